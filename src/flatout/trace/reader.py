"""Reads a trace back, and joins the traces of several machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.errors import TraceError
from flatout.trace.records import (
    KINDS,
    SCHEMA,
    Note,
    Record,
    RunInfo,
    Sample,
    Step,
    Summary,
    Window,
    from_json,
)
from flatout.trace.thin import window_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank recorded. `windows` cover every step; `steps` are those kept raw."""

    info: RunInfo
    steps: tuple[Step, ...] = ()
    windows: tuple[Window, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded run: its ranks, and the hardware samples of its machines by host name."""

    ranks: tuple[RankTrace, ...] = ()
    machines: tuple[RunInfo, ...] = ()
    samples: dict[str, tuple[Sample, ...]]
    notes: tuple[Note, ...] = ()


def read(folder: Path) -> Trace:
    """The trace in `folder`."""
    if not folder.is_dir():
        raise TraceError(f"no trace at {folder}: there is no such folder")
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise TraceError(f"{folder} is not a trace: it holds no .jsonl file")
    ranks: list[RankTrace] = []
    machines: list[RunInfo] = []
    samples: dict[str, tuple[Sample, ...]] = {}
    notes: list[Note] = []
    for path in files:
        info, records = _open(path)
        by_kind: dict[type[Any], list[Any]] = {kind: [] for kind in KINDS.values()}
        for record in records:
            by_kind[type(record)].append(record)
        if info.rank is None:
            machines.append(info)
            samples[info.host] = tuple(by_kind[Sample])
            notes += by_kind[Note]
        else:
            ranks.append(_rank(info, by_kind[Step], by_kind[Window], by_kind[Note]))
    ranks.sort(key=lambda r: r.info.rank or 0)
    return Trace(ranks=tuple(ranks), machines=tuple(machines), samples=samples, notes=tuple(notes))


def merge(*traces: Trace) -> Trace:
    """One trace of several: the ranks and machines of all of them. A rank recorded twice is refused."""
    ranks = sorted((r for trace in traces for r in trace.ranks), key=lambda r: r.info.rank or 0)
    numbers = [r.info.rank for r in ranks]
    twice = sorted({n for n in numbers if n is not None and numbers.count(n) > 1})
    if twice:
        raise TraceError(f"cannot join these traces: rank {twice[0]} is in more than one of them")
    samples: dict[str, tuple[Sample, ...]] = {}
    for trace in traces:
        for host, taken in trace.samples.items():
            samples[host] = tuple(sorted((*samples.get(host, ()), *taken), key=lambda s: s.time_s))
    machines = {info.host: info for trace in traces for info in trace.machines}
    notes = tuple(note for trace in traces for note in trace.notes)
    return Trace(ranks=tuple(ranks), machines=tuple(machines.values()), samples=samples, notes=notes)


def read_summaries(folder: Path) -> tuple[Summary, ...]:
    """The summaries in `folder`: enough for a first answer, however long the run."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.summary.json")))
    return tuple(from_json(Summary, data) for data in found)


def _rank(info: RunInfo, steps: list[Step], windows: list[Window], notes: list[Note]) -> RankTrace:
    """A run that was cut off leaves raw steps after its last window: they get one of their own."""
    covered = windows[-1].last_index if windows else -1
    rest = [step for step in steps if step.index > covered]
    if rest:
        windows = [*windows, window_of(rest)]
    return RankTrace(info=info, steps=tuple(steps), windows=tuple(windows), notes=tuple(notes))


def _open(path: Path) -> tuple[RunInfo, Iterator[Record]]:
    lines = _lines(path)
    first = next(lines, None)
    if first is None or first.get("kind") != "run":
        raise TraceError(f"{path} is not part of a trace: its first line does not describe a run")
    if first.get("schema") != SCHEMA:
        raise TraceError(
            f"{path} has trace schema {first.get('schema')}, this flatout reads schema {SCHEMA}: "
            "use the flatout version that wrote it"
        )
    return from_json(RunInfo, first), (
        from_json(KINDS[line["kind"]], line) for line in lines if line.get("kind") in KINDS
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; what a crash left of the last one is passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                data = json.loads(line)
            except ValueError:
                continue
            if isinstance(data, dict):
                yield data
