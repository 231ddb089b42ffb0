"""OUTSIDE: runs the user's command with flatout in it, watches the hardware beside it, and ends its process
tree.

The command gets our terminal, its own exit code comes back, and signals reach it. What flatout does inside
travels in environment variables; nothing is written but the trace folder.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.launch import sandbox
from flatout.launch.first_step import ASK_AFTER_S, FirstStep
from flatout.launch.launch_ranks import end_with_parent
from flatout.launch.lost import INJECTED, LostProcesses
from flatout.launch.protocol import (
    VARIABLE,
    Options,
    Trial,
    new_folder,
    note_not_measured,
    reasons_not_measured,
)
from flatout.launch.signals import SignalsReceived
from flatout.launch.snapshot import SharedMemory, Snapshot
from flatout.model.errors import OverlayError, RealWriteError, UsageError
from flatout.model.plan import Plan
from flatout.redact import redact_command, redact_text
from flatout.sample.hardware import PULSE_EVERY_S, Sampler
from flatout.sample.process import descendants, process_ids
from flatout.trace import End, Note, RunInfo, TraceWriter, note_end

_SAMPLE_EVERY_S = 1.0
_SHIMS = INJECTED.with_name("bin")
_END_WITHIN_S = 5.0
_CANNOT_START = 126
_NOT_FOUND = 127
TIMED_OUT = 124
OUTPUT = "output.txt"
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_RECEIVED_WITHIN_S = 0.3
_reported: set[str] = set()  # files that changed during a trial: reported once


def run(
    command: Sequence[str],
    *,
    folder: Path,
    max_steps: int | None = None,
    xray: bool = True,
    plan: Plan | None = None,
    trial: Trial | None = None,
    ends_with_us: bool = False,
    ask_after_s: float = ASK_AFTER_S,
) -> int:
    """Run `command`, recording into `folder`; its exit code (128 + n when signal n ended it).

    Where no step has come after `ask_after_s`, a line says what its processes are doing. A command lives on when we
    are killed, unless it `ends_with_us`: then it gets SIGTERM. With a `plan` its changes are made inside. In a
    `trial` the command's output goes to `output.txt` in the folder, and the exit code is `TIMED_OUT` where it had
    to be ended.
    """
    program = _program(command)
    if isinstance(program, int):
        return program
    options = Options(
        folder=folder.absolute(),
        name=_name(command),
        command=redact_command(command),
        max_steps=max_steps,
        xray=xray,
        plan=plan,
        trial=trial,
    )
    measured = os.environ.get("FLATOUT") != "off" and _make_folder(options.folder)
    if trial is not None and not measured:
        raise UsageError("a trial has to be recorded: FLATOUT is off, or its folder cannot be written to")
    if plan is not None and not measured:
        _say("the plan is not applied: FLATOUT is off, or nothing can be recorded")
    environment = dict(os.environ)
    if measured:
        environment |= _injection(options, program)
    words = [program, *command[1:]]
    if trial is not None:
        return _run_trial(words, options, trial, environment)
    how: dict[str, Any] = {}
    if ends_with_us:
        how["preexec_fn"] = end_with_parent
    with closing(SignalsReceived()) as signals:
        if measured:
            environment |= signals.environment
            how["pass_fds"] = (signals.write_end,)
        process = _start(words, env=environment, **how)
        if isinstance(process, int):
            return process
        first_step = FirstStep(options.folder, time.monotonic(), ask_after_s)
        with _watching(process.pid, options, first_step, hardware=measured):
            code = _wait(process, signals)
    if measured and max_steps is not None:
        end(options.folder)
    if measured and not any(options.folder.iterdir()):
        _say("the command was over before anything could be recorded")
        options.folder.rmdir()
    elif measured:
        _note_end(options, code)
    return code


def _run_trial(words: list[str], options: Options, trial: Trial, environment: dict[str, str]) -> int:
    """Run a command as a trial: in a sandbox, in a session of its own, to its end or its time's."""
    if trial.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(trial.seed % (1 << 32)))
    check_files: Callable[[], None] | None = None
    if trial.protect is not None:
        ours = [path for path in (options.folder, trial.leads, trial.follows) if path is not None]
        box = sandbox.sandbox_for(words, trial.protect, ours)
        environment |= sandbox.environment(box, redirected=not trial.overlay)
        if trial.overlay:
            check_files = _check_beside_overlays(box)
            words = [*sandbox.entrance(box), *words]
        else:
            check_files = _check_all_files(box)
    with (options.folder / OUTPUT).open("wb") as output:
        process = _start(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    if isinstance(process, int):
        return process
    try:
        # A run for a proof is not timed.
        with _watching(process.pid, options, None, hardware=not trial.fingerprints):
            return _wait_for_trial(process, trial.timeout_s)
    finally:
        end(options.folder, process)
        if check_files is not None:  # after Ctrl-C too
            check_files()


def _check_beside_overlays(box: sandbox.Sandbox) -> Callable[[], None]:
    """Remember what overlays do not cover; the function returned compares, after the trial.

    What changes in a folder under an overlay was not changed by the trial, but by a person, another program,
    or a service that the script called. That is reported, and is no reason to end.
    """
    memory, near = SharedMemory(), Snapshot(box.near, but=[*box.keep, box.scratch])

    def check() -> None:
        if why := sandbox.refusal(box):
            raise OverlayError(why)
        if files := memory.changed():
            raise RealWriteError(files)
        files = [file for file in near.changed() if file not in _reported]
        _reported.update(files)
        if files:
            _say(f"Note: changed during a trial, and not by it ({len(files)}): {', '.join(files[:5])}")

    return check


def _check_all_files(box: sandbox.Sandbox) -> Callable[[], None]:
    """Remember all of the user's folders; the function returned compares, after the trial."""
    but = [*box.keep, box.scratch]
    near = Snapshot(box.near, but=but)
    beyond = Snapshot(box.beyond, but=[*but, *sandbox.BUSY], others_work=True)

    def check() -> None:
        if files := sorted({*near.changed(), *beyond.changed()}):
            raise RealWriteError(files)

    return check


def _start(words: list[str], **how: Any) -> subprocess.Popen[bytes] | int:
    try:
        return subprocess.Popen(words, **how)
    except OSError as problem:
        _say(f"cannot start {redact_text(words[0])}: {problem.strerror}")
        return _CANNOT_START


def default_folder(command: Sequence[str]) -> Path:
    """flatout-runs/<time>-<name>, not taken yet."""
    return new_folder(_name(command))


def recordings(folder: Path) -> list[Path]:
    """The traces a run has left: `folder`, and folder-2, folder-3 … where its command trained more than once."""
    found = []
    while folder.is_dir():
        found.append(folder)
        folder = found[0].with_name(f"{found[0].name}-{len(found) + 1}")
    return found


def _make_folder(folder: Path) -> bool:
    """Make the trace folder. One that holds a recording is a mistake; one that cannot be made costs the recording."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        _say(f"cannot record into {folder} ({problem.strerror}): running unmeasured")
        return False
    if any(folder.glob("*.jsonl")):
        raise UsageError(f"{folder} already holds a recording: name a new folder")
    return True


def _program(command: Sequence[str]) -> str | int:
    """The program to start, or the exit code a shell would give where there is none."""
    if not command:
        raise UsageError("no command given: flatout run -- python train.py …")
    found = shutil.which(command[0])
    if found:
        return found
    if Path(command[0]).exists():
        _say(f"{redact_text(command[0])} cannot be executed")
        return _CANNOT_START
    _say(f"{redact_text(command[0])}: command not found")
    return _NOT_FOUND


def _name(command: Sequence[str]) -> str:
    """What to call a run: the script, the module, or else the program."""
    command = redact_command(command)
    scripts = [Path(word.split()[-1]).stem for word in command if word.endswith((".py", ".sh"))]
    modules = [after.rpartition(".")[2] for word, after in pairwise(command) if word == "-m"]
    return next(iter((*scripts, *modules[-1:], *(Path(word).stem for word in command[:1]))), "") or "run"


def _injection(options: Options, program: str) -> dict[str, str]:
    """The environment that brings flatout into every Python the command starts."""
    environment = {
        VARIABLE: options.to_environment(),
        "FLATOUT_PATH": str(INJECTED),
        "PYTHONPATH": _in_front_of("PYTHONPATH", INJECTED),
    }
    # bash, make and the like may replace PYTHONPATH for the Pythons that they start.
    if not Path(program).name.startswith("python"):
        environment["PATH"] = _in_front_of("PATH", _SHIMS)
    return environment


def _in_front_of(variable: str, folder: Path) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get(variable))))


def _wait(process: subprocess.Popen[bytes], received: SignalsReceived) -> int:
    """Wait for the command; its exit code, 128 + n when signal n ended it.

    Signals meant for the command are passed on. Ctrl-C in a terminal reaches it without us; so has what it
    `received`.
    """
    with _blocked({*_PASSED_ON, signal.SIGCHLD}):
        while process.poll() is None:
            sent = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, 1.0)
            if sent is None or sent.si_signo == signal.SIGCHLD:
                received.listen()
            elif _for_us_alone(sent, received):
                received.passed_on(sent.si_signo)
                process.send_signal(sent.si_signo)
    return _exit_code(process.returncode)


def _wait_for_trial(process: subprocess.Popen[bytes], timeout_s: float | None) -> int:
    """A trial is ours to end: what would end us ends it, and its time may be over."""
    try:
        if threading.current_thread() is not threading.main_thread():
            return _exit_code(process.wait(timeout_s))
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with _blocked({*_PASSED_ON, signal.SIGCHLD}):
            while process.poll() is None:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return TIMED_OUT
                sent = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, min(1.0, left_s))
                if sent is not None and sent.si_signo in _PASSED_ON:
                    raise KeyboardInterrupt
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    return _exit_code(process.returncode)


def _exit_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Keep these signals from this thread for a while."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _for_us_alone(sent: signal.struct_siginfo, received: SignalsReceived) -> bool:
    """Whether the command has not got this signal already, as far as can be known.

    The terminal signals the whole process group. Of other signals a Python in the command says whether it
    `received` them; where none does, a `kill` from within the group may have reached the command too. But a
    batch script's `trap 'kill -TERM $PID' TERM` signals us alone. A second SIGTERM does no harm, a lost one
    does. Only an interrupt, which many take as "at once" when it comes twice, is left to the group.
    """
    if sent.si_code > 0:
        return False
    if received.lately(sent.si_signo, _RECEIVED_WITHIN_S):
        return False
    if received.listens:
        return True
    try:
        return sent.si_signo != signal.SIGINT or os.getpgid(sent.si_pid) != os.getpgrp()
    except ProcessLookupError:
        return True


@contextmanager
def _watching(pid: int, options: Options, first_step: FirstStep | None, *, hardware: bool) -> Iterator[None]:
    """Sample the `hardware` beside the command, until it ends. Fails with a note, never with the run."""
    if not hardware:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(pid, options, first_step, stop), name="flatout-hardware", daemon=True
    )
    try:
        with _blocked(_PASSED_ON):  # signals go to the thread that waits for them
            thread.start()
    except RuntimeError as problem:  # a limit on processes; the command runs all the same
        _say(f"the hardware is not watched ({redact_text(str(problem))})")
        yield
        return
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if first_step is not None:
            first_step.close()


def _say(text: str) -> None:
    """One line on stderr, if anybody reads it."""
    with suppress(OSError, ValueError):
        print(f"flatout: {text}", file=sys.stderr, flush=True)


def _info(options: Options, pid: int) -> RunInfo:
    return RunInfo(
        name=options.name,
        command=options.command,
        host=socket.gethostname(),
        pid=pid,
        started_unix_s=time.time(),
        started_s=time.monotonic(),
    )


def _note_end(options: Options, code: int) -> None:
    """Leave in each recording of a command that it is over, and in the last of them its exit code."""
    *earlier, last = recordings(options.folder)
    info, now_s = _info(options, 0), time.monotonic()
    try:
        for folder in earlier:
            note_end(folder, info, End(time_s=now_s))
        note_end(last, info, End(time_s=now_s, exit_code=code))
    except OSError as problem:
        _say(f"how the command ended is not recorded: {problem.strerror}")


def _watch(pid: int, options: Options, first_step: FirstStep | None, stop: threading.Event) -> None:
    info = _info(options, pid)
    try:
        with Sampler(pids=[pid]) as sampler, TraceWriter(options.folder, info) as writer:
            sample = sampler.read()
            lost = LostProcesses(pid, time.monotonic())
            while not stop.wait(PULSE_EVERY_S):
                text = lost.look(time.monotonic())
                if text is not None and note_not_measured(options.folder, text) and options.trial is None:
                    _say(text)
                text = first_step.look(time.monotonic(), sample.processes) if first_step is not None else None
                if text is not None:
                    _say(text)
                sampler.pulse()
                if sampler.due(_SAMPLE_EVERY_S):
                    sample = sampler.read()
                    writer.write(sample)
            writer.write(sampler.read())
            for text in [*sampler.notes, *reasons_not_measured(options.folder)]:
                writer.write(Note(time_s=time.monotonic(), text=text))
    except Exception as problem:
        # A command that has ended cannot be watched: that is no fault.
        if Path(f"/proc/{pid}").exists():
            _say(f"the hardware is not watched ({redact_text(str(problem))})")


def end(folder: Path, root: subprocess.Popen[bytes] | None = None) -> None:
    """End what a trial has left running: its tree, and processes that still carry our variable for this folder."""
    ours = {pid for pid in process_ids() if pid != os.getpid() and _belongs(pid, folder)}
    if root is not None and root.poll() is None:
        ours |= {root.pid, *descendants(root.pid)}
    handles = list(_open_processes(ours))
    _signal_all(handles, signal.SIGTERM)
    _signal_all(_wait_for_all(handles, _END_WITHIN_S), signal.SIGKILL)
    if root is not None:
        root.wait()
    for handle in handles:
        os.close(handle)
    # A batch on its way from a worker of PyTorch's is a named file for a moment.
    for pid in ours:
        for segment in Path("/dev/shm").glob(f"torch_{pid}_*"):
            segment.unlink(missing_ok=True)


def _belongs(pid: int, folder: Path) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    told = [os.fsdecode(one) for one in variables if one.startswith(f"{VARIABLE}=".encode())]
    return any(f'"{folder}"' in one for one in told)


def _open_processes(pids: Iterable[int]) -> Iterator[int]:
    """A descriptor for each process, so that a signal cannot reach another one that has got its number since."""
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended
            yield os.pidfd_open(pid)


def _signal_all(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, number)


def _wait_for_all(handles: Iterable[int], timeout_s: float) -> set[int]:
    """Wait until these processes have ended; those that have not."""
    alive, end_s = set(handles), time.monotonic() + timeout_s
    poll = select.poll()
    for handle in alive:
        poll.register(handle, select.POLLIN)
    while alive and time.monotonic() < end_s:
        for handle, _ in poll.poll(1000 * max(0.0, end_s - time.monotonic())):
            alive.discard(handle)
            poll.unregister(handle)
    return alive
