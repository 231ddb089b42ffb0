"""Report → ReportView: what it says, as plain data. `terminal` shows the brief part, `page` all.

headlines, notes, figures     what one reads first
sections                      of tables, items (a finding, a change), paragraphs, and charts for the page
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from flatout.diagnose.breakdown import REST
from flatout.fix.result import Attempt
from flatout.model.finding import Finding
from flatout.model.formatting import count_of, duration, ms, ms_a_step
from flatout.model.readings import GPU_READINGS, shown_in
from flatout.report import Report, chart_data, charts
from flatout.report.account import Account, RankFigures, RecordedRun, mean_or_peak
from flatout.report.chart_data import WORKER_STATES, phase_name
from flatout.report.code_lines import CodeFrame, PhaseLines, flame_of_phase
from flatout.report.comparison import INTERVALS, Comparison, settings_of
from flatout.report.findings import change_as_typed, gain, headline, sentence
from flatout.report.fix_summary import FixSummary, bundles, gain_of, names_of, proofs_of
from flatout.report.markup import Html, as_text
from flatout.trace import GpuSample, RankTrace, Trace, Xray

MAX_LANES = 64
MAX_RANKS = 32
MAX_SETTINGS = 400
MAX_KERNELS = 12
MAX_KERNEL_NAME = 96
SMALL = 0.002  # of the training time: such parts are put together
WORDS_OF_CHARGE = {
    "useful": "",
    "idle": "lost",
    "wasteful": "could be spared",
    "measuring": "measuring",
    "remainder": "no cause found",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under their heads; columns from `numbers_from` on are numbers. The page folds up a `folded` one."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1
    folded: bool = False
    shares: Sequence[float] = ()  # a bar for each row, where there is no chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A finding, or a change that was tried."""

    title: str
    code: str = ""
    where: str = ""
    brief: str = ""  # what it would give
    quiet: str = ""  # how that is known
    lines: Sequence[str] = ()  # an empty one is left out
    copy_as: str = ""  # what the lines to copy are for
    to_copy: Sequence[str] = ()  # the same
    evidence: Sequence[Table] = ()


Part = Table | Item | CodeFrame | str | Callable[[], Html | None]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Parts under a title. One without a part is left out; a terminal shows those that are `brief`."""

    key: str
    title: str
    parts: Sequence[Part]
    brief: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportView:
    """A whole report. Figures are names, values and remarks."""

    about: Sequence[str]
    headlines: Sequence[str]
    notes: Sequence[str] = ()
    figures: Sequence[tuple[str, str, str]]
    command: Sequence[str] = ()
    train_with: Sequence[str] = ()
    sections: Sequence[ReportSection]


def view_of(report: Report) -> ReportView:
    """What a report says."""
    if report.fix is not None:
        return _fix_view(report, report.fix)
    if report.comparison is not None:
        return _comparison_view(report.comparison)
    assert report.run is not None
    return _run_view(report.run)


# A run


def _run_view(run: RecordedRun) -> ReportView:
    account, trace, first, began = run.account, run.trace, run.trace.ranks[0], ""
    if first.info.started_unix_s:
        began = f"{datetime.fromtimestamp(first.info.started_unix_s, timezone.utc):%d %B %Y, %H:%M} UTC"
    findings = [_finding(account, finding) for finding in run.findings]
    return ReportView(
        about=("flatout", account.name, first.info.host, account.facts.gpu or "", began),
        headlines=[*(f"{how}." for how in (account.ended,) if how), headline(account, run.findings)],
        figures=[*_run_figures(account), *run.costs.figures()],
        command=[" ".join(account.command)],
        sections=[
            ReportSection("findings", "What to change", findings),
            ReportSection("time", "Where the time went", _time_spent(account, run.lines)),
            ReportSection("causes", "By cause", _by_cause(run)),
            *_lines(run, first),
            ReportSection("steps", "Two steps in detail", [partial(charts.steps, first)], brief=False),
            ReportSection(
                key="run", title="Over the run", parts=[partial(charts.over_time, trace, first)], brief=False
            ),
            ReportSection("loading", "Loading", [workers.sentence() for workers in account.workers]),
            ReportSection("workers", "The workers", _workers(account, first), brief=False),
            ReportSection("xray", "X-ray: kernel by kernel", _xray(account.xray), brief=False),
            ReportSection("gpus", "The GPUs", [_gpus(trace)], brief=False),
            ReportSection("ranks", "The ranks", _ranks(account.by_rank), brief=False),
            ReportSection("facts", "The facts", [_facts(account)], brief=False),
            ReportSection("notes", "Notes", [note.text for note in account.notes]),
            ReportSection("trace", "Trace", [account.folder]),
        ],
    )


def _run_figures(account: Account) -> list[tuple[str, str, str]]:
    b, xray, gpu = account.breakdown, account.xray, account.gpu
    rows = [("steps", f"{b.steps:,}", f"{duration(b.training_ms)} of training, {duration(b.wall_ms)} in all")]
    median, p95 = b.step_ms.quantile(0.5), b.step_ms.quantile(0.95)
    if median is not None and p95 is not None:
        rows.append(("median step", ms(median), f"95% below {ms(p95)}"))
    if b.samples_per_s:
        rows.append(("samples a second", f"{b.samples_per_s:,.0f}", account.ceiling or "no ceiling was measured"))
    if account.ranks > 1:
        speeds = [rank.samples_per_s or 0.0 for rank in account.by_rank]
        rows.append(("ranks", f"{account.ranks:,}", f"{sum(speeds):,.0f} samples a second; all else is of rank 0"))
    active, util = gpu.get("sm_active_pct"), gpu.get("gpu_util_pct")
    if active is not None:
        rows.append(("SM active", f"{active:.0f}%", f"GPU-Util says {util or 0:.0f}%"))
    elif util is not None:
        rows.append(("GPU-Util", f"{util:.0f}%", "this GPU does not report how many SMs were active"))
    if xray is not None and xray.wall_ms:
        rows.append(("GPU busy", f"{xray.busy_ms / xray.wall_ms:.0%}", f"X-ray of {count_of(xray.steps, 'step')}"))
    return rows


def _finding(account: Account, finding: Finding) -> Item:
    evidence = [(name.replace("_", " "), as_text(value)) for name, value in finding.evidence.items()]
    shares = (f"{finding.share:.0%} of wall time", f"confidence {finding.confidence:.0%}", finding.derived)
    return Item(
        title=finding.title,
        code=finding.code,
        where=finding.where or "",
        brief=gain(finding),
        quiet=" · ".join(shares),
        lines=[finding.advice],
        to_copy=[change_as_typed(account, finding) or ""],
        evidence=[Table(title="Evidence", heads=("what", "value"), rows=evidence, folded=True)],
    )


def _by_cause(run: RecordedRun) -> list[Part]:
    """Useful work first, then what each cause takes, then what no cause explains."""
    if run.causes is None:
        return []
    rows, shares = [], []
    for charge in run.causes.charges:
        if charge.share < SMALL:
            continue
        name, words = charge.code or charge.name, WORDS_OF_CHARGE[charge.kind]
        if charge.kind == "remainder":
            name = phase_name(charge.name)
        rows.append((name, f"{charge.share:.1%}", words, charge.where or ""))
        shares.append(charge.share)
    heads = ("training's time by cause", "share", "", "where")
    return [Table(title="By cause", heads=heads, rows=rows, shares=shares)]


def _lines(run: RecordedRun, first: RankTrace) -> list[ReportSection]:
    """The code that took the time of each phase, and for the page a flame of it."""
    sections = []
    for phase in run.lines:
        flame = partial(charts.flame, flame_of_phase(first, phase))
        title = f"{phase.title}: {phase.share:.0%} of training's time"
        sections.append(ReportSection(f"lines-{phase.phase}", title, [*phase.frames(), flame]))
    return sections


def _time_spent(account: Account, lines: Sequence[PhaseLines] = ()) -> list[Part]:
    b, rows, shares, small_ms = account.breakdown, [], [], 0.0
    own = [line for phase in lines if phase.phase == REST for line in phase.largest()]
    for part in b.training:
        if part.name == REST and own:
            for name, share in own:
                rows.append((name, f"{part.share * share:.1%}", ms_a_step(part.ms * share, b.steps), ""))
                shares.append(part.share * share)
            continue
        if part.share < SMALL:
            small_ms += part.ms
            continue
        name = phase_name(part.name)
        if part.where:
            name += f" at {Path(part.where).name}"
        times = ms_a_step(part.ms, b.steps), ms_a_step(part.gpu_idle_ms, b.steps)
        rows.append((name, f"{part.share:.1%}", *times))
        shares.append(part.share)
    if small_ms:
        rows.append(("smaller parts", f"{small_ms / b.training_ms:.1%}", ms_a_step(small_ms, b.steps), ""))
        shares.append(small_ms / b.training_ms)
    heads = ("where training's time went", "share", "a step", "GPU idle")
    table = Table(title="The numbers", heads=heads, rows=rows, folded=True, shares=shares)
    return [partial(charts.time_spent, b, account.xray), table, sentence(account.cost)]


def _workers(account: Account, first: RankTrace) -> list[Part]:
    """What one looks up of loading: transforms, slow samples, and what each worker did with its time."""
    parts: list[Part] = []
    for workers in account.workers:
        median = workers.sample_ms.quantile(0.5) or 0.0
        transforms = [(name, ms(each)) for name, each in _largest(workers.transforms_ms)]
        slowest = [(f"{index:,}", ms(took), f"{took / (median or took):,.1f}×") for took, index in workers.slowest]
        parts.append(Table(title=f"Transforms of {workers}", heads=("transform", "a sample"), rows=transforms))
        slow = Table(title=f"The slowest samples of {workers}", heads=("index", "took", "of the median"), rows=slowest)
        parts.append(slow)
    lanes: list[tuple[str, ...]] = []
    for name, alive_ms, shares in chart_data.lanes(first.workers)[:MAX_LANES]:
        lanes.append((name, duration(alive_ms), *(f"{share:.0%}" for share in shares)))
    heads = ("worker", "there for", *WORKER_STATES)
    parts.append(Table(title="What each worker did", heads=heads, rows=lanes))
    return parts


def _xray(x: Xray | None) -> list[Part]:
    if x is None or not x.wall_ms:
        return []
    steps, busy_ms = max(1, x.steps), x.busy_ms or x.wall_ms
    said = [
        f"The GPU was busy {x.busy_ms / x.wall_ms:.0%} of the time, {ms(x.busy_ms / steps)} a step, "
        f"and had nothing queued for {x.launched_late_ms / x.wall_ms:.0%}.",
        f"{x.kernels / steps:,.0f} kernels a step, half of them below {x.kernel_us.quantile(0.5) or 0.0:.0f} µs.",
    ]
    if x.matrix_ms:
        said.append(f"Tensor cores did {x.tensor_core_ms / x.matrix_ms:.0%} of the work in matrix kernels.")
    if x.collective_ms:
        said.append(f"Collectives took {ms(x.collective_ms / steps)} a step.")
    kernels = [(name[:MAX_KERNEL_NAME], ms(t / steps), f"{t / busy_ms:.1%}") for name, t in _largest(x.top_ms)]
    copies = [(name, ms(t / steps)) for name, t in _largest(x.copies_ms)]
    return [
        " ".join(said),
        Table(title="Kernels that take the most time", heads=("kernel", "a step", "of busy"), rows=kernels),
        Table(title="Copies", heads=("kind", "a step"), rows=copies),
    ]


def _largest(spent: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(spent.items(), key=lambda item: -item[1])[:MAX_KERNELS]


def _gpus(trace: Trace) -> Table:
    seen: dict[tuple[str, str], list[GpuSample]] = {}
    for host, samples in trace.samples.items():
        for gpu in (gpu for sample in samples for gpu in sample.gpus):
            seen.setdefault((host, gpu.uuid), []).append(gpu)
    readings = shown_in("report", GPU_READINGS)
    rows: list[tuple[str, ...]] = []
    for (host, _), gpus in seen.items():
        cells = [reading.text(mean_or_peak(reading, gpus)) for reading in readings]
        reasons = sorted({reason for gpu in gpus for reason in gpu.throttle or () if reason != "idle"})
        rows.append((f"{host} GPU {gpus[-1].index}: {gpus[-1].name}", *cells, ", ".join(reasons) or "–"))
    heads = (f"{reading.label}{', highest' * reading.peak}" for reading in readings)
    caption = "Means over the run, set-up and pauses included"
    return Table(title=caption, heads=("GPU", *heads, "throttled by"), rows=rows)


def _ranks(every: Sequence[RankFigures]) -> list[Part]:
    """Every rank in a line; of very many, those at both ends."""
    if len(every) < 2:
        return []
    ranked = sorted(every, key=lambda figures: -(figures.step_ms.quantile(0.5) or 0.0))
    if len(ranked) > MAX_RANKS:
        ranked = [*ranked[: MAX_RANKS // 2], *ranked[-MAX_RANKS // 2 :]]
    rows: list[tuple[str, ...]] = []
    for one in ranked:
        times = (ms(one.step_ms.quantile(q) or 0.0) for q in (0.5, 0.95))
        shares = (f"{one.shares.get(name, 0.0):.1%}" for name in ("data", "backward", "sync"))
        speed = f"{one.samples_per_s or 0:,.0f}"
        rows.append((f"rank {one.rank} on {one.host or '?'}", f"{one.steps:,}", *times, speed, *shares))
    heads = ("rank", "steps", "median step", "p95", "samples/s", "data", "backward", "sync")
    title = f"{len(rows)} of {count_of(len(every), 'rank')}, the slowest first"
    lead = "Ranks wait for each other in backward: one that holds the others up waits least there."
    return [lead, Table(title=title, heads=heads, rows=rows)]


def _facts(account: Account) -> Table:
    rows = [(name, as_text(value)) for name, value in settings_of(account)[:MAX_SETTINGS]]
    return Table(title="In force, and what the script read", heads=("what", "value"), rows=rows, numbers_from=2)


# Two runs


def _comparison_view(both: Comparison) -> ReportView:
    losses = [both.losses.sentence()] if both.losses is not None else []
    rows = [(name, as_text(a), as_text(b)) for name, a, b in both.differences]
    differences = Table(title="Settings and facts", heads=("what differs", "A", "B"), rows=rows, numbers_from=3)
    return ReportView(
        about=("flatout compare", f"{both.a.folder} (A)", f"{both.b.folder} (B)"),
        headlines=[both.sentence()],
        notes=both.cautions,
        figures=both.figures(),
        sections=[
            ReportSection("phases", "Where a step's time goes", [_phases(both, "A", "B")]),
            ReportSection("steps", "Step by step", [partial(charts.by_step, both.panels)], brief=False),
            ReportSection("losses", "Losses", losses),
            ReportSection("differences", "What differs", [differences]),
            ReportSection("intervals", "Intervals", [INTERVALS], brief=False),
        ],
    )


def _phases(both: Comparison, a: str, b: str) -> Table:
    title = "A step, the phases that changed most first"
    return Table(title=title, heads=("a step's time", a, b, "change"), rows=both.phases())


# A fix


def _fix_view(report: Report, fix: FixSummary) -> ReportView:
    run, both, result, charted = report.run, report.comparison, fix.result, []
    if both is not None:
        panels = partial(charts.by_step, both.panels)
        charted = [
            ReportSection("before", "Where the time went before", _time_spent(both.a), brief=False),
            ReportSection("after", "Where it goes now", _time_spent(both.b), brief=False),
            ReportSection("phases", "Phase by phase", [_phases(both, "before", "after")], brief=False),
            ReportSection("steps", "Step by step (A: before, B: after)", [panels], brief=False),
        ]
    elif run is not None:
        charted = [ReportSection("before", "Where the time goes", _time_spent(run.account), brief=False)]
    left = [_finding(run.account, finding) for finding in fix.left] if run is not None else []
    withheld = []
    for offer in result.withheld:
        option = offer.changes[0].name.replace("_", "-").partition(":")[0]
        withheld.append(Item(title=offer.name, lines=[offer.why], to_copy=[f"--allow {option}"]))
    runs = partial(charts.every_run, [(trial.what, trial.speed, trial.seconds) for trial in result.trials])
    return ReportView(
        about=("flatout fix", shlex.join(fix.command)),
        headlines=[fix.sentence()],
        notes=result.remarks,
        figures=fix.figures(),
        train_with=[fix.train_with for _ in result.kept[:1]],
        sections=[
            ReportSection("kept", "Kept", [_kept(fix, bundle) for bundle in bundles(fix.kept)]),
            *charted,
            ReportSection("undone", "Not kept", list(map(_undone, bundles(fix.undone)))),
            ReportSection("withheld", "Not tried without your permission", withheld),
            ReportSection("left", "Left to you", left),
            ReportSection("runs", "Runs", [runs, fix.runs]),
        ],
    )


def _kept(fix: FixSummary, bundle: Sequence[Attempt]) -> Item:
    learning = dict.fromkeys(attempt.change.note for attempt in bundle if attempt.change.safety == "semantic")
    return Item(
        title=gain_of(bundle),
        code=", ".join(dict.fromkeys(attempt.change.safety for attempt in bundle)),
        where=", ".join(dict.fromkeys(attempt.where for attempt in bundle if attempt.where)),
        lines=[*proofs_of(bundle), *learning],
        copy_as="to make it permanent: ",
        to_copy=[fix.permanently(attempt) for attempt in bundle],
    )


def _undone(bundle: Sequence[Attempt]) -> Item:
    outcome = bundle[0].outcome
    return Item(title=f"{names_of(bundle)}: {outcome.verdict}", lines=[outcome.note])
