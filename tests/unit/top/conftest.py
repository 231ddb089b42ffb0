"""A machine whose time only passes when one sleeps, and recordings of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.top.sample_source import Stop
from flatout.trace import GpuSample, RunInfo, Sample, TraceWriter


class FakeMachine:
    """A sampler of the shape of `flatout.sample.hardware.Sampler`: one GPU whose SM activity is a function of time."""

    def __init__(self, sample: Sample, activity: Callable[[float], float], *, has_gpm: bool = True) -> None:
        self.notes: list[str] = []
        self.closed = False
        self.pulses_asked = 0
        self._now_s = 100.0
        self._sample = sample
        self._activity = activity
        self._has_gpm = has_gpm
        self._read_s: float | None = None
        self._pulse_s = self._now_s
        self._pulses: list[float] = []

    def clock(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def stop(self) -> Stop:
        return Stop(sleep=self.sleep)

    def pulse(self) -> None:
        self.pulses_asked += 1
        if self._now_s - self._pulse_s >= 0.1:
            self._pulses.append(self._mean(self._pulse_s, self._now_s))
            self._pulse_s = self._now_s

    def read(self) -> Sample:
        self.pulse()
        start_s = self._read_s if self._read_s is not None else self._now_s
        active = self._mean(start_s, self._now_s)
        gpus: tuple[GpuSample, ...] = tuple(
            dataclasses.replace(
                gpu,
                sm_active_pct=active if self._has_gpm and self._read_s is not None else None,
                gpu_util_pct=active,
                pulses=tuple(self._pulses),
            )
            for gpu in self._sample.gpus
        )
        self._pulses = []
        self._read_s = self._now_s
        return dataclasses.replace(self._sample, time_s=self._now_s, interval_s=self._now_s - start_s, gpus=gpus)

    def close(self) -> None:
        self.closed = True

    def _mean(self, start_s: float, end_s: float) -> float:
        """The mean activity between two moments, as a hardware counter would have it."""
        steps = 64
        if end_s <= start_s:
            return self._activity(start_s)
        return sum(self._activity(start_s + (end_s - start_s) * (k + 0.5) / steps) for k in range(steps)) / steps


@pytest.fixture
def machine(make_sample: Callable[..., Sample]) -> Callable[..., FakeMachine]:
    """Builds a machine: `machine(lambda t: 80.0)`; further arguments are make_sample's."""

    def build(activity: Callable[[float], float] = lambda _: 80.0, *, has_gpm: bool = True, **sample: object):  # type: ignore[no-untyped-def]
        return FakeMachine(make_sample(**sample), activity, has_gpm=has_gpm)

    return build


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Writes samples as a recording, and says where it is."""

    def write(samples: list[Sample], name: str = "recording", host: str = "node-1") -> Path:
        folder = tmp_path / name
        facts = {"cores_allowed": 16.0, "interval_s": 1.0}
        with TraceWriter(folder, RunInfo(name="top", host=host, started_unix_s=1e9, facts=facts)) as writer:
            for sample in samples:
                writer.write(sample)
        return folder

    return write
