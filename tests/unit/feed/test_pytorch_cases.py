"""What PyTorch's own tests of its DataLoader cover, put to ours."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feed_samples import Things, same
from torch.utils.data import ConcatDataset, IterableDataset, MapDataPipe, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from flatout.feed import DataLoader, feed_of, iterator_for

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WRONG: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1, "num_workers": 1},
    {"shuffle": True, "sampler": range(3), "num_workers": 1},
    {"batch_sampler": [[0]], "batch_size": 2, "num_workers": 1},
    {"batch_sampler": [[0]], "drop_last": True, "num_workers": 1},
    {"batch_size": None, "drop_last": True, "num_workers": 1},
    {"batch_size": 0, "num_workers": 1},
    {"num_workers": 0, "prefetch_factor": 2},
    {"num_workers": 0, "persistent_workers": True},
    {"num_workers": 0, "multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "no such thing"},
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: "+".join(arguments))
def test_wrong_arguments_get_pytorchs_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as expected:  # noqa: PT011
        TorchLoader(Things(4), **arguments)
    with pytest.raises(ValueError) as found:  # noqa: PT011
        DataLoader(Things(4), **arguments)
    assert str(found.value) == str(expected.value)


def test_attributes_that_pytorch_protects_are_protected() -> None:
    loader = DataLoader(Things(4), 2, num_workers=1)
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 3


@pytest.mark.parametrize("dataset", [
    TensorDataset(torch.arange(20), torch.arange(20) * 2),
    Subset(Things(40), range(3, 30, 3)),
    ConcatDataset([Things(5), Things(6)]),
    list(range(11)),
    np.arange(12.0).reshape(6, 2),
], ids=["tensors", "subset", "concatenated", "list", "array"])  # fmt: skip
def test_usual_datasets(dataset: Any) -> None:
    assert same(list(DataLoader(dataset, 4, num_workers=2)), list(TorchLoader(dataset, 4)))


class Bulk(Things):
    """Fetches a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.tensor(index), len(indices)) for index in indices]


def test_getitems_gets_the_whole_batch() -> None:
    assert same(list(DataLoader(Bulk(50), 20, num_workers=2)), list(TorchLoader(Bulk(50), 20, num_workers=1)))


class Own:
    """A batch type of the user's."""

    def __init__(self, samples: list[Any]) -> None:
        self.labels = torch.tensor([label for _, label in samples])
        self.pinned = False

    def pin_memory(self) -> Own:
        self.pinned = True
        return self


def test_a_batch_type_of_the_users_arrives() -> None:
    (batch,) = DataLoader(Things(4), 4, num_workers=1, collate_fn=Own)
    assert isinstance(batch, Own)
    assert batch.labels.tolist() == [0, 1, 2, 3]


def test_an_empty_dataset_has_no_batches() -> None:
    assert list(DataLoader(Things(0), 4, num_workers=1)) == []


def test_a_loader_in_any_order_gives_everything_once() -> None:
    found = torch.cat(list(DataLoader(Things(60, "scalar"), 4, num_workers=2, in_order=False)))
    assert sorted(found.tolist()) == list(range(60))


class Sized(IterableDataset[Any]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter(range(6))


def test_an_iterable_dataset_longer_than_it_says_is_warned_of() -> None:
    loader = DataLoader(Sized(), batch_size=None, num_workers=1)
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len(list(loader)) == 6


class LocalError(Exception):
    """Cannot be built from a message alone, like many."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class RaisesLocal(Things):
    def __getitem__(self, index: int) -> Any:
        raise LocalError(1, 2)


def test_an_exception_of_any_make_says_what_and_where() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Caught LocalError in DataLoader worker process 0.*1 and 2"):
        next(iter(DataLoader(RaisesLocal(4), 2, num_workers=1)))
    gc.collect()


class Threads(Things):
    def __getitem__(self, index: int) -> Any:
        square = np.ones((600, 600))
        square @ square  # enough for a BLAS that would use all cores
        torch.ones(600, 600) @ torch.ones(600, 600)
        return torch.get_num_threads(), len(list(Path("/proc/self/task").iterdir()))


def test_workers_have_one_thread() -> None:
    (batch,) = DataLoader(Threads(1), 1, num_workers=1)
    assert [int(part) for part in batch] == [1, 1]


class Policies(Things):
    def __getitem__(self, index: int) -> Any:
        return os.sched_getscheduler(0)


def test_workers_do_not_push_the_training_process_aside() -> None:
    assert next(iter(DataLoader(Policies(2), 2, num_workers=1))).tolist() == [os.SCHED_BATCH] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_tensors_of_a_batch_can_be_written_to_and_saved_alone(tmp_path: Any) -> None:
    """GIVEN a batch in a slot of many, THEN saving one tensor of it does not save the slot."""
    images, labels = next(iter(DataLoader(TensorDataset(torch.zeros(8, 1000), torch.arange(8)), 8, num_workers=1)))
    labels += 1
    torch.save(labels, tmp_path / "labels.pt")
    assert (tmp_path / "labels.pt").stat().st_size < 4000
    assert images.sum() == 0


class Pipe(MapDataPipe[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("dataset", "workers", "reason"), [
    (Things(10), 0, "num_workers=0"), (Pipe(), 1, "DataPipes share random seeds"),
], ids=["no workers", "datapipe"])  # fmt: skip
def test_pytorch_takes_over_where_it_has_to_and_the_log_says_why_once(
    dataset: Any, workers: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(dataset, 2, num_workers=workers)
    with caplog.at_level(logging.INFO, "flatout.feed"):
        assert same(list(loader), list(TorchLoader(dataset, 2)))
        list(loader)
    assert caplog.text.count(reason) == 1
    assert feed_of(loader) is None


def test_a_state_that_cannot_be_resumed_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Things(10), 2, num_workers=0)
    next(iter(loader))
    assert loader.state_dict()["yielded"] == 0
    assert "cannot resume in mid-epoch" in caplog.text


def in_a_daemon(reasons: Any) -> None:
    reasons.send(iterator_for(TorchLoader(Things(4), 2, num_workers=1))[1])


def test_a_daemonic_process_gets_pytorchs_loader() -> None:
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=in_a_daemon, args=(far,), daemon=True)
    process.start()
    assert near.recv() == "a daemonic process may have no workers"
    process.join()
