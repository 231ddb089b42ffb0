"""The result of a fix: every run, every change that was tried and its verdict, and the plan made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flatout.fix.offers import Offer, in_words
from flatout.fix.runs import Run
from flatout.fix.speed import Speed
from flatout.model.plan import Change, Outcome, Plan, Verdict
from flatout.model.stats import Gain, RunNoise


class ProgressListener:
    """Is told how a fix goes. This one ignores it."""

    def run_begins(self, what: str, left_s: float, number: int, about: int, times: float | None = None) -> None:
        """Run `number` of `about` (0: not known) begins, with so much of the time budget left.

        `times`: how many times as fast training is with what is kept so far.
        """

    def say(self, line: str) -> None:
        """Something has become known."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A change that was tried, `together` with others. `how`, `where` and `also` say how it was made,
    and where."""

    outcome: Outcome
    gain: Gain | None = None
    together: tuple[str, ...] = ()
    how: str = ""
    where: str = ""  # file:line
    also: tuple[str, ...] = ()

    @property
    def change(self) -> Change:
        return self.outcome.change

    @property
    def is_kept(self) -> bool:
        return self.outcome.verdict == "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, for the record. Runs for a proof are not timed: they have no speed."""

    what: str
    seconds: float
    speed: Speed | None


@dataclass(slots=True, kw_only=True)
class FixResult:
    """The result of a fix, so far or in the end."""

    attempts: list[Attempt] = field(default_factory=list)
    kept: tuple[Change, ...] = ()
    before: Run | None = None
    after: Run | None = None
    gain: Gain | None = None
    speeds: tuple[Speed, Speed] | None = None  # behind that gain: before and after, each over all its runs
    paused: bool = False  # whether the gain counts evaluation and checkpoints too
    noise: RunNoise | None = None
    trials: list[RunRecord] = field(default_factory=list)
    withheld: list[Offer] = field(default_factory=list)  # for want of permission
    untried: list[Offer] = field(default_factory=list)  # for want of time
    remarks: list[str] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False
    out_of_time: bool = False  # more time would have shown more
    written: tuple[str, ...] = ()  # the user's files that a trial has written to, which ended the fix
    seconds: float = 0.0

    @property
    def unfinished(self) -> bool:
        """Whether there is something to go on with."""
        return self.interrupted or self.out_of_time

    @property
    def tried(self) -> dict[tuple[str, str], str]:
        """The verdict on each change, by its name and its value as text."""
        return {(a.change.name, str(a.change.value)): a.outcome.verdict for a in self.attempts}

    @property
    def known(self) -> set[str]:
        """The names of what was tried or offered."""
        return {attempt.change.name for attempt in self.attempts} | self.offered

    @property
    def offered(self) -> set[str]:
        """The names of what would have been tried with more time or permission."""
        return {change.name for offer in (*self.withheld, *self.untried) for change in offer.changes}

    def attempt_at(self, change: Change) -> Attempt:
        """The attempt at this change."""
        return next(a for a in self.attempts if _same(a.change, change))

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
        """The verdict on changes that were tried together, in this run."""
        old = new = None
        if before is not None and run is not None and run.speed is not None:
            old, new = before.figure, run.speed.figure
        for change in changes:
            outcome = Outcome(change=change, verdict=verdict, before=old, after=new, note=note)
            together = tuple(in_words(other) for other in changes if other is not change)
            attempt = Attempt(outcome=outcome, gain=gained, together=together)
            made = run.applied.get(change.name) if run is not None else None
            if made is not None:
                attempt.how, attempt.where, attempt.also = made.how, made.where or "", made.also
            self.attempts = [a for a in self.attempts if not _same(a.change, change)]
            self.attempts.append(attempt)

    def drop(self, change: Change, why: str) -> None:
        """Keep a change no longer, nor an earlier value whose place it took."""
        attempt = self.attempt_at(change)
        verdict: Verdict = "unsafe" if why.startswith("failed") else "undone"
        attempt.outcome = replace(attempt.outcome, verdict=verdict, note=why)
        self.kept = tuple(kept for kept in self.kept if kept.name != change.name)
        note = f"{in_words(change)} had taken its place, and was dropped"
        for earlier in self.attempts:
            if earlier.change.name == change.name and earlier.is_kept:
                earlier.outcome = replace(earlier.outcome, verdict="undone", note=note)

    @property
    def measured(self) -> Run | None:
        """The last run, if it was of what was kept and nothing else."""
        run, kept = self.after, {change.name: change.value for change in self.kept}
        if run is None or not kept or not kept.items() <= {c.name: c.value for c in run.changes}.items():
            return None
        others = [change for change in run.changes if change.name not in kept]
        return run if all(run.why_not_applied(change) for change in others) else None

    @property
    def plan(self) -> Plan:
        """The plan to train with; it also lists what was tried and not kept."""
        kept = {a.change.name: a for a in self.attempts if a.is_kept}
        changes = tuple(replace(change, note=_note(kept[change.name])) for change in self.kept)
        return Plan(changes=changes, tried=tuple(a.outcome for a in self.attempts if not a.is_kept))


def _same(one: Change, other: Change) -> bool:
    return (one.name, one.value) == (other.name, other.value)


def _note(attempt: Attempt) -> str:
    gained = str(attempt.gain or "")
    if attempt.together:
        gained += f" together with {', '.join(attempt.together)}"
    return "; ".join(filter(None, (gained, attempt.outcome.proof, attempt.outcome.note)))
