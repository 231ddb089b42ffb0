"""Epoch after epoch as one pass: workers are at the next epoch's batches while the last ones of this one are used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler


class ChainedEpochs(BatchSampler):
    """The batches of all epochs, each in the order that its number gives the sampler; its length is one epoch's."""

    sampler: DistributedSampler[Any]

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, drop_last: bool, epochs: int) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.epochs = epochs
        self._first = 0

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass begin with this epoch."""
        self._first = epoch

    @property
    def in_all(self) -> int:
        """How many batches there are."""
        return self.epochs * len(self)

    @property
    def first(self) -> int:
        """The number of the batch that a pass begins with."""
        return self._first * len(self)

    def __iter__(self) -> Iterator[list[int]]:
        return self.beginning_at(self.first)

    def beginning_at(self, number: int) -> Iterator[list[int]]:
        """Those from this batch on, without making the epochs before it."""
        first, within = divmod(number, len(self))
        for epoch in range(first, self.epochs):
            self.sampler.set_epoch(epoch)
            yield from itertools.islice(super().__iter__(), within if epoch == first else 0, None)
