"""The table of frameworks agrees with the classes that are installed, and names nothing twice."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from flatout.engine.datasets import ChainedEpochs
from flatout.inside import run_facts
from flatout.model.frameworks import (
    PURE_SAMPLERS,
    RUN_LOOPS,
    WRAPPING_SAMPLERS,
)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def test_pytorchs_samplers_are_named_as_pytorch_names_them() -> None:
    known = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    assert {name_of(kind) for kind in known} <= PURE_SAMPLERS
    assert {name_of(BatchSampler), name_of(ChainedEpochs)} <= WRAPPING_SAMPLERS.keys()


def test_a_package_has_one_entry() -> None:
    assert len(RUN_LOOPS) == len(set(RUN_LOOPS))


@pytest.mark.parametrize(
    ("caller", "loader_module", "framework"),
    [
        ("/x/transformers/trainer.py", "torch.utils.data.dataloader", "transformers"),
        ("/x/transformers/trainer.py", "accelerate.data_loader", "transformers"),
        ("train.py", "accelerate.data_loader", "accelerate"),
        ("/x/lightning/pytorch/trainer/trainer.py", "torch.utils.data.dataloader", "lightning"),
        ("train.py", "torch.utils.data.dataloader", None),
    ],
)
def test_the_framework_is_the_one_that_calls_or_whose_loader_it_is(
    caller: str, loader_module: str, framework: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_facts, "called_from", caller.endswith)
    assert run_facts.framework_of(loader_module) == framework
