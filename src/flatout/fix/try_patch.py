"""The patch of a fix, tried before it is called proven: is the edited script what the plan is?

Not against the command as it was: bf16 or another loader trains in another way, and was proven by its
own class. The edited script (B) runs beside the command with the plan (A), in turns, and has to train
the same from the same weights (`edit_proof`) and to reach the plan's speed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from flatout.files import write_whole
from flatout.fix.edits import Edit, patched
from flatout.fix.fix_command import own_folder
from flatout.fix.patch import FilePatch, Outcome
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import Launcher
from flatout.fix.try_edit import EditResult, TryOut
from flatout.launch import sandbox
from flatout.model.errors import FlatoutError, UsageError

SHARE = 0.25  # of the budget of a fix, set aside for this
REACHED = 0.95  # of the plan's speed
_FEWEST_RUNS = 6  # two of each, and two for the proof


@dataclass(slots=True, kw_only=True)
class PatchResult(EditResult):
    """What has been found out about a patch, beside the plan."""

    MEANT: ClassVar = "as fast as with the plan"

    by_plan: tuple[str, ...] = ()  # the changes that its flatout.apply has to make

    @property
    def is_fast_enough(self) -> bool | None:
        """Whether it reaches the plan's speed; None where the runs cannot tell."""
        if self.gain is None or self.gain.low < REACHED <= self.gain.high:
            return None
        return self.gain.low >= REACHED

    @property
    def outcome(self) -> Outcome:
        """The verdict."""
        if self.crash or self.not_made or self.is_fast_enough is False:
            return "failed"
        if self.proof is not None and self.proof.standing == "failed":
            return "failed"
        proven = self.proof is not None and self.proof.holds
        return "passed" if proven and self.is_fast_enough else "undecided"

    @property
    def not_made(self) -> list[str]:
        """Changes that are in no file and not in force either."""
        return [
            f"flatout.apply does not make {name}: {self.refused[name]}" for name in self.by_plan if name in self.refused
        ]

    @property
    def in_words(self) -> str:
        """What was shown, and what was not."""
        if self.crash:
            return f"it does not run: {self.crash}"
        words = [*self.not_made]
        if self.proof is not None:
            standing = {"failed": "not the same training as with the plan", "not proven": "training not compared"}
            words.append(f"{standing.get(self.proof.standing, 'trains as with the plan')} ({self.proof.text})")
        if self.gain is not None:
            words.append(f"{self.gain} the plan's speed")
        if self.outcome == "undecided" and self.needs and (self.proof is None or self.needs != self.proof.text):
            words.append(self.needs)
        return "; ".join(words)

    @property
    def in_short(self) -> str:
        """What is said as soon as it is known."""
        return f"the patch {self.outcome}: {self.in_words}"


def try_patch(
    patch: FilePatch,
    command: Sequence[str],
    result: FixResult,
    *,
    budget_s: float,
    spent_s: float,
    steps: int | None,
    progress: ProgressListener,
) -> FilePatch:
    """The patch with what was found out about it, in what is left of the budget. The plan has to be
    on the disk."""
    if not patch.files and patch.command == tuple(command):
        return _with(patch, "not tried", "there is nothing of it to try")
    try:
        return _tried(patch, command, result, budget_s=budget_s, spent_s=spent_s, steps=steps, progress=progress)
    except KeyboardInterrupt:
        result.interrupted = True
        return _with(patch, "not tried", "interrupted")
    except FlatoutError as problem:
        return _with(patch, "not tried", str(problem))


def _tried(
    patch: FilePatch,
    command: Sequence[str],
    result: FixResult,
    *,
    budget_s: float,
    spent_s: float,
    steps: int | None,
    progress: ProgressListener,
) -> FilePatch:
    if result.interrupted or result.written:
        return _with(patch, "not tried", "the fix was ended early")
    run = result.measured or result.after
    missing_s = _FEWEST_RUNS * (run.seconds if run is not None else 0.0) - (budget_s - spent_s)
    if missing_s > 0:
        enough = math.ceil((budget_s + missing_s) / 60 + 0.5)
        return _with(patch, "not tried", f"too little time was left: --budget {enough}m would do")
    with own_folder() as folder:
        why_not = sandbox.why_no_overlay(command, folder)
        if why_not:
            return _with(patch, "not tried", f"no overlay can be mounted that would hold it: {why_not}")
        if shutil.which("git") is None:
            return _with(patch, "not tried", "git applies it, which is not installed here")
        try:
            edit = _edit_of(patch, folder)
        except UsageError as problem:
            return _with(patch, "failed", str(problem))
        runner = Launcher(command, folder / "runs", overlay=True, edits={edit.name: edit})
        plan = [change for change in result.kept if change not in patch.unwritten]
        edits = [PatchResult(name=edit.name, by_plan=tuple(change.name for change in patch.by_plan))]
        out = TryOut(runner, edits, plan=plan, budget_s=budget_s, spent_s=spent_s, steps=steps, progress=progress).run()
        if out.interrupted:
            raise KeyboardInterrupt
        return _with(patch, edits[0].outcome, edits[0].in_words)


def _edit_of(patch: FilePatch, folder: Path) -> Edit:
    """The patch as an edit, applied by git to copies."""
    if not patch.files:
        return Edit(name="the patch", command=patch.command)
    diff = folder / "fix.diff"
    write_whole(diff, patch.diff())
    return replace(patched([diff], patch.command, folder / "patched"), name="the patch")


def _with(patch: FilePatch, outcome: Outcome, words: str) -> FilePatch:
    return replace(patch, outcome=outcome, tried=words)
