"""Random numbers by position, and coming back to a position."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from feed_samples import Drawing, Things, same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from flatout.feed import DataLoader, packing, to_device
from flatout.feed.scheduler import Auto, BatchScheduler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def one_pass(loader: Any, seed: int = 4) -> list[Any]:
    torch.manual_seed(seed)
    return list(loader)


def feed(loader: DataLoader[Any]) -> BatchScheduler:
    assert loader.feed is not None
    return loader.feed


def test_draws_do_not_depend_on_the_number_of_workers() -> None:
    expected = one_pass(DataLoader(Drawing(200), 40, shuffle=True, num_workers=1))
    assert same(one_pass(DataLoader(Drawing(200), 40, shuffle=True, num_workers=3)), expected)


def test_slots_are_used_again() -> None:
    """GIVEN batches that are dropped, THEN a hundred of them need no more slots than are under way."""
    loader = DataLoader(Drawing(4000), 40, num_workers=Auto(3), persistent_workers=True)
    for _ in loader:
        pass
    assert len(list(feed(loader).slots)) < 16


def test_only_the_first_batch_of_a_worker_travels_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """... before it is known how large a slot has to be."""
    files: list[int] = []
    map_file = packing.map_file
    monkeypatch.setattr(packing, "map_file", lambda file, **how: files.append(file) or map_file(file, **how))
    for _ in DataLoader(Drawing(400), 8, num_workers=Auto(2), persistent_workers=True):
        pass
    assert 1 <= len(files) <= 2


def test_epochs_draw_different_numbers_and_a_seed_brings_them_back() -> None:
    loader = DataLoader(Drawing(20), 4, num_workers=2, persistent_workers=True)
    torch.manual_seed(1)
    first, second = list(loader), list(loader)
    assert not same(first, second)
    again = DataLoader(Drawing(20), 4, num_workers=1, persistent_workers=True)
    torch.manual_seed(1)
    assert same([list(again), list(again)], [first, second])


class OwnGenerator(Things):
    """Keeps its generators to itself, one of them inside a transform."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(0)
        self.transforms = [{"jitter": torch.Generator()}]

    def __getitem__(self, index: int) -> Any:
        return self.rng.random(), torch.rand((), generator=self.transforms[0]["jitter"])


def test_a_datasets_own_generators_go_by_position_too() -> None:
    expected = one_pass(DataLoader(OwnGenerator(120), 4, num_workers=1))
    assert same(one_pass(DataLoader(OwnGenerator(120), 4, num_workers=3)), expected)
    assert len({round(float(value), 9) for values, _ in expected for value in values}) == 120


@pytest.mark.parametrize("arguments", [
    {"shuffle": True},
    {"shuffle": True, "generator": torch.Generator()},
    {"sampler": DistributedSampler(range(60), num_replicas=2, rank=0)},
    {"shuffle": True, "persistent_workers": True},
], ids=["shuffled", "own generator", "distributed", "persistent"])  # fmt: skip
def test_resumes_in_mid_epoch(arguments: dict[str, Any]) -> None:
    """GIVEN a pass left after four batches, WHEN a new loader with another number of workers loads its state, THEN it
    gives the rest, and leaves the main process's random stream alone."""
    if "generator" in arguments:
        arguments["generator"].manual_seed(8)
    loader = DataLoader(Drawing(60), 5, num_workers=2, **arguments)
    torch.manual_seed(4)
    if arguments.get("persistent_workers"):
        list(loader)  # the state is that of the second pass
    before: list[Any] = []
    pass_ = iter(loader)
    for _ in range(4):
        before.append(next(pass_))
    saved = io.BytesIO()
    torch.save(loader.state_dict(), saved)
    rest = list(pass_)

    torch.manual_seed(99)
    other = DataLoader(Drawing(60), 5, num_workers=1, **arguments)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    mark = torch.get_rng_state()
    found = list(other)
    assert torch.equal(torch.get_rng_state(), mark)
    assert same(found, rest)
    assert rest


def test_after_the_end_there_is_nothing_to_resume() -> None:
    loader = DataLoader(Things(10, "scalar"), 5, num_workers=1)
    list(loader)
    other = DataLoader(Things(10, "scalar"), 5, num_workers=1)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 2


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(ValueError, match="not a state of this DataLoader"):
        DataLoader(Things(10)).load_state_dict({"epoch": 3})


def test_on_the_cpu_to_device_only_converts() -> None:
    loader = DataLoader(Things(8, "dict"), 4, num_workers=1)
    on_device = to_device(loader, "cpu", dtype=torch.float32, convert=lambda batch: batch["image"])
    assert len(on_device) == 2
    assert on_device.batch_size == 4
    expected = [batch["image"].float() for batch in TorchLoader(Things(8, "dict"), 4)]
    assert same(list(on_device), expected)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_was_used_goes_on_from_a_state(persistent: bool) -> None:
    loader = DataLoader(Things(40), 4, num_workers=2, persistent_workers=persistent)
    usual = list(loader)
    passing = iter(loader)
    for _ in range(3):
        next(passing)
    state = loader.state_dict()
    del passing
    loader.load_state_dict(state)
    assert same(list(loader), usual[3:])
    assert same(list(loader), usual)


def test_batches_that_were_fetched_and_not_used_are_not_lost_at_the_end_of_a_pass() -> None:
    loader = DataLoader(Things(40), 4, num_workers=2)
    usual = list(loader)
    state = loader.state_dict(behind=2)
    assert state["yielded"] == 8
    loader.load_state_dict(state)
    assert same(list(loader), usual[8:])
    assert loader.state_dict()["yielded"] == 0


def test_workers_that_have_ended_leave_nothing_behind() -> None:
    """GIVEN workers that are not forked, new ones for every pass."""
    loader = DataLoader(Things(8), 4, num_workers=1, multiprocessing_context="spawn")
    for _ in range(3):
        assert len(list(loader)) == 2
    assert loader.feed is not None
    assert len(loader.feed.pool._ending) <= 1
