"""`flatout fix` as a person runs it: real commands, real trials, on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.launch import sandbox
from flatout.model.plan import Plan
from flatout.trace import read

pytestmark = pytest.mark.timeout(420)  # runs of a fix are many, and on a busy machine some are run again

ROOT = Path(__file__).parents[3]
FLATOUT = (sys.executable, "-m", "flatout")

# Loading waits for a disk that is not there: workers help however busy the machine is.
SLOW_DISK = """
    import argparse, random, shutil, time
    from pathlib import Path
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 4000
        def __getitem__(self, index):
            time.sleep(0.005)
            return torch.full((8,), index / 4000) + random.random() / 1000, index % 2

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    out = Path("out")
    shutil.rmtree(out, ignore_errors=True)  # a script that wipes its output folder
    out.mkdir()
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for x, y in DataLoader(Slow(), batch_size=args.batch_size, shuffle=True):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), out / f"{epoch}.pt")
"""


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def fix(folder: Path, *words: str | Path, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
    command = [*FLATOUT, "fix", "--unprotected", *map(str, words)]  # wherever tests run
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout_s)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def slow_disk(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SLOW_DISK))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "best.pt").write_text("a week of training")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.timing
def test_a_starved_training_is_fixed_proven_reported_and_edited(slow_disk: Path) -> None:
    git(slow_disk, "init")
    git(slow_disk, "add", "train.py")
    git(slow_disk, "commit", "-m", "slow")
    before = files(slow_disk)

    ended = fix(
        slow_disk,
        *("--steps", "80", "--budget", "3m", "--only", "loader", "--price", "3/h", "--diff", "fix.diff", "--apply"),
        *("--json", "fix.json", "--html", "fix.html", "--", sys.executable, "train.py"),
    )

    # THEN the loader is kept, with its gain, its proof and its place
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads((slow_disk / "fix.json").read_text())
    (kept,) = result["kept"]
    assert (kept["name"], kept["value"], kept["safety"]) == ("loader", "elastic", "reseeded")
    assert kept["gain"]["low"] > 1
    assert "the same samples in the same order" in kept["proof"]
    assert kept["where"].endswith("train.py:24")
    assert result["gain"]["value"] > 1
    assert result["after"]["epoch_money"] < result["before"]["epoch_money"]
    # AND the patch trains as the plan does, where it could be tried
    patch = result["patch"]
    if sandbox.why_no_overlay([sys.executable], slow_disk):
        assert patch["outcome"] == "not tried"
    else:
        assert patch["outcome"] in ("passed", "undecided"), patch  # how fast it is, a busy machine may leave open
        assert patch["tried"].startswith("trains as with the plan (")
    # AND the plan is one that can be trained with
    (change,) = Plan.load(slow_disk / "flatout-plan.yaml").changes
    assert (change.name, change.safety) == ("loader", "reseeded")
    assert "Train with it:  flatout run --plan flatout-plan.yaml -- " in ended.stdout
    # AND the page shows both
    page = (slow_disk / "fix.html").read_text()
    assert "time went, and where it goes" in page
    # AND the script is edited, and what it was lies beside it
    after = files(slow_disk)
    assert after["train.py.orig"] == before["train.py"]
    edited = before["train.py"].decode().replace("Dataset\n", "Dataset\nimport flatout\n", 1)
    arguments = "Slow(), batch_size=args.batch_size, shuffle=True"
    edited = edited.replace(f"in DataLoader({arguments}", f'in flatout.DataLoader({arguments}, num_workers="auto"')
    assert after["train.py"].decode() == edited
    # AND the patch says the same to git
    git(slow_disk, "checkout", "train.py")
    git(slow_disk, "apply", "fix.diff")
    assert (slow_disk / "train.py").read_text() == edited
    # AND nothing else of the person's was touched: its output folder is wiped by every run of this script
    ours = ("flatout-", "fix.", "train.py", ".git/")
    untouched = {name: data for name, data in after.items() if not name.startswith(ours)}
    assert untouched == {name: data for name, data in before.items() if not name.startswith(ours)}
    # AND the change is in force without a plan
    run = [*FLATOUT, "run", "--quiet", "--max-steps", "40", "--trace", "run", "--", sys.executable, "train.py"]
    subprocess.run(run, cwd=slow_disk, env=environment(), check=True, timeout=120)
    assert read(slow_disk / "run").ranks[0].facts.training_loader.elastic


@pytest.mark.parametrize("name", ["gray", "stock"])
def test_the_workloads_go_through_real_trials(tmp_path: Path, name: str) -> None:
    """What pays on this machine is not ours to say; that everything was tried, decided and explained is."""
    made = subprocess.run(
        [sys.executable, "-m", f"workloads.{name}.make", "--size", "tiny", "--out", str(tmp_path / "data")],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    script = ROOT / "workloads" / name
    small = {
        "gray": ("python", script / "train.py", "--width", "1", "--batch-size", "32", "--epochs", "9"),
        "stock": (
            "bash",
            script / "train.sh",
            "--hidden",
            "8",
            "--layers",
            "1",
            "--num-workers",
            "1",
            "--batch-size",
            "8",
        ),
    }[name]
    command = ("--", *small, "--data", tmp_path / "data", "--device", "cpu", "--out", tmp_path / "run")
    wishes = ("--steps", "20", "--budget", "10m", "--only", "loader,device-prefetch", "--json", "fix.json")

    ended = fix(tmp_path, *wishes, *command)

    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "fix.json").read_text())
    assert result["stopped"]
    if name == "gray":  # which decodes in the training process
        assert [entry["name"] for entry in (*result["kept"], *result["undone"])] == ["loader"]
    assert not (tmp_path / "run").exists()
    plan = Plan.load(tmp_path / "flatout-plan.yaml")
    assert [change.name for change in plan.changes] == [entry["name"] for entry in result["kept"]]
    for entry in result["kept"]:
        assert entry["proof"]
        assert entry["gain"]["value"] > 1.02
    for entry in result["undone"]:
        assert entry["why"]


@pytest.mark.parametrize(("line_seen", "anything_kept"), [(": elastic loader", False), ("loader: kept", True)])
def test_ctrl_c_leaves_the_plan_so_far_beside_an_older_one(
    slow_disk: Path, line_seen: str, anything_kept: bool
) -> None:
    """GIVEN nothing kept so far THEN the older one stays where it is."""
    (slow_disk / "flatout-plan.yaml").write_text("# edited by me\n")
    command = [*FLATOUT, "fix", "--unprotected", "--budget", "10m", "--", sys.executable, "train.py"]
    process = subprocess.Popen(
        command, cwd=slow_disk, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line_seen in line:
            break
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"^flatout: to go on: flatout fix --resume flatout-runs/\S+-fix -- \S+ train\.py$", said, re.M)
    older = slow_disk / ("flatout-plan-1.yaml" if anything_kept else "flatout-plan.yaml")
    assert older.read_text() == "# edited by me\n"
    assert (slow_disk / "flatout-plan-1.yaml").exists() == anything_kept
    if anything_kept:
        assert [change.name for change in Plan.load(slow_disk / "flatout-plan.yaml").changes] == ["loader"]


def test_a_killed_fix_goes_on_and_makes_no_run_twice(slow_disk: Path) -> None:
    """GIVEN a script that says when it starts, WHEN kill -9 comes in the third run, THEN --resume starts with that."""
    script = slow_disk / "train.py"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        call = f"import socket\nif __name__ == '__main__': socket.create_connection({server.getsockname()!r}).close()\n"
        script.write_text(call + script.read_text())
        command = [*FLATOUT, "fix", "--unprotected", "--budget", "10m", "--only", "loader", "--steps", "80"]
        with subprocess.Popen(
            [*command, "--", sys.executable, "train.py"], cwd=slow_disk, env=environment(), stderr=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            while "run 3" not in process.stderr.readline():
                assert process.poll() is None
            process.kill()
        assert calls(server) in (2, 3)  # the third may just be starting

        ended = fix(slow_disk, "--resume", "--json", "fix.json", "--", sys.executable, "train.py")

        assert ended.returncode == 0, ended.stderr
        result = json.loads((slow_disk / "fix.json").read_text())
        assert [entry["name"] for entry in (*result["kept"], *result["undone"])] == ["loader"]
        assert "the figures of 2 runs are from before this fix was resumed" in result["remarks"]
        assert len(result["trials"]) - 2 <= calls(server) <= len(result["trials"]) - 1
    (folder,) = (slow_disk / "flatout-runs").glob("[!.]*")
    assert "unfinished" not in {path.name for path in folder.iterdir()}
    again = fix(slow_disk, "--resume", "--", sys.executable, "train.py")
    assert again.returncode == 2
    assert again.stderr == "flatout: --resume: there is nothing to go on with: no unfinished fix in flatout-runs\n"


def calls(server: socket.socket) -> int:
    """How many have called since the last time."""
    for number in itertools.count():
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return number
    raise AssertionError


@pytest.mark.parametrize(
    ("number", "running"),
    [(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGINT, 0)],
    ids=["Ctrl-C", "SIGTERM", "Ctrl-C while they start"],
)
def test_what_ends_a_fix_ends_its_runs_side_by_side_too(tmp_path: Path, number: int, running: int) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(100)\n")
    start = """
        import signal, sys
        from pathlib import Path
        from flatout.fix.runs import Launcher, ProofRun
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        launcher = Launcher([sys.executable, "train.py"], Path("trials").resolve())
        Path("trials").mkdir()
        try:
            print("ready", flush=True)
            launcher.prove([ProofRun(changes=(), steps=20)] * 2, timeout_s=90.0, at_once=2)
        except KeyboardInterrupt:
            sys.exit(77)
    """
    command = [sys.executable, "-c", textwrap.dedent(start)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE)

    def runs() -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                here = one.environ().get("PWD") == str(tmp_path) or Path(one.cwd()) == tmp_path
                found += [one] * (here and one.cmdline()[-1:] == ["train.py"])
        return found

    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    until_s = time.monotonic() + 60
    while len(runs()) < running:
        assert time.monotonic() < until_s
        time.sleep(0.1)
    time.sleep(0.02)  # they are being started now
    process.send_signal(number)
    assert process.wait(30) == 77
    process.stdout.close()
    assert not runs()


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("import torchh", "the command fails by itself: exit code 1: ModuleNotFoundError: No module named 'torchh'"),
        ("name = input()", "EOF when reading a line at train.py:1; a trial has nothing to read from stdin"),
        ("print('hello')", "no optimizer step was seen: nothing to fix"),
    ],
)
def test_a_command_that_cannot_be_fixed_gets_one_line(tmp_path: Path, script: str, complaint: str) -> None:
    (tmp_path / "train.py").write_text(script)
    ended = fix(tmp_path, "train.py")
    assert ended.returncode == 2
    assert complaint in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "flatout-plan.yaml").exists()
