"""A training that tunes itself while it trains (`flatout run --tune`). No step is repeated, and none is lost.

    the loader as declared is measured ─► its controller chooses ─► measured again: kept, or taken back
      ─► device prefetch, in turns (LiveTurns) ─► garbage collections, by their pauses
      ─► once a minute: has the bottleneck moved? Then the loader again

Only changes that leave what is learned alone. With several ranks the controllers choose and nothing
is compared: a rank that waits for the others does not show what its own loader brings.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from flatout.files import write_whole
from flatout.inside.recorder import CHECKPOINT, DATA, EVALUATION, GC, OWN, START
from flatout.inside.run_facts import ranks
from flatout.inside.trial import LiveTurns
from flatout.launch.protocol import TUNED
from flatout.model.plan import Outcome, Plan
from flatout.model.records import AppliedChange
from flatout.model.stats import ONE_RUN, Measured, block_means, error_of, gain
from flatout.model.turns import PAYS
from flatout.redact import redact_text
from flatout.trace import Step
from flatout.trace.downsample import LightSteps

if TYPE_CHECKING:
    from flatout.feed.scheduler import BatchScheduler
    from flatout.inside.changes.applied import Applied
    from flatout.inside.recording import Recording

LOADER, PREFETCH, FREEZE, PAGE_LOCKED = "loader", "device_prefetch", "gc_freeze", "pin_memory"

_COLD_STEPS = 10  # before anything is measured
_FEWEST_STEPS, _AT_LEAST_S = 30, 5.0  # of a measurement
_TIMES_THE_LAG = 3  # and so many times the batches that may lie ready: those show a loader faster than it is
_STILL_STEPS, _STILL_S = 40, 5.0  # a number of workers that has not changed for so long is chosen …
_MOST_STILL = 10  # … and after so many times as long the present one, whatever it is
_MOST_ROUNDS = 3  # with and without
_WORTH = 0.01  # a smaller share of the time is not worth a change
_GC_AT_LEAST_S, _GC_LEFT = 20.0, 0.5  # what leaves more of the pauses is taken back
_MINUTE_S, _AGAIN_AFTER_S = 60.0, 300.0
_SLOWER, _WAITS_MORE = 1.25, 0.1  # times the median step, and added share of waiting: the bottleneck has moved


class Seen(NamedTuple):
    """A training step, without the evaluation, checkpoints and work of flatout's own in it."""

    number: int
    end_s: float
    wall_s: float
    waited_s: float = 0.0  # for data
    collected_s: float = 0.0  # garbage


def seen_in(record: Step | LightSteps) -> Iterator[Seen]:
    """The training steps of a record."""
    if isinstance(record, LightSteps):
        steps = zip(record.ends_s, record.walls_ms, record.waits_ms, strict=True)
        for index, (end_s, wall_ms, wait_ms) in enumerate(steps, record.first_index):
            yield Seen(index, end_s, wall_ms / 1e3, wait_ms / 1e3)
    elif record.kind == "train":
        other_s, waited_s, collected_s = (
            sum(span.host_ms for span in record.spans if span.name in names) / 1e3
            for names in ((EVALUATION, CHECKPOINT, OWN), (DATA, START), (GC,))
        )
        wall_s = record.wall_ms / 1e3
        yield Seen(record.index, record.start_s + wall_s, wall_s - other_s, waited_s, collected_s)


@dataclass(slots=True)
class Steps:
    """Steps in a row, measured."""

    walls_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    waited_s: float = 0.0
    collected_s: float = 0.0

    def add(self, step: Seen) -> None:
        """One more."""
        self.walls_s.append(step.wall_s)
        self.seconds += step.wall_s
        self.waited_s += step.waited_s
        self.collected_s += step.collected_s

    @property
    def waiting(self) -> float:
        """The share of their time that they waited for data."""
        return self.waited_s / self.seconds

    @property
    def collecting(self) -> float:
        """The share of their time that garbage was collected."""
        return self.collected_s / self.seconds

    @property
    def speed(self) -> Measured:
        """Steps a second."""
        return Measured(value=len(self.walls_s) / self.seconds, error=error_of(block_means(self.walls_s)))


Work = Generator[None, None, None]  # goes on after each step


class Tuner:
    """Decides between steps. What it raises ends the tuning, and nothing else."""

    def __init__(self, applied: Applied, recording: Recording) -> None:
        self._applied, self._recording = applied, recording
        self._own, self._note = recording.recorder.as_own, recording.note
        self._feeds: list[BatchScheduler] = []
        self._workers: list[int] = []  # of each feed
        self._hold = True
        self._left = 0  # batches that may have lain ready when the numbers were last set
        self._fresh: list[Seen] = []  # steps recorded since the last look
        self._ended = 0  # steps
        self._now_s = 0.0  # the end of the last step that was recorded
        self._then = Steps()  # when the loader was decided
        self._decided: dict[str, tuple[bool, str]] = {}  # whether a change is kept, and why
        self._work = self._all()
        self.wants_every_step = True
        self.over = False

    def saw(self, record: Step | LightSteps) -> None:
        """Steps have been recorded."""
        if not self.over:
            self._fresh += seen_in(record)

    def step_ended(self, steps: int) -> None:
        """So many steps are over. What is switched now counts from the next one on."""
        if self.over:
            return
        self._ended = steps
        self._now_s = self._fresh[-1].end_s if self._fresh else self._now_s
        try:
            self._follow_loaders()
            next(self._work)
        except Exception as problem:
            self.over, self.wants_every_step = True, False
            self._tell(f"tuning has ended ({redact_text(f'{type(problem).__name__}: {problem}')}); training goes on")
        self._fresh.clear()

    # -- what is decided, one after the other

    def _all(self) -> Work:
        for name in (PREFETCH, FREEZE):
            self._applied.switch(name, on=False)
        yield from self._steps(lambda steps: len(steps.walls_s) >= _COLD_STEPS)
        alone = ranks()[1] == 1
        yield from self._decide_loader(compare=alone)
        if alone:
            yield from self._decide_prefetch()
            yield from self._decide_freeze()
        self.wants_every_step = False
        while True:
            if alone and LOADER in self._decided and not self._applied.why_not_made(LOADER):
                yield from self._decide_again()
            yield

    def _decide_loader(self, *, compare: bool) -> Work:
        if not self._feeds:
            self._tell(f"the loader stays PyTorch's: {self._applied.why_not_made(LOADER) or 'none was seen'}")
            return
        declared = [feed.declared for feed in self._feeds]
        self._set(declared, hold=True, why="as declared")
        self._then = before = yield from self._measured(_AT_LEAST_S)
        if before.waiting < _WORTH:
            self._stay(declared, f"the loop waits for data in {before.waiting:.1%} of the time")
            return
        begin_with = [feed.workers or feed.recipe.declared for feed in self._feeds]
        self._set(begin_with, hold=False, why="the loader chooses from here on")
        yield from self._chosen()
        lost = [feed.given_back for feed in self._feeds if feed.left_workers]
        text = f"{_in_words(self._workers)} in place of {_numbers(declared)}"
        if lost or self._workers == declared:
            self._stay(declared, lost[0] if lost else self._feeds[0].why)
        elif compare:
            yield from self._compare(before, declared, text)
        else:
            self._decide(LOADER, f"{text}, chosen by the loader (ranks are not compared)", kept=True)

    def _stay(self, declared: list[int], why: str) -> None:
        self._decide(LOADER, f"{_in_words(declared)} as declared: {why}", kept=False)
        self._set_back(declared)

    def _compare(self, before: Steps, declared: list[int], text: str) -> Work:
        """Keep the workers that there are now if steps are faster with them than `before`, and than
        without them again: the machine may have been busy for a while. Where that is not clear, the
        same is measured up to three times."""
        chosen, without, with_them, kept = self._workers, [before.speed], list[Measured](), False
        while not kept and len(with_them) < _MOST_ROUNDS:
            self._set(chosen, hold=True, why="to compare")
            after = yield from self._measured(_AT_LEAST_S)
            with_them.append(after.speed)
            if gain(without, with_them, ONE_RUN).value <= PAYS:
                break
            self._set(declared, hold=True, why="to compare")
            without.append((yield from self._measured(_AT_LEAST_S)).speed)
            always = min(run.value for run in with_them) > max(run.value for run in without)
            kept = always and gain(without, with_them, ONE_RUN).low > PAYS
        gained = gain(without, with_them, ONE_RUN)
        self._decide(LOADER, f"{text}: {gained}, {'kept' if kept else 'taken back'}", kept=kept)
        if kept:
            self._then = after
            self._set(chosen, hold=True, why="kept")
        else:
            self._set_back(declared)

    def _decide_prefetch(self) -> Work:
        """In turns, where batches go to a GPU."""
        if self._applied.why_not_made(PREFETCH):
            return
        turns = LiveTurns(self._applied, (PREFETCH,), self._recording.folder)
        while turns.step_ended():
            yield
        result = turns.results[0]
        kept = result.decision == "faster"
        text = f"batches copied to the GPU ahead of time: {result.gain or result.note}"
        self._decide(PREFETCH, f"{text}, {'kept' if kept else 'taken back'}", kept=kept)

    def _decide_freeze(self) -> Work:
        """By the pauses themselves: they come too seldom for turns."""
        before = yield from self._measured(_GC_AT_LEAST_S)
        if before.collecting < _WORTH:
            return
        self._freeze(on=True)
        after = yield from self._measured(_GC_AT_LEAST_S)
        kept = after.collecting <= _GC_LEFT * before.collecting
        text = f"garbage collections took {before.collecting:.1%} of the time, and {after.collecting:.1%} frozen"
        self._decide(FREEZE, f"{text}, {'kept' if kept else 'taken back'}", kept=kept)
        if not kept:
            self._freeze(on=False)

    def _decide_again(self) -> Work:
        """Wait until the bottleneck has moved, and decide the loader again."""
        why = yield from self._moved()
        if self._applied.why_not_made(LOADER):
            return
        self.wants_every_step = True
        self._tell(f"{why}: the loader is decided again")
        self._applied.hand_back_loaders("")
        while not self._recording.feeds_in_use():  # PyTorch's makes the rest of this pass
            yield
        self._follow_loaders()
        yield from self._decide_loader(compare=True)
        self.wants_every_step = False

    def _moved(self) -> Generator[None, None, str]:
        """Wait until the bottleneck has moved; how that shows."""
        again_s = self._now_s + _AGAIN_AFTER_S
        then, then_median_s = self._then, median(self._then.walls_s)
        while True:
            minute = yield from self._steps(
                lambda steps: len(steps.walls_s) >= _FEWEST_STEPS and steps.seconds >= _MINUTE_S
            )
            longer = median(minute.walls_s) / then_median_s
            if self._now_s < again_s:
                continue
            if longer > _SLOWER:
                return f"steps take {longer - 1:.0%} longer than when the loader was decided"
            if minute.waiting >= then.waiting + _WAITS_MORE:
                return f"the loop waits for data in {minute.waiting:.0%} of the time, it was {then.waiting:.0%}"

    # -- looking at steps

    def _steps(self, enough: Callable[[Steps], bool], *, beyond: int = 0) -> Generator[None, None, Steps]:
        """Steps from the next one on, or from so many `beyond` it, until there are enough."""
        first, steps = self._ended + beyond, Steps()
        while not enough(steps):
            yield
            for step in self._fresh:
                if step.number >= first:
                    steps.add(step)
        return steps

    def _measured(self, at_least_s: float) -> Generator[None, None, Steps]:
        """Steps to judge by, once what lies ready is used up."""
        lag = max(self._left, self._ahead())
        least = max(_FEWEST_STEPS, _TIMES_THE_LAG * lag)
        enough = lambda steps: len(steps.walls_s) >= least and steps.seconds >= at_least_s  # noqa: E731
        return (yield from self._steps(enough, beyond=lag + 1))

    def _chosen(self) -> Work:
        """Wait until the controllers stay at a number."""
        begun = last_change = self._now_s, self._ended
        while not (self._is_since(last_change) or self._is_since(begun, times=_MOST_STILL)):
            before = self._workers
            yield
            if self._workers != before:
                last_change = self._now_s, self._ended

    def _is_since(self, then: tuple[float, int], *, times: int = 1) -> bool:
        seconds, steps = self._now_s - then[0], self._ended - then[1]
        return seconds >= times * _STILL_S and steps >= times * _STILL_STEPS

    # -- switching

    def _follow_loaders(self) -> None:
        """The controllers may have changed their numbers; a loader that the script makes again gets
        the last one's."""
        feeds = self._recording.feeds_in_use()
        for feed, workers in zip(feeds, self._workers, strict=False):
            if feed not in self._feeds:
                self._own(functools.partial(feed.resize, workers, hold=self._hold))
        self._feeds = feeds or self._feeds
        self._note_numbers(self._feeds[0].why if self._feeds else "")

    def _ahead(self) -> int:
        return max((feed.batches_ahead for feed in self._feeds), default=0)

    def _set(self, workers: Sequence[int], *, hold: bool, why: str) -> None:
        self._hold, self._left = hold, self._ahead()
        for feed, number in zip(self._feeds, workers, strict=True):
            self._own(functools.partial(feed.resize, number, hold=hold))
        self._note_numbers(why)

    def _set_back(self, declared: list[int]) -> None:
        """As many as declared. Where those are none, PyTorch makes the batches of later passes, at
        less cost."""
        self._set(declared, hold=True, why="as declared")
        self._applied.hand_back_loaders("workers bring nothing here")

    def _note_numbers(self, why: str) -> None:
        before, self._workers = self._workers, [feed.workers for feed in self._feeds]
        if before and before != self._workers:
            self._note(f"step {self._ended}: {_numbers(before)} → {_in_words(self._workers)} ({why})")

    def _freeze(self, *, on: bool) -> None:
        self._own(functools.partial(self._applied.switch, FREEZE, on=on))
        self._note(f"step {self._ended}: gc_freeze is {'on' if on else 'off'}")

    # -- what is told

    def _decide(self, name: str, text: str, *, kept: bool) -> None:
        self._decided[name] = kept, text
        self._tell(text)
        if ranks()[0] == 0:
            write_whole(self._recording.folder / TUNED, self.plan.json())

    def _tell(self, text: str) -> None:
        """A note, and a line on stderr: one for all ranks."""
        text = f"step {self._ended}: {text}"
        self._note(text)
        if ranks()[0] == 0:
            with suppress(OSError, ValueError):
                print(f"flatout: {text}", file=sys.stderr, flush=True)

    @property
    def plan(self) -> Plan:
        """What is kept, and what was tried in vain."""
        changes = self._applied.ledger.changes
        kept = {name: text for name, (is_kept, text) in self._decided.items() if is_kept}
        if kept and not self._applied.why_not_made(PAGE_LOCKED):
            kept[PAGE_LOCKED] = "in force from the first pass on, not compared"
        tried = [
            Outcome(change=changes[name], verdict="undone", note=text)
            for name, (is_kept, text) in self._decided.items()
            if not is_kept
        ]
        return Plan(changes=tuple(replace(changes[name], note=text) for name, text in kept.items()), tried=tuple(tried))

    def entries(self) -> tuple[AppliedChange, ...]:
        """For the trace: what became of each change. What was taken back, or not reached, is not in force."""
        in_force = {PAGE_LOCKED: (True, ""), LOADER: (True, "")} | self._decided
        entries = []
        for entry in self._applied.ledger.entries():
            kept, why = in_force.get(entry.name, (False, "it was not decided"))
            entries.append(entry if kept or not entry.applied else replace(entry, applied=False, how=why))
        return tuple(entries)


def _numbers(workers: Sequence[int]) -> str:
    return " and ".join(str(number or "none") for number in workers)


def _in_words(workers: Sequence[int]) -> str:
    if not any(workers):
        return "no workers"
    return f"{_numbers(workers)} worker{'s' if list(workers) != [1] else ''}"
