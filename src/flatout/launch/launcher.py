"""Outside: runs the user's command with flatout in it, samples its hardware, and ends its process tree.

The command gets our terminal, its own exit code comes back, and signals reach it. What flatout does inside
travels in environment variables; nothing is written but the trace folder.
"""

from __future__ import annotations

import math
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.files import make_recording_folder
from flatout.launch import sandbox
from flatout.launch.exact_lines import PySpies, find_py_spy
from flatout.launch.hook import HOOK, OLDEST_PYTHON
from flatout.launch.launch_ranks import end_with_parent
from flatout.launch.protocol import (
    INJECTED,
    REQUEST,
    VARIABLE,
    Options,
    SignalsReceived,
    Trial,
    new_folder,
    note_not_measured,
    reasons_not_measured,
)
from flatout.launch.snapshot import UsersFiles
from flatout.model.errors import UsageError
from flatout.model.formatting import count_of
from flatout.model.plan import Plan
from flatout.redact import redact_command, redact_text
from flatout.sample import budget
from flatout.sample.hardware import PULSE_EVERY_S, Sampler
from flatout.sample.process import descendants, process_ids
from flatout.trace import End, Note, ProcessSample, RunInfo, TraceWriter, note_end

OUTPUT = "output.txt"
TIMED_OUT = 124
_CANNOT_START, _NOT_FOUND = 126, 127  # as a shell has them
ASK_AFTER_S = 60.0
_SHIMS = INJECTED.with_name("bin")
_END_WITHIN_S = 5.0
_SAMPLE_EVERY_S = 1.0
_RECEIVED_WITHIN_S = 0.3
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_AWAITED = {*_PASSED_ON, signal.SIGCHLD}


def run(
    command: Sequence[str],
    *,
    folder: Path,
    max_steps: int | None = None,
    xray: bool = True,
    plan: Plan | None = None,
    tune: bool = False,
    trial: Trial | None = None,
    exact_lines: bool = False,
    ends_with_us: bool = False,
    ask_after_s: float = ASK_AFTER_S,
) -> int:
    """Run `command`, recording into `folder`; its exit code (128 + n when signal n ended it).

    With `tune`, the training decides while it runs which changes of the `plan` to keep. With
    `exact_lines`, py-spy looks at its ranks. Where no step has come after `ask_after_s`, a line says
    what its processes are doing. A command lives on when we are killed, unless it `ends_with_us`:
    then it gets SIGTERM. The output of a `trial` goes to `output.txt` in the folder, and its exit
    code is `TIMED_OUT` where it had to be ended.
    """
    if not command:
        raise UsageError("no command given: flatout run -- python train.py …")
    program = shutil.which(command[0])
    if program is None:
        return _no_program(command[0])
    on = os.environ.get("FLATOUT") != "off"
    py_spy = find_py_spy() if exact_lines and on else None
    options = Options(
        folder=folder.absolute(),
        name=_name(command),
        command=redact_command(command),
        max_steps=max_steps,
        xray=xray,
        plan=plan,
        tune=tune,
        trial=trial,
        read_by=os.getpid() if py_spy is not None else None,
    )
    measured = on and _make_folder(options.folder)
    if trial is not None and not measured:
        raise UsageError("a trial has to be recorded: FLATOUT is off, or its folder cannot be written to")
    if plan is not None and not measured:
        what = "nothing is tuned" if tune else "the plan is not applied"
        say(f"{what}: FLATOUT is off, or nothing can be recorded")
    environment = dict(os.environ)
    if measured:
        environment |= _injection(options, program)
    words = [program, *command[1:]]
    if trial is not None:
        return _run_trial(words, options, trial, environment)
    with closing(SignalsReceived()) as received:
        if measured:
            environment |= received.environment
        process = _start(
            words,
            env=environment,
            pass_fds=(received.write_end,) if measured else (),
            preexec_fn=end_with_parent if ends_with_us else None,
        )
        if isinstance(process, int):
            return process
        with _blocked(), _watching(process.pid, options, ask_after_s, py_spy) if measured else nullcontext():
            code = _wait(process, received)
    if measured:
        _conclude(options, code)
    return code


def _run_trial(words: list[str], options: Options, trial: Trial, environment: dict[str, str]) -> int:
    """Run a command in a sandbox and a session of its own, to its end or its time's."""
    if trial.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(trial.seed % (1 << 32)))
    files: UsersFiles | None = None
    if trial.protect is not None:
        ours = [path for path in (options.folder, trial.leads, trial.follows) if path is not None]
        box = replace(sandbox.sandbox_for(words, trial.protect, ours), layer=str(trial.layer or ""))
        environment |= sandbox.environment(box, redirected=not trial.overlay)
        files = UsersFiles(box, overlay=trial.overlay)
        if trial.overlay:
            words = [*sandbox.entrance(box), *words]
    with (options.folder / OUTPUT).open("wb") as output:
        process = _start(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    if isinstance(process, int):
        return process
    # A run for a proof is not timed.
    watching = nullcontext() if trial.fingerprints else _watching(process.pid, options, math.inf)
    try:
        with signals_as_ctrl_c(), watching:
            process.wait(trial.timeout_s)
        return _exit_code(process)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        end(options.folder, process)
        if files is not None:  # after Ctrl-C too
            files.compare(say)


def _start(words: list[str], **how: Any) -> subprocess.Popen[bytes] | int:
    try:
        return subprocess.Popen(words, **how)
    except OSError as problem:
        say(f"cannot start {redact_text(words[0])}: {problem.strerror}")
        return _CANNOT_START


def _no_program(word: str) -> int:
    if Path(word).exists():
        say(f"{redact_text(word)} cannot be executed")
        return _CANNOT_START
    say(f"{redact_text(word)}: command not found")
    return _NOT_FOUND


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


def say(text: str) -> None:
    """One line on stderr, if anybody reads it."""
    with suppress(OSError, ValueError):
        print(f"flatout: {text}", file=sys.stderr, flush=True)


# --- its name and its folder --------------------------------------------------------------------------------


def default_folder(command: Sequence[str]) -> Path:
    """flatout-runs/<time>-<name>, not taken yet."""
    return new_folder(_name(command))


def recordings(folder: Path) -> list[Path]:
    """The traces a run has left: `folder`, and folder-2, folder-3 … where its command trained more
    than once."""
    found = []
    while folder.is_dir():
        found.append(folder)
        folder = found[0].with_name(f"{found[0].name}-{len(found) + 1}")
    return found


def _name(command: Sequence[str]) -> str:
    """What to call a run: the script, the module, or else the program."""
    command = redact_command(command)
    scripts = [Path(word.split()[-1]).stem for word in command if word.endswith((".py", ".sh", ".ipynb"))]
    modules = [after.rpartition(".")[2] for word, after in pairwise(command) if word == "-m"]
    programs = [Path(word).stem for word in command[:1]]
    return next(filter(None, (*scripts, *modules[-1:], *programs)), "run")


def _make_folder(folder: Path) -> bool:
    """Make the trace folder. One that holds a recording is a mistake; one that cannot be made costs
    the recording."""
    try:
        make_recording_folder(folder)
    except OSError as problem:
        say(f"cannot record into {folder} ({problem.strerror}): running unmeasured")
        return False
    if any(folder.glob("*.jsonl")):
        raise UsageError(f"{folder} already holds a recording: name a new folder")
    return True


def _conclude(options: Options, code: int) -> None:
    """Write into each recording that the command has ended, and into the last of them its exit code."""
    if options.max_steps is not None:
        end(options.folder)
    if not any(options.folder.iterdir()):
        say("the command was over before anything could be recorded")
        options.folder.rmdir()
        return
    *earlier, last = recordings(options.folder)
    run_info, now_s = _info(options, 0), time.monotonic()
    try:
        for folder in earlier:
            note_end(folder, run_info, End(time_s=now_s))
        note_end(last, run_info, End(time_s=now_s, exit_code=code))
    except OSError as problem:
        say(f"how the command ended is not recorded: {problem.strerror}")


def _info(options: Options, pid: int) -> RunInfo:
    return RunInfo(
        name=options.name,
        command=options.command,
        host=socket.gethostname(),
        pid=pid,
        started_unix_s=time.time(),
        started_s=time.monotonic(),
        facts={"commit": commit_here()},
    )


# --- the commit it ran at, read from .git by hand: starting git would take longer, and it may not be there -------

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def commit_here() -> str | None:
    """The commit that is checked out around the current folder; None where there is none, or it
    cannot be read."""
    with suppress(OSError, ValueError):
        here = Path.cwd()
        for folder in (here, *here.parents):
            if (folder / ".git").exists():
                found = _commit_in(_git_folder(folder / ".git"))
                return found if _COMMIT.fullmatch(found) else None
    return None


def _git_folder(marker: Path) -> Path:
    """Of a worktree and of a submodule, `.git` is a file that names it."""
    if marker.is_dir():
        return marker
    return marker.parent / marker.read_text(encoding="utf-8").removeprefix("gitdir:").strip()


def _commit_in(git: Path) -> str:
    """What HEAD stands for: a commit, or a branch. A worktree shares the branches of its repository."""
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    branch, shared = head.removeprefix("ref: "), git
    if (git / "commondir").exists():
        shared = git / (git / "commondir").read_text(encoding="utf-8").strip()
    if (shared / branch).is_file():
        return (shared / branch).read_text(encoding="utf-8").strip()
    packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.partition(" ")[0] for line in packed if line.endswith(f" {branch}")), "")


# --- while it runs: its hardware, and lines for the person ------------------------------------------------------


@contextmanager
def _watching(pid: int, options: Options, ask_after_s: float, py_spy: str | None = None) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(pid, options, ask_after_s, py_spy, stop), name="flatout-hardware", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as problem:  # a limit on processes; the command runs all the same
        say(f"the hardware is not watched ({redact_text(str(problem))})")
        yield
        return
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(pid: int, options: Options, ask_after_s: float, py_spy: str | None, stop: threading.Event) -> None:
    began_s, look_after_s = time.monotonic(), 1.0
    py_spies = PySpies(py_spy, pid) if py_spy is not None else None
    try:
        with (
            closing(FirstStep(options.folder, began_s, ask_after_s)) as first_step,
            Sampler(pids=[pid]) as sampler,
            TraceWriter(options.folder, _info(options, pid)) as writer,
            nullcontext() if py_spies is None else closing(py_spies),
        ):
            sample = sampler.read()
            while not stop.wait(PULSE_EVERY_S):
                now_s = time.monotonic()
                if look_after_s <= min(now_s - began_s, _LAST_LOOK_S):
                    look_after_s *= 2
                    if text := _lost_process(pid):
                        look_after_s = math.inf
                        if note_not_measured(options.folder, text) and options.trial is None:
                            say(text)
                if text := first_step.look(now_s, sample.processes):
                    say(text)
                if py_spies is not None:
                    py_spies.look(recordings(options.folder))
                sampler.pulse()
                if sampler.due(_SAMPLE_EVERY_S):
                    sample = sampler.read()
                    writer.write(sample)
            writer.write(sampler.read())
            missing = [] if py_spies is None else py_spies.conclude()
            for text in [*sampler.notes, *reasons_not_measured(options.folder), *missing]:
                writer.write(Note(time_s=time.monotonic(), text=text))
    except Exception as problem:
        # A command that has ended cannot be watched: that is no fault.
        if Path(f"/proc/{pid}").exists():
            say(f"the hardware is not watched ({redact_text(str(problem))})")


_ANSWERED_WITHIN_S = 3.0  # processes look once a second whether they are asked
_WAITS_FOR_ANOTHER = ("→ multiprocessing/", "→ torch/multiprocessing/", "→ subprocess.py")


class FirstStep:
    """Asks once what a command does that has taken no step after so many seconds.

    The request is a file in the trace folder. A process that may train answers it with the line of
    the script that it is at; one that runs no line of the user's, such as torchrun's agent, is
    silent. None of these files stays.
    """

    def __init__(self, folder: Path, began_s: float, after_s: float = ASK_AFTER_S) -> None:
        self._folder = folder
        self._after_s, self._due_s = after_s, began_s + after_s
        self._asked = False

    def look(self, now_s: float, processes: Sequence[ProcessSample]) -> str | None:
        """What to tell the person, once; `processes` are those of the command."""
        if now_s < self._due_s:
            return None
        if any(self._folder.glob("rank-*.jsonl")):
            self.close()
            return None
        if not self._asked:
            self._asked, self._due_s = True, now_s + _ANSWERED_WITHIN_S
            with suppress(OSError):
                (self._folder / REQUEST).touch()
            return None
        parts = [f"no training step after {self._after_s:.0f} s", self._likeliest_answer(), _load(processes)]
        self.close()
        return "; ".join(filter(None, parts))

    def close(self) -> None:
        """Ask no more, and leave no file."""
        self._due_s = math.inf
        for file in self._folder.glob(f"{REQUEST}*"):
            file.unlink(missing_ok=True)

    def _likeliest_answer(self) -> str:
        """Of the processes that do not only wait for others, the one that started first."""
        answers = [file.read_text(encoding="utf-8") for file in sorted(self._folder.glob(f"{REQUEST}-*"))]
        at_work = [one for one in answers if not any(wait in one for wait in _WAITS_FOR_ANOTHER)]
        return next(iter([*at_work, *answers]), "")


def _load(processes: Sequence[ProcessSample]) -> str:
    """Workers and their threads, or else all threads, against the cores that there are."""
    cores = count_of(round(budget.measure().cores_allowed), "core")
    workers = [process for process in processes if process.role == "worker"]
    if workers:
        threads = max(process.threads or 1 for process in workers)
        return f"{count_of(len(workers), 'worker')} × {count_of(threads, 'thread')} on {cores}"
    threads = sum(process.threads or 1 for process in processes)
    return f"{count_of(threads, 'thread')} on {cores}" if threads else ""


_LAST_LOOK_S = 64.0
_TORCH = re.compile(r"\s(/\S*/lib/python(\d+)\.(\d+)/[^\n]*?)/torch/lib/libtorch")


def _lost_process(root: int) -> str | None:
    """What to tell the person of a process below this one that loads PyTorch and in which nothing
    starts flatout.

    PYTHONPATH does, but Python ignores it with -I or -E, and a script may replace it.
    """
    for pid in sorted({root, *descendants(root)}):
        with suppress(OSError):  # it has ended, or is not ours
            if cause := _why_lost(Path(f"/proc/{pid}")):
                return f"process {pid} uses PyTorch and is not measured: {cause}"
    return None


def _why_lost(process: Path) -> str | None:
    torch = _TORCH.search((process / "maps").read_text(errors="replace"))
    if torch is None:
        return None
    site, version = Path(torch[1]), (int(torch[2]), int(torch[3]))
    variables = (process / "environ").read_text(errors="replace").split("\0")
    environment = dict(entry.partition("=")[::2] for entry in variables)
    if environment.get("FLATOUT") == "off":
        return None
    if version < OLDEST_PYTHON:
        return f"Python {version[0]}.{version[1]} is older than 3.10, the oldest that flatout works in"
    if VARIABLE not in environment:
        return f"it was started without the environment of the command: pass on {VARIABLE} and PYTHONPATH"
    flag = _ignores_pythonpath((process / "cmdline").read_text(errors="replace").split("\0"))
    started_it = not flag and str(INJECTED) in environment.get("PYTHONPATH", "").split(os.pathsep)
    if started_it or (site / HOOK).exists():
        return None
    cause = f"Python was started with {flag} and ignores PYTHONPATH" if flag else "PYTHONPATH was replaced for it"
    # The interpreter of the environment that has this torch.
    pythons = [folder / "bin" / "python" for folder in site.parents]
    python = next(filter(Path.exists, pythons), None) or (process / "exe").readlink()
    return f"{cause}. To have it measured: flatout hook install --python {shlex.quote(redact_text(str(python)))}"


def _ignores_pythonpath(command: Sequence[str]) -> str:
    """The option by which this Python does without PYTHONPATH, if there is one."""
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            return ""
        if word in ("-W", "-X"):  # the next word belongs to it
            next(words, None)
        elif not word.startswith(("-W", "-X", "--")) and (found := re.search("[IE]", word)):
            return f"-{found[0]}"
    return ""


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
    """Wait for the command, and pass signals on that it has not got without us; its exit code."""
    while process.poll() is None:
        sent = signal.sigtimedwait(_AWAITED, 1.0)
        if sent is None or sent.si_signo == signal.SIGCHLD:
            received.listen()
        elif _for_us_alone(sent, received):
            received.passed_on(sent.si_signo)
            process.send_signal(sent.si_signo)
    return _exit_code(process)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Signals that would end us and leave trials behind raise KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _PASSED_ON}
    replaced = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in replaced:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _for_us_alone(sent: signal.struct_siginfo, received: SignalsReceived) -> bool:
    """Whether the command has not got this signal already, as far as can be known.

    The terminal signals the whole process group. Of other signals a Python in the command says
    whether it `received` them; where none does, a `kill` from within the group may have reached the
    command too, or, as from a batch script's `trap`, us alone. A second SIGTERM does no harm, a lost
    one does. Only an interrupt, which many take as "at once" when it comes twice, is left to the
    group. That the terminal has gone (`ssh -t`, tmux) only the leader of the session is told.
    """
    told_as_leader = sent.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    if (sent.si_code > 0 and not told_as_leader) or received.lately(sent.si_signo, _RECEIVED_WITHIN_S):
        return False
    if received.listens or sent.si_signo != signal.SIGINT:
        return True
    try:
        return os.getpgid(sent.si_pid) != os.getpgrp()
    except ProcessLookupError:
        return True


def end(folder: Path, root: subprocess.Popen[bytes] | None = None) -> None:
    """End what a trial has left running: its tree, and processes that still carry our variable for
    this folder."""
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
    """A descriptor for each process, so that a signal cannot reach another one that has got its
    number since."""
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended
            yield os.pidfd_open(pid)


def _signal_all(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, number)
