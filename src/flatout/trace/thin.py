"""How a trace of any length stays small.

Steps: raw ones at first and around outliers, and windows over all of them, whose length doubles every
`WINDOWS_A_LENGTH` windows. Hardware samples: all of them at first; then means of 2, of 4, of 8 … each time another
`BYTES_A_STRIDE` have been written. Both grow with the logarithm of the run.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, TypeVar

from flatout.trace.records import Sample, Span, Step, Window
from flatout.trace.sketch import Sketch

T = TypeVar("T")

RAW_STEPS = 2_000
RAW_OUTLIERS = 4_000
OUTLIER = 2.0  # times the median step
NEIGHBOURS = 2
WINDOW_STEPS = 50
WINDOWS_A_LENGTH = 500
NAMES_A_WINDOW = 100
BYTES_A_STRIDE = 12_000_000


def span_key(span: Span) -> str:
    """The name under which a span is summed: synchronizing calls are told apart by their line."""
    return f"{span.name}@{span.where}" if span.where else span.name


class StepThinner:
    """Takes every step; gives back what to write."""

    def __init__(self) -> None:
        self._seen = 0
        self._outliers_written = 0
        self._typical = Sketch()
        self._before: deque[Step] = deque(maxlen=NEIGHBOURS)
        self._after = 0
        self._length = WINDOW_STEPS
        self._windows = 0
        self._open: list[Step] = []

    def push(self, step: Step) -> list[Step | Window]:
        """Count one step in."""
        out: list[Step | Window] = list(self._raw(step))
        self._open.append(step)
        if len(self._open) >= self._length:
            out += self.flush()
            self._windows += 1
            if self._windows % WINDOWS_A_LENGTH == 0:
                self._length *= 2
        return out

    def flush(self) -> list[Step | Window]:
        """Close the window that is open, if any."""
        if not self._open:
            return []
        window = window_of(self._open)
        self._open = []
        return [window]

    def _raw(self, step: Step) -> list[Step]:
        self._seen += 1
        self._typical.add(step.wall_ms)
        if self._seen <= RAW_STEPS:
            return [step]
        if self._outliers_written >= RAW_OUTLIERS:
            return []
        median = self._typical.quantile(0.5) if self._seen % 64 == 0 else self._median
        self._median = median
        if median is not None and step.wall_ms > OUTLIER * median:
            written = [*self._before, step]
            self._after = NEIGHBOURS
            self._before.clear()
        elif self._after:
            written = [step]
            self._after -= 1
        else:
            self._before.append(step)
            return []
        self._outliers_written += len(written)
        return written

    _median: float | None = None


def window_of(steps: list[Step]) -> Window:
    """One record for many steps."""
    spans: dict[str, Sketch] = {}
    idle: dict[str, float] = {}
    for step in steps:
        for key, (host_ms, idle_ms) in span_totals(step).items():
            if key not in spans and len(spans) >= NAMES_A_WINDOW:
                key = key.partition("@")[0]
            spans.setdefault(key, Sketch()).add(host_ms)
            if idle_ms is not None:
                idle[key] = idle.get(key, 0.0) + idle_ms
    counted = [step.samples for step in steps if step.samples is not None]
    return Window(
        first_index=steps[0].index,
        last_index=steps[-1].index,
        start_s=steps[0].start_s,
        wall_ms=Sketch.of(step.wall_ms for step in steps),
        spans_ms=spans,
        gpu_idle_ms=idle,
        samples=sum(counted) if counted else None,
        loss=Sketch.of(step.loss for step in steps),
    )


def span_totals(step: Step) -> dict[str, tuple[float, float | None]]:
    """Host and GPU-idle milliseconds of a step by span name, so that twenty small copies count as one."""
    totals: dict[str, tuple[float, float | None]] = {}
    for span in step.spans:
        key = span_key(span)
        host_ms, idle_ms = totals.get(key, (0.0, None))
        if span.gpu_idle_ms is not None:
            idle_ms = (idle_ms or 0.0) + span.gpu_idle_ms
        totals[key] = (host_ms + span.host_ms, idle_ms)
    return totals


class SampleThinner:
    """Takes every hardware sample; gives back what to write."""

    def __init__(self) -> None:
        self._stride = 1
        self._group: list[Sample] = []
        self._bytes_left = BYTES_A_STRIDE

    def push(self, sample: Sample) -> list[Sample]:
        """Count one sample in."""
        self._group.append(sample)
        return self.flush() if len(self._group) >= self._stride else []

    def flush(self) -> list[Sample]:
        """The mean of what is held back, if anything."""
        if not self._group:
            return []
        merged = mean_of(self._group)
        self._group = []
        return [merged]

    def wrote(self, size: int) -> None:
        """Told of each write, so that a long recording is thinned out."""
        self._bytes_left -= size
        if self._bytes_left <= 0:
            self._stride *= 2
            self._bytes_left = BYTES_A_STRIDE


def mean_of(samples: list[Sample]) -> Sample:
    """One sample for several: rates and levels as means, all else as it was last; pulses thinned alike."""
    last = samples[-1]
    if len(samples) == 1:
        return last
    gpus = tuple(
        dataclasses.replace(
            _mean_fields([g for s in samples for g in s.gpus if g.uuid == gpu.uuid], keep=("index", "energy_j")),
            pulses=tuple(p for s in samples for g in s.gpus if g.uuid == gpu.uuid for p in g.pulses)[:: len(samples)],
        )
        for gpu in last.gpus
    )
    processes = tuple(
        _mean_fields([p for s in samples for p in s.processes if p.pid == process.pid], keep=("pid",))
        for process in last.processes
    )
    return Sample(
        time_s=last.time_s,
        interval_s=sum(s.interval_s for s in samples),
        host=_mean_fields([s.host for s in samples]),
        gpus=gpus,
        processes=processes,
    )


def _mean_fields(records: list[T], keep: tuple[str, ...] = ()) -> T:
    last: Any = records[-1]
    means: dict[str, Any] = {}
    for field in dataclasses.fields(last):
        values = [getattr(r, field.name) for r in records]
        numbers = [v for v in values if isinstance(v, int | float)]
        if field.name in keep or not numbers:
            continue
        mean = sum(numbers) / len(numbers)
        means[field.name] = round(mean) if all(isinstance(v, int) for v in numbers) else mean
    result: T = dataclasses.replace(last, **means)
    return result
