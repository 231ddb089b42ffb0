"""Against the PyTorch loader: the same batches in the same order, and the same random stream left behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from feed_samples import SHAPES, Things, as_list, padded, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

from flatout.feed import DataLoader, LoaderOptions, feed_of, iterator_for, to_device
from flatout.feed.iterator import is_pure
from flatout.feed.scheduler import Auto

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # PyTorch's, on a small machine


class EagerSampler(Sampler[int]):
    """Draws when `iter()` is called, not at the first `next()`: PyTorch calls it twice."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class DrawsAsItGoes(EagerSampler):
    """Takes from the main process's stream at every step."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


def sampling(kind: str, length: int) -> dict[str, Any]:
    """Arguments for one way of choosing samples; built again for each loader."""
    things = range(length)
    return {
        "in order": {},
        "shuffled": {"shuffle": True},
        "own generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        "with replacement": {"sampler": RandomSampler(things, replacement=True, num_samples=length + 3)},
        "subset": {"sampler": SubsetRandomSampler(things[::2])},
        "weighted": {"sampler": WeightedRandomSampler([1.0 + i % 3 for i in things], length)},
        "distributed": {"sampler": DistributedSampler(things, num_replicas=2, rank=1, seed=5)},
        "eager": {"sampler": EagerSampler(length)},
        "as it goes": {"sampler": DrawsAsItGoes(length)},
        "batches": {"batch_sampler": BatchSampler(SequentialSampler(things), 3, drop_last=True)},
    }[kind]


def epochs(loader: TorchLoader[Any], stops: tuple[int | None, ...]) -> list[Any]:
    """The batches of a few epochs, each left after so many; a mark of the random stream after every batch."""
    seen: list[Any] = []
    for stop in stops:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(len(seen))
        for number, batch in enumerate(loader):
            seen.append((batch, torch.rand(()).item()))
            if number == stop:
                break
        if loader.generator is not None:
            seen.append((loader.generator.get_state(), 0.0))
    return seen


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_combination_of_arguments_gives_what_pytorch_gives(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 40), label="length")
    kind = data.draw(st.sampled_from(
        ["in order", "shuffled", "own generator", "with replacement", "subset", "weighted", "distributed", "eager",
         "as it goes", "batches"]), label="sampling")  # fmt: skip
    shape = data.draw(st.sampled_from(sorted(SHAPES)), label="shape")
    arguments: dict[str, Any] = {
        "num_workers": data.draw(st.integers(1, 3), label="workers"),
        "prefetch_factor": data.draw(st.sampled_from([None, 1, 3]), label="prefetch"),
        "persistent_workers": data.draw(st.booleans(), label="persistent"),
    }
    if kind != "batches":
        arguments["batch_size"] = data.draw(st.sampled_from([None, 1, 4, 9, 17]), label="batch size")
        if arguments["batch_size"] is not None:
            arguments["drop_last"] = data.draw(st.booleans(), label="drop last")
    collate = data.draw(st.sampled_from([None, as_list]), label="collate")
    if collate and arguments.get("batch_size", 1) is not None:
        arguments["collate_fn"] = collate
    stops = (data.draw(st.sampled_from([None, 0, 2, 5]), label="stop"), None)

    torch.manual_seed(11)
    expected = epochs(TorchLoader(Things(length, shape), **arguments, **sampling(kind, length)), stops)
    torch.manual_seed(11)
    found = epochs(DataLoader(Things(length, shape), **arguments, **sampling(kind, length)), stops)

    assert len(found) == len(expected)
    for (batch, mark), (stock_batch, stock_mark) in zip(found, expected, strict=True):
        assert same(batch, stock_batch), (batch, stock_batch)
        assert mark == stock_mark


@pytest.mark.parametrize(
    ("length", "size", "workers", "stop"), [(60, 2, 2, 25), (13, 4, 1, 0)], ids=["full last batch", "one of a sample"]
)
def test_leaving_before_the_end_leaves_the_generator_as_pytorch_does(
    length: int, size: int, workers: int, stop: int
) -> None:
    """A random sampler draws once more when it has ended: that must not happen earlier than in PyTorch."""
    results = []
    for loader_class in (DataLoader, TorchLoader):
        torch.manual_seed(1)
        loader = loader_class(Things(length), size, num_workers=workers, **sampling("own generator", length))
        results.append(epochs(loader, (stop, None)))
    assert same(*results)


class Torn:
    """A sample that may not be unpacked again."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["index"] in (17, 18):
            raise ValueError("torn")
        self.index = state["index"]


class Papers(Things):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), Torn(index)


def the_sample(samples: list[Any]) -> Any:
    return samples[0]


def test_a_batch_that_cannot_be_opened_costs_no_other() -> None:
    loader = DataLoader(Papers(60), 1, num_workers=4, collate_fn=the_sample)

    def opened(iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield next(iterator)[1].index
            except ValueError:
                yield "torn"
            except StopIteration:
                return

    got = list(opened(iter(loader)))
    assert got == [*range(17), "torn", "torn", *range(19, 60)]


def test_batches_of_uneven_size_from_a_custom_collate() -> None:
    expected = list(TorchLoader(Things(50), 4, num_workers=1, collate_fn=padded))
    found = list(DataLoader(Things(50), 4, num_workers=2, collate_fn=padded))
    assert all(map(same, found, expected))
    assert len(found) == len(expected)


def test_changes_between_epochs_are_seen_as_in_pytorch() -> None:
    for loader_class in (TorchLoader, DataLoader):
        for persistent, expected in ((False, 9), (True, 5)):
            dataset = Things(5, "scalar")
            loader = loader_class(dataset, 1, num_workers=1, persistent_workers=persistent, sampler=range(9))
            first = len(list(zip(loader, range(5), strict=False)))
            dataset.length, dataset.shape = 9, "bool"
            kinds = {batch.dtype for batch, _ in zip(loader, range(5), strict=False)}
            assert first == 5
            assert kinds == ({torch.bool} if not persistent else {torch.int64}), (loader_class, expected)


def samplers() -> dict[str, Any]:
    """As accelerate and transformers make them, and one of the script's own."""
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    data = Things(12)
    seedable, grouped = SeedableRandomSampler(data), LengthGroupedSampler(2, lengths=list(range(12)))
    return {
        "accelerate": {"batch_sampler": BatchSampler(seedable, 2, False)},
        "accelerate, two ranks": {"batch_sampler": BatchSamplerShard(BatchSampler(seedable, 2, False), 2, 0)},
        "accelerate, resumed": {"batch_sampler": SkipBatchSampler(BatchSampler(seedable, 2, False), 1)},
        "with replacement": {"sampler": SeedableRandomSampler(data, replacement=True)},
        "transformers": {"sampler": grouped, "batch_size": 2},
        "the script's own": {"sampler": type("Own", (RandomSampler,), {})(data), "batch_size": 2},
    }


@pytest.mark.parametrize("which", ["accelerate", "accelerate, two ranks", "accelerate, resumed", "transformers"])
def test_samplers_of_frameworks_may_be_asked_early(which: str) -> None:
    orders = []
    for loader_class in (TorchLoader, DataLoader):
        torch.manual_seed(3)
        loader = loader_class(Things(12), **samplers()[which], num_workers=1)
        assert is_pure(loader)
        orders.append([batch[1].tolist() for _ in range(2) for batch in loader])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("which", ["with replacement", "the script's own"])
def test_samplers_that_may_notice_are_not(which: str) -> None:
    assert not is_pure(TorchLoader(Things(12), **samplers()[which]))


level = 1


class Levelled(Things):
    """Goes by a global variable."""

    def __getitem__(self, index: int) -> Any:
        return level


@pytest.mark.parametrize("loader_class", [TorchLoader, DataLoader])
def test_a_global_variable_that_is_set_between_epochs_is_seen_as_in_pytorch(
    loader_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_class(Levelled(4), 4, num_workers=1)
    for now in (1, 2):
        monkeypatch.setitem(globals(), "level", now)
        assert [batch.tolist() for batch in loader] == [[now] * 4]


class Opaque(Things):
    """Holds something that cannot be looked into."""

    def __init__(self, length: int) -> None:
        super().__init__(length, "scalar")
        self.stream = iter(range(3))
        self.seen = [0]

    def __getitem__(self, index: int) -> Any:
        return self.seen[0]


def test_a_dataset_that_cannot_be_looked_into_is_shipped_again_and_what_was_learned_stays() -> None:
    dataset = Opaque(8)
    loader = DataLoader(dataset, 4, num_workers=1)
    assert torch.cat(list(loader)).tolist() == [0] * 8
    feed = loader.feed
    dataset.seen[0] = 1
    assert torch.cat(list(loader)).tolist() == [1] * 8
    assert loader.feed is feed


class Shifted:
    """A collate_fn that can be told something."""

    by = 0

    def __call__(self, batch: list[int]) -> torch.Tensor:
        return torch.tensor(batch) + self.by


@pytest.mark.parametrize("kind", [TorchLoader, DataLoader])
def test_a_change_to_what_joins_samples_is_seen_in_the_next_epoch(kind: type[TorchLoader[Any]]) -> None:
    shifted = Shifted()
    loader = kind(range(8), 4, num_workers=1, collate_fn=shifted)  # type: ignore[arg-type]
    assert torch.cat(list(loader)).tolist() == list(range(8))
    shifted.by = 10
    assert torch.cat(list(loader)).tolist() == list(range(10, 18))


def test_two_passes_at_once_do_not_disturb_each_other() -> None:
    loader = DataLoader(Things(20, "scalar"), 4, num_workers=1)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 5
    assert all(same(one, other) for one, other in pairs)


def test_dropping_an_old_pass_does_not_end_the_new_one() -> None:
    loader = DataLoader(Things(40, "scalar"), 4, num_workers=1)
    pass_ = iter(loader)
    for _ in pass_:
        pass
    new = iter(loader)
    next(new)
    del pass_
    assert len(list(new)) == 9


def test_a_loader_that_is_only_a_temporary_lives_as_long_as_its_pass() -> None:
    assert sum(len(batch) for batch in DataLoader(Things(20, "scalar"), 4, num_workers=1)) == 20


def test_errors_are_pytorchs_and_the_pass_goes_on_after_one() -> None:
    class Breaks(Things):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise KeyError("no such thing")
            return index

    for loader_class in (TorchLoader, DataLoader):
        found = iter(loader_class(Breaks(12), 4, num_workers=1))
        assert next(found).tolist() == [0, 1, 2, 3]
        with pytest.raises(KeyError, match="Caught KeyError in DataLoader worker process 0"):
            next(found)
        assert next(found).tolist() == [8, 9, 10, 11]
        del found
    gc.collect()  # an exception holds the frames it went through, and they the iterator


def test_samples_of_unequal_size_get_pytorchs_error() -> None:
    class Uneven(Things):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index % 3)

    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(DataLoader(Uneven(12), 4, num_workers=1))
    gc.collect()


def test_timeout_raises_as_in_pytorch() -> None:
    class Slow(Things):
        def __getitem__(self, index: int) -> Any:

            time.sleep(30)

    with pytest.raises(RuntimeError, match="DataLoader timed out after"):
        next(iter(DataLoader(Slow(4), 2, num_workers=1, timeout=0.2)))
    gc.collect()


def test_a_pytorch_loader_gets_our_iterator_and_reasons_when_not() -> None:
    loader = TorchLoader(Things(10, "scalar"), 2, num_workers=1)
    iterator, reason = iterator_for(loader)
    assert reason == ""
    assert iterator is not None
    assert len(iterator) == 5
    assert torch.cat(list(iterator)).tolist() == list(range(10))
    assert feed_of(loader) is not None
    assert iterator_for(TorchLoader(Things(10), 2)) == (None, "num_workers=0")


def test_length_and_type_are_those_of_a_pytorch_loader() -> None:
    loader = DataLoader(Things(10), 4, num_workers=2)
    assert isinstance(loader, TorchLoader)
    assert len(loader) == 3
    assert len(iter(loader)) == 3


def test_a_wrong_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="on_bad_sample must be one of raise, skip"):
        DataLoader(Things(3), on_bad_sample="skipp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_workers must be a number or \"auto\" \(got 'atuo'\)"):
        DataLoader(Things(3), num_workers="atuo")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_batches_cannot_go_to_a_card_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="there is no GPU to bring batches to"):
        to_device(DataLoader(Things(3)), "cuda")


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_are_zipped_draw_in_the_order_that_pytorch_draws_in(workers: int) -> None:
    """GIVEN two that shuffle: without workers PyTorch asks neither for a sample before both passes have begun."""

    def zipped(passes: Callable[[TorchLoader[Any]], Iterator[Any]]) -> list[Any]:
        torch.manual_seed(3)
        loaders = [TorchLoader(Things(24), 4, shuffle=True, num_workers=workers) for _ in range(2)]
        return [list(zip(*map(passes, loaders), strict=True)) for _ in range(2)]

    def ours(loader: TorchLoader[Any]) -> Iterator[Any]:
        iterator, reason = iterator_for(loader, LoaderOptions(workers="auto"))
        assert iterator is not None, reason
        return iterator

    assert same(zipped(ours), zipped(iter))


def test_a_forked_process_has_workers_of_its_own() -> None:
    """GIVEN a loader that was used WHEN a child and its parent go over it at the same time."""
    loader = DataLoader(Things(64), 4, num_workers=2)
    usual = list(loader)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if same(list(loader), usual) else 2
        finally:
            os._exit(code)
    assert same(list(loader), usual)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(list(loader), usual)


class Offset(Things):
    """Samples that the loop may shift between two passes."""

    offset = 0

    def __getitem__(self, index: int) -> Any:
        return torch.full((10_000,), self.offset + index)


def test_workers_are_started_for_each_pass_unless_they_are_persistent() -> None:
    for persistent in (False, True):
        loader = DataLoader(Things(40), 4, num_workers=2, persistent_workers=persistent)
        seen = []
        for _ in range(2):
            for number, _batch in enumerate(loader):
                if number == 8:
                    assert loader.feed is not None
                    seen.append({worker.pid for worker in loader.feed.pool if worker.pid})
        assert all(len(pids) == 2 for pids in seen)
        assert (seen[0] == seen[1]) is persistent
        del loader


def test_workers_of_a_pass_that_was_left_do_not_write_into_the_next_ones_batches() -> None:
    dataset = Offset(64)
    loader = DataLoader(dataset, 4, num_workers=2)
    for number in range(5):
        dataset.offset = 1000 * number
        for _ in loader:
            break
    dataset.offset = 9000
    kept = list(loader)
    assert torch.cat(kept)[:, -1].tolist() == [9000 + index for index in range(64)]


def test_a_worker_that_comes_later_has_the_dataset_as_it_was_when_the_pass_began() -> None:
    """GIVEN a loop that writes to its dataset in mid-epoch THEN the next pass is the first to see it, as in PyTorch."""
    dataset = Offset(400)
    loader = DataLoader(dataset, 4, num_workers=Auto(1), persistent_workers=True)
    found = []
    for number, batch in enumerate(loader):
        found += batch[:, 0].tolist()
        if number == 10:
            dataset.offset = 1000
            assert loader.feed is not None
            loader.feed.resize(3, hold=True)
    assert found == list(range(400))
