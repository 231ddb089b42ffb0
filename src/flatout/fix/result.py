"""What a fix has found: every run, every change that was tried and what became of it, and the plan that
comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.fix.offers import Offer, in_words
from flatout.fix.runs import Run
from flatout.fix.speed import Speed
from flatout.model.plan import Change, Outcome, Plan, Verdict
from flatout.model.stats import Gain, RunNoise


class ProgressListener:
    """Hears how a fix goes. This one does nothing with it."""

    def run_begins(self, what: str, left_s: float, number: int, about: int) -> None:
        """A run begins, so many of about so many (0: nobody knows), with so much of the time budget left."""

    def say(self, line: str) -> None:
        """Something has become known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A change that was tried. `together`: the others it was measured with; `how`, `where` and `also`: how
    it was made, and at which places."""

    outcome: Outcome
    gain: Gain | None = None
    together: tuple[str, ...] = ()
    how: str = ""
    where: str = ""  # file:line
    also: tuple[str, ...] = ()

    @property
    def change(self) -> Change:
        return self.outcome.change


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, for the record. Runs for a proof are not timed: they have no speed."""

    what: str
    seconds: float
    speed: Speed | None


@dataclass(slots=True, kw_only=True)
class FixResult:
    """What a fix has come to."""

    attempts: list[Attempt] = field(default_factory=list)
    kept: tuple[Change, ...] = ()
    before: Run | None = None
    after: Run | None = None
    gain: Gain | None = None
    speeds: tuple[Speed, Speed] | None = None  # behind that gain: before and after, each over all its runs
    paused: bool = False  # whether the gain counts evaluation and checkpoints too
    noise: RunNoise | None = None
    trials: list[RunRecord] = field(default_factory=list)
    withheld: list[Offer] = field(default_factory=list)
    untried: list[Offer] = field(default_factory=list)  # for want of time
    remarks: list[str] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False
    written: tuple[str, ...] = ()  # files of the person's that a trial has written to, which ended it all
    seconds: float = 0.0

    @property
    def tried(self) -> dict[tuple[str, str], str]:
        """What became of each change, by its name and its value as text."""
        return {(a.change.name, str(a.change.value)): a.outcome.verdict for a in self.attempts}

    @property
    def known(self) -> set[str]:
        """The names of what was tried, or would have been with more time or permission."""
        return {attempt.change.name for attempt in self.attempts} | self.offered

    @property
    def offered(self) -> set[str]:
        """The names of what would have been tried with more time or permission."""
        return {change.name for offer in (*self.withheld, *self.untried) for change in offer.changes}

    def attempt_at(self, change: Change) -> Attempt:
        """What became of this one."""
        return next(a for a in self.attempts if (a.change.name, a.change.value) == (change.name, change.value))

    def write_down(
        self,
        changes: Sequence[Change],
        verdict: Verdict,
        gained: Gain | None,
        *,
        note: str = "",
        run: Run | None = None,
        before: Speed | None = None,
    ) -> None:
        """What became of some changes that were tried together, by which run."""
        old = new = None
        if before is not None and run is not None and run.speed is not None:
            old, new = before.figure, run.speed.figure
        for change in changes:
            together = tuple(in_words(other) for other in changes if other is not change)
            outcome = Outcome(change=change, verdict=verdict, before=old, after=new, note=note)
            attempt = Attempt(outcome=outcome, gain=gained, together=together)
            if run is not None and change.name in run.applied:
                made = run.applied[change.name]
                attempt = replace(attempt, how=made.how, where=made.where or "", also=made.also)
            same = (change.name, change.value)
            self.attempts = [a for a in self.attempts if (a.change.name, a.change.value) != same]
            self.attempts.append(attempt)

    def amend(self, attempt: Attempt, **parts: Any) -> None:
        """More is known of it."""
        self.attempts[self.attempts.index(attempt)] = replace(attempt, **parts)

    def drop(self, change: Change, why: str) -> None:
        """It is kept no longer."""
        attempt = self.attempt_at(change)
        verdict: Verdict = "unsafe" if why.startswith("failed") else "undone"
        self.amend(attempt, outcome=replace(attempt.outcome, verdict=verdict, note=why))
        self.kept = tuple(kept for kept in self.kept if kept.name != change.name)
        for earlier in [a for a in self.attempts if a.change.name == change.name and a.outcome.verdict == "kept"]:
            note = f"{in_words(change)} had taken its place, and was dropped"
            self.amend(earlier, outcome=replace(earlier.outcome, verdict="undone", note=note))

    @property
    def measured(self) -> Run | None:
        """The last run of what was kept and nothing else; None if there is none."""
        run, kept = self.after, {change.name: change.value for change in self.kept}
        if run is None or not kept or not kept.items() <= {c.name: c.value for c in run.changes}.items():
            return None
        others = [change for change in run.changes if change.name not in kept]
        return run if all(run.why_not_applied(change) for change in others) else None

    @property
    def plan(self) -> Plan:
        """The plan to train with; what was tried and not kept stands in it too."""
        kept = {a.change.name: a for a in self.attempts if a.outcome.verdict == "kept"}
        changes = tuple(replace(change, note=_note(kept[change.name])) for change in self.kept)
        return Plan(changes=changes, tried=tuple(a.outcome for a in self.attempts if a.outcome.verdict != "kept"))


def _note(attempt: Attempt) -> str:
    gained = str(attempt.gain or "")
    if attempt.together:
        gained += f" together with {', '.join(attempt.together)}"
    return "; ".join(filter(None, (gained, attempt.outcome.proof, attempt.outcome.note)))
