"""Everything that parent and workers say to each other, and the recipe that both know.

parent ──► worker   Birth, NewSlot, OldSlot, Task, Cancel, NewEpoch        (the end of the wire: go)
worker ──► parent   for every Task one of Done, Failed, Skipped, Ended     (the end of the wire: died)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper

from flatout.feed.packing import Span
from flatout.feed.randomness import Key
from flatout.model.sizes import length_of


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every worker of a loader knows: how a list of indices becomes a batch."""

    dataset: Any = field(compare=False)  # who compares has to say how
    collate_fn: Callable[[Any], Any]
    iterable: bool
    auto_collation: bool
    drop_last: bool
    worker_init_fn: Callable[[int], None] | None
    batch_size: int | None
    declared: int  # the number of workers that user code is told
    numbered: bool  # as many workers as declared, and batches go round them; else they are interchangeable
    streams: bool  # of numbered workers: each has PyTorch's random stream, instead of seeds by position
    skip_bad: bool
    defer: bool = False  # what samples do to their pictures is noted, and done to whole batches on the card

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a loader that is made anew has in common with the one before it."""
        return type(self.dataset), length_of(self.dataset), self.batch_size, self.declared, self.defer

    @property
    def chunk(self) -> int:
        """Rows with random seeds of their own, the least that a worker is given: a quarter of a small batch, whose
        samples tend to be slow ones; seeding takes as long as some quick samples do."""
        return max(1, min(16, (self.batch_size or 64) // 4))


class StartWorker(NamedTuple):
    """First message to a worker; its board comes along. The last four let it go on where a dead one stopped."""

    number: int
    base_seed: int
    random_state: dict[str, Any] | None = None
    replay: int = 0
    checksum: int = 0
    data_state: Any = None


class NewEpoch(NamedTuple):
    """An iterable dataset starts from its beginning (persistent workers only)."""


class NewSlot(NamedTuple):
    """Memory to build batches in; its descriptor comes along."""

    slot: int


class DropSlot(NamedTuple):
    slot: int


class Task(NamedTuple):
    ticket: int
    key: Key
    batch: int
    first_row: int
    indices: Any  # of several batches: (number, indices) of each
    leave_out: frozenset[int] = frozenset()  # rows known to be bad
    slot: int | None = None
    regions: Sequence[tuple[int, int]] | None = None  # set: build only these rows of a batch that others build too
    several: bool = False


class Cancel(NamedTuple):
    ticket: int


class Done(NamedTuple):
    """A batch, or a part of one: what to unpack it from, what there is to learn from it, and what making it took."""

    ticket: int
    skeleton: Any  # bytes; of several batches a list, of bytes for each
    spans: list[Span]
    in_slot: bool
    needs: int
    regions: list[Span] | None
    misfit: bool
    bad: list[tuple[int, str]]
    drew: bool | None  # None: did not look this time
    rows: int
    ended_s: float  # by the clock that all processes share
    wall_s: float
    cpu_s: float
    run_delay_s: float
    random_state: dict[str, Any] | None = None
    data_state: Any = None
    checksum: int = 0
    fills: str | None = None  # what of the dataset samples fill, where that was seen


class Failed(NamedTuple):
    ticket: int
    error: ExceptionWrapper


class Skipped(NamedTuple):
    """A task that was not done: cancelled before it was begun, or several batches with something wrong in one."""

    ticket: int


class Ended(NamedTuple):
    """This worker's share of an iterable dataset is used up."""

    ticket: int
    random_state: dict[str, Any] | None


Message = StartWorker | NewEpoch | NewSlot | DropSlot | Task | Cancel | Done | Failed | Skipped | Ended
_KINDS: tuple[Any, ...] = (StartWorker, NewEpoch, NewSlot, DropSlot, Task, Cancel, Done, Failed, Skipped, Ended)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def plain(message: Message) -> tuple[Any, ...]:
    """A message as an ordinary tuple: its pickle is made and read three times as fast."""
    return (_NUMBERS[type(message)], *message)


def named(fields: tuple[Any, ...]) -> Any:
    """The message again."""
    return _KINDS[fields[0]](*fields[1:])
