"""What was seen beside the steps: what the workers of the loader did, as they report it (LoaderWork);
and the machine's cores, memory and GPU, as the hardware sampler saw them during plain training
(Machine).

Shares are 0 to 1. What was not measured is None. Whose the cores are matters most: those of this run
(all its ranks here, with their workers) or those of others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flatout.trace import GpuSample, RankTrace, Sample, Sketch, Step, Trace, WorkerReport

_MOST_SLOW_SAMPLES = 5
_ALL_CORES = 0.9  # of the machine's: a run that may use less of them is counted by its own processes


@dataclass(frozen=True)
class LoaderWork:
    """What the workers did, all together: the last report of each; with `num_workers=0` of the
    training process."""

    reports: tuple[WorkerReport, ...]

    def total(self, figure: str) -> float:
        """A figure of their reports, added up."""
        return sum(getattr(report, figure) or 0.0 for report in self.reports)

    @cached_property
    def sample_ms(self) -> Sketch:
        """How long a sample takes to load."""
        return Sketch.merged(report.sample_ms for report in self.reports)

    @cached_property
    def transforms_ms(self) -> dict[str, float]:
        """How long each transform takes of a sample."""
        samples = self.total("samples")
        spent_ms: dict[str, float] = {}
        for report in self.reports:
            for name, seconds in report.transforms_s.items():
                spent_ms[name] = spent_ms.get(name, 0.0) + seconds * 1e3 / samples
        return spent_ms

    @property
    def slowest(self) -> list[tuple[float, int]]:
        """Milliseconds and index of the slowest samples."""
        samples = ((ms, int(index)) for report in self.reports for ms, index in report.slowest)
        return sorted(samples, reverse=True)[:_MOST_SLOW_SAMPLES]

    @cached_property
    def worked_s(self) -> float:
        """How long they loaded samples and joined them."""
        return self.total("sample_wall_s") + self.total("collate_s")

    @property
    def busy(self) -> float | None:
        """The share of their time in which they did not wait for something to do."""
        return share_of(self.worked_s, self.worked_s + self.total("waiting_s"))

    @property
    def on_core(self) -> float | None:
        """The share of loading time that was spent on a core."""
        return share_of(self.total("sample_cpu_s"), self.total("sample_wall_s"))

    @property
    def delay(self) -> float | None:
        """How long they were ready to run but had no core, as a share of the time that they worked."""
        if all(report.run_delay_s is None for report in self.reports):
            return None
        return share_of(self.total("run_delay_s"), self.worked_s)

    @property
    def collating(self) -> float | None:
        """The share of their work that is joining samples."""
        return share_of(self.total("collate_s"), self.worked_s)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of one rank."""

    trace: Trace
    rank: RankTrace
    steps: tuple[Step, ...]  # of plain training
    workers: int
    loading_cores: float | None  # that the workers kept busy, as they report it

    @property
    def _all_samples(self) -> tuple[Sample, ...]:
        return self.trace.samples.get(self.rank.info.host, ())

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Hardware samples most of whose time was training, and not the X-ray."""
        if not self.steps:
            return self._all_samples
        end_s = _end_s(self.steps[-1])
        for window in self.rank.windows[-1:]:
            end_s = max(end_s, window.start_s + window.wall_ms.total / 1e3)
        xrayed = [step for step in self.rank.steps if step.kind in ("xray", "after xray")]
        training = []
        for sample in self._all_samples:
            middle_s = sample.time_s - sample.interval_s / 2
            in_xray = any(step.start_s < middle_s <= _end_s(step) for step in xrayed)
            if self.steps[0].start_s < middle_s <= end_s and not in_xray:
                training.append(sample)
        return tuple(training)

    # Memory and storage

    @property
    def fits_in_memory(self) -> float:
        """How many runs like this one its memory had room for when it began, by what came into use since."""
        hosts = [sample.host for sample in self._all_samples]
        used = [host.memory_used_bytes for host in hosts if host.memory_used_bytes is not None]
        total = next((host.memory_total_bytes for host in hosts if host.memory_total_bytes), None)
        if not used or total is None or max(used) <= used[0]:
            return math.inf
        return (total - used[0]) / (max(used) - used[0])

    @property
    def memory_share(self) -> float | None:
        """The most of its memory that was in use."""
        shares = []
        for sample in self.samples:
            used, total = sample.host.memory_used_bytes, sample.host.memory_total_bytes
            if used and total:
                shares.append(used / total)
        return max(shares, default=None)

    @cached_property
    def storage_share(self) -> float:
        """The share of time in which processes waited for storage: the larger of PSI and iowait."""
        pressure = _percent(sample.host.pressure_io_pct for sample in self.samples)
        iowait = _percent(sample.host.iowait_pct for sample in self.samples)
        return max(pressure or 0.0, iowait or 0.0)

    # Cores: how many there are

    @cached_property
    def cores(self) -> float | None:
        """Cores this rank may use."""
        return self.rank.facts.cores_allowed or self.cores_of_machine

    @property
    def spare_cores(self) -> int:
        """Cores left for loading beside training itself and the system."""
        cores = self.cores or 1.0
        return max(1, int(cores - 1 - cores / 16))

    @cached_property
    def cores_of_machine(self) -> int | None:
        """Cores there are; with an affinity mask, those in it: what others do on the rest takes
        nothing away."""
        counts = [len(sample.host.cores_pct) for sample in self.samples if sample.host.cores_pct]
        if counts and self._core_numbers:
            return len(self._core_numbers)
        return max(counts, default=None)

    @cached_property
    def _core_numbers(self) -> set[int]:
        """The cores that some rank of this machine may use; empty where all of them are."""
        of_ranks = [rank.facts.core_numbers for rank in self._ranks]
        return set().union(*of_ranks) if all(of_ranks) else set()

    @cached_property
    def _ranks(self) -> list[RankTrace]:
        return [rank for rank in self.trace.ranks if rank.info.host == self.rank.info.host]

    @property
    def _cores_of_run(self) -> float:
        """Cores that all ranks of this machine may use."""
        return (self.cores or 0.0) * len(self._ranks)

    # Cores: who keeps them busy

    @cached_property
    def _allowed_cores_busy(self) -> float | None:
        """How busy the cores were that this run may use, with whatever."""
        busy_pct = []
        for sample in self.samples:
            cores_pct = enumerate(sample.host.cores_pct or ())
            allowed = [pct for number, pct in cores_pct if number in self._core_numbers]
            busy_pct.append(statistics.fmean(allowed) if allowed else sample.host.cpu_pct)
        return _percent(busy_pct)

    @cached_property
    def cpu_share(self) -> float | None:
        """How busy the cores were that this run may use: all of the machine's, or else by its own
        processes."""
        own, there = self.own_cpu_share, self.cores_of_machine
        if own is not None and there and self._cores_of_run < _ALL_CORES * there:
            return own
        # Of a short training there are few samples, and not the same ones show both.
        return max((share for share in (own, self._allowed_cores_busy) if share is not None), default=None)

    @cached_property
    def own_cores(self) -> float | None:
        """How many cores this run itself kept busy: as seen from outside, else as its workers report it."""
        seen = Sketch.of(map(self._own_cores_in, self.samples)).mean
        if seen is not None or self.loading_cores is None:
            return seen
        return (self.loading_cores + self._trainer_cores) * len(self._ranks)

    def _own_cores_in(self, sample: Sample) -> float | None:
        """How many cores this run kept busy; None of a sample without all its workers, which are
        found late."""
        known = [process for process in sample.processes if process.cpu_pct is not None]
        workers = sum(process.role == "worker" for process in known)
        if not known or workers < self.workers * len(self._ranks):
            return None
        return sum(process.cpu_pct or 0.0 for process in known) / 100

    @cached_property
    def own_cpu_share(self) -> float | None:
        """How busy this run itself kept the cores it may use, whatever others did."""
        return share_of(self.own_cores, self._cores_of_run) if self.own_cores is not None else None

    @cached_property
    def cores_others(self) -> float | None:
        """How many cores other processes kept busy."""
        busy = self._allowed_cores_busy
        if busy is None or self.own_cores is None or self.cores_of_machine is None:
            return None
        return max(0.0, busy * self.cores_of_machine - self.own_cores)

    # The training process

    def of_trainer(self, figure: str, samples: Iterable[Sample]) -> list[float | None]:
        """A figure of the training process in each of these samples."""
        pid = self.rank.info.pid
        processes = (process for sample in samples for process in sample.processes if process.pid == pid)
        return [getattr(process, figure) for process in processes]

    @property
    def _trainer_cores(self) -> float:
        return _percent(self.of_trainer("cpu_pct", self.samples)) or 0.0

    @cached_property
    def trainer_delay(self) -> float | None:
        """The share of time in which the training process was ready to run but had no core.

        Only samples that are training from end to end count: its imports wait for cores too.
        """
        begin_s = self.steps[0].start_s if self.steps else 0.0
        whole = [sample for sample in self.samples if sample.time_s - sample.interval_s >= begin_s]
        share = _percent(self.of_trainer("run_delay_pct", whole))
        return min(1.0, share) if share is not None else None

    @cached_property
    def held_up_by_workers(self) -> float:
        """The share of time in which training has no core because its own workers have them all; on a
        GPU it is not counted."""
        if self.rank.facts.on_gpu or not self.workers or not self.trainer_delay or self.own_cores is None:
            return 0.0
        loading = max(0.0, self.own_cores - self._trainer_cores)
        return self.trainer_delay * (share_of(loading, loading + (self.cores_others or 0.0)) or 0.0)

    # The GPU

    @cached_property
    def gpu_samples(self) -> tuple[GpuSample, ...]:
        """This rank's GPU over the training."""
        return tuple(gpu for sample in self.samples for gpu in sample.gpus if is_gpu_of(self.rank, gpu))

    def gpu(self, reading: str) -> Sketch:
        """A reading of it."""
        return Sketch.of(getattr(sample, reading) for sample in self.gpu_samples)


def share_of(part: float, whole: float) -> float | None:
    """A part as a share, at most all of it; None of nothing."""
    return min(1.0, part / whole) if whole else None


def is_gpu_of(rank: RankTrace, gpu: GpuSample) -> bool:
    """Whether a rank trains on this GPU. PyTorch numbers the GPUs it may see in its own order, so the
    number tells only where no UUID was recorded."""
    uuid = rank.facts.gpu_uuid
    return gpu.uuid.endswith(uuid) if uuid else gpu.index == rank.facts.gpu_index


def _end_s(step: Step) -> float:
    return step.start_s + step.wall_ms / 1e3


def _percent(values: Iterable[float | None]) -> float | None:
    """The mean of percentages, as a share."""
    mean = Sketch.of(values).mean
    return mean / 100 if mean is not None else None
