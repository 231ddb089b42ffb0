"""Reads a trace back, and joins the traces of several machines.

A trace may be damaged, or made by somebody else. A crash leaves a last line that is cut off; any other bad
line is skipped, and a note says so. Of a trace too large for memory the first part of each file is read, and
a note says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import stat
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, Union

from flatout.model.errors import TraceError
from flatout.model.formatting import count_of, printable
from flatout.model.hardware_samples import Sample
from flatout.model.records import (
    SCHEMA,
    AppliedChange,
    End,
    ExactLines,
    Facts,
    FactsRecord,
    GradientExchange,
    LoaderFacts,
    Note,
    OwnCost,
    ParallelFacts,
    ProcessGroup,
    Record,
    RunInfo,
    SettingsRead,
    Stacks,
    Step,
    Summary,
    Window,
    WorkerReport,
    Xray,
    kind_of,
)
from flatout.model.stats import Sketch
from flatout.trace.downsample import window_of

_RECORDS = (RunInfo, Step, Window, Note, Sample, Summary, FactsRecord, Xray, WorkerReport, Stacks, ExactLines, End)
KINDS: dict[str, type[Any]] = {kind_of(record): record for record in _RECORDS}
R = TypeVar("R", bound=RunInfo | Summary)
T = TypeVar("T")
MOST_IN_MEMORY = 400_000_000  # bytes, about: enough for some hundred million steps
LONGEST_LINE = 4_000_000  # bytes
_BYTES_A_VALUE = 60  # in memory, beside its text
# Files of a rank that are read with its own: their records, and what a value takes in memory.
_BESIDE_A_RANK: dict[str, tuple[tuple[type[Any], ...], int]] = {
    "workers-": ((WorkerReport, Stacks), 0),
    "lines-": ((ExactLines,), _BYTES_A_VALUE),
}
_NOT_OPENED = (*_BESIDE_A_RANK, "proof-")
_VALUES = (b",", b":", b"[", b"{")  # a value follows each of them
# A line that does not match has no control character, and no half of a character, which cannot be
# written again.
_UNSAFE = re.compile(rb"\\u(00|20|d)|\\[bf]|[\x7f-\xff]", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank recorded. `windows` cover every step; `steps` are those kept raw."""

    info: RunInfo
    steps: tuple[Step, ...] = ()
    windows: tuple[Window, ...] = ()
    notes: tuple[Note, ...] = ()
    facts: Facts = field(default_factory=Facts)
    xray: Xray | None = None
    workers: tuple[WorkerReport, ...] = ()
    stacks: tuple[Stacks, ...] = ()  # of the training thread, and of each worker
    exact: tuple[ExactLines, ...] = ()  # with `--lines exact`: of the main thread, and of all workers
    end: End | None = None

    def every_step(self) -> list[Step] | None:
        """The training steps, where all of them were kept raw."""
        steps = [step for step in self.steps if step.kind == "train"]
        if len(steps) < sum(window.wall_ms.count for window in self.windows):
            return None
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded run: its ranks, and the hardware samples of its machines by host name."""

    ranks: tuple[RankTrace, ...] = ()
    machines: tuple[RunInfo, ...] = ()
    samples: dict[str, tuple[Sample, ...]]
    notes: tuple[Note, ...] = ()
    end: End | None = None  # of the command


def read(folder: Path, ranks: Collection[int] | None = None) -> Trace:
    """The trace in `folder`; of the given ranks only, where there are too many to read."""
    if not folder.is_dir():
        raise TraceError(f"no trace at {folder}: there is no such folder")
    files = sorted(path for path in folder.glob("*.jsonl") if not path.name.startswith(_NOT_OPENED))
    if not files:
        raise _no_trace(folder)
    parts: list[Trace] = []
    room = MOST_IN_MEMORY
    # Large files may use the room that small ones leave.
    for place, path in enumerate(sorted(files, key=_size)):
        file = _File(path, room // (len(files) - place))
        info = file.opening(RunInfo)
        if info is None:
            continue  # a full disk leaves an empty file; the other files still count
        if ranks is not None and info.rank is not None and info.rank not in ranks:
            continue
        records = file.by_kind()
        records[Note] += file.remarks(info)
        room -= file.taken
        if info.rank is None:
            parts.append(_machine(info, records))
            continue
        for name, (kinds, a_value) in _BESIDE_A_RANK.items():
            beside = _File(folder / f"{name}{info.rank:05d}.jsonl", room // 4, a_value=a_value)
            if beside.path.exists():
                found = beside.by_kind()
                for kind in kinds:
                    records[kind] += found[kind]
                records[Note] += beside.remarks(info)
                room -= beside.taken
        parts.append(Trace(ranks=(_rank(info, records),), samples={}))
    if not parts:
        raise TraceError(f"{folder} is not a trace: its .jsonl files are empty")
    return _joined(parts)


def _no_trace(folder: Path) -> TraceError:
    inside = {path.parent for path in folder.glob("*/*.jsonl")}
    if not inside:
        return TraceError(f"{folder} is not a trace: it holds no .jsonl file")
    newest = max(inside, key=lambda trace: trace.stat().st_mtime)
    return TraceError(f"{folder} is not a trace itself: it holds {len(inside)}, the newest is {newest}")


def merge(*traces: Trace) -> Trace:
    """One trace of several: the ranks and machines of all of them. A rank recorded twice is refused."""
    numbers = [r.info.rank for trace in traces for r in trace.ranks]
    twice = sorted({n for n in numbers if n is not None and numbers.count(n) > 1})
    if twice:
        raise TraceError(f"cannot join these traces: rank {twice[0]} is in more than one of them")
    return _joined(traces)


def _joined(traces: Sequence[Trace]) -> Trace:
    ranks = sorted((r for trace in traces for r in trace.ranks), key=lambda r: r.info.rank or 0)
    by_time: dict[str, dict[float, Sample]] = {}
    for trace in traces:
        for host, taken in trace.samples.items():
            by_time.setdefault(host, {}).update((sample.time_s, sample) for sample in taken)
    samples = {host: tuple(taken[time_s] for time_s in sorted(taken)) for host, taken in by_time.items()}
    machines = {info.host: info for trace in traces for info in trace.machines}
    notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
    # Of several machines one on which the command failed, if there is one.
    ends = (trace.end for trace in traces if trace.end is not None)
    end = max(ends, key=lambda end: bool(end.exit_code), default=None)
    return Trace(ranks=tuple(ranks), machines=tuple(machines.values()), samples=samples, notes=notes, end=end)


def read_summaries(folder: Path) -> tuple[Summary, ...]:
    """The summaries in `folder`: enough for a first answer, however long the run."""
    if not folder.is_dir():
        raise TraceError(f"no trace at {folder}: there is no such folder")
    paths = sorted(folder.glob("*.summary.json"))
    found = [(path, _File(path, LONGEST_LINE).opening(Summary)) for path in paths]
    if empty := [path for path, summary in found if summary is None]:
        raise TraceError(f"{empty[0]} is not part of a trace: it is empty")
    return tuple(summary for _, summary in found if summary is not None)


def _machine(info: RunInfo, records: dict[type[Any], list[Any]]) -> Trace:
    return Trace(
        machines=(info,),
        samples={info.host: tuple(records[Sample])},
        notes=tuple(records[Note]),
        end=next(iter(records[End]), None),
    )


def _rank(info: RunInfo, records: dict[type[Any], list[Any]]) -> RankTrace:
    """A run that was cut off leaves raw steps after its last window: if all are there, they become one."""
    steps, windows = records[Step], records[Window]
    first = steps[0].index if steps else 0
    if windows:
        first = windows[-1].last_index + 1
    rest = [step for step in steps if step.index >= first]
    whole = [step.index for step in rest] == list(range(first, first + len(rest)))
    training = [step for step in rest if step.kind == "train"]
    if whole and training:
        windows = [*windows, window_of(training)]
    return RankTrace(
        info=info,
        steps=tuple(steps),
        windows=tuple(windows),
        notes=tuple(records[Note]),
        facts=next((record.values for record in records[FactsRecord]), Facts()),
        xray=next(iter(records[Xray]), None),
        workers=tuple(records[WorkerReport]),
        stacks=tuple(records[Stacks]),
        exact=tuple(records[ExactLines]),
        end=next(iter(records[End]), None),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading it will say why
        return 0


class _File:
    """One file of a trace: its records, and notes about what is missing of it."""

    def __init__(self, path: Path, room: int, *, a_value: int = _BYTES_A_VALUE) -> None:
        self.path = path
        self.taken = 0  # of memory, about
        self._room = room
        self._a_value = a_value
        self._lines = self._read()
        self._number = 0
        self._damaged = 0
        self._first_damage = ""
        self._left_out_bytes = 0

    def opening(self, kind: type[R]) -> R | None:
        """The first record, which must be of this kind; None if the file is empty."""
        line = next(self._lines, None)
        if line is None:
            return None
        refused = f"{self.path} is not part of a trace: its first line "
        try:
            first = _parsed(line)
            if KINDS.get(str(first.get("record"))) is not kind:
                raise TraceError(f"{refused}does not describe a run")
            schema = first.get("schema")
            if type(schema) is not int:
                raise ValueError("it has no schema")
            if schema != SCHEMA:
                said = f"has trace schema {schema}, this flatout reads schema {SCHEMA}"
                raise TraceError(f"{self.path} {said}: use the flatout version that wrote it")
            return from_json(kind, first)
        except ValueError as problem:
            raise TraceError(f"{refused}is damaged ({problem})") from None

    def by_kind(self) -> dict[type[Any], list[Any]]:
        """The records of each kind; of those that are written again and again, the last."""
        found: dict[type[Any], dict[object, Record]] = {kind: {} for kind in KINDS.values()}
        for record in self._records():
            of_its_kind = found[type(record)]
            of_its_kind[_replaced_by(record) or len(of_its_kind)] = record
        return {kind: list(records.values()) for kind, records in found.items()}

    def _records(self) -> Iterator[Record]:
        """The records of known kinds; a damaged one is skipped and counted."""
        for line in self._lines:
            try:
                data = _parsed(line)
                name = data.get("record")
                if not isinstance(name, str):
                    raise ValueError("it does not say what it is")
                if name in KINDS:
                    yield from_json(KINDS[name], data)
            except ValueError as problem:
                if line.endswith(b"\n"):  # else it is the last, which a crash has cut off
                    self._count_damage(str(problem))

    def remarks(self, info: RunInfo) -> list[Note]:
        """Notes about what was left out."""
        words = []
        if self._damaged:
            were = "were" if self._damaged > 1 else "was"
            words.append(f"{count_of(self._damaged, 'damaged line')} {were} left out ({self._first_damage})")
        if self._left_out_bytes:
            size = f"{self._left_out_bytes / 1e6:,.0f} MB"
            words.append(f"larger than flatout reads: its last {size} were left out")
        return [Note(time_s=info.started_s, text=f"{self.path.name}: {text}") for text in words]

    def _count_damage(self, why: str) -> None:
        self._damaged += 1
        self._first_damage = self._first_damage or f"line {self._number}: {why}"

    def _read(self) -> Iterator[bytes]:
        """Its lines, as long as there is room in memory."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode) and not self.path.is_dir():
                # Reading a pipe would block.
                raise TraceError(f"cannot read {self.path}: it is not a file")
            with self.path.open("rb") as file:
                while line := file.readline(LONGEST_LINE):
                    self._number += 1
                    whole = len(line) < LONGEST_LINE or line.endswith(b"\n")
                    self.taken += len(line) + self._a_value * sum(map(line.count, _VALUES)) * whole
                    if not whole:
                        self._count_damage(f"longer than {LONGEST_LINE / 1e6:g} MB")
                        self._skip_the_rest_of_a_line(file)
                    if self.taken > self._room:
                        self._left_out_bytes = _size(self.path) - file.tell() + len(line)
                        return
                    if whole:
                        yield line
        except OSError as problem:
            raise TraceError(f"cannot read {self.path}: {problem.strerror}") from None

    def _skip_the_rest_of_a_line(self, file: BinaryIO) -> None:
        while (part := file.readline(LONGEST_LINE)) and not part.endswith(b"\n") and self.taken <= self._room:
            self.taken += len(part)


def _replaced_by(record: Record) -> object:
    """What a later record that replaces this one has in common with it; None where none does."""
    if isinstance(record, WorkerReport):
        return record.pid, record.born_s
    if isinstance(record, Stacks):
        return record.pid, record.dataset
    if isinstance(record, ExactLines):
        return ExactLines, record.in_workers
    return type(record) if isinstance(record, FactsRecord | Xray | End) else None


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8", "replace"), parse_constant=_refused)
        if _UNSAFE.search(line):
            data = _printable(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    return data


def _printable(data: Any) -> Any:
    """The same, with text that is safe to show in a terminal."""
    if isinstance(data, dict):
        return {_printable(key): _printable(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_printable(item) for item in data]
    if isinstance(data, str):
        return printable(data.encode("utf-8", "replace").decode())
    return data


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


# -- JSON → records, every value checked: a crash, a bad disk or a person may have changed it
#
# A value of the wrong type, one that is not finite or far too large raises a ValueError that names
# it. Unknown keys are ignored. Bad values of facts, which come from people's scripts, are left out.

Check = Callable[[Any], Any]  # returns the value for the record

_MOST = 1e18  # bytes, milliseconds, counts: more than any run has
_MOST_SECONDS = 1e11  # three thousand years: a calendar can still show them
_MOST_ANY = 1e150  # its square is still a number
# Rounding may take a value that should not be negative below zero.
_SLIGHTLY_NEGATIVE = -1.0
_DEEPEST = 100
# A bad value in one of these is left out; the others are kept.
_LENIENT = frozenset(
    {Facts, LoaderFacts, SettingsRead, AppliedChange, GradientExchange, ParallelFacts, ProcessGroup, OwnCost}
)


def from_json(kind: Callable[..., T], data: Any) -> T:
    """A record of class `kind` from parsed JSON."""
    if type(data) is not dict:
        raise ValueError(f"an object is expected, not {_shown(data)}")
    checks, needed = _checks(kind)
    values = {}
    for name, item in data.items():
        if name not in checks:
            continue
        try:
            values[name] = checks[name](item)
        except ValueError as problem:
            if kind not in _LENIENT:
                raise ValueError(f"{name}: {problem}") from None
    if missing := needed - values.keys():
        raise ValueError(f"{min(missing)} is missing")
    return kind(**values)


@functools.cache
def _checks(kind: Callable[..., Any]) -> tuple[dict[str, Check], frozenset[str]]:
    """How to check each field of a class, and the names of those it needs. Computed once a class."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(typing.cast("type[Any]", kind))
    none = dataclasses.MISSING
    needed = frozenset(f.name for f in fields if f.default is none and f.default_factory is none)
    checks = {f.name: _check(hints[f.name], f.name) for f in fields}
    return checks, needed


def _check(hint: Any, name: str) -> Check:
    arms, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        there = _check(next(arm for arm in arms if arm is not type(None)), name)
        return lambda item: None if item is None else there(item)
    if hint is Any:
        return _plain
    if hint in (str, bool):
        return functools.partial(_of_type, hint)
    if hint is int:
        # The set-up is step -1.
        return functools.partial(_whole, -1 if name == "index" else 0)
    if hint is float:
        return functools.partial(_number, *_limits(name))
    if hint is Sketch:
        return functools.partial(_sketch, *_limits(name))
    if dataclasses.is_dataclass(hint):
        return functools.partial(from_json, typing.cast("type[Any]", hint))
    if origin is dict:
        return functools.partial(_values, _check(arms[1], name))
    if arms[-1] is Ellipsis:
        return functools.partial(_items, _check(arms[0], name), arms[0] in _LENIENT)
    return functools.partial(_row, tuple(_check(arm, name) for arm in arms))


def _limits(name: str) -> tuple[float, float]:
    """The least and the largest value of a number of this name."""
    if name in ("loss", "temperature_c"):
        return -_MOST_ANY, _MOST_ANY
    seconds = name.endswith("_s") and not name.endswith(("bytes_s", "switches_s"))
    return _SLIGHTLY_NEGATIVE, _MOST_SECONDS if seconds else _MOST


def _of_type(kind: type, item: Any) -> Any:
    if type(item) is not kind:
        raise ValueError(f"{'text' if kind is str else 'true or false'} is expected, not {_shown(item)}")
    return item


def _whole(least: int, item: Any) -> Any:
    if type(item) is not int or not least <= item <= _MOST:
        raise ValueError(f"a whole number is expected, not {_shown(item)}")
    return item


def _number(least: float, most: float, item: Any) -> Any:
    # NaN is not between anything.
    if type(item) not in (float, int) or not least <= item <= most:
        raise ValueError(f"a number is expected, not {_shown(item)}")
    return item


def _sketch(least: float, most: float, item: Any) -> Sketch:
    sketch = Sketch.from_json(item)
    if sketch.count:
        _number(least, most, sketch.low)
        _number(least, most, sketch.high)
    return sketch


def _values(check: Check, item: Any) -> dict[str, Any]:
    if type(item) is not dict:
        raise ValueError(f"an object is expected, not {_shown(item)}")
    return {key: check(value) for key, value in item.items()}


def _items(check: Check, lenient: bool, item: Any) -> tuple[Any, ...]:
    """The items, which must all pass the check, or those that do."""
    if type(item) is not list:
        raise ValueError(f"a list is expected, not {_shown(item)}")
    if not lenient:
        return tuple([check(one) for one in item])
    good = []
    for one in item:
        with contextlib.suppress(ValueError):
            good.append(check(one))
    return tuple(good)


def _row(checks: tuple[Check, ...], item: Any) -> tuple[Any, ...]:
    if type(item) is not list or len(item) != len(checks):
        raise ValueError(f"a list of {len(checks)} is expected, not {_shown(item)}")
    return tuple([check(one) for check, one in zip(checks, item, strict=True)])


def _plain(item: Any, depth: int = 0) -> Any:
    """Any JSON whose numbers are finite and that is not nested too deeply."""
    if depth > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    if isinstance(item, dict):
        return {key: _plain(value, depth + 1) for key, value in item.items()}
    if isinstance(item, list):
        return [_plain(value, depth + 1) for value in item]
    return item if item is None or isinstance(item, str | bool) else _number(-_MOST_ANY, _MOST_ANY, item)


def _shown(item: Any) -> str:
    if isinstance(item, dict | list):
        return "an object" if isinstance(item, dict) else "a list"
    text = repr(item) if not isinstance(item, int) or abs(item) < _MOST_ANY else "a number of many digits"
    return text if len(text) <= 40 else f"{text[:39]}…"
