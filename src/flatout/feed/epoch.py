"""One pass over the data: which batch comes next, and each batch that is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.feed import packing
from flatout.feed.channel import Span
from flatout.feed.randomness import Key


@dataclass(slots=True, kw_only=True)
class Epoch:
    """One pass. The sampler is asked no earlier than PyTorch would ask it, where that could be noticed."""

    key: Key
    indices: Iterator[Any]  # of one batch after the other
    ahead: int  # how many batches PyTorch would ask for before they are needed
    free_until: int = 0  # batches before this one may be asked for at any time: nobody can tell
    in_order: bool = True
    next_number: int = 0

    def limit(self, depth: int) -> int:
        """How many batches may be under way, where `depth` would be good to have."""
        return depth if self.next_number < self.free_until else self.ahead

    def next(self) -> Batch | None:
        """Ask the sampler for the next batch; None at the end."""
        for indices in self.indices:
            self.next_number += 1
            return Batch(self.next_number - 1, indices)
        return None


@dataclass(slots=True, eq=False)
class Batch:
    """One batch on its way, and what has become of it. `problem` is to be raised in its place."""

    number: int
    indices: Any
    leave_out: frozenset[int] = frozenset()  # rows known to be bad
    finished: bool = False
    dropped: bool = False  # nobody wants it any more
    given: int = 0  # to how many workers it is given right now
    deaths: dict[int, int] = field(default_factory=dict)  # row: workers that died over it
    bad: Sequence[tuple[int, str]] = ()
    data: Any = None  # of a batch made in this process
    packed: tuple[bytes, Sequence[Span], memoryview] | None = None  # of one that a worker has made
    problem: Any = None

    @property
    def clean(self) -> bool:
        """Whether it is just data: nothing left out, nothing to raise."""
        return self.problem is None and not self.bad and not self.leave_out

    @property
    def wanted(self) -> bool:
        """Whether it is still to be made."""
        return not self.dropped and not self.finished

    def fail(self, problem: Any) -> None:
        """There will be no data, only something to raise."""
        self.finished, self.problem = True, problem

    def open(self) -> Any:
        """The batch as the loop gets it."""
        if self.packed is None:
            return self.data
        return packing.unpack(*self.packed)

    def release(self) -> None:
        """Let go of its data and memory."""
        self.data = self.packed = self.problem = None
