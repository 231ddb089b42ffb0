"""Reads a trace back, and joins the traces of several machines."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flatout.errors import TraceError
from flatout.trace.records import (
    KINDS,
    SCHEMA,
    Facts,
    Note,
    Record,
    RunInfo,
    Sample,
    Step,
    Summary,
    Window,
    WorkerReport,
    Xray,
    from_json,
)
from flatout.trace.thin import window_of

R = TypeVar("R", bound=RunInfo | Summary)
_BROKEN = (TypeError, ValueError, AttributeError, KeyError, IndexError)  # JSON, but not what one of our records says


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank recorded. `windows` cover every step; `steps` are those kept raw."""

    info: RunInfo
    steps: tuple[Step, ...] = ()
    windows: tuple[Window, ...] = ()
    notes: tuple[Note, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    xray: Xray | None = None
    workers: tuple[WorkerReport, ...] = ()

    def every_step(self) -> list[Step] | None:
        """The training steps, where all of them were kept raw."""
        steps = [step for step in self.steps if step.kind == "train"]
        return steps if len(steps) >= sum(window.wall_ms.count for window in self.windows) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded run: its ranks, and the hardware samples of its machines by host name."""

    ranks: tuple[RankTrace, ...] = ()
    machines: tuple[RunInfo, ...] = ()
    samples: dict[str, tuple[Sample, ...]]
    notes: tuple[Note, ...] = ()


def read(folder: Path, ranks: Collection[int] | None = None) -> Trace:
    """The trace in `folder`; of so many ranks that reading them all would take too long, of these only."""
    if not folder.is_dir():
        raise TraceError(f"no trace at {folder}: there is no such folder")
    files = sorted(path for path in folder.glob("*.jsonl") if not path.name.startswith(("workers-", "proof-")))
    inside = {path.parent for path in folder.glob("*/*.jsonl")} if not files else set()
    if inside:
        newest = max(inside, key=lambda trace: trace.stat().st_mtime)
        raise TraceError(f"{folder} is not a trace itself: it holds {len(inside)}, the newest is {newest}")
    if not files:
        raise TraceError(f"{folder} is not a trace: it holds no .jsonl file")
    found: list[RankTrace] = []
    machines: list[RunInfo] = []
    samples: dict[str, tuple[Sample, ...]] = {}
    notes: list[Note] = []
    for path in files:
        lines = _lines(path)
        first = next(lines, None)
        if first is None:
            continue  # a disk that was full from the start leaves an empty file; the others still tell their part
        info = _opening(path, first, RunInfo)
        if ranks is not None and info.rank is not None and info.rank not in ranks:
            continue
        by_kind: dict[type[Any], list[Any]] = {kind: [] for kind in KINDS.values()}
        for record in _records(lines):
            by_kind[type(record)].append(record)
        if info.rank is None:
            machines.append(info)
            samples[info.host] = tuple(by_kind[Sample])
            notes += by_kind[Note]
        else:
            found.append(_rank(info, by_kind, _workers(folder / f"workers-{info.rank:05d}.jsonl")))
    if not found and not machines:
        raise TraceError(f"{folder} is not a trace: its .jsonl files are empty")
    found.sort(key=lambda r: r.info.rank or 0)
    return Trace(ranks=tuple(found), machines=tuple(machines), samples=samples, notes=tuple(notes))


def merge(*traces: Trace) -> Trace:
    """One trace of several: the ranks and machines of all of them. A rank recorded twice is refused."""
    ranks = sorted((r for trace in traces for r in trace.ranks), key=lambda r: r.info.rank or 0)
    numbers = [r.info.rank for r in ranks]
    twice = sorted({n for n in numbers if n is not None and numbers.count(n) > 1})
    if twice:
        raise TraceError(f"cannot join these traces: rank {twice[0]} is in more than one of them")
    by_time: dict[str, dict[float, Sample]] = {}
    for trace in traces:
        for host, taken in trace.samples.items():
            by_time.setdefault(host, {}).update((sample.time_s, sample) for sample in taken)
    samples = {host: tuple(taken[time_s] for time_s in sorted(taken)) for host, taken in by_time.items()}
    machines = {info.host: info for trace in traces for info in trace.machines}
    notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
    return Trace(ranks=tuple(ranks), machines=tuple(machines.values()), samples=samples, notes=notes)


def read_summaries(folder: Path) -> tuple[Summary, ...]:
    """The summaries in `folder`: enough for a first answer, however long the run."""
    if not folder.is_dir():
        raise TraceError(f"no trace at {folder}: there is no such folder")
    paths = sorted(folder.glob("*.summary.json"))
    return tuple(_opening(path, next(_lines(path), {}), Summary) for path in paths)


def _rank(info: RunInfo, by_kind: dict[type[Any], list[Any]], workers: tuple[WorkerReport, ...]) -> RankTrace:
    """A run that was cut off leaves raw steps after its last window: they get one of their own, if none is missing."""
    steps, windows = by_kind[Step], by_kind[Window]
    covered = windows[-1].last_index if windows else None
    rest = [step for step in steps if covered is None or step.index > covered]
    if rest:
        first = rest[0].index if covered is None else covered + 1
        whole = [step.index for step in rest] == list(range(first, first + len(rest)))
        training = [step for step in rest if step.kind == "train"]
        if whole and training:
            windows = [*windows, window_of(training)]
    return RankTrace(
        info=info,
        steps=tuple(steps),
        windows=tuple(windows),
        notes=tuple(by_kind[Note]),
        facts=by_kind[Facts][-1].values if by_kind[Facts] else {},
        xray=by_kind[Xray][-1] if by_kind[Xray] else None,
        workers=workers,
    )


def _workers(path: Path) -> tuple[WorkerReport, ...]:
    """The last word of each loader worker of a rank."""
    if not path.exists():
        return ()
    last = {(r.pid, r.born_s): r for r in _records(_lines(path)) if isinstance(r, WorkerReport)}
    return tuple(last.values())


def _opening(path: Path, first: dict[str, Any], kind: type[R]) -> R:
    """The record a file begins with, if it is one of ours."""
    if KINDS.get(first.get("record", "")) is not kind:
        raise TraceError(f"{path} is not part of a trace: its first line does not describe a run")
    if first.get("schema") != SCHEMA:
        raise TraceError(
            f"{path} has trace schema {first.get('schema')}, this flatout reads schema {SCHEMA}: "
            "use the flatout version that wrote it"
        )
    try:
        return from_json(kind, first)
    except _BROKEN:
        raise TraceError(f"{path} is not part of a trace: its first line is damaged") from None


def _records(lines: Iterator[dict[str, Any]]) -> Iterator[Record]:
    """The records we know; a damaged one is passed over."""
    for line in lines:
        kind = KINDS.get(line.get("record", ""))
        if kind is not None:
            try:
                yield from_json(kind, line)
            except _BROKEN:
                continue


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; what a crash left of the last one is passed over."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    data = json.loads(line)
                except ValueError:
                    continue
                if isinstance(data, dict):
                    yield data
    except OSError as problem:
        raise TraceError(f"cannot read {path}: {problem.strerror}") from None
