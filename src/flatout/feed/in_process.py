"""Batches made in the training process itself, by the rules that hold in a worker.

Where the consumer waits for batches that take less time to make than to hand over, no worker is of use. The batches
are the same: random numbers go by position here too, the main process's own stream is left as it was, and
`get_worker_info()` answers as in a worker.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind, default_collate
from torch.utils.data._utils import collate as stock_collate
from torch.utils.data._utils import worker as stock_worker

from flatout.feed import packing, randomness
from flatout.feed.messages import Recipe
from flatout.feed.randomness import Key
from flatout.feed.seeded_dataset import SeededDataset, renumbered, worker_info
from flatout.feed.table import Batch

_one_thread = threading.RLock()  # random generators and get_worker_info() belong to the whole process
AT_ONCE_S = 8e-3  # batches are made this long at a stretch: looking after the random numbers takes 45 µs


class InProcess:
    """Makes a loader's batches where they are used. `drew`: whether samples were seen to draw random numbers."""

    def __init__(self, recipe: Recipe, *, drew: bool) -> None:
        self._recipe = recipe
        self._info = worker_info(recipe)
        self._rows = SeededDataset(recipe, memoryview(bytearray(16)).cast("q"), self._collate)
        self._plain: Any = _DatasetKind.create_fetcher(
            _DatasetKind.Map, recipe.dataset, recipe.auto_collation, self._collate, recipe.drop_last
        )
        self._by_position = drew or recipe.skip_bad or bool(self._rows.private)
        self.at_once = 8  # as many as can be made at a stretch, by the last one

    def make(self, coming: deque[tuple[int, Any]], key: Key, made: deque[Any]) -> Batch | None:
        """Move the first of these batches to `made`, and those behind it as long as that takes no time to speak of.

        A batch that is more than its data (there is something to raise, or to count) comes last and is returned.
        """
        with _one_thread:
            batches, odd = self._make(coming, key)
        for _ in range(len(batches) + (odd is not None)):
            coming.popleft()
        made.extend(batches)
        # Indices pulled too early leave the caches. Without any left it was not time that ended the stretch.
        self.at_once = len(batches) * 5 // 4 + 1 if coming else max(self.at_once, min(64, 2 * len(batches)))
        return odd

    def _make(self, coming: deque[tuple[int, Any]], key: Key) -> tuple[list[Any], Batch | None]:
        if not self._by_position:
            before = randomness.whole_snapshot()
            batches, odd = self._stretch(coming, key, lambda _, indices: self._plain.fetch(indices))
            if before[:-1] == randomness.snapshot():
                return batches, odd
            self._by_position = True  # it draws after all: as if nothing had happened
            randomness.put_back(before)
        with randomness.untouched():
            return self._stretch(coming, key, lambda number, indices: self._rows.load(key, number, indices))

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
                except Exception:
                    where = f"in DataLoader worker process {self._info.id}"
                    return made, Batch.made_here(number, indices, problem=ExceptionWrapper(where=where))
                if self._rows.bad:
                    return made, Batch.made_here(number, indices, data=made.pop(), bad=self._rows.bad)
                if time.monotonic() > until:
                    break
        finally:
            stock_worker._worker_info = None
        return made, None

    def _collate(self, samples: Any) -> Any:
        collate, functions = self._recipe.collate_fn, stock_collate.default_collate_fn_map
        if collate is default_collate:
            with _no_worker():
                return collate(samples)
        stack = functions[torch.Tensor]
        if stack is packing._stock_tensor:  # where the script's own collate_fn ends in default_collate
            functions[torch.Tensor] = _stack_in_process
        try:
            return collate(samples)
        finally:
            functions[torch.Tensor] = stack


@contextlib.contextmanager
def _no_worker() -> Iterator[None]:
    """PyTorch's collation sees no worker, or it would stack into /dev/shm."""
    info, stock_worker._worker_info = stock_worker._worker_info, None
    try:
        yield
    finally:
        stock_worker._worker_info = info


def _stack_in_process(batch: Any, **options: Any) -> Any:
    with _no_worker():
        return packing._stock_tensor(batch, **options)
