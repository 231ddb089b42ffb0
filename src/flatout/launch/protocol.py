"""What the launcher and the processes inside tell each other: by one environment variable, by files in the trace
folder, and by a pipe that says which signals a process has received. Standard library only: this runs before torch is
imported."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import resource
import select
import signal
import stat
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.files import write_whole

if TYPE_CHECKING:
    from flatout.model.plan import Plan

VARIABLE = "FLATOUT_RUN"
INJECTED = Path(__file__).parents[1] / "inside" / "path"  # what PYTHONPATH has to name
# A file in the trace folder: a line for each reason why a process is not measured.
NOT_MEASURED = "not-measured.txt"
# A file in it that asks what a process does that has not trained yet; one beside it for each answer.
REQUEST = "what-now"
TURNS = "turns.json"  # a file in it: what became of the changes that a trial has decided in turns
RANK = "FLATOUT_RANK"  # what a training process tells its loader workers
MOST_STEPS = 1_500  # of a trial, however short they are
WEIGHTS_EVERY = 5  # steps
WEIGHTS_OVER = "over"  # the file that says that a run leaves no more weights
_PIPE = "FLATOUT_HEARD"
_LISTENS = 0  # no signal: a process writes down what it receives
_LATELY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What makes a run a trial: it writes nothing of the user's, its output goes into the trace folder, and
    it ends.

    `protect` is a scratch folder that takes what the command writes, by overlays or (not `overlay`) by
    redirection; None lets it write. `seed` is imposed where the script sets none. With `fingerprints` nothing
    is timed: `proof-<rank>.jsonl` says what reached the model. Such a run may leave its weights in the folder
    `leads`, as far as `weights_bytes` go, and take up those in `follows`, every few steps.

    It goes on beyond its steps until it has trained for `at_least_s` (half of that where its steps are
    steady), and for up to twice that while its mean step is not `known_to` such a share, or until it has
    MOST_STEPS; several ranks do not: they have to end at the same step. It ends before its steps where a few
    slow ones have taken `enough_s`. The X-ray and the ceiling come last, and only where a step has taken less
    than `look_below_s`: what is slower than what there is already need not be understood.

    The changes named in `turns` are switched on and off while it trains, one after the other, before anything else is
    measured; what pays stays on.
    """

    seed: int | None = None
    fingerprints: bool = False
    leads: Path | None = None
    follows: Path | None = None
    weights_bytes: int = 0
    at_least_s: float = 0.0
    enough_s: float = math.inf
    known_to: float = math.inf
    look_below_s: float | None = None
    timeout_s: float | None = None
    protect: Path | None = None
    overlay: bool = True
    turns: tuple[str, ...] = ()


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

    def to_environment(self) -> str:
        """The value of the variable. The system takes 128 KiB at most: what a plan says of changes tried stays out."""
        options = self
        if self.plan is not None:
            options = replace(self, plan=replace(self.plan, tried=()))
        return json.dumps(asdict(options), default=str)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Options | None:
        """The options, or None where flatout is not wanted."""
        text = environ.get(VARIABLE)
        if not text or environ.get("FLATOUT") == "off":
            return None
        data = json.loads(text)
        data |= {"folder": Path(data["folder"]), "command": tuple(data["command"])}
        if trial := data.get("trial"):
            folders = {name: Path(trial[name]) for name in ("leads", "follows", "protect") if trial[name]}
            data["trial"] = Trial(**trial | folders | {"turns": tuple(trial["turns"])})
        if plan := data.get("plan"):
            # Imported only here: every Python of the command runs this, and few have a plan.
            from flatout.model.plan import Change, Plan

            data["plan"] = Plan(changes=tuple(Change(**change) for change in plan["changes"]))
        return cls(**data)


def new_folder(name: str) -> Path:
    """flatout-runs/<time>-<name>, not taken yet; -2 and so on behind it would be further trainings of one command."""
    base = Path("flatout-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    others = (base.with_name(f"{base.name}.{number}") for number in itertools.count(os.getpid()))
    return next(path for path in itertools.chain([base], others) if not path.exists())


# --- by files in the trace folder ---------------------------------------------------------------------------


def note_not_measured(folder: Path, reason: str) -> bool:
    """Leave word why a process is not measured; whether this is the first process that does so."""
    known = reasons_not_measured(folder)
    if reason not in known:
        with suppress(OSError):  # the line on stderr has to do
            write_whole(folder / NOT_MEASURED, "\n".join([*known, reason]))
    return reason not in known


def reasons_not_measured(folder: Path) -> list[str]:
    """Why processes of a command are not measured; empty where none is known."""
    try:
        return (folder / NOT_MEASURED).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def is_asked(folder: Path) -> bool:
    """Whether the launcher wants to know what a process does that has not trained yet."""
    return (folder / REQUEST).exists()


def answer(folder: Path, doing: str) -> None:
    """Tell it."""
    with suppress(OSError):
        write_whole(folder / f"{REQUEST}-{os.getpid():010d}", doing)


# --- by a pipe ----------------------------------------------------------------------------------------------


class SignalsReceived:
    """Which signals the command has received without us, so that they are not passed on a second time.

    A signal to a whole process group looks like one to us alone. But Python can write the number of each signal
    that it handles into a file: here into a pipe, whose `write_end` the command inherits with this `environment`.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.environment = {_PIPE: f"{self.write_end} {os.fstat(self.write_end).st_ino}"}
        self._received: list[tuple[int, float]] = []  # and when
        # Signals that we have passed on, and of which the command will write too.
        self._echoes: Counter[int] = Counter()
        self.listens = False  # whether a process writes down what it receives

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in what was written; what is older than a second is forgotten."""
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
        """Note that the command gets this signal from us: what it writes of it is an echo."""
        self._echoes[number] += 1


def write_down_signals(environ: Mapping[str, str]) -> None:
    """In a Python process of the command: have the signals that it receives written into the pipe, unless it uses
    another file for them (asyncio does).

    This process keeps a reading end too: without one, Python complains of a broken pipe when the launcher is
    gone.
    """
    descriptor, _, inode = environ.get(_PIPE, "").partition(" ")
    try:
        status = os.fstat(int(descriptor))
        # Another file may have got that descriptor number meanwhile.
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):
            ours = _under_high_number(int(descriptor))
            before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
                os.close(ours)
            else:
                reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                _under_high_number(reading)
                os.close(reading)
                os.write(ours, bytes([_LISTENS]))
    except (OSError, ValueError):  # not inherited, or not the main thread
        return


def _under_high_number(descriptor: int) -> int:
    """The same under a high number: a script that closes what it has inherited gets the low ones for its own
    files, and signals would be written into those."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, min(most, 1024) - 16))
