"""A Report as one HTML file that opens from disk, without a network, in any browser of the last years.

Everything is drawn before the page is opened; the page's own script only zooms, reads values and copies. A section
with nothing to say is left out.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files

from flatout import __version__
from flatout.model.facts import Facts
from flatout.model.finding import Finding
from flatout.model.formatting import count_of, duration, in_full, ms, ms_a_step
from flatout.model.readings import GPU_READINGS, shown_in
from flatout.model.records import to_json
from flatout.report import Report, chart_data, charts
from flatout.report.account import Account, RankFigures, RecordedRun, mean_or_peak, samples_by_gpu
from flatout.report.chart_data import WORKER_STATES, Bar, Lane, phase_name
from flatout.report.comparison import Comparison
from flatout.report.findings import GUIDE, change_as_typed, gain, headline, sentence
from flatout.report.fix_summary import FixSummary, bundles, gain_of, names_of, proofs_of
from flatout.report.markup import Html, as_text, copyable, folded, join, key_figures, remark, table, tag
from flatout.trace import GpuSample, RankTrace, Trace

# The browser fetches nothing and uses no script or style but ours, whatever a trace may hold.
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"
)
MAX_LANES = 64
MAX_RANKS = 32
MAX_SETTINGS = 200
MAX_KERNELS = 12
MAX_KERNEL_NAME = 96
INTERVALS = (
    "Intervals (95%) hold the noise within the two runs. What differs between any two runs of the same training only "
    "more runs can show."
)

Section = tuple[str, str, Html | None]  # its key, its title, and what stands in it


def page(report: Report) -> str:
    """The whole page."""
    if report.fix is not None:
        return _document("flatout fix", _fix_head(report.fix), _fix_sections(report, report.fix))
    if report.comparison is not None:
        comparison = report.comparison
        title = f"flatout: {comparison.a.name} compared"
        return _document(title, _comparison_head(comparison), _comparison_sections(comparison))
    assert report.run is not None
    return _document(f"flatout: {report.run.account.name}", _run_head(report.run), _run_sections(report.run))


def _document(title: str, head: Html, sections: Sequence[Section]) -> str:
    links, bodies = [], []
    for key, name, content in sections:
        if content:
            links.append(tag("a", name, href=f"#{key}"))
            heading = tag("h2", name, id=f"{key}-title")
            bodies.append(tag("section", heading, content, id=key, aria_labelledby=f"{key}-title"))
    style, script = ((files("flatout.report") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = POLICY.format(script=_sha256(script), style=_sha256(style))
    opening = join(
        [
            Html('<meta charset="utf-8">'),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            Html(f"<style>{style}</style>"),
        ]
    )
    about = f"Made by flatout {__version__}. Every figure was measured in this run unless it says otherwise."
    contents = tag("nav", *links, aria_label="Contents")
    main = tag("main", tag("header", head), contents, *bodies, tag("footer", about))
    body = tag("body", charts.PATTERNS, main, Html(f"<script>{script}</script>"))
    return f'<!doctype html>\n<html lang="en"><head>{opening}</head>{body}</html>\n'


def _sha256(text: str) -> str:
    """A script or a style as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _about(*parts: str) -> Html:
    return tag("p", tag("strong", parts[0]), *(f" · {part}" for part in parts[1:] if part), class_="about")


def _key(name: str) -> str:
    return name.replace("_", " ")


# A run: its head


def _run_sections(run: RecordedRun) -> list[Section]:
    account, first = run.account, run.trace.ranks[0]
    steps = join(charts.step_chart(timeline) for timeline in chart_data.timelines(first))
    over_time = charts.over_time(chart_data.panels(run.trace, first), chart_data.marks(run.trace, first))
    return [
        ("findings", "What to change", _findings(account, run.findings)),
        ("time", "Where the time went", _time_spent(account)),
        ("steps", "Two steps in detail", steps),
        ("run", "Over the run", over_time),
        ("loading", "Loading", _loading(account, first)),
        ("xray", "X-ray: kernel by kernel", _xray(account)),
        ("gpus", "The GPUs", _gpus(run.trace)),
        ("ranks", "The ranks", _ranks(account.by_rank)),
        ("facts", "The facts", _facts(account.facts)),
        ("notes", "Notes", _notes(account)),
    ]


def _run_head(run: RecordedRun) -> Html:
    account, info, began = run.account, run.trace.ranks[0].info, ""
    if info.started_unix_s:
        began = f"{datetime.fromtimestamp(info.started_unix_s, timezone.utc):%d %B %Y, %H:%M} UTC"
    verdict = headline(account, run.findings)
    titles = [tag("h1", verdict)]
    if account.ended is not None:
        titles = [tag("h1", f"{account.ended}.", class_="warning"), tag("p", verdict)]
    command = None
    if account.command:
        command = tag("pre", tag("code", " ".join(account.command)), class_="command", aria_label="The command")
    about = _about("flatout", account.name, info.host, account.facts.gpu or "", began)
    return join([about, *titles, key_figures(_run_figures(account)), command])


def _run_figures(account: Account) -> list[tuple[str, str, str]]:
    b = account.breakdown
    rows = [("steps", f"{b.steps:,}", f"{duration(b.training_ms)} of training, {duration(b.wall_ms)} in all")]
    median, p95 = b.step_ms.quantile(0.5), b.step_ms.quantile(0.95)
    if median is not None and p95 is not None:
        rows.append(("median step", ms(median), f"95% below {ms(p95)}"))
    if b.samples_per_s:
        rows.append(("samples a second", f"{b.samples_per_s:,.0f}", account.ceiling or "no ceiling was measured"))
    active, util = account.gpu.get("sm_active_pct"), account.gpu.get("gpu_util_pct")
    if active is not None:
        rows.append(("SM active", f"{active:.0f}%", f"GPU-Util says {util or 0:.0f}%"))
    elif util is not None:
        rows.append(("GPU-Util", f"{util:.0f}%", "this GPU does not report how many SMs were active"))
    if account.xray is not None and account.xray.wall_ms:
        busy = account.xray.busy_ms / account.xray.wall_ms
        rows.append(("GPU busy", f"{busy:.0%}", f"X-ray of {account.xray.steps} steps"))
    return rows


# A run: findings, time, steps


def _findings(account: Account, findings: Sequence[Finding]) -> Html | None:
    """Each with its evidence, and what to change."""
    if not findings:
        return None
    entries = (tag("li", _finding(account, finding)) for finding in findings)
    return tag("ol", *entries, class_="findings")


def _finding(account: Account, finding: Finding) -> Html:
    remarks = (gain(finding), f"{finding.share:.0%} of wall time", f"confidence {finding.confidence:.0%}")
    code = tag("code", finding.code, class_="chip", title=f"{GUIDE.name}: {finding.code}")
    parts: list[Html | None] = [
        tag("p", code, tag("span", finding.where or "", class_="where")),
        tag("h3", sentence(finding.title)),
    ]
    parts.append(remark(" · ".join((*remarks, finding.derived))))
    if finding.advice:
        parts.append(tag("p", sentence(finding.advice)))
    change = change_as_typed(account, finding)
    if change:
        parts.append(copyable(change))
    if finding.evidence:
        rows = [(_key(name), as_text(value)) for name, value in finding.evidence.items()]
        parts.append(folded("Evidence", table("Evidence", ("what", "value"), rows)))
    return tag("article", *parts, class_=f"finding {finding.code.partition('.')[0]}")


def _time_spent(account: Account) -> Html:
    b = account.breakdown
    bars = chart_data.waterfall(b)
    parts = [tag("h3", f"The whole run: {duration(b.wall_ms)}")]
    parts.append(charts.strip(chart_data.whole_run(b), "The whole run"))
    training = f"Training: {b.steps:,} steps in {duration(b.training_ms)}"
    parts.append(tag("h3", f"{training}, from all of it down to the work itself"))
    if not bars:
        return join([*parts, tag("p", "No training step was recorded.")])
    rows = []
    for bar in bars:
        idle_ms = bar.ms * bar.idle if bar.idle is not None else None
        times = ms_a_step(bar.ms, b.steps), ms_a_step(idle_ms, b.steps)
        rows.append((bar.label, bar.where or "", f"{bar.width:.2%}", *times))
    parts.append(charts.falls(bars, b.steps, account.xray))
    if any(bar.idle is not None for bar in bars):
        parts.append(tag("p", "Striped: the GPU was idle meanwhile.", class_="meta"))
    heads = ("cause", "where", "share", "a step", "GPU idle meanwhile")
    parts.append(folded("The numbers", table("Training's time by cause", heads, rows, numbers_from=2)))
    return join([*parts, remark(sentence(account.cost))])


# A run: what one looks up rather than reads


def _loading(account: Account, first: RankTrace) -> Html | None:
    lanes = chart_data.lanes(first.workers)
    if not lanes:
        return None
    parts: list[Html | None] = []
    for workers in account.workers:
        median, worst = workers.sample_ms.quantile(0.5) or 0.0, workers.sample_ms.high
        each = f"{ms(median)} each (worst {ms(worst)})"
        text = f"{workers}, by {workers.loaded_by}: {workers.samples:,} loaded, {each}."
        if workers.random_used:
            text += f" It draws random numbers from {', '.join(workers.random_used)}."
        transforms = [(name, ms(each)) for name, each in _largest(workers.transforms_ms)]
        slowest = [(f"{index:,}", ms(took), f"{took / (median or took):,.1f}×") for took, index in workers.slowest]
        parts.append(tag("p", text))
        parts.append(table("Transforms", ("transform", "a sample"), transforms))
        parts.append(table(f"The slowest samples of {workers}", ("index", "took", "of the median"), slowest))
    parts += [tag("h3", "What each worker did"), *map(_lane, lanes[:MAX_LANES])]
    parts.append(charts.legend((family, name) for name, family in WORKER_STATES.items()))
    if len(lanes) > MAX_LANES:
        parts.append(remark(f"{len(lanes) - MAX_LANES:,} more workers did the like."))
    return join(parts)


def _lane(lane: Lane) -> Html:
    name = "trainer"
    if lane.worker.worker is not None:
        name = f"worker {lane.worker.worker}"
    shares = ", ".join(f"{bar.label} {bar.width:.1%}" for bar in lane.bars)
    label = f"{name}, {duration(lane.alive_s * 1e3)}: {shares}"
    return charts.lane(name, charts.track(map(charts.block, lane.bars), label=label, style=" thin"))


def _xray(account: Account) -> Html | None:
    x = account.xray
    if x is None or not x.wall_ms:
        return None
    steps, median = max(1, x.steps), x.kernel_us.quantile(0.5) or 0.0
    figures = [
        ("GPU busy", f"{x.busy_ms / x.wall_ms:.0%}", f"{ms(x.busy_ms / steps)} of {ms(x.wall_ms / steps)} a step"),
        ("kernels a step", f"{x.kernels / steps:,.0f}", f"half of them below {median:.0f} µs"),
        ("launch gaps", f"{x.launched_late_ms / x.wall_ms:.0%}", "of the time the GPU had nothing queued"),
    ]
    if x.matrix_ms:
        figures.append(("tensor cores", f"{x.tensor_core_ms / x.matrix_ms:.0%}", "of the time in matrix kernels"))
    if x.collective_ms:
        figures.append(("collectives", ms(x.collective_ms / steps), "a step"))
    parts: list[Html | None] = [key_figures(figures)]
    if x.recovered is False:
        parts.append(tag("p", "The step time did not recover after the X-ray.", class_="warning"))
    busy_ms = x.busy_ms or x.wall_ms
    rows = [(_kernel(name), ms(spent / steps), f"{spent / busy_ms:.1%}") for name, spent in _largest(x.top_ms)]
    parts.append(table("Kernels that take the most time", ("kernel", "a step", "of busy"), rows))
    phases = {name: x.busy_by_phase_ms.get(name, 0.0) for name in (*x.busy_by_phase_ms, *x.idle_by_phase_ms)}
    by_phase = []
    for name in sorted(phases, key=lambda name: -phases[name] - x.idle_by_phase_ms.get(name, 0.0)):
        idle_ms = x.idle_by_phase_ms.get(name, 0.0)
        by_phase.append((phase_name(name), ms(phases[name] / steps), ms(idle_ms / steps)))
    caption = "Busy by the phase that launched it, idle by what the host did meanwhile"
    parts.append(table(caption, ("phase", "busy", "idle"), by_phase))
    copies = [(name, ms(spent / steps)) for name, spent in _largest(x.copies_ms)]
    return join([*parts, table("Copies", ("kind", "a step"), copies)])


def _largest(spent: dict[str, float], most: int = MAX_KERNELS) -> list[tuple[str, float]]:
    return sorted(spent.items(), key=lambda item: -item[1])[:most]


def _kernel(name: str) -> Html:
    return tag("code", name[:MAX_KERNEL_NAME], title=name)


def _gpus(trace: Trace) -> Html | None:
    rows = []
    for host, samples in trace.samples.items():
        rows += [_gpu_row(host, seen) for seen in samples_by_gpu(samples).values()]
    heads = (f"{reading.label}{', highest' * reading.peak}" for reading in shown_in("report", GPU_READINGS))
    caption = "Means over the run, set-up and pauses included"
    return table(caption, ("GPU", *heads, "throttled by"), rows)


def _gpu_row(host: str, seen: Sequence[GpuSample]) -> tuple[str, ...]:
    cells = [reading.text(mean_or_peak(reading, seen)) for reading in shown_in("report", GPU_READINGS)]
    reasons = sorted({reason for gpu in seen for reason in gpu.throttle or () if reason != "idle"})
    return f"{host} GPU {seen[-1].index}: {seen[-1].name}", *cells, ", ".join(reasons) or "–"


def _ranks(every: Sequence[RankFigures]) -> Html | None:
    """Every rank in a line; of very many, those at both ends."""
    if len(every) < 2:
        return None
    ranked = sorted(every, key=lambda figures: -(figures.step_ms.quantile(0.5) or 0.0))
    lead = "The slowest first. Ranks wait for each other in backward: one that holds the others up waits least there."
    if len(ranked) > MAX_RANKS:
        half = MAX_RANKS // 2
        lead += f" Of {len(ranked):,} ranks, the {half} slowest and the {half} fastest."
        ranked = [*ranked[:half], *ranked[-half:]]
    rows = []
    for one in ranked:
        times = (ms(one.step_ms.quantile(q) or 0.0) for q in (0.5, 0.95))
        speed = f"{one.samples_per_s or 0:,.0f}"
        shares = (f"{one.shares.get(name, 0.0):.1%}" for name in ("data", "backward", "sync"))
        rows.append((f"rank {one.rank} on {one.host or '?'}", f"{one.steps:,}", *times, speed, *shares))
    heads = ("rank", "steps", "median step", "p95", "samples/s", "data", "backward", "sync")
    return join([tag("p", lead), table("Ranks", heads, rows)])


def _facts(known: Facts) -> Html:
    facts = to_json(known)
    loaders = facts.pop("loaders", [])
    keys = dict.fromkeys(key for loader in loaders for key in loader)
    rows = [(_key(key), *(as_text(loader.get(key)) for loader in loaders)) for key in keys]
    heads = (f"loader {number}" for number, _ in enumerate(loaders, 1))
    others = [(_key(key), as_text(value)) for key, value in facts.items() if key != "settings"]
    parts = [table("Data loaders", ("setting", *heads), rows)]
    parts.append(table("In force at the end of the run", ("what", "value"), others))
    for read in known.settings:
        name = f"{read.source} {read.file or ''}".rstrip()
        settings = [(key, as_text(value)) for key, value in list(read.values.items())[:MAX_SETTINGS]]
        parts.append(
            folded(f"Settings read: {name} ({len(read.values):,})", table(name, ("setting", "value"), settings))
        )
    return join(parts)


def _notes(account: Account) -> Html | None:
    return tag("ul", *(tag("li", note.text) for note in account.notes)) if account.notes else None


# Two runs


def _comparison_sections(comparison: Comparison) -> list[Section]:
    losses = comparison.losses.sentence() if comparison.losses is not None else ""
    figures = table("Side by side", ("", "A", "B", "speed of B"), comparison.figures())
    return [
        ("runs", "The two runs", join([figures, remark(INTERVALS)])),
        ("phases", "Where a step's time goes", _phases(comparison, "A", "B")),
        ("steps", "Step by step", charts.by_step(comparison.panels)),
        ("losses", "Losses", remark(losses)),
        ("differences", "What differs", _differences(comparison)),
    ]


def _comparison_head(comparison: Comparison) -> Html:
    figures = [(name, f"{a} → {b}", ratio) for name, a, b, ratio in comparison.figures()[:4]]
    warnings = (tag("p", f"Note: {caution}.", class_="warning") for caution in comparison.cautions)
    about = _about("flatout", f"{comparison.a.folder} (A) and {comparison.b.folder} (B)")
    return join([about, tag("h1", comparison.sentence()), key_figures(figures), *warnings])


def _phases(comparison: Comparison, a: str, b: str) -> Html | None:
    return table("A step, the phases that changed most first", ("phase", a, b, "change"), comparison.phases())


def _differences(comparison: Comparison) -> Html:
    rows = [(name, as_text(a), as_text(b)) for name, a, b in comparison.differences]
    shown = table("Settings and facts", ("what", "A", "B"), rows, numbers_from=9)
    return shown or tag("p", "No setting or fact that flatout records.")


# A fix


def _fix_sections(report: Report, fix: FixSummary) -> list[Section]:
    run, both = report.run, report.comparison
    sections: list[Section] = [("kept", "What was kept", _kept(fix))]
    if both is not None:
        sections += [
            ("before", "Where the time went before", _time_spent(both.a)),
            ("after", "Where it goes now", _time_spent(both.b)),
            ("phases", "Phase by phase", _phases(both, "before", "after")),
            ("steps", "Step by step (A: before, B: after)", charts.by_step(both.panels)),
        ]
    elif run is not None:
        sections.append(("before", "Where the time goes", _time_spent(run.account)))
    return [
        *sections,
        ("undone", "What was tried and not kept", _undone(fix)),
        ("withheld", "What needs your permission", _withheld(fix)),
        ("left", "What is left to you", _findings(run.account, fix.left) if run is not None else None),
        ("runs", "Every run", _every_run(fix)),
    ]


def _fix_head(fix: FixSummary) -> Html:
    parts = [_about("flatout fix", shlex.join(fix.command))]
    parts.append(tag("h1", fix.sentence().replace(" → ", "\u00a0→\u00a0")))
    parts.append(key_figures((name, f"{before} → {after}", "") for name, before, after in fix.before_and_after()))
    if fix.result.kept:
        parts.append(copyable(fix.train_with))
    parts += (tag("p", f"Note: {remark}.", class_="warning") for remark in fix.result.remarks)
    return join(parts)


def _kept(fix: FixSummary) -> Html | None:
    if not fix.kept:
        return None
    entries = []
    for bundle in bundles(fix.kept):
        safeties = dict.fromkeys(attempt.change.safety for attempt in bundle)
        places = dict.fromkeys(attempt.where for attempt in bundle if attempt.where)
        notes = dict.fromkeys(attempt.change.note for attempt in bundle if attempt.change.note)
        chips = tag("code", ", ".join(safeties), class_="chip"), tag("span", ", ".join(places), class_="where")
        parts: list[Html | None] = [tag("p", *chips), tag("h3", gain_of(bundle)), *(tag("p", note) for note in notes)]
        parts += (remark(text) for text in proofs_of(bundle, explained=True))
        parts.append(tag("p", "To make it permanent:"))
        parts += (copyable(fix.permanently(attempt)) for attempt in bundle)
        entries.append(tag("li", tag("article", *parts, class_="finding")))
    return tag("ol", *entries, class_="findings")


def _undone(fix: FixSummary) -> Html | None:
    rows = []
    for bundle in bundles(fix.undone):
        safeties = dict.fromkeys(attempt.change.safety for attempt in bundle)
        outcome = bundle[0].outcome
        rows.append((names_of(bundle), ", ".join(safeties), outcome.verdict, outcome.note))
    heads = ("change", "class", "verdict", "why")
    return table("Tried and not kept", heads, rows, numbers_from=9)


def _withheld(fix: FixSummary) -> Html | None:
    rows = [(offer.name, offer.why, f"up to {offer.promise:.1f}×") for offer in fix.result.withheld]
    heads = ("change", "why", "promise, an estimate")
    return table("Allow with --allow", heads, rows, numbers_from=2)


def _every_run(fix: FixSummary) -> Html:
    """Each run with its speed as a bar: how the training became faster."""
    fastest = max((trial.speed.value for trial in fix.result.trials if trial.speed is not None), default=1.0)
    bars = []
    for trial in fix.result.trials:
        speed, width, took = "", 0.0, duration(1e3 * trial.seconds)
        if trial.speed is not None:
            speed, width = in_full(trial.speed.value), trial.speed.value / fastest
        bar = Bar(label=trial.what, family="compute", left=0.0, width=width, ms=1e3 * trial.seconds)
        bars.append(charts.bar_row(trial.what, [charts.block(bar)], speed, took))
    text, noise = fix.runs, fix.result.noise
    if noise and noise.repeats:
        text = f"Runs of the same plan vary by ±{noise.sd:.1%} ({count_of(noise.repeats, 'repeat')}). {text}"
    return join([tag("ul", *bars, class_="falls"), remark(text)])
