"""In which form a model that was captured as CUDA graphs takes a step: as graphs, or eagerly.

Compiling does not always pay (torch's compiler stops before an LSTM and begins anew behind it, at a cost in every
step), so both forms are measured at the start, and training goes on with what is faster. And now and then a batch is
smaller, an epoch's last or one with a sample left out: compiling for that too would end the graphs, so it is eager.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator

import torch

WARM, TIMED = 6, 12  # steps of each form: until it is compiled, captured and tuned; that are measured
WORTH = 1.05  # by so much eager has to be faster
ODD_ONE_IN = 8  # of more batches of another size than that, each is as usual as the first


class Form:
    """The form of every step of one training; `contest`: whether it is open yet which one is faster."""

    def __init__(self, *, contest: bool) -> None:
        self.contest = contest
        self._steps = self._odd = self._measured = self._usual_rows = 0
        self._times: tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], ...] = ([], [])

    @property
    def eager(self) -> bool:
        """Whether it is the eager form's turn to be measured."""
        return self.contest and WARM + TIMED <= self._measured < 2 * (WARM + TIMED)

    @contextlib.contextmanager
    def turn(self, rows: int) -> Iterator[None]:
        """One step's forward and backward pass over so many samples."""
        self._steps += 1
        self._usual_rows = self._usual_rows or rows
        odd = rows != self._usual_rows
        self._odd += odd
        eager = self.eager
        alone = odd and ODD_ONE_IN * self._odd <= self._steps
        measured = self.contest and not odd and self._measured < 2 * (WARM + TIMED)
        begin = _now() if measured else None
        with torch.compiler.set_stance("force_eager") if eager or alone else contextlib.nullcontext():
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
        captured, eager = (statistics.median(a.elapsed_time(b) for a, b in side) for side in self._times)
        return captured, eager


def _now() -> torch.cuda.Event:
    """As the card has it, so that nothing waits."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
