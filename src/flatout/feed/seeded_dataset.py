"""The dataset as torch's own fetcher sees it, in a worker or (`here`) in the training process.

It stands between the two, so that all the rest of fetching is stock's (and whatever measures it there still does):
seeds the random generators where a chunk of rows begins, looks whether the chunk drew from them, notes on the board
which row is being loaded, and leaves bad ones out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as stock_worker

from flatout.feed import randomness
from flatout.feed.messages import Recipe

NOT_IN_A_ROW = -1
_LEFT_OUT = object()  # in place of a sample that is bad
_SLOW_S = 2e-3  # a chunk that takes this long does not notice the 20 µs of looking whether it drew
_LOOKS, _LOOK_EVERY = 16, 64  # of quick chunks: at the first ones, then at one in so many


class SeededDataset:
    """Batch by batch, the rows of a map-style dataset."""

    def __init__(self, recipe: Recipe, board: memoryview, collate: Callable[[Any], Any]) -> None:
        self._dataset = self.__wrapped__ = recipe.dataset  # the latter is for who measures: the user knows this one
        self._samples: Any = self._dataset
        self._recipe = recipe
        self._chunk = recipe.chunk
        self._board = board
        self._user_collate = collate
        self._fetcher: Any = _DatasetKind.create_fetcher(
            _DatasetKind.Map, self, recipe.auto_collation, self._collate, recipe.drop_last
        )
        self.private = randomness.generators_in(recipe.dataset) if not recipe.streams else []
        self._chunks = 0
        self._slow = False
        self._began = 0.0
        self._state: tuple[Any, ...] | None = None
        self._row = 0
        self._place: tuple[randomness.Key, int, int] = ((0, 0), 0, 0)
        self._leave_out: frozenset[int] = frozenset()
        self.bad: list[tuple[int, str]] = []
        self.drew: bool | None = None

    def defer(self) -> None:
        """Leave to the GPU what samples do to their pictures."""
        from flatout.feed.deferred.samples import LazySamples  # which takes Pillow

        self._samples = LazySamples(self._dataset)

    def load(
        self, key: randomness.Key, batch: int, indices: Any, first_row: int = 0, leave_out: frozenset[int] = frozenset()
    ) -> Any:
        """A batch, or its rows from `first_row` on, collated."""
        self._place = (key, batch, first_row)
        self._leave_out = leave_out
        self._row = 0
        self.bad, self.drew = [], None
        self._begin_chunk()
        return self._fetcher.fetch(indices)

    def _collate(self, samples: Any) -> Any:
        self._end_chunk()
        self._board[1] = NOT_IN_A_ROW
        if self._recipe.skip_bad and self._recipe.auto_collation:
            samples = [sample for sample in samples if sample is not _LEFT_OUT]
            if not samples:
                return None
        return self._user_collate(samples)

    # --- what the fetcher asks ------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        row = self._row
        if row and row % self._chunk == 0:
            self._end_chunk()
            self._begin_chunk()
        self._row = row + 1
        self._board[1] = row
        return self._unless_bad(row, index) if self._recipe.skip_bad else self._samples[index]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._dataset, name)
        if name == "__getitems__" and self._samples is not self._dataset:
            return self._samples.get_many
        return found

    def _unless_bad(self, row: int, index: Any) -> Any:
        if row in self._leave_out:
            return _LEFT_OUT
        try:
            return self._samples[index]
        except Exception as error:
            self.bad.append((row, f"{type(error).__name__}: {error}"))
            return _LEFT_OUT

    def _begin_chunk(self) -> None:
        if not self._recipe.streams:
            key, batch, first_row = self._place
            randomness.seed_chunk(key, batch, (first_row + self._row) // self._chunk, self.private)
            self._chunks += 1
            look = self._slow or self._chunks <= _LOOKS or self._chunks % _LOOK_EVERY == 0
            self._state = randomness.snapshot() if look else None
        self._began = time.perf_counter()

    def _end_chunk(self) -> None:
        self._slow = time.perf_counter() - self._began > _SLOW_S
        if self._state is not None:
            self.drew = bool(self.drew) or self._state != randomness.snapshot()
            self._state = None


def worker_info(recipe: Recipe) -> Any:
    """What `get_worker_info()` says, once it is `renumbered`."""
    return stock_worker.WorkerInfo(id=0, num_workers=recipe.declared, seed=0, dataset=recipe.dataset)


def renumbered(info: Any, number: int, base_seed: int) -> Any:
    """The same object, speaking for stock's worker of that number."""
    object.__setattr__(info, "id", number)
    object.__setattr__(info, "seed", base_seed + number)
    return info
