"""A fix as it goes on (a bar for the budget, a line for each thing known), as text at its end, and as a page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout.fix.offers import all_in_words, in_words
from flatout.fix.result import Attempt, ProgressListener
from flatout.model.formatting import in_full
from flatout.report import chart_html
from flatout.report.account import account
from flatout.report.chart_data import Bar, Panel
from flatout.report.compare import compare
from flatout.report.compare_views import panels_of, phase_rows
from flatout.report.findings import told
from flatout.report.fixed import FixReport, Price, bundles
from flatout.report.html import Section, document, finding_list, time_spent
from flatout.report.markup import Html, copyable, figures, folded, join, table, tag
from flatout.report.terminal import WIDTH, duration, ms, print_table, wrapped

_BAR = 24
_SAFETY = {
    "identical": "bit for bit the same",
    "reseeded": "the same samples in the same order, other random numbers",
    "equivalent": "the same mathematics, other rounding",
    "semantic": "changes what is learned",
}


class Progress(ProgressListener):
    """Shows it on a terminal, with a bar for the budget; in a file or a pipe, by lines alone."""

    def __init__(self, console: Console, budget_s: float) -> None:
        self._console = console
        self._budget_s = budget_s
        self._began_s = time.monotonic()
        self._what = ""
        self._live = Live(self, console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def run_begins(self, what: str, left_s: float) -> None:
        self._what = what
        if self._live is None:
            self._console.print(
                Text(f"… {what} ({duration(1e3 * max(0.0, left_s))} left)", style="dim"), soft_wrap=True
            )

    def say(self, line: str) -> None:
        self._console.print(Text(wrapped(line, min(WIDTH, self._console.width), indent=2)), soft_wrap=True)

    def __rich__(self) -> Table:
        spent = time.monotonic() - self._began_s
        row = Table.grid(padding=(0, 1))
        left = f"{duration(1e3 * max(0.0, self._budget_s - spent))} left"
        what = self._what if len(self._what) <= 38 else self._what[:37] + "…"
        bar = ProgressBar(total=self._budget_s, completed=min(spent, self._budget_s), width=_BAR)
        row.add_row(Text(what, style="cyan"), bar, Text(left, style="dim"))
        return row


# At the end


def show(fixed: FixReport, console: Console) -> None:
    """Print what was kept, what was not, and how to go on."""
    _say(console, fixed.sentence(), style="bold")
    for title, attempts in (("Kept", fixed.kept), ("Not kept", fixed.undone)):
        if attempts:
            console.print(Text(f"\n{title}", style="bold"))
        for bundle in bundles(attempts):
            first, *others = _lines(fixed, bundle)
            _say(console, first, indent="  ")
            for line in others:
                _say(console, line, indent="    ")
    rows = before_and_after(fixed)
    if rows:
        console.print()
        print_table(console, ("", "before", "after"), rows)
    elif said := _an_epoch(fixed):
        _say(console, f"\n{said}")
    if fixed.left:
        console.print(Text("\nLeft to you", style="bold"))
    for finding in fixed.left:
        _say(console, told(finding), indent="  ")
        _say(console, finding.advice, indent="    ")
    for offer in fixed.found.withheld:
        allow = offer.changes[0].name.replace("_", "-").partition(":")[0]
        _say(console, f"\nNot tried without your leave: {offer.name} ({offer.why}). --allow {allow}")
    for remark in fixed.found.remarks:
        _say(console, f"Mind: {remark}.")
    _say(console, f"\n{_summed_up(fixed)}", style="dim")
    if fixed.found.kept:
        console.print(Text(f"\nTrain with it:  {fixed.train_with}"), soft_wrap=True)


def _summed_up(fixed: FixReport) -> str:
    runs = len(fixed.found.trials)
    took = f"{runs} run{'s' if runs != 1 else ''} in {duration(1e3 * fixed.found.seconds)}"
    return f"{took}; stopped: {fixed.found.stopped}."


def _say(console: Console, text: str, *, indent: str = "", style: str = "") -> None:
    lead = "\n" * (len(text) - len(text.lstrip("\n")))
    lines = wrapped(text.strip(), min(WIDTH, console.width), len(indent) + 2)
    console.print(Text(lead + indent + lines, style=style), soft_wrap=True)


def _lines(fixed: FixReport, bundle: Sequence[Attempt]) -> list[str]:
    """Changes that were measured together, and what there is to say about them."""
    outcome = bundle[0].outcome
    if outcome.verdict != "kept":
        return [f"{_names(bundle)}: {outcome.verdict}", outcome.note]
    learning = dict.fromkeys(attempt.change.note for attempt in bundle if attempt.change.safety == "semantic")
    return [_gained(bundle), *_proofs(bundle), *learning, *(f"for good: {fixed.permanently(one)}" for one in bundle)]


def _names(bundle: Sequence[Attempt]) -> str:
    return all_in_words(attempt.change for attempt in bundle)


def _gained(bundle: Sequence[Attempt]) -> str:
    first, here = bundle[0], [in_words(attempt.change) for attempt in bundle]
    others = [name for name in first.together if name not in here]
    beside = f" together with {', '.join(others)}" if others else ""
    return f"{_names(bundle)}: {first.gain or 'not measured'}{beside}"


def _proofs(bundle: Sequence[Attempt], *, explained: bool = False) -> list[str]:
    """What each class of change does to training, and how that is known."""
    said: dict[str, list[Attempt]] = {}
    for attempt in bundle:
        safety, proof = attempt.change.safety, attempt.outcome.proof
        meaning = f"{_SAFETY[safety]}. {proof}" if proof and explained else proof or _SAFETY[safety]
        unproven = f"said to be {safety}, " if proof.startswith("not proven") and not explained else f"{safety}: "
        said.setdefault(f"{unproven}{meaning}", []).append(attempt)
    if len(said) == 1:
        return list(said)
    return [f"{_names(some)}, {text}" for text, some in said.items()]


def before_and_after(fixed: FixReport) -> list[tuple[str, str, str]]:
    """The figures that both runs have."""
    a, b = fixed.before, fixed.after
    if a is None or b is None:
        return []
    rows, price = [], fixed.price or Price(0.0)
    told: tuple[tuple[str, Callable[[float], str], str], ...] = (
        (fixed.unit, in_full, "samples_per_s"),
        ("median step", ms, "step_ms"),
        ("SM active", "{:.0f}%".format, "sm_active_pct"),
        ("GPU-Util", "{:.0f}%".format, "gpu_util_pct"),
        ("power", "{:.0f} W".format, "power_w"),
        ("energy a sample", "{:.3g} J".format, "joules_a_sample"),
        ("an epoch", lambda seconds: duration(1e3 * seconds), "epoch_s"),
        (f"an epoch costs {price.unit}".strip(), price.figure, "epoch_money"),
    )
    for name, say, of in told:
        before, after = (getattr(side, of) for side in (a, b))
        if before is not None and after is not None:
            rows.append((name, say(before), say(after)))
    return rows


def _an_epoch(fixed: FixReport) -> str:
    """What it takes and costs now, where nothing was kept; empty where that is not known."""
    now, price = fixed.before, fixed.price
    if now is None or now.epoch_s is None or now.epoch_money is None or price is None:
        return ""
    costs = f"{price.figure(now.epoch_money)} {price.unit}".strip()
    return f"An epoch takes {duration(1e3 * now.epoch_s)} and costs {costs}."


# The page


def page(fixed: FixReport) -> str:
    """The fix as one self-contained file: what was changed, before and after."""
    found = fixed.found
    first, second = (run.trace if run is not None else None for run in (found.before, found.measured))
    sections: list[Section] = [("kept", "What was kept", _kept(fixed))]
    drawn: list[Panel] = []
    if first is not None and second is not None and found.kept:
        both = compare(first, second, ("before", "after"))
        drawn = panels_of(both, first.ranks[0], second.ranks[0])
        sections += [
            ("before", "Where the time went before", time_spent(both.a)),
            ("after", "Where it goes now", time_spent(both.b)),
            ("phases", "Phase by phase", table("A step", ("phase", "before", "after", "change"), phase_rows(both))),
            ("steps", "Step by step (A: before, B: after)", join(chart_html.plot(p, n) for n, p in enumerate(drawn))),
        ]
    elif first is not None:
        sections.append(("before", "Where the time goes", time_spent(account(first, "before"))))
    sections += [
        ("undone", "What was tried and not kept", _undone(fixed)),
        ("withheld", "What needs your leave", _withheld(fixed)),
        ("left", "What is left to you", _left(fixed)),
        ("runs", "Every run", _runs(fixed)),
    ]
    head = join(
        [
            tag("p", tag("strong", "flatout fix"), " · ", shlex.join(fixed.command), class_="about"),
            tag("h1", fixed.sentence().replace(" → ", "\u00a0→\u00a0")),
            figures([(name, f"{a} → {b}", "") for name, a, b in before_and_after(fixed)]),
            copyable(fixed.train_with) if found.kept else None,
            *(tag("p", f"Mind: {remark}.", class_="warning") for remark in found.remarks),
        ]
    )
    return document("flatout fix", head, sections, drawn)


def _kept(fixed: FixReport) -> Html | None:
    if not fixed.kept:
        return None
    articles = []
    for bundle in bundles(fixed.kept):
        safeties, places, notes = (
            dict.fromkeys(filter(None, words))
            for words in zip(*((a.change.safety, a.where, a.change.note) for a in bundle), strict=True)
        )
        articles.append(
            tag(
                "article",
                tag(
                    "p", tag("code", ", ".join(safeties), class_="chip"), tag("span", ", ".join(places), class_="where")
                ),
                tag("h3", _gained(bundle)),
                *(tag("p", note) for note in notes),
                *(tag("p", text, class_="meta") for text in _proofs(bundle, explained=True)),
                tag("p", "For good:"),
                *(copyable(fixed.permanently(attempt)) for attempt in bundle),
                class_="finding",
            )
        )
    return tag("ol", *(tag("li", article) for article in articles), class_="findings")


def _undone(fixed: FixReport) -> Html | None:
    rows = []
    for bundle in bundles(fixed.undone):
        safeties = dict.fromkeys(attempt.change.safety for attempt in bundle)
        rows.append((_names(bundle), ", ".join(safeties), bundle[0].outcome.verdict, bundle[0].outcome.note))
    heads = ("change", "class", "verdict", "why")
    return table("Tried and not kept", heads, rows, numbers_from=9) if rows else None


def _withheld(fixed: FixReport) -> Html | None:
    rows = [(offer.name, offer.why, f"up to {offer.promise:.1f}×") for offer in fixed.found.withheld]
    return (
        table("Allow with --allow", ("change", "why", "promise, an estimate"), rows, numbers_from=2) if rows else None
    )


def _left(fixed: FixReport) -> Html | None:
    run = fixed.found.measured or fixed.found.before
    if run is None or run.trace is None:
        return None
    return finding_list(account(run.trace, "now"), fixed.left)


def _runs(fixed: FixReport) -> Html:
    """Each run with its speed as a bar: how the training became faster."""
    trials = fixed.found.trials
    fastest = max((t.speed.value for t in trials if t.speed is not None), default=1.0)
    rows, listed = [], []
    for trial in trials:
        speed, took = in_full(trial.speed.value) if trial.speed is not None else "", duration(1e3 * trial.seconds)
        width = trial.speed.value / fastest if trial.speed is not None else 0.0
        bar = Bar(label=trial.what, family="compute", left=0.0, width=width, ms=1e3 * trial.seconds)
        rows.append(chart_html.row(trial.what, [chart_html.block(bar) if width else None], speed, took))
        listed.append((trial.what, speed, took))
    noise = fixed.found.noise
    seen = ""
    if noise and noise.repeats:
        again = f"{noise.repeats} repeat{'s' if noise.repeats != 1 else ''}"
        seen = f"Runs of the same plan vary by ±{noise.sd:.1%} ({again}). "
    stopped = f"{seen}{_summed_up(fixed)}"
    behind = folded("The figures", table("Every run", ("run", "samples/s", "took"), listed))
    return join([tag("ul", *rows, class_="falls"), tag("p", stopped, class_="meta"), behind])
