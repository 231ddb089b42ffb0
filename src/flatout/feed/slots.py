"""The ring: slots of shared memory that the parent owns and workers build batches in.

    free ──take──► being written ──lease──► the user's batch ──dropped──► copy still running? ──► free

A slot is used again when nothing lies over it any more (the lease, an object under all the batch's tensors,
was collected), no worker may still write to it, and the work that was queued on the GPU by then is over, in
every stream. Memory is page-locked with its first batch: to lock pages that nobody has touched stopped
training for seconds.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from flatout.feed import channel

_PAGE = 4096
_closed_but_in_use: set[Slot] = set()


class Slot:
    """One piece of the ring: `taken` while a worker may write to it, `leased` while a batch lies over it."""

    def __init__(self, number: int, size: int, *, page_locked: bool) -> None:
        self.number = number
        self.size = size
        self.fd = channel.memory_file(size)
        channel.close_in_children(self.fd)
        self.taken = False
        self.leased = False
        self._lease: weakref.ref[Any] | None = None
        self._map = mmap.mmap(self.fd, size)
        self._lease_class: Any = type("SlotMemory", (ctypes.c_ubyte * size,), {})  # ctypes' own allow no weak reference
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._to_be_locked = page_locked
        self.locked = False

    @property
    def is_free(self) -> bool:
        """Whether a worker may have it."""
        return not (self.taken or self.leased)

    def lease(self, dropped: deque[Slot]) -> memoryview:
        """The slot's bytes for one batch; when the last tensor over them is gone, the slot is put
        into `dropped`."""
        lease = self._lease_class.from_buffer(self._map)
        self.leased = True
        if self._to_be_locked:
            self._to_be_locked, self.locked = False, _page_lock(self._address, self.size)

        def on_drop(_: object) -> None:
            if self in _closed_but_in_use:
                _closed_but_in_use.discard(self)
                self._unlock()
            else:
                dropped.append(self)

        self._lease = weakref.ref(lease, on_drop)
        return memoryview(lease)

    def close(self) -> None:
        """Give the memory back; a batch that still lies over it keeps it, page-locked, until it is
        dropped."""
        channel.close_in_children(self.fd, False)
        os.close(self.fd)
        if self._lease is not None and self._lease() is not None:
            _closed_but_in_use.add(self)
        else:
            self._unlock()

    def _unlock(self) -> None:
        if self.locked:
            _page_unlock(self._address)


class Slots:
    """All slots of one loader."""

    def __init__(self, most_bytes: int, *, page_locked: bool) -> None:
        self.size = 0
        self.page_locked = page_locked
        self.closed: set[int] = set()  # their numbers, for workers to let go of them
        self.watched = True  # copies out of a slot may still run when its batch is dropped
        self._most_bytes = most_bytes
        self._all: dict[int, Slot] = {}
        self._dropped: deque[Slot] = deque()
        self._cooling: deque[tuple[list[Any], Slot]] = deque()
        self._made = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._all.values())

    def fit(self, needs: int) -> None:
        """Make new slots large enough for a batch of `needs` bytes."""
        # An eighth more: batches that differ a little in size should not make new slots each time.
        if needs > self.size:
            self.size = -(-(needs + needs // 8) // _PAGE) * _PAGE

    def take(self) -> Slot | None:
        """A slot for a worker to write to, or None when the ring may not grow further."""
        for slot in list(self._all.values()):  # the oldest, which may be too small by now, come first
            if slot.is_free and slot.size >= self.size:
                slot.taken = True
                return slot
            if slot.is_free:
                self.retire([slot])
        if not self.size or (len(self._all) + 1) * self.size > self._most_bytes:
            return None
        self._made += 1
        slot = self._all[self._made] = Slot(self._made, self.size, page_locked=self.page_locked)
        slot.taken = True
        return slot

    def lease(self, slot: Slot) -> memoryview:
        return slot.lease(self._dropped)

    def collect(self) -> None:
        """Bring back the slots of dropped batches; called from the training thread only, as it
        records events."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        queued = _queued() if self.watched and any(slot.locked for slot in dropped) else []
        for slot in dropped:
            if queued is None and slot.locked:
                self._dropped.append(slot)
            elif queued and slot.locked:
                self._cooling.append((queued, slot))
            else:
                slot.leased = False
        while self._cooling and all(event.query() for event in self._cooling[0][0]):
            self._cooling.popleft()[1].leased = False

    def trim(self, keep: int) -> None:
        """Close free slots beyond `keep`."""
        self.retire([slot for slot in self._all.values() if slot.is_free][keep:])

    def close(self) -> None:
        self.retire(list(self._all.values()))

    def retire(self, slots: list[Slot]) -> None:
        """Close these, which may still be written to."""
        for slot in slots:
            del self._all[slot.number]
            self.closed.add(slot.number)
            slot.close()


# --- the GPU's side -----------------------------------------------------------------------------

_streams: set[Any] = set()  # those that have been current: copies out of a slot may be queued in any of them


def _queued() -> list[Any] | None:
    """Events behind everything queued so far, none without CUDA; None while a graph is being captured."""
    if not torch.cuda.is_initialized():
        return []
    if torch.cuda.is_current_stream_capturing():
        return None
    events = []
    for stream in {torch.cuda.current_stream(), *_streams}:
        events.append(torch.cuda.Event())
        events[-1].record(stream)
    return events


@functools.cache
def _note_streams() -> None:
    """From now on. A script that copies ahead of time, in a stream of its own, may drop a batch before it
    is copied."""
    for owner, name in ((torch.cuda, "set_stream"), (torch.cuda.Stream, "__enter__")):
        enter = getattr(owner, name, None)
        if enter is None:  # before torch 2.7 a stream is no context of its own
            continue

        @functools.wraps(enter)
        def noted(stream: Any, _enter: Any = enter) -> Any:
            if type(stream) is torch.cuda.Stream:  # one from outside of torch may be gone when we come to it
                _streams.add(stream)
            return _enter(stream)

        setattr(owner, name, noted)


def _page_lock(address: int, size: int) -> bool:
    try:
        _note_streams()
        return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0
    except Exception:  # without page-locking the batch is pinned by a copy, as PyTorch does it
        return False


def _page_unlock(address: int) -> None:
    try:
        torch.cuda.cudart().cudaHostUnregister(address)
    except Exception:
        pass
