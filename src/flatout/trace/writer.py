"""Writes a trace while the run goes on, on a thread of its own.

`write` never blocks and never raises: records wait in a bounded queue, and what does not fit is dropped and
counted. A disk that fills up, or a mistake of ours, ends the recording, not the run. After a fork the child's
copy is inert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flatout.files import make_recording_folder, open_clear, write_whole
from flatout.model.errors import UsageError
from flatout.model.records import End, Note, Record, RunInfo, Step, Summary, Window, encode, kind_of
from flatout.model.stats import Sketch
from flatout.redact import redact_command, redact_text
from flatout.trace.downsample import LightSteps, SampleDownsampler, StepDownsampler, name_within

if TYPE_CHECKING:
    from flatout.model.hardware_samples import Sample

MAX_BYTES = 64_000_000
MAX_PENDING = 20_000
SUMMARY_BUCKETS = 16  # of each of at most a hundred phases: a summary stays below 100 kB
WRITE_EVERY_S = 0.5
SUMMARY_EVERY_WRITES = 60
_as_json = json.JSONEncoder(separators=(",", ":")).encode
CLOSE_WITHIN_S = 30.0  # a network disk that hangs must not hang the end of a training


class TraceWriter:
    """One file of a trace and its summary. Use as a context manager, or call `close`."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        stem = _stem(info)
        self.path = folder / f"{stem}.jsonl"
        self.error: str | None = None
        self.busy_s = 0.0  # of a core, on its own thread
        self._summary_path = folder / f"{stem}.summary.json"
        self._file = _create(self.path)
        self._lines: list[bytes] = []
        self._pending: deque[Record | LightSteps] = deque()
        self._refused = 0  # counted where `write` is called
        self._unwritten = 0  # counted on the writer's thread
        self._bytes = 0
        self._steps = StepDownsampler()
        self._samples = SampleDownsampler()
        info = dataclasses.replace(info, command=redact_command(info.command))
        self._totals = Summary(info=info)
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._closing = False
        self._put(info)
        self._flush()  # a run that crashes at once still leaves a file that describes it
        self._thread = threading.Thread(target=self._work, name="flatout-trace", daemon=True)
        self._thread.start()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dropped(self) -> int:
        """How many records were not written because there was no room."""
        return self._refused + self._unwritten

    def write(self, record: Record | LightSteps) -> None:
        """Queue one record. Returns at once and never raises."""
        if os.getpid() != self._pid:
            return
        if len(self._pending) >= MAX_PENDING or self._closing:
            self._refused += 1
        else:
            self._pending.append(record)

    def close(self) -> None:
        """Write what is pending and the final summary; safe to call twice, inert in a forked child."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():
            self._give_up(f"the disk did not answer for {CLOSE_WITHIN_S:g} s")

    def _work(self) -> None:
        with self._file:
            try:
                self._drain_until_closed()
            except Exception as problem:  # the training goes on without a recording
                self._give_up(f"{type(problem).__name__}: {problem}")

    def _drain_until_closed(self) -> None:
        for turn in range(1, 1 << 62):
            closing = self._wake.wait(WRITE_EVERY_S)
            self._drain()
            self.busy_s = time.thread_time()
            if closing:
                break
            if turn % SUMMARY_EVERY_WRITES == 0:
                self._write_summary(ended=False)
        for last in (*self._steps.flush(), *self._samples.flush()):
            self._put(last)
        self._flush()
        self._write_summary(ended=True)

    def _drain(self) -> None:
        while self._pending:
            record = self._pending.popleft()
            if isinstance(record, Note):
                record = dataclasses.replace(record, text=redact_text(record.text))
            if isinstance(record, Step | LightSteps):
                for one in self._steps.push(record):
                    self._steps.wrote(one, self._put(one))
            elif kind_of(type(record)) == "sample":
                for sample in self._samples.push(cast("Sample", record)):
                    self._samples.wrote(self._put(sample))
            else:
                self._put(record)
        self._flush()

    def _put(self, record: Record) -> int:
        """Queue the line of one record; its length in bytes, or 0 if there is no room."""
        if isinstance(record, Window):
            _count(self._totals, record)
        line = _line(record)
        if self.error or self._bytes + len(line) > MAX_BYTES:
            self._unwritten += 1
            return 0
        self._bytes += len(line)
        self._lines.append(line)
        return len(line)

    def _flush(self) -> None:
        """Write the queued lines, without a buffer: a forked child would write its copy of one again."""
        rest = memoryview(b"".join(self._lines))
        waiting, self._lines = len(self._lines), []
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as problem:
            self._unwritten += waiting
            self._give_up(problem.strerror or str(problem))

    def _write_summary(self, *, ended: bool) -> None:
        totals = self._totals
        summary = dataclasses.replace(
            totals,
            wall_ms=totals.wall_ms.coarse(),
            spans_ms={name: sketch.coarse(SUMMARY_BUCKETS) for name, sketch in totals.spans_ms.items()},
            dropped=self.dropped,
            ended=ended,
        )
        try:
            write_whole(self._summary_path, _line(summary))
        except OSError as problem:
            self._give_up(problem.strerror or str(problem))

    def _give_up(self, reason: str) -> None:
        if self.error is None:
            self.error = f"the recording in {self.path.parent} stopped: {reason}"


def _count(totals: Summary, window: Window) -> None:
    """Add a window to the totals of its file."""
    totals.wall_ms.merge(window.wall_ms)
    if window.samples is not None:
        totals.samples = (totals.samples or 0) + window.samples
    for name, sketch in window.spans_ms.items():
        key = name_within(totals.spans_ms, name)
        totals.spans_ms.setdefault(key, Sketch()).merge(sketch)


def note_end(folder: Path, info: RunInfo, end: End) -> None:
    """Append how a command ended to the recording of its machine, after that was closed, or to a new one."""
    path = folder / f"{_stem(info)}.jsonl"
    lines = _line(end)
    if not path.exists():
        lines = _line(info) + lines
    with path.open("ab") as file:
        file.write(lines)


def _line(record: Record) -> bytes:
    return (_as_json(encode(record)) + "\n").encode("ascii")


def _stem(info: RunInfo) -> str:
    if info.rank is None:
        return f"hardware-{info.host}"
    return f"rank-{info.rank:05d}"


def _create(path: Path) -> io.FileIO:
    try:
        make_recording_folder(path.parent)
        file = io.FileIO(path, "x", opener=open_clear)
    except FileExistsError:
        if path.parent.is_dir():
            raise UsageError(f"{path.parent} already holds a recording: name a new folder") from None
        raise UsageError(f"cannot record into {path.parent}: it is a file") from None
    except OSError as problem:
        raise UsageError(f"cannot record into {path.parent}: {problem.strerror}") from None
    with contextlib.suppress(ImportError, OSError):  # Windows; a file system without locks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as it is open: see `is_being_written`
    return file


def is_being_written(folder: Path) -> bool:
    """Whether a process still has a file of the recording in a folder open."""
    try:
        import fcntl
    except ImportError:  # Windows, where no training is recorded
        return False
    for path in filter(Path.is_file, folder.rglob("*.jsonl")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
