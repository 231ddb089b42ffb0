"""Where samples come from: the machine now, or a recording. Both look the same to the rest of `flatout top`."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flatout import __version__
from flatout.errors import TraceError, UsageError
from flatout.sense.hardware import PULSE_EVERY_S, Sampler
from flatout.trace import RunInfo, Sample, read

__all__ = ["Live", "Replay", "Source", "Stop"]


class Stop:
    """Asks a loop to end, or to hold. Plain flags: a signal handler may set them at any moment; a lock could jam."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.asked = False
        self.held = False
        self._sleep = sleep

    def wait(self, seconds: float) -> bool:
        """Let at most a pulse's time pass; True when one should end."""
        if not self.asked and seconds > 0:
            self._sleep(min(seconds, PULSE_EVERY_S))
        return self.asked


class Source:
    """A stream of samples, and what one must know to read them. `notes` may grow as samples come."""

    def __init__(self, info: RunInfo, notes: list[str], clock: Callable[[], float]) -> None:
        self.info = info
        self.notes = notes
        self.cores_allowed: float | None = info.facts.get("cores_allowed")
        self._clock = clock

    def samples(self, stop: Stop) -> Iterator[Sample]:
        """The samples, as they come."""
        raise NotImplementedError

    def unix_s(self, sample: Sample) -> float:
        """When a sample was taken, by the calendar."""
        return self.info.started_unix_s + sample.time_s - self.info.started_s

    def close(self) -> None:
        """Let go of everything."""


class Live(Source):
    """This machine: a sample every `interval_s`, pulses in between."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        interval_s: float,
        duration_s: float | None,
        cores_allowed: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        info = RunInfo(
            name="top",
            host=socket.gethostname(),
            pid=os.getpid(),
            versions={"flatout": __version__},
            started_unix_s=time.time(),
            started_s=clock(),
            facts={"cores_allowed": cores_allowed, "interval_s": interval_s},
        )
        super().__init__(info, sampler.notes, clock)
        self._sampler = sampler
        self._interval_s = interval_s
        self._duration_s = duration_s

    def samples(self, stop: Stop) -> Iterator[Sample]:
        """A sample an interval, until the duration is over or one is asked to stop."""
        self._sampler.read()  # rates need a start
        start_s = self._clock()
        due_s = start_s + self._interval_s
        last_s = start_s + self._duration_s if self._duration_s is not None else float("inf")
        while not stop.wait(due_s - self._clock()):
            if self._clock() < due_s:
                self._sampler.pulse()
                continue
            yield self._sampler.read()
            if self._clock() + self._interval_s / 2 > last_s:
                return
            due_s = max(due_s + self._interval_s, self._clock())  # a machine that fell behind does not hurry after

    def close(self) -> None:
        """Let go of the driver."""
        self._sampler.close()


class Replay(Source):
    """A recording, at `speed` times its own pace, or all at once."""

    def __init__(
        self,
        folder: Path,
        *,
        gpus: tuple[int, ...] | None,
        speed: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        trace = read(folder)
        if len(trace.machines) > 1:
            machines = f"{len(trace.machines)} machines ({', '.join(info.host for info in trace.machines)})"
            raise UsageError(f"{folder} holds {machines}: keep one hardware-*.jsonl in it")
        if not any(trace.samples.values()):
            raise TraceError(f"{folder} holds no hardware samples: nothing to replay")
        super().__init__(trace.machines[0], [note.text for note in trace.notes], clock)
        self._speed = speed
        self._samples = trace.samples[self.info.host]
        if gpus is not None:
            there = {gpu.index for sample in self._samples for gpu in sample.gpus}
            for index in gpus:
                if index not in there:
                    raise UsageError(f"there is no GPU {index} in {folder}")
            self._samples = tuple(_only(sample, gpus) for sample in self._samples)

    def samples(self, stop: Stop) -> Iterator[Sample]:
        """The recorded samples, in order."""
        for sample in self._samples:
            if self._speed is not None and self._pass(sample.interval_s / self._speed, stop):
                return
            yield sample

    def _pass(self, seconds: float, stop: Stop) -> bool:
        end_s = self._clock() + seconds
        while stop.held or self._clock() < end_s:
            if stop.wait(PULSE_EVERY_S if stop.held else end_s - self._clock()):
                return True
        return stop.asked


def _only(sample: Sample, gpus: tuple[int, ...]) -> Sample:
    return dataclasses.replace(sample, gpus=tuple(gpu for gpu in sample.gpus if gpu.index in gpus))
