"""How far a run with an end has come, and whether it is then worth a closer look."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

from flatout.launch.protocol import MOST_STEPS, Options
from flatout.model.stats import BLOCKS, block_means, error_of, half_width

_WARM_UP_S = 9.0  # of a trial, at most
_SHORT_S = 0.05  # a step
_STEADY = 0.005  # what the mean step is known to, of a card that waits for nothing: half the time will do


class TrialProgress:
    """How far a run with an end has come. Only measured steps count: an X-ray may take longer than all of them.

    A trial begins with batches that lie ready from when it started, and would show a loader faster than it is: they
    are used up first.
    """

    def __init__(self, options: Options, *, alone: Callable[[], bool]) -> None:
        self._alone = alone  # the only rank: others would have to agree
        self._steps = options.max_steps or 0
        self._trial = options.trial
        self._took_s: list[float] = []
        self._trained_s = 0.0
        self._step_began_s: float | None = None
        self._began_s = 0.0
        self._measured = 0

    def step_begins(self) -> None:
        self._step_began_s = time.monotonic()
        self._began_s = self._began_s or self._step_began_s

    def step_ended(self, measured: int) -> None:
        if measured > self._measured and self._step_began_s is not None:
            self._took_s.append(time.monotonic() - self._step_began_s)
            self._trained_s += self._took_s[-1]
        self._measured = measured

    def warms_up(self, steps: int, batches_ready: int) -> bool:
        timed = self._trial is not None and not self._trial.fingerprints
        soon = not self._began_s or time.monotonic() - self._began_s < _WARM_UP_S
        return timed and steps < batches_ready and (soon or not self._alone())

    def is_over(self) -> bool:
        """Whether the steps are there and, in a process of its own, the time is."""
        if self._trial is None or self._measured < self._steps or not self._alone():
            return self._measured >= self._steps
        wanted_s, wanted = self._trial.at_least_s, self._trial.known_to
        if self._measured >= MOST_STEPS or self._trained_s >= 2 * wanted_s:
            return True
        short = not self._took_s or self._took_s[-1] < _SHORT_S  # beside which a look counts
        if self._trained_s < wanted_s / 2 or (short and self._measured % BLOCKS):
            return False
        unsure = self._unsure()
        return unsure <= _STEADY or (self._trained_s >= wanted_s and unsure <= wanted)

    def _unsure(self) -> float:
        """Half the 95% interval of the mean step, as a share of it."""
        if len(self._took_s) < BLOCKS:
            return math.inf
        return half_width([(error_of(block_means(self._took_s)) ** 2, BLOCKS - 1)])

    @functools.cached_property
    def worth_a_look(self) -> bool:
        """Whether the steps, now that they are over, were fast enough; the later ones count: loaders have to settle."""
        wanted_s = self._trial.look_below_s if self._trial is not None and self._alone() else None
        later = self._took_s[len(self._took_s) // 2 :]
        return wanted_s is None or (bool(later) and sum(later) / len(later) < wanted_s)
