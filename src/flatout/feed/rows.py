"""The dataset as torch's own fetcher sees it inside a worker.

It stands between the two, so that all the rest of fetching is stock's (and whatever measures it there still does):
seeds the random generators where a chunk of rows begins, looks whether the chunk drew from them, notes on the board
which row is being loaded, times rows that take long, and leaves bad ones out.
"""

from __future__ import annotations

import time
from typing import Any

from flatout.feed import randomness
from flatout.feed.messages import Recipe, Task

__all__ = ["LEFT_OUT", "NOT_IN_A_ROW", "Rows"]

LEFT_OUT = object()  # in place of a sample that is bad
NOT_IN_A_ROW = -1
_SLOW_S = 2e-3  # a chunk that takes this long does not notice the 60 µs of looking whether it drew
_LOOKS, _LOOK_EVERY = 16, 64  # of quick chunks: at the first ones, then at one in so many


class Rows:
    """`task` by task, the rows of a map-style dataset."""

    def __init__(self, recipe: Recipe, board: memoryview) -> None:
        self._dataset = recipe.dataset
        self._seeded = not recipe.streams
        self._skip_bad = recipe.skip_bad
        self._board = board
        self._private = randomness.generators_in(recipe.dataset) if self._seeded else []
        self._chunks = 0
        self._slow = False
        self._began = 0.0
        self._state: tuple[Any, ...] | None = None
        self._row = 0
        self._task: Task | None = None
        self.bad: list[tuple[int, str]] = []
        self.drew: bool | None = None
        self.slowest: tuple[float, int] = (0.0, 0)

    def begin(self, task: Task) -> None:
        """What comes now are the rows of this task."""
        self._task = task
        self._row = 0
        self.bad, self.drew, self.slowest = [], None, (0.0, 0)
        self._begin_chunk()

    def end(self) -> None:
        """They have all been loaded."""
        self._end_chunk()
        self._board[1] = NOT_IN_A_ROW

    def __getitem__(self, index: Any) -> Any:
        row = self._row
        if row and row % randomness.CHUNK == 0:
            self._end_chunk()
            self._begin_chunk()
        self._row = row + 1
        self._board[1] = row
        if self._slow or self._skip_bad:
            return self._look_at(row, index)
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def _look_at(self, row: int, index: Any) -> Any:
        assert self._task is not None
        if row in self._task.leave_out:
            return LEFT_OUT
        began = time.perf_counter()
        try:
            return self._dataset[index]
        except Exception as error:
            if not self._skip_bad:
                raise
            self.bad.append((row, f"{type(error).__name__}: {error}"))
            return LEFT_OUT
        finally:
            self.slowest = max(self.slowest, (time.perf_counter() - began, row))

    def _begin_chunk(self) -> None:
        if self._seeded and self._task is not None:
            chunk = (self._task.first_row + self._row) // randomness.CHUNK
            randomness.seed_chunk(self._task.key, self._task.batch, chunk, self._private)
            self._chunks += 1
            look = self._slow or self._chunks <= _LOOKS or self._chunks % _LOOK_EVERY == 0
            self._state = randomness.snapshot() if look else None
        self._began = time.perf_counter()

    def _end_chunk(self) -> None:
        self._slow = time.perf_counter() - self._began > _SLOW_S
        if self._state is not None:
            self.drew = bool(self.drew) or not randomness.same(self._state, randomness.snapshot())
            self._state = None
