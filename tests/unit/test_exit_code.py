"""The exit code of the command comes back, whatever has gone meanwhile: readers, the terminal, a core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.trace import RunInfo, Step, TraceWriter

WORDS = (sys.executable, "-m", "flatout", "run", "--trace", "trace", "--")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that leaves a recording to sum up, for want of a training, and fails with 5."""
    monkeypatch.chdir(tmp_path)
    with TraceWriter(tmp_path / "made", RunInfo(name="demo", rank=0)) as writer:
        for index in range(100):
            writer.write(Step(index=index, start_s=float(index), wall_ms=10.0))
    return "cp made/rank-* trace; exit 5"


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_a_reader_that_has_left_does_not_cost_the_exit_code(closed: str, recorded: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    streams = {name: writing for name in ("stdout", "stderr") if closed in (name, "both")}
    where = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
    assert subprocess.run([*WORDS, "sh", "-c", recorded], check=False, **where).returncode == 5
    os.close(writing)


@pytest.mark.parametrize("without", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_nor_does_a_closed_stream_and_the_command_finds_it_closed(without: str, recorded: str) -> None:
    seen = "exec 3> open; for n in 0 1 2; do [ -e /proc/$$/fd/$n ] && echo $n >&3; done; "
    shell = f'exec "$@" {without}'
    assert subprocess.run(["sh", "-c", shell, "sh", *WORDS, "sh", "-c", seen + recorded], check=False).returncode == 5
    there = [str(n) for n, name in enumerate(("<&-", ">&-", "2>&-")) if name not in without.split()]
    assert Path("open").read_text().split() == there


def test_where_no_thread_can_be_started_the_command_is_waited_for_unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flatout_says: Callable[..., Any]
) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    over = tmp_path / "over"
    code, _, said = flatout_says(
        "run", "--trace", tmp_path / "trace", "--", "sh", "-c", f"sleep 0.2; touch {over}; exit 5"
    )
    assert code == 5
    assert over.exists()
    assert said.startswith("flatout: the hardware is not watched (can't start new thread)\n")
    assert "Traceback" not in said


def test_what_a_script_prints_after_it_has_closed_stdout_does_not_land_in_the_trace(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from flatout.feed import channel
from flatout.trace import Note, RunInfo, TraceWriter
os.close(1)
with TraceWriter(Path(sys.argv[1]), RunInfo(name="demo", rank=0)) as writer:
    ends, memory = channel.pair(), channel.memory_file(10)
    writer.write(Note(time_s=1.0, text="kept"))
    try:
        os.write(1, b"LOST")
    except OSError:
        sys.exit(7)
"""
    words = [sys.executable, "-c", script, str(tmp_path / "trace")]
    assert subprocess.run(words, check=False).returncode == 7
    text = (tmp_path / "trace" / "rank-00000.jsonl").read_text()
    assert "kept" in text
    assert "LOST" not in text
