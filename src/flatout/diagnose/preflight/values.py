"""A value as far as it is known without running anything, and where it was said.

Unknown is contagious and never guessed at. `Table` is whatever answers to names: a dict, a namespace of arguments, a
config file, a class of settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class Value:
    """`what` it is, `where` (file:line) that was said, and the `knob` to turn: `--flag`, `key`, or `NAME =`."""

    what: Any = UNKNOWN
    where: str | None = None
    knob: str | None = None

    @property
    def known(self) -> bool:
        """Whether it can be told without running."""
        return self.what is not UNKNOWN

    def is_number(self) -> bool:
        """Whether it is known to be an int or a float."""
        return isinstance(self.what, int | float) and not isinstance(self.what, bool)

    def turned_to(self, name: str, new: object) -> str:
        """How a person sets it to something else, in the words of the place where it is set."""
        if self.knob is None:
            return f"{name}={new}"
        if self.knob.endswith(" ="):
            return f"{self.knob} {new!r}"
        if not self.knob.startswith("--"):
            return f"{self.knob}: {_in_yaml(new)}"
        if isinstance(new, bool):
            return self.knob if new else f"without {self.knob}"
        return f"{self.knob} {new}"


@dataclass(frozen=True, slots=True)
class Device:
    """A torch.device; of it only the type matters here."""

    type: str


@dataclass(slots=True, eq=False)
class Table:
    """Names and their values. What is not in a `complete` one is known not to be there."""

    entries: dict[str, Value] = field(default_factory=dict)
    complete: bool = True

    def get(self, name: str) -> Value | None:
        """The value of a name: exactly so, or spelled with other case or dashes."""
        return self.entries.get(name) or next((v for k, v in self.entries.items() if folded(k) == folded(name)), None)

    def leaves(self, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Value]]:
        """Every value that is no table itself, with the names that lead to it."""
        for name, value in self.entries.items():
            if isinstance(value.what, Table):
                yield from value.what.leaves((*path, name))
            else:
                yield (*path, name), value


def folded(name: str) -> str:
    """A name without what people spell differently."""
    return re.sub(r"[-_ .]", "", name).lower()


def merged(values: Iterable[Value]) -> Value:
    """What all of them agree on, else unknown."""
    found = list(values)
    if not found or not all(value.known for value in found):
        return Value()
    first = found[0]
    same = all(type(value.what) is type(first.what) and value.what == first.what for value in found[1:])
    return first if same else Value()


def _in_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
