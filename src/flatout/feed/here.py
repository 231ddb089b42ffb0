"""Batches made in the training process itself, by the rules that hold in a worker.

Where the consumer waits for batches that take less time to make than to hand over, no worker is of use. The batches
are the same: random numbers go by position here too, the main process's own stream is left as it was, and
`get_worker_info()` answers as in a worker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as stock_worker

from flatout.feed import randomness
from flatout.feed.messages import Recipe
from flatout.feed.randomness import Key
from flatout.feed.rows import Rows, renumbered, worker_info
from flatout.feed.table import Batch

AT_ONCE_S = 8e-3  # batches are made this long at a stretch: looking after the random numbers takes 45 µs


class Here:
    """Makes a loader's batches where they are used. `drew`: whether samples were seen to draw random numbers."""

    def __init__(self, recipe: Recipe, *, drew: bool) -> None:
        self._recipe = recipe
        self._info = worker_info(recipe)
        self._rows = Rows(recipe, memoryview(bytearray(16)).cast("q"), self._collate)
        self._plain: Any = _DatasetKind.create_fetcher(
            _DatasetKind.Map, recipe.dataset, recipe.auto_collation, self._collate, recipe.drop_last
        )
        self._by_position = drew or recipe.skip_bad or bool(self._rows.private)
        self.at_once = 8  # as many as can be made at a stretch, by the last one

    def make(self, coming: deque[tuple[int, Any]], key: Key, made: deque[Any]) -> Batch | None:
        """Move the first of these batches to `made`, and those behind it as long as that takes no time to speak of.

        A batch that is more than its data (there is something to raise, or to count) comes last and is returned.
        """
        if not self._by_position:
            before = randomness.whole_snapshot()
            batches, odd = self._stretch(coming, key, lambda _, indices: self._plain.fetch(indices))
            if before[:-1] != randomness.snapshot():
                self._by_position = True  # it draws after all: as if nothing had happened
                randomness.put_back(before)
        if self._by_position:
            with randomness.untouched():
                batches, odd = self._stretch(coming, key, lambda number, indices: self._rows.load(key, number, indices))
        for _ in range(len(batches) + (odd is not None)):
            coming.popleft()
        made.extend(batches)
        # Indices pulled too early leave the caches. Without any left it was not time that ended the stretch.
        self.at_once = len(batches) * 5 // 4 + 1 if coming else max(self.at_once, min(64, 2 * len(batches)))
        return odd

    def _stretch(
        self, coming: deque[tuple[int, Any]], key: Key, load: Callable[[int, Any], Any]
    ) -> tuple[list[Any], Batch | None]:
        made: list[Any] = []
        until = time.monotonic() + AT_ONCE_S
        try:
            for number, indices in coming:
                stock_worker._worker_info = renumbered(self._info, number % self._recipe.declared, key[0])
                try:
                    made.append(load(number, indices))
                except Exception as problem:
                    return made, Batch.made_here(number, indices, problem=problem)
                if self._rows.bad:
                    return made, Batch.made_here(number, indices, data=made.pop(), bad=self._rows.bad)
                if time.monotonic() > until:
                    break
        finally:
            stock_worker._worker_info = None
        return made, None

    def _collate(self, samples: Any) -> Any:
        stock_worker._worker_info = None  # default_collate would see a worker, and stack into /dev/shm
        return self._recipe.collate_fn(samples)
