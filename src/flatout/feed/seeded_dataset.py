"""The dataset as torch's fetcher sees it, in a worker or in the training process.

It stands between the two, so that all the rest of fetching is PyTorch's (and what measures it there still
does): seeds the random generators before each batch, notes on the board which row is being loaded, and
leaves bad ones out.

`InProcess` is the one exception to the road through workers: it makes their batches in the training process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from flatout.feed import randomness
from flatout.feed.channel import Recipe
from flatout.feed.epoch import Batch

NO_ROW = -1
_one_thread = threading.RLock()  # random generators belong to the whole process
_LEFT_OUT = object()  # in place of a sample that is bad


class SeededDataset:
    """Batch by batch, the rows of a map-style dataset."""

    def __init__(self, recipe: Recipe, board: memoryview, collate: Callable[[Any], Any]) -> None:
        self._dataset = self.__wrapped__ = recipe.dataset  # the latter is for measuring: the user knows this one
        self._samples: Any = self._dataset
        self._recipe = recipe
        self._board = board
        self._user_collate = collate
        self._fetcher: Any = _DatasetKind.create_fetcher(
            _DatasetKind.Map, self, recipe.auto_collation, self._collate, recipe.drop_last
        )
        self._generators = randomness.generators_in(recipe.dataset)
        self._row = 0
        self._leave_out: frozenset[int] = frozenset()
        self.bad: list[tuple[int, str]] = []

    def defer_transforms(self) -> None:
        """Leave to the GPU what samples do to their pictures."""
        from flatout.feed.deferred.samples import LazySamples  # which needs Pillow

        self._samples = LazySamples(self._dataset)

    def load(self, key: randomness.Key, batch: int, indices: Any, leave_out: frozenset[int] = frozenset()) -> Any:
        """A batch, collated."""
        self._leave_out = leave_out
        self._row = 0
        self.bad = []
        randomness.seed_batch(key, batch, self._generators)
        return self._fetcher.fetch(indices)

    def _collate(self, samples: Any) -> Any:
        self._board[1] = NO_ROW
        if self._recipe.skip_bad and self._recipe.auto_collation:
            samples = [sample for sample in samples if sample is not _LEFT_OUT]
            if not samples:
                return None
        return self._user_collate(samples)

    # --- what the fetcher asks for ---------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        row = self._row
        self._row = row + 1
        self._board[1] = row
        if self._recipe.skip_bad:
            return self._unless_bad(row, index)
        return self._samples[index]

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._dataset, name)
        if name == "__getitems__" and self._samples is not self._dataset:
            return self._samples.get_many
        return attribute

    def _unless_bad(self, row: int, index: Any) -> Any:
        if row in self._leave_out:
            return _LEFT_OUT
        try:
            return self._samples[index]
        except Exception as error:
            self.bad.append((row, f"{type(error).__name__}: {error}"))
            return _LEFT_OUT


def worker_info(recipe: Recipe) -> Any:
    """What `get_worker_info()` returns, once it is `renumbered`."""
    return torch_worker.WorkerInfo(id=0, num_workers=recipe.declared, seed=0, dataset=recipe.dataset)


def renumber(info: Any, number: int, base_seed: int) -> Any:
    """The same object, as PyTorch's worker of that number would have it."""
    object.__setattr__(info, "id", number)
    object.__setattr__(info, "seed", base_seed + number)
    return info


class InProcess:
    """Makes a loader's batches in the training process, each when the loop asks for it.

    Random numbers belong to the batch here too, and the main process's own stream is left as it was.
    `as_script`: what a sample raises is raised as it is, as without workers.
    """

    def __init__(self, recipe: Recipe, *, as_script: bool) -> None:
        self._recipe = recipe
        self._as_script = as_script
        self._dataset = SeededDataset(recipe, memoryview(bytearray(16)).cast("q"), recipe.collate_fn)

    def make(self, batch: Batch, key: randomness.Key) -> None:
        """Make this batch now."""
        try:
            with _one_thread, randomness.untouched():
                batch.data = self._dataset.load(key, batch.number, batch.indices, batch.leave_out)
        except Exception as error:
            worker = batch.number % self._recipe.declared  # the one that PyTorch would have asked
            where = f"in DataLoader worker process {worker}"
            batch.problem = error if self._as_script else ExceptionWrapper(where=where)
        batch.bad, batch.finished = self._dataset.bad, True
