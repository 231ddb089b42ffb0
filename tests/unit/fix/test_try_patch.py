"""The patch of a fix beside its plan, in a world whose right answer is written down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_world import Machine, World

from flatout.cli import main
from flatout.fix import try_patch as module
from flatout.fix.offers import Wishes
from flatout.fix.patch import FilePatch
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import EDIT
from flatout.fix.search import Search
from flatout.fix.try_edit import TryOut
from flatout.fix.try_patch import PatchResult, try_patch
from flatout.model.plan import Change

PLAN = (Change(name="pin_memory", value=True, safety="identical"),)
SLOW = Machine(data_ms=60.0)


def fast(m: Machine) -> Machine:
    return replace(m, data_ms=0.1 * m.data_ms)


def tried(machine_with_patch: Machine, *, budget_s: float = 900, **more: Any) -> PatchResult:
    world = World(
        machine=SLOW, effects={"pin_memory": lambda m, _: fast(m), EDIT: lambda m, _: machine_with_patch}, **more
    )
    edit = PatchResult(name="the patch")
    TryOut(world, [edit], plan=PLAN, budget_s=budget_s, clock=world.clock).run()
    assert {("pin_memory",), (EDIT,)} == set(world.started)
    return edit


def test_a_patch_that_does_what_the_plan_does_passes() -> None:
    edit = tried(fast(SLOW))
    assert edit.outcome == "passed"
    assert edit.in_words.startswith("trains as with the plan (60 steps: ")
    assert edit.in_words.endswith("the plan's speed")


def test_one_without_the_change_in_force_is_too_slow() -> None:
    edit = tried(SLOW)
    assert edit.outcome == "failed"
    assert edit.gain is not None
    assert edit.gain.high < 0.5


def test_one_that_is_not_surely_within_five_percent_is_undecided() -> None:
    edit = tried(fast(SLOW), run_noise=0.3, budget_s=250)
    assert edit.outcome == "undecided"
    assert "not sure whether it is as fast as with the plan" in edit.in_words


def test_one_that_trains_in_another_way_than_the_plan_fails() -> None:
    def teaches(changes: Sequence[Change], losses: np.ndarray) -> np.ndarray:
        return losses * 1.1 if any(change.name == EDIT for change in changes) else losses

    edit = tried(fast(SLOW), teaches=teaches)
    assert edit.outcome == "failed"
    assert edit.in_words.startswith("not the same training as with the plan (step 1: the loss is another one")


def test_one_that_crashes_fails() -> None:
    edit = tried(SLOW, crash={EDIT: "NameError: name 'x' is not defined"})
    assert edit.outcome == "failed"
    assert edit.in_words == "it does not run: exit code 1: NameError: name 'x' is not defined"


def test_what_flatout_apply_does_not_make_is_a_failure() -> None:
    edit = PatchResult(name="the patch", by_plan=("gc_freeze",), refused={"fused_optimizer": "there was no occasion"})
    assert edit.outcome == "undecided"
    edit.refused["gc_freeze"] = "other changes are being made"
    assert edit.outcome == "failed"
    assert edit.in_words == "flatout.apply does not make gc_freeze: other changes are being made"


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FilePatch:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("one\n")
    files = {Path("train.py"): (b"one\n", b"two\n")}
    return FilePatch(file=Path("fix.diff"), files=files, command=("python", "train.py"))


def outcome(patch: FilePatch, *, spent_s: float = 10.0, result: FixResult | None = None) -> tuple[str, str]:
    result = result or FixResult(kept=PLAN)
    command = ("python", "train.py")
    done = try_patch(patch, command, result, budget_s=60.0, spent_s=spent_s, steps=None, progress=ProgressListener())
    return done.outcome, done.tried


def test_what_is_not_tried_says_why(patch: FilePatch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(patch, spent_s=90.0) == ("not tried", "too little time was left: --budget 2m would do")
    assert outcome(replace(patch, files={})) == ("not tried", "there is nothing of it to try")
    assert outcome(patch, result=FixResult(interrupted=True)) == ("not tried", "the fix was ended early")
    monkeypatch.setattr(module.sandbox, "why_no_overlay", lambda *_: "Operation not permitted")
    said = "no overlay can be mounted that would hold it: Operation not permitted"
    assert outcome(patch) == ("not tried", said)


def test_one_that_does_not_apply_has_failed(patch: FilePatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sandbox, "why_no_overlay", lambda *_: "")
    Path("train.py").write_text("three\n")
    was, said = outcome(patch)
    assert was == "failed"
    assert said.endswith("does not apply: train.py is not as the hunk at line 1 expects it")


def test_apply_leaves_files_alone_whose_patch_has_failed(
    patch: FilePatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a fix that has kept something, WHEN its patch fails, THEN it is written, and --force alone applies it."""
    failed = replace(patch, outcome="failed", tried="it does not run: exit code 1")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "train.py"], check=True)
    name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    subprocess.run(["git", *name, "commit", "-q", "-m", "one"], check=True)
    found = Search(World(machine=SLOW, workers=0), Wishes(), budget_s=600).run()
    monkeypatch.setattr("flatout.fix.fix_command.fix", lambda *_, **__: found)
    monkeypatch.setattr("flatout.fix.source_edits.patch_of", lambda *_: patch)
    monkeypatch.setattr("flatout.fix.try_patch.try_patch", lambda *_, **__: failed)

    def fix(*more: str) -> object:
        words = ["flatout", "fix", "--diff", "fix.diff", "--apply", *more, "--", sys.executable, "train.py"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert fix() == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("flatout: --apply edited nothing: the patch has failed (it does not run: exit code 1)")
    assert Path("fix.diff").read_bytes() == patch.diff()
    assert Path("train.py").read_text() == "one\n"
    assert not fix("--force")
    assert Path("train.py").read_text() == "two\n"
