"""A trial writes nothing of the user's, by an overlay or by redirection, and leaves no process behind."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from observing import write
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from flatout import launch, sandbox, trace
from flatout.sense.options import Trial

# A script with bad manners: wipes its output folder, appends to a file, writes and reads back all it can.
RUDE = """
    import csv, os, shutil, sys
    from pathlib import Path
    import torch
    from torch.utils.tensorboard import SummaryWriter
    out = Path("out")
    shutil.rmtree(out)
    assert not out.exists() and not os.path.exists("out/old.txt"), "it still sees what it wiped"
    out.mkdir()
    assert os.listdir(out) == []
    Path("logs/deep").mkdir(parents=True)
    os.remove("stale.txt")
    assert "stale.txt" not in os.listdir(".") and not Path("stale.txt").exists()
    with open("results.csv", "a") as file:
        csv.writer(file).writerow(["epoch", 1])
    assert Path("results.csv").read_text().splitlines() == ["epoch,0", "epoch,1"]
    board = SummaryWriter("logs/board")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        board.add_scalar("loss", float(loss), step)
        torch.save(model.state_dict(), out / "last.tmp")
        os.replace(out / "last.tmp", out / "last.pt")
        assert sorted(path.name for path in out.iterdir()) == ["last.pt"]
        assert torch.load(out / "last.pt").keys() == model.state_dict().keys()
    board.close()
    assert any(Path("logs/board").glob("events*"))
    os.rename("logs", out / "logs")
    assert (out / "logs" / "deep").is_dir() and not Path("logs").exists()
    Path(sys.argv[1], "elsewhere.txt").write_text("here too")
    shutil.copy("results.csv", out)
    print("to the end")
"""


CACHING = """
from pathlib import Path
from torch._inductor.runtime.cache_dir_utils import cache_dir
file = Path(cache_dir()) / "kernel"
print(file.read_text() if file.exists() else "nothing")
file.write_text("compiled")
"""


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder, byte for byte."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user"
    (folder / "out").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "out" / "old.txt").write_text("a result of last week")
    (folder / "stale.txt").write_text("stale")
    (folder / "results.csv").write_text("epoch,0\n")
    write(folder, train=RUDE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


@pytest.mark.parametrize("way", ["overlay", "redirection"])
def test_a_trial_writes_nothing_of_the_users(
    user_folder: Path,
    tmp_path: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if way == "overlay" and not sandbox.overlays_permitted():
        pytest.skip("this system permits no overlay")
    if way == "redirection":
        monkeypatch.setattr(sandbox, "overlays_permitted", lambda: False)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = tree(user_folder)
    code = launch.run(
        [sys.executable, "train.py", str(user_folder / "data")],
        folder=tmp_path / "trace",
        xray=False,
        trial=Trial(protect=scratch),
    )
    output = (tmp_path / "trace" / launch.OUTPUT).read_text()
    assert (code, "to the end" in output) == (0, True), output
    assert tree(user_folder) == before
    assert len(trace.read(tmp_path / "trace").ranks[0].steps) > 8
    assert "has written to your folders" not in capfd.readouterr().err


@pytest.mark.parametrize("way", ["overlay", "redirection"])
def test_what_one_trial_compiled_the_next_one_finds(
    user_folder: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a machine on which nothing was compiled yet WHEN two trials compile THEN the second has it easier."""
    if way == "overlay" and not sandbox.overlays_permitted():
        pytest.skip("this system permits no overlay")
    if way == "redirection":
        monkeypatch.setattr(sandbox, "overlays_permitted", lambda: False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write(user_folder, train=CACHING)
    for number in ("first", "second"):
        (tmp_path / number).mkdir()
        launch.run(
            [sys.executable, "train.py"], folder=tmp_path / f"trace-{number}", trial=Trial(protect=tmp_path / number)
        )
    said = [(tmp_path / f"trace-{number}" / launch.OUTPUT).read_text() for number in ("first", "second")]
    assert [text.split() for text in said] == [["nothing"], ["compiled"]]


@pytest.mark.parametrize("user", ["somebody", "DOMAIN\\somebody", None])
def test_what_a_trial_compiles_lies_where_torch_itself_looks(
    tmp_path: Path, user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN any user, in a container also one without a name THEN the training that is fixed finds what trials made."""

    def getuser() -> str:
        if user is None:
            raise KeyError("getpwuid(): uid not found: 1000")
        return user

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("getpass.getuser", getuser)
    there = sandbox.environment(sandbox.Sandbox(scratch=str(tmp_path), cover=(), keep=()), redirected=False)
    assert there["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


def test_what_gets_past_the_redirection_is_told(
    user_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """GIVEN no overlay WHEN another program writes for the script THEN the person learns which file it was."""
    monkeypatch.setattr(sandbox, "overlays_permitted", lambda: False)
    (tmp_path / "scratch").mkdir()
    write(user_folder, train="import subprocess; subprocess.run(['touch', 'by-touch.txt'], check=True)")
    launch.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=Trial(protect=tmp_path / "scratch"))
    said = capfd.readouterr().err
    assert "a trial has written to your folders" in said
    assert "by-touch.txt" in said


def test_a_trial_that_hangs_is_ended_with_its_tree(user_folder: Path, tmp_path: Path) -> None:
    train = """
    import os, pathlib, subprocess
    pathlib.Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()
    print("up", flush=True)
    subprocess.run(["sleep", "1000"])
    """
    write(user_folder, train=train)
    before = set(Path("/dev/shm").iterdir())
    trial = Trial(timeout_s=2.0)
    code = launch.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=trial)
    assert code == launch.TIMED_OUT
    assert (tmp_path / "trace" / launch.OUTPUT).read_text() == "up\n"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000"]]
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.name.endswith("_1_0")]


def test_a_trial_that_hangs_does_not_outlive_who_started_it(user_folder: Path, tmp_path: Path) -> None:
    if not sandbox.overlays_permitted():
        pytest.skip("this system permits no overlay")
    (tmp_path / "scratch").mkdir()
    write(user_folder, train="import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    start = (
        "import sys; from pathlib import Path; from flatout import launch; from flatout.sense.options import Trial;"
        "trial = Trial(protect=Path(sys.argv[2]), timeout_s=600.0);"
        "launch.run([sys.executable, 'train.py'], folder=Path(sys.argv[1]), trial=trial)"
    )
    output = tmp_path / "trace" / launch.OUTPUT
    fix = subprocess.Popen([sys.executable, "-c", start, str(tmp_path / "trace"), str(tmp_path / "scratch")])
    while not (output.exists() and output.read_text().endswith("\n")):
        assert fix.poll() is None
        time.sleep(0.02)
    trial = psutil.Process(int(output.read_text()))
    fix.kill()
    fix.wait()
    assert psutil.wait_procs([trial], timeout=20)[1] == []


def test_ctrl_c_ends_the_trial_and_comes_back_to_us(user_folder: Path, tmp_path: Path) -> None:
    write(user_folder, train="import time; print('up', flush=True); time.sleep(1000)")
    output = tmp_path / "trace" / launch.OUTPUT

    def interrupt_when_up() -> None:
        while not (output.exists() and output.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_up)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=Trial(timeout_s=60.0))
    thread.join()


def test_an_unprivileged_overlay_keeps_files_too(tmp_path: Path) -> None:
    """GIVEN the user's folder under an overlay WHEN a shell removes and writes there THEN only the scratch has it."""
    if not sandbox.overlays_permitted():
        pytest.skip("this system permits no overlay")
    for name in ("below", "below/kept", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "below" / "file").write_text("as it was")
    box = sandbox.Sandbox(
        scratch=str(tmp_path / "scratch"), cover=(str(tmp_path / "below"),), keep=(str(tmp_path / "below/kept"),)
    )
    words = ["sh", "-c", "cat file && rm file && echo new > other && echo kept > kept/file && ls"]
    command = sandbox.overlaid(words, box)
    assert command is not None
    done = subprocess.run(command, cwd=tmp_path / "below", capture_output=True, text=True, check=True)
    assert done.stdout == "as it waskept\nother\n"
    assert tree(tmp_path / "below").keys() == {"file", "kept", "kept/file"}


def test_where_disks_are_mounted_is_read_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "36 35 98:0 / /mnt/données\\040brutes rw - ext4 /dev/sdb rw\n25 1 0:23 / /proc rw - proc proc rw\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: lines)
    monkeypatch.setattr("os.path.isdir", lambda path: path == "/mnt/données brutes")
    assert list(sandbox._mounted_disks()) == ["/mnt/données brutes"]
