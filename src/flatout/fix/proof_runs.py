"""Which runs a proof takes, and what they show: from runs to verdicts.

    the command as it was ─► + reseeded ─┬─► + identical
                                         └─► + identical + equivalent

Classes are proven one on top of the other, so that two runs that are compared differ in one class
only. Each run follows the one it is compared with: every few steps it goes on from that one's weights
(inside/weights.py). Where the loss differs by too much, that one is repeated on its own, which shows
how far the machine alone makes runs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from flatout.fix.offers import all_in_words, with_changes
from flatout.fix.proof import FEWEST_LOSSES, Proof, failed, not_proven, same_batches, same_loss
from flatout.fix.runs import ProofRun, Run
from flatout.model.plan import Change

IDENTITY_STEPS = 60
PARITY_STEPS = FEWEST_LOSSES + 20
AS_IT_WAS = "the command as it was"
ONCE_MORE = "without it once more: what the machine alone does"

Changes = tuple[Change, ...]
Verdict = tuple[Changes, Proof]  # what was shown of some changes together


def proof_steps(changes: Sequence[Change]) -> int:
    """How many steps the longest run of a proof of these changes has."""
    return PARITY_STEPS if any(change.safety == "equivalent" for change in changes) else IDENTITY_STEPS


@dataclass(kw_only=True)
class ProofRuns:
    """The runs of a proof, each made once: `make` takes what they are for, in words, and makes all of
    them."""

    make: Callable[[str, Sequence[ProofRun]], list[Run]]
    side_by_side: bool
    has_time: Callable[[], bool]
    say: Callable[[str], None]
    finished: list[tuple[ProofRun, Run]] = field(default_factory=list)

    def make_together(self, requests: Sequence[ProofRun]) -> None:
        """Make these runs side by side, where there is room; `get` finds them."""
        if self.side_by_side and len(requests) > 1:
            runs = self.make(f"{len(requests)} runs side by side", requests)
            self.finished += zip(requests, runs, strict=True)

    def get(self, what: str, request: ProofRun) -> Run | None:
        """The run that is there already, or a new one; None where there is no time for it."""
        for finished, run in self.finished:
            if finished == request:
                return run
        if not self.has_time():
            return None
        (run,) = self.make(what, [request])
        self.finished.append((request, run))
        return run


def prove(runs: ProofRuns, kept: Sequence[Change]) -> Iterator[Verdict]:
    """Prove everything that was kept, class by class; a verdict is given as soon as it is known."""
    reseeded, identical, rounded = (
        tuple(change for change in kept if change.safety == safety)
        for safety in ("reseeded", "identical", "equivalent")
    )
    long = proof_steps(rounded)
    base = plain = ProofRun(changes=(), steps=long, leads=1)
    if reseeded:
        plain = ProofRun(changes=(), steps=IDENTITY_STEPS, leads=1)
        base = ProofRun(changes=reseeded, steps=long, follows=1, leads=2)
    runs.make_together([plain, *_likely_runs(base, identical, rounded)])
    as_it_was = runs.get(AS_IT_WAS, plain)
    if as_it_was is not None and as_it_was.broke_off:
        why = f"the command as it was failed: {as_it_was.reason()}"
        yield (*reseeded, *identical, *rounded), not_proven(why)
        return
    if reseeded:
        passed = yield from _prove_class(runs, reseeded, plain, standings=("reseeded", "identical"), whole=base)
        if not passed:
            base = plain
        elif passed != reseeded:
            base = ProofRun(changes=passed, steps=long, follows=1, leads=3)
    same = base.changes
    if identical:
        passed = yield from _prove_class(runs, identical, base, standings=("identical",))
        same = with_changes(same, passed)
    if rounded:
        if base.steps < PARITY_STEPS:  # what was reseeded did not pass
            base = ProofRun(changes=(), steps=PARITY_STEPS, leads=4)
        yield from _prove_class(runs, rounded, base, beside=same)


def _likely_runs(base: ProofRun, identical: Changes, rounded: Changes) -> list[ProofRun]:
    """The runs that a proof takes where all goes well, and two that may turn out to be needed: the rest
    without compiling, and a repeat of the run that all others are compared with."""
    runs = [base] if base.follows else []
    if identical:
        runs.append(_on_top(base, identical, IDENTITY_STEPS))
    if rounded:
        runs += [_on_top(base, (*identical, *some), PARITY_STEPS) for some in (rounded, _uncompiled(rounded)) if some]
        runs.append(_on_its_own(base))
    return runs


def _prove_class(
    runs: ProofRuns,
    changes: Changes,
    base: ProofRun,
    *,
    beside: Changes = (),
    standings: tuple[str, ...] = (),
    whole: ProofRun | None = None,
) -> Generator[Verdict, None, Changes]:
    """Verdicts on all of these together, or else on one after the other; returns those that passed.

    Their runs, with those `beside` them, are compared with `base`: the same bytes have to reach the
    model, as far as `standings` say; without any, the loss has to be the same. `whole`: the run of
    all of them, where others follow it.
    """
    repeat: Run | None = None
    steps, once_more = PARITY_STEPS, _on_its_own(base)
    if standings:
        steps, once_more = IDENTITY_STEPS, _on_top(base, (), IDENTITY_STEPS)

    def show(changes: Changes) -> Proof:
        request = whole
        if request is None or request.changes != changes:
            request = _on_top(base, with_changes(beside, changes), steps)
        before = runs.get(all_in_words(base.changes) or AS_IT_WAS, base)
        run = runs.get(all_in_words(changes), request)
        if before is None or run is None:
            return not_proven("the budget was spent")
        if not standings:
            return same_loss(before, run, repeat)
        return _at_least(standings, before, run, repeat)

    proof = show(changes)
    # A machine that never gives the same bytes or losses twice is no fault of the change.
    if not proof.holds:
        repeat = runs.get(ONCE_MORE, once_more)
        proof = show(changes)
    if proof.holds or len(changes) == 1:
        yield changes, proof
        return changes if proof.holds else ()
    rest = _uncompiled(changes)  # compiling is the first suspect
    without = show(rest) if rest else proof
    if without.holds:
        yield tuple(change for change in changes if change not in rest), proof
        yield rest, without
        return rest
    runs.say(f"proof, {all_in_words(changes)}: {proof.text}. One by one")
    # One on top of the others that passed: 0.7% and 0.7% of the loss are more than 1%.
    passed: Changes = ()
    for change in changes:
        proof = show((*passed, change))
        if proof.holds:
            passed, shown = (*passed, change), proof
        else:
            together = f", together with {all_in_words(passed)}" if passed else ""
            yield (change,), Proof(standing=proof.standing, text=f"{proof.text}{together}")
    if passed:
        yield passed, shown
    return passed


def _at_least(standings: tuple[str, ...], before: Run, run: Run, repeat: Run | None) -> Proof:
    """Whether the batches are the same as one of these standings takes it."""
    proof = same_batches(before, run, repeat)
    if not proof.holds or proof.standing in standings:
        return proof
    if repeat is not None and same_batches(before, repeat).standing not in standings:
        return not_proven("other bytes reach the model in every run, without it too")
    return failed(f"{proof.text}, where none should differ")


def _uncompiled(changes: Changes) -> Changes:
    """The other changes, where one of them is to compile; else nothing."""
    rest = tuple(change for change in changes if change.name != "compile")
    return rest if len(rest) < len(changes) else ()


def _on_its_own(base: ProofRun) -> ProofRun:
    return ProofRun(changes=base.changes, steps=PARITY_STEPS)


def _on_top(base: ProofRun, changes: Changes, steps: int) -> ProofRun:
    return ProofRun(changes=with_changes(base.changes, changes), steps=steps, follows=base.leads)
