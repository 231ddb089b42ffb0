"""The table of tasks: every batch that is under way, cut into the parts that workers are given.

    Batch 41  indices …   Part rows 0–31   done (worker 3)
                          Part rows 32–63  with worker 1
    Batch 42  indices …   Part rows 0–63   waiting

The parent owns it. A part that a worker died over goes back to waiting; a part that two workers did counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._utils import ExceptionWrapper

from flatout.feed import packing
from flatout.feed.account import BadSample
from flatout.feed.messages import Done, StartWorker
from flatout.feed.packing import Bytes, Span
from flatout.feed.slots import Slot


@dataclass(slots=True, eq=False)
class Part:
    """Rows of a batch that one worker makes. `problem` is what there is to raise instead."""

    batch: Batch
    first_row: int
    indices: Any
    leave_out: frozenset[int] = frozenset()
    finished: bool = False
    bad: Sequence[tuple[int, str]] = ()
    data: Any = None  # of a part made in this process
    packed: tuple[Any, Sequence[Span], Bytes] | None = None  # of one that travelled
    problem: ExceptionWrapper | BadSample | Exception | None = None
    given: int = 0  # to how many workers it is given right now

    @property
    def clean(self) -> bool:
        """Whether it is just data: nothing left out, nothing to raise."""
        return self.problem is None and not self.bad and not self.leave_out

    def fail(self, problem: ExceptionWrapper | BadSample | Exception) -> None:
        """There will be no data, only something to raise."""
        self.finished, self.problem = True, problem

    def open(self) -> Any:
        """The rows as the user gets them."""
        if self.packed is None:
            return self.data
        return (packing.unpack_together if self.batch.several else packing.unpack)(*self.packed)


@dataclass(slots=True, eq=False)
class Batch:
    """One batch in the making, or (`several`) some that follow each other and travel together. `slot` is shared by its
    parts when it has more than one."""

    number: int
    indices: Any  # of several: number and indices of each
    post: int
    several: bool = False
    parts: list[Part] = field(default_factory=list)
    slot: Slot | None = None
    regions: Sequence[tuple[int, int]] | None = None  # of its slot, where each part writes its rows
    memory: Bytes | None = None
    after: StartWorker | None = None  # where its numbered worker has got to with it
    dropped: bool = False  # its epoch was left, or its worker had nothing more
    deaths: dict[int, int] = field(default_factory=dict)  # row: workers that died over it

    @classmethod
    def made_here(cls, number: int, indices: Any, **part: Any) -> Batch:
        """One that no worker had to do with."""
        batch = cls(number, indices, 0)
        batch.parts = [Part(batch, 0, indices, finished=True, **part)]
        return batch

    @classmethod
    def of(cls, batches: list[tuple[int, Any]], post: int) -> Batch:
        """These, by number and indices; in one part."""
        number, indices = batches[0]
        several = len(batches) > 1
        batch = cls(number, batches if several else indices, post, several)
        batch.parts = [Part(batch, 0, batch.indices)]
        return batch

    def each(self) -> list[tuple[int, Any]]:
        """Number and indices of every batch in it."""
        return self.indices if self.several else [(self.number, self.indices)]

    def __len__(self) -> int:
        return len(self.indices) if self.several else 1

    @property
    def finished(self) -> bool:
        return all(part.finished for part in self.parts)

    @property
    def clean(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].clean

    def problem(self) -> ExceptionWrapper | BadSample | Exception | None:
        """What went wrong in the earliest rows, if anything did."""
        return next((part.problem for part in self.parts if part.problem is not None), None)

    def open(self) -> Any:
        """The finished batch as the user gets it; of several a list."""
        if len(self.parts) == 1:
            return self.parts[0].open()
        memory = packing.empty() if self.memory is None else self.memory
        return packing.join([part.open() for part in self.parts], memory)

    def release(self) -> None:
        """Let go of it all: batch and parts refer to each other, and neither a slot nor anybody should have to wait
        until that is found."""
        self.memory = None
        for part in self.parts:
            part.data = part.packed = part.problem = None
        self.parts = []


@dataclass(slots=True)
class Layout:
    """Where the rows of every tensor of a batch lie in a slot, learned from one made whole."""

    rows: int
    regions: Sequence[tuple[int, int]]  # offset, bytes a row

    @classmethod
    def of(cls, done: Done, rows: int) -> Layout | None:
        if done.regions is None or done.misfit or rows == 0 or any(size % rows for _, size in done.regions):
            return None
        return cls(rows, [(offset, size // rows) for offset, size in done.regions])


def cut(batch: Batch, pieces: int, chunk: int) -> None:
    """Divide a batch among about `pieces` workers, at borders of chunks (those have the random seeds)."""
    rows = len(batch.indices) if pieces > 1 else 1
    chunks = -(-rows // chunk)
    if pieces <= 1 or chunks <= 1:
        batch.parts = [Part(batch, 0, batch.indices)]
        return
    step = -(-chunks // pieces) * chunk
    batch.parts = [Part(batch, start, batch.indices[start : start + step]) for start in range(0, rows, step)]
