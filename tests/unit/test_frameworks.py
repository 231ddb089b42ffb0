"""The table of frameworks agrees with the classes that are installed, and names nothing twice."""

from __future__ import annotations

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from flatout.engine.datasets import ChainedEpochs
from flatout.model.frameworks import (
    PURE_SAMPLERS,
    RUN_LOOPS,
    WRAPPING_SAMPLERS,
    framework_of,
)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def test_pytorchs_samplers_are_named_as_pytorch_names_them() -> None:
    known = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    assert {name_of(kind) for kind in known} <= PURE_SAMPLERS
    assert {name_of(BatchSampler), name_of(ChainedEpochs)} <= WRAPPING_SAMPLERS.keys()


def test_a_package_has_one_entry() -> None:
    assert len(RUN_LOOPS) == len(set(RUN_LOOPS))


def test_the_framework_is_the_one_that_calls_or_whose_loader_it_is() -> None:
    assert framework_of("torch.utils.data.dataloader", "/x/transformers/trainer.py".endswith) == "transformers"
    assert framework_of("accelerate.data_loader", "/x/transformers/trainer.py".endswith) == "transformers"
    assert framework_of("accelerate.data_loader", "train.py".endswith) == "accelerate"
    assert (
        framework_of("torch.utils.data.dataloader", "/x/lightning/pytorch/trainer/trainer.py".endswith) == "lightning"
    )
    assert framework_of("torch.utils.data.dataloader", "train.py".endswith) is None
