"""A run with an end: so many steps, then the X-ray, then the ceiling, then out.

The ceiling is how fast the same step runs when its data is there: a few steps are fed with batches
kept from before (`replay`: no loader), then with their device copies (`resident`: no loader and no
copy).
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.files import write_whole
from flatout.inside.patches import Subscriber
from flatout.inside.recorder import BACKWARD, FORWARD, HELD, LOSS, OPTIMIZER, SYNC, Recorder
from flatout.inside.run_facts import ranks
from flatout.inside.stacks import in_words, lines_of
from flatout.inside.timing import tensors_in
from flatout.launch.protocol import MOST_STEPS, TURNS, Options
from flatout.model.stats import BLOCKS, FEW_STEPS, block_means, error_of, half_width
from flatout.model.turns import WITHIN_S, Rounds, TurnsResult, order_of_a_round

if TYPE_CHECKING:
    from flatout.inside.changes.applied import Applied
    from flatout.inside.xray import XraySchedule

_WARM_UP_S = 9.0  # of a trial, at most
_SHORT_S = 0.05  # a step
_STEADY = 0.005  # how precisely the mean step of a GPU that waits for nothing is known after half the time
_AHEAD, _AHEAD_OF_CEILING = 8, 2  # steps that the host may run ahead of the GPU
_KEPT = 4
_STEPS_EACH, _FEWEST_EACH = 12, 3  # of an X-ray, and of each kind of ceiling
_COMPUTES = frozenset({FORWARD, LOSS, BACKWARD, OPTIMIZER, SYNC})
_HUNG_S = 30.0  # in one call, where a step takes half a second at the most: it hangs
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/utils/cpp_extension", "/triton/")
_FETCHES_A_STEP = 64  # more than this without a step is no training: give the loader back


class BoundedRun:
    """Says after each step whether another one is to come, and of what kind."""

    def __init__(
        self,
        options: Options,
        recorder: Recorder,
        xray: XraySchedule | None,
        applied: Applied | None,
    ) -> None:
        self._recorder = recorder
        self._xray = xray
        self._progress = TrialProgress(options)
        self.step_begins = self._progress.step_begins
        self._leash = Leash(_AHEAD)
        trial = options.trial
        self._turns: LiveTurns | None = None
        if applied is not None and trial is not None and trial.turns and _is_alone():
            self._turns = LiveTurns(applied, trial.turns, options.folder)
        self.ceiling: Ceiling | None = None
        if trial is None or not trial.fingerprints:
            self.ceiling = Ceiling(recorder.train_loaders)

    def step_ended(self) -> None:
        """A step is over. Where the GPU is slower than the host, its pace is measured."""
        due = self._leash.step_ended()
        if due is not None:
            self._recorder.push(HELD)
            self._leash.wait(due)
            self._recorder.pop()
        self._progress.step_ended(self._recorder.measured)

    def goes_on(self, batches_ready: int) -> bool:
        """Whether there is another step; `batches_ready` is how many workers may have loaded at the start."""
        in_turns = self._turns is not None and self._turns.step_ended()
        if in_turns or self._progress.warms_up(self._recorder.steps, batches_ready):
            self._recorder.set_kind("warmup")
            return True
        if not self._progress.is_over():
            return True
        return self._progress.is_worth_a_look and (self._takes_xray() or self._measures_ceiling())

    def end_if_hung(self) -> None:
        """From another thread: end the process where a change in its turns has made a call hang. An
        evaluation, a checkpoint or the data may take as long as they like: a change to computing does
        nothing to them."""
        recorder = self._recorder
        if self._turns is None or not self._turns.under_way or recorder.doing not in _COMPUTES:
            return
        still_s = recorder.still_s
        if still_s > _HUNG_S and not _builds_kernels(recorder.thread):
            self._turns.give_up(f"it stood still for {still_s:.0f} s at {in_words(recorder.thread)}")
            os._exit(1)

    @property
    def _looks(self) -> int:
        """How many steps each look takes; ranks have measured as many, so it is the same for all."""
        return max(_FEWEST_EACH, min(_STEPS_EACH, self._recorder.measured // 3))

    def _takes_xray(self) -> bool:
        if self._xray is None or self._xray.done or not torch.cuda.is_initialized():
            return False
        was_running = self._xray.running
        self._xray.step_ended(self._looks)
        return was_running or self._xray.running

    def _measures_ceiling(self) -> bool:
        if self.ceiling is None:
            return False
        kind = self.ceiling.next_step(self._looks)
        self._leash.steps = _AHEAD_OF_CEILING
        if kind is not None:
            self._recorder.set_kind(kind)
        return kind is not None


def _builds_kernels(thread: int) -> bool:
    """Whether a thread is in a compiler: with another precision, say, a script's own compiled model
    compiles again."""
    return any(part in code.co_filename for code, _ in lines_of(thread) for part in _COMPILERS)


class TrialProgress:
    """How far a run with an end has come, by the measured steps."""

    def __init__(self, options: Options) -> None:
        self._steps = options.max_steps or 0
        self._trial = options.trial
        self._took_s: list[float] = []
        self._trained_s = 0.0
        self._step_began_s: float | None = None
        self._began_s = 0.0
        self._measured = 0

    def step_begins(self) -> None:
        """The next step begins."""
        self._step_began_s = time.monotonic()
        self._began_s = self._began_s or self._step_began_s

    def step_ended(self, measured: int) -> None:
        """A step is over; so many have been measured by now."""
        if measured > self._measured and self._step_began_s is not None:
            self._took_s.append(time.monotonic() - self._step_began_s)
            self._trained_s += self._took_s[-1]
        self._measured = measured

    def warms_up(self, steps: int, batches_ready: int) -> bool:
        """Whether the step before still used batches that lay ready: they would show a loader faster
        than it is."""
        timed = self._trial is not None and not self._trial.fingerprints
        soon = not self._began_s or time.monotonic() - self._began_s < _WARM_UP_S
        return timed and steps < batches_ready and (soon or not _is_alone())

    def is_over(self) -> bool:
        """Whether the steps are there and, in a process of its own, the time is."""
        if self._trial is None or not _is_alone():
            return self._measured >= self._steps
        if self._measured < self._steps:
            return self._measured >= FEW_STEPS and self._trained_s >= self._trial.enough_s
        least_s, precise = self._trial.at_least_s, self._trial.known_to
        if self._measured >= MOST_STEPS or self._trained_s >= 2 * least_s:
            return True
        short = not self._took_s or self._took_s[-1] < _SHORT_S  # beside which a look counts
        if self._trained_s < least_s / 2 or (short and self._measured % BLOCKS):
            return False
        unsure = self._unsure()
        return unsure <= _STEADY or (self._trained_s >= least_s and unsure <= precise)

    def _unsure(self) -> float:
        """Half the 95% interval of the mean step, as a share of it."""
        if len(self._took_s) < BLOCKS:
            return math.inf
        return half_width([(error_of(block_means(self._took_s)) ** 2, BLOCKS - 1)])

    @functools.cached_property
    def is_worth_a_look(self) -> bool:
        """Whether the steps were fast enough; the later ones count, as loaders have to settle."""
        if self._trial is None or self._trial.look_below_s is None or not _is_alone():
            return True
        later = self._took_s[len(self._took_s) // 2 :]
        return bool(later) and sum(later) / len(later) < self._trial.look_below_s


def _is_alone() -> bool:
    """Whether this is the only rank: others would have to agree."""
    return ranks()[1] == 1


class Leash:
    """Keeps the host within a few steps of the GPU, so that their pace is the GPU's: a queue takes a thousand
    launches, and a trial of small steps would be over before the GPU has done half of them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._ends: deque[Any] = deque()

    def step_ended(self) -> Any:
        """The end of an earlier step that the host has to wait for; None where the GPU has reached it."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        self._ends.append(torch.cuda.Event(blocking=True))
        self._ends[-1].record()
        due = None
        while len(self._ends) > self.steps:
            due = self._ends.popleft()
        return None if due is None or due.query() else due

    def wait(self, end: torch.cuda.Event) -> None:
        """Wait for it, past the wrapper that times the script's waits."""
        super(torch.cuda.Event, end).synchronize()


class Ceiling:
    """Keeps the last few batches, and gives them back when their time comes."""

    def __init__(self, train_loaders: Container[int]) -> None:
        self._train_loaders = train_loaders
        self._kept: dict[int, deque[Any]] = {}
        self._copies: dict[tuple[int, str], Any] = {}
        self._kinds: Iterator[str] | None = None
        self._replaying = False
        self._fetches = 0
        self._turn = 0
        self.resident = False  # whether device copies are given back, too

    def install(self, changes: Subscriber) -> None:
        """Answer `.to` and `.cuda` with the device copy made before, while `resident`."""
        for name in ("to", "cuda"):
            changes.around(f"torch.Tensor.{name}", functools.partial(self._move, name))

    def _move(self, name: str, call: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The device copy of a kept tensor is made once for each way of asking."""
        key = (id(tensor), f"{name} {args} {kwargs}")
        if not self.resident or key not in self._copies:
            moved = call(tensor, *args, **kwargs)
            if not self.resident or moved is tensor or not self._keeps(tensor):
                return moved
            self._copies[key] = moved
        return self._copies[key]

    def _keeps(self, tensor: Any) -> bool:
        batches = [batch for kept in self._kept.values() for batch in kept]
        return any(tensor is one for batch in batches for one in tensors_in(batch))

    def keep(self, loader: int, batch: Any) -> None:
        """Remember a batch that came from a loader."""
        self._kept.setdefault(loader, deque(maxlen=_KEPT)).append(_apart(batch))

    def next_step(self, each: int) -> str | None:
        """The kind of the next step, `each` so many; None when it is over or cannot be done here."""
        fed, self._fetches = self._fetches, 0
        if self._kinds is None:
            self._kinds = iter(("replay",) * each + ("resident",) * each)
        kind = next(self._kinds, None)
        self.resident = kind == "resident"
        if not self._kept or (self._replaying and not 0 < fed <= _FETCHES_A_STEP):
            return None
        if self.resident and not torch.cuda.is_initialized():
            return None
        self._replaying = kind is not None
        return kind

    def batch(self, loader: int) -> Any:
        """A kept batch of that loader, while replaying; None otherwise."""
        kept = self._kept.get(loader)
        if not self._replaying or not kept or loader not in self._train_loaders:
            return None
        self._fetches += 1
        if self._fetches > _FETCHES_A_STEP:
            return None
        self._turn += 1
        return _apart(kept[self._turn % len(kept)])


def _apart(batch: Any) -> Any:
    """The same tensors in containers of their own: scripts pop from their batches."""
    if isinstance(batch, dict):
        return type(batch)({key: _apart(item) for key, item in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_apart(item) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_apart(item) for item in batch)
    return batch


# -- changes tried in turns, one after another; what has paid stays on
#
#    a change goes on, a few steps to settle ─► rounds of four turns, ABBA or BAAB ─► decided, or time is over ─► next
#
# Nobody waits for the GPU: a turn lies between two events in its stream, and is read when the GPU has
# passed them.

_COLD_STEPS = 10  # before the first change
_SETTLING_STEPS = 4  # of a change: compiling, first kernels, memory of another layout
_FEWEST_STEPS, _MOST_STEPS = 2, 32  # in a turn
_TIMES_THE_SWITCH = 10  # as long as switching takes, a turn has to be
_FEWEST_ROUNDS = 6  # however slow they are


class LiveTurns:
    """The changes of a trial that are decided in turns; `step_ended` is called after every step."""

    def __init__(self, applied: Applied, names: Sequence[str], folder: Path) -> None:
        self._applied = applied
        self._folder = folder
        self._chance = random.Random(0)  # not the script's
        self.results = [TurnsResult(name=name) for name in names]  # what has come of each so far
        self._last_s = self._step_s = 0.0
        self._steps = self._all()
        for name in names:
            applied.switch(name, on=False)

    def step_ended(self) -> bool:
        """A step is over; whether another one is needed here."""
        now_s = time.perf_counter()
        self._step_s, self._last_s = now_s - self._last_s, now_s
        return next(self._steps, False)

    @property
    def under_way(self) -> bool:
        """Whether a change has its turns."""
        return any(result.state == "under way" for result in self.results)

    def give_up(self, why: str) -> None:
        """The run ends while a change has its turns."""
        self.results = [replace(one, note=why) if one.state == "under way" else one for one in self.results]
        self._save()

    def _all(self) -> Generator[bool, None, None]:
        for _ in range(_COLD_STEPS):
            yield True
        for number, result in enumerate(self.results):
            self.results[number] = replace(result, state="under way")
            self._save()
            self.results[number] = decided = yield from self._decided(result.name)
            self._applied.switch(result.name, on=decided.decision == "faster")
            self._save()

    def _decided(self, name: str) -> Generator[bool, None, TurnsResult]:
        """Turns with and without a change, until it is clear what it brings or the time is over."""
        began_s, steps = time.perf_counter(), _SETTLING_STEPS
        self._applied.try_out(name)
        for _ in range(_SETTLING_STEPS):
            yield True
        rounds, turns, each = Rounds(), deque[_Turn](), self._steps_a_turn(name)
        ends_s = time.perf_counter() + WITHIN_S
        while rounds.decision() == "undecided" and not self._applied.why_not_made(name):
            if time.perf_counter() > ends_s and len(rounds.logs) >= _FEWEST_ROUNDS:
                break
            for on in order_of_a_round(self._chance):
                self._applied.switch(name, on=on)
                begin = _Moment()
                for _ in range(each):
                    yield True
                turns.append((on, begin, _Moment()))
            steps += 4 * each
            while len(turns) >= 4 and turns[3][2].is_past:
                seconds: dict[bool, list[float]] = {True: [], False: []}
                for on, begin, end in [turns.popleft() for _ in range(4)]:
                    seconds[on].append(begin.seconds_to(end))
                rounds.add(seconds[True], seconds[False])
        result = TurnsResult(name=name, state="decided", seconds=time.perf_counter() - began_s)
        if note := self._applied.why_not_made(name):
            return replace(result, note=note)
        counted = len(rounds.logs)
        return replace(result, decision=rounds.decision(), gain=rounds.gain(), rounds=counted, steps=steps)

    def _steps_a_turn(self, name: str) -> int:
        """So many that switching is a small part of a turn."""
        step_s, began_s = self._step_s, time.perf_counter()
        for on in (False, True):
            self._applied.switch(name, on=on)
        switching_s = (time.perf_counter() - began_s) / 2
        return min(_MOST_STEPS, max(_FEWEST_STEPS, round(_TIMES_THE_SWITCH * switching_s / step_s)))

    def _save(self) -> None:
        results: list[dict[str, Any]] = [asdict(result) for result in self.results]
        write_whole(self._folder / TURNS, json.dumps(results))


class _Moment:
    """A moment in the GPU's work, or on the clock where there is no GPU."""

    __slots__ = ("_event", "_s")

    def __init__(self) -> None:
        self._s = time.perf_counter()
        self._event = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def is_past(self) -> bool:
        return self._event is None or self._event.query()

    def seconds_to(self, later: _Moment) -> float:
        if self._event is None or later._event is None:
            return later._s - self._s
        return float(self._event.elapsed_time(later._event)) / 1e3


_Turn = tuple[bool, _Moment, _Moment]  # steps in a row, with the change or without: from, to
