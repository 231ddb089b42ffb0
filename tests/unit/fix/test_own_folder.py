"""The folder of a fix: gone with it, and if it was killed, with the next one's start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.fix.fix_command import own_folder
from flatout.fix.journal import copy_recording
from flatout.launch.protocol import VARIABLE

HOLD = """
from flatout.fix.fix_command import own_folder
with own_folder() as folder:
    (folder / "checkpoint.pt").write_bytes(bytes(1000))
    print(folder, flush=True)
    input()
"""


def test_what_a_killed_one_has_left_goes_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "flatout-fix-notes").mkdir()  # nobody has said that it is ours
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=pipe, stdout=pipe, text=True) as living:
        with subprocess.Popen([sys.executable, "-c", HOLD], stdin=pipe, stdout=pipe, text=True) as killed:
            in_use, left = (Path(process.stdout.readline().strip()) for process in (living, killed) if process.stdout)
            killed.kill()
        assert left.is_dir()
        with own_folder() as folder:
            assert sorted(tmp_path.iterdir()) == sorted({folder, in_use, tmp_path / "flatout-fix-notes"})
            assert (in_use / "checkpoint.pt").exists()
        living.communicate("\n")
    assert [path.name for path in tmp_path.iterdir()] == ["flatout-fix-notes"]


def test_the_run_of_a_killed_one_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().decode().strip())
        killed.kill()
    (left / "redirection" / "01").mkdir(parents=True)
    told = {VARIABLE: f'{{"folder": "{left / "redirection" / "01"}"}}'}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=os.environ | told) as trained_on, own_folder():
        assert trained_on.wait(30) == -signal.SIGTERM
    assert not left.exists()


def test_a_recording_is_copied_whole_or_not_at_all(tmp_path: Path, full_disk: Callable[[], Any]) -> None:
    recording, kept = tmp_path / "recording", tmp_path / "kept"
    recording.mkdir()
    (recording / "a.json").write_bytes(bytes(100))
    (recording / "b.jsonl").write_bytes(bytes(100_000))
    with full_disk():
        assert copy_recording(recording, kept / "before") == [
            f"the recording {kept / 'before'} is not kept: [Errno 27] File too large"
        ]
    assert not list(kept.iterdir())
    assert copy_recording(recording, kept / "before") == []
    assert {path.name for path in (kept / "before").iterdir()} == {"a.json", "b.jsonl"}
