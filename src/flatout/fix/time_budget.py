"""The time that a fix may take: what is left of it, and what a run is expected to take.

A run is expected to take as long as the longest one so far; what the compiler takes is held apart from
that. Nothing else is foreseen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from flatout.model.plan import Change

COMPILING_S, TUNING_S = 40.0, 180.0  # by torch.compile, and with max-autotune, until it has been seen
COMPILED_AGAIN = 0.3  # of that time is left when the compiler finds its kernels in its cache: a guess
_PATIENCE = 4  # times as long as expected, before a run is ended


class TimeBudget:
    """Adds up seconds."""

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._began_s = clock()
        self._longest_s = 0.0  # of the runs without the compiler
        self._compiling_s: dict[str, float] = {}  # by mode, as it was seen

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        return self._budget_s - self.spent_s

    def note(self, changes: Sequence[Change], seconds: float) -> None:
        """A run of usual length with these changes has taken so long."""
        mode = _compile_mode(changes)
        if mode is None:
            self._longest_s = max(self._longest_s, seconds)
        else:
            self._compiling_s.setdefault(mode, max(0.0, seconds - self._longest_s))

    def run_s(self, changes: Sequence[Change]) -> float:
        """What a run of usual length with these changes is expected to take."""
        again_s = self.compiled_again_s(changes)
        compiled_before = _compile_mode(changes) in self._compiling_s
        return self._longest_s + (again_s if compiled_before else again_s / COMPILED_AGAIN)

    def compiled_again_s(self, changes: Sequence[Change]) -> float:
        """What the compiler is expected to take in a run with these changes, once it has done it before."""
        mode = _compile_mode(changes)
        if mode is None:
            return 0.0
        guess_s = TUNING_S if mode == "max-autotune" else COMPILING_S
        return COMPILED_AGAIN * self._compiling_s.get(mode, guess_s)

    def timeout_s(self, expected_s: float) -> float:
        """How long to wait for a run that is expected to take so long."""
        if not self._longest_s:
            return max(120.0, self.left_s)  # nothing has run yet
        return max(30.0, min(60.0 + _PATIENCE * expected_s, self.left_s + 30.0))

    def enough_m(self, needed_s: float) -> int:
        """A budget in minutes that would have left so many seconds."""
        missing_s = max(0.0, needed_s - self.left_s)
        return math.ceil((self._budget_s + missing_s) / 60 + 0.5)


def _compile_mode(changes: Sequence[Change]) -> str | None:
    return next((change.value for change in changes if change.name == "compile"), None)
