"""Training steps of which only the ends and the waits for batches were noted: handed over as they were noted.

Making sense of them is the writer's work, many at a time; the training thread has better things to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from flatout.model.records import Span, Step

Fetch = tuple[int, float, float, int | None]  # of which loader, from when, to when, how many samples
Event = Fetch | float | None  # a batch was waited for; a step ended; a backward pass


@dataclass(frozen=True, kw_only=True)
class PlainSteps:
    """Whole steps in order, the first of which began at `start_s`."""

    first_index: int
    start_s: float
    events: list[Event]
    waiting: str  # what a wait for a batch is called
    computing: str  # and what all else

    @cached_property
    def ends_s(self) -> list[float]:
        return [event for event in self.events if type(event) is float]

    @cached_property
    def walls_ms(self) -> list[float]:
        ends = self.ends_s
        return [(end - start) * 1e3 for start, end in zip([self.start_s, *ends], ends, strict=False)]

    @cached_property
    def waits_ms(self) -> list[float]:
        """Of each step, no longer than itself."""
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
        """Where the events of each step begin, and where those of the last end."""
        return [0, *(place for place, event in enumerate(self.events, 1) if type(event) is float)]

    def last(self, count: int) -> list[Step]:
        """The last few of them."""
        return self.part(max(0, len(self.ends_s) - count), len(self.ends_s))

    def part(self, first: int, end: int) -> list[Step]:
        """Those from one place up to another."""
        some = replace(
            self,
            first_index=self.first_index + first,
            start_s=self.ends_s[first - 1] if first else self.start_s,
            events=self.events[self._starts[first] : self._starts[end]],
        )
        return list(some.steps())

    def steps(self) -> Iterator[Step]:
        """One by one, as they would have been recorded."""
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
