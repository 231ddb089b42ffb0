"""A Report as text, at most 80 columns wide, without color in a pipe. Also a check, and a fix as it goes on."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout.check import FAIL, NOT_APPLICABLE, OK, WARN, Checklist, Line
from flatout.diagnose.breakdown import Breakdown, Part
from flatout.fix.result import Attempt, ProgressListener
from flatout.model.formatting import duration, ms, ms_a_step
from flatout.report import Report
from flatout.report.account import Account, RecordedRun, Workers
from flatout.report.chart_data import phase_name
from flatout.report.comparison import Comparison
from flatout.report.findings import GUIDE, MIN_SHOWN_GAIN, change_as_typed, headline, one_line
from flatout.report.fix_summary import FixSummary, bundles, gain_of, names_of, proofs_of
from flatout.report.markup import as_text
from flatout.trace import Xray

WIDTH = 80
MIN_WIDTH, SUBJECT = 50, 27  # of a checklist, and of its first columns
STATUS_STYLES = {FAIL: "red", WARN: "yellow", OK: "green", NOT_APPLICABLE: "dim"}
STATUS_WORDS = {FAIL: "failed", WARN: "to look at", OK: "ok", NOT_APPLICABLE: "not judged"}
LABEL = 9
NAME, SHORT_NAME = 36, 26
BAR = 12
SMALL = 0.002
EIGHTHS = " ▏▎▍▌▋▊▉"
MAX_DIFFERENCES = 20
VALUE = 24  # of a column
TIME_BAR = 24


def show(report: Report, console: Console) -> None:
    """Print the report."""
    if report.fix is not None:
        _show_fix(report.fix, console)
    elif report.comparison is not None:
        _show_comparison(report.comparison, console)
    else:
        assert report.run is not None
        _show_findings(report.run, console)
        _show_account(report.run.account, console)


def wrapped(text: str, width: int = WIDTH, indent: int = 0) -> str:
    """Text in lines, with an indent from the second on; a path or a flag stays whole."""
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False, break_long_words=False)
    return f"\n{'':<{indent}}".join(lines)


def _say(console: Console, text: str, *, indent: int = 0, hang: int = 0, style: str = "") -> None:
    """Print a paragraph; lines after the first stand further in by `hang`."""
    lines = wrapped(text, min(WIDTH, console.width), indent + hang)
    console.print(Text(" " * indent + lines, style=style), soft_wrap=True)


def _print_unpadded(thing: RenderableType, console: Console) -> None:
    """Print it without the spaces that rich leaves at the ends of lines."""
    for segments in console.render_lines(thing, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def _print_table(
    console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True
) -> None:
    """Print rows under their heads; with `numbers`, all columns but the first are set to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if numbers and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _print_unpadded(table, console)


# A run


def _show_findings(run: RecordedRun, console: Console) -> None:
    account = run.account
    if account.ended is not None:
        _say(console, f"{account.ended}.", style="bold red")
    _say(console, headline(account, run.findings), style="bold")
    width = min(WIDTH, console.width)
    for number, finding in enumerate(run.findings, 1):
        lines = [one_line(finding), finding.advice, change_as_typed(account, finding) or ""]
        text = "\n   ".join(wrapped(line, width, 3) for line in lines if line)
        console.print(Text(f"{number}. {text}"), soft_wrap=True)
    if any(finding.gain_high >= MIN_SHOWN_GAIN for finding in run.findings):
        here = Path.cwd()
        guide = GUIDE.relative_to(here) if GUIDE.is_relative_to(here) else GUIDE
        _say(console, f"each cause, how to make sure, what to do: {guide}", indent=3, style="dim")
    console.print()


def _show_account(account: Account, console: Console) -> None:
    width = min(WIDTH, console.width)
    console.print(
        Text.assemble(("flatout  ", "bold"), wrapped("; ".join(_totals(account)), width, LABEL)), soft_wrap=True
    )
    _print_unpadded(_phases_table(account.breakdown, WIDTH - width), console)
    for label, text in _remarks(account):
        console.print(Text.assemble((f"{label:<{LABEL}}", "dim"), wrapped(text, width, LABEL)), soft_wrap=True)


def _totals(account: Account) -> list[str]:
    b = account.breakdown
    median, p95 = b.step_ms.quantile(0.5), b.step_ms.quantile(0.95)
    words = [f"{b.steps:,} steps in {duration(b.training_ms)} (of {duration(b.wall_ms)})"]
    if median is not None and p95 is not None:
        words.append(f"median step {ms(median)}, p95 {ms(p95)}")
    if b.samples_per_s is not None:
        words.append(f"{b.samples_per_s:,.0f} samples/s")
    if account.ranks > 1:
        words.append(f"rank 0 of {account.ranks}")
        speeds = [rank.samples_per_s for rank in account.by_rank]
        if None not in speeds:
            words.append(f"all of them {sum(filter(None, speeds)):,.0f} samples/s")
    return words


def _phases_table(b: Breakdown, missing: int) -> Table:
    """The phases. In a terminal with `missing` columns less, names become shorter first, then the bars."""
    name_width = max(SHORT_NAME, NAME - missing)
    bar_width = max(0, BAR - max(0, missing - (NAME - SHORT_NAME)))
    on_gpu = any(part.gpu_idle_ms is not None for part in b.training)
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("where training's time went", width=name_width, no_wrap=True)
    table.add_column("", width=bar_width)
    for head in ("share", "a step", "GPU idle")[: 2 + on_gpu]:
        table.add_column(head, justify="right")
    small_ms = 0.0
    for part in b.training:
        if part.share < SMALL:
            small_ms += part.ms
            continue
        bar = Text(_bar(part.share, bar_width), style="cyan")
        times = (ms_a_step(part.ms, b.steps), ms_a_step(part.gpu_idle_ms, b.steps))
        table.add_row(_name(part, name_width), bar, f"{part.share:6.1%}", *times[: 1 + on_gpu])
    if small_ms:
        table.add_row("smaller parts", "", f"{small_ms / b.training_ms:6.1%}", ms_a_step(small_ms, b.steps))
    return table


def _name(part: Part, width: int) -> str:
    """A part in words, with as much of the end of its file:line as there is room for."""
    name = phase_name(part.name)
    room = width - len(name) - 2
    if not part.where or room < 2:
        return name
    if len(part.where) <= room:
        return f"{name}  {part.where}"
    return f"{name}  …{part.where[1 - room :]}"


def _bar(share: float, width: int) -> str:
    """In eighths of a cell: in a narrow terminal it has few."""
    full, eighths = divmod(round(8 * share * width), 8)
    return ("█" * full + EIGHTHS[eighths].strip()) or "▏"[:width]


def _remarks(account: Account) -> list[tuple[str, str]]:
    remarks = []
    if account.ceiling:
        remarks.append(("ceiling", account.ceiling))
    if account.gpu.get("sm_active_pct") is not None:
        active, util, power = (account.gpu.get(n, 0.0) for n in ("sm_active_pct", "gpu_util_pct", "power_w"))
        remarks.append(("GPU", f"SM active {active:.0f}%, GPU-Util {util:.0f}%, {power:.0f} W: means over the run"))
    if account.xray is not None:
        remarks.append(("X-ray", _xray(account.xray)))
    remarks += [("loading", _loading(workers)) for workers in account.workers]
    if account.cost:
        remarks.append(("cost", account.cost))
    remarks += [("note", note.text) for note in account.notes]
    remarks.append(("trace", account.folder))
    return remarks


def _xray(xray: Xray) -> str:
    words = [f"GPU busy {xray.busy_ms / xray.wall_ms:.0%} in {xray.steps} steps"]
    median = xray.kernel_us.quantile(0.5)
    words.append(f"{xray.kernels / max(1, xray.steps):,.0f} kernels a step, half below {median or 0:.0f} µs")
    if xray.matrix_ms:
        words.append(f"tensor cores in {xray.tensor_core_ms / xray.matrix_ms:.0%} of matrix time")
    if "HtoD Pageable" in xray.copies_ms:
        words.append("copies from pageable memory")
    if xray.recovered is False:
        words.append("the step time did not recover afterwards")
    return "; ".join(words)


def _loading(workers: Workers) -> str:
    median, worst = workers.sample_ms.quantile(0.5) or 0.0, workers.sample_ms.quantile(1.0) or 0.0
    words = [f"{workers.loaded_by} on {workers}: {ms(median)} a sample (worst {ms(worst)})"]
    if workers.workers:
        words.append(f"busy {workers.busy_share:.0%}")
    words.append(f"on a core {min(1.0, workers.cpu_share):.0%} of that")
    if workers.transforms_ms:
        name, spent = max(workers.transforms_ms.items(), key=lambda item: item[1])
        words.append(f"{name} takes {ms(spent)}")
    return ", ".join(words)


# Two runs


def _show_comparison(comparison: Comparison, console: Console) -> None:
    _say(console, comparison.sentence(), style="bold")
    for caution in comparison.cautions:
        _say(console, f"Note: {caution}.")
    console.print()
    _print_table(console, ("", "A", "B", ""), comparison.figures())
    console.print()
    _print_table(console, ("a step's time", "A", "B", ""), comparison.phases())
    if comparison.losses is not None:
        console.print()
        _say(console, comparison.losses.sentence())
    if not comparison.differences:
        return
    console.print()
    rows = [(name, *_cut(as_text(a), as_text(b)), "") for name, a, b in comparison.differences[:MAX_DIFFERENCES]]
    _print_table(console, ("what differs", "A", "B", ""), rows, numbers=False)
    more = len(comparison.differences) - MAX_DIFFERENCES
    if more > 0:
        _say(console, f"and {more} more: see --html or --json", style="dim")


def _cut(a: str, b: str) -> tuple[str, ...]:
    """Two values that differ, short enough for a column, from shortly before where they do."""
    same = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = 0
    if max(len(a), len(b)) > VALUE and same > VALUE // 2:
        start = same - VALUE // 3
    lead = "…" * (start > 0)
    return _shortened(lead + a[start:], VALUE), _shortened(lead + b[start:], VALUE)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# A check


def show_checklist(checklist: Checklist, console: Console, *, all_lines: bool = False) -> None:
    """Print the list; lines that do not apply only with `all_lines`."""
    width = max(MIN_WIDTH, min(WIDTH, console.width))
    seen = ", ".join(checklist.looked_at) or "the machine alone: no script was given, as in flatout check train.py"
    console.print(Text(wrapped(f"looked at {seen}", width), style="dim"), soft_wrap=True)
    counts = []
    for status, style in STATUS_STYLES.items():
        lines = checklist.with_status(status)
        if lines:
            counts.append(f"{len(lines)} {STATUS_WORDS[status]}")
        if lines and status == NOT_APPLICABLE:  # all of them have the same reason
            subjects = ", ".join(line.subject for line in lines)
            lines = [replace(lines[0], subject=f"{len(lines)} lines", reason=f"{subjects}: {lines[0].reason}")]
        for line in lines if all_lines or status != NOT_APPLICABLE else ():
            console.print(_checklist_line(line, style, width), soft_wrap=True)
    hidden = bool(checklist.with_status(NOT_APPLICABLE)) and not all_lines
    more = " (--all shows them)" if hidden else ""
    console.print(Text(wrapped(", ".join(counts) + more, width), style="bold"), soft_wrap=True)


def _checklist_line(line: Line, style: str, width: int) -> Text:
    place = f" ({line.where})" if line.where and line.where not in line.reason else ""
    text = Text.assemble(
        (f"{line.status:<5}", style), f"{line.subject:<{SUBJECT - 5}}", wrapped(line.reason + place, width, SUBJECT)
    )
    if line.fix:
        text.append(f"\n{'':<{SUBJECT}}").append(
            wrapped(f"→ {line.fix}", width, SUBJECT), style="bold" if line.status != NOT_APPLICABLE else ""
        )
    return text


# A fix


def _show_fix(fix: FixSummary, console: Console) -> None:
    """What was kept, what was not, and how to go on."""
    _say(console, fix.sentence(), hang=2, style="bold")
    for title, attempts in (("Kept", fix.kept), ("Not kept", fix.undone)):
        if attempts:
            console.print(Text(f"\n{title}", style="bold"))
        for bundle in bundles(attempts):
            first, *others = _bundle_lines(fix, bundle)
            _say(console, first, indent=2, hang=2)
            for line in others:
                _say(console, line, indent=4, hang=2)
    rows = fix.before_and_after()
    if rows:
        console.print()
        _print_table(console, ("", "before", "after"), rows)
    elif fix.epoch_sentence():
        console.print()
        _say(console, fix.epoch_sentence(), hang=2)
    if fix.left:
        console.print(Text("\nLeft to you", style="bold"))
    for finding in fix.left:
        _say(console, one_line(finding), indent=2, hang=2)
        _say(console, finding.advice, indent=4, hang=2)
    for offer in fix.result.withheld:
        name = offer.changes[0].name.replace("_", "-").partition(":")[0]
        console.print()
        _say(console, f"Not tried without your permission: {offer.name} ({offer.why}). --allow {name}", hang=2)
    for remark in fix.result.remarks:
        _say(console, f"Note: {remark}.", hang=2)
    console.print()
    _say(console, fix.runs, hang=2, style="dim")
    if fix.result.kept:
        console.print(Text(f"\nTrain with it:  {fix.train_with}"), soft_wrap=True)


def _bundle_lines(fix: FixSummary, bundle: Sequence[Attempt]) -> list[str]:
    outcome = bundle[0].outcome
    if outcome.verdict != "kept":
        return [f"{names_of(bundle)}: {outcome.verdict}", outcome.note]
    learning = dict.fromkeys(attempt.change.note for attempt in bundle if attempt.change.safety == "semantic")
    edits = [f"to make it permanent: {fix.permanently(attempt)}" for attempt in bundle]
    return [gain_of(bundle), *proofs_of(bundle), *learning, *edits]


class FixProgress(ProgressListener):
    """A fix as it goes on: with a bar for the time budget on a terminal; in a file or a pipe only lines."""

    def __init__(self, console: Console, budget_s: float) -> None:
        self._console = console
        self._budget_s = budget_s
        self._began_s = time.monotonic()
        self._what = ""
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> FixProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def run_begins(self, what: str, left_s: float) -> None:
        self._what = what
        if self._live is None:
            line = f"… {what} ({duration(1e3 * max(0.0, left_s))} left)"
            self._console.print(Text(line, style="dim"), soft_wrap=True)

    def say(self, line: str) -> None:
        _say(self._console, line, hang=2)

    def __rich__(self) -> Table:
        spent = time.monotonic() - self._began_s
        left = f"{duration(1e3 * max(0.0, self._budget_s - spent))} left"
        bar = ProgressBar(total=self._budget_s, completed=min(spent, self._budget_s), width=TIME_BAR)
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(_shortened(self._what, 38), style="cyan"), bar, Text(left, style="dim"))
        return row
