"""Writing never blocks, never raises, and never grows without bound."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.model.errors import UsageError
from flatout.trace import Note, RunInfo, Sample, Span, Step, TraceWriter, read, read_summaries
from flatout.trace import writer as writer_module

INFO = RunInfo(name="demo", command=("python", "train.py"), host="box", rank=0, pid=1, started_s=5.0)


def a_step(index: int, wall_ms: float = 10.0) -> Step:
    return Step(index=index, start_s=float(index), wall_ms=wall_ms, samples=4)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", INFO) as writer:
        for index in range(120):
            writer.write(a_step(index))
        writer.write(Note(time_s=1.0, text="hello"))

    trace = read(tmp_path / "run")

    [rank] = trace.ranks
    assert rank.info == INFO
    assert [step.index for step in rank.steps] == list(range(120))
    assert sum(window.wall_ms.count for window in rank.windows) == 120
    assert rank.notes == (Note(time_s=1.0, text="hello"),)


def test_the_summary_holds_the_totals(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, INFO) as writer:
        for index in range(75):
            writer.write(a_step(index))
    [summary] = read_summaries(tmp_path)
    assert (summary.wall_ms.count, summary.samples, summary.dropped, summary.ended) == (75, 300, 0, True)


def test_no_secret_is_written(tmp_path: Path) -> None:
    info = dataclasses.replace(INFO, command=("python", "train.py", "--hf-token", "LEAK"))
    with TraceWriter(tmp_path, info) as writer:
        writer.write(a_step(0))
        writer.write(Note(time_s=1.0, text="not measured (ValueError: password=LEAK)"))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(written) == 2
    assert not any("LEAK" in text for text in written.values())
    assert read(tmp_path).ranks[0].info.command == ("python", "train.py", "--hf-token", "***")
    assert read(tmp_path).ranks[0].notes[0].text == "not measured (ValueError: password=***)"


def test_hardware_samples_go_to_a_file_of_the_machine(tmp_path: Path, make_sample: Callable[..., Sample]) -> None:
    samples = tuple(make_sample(float(second), sm=50.0) for second in range(3))
    with TraceWriter(tmp_path, RunInfo(name="top", host="box")) as writer:
        for sample in samples:
            writer.write(sample)
    assert read(tmp_path).samples == {"box": samples}


class StuckFile:
    """A disk that does not answer until it is told to."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self.answers = threading.Event()
        self.asked = threading.Event()
        self.answers.set()

    def write(self, data: memoryview) -> int:
        self.asked.set()
        self.answers.wait()
        return self._file.write(data)

    def __enter__(self) -> StuckFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_a_disk_that_hangs_costs_records_not_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a disk that hangs, WHEN more is written than fits, THEN `write` returns and the rest is counted."""
    file = StuckFile(tmp_path / "rank-00000.jsonl")
    monkeypatch.setattr(writer_module, "_create", lambda _path: file)
    monkeypatch.setattr(writer_module, "WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(writer_module, "MAX_PENDING", 10)
    with TraceWriter(tmp_path, INFO) as writer:
        file.answers.clear()
        file.asked.clear()
        writer.write(a_step(0))
        file.asked.wait()  # the thread holds step 0, and hangs
        for index in range(1, 101):
            writer.write(a_step(index))
        assert writer.dropped == 90
        file.answers.set()
    assert len(read(tmp_path).ranks[0].steps) == 11
    assert read_summaries(tmp_path)[0].dropped == 90


def test_closing_gives_up_on_a_disk_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StuckFile(tmp_path / "rank-00000.jsonl")
    monkeypatch.setattr(writer_module, "_create", lambda _path: file)
    monkeypatch.setattr(writer_module, "CLOSE_WITHIN_S", 0.01)
    writer = TraceWriter(tmp_path, INFO)
    file.answers.clear()
    writer.write(a_step(0))
    writer.close()
    file.answers.set()
    assert "did not answer" in (writer.error or "")


def test_a_full_disk_ends_the_recording_not_the_run(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write in the same way."""
    script = """
import resource, sys
from pathlib import Path
from flatout.trace import RunInfo, Step, TraceWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with TraceWriter(Path(sys.argv[1]), RunInfo(name="demo", rank=0)) as writer:
    for index in range(2_000):
        writer.write(Step(index=index, start_s=float(index), wall_ms=10.0))
print(writer.error)
print(writer.dropped > 0)
"""
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"the recording in {tmp_path} stopped: File too large\nTrue\n"
    steps = read(tmp_path).ranks[0].steps
    assert 100 < len(steps) < 2_000
    assert [step.index for step in steps] == list(range(len(steps)))


def test_a_mistake_of_ours_ends_the_recording_not_the_run(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, INFO) as writer:
        writer.write("not a record")  # type: ignore[arg-type]
    assert "stopped" in (writer.error or "")


def test_a_forked_child_leaves_the_parents_file_alone(tmp_path: Path) -> None:
    """The fork comes at the worst moment: while the thread, which the child will not have, holds its lock."""
    script = """
import os, signal, sys
from pathlib import Path
from flatout.trace import RunInfo, Step, TraceWriter, writer
signal.alarm(30)
writer.WRITE_EVERY_S = 3600.0
writer.MAX_PENDING = 2
trace = TraceWriter(Path(sys.argv[1]), RunInfo(name="demo", rank=0))
trace.write(Step(index=0, start_s=0.0, wall_ms=10.0))
with trace._wake._cond:
    child = os.fork()
    if not child:
        for _ in range(9):
            trace.write(Step(index=99, start_s=1.0, wall_ms=10.0))
        trace.close()
        sys.exit(trace.dropped)
assert os.waitpid(child, 0)[1] == 0
trace.write(Step(index=1, start_s=1.0, wall_ms=10.0))
trace.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True)
    assert [step.index for step in read(tmp_path).ranks[0].steps] == [0, 1]


def test_a_file_never_passes_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_BYTES", 5_000)
    with TraceWriter(tmp_path, INFO) as writer:
        for index in range(500):
            writer.write(a_step(index))
    assert writer.path.stat().st_size <= 5_000
    assert writer.dropped > 300
    assert read_summaries(tmp_path)[0].wall_ms.count == 500


def test_a_summary_stays_below_100_kb(tmp_path: Path) -> None:
    """GIVEN a run with as many phases as there may be, THEN the summary gives up detail, not the totals."""
    spans = tuple(
        Span(name="sync", start_ms=0.0, host_ms=1.0, where=f"{'deep/' * 30}train.py:{line}", gpu_idle_ms=1.0)
        for line in range(90)
    )
    with TraceWriter(tmp_path, INFO) as writer:
        for index in range(300):
            spread = tuple(
                Span(name=s.name, start_ms=0.0, host_ms=1.05 ** ((index * 7 + i) % 200), where=s.where, gpu_idle_ms=1.0)
                for i, s in enumerate(spans)
            )
            writer.write(Step(index=index, start_s=float(index), wall_ms=1.05 ** (index % 200), spans=spread))
    path = tmp_path / "rank-00000.summary.json"
    assert path.stat().st_size < 100_000
    [summary] = read_summaries(tmp_path)
    assert (summary.wall_ms.count, len(summary.spans_ms), summary.spans_ms[f"sync@{spans[0].where}"].count) == (
        300,
        90,
        300,
    )


def test_closing_twice_and_writing_after_are_harmless(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, INFO)
    writer.close()
    writer.close()
    writer.write(a_step(0))
    assert writer.dropped == 1


def test_the_file_says_whose_it_is_at_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, INFO) as writer:
        assert json.loads(writer.path.read_text())["name"] == "demo"


def test_a_folder_that_cannot_take_a_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="it is a file"):
        TraceWriter(tmp_path / "file", INFO)
    with pytest.raises(UsageError, match="Not a directory"):
        TraceWriter(tmp_path / "file" / "below", INFO)
    TraceWriter(tmp_path / "run", INFO).close()
    with pytest.raises(UsageError, match="already holds a recording"):
        TraceWriter(tmp_path / "run", INFO)
    with pytest.raises(UsageError, match="cannot record into /proc/nowhere: No such file or directory"):
        TraceWriter(Path("/proc/nowhere"), INFO)
