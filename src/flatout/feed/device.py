"""Batches that arrive on the GPU: the next ones are copied on a stream of their own while this one computes.

    host batch (page-locked slot) ──copy, convert──► device batch ──event──► your stream waits for it, you compute
             side stream, some batches ahead                    the slot is free when the copy is over

Memory made on the side stream is marked as used on yours (`record_stream`), so the caching allocator hands it
out again only when your work with it is over.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data.dataloader import DataLoader as TorchLoader

from flatout.feed.iterator import FeedIterator
from flatout.feed.loader import DataLoader, iterator_for
from flatout.feed.scheduler import LoaderOptions


def to_device(
    loader: Iterable[Any],
    device: torch.device | str = "cuda",
    *,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    convert: Callable[[Any], Any] | None = None,
    ahead: int = 2,
) -> OnDevice:
    """`loader` with its batches on `device`.

    `dtype` is what uint8 tensors become there, `channels_last` the layout of 4-d floats, and `convert(batch)`
    runs after both, all of it on the side stream. `ahead` batches are on their way while one is in use.
    """
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1 (got {ahead})")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"there is no GPU to bring batches to (device={str(device)!r}); here it is 'cpu'")
    return OnDevice(loader, torch.device(device), dtype, channels_last, convert, ahead)


@dataclass(eq=False)
class OnDevice:
    """A loader whose batches are on the device; all other attributes are the loader's own."""

    _loader: Iterable[Any]
    _device: torch.device
    _dtype: torch.dtype | None
    _channels_last: bool
    _convert: Callable[[Any], Any] | None
    _ahead: int
    _on_the_way: int = 0  # batches

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is (not how far ahead the copies are)."""
        if not isinstance(self._loader, DataLoader):
            raise TypeError(f"{type(self._loader).__name__} has no place to resume from; use flatout.DataLoader")
        return self._loader.state_dict(behind=self._on_the_way)

    def __iter__(self) -> Iterator[Any]:
        host = self._host_batches()
        return self._copied(host) if self._device.type == "cuda" else map(self._moved, host)

    def _host_batches(self) -> Iterator[Any]:
        """The loader's batches, out of page-locked memory where that can be had."""
        loader = self._loader
        if self._device.type == "cuda" and isinstance(loader, TorchLoader) and not loader.pin_memory:
            if isinstance(loader, DataLoader):
                loader.page_lock()
            else:
                iterator, _ = iterator_for(loader, LoaderOptions(page_locked=True))
                if iterator is not None:
                    return iterator
        return iter(loader)

    def _copied(self, host: Iterator[Any]) -> Iterator[Any]:
        side = torch.cuda.Stream(self._device)
        slots = host.slots if isinstance(host, FeedIterator) else None
        if slots is not None:
            slots.watched = False  # we keep a host batch until its copy is over; there is nothing left to wait for
        waiting: collections.deque[tuple[Any, torch.cuda.Event]] = collections.deque()
        copying: collections.deque[tuple[Any, torch.cuda.Event]] = collections.deque()  # host batches in use
        self._on_the_way = 0
        try:
            for batch in itertools.chain(host, itertools.repeat(_END)):
                if batch is not _END:
                    with torch.cuda.stream(side):
                        moved = self._moved(batch)
                        done = torch.cuda.Event()
                        done.phase = "copy"  # type: ignore[attr-defined]  # for the recorder of waits
                        done.record(side)
                    waiting.append((moved, done))
                    copying.append((batch, done))
                    del batch, moved
                    if len(waiting) <= self._ahead:
                        continue
                if not waiting:
                    return
                # A host that never waits would have more and more copies under way, in slots and GPU memory.
                _let_go(copying, keep=self._ahead + 1)
                ready, done = waiting.popleft()
                self._on_the_way = len(waiting)
                current = torch.cuda.current_stream(self._device)
                current.wait_event(done)
                map_tensors(ready, _used_on(current))
                yield ready
                del ready
        finally:
            self._on_the_way = 0
            for _, done in copying:  # a slot must not be written to while its copy still runs
                done.synchronize()
            if slots is not None:
                slots.watched = True

    def _moved(self, batch: Any) -> Any:
        batch = map_tensors(batch, self._tensor)
        return self._convert(batch) if self._convert is not None else batch

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self._device, non_blocking=True)
        if self._dtype is not None and tensor.dtype == torch.uint8:
            tensor = tensor.to(self._dtype)
        # Bytes stay as they are: they may well be height x width x channels.
        if self._channels_last and tensor.dim() == 4 and tensor.is_floating_point():
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor


_END = object()


def _let_go(copying: collections.deque[tuple[Any, torch.cuda.Event]], *, keep: int) -> None:
    """Drop the host batches whose copy is over, and wait for that where there are more than `keep`."""
    while copying:
        done = copying[0][1]
        if not done.query():
            if len(copying) <= keep:
                return
            done.synchronize()
        copying.popleft()


def map_tensors(thing: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A batch with every tensor in it changed, however deep in containers."""
    if isinstance(thing, torch.Tensor):
        return change(thing)
    if isinstance(thing, Mapping):
        changed = {key: map_tensors(value, change) for key, value in thing.items()}
        return changed if type(thing) is dict else type(thing)(changed)  # type: ignore[call-arg]
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(map_tensors(value, change) for value in thing))
    if isinstance(thing, Sequence) and not isinstance(thing, (str, bytes)):
        return type(thing)(map_tensors(value, change) for value in thing)  # type: ignore[call-arg]
    return thing


def _used_on(stream: torch.cuda.Stream) -> Callable[[torch.Tensor], torch.Tensor]:
    def mark(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    return mark
