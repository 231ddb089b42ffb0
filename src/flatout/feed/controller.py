"""How many workers, and how many batches ahead: a small state machine over what was seen in the last window.

    consumer waits, workers all busy ──► more workers, as long as each step brings more batches a second; at last fewer,
                                         unless each computes on a core of its own, and kept if they bring as many
    consumer waits, workers not busy ──► more batches ahead (uneven samples), else leave it
    consumer never waits             ──► fewer workers, down to the fewest that keep up
    consumer waits, batches are tiny ──► none: making one takes less time than handing it over

Every step is checked against the pace before it and taken back when it brought nothing; what was found out is
remembered, so the numbers settle. No clock in here: an `Observation` says how long its window was.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

MOST_WORKERS = 128
STARVED, FED = 0.03, 0.015  # share of the window that the consumer waited: 97% of what could be had is wanted
BUSY, IDLE = 0.75, 0.05  # share of their time that workers work where more of them may help; and that is given away
WORTH_IT = 1.025  # a step up has to bring this much
LEAP, STRIDE = 3.0, 1.5  # times as many workers at once, at most: until that was too far once, and then
CLEAR = 1.15  # a difference of this much is no accident
FEWER = 0.75  # times as many workers are tried where no more are to be had
COMPUTES = 0.85  # share of its work that a worker computes where fewer could not do as much
KEEPS_UP = 0.85  # how busy workers may be where the consumer is the limit
REMEMBER = 40  # windows after which a limit found is tried again, and then twice as many each time
WINDOW_S, GLANCE_S = 1.0, 0.1  # how long to look; and where the differences are large
TINY_S = 2e-3  # batches that take longer are never made in the training process
CALLS_WORKERS_BACK = 1.1  # how much quicker they have to promise to be
_QUICKER = "batches take less time to make than to hand over"


@dataclass(slots=True, kw_only=True)
class Observation:
    """One window of a running loader."""

    seconds: float = 0.0
    batches: int = 0
    waited_s: float = 0.0  # by the consumer, for workers, or while a batch is made in its own process
    parent_s: float = 0.0  # what handing over took the consumer beside that
    workers: int = 0
    busy_s: float = 0.0  # in which workers had something to do, summed over them
    made: float = 0.0  # batches that they finished
    made_s: float = 0.0  # what those took, whenever they were begun
    cpu_s: float = 0.0
    run_delay_s: float = 0.0  # ready to run, but no core was free
    cores: float = 1.0  # that this loader may use
    memory_kills: int = 0

    @property
    def rate(self) -> float:
        return self.batches / self.seconds

    @property
    def busy(self) -> float:
        """The share of their time that workers worked."""
        return min(1.0, self.busy_s / (self.seconds * self.workers))

    @property
    def pace(self) -> float:
        """Batches a second that the workers make when they are all at work, by the time a batch takes one of them.

        By what the consumer gets it could not be told in a few seconds: workers that began together end together, and
        batches come in bursts, with long waits between.
        """
        return self.workers * self.made / self.made_s * min(1.0, self.busy / BUSY)

    @property
    def computes(self) -> bool:
        """Whether workers wait neither for a core nor for anything else."""
        return self.cpu_s > COMPUTES * self.made_s

    @property
    def work_s(self) -> float:
        """What the workers would have taken, each with a core to itself."""
        return max(self.made_s - self.run_delay_s, self.cpu_s)


class Controller:
    """Decides from one observation to the next. `workers` and `depth` (batches under way a worker) are what it wants.

    No workers at all (`may_do_without`) means that batches are made in the training process.
    """

    def __init__(self, workers: int, *, cores: float, may_do_without: bool = False) -> None:
        self._most, self._declared = MOST_WORKERS, workers
        self.workers = min(workers, self._ceiling(cores, 1.0))
        self.depth = 2.0
        self.why = "to begin with" if self.workers == workers else f"{workers} declared, {cores:g} cores to use"
        self.may_do_without = may_do_without
        self.window_s = GLANCE_S if may_do_without else WINDOW_S
        self._rates: dict[int, float] = {}
        self._tried_from: int | None = None  # the count before a step whose effect is not known yet
        self._kept_up = False  # before that step the consumer did not wait
        self._hand_over_s = 0.0  # a batch, when workers were last given up
        self._crew = 1  # how many they were
        self._of_no_use = False  # they were called back in vain
        self._next_try, self._patience = 0, 4  # windows until doing without them is tried again
        self._here: deque[float] = deque(maxlen=4)  # the last paces with so many workers
        self._all_needed: dict[int, float] = {}  # so many, at this rate: fewer brought less
        self._ask_again, self._fewer_patience = 0, 8  # windows until fewer are tried again
        self._too_many: int | None = None
        self._leap = LEAP
        self._too_few = 0
        self._calm = 0
        self._warming = True
        self._age, self._forget_at = 0, REMEMBER
        self._kills = 0

    def observe(self, seen: Observation) -> None:
        """Take in one window, and decide."""
        self._count_kills(seen)
        if self._warming or seen.workers != self.workers:
            self._warming = False  # the window in which a change took place says nothing
            return
        self._forget_sometimes()
        if self.workers == 0:
            self._without(seen)
        elif not self._better_without(seen):
            self._with(seen)

    # --- without workers, or with some --------------------------------------------------------------------------------

    def _better_without(self, seen: Observation) -> bool:
        """Whether doing without workers is tried now, or there is no more to learn from this window."""
        called_back, self._tried_from = self._tried_from == 0, self._tried_from or None
        glance, self.window_s = self.window_s < WINDOW_S, WINDOW_S
        if called_back and seen.rate < self._rates[0]:
            self._of_no_use = True
            self._go(0, _QUICKER)
            return True
        tiny = seen.work_s < TINY_S * seen.batches and seen.waited_s > STARVED * seen.seconds
        due = self._age >= self._next_try and not called_back and self._tried_from is None
        if self.may_do_without and tiny and due:
            self._rates[self.workers], self._hand_over_s = seen.rate, seen.parent_s / seen.batches
            self._tried_from = self._crew = self.workers
            self.window_s = GLANCE_S
            self._go(0, _QUICKER)
            return True
        return glance

    def _without(self, seen: Observation) -> None:
        """No workers: were they quicker, or would they be by now?"""
        tried_from, self._tried_from = self._tried_from, None
        self.window_s = WINDOW_S
        self._rates[0] = seen.rate
        step_s = (seen.seconds - seen.waited_s) / seen.batches  # what the consumer does between batches
        with_workers_s = max(1 / self._rates.get(self._crew, math.inf), step_s + self._hand_over_s)
        if tried_from and seen.rate < self._rates[tried_from]:
            # A busy machine can make either look slow: ask again, but less and less often.
            self._next_try, self._patience = self._age + self._patience, self._patience * 2
            self._go(tried_from, f"{tried_from} workers bring more than the training process by itself")
        elif with_workers_s * CALLS_WORKERS_BACK < seen.seconds / seen.batches and not self._of_no_use:
            self._tried_from = 0
            self._go(self._crew, "the consumer has become slow enough for workers to be of use")

    def _with(self, seen: Observation) -> None:
        ceiling = self._ceiling(seen.cores, seen.cpu_s / seen.work_s if seen.work_s else 1.0)
        waits = seen.waited_s / seen.seconds
        if self.workers > ceiling:
            self._tried_from = None
            self._go(ceiling, f"{seen.cores:g} cores to use")
        elif waits > STARVED:
            self._starved(seen, ceiling)
        else:
            self._tried_from = None
            if waits < FED:
                self._fed(seen)
            else:
                self._calm = 0

    # --- more or fewer of them ----------------------------------------------------------------------------------------

    def _starved(self, seen: Observation, ceiling: int) -> None:
        self._calm = 0
        self._here.append(seen.pace)
        rate = self._rates[self.workers] = statistics.fmean(self._here)
        if self._tried_from is not None:
            gain = rate / self._rates.get(self._tried_from, rate)
            if len(self._here) == 1 and 1 / CLEAR < gain < CLEAR:
                return  # windows differ by a few percent: looked at twice
            tried_from, self._tried_from = self._tried_from, None
            if self._judged(tried_from, gain):
                return
        if seen.busy < 1 - IDLE and self.depth < 4:
            self.depth = min(4.0, self.depth * 1.5)
            self._here.clear()
            self._warming = True
            self._say(f"batches take unevenly long: {self.depth:g} ahead a worker")
        elif seen.busy >= BUSY:
            self._more_or_fewer(seen, ceiling)
        else:
            self._say("the consumer waits, but not for workers")

    def _more_or_fewer(self, seen: Observation, ceiling: int) -> None:
        limit = min(ceiling, (self._too_many or self._most + 1) - 1)
        wanted = min(limit, max(self.workers + 1, min(_needed(seen), int(self._leap * self.workers))))
        fewer = int(FEWER * self.workers)
        as_then = self._rates[self.workers] / self._all_needed.get(self.workers, math.inf)
        if wanted > self.workers:
            self._try(wanted, "every worker is busy and the consumer waits")
        elif fewer and not seen.computes and self._age >= self._ask_again and not 1 / CLEAR < as_then < CLEAR:
            self._try(fewer, "whether fewer bring as much")
        elif self.workers == ceiling > seen.cores:
            self._say(f"no more than {ceiling} on {seen.cores:g} cores, even if they mostly wait for storage")
        elif self.workers == ceiling:
            self._say(f"all {seen.cores:g} cores are in use")
        else:
            self._say(f"more than {self.workers} workers bring nothing")

    def _judged(self, tried_from: int, gain: float) -> bool:
        """Whether the step from `tried_from` to here is taken back, or a smaller one is tried."""
        if tried_from > self.workers:
            if self._kept_up or gain < 1 / WORTH_IT:  # the consumer did not wait before, and does now
                if self._kept_up:
                    self._too_few = max(self._too_few, self.workers)
                self._ask_again, self._fewer_patience = self._age + self._fewer_patience, 2 * self._fewer_patience
                self._all_needed[tried_from] = self._rates[tried_from]
                self._go(tried_from, f"{self.workers} workers bring less than {tried_from}")
                return True
            self._too_many, self._leap = self.workers + 1, STRIDE
            return False
        if gain < WORTH_IT:
            self._too_many, self._leap = self.workers, STRIDE
            self._go(tried_from, f"{self.workers} workers brought no more than {tried_from}")
            return True
        enough = math.ceil(tried_from * gain)
        if enough < FEWER * self.workers:  # threads of one core bring less than cores, but not as little as this
            self._leap = STRIDE
            self._try(enough, f"{self.workers} workers brought no more than {enough} would")
            return True
        self._all_needed[self.workers] = self._rates[self.workers]
        return False

    def _fed(self, seen: Observation) -> None:
        needed = max(1, math.ceil(seen.busy_s / seen.seconds / KEEPS_UP), self._too_few + 1)
        self._calm = self._calm + 1 if needed < self.workers else 0
        if self._calm >= 2:
            self._calm = 0
            self._rates[self.workers] = seen.rate
            # Halfway: how busy the others get with one gone is a guess.
            self._try((self.workers + needed) // 2, "fewer workers keep up")
            self._kept_up = True
            return
        self._say(f"{self.workers} workers keep up")

    def _count_kills(self, seen: Observation) -> None:
        self._kills += seen.memory_kills
        if self._kills >= 2:
            self._kills = 0
            self._most = max(1, min(self.workers, self._most) - 1)
            self._tried_from = None
            self._go(min(self.workers, self._most), "workers were killed for memory")

    def _ceiling(self, cores: float, cpu_share: float) -> int:
        """Workers that compute need a core each; who mostly waits can share one with three, or with all declared."""
        four, all_of_them = (round(cores / min(1.0, max(least, cpu_share))) for least in (0.25, 0.02))
        return max(1, min(self._most, max(four, min(self._declared, all_of_them))))

    def _forget_sometimes(self) -> None:
        self._age += 1
        if self._age >= self._forget_at:
            self._forget_at *= 2
            self._too_many, self._too_few, self._of_no_use = None, 0, False

    def _try(self, workers: int, why: str) -> None:
        self._tried_from, self._kept_up = self.workers, False
        self._go(workers, why)

    def _go(self, workers: int, why: str) -> None:
        if workers != self.workers:
            self._warming = True
            self._here.clear()
        self.workers = workers
        self._say(why)

    def _say(self, why: str) -> None:
        self.why = why


def _needed(seen: Observation) -> int:
    """How many workers would keep up with a consumer that never waits."""
    takes_s = max(seen.seconds - seen.waited_s, 1e-9)  # the consumer, for as many batches
    return math.ceil(min(seen.busy_s / takes_s / KEEPS_UP, 1e6))
