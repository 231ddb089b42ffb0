"""Keeps a trace of any length small.

Steps: raw ones at first and around outliers, and windows over all of them. Hardware samples: all of them at
first, then means of several. After every few megabytes, windows and means become twice as long, so a file
grows with the logarithm of the run. Memory does not grow.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from flatout.model.records import Span, Step, Window
from flatout.model.stats import Sketch

if TYPE_CHECKING:
    from flatout.model.hardware_samples import Sample

T = TypeVar("T")

# 24 MB for raw steps and 2.5 MB for each of 16 lengths of window; 16 MB and 3 MB for each of 16
# strides of samples: both fill the 64 MB of a file, after hundreds of millions of steps, or months of
# sampling.
RAW_STEPS = 2_000  # more than any trial has
RAW_OUTLIERS = 4_000
# So that an uneven run keeps some for later.
OUTLIERS_AT_FIRST, OUTLIERS_SHARE = 100, 0.02
RAW_STEP_BYTES = 24_000_000
OUTLIER = 2.0  # times the median step
NEIGHBOURS = 2
WINDOW_STEPS, WINDOW_MS = 50, 500.0  # at least, both
BYTES_A_LENGTH = 2_500_000
NAMES_A_WINDOW = 100
RAW_SAMPLE_BYTES = 16_000_000
BYTES_A_STRIDE = 3_000_000

_NOT_AVERAGED = ("index", "pid", "energy_j")


Fetch = tuple[int, float, float, int | None]  # loader, start, end, samples
Event = Fetch | float | None  # a wait for a batch; the end of a step; a backward pass


@dataclass(frozen=True, kw_only=True)
class LightSteps:
    """Training steps in a row, of which only the ends and the waits for batches were recorded, as a
    list of events.

    The training thread only appends events; the writer's thread turns many of them into records at
    once. The first step began at `start_s`.
    """

    first_index: int
    start_s: float
    events: list[Event]
    waiting: str  # the span name of a wait for a batch
    computing: str  # the span name of all other time

    @cached_property
    def ends_s(self) -> list[float]:
        return [event for event in self.events if type(event) is float]

    @cached_property
    def walls_ms(self) -> list[float]:
        ends = self.ends_s
        return [(end - start) * 1e3 for start, end in zip([self.start_s, *ends], ends, strict=False)]

    @cached_property
    def waits_ms(self) -> list[float]:
        """Milliseconds each step waited for batches, at most its own length."""
        waits, waited = [], 0.0
        for event in self.events:
            if type(event) is tuple:
                waited += event[2] - event[1]
            elif event is not None:
                waits.append(waited * 1e3)
                waited = 0.0
        return [min(wait, wall) for wait, wall in zip(waits, self.walls_ms, strict=True)]

    @cached_property
    def samples(self) -> int:
        return sum(event[3] or 0 for event in self.events if type(event) is tuple)

    @cached_property
    def _starts(self) -> list[int]:
        """The place in `events` where each step begins, and where the last one ends."""
        return [0, *(place for place, event in enumerate(self.events, 1) if type(event) is float)]

    def step(self, place: int) -> Step:
        """The step at this place, as a full record."""
        alone = dataclasses.replace(
            self,
            first_index=self.first_index + place,
            start_s=[self.start_s, *self.ends_s][place],
            events=self.events[self._starts[place] : self._starts[place + 1]],
        )
        return next(alone.steps())

    def steps(self) -> Iterator[Step]:
        """One by one, as full records."""
        index, start_s = self.first_index, self.start_s
        cut_s, spans, samples, passes = start_s, [], 0, 0

        def until(end_s: float, name: str) -> None:
            nonlocal cut_s
            if end_s > cut_s:
                spans.append(Span(name=name, start_ms=(cut_s - start_s) * 1e3, host_ms=(end_s - cut_s) * 1e3))
                cut_s = end_s

        for event in self.events:
            if event is None:
                passes += 1
            elif isinstance(event, tuple):
                until(event[1], self.computing)
                until(event[2], self.waiting)
                samples += event[3] or 0
            else:
                until(event, self.computing)
                yield Step(
                    index=index,
                    start_s=start_s,
                    wall_ms=(cut_s - start_s) * 1e3,
                    spans=tuple(spans),
                    samples=samples or None,
                    micro_steps=max(1, passes),
                )
                index, start_s = index + 1, cut_s
                spans, samples, passes = [], 0, 0


class StepDownsampler:
    """Takes every step and gives back the records to write; `wrote` tells it how large they were."""

    def __init__(self) -> None:
        self._outliers = _Outliers()
        self._seen = 0  # up to so many, all are kept
        self._raw_bytes_left = RAW_STEP_BYTES
        self._window: Window | None = None  # the one that is open
        self._length = WINDOW_STEPS
        self._window_bytes_left = BYTES_A_LENGTH

    def push(self, step: Step | LightSteps) -> list[Step | Window]:
        """Add a step, or many. What is not plain training (set-up, X-ray, the tail) stays out of the
        windows."""
        if isinstance(step, Step) and step.kind != "train":
            return self._with_room([step])
        if self._seen >= RAW_STEPS:
            raw = self._outliers.among(step)
        elif isinstance(step, LightSteps):
            return [record for one in step.steps() for record in self.push(one)]
        else:
            raw = [step]
            self._seen += 1
        self._window = self._window or _window_from(step)
        _add_to(self._window, step)
        return self._with_room(raw)

    def _with_room(self, raw: list[Step]) -> list[Step | Window]:
        """Raw steps, as long as there is room for them, and the window if it is full."""
        kept: list[Step | Window] = [*raw] if self._raw_bytes_left > 0 else []
        walls = self._window.wall_ms if self._window is not None else Sketch()
        if walls.count >= self._length and walls.total >= WINDOW_MS:
            kept += self.flush()
        return kept

    def flush(self) -> list[Step | Window]:
        """Close the window that is open, if any."""
        window, self._window = self._window, None
        if window is None:
            return []
        self._outliers.learn(window.wall_ms)
        return [window]

    def wrote(self, record: Step | Window, size: int) -> None:
        """Account for a record that was written: windows become longer as the file grows."""
        if isinstance(record, Step):
            self._raw_bytes_left -= size
            return
        self._window_bytes_left -= size
        if self._window_bytes_left <= 0:
            self._length *= 2
            self._window_bytes_left = BYTES_A_LENGTH


class _Outliers:
    """Selects steps far slower than the median so far, with their neighbours; only so many at any time."""

    def __init__(self) -> None:
        self._wall_ms = Sketch()
        self._median_ms: float | None = None
        self._before: deque[tuple[Step | LightSteps, int]] = deque(maxlen=NEIGHBOURS)  # steps, the place in them
        self._after = 0
        self._kept = 0

    @property
    def _left(self) -> int:
        allowed = OUTLIERS_AT_FIRST + OUTLIERS_SHARE * self._wall_ms.count
        return int(min(RAW_OUTLIERS, allowed)) - self._kept

    def learn(self, walls_ms: Sketch) -> None:
        """Learn how long steps usually take."""
        self._wall_ms.merge(walls_ms)
        self._median_ms = self._wall_ms.quantile(0.5)

    def among(self, steps: Step | LightSteps) -> list[Step]:
        """The steps to keep, of these and of those before."""
        limit_ms, left = OUTLIER * (self._median_ms or math.inf), self._left
        kept: list[tuple[Step | LightSteps, int]] = []
        for place, wall_ms in enumerate(steps.walls_ms if isinstance(steps, LightSteps) else [steps.wall_ms]):
            if len(kept) >= left:
                self._after = 0
            if wall_ms > limit_ms and len(kept) < left:
                kept += [*self._before, (steps, place)]
                self._before.clear()
                self._after = NEIGHBOURS
            elif self._after:
                kept.append((steps, place))
                self._after -= 1
            else:
                self._before.append((steps, place))
        self._kept += len(kept)
        return [some.step(at) if isinstance(some, LightSteps) else some for some, at in kept]


def window_of(steps: Sequence[Step | LightSteps]) -> Window:
    """One record for many steps."""
    window = _window_from(steps[0])
    for step in steps:
        _add_to(window, step)
    return window


def _window_from(first: Step | LightSteps) -> Window:
    index = first.index if isinstance(first, Step) else first.first_index
    return Window(first_index=index, last_index=index, start_s=first.start_s, wall_ms=Sketch())


def _add_to(window: Window, step: Step | LightSteps) -> None:
    """Add a step, or many."""
    if isinstance(step, LightSteps):
        walls, waits = step.walls_ms, step.waits_ms
        _count_in(window, step.first_index, walls, step.samples or None)
        computing_ms = [wall - wait for wall, wait in zip(walls, waits, strict=True)]
        for name, figures in ((step.waiting, waits), (step.computing, computing_ms)):
            window.spans_ms[_key(window, name)].extend(figures)
        return
    _count_in(window, step.index, [step.wall_ms], step.samples)
    if step.loss is not None:
        window.loss.add(step.loss)
    host_ms: dict[str, float] = {}  # twenty small copies count as one
    for span in step.spans:
        key = _key(window, f"{span.name}@{span.where}" if span.where else span.name)
        host_ms[key] = host_ms.get(key, 0.0) + span.host_ms
        if span.gpu_idle_ms is not None:
            window.gpu_idle_ms[key] = window.gpu_idle_ms.get(key, 0.0) + span.gpu_idle_ms
        if span.gpu_busy_ms is not None:
            window.gpu_busy_ms[key] = window.gpu_busy_ms.get(key, 0.0) + span.gpu_busy_ms
    for key, ms in host_ms.items():
        window.spans_ms[key].add(ms)
    window.gpu_steps += step.has_events


def _count_in(window: Window, first_index: int, walls_ms: Sequence[float], samples: int | None) -> None:
    window.last_index = first_index + len(walls_ms) - 1
    window.wall_ms.extend(walls_ms)
    if samples is not None:
        window.samples = (window.samples or 0) + samples


def _key(window: Window, name: str) -> str:
    """The name under which a span is counted: there is a sketch for it."""
    key = name_within(window.spans_ms, name)
    if key not in window.spans_ms:
        window.spans_ms[key] = Sketch()
    return key


def name_within(known: Mapping[str, object], name: str) -> str:
    """`name`, or without its line once there are too many names to keep apart."""
    if name in known or len(known) < NAMES_A_WINDOW:
        return name
    return name.partition("@")[0]


class SampleDownsampler:
    """Takes every hardware sample and gives back those to write; `wrote` tells it how large they were."""

    def __init__(self) -> None:
        self._stride = 1  # how many become one: some hundreds after weeks
        self._bytes_left = RAW_SAMPLE_BYTES
        self._held: list[Sample] = []

    def push(self, sample: Sample) -> list[Sample]:
        """Count one sample in."""
        self._held.append(sample)
        return self.flush() if len(self._held) >= self._stride else []

    def flush(self) -> list[Sample]:
        """The mean of what is held back, if anything."""
        held, self._held = self._held, []
        return [mean_of(held)] if held else []

    def wrote(self, size: int) -> None:
        """Account for a sample that was written: the stride becomes longer as the file grows."""
        self._bytes_left -= size
        if self._bytes_left <= 0:
            self._stride *= 2
            self._bytes_left = BYTES_A_STRIDE


def mean_of(samples: list[Sample]) -> Sample:
    """One sample for several: means over time; what is no number, from the last; fewer pulses."""
    last = samples[-1]
    if len(samples) == 1:
        return last
    mean = _mean([(sample, sample.interval_s) for sample in samples])
    return dataclasses.replace(mean, time_s=last.time_s, interval_s=sum(sample.interval_s for sample in samples))


def _mean(weighted: list[tuple[T, float]]) -> T:
    """The mean of every field of some records, each with the time it covers."""
    last: Any = weighted[-1][0]
    means: dict[str, Any] = {}
    for field in dataclasses.fields(last):
        values = [(getattr(record, field.name), length) for record, length in weighted]
        known = [(value, length) for value, length in values if value is not None]
        if field.name == "pulses":
            means[field.name] = tuple(pulse for pulses, _ in known for pulse in pulses)[:: len(known)]
        elif known and field.name not in _NOT_AVERAGED:
            means[field.name] = _mean_value(known)
    result: T = dataclasses.replace(last, **means)
    return result


def _mean_value(weighted: list[tuple[Any, float]]) -> Any:
    """The mean of numbers, of records, or of items of the same kind, one by one; of all else the last."""
    last = weighted[-1][0]
    if isinstance(last, int | float):
        covered_s = sum(length for _, length in weighted)
        if not covered_s:  # the very first sample
            return last
        mean = sum(value * length for value, length in weighted) / covered_s
        return round(mean) if all(isinstance(value, int) for value, _ in weighted) else mean
    if dataclasses.is_dataclass(last):
        return _mean(weighted)
    if not isinstance(last, tuple):
        return last
    by_name: dict[Any, list[tuple[Any, float]]] = {}
    for items, length in weighted:
        for place, item in enumerate(items):
            by_name.setdefault(_name_of(item, place), []).append((item, length))
    return tuple(_mean_value(by_name[_name_of(item, place)]) for place, item in enumerate(last))


def _name_of(item: Any, place: int) -> Any:
    """What tells a GPU, a process, a disk or a core from the others."""
    return getattr(item, "uuid", None) or getattr(item, "pid", None) or getattr(item, "name", place)
