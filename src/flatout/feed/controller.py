"""How many workers, and how many batches ahead, by what was measured in the last window.

    the loop waits, workers all busy  ──► more workers, as long as they bring more batches a second
    the loop waits, workers not busy  ──► more batches ahead (uneven samples), else nothing
    the loop never waits              ──► fewer workers, down to the fewest that keep up
    a pass takes less time to make than its workers took to start ──► none in the next pass

Every step is compared with the pace before it, and taken back as far as it brought nothing. `Controller` has
no clock; `Tuning` measures the windows of one loader, and knows of the other loaders that share its cores.
"""

from __future__ import annotations

import logging
import math
import statistics
import weakref
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
CLEAR_GAIN = 1.15  # a difference of this much is no accident
LOOKS = 4  # windows that are looked at where a difference is not clear
FIRST_LEAP, LATER_LEAP = 3.0, 1.5  # times as many workers at once; the second after a step went too far
FEWER = 0.75  # times as many workers, below which a step is taken back a part of the way
KEEPS_UP = 0.85  # how busy workers may be where the loop is the limit
REMEMBER_WINDOWS = 40  # after which a limit that was found is tried again; then twice as many each time
WINDOW_S, WINDOW_BATCHES = 1.0, 8  # how long a window is, and how many batches it has at least
RECENT_S = 5.0  # a loader that was used this recently shares the cores


@dataclass(slots=True, kw_only=True)
class Observation:
    """One window of a running loader, or a whole pass."""

    seconds: float = 0.0
    batches: int = 0
    waited_s: float = 0.0  # by the loop, for workers, or while a batch is made in its own process
    workers: int = 0
    made: int = 0  # batches that they finished
    made_s: float = 0.0  # what those took, whenever they were begun
    cpu_s: float = 0.0
    run_delay_s: float = 0.0  # ready to run, but no core was free
    cores: float = 1.0  # that this loader may use
    memory_kills: int = 0

    @property
    def busy(self) -> float:
        """The share of their time that workers worked."""
        return min(1.0, self.made_s / (self.seconds * self.workers))

    @property
    def capacity(self) -> float:
        """Batches a second that the workers make when they are all at work, by the time a batch takes
        one of them.

        What the loop gets does not tell it within seconds: it comes in bursts, with long waits between.
        """
        return self.workers * self.made / self.made_s

    @property
    def cpu_share(self) -> float:
        """The share of its work that a worker needs a core for, had it one to itself."""
        work_s = max(self.made_s - self.run_delay_s, self.cpu_s)
        return self.cpu_s / work_s if work_s else 1.0


class Controller:
    """Decides from one observation to the next: `workers` and `depth`, the batches under way a worker.

    No workers at all (`may_do_without`) means that batches are made in the training process.
    """

    def __init__(self, workers: int, *, cores: float, may_do_without: bool = False) -> None:
        self._max_workers, self._declared = MAX_WORKERS, workers
        self.workers = min(workers, self._ceiling(cores, 1.0))
        self.depth = 2.0
        self.why = "to begin with" if self.workers == workers else f"{workers} declared, {cores:g} cores to use"
        self.may_do_without = may_do_without
        self._with_workers = (1, math.inf)  # how many they were before there were none, and what the loop waited
        self._paces: dict[int, float] = {}  # what the counts that were tried have brought
        self._recent: list[float] = []  # paces of the present count, window by window
        self._tried_from: int | None = None  # the count before a step whose effect is not known yet
        self._too_many, self._too_few = MAX_WORKERS + 1, 0
        self._leap = FIRST_LEAP
        self._calm_windows = 0
        self._warming_up = True
        self._age, self._forget_at = 0, REMEMBER_WINDOWS
        self._kills = 0

    def observe(self, seen: Observation) -> None:
        """Take in one window, and decide."""
        self._count_kills(seen)
        if self._warming_up or seen.workers != self.workers or not seen.workers:
            self._warming_up = False  # the window in which a change took place says nothing
            return
        self._forget_sometimes()
        ceiling = self._ceiling(seen.cores, seen.cpu_share)
        waits = seen.waited_s / seen.seconds
        if waits > STARVED and self.workers <= ceiling:
            self._calm_windows = 0
            self._starved(seen, ceiling)
            return
        self._tried_from = None
        if self.workers > ceiling:
            self._go(ceiling, f"{seen.cores:g} cores to use")
        elif waits < FED:
            self._fed(seen)

    def observe_pass(self, seen: Observation) -> None:
        """Take in a pass that is over, from the start of its workers. Where the training process would have
        taken less time for all their work than it has waited, the next pass does without them."""
        if not self.may_do_without or not seen.batches:
            return
        waited_s = seen.waited_s / seen.batches
        if self.workers and seen.made and seen.made_s < seen.waited_s:
            self._with_workers = self.workers, waited_s
            self._go(0, "a pass takes less time than to start workers for it")
        elif not self.workers and waited_s > self._with_workers[1]:
            self.may_do_without = False
            self._go(self._with_workers[0], "the loop waits less for workers than without them")

    def _starved(self, seen: Observation, ceiling: int) -> None:
        self._recent.append(seen.capacity * min(1.0, seen.busy / BUSY))
        self._paces[self.workers] = statistics.fmean(self._recent[-LOOKS:])
        if self._tried_from is not None and not self._judge_step(self._tried_from):
            return
        if seen.busy < 1 - MAX_IDLE and self.depth < MAX_DEPTH:
            self.depth = min(MAX_DEPTH, self.depth * 1.5)
            self._recent.clear()
            self._warming_up = True
            self.why = f"batches take unevenly long: {self.depth:g} ahead a worker"
        elif seen.busy >= BUSY:
            self._more(seen, ceiling)
        else:
            self.why = "the loop waits, but not for workers"

    def _judge_step(self, before: int) -> bool:
        """Whether the step from `before` to the present count is judged, and was a good one."""
        gain = self._paces[self.workers] / self._paces[before]
        if len(self._recent) < LOOKS and 1 / CLEAR_GAIN < gain < CLEAR_GAIN:
            return False
        self._tried_from = None
        enough = math.ceil(before * gain)
        if gain < MIN_GAIN or self.workers < before:
            self._leap = LATER_LEAP
        if self.workers < before and gain >= 1 / MIN_GAIN:
            # The others were in each other's way, or waited for the same disk.
            self._too_many = self.workers + 1
            return True
        if self.workers < before:
            self._too_few = self.workers
            self._go(before, f"{self.workers} workers bring less than {before}")
        elif gain < MIN_GAIN:
            self._too_many = self.workers
            self._go(before, f"{self.workers} workers brought no more than {before}")
        elif enough < FEWER * self.workers:  # threads of one core bring less than cores, but not as little as this
            self._try(enough, f"{self.workers} workers brought no more than {enough} would")
        else:
            return True
        return False

    def _more(self, seen: Observation, ceiling: int) -> None:
        takes_s = max(seen.seconds - seen.waited_s, 1e-9)  # the loop, for as many batches
        needed = math.ceil(min(seen.made_s / takes_s / KEEPS_UP, 1e6))
        leap = max(self.workers + 1, min(needed, int(self._leap * self.workers)))
        more = min(ceiling, self._too_many - 1, leap)
        if more > self.workers:
            self._try(more, "every worker is busy and the loop waits")
        elif self.workers == ceiling:
            self.why = f"no more than {ceiling} on {seen.cores:g} cores"
        else:
            self.why = f"more than {self.workers} workers bring nothing"

    def _fed(self, seen: Observation) -> None:
        needed = max(1, math.ceil(seen.made_s / seen.seconds / KEEPS_UP), self._too_few + 1)
        self._calm_windows = self._calm_windows + 1 if needed < self.workers else 0
        if self._calm_windows < 2:
            self.why = f"{self.workers} workers keep up"
            return
        self._calm_windows = 0
        self._paces[self.workers] = seen.capacity
        # Halfway: how busy the others get with one gone is a guess.
        self._try((self.workers + needed) // 2, "fewer workers keep up")

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
            self._too_many, self._too_few = MAX_WORKERS + 1, 0

    def _try(self, workers: int, why: str) -> None:
        self._tried_from = self.workers
        self._go(workers, why)

    def _go(self, workers: int, why: str) -> None:
        if workers != self.workers:
            self._warming_up = True
            self._recent.clear()
        self.workers = workers
        self.why = why


# --- measuring ----------------------------------------------------------------------------------

_all: list[weakref.ref[Tuning]] = []  # replaced, never changed: several threads may go through it


class Tuning(Controller):
    """The controller of one loader, and what it has to know."""

    def __init__(self, workers: int, budget: Budget, *, fixed: bool, may_do_without: bool) -> None:
        global _all
        super().__init__(workers, cores=budget.cores_allowed, may_do_without=may_do_without)
        self._fixed = fixed
        self._held = False
        if fixed:
            self.workers, self.why = workers, "as declared"
        self._budget = budget
        self._window = Observation()
        self._pass = Observation()  # batches, waits and work since workers were started for it
        self._asked_at: float | None = None  # in this pass
        self._pass_ended_at = -math.inf
        self._kills_before = out_of_memory_kills()
        _all = [*(ref for ref in _all if ref() is not None), weakref.ref(self)]

    def set_workers(self, workers: int, *, hold: bool) -> None:
        """Set the number from outside; with `hold` it stays, unless workers are killed for memory."""
        if workers != self.workers:  # what was learned may be long ago
            self._paces.clear()
            self._tried_from = None
            self._too_many, self._too_few = MAX_WORKERS + 1, 0
        self._go(workers, "set from outside")
        self._held = hold

    def begin_pass(self, start_s: float) -> None:
        """A pass begins; to start its workers has taken so long."""
        self._pass = Observation(waited_s=start_s)

    def end_pass(self, now: float) -> None:
        """A pass is over: until the next one, nobody waits, and the cores are free for others."""
        if self._asked_at is None:
            return
        self._pass_ended_at, self._asked_at = now, None
        if not self._held:
            self.observe_pass(self._pass)

    def add_batch(self, done: Done) -> None:
        """A worker has finished a batch."""
        for window in (self._window, self._pass):
            window.made += 1
            window.made_s += done.wall_s
            window.cpu_s += done.cpu_s
            window.run_delay_s += done.run_delay_s

    def count_death(self) -> None:
        """A worker is gone; whether the kernel killed it for memory is seen in its count of such kills."""
        self.may_do_without = False  # what kills a worker should not get at the training process
        kills = out_of_memory_kills()
        self._window.memory_kills += max(0, kills - self._kills_before)
        self._kills_before = kills

    def handed_over(self, waited_s: float, asked_at: float, now: float) -> bool:
        """The loop got a batch; whether it was the last of a window, and `decide` is due."""
        if any(other._pass_ended_at > (self._asked_at or asked_at) for other in self._others()):
            self._window = Observation()  # an evaluation, say: its time is not this loop's
            self._asked_at = None
        window = self._window
        window.seconds += now - (self._asked_at or asked_at)
        self._asked_at = now
        for one in (window, self._pass):
            one.batches += 1
            one.waited_s += waited_s
        return window.seconds >= WINDOW_S and window.batches >= WINDOW_BATCHES and window.made >= WINDOW_BATCHES / 2

    def decide(self, workers: int) -> bool:
        """Look at a window that is over, which had so many workers. Whether their number is to change."""
        window, self._window = self._window, Observation()
        if self._fixed:
            return False
        window.workers, window.cores = workers, self.cores()
        before = self.workers
        if self._held:
            self._count_kills(window)
        else:
            self.observe(window)
        if self.workers != before:
            log.info("%d → %d workers: %s", before, self.workers, self.why)
        return self.workers != before

    def cores(self) -> float:
        """A fair share of the cores, among the loaders that were used in the last seconds."""
        assert self._asked_at is not None
        sharing = sum(self._asked_at - (other._asked_at or -math.inf) < RECENT_S for other in self._others())
        return max(1.0, self._budget.cores_allowed / (1 + sharing))

    def _others(self) -> list[Tuning]:
        return [other for ref in _all if (other := ref()) is not None and other is not self]


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory so far, in this control group or machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            fields = dict(line.split(" ", 1) for line in Path(path).read_text().splitlines())
            return int(fields["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return 0
