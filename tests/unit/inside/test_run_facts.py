"""What is taken down of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from flatout.inside.run_facts import loader_facts
from flatout.model.frameworks import PURE_SAMPLERS

DATA = TensorDataset(torch.arange(100))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(50))

    def __len__(self) -> int:
        return 40


class Unmeasured(Stream):
    def __len__(self) -> int:
        raise RuntimeError("nobody knows")


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"batch_size": 8}, 13),
        ({"batch_size": 8, "drop_last": True}, 12),
        ({"batch_size": 8, "sampler": SubsetRandomSampler(range(30))}, 4),
        ({"batch_sampler": BatchSampler(range(30), 7, drop_last=False)}, 5),
        ({"batch_size": None, "sampler": BatchSampler(range(30), 7, drop_last=False)}, 5),
        ({"batch_size": 8, "sampler": iter(range(30))}, None),
        ({"batch_size": 8, "sampler": Unmeasured()}, None),
    ],
    ids=["all", "drop_last", "a part", "batch_sampler", "batches as samples", "endless", "has no length"],
)
def test_how_many_batches_an_epoch_has(settings: dict[str, Any], batches: int | None) -> None:
    assert loader_facts(DataLoader(DATA, **settings)).batches == batches


@pytest.mark.filterwarnings("error")
def test_a_stream_is_not_asked_for_its_batches() -> None:
    """torch would then warn the person of a length that nobody but us had asked for."""
    loader = DataLoader(Stream(), batch_size=1)
    assert loader_facts(loader).batches is None
    assert len(list(loader)) == 50


class RandomSampler(SubsetRandomSampler):
    """Has the name of PyTorch's, and is the script's own."""


def test_a_sampler_is_noted_with_its_module() -> None:
    own = loader_facts(DataLoader(DATA, sampler=RandomSampler(range(30))))
    assert own.sampler == f"{__name__}.RandomSampler"
    pytorchs = loader_facts(DataLoader(DATA, shuffle=True))
    assert pytorchs.sampler in PURE_SAMPLERS
