"""One pass over the data: the indices of its batches, asked for no earlier than stock would where that shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flatout.feed.randomness import Key


@dataclass(slots=True, kw_only=True)
class Epoch:
    """One pass over the data."""

    key: Key
    indices: Iterator[Any]  # of one batch after the other
    ahead: int  # how many batches stock would pull before they are asked for
    free_until: int = 0  # batches before this one may be pulled as early as we like: nobody can tell
    in_order: bool = True
    next_number: int = 0
    exhausted: bool = False
    coming: deque[tuple[int, Any]] = field(default_factory=deque)  # numbers and indices pulled, and not begun yet

    def limit(self, depth: int) -> int:
        """How many batches are to be pulled and not handed out, where `depth` would be good to have."""
        return depth if self.next_number < self.free_until else self.ahead

    def pull_ahead(self, depth: int, under_way: int = 0) -> None:
        """Have as many coming as that, less those that are under way."""
        while under_way + len(self.coming) < self.limit(depth) and self.pull():
            pass

    def begin(self, most: int) -> list[tuple[int, Any]]:
        """The next batches, as many as `most`; none at the end."""
        while len(self.coming) < most and self.pull():
            pass
        return [self.coming.popleft() for _ in range(min(most, len(self.coming)))]

    def free(self) -> int:
        """How many of the next batches may come out at any time: handing out a later one has the last one pulled."""
        return self.free_until - self.ahead - (self.coming[0][0] if self.coming else self.next_number)

    def pull(self) -> bool:
        """Ask for the next batch's indices; False at the end."""
        if not self.exhausted:
            try:
                self.coming.append((self.next_number, next(self.indices)))
                self.next_number += 1
                return True
            except StopIteration:
                self.exhausted = True
        return False
