"""What to change in a run, and what became of each change.

A `Plan` is a small YAML file that a person can read and edit; it travels into a process as JSON. A misspelt
key is refused with its place and the nearest right one, since a change that is silently left out would be
taken for made.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flatout.files import write_whole
from flatout.model.errors import UsageError
from flatout.model.inputs import LONGEST_KEY, did_you_mean, load_yaml, short, text_of

VERSION = 1
_OPTIONAL = ("note", "knob")
Safety = Literal["identical", "reseeded", "equivalent", "semantic"]
Verdict = Literal["kept", "undone", "unsafe", "not applicable"]

HEADER = """\
# What flatout changes in a training, a change an entry. Delete an entry to leave it out; edit a value freely.
# safety says what a change does to the result:
#   identical   the same batches and arithmetic, bit for bit
#   reseeded    the same samples in the same order; random augmentation draws other numbers
#   equivalent  the same mathematics, other rounding
#   semantic    changes what is learned
# Changes under `tried` are not made: they were tried and not kept, and why.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One reversible alteration of a run. `note` says in words why it is there.

    `knob` is where the script reads the value: `--batch-size`, `configs/train.yaml:train.batch_size`,
    `config.py:BATCH_SIZE`. The value is changed as it is read. Without a knob, objects are changed as they
    are built.
    """

    name: str
    value: Any
    safety: Safety
    note: str = ""
    knob: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured quantity: the median of `n` measurements, and how far they spread."""

    median: float
    spread: float
    n: int
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A change that was tried: before and after, what proves it harmless, and what was decided."""

    change: Change
    verdict: Verdict
    before: Figure | None = None
    after: Figure | None = None
    proof: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes to apply, in this order; and those that were tried and not kept, for the reader."""

    changes: tuple[Change, ...] = ()
    tried: tuple[Outcome, ...] = ()

    def save(self, path: Path) -> None:
        """Write it for people."""
        try:
            write_whole(path, self.text())
        except OSError as problem:
            raise UsageError(f"cannot write {path}: {problem.strerror}") from None

    def text(self) -> str:
        """As `save` writes it."""
        import yaml  # not above: a plan also travels into a Python that may lack it

        return HEADER + yaml.safe_dump(self._data(), sort_keys=False, allow_unicode=True, width=120)

    def json(self) -> str:
        """For programs, and for a Python without PyYAML; `load` reads it too."""
        return json.dumps(self._data())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan that `save` or a person has written."""
        return _plan(load_yaml(text_of(path), str(path)), str(path))

    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"plan": VERSION, "changes": [_entry(change) for change in self.changes]}
        if self.tried:
            data["tried"] = [
                {**_entry(dataclasses.replace(o.change, note="")), "verdict": o.verdict, "why": o.note}
                for o in self.tried
            ]
        return data


def _entry(change: Change) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(change).items() if v or k not in _OPTIONAL}


def _plan(data: Any, where: str) -> Plan:
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not a plan: it should begin with 'plan: {VERSION}' and 'changes:'")
    _check_keys(data, ("plan", "changes"), ("tried",), where)
    if data["plan"] != VERSION:
        raise UsageError(f"{where}: plan version {short(data['plan'])}, this flatout reads version {VERSION}")
    changes = tuple(_change(entry, place) for place, entry in _entries(data, "changes", where))
    names = [change.name for change in changes]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise UsageError(f"{where}: {twice} is changed more than once")
    tried = tuple(_tried(entry, place) for place, entry in _entries(data, "tried", where))
    return Plan(changes=changes, tried=tried)


def _entries(data: dict[str, Any], key: str, where: str) -> Iterator[tuple[str, Any]]:
    """Each entry of a list, and what to call it."""
    entries = data.get(key) or []
    if not isinstance(entries, list):
        raise UsageError(f"{where}: {key} must be a list, each entry beginning with '- name:'")
    return ((f"{where}: {key.removesuffix('s')} {number}", entry) for number, entry in enumerate(entries, 1))


def _change(entry: Any, where: str, more: tuple[str, ...] = ()) -> Change:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} must have a name, a value and a safety (got {short(entry)})")
    _check_keys(entry, ("name", "value", "safety"), (*_OPTIONAL, *more), where)
    name = entry["name"]
    if not isinstance(name, str) or len(name) > LONGEST_KEY:
        raise UsageError(f"{where}: name must be text of at most {LONGEST_KEY} letters (got {short(name)})")
    safety = _one_of(Safety, entry, "safety", f"{where} ({name})")
    words = {key: str(entry.get(key) or "") for key in _OPTIONAL}
    return Change(name=name, value=entry["value"], safety=safety, **words)


def _tried(entry: Any, where: str) -> Outcome:
    change = _change(entry, where, ("verdict", "why"))
    verdict = _one_of(Verdict, entry, "verdict", where)
    return Outcome(change=change, verdict=verdict, note=str(entry.get("why") or ""))


def _one_of(words: Any, entry: dict[str, Any], key: str, where: str) -> Any:
    known = get_args(words)
    if entry.get(key) not in known:
        raise UsageError(f"{where}: {key} must be one of {', '.join(known)} (got {short(entry.get(key))})")
    return entry[key]


def _check_keys(data: dict[Any, Any], needed: tuple[str, ...], other: tuple[str, ...], where: str) -> None:
    known = [*needed, *other]
    for key in data:
        if key not in known:
            raise UsageError(f"{where}: unknown key {short(key)} ({did_you_mean(str(key), known)})")
    missing = next((key for key in needed if key not in data), None)
    if missing is not None:
        raise UsageError(f"{where}: {missing!r} is missing")
