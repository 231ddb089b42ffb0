"""Random numbers by position, and coming back to a position."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feed_samples import Drawing, Things, same
from torch.utils.data import DataLoader as Stock
from torch.utils.data import DistributedSampler, IterableDataset

from flatout.feed import DataLoader, packing, to_device
from flatout.feed.fork_server import ContextStarter
from flatout.feed.loader import Auto
from flatout.feed.scheduler import BatchScheduler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def one_pass(loader: Any, seed: int = 4) -> list[Any]:
    torch.manual_seed(seed)
    return list(loader)


def feed(loader: DataLoader[Any]) -> BatchScheduler:
    assert loader.feed is not None
    return loader.feed


def test_draws_do_not_depend_on_the_number_of_workers() -> None:
    """... nor on whether a batch was divided among them."""
    expected = one_pass(DataLoader(Drawing(200), 40, shuffle=True, num_workers=1))
    assert same(one_pass(DataLoader(Drawing(200), 40, shuffle=True, num_workers=3)), expected)


class Slow(Drawing):
    """Takes long enough for a batch to be divided, and has a string in it."""

    def __getitem__(self, index: int) -> Any:
        import time

        time.sleep(0.002)
        return super().__getitem__(index), f"sample {index}", index


def test_a_divided_batch_is_the_batch() -> None:
    expected = one_pass(DataLoader(Slow(600), 40, shuffle=True, num_workers=1))
    divided = DataLoader(Slow(600), 40, shuffle=True, num_workers=Auto(1))
    torch.manual_seed(4)
    found = []
    for batch in divided:
        found.append(batch)
        feed(divided).resize(3)
    assert same(found, expected)
    assert feed(divided).account.parts > len(expected), "no batch was divided"
    images = found[-2][0]
    assert images.untyped_storage().nbytes() == images.numel() * images.element_size()


class Uneven(Things):
    """Some workers take up to twice as long as others."""

    def __getitem__(self, index: int) -> Any:
        import os
        import time

        time.sleep(0.0015 * (1 + os.getpid() % 3 / 2))
        return torch.zeros(3, 32, 32), index


def test_workers_that_differ_leave_divided_batches_in_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN workers of different speed and a consumer that waits for them, THEN they do not take each other's parts:
    the training process would have to put those batches together."""
    joined: list[int] = []
    copied = packing._copied
    monkeypatch.setattr(packing, "_copied", lambda pieces: joined.append(len(pieces)) or copied(pieces))
    loader = DataLoader(Uneven(128 * 200), 128, num_workers=Auto(16))
    for _ in loader:
        feed(loader).resize(16, hold=True)
    assert feed(loader).account.parts > 400, "hardly a batch was divided"
    assert len(joined) < 30
    second = iter(loader)
    next(second)
    assert feed(loader)._under_way() < 25, "a second pass begins with as many batches as if they were whole"


class WaitsForTheNext(Slow):
    """Sample 800 takes until all of the next batch were made."""

    def __init__(self, length: int, marks: Path) -> None:
        super().__init__(length)
        self.marks = marks

    def __getitem__(self, index: int) -> Any:
        import time

        if 880 <= index < 960:
            (self.marks / str(index)).touch()
        while index == 800 and len(list(self.marks.iterdir())) < 80:
            time.sleep(0.005)
        return super().__getitem__(index)


def test_a_slow_sample_does_not_hold_up_the_parts_behind_it(tmp_path: Path) -> None:
    """... of which its worker has some: without others taking them over this test would not end."""
    loader = DataLoader(WaitsForTheNext(1600, tmp_path), 80, num_workers=Auto(3), timeout=20)
    indices = []
    for _, _, index in loader:
        feed(loader).resize(3, hold=True)
        indices += index.tolist()
    assert indices == list(range(1600))
    assert feed(loader).account.parts > 30, "hardly a batch was divided"


def test_slots_go_round() -> None:
    """GIVEN batches that are divided and dropped, THEN a hundred of them need no more slots than are under way."""
    loader = DataLoader(Slow(4000), 40, num_workers=Auto(3))
    for _ in loader:
        pass
    assert feed(loader).account.parts > 100
    assert len(list(feed(loader).slots)) < 24


def test_only_the_first_batch_of_a_worker_travels_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """... because nobody knows yet how large a slot has to be."""
    travelled: list[int] = []
    map_file = packing.map_file
    monkeypatch.setattr(packing, "map_file", lambda file, **how: travelled.append(file) or map_file(file, **how))
    for _ in DataLoader(Slow(400), 8, num_workers=Auto(2)):
        pass
    assert 1 <= len(travelled) <= 2


def test_epochs_draw_different_numbers_and_a_seed_brings_them_back() -> None:
    loader = DataLoader(Drawing(20), 4, num_workers=2, persistent_workers=True)
    torch.manual_seed(1)
    first, second = list(loader), list(loader)
    assert not same(first, second)
    again = DataLoader(Drawing(20), 4, num_workers=1, persistent_workers=True)
    torch.manual_seed(1)
    assert same([list(again), list(again)], [first, second])


def test_it_is_seen_whether_a_dataset_draws() -> None:
    plain, drawing = DataLoader(Things(40), 4, num_workers=1), DataLoader(Drawing(40), 4, num_workers=1)
    list(plain)
    list(drawing)
    assert not feed(plain).account.drew
    assert feed(drawing).account.drew


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
    {"shuffle": True, "rng": "stock"},
    {"shuffle": True, "persistent_workers": True},
], ids=["shuffled", "own generator", "distributed", "stock streams", "persistent"])  # fmt: skip
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
    workers = 2 if arguments.get("rng") == "stock" else 1
    other = DataLoader(Drawing(60), 5, num_workers=workers, **arguments)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    mark = torch.get_rng_state()
    found = list(other)
    assert torch.equal(torch.get_rng_state(), mark)
    assert same(found, rest)
    assert rest


class Normal(Things):
    def __getitem__(self, index: int) -> Any:
        return np.random.randn()


@pytest.mark.parametrize("left_after", [1, 2])
def test_a_stream_resumes_between_two_normal_numbers(left_after: int) -> None:
    """They come in pairs, and taking the second one leaves the words of numpy's generator as they are."""
    loader = DataLoader(Normal(6), 1, num_workers=1, rng="stock")
    pass_ = iter(loader)
    for _ in range(left_after):
        next(pass_)
    state = loader.state_dict()
    other = DataLoader(Normal(6), 1, num_workers=1, rng="stock")
    other.load_state_dict(state)
    assert same(list(other), list(pass_))


class Stream(IterableDataset[Any]):
    """Workers of different length, drawing as they go."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for value in range(8 + 8 * info.id):
            yield torch.tensor([info.id, value]), torch.rand(())


@pytest.mark.parametrize("left_after", [1, 5, 9])
def test_an_iterable_dataset_resumes_too(left_after: int) -> None:
    loader = DataLoader(Stream(), 4, num_workers=3)
    pass_ = iter(loader)
    for _ in range(left_after):
        next(pass_)
    state = loader.state_dict()
    rest = list(pass_)
    other = DataLoader(Stream(), 4, num_workers=3)
    other.load_state_dict(state)
    assert same(list(other), rest)
    another = DataLoader(Stream(), 4, num_workers=2)
    another.load_state_dict(state)
    with pytest.raises(ValueError, match="saved with 3 numbered workers and cannot go on with 2"):
        iter(another)
    del another
    gc.collect()


class Keeper:
    """Counts on from where its state says; `name` is what only it can read."""

    def __init__(self, name: str) -> None:
        self.name, self.at = name, 0

    def state_dict(self) -> dict[str, int]:
        return {self.name: self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state[self.name]


class KeepsState(Keeper, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return KeepsStateToo(self)


class KeepsStateToo(Keeper):
    def __init__(self, dataset: KeepsState) -> None:
        super().__init__("iterator")
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> int:
        if self.dataset.at == 20:
            raise StopIteration
        self.dataset.at += 1
        return self.dataset.at


def test_a_state_goes_back_to_whom_it_is_from() -> None:
    """GIVEN a dataset and an iterator that both keep a state, THEN neither is given the other's."""
    loader = DataLoader(KeepsState("dataset"), 2, num_workers=1)
    pass_ = iter(loader)
    next(pass_)
    other = DataLoader(KeepsState("dataset"), 2, num_workers=1)
    other.load_state_dict(loader.state_dict())
    assert same(list(other), list(pass_))


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
    expected = [batch["image"].float() for batch in Stock(Things(8, "dict"), 4)]
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
    """GIVEN numbered workers, new ones for every pass, that are not forked."""
    loader = DataLoader(Things(8), 4, num_workers=1, worker_init_fn=_nothing, multiprocessing_context="spawn")
    for _ in range(4):
        assert len(list(loader)) == 2
    assert loader.feed is not None
    starter = loader.feed.crew._starter
    assert isinstance(starter, ContextStarter)
    assert len(starter._processes) <= 2


def _nothing(number: int) -> None:
    pass
