"""What a recorded run says: figures, findings, time by cause and by phase, lines, loading, hardware,
and the facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from flatout.diagnose.breakdown import ENOUGH_STEPS, KINDS_IN_WORDS, REST, Breakdown, HotFunction, HotLine, in_training
from flatout.diagnose.rank_metrics import MIN_CEILING
from flatout.model.causes import Finding
from flatout.model.formatting import GPU_READINGS, amount, count_of, duration, in_full, ms, ms_a_step, shown_in
from flatout.model.stats import FEW_STEPS, LONG_S
from flatout.report.account import RankFigures, RecordedRun, mean_or_peak
from flatout.report.charts import over_time, timelines
from flatout.report.views import (
    CodeFrame,
    Item,
    Part,
    ReportSection,
    ReportView,
    Table,
    TableBar,
    as_text,
    change_as_typed,
    gain,
    phase_family,
    phase_name,
    sentence,
    times_faster,
)
from flatout.trace import GpuSample, Trace, Xray

MAX_RANKS = 32
MAX_SETTINGS = 400
MAX_KERNELS = 12
MAX_FUNCTIONS, MAX_LINES = 3, 4
MIN_FUNCTION, MIN_LINE = 0.05, 0.03  # of the phase
LONG_SETUP_MS, LONG_SETUP = 10_000.0, 0.25  # of the run: a shorter set-up has no line of its own
SMALL = 0.002  # of the training time: such parts are put together
KINDS_OF_CHARGE = {  # in words, and the color of its bar
    "useful": ("", "compute"),
    "idle": ("lost", "sync"),
    "wasteful": ("could be spared", "compute"),
    "measuring": ("measuring", "other"),
    "remainder": ("no cause found", "other"),
}


def run_view(run: RecordedRun, *, brief: bool) -> ReportView:
    """What a recorded run says."""
    info, began = run.first.info, ""
    if info.started_unix_s:
        began = f"{datetime.fromtimestamp(info.started_unix_s, timezone.utc):%d %B %Y, %H:%M} UTC"
    findings = [finding_item(run, finding) for finding in run.findings]
    sections = [
        ReportSection("findings", "What to change", findings),
        ReportSection("causes", "Time by cause", _by_cause(run)),
        ReportSection("time", "Where the time went", time_spent(run, brief=brief)),
    ]
    for phase in run.lines:
        title = f"{phase.title}: {phase.share:.0%} of training's time"
        hot = [function for function in phase.functions if function.share >= MIN_FUNCTION]
        sections.append(ReportSection(f"lines-{phase.phase}", title, list(map(_frame, hot[:MAX_FUNCTIONS]))))
    if not brief:
        sections.append(ReportSection("steps", "Two steps in detail", timelines(run.first)))
        sections.append(ReportSection("run", "Over the run", over_time(run)))
    sections.append(ReportSection("loading", "Loading", [workers.sentence() for workers in run.workers]))
    if not brief:
        sections += [
            ReportSection("samples", "Slow samples", _slow_samples(run)),
            ReportSection("xray", "X-ray: kernel by kernel", _xray(run.first.xray)),
            ReportSection("gpus", "The GPUs", [_gpus(run.trace)]),
            ReportSection("ranks", "The ranks", _ranks(run.by_rank)),
            ReportSection("facts", "The facts", [_facts(run)]),
        ]
    sections += [ReportSection("notes", "Notes", run.notes), ReportSection("trace", "Trace", [run.folder])]
    return ReportView(
        about=("flatout", info.name, info.host, run.facts.gpu or "", began),
        headlines=[*(f"{how}." for how in (run.ended,) if how), headline(run)],
        figures=[*_figures(run), *_cost_figures(run)],
        command=" ".join(run.command),
        sections=sections,
    )


def _figures(run: RecordedRun) -> list[tuple[str, str, str]]:
    b, xray, gpu = run.breakdown, run.first.xray, run.hardware
    rows = [("steps", f"{b.steps:,}", f"{duration(b.training_ms)} of training, {duration(b.wall_ms)} in all")]
    rows += _long_setup(run)
    median, p95 = b.step_ms.quantile(0.5), b.step_ms.quantile(0.95)
    if median is not None and p95 is not None:
        rows.append(("median step", ms(median), f"95% below {ms(p95)}"))
    if b.samples_per_s:
        ceiling = ceiling_in_words(b) or "no ceiling was measured"
        rows.append(("samples a second", f"{b.samples_per_s:,.0f}", ceiling))
    if run.ranks > 1:
        speeds = [rank.breakdown.samples_per_s or 0.0 for rank in run.by_rank]
        speed = count_of(round(sum(speeds)), "sample")
        rows.append(("ranks", f"{run.ranks:,}", f"{speed} a second; all else is of rank 0"))
    active, util = gpu.get("sm_active_pct"), gpu.get("gpu_util_pct")
    if active is not None:
        rows.append(("SM active", f"{active:.0f}%", f"GPU-Util says {util or 0:.0f}%"))
    elif util is not None:
        rows.append(("GPU-Util", f"{util:.0f}%", "this GPU does not report how many SMs were active"))
    if xray is not None and xray.wall_ms:
        rows.append(("GPU busy", f"{xray.busy_ms / xray.wall_ms:.0%}", f"X-ray of {count_of(xray.steps, 'step')}"))
    flops = run.model_flops
    if flops is not None and "share" in flops:
        peak = f"of {flops['peak_tflops']:g} TFLOP/s, the maker's figure for {flops['precision']}"
        rows.append(("model FLOPs", f"{flops['share']:.1%}", f"{flops['tflops']:.3g} {peak}"))
    elif flops is not None:
        rows.append(("model FLOPs", f"{flops['tflops']:.3g} TFLOP/s", "what this GPU could do is not known"))
    return rows


def _long_setup(run: RecordedRun) -> list[tuple[str, str, str]]:
    """The time before the first step, where it is much of the run."""
    b, remark = run.breakdown, ""
    setup_ms = sum(part.ms for part in b.parts if part.name == KINDS_IN_WORDS["setup"])
    if setup_ms < max(LONG_SETUP_MS, LONG_SETUP * b.wall_ms):
        return []
    hottest = next((function.hottest for function in in_training(run.first, ("setup",))), None)
    if hottest is not None:
        remark = f"{hottest.share:.0%} of it at {hottest}"
    return [("set-up", duration(setup_ms), remark)]


def _cost_figures(run: RecordedRun) -> list[tuple[str, str, str]]:
    costs, rows, tokens = run.costs, [], run.metrics[0].loader.tokens
    if costs["tokens_per_s"] is not None and tokens is not None:
        remark = f"{tokens.padding:.0%} of them padding" if tokens.padding is not None else ""
        rows.append(("tokens a second", in_full(costs["tokens_per_s"]), remark))
    amounts: list[tuple[str, str, Callable[[float], str]]] = [("energy", "energy_wh", _energy)]
    if run.price is not None:
        amounts.append(("cost", "money", run.price.text))
    for label, name, text in amounts:
        if name not in costs:
            continue
        remark = f"in {duration(1e3 * costs['seconds'])}"
        if costs["epoch_s"] is not None:
            remark = f"{text(costs[f'epoch_{name}'])} an epoch of {duration(1e3 * costs['epoch_s'])}"
        rows.append((label, text(costs[name]), remark))
    return rows


def _energy(wh: float) -> str:
    return f"{in_full(wh)} Wh" if wh < 1000 else f"{in_full(wh / 1000)} kWh"


def ceiling_in_words(b: Breakdown) -> str | None:
    """How fast the same steps could be, measured or worked out; None where others had the cores then."""
    ceilings = ((b.ceiling_samples_per_s, "with the data there"), (b.replay_samples_per_s, "without the loader"))
    for most, how in ceilings:
        if most and b.samples_per_s and most > MIN_CEILING * b.samples_per_s:
            faster = most / b.samples_per_s
            return f"{most:,.0f} samples/s {how} ({faster:.1f}×)" if faster > 1 else f"no faster {how}"
    return None


def finding_item(run: RecordedRun, finding: Finding) -> Item:
    """A finding, with the change to make."""
    evidence = []
    for name, value in finding.evidence.items():
        is_share = "share" in name and isinstance(value, float)
        if value is not None and value not in ([], {}):
            evidence.append((name.replace("_", " "), f"{value:.1%}" if is_share else as_text(value)))
    shares = (f"{finding.share:.0%} of wall time", f"confidence {finding.confidence:.0%}", finding.derived)
    typed = list(filter(None, [change_as_typed(run.facts, finding)]))
    return Item(
        finding.title,
        code=finding.code,
        where=finding.where or "",
        brief=gain(finding),
        quiet=" · ".join(shares),
        lines=[finding.advice],
        to_copy=typed,
        evidence=evidence,
    )


Row = tuple[tuple[str, ...], TableBar]  # the cells of a row, its share not among them, and its bar


def _share_table(heads: Sequence[str], rows: Sequence[Row], length: Callable[[float], str] = lambda share: "") -> Table:
    """Each part of the time, its share and what stands beside it; the small ones together with their
    `length`."""
    shown = [row for row in rows if row[1].share >= SMALL]
    small = sum(bar.share for _, bar in rows if bar.share < SMALL)
    if small >= SMALL / 4:
        shown.append((("smaller parts", length(small)), TableBar(small, "other")))
    cells = [(name, f"{bar.share:.1%}", *beside)[: len(heads)] for (name, *beside), bar in shown]
    return Table("", heads, cells, bars=[bar for _, bar in shown])


def _by_cause(run: RecordedRun) -> list[Part]:
    """Useful work first, then what each cause takes, then what no cause explains. The shares add up
    to 100%."""
    if run.causes is None:
        return []
    rows: list[Row] = []
    for charge in run.causes.charges:
        words, family = KINDS_OF_CHARGE[charge.kind]
        name = charge.code or phase_name(charge.name)
        place = " at ".join(filter(None, (name, charge.where)))
        rows.append(((place, words), TableBar(charge.share, (charge.code or family).partition(".")[0])))
    return [_share_table(("training's time by cause", "share", ""), rows)]


def time_spent(run: RecordedRun, *, brief: bool = False) -> list[Part]:
    """Training's time by phase; and for the page that of the whole run."""
    b, rows = run.breakdown, list[Row]()
    own = next((phase.functions[0].hottest.where for phase in run.lines if phase.phase == REST), None)
    for part in b.training:
        name = phase_name(part.name)
        if part.where:
            name += f" at {Path(part.where).name}"
        elif part.name == REST and own:
            name = f"your own code, mostly {own}"
        idle = part.share * (part.gpu_idle_ms or 0.0) / (part.ms or 1.0)
        cells = name, ms_a_step(part.ms, b.steps), ms_a_step(part.gpu_idle_ms, b.steps)
        rows.append((cells, TableBar(part.share, phase_family(part.name), idle)))
    heads = ["where training's time went", "share", "a step"]
    knows_idle = any(part.gpu_idle_ms is not None for part in b.training)
    if knows_idle:
        heads.append("GPU idle")
    training = _share_table(heads, rows, lambda share: ms_a_step(share * b.training_ms, b.steps))
    cost = ""
    spent_us, share = run.overhead.values()
    if share is not None:
        cost = f"Measuring took about {spent_us:.0f} µs a step ({share:.2%} of it)."
    if brief:
        return [training, cost]
    striped = "Striped: the GPU was idle meanwhile." * knows_idle
    return [_whole_run(b), training, striped, cost]


def _whole_run(b: Breakdown) -> Table:
    training = {(part.name, part.where): part.ms for part in b.training}
    parts = [("training", b.training_ms, "compute")]
    for part in b.parts:
        key = part.name, part.where
        beside_ms, name = part.ms - training.get(key, 0.0), phase_name(part.name)
        if key in training:  # an evaluation after the last step, say
            name += " after the last step"
        parts.append((name, beside_ms, "other"))
    rows: list[Row] = []
    for name, length_ms, family in sorted(parts, key=lambda one: -one[1]):
        rows.append(((name, duration(length_ms)), TableBar(length_ms / (b.wall_ms or 1.0), family)))
    return _share_table(("the whole run", "share", "time"), rows, lambda share: duration(share * b.wall_ms))


def _frame(function: HotFunction) -> CodeFrame:
    shares: dict[int, float] = {}
    known: dict[int, HotLine] = {}
    for line in function.lines:  # one that called several things is one line of code
        number = int(line.where.rpartition(":")[2] or 0)
        shares[number] = shares.get(number, 0.0) + line.share
        known.setdefault(number, line)
    largest = sorted(shares, key=lambda number: -shares[number])[:MAX_LINES]
    rows = []
    for number in sorted(number for number in largest if shares[number] >= MIN_LINE):
        rows.append((number, known[number].source or "", known[number].called or "", shares[number]))
    file = Path(function.hottest.where.rpartition(":")[0]).name
    title = f"{file}, {function.name}: {function.share:.0%} of that" + "; exact lines" * function.exact
    return CodeFrame(title=title, lines=rows)


def _slow_samples(run: RecordedRun) -> list[Part]:
    parts: list[Part] = []
    for workers in run.workers:
        median = workers.work.sample_ms.quantile(0.5) or 0.0
        rows = [(f"{index:,}", ms(took), f"{took / (median or took):,.1f}×") for took, index in workers.work.slowest]
        parts.append(Table(f"The slowest samples of {workers}", ("index", "took", "of the median"), rows))
    return parts


def _xray(x: Xray | None) -> list[Part]:
    if x is None or not x.wall_ms:
        return []
    steps, busy_ms = max(1, x.steps), x.busy_ms or x.wall_ms
    kernels = count_of(round(x.kernels / steps), "kernel")
    said = [
        f"The GPU was busy {x.busy_ms / x.wall_ms:.0%} of the time, {ms(x.busy_ms / steps)} a step, "
        f"and had nothing queued for {x.launched_late_ms / x.wall_ms:.0%}.",
        f"{kernels} a step, half of them below {x.kernel_us.quantile(0.5) or 0.0:.0f} µs.",
    ]
    if x.matrix_ms:
        said.append(f"Tensor cores did {x.tensor_core_ms / x.matrix_ms:.0%} of the work in matrix kernels.")
    if x.collective_ms:
        said.append(f"Collectives took {ms(x.collective_ms / steps)} a step.")
    longest = [(as_text(name), ms(t / steps), f"{t / busy_ms:.1%}") for name, t in _largest(x.top_ms)]
    copies = [(name, ms(t / steps)) for name, t in _largest(x.copies_ms)]
    return [
        " ".join(said),
        Table(title="Kernels that take the most time", heads=("kernel", "a step", "of busy"), rows=longest),
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
        cells = [amount(mean_or_peak(reading, gpus), reading.unit) for reading in readings]
        reasons = sorted({reason for gpu in gpus for reason in gpu.throttle or () if reason != "idle"})
        rows.append((f"{host} GPU {gpus[-1].index}: {gpus[-1].name}", *cells, ", ".join(reasons) or "–"))
    heads = (f"{reading.label}{', highest' * reading.peak}" for reading in readings)
    caption = "Means over the run, set-up and pauses included"
    return Table(title=caption, heads=("GPU", *heads, "throttled by"), rows=rows)


def _ranks(every: Sequence[RankFigures]) -> list[Part]:
    """Every rank in a line; of very many, those at both ends."""
    if len(every) < 2:
        return []
    ranked = sorted(every, key=lambda one: -(one.breakdown.step_ms.quantile(0.5) or 0.0))
    if len(ranked) > MAX_RANKS:
        ranked = [*ranked[: MAX_RANKS // 2], *ranked[-MAX_RANKS // 2 :]]
    rows: list[tuple[str, ...]] = []
    for info, b in ranked:
        times = (ms(b.step_ms.quantile(q) or 0.0) for q in (0.5, 0.95))
        shares = (f"{b.share_of(name):.1%}" for name in ("data", "backward", "sync"))
        speed = f"{b.samples_per_s or 0:,.0f}"
        rows.append((f"rank {info.rank or 0} on {info.host or '?'}", f"{b.steps:,}", *times, speed, *shares))
    heads = ("rank", "steps", "median step", "p95", "samples/s", "data", "backward", "sync")
    title = f"{len(rows)} of {count_of(len(every), 'rank')}, the slowest first"
    lead = "Ranks wait for each other in backward: one that holds the others up waits least there."
    return [lead, Table(title, heads, rows)]


def _facts(run: RecordedRun) -> Table:
    rows = [(name, as_text(value)) for name, value in run.settings()[:MAX_SETTINGS]]
    return Table(title="In force, and what the script read", heads=("what", "value"), rows=rows, numbers_from=2)


def headline(run: RecordedRun) -> str:
    """The verdict in a sentence; without findings, what the account alone can say."""
    if run.findings:
        first = run.findings[0]
        if first.gain_high >= 1.05:
            return f"You could train {times_faster(first)} faster. {sentence(first.title)}."
        return f"{sentence(first.title)}."
    b = run.breakdown
    if not b.enough:
        would_do = f"{ENOUGH_STEPS}, or {FEW_STEPS} in {LONG_S:.0f} s, would do"
        return f"Not enough training steps to judge: {b.steps} in {b.training_ms / 1e3:.2g} s ({would_do})."
    longest = min(b.training, key=lambda part: (phase_family(part.name) == "compute", -part.share))
    return f"{longest.share:.0%} of training time goes to {phase_name(longest.name)}."
