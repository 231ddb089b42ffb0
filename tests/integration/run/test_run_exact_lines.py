"""`flatout run --lines exact`: py-spy, from outside, finds the line that a look from inside cannot."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from observing import FLATOUT, flatout_run, write

from flatout.diagnose.breakdown import SAMPLES, in_training, in_workers
from flatout.launch.exact_lines import find_py_spy
from flatout.model.errors import UsageError

# An operator on Python objects keeps the interpreter's lock; from inside it is seen at the next call.
TRAIN = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader, Dataset

    BIG = 3**40_000

    class Numbers(Dataset):
        def __len__(self):
            return 1200

        def __getitem__(self, index):
            factor = BIG * BIG
            index = int(index)
            return torch.randn(6)

    def digest(rounds):
        names = []
        for number in range(rounds):
            product = BIG * BIG
            names.append(str(number))
        return len(names) + product % 7

    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in DataLoader(Numbers(), batch_size=8, num_workers=1):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        digest(20)
    print("trained", flush=True)
    END
"""
SECRET = "--api-key=hunter2hunter2"


def where(text: str) -> str:
    """Where in the script this is written."""
    return f"train.py:{next(n for n, line in enumerate(TRAIN.splitlines(), 1) if text in line)}"


@functools.cache
def why_py_spy_cannot_look() -> str:
    """Empty where py-spy can read a process that is its brother, as a training is."""
    try:
        program = find_py_spy()
    except UsageError:
        return "py-spy is not installed"
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with tempfile.TemporaryDirectory() as folder:
            words = [program, "record", "--pid", str(process.pid), "--nonblocking", "--idle", "--duration", "1"]
            words += ["--format", "raw", "--output", f"{folder}/lines"]
            looked = subprocess.run(words, capture_output=True, text=True)
        process.communicate(b"\n")
    return "" if looked.returncode == 0 else f"py-spy may not read other processes here: {looked.stderr.strip()}"


@pytest.mark.timing
@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_planted_line_is_the_first(tmp_path: Path, end: str, code: int) -> None:
    if reason := why_py_spy_cannot_look():
        pytest.skip(reason)
    write(tmp_path, train=TRAIN.replace("END", end))
    run = flatout_run(tmp_path, sys.executable, "train.py", SECRET, options=("--lines", "exact"))
    assert (run.code, run.out) == (code, "trained\n")
    looked_at = str(run.observed.rank.info.pid)
    commands = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if "record" in command and looked_at in command]
    digest = in_training(run.observed.rank)[0]
    assert (digest.name, digest.exact) == ("digest", True)
    assert (digest.hottest.where, digest.hottest.source) == (where("    product ="), "product = BIG * BIG")
    sample = in_workers(run.observed.rank, "Numbers", (SAMPLES,))[0]
    assert (sample.name, sample.exact, sample.hottest.where) == ("Numbers.__getitem__", True, where("factor = "))
    assert "train.py, digest: " in run.err
    assert "; exact lines" in run.err
    assert run.account is not None
    assert next(line for line in run.account["lines"] if line["function"] == "digest")["exact"]
    assert "hunter2" not in run.text()


def test_a_py_spy_that_fails_costs_the_exact_lines_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, train=TRAIN.replace("END", "sys.exit(3)"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/py-spy").write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\nexit 1\n")
    (tmp_path / "bin/py-spy").chmod(0o755)
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    run = flatout_run(tmp_path, sys.executable, "train.py", options=("--lines", "exact"), env={"PATH": path})
    assert (run.code, run.out) == (alone.returncode, alone.stdout)
    assert run.account is not None
    why = "the lines of rank 0 are sampled, not exact: py-spy ended with exit code 1 (Error: Permission denied)"
    assert why in run.account["notes"]
    assert not in_training(run.observed.rank)[0].exact


def test_where_py_spy_is_missing_nothing_is_started(tmp_path: Path) -> None:
    command = [str(tmp_path / "python"), *FLATOUT[1:], "run", "--lines", "exact", "--", shutil.which("touch"), "made"]
    (tmp_path / "python").symlink_to(sys.executable)  # no py-spy lies beside this name
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": str(tmp_path), "PYTHONPATH": paths}
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line == "flatout: --lines exact needs the program py-spy, which is not here: pip install 'flatout[exact]'"
    assert [path.name for path in tmp_path.iterdir()] == ["python"]
