"""The recordings in flatout-runs: what each has come to, how a run compares with those before it,
which may go.

    RUN/run.json   a PastRun: a list of fifty reads none of their traces

`flatout run` leaves that file at its end; of other recordings, the first list that holds them does.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flatout.files import RUNS, write_whole
from flatout.fix.speed import Speed, measure
from flatout.model.errors import UsageError
from flatout.model.formatting import exit_in_words, in_full
from flatout.model.inputs import is_file, is_folder, load_json, text_of
from flatout.model.stats import ENOUGH_RUNS, RunNoise, gain
from flatout.report import read_run
from flatout.report.account import RecordedRun
from flatout.trace.reader import from_json
from flatout.trace.writer import is_being_written

SCHEMA = 1
KEPT = "run.json"
HEADS = ("recording", "begun", "verdict", "speed", "busy", "cost", "commit", "exit")
_BUSY = {"sm_active_pct": "SM", "gpu_util_pct": "GPU", "cpu_pct": "CPU"}  # the first that was measured
_OF_A_FIX = ("before", "after")
_NAMED_BY_US = re.compile(r"\d{8}-\d{6}-.+")
_NUMBER = re.compile(r"-\d+$")  # of a training, where its command trained more than once


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """What a recording has come to. `device`: its GPU, or the machine whose cores it trained on."""

    folder: str
    name: str
    command: tuple[str, ...]
    started_unix_s: float
    device: str
    ranks: int
    steps: int
    speed: Speed | None = None
    verdict: str | None = None
    hardware: dict[str, float] = field(default_factory=dict)
    money: float | None = None
    currency: str | None = None
    commit: str | None = None
    exit_code: int | None = None
    ended: str | None = None
    running: bool = False

    @classmethod
    def of(cls, run: RecordedRun, folder: Path) -> PastRun:
        """What there is to know of a run."""
        info, commits = run.first.info, [machine.facts.get("commit") for machine in run.trace.machines]
        return cls(
            folder=str(folder),
            name=info.name,
            command=run.command,
            started_unix_s=info.started_unix_s,
            device=run.facts.gpu or info.host,
            ranks=run.ranks,
            steps=run.breakdown.steps,
            speed=measure(run.trace),
            verdict=next((finding.code for finding in run.findings), None),
            hardware=run.hardware,
            money=run.costs.get("money"),
            currency=run.costs.get("currency"),
            commit=next(filter(None, commits), None),
            exit_code=getattr(run.trace.end, "exit_code", None),
            ended=run.ended,
        )

    def row(self, runs: Path) -> tuple[str, ...]:
        """Its line in a list of those in `runs`, under HEADS."""
        name, begun, cost = Path(self.folder).relative_to(runs), "", ""
        if not _NAMED_BY_US.fullmatch(name.parts[0]):
            begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.started_unix_s))
        if self.money is not None:
            cost = f"{in_full(self.money)} {self.currency or ''}".rstrip()
        ended = "running" * self.running
        if self.exit_code:
            ended = exit_in_words(self.exit_code).removeprefix("exit code ")
        busy = (f"{of} {self.hardware[reading]:.0f}%" for reading, of in _BUSY.items() if reading in self.hardware)
        commit = (self.commit or "")[:7]
        return str(name), begun, self.verdict or "", str(self.speed or ""), next(busy, ""), cost, commit, ended


# What each has come to


def past_run(folder: Path) -> PastRun:
    """What a recording has come to: as noted beside it, or else by reading its trace."""
    past, running = _noted(folder), is_being_written(folder)
    if past is None:
        past = PastRun.of(read_run([folder]), folder)
        if not running:
            note(past)
    return replace(past, running=running)


def note(past: PastRun) -> None:
    """Note it beside the recording. One that cannot be written to is read again each time."""
    with suppress(OSError):
        write_whole(Path(past.folder) / KEPT, json.dumps({"schema": SCHEMA, **asdict(past)}) + "\n")


def _noted(folder: Path) -> PastRun | None:
    """None too where the note is damaged, or of another version."""
    path = folder / KEPT
    if not is_file(path):
        return None
    try:
        data = load_json(text_of(path), KEPT)
        past = from_json(PastRun, data)
    except (UsageError, ValueError):
        return None
    return replace(past, folder=str(folder)) if data.get("schema") == SCHEMA else None


def to_json(listed: Sequence[PastRun]) -> dict[str, Any]:
    """The documented JSON of `flatout runs`."""
    return {"schema": SCHEMA, "runs": [asdict(past) for past in listed]}


# Which there are


def recordings_in(runs: Path) -> list[Path]:
    """The recordings in a folder, those before and after a fix too; the last written first."""
    if not is_folder(runs):
        return []
    places = ("*", *(f"*/{part}" for part in _OF_A_FIX))
    found = {path.parent for place in places for path in runs.glob(f"{place}/rank-*.jsonl")}
    return sorted(found, key=_written, reverse=True)


def last(count: int, runs: Path = Path(RUNS)) -> list[Path]:
    """The last recordings, the newest last. UsageError where there are fewer."""
    found = recordings_in(runs)[:count]
    if not found:
        raise UsageError(f"there is no recording in {runs}: flatout run -- python train.py makes one")
    if len(found) < count:
        raise UsageError(f"there is only one recording in {runs}: {found[0]}")
    return found[::-1]


def _written(folder: Path) -> tuple[float, str]:
    """When a folder was written to last, to sort by; by name where that is the same."""
    written_s = 0.0
    for path in folder.rglob("*.jsonl"):
        with suppress(OSError):  # it is being removed
            written_s = max(written_s, path.stat().st_mtime)
    return written_s, str(folder)


# How a run compares with those before it


def beside_earlier(now: PastRun, runs: Path = Path(RUNS)) -> str:
    """That a run was faster or slower than the last ones alike, beyond what they vary by; empty if it
    was not."""
    earlier = list(islice(_alike(now, runs), ENOUGH_RUNS))
    speeds = [past.speed for past in earlier if past.speed is not None]
    if now.speed is None or len(speeds) < ENOUGH_RUNS:
        return ""
    change = gain(speeds, [now.speed], RunNoise.seen_in([speeds]))
    if change.low <= 1 <= change.high:
        return ""
    look = shlex.join(["flatout", "compare", earlier[0].folder, now.folder])
    return f"{change.verdict} than your last {ENOUGH_RUNS} runs of this command: {change} their speed ({look})"


def _alike(now: PastRun, runs: Path) -> Iterator[PastRun]:
    """Earlier runs of the same command on the same hardware, the last first. Those of a fix are trials."""
    for folder in recordings_in(runs):
        if folder.parent == runs and folder.resolve() != Path(now.folder).resolve():
            past = _noted(folder)
            if past is not None and _kind(past) == _kind(now):
                yield past


def _kind(past: PastRun) -> tuple[object, ...]:
    """What runs that can be compared have in common."""
    unit = past.speed and past.speed.unit
    return past.command, past.device, past.ranks, unit, _NUMBER.findall(past.folder)


# Which may go


def remove_older(most: int, runs: Path) -> int:
    """Remove all recordings but the last `most` (0: none) of those that flatout has named; how many went.

    What is being written stays, and a fix that can be resumed, and a folder that holds anything of
    the user's.
    """
    ours = sorted(filter(_is_ours, runs.glob("*")), key=_written, reverse=True)
    gone = [folder for folder in ours[most:] if most and not is_being_written(folder)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return sum(not folder.exists() for folder in gone)


def _is_ours(folder: Path) -> bool:
    """Whether flatout has named a folder, and all in it are files of recordings, perhaps of a fix
    that is over."""
    if not _NAMED_BY_US.fullmatch(folder.name) or folder.is_symlink():
        return False
    from flatout.launch.launcher import OUTPUT  # Linux alone has these
    from flatout.launch.protocol import NOT_MEASURED, REQUEST, TUNED, TURNS

    patterns = ("*.jsonl", "*.summary.json", KEPT, TUNED, TURNS, NOT_MEASURED, OUTPUT, f"{REQUEST}*")
    others = [path for path in folder.rglob("*") if not any(map(path.match, patterns))]
    return any(folder.rglob("rank-*.jsonl")) and all(path.name in _OF_A_FIX and path.is_dir() for path in others)
