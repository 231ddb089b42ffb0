"""What scripts that were written for PyTorch's loader rely on, beside its batches."""

from __future__ import annotations

import errno
import functools
import gc
import inspect
import os
import pickle
import resource
import threading
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from feed_samples import Drawing, Things, as_list, same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, Subset, get_worker_info

from flatout.feed import DataLoader, LoaderOptions, channel, iterator_for
from flatout.feed.scheduler import Auto

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# --- how many workers -------------------------------------------------------------------------------------------------


def test_without_a_number_samples_are_loaded_in_the_training_process() -> None:
    """... and need not be picklable."""
    loader = DataLoader(Things(6), 2, collate_fn=lambda samples: (samples, lambda: None))
    assert loader.num_workers == 0
    assert len(list(loader)) == 3
    assert loader.feed is None


class MeetsOthers(Dataset[Any]):
    """No sample is ready before as many are begun as there are workers."""

    def __init__(self, workers: int) -> None:
        self.barrier = get_context("fork").Barrier(workers)

    def __len__(self) -> int:
        return self.barrier.parties

    def __getitem__(self, index: int) -> Any:
        self.barrier.wait(timeout=60)
        return index


def test_as_many_workers_run_as_are_declared() -> None:
    """... however few cores there are."""
    loader = DataLoader(MeetsOthers(6), 1, num_workers=6)
    assert torch.cat(list(loader)).tolist() == list(range(6))
    assert loader.feed is not None
    assert (loader.feed.workers, loader.feed.why) == (6, "as declared")
    loader.feed.resize(2, hold=True)
    assert loader.feed.workers == 6


@pytest.mark.filterwarnings("default:This DataLoader will create")
def test_more_workers_than_cores_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="excessive worker creation"):
        DataLoader(Things(4), num_workers=1000)


# --- loaders whose workers differ by their number --------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(3 + info.id) if info is not None else [])


class Asks(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return max(get_worker_info().id for _ in "x")  # type: ignore[union-attr]


def ask_in_collate(samples: list[Any]) -> Any:
    return samples, get_worker_info().num_workers  # type: ignore[union-attr]


def own_init(_: int) -> None:
    """May open files."""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dataset": Stream()}, "an IterableDataset: which data a worker gives depends on its number"),
        ({"dataset": Asks()}, "Asks.__getitem__ calls get_worker_info()"),
        ({"dataset": Subset(Asks(), range(8))}, "Asks.__getitem__ calls get_worker_info()"),
        ({"dataset": Things(12), "collate_fn": ask_in_collate}, "ask_in_collate calls get_worker_info()"),
        ({"dataset": Things(12), "worker_init_fn": own_init}, f"its worker_init_fn, {__name__}.own_init, may make"),
        ({"dataset": Things(12), "worker_init_fn": functools.partial(own_init)}, f"its worker_init_fn, {__name__}.own"),
    ],
    ids=["stream", "dataset", "wrapped dataset", "collate_fn", "worker_init_fn", "partial"],
)
def test_a_loader_whose_workers_differ_by_their_number_is_pytorchs_and_says_why(
    arguments: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="flatout.feed")
    expected = list(TorchLoader(**arguments, batch_size=2, num_workers=2))
    loader = DataLoader(**arguments, batch_size=2, num_workers=2)
    assert same(list(loader), expected)
    assert loader.feed is None
    assert reason in caplog.text
    iterator, why_not = iterator_for(TorchLoader(**arguments, batch_size=2), LoaderOptions(workers="auto"))
    assert iterator is None
    assert reason in why_not


def test_a_worker_init_fn_that_only_seeds_does_not_matter() -> None:
    from transformers.trainer_utils import seed_worker

    seeds = functools.partial(seed_worker, num_workers=1, rank=0)
    for workers in (0, 1):
        iterator, why_not = iterator_for(
            TorchLoader(Things(12), 4, num_workers=workers, worker_init_fn=seeds), LoaderOptions(workers="auto")
        )
        assert iterator is not None, why_not


def test_ranks_that_were_seeded_alike_draw_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for rank in ("0", "1", "1"):
        monkeypatch.setenv("RANK", rank)
        torch.manual_seed(1)
        drawn.append(list(DataLoader(Drawing(4), 4, num_workers=1)))
    assert not same(drawn[0], drawn[1])
    assert same(drawn[1], drawn[2])


# --- between passes, and beside each other ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_between_two_passes_brings_back_the_next_ones_order(workers: int, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(15)
        keep = persistent and workers > 0
        return DataLoader(
            Things(12), 4, shuffle=True, num_workers=workers, generator=generator, persistent_workers=keep
        )

    loader = make()
    first, state, second, third = list(loader), loader.state_dict(), list(loader), list(loader)
    assert not same(first, second)
    resumed = make()
    resumed.load_state_dict(state)
    assert same([list(resumed), list(resumed)], [second, third])


@pytest.mark.parametrize("workers", [2, Auto(2)], ids=["declared", "auto"])
def test_several_threads_go_through_one_loader(workers: int) -> None:
    expected = [list(range(first, first + 4)) for first in range(0, 40, 4)]
    for _ in range(3):
        loader = DataLoader(list(range(40)), 4, num_workers=workers)  # type: ignore[arg-type]
        found: list[Any] = [None] * 4

        def go(number: int, loader: Any = loader, found: list[Any] = found) -> None:
            try:
                found[number] = [[batch.tolist() for batch in loader] for _ in range(2)]
            except Exception as problem:
                found[number] = problem

        threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[expected] * 2] * 4


# --- in a worker ------------------------------------------------------------------------------------------------------


class ReadOnly(Things):
    def __getitem__(self, index: int) -> Any:
        array = np.full((2, 3), index)
        array.flags.writeable = False
        return array, {"turned": np.asfortranarray(array)}


def test_read_only_arrays_may_be_written_to() -> None:
    for (array, more), *_ in DataLoader(ReadOnly(4), 1, num_workers=1, collate_fn=as_list):
        array += 1
        more["turned"] += 1
        assert (array == more["turned"]).all()


class Raises(Things):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(f"no such thing as {index}")


@pytest.mark.parametrize("way", ["declared", "auto", "without workers"])
def test_an_exception_says_which_worker_raised_it(way: str) -> None:
    loader = DataLoader(Raises(4), 2, num_workers=1 if way == "declared" else Auto(1))
    passing = iter(loader)
    if way == "without workers":
        assert loader.feed is not None
        loader.feed.resize(0, hold=True)
    with pytest.raises(KeyError, match=r"Caught KeyError in DataLoader worker process 0\.(.|\n)*no such thing as 0"):
        next(passing)
    del passing, loader
    gc.collect()


def test_what_spawned_workers_cannot_be_sent_is_said() -> None:
    told = pytest.warns(UserWarning, match=r"Got pickle error when.*'spawn'.*collate_fn")
    with told, pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        iter(DataLoader(Things(4), 2, num_workers=1, collate_fn=lambda one: one, multiprocessing_context="spawn"))


# --- the machine's limits, and other libraries ------------------------------------------------------------------------


def _keep_all(limit: int, say: Callable[[str], None]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    kept = []
    try:
        for batch in DataLoader(Things(400, "tensor"), 1, num_workers=1):
            kept.append(batch)
        say("there was room for all")
    except RuntimeError as problem:
        say(str(problem))


def test_at_the_limit_of_open_files_there_is_advice() -> None:
    context = get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_keep_all, args=(80, there.send))
    child.start()
    assert here.poll(60)
    said = here.recv()
    child.join()
    assert "ulimit -n" in said
    assert "set_sharing_strategy" in said


def test_an_answer_that_is_lost_there_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a loop that goes on after that error, THEN it gets every batch, in order."""
    batches = iter(DataLoader(Things(400, "scalar"), 4, num_workers=2))
    found = next(batches).tolist()
    receive, lost = channel.receive, []

    def loses_one(*args: Any, **kwargs: Any) -> Any:
        answer, fds = receive(*args, **kwargs)
        if lost or len(answer) < len(channel.Done._fields):
            return answer, fds
        lost.append(answer)
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(channel, "receive", loses_one)
    with pytest.raises(RuntimeError, match="Too many open files"):
        found.extend(row for batch in batches for row in batch.tolist())
    found.extend(row for batch in batches for row in batch.tolist())
    assert found == list(range(400))


def test_another_loader_made_from_its_attributes_has_its_options() -> None:
    """As Lightning does, to put a sampler of its own in: by the names of the arguments."""
    loader = DataLoader(Things(10), 2, shuffle=True, num_workers="auto", on_bad_sample="skip", hang_timeout=5)
    arguments = inspect.signature(DataLoader).parameters.keys() & vars(loader).keys()
    given = {name: vars(loader)[name] for name in arguments - {"sampler", "batch_sampler"}}
    other: DataLoader[Any] = DataLoader(**given, sampler=SequentialSampler(range(10)))
    assert (other.on_bad_sample, other.hang_timeout) == ("skip", 5)
    assert isinstance(pickle.loads(pickle.dumps(other.num_workers)), Auto)


def test_draws_are_by_position_with_declared_workers_and_with_any_other_number() -> None:
    found = []
    for workers in (1, 3, Auto(2)):
        torch.manual_seed(1)
        found.append(list(DataLoader(Drawing(24), 4, num_workers=workers)))
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert len(list(TorchLoader(Drawing(24), 4))) == len(found[0])
