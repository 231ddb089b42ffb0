"""The runs a proof takes, class by class, each on top of the one before: what is compared differs in nothing else.

    the command as it was ─► + reseeded ─► + identical ─► + equivalent

Nobody times them, so they go side by side as far as there is room. Where the loss differs by more than it may, the plan
without the change runs again: what the machine alone does. If that is much too, the training is a sensitive one, and
runs whose weights were shaken by as much as half precision rounds say what rounding alone makes of its loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from flatout.plan import Change
from flatout.remedy.candidates import all_in_words, in_words, with_changes
from flatout.remedy.proof import FEWEST_LOSSES, Proof, is_steady, same_batches, same_loss
from flatout.remedy.running import ProofRun, Run

IDENTITY_STEPS = 60
PARITY_STEPS = FEWEST_LOSSES + 20
SHAKEN_RUNS = 2
SHAKEN = "without it, weights shaken a little: what rounding alone does"
WITHOUT = "without it"
ONCE_MORE = "without it once more: what the machine alone does"


class Bench(Protocol):
    """Where the runs of a proof are made."""

    def prove_with(self, what: str, wanted: ProofRun) -> Run:
        """One run."""
        ...

    def prove_with_all(self, wanted: Sequence[ProofRun]) -> list[Run]:
        """Several at once."""
        ...

    @property
    def room(self) -> int:
        """How many can go side by side."""
        ...

    @property
    def shakes_ahead(self) -> bool:
        """Whether those of a sensitive training go along before it is known to be one."""
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


class Proving:
    """A proof under way."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._ahead: list[tuple[ProofRun, Run]] = []  # runs that are there before they are asked for

    def prove(self, reseeded: tuple[Change, ...], identical: tuple[Change, ...], rounded: tuple[Change, ...]) -> None:
        """Everything that was kept, by its class."""
        plans = [plan for plan in (reseeded, identical, rounded) if plan]
        every = [(), *itertools.accumulate(plans, with_changes)]
        long = 2 if rounded else 0  # the last two are compared by their losses
        steps = [PARITY_STEPS if place >= len(every) - long else IDENTITY_STEPS for place in range(len(every))]
        wanted = [ProofRun(changes=plan, steps=count) for plan, count in zip(every, steps, strict=True)]
        self._run_all_ahead(wanted, paired=wanted[-2] if rounded else None)
        paired = self._run("the command as it was", wanted[0])
        if reseeded:
            paired = self._same_batches(paired, reseeded, ("reseeded", "identical"), steps[1])
        if identical:
            paired = self._same_batches(paired, identical, ("identical",), steps[1 + bool(reseeded)])
        if rounded:
            self._same_loss(paired, rounded)

    def _same_batches(self, paired: Run, changes: tuple[Change, ...], needed: Sequence[str], steps: int) -> Run:
        """Whether the same batches reach the model; the run with what passed, to compare the next class with."""
        repeats: list[Run] = []

        def prove(run: Run) -> Proof:
            proof = same_batches(paired, run, repeats)
            if proof.holds and proof.standing not in needed:
                if repeats and same_batches(paired, repeats[0]).standing not in needed:
                    return Proof(standing="not proven", text="other bytes reach the model in every run, without it too")
                return Proof(standing="failed", text=f"{proof.text}, where none should differ")
            return proof

        def with_these(some: tuple[Change, ...]) -> Run:
            wanted = ProofRun(changes=with_changes(paired.changes, some), steps=steps)
            return self._run(all_in_words(some), wanted)

        run = with_these(changes)
        proof = prove(run)
        again = ProofRun(changes=paired.changes, steps=paired.asked)
        if not proof.holds and self._is_within_reach(again):
            if not self._is_ahead(again):
                self._run_ahead([again, again])
            repeats.append(self._run(ONCE_MORE, again))
            while self._is_ahead(again):
                repeats.append(self._run(ONCE_MORE, again))
            proof = prove(run)
        if proof.holds or len(changes) == 1:
            self._bench.proven(changes, proof)
            return run if proof.holds else paired
        self._bench.said(f"proof, {all_in_words(changes)}: {proof.text}. One by one")
        passed = self._one_by_one(paired.changes, changes, steps, prove)
        if len(passed) > 1:
            return with_these(tuple(change for change, _ in passed))
        return passed[0][1] if passed else paired

    def _same_loss(self, paired: Run, changes: tuple[Change, ...]) -> None:
        same = paired.changes

        def wanted(some: tuple[Change, ...] = ()) -> ProofRun:
            return ProofRun(changes=with_changes(same, some), steps=PARITY_STEPS)

        if paired.asked < PARITY_STEPS:  # something was let go on the way here
            paired = self._run(WITHOUT, wanted())
        run = self._run(all_in_words(changes), wanted(changes))
        proof = same_loss(paired, run)
        if proof.holds or not self._is_within_reach(wanted()):
            self._bench.proven(changes, proof)
            return
        repeat, rounding = self._run(ONCE_MORE, wanted()), []
        if not is_steady(paired, repeat):
            shaken = _shaken(wanted())
            if not self._is_ahead(shaken[0]):
                self._run_ahead(shaken)
            rounding = [self._run(SHAKEN, one) for one in shaken if self._is_within_reach(one)]
        proof = same_loss(paired, run, repeat, rounding)
        if proof.holds or len(changes) == 1:
            self._bench.proven(changes, proof)
            return
        self._run_ahead([wanted((change,)) for change in changes])
        self._one_by_one(same, changes, PARITY_STEPS, lambda run: same_loss(paired, run, repeat, rounding))

    def _one_by_one(
        self, same: tuple[Change, ...], changes: tuple[Change, ...], steps: int, prove: Callable[[Run], Proof]
    ) -> list[tuple[Change, Run]]:
        """Each by itself; those that pass, and their runs."""
        passed = []
        for change in changes:
            wanted = ProofRun(changes=with_changes(same, (change,)), steps=steps)
            proof = Proof(standing="not proven", text="the budget was spent")
            if self._is_within_reach(wanted):
                run = self._run(in_words(change), wanted)
                proof = prove(run)
                if proof.holds:
                    passed.append((change, run))
            self._bench.proven((change,), proof)
        return passed

    def _run_all_ahead(self, wanted: Sequence[ProofRun], paired: ProofRun | None) -> None:
        """Whatever will be asked for: that which rounding is compared with twice, since a card seldom computes the same
        twice, and what a sensitive training needs, where it is known to be one or there is room for all at once."""
        if paired is None:
            self._run_ahead(wanted)
            return
        room, every, shaken = self._bench.room, [paired, paired, wanted[-1], *wanted[:-2]], _shaken(paired)
        if self._bench.shakes_ahead and len(every) + len(shaken) <= room:
            self._run_ahead([*every, *shaken])
            return
        self._run_ahead(every[:room])
        both = [run for there, run in self._ahead if there == paired]
        sensitive = len(both) > 1 and not is_steady(*both) and self._bench.has_time()
        self._run_ahead([*every[room:], *((*wanted[:-2], *wanted[:-2], *shaken) if sensitive else ())])

    def _run_ahead(self, wanted: Sequence[ProofRun]) -> None:
        """As many at once as there is room for; `_run` finds them."""
        room = self._bench.room
        for some in (wanted[place : place + room] for place in range(0, len(wanted), room)):
            if len(some) > 1:
                self._ahead += zip(some, self._bench.prove_with_all(some), strict=True)

    def _is_ahead(self, wanted: ProofRun) -> bool:
        return any(there == wanted for there, _ in self._ahead)

    def _is_within_reach(self, wanted: ProofRun) -> bool:
        return self._is_ahead(wanted) or self._bench.has_time()

    def _run(self, what: str, wanted: ProofRun) -> Run:
        for place, (there, run) in enumerate(self._ahead):
            if there == wanted:
                del self._ahead[place]
                return run
        return self._bench.prove_with(what, wanted)


def _shaken(wanted: ProofRun) -> list[ProofRun]:
    return [replace(wanted, shaken=number) for number in range(1, SHAKEN_RUNS + 1)]
