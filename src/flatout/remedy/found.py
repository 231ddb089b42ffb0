"""What a fix has found: every run, every change that was tried and what became of it, and the plan that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flatout.plan import Change, Outcome, Plan
from flatout.remedy.candidates import Offer
from flatout.remedy.running import Run
from flatout.remedy.speed import Gain, Noise, Speed


class Story:
    """Who is told what goes on. This one keeps it to itself."""

    def trying(self, what: str, left_s: float) -> None:
        """A run begins."""

    def said(self, line: str) -> None:
        """Something is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A change that was tried. `together`: the others it was measured with; `made` and `where`: how it got in."""

    outcome: Outcome
    gain: Gain | None = None
    together: tuple[str, ...] = ()
    made: str = ""
    where: str = ""  # file:line

    @property
    def change(self) -> Change:
        return self.outcome.change


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run, for the record. Runs for a proof are not timed: they have no speed."""

    what: str
    seconds: float
    speed: Speed | None


@dataclass(slots=True, kw_only=True)
class Found:
    """What a fix has come to."""

    attempts: list[Attempt] = field(default_factory=list)
    kept: tuple[Change, ...] = ()
    before: Run | None = None
    after: Run | None = None
    gain: Gain | None = None
    speeds: tuple[Speed, Speed] | None = None  # behind that gain: before and after, each over all its runs
    paused: bool = False  # whether the gain counts evaluation and checkpoints too
    noise: Noise | None = None
    trials: list[Trial] = field(default_factory=list)
    withheld: list[Offer] = field(default_factory=list)
    untried: list[Offer] = field(default_factory=list)  # for want of time
    remarks: list[str] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def measured(self) -> Run | None:
        """The last run of what was kept, and of nothing else; None where something was let go since, or all."""
        run, kept = self.after, {change.name: change.value for change in self.kept}
        if run is None or not kept or not kept.items() <= {c.name: c.value for c in run.changes}.items():
            return None
        others = [change for change in run.changes if change.name not in kept]
        return run if all(run.why_not_made(change) for change in others) else None

    @property
    def plan(self) -> Plan:
        """The plan to train with; what was tried and not kept stands in it too."""
        kept = {a.change.name: a for a in self.attempts if a.outcome.verdict == "kept"}
        changes = tuple(replace(change, note=_note(kept[change.name])) for change in self.kept)
        return Plan(changes=changes, tried=tuple(a.outcome for a in self.attempts if a.outcome.verdict != "kept"))


def _note(attempt: Attempt) -> str:
    gained = f"{attempt.gain}" if attempt.gain is not None else ""
    beside = f" together with {', '.join(attempt.together)}" if attempt.together else ""
    return "; ".join(filter(None, (f"{gained}{beside}", attempt.outcome.proof, attempt.outcome.note)))
