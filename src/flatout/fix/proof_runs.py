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
from dataclasses import dataclass, replace

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


def prove(runner: ProofRunner, kept: Sequence[Change]) -> Iterator[ProofVerdict]:
    """Prove everything that was kept, class by class; a verdict is given as soon as it is known."""
    reseeded, identical, rounded = (
        tuple(change for change in kept if change.safety == safety)
        for safety in ("reseeded", "identical", "equivalent")
    )
    if reseeded or identical or rounded:
        yield from _Proving(runner).prove(reseeded, identical, rounded)


def proof_steps(changes: Sequence[Change]) -> int:
    """How many steps the longest run of a proof of these changes has."""
    return PARITY_STEPS if any(change.safety == "equivalent" for change in changes) else IDENTITY_STEPS


def _first_runs(reseeded: Changes, identical: Changes, rounded: Changes, *, side_by_side: bool) -> list[ProofRun]:
    """The runs that a proof begins with.

    The first is the command as it was; where anything is reseeded, the second is what the rest is compared
    with. Side by side, two that may turn out to be needed go along: the rest without compiling, and a
    repeat of what it is all compared with.
    """
    long = PARITY_STEPS if rounded else IDENTITY_STEPS
    plain = ProofRun(changes=(), steps=IDENTITY_STEPS if reseeded else long, leads=1)
    runs, base = [plain], plain
    if reseeded:
        base = ProofRun(changes=reseeded, steps=long, follows=1, leads=2)
        runs.append(base)
    if identical:
        runs.append(_on_top(base, identical, IDENTITY_STEPS))
    if rounded:
        runs.append(_on_top(base, (*identical, *rounded), PARITY_STEPS))
    if rounded and side_by_side:
        without_compiling = _uncompiled(rounded)
        if without_compiling:
            runs.append(_on_top(base, (*identical, *without_compiling), PARITY_STEPS))
        runs.append(_on_its_own(base))
    return runs


class _Proving:
    """A proof under way. `base` is what the next class is compared with."""

    def __init__(self, runner: ProofRunner) -> None:
        self._runner = runner
        self._finished: list[tuple[ProofRun, Run]] = []
        self._leaders = 2  # numbers given to leaders so far

    def prove(self, reseeded: Changes, identical: Changes, rounded: Changes) -> Iterator[ProofVerdict]:
        runs = _first_runs(reseeded, identical, rounded, side_by_side=self._runner.side_by_side)
        self._run_together(runs)
        base = runs[0]
        as_it_was = self._run(AS_IT_WAS, base)
        if as_it_was.broke_off:
            failed = Proof(standing="not proven", text=f"the command as it was failed: {as_it_was.reason()}")
            yield ProofVerdict((*reseeded, *identical, *rounded), failed)
            return
        if reseeded:
            passed = yield from self._same_batches(base, runs[1], reseeded, ("reseeded", "identical"))
            if passed == reseeded:
                base = runs[1]
            elif passed:
                base = self._new_leader(passed, runs[1].steps, follows=base.leads)
        same = base.changes
        if identical:
            request = _on_top(base, identical, IDENTITY_STEPS)
            passed = yield from self._same_batches(base, request, identical, ("identical",))
            same = with_changes(same, passed)
        if rounded:
            yield from self._same_loss(base, same, rounded)

    def _new_leader(self, changes: Changes, steps: int, follows: int = 0) -> ProofRun:
        self._leaders += 1
        return ProofRun(changes=changes, steps=steps, follows=follows, leads=self._leaders)

    def _same_batches(
        self, base: ProofRun, request: ProofRun, changes: Changes, needed: Sequence[str]
    ) -> Generator[ProofVerdict, None, Changes]:
        """Whether the same batches reach the model; returns those changes that passed."""
        before = self._run(all_in_words(base.changes) or AS_IT_WAS, base)
        repeat: Run | None = None

        def judge(run: Run) -> Proof:
            proof = same_batches(before, run, repeat)
            if not proof.holds or proof.standing in needed:
                return proof
            if repeat is not None and same_batches(before, repeat).standing not in needed:
                return Proof(standing="not proven", text="other bytes reach the model in every run, without it too")
            return Proof(standing="failed", text=f"{proof.text}, where none should differ")

        run = self._run(all_in_words(changes), request)
        proof = judge(run)
        again = _on_top(base, (), IDENTITY_STEPS)
        # A machine that never gives the same bytes or losses twice is no fault of the change.
        if not proof.holds and self._within_reach(again):
            repeat = self._run(ONCE_MORE, again)
            proof = judge(run)
        if proof.holds or len(changes) == 1:
            yield ProofVerdict(changes, proof)
            return changes if proof.holds else ()
        return (yield from self._one_by_one(changes, proof, lambda some: _on_top(base, some, IDENTITY_STEPS), judge))

    def _same_loss(self, base: ProofRun, same: Changes, changes: Changes) -> Iterator[ProofVerdict]:
        """Whether these, on top of what is the `same`, teach the model what the base teaches it."""
        if base.steps < PARITY_STEPS:  # something was dropped on the way here
            base = self._new_leader(base.changes, PARITY_STEPS)
        before = self._run(WITHOUT, base)

        def request_for(some: Changes) -> ProofRun:
            return replace(_on_top(base, some, PARITY_STEPS), changes=with_changes(same, some))

        run, alone = self._run(all_in_words(changes), request_for(changes)), None
        proof = same_loss(before, run)
        if not proof.holds and self._within_reach(_on_its_own(base)):
            alone = self._run(ONCE_MORE, _on_its_own(base))
            proof = same_loss(before, run, alone)
        if proof.holds or len(changes) == 1:
            yield ProofVerdict(changes, proof)
            return
        rest = _uncompiled(changes)
        if rest and self._within_reach(request_for(rest)):  # compiling is the first suspect
            without = same_loss(before, self._run(all_in_words(rest), request_for(rest)), alone)
            if without.holds:
                yield ProofVerdict(tuple(change for change in changes if change not in rest), proof)
                yield ProofVerdict(rest, without)
                return
        yield from self._one_by_one(changes, proof, request_for, lambda run: same_loss(before, run, alone))

    def _one_by_one(
        self,
        changes: Changes,
        together: Proof,
        request_for: Callable[[Changes], ProofRun],
        judge: Callable[[Run], Proof],
    ) -> Generator[ProofVerdict, None, Changes]:
        """Each on its own, and then those that passed together, without the last ones until that holds too;
        returns those. `together`: the proof of all of them, which does not hold."""
        self._runner.say(f"proof, {all_in_words(changes)}: {together.text}. One by one")
        if self._runner.has_time():
            self._run_together([request_for((change,)) for change in changes])

        def proof_of(some: Changes) -> Proof:
            if some == changes:
                return together
            if not self._within_reach(request_for(some)):
                return Proof(standing="not proven", text="the budget was spent")
            return judge(self._run(all_in_words(some), request_for(some)))

        # What each of them may do, all of them together may not: 0.7% and 0.7% of the loss are more than 1%.
        passed: Changes = ()
        for change in changes:
            proof = proof_of((change,))
            if proof.holds:
                passed = (*passed, change)
            else:
                yield ProofVerdict((change,), proof)
        while passed:
            proof = proof_of(passed)
            if proof.holds:
                yield ProofVerdict(passed, proof)
                return passed
            *rest, last = passed
            beside = f"{proof.text}, together with {all_in_words(rest)}"
            yield ProofVerdict((last,), Proof(standing=proof.standing, text=beside))
            passed = tuple(rest)
        return ()

    def _run_together(self, requests: Sequence[ProofRun]) -> None:
        """Make these runs side by side, where there is room; `_run` finds them."""
        missing = [one for one in requests if self._run_there(one) is None]
        if self._runner.side_by_side and len(missing) > 1:
            runs = self._runner.run(f"{len(missing)} runs side by side", missing)
            self._finished += zip(missing, runs, strict=True)

    def _within_reach(self, request: ProofRun) -> bool:
        return self._run_there(request) is not None or self._runner.has_time()

    def _run_there(self, request: ProofRun) -> Run | None:
        return next((run for finished, run in self._finished if finished == request), None)

    def _run(self, what: str, request: ProofRun) -> Run:
        """The run that is there already, or a new one."""
        run = self._run_there(request)
        if run is None:
            (run,) = self._runner.run(what, [request])
            self._finished.append((request, run))
        return run


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
