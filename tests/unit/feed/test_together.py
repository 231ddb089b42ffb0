"""Quick batches travel together, from the second handful of a pass on; nobody can tell."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from feed_samples import SHAPES, Drawing, Things, padded, same
from torch.utils.data import DataLoader as Stock
from torch.utils.data import SequentialSampler

from flatout.feed import DataLoader
from flatout.feed.loader import Auto

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def _workers(number: int) -> dict[str, Any]:
    """So many that are interchangeable, and that stay however little time a batch takes."""
    return {"num_workers": Auto(number), "persistent_workers": True}


def side_by_side(batches: list[torch.Tensor]) -> int:
    """How many of these lie right behind the one before, as they do only when one task made both."""
    places = [(batch.data_ptr(), -(-batch.numel() * batch.element_size() // 64) * 64) for batch in batches]
    return sum(one + size == other for (one, size), (other, _) in itertools.pairwise(places))


def test_most_batches_of_a_pass_travel_together() -> None:
    found = list(DataLoader(Things(4000, "tensor"), 4, **_workers(2)))
    assert side_by_side(found) > 500
    assert torch.cat(found)[:, 0, 0].tolist() == list(range(4000))


@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_stocks_batches(shape: str) -> None:
    results = []
    for loader_class in (DataLoader, Stock):
        torch.manual_seed(3)
        results.append(list(loader_class(Things(250, shape), 1, shuffle=True, **_workers(1))))
    assert same(*results)


def test_batches_that_differ_in_size_are_stocks_too() -> None:
    ours, stock = (list(kind(Things(1200), 4, **_workers(2), collate_fn=padded)) for kind in (DataLoader, Stock))
    assert same(ours, stock)


def test_leaving_in_the_middle_leaves_the_generator_as_stock_does() -> None:
    """... wherever that is, and the next pass is stock's."""
    for stop in (0, 130, 196, 197, 198, 199):
        states = []
        for loader_class in (DataLoader, Stock):
            generator = torch.Generator().manual_seed(5)
            loader = loader_class(Things(800), 4, shuffle=True, **_workers(1), generator=generator)
            iterator = iter(loader)
            for _ in range(stop):
                next(iterator)
            del iterator
            states.append((generator.get_state(), list(loader)))
        assert same(*states), f"left after {stop} batches"


def test_draws_are_those_of_batches_that_travel_alone() -> None:
    """... as they do where the sampler is one that we do not know."""
    dataset = Drawing(1200)
    together, alone = (
        DataLoader(dataset, 4, sampler=kind(dataset), **_workers(2)) for kind in (SequentialSampler, Own)
    )
    results = []
    for loader in (together, alone):
        torch.manual_seed(6)
        results.append(list(loader))
    assert same(*results)
    assert [side_by_side(found) > 100 for found in results] == [True, False]


class Own(SequentialSampler):
    pass


class InOneBuffer:
    """A collate_fn that makes every batch in the same memory."""

    def __init__(self) -> None:
        self.buffer = np.zeros(4)

    def __call__(self, samples: list[int]) -> Any:
        self.buffer[:] = samples
        return self.buffer


def test_a_collate_fn_may_use_its_memory_again() -> None:
    found = list(DataLoader(Things(2000, "scalar"), 4, **_workers(1), collate_fn=InOneBuffer()))
    assert np.concatenate(found).tolist() == list(range(2000))
    found[300][:] = -1
    assert found[301].tolist() == [1204, 1205, 1206, 1207], "two batches share their memory"


class Broken(Things):
    def __getitem__(self, index: int) -> Any:
        if index == 901:
            raise OSError("truncated")
        return super().__getitem__(index)


def test_an_error_is_raised_in_its_place() -> None:
    loader = DataLoader(Broken(2000), 4, **_workers(2))
    found: list[int] = []
    with pytest.raises(OSError, match="truncated"):
        found.extend(row for _, index in loader for row in index.tolist())
    assert found == list(range(900))
    del loader
    gc.collect()


def test_a_bad_sample_is_left_out_of_its_batch_alone() -> None:
    loader = DataLoader(Broken(2000), 4, **_workers(2), on_bad_sample="skip")
    found = [index.tolist() for _, index in loader]
    assert found[225] == [900, 902, 903]
    assert [index for batch in found for index in batch] == [index for index in range(2000) if index != 901]
    assert loader.feed is not None
    assert [bad.index for bad in loader.feed.account.bad] == [901]
