"""Beside a command that runs: the hardware is sampled into its trace, and two things are told to the person. One is a
training process that flatout has not got into; the other, what the processes do where no step comes for a minute.
Whatever goes wrong here becomes a line, and the command goes on."""

from __future__ import annotations

import math
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from flatout.launch.hook import HOOK, OLDEST_PYTHON
from flatout.launch.protocol import INJECTED, REQUEST, VARIABLE, Options, note_not_measured, reasons_not_measured
from flatout.model.formatting import count_of
from flatout.redact import redact_text
from flatout.sample import budget
from flatout.sample.hardware import PULSE_EVERY_S, Sampler
from flatout.sample.process import descendants
from flatout.trace import Note, ProcessSample, RunInfo, TraceWriter

ASK_AFTER_S = 60.0
_SAMPLE_EVERY_S = 1.0


@contextmanager
def watching(pid: int, options: Options, ask_after_s: float) -> Iterator[None]:
    """Watch a command until it ends. Signals have to be blocked: they are for the thread that waits for them."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(pid, options, ask_after_s, stop), name="flatout-hardware", daemon=True
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


def _watch(pid: int, options: Options, ask_after_s: float, stop: threading.Event) -> None:
    began_s = time.monotonic()
    lost = LostProcesses(pid, began_s)
    try:
        with (
            closing(FirstStep(options.folder, began_s, ask_after_s)) as first_step,
            Sampler(pids=[pid]) as sampler,
            TraceWriter(options.folder, info(options, pid)) as writer,
        ):
            sample = sampler.read()
            while not stop.wait(PULSE_EVERY_S):
                text = lost.look(time.monotonic())
                if text is not None and note_not_measured(options.folder, text) and options.trial is None:
                    say(text)
                text = first_step.look(time.monotonic(), sample.processes)
                if text is not None:
                    say(text)
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
            say(f"the hardware is not watched ({redact_text(str(problem))})")


def info(options: Options, pid: int) -> RunInfo:
    """What a trace says first."""
    return RunInfo(
        name=options.name,
        command=options.command,
        host=socket.gethostname(),
        pid=pid,
        started_unix_s=time.time(),
        started_s=time.monotonic(),
    )


def say(text: str) -> None:
    """One line on stderr, if anybody reads it."""
    with suppress(OSError, ValueError):
        print(f"flatout: {text}", file=sys.stderr, flush=True)


# --- no step for a minute -----------------------------------------------------------------------------------

_ANSWERED_WITHIN_S = 3.0  # processes look once a second whether they are asked
_WAITS_FOR_ANOTHER = ("→ multiprocessing/", "→ torch/multiprocessing/", "→ subprocess.py")


class FirstStep:
    """Asks once, where a command that began at `began_s` has taken no step after so many seconds.

    The request is a file in the trace folder. A process that may train answers it with the line of the script that
    it is at; one that runs no line of the user's, such as torchrun's agent, is silent. None of these files stays.
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
        """What training itself is doing: a process that only waits for those it has started is not it. Of several it
        is the one that started first."""
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


# --- processes that flatout is not in -----------------------------------------------------------------------

_LOOK_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_TORCH = re.compile(r"\s(/\S*/lib/python(\d+)\.(\d+)/[^\n]*?)/torch/lib/libtorch")


class LostProcesses:
    """Looks for them below a command, a few times in its first minute: they load PyTorch, and nothing there starts
    flatout. PYTHONPATH does, but Python ignores it with -I or -E, and a script may replace it."""

    def __init__(self, root: int, started_s: float) -> None:
        self._root = root
        self._due = [started_s + after_s for after_s in _LOOK_AFTER_S]

    def look(self, now_s: float) -> str | None:
        """What to tell the person of the first that is found, with the way to cure it."""
        if not self._due or now_s < self._due[0]:
            return None
        self._due = [at_s for at_s in self._due if at_s > now_s]
        for pid in sorted({self._root, *descendants(self._root)}):
            with suppress(OSError):  # it has ended, or is not ours
                text = _why_lost(Path(f"/proc/{pid}"))
                if text is not None:
                    self._due = []
                    return f"process {pid} uses PyTorch and is not measured: {text}"
        return None


def _why_lost(process: Path) -> str | None:
    torch = _TORCH.search((process / "maps").read_text(errors="replace"))
    if torch is None:
        return None
    site, version = Path(torch[1]), (int(torch[2]), int(torch[3]))
    pairs = [entry.partition("=") for entry in (process / "environ").read_text(errors="replace").split("\0")]
    environment = {name: value for name, _, value in pairs}
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
