"""How many workers, and how many batches ahead: a small state machine over what was seen in the last window.

    consumer waits, workers all busy ──► more workers, as long as each step brings more batches a second
    consumer waits, workers not busy ──► more batches ahead (uneven samples), else leave it
    consumer never waits             ──► fewer workers, down to the fewest that keep up

Every step is checked against the rate before it and taken back when it brought nothing; what was found out is
remembered, so the numbers settle. No clock in here: an `Observation` says how long its window was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Controller", "Decision", "Observation"]

STARVED, FED = 0.05, 0.02  # share of the window that the consumer waited
BUSY = 0.75
WORTH_IT = 1.025  # a step up has to bring this much
KEEPS_UP = 0.85  # how busy workers may be where the consumer is the limit
REMEMBER = 40  # windows after which a limit found is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One window of a running loader."""

    seconds: float
    batches: int
    waited_s: float
    workers: int
    busy_s: float  # summed over workers
    cpu_s: float
    run_delay_s: float = 0.0  # ready to run, but no core was free
    cores: float  # that this loader may use
    memory_kills: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    workers: int
    depth: float  # batches under way a worker
    why: str


class Controller:
    """Decides from one observation to the next. `workers` and `depth` are what it wants now."""

    def __init__(self, workers: int, *, cores: float, most_workers: int = 128) -> None:
        self._most = max(1, most_workers)
        self.workers = min(workers, self._ceiling(cores, 1.0))
        self.depth = 2.0
        self.why = "as declared" if self.workers == workers else f"{workers} declared, {cores:g} cores to use"
        self._rates: dict[int, float] = {}
        self._tried_from: int | None = None  # the count before a step whose effect is not known yet
        self._too_many: int | None = None
        self._too_few = 0
        self._calm = 0
        self._warming = True
        self._age = 0
        self._kills = 0

    def observe(self, seen: Observation) -> Decision:
        """Take in one window; what to do now."""
        self._count_kills(seen)
        if self._warming or seen.workers != self.workers:
            self._warming = False  # the window in which a change took place says nothing
            return self._now()
        self._forget_sometimes()
        on_their_own = max(seen.busy_s - seen.run_delay_s, seen.cpu_s)  # what they would take, each with a core
        ceiling = self._ceiling(seen.cores, seen.cpu_s / on_their_own if on_their_own else 1.0)
        if self.workers > ceiling:
            return self._go(ceiling, f"{seen.cores:g} cores to use")
        waits = seen.waited_s / seen.seconds
        if waits > STARVED:
            return self._starved(seen, ceiling)
        self._tried_from = None
        if waits < FED:
            return self._fed(seen)
        self._calm = 0
        return self._now()

    def _starved(self, seen: Observation, ceiling: int) -> Decision:
        self._calm = 0
        rate = seen.batches / seen.seconds
        self._rates[self.workers] = rate
        tried_from, self._tried_from = self._tried_from, None
        if tried_from is not None and tried_from < self.workers:
            gain = rate / self._rates[tried_from]
            if gain < WORTH_IT:
                self._too_many = self.workers
                return self._go(tried_from, f"{self.workers} workers brought no more than {tried_from}")
            enough = math.ceil(tried_from * gain)  # a step that brought less than its share went too far
            if enough < self.workers * 0.9:
                self._too_many = self.workers
                return self._go(enough, f"{self.workers} workers brought no more than {enough} would")
        if tried_from is not None and tried_from > self.workers:
            if rate < self._rates.get(tried_from, 0.0) / WORTH_IT:
                self._too_few = max(self._too_few, self.workers)
                return self._go(tried_from, f"{self.workers} workers bring less than {tried_from}")
            self._too_many = tried_from
        if seen.busy_s < BUSY * seen.seconds * self.workers:
            if self.depth < 4:
                self.depth = min(4.0, self.depth * 1.5)
                return self._now(f"batches take unevenly long: {self.depth:g} ahead a worker")
            return self._now("the consumer waits, but not for workers")
        limit = min(ceiling, (self._too_many or self._most + 1) - 1)
        wanted = min(limit, max(self.workers + 1, int(self.workers * 1.5)))
        if wanted > self.workers:
            self._tried_from = self.workers
            return self._go(wanted, "every worker is busy and the consumer waits")
        if self.workers == ceiling:
            return self._now(f"all {seen.cores:g} cores are in use")
        return self._now(f"more than {self.workers} workers bring nothing")

    def _fed(self, seen: Observation) -> Decision:
        needed = max(1, math.ceil(seen.busy_s / seen.seconds / KEEPS_UP), self._too_few + 1)
        self._calm = self._calm + 1 if needed < self.workers else 0
        if self._calm >= 2:
            self._calm = 0
            self._rates[self.workers] = seen.batches / seen.seconds
            self._tried_from = self.workers
            # Halfway: how busy the others get with one gone is a guess.
            return self._go((self.workers + needed) // 2, "fewer workers keep up")
        return self._now(f"{self.workers} workers keep up")

    def _count_kills(self, seen: Observation) -> None:
        self._kills += seen.memory_kills
        if self._kills >= 2:
            self._kills = 0
            self._most = max(1, min(self.workers, self._most) - 1)
            self._go(min(self.workers, self._most), "workers were killed for memory")

    def _ceiling(self, cores: float, cpu_share: float) -> int:
        """Workers that compute need a core each; workers that mostly wait for storage can share."""
        return max(1, min(self._most, round(cores / min(1.0, max(0.25, cpu_share)))))

    def _forget_sometimes(self) -> None:
        self._age += 1
        if self._age % REMEMBER == 0:
            self._too_many, self._too_few = None, 0

    def _go(self, workers: int, why: str) -> Decision:
        self._warming = workers != self.workers
        self.workers = workers
        return self._now(why)

    def _now(self, why: str | None = None) -> Decision:
        self.why = why or self.why
        return Decision(self.workers, self.depth, self.why)
