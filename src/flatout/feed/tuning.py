"""How many workers a feed has: gathers what the controller wants to see, window by window.

Loaders of one process share its cores: those in the middle of a pass that were asked for a batch lately divide them.
One that is made anew for every epoch begins with as many workers as the one before it had in the end.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Hashable

from flatout.feed.account import out_of_memory_kills
from flatout.feed.controller import Controller, Observation
from flatout.feed.messages import Done
from flatout.sample.budget import Budget

log = logging.getLogger("flatout.feed")

WINDOW_BATCHES = 8
LATELY_S = 5.0

_all: list[weakref.ref[Tuning]] = []  # replaced, never changed: several threads may go through it
_latest_end = -math.inf  # of any pass
_found: dict[Hashable, int] = {}  # workers, by what a loader is like


class Tuning:
    """The number of workers and of batches ahead that one loader should have; `like` is what it is like."""

    def __init__(self, workers: int, budget: Budget, *, may_do_without: bool, like: Hashable = None) -> None:
        global _all
        self._controller = Controller(workers, cores=budget.cores_allowed, may_do_without=may_do_without)
        self._like = like
        if like is not None and _found.get(like):
            self._controller.workers, self._controller.why = _found[like], "what the loader before it had"
        self._budget = budget
        self._window = Observation()
        self._asked_at: float | None = None  # in this pass
        self._began_at = 0.0
        self._last_pass = (-math.inf, -math.inf)  # from its first batch asked for to its end
        self._kills = out_of_memory_kills()
        self._held = False
        _all = [*(one for one in _all if one() is not None), weakref.ref(self)]

    @property
    def workers(self) -> int:
        return self._controller.workers

    @property
    def depth(self) -> float:
        """Batches under way a worker."""
        return self._controller.depth

    @property
    def why(self) -> str:
        return self._controller.why

    def hold(self, workers: int, *, for_good: bool) -> None:
        """Set the number from outside."""
        self._controller.workers = workers
        self._held = for_good

    def rest(self, now: float) -> None:
        """A pass is over: until a batch of the next is asked for, nobody waits, and the cores are the others'."""
        global _latest_end
        if self._asked_at is not None:
            self._last_pass, self._asked_at = (self._began_at, now), None
            _latest_end = max(_latest_end, now)
            if self._like is not None and not self._held:
                _found[self._like] = self.workers

    def had_work(self, seconds: float) -> None:
        """A worker had something to do for so long."""
        self._window.busy_s += seconds

    def worked(self, done: Done, batches: float) -> None:
        """A worker has finished so many batches, or part of one."""
        window = self._window
        window.made += batches
        window.made_s += done.wall_s
        window.cpu_s += done.cpu_s
        window.run_delay_s += done.run_delay_s

    def died(self) -> None:
        """A worker is gone; whether the kernel killed it for memory is seen in its count of such kills."""
        self._controller.may_do_without = False  # what kills a worker should not get at the training process
        kills = out_of_memory_kills()
        self._window.memory_kills += max(0, kills - self._kills)
        self._kills = kills

    def served(self, batches: int, waited_s: float, parent_s: float, now: float) -> bool:
        """The consumer got batches; whether these were the last of a window, and `decide` is due."""
        window = self._window
        if self._asked_at is None:
            self._asked_at = self._began_at = now - waited_s - parent_s
        window.seconds += now - self._asked_at - self._others_s(self._asked_at)
        self._asked_at = now
        window.batches += batches
        window.waited_s += waited_s
        window.parent_s += parent_s
        enough = window.batches >= WINDOW_BATCHES and (window.made >= WINDOW_BATCHES / 2 or not self.workers)
        return enough and window.seconds >= self._controller.window_s

    def _others_s(self, since: float) -> float:
        """How long others' whole passes took meanwhile, such as an evaluation: that is no time of this consumer's."""
        total = 0.0
        if _latest_end <= since:
            return total
        for begin, end in sorted(other._last_pass for other in self._others()):
            if end > since:  # two that were used together took their time only once
                total += end - max(begin, since)
                since = end
        return total

    def decide(self, workers: int) -> bool:
        """Look at the window that is over, in which there were so many workers; whether their number is to change."""
        window, self._window = self._window, Observation()
        if self._held:
            return False
        window.workers, window.cores = workers, self._cores()
        before = self.workers
        self._controller.observe(window)
        if self.workers != before:
            log.info("%d → %d workers: %s", before, self.workers, self.why)
        return self.workers != before

    def _others(self) -> list[Tuning]:
        return [other for one in _all if (other := one()) is not None and other is not self]

    def _cores(self) -> float:
        """A fair share of them."""
        assert self._asked_at is not None
        asked = (other._asked_at for other in self._others())
        others = sum(1 for at in asked if at is not None and self._asked_at - at < LATELY_S)
        return max(1.0, self._budget.cores_allowed / (1 + others))
