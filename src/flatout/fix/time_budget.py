"""What is left of a fix's time, and what it has to last for: the proof first of all, then the last comparison."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flatout.fix.proof_runs import foreseen
from flatout.fix.result import FixResult
from flatout.fix.runs import LOOKING, WEIGHTS_BYTES, ProofRun, Run
from flatout.launch.protocol import WEIGHTS_EVERY
from flatout.model.plan import Change

COMPILING_S, TUNING_KERNELS_S = 40.0, 180.0
COMPILED_AGAIN = 0.3  # of that time, with the kernels at hand: a guess
_MEETING_S, _WEIGHT_BYTES = 2.5e-8, 12  # of one weight: to write, read and compare it; with Adam's memory
_ROOM = 0.7  # of the memory, a card's or the host's, for runs side by side
_SURE = 1.1  # times what a run took: the next may take longer
_CROWDED = 1.5  # times as long, where that many share the cores


class TimeBudget:
    """The budget of a fix that has come as far as `found`."""

    def __init__(self, found: FixResult, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._found = found
        self._clock = clock
        self._began_s = clock()
        self.budget_s = budget_s
        self.unrounded: Run | None = None  # the last that was kept before anything changed rounding, or learning

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s

    def affords(self, changes: Sequence[Change], *, runs: int = 1, compare: bool = True) -> bool:
        """Whether there is time for so many runs with these changes, their proof and, if wanted, the comparison."""
        return self.left_s - self.reserve_s(changes, compare=compare) > runs * self.trial_s(changes)

    def trial_s(self, changes: Sequence[Change]) -> float:
        """What a run with these changes too will take, compiling and all."""
        return self._now.seconds + max(0.0, _compiling_s(changes) - _compiling_s(self._found.kept))

    def enough_m(self, changes: Sequence[Change], trying_s: float) -> int:
        """A budget that would have done for these changes too."""
        comparing_s = self._before.seconds + self._now.seconds
        missing_s = self.reserve_s(changes) + trying_s + comparing_s - self.left_s
        return math.ceil((self.budget_s + max(0.0, missing_s)) / 60 + 0.5)

    def reserve_s(self, changes: Sequence[Change] = (), *, compare: bool = True) -> float:
        """What the proof and, if wanted, the last comparison will take, with these changes too."""
        every = (*self._found.kept, *changes)
        proving_s = self._proving_s(self._proof_runs(every)) if {c.safety for c in every} - {"semantic"} else 0.0
        return proving_s + (self.comparing_s() if compare and self._found.kept else 0.0)

    def _proof_runs(self, every: Sequence[Change]) -> list[_ProofRun]:
        reseeded, identical, rounded = (
            tuple(change for change in every if change.safety == safety)
            for safety in ("reseeded", "identical", "equivalent")
        )
        return [
            self._foreseen(run, every) for run in foreseen(reseeded, identical, rounded, side_by_side=self.room > 1)
        ]

    def _foreseen(self, wanted: ProofRun, every: Sequence[Change]) -> _ProofRun:
        """By the run that it is most like."""
        rounds = any(change.safety == "equivalent" for change in wanted.changes)
        like = self._now if rounds else self._paired if wanted.changes else self._before
        plain_s = start_s(like) - self._compiled_for_s(like) + self._meeting_s(wanted)
        compiling_s = self._compiling_again_s(every) if _compiling_s(wanted.changes) else 0.0
        busy, cores = like.case.busy_share or 0.0, like.case.cpu_share or 0.0
        return _ProofRun(plain_s, compiling_s, _training_s(like, wanted.steps), busy, cores)

    def _meeting_s(self, wanted: ProofRun) -> float:
        """What it takes to bring weights from run to run."""
        weights = self._before.case.facts.parameters or 0 if wanted.leads or wanted.follows else 0
        return _MEETING_S * min(wanted.steps / WEIGHTS_EVERY * weights, WEIGHTS_BYTES / _WEIGHT_BYTES)

    def _proving_s(self, runs: Sequence[_ProofRun]) -> float:
        return _side_by_side_s(runs, self.room) if self.room > 1 else sum(run.alone_s for run in runs)

    def comparing_s(self, steps: int | None = None) -> float:
        """What both sides once more will take, without X-ray and ceiling: so many steps, or as many as last time."""
        both = (self._before, self._now)
        if steps is not None:
            return sum(self.cost_s(run, steps) for run in both)
        return _SURE * sum(self._start_again_s(run) + run.case.breakdown.training_ms / 1e3 for run in both)

    def cost_s(self, run: Run, steps: int) -> float:
        """What so many steps like those of this run will take, start and all."""
        return self._start_again_s(run) + _training_s(run, steps)

    def timeout_s(self, changes: Sequence[Change], steps: int) -> float:
        """How long to wait for a run of so many steps with these changes."""
        if self._found.before is None:
            return max(120.0, self.left_s)
        usual_s = max(self._before.seconds, self.cost_s(self._before, steps))
        patience_s = 60 + 4 * usual_s + 2 * _compiling_s(changes)
        return max(30.0, min(patience_s, self.left_s + 30))

    def proof_timeout_s(self, wanted: Sequence[ProofRun], at_once: int) -> float:
        """How long to wait for runs of a proof, so many side by side: a busy card takes them in turns."""
        crowded = 1 + (at_once - 1) * (self._now.case.busy_share or 0.0)
        patience_s = crowded * max(self.timeout_s(one.changes, one.steps) for one in wanted)
        return min(patience_s, 2 * max(0.0, self.left_s) + 30)

    @property
    def room(self) -> int:
        """How many runs have room at once: on one card and one host, by one process each, with cores to go round."""
        case, both = self._now.case, (self._before.case, self._now.case)
        total = case.card("memory_total_bytes").high
        memory = max(one.facts.memory_reserved_bytes or 0 for one in both)
        if not memory or not math.isfinite(total) or case.rank.info.world_size > 1:
            return 1
        fit = min(total / memory, *(one.fits_in_memory for one in both))
        return max(1, min(int(_ROOM * fit), int((case.cores or 0) / 2)))

    def _start_again_s(self, run: Run) -> float:
        """What a run like this one takes beside its steps, now that what it compiled is there."""
        return start_s(run) - (1 - COMPILED_AGAIN) * self._compiled_for_s(run)

    def _compiled_for_s(self, run: Run) -> float:
        return max(0.0, start_s(run) - start_s(self._before)) if _compiling_s(run.changes) else 0.0

    def _compiling_again_s(self, every: Iterable[Change]) -> float:
        """What the proof's run will take to compile: it has the batch of the script, which may be another by now."""
        every = list(every)
        takes_s = max(_compiling_s(every), self._compiled_for_s(self._now)) if _compiling_s(every) else 0.0
        return takes_s * (1.0 if any(change.name == "batch_size" for change in every) else COMPILED_AGAIN)

    @property
    def _before(self) -> Run:
        assert self._found.before is not None
        return self._found.before

    @property
    def _paired(self) -> Run:
        """What is like the run that other rounding is held against."""
        return self.unrounded or self._before

    @property
    def _now(self) -> Run:
        assert self._found.after is not None
        return self._found.after


class _ProofRun(NamedTuple):
    """One of a proof, as far as it can be foreseen: its start, its compiling, its steps, and what these use."""

    start_s: float
    compiling_s: float
    training_s: float
    card: float
    cores: float

    @property
    def alone_s(self) -> float:
        return self.start_s + self.compiling_s + self.training_s


def _side_by_side_s(runs: Sequence[_ProofRun], room: int) -> float:
    """So many at once, the next when one has ended. They share the card and the cores; compiling has one to itself."""
    ends_s = [0.0] * room
    for run in runs:
        heapq.heapreplace(ends_s, ends_s[0] + _CROWDED * (run.start_s + run.training_s) + run.compiling_s)
    shared_s = max(sum(run.card * run.training_s for run in runs), sum(run.cores * run.training_s for run in runs))
    return max(*ends_s, min(run.start_s for run in runs) + shared_s)


def start_s(run: Run) -> float:
    """What a run took beside its training steps, X-ray and ceiling."""
    if run.trace is None:
        return run.seconds
    looking_ms = sum(step.wall_ms for step in run.trace.ranks[0].steps if step.kind in LOOKING)
    return max(0.0, run.seconds - (run.case.breakdown.training_ms + looking_ms) / 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """What it takes, in words, and whether it pays in the training as planned."""

    said: str
    pays: bool


def compiling(run: Run, before: Run, gain: float) -> Compiling | None:
    """What compiling takes in a run so many times as fast as the one before; None where it takes nothing."""
    extra_s, planned = start_s(run) - start_s(before), run.planned_samples
    if run.speed is None or not run.case.loader.batch_size or extra_s <= 0:
        return None
    pays_after = extra_s / ((gain - 1) / run.speed.value)
    said = f"compiling takes {extra_s:.0f} s and pays after {pays_after:,.0f} samples"
    if planned is not None and pays_after > planned:
        return Compiling(said=f"{said}, more than the {planned:,.0f} of the whole training", pays=False)
    return Compiling(said=said, pays=True)


def _training_s(run: Run, steps: int) -> float:
    return steps * (run.case.breakdown.step_ms.mean or 0.0) / 1e3


def _compiling_s(changes: Iterable[Change]) -> float:
    modes = [change.value for change in changes if change.name == "compile"]
    return TUNING_KERNELS_S if "max-autotune" in modes else COMPILING_S if modes else 0.0
