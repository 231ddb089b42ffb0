"""Page-locked slots, leases that wait for copies, and batches that arrive on the GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from flatout.feed import DataLoader, feed_of, to_device


class Frames(Dataset[Any]):
    """Each sample is full of its own index."""

    def __init__(self, length: int, side: int = 256) -> None:
        self.length = length
        self.side = side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, self.side, self.side), index % 251, dtype=torch.uint8), index


def busy(milliseconds: float) -> None:
    """Keep the current stream busy, so that what is queued behind it runs late."""
    torch.cuda._sleep(int(milliseconds * 2e6))


def assert_whole(images: torch.Tensor, indices: torch.Tensor) -> None:
    """Every byte of every sample is its own."""
    expected = (indices % 251).to(images.device).to(images.dtype)
    flat = images.flatten(1)
    assert bool((flat == expected[:, None]).all())


def test_pinned_batches_lie_in_page_locked_slots() -> None:
    loader = DataLoader(Frames(256), 16, num_workers=2, pin_memory=True)
    pinned = [images.is_pinned() and indices.is_pinned() for images, indices in loader]
    assert all(pinned)
    feed = feed_of(loader)
    assert feed is not None
    assert any(slot.locked for slot in feed.slots)


def test_without_pin_memory_nothing_is_page_locked() -> None:
    assert not any(images.is_pinned() for images, _ in DataLoader(Frames(64), 16, num_workers=1))


def test_a_slot_is_not_reused_while_its_copy_waits_behind_other_work() -> None:
    """GIVEN a stream that is far behind, WHEN batches are copied without waiting and dropped at once, THEN no copy
    sees a later batch's bytes."""
    loader = DataLoader(Frames(1600), 16, num_workers=2, pin_memory=True)
    copies = []
    for images, indices in loader:
        busy(3)
        copies.append((images.cuda(non_blocking=True), indices.clone()))
        del images, indices
    for images, indices in copies:
        assert_whole(images, indices)


@pytest.mark.parametrize("context", [torch.cuda.stream, lambda stream: stream], ids=["torch.cuda.stream", "the stream"])
def test_a_slot_is_not_reused_while_its_copy_waits_in_another_stream(context: Any) -> None:
    """GIVEN a script that copies ahead of time in a stream of its own, and does not wait for it before the next batch
    WHEN its batches are dropped at once THEN no copy sees a later batch's bytes."""
    loader = DataLoader(Frames(1600), 16, num_workers=2, pin_memory=True)
    side = torch.cuda.Stream()
    copies = []
    for images, indices in loader:
        with context(side):
            busy(3)
            copied = images.cuda(non_blocking=True)
        copied.record_stream(torch.cuda.current_stream())
        copies.append((copied, indices.clone()))
        del images, indices, copied
    side.synchronize()
    for images, indices in copies:
        assert_whole(images, indices)


def test_batches_that_are_kept_stay_what_they_are() -> None:
    kept = list(DataLoader(Frames(640), 16, num_workers=2, pin_memory=True))
    for images, indices in kept:
        assert_whole(images, indices)


def test_to_device_gives_pytorchs_batches() -> None:
    expected = list(TorchLoader(Frames(100), 16, num_workers=1))
    found = list(to_device(DataLoader(Frames(100), 16, num_workers=2), "cuda"))
    assert len(found) == len(expected)
    for (images, indices), (stock_images, stock_indices) in zip(found, expected, strict=True):
        assert images.is_cuda
        assert images.dtype == torch.uint8
        assert torch.equal(images.cpu(), stock_images)
        assert torch.equal(indices.cpu(), stock_indices)


def test_to_device_is_right_when_the_consumer_lags_behind() -> None:
    """GIVEN a consumer whose work runs late and drops each batch at once, THEN what it computed is of that batch."""
    sums, wanted = [], []
    for images, indices in to_device(DataLoader(Frames(1600), 16, num_workers=2), "cuda"):
        busy(2)
        sums.append(images.flatten(1).float().mean(1))
        wanted.append(indices)
        del images, indices
    for mean, indices in zip(sums, wanted, strict=True):
        assert torch.equal(mean, (indices % 251).float())


def test_a_host_that_never_waits_does_not_pile_up_copies() -> None:
    """GIVEN batches that come faster than the wire takes them WHEN nothing in the loop waits for the GPU THEN it holds
    no more host batches than the few that are on their way."""
    memory = torch.zeros(64 << 20, dtype=torch.uint8).pin_memory()
    made: list[weakref.ref[torch.Tensor]] = []

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(200):
            batch = memory.view(-1)
            made.append(weakref.ref(batch))
            yield batch

    held = [sum(batch() is not None for batch in made) for _ in to_device(batches(), "cuda")]
    assert len(held) == 200
    assert max(held) <= 4


def test_to_device_makes_floats_and_channels_last_on_the_gpu() -> None:
    on_device = to_device(DataLoader(Frames(64), 16, num_workers=1), "cuda", dtype=torch.bfloat16, channels_last=True)
    for images, indices in on_device:
        assert images.dtype == torch.bfloat16
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert indices.dtype == torch.int64


def test_to_device_takes_pytorchs_loader_and_any_iterable() -> None:
    theirs = TorchLoader(Frames(64), 16, num_workers=1)
    assert [indices.tolist() for _, indices in to_device(theirs, "cuda")] == [
        list(range(start, start + 16)) for start in range(0, 64, 16)
    ]
    assert feed_of(theirs) is not None

    def plain() -> Iterator[Any]:
        yield {"x": torch.ones(2), "name": "a"}

    (batch,) = to_device(plain(), "cuda")
    assert batch["x"].is_cuda
    assert batch["name"] == "a"


def test_to_device_resumes_where_the_loop_was_not_where_the_copies_were() -> None:
    loader = DataLoader(Frames(160), 16, shuffle=True, num_workers=1)
    on_device = to_device(loader, "cuda")
    torch.manual_seed(3)
    pass_ = iter(on_device)
    for _ in range(3):
        next(pass_)
    state = on_device.state_dict()
    rest = [indices.cpu() for _, indices in pass_]
    other = DataLoader(Frames(160), 16, shuffle=True, num_workers=2)
    other.load_state_dict(state)
    assert [indices.tolist() for _, indices in other] == [indices.tolist() for indices in rest]


def test_a_pass_left_half_way_leaves_nothing_running() -> None:
    loader = DataLoader(Frames(640), 16, num_workers=2)
    for _ in range(3):
        for images, indices in to_device(loader, "cuda"):
            assert_whole(images, indices)
            break
    assert sum(len(indices) for _, indices in loader) == 640


@pytest.mark.parametrize("workers", [1, 3])
def test_a_graph_may_be_captured_between_batches(workers: int) -> None:
    """GIVEN batches dropped while a CUDA graph is captured, THEN neither is disturbed."""
    still = torch.zeros(16, device="cuda")
    seen = 0
    for number, (images, indices) in enumerate(DataLoader(Frames(320), 16, num_workers=workers, pin_memory=True)):
        del images
        if number == 4:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                still += 1
            graph.replay()
        seen += len(indices)
    torch.cuda.synchronize()
    assert seen == 320
    assert still.tolist() == [1.0] * 16


class Collecting(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


@pytest.mark.parametrize("kind", [DataLoader, TorchLoader])
def test_workers_do_not_free_what_the_training_process_has_on_the_gpu(kind: Any) -> None:
    """Memory in use on two streams, in a circle only the collector finds: to free it in a forked child aborts."""
    gc.disable()
    try:
        circle: list[Any] = [torch.zeros(1024, device="cuda")]
        circle[0].record_stream(torch.cuda.Stream())
        circle.append(circle)
        del circle
        assert [int(n) for batch in kind(Collecting(), batch_size=2, num_workers=2) for n in batch] == [*range(8)]
    finally:
        gc.enable()
