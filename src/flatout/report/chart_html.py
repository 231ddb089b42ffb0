"""Pictures as HTML: bars and rows of blocks drawn by the page itself, and places for the plots Plotly draws.

Nothing is told by colour alone: blocks carry names or titles, idle time a pattern, and every picture has its figures
in a table behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flatout.model.formatting import in_full
from flatout.report.chart_data import Bar, Mark, Panel, Timeline, words
from flatout.report.markup import Html, folded, join, table, tag
from flatout.report.terminal import duration, ms
from flatout.trace import Sketch, Step, Xray
from flatout.trace.downsample import span_totals

TABLE_ROWS = 24
SMALL = 0.002
FAMILIES = ("data", "copy", "sync", "pause", "compute", "other")


def strip(bars: Sequence[Bar], label: str) -> Html:
    """One bar of parts, each named under it."""
    seen = [bar for bar in bars if bar.width >= 0.0005]
    parts = (block(bar, extra=f"n{place}") for place, bar in enumerate(seen))
    track = tag("div", *parts, class_="track strip", role="img", aria_label=said(label, seen))
    names = ((f"{b.family} n{place}", f"{b.label} ", tag("b", f"{b.width:.0%}")) for place, b in enumerate(seen))
    return join([track, legend(names)])


def legend(items: Iterable[tuple[str, ...]]) -> Html:
    """What the colours stand for: the class of each, and what to write beside it."""
    named = (tag("li", tag("i", class_=f"swatch {kind}"), *beside) for kind, *beside in items)
    return tag("ul", *named, class_="legend")


def block(bar: Bar, extra: str = "", text: str = "") -> Html:
    """A bar in its track; what it is stands in its title."""
    title = f"{bar.label}{f' at {bar.where}' if bar.where else ''}: {ms(bar.ms)}"
    return tag(
        "span",
        text or None,
        class_=f"block {bar.family} {extra}".strip(),
        style=f"left:{100 * bar.left:.3f}%;width:{100 * bar.width:.3f}%",
        title=title,
    )


def said(label: str, bars: Sequence[Bar]) -> str:
    """Bars for those who do not see them."""
    return f"{label}: " + ", ".join(f"{bar.label} {ms(bar.ms)}" for bar in bars)


def falls(bars: Sequence[Bar], steps: int, xray: Xray | None) -> Html:
    """The waterfall, and under it what the X-ray saw of the GPU's own work."""
    rows = [_fall(bar, steps) for bar in bars if bar.width >= SMALL]
    rest_ms = sum(bar.ms for bar in bars if bar.width < SMALL)
    small = f"Parts below {SMALL:.1%} are in the table: {ms(rest_ms / max(1, steps))} a step together."
    if xray is not None and xray.wall_ms:
        share = xray.busy_ms / xray.wall_ms
        seen = Bar(label="kernels and copies", family="compute", left=0.0, width=share, ms=xray.busy_ms)
        name = f"GPU at work, in {xray.steps} steps under the X-ray"
        rows.append(row(name, [block(seen)], f"{share:.1%}", ms(xray.busy_ms / max(1, xray.steps)), class_="result"))
    return join([tag("ul", *rows, class_="falls"), tag("p", small, class_="meta") if rest_ms else None])


def _fall(bar: Bar, steps: int) -> Html:
    idle = bar.idle or 0.0
    busy = replace(bar, width=bar.width * (1 - idle), ms=bar.ms * (1 - idle))
    waited = replace(bar, left=bar.left + busy.width, width=bar.width * idle, ms=bar.ms * idle)
    blocks = [block(busy), block(waited, extra="idle") if idle else None]
    name = join([bar.label, tag("small", bar.where) if bar.where else None])
    return row(name, blocks, f"{bar.width:.1%}", ms(bar.ms / max(1, steps)))


def row(name: str, blocks: Sequence[Html | None], figure: str, beside: str, **attributes: str) -> Html:
    """A line of a list of bars: what it is, its blocks, and two figures."""
    return tag(
        "li",
        tag("span", name, class_="name"),
        tag("span", *blocks, class_="track"),
        tag("span", figure, class_="figure"),
        tag("span", beside, class_="figure quiet"),
        **attributes,
    )


# Steps


def step_figure(drawn: Timeline) -> Html:
    """One step: the host's row, and the GPU's under it."""
    step = drawn.step
    rows = [_row_of_step(name, bars, drawn.title) for name, bars in (("host", drawn.host), ("GPU", drawn.gpu)) if bars]
    remarks = []
    if not drawn.gpu:
        remarks.append("This step carries no GPU events.")
    elif not drawn.anchored:
        remarks.append("The GPU never waited long enough to say how far it ran behind the host.")
    heads = ("phase", "where", "host", "GPU idle", "GPU busy")
    return tag(
        "figure",
        tag("figcaption", tag("h3", drawn.title), tag("p", f"step {step.index:,}: {ms(step.wall_ms)}", class_="meta")),
        *rows,
        tag("p", tag("span", "0"), tag("span", ms(max(step.wall_ms, sum(b.ms for b in drawn.gpu)))), class_="axis"),
        _legend(drawn),
        tag("p", " ".join(remarks), class_="meta") if remarks else None,
        folded("The figures", table(drawn.title, heads, _phases(step), numbers_from=2)),
    )


def _phases(step: Step) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, (host, idle, busy) in sorted(span_totals(step).items(), key=lambda item: -item[1][0]):
        name, _, where = key.partition("@")
        rows.append((words(name), where, ms(host), ms(idle) if idle else "", ms(busy) if busy else ""))
    return rows


def _row_of_step(name: str, bars: Sequence[Bar], title: str) -> Html:
    blocks = (block(bar, extra="idle" if bar.idle == 1.0 else "", text=_fits(bar)) for bar in bars)
    return lane(name, blocks, said(f"{title}, {name}", bars))


def lane(name: str, blocks: Iterable[Html], label: str, class_: str = "lane") -> Html:
    """A row of blocks beside its name; `label` is for those who do not see them."""
    track = tag("div", *blocks, class_="track", role="img", aria_label=label)
    return tag("div", tag("span", name, class_="name"), track, class_=class_)


def _fits(bar: Bar) -> str:
    text = f"idle: {bar.label}" if bar.idle == 1.0 else bar.label
    return text if bar.width > 0.0085 * len(text) else ""


def _legend(drawn: Timeline) -> Html:
    bars = (*drawn.host, *drawn.gpu)
    names = ((family, ", ".join(dict.fromkeys(b.label for b in bars if b.family == family))) for family in FAMILIES)
    items = [(family, labels) for family, labels in names if labels]
    if any(bar.idle == 1.0 for bar in drawn.gpu):
        items.append(("idle", "GPU idle, in the colour of its cause"))
    return legend(items)


# Over the run


def over_time(drawn: Sequence[Panel], marked: Sequence[Mark]) -> Html | None:
    """The plots over the run."""
    if not drawn:
        return None
    figures_ = (plot(panel, place) for place, panel in enumerate(drawn))
    rows = [(mark.name, f"{mark.start_s:,.2f} s", duration(mark.length_s * 1e3)) for mark in marked]
    heads = ("what", "after", "for")
    behind = folded("What is marked", table("Stretches that are not plain training", heads, rows)) if rows else None
    counted = Counter(mark.name for mark in marked)
    names = ", ".join(name if times == 1 else f"{name} ({times}×)" for name, times in counted.items())
    parts = [
        tag("p", f"Shaded: {names}.", class_="meta") if names else None,
        tag("p", "Drag to look closer, double-click to go back; the plots move together.", class_="meta screen"),
    ]
    return join([*parts, *figures_, behind])


def plot(panel: Panel, place: int) -> Html:
    """A place for a plot, and its figures."""
    rows = []
    for series in panel.series:
        values = Sketch.of(series.y)
        middle = values.quantile(0.5) or 0.0
        rows.append(
            (
                series.name,
                f"{len(series.y):,}",
                *(in_full(v) for v in (values.low, middle, values.mean or 0.0, values.high)),
            )
        )
    label = f"{panel.title} over the run, {panel.unit}: " + "; ".join(
        f"{r[0]}: median {r[3]}, highest {r[5]}" for r in rows
    )
    unit = f" {panel.unit}" if panel.unit else ""
    heads = ("series", "points", "lowest", "median", "mean", "highest")
    return tag(
        "figure",
        tag("figcaption", tag("h3", panel.title, tag("small", unit))),
        tag("div", class_="plot", id=f"plot-{place}", role="img", aria_label=label),
        folded("The figures", table(f"{panel.title}{unit}", heads, rows), _excerpt(panel)),
    )


def _excerpt(panel: Panel) -> Html:
    """A few moments of each series, evenly spread."""
    rows = []
    for series in panel.series:
        every = max(1, -(-len(series.x) // TABLE_ROWS))
        rows += [
            (series.name, f"{x:,.2f} s", in_full(y)) for x, y in zip(series.x[::every], series.y[::every], strict=True)
        ]
    return table(f"{panel.title}: moments of the run", ("series", "after", panel.unit or "value"), rows)
