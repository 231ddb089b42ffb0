"""Which files of the user's have changed meanwhile, and by whom they may have been."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from flatout.launch import snapshot
from flatout.launch.sandbox import Sandbox
from flatout.launch.snapshot import SharedMemory, Snapshot, UsersFiles
from flatout.model.errors import RealWriteError

# Opens a file for writing, says so, and holds it until it is told to end.
HOLD = "import sys; file = open(sys.argv[1], 'a'); print('open', flush=True); input()"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in ("log.txt", "kept.txt", "out/best.pt", "out/deep/er.pt", "data/1", "__pycache__/train.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def names(found: list[str], project: Path) -> list[str]:
    return [str(Path(path).relative_to(project)) for path in found]


def test_every_file_that_was_changed_made_or_removed_is_named(project: Path) -> None:
    before = Snapshot([str(project)])
    (project / "log.txt").write_text("other words")
    (project / "out" / "deep" / "er.pt").unlink()
    (project / "out" / "deep").rmdir()
    (project / "new" / "empty").mkdir(parents=True)
    (project / "new" / "file").touch()
    (project / "also-empty").mkdir()
    (project / "data" / "1").rename(project / "data" / "2")
    (project / "__pycache__" / "train.pyc").unlink()
    changed = ["also-empty", "data/1", "data/2", "log.txt", "new/file", "out/deep/er.pt"]
    assert names(before.changed(), project) == changed


@pytest.mark.parametrize("how", ["permissions", "same size and time", "a link"])
def test_less_than_new_content_is_seen_too(project: Path, how: str) -> None:
    before, file = Snapshot([str(project)]), project / "log.txt"
    there = file.stat()
    if how == "permissions":
        file.chmod(0o600)
    elif how == "a link":
        file.unlink()
        file.symlink_to("kept.txt")
    else:
        file.write_text("LOG.TXT")
        os.utime(file, ns=(there.st_atime_ns, there.st_mtime_ns))
    assert names(before.changed(), project) == ["log.txt"]


def test_what_is_left_out_is_left_out(project: Path) -> None:
    before = Snapshot([str(project)], but=[str(project / "out")])
    (project / "out" / "best.pt").write_text("better")
    (project / "flatout-runs").mkdir()
    (project / "flatout-runs" / "rank-0.jsonl").touch()
    assert before.changed() == []


def test_what_an_older_process_is_writing_is_its_own(project: Path) -> None:
    """GIVEN another training that has its log open THEN that, and what lies beside it, does not count."""
    pipe = subprocess.PIPE
    (project / "other").mkdir()
    command = [sys.executable, "-c", HOLD, str(project / "other" / "events.log")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        until_its_age_shows(other.pid)
        before = Snapshot([str(project)])
        (project / "other" / "events.log").write_text("a line")
        (project / "other" / "checkpoint.pt").touch()
        (project / "log.txt").write_text("by the trial")
        found = before.changed()
        other.communicate("\n")
    assert names(found, project) == ["log.txt"]


def until_its_age_shows(pid: int) -> None:
    """Until a process is older than the tick in which the kernel tells when it began."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    while time.clock_gettime(time.CLOCK_BOOTTIME) <= (ticks + 1) / os.sysconf("SC_CLK_TCK"):
        os.sched_yield()


def test_a_process_that_a_trial_has_left_running_is_no_excuse(project: Path) -> None:
    before, pipe = Snapshot([str(project)]), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, str(project / "new.txt")], stdin=pipe, stdout=pipe) as left:
        assert left.stdout is not None
        left.stdout.readline()
        found = before.changed()
        left.communicate(b"\n")
    assert names(found, project) == ["new.txt"]


def test_elsewhere_other_repositories_are_left_to_those_who_work_there(project: Path) -> None:
    (project / "out" / ".git").mkdir()
    near, beyond = Snapshot([str(project)]), Snapshot([str(project)], others_work=True)
    for name in ("log.txt", "out/best.pt"):
        (project / name).write_text("other words")
    assert names(near.changed(), project) == ["log.txt", "out/best.pt"]
    assert names(beyond.changed(), project) == ["log.txt"]


def test_a_folder_with_more_files_than_are_looked_at_is_data(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN more files than one can look at THEN those near the top are, and nothing is made up of the rest."""
    for number in range(20):
        (project / "data" / f"picture-{number}").touch()
    monkeypatch.setattr(snapshot, "MOST_FILES", 12)
    before = Snapshot([str(project)])
    (project / "data" / "picture-3").write_text("painted over")
    (project / "log.txt").write_text("other words")
    assert names(before.changed(), project) == ["log.txt"]


def test_of_shared_memory_only_files_that_were_there_count(tmp_path: Path) -> None:
    for name in ("mine.bin", "gone.bin", "torch_12_34"):
        (tmp_path / name).touch()
    before = SharedMemory(str(tmp_path))
    (tmp_path / "mine.bin").write_text("overwritten")
    (tmp_path / "gone.bin").unlink()
    (tmp_path / "torch_12_34").unlink()
    (tmp_path / "new").touch()
    assert names(before.changed(), tmp_path) == ["gone.bin", "mine.bin"]


@pytest.mark.parametrize("overlay", [True, False])
def test_what_another_program_removes_from_shared_memory_ends_no_fix(tmp_path: Path, overlay: bool) -> None:
    """GIVEN a file in /dev/shm WHEN it is gone after a trial THEN a note tells; one with other content ends the fix."""
    said: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        place = f"{folder}." if overlay else f"{folder}/"  # overlays cover folders there
        files = [Path(f"{place}{name}") for name in ("gone", "kept")]
        for file in files:
            file.touch()
        box = Sandbox(scratch=str(tmp_path), cover=[folder], keep=[], near=[])
        before = UsersFiles(box, overlay=overlay)
        try:
            files[0].unlink()
            before.compare(said.append)
            assert said == [f"Note: new or gone during a trial, by it or by another program (1): {files[0]}"]
            files[1].write_text("overwritten")
            with pytest.raises(RealWriteError) as told:
                before.compare(said.append)
        finally:
            files[1].unlink()
    assert told.value.files == (str(files[1]),)
    assert len(said) == 1


def test_a_new_file_ends_a_fix_in_the_persons_own_folders_alone(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN no overlay WHEN another program makes a file elsewhere THEN a note tells; a change there ends the fix."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    monkeypatch.setenv("HOME", str(home))
    for folder in (home, elsewhere):
        folder.mkdir()
        (folder / "there.txt").touch()
    box = Sandbox(scratch=str(tmp_path / "scratch"), cover=[str(elsewhere)], keep=[], near=[str(project)])

    def written(*files: Path) -> tuple[str, ...]:
        before = UsersFiles(box, overlay=False)
        for file in files:
            file.unlink() if file.name == "there.txt" else file.write_text("new")
        try:
            before.compare(said.append)
        except RealWriteError as problem:
            return problem.files
        return ()

    said: list[str] = []
    assert written(elsewhere / "new.txt") == ()
    assert said == [f"Note: new or gone during a trial, by it or by another program (1): {elsewhere}/new.txt"]
    real = [elsewhere / "there.txt", home / "new.txt", project / "new.txt"]
    assert written(*real) == tuple(map(str, real))


def test_a_working_folder_in_shared_memory_is_the_persons_own(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "there.txt").touch()
        before = UsersFiles(Sandbox(scratch=str(tmp_path), cover=[folder], keep=[], near=[folder]), overlay=False)
        Path(folder, "there.txt").unlink()
        Path(folder, "new.txt").touch()
        with pytest.raises(RealWriteError) as told:
            before.compare(print)
    assert told.value.files == (f"{folder}/new.txt", f"{folder}/there.txt")
