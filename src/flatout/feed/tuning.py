"""How many workers a feed has: gathers what the controller wants to see, window by window.

Loaders of one process share its cores: those that were asked for a batch lately divide them.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass

from flatout.budget import Budget
from flatout.feed.account import out_of_memory_kills
from flatout.feed.controller import Controller, Observation
from flatout.feed.messages import Timing

__all__ = ["Tuning"]

log = logging.getLogger("flatout.feed")

WINDOW_S, WINDOW_BATCHES = 1.0, 8
LATELY_S = 5.0

_all: weakref.WeakSet[Tuning] = weakref.WeakSet()


@dataclass(slots=True)
class _Window:
    since: float
    batches: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    run_delay_s: float = 0.0
    memory_kills: int = 0


class Tuning:
    """The number of workers and of batches ahead that one loader should have."""

    def __init__(self, workers: int, budget: Budget) -> None:
        self._controller = Controller(workers, cores=budget.cores_allowed)
        self._budget = budget
        self._window = _Window(time.monotonic())
        self._used_at = time.monotonic()
        self._kills = out_of_memory_kills()
        self._held = False
        _all.add(self)

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

    def restart(self) -> None:
        """A new pass: what lies between two of them is nobody's waiting."""
        self._window = _Window(time.monotonic())

    def worked(self, timing: Timing) -> None:
        """A worker has finished something."""
        self._window.busy_s += timing.wall_s
        self._window.cpu_s += timing.cpu_s
        self._window.run_delay_s += timing.run_delay_s

    def died(self) -> None:
        """A worker is gone; whether the kernel killed it for memory is seen in its count of such kills."""
        kills = out_of_memory_kills()
        self._window.memory_kills += max(0, kills - self._kills)
        self._kills = kills

    def served(self, waited_s: float, workers: int) -> bool:
        """The consumer got a batch from `workers` workers; whether their number is to change."""
        window, now = self._window, time.monotonic()
        self._used_at = now
        window.batches += 1
        window.waited_s += waited_s
        seconds = now - window.since
        if seconds < WINDOW_S or window.batches < WINDOW_BATCHES:
            return False
        self._window = _Window(now)
        if self._held:
            return False
        before = self.workers
        decision = self._controller.observe(
            Observation(
                seconds=seconds,
                batches=window.batches,
                waited_s=window.waited_s,
                workers=workers,
                busy_s=window.busy_s,
                cpu_s=window.cpu_s,
                run_delay_s=window.run_delay_s,
                cores=self._cores(now),
                memory_kills=window.memory_kills,
            )
        )
        if decision.workers != before:
            log.info("%d → %d workers: %s", before, decision.workers, decision.why)
        return decision.workers != before

    def _cores(self, now: float) -> float:
        others = sum(1 for other in _all if other is not self and now - other._used_at < LATELY_S)
        return max(1.0, self._budget.cores_allowed / (1 + others))
