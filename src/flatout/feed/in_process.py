"""Batches made in the training process itself: the one exception to the road through workers.

It is taken where workers are of no use, in one of two ways. With `rng="position"` the batches are those
that workers would make: random numbers belong to the batch, the main process's own stream is left as it
was, and `get_worker_info()` answers as in a worker. With `rng="script"` they are those of `num_workers=0`:
made when they are asked for, one by one, with the script's own random numbers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind, default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from flatout.feed import packing, randomness
from flatout.feed.channel import Recipe
from flatout.feed.epoch import Batch
from flatout.feed.randomness import Key
from flatout.feed.seeded_dataset import SeededDataset, renumber, worker_info

_one_thread = threading.RLock()  # random generators and get_worker_info() belong to the whole process
_AT_ONCE_S = 8e-3  # batches are made this long at a stretch: looking after the random numbers takes 80 µs
Rng = Literal["position", "script"]


class InProcess:
    """Makes a loader's batches in the training process. `drew`: its samples draw random numbers."""

    def __init__(self, recipe: Recipe, rng: Rng, *, drew: bool = True) -> None:
        self.rng = rng
        self._recipe = recipe
        collate = recipe.collate_fn if rng == "script" else self._collate
        self._fetcher: Any = _DatasetKind.create_fetcher(
            _DatasetKind.Map, recipe.dataset, recipe.auto_collation, collate, recipe.drop_last
        )
        if rng == "position":
            self._info = worker_info(recipe)
            self._seeded = SeededDataset(recipe, memoryview(bytearray(16)).cast("q"), self._collate)
            self._seeds = drew or recipe.skip_bad or bool(self._seeded.private_generators)
        self.at_once = 8 if rng == "position" else 1  # as many as the next stretch may be

    def make(self, pulled: deque[tuple[int, Any]], key: Key) -> list[Batch]:
        """The first of these batches, and those behind it as long as that takes no time to speak of.

        A batch that is more than its data (there is something to raise, or to count) comes last.
        """
        if self.rng == "script":
            # Taken out first: if a sample raises, the loop may go on with the next batch.
            number, indices = pulled.popleft()
            return [Batch(number, indices, finished=True, data=self._fetcher.fetch(indices))]
        with _one_thread:
            batches = self._make_by_position(pulled, key)
        for _ in batches:
            pulled.popleft()
        if pulled:  # it was time that ended the stretch: indices pulled too early leave the caches
            self.at_once = len(batches) * 5 // 4 + 1
        else:
            self.at_once = max(self.at_once, min(64, 2 * len(batches)))
        return batches

    def _make_by_position(self, pulled: deque[tuple[int, Any]], key: Key) -> list[Batch]:
        if not self._seeds:
            before = randomness.snapshot()
            batches = self._stretch(pulled, key, lambda _, indices: self._fetcher.fetch(indices))
            if before == randomness.snapshot():
                return batches
            self._seeds = True  # it draws after all: as if nothing had happened
            randomness.put_back(before)
        with randomness.untouched():
            return self._stretch(pulled, key, lambda number, indices: self._seeded.load(key, number, indices))

    def _stretch(self, pulled: deque[tuple[int, Any]], key: Key, load: Callable[[int, Any], Any]) -> list[Batch]:
        batches: list[Batch] = []
        until = time.monotonic() + _AT_ONCE_S
        try:
            for number, indices in pulled:
                torch_worker._worker_info = renumber(self._info, number % self._recipe.declared, key[0])
                batch = Batch(number, indices, finished=True)
                batches.append(batch)
                try:
                    batch.data = load(number, indices)
                except Exception:
                    batch.problem = ExceptionWrapper(where=f"in DataLoader worker process {self._info.id}")
                batch.bad = self._seeded.bad
                if not batch.clean or time.monotonic() > until:
                    break
        finally:
            torch_worker._worker_info = None
        return batches

    def _collate(self, samples: Any) -> Any:
        collate, functions = self._recipe.collate_fn, torch_collate.default_collate_fn_map
        if collate is default_collate:
            with _without_worker_info():
                return collate(samples)
        stack = functions[torch.Tensor]
        if stack is packing.torch_stack:  # where the script's own collate_fn ends in default_collate
            functions[torch.Tensor] = _stack_in_process
        try:
            return collate(samples)
        finally:
            functions[torch.Tensor] = stack


@contextlib.contextmanager
def _without_worker_info() -> Iterator[None]:
    """PyTorch's collation sees no worker, or it would stack into /dev/shm."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _stack_in_process(batch: Any, **options: Any) -> Any:
    with _without_worker_info():
        return packing.torch_stack(batch, **options)
