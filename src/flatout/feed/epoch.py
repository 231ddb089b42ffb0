"""One pass over the data: which batches come next, and each that is on its way."""

from __future__ import annotations

from collections import deque
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
    exhausted: bool = False
    pulled: deque[tuple[int, Any]] = field(default_factory=deque)  # numbers and indices that are not begun yet

    def limit(self, depth: int) -> int:
        """How many batches may be pulled and not handed out, where `depth` would be good to have."""
        return depth if self.next_number < self.free_until else self.ahead

    def pull_ahead(self, depth: int, under_way: int = 0) -> None:
        """Pull until there are as many as that, counting those that are under way."""
        while under_way + len(self.pulled) < self.limit(depth) and self.pull():
            pass

    def next(self) -> tuple[int, Any] | None:
        """Number and indices of the next batch; None at the end."""
        if self.pulled or self.pull():
            return self.pulled.popleft()
        return None

    def pull(self) -> bool:
        """Ask the sampler for the next batch's indices; False at the end."""
        if not self.exhausted:
            try:
                self.pulled.append((self.next_number, next(self.indices)))
                self.next_number += 1
                return True
            except StopIteration:
                self.exhausted = True
        return False


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
