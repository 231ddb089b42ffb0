"""Batches made in the training process itself, by the rules that hold in a worker.

Where the consumer waits for batches that take less time to make than to hand over, no worker is of use. The batches
are the same: random numbers go by position here too, the main process's own stream is left as it was, and
`get_worker_info()` answers as in a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as stock_worker

from flatout.feed import randomness
from flatout.feed.messages import Recipe
from flatout.feed.randomness import Key
from flatout.feed.rows import Rows, renumbered, worker_info
from flatout.feed.table import Batch, Part

__all__ = ["Here"]

AT_ONCE_S = 4e-3  # small batches are made this long at a stretch: looking after the random numbers takes 25 µs


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

    def make(self, batches: list[Batch], key: Key) -> None:
        """Make the first of these batches, and those behind it as long as that takes no time to speak of."""
        try:
            if not self._by_position:
                before = randomness.snapshot()
                self._make(batches, key, lambda part: self._plain.fetch(part.indices))
                if randomness.same(before, randomness.snapshot()):
                    return
                self._by_position = True  # it draws after all: as if nothing had happened
                randomness.put_back(before)
                for batch in batches:
                    batch.parts[0].finished, batch.parts[0].problem = False, None
            with randomness.untouched():
                self._make(batches, key, lambda part: self._load(part, key))
        finally:
            stock_worker._worker_info = None

    def _make(self, batches: list[Batch], key: Key, load: Callable[[Part], Any]) -> None:
        until = time.monotonic() + AT_ONCE_S
        for batch in batches:
            part = batch.parts[0]
            stock_worker._worker_info = renumbered(self._info, batch.number % self._recipe.declared, key[0])
            try:
                part.data = load(part)
                part.finished = True
            except Exception as problem:
                part.fail(problem)
            if time.monotonic() > until:
                return

    def _collate(self, samples: Any) -> Any:
        stock_worker._worker_info = None  # default_collate would see a worker, and stack into /dev/shm
        return self._recipe.collate_fn(samples)

    def _load(self, part: Part, key: Key) -> Any:
        data = self._rows.load(key, part.batch.number, part.indices, leave_out=part.leave_out)
        part.bad = self._rows.bad
        return data
