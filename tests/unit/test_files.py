"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.files import PRIVATE, make_recording_folder, remove_if_empty, write_whole, write_whole_by


def _full(file: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_written_and_nothing_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "plan.yaml", "one")
    write_whole(tmp_path / "plan.yaml", "two")
    assert (tmp_path / "plan.yaml").read_text() == "two"
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.yaml"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "plan.yaml", "older")
    with pytest.raises(OSError, match="No space left"):
        write_whole_by(tmp_path / "plan.yaml", _full)
    assert (tmp_path / "plan.yaml").read_text() == "older"
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.yaml"]


def test_permissions_are_kept_unless_the_file_is_to_be_private(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "new")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    path.chmod(0o640)
    write_whole(path, "newer")
    assert path.stat().st_mode & 0o777 == 0o640
    write_whole(path, "newest", mode=PRIVATE)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_a_link_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").write_text("older")
    write_whole(tmp_path / "link", "newer")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "newer"
    write_whole(Path(os.devnull), "gone")
    assert Path(os.devnull).is_char_device()


def test_what_utf_8_cannot_hold_does_not_lose_the_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.html", "tr\udcffain.py")
    assert (tmp_path / "report.html").read_text() == "tr?ain.py"


def test_a_kill_in_mid_write_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "step-1.pt"
    write_whole(path, "older")
    program = (
        "import os, signal, sys; from pathlib import Path; from flatout.files import write_whole_by\n"
        "def write(file): file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_whole_by(Path(sys.argv[1]), write)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="only Linux has nameless files")
def test_a_disk_without_nameless_files_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    write_whole(tmp_path / "plan.yaml", "one")
    with pytest.raises(OSError, match="No space left"):
        write_whole_by(tmp_path / "plan.yaml", _full)
    assert (tmp_path / "plan.yaml").read_text() == "one"
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.yaml"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


REDIRECTED = """
import os, sys
from pathlib import Path
from flatout.files import write_whole
from flatout.inside import redirect
from flatout.launch.sandbox import Sandbox

here = Path(sys.argv[1])
redirect.install(Sandbox(cover=[str(here)], keep=[str(here / "kept")], scratch=str(here / "scratch")))
for folder in (here, here / "kept"):
    for text in ("one", "two"):
        write_whole(folder / "x.json", text)
    assert (folder / "x.json").read_text() == "two", folder
    assert [name for name in os.listdir(folder) if name.endswith((".json", ".part"))] == ["x.json"], folder
"""


def test_it_writes_where_a_trial_redirects_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", REDIRECTED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "x.json").exists()
    assert (tmp_path / "kept" / "x.json").read_text() == "two"


def test_git_looks_away_from_a_new_folder_of_recordings_and_what_is_empty_goes(tmp_path: Path) -> None:
    runs = tmp_path / "flatout-runs"
    make_recording_folder(runs / "one")
    assert (runs / ".gitignore").read_text() == "*\n"
    remove_if_empty(runs)
    assert (runs / "one").is_dir()
    (runs / "one").rmdir()
    remove_if_empty(runs)
    assert not runs.exists()
    make_recording_folder(tmp_path / "elsewhere" / "one")
    assert not (tmp_path / "elsewhere" / ".gitignore").exists()


def test_a_folder_of_recordings_that_is_there_keeps_what_git_was_told(tmp_path: Path) -> None:
    runs = tmp_path / "flatout-runs"
    runs.mkdir()
    make_recording_folder(runs / "one")
    assert not (runs / ".gitignore").exists()
    (runs / "one").rmdir()
    (runs / ".gitignore").write_text("*\n!kept\n")
    remove_if_empty(runs)
    assert (runs / ".gitignore").read_text() == "*\n!kept\n"
