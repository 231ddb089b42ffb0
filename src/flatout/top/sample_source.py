"""Where samples come from: the machine now, or a recording. The rest of `top` sees no difference."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flatout.model.errors import TraceError, UsageError
from flatout.sample.hardware import PULSE_EVERY_S, Sampler
from flatout.trace import RunInfo, Sample, read


class Stop:
    """Asks a loop to end, or to pause. Plain flags: signal handlers set them, and a lock could deadlock."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.asked = False
        self.held = False
        self._sleep = sleep

    def wait(self, seconds: float) -> bool:
        """Let at most a pulse's time pass; True when the loop should end."""
        if not self.asked and seconds > 0:
            self._sleep(min(seconds, PULSE_EVERY_S))
        return self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """A stream of samples, and what one must know to read them. `notes` may grow as samples come."""

    info: RunInfo
    notes: list[str]
    samples: Callable[[Stop], Iterator[Sample]]

    @property
    def cores_allowed(self) -> float | None:
        """How many cores the training may use."""
        cores = self.info.facts.get("cores_allowed")
        return cores if isinstance(cores, int | float) else None

    def unix_s(self, sample: Sample) -> float:
        """When a sample was taken, by the calendar."""
        return self.info.started_unix_s + sample.time_s - self.info.started_s


def live(
    sampler: Sampler,
    *,
    interval_s: float,
    duration_s: float = math.inf,
    cores_allowed: float,
    clock: Callable[[], float] = time.monotonic,
) -> SampleSource:
    """This machine: a sample every `interval_s`, pulses in between."""

    def samples(stop: Stop) -> Iterator[Sample]:
        sampler.read()  # rates need a start
        start_s = clock()
        due_s = start_s + interval_s
        while not stop.wait(due_s - clock()):
            if clock() < due_s:
                sampler.pulse()
                continue
            yield sampler.read()
            if clock() + interval_s / 2 > start_s + duration_s:
                return
            due_s = max(due_s + interval_s, clock())  # after falling behind, it does not hurry

    info = RunInfo(
        name="top",
        host=socket.gethostname(),
        pid=os.getpid(),
        started_unix_s=time.time(),
        started_s=clock(),
        facts={"cores_allowed": cores_allowed, "interval_s": interval_s},
    )
    return SampleSource(info=info, notes=sampler.notes, samples=samples)


def replay(
    folder: Path,
    *,
    gpus: tuple[int, ...] | None = None,
    speed: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> SampleSource:
    """A recording, at `speed` times its own pace, or all at once; of these GPUs only."""
    trace = read(folder)
    if len(trace.machines) > 1:
        machines = f"{len(trace.machines)} machines ({', '.join(info.host for info in trace.machines)})"
        raise UsageError(f"{folder} holds {machines}: keep one hardware-*.jsonl in it")
    if not any(trace.samples.values()):
        raise TraceError(f"{folder} holds no hardware samples: nothing to replay")
    info = trace.machines[0]
    recorded = trace.samples[info.host]
    there = {gpu.index for sample in recorded for gpu in sample.gpus}
    for index in gpus or ():
        if index not in there:
            raise UsageError(f"there is no GPU {index} in {folder}")
    chosen = there.intersection(gpus or there)

    def samples(stop: Stop) -> Iterator[Sample]:
        for sample in recorded:
            end_s = clock() + sample.interval_s / speed
            while not stop.asked and (stop.held or clock() < end_s):
                stop.wait(PULSE_EVERY_S if stop.held else end_s - clock())
            if stop.asked:
                return
            yield dataclasses.replace(sample, gpus=tuple(gpu for gpu in sample.gpus if gpu.index in chosen))

    return SampleSource(info=info, notes=[note.text for note in trace.notes], samples=samples)
