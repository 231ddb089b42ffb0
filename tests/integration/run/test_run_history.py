"""Runs of one command after another, as a person makes them: each is listed, compared with those before, and kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from observing import FLATOUT, write

TRAIN = """
    import os, sys, time, torch
    from flatout.inside import compiler
    compiler.load_when_used()  # an optimizer's first step would load the compiler, for seconds
    torch.set_num_threads(1)
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(60):
        weight.square().sum().backward()
        optimizer.step()
        time.sleep(0.01)
    sys.exit(int(os.environ["CODE"]))
"""
COMMIT = "0123456789" * 4


def flatout(place: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CODE": str(code), "FLATOUT_KEEP": "3"}
    return subprocess.run(
        [*FLATOUT, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False
    )


def test_runs_of_one_command_are_listed_compared_and_the_last_ones_kept(tmp_path: Path) -> None:
    """GIVEN a run, and copies of it that were ten times as fast WHEN the command is run once more THEN it is slower."""
    write(tmp_path, train=TRAIN)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(COMMIT)
    train = ("run", "--price", "$3/h", "--", sys.executable, "train.py")
    assert flatout(tmp_path, *train).returncode == 0
    runs = tmp_path / "flatout-runs"
    assert (runs / ".gitignore").read_text() == "*\n"
    (first,) = runs.glob("*-train")
    noted = json.loads((first / "run.json").read_text())
    noted["speed"]["value"] *= 10
    for number in range(3):
        shutil.copytree(first, runs / f"20260101-00000{number}-train")
        (runs / f"20260101-00000{number}-train" / "run.json").write_text(json.dumps(noted))
    shutil.rmtree(first)

    again = flatout(tmp_path, *train, code=3)
    assert again.returncode == 3
    *_, slower, removed = again.stderr.splitlines()
    assert slower.startswith("flatout: slower than your last 3 runs of this command: 0.1")
    assert slower.endswith(
        f"(flatout compare flatout-runs/20260101-000002-train flatout-runs/{max(runs.iterdir()).name})"
    )
    which = "1 older recording removed from flatout-runs: it keeps the last 3"
    assert removed == f"flatout: {which} (--keep N or FLATOUT_KEEP; 0: all)"

    newest, *older = json.loads(flatout(tmp_path, "runs", "--json", "-").stdout)["runs"]
    assert len(older) == 2
    assert (newest["exit_code"], newest["commit"], newest["command"]) == (3, COMMIT, [sys.executable, "train.py"])
    assert newest["money"] > 0
    shown = flatout(tmp_path, "report").stdout
    assert shown.endswith(f"Trace: {newest['folder']}\n")
    assert "B is" in (said := flatout(tmp_path, "compare").stdout) or "No difference shown" in said
