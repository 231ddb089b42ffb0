"""OUTSIDE: runs the user's command with flatout in it, watches the hardware beside it, and ends its process tree.

The command gets our terminal, its own exit code comes back, and signals reach it. flatout's part travels in two
environment variables; nothing is written but the trace folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from flatout.errors import UsageError
from flatout.sense.hardware import Sampler
from flatout.sense.options import VARIABLE, Options
from flatout.sense.settings import hide_in_arguments
from flatout.trace import Note, RunInfo, TraceWriter

_SAMPLE_EVERY_S = 1.0
_PULSES_A_SAMPLE = 8
_END_WITHIN_S = 5.0
_CANNOT_START = 126
_NOT_FOUND = 127


def run(command: Sequence[str], *, folder: Path, max_steps: int | None = None, xray: bool = True) -> int:
    """Run `command`, recording into `folder`; its exit code (128 + n when signal n ended it)."""
    program = _program(command)
    if isinstance(program, int):
        return program
    options = Options(
        folder=folder.absolute(),
        name=_name(command),
        command=hide_in_arguments(tuple(command)),
        max_steps=max_steps,
        xray=xray,
    )
    off = os.environ.get("FLATOUT") == "off"
    environment = os.environ if off else {**os.environ, **_injection(options)}
    with _signals_passed_on() as pass_to:
        try:
            process = subprocess.Popen([program, *command[1:]], env=environment)
        except OSError as problem:
            print(f"flatout: cannot start {command[0]}: {problem.strerror}", file=sys.stderr)
            return _CANNOT_START
        pass_to.append(process.pid)
        if off:
            return _exit_code(process.wait())
        with _watching(process.pid, options):
            code = process.wait()
        _end_descendants(process.pid, options.folder)
    return _exit_code(code)


def default_folder(command: Sequence[str]) -> Path:
    """flatout-runs/<time>-<name>, not taken yet."""
    base = Path("flatout-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{_name(command)}"
    candidates = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def _program(command: Sequence[str]) -> str | int:
    """The program to start, or the exit code a shell would give where there is none."""
    if not command:
        raise UsageError("no command given: flatout run -- python train.py …")
    found = shutil.which(command[0])
    if found:
        return found
    if Path(command[0]).exists():
        print(f"flatout: {command[0]} cannot be executed", file=sys.stderr)
        return _CANNOT_START
    print(f"flatout: {command[0]}: command not found", file=sys.stderr)
    return _NOT_FOUND


def _name(command: Sequence[str]) -> str:
    """What to call a run: the script, or else the program."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    modules = [after for word, after in zip(command, command[1:], strict=False) if word == "-m"]
    return Path((scripts or modules or list(command))[-1 if modules and not scripts else 0]).stem or "run"


def _injection(options: Options) -> dict[str, str]:
    """The environment that brings flatout into every Python the command starts."""
    ours = str(Path(__file__).parent / "inject" / "path")
    before = os.environ.get("PYTHONPATH")
    return {
        VARIABLE: options.to_environment(),
        "PYTHONPATH": os.pathsep.join([ours, before]) if before else ours,
    }


@contextmanager
def _signals_passed_on() -> Iterator[list[int]]:
    """While the command runs, Ctrl-C is its affair (the terminal tells it too) and SIGTERM and SIGHUP go on to it."""
    children: list[int] = []

    def pass_on(number: int, _: object) -> None:
        for pid in children:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    in_main = threading.current_thread() is threading.main_thread()
    wanted = {signal.SIGINT: lambda *_: None, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on} if in_main else {}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _watching(pid: int, options: Options) -> Iterator[None]:
    """Sample the hardware beside the command, until it ends. Fails with a note, never with the run."""
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(pid, options, stop), name="flatout-hardware", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(pid: int, options: Options, stop: threading.Event) -> None:
    info = RunInfo(
        name=options.name,
        command=options.command,
        host=socket.gethostname(),
        pid=pid,
        started_unix_s=time.time(),
        started_s=time.monotonic(),
    )
    try:
        with Sampler(pids=[pid]) as sampler, TraceWriter(options.folder, info) as writer:
            sampler.read()
            while not stop.wait(_SAMPLE_EVERY_S / _PULSES_A_SAMPLE):
                sampler.pulse()
                if sampler.due(_SAMPLE_EVERY_S):
                    writer.write(sampler.read())
            writer.write(sampler.read())
            for text in sampler.notes:
                writer.write(Note(time_s=time.monotonic(), text=text))
    except Exception as problem:
        print(f"flatout: the hardware is not watched ({problem})", file=sys.stderr)


def _end_descendants(pid: int, folder: Path) -> None:
    """End what the command left running: processes that still carry our variable for this folder."""
    ours = [p for p in psutil.process_iter() if p.pid != os.getpid() and _belongs(p, folder)]
    for process in ours:
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(ours, timeout=_END_WITHIN_S)
    for process in alive:
        _quietly(process.kill)


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in process.environ().get(VARIABLE, "") and process.ppid() in (1, os.getpid())
    except (psutil.Error, OSError):
        return False


def _quietly(action: object) -> None:
    try:
        action()  # type: ignore[operator]
    except psutil.Error:
        pass


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code
