"""What evaluation and checkpoints take, and what is left of that where they come less often.

How long they take is measured; that every fifth of them takes a fifth is arithmetic. A trial of little more than an
epoch could not measure it: it has all of the one evaluation that comes after the first epoch in any case, or none at
all. What it can show is that the script does as it is told, if not in the first epoch then in a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flatout.diagnose.knobs import knobs
from flatout.fix.offers import PAUSES, Wishes
from flatout.fix.runs import Run
from flatout.fix.speed import EVALUATION_AND_CHECKPOINT
from flatout.model.facts import SettingsRead
from flatout.model.plan import Change

_KINDS = dict(zip(PAUSES, EVALUATION_AND_CHECKPOINT, strict=True))
_SEVERAL = 2  # of the rarest pause: then what was measured is better than arithmetic
_RARER = 0.75  # of what they took, at the most, where some of them are left out


class Pauses:
    """Those of a fix under way."""

    def __init__(self) -> None:
        self._taken_s: dict[str, float] = {}  # a sample, by kind, as often as the script has them by itself
        self._settings: tuple[SettingsRead, ...] = ()

    def look_at(self, run: Run, plan: Sequence[Change]) -> None:
        """A run over an epoch and more."""
        if run.speed is not None and not any(change.name in _KINDS for change in plan):
            self._taken_s, self._settings = run.speed.pauses_s, run.case.facts.settings

    def as_planned(self, run: Run, plan: Sequence[Change]) -> Run:
        """The run, with its pauses as often as its plan has them in a long training."""
        left = self._left(plan)
        if run.speed is None or not left or _saw_several(run, plan):
            return run
        pauses_s = sum(seconds * left.get(kind, 1.0) for kind, seconds in self._taken_s.items())
        return replace(run, speed=replace(run.speed, with_pauses=1 / (1 / run.speed.value + pauses_s)))

    def are_rarer(self, run: Run, changes: Sequence[Change]) -> bool:
        """Whether some of them were left out in a run."""
        kinds, seen = self._left(changes), run.speed.pauses_s if run.speed is not None else {}
        seen_s, known_s = (sum(pauses_s.get(kind, 0.0) for kind in kinds) for pauses_s in (seen, self._taken_s))
        return run.speed is not None and seen_s < _RARER * known_s

    def _left(self, plan: Sequence[Change]) -> dict[str, float]:
        """Which share of its pauses a plan leaves, by kind: the interval as it was, over the interval as it is."""
        shares = {}
        for change in plan if self._taken_s else ():
            there = (
                knobs(self._settings, change.name, lambda value: isinstance(value, int))
                if change.name in _KINDS
                else ()
            )
            before = next((knob.value for knob in there if knob.text == change.knob), None)
            if before:
                shares[_KINDS[change.name]] = before / change.value
        return shares


def _saw_several(run: Run, plan: Sequence[Change]) -> bool:
    """Whether a run was long enough to have its pauses as often as its plan has them."""
    steps = run.case.steps_an_epoch
    rarest = max(change.value for change in plan if change.name in _KINDS)
    return steps is not None and run.case.breakdown.steps >= _SEVERAL * rarest * steps


def may_be_changed(wishes: Wishes) -> bool:
    """Whether the user lets them come less often."""
    return any(wishes.permits(Change(name=name, value=0, safety="semantic")) for name in PAUSES)
