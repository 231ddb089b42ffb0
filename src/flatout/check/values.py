"""A value as far as it is known without running anything, and where it was said. Unknown is contagious."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flatout.model.formatting import as_typed

UNKNOWN: Any = object()


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
        if not self.knob.startswith("-"):
            return f"{self.knob}: {as_typed(new)}"
        if isinstance(new, bool):
            return self.knob if new else f"without {self.knob}"
        return f"{self.knob} {new}"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A dict. What is not in a `complete` one is known not to be there."""

    entries: dict[str, Value] = field(default_factory=dict)
    complete: bool = True

    def plus(self, other: Value) -> Table:
        """This one updated with another, which may be unknown."""
        if not isinstance(other.what, Table):
            return Table(self.entries, False)
        return Table(self.entries | other.what.entries, self.complete and other.what.complete)


def merged(values: Iterable[Value]) -> Value:
    """What all of them agree on, else unknown."""
    found = list(values)
    if not found or not all(value.known for value in found):
        return Value()
    first = found[0]
    same = all(type(value.what) is type(first.what) and value.what == first.what for value in found[1:])
    return first if same else Value()
