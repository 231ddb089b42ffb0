"""The runs a proof takes, class by class, each on top of the one before: what is compared differs in nothing else.

    the command as it was ─► + reseeded ─┬─► + identical
                                         └─► + identical + equivalent

Each follows the one that it is compared with: every few steps it goes on from that one's weights (inside/weights.py).
Where the loss differs by more than it may all the same, what it is compared with runs once more, left to itself: what
the machine alone does. Nobody times them, so they go side by side as far as there is room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from flatout.fix.offers import all_in_words, with_changes
from flatout.fix.proof import FEWEST_LOSSES, Proof, same_batches, same_loss
from flatout.fix.runs import ProofRun, Run
from flatout.model.plan import Change

IDENTITY_STEPS = 60
PARITY_STEPS = FEWEST_LOSSES + 20
AS_IT_WAS = "the command as it was"
WITHOUT = "without it"
ONCE_MORE = "without it once more: what the machine alone does"

Changes = tuple[Change, ...]


class Bench(Protocol):
    """Where the runs of a proof are made."""

    def prove_with(self, what: str, wanted: Sequence[ProofRun]) -> list[Run]:
        """Runs, side by side as far as there is room."""
        ...

    @property
    def room(self) -> int:
        """How many can go side by side."""
        ...

    def has_time(self) -> bool:
        """Whether there is any left."""
        ...

    def proven(self, changes: Sequence[Change], proof: Proof) -> None:
        """What came of it."""
        ...

    def said(self, line: str) -> None:
        """Something worth telling."""
        ...


class Led(NamedTuple):
    """What others are compared with, and follow."""

    wanted: ProofRun
    run: Run


def foreseen(reseeded: Changes, identical: Changes, rounded: Changes, *, side_by_side: bool) -> list[ProofRun]:
    """The runs of a proof of all these. The first is the command as it was; the second, where anything is reseeded,
    what the rest is compared with. Side by side, what may turn out to be needed goes along: the rest without compiling,
    and what it is all compared with once more."""
    long = PARITY_STEPS if rounded else IDENTITY_STEPS  # of what other rounding is compared with
    plain = ProofRun(changes=(), steps=IDENTITY_STEPS if reseeded else long, leads=1)
    fed = ProofRun(changes=reseeded, steps=long, follows=1, leads=2) if reseeded else plain
    runs = [plain, fed] if reseeded else [plain]
    runs += [_on_top(fed, identical, IDENTITY_STEPS)] if identical else []
    wanted = (rounded, _uncompiled(rounded)) if side_by_side else (rounded,)
    runs += [_on_top(fed, (*identical, *some), PARITY_STEPS) for some in wanted if some]
    return [*runs, *([_alone(fed)] if rounded and side_by_side else [])]


class Proving:
    """A proof under way."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._made: list[tuple[ProofRun, Run]] = []
        self._leaders = itertools.count(3)

    def prove(self, reseeded: Changes, identical: Changes, rounded: Changes) -> None:
        """Everything that was kept, by its class."""
        runs = foreseen(reseeded, identical, rounded, side_by_side=self._bench.room > 1)
        self._run_ahead(runs)
        led = Led(runs[0], self._run(AS_IT_WAS, runs[0]))
        if led.run.broke_off:
            failed = Proof(standing="not proven", text=f"the command as it was failed: {led.run.reason()}")
            self._bench.proven((*reseeded, *identical, *rounded), failed)
            return
        if reseeded:
            led = self._reseeded(led, runs[1])
        same = led.wanted.changes
        if identical:
            same = with_changes(same, self._same_batches(led, identical, ("identical",)))
        if rounded:
            self._same_loss(led, same, rounded)

    def _leader(self, changes: Changes, steps: int, follows: int = 0) -> ProofRun:
        return ProofRun(changes=changes, steps=steps, follows=follows, leads=next(self._leaders))

    def _reseeded(self, led: Led, wanted: ProofRun) -> Led:
        """What the other classes are compared with: the run with what passed, or the command as it was."""
        run = self._run(all_in_words(wanted.changes), wanted)
        passed = self._same_batches(led, wanted.changes, ("reseeded", "identical"), run)
        if passed == wanted.changes:
            return Led(wanted, run)
        if not passed:
            return led
        fewer = self._leader(passed, wanted.steps, follows=led.wanted.leads)
        return Led(fewer, self._run(all_in_words(passed), fewer))

    def _same_batches(self, led: Led, changes: Changes, needed: Sequence[str], run: Run | None = None) -> Changes:
        """Whether the same batches reach the model; those changes that passed. `run`: with all of them."""
        repeat: Run | None = None

        def prove(run: Run) -> Proof:
            proof = same_batches(led.run, run, repeat)
            if proof.holds and proof.standing not in needed:
                if repeat is not None and same_batches(led.run, repeat).standing not in needed:
                    return Proof(standing="not proven", text="other bytes reach the model in every run, without it too")
                return Proof(standing="failed", text=f"{proof.text}, where none should differ")
            return proof

        run = run or self._run(all_in_words(changes), _on_top(led.wanted, changes, IDENTITY_STEPS))
        proof = prove(run)
        again = _on_top(led.wanted, (), IDENTITY_STEPS)
        if not proof.holds and self._is_within_reach(again):
            repeat = self._run(ONCE_MORE, again)
            proof = prove(run)
        if proof.holds or len(changes) == 1:
            self._bench.proven(changes, proof)
            return changes if proof.holds else ()
        self._bench.said(f"proof, {all_in_words(changes)}: {proof.text}. One by one")
        return self._one_by_one(changes, proof, lambda some: _on_top(led.wanted, some, IDENTITY_STEPS), prove)

    def _same_loss(self, led: Led, same: Changes, changes: Changes) -> None:
        """Whether these, on top of what is the `same`, teach what the run does that they are compared with."""
        if led.wanted.steps < PARITY_STEPS:  # something was let go on the way here
            longer = self._leader(led.wanted.changes, PARITY_STEPS)
            led = Led(longer, self._run(WITHOUT, longer))

        def wanted(some: Changes) -> ProofRun:
            return replace(_on_top(led.wanted, some, PARITY_STEPS), changes=with_changes(same, some))

        run, alone = self._run(all_in_words(changes), wanted(changes)), None
        proof = same_loss(led.run, run)
        if not proof.holds and self._is_within_reach(_alone(led.wanted)):
            alone = self._run(ONCE_MORE, _alone(led.wanted))
            proof = same_loss(led.run, run, alone)
        if proof.holds or len(changes) == 1:
            self._bench.proven(changes, proof)
            return
        rest = _uncompiled(changes)
        if rest and self._is_within_reach(wanted(rest)):  # compiling is the first suspect
            without = same_loss(led.run, self._run(all_in_words(rest), wanted(rest)), alone)
            if without.holds:
                self._bench.proven(tuple(change for change in changes if change not in rest), proof)
                self._bench.proven(rest, without)
                return
        self._bench.said(f"proof, {all_in_words(changes)}: {proof.text}. One by one")
        if self._bench.has_time():
            self._run_ahead([one for one in (wanted((change,)) for change in changes) if self._there(one) is None])
        self._one_by_one(changes, proof, wanted, lambda run: same_loss(led.run, run, alone))

    def _one_by_one(
        self, changes: Changes, of_all: Proof, wanted: Callable[[Changes], ProofRun], prove: Callable[[Run], Proof]
    ) -> Changes:
        """Each by itself, and then those that passed together, without the last ones until that holds too: what each
        of them may do, all of them may not. `of_all`: how they fared together."""

        def proof_of(some: Changes) -> Proof:
            if some == changes:
                return of_all
            if not self._is_within_reach(wanted(some)):
                return Proof(standing="not proven", text="the budget was spent")
            return prove(self._run(all_in_words(some), wanted(some)))

        alone = {change.name: proof_of((change,)) for change in changes}
        passed = tuple(change for change in changes if alone[change.name].holds)
        for change in changes:
            if change not in passed:
                self._bench.proven((change,), alone[change.name])
        while passed:
            proof = alone[passed[0].name] if len(passed) == 1 else proof_of(passed)
            if proof.holds:
                self._bench.proven(passed, proof)
                return passed
            *rest, last = passed
            beside = f"{proof.text}, together with {all_in_words(rest)}"
            self._bench.proven((last,), Proof(standing=proof.standing, text=beside))
            passed = tuple(rest)
        return ()

    def _run_ahead(self, wanted: Sequence[ProofRun]) -> None:
        """Side by side, where there is room for that; `_run` finds them."""
        if self._bench.room > 1 and len(wanted) > 1:
            runs = self._bench.prove_with(f"{len(wanted)} runs side by side", wanted)
            self._made += zip(wanted, runs, strict=True)

    def _is_within_reach(self, wanted: ProofRun) -> bool:
        return self._there(wanted) is not None or self._bench.has_time()

    def _there(self, wanted: ProofRun) -> Run | None:
        return next((run for there, run in self._made if there == wanted), None)

    def _run(self, what: str, wanted: ProofRun) -> Run:
        run = self._there(wanted)
        if run is None:
            (run,) = self._bench.prove_with(what, [wanted])
            self._made.append((wanted, run))
        return run


def _uncompiled(changes: Changes) -> Changes:
    """The rest, where one of them is to compile; else nothing."""
    rest = tuple(change for change in changes if change.name != "compile")
    return rest if len(rest) < len(changes) else ()


def _alone(led: ProofRun) -> ProofRun:
    """It once more, left to itself."""
    return ProofRun(changes=led.changes, steps=PARITY_STEPS)


def _on_top(led: ProofRun, changes: Changes, steps: int) -> ProofRun:
    """A run that follows another, with these changes too."""
    return ProofRun(changes=with_changes(led.changes, changes), steps=steps, follows=led.leads)
