"""A Comparison as text for a terminal, and as a page."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flatout.report import chart_html
from flatout.report.account import Account
from flatout.report.chart_data import Panel, Series, grouped, line, words
from flatout.report.compare import Comparison, Steady, phases
from flatout.report.html import Section, document
from flatout.report.markup import Html, figures, join, shown, table, tag
from flatout.report.terminal import duration, ms, print_table, print_unpadded
from flatout.trace import RankTrace, Sketch, Trace

MOST_LINES = 20
_VALUE = 24


def show(comparison: Comparison, console: Console) -> None:
    """Print it, 80 columns wide."""
    print_unpadded(Text(comparison.sentence(), style="bold"), console)
    for caution in comparison.cautions:
        print_unpadded(Text(f"Mind: {caution}."), console)
    console.print()
    print_table(console, ("", "A", "B", ""), _figures(comparison))
    console.print()
    print_table(console, ("a step's time", "A", "B", ""), phase_rows(comparison))
    if comparison.losses is not None:
        console.print()
        print_unpadded(Text(_losses(comparison)), console)
    if comparison.differences:
        console.print()
        rows = [(name, *_cut(shown(a), shown(b)), "") for name, a, b in comparison.differences[:MOST_LINES]]
        print_table(console, ("what differs", "A", "B", ""), rows, figures=False)
        more = len(comparison.differences) - MOST_LINES
        if more > 0:
            print_unpadded(Text(f"and {more} more: see --html or --json", style="dim"), console)


def _cut(a: str, b: str) -> tuple[str, str]:
    """Two values that differ, short enough for a column, from shortly before where they do."""
    same = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = same - _VALUE // 3 if max(len(a), len(b)) > _VALUE and same > _VALUE // 2 else 0
    a, b = (f"…{text[start:]}" if start else text for text in (a, b))
    return _ended(a), _ended(b)


def _ended(text: str) -> str:
    return text if len(text) <= _VALUE else text[: _VALUE - 1] + "…"


def _figures(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    rows = []
    a, b = (comparison.a, comparison.steady_a), (comparison.b, comparison.steady_b)
    for name, value, ratio in (
        ("median step", _median_step, comparison.typical),
        ("95th percentile", lambda one, _: ms(one.breakdown.step_ms.quantile(0.95) or 0.0), None),
        ("samples a second", _samples_per_s, comparison.overall),
        ("steps", lambda one, _: f"{one.breakdown.steps:,}", None),
        ("training time", lambda one, _: duration(one.breakdown.training_ms), None),
    ):
        rows.append((name, value(*a), value(*b), str(ratio or "")))
    return rows


def _median_step(one: Account, steady: Steady | None) -> str:
    return ms(steady.median_ms if steady is not None else one.breakdown.step_ms.quantile(0.5) or 0.0)


def _samples_per_s(one: Account, steady: Steady | None) -> str:
    speed = one.breakdown.samples_per_s
    speed = steady.samples_per_s if steady is not None else speed * one.ranks if speed else None
    return f"{speed:,.0f}" if speed else "not known"


def phase_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """The phases of a step, those that changed most first."""
    a, b = phases(comparison.a.breakdown), phases(comparison.b.breakdown)
    names = sorted(dict.fromkeys((*a, *b)), key=lambda name: -abs(b.get(name, 0.0) - a.get(name, 0.0)))
    rows = []
    for name in names:
        before, after = a.get(name, 0.0), b.get(name, 0.0)
        if max(before, after) < 0.002 * (comparison.a.breakdown.step_ms.mean or 0.0):
            continue
        apart = after - before
        rows.append((words(name), ms(before), ms(after), f"{'+' if apart >= 0 else '−'}{ms(abs(apart))}"))
    return rows


def _losses(comparison: Comparison) -> str:
    losses = comparison.losses
    assert losses is not None
    if losses.end_a is None or losses.end_b is None or losses.low is None or losses.high is None:
        return "Losses: too few were read to compare; they are read in some steps only, fewer as a run goes on."
    apart = f"B − A = {losses.end_b - losses.end_a:+.4g} ({losses.low:+.4g} to {losses.high:+.4g})"
    verdict = losses.verdict if losses.verdict == "no difference shown" else f"B's is {losses.verdict}"
    return (
        f"Loss over the last quarter of what both did: {losses.end_a:.4g} and {losses.end_b:.4g}; {apart}: {verdict}."
    )


# The page


def page(comparison: Comparison, first: Trace, second: Trace) -> str:
    """The comparison as one self-contained file."""
    drawn = panels_of(comparison, first.ranks[0], second.ranks[0])
    differences = [(name, shown(a), shown(b)) for name, a, b in comparison.differences]
    sections: list[Section] = [
        ("runs", "The two runs", _runs(comparison)),
        (
            "phases",
            "Where a step's time goes",
            table("A step, those that changed most first", ("phase", "A", "B", "change"), phase_rows(comparison)),
        ),
        ("steps", "Step by step", join(chart_html.plot(panel, place) for place, panel in enumerate(drawn))),
        ("losses", "Losses", tag("p", _losses(comparison)) if comparison.losses is not None else None),
        ("differences", "What differs", table("Settings and facts", ("what", "A", "B"), differences, numbers_from=9)),
    ]
    if not differences:
        sections[-1] = ("differences", "What differs", tag("p", "No setting or fact that flatout records."))
    about = f"{comparison.a.folder} (A) and {comparison.b.folder} (B)"
    head = join(
        [
            tag("p", tag("strong", "flatout"), " · ", about, class_="about"),
            tag("h1", comparison.sentence()),
            figures([(name, f"{a} → {b}", said) for name, a, b, said in _figures(comparison)[:4]]),
            *(tag("p", f"Mind: {caution}.", class_="warning") for caution in comparison.cautions),
        ]
    )
    return document(f"flatout: {comparison.a.name} compared", head, sections, drawn)


def _runs(comparison: Comparison) -> Html:
    note = (
        "The 95% intervals come from the means of eight blocks of steps: they hold the noise within the two runs. "
        "What differs between any two runs of the same training only more runs can show."
    )
    return join(
        [table("Side by side", ("", "A", "B", "speed of B"), _figures(comparison)), tag("p", note, class_="meta")]
    )


def panels_of(comparison: Comparison, a: RankTrace, b: RankTrace) -> list[Panel]:
    panels = [Panel(title="Step time by step", unit="ms", series=(_steps("A", "other", a), _steps("B", "compute", b)))]
    losses = comparison.losses
    if losses is not None:
        curves = [
            line(name, kind, [x for x, _ in curve], [y for _, y in curve], dashed=name == "A")
            for name, kind, curve in (("A", "other", losses.a), ("B", "compute", losses.b))
        ]
        panels.append(Panel(title=f"Loss by {losses.axis}", unit="", series=tuple(curves)))
    return [panel for panel in panels if any(series.x for series in panel.series)]


def _steps(name: str, kind: str, rank: RankTrace) -> Series:
    """Step times, or medians of windows where not every step was kept."""
    steps = rank.every_step()
    if steps is not None:
        return line(name, kind, [s.index for s in steps], [s.wall_ms for s in steps], dashed=name == "A")
    groups = grouped(rank.windows, 2_000)
    medians = [Sketch.merged(w.wall_ms for w in group).quantile(0.5) for group in groups]
    return line(name, kind, [group[0].first_index for group in groups], medians, dashed=name == "A")
