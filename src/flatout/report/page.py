"""A Report as one HTML file that opens from disk, without a network, in any browser of the last years.

Everything is drawn before the page is opened, as inline SVG; the page's own script only zooms, reads
values and copies. The browser fetches nothing and uses no script or style but the page's, whatever a
trace may hold: text is escaped unless it is `Html`, and no element has a style attribute. No meaning
is in color alone. A section with nothing to say is left out.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from flatout import __version__
from flatout.model.formatting import in_full, ms
from flatout.report import Report, view_of
from flatout.report.views import (
    BarChart,
    ChartBar,
    CodeFrame,
    Item,
    Mark,
    Plot,
    Plots,
    ReportView,
    Series,
    Table,
    TableBar,
    sentence,
)
from flatout.trace import Sketch

SIZE = 10_000  # what a plot measures inside, each way: the page's script knows it too
TICKS = 5  # along the x axis
NARROWEST = 0.0085  # of a chart, for each letter in a bar
HOW_TO_ZOOM = "Drag to zoom in, shift and drag to move, double-click for all. Keys: ← → + − 0."


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is class, `aria_label` aria-label. What is None is left out."""
    opening = name
    for key, value in attributes.items():
        if value is not None:
            opening += f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """One after the other; None is left out, and "" is nothing."""
    parts = (child for child in children if child is not None)
    return Html("".join(part if isinstance(part, Html) else escape(str(part)) for part in parts))


def page(report: Report) -> str:
    """The whole page."""
    view, contents, sections = view_of(report, brief=False), [], []
    for section in view.sections:
        body = join(SHOWN_BY[type(part)](part) for part in section.parts if part)
        if body:
            contents.append(tag("a", section.title, href=f"#{section.key}"))
            heading = tag("h2", section.title, id=f"{section.key}-title")
            sections.append(tag("section", heading, body, id=section.key, aria_labelledby=f"{section.key}-title"))
    template = (files("flatout.report") / "page.html").read_text(encoding="utf-8")
    values = {
        "title": escape(": ".join(view.about[:2])),
        "script": _hash_of("script", template),
        "style": _hash_of("style", template),
        "version": __version__,
        "head": _head(view),
        "contents": join(contents),
        "sections": join(sections),
    }
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def _hash_of(name: str, template: str) -> str:
    """The page's script or style as a content security policy names it."""
    text = template.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _head(view: ReportView) -> Html:
    first, *others = view.about
    headline, *more = view.headlines
    figures = (tag("div", tag("dt", name), tag("dd", value, tag("small", text))) for name, value, text in view.figures)
    command = tag("pre", tag("code", view.command), class_="command", aria_label="The command")
    return join([
        tag("p", tag("strong", first), *(f" · {part}" for part in others if part), class_="about"),
        tag("h1", headline),
        *(tag("p", line) for line in more),
        tag("dl", *figures, class_="figures"),
        view.command and command,
        view.train_with and _copyable(view.train_with),
        *(tag("p", f"Note: {note}.", class_="warning") for note in view.notes),
    ])  # fmt: skip


def _item(item: Item) -> Html:
    explained = f"flatout explain {item.code}" if item.brief else None  # else it is the class of a change
    code = item.code and tag("code", item.code, class_="chip", title=explained)
    place = item.where and tag("span", item.where, class_="where")
    lines = filter(None, (*item.lines, item.copy_as))
    evidence = _table(Table("", ("what", "value"), item.evidence))
    return tag(
        "article",
        (code or place) and tag("p", code, place),
        tag("h3", sentence(item.title)),
        tag("p", " · ".join(filter(None, (item.brief, item.quiet))), class_="meta"),
        *(tag("p", sentence(line)) for line in lines),
        *map(_copyable, item.to_copy),
        evidence and tag("details", tag("summary", "Evidence"), evidence),
        class_=f"finding {item.code.partition('.')[0]}",
    )


def _copyable(text: str) -> Html:
    button = tag("button", "Copy", type="button", data_copy=text)
    return tag("div", tag("pre", tag("code", text)), button, class_="copyable")


def _code(frame: CodeFrame) -> Html:
    rows = []
    for number, source, called, share in frame.lines:
        beside = called and tag("span", f"  → {called}", class_="quiet")
        rows.append(tag("span", f"{share:>5.0%} ", tag("i", f"{number:>5} │ "), source, beside, "\n"))
    return tag("div", tag("h3", frame.title), tag("pre", tag("code", *rows), class_="frame-of-code", tabindex="0"))


def _table(shown: Table) -> Html | None:
    """A table, with a bar beside the name of each row where it has bars; None without a row."""
    if not shown.rows:
        return None
    rows = []
    for place, row in enumerate(shown.rows):
        bar = tag("td", _table_bar(shown.bars[place]), class_="bar") if shown.bars else None
        rows.append(tag("tr", *_cells("td", row, shown, bar)))
    top = tag("tr", *_cells("th", shown.heads, shown, tag("td") if shown.bars else None))
    caption = shown.title and tag("caption", shown.title)
    whole = tag("table", caption, tag("thead", top), tag("tbody", *rows), class_="bars" if shown.bars else None)
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=shown.title or shown.heads[0])


def _cells(name: str, row: Sequence[str], shown: Table, bar: Html | None) -> Iterator[Html | None]:
    yield tag("th", row[0])
    yield bar
    for place, cell in enumerate(row[1:], 1):
        yield tag(name, cell, class_="number" if place >= shown.numbers_from else None)


def _table_bar(bar: TableBar) -> Html:
    busy = bar.share - bar.idle
    blocks = [tag("rect", class_=bar.family, width=f"{100 * busy:.2f}%", height="100%")]
    if bar.idle:
        place = _place(busy, bar.idle)
        blocks += (tag("rect", class_=bar.family, **place), tag("rect", class_="stripes", **place))
    return tag("svg", *blocks, class_="track", aria_hidden="true")


def _place(left: float, width: float) -> dict[str, str]:
    """Where a bar is in its track, in shares of it."""
    return {"x": f"{100 * left:.2f}%", "width": f"{100 * width:.2f}%", "height": "100%"}


# Charts


def _zoomable(children: Iterable[object], start: float, end: float, unit: str) -> Html:
    """What the page's script zooms as one: its axis runs from `start` to `end`."""
    return tag("div", *children, class_="zoom", data_start=f"{start:.6g}", data_end=f"{end:.6g}", data_unit=unit)


def _axis(start: float, end: float, unit: str) -> Html:
    """Numbers along the x axis; the page's script writes others there when one zooms."""
    values = (start + (end - start) * place / (TICKS - 1) for place in range(TICKS))
    ticks = (tag("span", f"{float(f'{value:.3g}'):,.9g} {unit}".rstrip()) for value in values)
    return tag("div", *ticks, class_="axis")


def _legend(items: Iterable[tuple[str, str]]) -> Html:
    """What the colors stand for: the class of each, and what to write beside it."""
    entries = (tag("li", tag("i", class_=f"swatch {kind}"), name) for kind, name in items)
    return tag("ul", *entries, class_="legend")


def _bar_chart(drawn: BarChart) -> Html:
    rows = []
    for name, bars in drawn.rows:
        described = f"{drawn.title} {name}: " + ", ".join(f"{bar.label} {ms(bar.ms)}" for bar in bars)
        inner = tag("svg", *map(_block, bars), class_="inner")
        track = tag("svg", inner, class_="track step", role="img", aria_label=described)
        rows.append(tag("div", tag("span", name, class_="name"), track, class_="lane"))
    frame = tag("div", *rows, class_="frame", tabindex="0", role="group", aria_label=f"{drawn.title}, zoomable")
    heading = tag("figcaption", tag("h3", drawn.title), tag("p", drawn.note, class_="meta"))
    chart = _zoomable([frame, _axis(0.0, drawn.end, drawn.unit)], 0.0, drawn.end, drawn.unit)
    return tag("figure", heading, chart, _legend(drawn.legend))


def _block(bar: ChartBar) -> Html:
    """A bar in its track; its title says what it is."""
    place = _place(bar.left, bar.width)
    what, text, style = " at ".join(filter(None, (bar.label, bar.where))), bar.label, None
    parts = [tag("rect", tag("title", f"{what}: {ms(bar.ms)}"), class_=bar.family, **place)]
    if bar.idle:
        text, style = f"idle: {text}", "idle"
        parts.append(tag("rect", class_="stripes", **place))
    if bar.width >= NARROWEST * len(text):
        parts.append(tag("svg", tag("text", text, x=6, y="68%", class_=style), **place))
    return join(parts)


def _plots(drawn: Plots) -> Html:
    """Plots that zoom together; evaluations and the like are shaded."""
    every = [series for plot in drawn.plots for series in plot.series]
    start = 0.0 if drawn.unit == "s" else min(series.x[0] for series in every)
    end = max(max(series.x[-1] for series in every), start + 1e-9)
    axis_end, unit = end, drawn.unit
    for least_s, longer, seconds in ((3 * 3600, "h", 3600), (300, "min", 60)):
        if unit == "s" and end > least_s:
            axis_end, unit = end / seconds, longer
    figures: list[Html] = []
    for plot in drawn.plots:
        bands = Html('<use href="#bands"></use>') if figures else _bands(drawn.marks, end)
        figures.append(_plot(plot, start, end, bands if drawn.marks else None, _axis(start, axis_end, unit)))
    names = ", ".join(f"{name} ({times}×)" for name, times in Counter(mark.name for mark in drawn.marks).items())
    lead = names and f"Shaded: {names}. "
    together = " The plots move together." * (len(figures) > 1)
    return join([tag("p", f"{lead}{HOW_TO_ZOOM}{together}", class_="meta"), _zoomable(figures, start, axis_end, unit)])


def _plot(plot: Plot, start: float, end: float, bands: Html | None, axis: Html) -> Html:
    """A plot with its grid; its label has its numbers, for those who do not see it."""
    low, step, parts = _scale(plot.series)
    high = low + step * parts
    drawn = [bands, tag("path", class_="grid", d="".join(f"M0 {SIZE * n // parts}h{SIZE}" for n in range(parts + 1)))]
    for series in plot.series:
        style = f"line {series.family}" + " dashed" * series.dashed + " dots" * (len(series.x) < 3)
        points = _points(series, start, end, low, high)
        drawn.append(tag("polyline", class_=style, points=points, data_name=series.name))
    levels = []
    for n in range(parts + 1):
        text, place = in_full(round(high - n * step, 9)), f"{100 * n / parts:.1f}%"
        levels.append(tag("text", text, x=2, y=place, dy=10 - 13 * (n > 0)))
    title, described = f"{plot.title} {plot.unit}".rstrip(), []
    for series in plot.series:
        numbers = map(in_full, (Sketch.of(series.y).quantile(0.5) or 0.0, min(series.y), max(series.y)))
        described.append("{}: median {}, lowest {}, highest {}".format(series.name, *numbers))
    surface = {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "aria_hidden": "true"}
    frame = tag(
        "div",
        tag("svg", *drawn, class_="lines", data_low=f"{low:g}", data_high=f"{high:g}", **surface),
        tag("svg", *levels, class_="levels", aria_hidden="true"),
        class_="frame plot",
        tabindex="0",
        role="img",
        aria_label=f"{title}: {'; '.join(described)}",
    )
    names = _legend((series.family, series.name) for series in plot.series)
    heading = tag("h3", plot.title, tag("small", f" {plot.unit}"))
    return tag("figure", tag("figcaption", heading, names, tag("output", aria_live="polite")), frame, axis)


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


def _points(series: Series, start: float, end: float, low: float, high: float) -> str:
    """The points of a line in whole numbers, the first one twice: a single one is drawn as a dot then."""
    points = []
    for x, y in zip(series.x, series.y, strict=True):
        at, up = (x - start) / (end - start), (high - y) / (high - low)
        points.append(f"{round(SIZE * at)},{round(SIZE * up)}")
    return " ".join(points[:1] + points)


def _bands(marks: Sequence[Mark], end: float) -> Html:
    """Shaded stretches, which the plots after the first one use again."""
    rects = []
    for mark in marks:
        left = max(0, round(SIZE * mark.start_s / end))
        width = max(12, round(SIZE * mark.length_s / end))
        rects.append(tag("rect", tag("title", f"{mark.name}, {mark.length_s:.2f} s"), x=left, width=width, height=SIZE))
    return tag("g", *rects, id="bands", class_="bands")


SHOWN_BY: dict[type, Callable[[Any], Html | None]] = {
    Item: _item,
    CodeFrame: _code,
    BarChart: _bar_chart,
    Plots: _plots,
    Table: _table,
    str: lambda text: tag("p", sentence(text)),
}
