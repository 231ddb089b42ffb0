"""The runs of a fix: the time they may take (`TimeBudget`), making them (`Trials`), and their speeds
(`RunHistory`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from flatout.diagnose.knobs import knobs
from flatout.fix.offers import PAUSES, with_changes
from flatout.fix.proof_runs import proof_steps
from flatout.fix.result import FixResult, ProgressListener, RunRecord
from flatout.fix.runs import ProofRun, Run, Runner, runs_at_once
from flatout.fix.speed import EVALUATION_AND_CHECKPOINT, Speed, gain_of_rarer_pauses, pooled
from flatout.launch.protocol import MOST_STEPS, Trial
from flatout.model.plan import Change
from flatout.model.stats import FEW_STEPS, LONG_S, Gain, RunNoise, gain
from flatout.model.turns import WITHIN_S

FIRST_STEPS = 48
MEASURE_S = 6.0  # of training in a trial
COMPILING_S, TUNING_S = 40.0, 180.0  # by torch.compile, and with max-autotune, until it has been seen
COMPILED_AGAIN = 0.3  # of that time is left when the compiler finds its kernels in its cache: a guess
_PATIENCE = 4  # times as long as expected, before a run is ended
_SETTLING = 4  # times as long with the elastic loader, where steps are slow: it has to find its workers first
PROOF_RUNS = 3  # time is set aside for so many: the command as it was, and two with what is kept
ALIKE = 1.5  # times as fast: likely to be held up by the same things
_KINDS = dict(zip(PAUSES, EVALUATION_AND_CHECKPOINT, strict=True))
_RARER = 0.75  # of what they took, at the most, where some of them are left out


class TimeBudget:
    """Adds up seconds. A run is expected to take as long as the longest so far; the compiler's time
    is apart."""

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic, *, spent_s: float = 0.0) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._began_s = clock() - spent_s
        self._longest_s = 0.0  # of the runs without the compiler
        self._compiling_s: dict[str, float] = {}  # by mode, as it was seen

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        return self._budget_s - self.spent_s

    def note(self, changes: Sequence[Change], seconds: float) -> None:
        """A run of usual length with these changes has taken so long."""
        mode = _compile_mode(changes)
        if mode is None:
            self._longest_s = max(self._longest_s, seconds)
        else:
            self._compiling_s.setdefault(mode, max(0.0, seconds - self._longest_s))

    def run_s(self, changes: Sequence[Change]) -> float:
        """The seconds that a run of usual length with these changes should take."""
        again_s = self.compiled_again_s(changes)
        compiled_before = _compile_mode(changes) in self._compiling_s
        return self._longest_s + (again_s if compiled_before else again_s / COMPILED_AGAIN)

    def compiled_again_s(self, changes: Sequence[Change]) -> float:
        """What the compiler should take of them, once it has done it before."""
        mode = _compile_mode(changes)
        if mode is None:
            return 0.0
        guess_s = TUNING_S if mode == "max-autotune" else COMPILING_S
        return COMPILED_AGAIN * self._compiling_s.get(mode, guess_s)

    def timeout_s(self, expected_s: float) -> float:
        """When to end a run that should take so long."""
        if not self._longest_s:
            return max(120.0, self.left_s)  # nothing has run yet
        return max(30.0, min(60.0 + _PATIENCE * expected_s, self.left_s + 30.0))

    def enough_m(self, needed_s: float) -> int:
        """The budget in minutes that would have left so many seconds."""
        missing_s = max(0.0, needed_s - self.left_s)
        return math.ceil((self._budget_s + missing_s) / 60 + 0.5)


def _compile_mode(changes: Sequence[Change]) -> str | None:
    return next((change.value for change in changes if change.name == "compile"), None)


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
        self._expected = 0  # runs in all; 0 as long as nobody knows

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

    def run(
        self,
        what: str,
        changes: Sequence[Change],
        *,
        steps: int | None = None,
        known_to: float = math.inf,
        look_below_s: float | None = 0.0,
        turns: Sequence[Change] = (),
        elastic: bool = False,
    ) -> Run:
        """A run with these changes. `steps`: other than usual. `turns`: those of them that it decides
        one by one. `elastic`: its script may have the elastic loader.

        X-ray and ceiling are taken where its steps are shorter than `look_below_s` (always, if None); else
        they are those of what is kept.
        """
        self._say_begins(what)
        usual, expected_s = self._steps or FIRST_STEPS, self._budget.run_s(changes)
        earlier = None
        if self._result.before is not None:
            earlier = self.after if changes else self.before
            usual = self.usual_steps(earlier)
            expected_s += (steps or usual) * self.before.step_s + len(turns) * WITHIN_S
        at_least_s, enough_s = 0.0, math.inf
        if self._ends_by_time:
            at_least_s = MEASURE_S
        if self._ends_by_time and steps is None:
            enough_s = LONG_S
            if elastic or any(change.name == "loader" for change in changes):
                enough_s *= _SETTLING
        trial = Trial(
            timeout_s=self._budget.timeout_s(expected_s),
            at_least_s=at_least_s,
            enough_s=enough_s,
            known_to=known_to,
            look_below_s=look_below_s,
            turns=tuple(change.name for change in turns),
        )
        run = self._runner.run(changes, steps or usual, trial)
        self._result.trials.append(RunRecord(what=what, seconds=run.seconds, speed=run.speed))
        # A crash is over sooner, and an epoch later, than other runs: neither says what the next trial takes.
        if run.is_measured and steps is None:
            self._budget.note(changes, run.seconds - run.turns_s)
        return run.with_ceiling_from(earlier)

    def prove(self, what: str, requests: Sequence[ProofRun]) -> list[Run]:
        """Runs of a proof, side by side where there is room."""
        self._say_begins(f"proof: {what}")
        at_once, began_s = min(len(requests), runs_at_once(self.before, self.after)), self._budget.spent_s
        # Runs side by side take turns on a busy GPU, and none is ended for that.
        crowded = 1 + (at_once - 1) * (self.after.metrics.busy_share or 0.0)
        longest_s = max(self._budget.run_s(one.changes) + one.steps * self.before.step_s for one in requests)
        timeout_s = min(crowded * self._budget.timeout_s(longest_s), 2 * max(0.0, self._budget.left_s) + 30)
        runs = self._runner.prove(requests, timeout_s=timeout_s, at_once=at_once)
        took_s = max(self._budget.spent_s - began_s, *(run.seconds for run in runs))  # they may be earlier runs
        self._result.trials.append(RunRecord(what=f"proof: {what}", seconds=took_s, speed=None))
        return runs

    def _say_begins(self, what: str) -> None:
        number = len(self._result.trials) + 1
        about = self._expected and max(self._expected, number)
        self._progress.run_begins(what, self._budget.left_s, number, about, self._times_as_fast())

    def _times_as_fast(self) -> float | None:
        if not self._result.kept or self.before.speed is None or self.after.speed is None:
            return None
        return self.after.speed.value / self.before.speed.value

    def measure_afresh(self) -> None:
        """The last comparison begins."""
        self._runner.measure_afresh()

    def expect(self, offers: int) -> None:
        """So many offers are still to be tried; then come the proof, and before and after once more."""
        self._expected = len(self._result.trials) + offers + 3

    @property
    def _ends_by_time(self) -> bool:
        """Several ranks would not agree on when to end."""
        alone = self._result.before is None or self.before.metrics.rank.info.world_size == 1
        return alone and self._steps is None

    def usual_steps(self, run: Run) -> int:
        """As many as are given, or make some seconds; where a trial ends by time, the fewest."""
        if self._steps is not None:
            return self._steps
        if self._ends_by_time:
            return FIRST_STEPS
        step_s = max(1e-4, run.step_s)
        few = max(FEW_STEPS + 1, LONG_S / step_s)
        return math.ceil(min(MOST_STEPS, max(min(FIRST_STEPS, few), MEASURE_S / step_s)))

    def epoch_steps(self) -> int | None:
        """One epoch and a little more, at the batch size of what is kept; never less than a trial has."""
        steps = self.after.metrics.steps_an_epoch
        if steps is None:
            return None
        return max(math.ceil(1.1 * steps) + 5, self.usual_steps(self.after))

    def epochs_s(self, epochs: int) -> float:
        """The seconds of a run over so many epochs; as any other where nobody knows how long they are."""
        return self._budget.run_s(self._result.kept) + epochs * (self.epoch_steps() or 0) * self.after.step_s

    def compare_s(self) -> float:
        """The seconds of before and after once more."""
        return self._budget.run_s(()) + self._budget.run_s(self._result.kept)

    def reserve_s(self, changes: Sequence[Change] = (), *, compare: bool = False) -> float:
        """The time set aside for the proof, with these changes too, and for before against after."""
        plan = with_changes(self._result.kept, changes)
        reserve_s = self.compare_s() if compare and self._result.kept else 0.0
        if all(change.safety == "semantic" for change in plan):
            return reserve_s
        # One run of a proof is as slow as the command was, the others as fast as what is kept.
        training_s = proof_steps(plan) * (self.before.step_s + (PROOF_RUNS - 1) * self.after.step_s)
        return reserve_s + PROOF_RUNS * self.before.start_s + training_s + self._budget.compiled_again_s(plan)

    def affords(self, changes: Sequence[Change] = (), seconds: float | None = None, *, compare: bool = True) -> bool:
        """Whether there is time for a run with these changes too, or for so many seconds."""
        if seconds is None:
            seconds = self._budget.run_s(with_changes(self._result.kept, changes))
        return self._budget.left_s - self.reserve_s(changes, compare=compare) > seconds


class RunHistory:
    """The speeds of all runs by plan. They leave out evaluation and checkpoints: plans that differ in
    these are one."""

    def __init__(self) -> None:
        self._speeds: dict[str, list[Speed]] = {}
        self._pauses_s: dict[str, float] = {}  # a sample, by kind, without any change
        self._intervals: dict[tuple[str, str], int] = {}  # how often it has them, by change and knob

    def note(self, changes: Sequence[Change], run: Run) -> None:
        """Add a run of a plan, if it was measured."""
        if run.speed is not None and not run.hung:
            self._speeds.setdefault(_key(changes), []).append(run.speed)

    def speeds(self, changes: Sequence[Change]) -> list[Speed]:
        """Those of all runs of a plan, the first one first."""
        return self._speeds.get(_key(changes), [])

    def counting_pauses(self, changes: Sequence[Change]) -> Speed:
        """All runs of a plan as one, with evaluation and checkpoints as often as the plan has them."""
        return pooled(self.speeds(changes)).counting(self._pauses_left_s(changes))

    def gain(self, before: Sequence[Change], after: Sequence[Change]) -> Gain:
        """How many times as fast a plan is as another; with its pauses counted, where it changes them."""
        old, new = self.speeds(before), self.speeds(after)
        noise = self.noise_near(old, new)
        old_s, new_s = self._pauses_left_s(before), self._pauses_left_s(after)
        if old_s == new_s:
            return gain(old, new, noise)
        if old is new:
            return gain_of_rarer_pauses(old, old_s, new_s, noise)
        return gain([run.counting(old_s) for run in old], [run.counting(new_s) for run in new], noise)

    def forget_speeds(self) -> None:
        """Nothing that was measured counts."""
        self._speeds.clear()

    @property
    def noise(self) -> RunNoise:
        return RunNoise.seen_in(self._speeds.values())

    def noise_near(self, *plans: Sequence[Speed]) -> RunNoise:
        """That of plans about as fast as these: one that is far slower waits for something else."""
        speeds = [pooled(runs).value for runs in plans]

        def is_near(runs: Sequence[Speed]) -> bool:
            return any(1 / ALIKE < pooled(runs).value / speed < ALIKE for speed in speeds)

        return RunNoise.seen_in(runs for runs in self._speeds.values() if is_near(runs))

    def look_at_pauses(self, run: Run) -> None:
        """Learn how long evaluation and checkpoints take from a run over an epoch and more."""
        assert run.speed is not None
        self._pauses_s = run.speed.pauses_s
        for name in _KINDS:
            for knob in knobs(run.metrics.facts.settings, name, lambda value: isinstance(value, int)):
                self._intervals[name, knob.text] = knob.value

    def pauses_are_rarer(self, run: Run, changes: Sequence[Change]) -> bool:
        """Whether some of those that these changes are about were left out in a run."""
        assert run.speed is not None
        kinds = [_KINDS[change.name] for change in changes]
        seen_s = sum(run.speed.pauses_s.get(kind, 0.0) for kind in kinds)
        return seen_s < _RARER * sum(self._pauses_s.get(kind, 0.0) for kind in kinds)

    def _pauses_left_s(self, plan: Sequence[Change]) -> float:
        """Seconds a sample that they take in a long training with this plan."""
        left_s = dict(self._pauses_s)
        for change in plan:
            before = self._intervals.get((change.name, change.knob))
            if before:
                left_s[_KINDS[change.name]] *= before / change.value
        return sum(left_s.values())


def _key(changes: Sequence[Change]) -> str:
    return "; ".join(sorted(f"{c.name}={c.value!r}@{c.knob}" for c in changes if c.name not in PAUSES))
