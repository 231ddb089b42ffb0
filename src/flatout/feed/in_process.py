"""Batches made in the training process itself: the one exception to the road through workers.

They are those that workers would make: random numbers belong to the batch, and the main process's own
stream is left as it was. Each is made when the loop asks for it, with the dataset as it is then.
"""

from __future__ import annotations

import threading

from torch._utils import ExceptionWrapper

from flatout.feed import randomness
from flatout.feed.channel import Recipe
from flatout.feed.epoch import Batch
from flatout.feed.randomness import Key
from flatout.feed.seeded_dataset import SeededDataset

_one_thread = threading.RLock()  # random generators belong to the whole process


class InProcess:
    """Makes a loader's batches. `as_script`: what a sample raises is raised as it is, as without workers."""

    def __init__(self, recipe: Recipe, *, as_script: bool) -> None:
        self._recipe = recipe
        self._as_script = as_script
        self._dataset = SeededDataset(recipe, memoryview(bytearray(16)).cast("q"), recipe.collate_fn)

    def make(self, batch: Batch, key: Key) -> None:
        """Make this batch now."""
        try:
            with _one_thread, randomness.untouched():
                batch.data = self._dataset.load(key, batch.number, batch.indices, batch.leave_out)
        except Exception as error:
            worker = batch.number % self._recipe.declared  # the one that PyTorch would have asked
            where = f"in DataLoader worker process {worker}"
            batch.problem = error if self._as_script else ExceptionWrapper(where=where)
        batch.bad, batch.finished = self._dataset.bad, True
