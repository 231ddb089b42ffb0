"""What the launcher tells the processes inside comes through the environment whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flatout.launch import launcher, protocol
from flatout.launch.protocol import VARIABLE, Options, Trial
from flatout.model.plan import Change, Outcome, Plan


def test_options_come_back_from_the_environment() -> None:
    change = Change(name="batch_size", value=128, safety="semantic", knob="--batch-size")
    options = Options(
        folder=Path("/traces/one"),
        name="train",
        command=("python", "train.py"),
        max_steps=50,
        plan=Plan(changes=(change,)),
        trial=Trial(seed=7, fingerprints=True, follows=Path("/weights"), timeout_s=90.0, protect=Path("/scratch")),
    )
    assert Options.from_environment({VARIABLE: options.to_environment()}) == options


def test_what_a_plan_says_of_changes_tried_is_left_out() -> None:
    """The system takes 128 KiB a variable, and a long fix has much to say."""
    change = Change(name="batch_size", value=128, safety="semantic")
    tried = Outcome(change=change, verdict="undone", note="no gain" * 50_000)
    options = Options(folder=Path("/one"), name="train", plan=Plan(changes=(change,), tried=(tried,)))
    text = options.to_environment()
    assert len(text) < 2_000
    assert Options.from_environment({VARIABLE: text}) == replace(options, plan=Plan(changes=(change,)))


def test_options_of_a_plain_run_come_back_too() -> None:
    options = Options(folder=Path("/traces/one"), name="train", command=("train.sh",), xray=False)
    assert Options.from_environment({VARIABLE: options.to_environment()}) == options


def test_switched_off_there_are_no_options() -> None:
    assert Options.from_environment({VARIABLE: "{}", "FLATOUT": "off"}) is None
    assert Options.from_environment({}) is None


def test_trainings_begun_in_the_same_second_are_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(protocol.time, "strftime", lambda _: "now")
    folders = []
    for _ in range(3):
        folders.append(protocol.new_folder("train"))
        folders[-1].mkdir(parents=True)
    assert len(set(folders)) == 3
    assert [launcher.recordings(folder) for folder in folders] == [[folder] for folder in folders]
