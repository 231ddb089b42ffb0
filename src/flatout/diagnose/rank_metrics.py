"""A Case: one rank's trace with the figures that the rules reason about, each worked out once.

Shares are of the training time, 0 to 1. What the trace does not tell is None, and a rule that needs it stays silent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flatout.diagnose.breakdown import Breakdown, breakdown
from flatout.diagnose.replay import gain_without
from flatout.model.facts import NO_LOADER, Facts, LoaderFacts
from flatout.trace import GpuSample, ProcessSample, RankTrace, Sample, Sketch, Step, Trace, WorkerReport, Xray

LAUNCHING = ("forward", "loss", "backward", "optimizer", "rest", "copy")
_MARKED_STEPS_USED = 200
LAUNCHES_LATE = 0.15  # of the time of a phase: the card waits for the host
DISTURBED = 0.8  # a ceiling below so much of what the run itself did


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value the script read; the key is in lower case."""

    source: str
    file: str | None
    key: str
    value: Any


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield str(key).lower(), value


@dataclass(frozen=True)
class RankMetrics:
    """What is known of one rank."""

    trace: Trace
    rank: RankTrace

    @cached_property
    def breakdown(self) -> Breakdown:
        return breakdown(self.rank)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Raw steps of plain training."""
        return tuple(step for step in self.rank.steps if step.kind == "train")

    @cached_property
    def step_ms(self) -> float:
        """The median step."""
        return self.breakdown.step_ms.quantile(0.5) or 0.0

    @cached_property
    def mean_ms(self) -> float:
        """The mean step, without what measuring it took: waits that come in bursts are in it."""
        b = self.breakdown
        return b.training_ms * (1 - b.share_of("flatout")) / b.steps if b.steps else 0.0

    @property
    def facts(self) -> Facts:
        return self.rank.facts

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Every plain value the script read, nested ones by their last name."""
        return tuple(
            Setting(source=read.source, file=read.file, key=key, value=value)
            for read in self.facts.settings
            for key, value in _leaves(read.values)
        )

    @property
    def xray(self) -> Xray | None:
        return self.rank.xray

    @property
    def on_gpu(self) -> bool:
        """Whether training ran on a card."""
        return self.facts.on_gpu

    # -- the loader -------------------------------------------------------------------------------------------------

    @cached_property
    def loader(self) -> LoaderFacts:
        """The settings of the loader training reads from."""
        return self.facts.training_loader

    @property
    def steps_an_epoch(self) -> float | None:
        """Optimizer steps from one pass over the data to the next, where that is known."""
        loader, batches = self.loader, float(self.loader.batches or 0)
        if not batches and loader.length and loader.batch_size:
            batches = loader.length / loader.batch_size / max(1, self.rank.info.world_size)
        return batches / self._batches_a_step or None

    @property
    def _batches_a_step(self) -> float:
        """More than one where gradients are added up: by the backward passes, but not where a batch has several of
        them, for one optimizer after the other; less than one where each of these has steps of its own."""
        backward = statistics.median([step.micro_steps for step in self.steps] or [1]) or 1
        batch, seen = self.loader.batch_size, self.breakdown
        taken = seen.samples / seen.steps / batch if batch and seen.samples and seen.steps else backward
        if taken > 1.5:  # a batch of each of several loaders is one batch
            taken /= self.facts.loaders_side_by_side or 1
        return 1 / round(1 / taken) if taken < 0.6 else min(backward, round(taken))

    @property
    def workers(self) -> int:
        """How many workers it has."""
        return self.loader.num_workers or 0

    @cached_property
    def elastic(self) -> bool:
        """Whether flatout's loader is in place: it finds the number of workers by itself."""
        made = any(change.name == "loader" and change.applied for change in self.facts.changes)
        return made or bool(self.loader.elastic)

    @cached_property
    def reports(self) -> tuple[WorkerReport, ...]:
        """What that loader's workers said at last (or the training process, with num_workers=0)."""
        if self.loader is NO_LOADER:
            return ()
        name, length = self.loader.dataset.rpartition(".")[2], self.loader.length
        return tuple(r for r in self.rank.workers if r.dataset == name and r.length == length and r.samples)

    @cached_property
    def sample_ms(self) -> Sketch:
        """How long a sample takes to load."""
        times = Sketch()
        for report in self.reports:
            times.merge(report.sample_ms)
        return times

    @cached_property
    def worked_s(self) -> float:
        """How long the workers were at work, all together: loading samples and joining them."""
        return sum(r.sample_wall_s + r.collate_s for r in self.reports)

    @cached_property
    def worker_busy(self) -> float | None:
        """The share of their time the workers were at work, not waiting to be asked."""
        waited_s = sum(r.waiting_s for r in self.reports)
        return self.worked_s / (self.worked_s + waited_s) if self.worked_s else None

    @cached_property
    def worker_on_core(self) -> float | None:
        """The share of loading time that was spent on a core."""
        wall = sum(r.sample_wall_s for r in self.reports)
        return min(1.0, sum(r.sample_cpu_s for r in self.reports) / wall) if wall else None

    @cached_property
    def worker_delay(self) -> float | None:
        """The share of loading time in which a worker was ready to run but had no core."""
        delays = [r.run_delay_s for r in self.reports if r.run_delay_s is not None]
        return min(1.0, sum(delays) / self.worked_s) if delays and self.worked_s else None

    @cached_property
    def collate_share(self) -> float | None:
        """The share of the workers' work that is joining samples."""
        return sum(r.collate_s for r in self.reports) / self.worked_s if self.worked_s else None

    @cached_property
    def samples_a_worker_s(self) -> float | None:
        """What one worker can make, in samples a second."""
        return sum(r.samples for r in self.reports) / self.worked_s if self.worked_s else None

    @cached_property
    def supply(self) -> float:
        """How many times as fast as now the workers could deliver; without any there is no such bound."""
        rate, now = self.samples_a_worker_s, self.breakdown.samples_per_s
        workers = min(self.workers, self.cores or math.inf)
        if not rate or not now or not workers or self.elastic:
            return math.inf
        in_hand = 1 / self.worker_busy if self.worker_busy and self.share("data") < 0.01 else 1.0
        return max(in_hand, rate * workers / now)

    @cached_property
    def worker_samples(self) -> tuple[ProcessSample, ...]:
        """What was seen of the workers from outside."""
        return tuple(p for s in self.samples for p in s.processes if p.role == "worker")

    @cached_property
    def start_share(self) -> float:
        """The share of time that starting workers takes: the start itself, and the wait for a first batch beyond what
        a worker takes to make one. The raw steps tell how long such a wait is beside a start."""
        started, rate, batch = self.share("loader start"), self.samples_a_worker_s, self.loader.batch_size
        if not rate or not batch or self.loader.persistent_workers or not self.workers:
            return started
        starts_ms = beyond_ms = 0.0
        for step in self.steps:
            start_ms = sum(span.host_ms for span in step.spans if span.name == "loader start")
            if start_ms:
                wait_ms = sum(span.host_ms for span in step.spans if span.name == "data")
                starts_ms += start_ms
                beyond_ms += max(0.0, wait_ms - batch / rate * 1e3)
        return started + (min(self.share("data"), started * beyond_ms / starts_ms) if starts_ms else 0.0)

    # -- time -------------------------------------------------------------------------------------------------------

    def share(self, phase: str) -> float:
        """The share of training time the host spends in a phase."""
        return self.breakdown.share_of(phase)

    @cached_property
    def marked(self) -> tuple[Step, ...]:
        """Steps that carried events."""
        has = [s for s in self.steps if any(p.gpu_idle_ms is not None or p.gpu_busy_ms is not None for p in s.spans)]
        return tuple(has[-_MARKED_STEPS_USED:])

    def saved_without(self, *phases: str) -> float | None:
        """The share of training time that would be saved if the host spent none in these phases.

        Steps with events say how much of such time is saved when it is gone; all steps say how much of it there is.
        Waits come in bursts: a median step may have none of them.
        """
        share = sum(self.share(phase) for phase in phases)
        if not self.on_gpu:
            return min(0.99, share)
        spent_ms = saved_ms = 0.0
        for step in self.marked:
            saved = gain_without(step, *phases, at_work=self._at_work)
            if saved is not None:
                spent_ms += sum(span.host_ms for span in step.spans if span.name in phases)
                saved_ms += saved * step.wall_ms
        if not self.marked:
            return None
        if not spent_ms:  # none in the steps looked at: a wait for data leaves the card idle, one for the card need not
            return min(0.99, self.share("data")) if "data" in phases else 0.0
        return min(0.99, share * saved_ms / spent_ms)

    @cached_property
    def _at_work(self) -> dict[str, float]:
        """The share of its time in a phase that the card works, by the X-ray: events see no gaps between kernels."""
        work, idle = (self.xray.busy_by_phase_ms, self.xray.idle_by_phase_ms) if self.xray is not None else ({}, {})
        return {phase: work.get(phase, 0.0) / (work.get(phase, 0.0) + ms) for phase, ms in idle.items() if ms}

    @cached_property
    def busy_share(self) -> float | None:
        """The share of the time in which the card has work: the X-ray's kernels laid over the mean step."""
        xray = self.xray
        if xray is None or not xray.steps or not self.mean_ms:
            return None
        return min(1.0, xray.busy_ms / xray.steps / self.mean_ms)

    @cached_property
    def exposed(self) -> float:
        """How much of what the card saves is sure to be saved: not so where it waits for launches, by the X-ray."""
        xray = self.xray
        if xray is None or not xray.busy_ms:
            return 1.0
        return xray.busy_ms / (xray.busy_ms + sum(xray.idle_by_phase_ms.get(phase, 0.0) for phase in LAUNCHING))

    @cached_property
    def card_bound(self) -> float:
        """The share of the card's work that, done sooner, ends the step sooner.

        In a phase whose launches the card waits for, kernels that end sooner only wait longer for the next one.
        """
        xray = self.xray
        if xray is None or not xray.busy_by_phase_ms:
            return 1.0
        work, idle = xray.busy_by_phase_ms, xray.idle_by_phase_ms
        kept_waiting = sum(
            ms for phase, ms in work.items() if idle.get(phase, 0.0) > LAUNCHES_LATE * (ms + idle.get(phase, 0.0))
        )
        return 1 - kept_waiting / (sum(work.values()) or 1.0)

    def waits_for_launches(self, *phases: str) -> float:
        """The share of the step in which the card waits for what the host launches, in these phases or in all."""
        xray = self.xray
        if xray is None or not xray.steps or not self.mean_ms:
            return 0.0
        idle_ms = sum(xray.idle_by_phase_ms.get(phase, 0.0) for phase in phases or LAUNCHING)
        # An X-ray slows the host down. It may be of an earlier run, which waited for data otherwise than this one does.
        xrayed_ms = (xray.wall_ms - xray.idle_by_phase_ms.get("data", 0.0)) / xray.steps
        return min(0.99, idle_ms / xray.steps / max(self.mean_ms, xrayed_ms + self.share("data") * self.mean_ms))

    @cached_property
    def headroom(self) -> float:
        """How many times faster the step could be at most: by the measured ceiling, or else by the X-ray."""
        if self._above_now is not None:
            return max(1.0, self._above_now)
        return 1 / self.busy_share if self.busy_share else float("inf")

    @property
    def has_ceiling(self) -> bool:
        """Whether the headroom was measured by replaying batches."""
        return self._above_now is not None

    @cached_property
    def _above_now(self) -> float | None:
        """The ceiling as a multiple of the run. One far below the run says nothing: others had the cores meanwhile."""
        b = self.breakdown
        # Batches that are on the card already cannot be slower than others: the higher of the two was disturbed less.
        ceiling = max(b.ceiling_samples_per_s or 0.0, b.replay_samples_per_s or 0.0)
        above = ceiling / b.samples_per_s if ceiling and b.samples_per_s else None
        return above if above is not None and above > DISTURBED else None

    # -- the machine ------------------------------------------------------------------------------------------------

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Hardware samples most of whose time was training, and not the X-ray."""
        taken = self.trace.samples.get(self.rank.info.host, ())
        if not self.steps:
            return taken
        start, last = self.steps[0].start_s, self.steps[-1]
        ends = [last.start_s + last.wall_ms / 1e3, *(w.start_s + w.wall_ms.total / 1e3 for w in self.rank.windows[-1:])]
        xray = [step for step in self.rank.steps if step.kind in ("xray", "after xray")]

        def trains(at_s: float) -> bool:
            looked_at = any(step.start_s < at_s <= step.start_s + step.wall_ms / 1e3 for step in xray)
            return start < at_s <= max(ends) and not looked_at

        return tuple(s for s in taken if trains(s.time_s - s.interval_s / 2))

    @cached_property
    def fits_in_memory(self) -> float:
        """How many runs like this one the host's memory had room for when it began, by what came into use since."""
        hosts = [sample.host for sample in self.trace.samples.get(self.rank.info.host, ())]
        used = [host.memory_used_bytes for host in hosts if host.memory_used_bytes is not None]
        total = next((host.memory_total_bytes for host in hosts if host.memory_total_bytes), None)
        grew = max(used) - used[0] if used else 0
        return (total - used[0]) / grew if total is not None and grew > 0 else math.inf

    @cached_property
    def cores(self) -> float | None:
        """Cores this rank may use."""
        if self.facts.cores_allowed:
            return self.facts.cores_allowed
        return float(self.cores_of_machine) if self.cores_of_machine else None

    @cached_property
    def cores_of_machine(self) -> int | None:
        """Cores there are, whoever may use them."""
        return max((len(s.host.cores_pct) for s in self.samples if s.host.cores_pct), default=None)

    @cached_property
    def cpu_share(self) -> float | None:
        """How busy the cores were that this run may use: all of the machine's, or else by its own processes."""
        machine, own = self.cores_of_machine, self.own_cpu_share
        if own is not None and machine and (self.cores or 0.0) * self._ranks_here < 0.9 * machine:
            return own
        mean = Sketch.of(s.host.cpu_pct for s in self.samples).mean
        return mean / 100 if mean is not None else None

    @cached_property
    def own_cpu_share(self) -> float | None:
        """How busy this run itself kept them, whatever others did; None where that was not seen."""
        ours = Sketch.of(self._cores_ours(s) for s in self.samples).mean
        if ours is None and self.workers and self.worker_busy and not self.elastic:  # by what they said themselves
            ours = self.workers * self.worker_busy * (self.worker_on_core or 1.0) * self._ranks_here
        return min(1.0, ours / (self.cores * self._ranks_here)) if ours is not None and self.cores else None

    @cached_property
    def cores_others(self) -> float | None:
        """How many cores were kept busy by what is none of this run's."""
        machine = self.cores_of_machine or 0
        seen = ((s.host.cpu_pct, self._cores_ours(s)) for s in self.samples)
        mean = Sketch.of(pct / 100 * machine - ours for pct, ours in seen if pct is not None and ours is not None).mean
        return max(0.0, mean) if mean is not None else None

    @property
    def _ranks_here(self) -> int:
        return sum(rank.info.host == self.rank.info.host for rank in self.trace.ranks)

    def _cores_ours(self, sample: Sample) -> float | None:
        """How many cores this run kept busy; None of a sample that did not see all its workers: they are found late."""
        known = [p for p in sample.processes if p.cpu_pct is not None]
        workers = sum(p.role == "worker" for p in known)
        if not known or workers < self.workers * self._ranks_here:
            return None
        return sum(p.cpu_pct or 0.0 for p in known) / 100

    @cached_property
    def trainer_delay(self) -> float | None:
        """The share of time in which the training process was ready to run but had no core."""
        taken = (p for s in self.samples for p in s.processes if p.pid == self.rank.info.pid)
        mean = Sketch.of(p.run_delay_pct for p in taken).mean
        return min(1.0, mean / 100) if mean is not None else None

    @cached_property
    def storage_share(self) -> float:
        """The share of time in which tasks stood still for storage: the larger of PSI and iowait."""
        pressure = Sketch.of(s.host.pressure_io_pct for s in self.samples).mean or 0.0
        iowait = Sketch.of(s.host.iowait_pct for s in self.samples).mean or 0.0
        return max(pressure, iowait) / 100

    @cached_property
    def card_samples(self) -> tuple[GpuSample, ...]:
        """What was seen of this rank's card."""
        return tuple(gpu for s in self.samples for gpu in s.gpus if is_card_of(self.rank, gpu))

    def card(self, field: str) -> Sketch:
        """A figure of it over the training."""
        return Sketch.of(getattr(gpu, field) for gpu in self.card_samples)


def is_card_of(rank: RankTrace, gpu: GpuSample) -> bool:
    """Whether a rank trains on this card. Torch counts only the cards it may see, in an order of its own; so its number
    tells only where nothing better was recorded."""
    uuid = rank.facts.gpu_uuid
    return gpu.uuid.endswith(uuid) if uuid else gpu.index == rank.facts.gpu_index


def cases(trace: Trace) -> tuple[RankMetrics, ...]:
    """A case for every rank."""
    return tuple(RankMetrics(trace, rank) for rank in trace.ranks)
