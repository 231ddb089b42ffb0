"""Copies made ahead of time: one of a host batch that may have been written to since is worth nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.feed.iterator import FeedIterator
from flatout.inject.apply import loading

PATCHED = ("to", "cuda", "numpy", "__array__", "__dlpack__")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[loading._Copies]:
    before = {name: getattr(torch.Tensor, name) for name in PATCHED}
    monkeypatch.setattr(loading, "_copies", loading._Copies())
    loading._answer_with_copies()
    yield loading._copies
    for name, method in before.items():
        setattr(torch.Tensor, name, method)


@pytest.mark.parametrize("look", [lambda host: host.numpy(), np.asarray, np.from_dlpack])
def test_memory_that_is_given_out_is_copied_anew(copies: loading._Copies, look: Callable[[Any], Any]) -> None:
    host, other = torch.ones(3), torch.ones(3)
    for tensor in (host, other):
        copies.put(tensor, torch.ones(3, device="meta"), None)
    look(other)
    assert [*copies._made] == [id(host)]


class Numbers(Dataset[int]):
    """Each takes a moment to make."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[DataLoader[Any]], tuple[Any, list[str]]]:
    """An iterator that fetches ahead, without a card to copy to, and what it does."""

    def made(loader: DataLoader[Any]) -> tuple[Any, list[str]]:
        did: list[str] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(loading, "_look_ahead_after_steps", lambda: None)
        monkeypatch.setattr(loading._Ahead, "_copy", lambda _, batch: did.append(f"fetched {batch.item()}"))
        return loading._Ahead(iter(loader), torch.device("cuda"), did.append), did  # type: ignore[arg-type]

    return made


def train(iterator: Any, did: list[str], batches_a_step: int) -> None:
    for number, batch in enumerate(iterator, 1):
        did.append(f"got {batch.item()}")
        time.sleep(0.1)  # the next one is there by now
        if number % batches_a_step == 0:
            did.append("step")
            loading._look_ahead()


def test_the_next_batch_is_fetched_while_the_card_is_at_work(ahead: Callable[..., tuple[Any, list[str]]]) -> None:
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
    monkeypatch.setattr(FeedIterator, "is_ready", lambda _: False)
    train(iterator, did, batches_a_step=1)
    assert [line for line in did if line.startswith("got")] == [f"got {n}" for n in range(12)]


def test_steps_of_another_thread_and_of_a_loader_that_is_gone_fetch_nothing(
    ahead: Callable[..., tuple[Any, list[str]]],
) -> None:
    iterator, did = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    next(iterator)
    loading._look_ahead()
    next(iterator)
    so_far = list(did)
    time.sleep(0.2)
    other = threading.Thread(target=loading._look_ahead)
    other.start()
    other.join()
    assert did == so_far
    loading._look_ahead()
    assert did == [*so_far, "fetched 2"]
    del iterator
    loading._look_ahead()
    assert did == [*so_far, "fetched 2"]


def test_a_child_that_steps_leaves_the_workers_to_their_owner(
    ahead: Callable[..., tuple[Any, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator, did = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    next(iterator)
    loading._look_ahead()
    next(iterator)
    time.sleep(0.2)
    so_far, here = list(did), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    loading._look_ahead()
    monkeypatch.undo()
    assert did == so_far


def test_what_goes_wrong_at_the_end_of_a_step_is_raised_by_the_next_batch(
    ahead: Callable[..., tuple[Any, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator, _ = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))

    def fails(_: Any) -> bool:
        raise BlockingIOError("no more processes")

    next(iterator)
    loading._look_ahead()
    next(iterator)
    monkeypatch.setattr(FeedIterator, "is_ready", fails)
    loading._look_ahead()
    with pytest.raises(BlockingIOError, match="no more processes"):
        next(iterator)


def test_the_end_of_a_pass_is_seen_at_its_last_step(ahead: Callable[..., tuple[Any, list[str]]]) -> None:
    """A loop that counts its batches never asks for one too many; and a pass that has not ended keeps its workers."""
    iterator, _ = ahead(flatout.DataLoader(Numbers(), batch_size=1, num_workers=1))
    for _ in range(12):
        next(iterator)
        time.sleep(0.05)
        loading._look_ahead()
    assert iterator._inner.position.finished
