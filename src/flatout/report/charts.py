"""Charts as inline SVG, which page.js zooms and reads values from.

No meaning is in color alone: blocks carry names or titles, idle time a pattern, and every chart has its numbers in a
table behind it. No element has a style attribute, so that the page's policy can forbid all styles but its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flatout.model.formatting import duration, in_full, ms, ms_a_step
from flatout.report.chart_data import Bar, Mark, Panel, Series, Timeline, phase_name
from flatout.report.markup import Html, folded, join, remark, table, tag
from flatout.trace import Sketch, Step, Xray
from flatout.trace.downsample import span_totals

SIZE = 10_000  # what a plot measures inside, each way: page.js knows it too
SMALLEST_SHARE = 0.002
FAMILIES = ("data", "copy", "sync", "pause", "compute", "other")
TICKS = 5  # along the x axis
# Stripes for idle time, defined once a page.
PATTERNS = Html(
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs><pattern id="stripes" width="7" height="7" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="7"></rect></pattern></defs>'
    "</svg>"
)


# Bars


def block(bar: Bar, *, style: str = "", text: str = "") -> Html:
    """A bar in its track; its title says what it is."""
    place = {"x": f"{100 * bar.left:.2f}%", "width": f"{100 * bar.width:.2f}%", "height": "100%"}
    what = " at ".join(filter(None, (bar.label, bar.where)))
    parts = [tag("rect", tag("title", f"{what}: {ms(bar.ms)}"), class_=f"{bar.family}{style}", **place)]
    if style == " idle":
        parts.append(tag("rect", class_="stripes", **place))
    if text:
        parts.append(tag("svg", tag("text", text, x=6, y="68%", class_=style.strip() or None), **place))
    return join(parts)


def track(blocks: Iterable[Html], *, label: str | None = None, style: str = "") -> Html:
    """A row of blocks; `label` is for those who do not see them."""
    if label is None:
        return tag("svg", *blocks, class_=f"track{style}", aria_hidden="true")
    return tag("svg", *blocks, class_=f"track{style}", role="img", aria_label=label)


def described(label: str, bars: Iterable[Bar]) -> str:
    """Bars in words."""
    return f"{label}: " + ", ".join(f"{bar.label} {ms(bar.ms)}" for bar in bars)


def strip(bars: Sequence[Bar], label: str) -> Html:
    """One bar of parts, each named under it."""
    seen = [bar for bar in bars if bar.width >= 0.0005]
    blocks = (block(bar, style=f" n{place}") for place, bar in enumerate(seen))
    names = []
    for place, bar in enumerate(seen):
        names.append((f"{bar.family} n{place}", f"{bar.label} ", tag("b", f"{bar.width:.0%}")))
    return join([track(blocks, label=described(label, seen), style=" strip"), legend(names)])


def legend(items: Iterable[tuple[str, ...]]) -> Html:
    """What the colors stand for: the class of each, and what to write beside it."""
    entries = (tag("li", tag("i", class_=f"swatch {kind}"), *beside) for kind, *beside in items)
    return tag("ul", *entries, class_="legend")


def bar_row(name: object, blocks: Iterable[Html], value: str, beside: str, *, style: str | None = None) -> Html:
    """A line of a list of bars: what it is, its blocks, and two numbers."""
    numbers = tag("span", value, class_="number"), tag("span", beside, class_="number quiet")
    return tag("li", tag("span", name, class_="name"), track(blocks), *numbers, class_=style)


def falls(bars: Sequence[Bar], steps: int, xray: Xray | None) -> Html:
    """The waterfall, and under it what the X-ray saw of the GPU's own work."""
    rows = [_fall(bar, steps) for bar in bars if bar.width >= SMALLEST_SHARE]
    if xray is not None and xray.wall_ms:
        seen = Bar(label="busy", family="compute", left=0.0, width=xray.busy_ms / xray.wall_ms, ms=xray.busy_ms)
        name, each = f"GPU at work, in {xray.steps} steps under the X-ray", ms_a_step(xray.busy_ms, xray.steps)
        rows.append(bar_row(name, [block(seen)], f"{seen.width:.1%}", each, style="result"))
    small_ms, note = sum(bar.ms for bar in bars if bar.width < SMALLEST_SHARE), ""
    if small_ms:
        note = f"Parts below {SMALLEST_SHARE:.1%} are in the table: {ms_a_step(small_ms, steps)} a step together."
    return join([tag("ul", *rows, class_="falls"), remark(note)])


def _fall(bar: Bar, steps: int) -> Html:
    idle = bar.idle or 0.0
    busy = replace(bar, width=bar.width * (1 - idle), ms=bar.ms * (1 - idle))
    blocks = [block(busy)]
    if idle:
        waited = replace(bar, left=bar.left + busy.width, width=bar.width * idle, ms=bar.ms * idle)
        blocks.append(block(waited, style=" idle"))
    name = join([bar.label, tag("small", bar.where or "")])
    return bar_row(name, blocks, f"{bar.width:.1%}", ms_a_step(bar.ms, steps))


def lane(name: str, shown: Html) -> Html:
    """A track beside its name."""
    return tag("div", tag("span", name, class_="name"), shown, class_="lane")


# Steps


def step_chart(drawn: Timeline) -> Html:
    """One step: the host's row, and the GPU's under it, on an axis that can be zoomed."""
    step = drawn.step
    axis_ms = max(step.wall_ms, sum(bar.ms for bar in drawn.gpu))
    rows = [_step_row("host", drawn.host, drawn.title)]
    if drawn.gpu:
        rows.append(_step_row("GPU", drawn.gpu, drawn.title))
    note = ""
    if not drawn.gpu:
        note = "This step carries no GPU events."
    elif not drawn.anchored:
        note = "The GPU never waited long enough to show how far it ran behind the host."
    heads = ("phase", "where", "host", "GPU idle", "GPU busy")
    caption = remark(f"step {step.index:,}: {ms(step.wall_ms)}")
    frame = tag("div", *rows, class_="frame", tabindex="0", role="group", aria_label=f"{drawn.title}, zoomable")
    return tag(
        "figure",
        tag("figcaption", tag("h3", drawn.title), caption),
        _zoomable([frame, tag("div", _ticks(0.0, axis_ms, "ms"), class_="axis")], 0.0, axis_ms, "ms"),
        _step_legend(drawn),
        remark(note),
        folded("The numbers", table(drawn.title, heads, _phase_rows(step), numbers_from=2)),
    )


def _phase_rows(step: Step) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, spent in sorted(span_totals(step).items(), key=lambda item: -item[1][0]):
        name, _, where = key.partition("@")
        rows.append((phase_name(name), where, *(ms_a_step(value or None, 1) for value in spent)))
    return rows


def _step_row(name: str, bars: Sequence[Bar], title: str) -> Html:
    blocks = []
    for bar in bars:
        text, style = bar.label, ""
        if bar.idle == 1.0:
            text, style = f"idle: {text}", " idle"
        if bar.width < 0.0085 * len(text):  # too narrow for its name
            text = ""
        blocks.append(block(bar, style=style, text=text))
    inner = tag("svg", *blocks, class_="inner")
    return lane(name, track([inner], label=described(f"{title}, {name}", bars), style=" step"))


def _step_legend(drawn: Timeline) -> Html:
    items: list[tuple[str, ...]] = []
    for family in FAMILIES:
        labels = dict.fromkeys(bar.label for bar in (*drawn.host, *drawn.gpu) if bar.family == family)
        if labels:
            items.append((family, ", ".join(labels)))
    if any(bar.idle == 1.0 for bar in drawn.gpu):
        items.append(("idle", "GPU idle, in the color of its cause"))
    return legend(items)


# Plots


def over_time(panels: Sequence[Panel], marks: Sequence[Mark]) -> Html | None:
    """The plots over the run, which zoom together; evaluations and the like are shaded."""
    if not panels:
        return None
    end = max(1e-9, *(series.x[-1] for panel in panels for series in panel.series))
    again = Html('<use href="#bands"></use>')
    figures = [plot(panels[0], 0.0, end, bands=_bands(marks, end), marks=marks)]
    figures += (plot(panel, 0.0, end, bands=again, marks=marks) for panel in panels[1:])
    zoomable = _zoomable(figures, 0.0, *_time_axis(end))
    if not marks:
        return join([_how_to_zoom("The plots move together."), zoomable])
    names = ", ".join(f"{name} ({times}×)" for name, times in Counter(mark.name for mark in marks).items())
    rows = [(mark.name, f"{mark.start_s:,.2f} s", duration(mark.length_s * 1e3)) for mark in marks]
    behind = folded("What is shaded", table("Not plain training", ("what", "after", "for"), rows))
    return join([remark(f"Shaded: {names}."), _how_to_zoom("The plots move together."), zoomable, behind])


def by_step(panels: Iterable[Panel]) -> Html:
    """Plots whose axis counts steps or samples; each zooms alone."""
    parts = [_how_to_zoom("")]
    for panel in panels:
        start = min(series.x[0] for series in panel.series)
        end = max(max(series.x[-1] for series in panel.series), start + 1e-9)
        parts.append(_zoomable([plot(panel, start, end)], start, end, panel.x_unit))
    return join(parts)


def _how_to_zoom(more: str) -> Html:
    text = f"Drag to zoom in, shift and drag to move, double-click for all. Keys: ← → + − 0. {more}"
    return tag("p", text, class_="meta screen")


def _zoomable(children: Iterable[object], start: float, end: float, unit: str) -> Html:
    """What page.js zooms as one: its axis runs from `start` to `end`."""
    return tag("div", *children, class_="zoom", data_start=f"{start:.6g}", data_end=f"{end:.6g}", data_unit=unit)


def _time_axis(seconds: float) -> tuple[float, str]:
    """The end of an axis, in the unit that suits it."""
    if seconds > 3 * 3600:
        return seconds / 3600, "h"
    if seconds > 300:
        return seconds / 60, "min"
    return seconds, "s"


def plot(panel: Panel, start: float, end: float, *, bands: Html | None = None, marks: Sequence[Mark] = ()) -> Html:
    """A plot with its grid, and its numbers in a table behind it."""
    low, step, lines = _scale(panel.series)
    high = low + step * lines
    grid = "".join(f"M0 {SIZE * n // lines}h{SIZE}" for n in range(lines + 1))
    drawn = [bands, tag("path", class_="grid", d=grid)]
    for series in panel.series:
        style = f"line {series.family}" + " dashed" * series.dashed + " dots" * (len(series.x) < 3)
        path = _path(series, start, end, low, high, marks)
        drawn.append(tag("path", class_=style, d=path, data_name=series.name))
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
    names = legend((series.family, series.name) for series in panel.series)
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
        folded("The numbers", table(title, heads, rows)),
    )


def _spread(series: Series) -> tuple[str, ...]:
    values = Sketch.of(series.y)
    levels = (values.low, values.quantile(0.5) or 0.0, values.mean or 0.0, values.high)
    return (series.name, f"{len(series.y):,}", *(in_full(value) for value in levels))


def _ticks(start: float, end: float, unit: str) -> Html:
    """Numbers along the x axis; page.js writes others there when one zooms."""
    texts = []
    for place in range(TICKS):
        value = start + (end - start) * place / (TICKS - 1)
        texts.append(tag("span", f"{float(f'{value:.3g}'):,.9g} {unit}".rstrip()))
    return join(texts)


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


def _path(series: Series, start: float, end: float, low: float, high: float, marks: Sequence[Mark]) -> str:
    """A line as whole numbers, relative to the point before: half as long as absolute ones."""
    usual = (series.x[-1] - series.x[0]) / max(1, len(series.x) - 1)
    pauses = [mark.start_s + mark.length_s / 2 for mark in marks if mark.length_s > 3 * usual]
    parts: list[str] = []
    before_x, before_at, before_y = -math.inf, 0, 0
    for x, y in zip(series.x, series.y, strict=True):
        at = round(SIZE * (x - start) / (end - start))
        up = round(SIZE * (high - y) / (high - low))
        gap = x - before_x > 3 * usual and any(before_x < pause < x for pause in pauses)
        if not parts or gap:
            parts.append(f"M{at} {up}l0 0")
        else:
            parts.append(f"{at - before_at:+d}{up - before_y:+d}".replace("+", " "))
        before_x, before_at, before_y = x, at, up
    return "".join(parts)


def _bands(marks: Sequence[Mark], end: float) -> Html:
    """Shaded stretches, which the plots after the first one use again."""
    rects = []
    for mark in marks:
        left = max(0, round(SIZE * mark.start_s / end))
        width = max(12, round(SIZE * mark.length_s / end))
        rects.append(tag("rect", tag("title", mark.name), x=left, width=width, height=SIZE))
    return tag("g", *rects, id="bands", class_="bands")
