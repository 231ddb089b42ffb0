"""Edits tried in a world whose right answer is written down: what each comes to, and which runs that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated_world import Machine, World

from flatout.fix.edits import Edit
from flatout.fix.runs import EDIT, Run
from flatout.fix.try_edit import MOST_RUNS, EditResult, TryOut, TryResult
from flatout.model.errors import UsageError
from flatout.model.plan import Change

DATA_MS = 60.0
FASTER = {"faster.diff": 0.2, "wrong.diff": 0.2, "other.diff": 0.5, "same.diff": 1.0, "slower.diff": 2.0}
HARM = {"wrong.diff", "slower-and-wrong.diff"}


def edits_of(changes: Sequence[Change]) -> list[str]:
    return [name for change in changes if change.name == EDIT for name in str(change.value).split(" + ")]


def effect(m: Machine, name: str) -> Machine:
    for one in name.split(" + "):
        m = replace(m, data_ms=m.data_ms * FASTER.get(one, 1.0))
    return m


def teaches(changes: Sequence[Change], losses: np.ndarray) -> np.ndarray:
    return losses * 1.1 if HARM & set(edits_of(changes)) else losses


def world(**more: Any) -> World:
    known = {"machine": Machine(data_ms=DATA_MS), "effects": {EDIT: effect}, "teaches": teaches}
    return World(**known | more)


def tried(simulated: World, *names: str, budget_s: float = 600, **more: Any) -> TryResult:
    edits = [EditResult(name=name) for name in names]
    return TryOut(simulated, edits, budget_s=budget_s, clock=simulated.clock, **more).run()


def only(result: TryResult) -> EditResult:
    (edit,) = result.edits
    return edit


def runs_of(result: TryResult) -> list[str]:
    return [trial.what for trial in result.runs.trials]


def test_a_right_edit_is_faster_and_the_same() -> None:
    result = tried(world(), "faster.diff")
    edit = only(result)
    assert (edit.verdict, result.passed) == ("faster and the same", True)
    assert edit.gain is not None
    assert edit.gain.low < (DATA_MS + 20) / (0.2 * DATA_MS + 20) < edit.gain.high
    # A B B A, and then the proof, which an edit that is the same to the last bit passes without a repeat
    assert runs_of(result) == [
        "the command as it is",
        "with faster.diff",
        "with faster.diff",
        "the command as it is",
        "proof: the command as it is, and then the edit",
    ]


def test_a_wrong_one_is_not_and_says_what_differs() -> None:
    result = tried(world(), "wrong.diff")
    edit = only(result)
    assert (edit.verdict, result.passed) == ("faster, but not the same training", False)
    assert edit.proof is not None
    assert edit.proof.text.startswith("step 1: the loss is another one")
    assert runs_of(result)[-1] == "proof: the command as it is once more: what the machine alone does"


def test_one_that_changes_nothing_is_not_faster() -> None:
    result = tried(world(), "same.diff")
    assert (only(result).verdict, result.passed) == ("the same, not faster", False)


def test_a_slower_one_is_not_measured_again_and_again() -> None:
    result = tried(world(), "slower.diff")
    assert only(result).verdict == "the same, not faster"
    assert len(result.runs.trials) == 5


def test_a_small_gain_is_measured_until_it_is_clear_or_the_runs_are_many() -> None:
    small = {EDIT: lambda m, _: replace(m, compute_ms=19.2)}
    result = tried(world(machine=Machine(data_ms=1.0), effects=small), "small.diff", budget_s=3000)
    assert sum(what == "with small.diff" for what in runs_of(result)) in range(3, MOST_RUNS + 1)
    assert only(result).verdict == "faster and the same"
    # AND where runs differ by more than it gives, it stays open, with what would help
    noisy = world(machine=Machine(data_ms=1.0), effects=small, run_noise=0.25)
    result = tried(noisy, "small.diff", budget_s=3000, steps=60)
    assert sum(what == "with small.diff" for what in runs_of(result)) == MOST_RUNS
    assert only(result).verdict == "undecided"
    assert (
        only(result).needs == "after 12 runs of each it is not sure whether it is faster: --steps 120 has longer runs"
    )
    brief = tried(noisy, "small.diff", budget_s=200)
    assert "--budget " in only(brief).needs


def test_one_that_crashes_does_not_run() -> None:
    result = tried(world(crash={EDIT: "NameError: name 'x' is not defined"}), "broken.diff")
    edit = only(result)
    assert (edit.verdict, edit.crash) == ("does not run", "exit code 1: NameError: name 'x' is not defined")
    assert runs_of(result) == ["the command as it is", "with broken.diff", "the command as it is"]


def test_a_command_that_does_not_run_is_the_persons_mistake() -> None:
    class Broken(World):
        def run(self, *_: Any) -> Run:
            return Run(changes=(), code=1, seconds=1.0, output="ValueError: no data")

    with pytest.raises(UsageError, match="the command fails by itself: exit code 1: ValueError: no data"):
        tried(Broken(), "faster.diff")


def test_several_are_tried_each_alone_and_then_those_that_passed_together() -> None:
    def together(names: Sequence[str]) -> Edit:
        return Edit(name=" + ".join(names), command=("python", "train.py"))

    result = tried(world(), "faster.diff", "wrong.diff", "other.diff", together=together, budget_s=3000)
    assert [(edit.name, edit.verdict) for edit in result.edits] == [
        ("faster.diff", "faster and the same"),
        ("wrong.diff", "faster, but not the same training"),
        ("other.diff", "faster and the same"),
        ("faster.diff + other.diff", "faster and the same"),
    ]
    assert not result.passed


def test_edits_that_do_not_fit_together_are_not_tried_so() -> None:
    def together(names: Sequence[str]) -> Edit:
        raise UsageError("other.diff does not apply: train.py is not as the hunk at line 3 expects it")

    result = tried(world(), "faster.diff", "other.diff", together=together, budget_s=3000)
    assert result.passed
    assert result.remarks[-1].startswith("not tried together: other.diff does not apply")


def test_a_proof_that_has_no_time_says_how_much_it_would_take() -> None:
    edit = only(tried(world(), "faster.diff", budget_s=62))
    assert edit.verdict == "undecided"
    assert "a proof takes 2 runs of 20 steps" in edit.needs
    assert "--budget " in edit.needs


def test_what_was_seen_of_a_pass_over_the_data_is_said() -> None:
    result = tried(world(length=64 * 5000), "faster.diff")
    assert result.remarks == [
        "the proof compared 60 steps of the 5,000 in a pass over the data, and nothing later, such as evaluation or a "
        "schedule; --steps and --budget reach further"
    ]
    assert tried(world(length=64 * 30), "faster.diff").remarks == []


@pytest.mark.parametrize("at", [1, 3, 4])
def test_an_interruption_leaves_what_is_known(at: int) -> None:
    result = tried(world(interrupt_at=at), "faster.diff")
    assert result.interrupted
    assert not result.passed
    assert only(result).verdict == "undecided"


def test_the_names_of_runs_say_which_edit_they_have() -> None:
    simulated = world()
    seen: list[list[str]] = []
    run: Callable[..., Run] = simulated.run

    def noting(changes: Sequence[Change], *rest: Any) -> Run:
        seen.append(edits_of(changes))
        return run(changes, *rest)

    simulated.run = noting  # type: ignore[method-assign]
    tried(simulated, "faster.diff")
    assert seen == [[], ["faster.diff"], ["faster.diff"], []]
