"""What the launcher and the processes inside tell each other.

By one environment variable, by files in the trace folder, and by a pipe that says which signals a process has
received. Standard library only: this runs before torch is imported.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import select
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.files import RUNS, write_whole

if TYPE_CHECKING:
    from flatout.model.plan import Plan

VARIABLE = "FLATOUT_RUN"
INJECTED = Path(__file__).parents[1] / "inside" / "path"  # what PYTHONPATH has to name
RANK = "FLATOUT_RANK"  # what a training process tells its loader workers
# Files in the trace folder.
NOT_MEASURED = "not-measured.txt"  # a line for each reason why a process is not measured
REQUEST = "what-now"  # asks what a process does that has not trained yet; the answers lie beside it
TUNED = "tuned.json"  # what a training that tunes itself has decided so far, as a plan
TURNS = "turns.json"  # the results of the changes that a trial has decided in turns
MOST_STEPS = 1_500  # of a trial, however short they are
WEIGHTS_EVERY = 5  # steps
WEIGHTS_OVER = "over"  # the file that says that a run leaves no more weights
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PARENTS_ONLY, _PR_SET_PTRACER = "1", 0x59616D61
_PIPE = "FLATOUT_HEARD"
_LISTENS = 0  # no signal: a process writes down what it receives
_LATELY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run of `fix`: it writes nothing of the user's, its output goes into the trace folder, and it ends."""

    seed: int | None = None  # imposed where the script sets none
    fingerprints: bool = False  # nothing is timed, and `proof-<rank>.jsonl` says what reached the model
    closely: bool = False  # it also says what it takes to judge an edit of the person's own
    layer: Path | None = None  # files laid over the person's, in the trial's own view: see `sandbox`
    # Every few steps it leaves its weights in one folder, as far as `weights_bytes` go, and takes up
    # those in another.
    leads: Path | None = None
    follows: Path | None = None
    weights_bytes: int = 0
    # Beyond its steps it trains for `at_least_s` (half of that where steps are steady), and for up to
    # twice that while its mean step is not `known_to` such a share. Several ranks do not: they have
    # to end at the same step.
    at_least_s: float = 0.0
    known_to: float = math.inf
    enough_s: float = math.inf  # it ends before its steps where a few slow ones have taken this long
    look_below_s: float | None = None  # the X-ray and the ceiling come only where a step has taken less
    timeout_s: float | None = None
    # What the command writes goes to this scratch folder, by overlays or else by redirection; None
    # lets it write.
    protect: Path | None = None
    overlay: bool = True
    turns: tuple[str, ...] = ()  # changes to switch on and off before the rest is measured; what pays stays on


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where to record, how far to go, and what to change."""

    folder: Path
    name: str
    command: tuple[str, ...] = ()
    max_steps: int | None = None
    xray: bool = True
    plan: Plan | None = None
    trial: Trial | None = None
    tune: bool = False  # decide while training runs which changes of the plan to keep
    read_by: int | None = None  # a process that may read the memory of those that are measured, and so may its children

    def to_environment(self) -> str:
        """The value of the variable. The system takes 128 KiB at most: what a plan says of changes
        tried stays out."""
        options = self
        if self.plan is not None:
            options = replace(self, plan=replace(self.plan, tried=()))
        return json.dumps(asdict(options), default=str)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Options | None:
        """The options, or None where flatout is off or has not started the command."""
        text = environ.get(VARIABLE)
        if not text or environ.get("FLATOUT") == "off":
            return None
        data = json.loads(text)
        data |= {"folder": Path(data["folder"]), "command": tuple(data["command"])}
        if trial := data.get("trial"):
            folders = {name: Path(trial[name]) for name in ("leads", "follows", "protect", "layer") if trial[name]}
            data["trial"] = Trial(**trial | folders | {"turns": tuple(trial["turns"])})
        if plan := data.get("plan"):
            # Imported only here: every Python of the command runs this, and few have a plan.
            from flatout.model.plan import Change, Plan

            data["plan"] = Plan(changes=tuple(Change(**change) for change in plan["changes"]))
        return cls(**data)


def new_folder(name: str) -> Path:
    """flatout-runs/<time>-<name>, not taken yet; -2 and so on behind it would be further trainings of
    one command."""
    base = Path(RUNS) / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    folder, number = base, os.getpid()
    while folder.exists():
        folder, number = base.with_name(f"{base.name}.{number}"), number + 1
    return folder


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook, which goes on when a training has ended."""
    return "ipykernel" in sys.modules


# --- by files in the trace folder ---------------------------------------------------------------------------


def note_not_measured(folder: Path, reason: str) -> bool:
    """Leave word why a process is not measured; whether this is the first process that does so."""
    known = reasons_not_measured(folder)
    if reason not in known:
        with suppress(OSError):  # the line on stderr has to do
            write_whole(folder / NOT_MEASURED, "\n".join([*known, reason]))
    return reason not in known


def reasons_not_measured(folder: Path) -> list[str]:
    """Why processes of a command are not measured."""
    try:
        return (folder / NOT_MEASURED).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def is_asked(folder: Path) -> bool:
    """Whether the launcher asks what a process does that has not trained yet."""
    return (folder / REQUEST).exists()


def answer(folder: Path, doing: str) -> None:
    """Answer the launcher."""
    with suppress(OSError):
        write_whole(folder / f"{REQUEST}-{os.getpid():010d}", doing)


# --- by the system ---------------------------------------------------------------------------------------------


def let_be_read(by: int) -> None:
    """Let process `by` and its children, such as py-spy, read the memory of this process and of those
    it forks.

    Most systems let any process of the same user do so, those with Yama only the parents of a process.
    """
    with suppress(OSError):
        if _YAMA.read_text().strip() != _PARENTS_ONLY:
            return
        import ctypes

        permit = partial(ctypes.CDLL(None).prctl, _PR_SET_PTRACER, *map(ctypes.c_ulong, (by, 0, 0, 0)))
        permit()
        os.register_at_fork(after_in_child=permit)


# --- by a pipe ----------------------------------------------------------------------------------------------


class SignalsReceived:
    """Which signals the command has received without us, so that they are not passed on a second time.

    A signal to a whole process group looks like one to us alone. But Python can write the number of
    each signal that it handles into a file: here into a pipe, whose `write_end` the command inherits
    with this `environment`.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.environment = {_PIPE: f"{self.write_end} {os.fstat(self.write_end).st_ino}"}
        self._received: list[tuple[int, float]] = []  # signals, and when
        self._echoes: Counter[int] = Counter()  # signals that we have passed on, of which the command writes too
        self.listens = False  # whether a process writes down what it receives

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Read what was written, and forget what is older than a second."""
        now_s = time.monotonic()
        self._received = [(number, at_s) for number, at_s in self._received if now_s - at_s < _LATELY_S]
        if select.select([self._read_end], [], [], timeout_s)[0]:
            for number in os.read(self._read_end, 1 << 16):
                self.listens |= number == _LISTENS
                if self._echoes[number]:
                    self._echoes[number] -= 1
                else:
                    self._received.append((number, time.monotonic()))

    def lately(self, number: int, within_s: float) -> bool:
        """Whether a process of the command has received this signal lately, or does within `within_s`."""
        end_s = time.monotonic() + within_s
        while True:
            left_s = end_s - time.monotonic()
            self.listen(max(0.0, left_s))
            if any(seen == number for seen, _ in self._received):
                self._received = [(seen, at_s) for seen, at_s in self._received if seen != number]
                return True
            if left_s <= 0:
                return False

    def passed_on(self, number: int) -> None:
        """The command gets this signal from us: what it writes of it is an echo."""
        self._echoes[number] += 1


def write_down_signals(environ: Mapping[str, str]) -> None:
    """In a Python process of the command: have the signals that it receives written into the pipe.

    Not where it uses another file for them, as asyncio does.
    """
    descriptor, _, inode = environ.get(_PIPE, "").partition(" ")
    with suppress(OSError, ValueError):  # not inherited, or not the main thread
        status = os.fstat(int(descriptor))
        # Another file may have got that descriptor number meanwhile.
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != int(inode):
            return
        ours = _under_high_number(int(descriptor))
        before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(ours)
            return
        # Without a reading end of its own, Python complains of a broken pipe when the launcher is gone.
        reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        _under_high_number(reading)
        os.close(reading)
        os.write(ours, bytes([_LISTENS]))


def _under_high_number(descriptor: int) -> int:
    """The same file. A script that closes what it has inherited gets the low numbers for files of its own."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, min(most, 1024) - 16))
