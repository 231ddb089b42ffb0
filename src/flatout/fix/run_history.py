"""What the runs of a fix have shown so far: how fast each plan is, how noisy runs are, and what pauses take.

How long evaluation and checkpoints take is measured; that every fifth of them takes a fifth is arithmetic. A trial of
little more than an epoch could not measure it: it has the one evaluation that comes after the first epoch in any case,
or none at all. What a trial can show is that the script does skip some, if not in the first epoch then in a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flatout.diagnose.knobs import knobs
from flatout.fix.offers import PAUSES
from flatout.fix.runs import Run
from flatout.fix.speed import EVALUATION_AND_CHECKPOINT, Speed, pooled
from flatout.model.plan import Change, Figure
from flatout.model.stats import RunNoise

ALIKE = 1.5  # times as fast: likely to be held up by the same things
_KINDS = dict(zip(PAUSES, EVALUATION_AND_CHECKPOINT, strict=True))
_SEVERAL = 2  # of the rarest pause: then what was measured is better than arithmetic
_RARER = 0.75  # of what they took, at the most, where some of them are left out


class RunHistory:
    """Speeds by plan: of trials of usual length and, apart from those, of `long` runs with their pauses."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[str, bool], list[Speed]] = {}
        self._pauses_s: dict[str, float] = {}  # a sample, by kind, as often as the script has them without any change
        self._intervals: dict[tuple[str, str], int] = {}  # how often it has them, by change and knob

    def note(self, changes: Sequence[Change], run: Run, *, long: bool = False) -> None:
        """One more run of a plan, if it came to anything."""
        if run.speed is not None and not run.hung:
            self._speeds.setdefault(_key(changes, long), []).append(run.speed)

    def speeds(self, changes: Sequence[Change], *, long: bool = False) -> list[Speed]:
        """Those of all runs of a plan, the first one first."""
        return self._speeds.get(_key(changes, long), [])

    def figure_without(self, changes: Sequence[Change], plan: Sequence[Change]) -> Figure | None:
        """How fast the last run of a plan was that has no change of these names in it."""
        names = {change.name for change in changes}
        speeds = self.speeds([change for change in plan if change.name not in names])
        return speeds[-1].figure if speeds else None

    def forget_speeds(self) -> None:
        """Nothing that was measured counts."""
        self._speeds.clear()

    @property
    def noise(self) -> RunNoise:
        return RunNoise.seen_in(self._speeds.values())

    def noise_near(self, *plans: Sequence[Speed]) -> RunNoise:
        """That of plans about as fast as these: one that is far slower waits for something else, with other noise."""
        speeds = [pooled(runs).value for runs in plans]

        def is_near(runs: Sequence[Speed]) -> bool:
            value = pooled(runs).value
            return any(1 / ALIKE < value / speed < ALIKE for speed in speeds)

        return RunNoise.seen_in(runs for runs in self._speeds.values() if is_near(runs))

    # -- evaluation and checkpoints ---------------------------------------------------------------------------------

    def look_at_pauses(self, run: Run, plan: Sequence[Change]) -> None:
        """Learn what they take from a run over an epoch and more."""
        if run.speed is None or any(change.name in _KINDS for change in plan):
            return
        self._pauses_s = run.speed.pauses_s
        self._intervals = {}
        for name in _KINDS:
            for knob in knobs(run.case.facts.settings, name, lambda value: isinstance(value, int)):
                self._intervals.setdefault((name, knob.text), knob.value)

    def with_planned_pauses(self, run: Run, plan: Sequence[Change]) -> Run:
        """The run, with its pauses as often as its plan has them in a long training."""
        shares = self._shares_left(plan)
        if run.speed is None or not shares or _saw_several(run, plan):
            return run
        pauses_s = sum(seconds * shares.get(kind, 1.0) for kind, seconds in self._pauses_s.items())
        return replace(run, speed=replace(run.speed, with_pauses=1 / (1 / run.speed.value + pauses_s)))

    def pauses_are_rarer(self, run: Run, changes: Sequence[Change]) -> bool:
        """Whether some of them were left out in a run."""
        if run.speed is None:
            return False
        kinds = self._shares_left(changes)
        seen_s = sum(run.speed.pauses_s.get(kind, 0.0) for kind in kinds)
        return seen_s < _RARER * sum(self._pauses_s.get(kind, 0.0) for kind in kinds)

    def _shares_left(self, plan: Sequence[Change]) -> dict[str, float]:
        """Which share of its pauses a plan leaves, by kind: the interval as it was, over the interval as it is."""
        shares = {}
        for change in plan:
            before = self._intervals.get((change.name, change.knob))
            if before:
                shares[_KINDS[change.name]] = before / change.value
        return shares


def _saw_several(run: Run, plan: Sequence[Change]) -> bool:
    """Whether a run was long enough to have its pauses as often as its plan has them."""
    steps = run.case.steps_an_epoch
    rarest = max(change.value for change in plan if change.name in _KINDS)
    return steps is not None and run.case.breakdown.steps >= _SEVERAL * rarest * steps


def _key(changes: Sequence[Change], long: bool) -> tuple[str, bool]:
    return "; ".join(sorted(f"{change.name}={change.value!r}@{change.knob}" for change in changes)), long
