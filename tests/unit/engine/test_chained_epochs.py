"""Epochs one after the other, as one pass."""

from __future__ import annotations

import itertools

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from flatout.engine.datasets import ChainedEpochs


def one_by_one(epochs: range, drop_last: bool) -> list[list[int]]:
    sampler = DistributedSampler(range(21), 1, 0, seed=3)
    batches = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        batches += list(BatchSampler(sampler, 4, drop_last))
    return batches


@pytest.mark.parametrize(("drop_last", "length"), [(True, 5), (False, 6)])
def test_all_epochs_in_the_order_of_each(drop_last: bool, length: int) -> None:
    batches = ChainedEpochs(DistributedSampler(range(21), 1, 0, seed=3), 4, drop_last, epochs=3)
    assert (len(batches), batches.in_all) == (length, 3 * length)
    assert list(batches) == one_by_one(range(3), drop_last)
    batches.set_epoch(1)
    assert (list(batches), batches.first) == (one_by_one(range(1, 3), drop_last), length)


@pytest.mark.parametrize("number", [0, 3, 6, 13, 18])
def test_a_pass_may_begin_anywhere(number: int) -> None:
    batches = ChainedEpochs(DistributedSampler(range(21), 1, 0, seed=3), 4, False, epochs=3)
    assert list(batches.beginning_at(number)) == list(itertools.islice(batches, number, None))
