"""Trace → Account: everything a summary of one run may show, as plain data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.diagnose.breakdown import Breakdown, breakdown
from flatout.diagnose.rank_metrics import is_card_of
from flatout.model.errors import TraceError
from flatout.model.facts import Facts
from flatout.model.formatting import count_of
from flatout.model.records import SPANS_A_STEP, to_json
from flatout.redact import redact_command, redact_setting, redact_text
from flatout.report.ended import how_it_ended
from flatout.report.gather import RankFigures, of_breakdown
from flatout.trace import GpuSample, Note, RankTrace, Sample, Sketch, Trace, WorkerReport, Xray
from flatout.trace.checked import from_json

SCHEMA = 1
STOOD_STILL_S = 10.0  # in a wait that was a run's last …
STOOD_STILL_STEPS = 20.0  # … and so many steps: more than a pause
WHAT_IS_COUNTED = (
    "flatout counts calls of torch.optim.Optimizer.step; did the script train, and did it run with the Python it was "
    "started with?"
)
_WAITS = {"data": "a batch that did not come", "sync": "the GPU"}


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
    transforms_ms: dict[str, float] = field(default_factory=dict)
    slowest: tuple[tuple[float, int], ...] = ()
    random_used: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The dataset with its length: training and validation data are often of one class."""
        return self.dataset if self.length is None else f"{self.dataset} of {count_of(self.length, 'sample')}"

    @property
    def who(self) -> str:
        """Who loaded it, in words."""
        if not self.workers:
            return "the training process"
        return f"{self.workers} worker" + "s" * (self.workers > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of the first rank, every rank in a line, and what lies beside them."""

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
    ended: str | None = None  # how, where it did not end well

    @property
    def ranks(self) -> int:
        """How many there were, those that were not read among them."""
        return len(self.by_rank)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout run --json`."""
        b = self.breakdown
        return {
            "schema": SCHEMA,
            "name": self.name,
            "trace": self.folder,
            "ranks": self.ranks,
            "ended": self.ended,
            "breakdown": {"wall_ms": b.wall_ms, "parts": [_part(p) for p in b.parts]},
            "training": {"wall_ms": b.training_ms, "parts": [_part(p) for p in b.training]},
            "facts": {
                "steps": b.steps,
                "samples_per_s": b.samples_per_s,
                "step_ms": {"median": b.step_ms.quantile(0.5), "p95": b.step_ms.quantile(0.95)},
                "ceiling_samples_per_s": b.ceiling_samples_per_s,
                "replay_samples_per_s": b.replay_samples_per_s,
                **to_json(self.facts),
            },
            "xray": _plain(self.xray) if self.xray is not None else None,
            "workers": [_plain(w) for w in self.workers],
            "hardware": self.gpu,
            "overhead": {"us_per_step": self.own_us_per_step, "share": self.own_share},
            "notes": [note.text for note in self.notes],
        }

    @property
    def own_share(self) -> float | None:
        """Of a step, what measuring took."""
        mean = self.breakdown.step_ms.mean
        return self.own_us_per_step / 1e3 / mean if self.own_us_per_step is not None and mean else None


def account(trace: Trace, folder: str, by_rank: Sequence[RankFigures] = ()) -> Account:
    """The account of a run; `by_rank` where the trace does not hold all of its ranks."""
    if not trace.ranks:
        if trace.machines and not any(info.command for info in trace.machines):
            raise TraceError(f"{folder} was recorded by flatout top: look at it with flatout top --replay {folder}")
        raise TraceError(f"no optimizer step was seen in {folder}: nothing to account for. {WHAT_IS_COUNTED}")
    first = trace.ranks[0]
    return Account(
        name=first.info.name,
        folder=folder,
        command=redact_command(first.info.command),
        breakdown=breakdown(first),
        by_rank=tuple(by_rank or (of_breakdown(rank.info, breakdown(rank)) for rank in trace.ranks)),
        xray=first.xray,
        workers=_workers(first),
        facts=dataclasses.replace(_redacted(first.facts), own_cost=None),
        own_us_per_step=first.facts.own_cost.us_per_step if first.facts.own_cost is not None else None,
        gpu=_hardware(first, trace.samples.get(first.info.host, ())),
        notes=tuple(
            dataclasses.replace(note, text=redact_text(note.text))
            for note in (*_end_of_a_hang(first), *trace.notes, *first.notes)
        ),
        ended=how_it_ended(trace),
    )


def _redacted(facts: Facts) -> Facts:
    """Without secrets. They were hidden when the trace was written; it may be another's, or an older flatout's."""
    return from_json(Facts, redact_setting("", to_json(facts)))


def _end_of_a_hang(rank: RankTrace) -> tuple[Note, ...]:
    """Where a run ended in a wait that is none of training's own: what its steps say is not why it stood still."""
    tail = next((step for step in rank.steps if step.kind == "tail"), None)
    last = next((span for span in reversed(tail.spans) if span.name != "rest"), None) if tail is not None else None
    summed_up = tail is not None and len(tail.spans) > SPANS_A_STEP
    if tail is None or last is None or last.name not in _WAITS or summed_up:
        return ()
    median_ms = breakdown(rank).step_ms.quantile(0.5) or 0.0
    if last.host_ms < max(1e3 * STOOD_STILL_S, STOOD_STILL_STEPS * median_ms):
        return ()
    where = f" ({last.where})" if last.where else ""
    text = f"the run ended in a wait of {last.host_ms / 1e3:.1f} s for {_WAITS[last.name]}{where}: it stood still"
    return (Note(time_s=tail.start_s, text=text),)


def _workers(rank: RankTrace) -> tuple[Workers, ...]:
    groups: dict[tuple[str, int | None], list[WorkerReport]] = {}
    for report in rank.workers:
        groups.setdefault((report.dataset, report.length), []).append(report)
    return tuple(
        _together(dataset, length, reports)
        for (dataset, length), reports in groups.items()
        if any(r.samples for r in reports)
    )


def _together(dataset: str, length: int | None, reports: list[WorkerReport]) -> Workers:
    alive = sum(over_s - born_s for born_s, over_s in _lives(reports)) or 1.0
    wall = sum(r.sample_wall_s for r in reports) or 1e-9
    delays = [r.run_delay_s for r in reports if r.run_delay_s is not None]
    samples = sum(r.samples for r in reports)
    transforms: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.transforms_s.items():
            transforms[name] = transforms.get(name, 0.0) + seconds * 1e3 / samples
    slowest = sorted(((ms, int(index)) for r in reports for ms, index in r.slowest), reverse=True)
    return Workers(
        dataset=dataset,
        length=length,
        workers=_at_once([r for r in reports if r.worker is not None]),
        samples=samples,
        sample_ms=Sketch.merged(r.sample_ms for r in reports),
        busy_share=(wall + sum(r.collate_s for r in reports)) / alive,
        cpu_share=sum(r.sample_cpu_s for r in reports) / wall,
        run_delay_share=sum(delays) / alive if delays else None,
        collate_share=sum(r.collate_s for r in reports) / (wall + sum(r.collate_s for r in reports)),
        transforms_ms=transforms,
        slowest=tuple(slowest[:5]),
        random_used=tuple(sorted({name for r in reports for name in r.random_used})),
    )


def _at_once(workers: Sequence[WorkerReport]) -> int:
    """How many there were at the same time. They may come and go, and flatout's own all have one number."""
    numbers = {worker.worker for worker in workers}
    comings = sorted(change for born_s, over_s in _lives(workers) for change in ((born_s, 1), (over_s, -1)))
    return max(len(numbers), *itertools.accumulate((by for _, by in comings), initial=0))


def _lives(workers: Sequence[WorkerReport]) -> list[tuple[float, float]]:
    """From when to when each process was there: one that is handed its dataset anew reports on it anew."""
    known: dict[int, tuple[float, float]] = {}
    for worker in workers:
        born_s, over_s = known.get(worker.pid, (worker.born_s, worker.time_s))
        known[worker.pid] = min(born_s, worker.born_s), max(over_s, worker.time_s)
    return list(known.values())


def _hardware(rank: RankTrace, samples: tuple[Sample, ...]) -> dict[str, float]:
    """Means over the run, of the rank's card and of the host."""
    if not samples:
        return {}
    means: dict[str, float | None] = {"cpu_pct": Sketch.of(s.host.cpu_pct for s in samples).mean}
    card = cards_of(samples).get(card_of(rank, samples) or "")
    if card:
        for name in ("gpu_util_pct", "sm_active_pct", "tensor_active_pct", "dram_active_pct", "power_w"):
            means[name] = Sketch.of(getattr(g, name) for g in card).mean
        means["memory_used_bytes"] = Sketch.of(g.memory_used_bytes for g in card).high
    return {name: value for name, value in means.items() if value is not None}


def card_of(rank: RankTrace, samples: Iterable[Sample]) -> str | None:
    """The card a rank trains on: the one it named, else the one that drew the most power."""
    cards = cards_of(samples)
    named = next((uuid for uuid, taken in cards.items() if is_card_of(rank, taken[0])), None)
    return named or max(cards, key=lambda uuid: Sketch.of(g.power_w for g in cards[uuid]).mean or 0.0, default=None)


def cards_of(samples: Iterable[Sample]) -> dict[str, list[GpuSample]]:
    """What was sampled of each card, by its UUID."""
    cards: dict[str, list[GpuSample]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            cards.setdefault(gpu.uuid, []).append(gpu)
    return cards


def _part(part: Any) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(part).items() if v is not None}


def _plain(value: Any) -> dict[str, Any]:
    """A record with its sketches as a few quantiles."""
    data = {}
    for entry in dataclasses.fields(value):
        item = getattr(value, entry.name)
        if isinstance(item, Sketch):
            item = {"mean": item.mean, "p50": item.quantile(0.5), "p95": item.quantile(0.95), "max": item.quantile(1.0)}
        data[entry.name] = item
    return data
