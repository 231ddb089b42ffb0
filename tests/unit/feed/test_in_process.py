"""Batches made in the training process: those that workers would have made, and nobody's random numbers touched."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from feed_samples import Drawing, Things, as_list, same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Sampler, get_worker_info

from flatout.feed import DataLoader, LoaderOptions, iterator_for, randomness
from flatout.feed import loader as loader_module
from flatout.feed.channel import Recipe
from flatout.feed.loader import feed_of
from flatout.feed.scheduler import Auto, BatchScheduler
from flatout.feed.worker import SeededDataset
from flatout.inside.loaders import Meter

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def feed(loader: DataLoader[Any]) -> BatchScheduler:
    assert loader.feed is not None
    return loader.feed


def one_pass(loader: TorchLoader[Any], workers_at: dict[int, int] | None = None) -> list[Any]:
    """All batches; before each of those numbers the workers become so many. Other code draws in between."""
    torch.manual_seed(4)
    found = []
    for number, batch in enumerate(loader):
        found.append((batch, torch.rand(()).item(), np.random.rand(), random.random()))
        if workers_at and number in workers_at:
            assert isinstance(loader, DataLoader)
            feed(loader).resize(workers_at[number], hold=True)
    return found


def random_state_set() -> None:
    random.seed(1)
    np.random.seed(1)


class LateDrawing(Things):
    """Draws from each of three generators, but not before sample 700: nobody has seen it draw by then."""

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()] if index >= 700 else [0.0] * 3
        return torch.tensor([index, *drawn], dtype=torch.float64)


class LateNormal(Things):
    """Draws normal numbers of numpy, which come in pairs: one of them is kept for the next time."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, np.random.randn() if index >= 700 else 0.0], dtype=torch.float64)


class OwnGenerator(Things):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return self.rng.random()


@pytest.mark.parametrize(
    "make", [Things, Drawing, LateDrawing, LateNormal, OwnGenerator], ids=lambda make: make.__name__
)
def test_batches_are_those_of_workers_and_the_main_stream_is_left_alone(make: Callable[[int], Things]) -> None:
    """GIVEN a pass that goes from workers to none and back, THEN every bit is as with workers throughout."""
    random_state_set()
    expected, drawn = one_pass(DataLoader(make(1000), 20, num_workers=2)), np.random.randn(3).tolist()
    random_state_set()
    loader = DataLoader(make(1000), 20, num_workers=Auto(2))
    found = one_pass(loader, {2: 0, 30: 2, 36: 0})
    assert same(found, expected)
    assert np.random.randn(3).tolist() == drawn
    assert feed(loader).account.made_by_workers < len(expected), "workers made all of them"
    assert feed(loader).workers == 0
    assert get_worker_info() is None


def test_a_snapshot_has_the_normal_number_that_numpy_keeps() -> None:
    random_state_set()
    np.random.randn()
    taken = randomness.capture()
    drawn = np.random.randn(3).tolist()
    assert not randomness.same_state(randomness.capture(), taken)
    randomness.restore(taken)
    assert randomness.same_state(randomness.capture(), taken)
    assert np.random.randn(3).tolist() == drawn


def test_numpy_may_draw_from_another_generator() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        taken = randomness.capture()
        drawn = np.random.randn(3).tolist()
        randomness.restore(taken)
        assert np.random.randn(3).tolist() == drawn
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("missing", ["pidfd_open", "schedstat"])
def test_what_a_sandboxed_kernel_lacks_is_done_without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def lacks(path: Any, *args: Any, **kwargs: Any) -> int:
        if missing == "pidfd_open" or path == "/proc/self/schedstat":
            raise OSError(38, "Function not implemented")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, missing if missing == "pidfd_open" else "open", lacks)
    loader_module._kernel_has_what_workers_need.cache_clear()
    try:
        data = DataLoader(Things(40), 4, num_workers=1)
        assert same(as_list(data), as_list(TorchLoader(Things(40), 4)))
        assert (feed_of(data) is None) == (missing == "pidfd_open")
    finally:
        loader_module._kernel_has_what_workers_need.cache_clear()


class Caching(Things):
    """Slow the first time, quick ever after."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            time.sleep(0.002)
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


def test_samples_that_fill_their_dataset_are_made_where_it_is() -> None:
    """A cache in every worker would be filled in every one of them."""
    reasons: list[str] = []
    data = Caching(800)
    loader = TorchLoader(data, 8, shuffle=True)
    iterator, _ = iterator_for(loader, LoaderOptions(workers="auto"), give_back=reasons.append)
    assert iterator is not None
    assert len(list(iterator)) == 100
    assert reasons[0].startswith("samples fill what they come from (Caching, cache)")
    filled = len(data.cache)
    assert filled > 600
    assert iterator_for(loader, LoaderOptions(workers="auto")) == (None, reasons[0])
    assert len(list(loader)) == 100
    assert len(data.cache) == 800


class Draws(Sampler[int]):
    """A sampler that draws from the main process's streams whenever it is asked."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(200):
            yield int(torch.randint(1000, ())) + int(np.random.randint(3)) + random.randrange(3)

    def __len__(self) -> int:
        return 200


def test_a_sampler_is_asked_when_pytorch_would_ask_it() -> None:
    """GIVEN a sampler and a loop that draw from the same streams, THEN workers or none, each gets PyTorch's numbers."""
    random_state_set()
    expected = one_pass(TorchLoader(Things(1010), 5, sampler=Draws(), num_workers=2, prefetch_factor=5))
    for workers_at in ({}, {0: 0}, {3: 0, 20: 2, 22: 0, 30: 1}):
        random_state_set()
        loader = DataLoader(Things(1010), 5, sampler=Draws(), num_workers=Auto(2), prefetch_factor=5)
        assert same(one_pass(loader, workers_at), expected)


def test_a_pass_that_is_over_stays_over() -> None:
    """... and takes nothing from the one that has begun since."""
    loader = without_workers(Things(12), 4)
    first = iter(loader)
    assert len(list(first)) == 3
    second = iter(loader)
    assert next(first, None) is None
    assert len(list(second)) == 3


def test_a_later_epoch_without_workers_is_pytorchs() -> None:
    torch.manual_seed(3)
    loader = TorchLoader(Things(100, "nested"), 8, shuffle=True, num_workers=2)
    expected = [list(loader), list(loader)]
    torch.manual_seed(3)
    loader = DataLoader(Things(100, "nested"), 8, shuffle=True, num_workers=Auto(2))
    first = list(loader)
    feed(loader).resize(0, hold=True)
    parts = feed(loader).account.made_by_workers
    assert same([first, list(loader)], expected)
    assert feed(loader).account.made_by_workers == parts, "workers made some of it"
    assert feed(loader).account.batches == 26


def without_workers(dataset: Any, batch_size: int, **arguments: Any) -> DataLoader[Any]:
    """A loader that has got rid of its workers in a first pass."""
    loader = DataLoader(dataset, batch_size, num_workers=Auto(1), **arguments)
    next(iter(loader))
    feed(loader).resize(0, hold=True)
    return loader


class Raising(Things):
    def __getitem__(self, index: int) -> Any:
        if index in (8, 9, 10, 11, 21):
            raise OSError("truncated")
        return index


def test_an_exception_is_raised_as_a_worker_would_and_the_pass_goes_on() -> None:
    loader = without_workers(Raising(24), 4)
    pass_ = iter(loader)
    assert [next(pass_).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match=r"^Caught OSError in DataLoader worker process 0\.\n(.|\n)*truncated"):
        next(pass_)
    assert next(pass_).tolist() == [12, 13, 14, 15]
    del pass_, loader
    gc.collect()


def test_samples_that_raise_can_be_skipped() -> None:
    loader = without_workers(Raising(24), 4, on_bad_sample="skip")
    feed(loader).account.bad.clear()
    found = [batch.tolist() for batch in loader]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19], [20, 22, 23]]
    assert [bad.index for bad in feed(loader).account.bad] == [8, 9, 10, 11, 21]


def test_a_pass_left_half_way_resumes_where_the_loop_was() -> None:
    """... not where the batches made ahead were."""
    expected = one_pass(DataLoader(Drawing(90), 3, shuffle=True, num_workers=2))
    loader = without_workers(Drawing(90), 3, shuffle=True)
    torch.manual_seed(4)
    pass_ = iter(loader)
    for _ in range(4):
        next(pass_)
        torch.rand(())
    state = loader.state_dict()
    assert state["yielded"] == 4
    del pass_
    assert len(list(loader)) == 30, "what was made ahead got into the next pass"
    other = DataLoader(Drawing(90), 3, shuffle=True, num_workers=1)
    other.load_state_dict(state)
    assert same(list(other), [batch for batch, *_ in expected[4:]])


def test_batches_of_the_training_process_need_no_shared_memory() -> None:
    loader = without_workers(Things(8), 4)
    for images, _ in loader:
        assert not images.is_shared()


def test_only_auto_does_without_workers() -> None:
    """... and not where workers have a meaning, keep an old dataset, or get theirs by pickle."""

    def may(loader: DataLoader[Any]) -> bool:
        next(iter(loader))
        return feed(loader)._tuning.may_do_without

    assert may(DataLoader(Things(8), 4, num_workers="auto"))
    assert not may(DataLoader(Things(8), 4, num_workers=1))
    assert not may(DataLoader(Things(8), 4, num_workers="auto", persistent_workers=True))
    assert not may(DataLoader(Things(8), 4, num_workers="auto", multiprocessing_context="spawn", collate_fn=as_list))


def test_batches_made_in_the_training_process_are_measured_under_the_name_of_the_dataset() -> None:
    """The diagnosis finds a loader's reports by it; what stands between, to seed rows, is nobody's dataset."""
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0))
    recipe = Recipe(
        dataset=dataset,
        collate_fn=torch.utils.data.default_collate,
        auto_collation=True,
        drop_last=False,
        declared=0,
        skip_bad=False,
    )
    meter = Meter(SeededDataset(recipe, memoryview(bytearray(16)).cast("q")), None, None)
    report = meter.report()
    assert (report.dataset, report.length) == ("TensorDataset", 6)


def tuned(loader: TorchLoader[Any], said: list[str] | None = None) -> Iterator[Any]:
    """A pass of a loader whose workers are as it declares, until they are told otherwise."""
    iterator, why_not = iterator_for(loader, LoaderOptions(workers="tuned"), give_back=(said or []).append)
    assert iterator is not None, why_not
    return iterator


def feed_behind(loader: TorchLoader[Any]) -> BatchScheduler:
    scheduler = feed_of(loader)
    assert scheduler is not None
    return scheduler


@pytest.mark.parametrize("declared", [0, 1, 3])
def test_workers_that_come_and_go_in_mid_pass_leave_every_batch_as_it_is(declared: int) -> None:
    torch.manual_seed(4)
    expected = list(TorchLoader(Things(400), 4, shuffle=True, num_workers=declared))
    torch.manual_seed(4)
    loader = TorchLoader(Things(400), 4, shuffle=True, num_workers=declared)
    found, made = [], []
    for number, batch in enumerate(tuned(loader)):
        found.append(batch)
        scheduler = feed_behind(loader)
        made.append(scheduler.account.made_by_workers)
        if number == 0:
            assert (scheduler.workers, len(scheduler.pool.working)) == (declared, declared)
        if number in (20, 50, 70):
            scheduler.resize({20: 2, 50: declared, 70: 4}[number], hold=number != 70)
    assert same(found, expected)
    assert made[-1] > 0
    assert (made[19] == 0) == (declared == 0)


class Sized(Things):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.size = 1

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.size,), index)


def test_a_loop_that_writes_to_its_dataset_is_noticed_when_workers_come_in_mid_pass() -> None:
    """GIVEN a size that the loop sets after every batch, THEN each batch has the one of its moment all the same."""
    data, said = Sized(200), ["this is not empty"]
    loader = TorchLoader(data, 4)
    for number, batch in enumerate(tuned(loader, said)):
        assert batch.shape == (4, number // 10 + 1)
        data.size = (number + 1) // 10 + 1
        if number == 24:
            feed_behind(loader).resize(2, hold=True)
    assert "the loop writes to what it reads (Sized, size)" in said[-1]
    assert feed_behind(loader).left_workers
