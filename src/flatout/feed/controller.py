"""How many workers, and how many batches ahead: a small state machine over what was measured in the last
window.

    the loop waits, workers all busy  ──► more workers, as long as each step brings more batches a second; then fewer,
                                          unless each computes on a core of its own, kept if they bring as many
    the loop waits, workers not busy  ──► more batches ahead (uneven samples), else nothing
    the loop never waits              ──► fewer workers, down to the fewest that keep up
    the loop waits, batches are tiny  ──► none: making one takes less time than handing it over

Every step is compared with the pace before it and taken back when it brought nothing; limits that were
found are remembered, so the numbers settle. `Controller` has no clock: an `Observation` says how long its
window was. `Tuning` measures the windows of one loader, and knows of the other loaders that share its
cores.
"""

from __future__ import annotations

import logging
import math
import statistics
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from flatout.feed.channel import Done
from flatout.sample.budget import Budget

log = logging.getLogger("flatout.feed")

MAX_WORKERS = 128
STARVED, FED = 0.03, 0.015  # share of the window that the loop waited: above, below
BUSY = 0.75  # share of their time that workers work, above which more of them may help
MAX_IDLE = 0.05  # share of their time that workers may be idle before more batches are begun ahead
MAX_DEPTH = 4.0
MIN_GAIN = 1.025  # a step up has to bring this much
FIRST_LEAP, LATER_LEAP = 3.0, 1.5  # times as many workers at once; the second after a step went too far
CLEAR_GAIN = 1.15  # a difference of this much is no accident
FEWER = 0.75  # times as many workers are tried where no more are to be had
COMPUTES = 0.85  # share of its work that a worker computes where fewer could not do as much
KEEPS_UP = 0.85  # how busy workers may be where the loop is the limit
REMEMBER_WINDOWS = 40  # after which a limit that was found is tried again; then twice as many each time
WINDOW_S, GLANCE_S = 1.0, 0.1  # how long a window is; and where the differences are large
WINDOW_BATCHES = 8
TINY_S = 2e-3  # batches that take longer are never made in the training process because of their size
RETURN_GAIN = 1.1  # how much quicker workers have to promise to be before they are started again
RECENT_S = 5.0  # a loader that was used this recently shares the cores
_QUICKER = "batches take less time to make than to hand over"


@dataclass(slots=True, kw_only=True)
class Observation:
    """One window of a running loader."""

    seconds: float = 0.0
    batches: int = 0
    waited_s: float = 0.0  # by the loop, for workers, or while a batch is made in its own process
    parent_s: float = 0.0  # what handing over took the training process beside that
    workers: int = 0
    busy_s: float = 0.0  # in which workers had something to do, summed over them
    made: int = 0  # batches that they finished
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
        """Batches a second that the workers make when they are all at work, by the time a batch takes one
        of them.

        What the loop gets does not tell it within seconds: workers that began together end together, and
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
    """Decides from one observation to the next. `workers` and `depth` (batches under way a worker) are its
    decision.

    No workers at all (`may_do_without`) means that batches are made in the training process.
    """

    def __init__(self, workers: int, *, cores: float, may_do_without: bool = False) -> None:
        self._max_workers, self._declared = MAX_WORKERS, workers
        self.workers = min(workers, self._ceiling(cores, 1.0))
        self.depth = 2.0
        self.why = "to begin with" if self.workers == workers else f"{workers} declared, {cores:g} cores to use"
        self.may_do_without = may_do_without
        self.window_s = GLANCE_S if may_do_without else WINDOW_S
        self._rates: dict[int, float] = {}
        self._tried_from: int | None = None  # the count before a step whose effect is not known yet
        self._kept_up = False  # before that step the loop did not wait
        self._hand_over_s = 0.0  # a batch, when workers were last given up
        self._workers_before = 1  # how many they were
        self._returned_in_vain = False
        self._next_try, self._patience = 0, 4  # windows until doing without workers is tried again
        self._recent_paces: deque[float] = deque(maxlen=4)  # with so many workers
        self._all_needed: dict[int, float] = {}  # so many, at this rate: fewer brought less
        self._ask_again, self._fewer_patience = 0, 8  # windows until fewer are tried again
        self._too_many: int | None = None
        self._leap = FIRST_LEAP
        self._too_few = 0
        self._calm_windows = 0
        self._warming_up = True
        self._age, self._forget_at = 0, REMEMBER_WINDOWS
        self._kills = 0

    def observe(self, seen: Observation) -> None:
        """Take in one window, and decide."""
        self._count_kills(seen)
        if self._warming_up or seen.workers != self.workers:
            self._warming_up = False  # the window in which a change took place says nothing
            return
        self._forget_sometimes()
        if self.workers == 0:
            self._without_workers(seen)
        elif not self._try_without(seen):
            self._with_workers(seen)

    def observe_pass(self, seen: Observation) -> None:
        """Take in a pass that is over, from the start of its workers. Where the training process would have
        taken less time for all their work than it has waited, the next pass does without them."""
        if self.may_do_without and self.workers and seen.made and seen.batches and seen.made_s < seen.waited_s:
            self._rates[self.workers] = seen.rate
            self._tried_from, self._workers_before = None, self.workers
            self._go(0, "a pass takes less time than to start workers for it")

    # --- without workers, or with some --------------------------------------------------------------------------------

    def _try_without(self, seen: Observation) -> bool:
        """Whether doing without workers is tried now, or there is no more to learn from this window."""
        returned, self._tried_from = self._tried_from == 0, self._tried_from or None
        glance, self.window_s = self.window_s < WINDOW_S, WINDOW_S
        if returned and seen.rate < self._rates[0]:
            self._returned_in_vain = True
            self._go(0, _QUICKER)
            return True
        tiny = seen.work_s < TINY_S * seen.batches and seen.waited_s > STARVED * seen.seconds
        due = self._age >= self._next_try and not returned and self._tried_from is None
        if self.may_do_without and tiny and due:
            self._rates[self.workers], self._hand_over_s = seen.rate, seen.parent_s / seen.batches
            self._tried_from = self._workers_before = self.workers
            self.window_s = GLANCE_S
            self._go(0, _QUICKER)
            return True
        return glance

    def _without_workers(self, seen: Observation) -> None:
        """Were workers quicker, or would they be by now?"""
        tried_from, self._tried_from = self._tried_from, None
        self.window_s = WINDOW_S
        self._rates[0] = seen.rate
        # Workers make batches while the loop is at its step: only the longer of the two counts.
        step_s = (seen.seconds - seen.waited_s) / seen.batches  # what the loop does between batches
        with_workers_s = max(1 / self._rates.get(self._workers_before, math.inf), step_s + self._hand_over_s)
        if tried_from and seen.rate < self._rates[tried_from]:
            # A busy machine can make either look slow: ask again, but less and less often.
            self._next_try, self._patience = self._age + self._patience, self._patience * 2
            self._go(tried_from, f"{tried_from} workers bring more than the training process alone")
        elif with_workers_s * RETURN_GAIN < seen.seconds / seen.batches and not self._returned_in_vain:
            self._tried_from = 0
            self._go(self._workers_before, "the loop has become slow enough for workers to be of use")

    def _with_workers(self, seen: Observation) -> None:
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
                self._calm_windows = 0

    # --- more or fewer of them ----------------------------------------------------------------------------------------

    def _starved(self, seen: Observation, ceiling: int) -> None:
        self._calm_windows = 0
        self._recent_paces.append(seen.pace)
        rate = self._rates[self.workers] = statistics.fmean(self._recent_paces)
        if self._tried_from is not None:
            gain = rate / self._rates.get(self._tried_from, rate)
            if len(self._recent_paces) == 1 and 1 / CLEAR_GAIN < gain < CLEAR_GAIN:
                return  # windows differ by a few percent: look twice
            tried_from, self._tried_from = self._tried_from, None
            if self._judge_step(tried_from, gain):
                return
        if seen.busy < 1 - MAX_IDLE and self.depth < MAX_DEPTH:
            self.depth = min(MAX_DEPTH, self.depth * 1.5)
            self._recent_paces.clear()
            self._warming_up = True
            self.why = f"batches take unevenly long: {self.depth:g} ahead a worker"
        elif seen.busy >= BUSY:
            self._more_or_fewer(seen, ceiling)
        else:
            self.why = "the loop waits, but not for workers"

    def _more_or_fewer(self, seen: Observation, ceiling: int) -> None:
        limit = min(ceiling, (self._too_many or self._max_workers + 1) - 1)
        more = min(limit, max(self.workers + 1, min(_needed(seen), int(self._leap * self.workers))))
        fewer = int(FEWER * self.workers)
        since_then = self._rates[self.workers] / self._all_needed.get(self.workers, math.inf)
        may_ask = self._age >= self._ask_again and not 1 / CLEAR_GAIN < since_then < CLEAR_GAIN
        if more > self.workers:
            self._try(more, "every worker is busy and the loop waits")
        elif fewer and not seen.computes and may_ask:
            self._try(fewer, "whether fewer bring as much")
        elif self.workers == ceiling > seen.cores:
            self.why = f"no more than {ceiling} on {seen.cores:g} cores, even if they mostly wait for storage"
        elif self.workers == ceiling:
            self.why = f"all {seen.cores:g} cores are in use"
        else:
            self.why = f"more than {self.workers} workers bring nothing"

    def _judge_step(self, tried_from: int, gain: float) -> bool:
        """Whether the step from `tried_from` to here is taken back, or a smaller one is tried."""
        if tried_from > self.workers:
            return self._judge_step_down(tried_from, gain)
        if gain < MIN_GAIN:
            self._too_many, self._leap = self.workers, LATER_LEAP
            self._go(tried_from, f"{self.workers} workers brought no more than {tried_from}")
            return True
        enough = math.ceil(tried_from * gain)
        if enough < FEWER * self.workers:  # threads of one core bring less than cores, but not as little as this
            self._leap = LATER_LEAP
            self._try(enough, f"{self.workers} workers brought no more than {enough} would")
            return True
        self._all_needed[self.workers] = self._rates[self.workers]
        return False

    def _judge_step_down(self, tried_from: int, gain: float) -> bool:
        # Fewer bring as much: the others were in each other's way, or waited for the same disk.
        if not self._kept_up and gain >= 1 / MIN_GAIN:
            self._too_many, self._leap = self.workers + 1, LATER_LEAP
            return False
        if self._kept_up:  # the loop did not wait before, and does now
            self._too_few = max(self._too_few, self.workers)
        self._ask_again, self._fewer_patience = self._age + self._fewer_patience, 2 * self._fewer_patience
        self._all_needed[tried_from] = self._rates[tried_from]
        self._go(tried_from, f"{self.workers} workers bring less than {tried_from}")
        return True

    def _fed(self, seen: Observation) -> None:
        needed = max(1, math.ceil(seen.busy_s / seen.seconds / KEEPS_UP), self._too_few + 1)
        self._calm_windows = self._calm_windows + 1 if needed < self.workers else 0
        if self._calm_windows < 2:
            self.why = f"{self.workers} workers keep up"
            return
        self._calm_windows = 0
        self._rates[self.workers] = seen.rate
        # Halfway: how busy the others get with one gone is a guess.
        self._try((self.workers + needed) // 2, "fewer workers keep up")
        self._kept_up = True

    def _count_kills(self, seen: Observation) -> None:
        self._kills += seen.memory_kills
        if self._kills >= 2:
            self._kills = 0
            self._max_workers = max(1, min(self.workers, self._max_workers) - 1)
            self._tried_from = None
            self._go(min(self.workers, self._max_workers), "workers were killed for memory")

    def _ceiling(self, cores: float, cpu_share: float) -> int:
        """Workers that compute need a core each; four that wait can share one, or all that were declared."""
        sharing, declared = (round(cores / min(1.0, max(least, cpu_share))) for least in (0.25, 0.02))
        return max(1, min(self._max_workers, max(sharing, min(self._declared, declared))))

    def _forget_sometimes(self) -> None:
        self._age += 1
        if self._age >= self._forget_at:
            self._forget_at *= 2
            self._too_many, self._too_few, self._returned_in_vain = None, 0, False

    def _try(self, workers: int, why: str) -> None:
        self._tried_from, self._kept_up = self.workers, False
        self._go(workers, why)

    def _go(self, workers: int, why: str) -> None:
        if workers != self.workers:
            self._warming_up = True
            self._recent_paces.clear()
        self.workers = workers
        self.why = why


def _needed(seen: Observation) -> int:
    """How many workers would keep up with a loop that never waits."""
    takes_s = max(seen.seconds - seen.waited_s, 1e-9)  # the loop, for as many batches
    return math.ceil(min(seen.busy_s / takes_s / KEEPS_UP, 1e6))


# --- measuring --------------------------------------------------------------------------------------------------------

_all: list[weakref.ref[Tuning]] = []  # replaced, never changed: several threads may go through it
_latest_end_s = -math.inf  # of any pass
_workers_by_kind: dict[Hashable, int] = {}  # what a loader that is built again for every epoch begins with


class Tuning:
    """How many workers and batches ahead one loader should have. `kind` is the same for loaders that are alike."""

    def __init__(self, workers: int, budget: Budget, *, fixed: bool, may_do_without: bool, kind: Hashable) -> None:
        global _all
        self._controller = Controller(workers, cores=budget.cores_allowed, may_do_without=may_do_without)
        self._kind = kind
        self._fixed = fixed
        if fixed:
            self.hold(workers, "as declared")
        elif _workers_by_kind.get(kind):
            self._controller.workers, self._controller.why = _workers_by_kind[kind], "what the loader before it had"
        self._budget = budget
        self._window = Observation()
        self._pass = Observation()  # batches, waits and work since workers were started for it
        self._asked_at: float | None = None  # in this pass
        self._first_asked_at = 0.0
        self._last_pass = (-math.inf, -math.inf)  # from its first batch asked for to its end
        self._kills = out_of_memory_kills()
        _all = [*(ref for ref in _all if ref() is not None), weakref.ref(self)]

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

    def hold(self, workers: int, why: str = "") -> None:
        """Set the number from outside."""
        self._controller.workers = workers
        self._controller.why = why or self._controller.why

    def keep(self) -> None:
        """Decide nothing any more."""
        self._fixed = True

    def begin_pass(self, start_s: float) -> None:
        """A pass begins; to start its workers has taken so long."""
        self._pass = Observation(seconds=start_s, waited_s=start_s)

    def end_pass(self, now: float) -> None:
        """A pass is over: until the next one, nobody waits, and the cores are free for others."""
        global _latest_end_s
        if self._asked_at is None:
            return
        self._last_pass, self._asked_at = (self._first_asked_at, now), None
        _latest_end_s = max(_latest_end_s, now)
        if self._fixed:
            return
        over = self._pass
        over.seconds += now - self._first_asked_at
        self._controller.observe_pass(over)
        _workers_by_kind[self._kind] = self.workers

    def add_busy(self, seconds: float) -> None:
        """A worker had something to do for so long."""
        self._window.busy_s += seconds

    def add_batch(self, done: Done) -> None:
        """A worker has finished a batch."""
        for window in (self._window, self._pass):
            window.made += 1
            window.made_s += done.wall_s
            window.cpu_s += done.cpu_s
            window.run_delay_s += done.run_delay_s

    def count_death(self) -> None:
        """A worker is gone; whether the kernel killed it for memory is seen in its count of such kills."""
        self._controller.may_do_without = False  # what kills a worker should not get at the training process
        kills = out_of_memory_kills()
        self._window.memory_kills += max(0, kills - self._kills)
        self._kills = kills

    def handed_over(self, batches: int, waited_s: float, parent_s: float, now: float) -> bool:
        """The loop got batches; whether these were the last of a window, and `decide` is due."""
        window = self._window
        if self._asked_at is None:
            self._asked_at = self._first_asked_at = now - waited_s - parent_s
        window.seconds += now - self._asked_at - self._other_passes_s(self._asked_at)
        self._asked_at = now
        window.batches += batches
        window.waited_s += waited_s
        window.parent_s += parent_s
        self._pass.batches += batches
        self._pass.waited_s += waited_s
        enough = window.batches >= WINDOW_BATCHES and (window.made >= WINDOW_BATCHES / 2 or not self.workers)
        return enough and window.seconds >= self._controller.window_s

    def decide(self, workers: int) -> bool:
        """Look at a window that is over, which had so many workers. Whether their number is to change."""
        window, self._window = self._window, Observation()
        if self._fixed:
            return False
        window.workers, window.cores = workers, self.cores()
        before = self.workers
        self._controller.observe(window)
        if self.workers != before:
            log.info("%d → %d workers: %s", before, self.workers, self.why)
        return self.workers != before

    def cores(self) -> float:
        """A fair share of the cores, among the loaders that were used in the last seconds."""
        assert self._asked_at is not None
        asked = [other._asked_at for other in self._others()]
        sharing = sum(at is not None and self._asked_at - at < RECENT_S for at in asked)
        return max(1.0, self._budget.cores_allowed / (1 + sharing))

    def _other_passes_s(self, since: float) -> float:
        """How long whole passes of other loaders took meanwhile: an evaluation is not this loop's time."""
        total = 0.0
        if _latest_end_s <= since:
            return total
        for begin, end in sorted(other._last_pass for other in self._others()):
            if end > since:  # two that were used together took their time only once
                total += end - max(begin, since)
                since = end
        return total

    def _others(self) -> list[Tuning]:
        return [other for ref in _all if (other := ref()) is not None and other is not self]


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory so far, in this control group or machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            for line in Path(path).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            continue
    return 0
