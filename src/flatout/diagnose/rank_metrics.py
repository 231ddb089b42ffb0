"""RankMetrics: the figures of one rank that the rules reason about, each worked out when it is first
asked for.

Its time lies in `breakdown`, what its loader's workers did in `work`, and what the hardware did in `machine`.

Shares are of the training time, 0 to 1. What the trace does not tell is None, and a rule that needs
it says nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from flatout.diagnose.breakdown import (
    COMPUTING,
    ENOUGH_LOOKS,
    OWN_CODE,
    REST,
    Breakdown,
    breakdown,
    in_training,
    lines_of,
    training_stacks,
)
from flatout.diagnose.machine import LoaderWork, Machine, share_of
from flatout.model.records import NO_LOADER, Facts, LoaderFacts
from flatout.trace import RankTrace, Step, Trace, Xray

LAUNCHING = (*COMPUTING, REST, "copy")  # phases in which kernels are launched
PAUSES = ("evaluation", "checkpoint", "logging")  # phases that a line of the script asks for
LATE_LAUNCHES = 0.15  # of the time of a phase: beyond this the GPU waits for the host in it
MIN_CEILING = 0.8  # of the run's own speed: a ceiling below this was disturbed by others
MIN_SHARE = 0.03  # of the time: a cause that takes less is not reported
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
        """The mean step, waits that come in bursts included, without what measuring it took."""
        if not self.breakdown.steps:
            return 0.0
        return self.breakdown.training_ms * (1 - self.share("flatout")) / self.breakdown.steps

    @property
    def facts(self) -> Facts:
        return self.rank.facts

    @cached_property
    def xray(self) -> Xray | None:
        """The X-ray, if it saw kernels, and if there was training to compare it with."""
        seen = self.rank.xray
        if seen is None or not (seen.steps and seen.wall_ms and seen.busy_ms and self.mean_ms):
            return None
        return seen

    @property
    def on_gpu(self) -> bool:
        return self.facts.on_gpu

    # The loader and its workers

    @cached_property
    def loader(self) -> LoaderFacts:
        """The settings of the loader that training reads from."""
        return self.facts.training_loader

    @property
    def workers(self) -> int:
        """How many workers it has."""
        return self.loader.num_workers or 0

    @cached_property
    def elastic(self) -> bool:
        """Whether it is flatout's, which finds the number of workers itself."""
        applied = any(change.name == "loader" and change.applied for change in self.facts.changes)
        return applied or bool(self.loader.elastic)

    @cached_property
    def work(self) -> LoaderWork:
        """What those did that have loaded samples."""
        if self.loader is NO_LOADER:
            return LoaderWork(())
        name, length = self.loader.class_name, self.loader.length
        reports = (report for report in self.rank.workers if (report.dataset, report.length) == (name, length))
        return LoaderWork(tuple(report for report in reports if report.samples))

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

        Backward passes count accumulation, but there may be several for one batch: the samples of a
        step tell.
        """
        backward = statistics.median([step.micro_steps for step in self.steps] or [1]) or 1
        taken = backward
        if self.loader.batch_size and self._samples_a_step:
            taken = self._samples_a_step / self.loader.batch_size
        if taken > 1.5:  # a batch from each of several loaders counts as one batch
            taken /= self.facts.loaders_side_by_side or 1
        if taken < 0.6:
            return 1 / round(1 / taken)
        return min(backward, round(taken))

    @property
    def _samples_a_step(self) -> float:
        return (self.breakdown.samples or 0) / max(1, self.breakdown.steps)

    @cached_property
    def samples_a_worker_s(self) -> float | None:
        """Samples a second that one worker can make."""
        made = self.work.total("samples")
        if self.loader.ready_made and not self.loader.iterable and self._samples_a_step:
            made *= max(1.0, self._samples_a_step / self._batches_a_step)  # the dataset hands out whole batches
        return made / self.work.worked_s if self.work.worked_s else None

    @cached_property
    def supply(self) -> float:
        """How many times as fast as now the workers could deliver; infinite where that is not known."""
        rate, now = self.samples_a_worker_s, self.breakdown.samples_per_s
        workers = min(self.workers, self.machine.cores or math.inf)
        if not rate or not now or not workers or self.elastic:
            return math.inf
        least = 1.0
        if self.work.busy and self.share("data") < _NO_WAIT:
            least = 1 / self.work.busy
        return max(least, rate * workers / now)

    @cached_property
    def start_share(self) -> float:
        """The share of time that starting workers takes: the start, and the wait for a first batch
        beyond what a worker takes to make one. Raw steps tell how long such a wait is beside a
        start."""
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

    # The machine

    @cached_property
    def machine(self) -> Machine:
        """The hardware while it trained."""
        loading_cores = None
        if self.workers and self.work.busy and not self.elastic:
            loading_cores = self.workers * self.work.busy * (self.work.on_core or 1.0)
        return Machine(
            trace=self.trace, rank=self.rank, steps=self.steps, workers=self.workers, loading_cores=loading_cores
        )

    @cached_property
    def workers_lack_cores(self) -> bool:
        """Whether workers wait for cores that processes of others keep busy."""
        machine, delay = self.machine, self.work.delay or 0.0
        if not self.workers or delay < NO_CORE or (machine.cpu_share or 0.0) < CPU_FULL:
            return False
        return (machine.cores_others or 0.0) >= _OTHERS_CORES * (machine.cores_of_machine or math.inf)

    # Time

    def share(self, *phases: str) -> float:
        """The share of training time the host spends in these phases."""
        return sum(map(self.breakdown.share_of, phases))

    @cached_property
    def steps_with_events(self) -> tuple[Step, ...]:
        """Steps in which CUDA events timed the GPU."""
        timed = (step for step in self.steps if step.has_events)
        return tuple(timed)[-_MOST_STEPS:]

    def saved_without(self, phase: str) -> float | None:
        """The share of training time that would be saved if the host spent none in a phase.

        Steps with events say how much of such time is saved when it is gone; all steps say how much
        of it there is. Waits come in bursts: a median step may have none of them.
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
    def data_saved(self) -> float:
        """The share of the time that would be saved if batches were there when asked for."""
        return self.saved_without("data") or 0.0

    @cached_property
    def _gpu_busy_in_phase(self) -> dict[str, float]:
        """The share of a phase's GPU time with kernels, by the X-ray: events do not see the gaps
        between them."""
        if self.xray is None:
            return {}
        busy_ms, shares = self.xray.busy_by_phase_ms, {}
        for phase, idle_ms in self.xray.idle_by_phase_ms.items():
            if idle_ms:
                shares[phase] = busy_ms.get(phase, 0.0) / (busy_ms.get(phase, 0.0) + idle_ms)
        return shares

    @cached_property
    def busy_share(self) -> float | None:
        """The share of the time in which the GPU has work: the X-ray's kernels over the mean step."""
        if self.xray is None:
            return None
        return min(1.0, self.xray.busy_ms / self.xray.steps / self.mean_ms)

    @cached_property
    def saved_for_sure(self) -> float:
        """How much of the GPU time saved surely shortens the step: less where the GPU waits for launches."""
        if self.xray is None:
            return 1.0
        return self.xray.busy_ms / (self.xray.busy_ms + _idle_ms(self.xray, LAUNCHING))

    @cached_property
    def saved_at_most(self) -> float:
        """How much of the GPU time saved may shorten the step: where the GPU waits for launches,
        kernels that end sooner only wait longer for the next one."""
        if self.xray is None:
            return 1.0
        late_ms = 0.0
        for phase, busy_ms in self.xray.busy_by_phase_ms.items():
            idle_ms = _idle_ms(self.xray, (phase,))
            if idle_ms > LATE_LAUNCHES * (busy_ms + idle_ms):
                late_ms += busy_ms
        return 1 - late_ms / (sum(self.xray.busy_by_phase_ms.values()) or 1.0)

    def waits_for_launches(self, *phases: str) -> float:
        """The share of the step in which the GPU waits for what the host launches, in these phases or
        in all."""
        xray = self.xray
        if xray is None:
            return 0.0
        # An X-ray slows the host down. It may be of an earlier run, which waited more or less for data.
        step_in_xray_ms = (xray.wall_ms - _idle_ms(xray, ("data",))) / xray.steps
        step_ms = max(self.mean_ms, step_in_xray_ms + self.share("data") * self.mean_ms)
        return min(MAX_SAVED, _idle_ms(xray, phases or LAUNCHING) / xray.steps / step_ms)

    @cached_property
    def ceiling(self) -> float | None:
        """How many times as fast the step was as its batches were replayed; None where others had the
        cores then."""
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

    @property
    def headroom_source(self) -> str:
        """How that is known."""
        return "model of the step" if self.ceiling is None else "measured ceiling"

    @cached_property
    def computing(self) -> float:
        """The share of the time that goes into forward and backward, and that is work of the GPU's."""
        return min(self.share("forward", "loss", "backward"), self.busy_share or 1.0)

    @cached_property
    def own_code_inside(self) -> dict[str, float]:
        """The share of the time that the script's own code takes within each phase that computes: a
        metric in numpy between forward and backward, a loop over elements in a model, a training step
        that the optimizer calls."""
        shares = {}
        for phase in COMPUTING:
            lines = lines_of(in_training(self.rank, (phase,)))
            shares[phase] = self.share(phase) * sum(line.share for line in lines if line.outside_torch)
        return shares

    @cached_property
    def beside_pauses(self) -> dict[str, dict[str, float]]:
        """Of each kind of pause, the share of the time that the script's own code takes for it, by
        line: what else is done on a line that mostly saves or logs, such as putting the picture
        together."""
        own, pauses = self._by_line(REST, OWN_CODE), {}
        for phase in PAUSES:
            lines = self._by_line(phase, (phase,))
            pauses[phase] = {where: share for where, share in own.items() if share <= lines.get(where, 0.0)}
        return pauses

    def _by_line(self, phase: str, seen_as: Collection[str]) -> dict[str, float]:
        """The share of the time of each line in a phase, whatever it called."""
        shares: dict[str, float] = {}
        for line in lines_of(in_training(self.rank, seen_as)):
            shares[line.where] = shares.get(line.where, 0.0) + self.share(phase) * line.share
        return shares

    def passed(self, through: str) -> float:
        """The share of forward passes in which the stack was seen to pass through something, as
        stacks name it."""
        seen = training_stacks(self.rank)
        forward = [one for stacks in seen for one in stacks.stacks if one.phase == "forward"]
        seconds = sum(one.seconds for one in forward)
        if sum(one.looks for one in forward) < ENOUGH_LOOKS:
            return 0.0
        return share_of(sum(stacks.passed_s.get(through, 0.0) for stacks in seen), seconds) or 0.0


def metrics_of(trace: Trace) -> tuple[RankMetrics, ...]:
    """The metrics of every rank."""
    return tuple(RankMetrics(trace, rank) for rank in trace.ranks)


def host_ms_in(step: Step, phase: str) -> float:
    """How long the host was in a phase of a step."""
    return sum(span.host_ms for span in step.spans if span.name == phase)


def rounded(value: float | None) -> float | None:
    """As many digits as evidence needs."""
    return round(value, 4) if value is not None else None


def _idle_ms(xray: Xray, phases: Iterable[str]) -> float:
    return sum(xray.idle_by_phase_ms.get(phase, 0.0) for phase in phases)


# How long a step would take without one of its causes, worked out span by span. The GPU reaches the
# end of span i when it has done all work before it and the host has launched the span:
#
#     gpu[i+1] = max(gpu[i] + work[i], host[i+1])
#
# Work is the GPU's time between the span's two events, less the gaps that an X-ray has measured
# between its kernels. This tells an `.item()` that leaves the GPU without work from one that waits
# for useful work.


def replayed_ms(step: Step, without: str | None = None, at_work: Mapping[str, float] | None = None) -> float | None:
    """The long-run length of a step, or of one in which a phase takes the host no time; None without events.

    `at_work` is the share of its time in a phase that the GPU works; all of it in one that is not named.
    """
    if not step.has_events:
        return None
    track = []  # of each span: how long it holds the host, whether that is by waiting for the GPU, the GPU's work
    for span in step.spans:
        takes_ms = span.host_ms
        waits_for_gpu = span.name == "sync" and without != "sync"
        if waits_for_gpu:
            takes_ms = span.gpu_idle_ms or 0.0
        elif span.name in ("held", without):  # a hold only keeps the host from running far ahead
            takes_ms = 0.0
        work_ms = (span.gpu_busy_ms or 0.0) * (at_work or {}).get(span.name, 1.0)
        track.append((takes_ms, waits_for_gpu, work_ms))
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
    """The share of a step's time that would be saved if a phase took the host no time: 0 to 1, an
    estimate."""
    now = replayed_ms(step, at_work=at_work)
    then = replayed_ms(step, phase, at_work)
    return max(0.0, 1 - then / now) if now and then is not None else None
