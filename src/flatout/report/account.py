"""Trace → Account: a run as plain data: its time, ranks, loader workers, hardware, and how it ended."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.diagnose.breakdown import Breakdown, split
from flatout.diagnose.by_cause import CauseAccount
from flatout.diagnose.rank_metrics import MIN_CEILING, RankMetrics, is_gpu_of
from flatout.model.errors import TraceError
from flatout.model.facts import Facts
from flatout.model.finding import Finding
from flatout.model.formatting import as_typed, count_of, exit_in_words, ms
from flatout.model.readings import GPU_READINGS, Reading, shown_in
from flatout.model.records import SPANS_A_STEP, to_json
from flatout.redact import redact_command, redact_setting, redact_text
from flatout.report.code_lines import PhaseLines
from flatout.report.costs import RunCosts
from flatout.trace import GpuSample, Note, RankTrace, Sample, Sketch, Summary, Trace, WorkerReport, Xray
from flatout.trace.checked import from_json

SCHEMA = 1
HANG_MS = 10_000.0  # a run whose last wait was at least as long hung
WHAT_IS_COUNTED = (
    "flatout counts calls of torch.optim.Optimizer.step; did the script train, and did it run with the Python it was "
    "started with?"
)
WAITS = {"data": "a batch that did not come", "sync": "the GPU"}
NOT_TRAINING = ("setup", "tail", "replay", "resident")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank in a line: `shares` of its training time by phase."""

    rank: int
    host: str
    steps: int
    step_ms: Sketch
    samples_per_s: float | None
    shares: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What the loader workers of one dataset did, all together."""

    dataset: str
    length: int | None
    workers: int
    samples: int
    sample_ms: Sketch
    busy_share: float
    cpu_share: float
    run_delay_share: float | None
    collate_share: float
    transforms_ms: dict[str, float]
    slowest: tuple[tuple[float, int], ...]
    random_used: tuple[str, ...]

    def __str__(self) -> str:
        """The dataset with its length: training and validation data are often of one class."""
        if self.length is None:
            return self.dataset
        return f"{self.dataset} of {count_of(self.length, 'sample')}"

    def sentence(self) -> str:
        """Who loaded how much of it, and how fast."""
        median, worst = self.sample_ms.quantile(0.5) or 0.0, self.sample_ms.high
        busy = f", busy {self.busy_share:.0%}" if self.workers else ""
        who = count_of(self.workers, "worker") if self.workers else "the training process"
        text = f"{who} on {self}: {ms(median)} a sample (worst {ms(worst)}){busy}"
        text += f", on a core {min(1.0, self.cpu_share):.0%} of that"
        if self.transforms_ms:
            name, spent = max(self.transforms_ms.items(), key=lambda item: item[1])
            text += f", {name} takes {ms(spent)}"
        if self.random_used:
            text += f"; draws random numbers from {', '.join(self.random_used)}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What the first rank did, every rank in a line, and what else is known of the run."""

    name: str
    folder: str
    command: tuple[str, ...]
    breakdown: Breakdown
    by_rank: tuple[RankFigures, ...]
    xray: Xray | None
    workers: tuple[Workers, ...]
    facts: Facts
    own_us_per_step: float | None
    gpu: dict[str, float]
    notes: tuple[Note, ...]
    ended: str | None  # how, where it did not end well

    @property
    def ranks(self) -> int:
        """How many there were, those that were not read among them."""
        return len(self.by_rank)

    @property
    def ceiling(self) -> str | None:
        """How fast the same steps could be, measured or worked out; None where others had the cores then."""
        b = self.breakdown
        for most, how in (
            (b.ceiling_samples_per_s, "with the data there"),
            (b.replay_samples_per_s, "without the loader"),
        ):
            if most and b.samples_per_s and most > MIN_CEILING * b.samples_per_s:
                faster = most / b.samples_per_s
                return f"{most:,.0f} samples/s {how} ({faster:.1f}×)" if faster > 1 else f"no faster {how}"
        return None

    @property
    def own_share(self) -> float | None:
        """The share of a step that measuring took."""
        mean = self.breakdown.step_ms.mean
        if self.own_us_per_step is None or not mean:
            return None
        return self.own_us_per_step / 1e3 / mean

    @property
    def cost(self) -> str:
        """What measuring took, in words; empty where that was not recorded."""
        if self.own_share is None:
            return ""
        return f"measuring took about {self.own_us_per_step:.0f} µs a step ({self.own_share:.2%})"

    @property
    def changes(self) -> str:
        """What a plan has changed in this run, and what it could not change; empty without a plan."""
        applied, not_applied = [], []
        for change in self.facts.changes:
            if change.applied:
                how = ", ".join(filter(None, (change.how, change.where, *change.also)))
                applied.append(f"{change.name}={as_typed(change.value)} ({how})")
            else:
                not_applied.append(f"{change.name} ({change.how})")
        if not applied and not not_applied:
            return ""
        sentence = f"changed in this run: {'; '.join(applied) or 'nothing'}."
        if not_applied:
            sentence += f" Not changed: {'; '.join(not_applied)}."
        return sentence

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of a run, without its findings."""
        b = self.breakdown
        return {
            "name": self.name,
            "trace": self.folder,
            "ranks": self.ranks,
            "ended": self.ended,
            "breakdown": {"wall_ms": b.wall_ms, "parts": [to_json(part) for part in b.parts]},
            "training": {"wall_ms": b.training_ms, "parts": [to_json(part) for part in b.training]},
            "facts": {
                "steps": b.steps,
                "samples_per_s": b.samples_per_s,
                "step_ms": {"median": b.step_ms.quantile(0.5), "p95": b.step_ms.quantile(0.95)},
                "ceiling_samples_per_s": b.ceiling_samples_per_s,
                "replay_samples_per_s": b.replay_samples_per_s,
                **to_json(self.facts),
            },
            "xray": _with_quantiles(self.xray) if self.xray is not None else None,
            "workers": [_with_quantiles(workers) for workers in self.workers],
            "hardware": self.gpu,
            "overhead": {"us_per_step": self.own_us_per_step, "share": self.own_share},
            "notes": [note.text for note in self.notes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One recorded run: its account, what to change, and its records, which the charts show."""

    account: Account
    findings: tuple[Finding, ...]
    trace: Trace
    costs: RunCosts
    causes: CauseAccount | None = None  # None where there is too little to judge by
    lines: tuple[PhaseLines, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of a run, but for its findings."""
        charges = [to_json(charge) for charge in self.causes.charges] if self.causes is not None else []
        lines = [line for phase in self.lines for line in phase.to_json()]
        return {**self.account.to_json(), "account": charges, "lines": lines, "costs": self.costs.to_json()}


def account(trace: Trace, folder: str, metrics: Sequence[RankMetrics], by_rank: Sequence[RankFigures] = ()) -> Account:
    """The account of a run; `by_rank` where the trace does not hold all of its ranks."""
    if not metrics:
        if trace.machines and not any(info.command for info in trace.machines):
            raise TraceError(f"{folder} was recorded by flatout top: look at it with flatout top --replay {folder}")
        raise TraceError(f"no optimizer step was seen in {folder}: nothing to account for. {WHAT_IS_COUNTED}")
    first = metrics[0].rank
    own_cost = first.facts.own_cost
    # Secrets were hidden when the trace was written, but perhaps by an older flatout.
    facts = from_json(Facts, redact_setting("", to_json(first.facts)))
    notes = (*_note_of_a_hang(first), *trace.notes, *first.notes)
    return Account(
        name=first.info.name,
        folder=folder,
        command=redact_command(first.info.command),
        breakdown=metrics[0].breakdown,
        by_rank=tuple(by_rank or map(figures_of_rank, metrics)),
        xray=first.xray,
        workers=_workers(first),
        facts=dataclasses.replace(facts, own_cost=None),
        own_us_per_step=own_cost.us_per_step if own_cost is not None else None,
        gpu=_hardware(first, trace.samples.get(first.info.host, ())),
        notes=tuple(dataclasses.replace(note, text=redact_text(note.text)) for note in notes),
        ended=how_it_ended(trace),
    )


# Ranks


def figures_of_summary(summary: Summary) -> RankFigures:
    """A rank's figures from its summary."""
    totals: dict[str, float] = {}
    for key, sketch in summary.spans_ms.items():
        name = key.partition("@")[0]
        totals[name] = totals.get(name, 0.0) + sketch.total
    all_ms = summary.wall_ms.total or 1.0
    return RankFigures(
        rank=summary.info.rank or 0,
        host=summary.info.host,
        steps=summary.wall_ms.count,
        step_ms=summary.wall_ms,
        samples_per_s=summary.samples / all_ms * 1e3 if summary.samples else None,
        shares={name: total / all_ms for name, total in split(totals).items()},
    )


def figures_of_rank(metrics: RankMetrics) -> RankFigures:
    """A rank's figures from its trace."""
    info, b = metrics.rank.info, metrics.breakdown
    return RankFigures(
        rank=info.rank or 0,
        host=info.host,
        steps=b.steps,
        step_ms=b.step_ms,
        samples_per_s=b.samples_per_s,
        shares={part.name: b.share_of(part.name) for part in b.training},
    )


# Loader workers


def _workers(rank: RankTrace) -> tuple[Workers, ...]:
    groups: dict[tuple[str, int | None], list[WorkerReport]] = {}
    for report in rank.workers:
        groups.setdefault((report.dataset, report.length), []).append(report)
    return tuple(_summed_up(reports) for reports in groups.values() if any(r.samples for r in reports))


def _summed_up(reports: list[WorkerReport]) -> Workers:
    alive = sum(over_s - born_s for born_s, over_s in _lives(reports)) or 1.0
    wall = sum(r.sample_wall_s for r in reports) or 1e-9
    collate = sum(r.collate_s for r in reports)
    delays = [r.run_delay_s for r in reports if r.run_delay_s is not None]
    samples = sum(r.samples for r in reports)
    transforms: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.transforms_s.items():
            transforms[name] = transforms.get(name, 0.0) + seconds * 1e3 / samples
    slowest = sorted(((took, int(index)) for r in reports for took, index in r.slowest), reverse=True)
    return Workers(
        dataset=reports[0].dataset,
        length=reports[0].length,
        workers=_at_once([r for r in reports if r.worker is not None]),
        samples=samples,
        sample_ms=Sketch.merged(r.sample_ms for r in reports),
        busy_share=(wall + collate) / alive,
        cpu_share=sum(r.sample_cpu_s for r in reports) / wall,
        run_delay_share=sum(delays) / alive if delays else None,
        collate_share=collate / (wall + collate),
        transforms_ms=transforms,
        slowest=tuple(slowest[:5]),
        random_used=tuple(sorted({name for r in reports for name in r.random_used})),
    )


def _at_once(workers: Sequence[WorkerReport]) -> int:
    """How many there were at the same time. They may come and go, and flatout's own all have one number."""
    changes = sorted(change for born_s, over_s in _lives(workers) for change in ((born_s, 1), (over_s, -1)))
    return max(itertools.accumulate((by for _, by in changes), initial=0))


def _lives(workers: Sequence[WorkerReport]) -> list[tuple[float, float]]:
    """From when to when each process was there: one that gets its dataset again reports on it again."""
    known: dict[int, tuple[float, float]] = {}
    for worker in workers:
        born_s, over_s = known.get(worker.pid, (worker.born_s, worker.time_s))
        known[worker.pid] = min(born_s, worker.born_s), max(over_s, worker.time_s)
    return list(known.values())


# Hardware


def _hardware(rank: RankTrace, samples: Iterable[Sample]) -> dict[str, float]:
    """Means over the run, of the rank's GPU and of the host; of memory the highest."""
    seen = [gpu for sample in samples for gpu in sample.gpus if is_gpu_of(rank, gpu)]
    figures = {"cpu_pct": Sketch.of(s.host.cpu_pct for s in samples).mean}
    for reading in shown_in("run", GPU_READINGS):
        figures[reading.name] = mean_or_peak(reading, seen)
    return {name: value for name, value in figures.items() if value is not None}


def mean_or_peak(reading: Reading, seen: Iterable[GpuSample]) -> float | None:
    """What counts of a reading over a run; None where it was never measured."""
    values = Sketch.of(getattr(gpu, reading.name) for gpu in seen)
    return values.high if reading.peak and values.count else values.mean


# The end


def how_it_ended(trace: Trace) -> str | None:
    """How a run failed, without a full stop. None if it ended well, goes on, or did not record that."""
    code = trace.end.exit_code if trace.end is not None else None
    ends = [(rank.end, rank.info.rank) for rank in trace.ranks if rank.end is not None]
    failed = [(end, rank) for end, rank in ends if end.error is not None]
    command = next((info.command for info in trace.machines if info.command), ())
    subject = Path(command[0]).name if command and code else "Training"
    after = f"after {_steps(trace.ranks[0])}" if trace.ranks else "before its first step"
    how = f"ended with {exit_in_words(code)} {after}" if code else f"ended {after}"
    if failed:
        end, number = min(failed, key=lambda one: one[0].time_s)
        if end.error == "KeyboardInterrupt":
            return f"{subject} was interrupted {after}"
        rank = f" (rank {number})" * (len(trace.ranks) > 1)
        return f"{subject} {how}: {' at '.join(filter(None, (end.error, end.where)))}{rank}"
    if code:
        return f"{subject} {how}"
    if trace.end is not None and code is None and len(ends) < len(trace.ranks):
        return f"{subject} was killed, or crashed, {after}"
    return None


def _steps(rank: RankTrace) -> str:
    """How many are known. The last second of a process that was killed is not in its trace."""
    indices = [step.index for step in rank.steps if step.kind not in NOT_TRAINING]
    indices += [window.last_index for window in rank.windows[-1:]]
    steps = count_of(max(indices, default=-1) + 1, "step")
    return steps if rank.end is not None else f"at least {steps}"


def _note_of_a_hang(rank: RankTrace) -> tuple[Note, ...]:
    """Where a run ended in a long wait: its steps do not show why it hung."""
    tail = next((step for step in rank.steps if step.kind == "tail"), None)
    if tail is None or len(tail.spans) > SPANS_A_STEP:  # more spans than that are summed up
        return ()
    last = next((span for span in reversed(tail.spans) if span.name != "rest"), None)
    if last is None or last.name not in WAITS or last.host_ms < HANG_MS:
        return ()
    place = f" ({last.where})" if last.where else ""
    text = f"the run ended in a wait of {last.host_ms / 1e3:.1f} s for {WAITS[last.name]}{place}: it hung"
    return (Note(time_s=tail.start_s, text=text),)


def _with_quantiles(record: Any) -> dict[str, Any]:
    """A record with its sketches as a few quantiles."""
    data = {}
    for entry in dataclasses.fields(record):
        item = getattr(record, entry.name)
        if isinstance(item, Sketch):
            p50, p95, highest = (item.quantile(q) for q in (0.5, 0.95, 1.0))
            item = {"mean": item.mean, "p50": p50, "p95": p95, "max": highest}
        data[entry.name] = item
    return data
