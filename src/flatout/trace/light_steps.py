"""Training steps of which only the ends and the waits for batches were recorded, handed over as a list of
events.

The writer turns many of them into records at once, on its own thread: the training thread only appends
events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from flatout.model.records import Span, Step

Fetch = tuple[int, float, float, int | None]  # loader, start, end, samples
Event = Fetch | float | None  # a wait for a batch; the end of a step; a backward pass


@dataclass(frozen=True, kw_only=True)
class LightSteps:
    """Whole steps in order; the first began at `start_s`."""

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

    def last(self, count: int) -> list[Step]:
        """The last `count` steps."""
        return self.part(max(0, len(self.ends_s) - count), len(self.ends_s))

    def part(self, first: int, end: int) -> list[Step]:
        """The steps from place `first` up to place `end`."""
        selected = replace(
            self,
            first_index=self.first_index + first,
            start_s=[self.start_s, *self.ends_s][first],
            events=self.events[self._starts[first] : self._starts[end]],
        )
        return list(selected.steps())

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
