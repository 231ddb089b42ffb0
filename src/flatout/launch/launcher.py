"""OUTSIDE: runs the user's command with flatout in it, and ends its process tree.

The command gets our terminal, its own exit code comes back, and signals reach it. What flatout does inside
travels in environment variables; nothing is written but the trace folder.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from flatout.launch import sandbox
from flatout.launch.launch_ranks import end_with_parent
from flatout.launch.protocol import INJECTED, VARIABLE, Options, SignalsReceived, Trial, new_folder
from flatout.launch.snapshot import SharedMemory, Snapshot
from flatout.launch.watch import ASK_AFTER_S, info, say, watching
from flatout.model.errors import OverlayError, RealWriteError, UsageError
from flatout.model.plan import Plan
from flatout.redact import redact_command, redact_text
from flatout.sample.process import descendants, process_ids
from flatout.trace import End, note_end

_SHIMS = INJECTED.with_name("bin")
_END_WITHIN_S = 5.0
_CANNOT_START = 126
_NOT_FOUND = 127
TIMED_OUT = 124
OUTPUT = "output.txt"
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_AWAITED = {*_PASSED_ON, signal.SIGCHLD}
_RECEIVED_WITHIN_S = 0.3


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
        say("the plan is not applied: FLATOUT is off, or nothing can be recorded")
    environment = dict(os.environ)
    if measured:
        environment |= _injection(options, program)
    words = [program, *command[1:]]
    if trial is not None:
        return _run_trial(words, options, trial, environment)
    how: dict[str, Any] = {"env": environment}
    if ends_with_us:
        how["preexec_fn"] = end_with_parent
    with closing(SignalsReceived()) as received, ExitStack() as beside:
        if measured:
            environment |= received.environment
            how["pass_fds"] = (received.write_end,)
        process = _start(words, **how)
        if isinstance(process, int):
            return process
        beside.enter_context(_blocked())
        if measured:
            beside.enter_context(watching(process.pid, options, ask_after_s))
        code = _wait(process, received)
    if measured:
        _conclude(options, code)
    return code


def _run_trial(words: list[str], options: Options, trial: Trial, environment: dict[str, str]) -> int:
    """Run a command as a trial: in a sandbox, in a session of its own, to its end or its time's."""
    if trial.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(trial.seed % (1 << 32)))
    files: _UsersFiles | None = None
    if trial.protect is not None:
        ours = [path for path in (options.folder, trial.leads, trial.follows) if path is not None]
        box = sandbox.sandbox_for(words, trial.protect, ours)
        environment |= sandbox.environment(box, redirected=not trial.overlay)
        files = _UsersFiles(box, overlay=trial.overlay)
        if trial.overlay:
            words = [*sandbox.entrance(box), *words]
    with (options.folder / OUTPUT).open("wb") as output:
        process = _start(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    if isinstance(process, int):
        return process
    try:
        with _blocked(), ExitStack() as beside:
            if not trial.fingerprints:  # a run for a proof is not timed
                beside.enter_context(watching(process.pid, options, math.inf))
            return _wait_for_trial(process, trial.timeout_s)
    finally:
        end(options.folder, process)
        if files is not None:  # after Ctrl-C too
            files.compare()


class _UsersFiles:
    """The user's files before a trial, to be compared after it."""

    _reported: ClassVar[set[str]] = set()  # files that changed during a trial: reported once

    def __init__(self, box: sandbox.Sandbox, *, overlay: bool) -> None:
        self._box, self._overlay = box, overlay
        but = [*box.keep, box.scratch, *sandbox.not_compared()]
        self._near = Snapshot(box.near, but=but)
        if overlay:  # which covers all but shared memory
            self._beyond: Snapshot = SharedMemory()
        else:
            self._beyond = Snapshot([str(Path.home().resolve()), *box.cover], but=but, others_work=True)

    def compare(self) -> None:
        """Raise where a trial has really written to them."""
        if self._overlay and (why := sandbox.refusal(self._box)):
            raise OverlayError(why)
        near, beyond = self._near.changed(), self._beyond.changed()
        if self._overlay and near:
            # It was not the trial that wrote there, but a person, another program, or a service that the script called.
            # That is reported, and is no reason to end.
            new = [file for file in near if file not in self._reported]
            self._reported.update(new)
            if new:
                say(f"Note: changed during a trial, and not by it ({len(new)}): {', '.join(new[:5])}")
            near = []
        if near or beyond:
            raise RealWriteError(sorted({*near, *beyond}))


def _start(words: list[str], **how: Any) -> subprocess.Popen[bytes] | int:
    try:
        return subprocess.Popen(words, **how)
    except OSError as problem:
        say(f"cannot start {redact_text(words[0])}: {problem.strerror}")
        return _CANNOT_START


# --- its name and its folder --------------------------------------------------------------------------------


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
        say(f"cannot record into {folder} ({problem.strerror}): running unmeasured")
        return False
    if any(folder.glob("*.jsonl")):
        raise UsageError(f"{folder} already holds a recording: name a new folder")
    return True


def _conclude(options: Options, code: int) -> None:
    """A command is over. Leave that in each of its recordings, and in the last of them its exit code."""
    if options.max_steps is not None:
        end(options.folder)
    if not any(options.folder.iterdir()):
        say("the command was over before anything could be recorded")
        options.folder.rmdir()
        return
    *earlier, last = recordings(options.folder)
    run_info, now_s = info(options, 0), time.monotonic()
    try:
        for folder in earlier:
            note_end(folder, run_info, End(time_s=now_s))
        note_end(last, run_info, End(time_s=now_s, exit_code=code))
    except OSError as problem:
        say(f"how the command ended is not recorded: {problem.strerror}")


def _program(command: Sequence[str]) -> str | int:
    """The program to start, or the exit code a shell would give where there is none."""
    if not command:
        raise UsageError("no command given: flatout run -- python train.py …")
    found = shutil.which(command[0])
    if found:
        return found
    if Path(command[0]).exists():
        say(f"{redact_text(command[0])} cannot be executed")
        return _CANNOT_START
    say(f"{redact_text(command[0])}: command not found")
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


# --- its end ------------------------------------------------------------------------------------------------


@contextmanager
def _blocked() -> Iterator[None]:
    """Keep the signals that are waited for from this thread, and from those that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(process: subprocess.Popen[bytes], received: SignalsReceived) -> int:
    """Wait for the command; its exit code, 128 + n when signal n ended it.

    Signals meant for the command are passed on. Ctrl-C in a terminal reaches it without us; so has what it
    `received`.
    """
    while process.poll() is None:
        sent = signal.sigtimedwait(_AWAITED, 1.0)
        if sent is None or sent.si_signo == signal.SIGCHLD:
            received.listen()
        elif _for_us_alone(sent, received):
            received.passed_on(sent.si_signo)
            process.send_signal(sent.si_signo)
    return _exit_code(process)


def _wait_for_trial(process: subprocess.Popen[bytes], timeout_s: float | None) -> int:
    """A trial is ours to end: what would end us ends it, and its time may be over."""
    end_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    gets_signals = threading.current_thread() is threading.main_thread()
    while process.poll() is None:
        left_s = min(1.0, end_s - time.monotonic())
        if left_s <= 0:
            return TIMED_OUT
        if not gets_signals:
            with suppress(subprocess.TimeoutExpired):
                process.wait(left_s)
        elif (sent := signal.sigtimedwait(_AWAITED, left_s)) is not None and sent.si_signo in _PASSED_ON:
            raise KeyboardInterrupt
    return _exit_code(process)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _for_us_alone(sent: signal.struct_siginfo, received: SignalsReceived) -> bool:
    """Whether the command has not got this signal already, as far as can be known.

    The terminal signals the whole process group. Of other signals a Python in the command says whether it
    `received` them; where none does, a `kill` from within the group may have reached the command too. But a
    batch script's `trap 'kill -TERM $PID' TERM` signals us alone. A second SIGTERM does no harm, a lost one
    does. Only an interrupt, which many take as "at once" when it comes twice, is left to the group.
    """
    if sent.si_code > 0 or received.lately(sent.si_signo, _RECEIVED_WITHIN_S):
        return False
    if received.listens or sent.si_signo != signal.SIGINT:
        return True
    try:
        return os.getpgid(sent.si_pid) != os.getpgrp()
    except ProcessLookupError:
        return True


def end(folder: Path, root: subprocess.Popen[bytes] | None = None) -> None:
    """End what a trial has left running: its tree, and processes that still carry our variable for this folder."""
    ours = {pid for pid in process_ids() if pid != os.getpid() and _belongs(pid, folder)}
    if root is not None and root.poll() is None:
        ours |= {root.pid, *descendants(root.pid)}
    handles = list(_open_processes(ours))
    _signal_all(handles, signal.SIGTERM)
    end_s = time.monotonic() + _END_WITHIN_S
    for handle in handles:  # each can be read from when its process has ended
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        ended.poll(1000 * max(0.0, end_s - time.monotonic()))
    _signal_all(handles, signal.SIGKILL)
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
