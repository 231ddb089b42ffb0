"""Whether each change of the plan was made, how and where; or why not. Standard library only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from flatout.model.records import AppliedChange
from flatout.redact import redact_setting, redact_text

if TYPE_CHECKING:
    from flatout.model.plan import Change

KNOBS = "FLATOUT_KNOBS"  # tells the processes that this one starts which values were changed as they were read
T = TypeVar("T")


class Ledger:
    """The changes to make in this process, and an entry for each."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self.changes = {change.name: change for change in changes}
        self._made: dict[str, str] = json.loads(os.environ.get(KNOBS, "{}"))  # how
        self._places: dict[str, list[str]] = {}
        self._refused: dict[str, str] = {}  # why
        self._off: set[str] = set()

    def wanted(self, name: str) -> Change | None:
        """The change to make in this process; None where it is not in the plan, made by a knob, or off."""
        change = self.changes.get(name)
        if change is None or change.knob or name in self._off:
            return None
        return change

    def made(self, name: str, how: str, where: str | None = None) -> None:
        """It has been made; how it was the first time counts."""
        self._made.setdefault(name, redact_text(how))
        places = self._places.setdefault(name, [])
        if where is not None and where not in places:
            places.append(where)

    def made_otherwise(self, name: str, how: str) -> None:
        """It is made in another way than first said."""
        self._made[name] = how

    def made_by_knob(self, name: str, how: str) -> None:
        """It was made when the script read its setting; processes that this one starts will know."""
        self.made(name, how)
        told = json.loads(os.environ.get(KNOBS, "{}"))
        os.environ[KNOBS] = json.dumps({**told, name: redact_text(how)})

    def refused(self, name: str, why: str) -> None:
        """It cannot be made here. The first reason counts, unless it is made elsewhere."""
        self._refused.setdefault(name, redact_text(why))

    def failed(self, name: str, problem: BaseException, where: str | None = None) -> None:
        """It raised, perhaps `where` in the user's code: the change is off from now on."""
        why = f"{type(problem).__name__}: {problem}"
        self.withdraw(name, f"{why} at {where}" if where else why)

    def withdraw(self, name: str, why: str) -> None:
        """It should not have been made: it is off from now on."""
        if name in self._off:
            return
        self._off.add(name)
        self._made.pop(name, None)
        self._places.pop(name, None)
        self._refused[name] = redact_text(why)
        print(f"flatout: {name} is switched off ({self._refused[name]}); training goes on", file=sys.stderr)

    def attempt(self, name: str, function: Callable[..., T], *args: Any) -> T | None:
        """Call something of ours; what it raises ends that change, not the run."""
        try:
            return function(*args)
        except Exception as problem:
            self.failed(name, problem)
            return None

    def entries(self) -> tuple[AppliedChange, ...]:
        """For the trace: one entry a change, in the plan's order."""
        return tuple(map(self.entry, self.changes.values()))

    def entry(self, change: Change) -> AppliedChange:
        """Whether a change was made, how and where; or why not."""
        how, places = self._made.get(change.name), self._places.get(change.name, [])
        no_occasion = f"the script did not read {change.knob}" if change.knob else "there was no occasion for it"
        return AppliedChange(
            name=change.name,
            value=redact_setting(change.knob, change.value),
            applied=how is not None,
            how=how or self._refused.get(change.name, no_occasion),
            where=next(iter(places), None),
            also=tuple(places[1:]),
        )


class LiveChange:
    """A change that may be switched between two steps, as often as one likes. It begins switched on."""

    name = ""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.value: Any = getattr(ledger.changes.get(self.name), "value", None)
        self.is_on = True

    def on(self) -> None:
        """Make the change, from the next step on."""
        self.is_on = True
        self.switched()

    def off(self) -> None:
        """Train from the next step on as if it had never been made."""
        self.is_on = False
        self.switched()

    def switched(self) -> None:
        """Bring what has been changed already in line with `is_on`."""

    @property
    def is_wanted(self) -> bool:
        """Whether the plan has it, and nothing has gone wrong with it."""
        return self.ledger.wanted(self.name) is not None

    def made(self, how: str, where: str | None = None) -> None:
        """It has been made."""
        self.ledger.made(self.name, how, where)

    def refused(self, why: str) -> None:
        """It cannot be made here."""
        self.ledger.refused(self.name, why)
