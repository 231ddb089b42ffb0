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

from flatout import trace
from flatout.launch import launcher, sandbox
from flatout.launch.protocol import Trial
from flatout.model.errors import RealWriteError

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


def overlay_for(way: str, folder: Path) -> bool:
    """Whether trials run on an overlay; where that is what is tested and the system forbids it, there is no test."""
    if way == "overlay" and (why := sandbox.why_no_overlay([sys.executable], folder)):
        pytest.skip(f"this system permits no overlay: {why}")
    return way == "overlay"


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
    capfd: pytest.CaptureFixture[str],
) -> None:
    overlay = overlay_for(way, tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = tree(user_folder)
    code = launcher.run(
        [sys.executable, "train.py", str(user_folder / "data")],
        folder=tmp_path / "trace",
        xray=False,
        trial=Trial(protect=scratch, overlay=overlay),
    )
    output = (tmp_path / "trace" / launcher.OUTPUT).read_text()
    assert (code, "to the end" in output) == (0, True), output
    assert tree(user_folder) == before
    assert len(trace.read(tmp_path / "trace").ranks[0].steps) > 8
    assert str(user_folder) not in capfd.readouterr().err


@pytest.mark.parametrize("way", ["overlay", "redirection"])
def test_what_one_trial_compiled_the_next_one_finds(
    user_folder: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a machine on which nothing was compiled yet WHEN two trials compile THEN the second has it easier."""
    overlay = overlay_for(way, tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write(user_folder, train=CACHING)
    for number in ("first", "second"):
        (tmp_path / number).mkdir()
        trial = Trial(protect=tmp_path / number, overlay=overlay)
        launcher.run([sys.executable, "train.py"], folder=tmp_path / f"trace-{number}", trial=trial)
    said = [(tmp_path / f"trace-{number}" / launcher.OUTPUT).read_text() for number in ("first", "second")]
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
    box = sandbox.sandbox_for(["python", "train.py"], tmp_path, ())
    there = sandbox.environment(box, redirected=False)
    assert there["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


def test_what_gets_past_the_redirection_ends_it_and_is_named(user_folder: Path, tmp_path: Path) -> None:
    """GIVEN no overlay WHEN other programs write for the script THEN the person learns of every file."""
    (tmp_path / "scratch").mkdir()
    past = "mkdir -p new/deep; touch by-touch.txt new/deep/file; echo >> results.csv; rm stale.txt; cp stale.txt x"
    write(user_folder, train=f"import subprocess; subprocess.run({past!r}, shell=True)")
    trial = Trial(protect=tmp_path / "scratch", overlay=False)
    with pytest.raises(RealWriteError) as told:
        launcher.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=trial)
    names = ["by-touch.txt", "new/deep/file", "results.csv", "stale.txt"]
    assert told.value.files == tuple(str(user_folder / name) for name in names)
    assert all(name in str(told.value) for name in names)


# Ways of writing that open() is not, each at a file of the user's. What cannot be caught is in docs/FIX.md.
SIDE_DOORS = """
    import io, os, stat
    from pathlib import Path
    with io.FileIO("results.csv", "a") as file:
        file.write(b"by FileIO")
    assert open("results.csv", "rb").read().endswith(b"by FileIO")
    assert isinstance(open("results.csv", "rb", buffering=0), io.FileIO)
    os.link("stale.txt", "hard.txt")
    open("hard.txt", "w").write("not the one it was made of")
    assert Path("stale.txt").read_text() == "stale"
    for folder, _, files, handle in os.fwalk("out"):
        for name in files:
            os.unlink(name, dir_fd=handle)
    assert os.listdir("out") == []
    here = os.open(".", os.O_RDONLY)
    os.close(os.open("by-handle.txt", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.rename("by-handle.txt", "renamed.txt", src_dir_fd=here, dst_dir_fd=here)
    os.mkdir("folder", dir_fd=here)
    os.symlink("results.csv", "link", dir_fd=here)
    os.mkfifo("pipe")
    os.mknod("node", 0o600 | stat.S_IFREG)
    open("/proc/self/cwd/by-proc.txt", "w").close()
    open(f"/proc/{os.getpid()}/cwd/results.csv", "w").write("by proc")
    open("/proc/self/root" + os.path.abspath("stale.txt"), "w").write("by root")
    open("elsewhere/kept.txt", "w").write("through a link")
    assert open("elsewhere/kept.txt").read() == open("../far/kept.txt").read() == "through a link"
    assert os.listdir("elsewhere") == ["kept.txt"]
    open("to-kept.txt", "a").write(", by its own link")
    assert open("../far/kept.txt").read() == "through a link, by its own link"
    os.symlink(os.path.abspath("../far"), "far")
    open("far/new.txt", "w").write("through a link of its own")
    os.symlink(os.path.abspath("../far/kept.txt"), "one")
    open("one", "w").write("the same")
    os.replace("one", "other")
    os.chmod("out", 0o700)
    with open("data/numbers") as file:
        os.fchmod(file.fileno(), 0o600)
        os.chown(file.fileno(), os.getuid(), os.getgid())
        os.utime(file.fileno(), (1, 1))
    os.chown("data/numbers", os.getuid(), os.getgid())
    os.lchown("data/numbers", os.getuid(), os.getgid())
    try:
        os.setxattr("data/numbers", "user.note", b"mine")
        os.removexattr("data/numbers", "user.note")
    except OSError:
        pass  # not on this disk
    print("to the end")
"""


def test_side_doors_are_redirected_too(user_folder: Path, tmp_path: Path) -> None:
    """GIVEN no overlay WHEN a script writes in other ways than by open() THEN nothing of the user's changes."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "kept.txt").write_text("kept")
    (user_folder / "data" / "numbers").write_text("123")
    (user_folder / "elsewhere").symlink_to(tmp_path / "far")
    (user_folder / "to-kept.txt").symlink_to(tmp_path / "far" / "kept.txt")
    write(user_folder, train=SIDE_DOORS)
    before, far, times = tree(user_folder), tree(tmp_path / "far"), (user_folder / "data" / "numbers").stat()
    trial = Trial(protect=tmp_path / "scratch", overlay=False)
    code = launcher.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=trial)  # and compares
    output = (tmp_path / "trace" / launcher.OUTPUT).read_text()
    assert (code, "to the end" in output) == (0, True), output
    assert (tree(user_folder), tree(tmp_path / "far")) == (before, far)
    assert (user_folder / "data" / "numbers").stat() == times


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR here"])
def test_no_variable_opens_the_sandbox(
    user_folder: Path, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a cache folder that is, or is above, the working folder THEN a trial still writes nothing there."""
    overlay = overlay_for("overlay", tmp_path)
    name, _, here = variable.partition(" ")
    monkeypatch.setenv(name, str(user_folder if here else tmp_path))
    (tmp_path / "scratch").mkdir()
    write(user_folder, train="open('stale.txt', 'w').write('overwritten by a trial')")
    launcher.run(
        [sys.executable, "train.py"],
        folder=tmp_path / "trace",
        trial=Trial(protect=tmp_path / "scratch", overlay=overlay),
    )
    assert (user_folder / "stale.txt").read_text() == "stale"


def test_what_links_of_the_project_lead_to_is_covered(user_folder: Path, tmp_path: Path) -> None:
    overlay = overlay_for("overlay", tmp_path)
    (tmp_path / "scratch").mkdir()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as far:
        Path(far, "kept.txt").write_text("kept")
        (user_folder / "far").symlink_to(far)
        write(user_folder, train="open('far/kept.txt', 'w').write('overwritten by a trial')")
        launcher.run(
            [sys.executable, "train.py"],
            folder=tmp_path / "trace",
            trial=Trial(protect=tmp_path / "scratch", overlay=overlay),
        )
        assert Path(far, "kept.txt").read_text() == "kept"


def test_what_overlays_do_not_cover_is_compared(user_folder: Path, tmp_path: Path) -> None:
    """GIVEN a file in /dev/shm WHEN a trial overwrites it THEN that ends it; a folder there is covered."""
    overlay = overlay_for("overlay", tmp_path)
    (tmp_path / "scratch").mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(f"{folder}.txt")
        for path in (file, Path(folder, "kept.txt")):
            path.write_text("kept")
        write(user_folder, train=f"for path in ('{file}', '{folder}/kept.txt'): open(path, 'w').write('overwritten')")
        trial = Trial(protect=tmp_path / "scratch", overlay=overlay)
        try:
            with pytest.raises(RealWriteError) as told:
                launcher.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=trial)
        finally:
            file.unlink()
        assert (told.value.files, Path(folder, "kept.txt").read_text()) == ((str(file),), "kept")


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
    code = launcher.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=trial)
    assert code == launcher.TIMED_OUT
    assert (tmp_path / "trace" / launcher.OUTPUT).read_text() == "up\n"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000"]]
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.name.endswith("_1_0")]


def test_a_trial_that_hangs_does_not_outlive_who_started_it(user_folder: Path, tmp_path: Path) -> None:
    overlay_for("overlay", tmp_path)
    (tmp_path / "scratch").mkdir()
    write(user_folder, train="import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    start = (
        "import sys; from pathlib import Path; from flatout.launch import launcher;"
        "from flatout.launch.protocol import Trial;"
        "trial = Trial(protect=Path(sys.argv[2]), timeout_s=600.0);"
        "launcher.run([sys.executable, 'train.py'], folder=Path(sys.argv[1]), trial=trial)"
    )
    output = tmp_path / "trace" / launcher.OUTPUT
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
    output = tmp_path / "trace" / launcher.OUTPUT

    def interrupt_when_up() -> None:
        while not (output.exists() and output.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_up)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launcher.run([sys.executable, "train.py"], folder=tmp_path / "trace", trial=Trial(timeout_s=60.0))
    thread.join()


def test_an_unprivileged_overlay_keeps_files_too(tmp_path: Path) -> None:
    """GIVEN the user's folder under an overlay WHEN a shell removes and writes there THEN only the scratch has it."""
    overlay_for("overlay", tmp_path)
    for name in ("below", "below/kept", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "below" / "file").write_text("as it was")
    box = sandbox.Sandbox(
        scratch=str(tmp_path / "scratch"), cover=(str(tmp_path / "below"),), keep=(str(tmp_path / "below/kept"),)
    )
    words = ["sh", "-c", "cat file && rm file && echo new > other && echo kept > kept/file && ls"]
    done = subprocess.run(
        [*sandbox.entrance(box), *words], cwd=tmp_path / "below", capture_output=True, text=True, check=True
    )
    assert done.stdout == "as it waskept\nother\n"
    assert tree(tmp_path / "below").keys() == {"file", "kept", "kept/file"}


def with_layer(tmp_path: Path, cover: Path) -> sandbox.Sandbox:
    """A layer that edits `project/net.py`, adds a file in a new folder, and removes one."""
    project, layer = tmp_path / "project", tmp_path / "layer"
    files = layer / sandbox.FILES / project.relative_to("/")
    for folder in (project, files / "new", tmp_path / "scratch"):
        folder.mkdir(parents=True)
    (project / "net.py").write_text("width = 1\n")
    (project / "old.py").write_text("")
    (files / "net.py").write_text("width = 2\n")
    (files / "new" / "part.py").write_text("depth = 3\n")
    (layer / sandbox.REMOVED).write_text(str(project / "old.py"))
    return sandbox.Sandbox(scratch=str(tmp_path / "scratch"), cover=(str(cover),), keep=(), layer=str(layer))


def test_a_layer_is_laid_over_files_in_the_trials_own_view(tmp_path: Path) -> None:
    overlay_for("overlay", tmp_path)
    project = tmp_path / "project"
    box = with_layer(tmp_path, project)
    # What Python compiled of the file before looks as if it were of the edited one: same size, same second.
    compiles = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", "import net"], cwd=project, env=compiles, check=True)
    before = tree(project)
    script = "import net, new.part, os; print(net.width, new.part.depth, sorted(os.listdir()))"
    done = subprocess.run(
        [*sandbox.entrance(box), sys.executable, "-c", script], cwd=project, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 3 ['__pycache__', 'net.py', 'new']\n"
    assert tree(project) == before


def test_a_layer_is_never_really_written(tmp_path: Path) -> None:
    """GIVEN files that no overlay covers WHEN a layer is about them THEN the command is refused."""
    overlay_for("overlay", tmp_path)
    covered = tmp_path / "covered"
    covered.mkdir()
    box = with_layer(tmp_path, covered)
    before = tree(tmp_path / "project")
    done = subprocess.run([*sandbox.entrance(box), "true"], cwd=covered, check=False)
    assert done.returncode == 1
    assert sandbox.refusal(box).startswith(f"no overlay covers {tmp_path / 'project'}")
    assert tree(tmp_path / "project") == before


def test_where_disks_are_mounted_is_read_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "36 35 98:0 / /mnt/données\\040brutes rw - ext4 /dev/sdb rw\n25 1 0:23 / /proc rw - proc proc rw\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: lines)
    monkeypatch.setattr("os.path.exists", lambda path: path == "/mnt/données brutes")
    assert list(sandbox._mounted()) == ["/mnt/données brutes"]
