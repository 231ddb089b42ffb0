"""Whether compiling pays, measured: some steps compiled, some eager, and training goes on with what is faster.

It does not always: torch's compiler stops before an LSTM and begins anew behind it, at a cost in every step.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator

import torch

WARM, TIMED = 6, 12  # steps of each: until it is compiled, captured and tuned; that are measured
WORTH = 1.05  # by so much eager has to be faster


class Contest:
    """Measures steps as the card has them, so that nothing waits. One object a training."""

    def __init__(self) -> None:
        self._steps = 0
        self._times: tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], ...] = ([], [])

    @property
    def eager(self) -> bool:
        """Whether the next step is an eager one."""
        return WARM + TIMED <= self._steps < 2 * (WARM + TIMED)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One step's forward and backward pass, in the form whose turn it is."""
        eager = self.eager
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
            yield
        end.record()
        if self._steps % (WARM + TIMED) >= WARM and self._steps < 2 * (WARM + TIMED):
            self._times[eager].append((begin, end))
        self._steps += 1

    def result(self) -> tuple[float, float] | None:
        """Milliseconds of a compiled step and of an eager one, when the card has come to the last of them."""
        if len(self._times[True]) < TIMED or not self._times[True][-1][1].query():
            return None
        compiled, eager = (statistics.median(a.elapsed_time(b) for a, b in side) for side in self._times)
        return compiled, eager
