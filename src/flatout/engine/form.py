"""In which form a model that was captured as CUDA graphs takes a step: as graphs, or eagerly.

Compiling does not always pay (torch's compiler stops before an LSTM and begins anew behind it, at a cost in every
step), so both forms are measured at the start, and training goes on with what is faster. And now and then a batch has
another shape, an epoch's last or one with a sample left out: that one is eager. Where many have, graphs are no good:
each shape would need its own.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator

import torch

WARM, TIMED = 6, 12  # steps of each form: until it is compiled, captured and tuned; that are measured
WORTH = 1.05  # by so much eager has to be faster
ODD_ONE_IN, ODD_ANYWAY = 8, 2  # batches of another shape that may be: a share, and so many at the start

Shapes = tuple[torch.Size, ...]  # of the tensors in a batch


class Form:
    """The form of every step of one training; `contest`: whether it is open yet which one is faster."""

    def __init__(self, *, contest: bool) -> None:
        self.contest = contest
        self._seen: Counter[Shapes] = Counter()
        self._usual: Shapes | None = None
        self._measured = 0
        self._times: tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], ...] = ([], [])

    @property
    def eager(self) -> bool:
        """Whether it is the eager form's turn to be measured."""
        return self.contest and WARM + TIMED <= self._measured < 2 * (WARM + TIMED)

    @property
    def varied(self) -> bool:
        """Whether batches have many shapes."""
        steps = self._seen.total()
        return ODD_ONE_IN * (steps - max(self._seen.values(), default=0) - ODD_ANYWAY) > steps

    @contextlib.contextmanager
    def turn(self, shapes: Shapes) -> Iterator[None]:
        """One step's forward and backward pass over a batch of these shapes."""
        self._seen[shapes] += 1
        usual = max(self._seen, key=lambda known: self._seen[known])  # of those that were as often, the first
        if self._usual is not None and usual != self._usual:
            torch.compiler.reset()  # a training that began with a batch of another shape: compiled for that
            self._measured, self._times = 0, ([], [])
        self._usual = usual
        odd = shapes != usual
        eager = self.eager
        measured = self.contest and not odd and self._measured < 2 * (WARM + TIMED)
        begin = _now() if measured else None
        with torch.compiler.set_stance("force_eager") if eager or odd else contextlib.nullcontext():
            yield
        if begin is not None:
            if self._measured % (WARM + TIMED) >= WARM:
                self._times[eager].append((begin, _now()))
            self._measured += 1

    def result(self) -> tuple[float, float] | None:
        """Milliseconds of a step as graphs and of an eager one, once, when the card has come to the last of them."""
        if not self.contest or len(self._times[True]) < TIMED or not self._times[True][-1][1].query():
            return None
        self.contest = False
        captured, eager = ([a.elapsed_time(b) for a, b in side] for side in self._times)
        # The quarter that went best ends there: an X-ray may slow the others.
        return statistics.quantiles(captured, n=4)[0], statistics.quantiles(eager, n=4)[0]


def _now() -> torch.cuda.Event:
    """As the card has it, so that nothing waits."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
