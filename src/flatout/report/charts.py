"""Charts as inline SVG, which the script of page.html zooms and reads values from.

No meaning is in color alone: blocks carry names or titles, idle time a pattern, and every chart has its numbers in a
table behind it. No element has a style attribute, so that the page's policy can forbid all styles but its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flatout.diagnose.breakdown import Breakdown
from flatout.fix.speed import Speed
from flatout.model.formatting import duration, in_full, ms, ms_a_step
from flatout.report import chart_data
from flatout.report.chart_data import Bar, Mark, Panel, Series, Timeline
from flatout.report.code_lines import Flame
from flatout.report.markup import Html, join, table, tag
from flatout.trace import RankTrace, Sketch, Trace, Xray

SIZE = 10_000  # what a plot measures inside, each way: the page's script knows it too
SMALLEST_SHARE = 0.002
NARROWEST = 0.0085  # of a step, for each letter in a block
FAMILIES = ("data", "copy", "sync", "pause", "compute", "other")
TICKS = 5  # along the x axis
HOW_TO_ZOOM = "Drag to zoom in, shift and drag to move, double-click for all. Keys: ← → + − 0."


# Bars


def _block(bar: Bar, *, style: str = "", text: str = "") -> Html:
    """A bar in its track; its title says what it is."""
    place = {"x": f"{100 * bar.left:.2f}%", "width": f"{100 * bar.width:.2f}%", "height": "100%"}
    what = " at ".join(filter(None, (bar.label, bar.where)))
    parts = [tag("rect", tag("title", f"{what}: {ms(bar.ms)}"), class_=f"{bar.family}{style}", **place)]
    if style == " idle":
        parts.append(tag("rect", class_="stripes", **place))
    if text:
        parts.append(tag("svg", tag("text", text, x=6, y="68%", class_=style.strip() or None), **place))
    return join(parts)


def _track(blocks: Iterable[Html], label: str, bars: Iterable[Bar], style: str) -> Html:
    """A row of blocks, with the bars in words for those who do not see them."""
    described = f"{label}: " + ", ".join(f"{bar.label} {ms(bar.ms)}" for bar in bars)
    return tag("svg", *blocks, class_=f"track{style}", role="img", aria_label=described)


def _legend(items: Iterable[tuple[str, ...]]) -> Html:
    """What the colors stand for: the class of each, and what to write beside it."""
    entries = (tag("li", tag("i", class_=f"swatch {kind}"), *beside) for kind, *beside in items)
    return tag("ul", *entries, class_="legend")


def _bar_row(name: object, blocks: Iterable[Html], value: str, beside: str) -> Html:
    """A line of a list of bars: what it is, its blocks, and two numbers."""
    numbers = tag("span", value, class_="number"), tag("span", beside, class_="number quiet")
    track = tag("svg", *blocks, class_="track", aria_hidden="true")
    return tag("li", tag("span", name, class_="name"), track, *numbers)


def time_spent(b: Breakdown, xray: Xray | None) -> Html:
    """The whole run in a bar, and the waterfall of training; under it what the X-ray saw of the GPU."""
    whole = [bar for bar in chart_data.whole_run(b) if bar.width >= 0.0005]
    blocks = (_block(bar, style=f" n{place}") for place, bar in enumerate(whole))
    names = []
    for place, bar in enumerate(whole):
        names.append((f"{bar.family} n{place}", f"{bar.label} ", tag("b", f"{bar.width:.0%}")))
    bars = [bar for bar in chart_data.waterfall(b) if bar.width >= SMALLEST_SHARE]
    rows = [_fall(bar, b.steps) for bar in bars]
    if xray is not None and xray.wall_ms:
        busy = Bar(label="busy", family="compute", left=0.0, width=xray.busy_ms / xray.wall_ms, ms=xray.busy_ms)
        name, each = "GPU at work, under the X-ray", ms_a_step(xray.busy_ms, xray.steps)
        rows.append(_bar_row(tag("b", name), [_block(busy)], f"{busy.width:.1%}", each))
    striped = tag("p", "Striped: the GPU was idle meanwhile.", class_="meta")
    return join(
        [
            tag("h3", f"The whole run: {duration(b.wall_ms)}"),
            _track(blocks, "The whole run", whole, " strip"),
            _legend(names),
            tag("h3", f"Training: {duration(b.training_ms)}, from all of it down to the work itself"),
            tag("ul", *rows, class_="falls"),
            striped if any(bar.idle for bar in bars) else None,
        ]
    )


def _fall(bar: Bar, steps: int) -> Html:
    idle = bar.idle or 0.0
    busy = replace(bar, width=bar.width * (1 - idle), ms=bar.ms * (1 - idle))
    blocks = [_block(busy)]
    if idle:
        waited = replace(bar, left=bar.left + busy.width, width=bar.width * idle, ms=bar.ms * idle)
        blocks.append(_block(waited, style=" idle"))
    name = join([bar.label, tag("small", bar.where or "")])
    return _bar_row(name, blocks, f"{bar.width:.1%}", ms_a_step(bar.ms, steps))


def every_run(runs: Sequence[tuple[str, Speed | None, float]]) -> Html:
    """Each run with its speed as a bar: how the training became faster."""
    fastest = max((speed.value for _, speed, _ in runs if speed is not None), default=1.0)
    rows = []
    for what, speed, seconds in runs:
        text, width = "", 0.0
        if speed is not None:
            text, width = in_full(speed.value), speed.value / fastest
        bar = Bar(label=what, family="compute", left=0.0, width=width, ms=1e3 * seconds)
        rows.append(_bar_row(what, [_block(bar)], text, duration(1e3 * seconds)))
    return tag("ul", *rows, class_="falls")


def flame(whole: Flame | None) -> Html | None:
    """Calls as bars, each above what it called."""
    if whole is None:
        return None
    tracks = []
    for row in whole.rows():
        blocks = []
        for left, width, call in row:
            family = "compute" if call.own else "other"
            bar = Bar(label=call.name, family=family, left=left, width=width, ms=1e3 * call.seconds, where=call.where)
            text = call.name if width > NARROWEST * len(call.name) else ""
            blocks.append(_block(bar, text=text))
        tracks.append(tag("svg", *blocks, class_="track flame", aria_hidden="true"))
    note = "Each bar is a call, above what it called: yours in the color of work, a library's in grey. Widths are time."
    return tag("figure", *tracks, tag("figcaption", tag("p", note, class_="meta")))


# Steps


def steps(rank: RankTrace) -> Html:
    """A typical and a bad step, each on an axis that can be zoomed."""
    return join(_step_chart(timeline) for timeline in chart_data.timelines(rank))


def _step_chart(drawn: Timeline) -> Html:
    """The host's row, and the GPU's under it."""
    step, note = drawn.step, ""
    rows = [_step_row("host", drawn.host, drawn.title)]
    if drawn.gpu:
        rows.append(_step_row("GPU", drawn.gpu, drawn.title))
    else:
        note = "This step carries no GPU events."
    if drawn.gpu and not drawn.anchored:
        note = "The GPU never waited long enough to show how far it ran behind the host."
    axis_ms = max(step.wall_ms, sum(bar.ms for bar in drawn.gpu))
    items: list[tuple[str, ...]] = []
    for family in FAMILIES:
        labels = dict.fromkeys(bar.label for bar in (*drawn.host, *drawn.gpu) if bar.family == family)
        if labels:
            items.append((family, ", ".join(labels)))
    if any(bar.idle for bar in drawn.gpu):
        items.append(("idle", "GPU idle, in the color of its cause"))
    caption = tag("p", f"step {step.index:,}: {ms(step.wall_ms)}. {note}", class_="meta")
    frame = tag("div", *rows, class_="frame", tabindex="0", role="group", aria_label=f"{drawn.title}, zoomable")
    axis = tag("div", _ticks(0.0, axis_ms, "ms"), class_="axis")
    heading = tag("figcaption", tag("h3", drawn.title), caption)
    return tag("figure", heading, _zoomable([frame, axis], 0.0, axis_ms, "ms"), _legend(items))


def _step_row(name: str, bars: Sequence[Bar], title: str) -> Html:
    blocks = []
    for bar in bars:
        text, style = bar.label, ""
        if bar.idle:
            text, style = f"idle: {text}", " idle"
        if bar.width < NARROWEST * len(text):
            text = ""
        blocks.append(_block(bar, style=style, text=text))
    inner = tag("svg", *blocks, class_="inner")
    track = _track([inner], f"{title}, {name}", bars, " step")
    return tag("div", tag("span", name, class_="name"), track, class_="lane")


# Plots


def over_time(trace: Trace, rank: RankTrace) -> Html | None:
    """The plots over the run, which zoom together; evaluations and the like are shaded."""
    panels, marks = chart_data.panels(trace, rank), chart_data.marks(trace, rank)
    if not panels:
        return None
    end = max(1e-9, *(series.x[-1] for panel in panels for series in panel.series))
    figures = [_plot(panels[0], 0.0, end, _bands(marks, end))]
    figures += (_plot(panel, 0.0, end, Html('<use href="#bands"></use>')) for panel in panels[1:])
    names = ", ".join(f"{name} ({times}×)" for name, times in Counter(mark.name for mark in marks).items())
    shaded = f"Shaded: {names}. " if names else ""
    lead = tag("p", f"{shaded}{HOW_TO_ZOOM} The plots move together.", class_="meta")
    return join([lead, _zoomable(figures, 0.0, *_time_axis(end))])


def by_step(panels: Iterable[Panel]) -> Html:
    """Plots whose axis counts steps or samples; each zooms alone."""
    parts = [tag("p", HOW_TO_ZOOM, class_="meta")]
    for panel in panels:
        start = min(series.x[0] for series in panel.series)
        end = max(max(series.x[-1] for series in panel.series), start + 1e-9)
        parts.append(_zoomable([_plot(panel, start, end)], start, end, panel.x_unit))
    return join(parts)


def _zoomable(children: Iterable[object], start: float, end: float, unit: str) -> Html:
    """What the page's script zooms as one: its axis runs from `start` to `end`."""
    return tag("div", *children, class_="zoom", data_start=f"{start:.6g}", data_end=f"{end:.6g}", data_unit=unit)


def _time_axis(seconds: float) -> tuple[float, str]:
    """The end of an axis, in the unit that suits it."""
    if seconds > 3 * 3600:
        return seconds / 3600, "h"
    return (seconds / 60, "min") if seconds > 300 else (seconds, "s")


def _plot(panel: Panel, start: float, end: float, bands: Html | None = None) -> Html:
    """A plot with its grid, and its numbers in a table behind it."""
    low, step, lines = _scale(panel.series)
    high = low + step * lines
    grid = "".join(f"M0 {SIZE * n // lines}h{SIZE}" for n in range(lines + 1))
    drawn = [bands, tag("path", class_="grid", d=grid)]
    for series in panel.series:
        style = f"line {series.family}" + " dashed" * series.dashed + " dots" * (len(series.x) < 3)
        drawn.append(tag("path", class_=style, d=_path(series, start, end, low, high), data_name=series.name))
    levels = []
    for n in range(lines + 1):
        text, place = in_full(round(high - n * step, 9)), f"{100 * n / lines:.1f}%"
        levels.append(tag("text", text, x=2, y=place, dy=10 - 13 * (n > 0)))
    rows = [_spread(series) for series in panel.series]
    title = f"{panel.title} {panel.unit}".rstrip()
    label = f"{title}: " + "; ".join(f"{row[0]}: median {row[3]}, highest {row[5]}" for row in rows)
    surface = {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "aria_hidden": "true"}
    frame = tag(
        "div",
        tag("svg", *drawn, class_="lines", data_low=f"{low:g}", data_high=f"{high:g}", **surface),
        tag("svg", *levels, class_="levels", aria_hidden="true"),
        class_="frame plot",
        tabindex="0",
        role="img",
        aria_label=label,
    )
    names = _legend((series.family, series.name) for series in panel.series)
    heads = ("series", "points", "lowest", "median", "mean", "highest")
    axis_end, axis_unit = end, panel.x_unit
    if axis_unit == "s":
        axis_end, axis_unit = _time_axis(end)
    heading = tag("h3", panel.title, tag("small", f" {panel.unit}"))
    return tag(
        "figure",
        tag("figcaption", heading, names, tag("output", aria_live="polite")),
        frame,
        tag("div", _ticks(start, axis_end, axis_unit), class_="axis"),
        tag("details", tag("summary", "The numbers"), table(title, heads, rows)),
    )


def _spread(series: Series) -> tuple[str, ...]:
    values = Sketch.of(series.y)
    levels = (values.low, values.quantile(0.5) or 0.0, values.mean or 0.0, values.high)
    return (series.name, f"{len(series.y):,}", *(in_full(value) for value in levels))


def _ticks(start: float, end: float, unit: str) -> Html:
    """Numbers along the x axis; the page's script writes others there when one zooms."""
    values = (start + (end - start) * place / (TICKS - 1) for place in range(TICKS))
    return join(tag("span", f"{float(f'{value:.3g}'):,.9g} {unit}".rstrip()) for value in values)


def _scale(series: Sequence[Series]) -> tuple[float, float, int]:
    """A y axis in round numbers: where it begins, how far its lines are apart, and how many parts it has."""
    high = max(max(one.y) for one in series)
    low = min(0.0, *(min(one.y) for one in series))
    if high <= low:  # a line of zeros
        high = low + 1.0
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    low = step * math.floor(low / step)
    return low, step, max(1, math.ceil((high - low) / step * 0.999))


def _path(series: Series, start: float, end: float, low: float, high: float) -> str:
    """A line as whole numbers, relative to the point before: half as long as absolute ones."""
    parts: list[str] = []
    before_at, before_y = 0, 0
    for x, y in zip(series.x, series.y, strict=True):
        at = round(SIZE * (x - start) / (end - start))
        up = round(SIZE * (high - y) / (high - low))
        if parts:
            parts.append(f"{at - before_at:+d}{up - before_y:+d}".replace("+", " "))
        else:
            parts.append(f"M{at} {up}l0 0")
        before_at, before_y = at, up
    return "".join(parts)


def _bands(marks: Sequence[Mark], end: float) -> Html:
    """Shaded stretches, which the plots after the first one use again."""
    rects = []
    for mark in marks:
        left = max(0, round(SIZE * mark.start_s / end))
        width = max(12, round(SIZE * mark.length_s / end))
        rects.append(tag("rect", tag("title", f"{mark.name}, {mark.length_s:.2f} s"), x=left, width=width, height=SIZE))
    return tag("g", *rects, id="bands", class_="bands")
