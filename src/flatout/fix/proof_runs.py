"""Which runs a proof takes, and what they show: from runs to verdicts.

    the command as it was ─► + reseeded ─┬─► + identical
                                         └─► + identical + equivalent

The classes are proven one on top of the other, so that two runs that are compared differ in one class
only. Each run follows the one that it is compared with: every few steps it goes on from that one's
weights (inside/weights.py). Where the loss differs by more than it may, the run that it is compared with
is repeated on its own: that shows what the machine alone does. Nobody times these runs, so they go side
by side where there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from flatout.fix.offers import all_in_words, with_changes
from flatout.fix.proof import FEWEST_LOSSES, Proof, same_batches, same_loss
from flatout.fix.runs import ProofRun, Run
from flatout.model.plan import Change

IDENTITY_STEPS = 60
PARITY_STEPS = FEWEST_LOSSES + 20
AS_IT_WAS = "the command as it was"
ONCE_MORE = "without it once more: what the machine alone does"

Changes = tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class ProofVerdict:
    """What was shown of some changes together."""

    changes: Changes
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRunner:
    """How runs of a proof are made: `run` takes what they are for, in words, and makes all of them."""

    run: Callable[[str, Sequence[ProofRun]], list[Run]]
    side_by_side: bool
    has_time: Callable[[], bool]
    say: Callable[[str], None]


def proof_steps(changes: Sequence[Change]) -> int:
    """How many steps the longest run of a proof of these changes has."""
    return PARITY_STEPS if any(change.safety == "equivalent" for change in changes) else IDENTITY_STEPS


def prove(runner: ProofRunner, kept: Sequence[Change]) -> Iterator[ProofVerdict]:
    """Prove everything that was kept, class by class; a verdict is given as soon as it is known."""
    reseeded, identical, rounded = (
        tuple(change for change in kept if change.safety == safety)
        for safety in ("reseeded", "identical", "equivalent")
    )
    if not reseeded and not identical and not rounded:
        return
    runs, long = _Runs(runner), proof_steps(rounded)
    base = plain = ProofRun(changes=(), steps=long, leads=1)
    if reseeded:
        plain = ProofRun(changes=(), steps=IDENTITY_STEPS, leads=1)
        base = ProofRun(changes=reseeded, steps=long, follows=1, leads=2)
    runs.make_together([plain, *_likely_runs(base, identical, rounded)])
    as_it_was = runs.get(AS_IT_WAS, plain)
    if as_it_was.broke_off:
        failed = Proof(standing="not proven", text=f"the command as it was failed: {as_it_was.reason()}")
        yield ProofVerdict((*reseeded, *identical, *rounded), failed)
        return
    if reseeded:
        standings = ("reseeded", "identical")
        passed = yield from _Class(runs=runs, base=plain, standings=standings, whole=base).prove(reseeded)
        if not passed:
            base = plain
        elif passed != reseeded:
            base = ProofRun(changes=passed, steps=long, follows=1, leads=3)
    same = base.changes
    if identical:
        passed = yield from _Class(runs=runs, base=base, standings=("identical",)).prove(identical)
        same = with_changes(same, passed)
    if rounded:
        if base.steps < PARITY_STEPS:  # what was reseeded did not pass
            base = ProofRun(changes=(), steps=PARITY_STEPS, leads=4)
        yield from _Class(runs=runs, base=base, beside=same).prove(rounded)


def _likely_runs(base: ProofRun, identical: Changes, rounded: Changes) -> list[ProofRun]:
    """The runs that a proof takes where all goes well, and two that may turn out to be needed: the rest
    without compiling, and a repeat of what it is all compared with."""
    runs = []
    if base.follows:
        runs.append(base)
    if identical:
        runs.append(_on_top(base, identical, IDENTITY_STEPS))
    if rounded:
        runs += [_on_top(base, (*identical, *some), PARITY_STEPS) for some in (rounded, _uncompiled(rounded)) if some]
        runs.append(_on_its_own(base))
    return runs


class _Runs:
    """Makes the runs of a proof, each of them once."""

    def __init__(self, runner: ProofRunner) -> None:
        self._runner = runner
        self._finished: list[tuple[ProofRun, Run]] = []
        self.say = runner.say

    def make_together(self, requests: Sequence[ProofRun]) -> None:
        """Make these runs side by side, where there is room; `get` finds them."""
        if self._runner.side_by_side and len(requests) > 1:
            runs = self._runner.run(f"{len(requests)} runs side by side", requests)
            self._finished += zip(requests, runs, strict=True)

    def can_get(self, request: ProofRun) -> bool:
        """Whether the run is there already, or there is time to make it."""
        return self._runner.has_time() or any(finished == request for finished, _ in self._finished)

    def get(self, what: str, request: ProofRun) -> Run:
        """The run that is there already, or a new one."""
        for finished, run in self._finished:
            if finished == request:
                return run
        (run,) = self._runner.run(what, [request])
        self._finished.append((request, run))
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Class:
    """How changes of one class are proven, on top of those `beside` them: their runs are compared with `base`.

    The same bytes have to reach the model, as far as `standings` say; without any, the loss has to be the
    same. `whole`: the run of all of them, where others follow it."""

    runs: _Runs
    base: ProofRun
    beside: Changes = ()
    standings: tuple[str, ...] = ()
    whole: ProofRun | None = None

    def prove(self, changes: Changes) -> Generator[ProofVerdict, None, Changes]:
        """Verdicts on all of these together, or else on one after the other; returns those that passed."""
        repeat = None
        proof = self._proof(changes, repeat)
        again = _on_top(self.base, (), IDENTITY_STEPS) if self.standings else _on_its_own(self.base)
        # A machine that never gives the same bytes or losses twice is no fault of the change.
        if not proof.holds and self.runs.can_get(again):
            repeat = self.runs.get(ONCE_MORE, again)
            proof = self._proof(changes, repeat)
        if proof.holds or len(changes) == 1:
            yield ProofVerdict(changes, proof)
            return changes if proof.holds else ()
        rest = _uncompiled(changes)  # compiling is the first suspect
        if rest:
            without = self._proof(rest, repeat)
            if without.holds:
                yield ProofVerdict(tuple(change for change in changes if change not in rest), proof)
                yield ProofVerdict(rest, without)
                return rest
        self.runs.say(f"proof, {all_in_words(changes)}: {proof.text}. One by one")
        # One on top of the others that passed: 0.7% and 0.7% of the loss are more than 1%.
        passed: Changes = ()
        for change in changes:
            proof = self._proof((*passed, change), repeat)
            if proof.holds:
                passed, shown = (*passed, change), proof
            else:
                beside = f", together with {all_in_words(passed)}" if passed else ""
                yield ProofVerdict((change,), Proof(standing=proof.standing, text=f"{proof.text}{beside}"))
        if passed:
            yield ProofVerdict(passed, shown)
        return passed

    def _proof(self, changes: Changes, repeat: Run | None) -> Proof:
        request = self.whole
        if request is None or request.changes != changes:
            steps = IDENTITY_STEPS if self.standings else PARITY_STEPS
            request = _on_top(self.base, with_changes(self.beside, changes), steps)
        if not self.runs.can_get(request):
            return Proof(standing="not proven", text="the budget was spent")
        before = self.runs.get(all_in_words(self.base.changes) or AS_IT_WAS, self.base)
        run = self.runs.get(all_in_words(changes), request)
        if not self.standings:
            return same_loss(before, run, repeat)
        proof = same_batches(before, run, repeat)
        if not proof.holds or proof.standing in self.standings:
            return proof
        if repeat is not None and same_batches(before, repeat).standing not in self.standings:
            return Proof(standing="not proven", text="other bytes reach the model in every run, without it too")
        return Proof(standing="failed", text=f"{proof.text}, where none should differ")


def _uncompiled(changes: Changes) -> Changes:
    """The rest, where one of them is to compile; else nothing."""
    rest = tuple(change for change in changes if change.name != "compile")
    return rest if len(rest) < len(changes) else ()


def _on_its_own(base: ProofRun) -> ProofRun:
    """The same run again, following nobody."""
    return ProofRun(changes=base.changes, steps=PARITY_STEPS)


def _on_top(base: ProofRun, changes: Changes, steps: int) -> ProofRun:
    """A run that follows another, with these changes too."""
    return ProofRun(changes=with_changes(base.changes, changes), steps=steps, follows=base.leads)
