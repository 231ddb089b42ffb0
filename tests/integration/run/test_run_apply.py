"""`flatout.apply`: a plan's changes in a script that is started without flatout, and under `flatout run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from observing import flatout_run, write

from flatout.model.plan import Change, Plan

TRAIN = """
    import sys
    if sys.argv[1:] == ["torch-first"]:
        import torch
    import flatout
    flatout.apply("plan.yaml")
    flatout.apply("plan.yaml")  # once more changes nothing
    import argparse, gc
    import torch
    from torch.utils.data import DataLoader

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    args, _ = parser.parse_known_args()
    model = torch.nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(40, 3, 8, 8), batch_size=args.batch_size)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    laid_out = model.weight.is_contiguous(memory_format=torch.channels_last)
    print(args.batch_size, loader.num_workers, laid_out, gc.get_freeze_count() > 0)
"""
MADE, NOT_MADE = "8 1 True True", "4 0 False False"
PLAN = Plan(
    changes=(
        Change(name="batch_size", value=8, safety="semantic", knob="--batch-size"),
        Change(name="num_workers", value=1, safety="reseeded"),
        Change(name="channels_last", value=True, safety="equivalent"),
        Change(name="gc_freeze", value=True, safety="identical"),
    )
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, train=TRAIN)
    PLAN.save(tmp_path / "plan.yaml")
    return tmp_path


@pytest.mark.parametrize(
    ("word", "switch", "expected"), [("", "", MADE), ("torch-first", "", MADE), ("", "off", NOT_MADE)]
)
def test_it_makes_the_changes_in_a_plain_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, word: str, switch: str, expected: str
) -> None:
    monkeypatch.setenv("FLATOUT", switch)
    command = [sys.executable, "train.py", *filter(None, [word])]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout.strip(), ended.stderr) == (expected, "")
    assert not (folder / "flatout-runs").exists()


@pytest.mark.parametrize("options", [(), ("--plan", "plan.yaml")])
def test_under_flatout_run_the_changes_are_made_once_and_recorded(folder: Path, options: tuple[str, ...]) -> None:
    run = flatout_run(folder, sys.executable, "train.py", options=("--no-xray", "--quiet", *options))
    assert run.out.strip() == MADE
    assert {entry.name for entry in run.observed.rank.facts.changes if entry.applied} == {
        change.name for change in PLAN.changes
    }


def test_a_plan_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    code = "import flatout; flatout.apply('none.yaml')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stderr.strip().endswith("no such file: none.yaml")
