"""Writes a trace while the run goes on, on a thread of its own.

`write` never blocks and never raises: records wait in a bounded queue, and what does not fit is dropped and counted.
A disk that fills up ends the recording, not the run. After a fork the child's copy is inert.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from pathlib import Path
from typing import IO

from flatout.errors import UsageError
from flatout.trace.records import Note, Record, RunInfo, Sample, Step, Summary, Window, encode, to_json
from flatout.trace.sketch import Sketch
from flatout.trace.thin import NAMES_A_WINDOW, SampleThinner, StepThinner

MAX_BYTES = 64_000_000
MAX_PENDING = 20_000
WRITE_EVERY_S = 0.5
SUMMARY_EVERY_WRITES = 60
NOTES_KEPT = 100


class TraceWriter:
    """One file of a trace and its summary. Use as a context manager, or call `close`."""

    def __init__(self, folder: Path, info: RunInfo, *, max_pending: int = MAX_PENDING) -> None:
        stem = f"hardware-{info.host}" if info.rank is None else f"rank-{info.rank:05d}"
        self.path = folder / f"{stem}.jsonl"
        self.error: str | None = None
        self._summary_path = folder / f"{stem}.summary.json"
        self._file = _create(self.path)
        self._pending: deque[Record] = deque()
        self._max_pending = max_pending
        self._dropped = 0
        self._bytes = 0
        self._steps = StepThinner()
        self._samples = SampleThinner()
        self._totals = _Totals(info)
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._closing = False
        self._put(info)
        self._thread = threading.Thread(target=self._work, name="flatout-trace", daemon=True)
        self._thread.start()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dropped(self) -> int:
        """How many records were not written, for want of room."""
        return self._dropped

    def write(self, record: Step | Sample | Note) -> None:
        """Hand over one record. Returns at once, whatever happens."""
        if len(self._pending) >= self._max_pending or self._closing:
            self._dropped += 1
        else:
            self._pending.append(record)

    def close(self) -> None:
        """Write what is pending and the final summary; safe to call twice, inert in a forked child."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        for turn in range(1, 1 << 62):
            closing = self._wake.wait(WRITE_EVERY_S)
            self._drain()
            if closing:
                break
            if turn % SUMMARY_EVERY_WRITES == 0:
                self._write_summary(ended=False)
        for last in (*self._steps.flush(), *self._samples.flush()):
            self._put(last)
        self._write_summary(ended=True)
        try:
            self._file.close()
        except OSError as problem:
            self._give_up(problem)

    def _drain(self) -> None:
        while self._pending:
            record = self._pending.popleft()
            self._totals.count(record)
            if isinstance(record, Step):
                for thinned in self._steps.push(record):
                    self._put(thinned)
            elif isinstance(record, Sample):
                for sample in self._samples.push(record):
                    self._samples.wrote(self._put(sample))
            else:
                self._put(record)
        try:
            self._file.flush()
        except OSError as problem:
            self._give_up(problem)

    def _put(self, record: Record) -> int:
        if isinstance(record, Window):
            self._totals.count(record)
        line = json.dumps(encode(record), separators=(",", ":")) + "\n"
        if self.error or self._bytes + len(line) > MAX_BYTES:
            self._dropped += 1
            return 0
        try:
            self._bytes += self._file.write(line)
        except OSError as problem:
            self._give_up(problem)
        return len(line)

    def _write_summary(self, *, ended: bool) -> None:
        summary = json.dumps(to_json(self._totals.summary(dropped=self._dropped, ended=ended)), separators=(",", ":"))
        scratch = self._summary_path.with_suffix(".tmp")
        try:
            scratch.write_text(summary, encoding="utf-8")
            scratch.replace(self._summary_path)
        except OSError as problem:
            self._give_up(problem)

    def _give_up(self, problem: OSError) -> None:
        if self.error is None:
            self.error = f"the recording in {self.path.parent} stopped: {problem.strerror}"


class _Totals:
    """The running totals behind a Summary."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._steps = 0
        self._hardware_samples = 0
        self._wall_ms = Sketch()
        self._spans_ms: dict[str, Sketch] = {}
        self._idle_ms: dict[str, float] = {}
        self._samples: int | None = None
        self._notes: list[Note] = []

    def count(self, record: Record) -> None:
        if isinstance(record, Step):
            self._steps += 1
        elif isinstance(record, Sample):
            self._hardware_samples += 1
        elif isinstance(record, Note) and len(self._notes) < NOTES_KEPT:
            self._notes.append(record)
        elif isinstance(record, Window):
            self._add(record)

    def _add(self, window: Window) -> None:
        self._wall_ms.merge(window.wall_ms)
        if window.samples is not None:
            self._samples = (self._samples or 0) + window.samples
        for key, sketch in window.spans_ms.items():
            if key not in self._spans_ms and len(self._spans_ms) >= NAMES_A_WINDOW:
                key = key.partition("@")[0]
            self._spans_ms.setdefault(key, Sketch()).merge(sketch)
        for key, idle_ms in window.gpu_idle_ms.items():
            key = key if key in self._spans_ms else key.partition("@")[0]
            self._idle_ms[key] = self._idle_ms.get(key, 0.0) + idle_ms

    def summary(self, *, dropped: int, ended: bool) -> Summary:
        return Summary(
            info=self._info,
            steps=self._steps,
            wall_ms=self._wall_ms.coarse(),
            spans_ms={key: sketch.coarse(64) for key, sketch in self._spans_ms.items()},
            gpu_idle_ms=self._idle_ms,
            samples=self._samples,
            hardware_samples=self._hardware_samples,
            dropped=dropped,
            notes=tuple(self._notes),
            ended=ended,
        )


def _create(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("x", encoding="utf-8")
    except FileExistsError:
        if path.parent.is_dir():
            raise UsageError(f"{path.parent} already holds a recording: name a new folder") from None
        raise UsageError(f"cannot record into {path.parent}: it is a file") from None
    except OSError as problem:
        raise UsageError(f"cannot record into {path.parent}: {problem.strerror}") from None
