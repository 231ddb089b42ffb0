"""The runs of a fix: made in the time there is (`Trials`), and what they have shown so far (`RunHistory`).

How long evaluation and checkpoints take is measured; that every fifth of them takes a fifth is
arithmetic. A trial of little more than an epoch could not measure it: it has the one evaluation that
comes after the first epoch in any case, or none at all. What a trial can show is that the script does
skip some, if not in the first epoch then in a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flatout.diagnose.find_knobs import knobs
from flatout.fix.offers import PAUSES, with_changes
from flatout.fix.proof_runs import proof_steps
from flatout.fix.result import FixResult, ProgressListener, RunRecord
from flatout.fix.runs import ProofRun, Run, Runner, runs_at_once
from flatout.fix.speed import EVALUATION_AND_CHECKPOINT, Speed, pooled
from flatout.fix.time_budget import TimeBudget
from flatout.launch.protocol import MOST_STEPS, Trial
from flatout.model.plan import Change, Figure
from flatout.model.stats import RunNoise

FIRST_STEPS = 48
MEASURE_S = 6.0  # of training in a trial
PROOF_RUNS = 3  # time is set aside for so many: the command as it was, and two with what is kept
ALIKE = 1.5  # times as fast: likely to be held up by the same things
_KINDS = dict(zip(PAUSES, EVALUATION_AND_CHECKPOINT, strict=True))
_SEVERAL = 2  # of the rarest pause: then what was measured is better than arithmetic
_RARER = 0.75  # of what they took, at the most, where some of them are left out


class Trials:
    """Makes the runs of a fix. `result` holds what is kept so far; `steps`: of each run, if given."""

    def __init__(
        self, runner: Runner, result: FixResult, budget: TimeBudget, progress: ProgressListener, steps: int | None
    ) -> None:
        self._runner = runner
        self._result = result
        self._progress = progress
        self._steps = steps
        self._budget = budget
        self.history = RunHistory()
        self.others_here = False  # others used the machine during a run

    @property
    def before(self) -> Run:
        """The latest run of the command as it was."""
        assert self._result.before is not None
        return self._result.before

    @property
    def after(self) -> Run:
        """The latest run of what is kept so far."""
        assert self._result.after is not None
        return self._result.after

    @property
    def speed_now(self) -> Speed:
        """That of the latest run of what is kept so far."""
        return self.history.speeds(self._result.kept)[-1]

    def run(
        self,
        what: str,
        changes: Sequence[Change],
        *,
        steps: int | None = None,
        known_to: float = math.inf,
        look_below_s: float | None = None,
    ) -> Run:
        """A run with these changes. `steps`: other than usual."""
        self._progress.run_begins(what, self._budget.left_s)
        first = self._result.before is None
        usual, expected_s = self._steps or FIRST_STEPS, self._budget.run_s(changes)
        if not first:
            usual = self.usual_steps(self.after if changes else self.before)
            training_s = (steps or usual) * self.before.step_s
            expected_s = max(expected_s, self.before.start_s + training_s + self._budget.compiled_again_s(changes))
        trial = Trial(
            timeout_s=self._budget.timeout_s(expected_s),
            at_least_s=MEASURE_S if self._ends_by_time else 0.0,
            known_to=known_to,
            look_below_s=look_below_s,
        )
        run = self._runner.run(changes, steps or usual, trial)
        self._result.trials.append(RunRecord(what=what, seconds=run.seconds, speed=run.speed))
        # A crash is over sooner, and a whole epoch later, than other runs: neither says what the next trial
        # takes.
        if run.is_measured and steps is None:
            self._budget.note(changes, run.seconds)
        if not self.others_here and run.in_company:
            self.others_here = True
            self.remark("others use this machine: a gain may not show, run it again when it is quiet")
        return self.history.with_planned_pauses(run, changes)

    def prove(self, what: str, requests: Sequence[ProofRun]) -> list[Run]:
        """Runs of a proof, side by side where there is room."""
        self._progress.run_begins(f"proof: {what}", self._budget.left_s)
        at_once, began_s = min(len(requests), runs_at_once(self.before, self.after)), self._budget.spent_s
        # Runs side by side take turns on a busy GPU, and none is ended for that.
        crowded = 1 + (at_once - 1) * (self.after.metrics.busy_share or 0.0)
        longest_s = max(self.seconds_again(self.before, one.steps) for one in requests)
        compiling_s = max(self._budget.compiled_again_s(one.changes) for one in requests)
        timeout_s = crowded * self._budget.timeout_s(longest_s + compiling_s)
        timeout_s = min(timeout_s, 2 * max(0.0, self._budget.left_s) + 30)
        runs = self._runner.prove(requests, timeout_s=timeout_s, at_once=at_once)
        took_s = self._budget.spent_s - began_s
        self._result.trials.append(RunRecord(what=f"proof: {what}", seconds=took_s, speed=None))
        return runs

    def remark(self, text: str) -> None:
        """Something the user should know, if there is anything."""
        if text:
            self._result.remarks.append(text)
            self._progress.say(text)

    # -- steps --

    @property
    def _ends_by_time(self) -> bool:
        """Whether a trial ends by time; several ranks would not agree on when that is."""
        alone = self._result.before is None or self.before.metrics.rank.info.world_size == 1
        return alone and self._steps is None

    def usual_steps(self, run: Run) -> int:
        """More than the batches that lie ready at the start; for some seconds, where only steps count."""
        if self._steps is not None:
            return self._steps
        if self._ends_by_time:
            return FIRST_STEPS
        return int(min(MOST_STEPS, max(FIRST_STEPS, MEASURE_S / max(1e-4, run.step_s))))

    def epoch_steps(self) -> int | None:
        """One epoch and a little more, at the batch size of what is kept; never less than a trial has."""
        steps = self.after.metrics.steps_an_epoch
        if steps is None:
            return None
        return max(math.ceil(1.1 * steps) + 5, self.usual_steps(self.after))

    # -- time --

    def seconds_again(self, run: Run, steps: int | None = None) -> float:
        """What a run takes once more, without X-ray and ceiling: so many steps, or as many as it had."""
        training_s = run.metrics.breakdown.training_ms / 1e3
        if steps is not None:
            training_s = steps * run.step_s
        return self.before.start_s + self._budget.compiled_again_s(run.changes) + training_s

    def compare_s(self, steps: int | None = None) -> float:
        """What before and after take once more."""
        return self.seconds_again(self.before, steps) + self.seconds_again(self.after, steps)

    def reserve_s(self, changes: Sequence[Change] = (), *, compare: bool = True) -> float:
        """The time set aside for the proof, with these changes too, and for before against after."""
        plan = with_changes(self._result.kept, changes)
        reserve_s = 0.0
        if compare and self._result.kept:
            reserve_s = self.compare_s()
        if all(change.safety == "semantic" for change in plan):
            return reserve_s
        # One run of a proof is as slow as the command was, the others as fast as what is kept.
        training_s = proof_steps(plan) * (self.before.step_s + (PROOF_RUNS - 1) * self.after.step_s)
        return reserve_s + PROOF_RUNS * self.before.start_s + training_s + self._budget.compiled_again_s(plan)

    def spare_s(self, changes: Sequence[Change] = (), *, compare: bool = True) -> float:
        """The time that is left beside what is set aside."""
        return self._budget.left_s - self.reserve_s(changes, compare=compare)

    def affords(self, changes: Sequence[Change], runs: int = 1) -> bool:
        """Whether there is time for so many runs with these changes too, beside what is set aside."""
        plan = with_changes(self._result.kept, changes)
        return self.spare_s(changes) > runs * self._budget.run_s(plan)


class RunHistory:
    """Speeds by plan: of trials of usual length and, apart from those, of `long` runs with their pauses."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[str, bool], list[Speed]] = {}
        self._pauses_s: dict[str, float] = {}  # a sample, by kind, without any change
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
        """That of plans about as fast as these: one that is far slower waits for something else, with other
        noise."""
        speeds = [pooled(runs).value for runs in plans]

        def is_near(runs: Sequence[Speed]) -> bool:
            value = pooled(runs).value
            return any(1 / ALIKE < value / speed < ALIKE for speed in speeds)

        return RunNoise.seen_in(runs for runs in self._speeds.values() if is_near(runs))

    # -- evaluation and checkpoints --

    def look_at_pauses(self, run: Run, plan: Sequence[Change]) -> None:
        """Learn what they take from a run over an epoch and more."""
        if run.speed is None or any(change.name in _KINDS for change in plan):
            return
        self._pauses_s = run.speed.pauses_s
        self._intervals = {}
        for name in _KINDS:
            for knob in knobs(run.metrics.facts.settings, name, lambda value: isinstance(value, int)):
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
        """Which share of its pauses a plan leaves, by kind: the interval as it was, over the interval as it
        is."""
        shares = {}
        for change in plan:
            before = self._intervals.get((change.name, change.knob))
            if before:
                shares[_KINDS[change.name]] = before / change.value
        return shares


def _saw_several(run: Run, plan: Sequence[Change]) -> bool:
    """Whether a run was long enough to have its pauses as often as its plan has them."""
    steps = run.metrics.steps_an_epoch
    rarest = max(change.value for change in plan if change.name in _KINDS)
    return steps is not None and run.metrics.breakdown.steps >= _SEVERAL * rarest * steps


def _key(changes: Sequence[Change], long: bool) -> tuple[str, bool]:
    return "; ".join(sorted(f"{change.name}={change.value!r}@{change.knob}" for change in changes)), long
