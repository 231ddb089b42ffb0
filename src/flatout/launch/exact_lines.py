"""Exact lines, for `flatout run --lines exact`: a `py-spy record` beside each rank, and what it has
seen, in the trace.

py-spy runs outside the training and reads its memory. It writes to a file without a name, since its
output holds the command lines of all processes; `lines-NNNNN.jsonl` keeps the stacks of main threads.
What goes wrong is a sentence for the report and never touches the training.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile

from flatout.files import write_whole
from flatout.model.errors import UsageError
from flatout.model.formatting import exit_in_words, printable
from flatout.model.records import WORKER_BEGINS, ExactLines, Frame, Record, RunInfo, StackCount, encode, function_name
from flatout.redact import redact_text
from flatout.sample.process import descendants
from flatout.trace.reader import from_json

# Idle threads too: a line that waits takes time. Without --nonblocking it would stop the training at
# each look.
_LOOKS = ("--idle", "--threads", "--subprocesses", "--nonblocking", "--rate", "50")
_OUTPUT = ("--format", "raw", "--full-filenames", "--output")
_END_WITHIN_S = 5.0
_MOST_STACKS, _DEEPEST = 2_000, 128  # of a record, of a stack
_LONGEST_LINE, _MOST_SAID = 1 << 16, 300  # of py-spy's output, of its errors
_LARGEST_SOURCE = 10_000_000
# A line of its output: PROCESS;thread (4711): MainThread;FRAME;FRAME 12. Commands of processes may
# hold semicolons.
_STACK = re.compile(r"(?:.*;)?thread \((\d{1,9})\)(?:: ([^;]*))?;(.*) (\d{1,9})")
_FRAME = re.compile(r"(.+) \((.+):(\d{1,9})\)")
_LIBRARIES = re.compile(r".*/(?:site|dist)-packages/|.*/lib(?:64)?/python3\.\d+/")
_OURS = str(Path(__file__).parents[2]) + os.sep

Line = tuple[str, str, int]  # function, file, number
Counts = Counter[tuple[Line, ...]]  # of stacks, outermost line first


def find_py_spy() -> str:
    """The program, on PATH or beside flatout's Python."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        raise UsageError("--lines exact needs the program py-spy, which is not here: pip install 'flatout[exact]'")
    return program


class PySpies:
    """The py-spys of the command whose first process is `root`."""

    def __init__(self, program: str, root: int) -> None:
        self._program, self._root = program, root
        self._known: set[Path] = set()
        self._spies: list[_PySpy] = []
        self._why_none: dict[int | None, str] = {}  # by rank

    def look(self, folders: Iterable[Path]) -> None:
        """Start one for each rank that has begun to record into one of these folders."""
        for file in (file for folder in folders for file in folder.glob("rank-*.jsonl")):
            if file in self._known or (info := _rank_in(file)) is None:
                continue
            self._known.add(file)
            # In a container of the command's own, the number would be that of another process.
            if info.host == socket.gethostname() and info.pid in {self._root, *descendants(self._root)}:
                try:
                    self._spies.append(_PySpy(self._program, info, file))
                except OSError as problem:
                    self._why_none[info.rank] = f"py-spy did not start: {problem.strerror}"

    def conclude(self) -> list[str]:
        """End them and keep what they have seen; for each rank of which that is nothing, why."""
        for spy in self._spies:
            spy.process.send_signal(signal.SIGINT)  # it writes what it has seen, and ends
        end_s = time.monotonic() + _END_WITHIN_S
        why = self._why_none | {spy.info.rank: spy.conclude(end_s) for spy in self._spies}
        return [f"the lines of rank {rank} are sampled, not exact: {text}" for rank, text in why.items() if text]

    def close(self) -> None:
        """Leave none of them behind."""
        for spy in self._spies:
            spy.close()


def _rank_in(file: Path) -> RunInfo | None:
    """The rank that records into this file, once its first line is there."""
    with suppress(OSError, ValueError), file.open("rb") as opened:
        return from_json(RunInfo, json.loads(opened.readline(_LONGEST_LINE)))
    return None


def _unblock_signals() -> None:
    """In py-spy: the thread that starts it blocks the signal that ends it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class _PySpy:
    def __init__(self, program: str, info: RunInfo, file: Path) -> None:
        self.info = info
        self._lines_file = file.with_name(file.name.replace("rank", "lines", 1))
        self._folder = f"{Path(f'/proc/{info.pid}/cwd').readlink()}{os.sep}"
        with ExitStack() as files:
            self._seen, self._said = (files.enter_context(TemporaryFile()) for _ in range(2))
            output = f"/proc/{os.getpid()}/fd/{self._seen.fileno()}"
            self.process = subprocess.Popen(
                [program, "record", "--pid", str(info.pid), *_LOOKS, *_OUTPUT, output],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,  # a Ctrl-C, which a training may survive, does not reach it
                preexec_fn=_unblock_signals,
            )
            self._files = files.pop_all()

    def conclude(self, end_s: float) -> str:
        """Wait until then for its end, and keep what it has seen; in words, why that is nothing."""
        try:
            self.process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()
        try:
            return self._keep()
        except OSError as problem:
            return f"they cannot be written: {problem.strerror}"

    def close(self) -> None:
        """Leave nothing open."""
        self._kill()
        self._files.close()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _keep(self) -> str:
        self._seen.seek(0)
        lines = iter(lambda: self._seen.readline(_LONGEST_LINE), b"")
        training, workers = main_threads((line.decode("utf-8", "replace") for line in lines), self.info.pid)
        if not training and not workers:
            code, why = self.process.returncode, "py-spy has seen nothing"
            if code:
                why = f"py-spy ended with {exit_in_words(128 - code if code < 0 else code)}"
            return " ".join(filter(None, (why, self._complaint())))
        by_role = self._record(training, in_workers=False), self._record(workers, in_workers=True)
        records: tuple[Record, ...] = (self.info, *by_role)
        write_whole(self._lines_file, "".join(f"{json.dumps(encode(record))}\n" for record in records))
        return ""

    def _complaint(self) -> str:
        """What it has printed about a failure, in brackets."""
        self._said.seek(0)
        said = self._said.read(_LONGEST_LINE).decode("utf-8", "replace").splitlines()
        lines = [line.strip() for line in said if line.strip() and not line.startswith("py-spy>")]
        return f"({printable(redact_text(' '.join(lines)))[:_MOST_SAID]})" if lines else ""

    def _record(self, counts: Counts, *, in_workers: bool) -> ExactLines:
        numbers: dict[Line, int] = {}
        stacks = []
        for lines, looks in counts.most_common(_MOST_STACKS):
            frames = tuple(numbers.setdefault(line, len(numbers)) for line in lines)
            stacks.append(StackCount(frames=frames, looks=looks))
        return ExactLines(
            time_s=time.monotonic(),
            in_workers=in_workers,
            frames=tuple(map(self._frame, numbers)),
            stacks=tuple(stacks),
        )

    def _frame(self, line: Line) -> Frame:
        """A line as the sampled stacks name it, with its source where it is not a library's."""
        function, file, number = line
        shown = _LIBRARIES.sub("", file).removeprefix(_OURS)
        own = shown == file and not file.startswith("<")
        source = redact_text(self._source(file, number)) if own else None
        where = f"{redact_text(shown.removeprefix(self._folder))}:{number}"
        return Frame(where=where, function=function_name(function), own=own, source=source or None)

    def _source(self, file: str, number: int) -> str:
        """One line of a file that has not changed since the training began."""
        with suppress(OSError):
            status = Path(file).stat()
            if Path(file).is_file() and status.st_size < _LARGEST_SOURCE and status.st_mtime < self.info.started_unix_s:
                return linecache.getline(file, number).strip()[:160]
        return ""


def main_threads(lines: Iterable[str], rank_pid: int) -> tuple[Counts, Counts]:
    """The stacks of a rank's main thread, and those of its loader workers together; damaged lines are
    left out."""
    training, workers = Counts(), Counts()
    for line in lines:
        if (found := _STACK.fullmatch(line.rstrip())) is None:
            continue
        thread, name, pieces, looks = found.groups()
        frames = map(_FRAME.fullmatch, pieces.split(";")[-_DEEPEST:])
        stack = tuple((frame[1], frame[2], int(frame[3])) for frame in frames if frame)
        begins = [depth for depth, (_, file, _) in enumerate(stack, 1) if file.endswith(WORKER_BEGINS)]
        if begins and name == "MainThread":
            workers[stack[begins[-1] :]] += int(looks)
        elif int(thread) == rank_pid:
            training[stack] += int(looks)
    return training, workers
