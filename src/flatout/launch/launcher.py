"""OUTSIDE: runs the user's command with flatout in it, watches the hardware beside it, and ends its process tree.

The command gets our terminal, its own exit code comes back, and signals reach it. flatout's part travels in two
environment variables; nothing is written but the trace folder.
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
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.launch import sandbox
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
_HEARD_WITHIN_S = 0.3
_TOLD: set[str] = set()  # files that changed during a trial: once is enough


def run(
    command: Sequence[str],
    *,
    folder: Path,
    max_steps: int | None = None,
    xray: bool = True,
    plan: Plan | None = None,
    trial: Trial | None = None,
    ends_with_us: bool = False,
) -> int:
    """Run `command`, recording into `folder`; its exit code (128 + n when signal n ended it).

    A command lives on when we are killed, unless it `ends_with_us`: then it gets SIGTERM.
    With a `plan` its changes are made inside. In a `trial` the command's output goes to `output.txt` in the folder,
    and the exit code is `TIMED_OUT` where it had to be ended.
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
    measured = os.environ.get("FLATOUT") != "off" and _made(options.folder)
    if trial is not None and not measured:
        raise UsageError("a trial has to be recorded: FLATOUT is off, or its folder cannot be written to")
    if plan is not None and not measured:
        _say("the plan is not applied: FLATOUT is off, or nothing can be recorded")
    environment = {**os.environ, **_injection(options, program)} if measured else dict(os.environ)
    words = [program, *command[1:]]
    if trial is not None:
        return _try(words, options, trial, environment)
    with closing(SignalsReceived()) as heard:
        if measured:
            environment |= heard.environment
        process = _started(
            words,
            env=environment,
            pass_fds=(heard.write_end,) if measured else (),
            preexec_fn=end_with_parent if ends_with_us else None,
        )
        if isinstance(process, int):
            return process
        with _watching(process.pid, options if measured else None):
            code = _wait(process, heard)
    if measured and max_steps is not None:
        end(options.folder)
    code = code if code >= 0 else 128 - code
    if measured and not any(options.folder.iterdir()):
        _say("the command was over before anything could be recorded")
        options.folder.rmdir()
    elif measured:
        _note_end(options, code)
    return code


def _try(words: list[str], options: Options, trial: Trial, environment: dict[str, str]) -> int:
    """Run a command as a trial: in a sandbox, in a session of its own, to its end or its time's."""
    if trial.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(trial.seed % (1 << 32)))
    look_again: Callable[[], None] | None = None
    if trial.protect is not None:
        ours = [path for path in (options.folder, trial.leads, trial.follows) if path is not None]
        box = sandbox.sandbox_for(words, trial.protect, ours)
        environment |= sandbox.environment(box, redirected=not trial.overlay)
        look_again = _overlaid(box) if trial.overlay else _redirected(box)
        words = [*(sandbox.entrance(box) if trial.overlay else ()), *words]
    with (options.folder / OUTPUT).open("wb") as output:
        process = _started(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    if isinstance(process, int):
        return process
    try:
        with _watching(process.pid, options if not trial.fingerprints else None):  # nobody times those
            code = _wait(process, trial=trial)
    finally:
        end(options.folder, process)
        if look_again is not None:  # after Ctrl-C too
            look_again()
    return code if code >= 0 else 128 - code


def _overlaid(box: sandbox.Sandbox) -> Callable[[], None]:
    """Look at what overlays do not cover; to be called once more after the trial.

    What changes in a folder under an overlay was not changed by the trial: a person, another program, or a service that
    the script has asked to. That is told, and is no reason to end.
    """
    memory, near = SharedMemory(), Snapshot(box.near, but=[*box.keep, box.scratch])

    def look_again() -> None:
        if why := sandbox.refusal(box):
            raise OverlayError(why)
        if files := memory.changed():
            raise RealWriteError(files)
        if files := [file for file in near.changed() if file not in _TOLD]:
            _TOLD.update(files)
            shown = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
            print(f"flatout: Note: changed during a trial, and not by it: {shown}", file=sys.stderr)

    return look_again


def _redirected(box: sandbox.Sandbox) -> Callable[[], None]:
    """Look at all of the user's folders; to be called once more after the trial."""
    but = [*box.keep, box.scratch]
    near = Snapshot(box.near, but=but)
    beyond = Snapshot(box.beyond, but=[*but, *sandbox.BUSY], others_work=True)

    def look_again() -> None:
        if files := sorted({*near.changed(), *beyond.changed()}):
            raise RealWriteError(files)

    return look_again


def _started(words: list[str], **how: Any) -> subprocess.Popen[bytes] | int:
    try:
        return subprocess.Popen(words, **how)
    except OSError as problem:
        print(f"flatout: cannot start {redact_text(words[0])}: {problem.strerror}", file=sys.stderr)
        return _CANNOT_START


def default_folder(command: Sequence[str]) -> Path:
    """flatout-runs/<time>-<name>, not taken yet."""
    return new_folder(_name(command))


def recordings(folder: Path) -> list[Path]:
    """The traces a run has left: `folder`, and folder-2, folder-3 … where its command trained more than once."""
    found = [folder] if folder.is_dir() else []
    while (following := folder.with_name(f"{folder.name}-{len(found) + 1}")).is_dir() and found:
        found.append(following)
    return found


def _made(folder: Path) -> bool:
    """Make the trace folder. One that holds a recording is a mistake; one that cannot be made costs the recording."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        print(f"flatout: cannot record into {folder} ({problem.strerror}): running unmeasured", file=sys.stderr)
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
        print(f"flatout: {redact_text(command[0])} cannot be executed", file=sys.stderr)
        return _CANNOT_START
    print(f"flatout: {redact_text(command[0])}: command not found", file=sys.stderr)
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
    if not Path(program).name.startswith("python"):  # bash, make …: it may replace PYTHONPATH for the Pythons it starts
        environment["PATH"] = _in_front_of("PATH", _SHIMS)
    return environment


def _in_front_of(variable: str, folder: Path) -> str:
    before = os.environ.get(variable)
    if not before:
        return str(folder)
    return f"{folder}{os.pathsep}{before}"


def _wait(process: subprocess.Popen[bytes], heard: SignalsReceived | None = None, *, trial: Trial | None = None) -> int:
    """Wait for the command. Signals meant for it go on to it; Ctrl-C in a terminal reaches it without us, and what it
    has `heard` has too.

    A trial is ours to end: what would end us ends it, and its time may be over.
    """
    left_s = trial.timeout_s if trial is not None else None
    if threading.current_thread() is not threading.main_thread():
        try:
            return process.wait(left_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
    end_s = math.inf if left_s is None else time.monotonic() + left_s
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    try:
        while process.poll() is None:
            sent = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, min(1.0, max(0.0, end_s - time.monotonic())))
            if sent is not None and sent.si_signo in _PASSED_ON:
                if trial is not None:
                    raise KeyboardInterrupt
                if _for_us_alone(sent, heard):
                    if heard is not None:
                        heard.passed_on(sent.si_signo)
                    process.send_signal(sent.si_signo)
            elif heard is not None:
                heard.listen()
            if time.monotonic() >= end_s:
                return TIMED_OUT
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode


def _for_us_alone(sent: signal.struct_siginfo, heard: SignalsReceived | None) -> bool:
    """Whether the command has not been told already, as far as one can know.

    The terminal tells the whole process group. Of others a Python that listens says whether it has `heard` them; where
    none does, a `kill` from within the group may have told it too. But a batch script's `trap 'kill -TERM $PID' TERM`
    tells us alone. A second polite signal does no harm and a lost one does: only an interrupt, which many take as "at
    once" when it comes twice, is left to the group.
    """
    if sent.si_code > 0:
        return False
    if heard is not None and heard.lately(sent.si_signo, _HEARD_WITHIN_S):
        return False
    if heard is not None and heard.listens:
        return True
    try:
        return sent.si_signo != signal.SIGINT or os.getpgid(sent.si_pid) != os.getpgrp()
    except ProcessLookupError:
        return True


@contextmanager
def _watching(pid: int, options: Options | None) -> Iterator[None]:
    """Sample the hardware beside the command, until it ends. Fails with a note, never with the run."""
    if options is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(pid, options, stop), name="flatout-hardware", daemon=True)
    # Signals go to the thread that waits for them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        thread.start()
    except RuntimeError as problem:  # a limit on processes: the command runs, and is waited for as ever
        stop.set()
        _say(f"the hardware is not watched ({redact_text(str(problem))})")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        if not stop.is_set():
            stop.set()
            thread.join()


def _say(text: str) -> None:
    """One line on stderr, if anybody reads it: a command is under way, or over."""
    try:
        print(f"flatout: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


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


def _watch(pid: int, options: Options, stop: threading.Event) -> None:
    info = _info(options, pid)
    try:
        with Sampler(pids=[pid]) as sampler, TraceWriter(options.folder, info) as writer:
            sampler.read()
            lost = LostProcesses(pid, time.monotonic())
            while not stop.wait(PULSE_EVERY_S):
                text = lost.look(time.monotonic())
                if text is not None and note_not_measured(options.folder, text) and options.trial is None:
                    _say(text)
                sampler.pulse()
                if sampler.due(_SAMPLE_EVERY_S):
                    writer.write(sampler.read())
            writer.write(sampler.read())
            for text in [*sampler.notes, *reasons_not_measured(options.folder)]:
                writer.write(Note(time_s=time.monotonic(), text=text))
    except Exception as problem:
        if Path(f"/proc/{pid}").exists():  # of a command that is over already there is nothing to watch
            _say(f"the hardware is not watched ({redact_text(str(problem))})")


def end(folder: Path, root: subprocess.Popen[bytes] | None = None) -> None:
    """End what a trial has left running: its tree, and processes that still carry our variable for this folder."""
    ours = {pid for pid in process_ids() if pid != os.getpid() and _belongs(pid, folder)}
    if root is not None and root.poll() is None:
        ours |= {root.pid, *descendants(root.pid)}
    handles = _open_processes(ours)
    _signal_all(handles, signal.SIGTERM)
    _signal_all(_wait_for_all(handles, _END_WITHIN_S), signal.SIGKILL)
    if root is not None:
        root.wait()
    for handle in handles:
        os.close(handle)
    for pid in ours:  # what a worker of torch's was about to hand over has a name, for a moment
        for segment in Path("/dev/shm").glob(f"torch_{pid}_*"):
            segment.unlink(missing_ok=True)


def _belongs(pid: int, folder: Path) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    told = [os.fsdecode(one) for one in variables if one.startswith(f"{VARIABLE}=".encode())]
    return any(f'"{folder}"' in one for one in told)


def _open_processes(pids: Iterable[int]) -> list[int]:
    """A descriptor for each process, so that a signal cannot reach another one that has got its number since."""
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:  # it has ended
            continue
    return handles


def _signal_all(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        try:
            signal.pidfd_send_signal(handle, number)
        except (ProcessLookupError, PermissionError):
            continue


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
