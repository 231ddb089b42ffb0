"""Copies made ahead of time: one of a host batch that may have been written to since is worth nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
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
from flatout.feed.loader import Options, iterator_for
from flatout.feed.scheduler import BatchScheduler
from flatout.inside.changes import device_prefetch as copying
from flatout.inside.patches import Patches, Stage


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[copying._Copies]:
    monkeypatch.setattr(copying, "_copies", copying._Copies())
    monkeypatch.setattr(copying, "_copying", deque())
    changes = Patches().subscriber(Stage.CHANGE, pytest.fail)
    copying.answer_with_copies(changes)
    yield copying._copies
    changes.leave()


@pytest.mark.parametrize("look", [lambda host: host.numpy(), np.asarray, np.from_dlpack])
def test_memory_that_is_given_out_is_copied_anew(
    copies: copying._Copies, look: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other = torch.ones(3), torch.ones(3)
    stream = SimpleNamespace(wait_event=lambda done: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    made = [torch.ones(3, device="meta") for _ in range(2)]
    for tensor, copy in zip((host, other), made, strict=True):
        copies.put(tensor, copy, None, stream, copying.CopyPattern())
    look(other)
    assert host.to("meta") is made[0]
    assert other.to("meta") is not made[1]


def test_a_copy_stays_while_it_is_made_though_its_tensor_comes_again(
    copies: copying._Copies,
) -> None:
    host, first, second = torch.ones(3), torch.ones(3, device="meta"), torch.ones(3, device="meta")
    for copy in (first, second):
        copies.put(host, copy, f"done {id(copy)}", None, copying.CopyPattern())
    ((kept, done),) = copying._copying
    assert kept is first
    assert done == f"done {id(first)}"


class NotMade(PlaceholderTensor):
    """What only its copying makes."""

    def materialized(self) -> None:
        return None

    def materialize(self) -> torch.Tensor:
        pytest.fail("made on the host")

    @classmethod
    def record(cls, name: str, args: Any, kwargs: Any) -> Any:
        return 0 if name == "_version" else NotImplemented


class Gpu:
    """A stream that does nothing, and counts how often it was waited for to the end."""

    def __init__(self) -> None:
        self.waited_for = 0

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        self.waited_for += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(copying, "_side_stream", lambda device: gpu)
    monkeypatch.setattr(copying, "_look_ahead_after_steps", lambda: None)
    monkeypatch.setattr(copying, "_move", lambda host, device: torch.empty(host.shape, device=device))
    return gpu


def test_copies_are_made_in_room_that_fits_and_what_is_made_by_copying_is_not_made_here(
    gpu: Gpu, copies: copying._Copies
) -> None:
    failed: list[Exception] = []
    ahead = copying.DevicePrefetcher(None, torch.device("meta"), failed.append)

    def batch(samples: int) -> tuple[Any, Any]:
        return NotMade((samples, 3), torch.float32), torch.arange(samples)

    ahead._make_room(batch(4))
    room: Any = ahead._room
    for samples, in_room in ((4, True), (2, False)):
        ahead._room = room
        pictures, labels = batch(samples)
        ahead._copy((pictures, labels))
        moved = labels.to("meta")
        assert (moved is room.copies[1]) == in_room
        assert moved.shape == (samples,)
    assert not failed


def test_what_goes_wrong_with_a_copy_is_over_before_its_memory_is_given_back(
    gpu: Gpu, copies: copying._Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Exception] = []
    ahead = copying.DevicePrefetcher(None, torch.device("meta"), failed.append)

    def fails(*_: Any) -> None:
        raise RuntimeError("no version")

    monkeypatch.setattr(copies, "put", fails)
    batches = [[torch.ones(3)], [torch.ones(3)]]
    assert [ahead._fetched(lambda batch=batch: batch) for batch in batches] == batches
    assert gpu.waited_for == len(failed) == 1


def test_nothing_is_copied_of_tensors_of_inference_mode(gpu: Gpu, copies: copying._Copies) -> None:
    failed: list[Exception] = []
    ahead = copying.DevicePrefetcher(None, torch.device("meta"), failed.append)
    with torch.inference_mode():
        batch = [torch.ones(3)]
    ahead._fetched(lambda: batch)
    assert not failed
    assert not copies


def by_keyword(host: Any) -> Any:
    return host.to("meta", non_blocking=True)


def by_place(host: Any) -> Any:
    return host.to("meta", None, True)


def elsewhere(host: Any) -> Any:
    """As a prefetcher of the script's own does it, with a stream of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: Gpu())
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        return by_keyword(host)


@pytest.mark.parametrize("move", [by_keyword, by_place])
def test_a_script_that_copies_small_page_locked_batches_without_waiting_is_left_to_it(
    gpu: Gpu, copies: copying._Copies, monkeypatch: pytest.MonkeyPatch, move: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    told: list[str] = []
    habit = copying.CopyPattern(lambda: told.append("good"))
    copied = 0
    for _ in range(3):  # passes
        ahead = copying.DevicePrefetcher(None, torch.device("meta"), told.append, habit)  # type: ignore[arg-type]
        for _ in range(10):
            batch = [torch.ones(3), torch.ones(2)]
            ahead._fetched(lambda batch=batch: batch)
            copied += bool(copies)
            for host in batch:
                move(host)
    assert copied == copying._SURE + 1
    assert told == ["good"]
    assert not copying._copying, "host batches are held"
    assert ahead._room is None


def test_batches_that_become_large_are_copied_again(
    gpu: Gpu, copies: copying._Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    ahead = copying.DevicePrefetcher(None, torch.device("meta"), pytest.fail)
    copied = []
    for number in range(4 * copying._EVERY):
        host = torch.empty(3 if number < copying._EVERY else copying.SMALL_BYTES)
        ahead._fetched(lambda host=host: [host])
        ahead._num_yielded += 1
        copied.append(bool(copies))
        by_keyword(host)
    assert not any(copied[copying._SURE + 1 : copying._EVERY])
    assert all(copied[2 * copying._EVERY :])


@pytest.mark.parametrize(
    ("batch", "pinned", "move"),
    [
        ([torch.ones(3)], True, lambda host: host.to("meta")),
        ([torch.ones(3)], True, lambda host: host.to("meta", non_blocking=False)),
        ([torch.ones(3)], True, lambda host: host.to("meta", None, False, True)),
        ([torch.ones(3)], False, by_keyword),
        ([torch.ones(copying.SMALL_BYTES // 4)], True, by_keyword),
        ([NotMade((4, 3), torch.float32)], True, by_keyword),
        ([torch.ones(3) for _ in range(20)], False, by_keyword),
        ([torch.ones(3) for _ in range(20)] + [torch.ones(1)], True, lambda host: host.to("meta", None, len(host) > 1)),
        ([torch.ones(3)], True, elsewhere),
    ],
    ids=[
        "waits", "says so", "a copy of its own", "not page-locked", "large", "made by copying", "many",
        "waits for one of them", "on another stream",
    ],
)  # fmt: skip
def test_else_it_gets_its_copies(
    gpu: Gpu,
    copies: copying._Copies,
    monkeypatch: pytest.MonkeyPatch,
    batch: list[Any],
    pinned: bool,
    move: Callable[[Any], Any],
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    ahead = copying.DevicePrefetcher(None, torch.device("meta"), pytest.fail)
    for _ in range(3 * copying._SURE):
        ahead._fetched(lambda: batch)
        assert copies
        for host in batch:
            move(host)


def test_a_profiler_still_hears_of_every_batch() -> None:
    changes = Patches().subscriber(Stage.CHANGE, pytest.fail)
    copying.fetch_without_a_span(changes)
    loader = flatout.DataLoader(Numbers(), batch_size=1, num_workers=1)
    assert [int(batch) for batch in loader] == list(range(12))
    batches = iter(loader)
    assert int(next(batches)) == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert int(next(batches)) == 1
    assert any("__next__" in event.name for event in profiler.events() or ())
    assert [int(batch) for batch in batches] == list(range(2, 12))
    changes.leave()


class Numbers(Dataset[int]):
    """Each takes a moment to make."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[DataLoader[Any]], tuple[Any, list[str]]]:
    """An iterator that fetches ahead, without a GPU to copy to, and what it does."""

    def made(loader: DataLoader[Any]) -> tuple[Any, list[str]]:
        did: list[str] = []
        monkeypatch.setattr(copying, "_side_stream", lambda device: None)
        monkeypatch.setattr(copying.DevicePrefetcher, "_make_room", lambda _, batch: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(copying, "_look_ahead_after_steps", lambda: None)
        monkeypatch.setattr(copying.DevicePrefetcher, "_copy", lambda _, batch: did.append(f"fetched {batch.item()}"))
        inner = iter(loader) if isinstance(loader, DataLoader) else loader
        return copying.DevicePrefetcher(inner, torch.device("cuda"), did.append), did  # type: ignore[arg-type]

    return made


def train(iterator: Any, did: list[str], batches_a_step: int) -> None:
    for number, batch in enumerate(iterator, 1):
        did.append(f"got {batch.item()}")
        time.sleep(0.1)  # the next one is there by now
        if number % batches_a_step == 0:
            did.append("step")
            copying._stepped()


def test_the_next_batch_is_fetched_while_the_gpu_is_at_work(ahead: Callable[..., tuple[Any, list[str]]]) -> None:
    iterator, did = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    train(iterator, did, batches_a_step=1)
    assert [line for line in did if line.startswith("got")] == [f"got {n}" for n in range(12)]
    # The first two are there before the first step; from then on the end of a step is when the next one is fetched.
    assert did[:5] == ["fetched 0", "fetched 1", "got 0", "step", "got 1"]
    assert did[5:11] == ["step", "fetched 2", "got 2", "step", "fetched 3", "got 3"]


@pytest.mark.parametrize(
    ("loader", "batches_a_step"), [(flatout.DataLoader, 2), (DataLoader, 1)], ids=["accumulated", "stock's"]
)
def test_else_it_is_fetched_when_the_one_before_is_asked_for(
    ahead: Callable[..., tuple[Any, list[str]]], loader: Any, batches_a_step: int
) -> None:
    """GIVEN more than a batch a step, or a loader that cannot say whether one is there."""
    iterator, did = ahead(loader(Numbers(), batch_size=1, num_workers=1))
    train(iterator, did, batches_a_step)
    fetched_and_got = [line for line in did if line != "step"]
    assert fetched_and_got == ["fetched 0", *(f"{what} {n + (what == 'fetched')}" for n in range(11)
                               for what in ("fetched", "got")), "got 11"]  # fmt: skip


def test_what_is_not_there_at_the_end_of_a_step_is_waited_for_when_it_is_asked_for(
    ahead: Callable[..., tuple[Any, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator, did = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    monkeypatch.setattr(BatchScheduler, "is_ready", lambda _: False)
    train(iterator, did, batches_a_step=1)
    assert [line for line in did if line.startswith("got")] == [f"got {n}" for n in range(12)]


def test_steps_of_another_thread_and_of_a_loader_that_is_gone_fetch_nothing(
    ahead: Callable[..., tuple[Any, list[str]]],
) -> None:
    iterator, did = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    next(iterator)
    copying._stepped()
    next(iterator)
    so_far = list(did)
    time.sleep(0.2)
    other = threading.Thread(target=copying._stepped)
    other.start()
    other.join()
    assert did == so_far
    copying._stepped()
    assert did == [*so_far, "fetched 2"]
    del iterator
    copying._stepped()
    assert did == [*so_far, "fetched 2"]


def test_a_child_that_steps_leaves_the_workers_to_their_owner(
    ahead: Callable[..., tuple[Any, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator, did = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    next(iterator)
    copying._stepped()
    next(iterator)
    time.sleep(0.2)
    so_far, here = list(did), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    copying._stepped()
    monkeypatch.undo()
    assert did == so_far


def test_what_goes_wrong_at_the_end_of_a_step_is_raised_by_the_next_batch(
    ahead: Callable[..., tuple[Any, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator, _ = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))

    def fails(_: Any) -> bool:
        raise BlockingIOError("no more processes")

    next(iterator)
    copying._stepped()
    next(iterator)
    monkeypatch.setattr(BatchScheduler, "is_ready", fails)
    copying._stepped()
    with pytest.raises(BlockingIOError, match="no more processes"):
        next(iterator)


def test_the_end_of_a_pass_is_seen_at_its_last_step(ahead: Callable[..., tuple[Any, list[str]]]) -> None:
    """A loop that counts its batches never asks for one too many; and a pass that has not ended keeps its workers."""
    iterator, _ = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    for _ in range(12):
        next(iterator)
        time.sleep(0.05)
        copying._stepped()
    assert iterator._inner.position.finished


class Shifted(Numbers):
    """The loop says by how much."""

    by = 0

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)  # too long for more than one at a stretch
        return index + self.by


def test_a_loop_that_writes_to_its_dataset_gets_what_stock_would_give_it(
    ahead: Callable[..., tuple[Any, list[str]]],
) -> None:
    def seen(iterator: Any, dataset: Shifted) -> list[int]:
        values = []
        for number, batch in enumerate(iterator):
            values.append(batch.item())
            time.sleep(0.05)
            copying._stepped()
            if number > 3:
                dataset.by = 100 * number
        return values

    told: list[str] = []
    plain, dataset = Shifted(), Shifted()
    inner, _ = iterator_for(DataLoader(dataset, batch_size=1), Options(workers="auto"), give_back=told.append)
    assert seen(ahead(inner)[0], dataset) == seen(DataLoader(plain, batch_size=1), plain)
    assert [line.partition(" (")[0] for line in told] == ["the loop writes to what it reads"]


def test_what_is_written_before_samples_are_made_early_in_the_scripts_thread_is_seen(
    ahead: Callable[..., tuple[Any, list[str]]],
) -> None:
    """GIVEN a loader that does without workers for a while: those that come back have the dataset as it was."""
    dataset = Shifted()
    inner, _ = iterator_for(DataLoader(dataset, batch_size=1), Options(workers="auto"))
    assert isinstance(inner, FeedIterator)
    iterator, _ = ahead(inner)
    got = []
    for number in range(12):
        got.append(next(iterator).item())
        if number == 2:
            inner._scheduler.resize(0, hold=True)
        if number == 5:
            dataset.by = 1000
        if number == 7:
            inner._scheduler.resize(1, hold=True)
        copying._stepped()
    assert got == [number + 1000 * (number > 5) for number in range(12)]


def nothing_of_odd(samples: list[int]) -> torch.Tensor | None:
    return None if samples[0] % 2 else torch.tensor(samples)


def test_a_batch_that_is_none_is_a_batch(
    ahead: Callable[..., tuple[Any, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator, _ = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1, collate_fn=nothing_of_odd))
    monkeypatch.setattr(copying.DevicePrefetcher, "_copy", lambda _, batch: None)
    got = []
    for batch in iterator:
        got.append(batch if batch is None else batch.item())
        copying._stepped()
    assert got == [number if number % 2 == 0 else None for number in range(12)]


def test_switched_off_in_mid_pass_nothing_is_fetched_ahead_and_no_batch_is_lost(
    ahead: Callable[..., tuple[Any, list[str]]],
) -> None:
    iterator, did = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    got = []
    for number, batch in enumerate(iterator):
        got.append(batch.item())
        if number in (3, 7):
            (iterator._change.off if number == 3 else iterator._change.on)()
            did.clear()
        copying._stepped()
        if number in (5, 6):
            assert did == [], "nothing is fetched or copied ahead"
    assert got == list(range(12))
    assert did, "it goes on when it is switched on again"
