"""Changes tried while training runs: switched on and off between steps, in turns, until it is clear what each brings.

One change after another; what has paid stays on. Nobody waits for the GPU: a turn lies between two events in its
stream, and is read when the GPU has passed them.

    a change goes on, a few steps to settle ─► rounds of four turns, ABBA or BAAB ─► decided, or time is over ─► next
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.files import write_whole
from flatout.launch.protocol import TURNS
from flatout.model.turns import WITHIN_S, Rounds, TurnsResult, order_of_a_round

if TYPE_CHECKING:
    from flatout.inside.changes.applied import Applied

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
