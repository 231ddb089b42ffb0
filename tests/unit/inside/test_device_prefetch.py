"""Batches that are fetched and copied to the GPU ahead of time. The GPU is one that only keeps a list of its work."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.feed.deferred.batch import PlaceholderTensor
from flatout.feed.iterator import FeedIterator
from flatout.feed.loader import iterator_for
from flatout.feed.scheduler import LoaderOptions
from flatout.inside.changes.device_prefetch import (
    SMALL_BYTES,
    SURE_AFTER,
    DevicePrefetch,
    DevicePrefetcher,
    SideStream,
    fetch_without_a_span,
)
from flatout.inside.changes.ledger import Ledger
from flatout.inside.patches import Patches, Stage, Subscriber
from flatout.model.plan import Change
from flatout.model.records import AppliedChange

META = torch.device("meta")


class ListingGpu(SideStream):
    """A GPU without memory: it lists what is copied to it."""

    def __init__(self) -> None:
        self.device = META
        self.copied: list[Any] = []
        self.over = True  # whether copies are
        self.of_script = False

    def copy(self, hosts: list[Any]) -> tuple[list[Any], Any]:
        self.copied += hosts
        return [torch.empty(host.shape, device=META) for host in hosts], SimpleNamespace(query=lambda: self.over)

    def hand_over(self, copy: Any, done: Any) -> None: ...

    def script_has_another(self) -> bool:
        return self.of_script

    def is_capturing(self) -> bool:
        return False


class Setup:
    """The change in this process, one GPU, and what became of the change."""

    def __init__(self, changes: Subscriber) -> None:
        self.gpu = ListingGpu()
        self.ledger = Ledger([Change(name="device_prefetch", value=True, safety="identical")])
        self.change = DevicePrefetch(self.ledger)
        self.change.install(changes)

    def over(self, batches: Any) -> Any:
        """An iterator that fetches and copies ahead."""
        inner = iter(batches) if isinstance(batches, DataLoader) else batches
        return self.change.ahead_of(inner, self.gpu, "train.py:1")

    def begin(self, batch: Any) -> Any:
        """Begin the copy of one batch."""
        return next(self.over(Given([batch])))

    @property
    def made(self) -> AppliedChange:
        return self.ledger.entries()[0]

    @property
    def values(self) -> list[Any]:
        return [host.item() for host in self.gpu.copied]


class Given:
    """An iterator as PyTorch's loaders have it, over given batches."""

    _profile_name, _sampler_iter, _num_yielded, _dataset_kind = "given", object(), 0, None

    def __init__(self, batches: Any) -> None:
        self._batches = iter(batches)

    def _next_data(self) -> Any:
        return next(self._batches)


@pytest.fixture
def setup() -> Iterator[Setup]:
    changes = Patches().subscriber(Stage.CHANGE, pytest.fail)
    yield Setup(changes)
    changes.leave()


def by_keyword(host: Any) -> Any:
    return host.to("meta", non_blocking=True)


def by_place(host: Any) -> Any:
    return host.to("meta", None, True)


# -- which copy is the answer -----------------------------------------------------------------------------------------


def test_the_copy_is_the_answer_once(setup: Setup) -> None:
    host = setup.begin([torch.ones(3)])[0]
    copy = host.to("meta")
    assert setup.gpu.copied == [host]
    assert host.to("meta") is not copy, "the next one is a copy of its own"


@pytest.mark.parametrize("look", [lambda host: host.numpy(), np.asarray, np.from_dlpack])
def test_memory_that_was_handed_out_is_copied_again(setup: Setup, look: Callable[[Any], Any]) -> None:
    batch = setup.begin([torch.ones(3), torch.ones(3)])
    look(batch[1])
    assert len(setup.change.copies) == 1
    batch[0].to("meta")
    assert len(setup.change.copies) == 0


def test_a_batch_that_was_written_to_is_copied_again(setup: Setup) -> None:
    host = setup.begin([torch.ones(3)])[0]
    host.mul_(2)
    host.to("meta")
    assert len(setup.change.copies) == 1, "it is not given out"


def test_a_copy_that_goes_on_is_kept_though_its_tensor_comes_again(setup: Setup) -> None:
    setup.gpu.over = False
    host = torch.ones(3)
    for _ in range(2):
        setup.begin([host])
    assert len(setup.change.copies) == 1
    assert len(setup.change.kept) == 3, "both batches, and the first copy"
    setup.gpu.over = True
    list(setup.over(Given([])))
    assert not setup.change.kept


class NotMade(PlaceholderTensor):
    """An image that only its copying makes."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (4, 3), dtype=torch.float32)

    def materialize(self) -> torch.Tensor:
        pytest.fail("made on the host")

    def record(self, name: str, args: Any, kwargs: Any) -> Any:
        return 0 if name == "_version" else NotImplemented


def test_what_is_made_by_copying_is_not_made_on_the_host(setup: Setup) -> None:
    images, labels = setup.begin((NotMade(), torch.arange(4)))
    assert setup.gpu.copied[0] is images
    assert labels.to("meta").shape == (4,)
    assert setup.made.applied


def test_a_copy_that_fails_is_over_before_its_memory_is_given_back() -> None:
    side = SideStream.__new__(SideStream)
    waited: list[str] = []
    side.device, side._stream = "no such device", SimpleNamespace(synchronize=lambda: waited.append("waited"))  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        side.copy([torch.ones(3)])
    assert waited == ["waited"]


def test_after_a_copy_that_fails_the_script_has_its_batches(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(setup.gpu, "copy", fails)
    assert [len(batch) for batch in setup.over(Given([[torch.ones(3)], [torch.ones(3)]]))] == [1, 1]
    assert not setup.made.applied
    assert setup.made.how == "RuntimeError: out of memory"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_laid_out_otherwise_is_left_alone(setup: Setup) -> None:
    setup.begin([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.ones(3)])
    assert [host.layout for host in setup.gpu.copied] == [torch.strided]


def test_tensors_of_inference_mode_are_left_alone(setup: Setup) -> None:
    with torch.inference_mode():
        batch = [torch.ones(3)]
    setup.begin(batch)
    assert setup.made.applied
    assert not setup.gpu.copied


# -- scripts that copy well by themselves ------------------------------------------------------------------------


def elsewhere(setup: Setup) -> Callable[[Any], Any]:
    """As a prefetcher of the script's own does it, with a stream of its own."""

    def move(host: Any) -> Any:
        setup.gpu.of_script = True
        return by_keyword(host)

    return move


@pytest.mark.parametrize("move", [by_keyword, by_place])
def test_a_script_that_copies_small_page_locked_batches_without_waiting_is_left_to_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, move: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    for batch in setup.over(Given([torch.ones(3), torch.ones(2)] for _ in range(30))):
        for host in batch:
            move(host)
    # Each is copied ahead, the one after it as well, until the pattern is sure.
    assert SURE_AFTER < len(setup.gpu.copied) / 2 <= SURE_AFTER + 4
    assert "copied by the script" in setup.made.how
    assert not setup.change.kept, "host batches are held"


def test_large_batches_are_copied_ahead_for_good(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    large = torch.empty(SMALL_BYTES)
    for batch in setup.over(Given([large.clone()] for _ in range(3 * SURE_AFTER))):
        by_keyword(batch[0])
    assert len(setup.gpu.copied) == 3 * SURE_AFTER


@pytest.mark.parametrize(
    ("batch", "pinned", "move"),
    [
        (1, True, lambda host: host.to("meta")),
        (1, True, lambda host: host.to("meta", non_blocking=False)),
        (1, True, lambda host: host.to("meta", None, False, True)),
        (1, False, by_keyword),
        (20, False, by_keyword),
        (20, True, lambda host: host.to("meta", None, len(host) > 1)),
        (1, True, elsewhere),
    ],
    ids=["waits", "says so", "a copy of its own", "not page-locked", "many", "waits for one", "on another stream"],
)
def test_else_its_batches_are_copied_ahead(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, batch: int, pinned: bool, move: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    moved = elsewhere(setup) if move is elsewhere else move
    batches = 3 * SURE_AFTER
    for hosts in setup.over(Given([torch.ones(1 if n == 19 else 3) for n in range(batch)] for _ in range(batches))):
        for host in hosts:
            moved(host)
    assert len(setup.gpu.copied) == batch * batches


# -- when batches are fetched ------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Shifted(Numbers):
    """The loop says by how much."""

    by = 0

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)  # too long for a batch to be made in the training process
        return index + self.by


def until_ready(iterator: Any) -> None:
    """Wait until the next batch lies ready, or all have been handed out."""
    deadline = time.monotonic() + 20
    inner = iterator._inner
    while time.monotonic() < deadline:
        if inner.position.finished or inner.made_when_asked or inner._scheduler.is_ready():
            return
        time.sleep(0.005)
    pytest.fail("no batch came")


def train(setup: Setup, iterator: Any, batches_a_step: int) -> list[str]:
    """What happened: a batch was fetched (and its copy begun), got by the loop, or a step ended."""
    happened: list[str] = []
    for number, batch in enumerate(iterator, 1):
        happened += [f"fetched {value}" for value in setup.values]
        setup.gpu.copied.clear()
        happened.append(f"got {batch.item()}")
        if number % batches_a_step == 0:
            if isinstance(iterator._inner, FeedIterator):
                until_ready(iterator)
            happened.append("step")
            setup.change.step_ended()
            happened += [f"fetched {value}" for value in setup.values]
            setup.gpu.copied.clear()
    return happened


def test_the_next_batch_is_fetched_while_the_gpu_is_at_work(setup: Setup) -> None:
    happened = train(setup, setup.over(flatout.DataLoader(Shifted(), batch_size=1, num_workers=1)), 1)
    assert [line for line in happened if line.startswith("got")] == [f"got {n}" for n in range(12)]
    # The first two are there before the first step; from then on the end of a step is when the next one is fetched.
    assert happened[:5] == ["fetched 0", "fetched 1", "got 0", "step", "got 1"]
    assert happened[5:11] == ["step", "fetched 2", "got 2", "step", "fetched 3", "got 3"]


@pytest.mark.parametrize(
    ("loader", "batches_a_step"), [(flatout.DataLoader, 2), (DataLoader, 1)], ids=["accumulated", "PyTorch's"]
)
def test_else_it_is_fetched_when_the_one_before_is_asked_for(setup: Setup, loader: Any, batches_a_step: int) -> None:
    """GIVEN more than a batch a step, or a loader that cannot say whether one is there."""
    happened = train(setup, setup.over(loader(Shifted(), batch_size=1, num_workers=1)), batches_a_step)
    expected = ["fetched 0"]
    for number in range(11):
        expected += [f"fetched {number + 1}", f"got {number}"]
    assert [line for line in happened if line != "step"] == [*expected, "got 11"]


def test_a_batch_that_is_not_ready_is_waited_for_when_it_is_asked_for(setup: Setup) -> None:
    iterator = setup.over(flatout.DataLoader(Shifted(), batch_size=1, num_workers=1))
    got = []
    for batch in iterator:
        got.append(batch.item())
        setup.change.step_ended()  # at once: the worker is not that quick
    assert got == list(range(12))


def test_steps_of_other_threads_and_processes_fetch_nothing(setup: Setup) -> None:
    iterator = setup.over(flatout.DataLoader(Shifted(), batch_size=1, num_workers=1))
    next(iterator)
    setup.change.step_ended()
    next(iterator)
    until_ready(iterator)
    so_far = setup.values
    thread = threading.Thread(target=setup.change.step_ended)
    thread.start()
    thread.join()
    child = multiprocessing.get_context("fork").Process(target=setup.change.step_ended)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert setup.values == so_far
    setup.change.step_ended()
    assert setup.values == [*so_far, 2]
    del iterator
    setup.change.step_ended()
    assert setup.values == [*so_far, 2]


def test_what_goes_wrong_at_the_end_of_a_step_is_raised_by_the_next_batch(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> bool:
        raise BlockingIOError("no more processes")

    iterator = setup.over(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    next(iterator)
    setup.change.step_ended()
    next(iterator)
    monkeypatch.setattr(FeedIterator, "ahead", fails)
    setup.change.step_ended()
    with pytest.raises(BlockingIOError, match="no more processes"):
        next(iterator)


def test_the_end_of_a_pass_is_seen_at_its_last_step(setup: Setup) -> None:
    """A loop that counts its batches never asks for one too many; a pass that has not ended keeps its workers."""
    iterator = setup.over(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    for _ in range(12):
        next(iterator)
        until_ready(iterator)
        setup.change.step_ended()
    assert iterator._inner.position.finished


def test_a_loop_that_writes_to_its_dataset_gets_what_pytorch_would_give_it(setup: Setup) -> None:
    def seen(iterator: Any, dataset: Shifted) -> list[int]:
        values = []
        for number, batch in enumerate(iterator):
            values.append(batch.item())
            if isinstance(iterator, DevicePrefetcher):
                until_ready(iterator)
            setup.change.step_ended()
            if number > 3:
                dataset.by = 100 * number
        return values

    said: list[str] = []
    plain, dataset = Shifted(), Shifted()
    inner, _ = iterator_for(DataLoader(dataset, batch_size=1), LoaderOptions(workers="auto"), give_back=said.append)
    assert seen(setup.over(inner), dataset) == seen(DataLoader(plain, batch_size=1), plain)
    assert [line.partition(" (")[0] for line in said] == ["the loop writes to what it reads"]


def nothing_of_odd(samples: list[int]) -> torch.Tensor | None:
    return None if samples[0] % 2 else torch.tensor(samples)


def test_a_batch_that_is_none_is_a_batch(setup: Setup) -> None:
    loader = flatout.DataLoader(Numbers(), batch_size=1, num_workers=1, collate_fn=nothing_of_odd)
    got = []
    for batch in setup.over(loader):
        got.append(batch if batch is None else batch.item())
        setup.change.step_ended()
    assert got == [number if number % 2 == 0 else None for number in range(12)]


def test_switched_off_in_mid_pass_nothing_is_fetched_ahead_and_no_batch_is_lost(setup: Setup) -> None:
    iterator = setup.over(flatout.DataLoader(Shifted(), batch_size=1, num_workers=1))
    got = []
    for number, batch in enumerate(iterator):
        got.append(batch.item())
        if number == 3:
            setup.change.off()
            setup.gpu.copied.clear()
        if number == 7:
            assert setup.values == [], "nothing was copied ahead"
            setup.change.on()
        until_ready(iterator)
        setup.change.step_ended()
    assert got == list(range(12))
    assert setup.values, "it goes on when it is switched on again"


def test_a_profiler_still_sees_every_batch() -> None:
    changes = Patches().subscriber(Stage.CHANGE, pytest.fail)
    fetch_without_a_span(changes)
    loader = flatout.DataLoader(Numbers(), batch_size=1, num_workers=1)
    assert [int(batch) for batch in loader] == list(range(12))
    batches = iter(loader)
    assert int(next(batches)) == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert int(next(batches)) == 1
    assert any("__next__" in event.name for event in profiler.events() or ())
    assert [int(batch) for batch in batches] == list(range(2, 12))
    changes.leave()
