"""What the launcher tells the processes inside, by one environment variable, and what they tell it, by a file."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.files import write_whole

if TYPE_CHECKING:
    from flatout.model.plan import Plan

VARIABLE = "FLATOUT_RUN"
# A file in the trace folder: a line for each reason why a process is not measured.
NOT_MEASURED = "not-measured.txt"
# A file in it that asks what a process does that has not trained yet; one beside it for each answer.
REQUEST = "what-now"
RANK = "FLATOUT_RANK"  # what a training process tells its loader workers
MOST_STEPS = 1_500  # of a trial, however short they are
WEIGHTS_EVERY = 5  # steps
WEIGHTS_OVER = "over"  # the file that says that a run leaves no more weights


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
    slow ones have taken `enough_s`. The X-ray and the ceiling come last,
    and only where a step has taken less than `look_below_s`: what is slower than what there is already need
    not be understood.
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
        if data.get("trial") is not None:
            folders = {name: data["trial"][name] for name in ("leads", "follows", "protect")}
            given = {name: Path(folder) if folder is not None else None for name, folder in folders.items()}
            data["trial"] = Trial(**data["trial"] | given)
        if data.get("plan") is not None:
            # Imported only here: every Python of the command runs this, and few have a plan.
            from flatout.model.plan import Change, Plan

            data["plan"] = Plan(changes=tuple(Change(**change) for change in data["plan"]["changes"]))
        return cls(**data)


def note_not_measured(folder: Path, reason: str) -> bool:
    """Leave word why a process is not measured; whether this is the first process that does so."""
    try:
        known = reasons_not_measured(folder)
        if reason in known:
            return False
        write_whole(folder / NOT_MEASURED, "\n".join([*known, reason]))
    except OSError:  # the line on stderr has to do
        pass
    return True


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


def new_folder(name: str) -> Path:
    """flatout-runs/<time>-<name>, not taken yet; -2 and so on behind it would be further trainings of one command."""
    base = Path("flatout-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    others = (base.with_name(f"{base.name}.{number}") for number in itertools.count(os.getpid()))
    return next(path for path in itertools.chain([base], others) if not path.exists())
