"""`flatout try`: edits of the person's own through the gate. Is it faster, and is it the same training?

    A B B A …                                   timed, until the answer is clear or the time is up    ─► gain
    A leads; B follows it, and A once more      with fingerprints, judged by edit_proof               ─► proof
                                                                    both ─► EditResult, which has a verdict

A is the command as it is, B the same with an edit. Each of several edits is tried on its own; then
those that passed, together. How many steps a proof has follows the time that is left.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from flatout.fix.edit_proof import same_training
from flatout.fix.edits import Edit, copied, patched
from flatout.fix.fix_command import in_a_sandbox, own_folder
from flatout.fix.proof import FEWEST_BATCHES, Proof, not_proven
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import EDIT, Launcher, ProofRun, Run, Runner
from flatout.fix.speed import Speed, pooled
from flatout.fix.trials import FIRST_STEPS, RunHistory, TimeBudget, Trials
from flatout.launch import sandbox
from flatout.model.errors import UsageError
from flatout.model.plan import Change
from flatout.model.stats import MIN_GAIN, Gain
from flatout.redact import redact_command

FIRST = "the command as it is"
WITH_THE_PLAN = "the command with the plan"
NO_OVERLAY = (
    "an edit cannot be laid over your files here, as no overlay can be mounted: run the edited copy yourself, as in "
    "flatout try --unprotected --against 'python train.py' -- python edited/train.py"
)
MOST_RUNS = 12  # of each side
_USUAL_STEPS, _MOST_STEPS = 60, 600  # of a proof; the latter to see a whole pass over the data
_NO_GAIN = 1.05  # a 95% interval that ends below this hides no gain that is worth another run
_PROOF_SHARE = 0.9  # of the time left, at the most
_SLOWER = 1.2  # times: fingerprints and weights take time too

EditVerdict = Literal[
    "faster and the same",
    "faster, but not the same training",
    "not the same training",
    "the same, not faster",
    "does not run",
    "undecided",
]


@dataclass(slots=True, kw_only=True)
class EditResult:
    """What has been found out about one edit, or about several together."""

    MEANT: ClassVar = "faster"  # what it is meant to be

    name: str
    gain: Gain | None = None
    speeds: tuple[Speed, Speed] | None = None  # behind the gain
    proof: Proof | None = None
    crash: str = ""  # why it does not run
    needs: str = ""  # what would decide it
    refused: dict[str, str] = field(default_factory=dict)  # what a flatout.apply of its own did not do, and why

    @property
    def is_fast_enough(self) -> bool | None:
        """Whether a gain worth having is shown; None where it may be there and is not shown."""
        if self.gain is None:
            return None
        if self.gain.value < MIN_GAIN:
            return False if self.gain.high < _NO_GAIN else None
        return True if self.gain.low > 1 else None

    @property
    def verdict(self) -> EditVerdict:
        if self.crash:
            return "does not run"
        if self.proof is not None and self.proof.standing == "failed":
            return "faster, but not the same training" if self.is_fast_enough else "not the same training"
        if self.proof is None or not self.proof.holds or self.is_fast_enough is None:
            return "undecided"
        return "faster and the same" if self.is_fast_enough else "the same, not faster"

    @property
    def passed(self) -> bool:
        return self.verdict == "faster and the same"

    @property
    def in_short(self) -> str:
        """What is said as soon as it is known."""
        return f"{self.name}: {self.verdict}" + f", {self.gain}" * (self.gain is not None)


@dataclass(slots=True, kw_only=True)
class TryResult:
    """The result of a try, so far or in the end."""

    edits: list[EditResult]
    runs: FixResult = field(default_factory=FixResult)  # every run, and the latest of A
    remarks: list[str] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every edit is faster and the same training."""
        return all(edit.passed for edit in self.edits) and not self.interrupted


class TryOut:
    """Tries edits, each an EditResult to fill in. `together` makes one edit of several, for the
    runner; it raises UsageError where they do not fit. `spent_s` of the budget are gone; `plan`: what
    the command has without an edit."""

    def __init__(
        self,
        runner: Runner,
        edits: Sequence[EditResult],
        *,
        budget_s: float,
        spent_s: float = 0.0,
        plan: Sequence[Change] = (),
        steps: int | None = None,
        progress: ProgressListener | None = None,
        together: Callable[[Sequence[str]], Edit] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._progress = progress or ProgressListener()
        self._together = together
        self.result = TryResult(edits=list(edits))
        self._plan, self._first = tuple(plan), WITH_THE_PLAN if plan else FIRST
        self._budget = TimeBudget(budget_s, clock, spent_s=spent_s)
        self._trials = Trials(runner, self.result.runs, self._budget, self._progress, steps)
        self._history = RunHistory()
        self._leads = 0

    def run(self) -> TryResult:
        """Everything, in order. An interruption ends it with what is known so far."""
        try:
            self._time(None)
            self._decide(self.result.edits)
            self._decide_together()
        except KeyboardInterrupt:
            self.result.interrupted = True
        self.result.seconds = self._budget.spent_s
        return self.result

    # -- speed --

    def _time(self, edit: EditResult | None) -> None:
        """A timed run of the command as it is, or with an edit."""
        changes = self._plan if edit is None else _changes(edit)
        elastic = any(change.name == "loader" for change in self._plan)
        run = self._trials.run(self._first if edit is None else f"with {edit.name}", changes, elastic=elastic)
        steps = self._steps or FIRST_STEPS
        if edit is not None:
            edit.refused = run.refused
            if _fails(run, self._trials.before):
                edit.crash = run.reason() if run.hung or run.code else "it ends before its speed can be measured"
        elif not run.is_measured or (run.code and run.metrics.breakdown.steps < steps):
            raise UsageError(run.why_no_baseline(steps))
        else:
            self.result.runs.before = self.result.runs.after = run
        self._history.note(changes, run)

    def _decide(self, edits: Sequence[EditResult]) -> None:
        """A B B A, then the proof, then more runs as long as it is open which is faster."""
        self._round(edits, first=True)
        self._prove([edit for edit in edits if not edit.crash])
        while open_ones := [edit for edit in edits if self._is_open(edit)]:
            if not self._affords(open_ones):
                break
            self._round(open_ones)
        for edit in edits:
            self._say_what_is_needed(edit)
            self._progress.say(edit.in_short)

    def _round(self, edits: Sequence[EditResult], *, first: bool = False) -> None:
        """Each edit twice, the second time in reverse, with the command as it is around them."""
        if not first:
            self._time(None)
        for edit in (*edits, *reversed(edits)):
            if not edit.crash:
                self._time(edit)
        self._time(None)
        for edit in edits:
            speeds = self._history.speeds(self._plan), self._history.speeds(_changes(edit))
            if all(speeds):
                edit.gain = self._history.gain(self._plan, _changes(edit))
                edit.speeds = pooled(speeds[0]), pooled(speeds[1])

    def _is_open(self, edit: EditResult) -> bool:
        """Whether more runs could show something."""
        if edit.crash or edit.gain is None or len(self._history.speeds(_changes(edit))) >= MOST_RUNS:
            return False
        may_pass = edit.proof is not None and edit.proof.holds
        return may_pass and edit.is_fast_enough is None

    def _affords(self, edits: Sequence[EditResult]) -> bool:
        runs = 2 + 2 * len(edits)
        return self._budget.left_s > runs * self._budget.run_s(self._plan)

    def _say_what_is_needed(self, edit: EditResult) -> None:
        if edit.verdict != "undecided" or edit.needs:
            return
        if edit.proof is not None and not edit.proof.holds:
            edit.needs = edit.proof.text
            return
        runs = len(self._history.speeds(_changes(edit)))
        if runs >= MOST_RUNS:
            longer = f"--steps {2 * self._steps} has longer runs" if self._steps else "it takes a quieter machine"
            edit.needs = f"after {runs} runs of each it is not sure whether it is {edit.MEANT}: {longer}"
            return
        enough = self._budget.enough_m(max(0.0, self._budget.left_s) + 4 * self._budget.run_s(self._plan))
        edit.needs = f"it is not sure whether it is {edit.MEANT}: --budget {enough}m has more runs"

    # -- the same training --

    def _prove(self, edits: Sequence[EditResult]) -> None:
        """The command without an edit leads, the edits follow; so does it, where one is not the same
        to the bit."""
        if not edits:
            return
        steps = self._proof_steps(len(edits) + 1)
        if steps < FEWEST_BATCHES:
            for edit in edits:
                edit.proof = not_proven(self._too_short(len(edits) + 1))
            return
        self._leads += 1
        requests = [ProofRun(changes=self._plan, steps=steps, leads=self._leads)]
        requests += [ProofRun(changes=_changes(edit), steps=steps, follows=self._leads) for edit in edits]
        lead, *followers = self._trials.prove(f"{self._first}, and then the edit", requests)
        if lead.broke_off:
            for edit in edits:
                edit.proof = not_proven(f"{self._first} failed: {lead.reason()}")
            return
        doubtful = []
        for edit, run in zip(edits, followers, strict=True):
            edit.proof = same_training(lead, run)
            if edit.proof.standing != "identical":
                doubtful.append((edit, run))
        if doubtful and self._budget.left_s > 0:
            once_more = ProofRun(changes=self._plan, steps=steps, follows=self._leads)
            (again,) = self._trials.prove(f"{self._first} once more: what the machine alone does", [once_more])
            for edit, run in doubtful:
                edit.proof = same_training(lead, run, again)
        self._remark_on(steps)

    def _proof_steps(self, runs: int) -> int:
        """Steps for a whole pass over the data and a little more, as far as `runs` of them have time."""
        before = self._trials.before
        wanted, epoch = self._steps or _USUAL_STEPS, before.metrics.steps_an_epoch or 0.0
        if self._steps is None and 1.1 * epoch + 5 <= _MOST_STEPS:
            wanted = max(wanted, math.ceil(1.1 * epoch) + 5)
        each_s = _PROOF_SHARE * self._budget.left_s / runs - before.start_s
        with_again_s = _PROOF_SHARE * self._budget.left_s / (runs + 1) - before.start_s
        step_s = _SLOWER * max(before.step_s, 1e-4)
        return min(wanted, int(each_s / step_s), max(FEWEST_BATCHES, int(with_again_s / step_s)))

    def _too_short(self, runs: int) -> str:
        before = self._trials.before
        needed_s = runs * (before.start_s + FEWEST_BATCHES * _SLOWER * before.step_s) / _PROOF_SHARE
        enough = self._budget.enough_m(needed_s)
        return f"a proof takes {runs} runs of {FEWEST_BATCHES} steps, {needed_s:.0f} s: --budget {enough}m would do"

    def _remark_on(self, steps: int) -> None:
        epoch = math.ceil(self._trials.before.metrics.steps_an_epoch or 0)
        if epoch > steps:
            text = f"the proof compared {steps} steps of the {epoch:,} in a pass over the data"
            later = "nothing later, such as evaluation or a schedule; --steps and --budget reach further"
            self.result.remarks.append(f"{text}, and {later}")

    def _decide_together(self) -> None:
        """Those that passed, as one edit."""
        passed = [edit.name for edit in self.result.edits if edit.passed]
        if len(passed) < 2 or self._together is None:
            return
        try:
            edit = EditResult(name=self._together(passed).name)
        except UsageError as problem:
            self.result.remarks.append(f"not tried together: {problem}")
            return
        self.result.edits.append(edit)
        self._decide([edit])


def _fails(run: Run, before: Run) -> bool:
    return not run.is_measured or (run.code != 0 and before.code == 0)


def _changes(edit: EditResult) -> tuple[Change, ...]:
    """An edit as a change, by which the runs that have it are told from the others."""
    return (Change(name=EDIT, value=edit.name, safety="equivalent"),)


# For one command


def try_edits(
    command: Sequence[str],
    *,
    patches: Sequence[Path] = (),
    copy: Path | None = None,
    against: Sequence[str] = (),
    variables: Sequence[str] = (),
    budget_s: float,
    steps: int | None = None,
    progress: ProgressListener | None = None,
    unprotected: bool = False,
) -> TryResult:
    """Try patches, an edited `copy` of the current folder, `variables`, or the command `against` an
    older one."""
    progress = progress or ProgressListener()
    with own_folder() as folder:
        before, edits = tuple(command), {}
        for number, patch in enumerate(patches):
            edits[str(patch)] = patched([patch], command, folder / f"edit-{number}")
        if copy is not None:
            edits[str(copy)] = copied(copy, command, folder / "edit")
        if against:
            before, name = tuple(against), shlex.join(redact_command(command))
            edits[name] = Edit(name=name, command=tuple(command))
        if variables:  # env stands in front of both, so that nothing else differs
            before, name = ("env", *command), " ".join(redact_command(variables))
            edits[name] = Edit(name=name, command=("env", *variables, *command))

        def together(names: Sequence[str]) -> Edit:
            edit = patched([Path(name) for name in names], command, folder / "edit-together")
            edits[edit.name] = edit
            return edit

        def search(overlay: bool) -> TryResult:
            if not overlay and (patches or copy):
                raise UsageError(NO_OVERLAY)
            runner = Launcher(before, folder / str(overlay), overlay=overlay, edits=edits)
            tried = [EditResult(name=name) for name in edits]
            out = TryOut(runner, tried, budget_s=budget_s, steps=steps, progress=progress, together=together)
            return out.run()

        why_not = sandbox.why_no_overlay(before, folder)
        if why_not and (patches or copy):
            raise UsageError(f"{NO_OVERLAY} ({why_not})")
        return in_a_sandbox(search, why_not, progress, unprotected=unprotected)
