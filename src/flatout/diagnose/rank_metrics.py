"""RankMetrics: the figures of one rank that the rules reason about, each worked out when it is first asked for.

Shares are of the training time, 0 to 1. What the trace does not tell is None, and a rule that needs it stays silent.

How long a step would take without one of its causes is worked out span by span. The GPU reaches the end of span i when
it has done all work before it and the host has launched the span:

    gpu[i+1] = max(gpu[i] + work[i], host[i+1])

A span in which nothing is launched has no work. Elsewhere it is the GPU's time between the span's two events, less the
gaps between its kernels where an X-ray has measured them. This tells an `.item()` that leaves the GPU without work from
one that waits for useful work.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from flatout.diagnose.breakdown import ENOUGH_LOOKS, OWN_CODE, REST, Breakdown, breakdown, in_training
from flatout.model.records import NO_LOADER, Facts, LoaderFacts
from flatout.trace import GpuSample, ProcessSample, RankTrace, Sample, Sketch, Span, Step, Trace, WorkerReport, Xray

LAUNCHING = ("forward", "loss", "backward", "optimizer", "rest", "copy")  # phases in which kernels are launched
COMPUTING = ("forward", "loss", "backward", "optimizer")  # phases that compute
PAUSES = ("evaluation", "checkpoint", "logging")  # phases that a line of the script asks for
LATE_LAUNCHES = 0.15  # of the time of a phase: beyond this the GPU waits for the host in it
MIN_CEILING = 0.8  # of the run's own speed: a ceiling below this was disturbed by others
MAX_SAVED = 0.99  # a share of the time that can be saved at the most
CPU_FULL = 0.85  # of the cores
NO_CORE = 0.25  # of loading time that a worker is ready and has no core
_OTHERS_CORES = 0.4  # of all cores, that others keep busy
_MOST_STEPS = 200  # with events, that are replayed
_ROUNDS, _STEADY = 24, 12  # a step is replayed so often, and counts the last times
_NO_WAIT = 0.01  # of the time: training that waits less for data has all the data it wants


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
        """The mean step, without what measuring it took. Waits that come in bursts are in it."""
        if not self.breakdown.steps:
            return 0.0
        return self.breakdown.training_ms * (1 - self.share("flatout")) / self.breakdown.steps

    @property
    def facts(self) -> Facts:
        return self.rank.facts

    @property
    def xray(self) -> Xray | None:
        return self.rank.xray

    @property
    def on_gpu(self) -> bool:
        return self.facts.on_gpu

    # The loader and its workers

    @cached_property
    def loader(self) -> LoaderFacts:
        """The settings of the loader training reads from."""
        return self.facts.training_loader

    @property
    def steps_an_epoch(self) -> float | None:
        """Optimizer steps from one pass over the data to the next."""
        loader, batches = self.loader, float(self.loader.batches or 0)
        if not batches and loader.length and loader.batch_size:
            batches = loader.length / loader.batch_size / max(1, self.rank.info.world_size)
        return batches / self._batches_a_step or None

    @property
    def _batches_a_step(self) -> float:
        """More than 1 where gradients are accumulated, less where several optimizers step for each batch.

        Backward passes count accumulation, but there may be several for one batch: the samples of a step tell.
        """
        backward = statistics.median([step.micro_steps for step in self.steps] or [1]) or 1
        batch, seen = self.loader.batch_size, self.breakdown
        taken = backward
        if batch and seen.samples and seen.steps:
            taken = seen.samples / seen.steps / batch
        if taken > 1.5:  # a batch from each of several loaders counts as one batch
            taken /= self.facts.loaders_side_by_side or 1
        if taken < 0.6:
            return 1 / round(1 / taken)
        return min(backward, round(taken))

    @property
    def workers(self) -> int:
        """How many workers the loader has."""
        return self.loader.num_workers or 0

    @cached_property
    def elastic(self) -> bool:
        """Whether flatout's loader is in place, which finds the number of workers itself."""
        applied = any(change.name == "loader" and change.applied for change in self.facts.changes)
        return applied or bool(self.loader.elastic)

    @cached_property
    def reports(self) -> tuple[WorkerReport, ...]:
        """The last report of each worker of that loader; of the training process with num_workers=0."""
        if self.loader is NO_LOADER:
            return ()
        name, length = self.loader.class_name, self.loader.length
        return tuple(r for r in self.rank.workers if r.dataset == name and r.length == length and r.samples)

    @cached_property
    def sample_ms(self) -> Sketch:
        """How long a sample takes to load."""
        return Sketch.merged(report.sample_ms for report in self.reports)

    @cached_property
    def transforms_ms(self) -> dict[str, float]:
        """How long each transform takes of a sample."""
        samples, spent = self._total("samples"), dict.fromkeys((n for r in self.reports for n in r.transforms_s), 0.0)
        for report in self.reports:
            for name, seconds in report.transforms_s.items():
                spent[name] += seconds * 1e3 / samples
        return spent

    @cached_property
    def slowest_samples(self) -> list[tuple[float, int]]:
        """Milliseconds and index of the slowest samples."""
        slowest = ((ms, int(index)) for report in self.reports for ms, index in report.slowest)
        return sorted(slowest, reverse=True)[:5]

    def _total(self, figure: str) -> float:
        """A figure of the workers' reports, added up."""
        return sum(getattr(report, figure) or 0.0 for report in self.reports)

    @property
    def worked_s(self) -> float:
        """How long all workers were at work: loading samples and joining them."""
        return self._total("sample_wall_s") + self._total("collate_s")

    @cached_property
    def worker_busy(self) -> float | None:
        """The share of their time the workers were at work, not waiting for something to do."""
        return _share(self.worked_s, self.worked_s + self._total("waiting_s"))

    @cached_property
    def worker_on_core(self) -> float | None:
        """The share of loading time that was spent on a core."""
        return _share(self._total("sample_cpu_s"), self._total("sample_wall_s"))

    @cached_property
    def worker_delay(self) -> float | None:
        """How long workers were ready to run but had no core, as a share of the time that they worked."""
        if all(report.run_delay_s is None for report in self.reports):
            return None
        return _share(self._total("run_delay_s"), self.worked_s)

    @cached_property
    def collate_share(self) -> float | None:
        """The share of the workers' work that is joining samples."""
        return _share(self._total("collate_s"), self.worked_s)

    @cached_property
    def samples_a_worker_s(self) -> float | None:
        """Samples a second that one worker can make."""
        seen, made = self.breakdown, self._total("samples")
        if self.loader.batch_size is None and not self.loader.iterable and seen.samples and seen.steps:
            made *= max(1.0, seen.samples / seen.steps / self._batches_a_step)  # the dataset hands out whole batches
        return made / self.worked_s if self.worked_s else None

    @cached_property
    def supply(self) -> float:
        """How many times as fast as now the workers could deliver; infinite where that is not known."""
        rate, now = self.samples_a_worker_s, self.breakdown.samples_per_s
        workers = min(self.workers, self.cores or math.inf)
        if not rate or not now or not workers or self.elastic:
            return math.inf
        by_rate = rate * workers / now
        if self.worker_busy and self.share("data") < _NO_WAIT:
            return max(1 / self.worker_busy, by_rate)
        return max(1.0, by_rate)

    @cached_property
    def worker_samples(self) -> tuple[ProcessSample, ...]:
        """The workers as seen from outside."""
        return tuple(p for sample in self.samples for p in sample.processes if p.role == "worker")

    @cached_property
    def start_share(self) -> float:
        """The share of time that starting workers takes: the start, and the wait for a first batch beyond what a
        worker takes to make one. Raw steps tell how long such a wait is beside a start."""
        started, rate, batch = self.share("loader start"), self.samples_a_worker_s, self.loader.batch_size
        if not rate or not batch or self.loader.persistent_workers or not self.workers:
            return started
        starts_ms = beyond_ms = 0.0
        for step in self.steps:
            start_ms = host_ms_in(step, "loader start")
            if start_ms:
                starts_ms += start_ms
                beyond_ms += max(0.0, host_ms_in(step, "data") - batch / rate * 1e3)
        if not starts_ms:
            return started
        return started + min(self.share("data"), started * beyond_ms / starts_ms)

    # Time

    def share(self, *phases: str) -> float:
        """The share of training time the host spends in these phases."""
        return sum(map(self.breakdown.share_of, phases))

    @cached_property
    def steps_with_events(self) -> tuple[Step, ...]:
        """Steps in which CUDA events timed the GPU."""
        timed = (step for step in self.steps if any(map(_has_event, step.spans)))
        return tuple(timed)[-_MOST_STEPS:]

    def saved_without(self, phase: str) -> float | None:
        """The share of training time that would be saved if the host spent none in a phase.

        Steps with events say how much of such time is saved when it is gone; all steps say how much of it there is.
        Waits come in bursts: a median step may have none of them.
        """
        share = min(MAX_SAVED, self.share(phase))
        if not self.on_gpu:
            return share
        if not self.steps_with_events:
            return None
        spent_ms = saved_ms = 0.0
        for step in self.steps_with_events:
            saved = saved_in_step(step, phase, self._gpu_busy_in_phase)
            if saved is not None:
                spent_ms += host_ms_in(step, phase)
                saved_ms += saved * step.wall_ms
        if spent_ms:
            return min(MAX_SAVED, share * saved_ms / spent_ms)
        # None in the steps looked at: a wait for data leaves the GPU idle, one for the GPU need not.
        return share if phase == "data" else 0.0

    @cached_property
    def _gpu_busy_in_phase(self) -> dict[str, float]:
        """The share of a phase's GPU time with kernels, by the X-ray: events do not see the gaps between them."""
        if self.xray is None:
            return {}
        busy_ms = self.xray.busy_by_phase_ms
        return {
            phase: busy_ms.get(phase, 0.0) / (busy_ms.get(phase, 0.0) + idle_ms)
            for phase, idle_ms in self.xray.idle_by_phase_ms.items()
            if idle_ms
        }

    @cached_property
    def busy_share(self) -> float | None:
        """The share of the time in which the GPU has work: the X-ray's kernels over the mean step."""
        xray = self.xray
        if xray is None or not xray.steps or not self.mean_ms:
            return None
        return min(1.0, xray.busy_ms / xray.steps / self.mean_ms)

    @cached_property
    def saved_for_sure(self) -> float:
        """How much of the GPU time saved surely shortens the step: less where the GPU waits for launches."""
        xray = self.xray
        if xray is None or not xray.busy_ms:
            return 1.0
        return xray.busy_ms / (xray.busy_ms + _idle_ms(xray, LAUNCHING))

    @cached_property
    def saved_at_most(self) -> float:
        """How much of the GPU time saved may shorten the step.

        Where the GPU waits for launches, kernels that end sooner only wait longer for the next one.
        """
        xray = self.xray
        if xray is None or not xray.busy_by_phase_ms:
            return 1.0
        late_ms = 0.0
        for phase, busy_ms in xray.busy_by_phase_ms.items():
            idle_ms = xray.idle_by_phase_ms.get(phase, 0.0)
            if idle_ms > LATE_LAUNCHES * (busy_ms + idle_ms):
                late_ms += busy_ms
        return 1 - late_ms / (sum(xray.busy_by_phase_ms.values()) or 1.0)

    def waits_for_launches(self, *phases: str) -> float:
        """The share of the step in which the GPU waits for what the host launches, in these phases or in all."""
        xray = self.xray
        if xray is None or not xray.steps or not self.mean_ms:
            return 0.0
        # An X-ray slows the host down. It may be of an earlier run, which waited more or less for data.
        step_in_xray_ms = (xray.wall_ms - xray.idle_by_phase_ms.get("data", 0.0)) / xray.steps
        step_ms = max(self.mean_ms, step_in_xray_ms + self.share("data") * self.mean_ms)
        return min(MAX_SAVED, _idle_ms(xray, phases or LAUNCHING) / xray.steps / step_ms)

    @cached_property
    def ceiling(self) -> float | None:
        """How many times as fast the step was as its batches were replayed; None where others had the cores then."""
        seen = self.breakdown
        # Batches that are on the GPU already cannot be slower than others: the slower was disturbed more.
        most = max(seen.ceiling_samples_per_s or 0.0, seen.replay_samples_per_s or 0.0)
        if not most or not seen.samples_per_s or most / seen.samples_per_s <= MIN_CEILING:
            return None
        return max(1.0, most / seen.samples_per_s)

    @cached_property
    def headroom(self) -> float:
        """How many times faster the step could be at most: by the measured ceiling, or else by the X-ray."""
        if self.ceiling is not None:
            return self.ceiling
        return 1 / self.busy_share if self.busy_share else math.inf

    @cached_property
    def computing(self) -> float:
        """The share of the time that goes into forward and backward, and that is work of the GPU's."""
        share = self.share("forward", "loss", "backward")
        return share if self.busy_share is None else min(share, self.busy_share)

    @cached_property
    def own_code_inside(self) -> dict[str, float]:
        """The share of the time that the script's own code takes within each phase that computes: a metric in numpy
        between forward and backward, a loop over elements in a model, a training step that the optimizer calls."""
        return {phase: self.share(phase) * self._own_code_of(phase) for phase in COMPUTING}

    def _own_code_of(self, phase: str) -> float:
        """The part of a phase's time in which no tensor operation runs."""
        lines = (line for function in in_training(self.rank, (phase,)) for line in function.lines)
        return sum(line.share for line in lines if line.outside_torch)

    @cached_property
    def beside_pauses(self) -> dict[str, dict[str, float]]:
        """Of each kind of pause, what the script's own code takes for it, by line: what else is done on a line that
        mostly saves or logs, such as putting the picture together. As a share of the time."""
        own = self._by_line(REST, OWN_CODE)
        pauses = {phase: self._by_line(phase, (phase,)) for phase in PAUSES}
        return {
            phase: {where: share for where, share in own.items() if share <= lines.get(where, 0.0)}
            for phase, lines in pauses.items()
        }

    def _by_line(self, phase: str, seen_as: Collection[str]) -> dict[str, float]:
        """The share of the time of each line in a phase, whatever it called."""
        shares: dict[str, float] = {}
        for function in in_training(self.rank, seen_as):
            for line in function.lines:
                shares[line.where] = shares.get(line.where, 0.0) + self.share(phase) * line.share
        return shares

    def passed(self, through: str) -> float:
        """The share of forward passes in which the stack was seen to pass through something, as stacks name it."""
        seen = [stacks for stacks in self.rank.stacks if stacks.dataset is None]
        forward = [one for stacks in seen for one in stacks.stacks if one.phase == "forward"]
        seconds = sum(one.seconds for one in forward)
        if sum(one.looks for one in forward) < ENOUGH_LOOKS or not seconds:
            return 0.0
        return min(1.0, sum(stacks.passed_s.get(through, 0.0) for stacks in seen) / seconds)

    # The machine

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Hardware samples most of whose time was training, and not the X-ray."""
        taken = self.trace.samples.get(self.rank.info.host, ())
        if not self.steps:
            return taken
        last = self.steps[-1]
        end_s = last.start_s + last.wall_ms / 1e3
        for window in self.rank.windows[-1:]:
            end_s = max(end_s, window.start_s + window.wall_ms.total / 1e3)
        looked_into = [step for step in self.rank.steps if step.kind in ("xray", "after xray")]
        xrayed = [(step.start_s, step.start_s + step.wall_ms / 1e3) for step in looked_into]
        training = []
        for sample in taken:
            middle_s = sample.time_s - sample.interval_s / 2
            in_xray = any(start_s < middle_s <= over_s for start_s, over_s in xrayed)
            if self.steps[0].start_s < middle_s <= end_s and not in_xray:
                training.append(sample)
        return tuple(training)

    @cached_property
    def fits_in_memory(self) -> float:
        """How many runs like this one the host's memory had room for when it began, by what came into use since."""
        hosts = [sample.host for sample in self.trace.samples.get(self.rank.info.host, ())]
        used = [host.memory_used_bytes for host in hosts if host.memory_used_bytes is not None]
        total = next((host.memory_total_bytes for host in hosts if host.memory_total_bytes), None)
        if not used or total is None or max(used) <= used[0]:
            return math.inf
        return (total - used[0]) / (max(used) - used[0])

    @cached_property
    def cores(self) -> float | None:
        """Cores this rank may use."""
        return self.facts.cores_allowed or self.cores_of_machine

    @cached_property
    def spare_cores(self) -> int:
        """Cores left for loading beside training itself and the system."""
        cores = self.cores or 1.0
        return max(1, int(cores - 1 - cores / 16))

    @cached_property
    def cores_of_machine(self) -> int | None:
        """Cores there are; with an affinity mask, those in it: what others do on the rest takes nothing away."""
        there = max((len(s.host.cores_pct) for s in self.samples if s.host.cores_pct), default=None)
        if there is None or not self._core_numbers:
            return there
        return len(self._core_numbers)

    @cached_property
    def _core_numbers(self) -> set[int]:
        """The cores that some rank of this machine may use; empty where all of them are."""
        of_ranks = [rank.facts.core_numbers for rank in self.trace.ranks if rank.info.host == self.rank.info.host]
        return set().union(*of_ranks) if all(of_ranks) else set()

    def _cpu_pct(self, sample: Sample) -> float | None:
        """How busy the cores were that this run may use."""
        of_mask = [pct for number, pct in enumerate(sample.host.cores_pct or ()) if number in self._core_numbers]
        return statistics.fmean(of_mask) if of_mask else sample.host.cpu_pct

    @cached_property
    def cpu_share(self) -> float | None:
        """How busy the cores were that this run may use: all of the machine's, or else by its own processes."""
        may_use = (self.cores or 0.0) * self._ranks_of_host
        if self.own_cpu_share is not None and self.cores_of_machine and may_use < 0.9 * self.cores_of_machine:
            return self.own_cpu_share
        return _percent(self._cpu_pct(sample) for sample in self.samples)

    @cached_property
    def own_cores(self) -> float | None:
        """How many cores this run itself kept busy: as seen from outside, else as its workers report it."""
        seen = Sketch.of(self._own_cores(sample) for sample in self.samples).mean
        if seen is not None or not self.workers or not self.worker_busy or self.elastic:
            return seen
        trainer_pct = Sketch.of(self._of_trainer("cpu_pct", self.samples)).mean or 0.0
        loading = self.workers * self.worker_busy * (self.worker_on_core or 1.0)
        return (loading + trainer_pct / 100) * self._ranks_of_host

    @cached_property
    def own_cpu_share(self) -> float | None:
        """How busy this run itself kept the cores it may use, whatever others did."""
        if self.own_cores is None or not self.cores:
            return None
        return min(1.0, self.own_cores / (self.cores * self._ranks_of_host))

    @cached_property
    def cores_others(self) -> float | None:
        """How many cores other processes kept busy."""
        busy = _percent(self._cpu_pct(sample) for sample in self.samples)
        if busy is None or self.own_cores is None or self.cores_of_machine is None:
            return None
        return max(0.0, busy * self.cores_of_machine - self.own_cores)

    @cached_property
    def workers_lack_cores(self) -> bool:
        """Whether workers wait for cores that processes of others keep busy."""
        cores = self.cores_of_machine or math.inf
        waits = self.workers > 0 and (self.worker_delay or 0.0) >= NO_CORE
        return waits and (self.cpu_share or 0.0) >= CPU_FULL and (self.cores_others or 0.0) >= _OTHERS_CORES * cores

    @property
    def _ranks_of_host(self) -> int:
        return sum(rank.info.host == self.rank.info.host for rank in self.trace.ranks)

    def _own_cores(self, sample: Sample) -> float | None:
        """How many cores this run kept busy; None of a sample without all its workers, which are found late."""
        known = [process for process in sample.processes if process.cpu_pct is not None]
        workers = sum(process.role == "worker" for process in known)
        if not known or workers < self.workers * self._ranks_of_host:
            return None
        return sum(process.cpu_pct or 0.0 for process in known) / 100

    def _of_trainer(self, figure: str, samples: Iterable[Sample]) -> list[float | None]:
        """A figure of the training process over these samples."""
        pid = self.rank.info.pid
        return [getattr(p, figure) for sample in samples for p in sample.processes if p.pid == pid]

    @cached_property
    def trainer_delay(self) -> float | None:
        """The share of time in which the training process was ready to run but had no core.

        Only samples that are training from end to end count: its imports wait for cores too.
        """
        begin_s = self.steps[0].start_s if self.steps else 0.0
        whole = [sample for sample in self.samples if sample.time_s - sample.interval_s >= begin_s]
        share = _percent(self._of_trainer("run_delay_pct", whole))
        return min(1.0, share) if share is not None else None

    @cached_property
    def held_up_by_workers(self) -> float:
        """The share of time in which the training process has no core because its own workers have them all."""
        if not self.workers or not self.trainer_delay or self.own_cores is None:
            return 0.0
        trainer_pct = Sketch.of(self._of_trainer("cpu_pct", self.samples)).mean or 0.0
        loading = max(0.0, self.own_cores - trainer_pct / 100)
        return self.trainer_delay * (_share(loading, loading + (self.cores_others or 0.0)) or 0.0)

    @cached_property
    def storage_share(self) -> float:
        """The share of time in which processes waited for storage: the larger of PSI and iowait."""
        pressure = _percent(sample.host.pressure_io_pct for sample in self.samples)
        iowait = _percent(sample.host.iowait_pct for sample in self.samples)
        return max(pressure or 0.0, iowait or 0.0)

    @cached_property
    def gpu_samples(self) -> tuple[GpuSample, ...]:
        """This rank's GPU."""
        return tuple(gpu for sample in self.samples for gpu in sample.gpus if is_gpu_of(self.rank, gpu))

    def gpu(self, reading: str) -> Sketch:
        """A reading of it over the training."""
        return Sketch.of(getattr(sample, reading) for sample in self.gpu_samples)


def is_gpu_of(rank: RankTrace, gpu: GpuSample) -> bool:
    """Whether a rank trains on this GPU. PyTorch numbers the GPUs it may see in its own order, so the number tells only
    where no UUID was recorded."""
    uuid = rank.facts.gpu_uuid
    return gpu.uuid.endswith(uuid) if uuid else gpu.index == rank.facts.gpu_index


def metrics_of(trace: Trace) -> tuple[RankMetrics, ...]:
    """The metrics of every rank."""
    return tuple(RankMetrics(trace, rank) for rank in trace.ranks)


def host_ms_in(step: Step, phase: str) -> float:
    """How long the host was in a phase of a step."""
    return sum(span.host_ms for span in step.spans if span.name == phase)


def replayed_ms(
    step: Step, host_ms: Callable[[Span], float] = lambda span: span.host_ms, at_work: Mapping[str, float] | None = None
) -> float | None:
    """The long-run length of a step when each span takes the host `host_ms(span)`; None for a step without events.

    `at_work` is the share of its time in a phase that the GPU works; all of it in one that is not named.
    """
    if not any(map(_has_event, step.spans)):
        return None
    track = []  # of each span: how long it holds the host, whether that is by waiting for the GPU, the GPU's work
    for span in step.spans:
        takes_ms = host_ms(span)
        waits_for_gpu = span.name == "sync" and takes_ms >= span.host_ms
        if waits_for_gpu:
            takes_ms = span.gpu_idle_ms or 0.0
        elif span.name == "held":  # which only keeps the host from running far ahead
            takes_ms = 0.0
        track.append((takes_ms, waits_for_gpu, (span.gpu_busy_ms or 0.0) * (at_work or {}).get(span.name, 1.0)))
    host = gpu = 0.0
    ends = []
    for _ in range(_ROUNDS):
        for takes_ms, waits_for_gpu, work_ms in track:
            if waits_for_gpu:  # the host goes on only when the GPU has come here
                host = max(host, gpu)
            host += takes_ms
            gpu = max(gpu + work_ms, host)
        ends.append(gpu)
    return (ends[-1] - ends[-1 - _STEADY]) / _STEADY


def saved_in_step(step: Step, phase: str, at_work: Mapping[str, float] | None = None) -> float | None:
    """The share of a step's time that would be saved if a phase took the host no time: 0 to 1, an estimate."""
    now = replayed_ms(step, at_work=at_work)
    then = replayed_ms(step, lambda span: 0.0 if span.name == phase else span.host_ms, at_work)
    return max(0.0, 1 - then / now) if now and then is not None else None


def _has_event(span: Span) -> bool:
    return span.gpu_idle_ms is not None or span.gpu_busy_ms is not None


def _idle_ms(xray: Xray, phases: Iterable[str]) -> float:
    return sum(xray.idle_by_phase_ms.get(phase, 0.0) for phase in phases)


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None


def _percent(values: Iterable[float | None]) -> float | None:
    """The mean of percentages, as a share."""
    mean = Sketch.of(values).mean
    return mean / 100 if mean is not None else None
