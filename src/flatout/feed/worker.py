"""The worker process: takes tasks from its wire one by one, answers each exactly once, and keeps nothing.

It first writes on its board (a few bytes shared with the parent) which sample it is at, so that after its death the
parent knows where it stood.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import time
import zlib
from collections import deque
from collections.abc import Sequence
from socket import socket
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind, default_collate
from torch.utils.data._utils import collate as stock_collate
from torch.utils.data._utils import worker as stock_worker

from flatout.feed import packing, randomness, wire
from flatout.feed.messages import (
    Cancel,
    Done,
    DropSlot,
    Ended,
    Failed,
    NewEpoch,
    NewSlot,
    Recipe,
    Skipped,
    StartWorker,
    Task,
    named,
    plain,
)
from flatout.feed.seeded_dataset import NOT_IN_A_ROW, SeededDataset, renumbered, worker_info
from flatout.feed.watch import Filling


class ReplayDiffers(RuntimeError):
    """A dead worker's stream came out differently the second time."""


def main(recipe: Recipe, connection: socket) -> None:
    """Work until the parent hangs up."""
    try:
        birth, (board,) = wire.receive(connection)
        worker = _Worker(recipe, named(birth), connection, board)
        while True:
            worker.step()
    except (EOFError, ConnectionError):
        pass


class _Worker:
    def __init__(self, recipe: Recipe, birth: StartWorker, connection: socket, board: int) -> None:
        self._recipe = recipe
        self._birth = birth
        self._wire = connection
        self._board = memoryview(mmap.mmap(board, 16)).cast("q")
        self._slots: dict[int, packing.Bytes] = {}
        self._queue: deque[Task | NewEpoch] = deque()
        self._cancelled: set[int] = set()
        self._schedstat: int | None = None  # a sandboxed kernel may have none
        with contextlib.suppress(OSError):
            self._schedstat = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._checksum = 0
        self._filling = Filling(recipe.dataset)
        self._drawn_to: tuple[Any, ...] = ()
        self._drew: bool | None = None
        self._spare_normal = False
        self._init_error: ExceptionWrapper | None = None
        self._fetcher: Any = None  # of an iterable dataset
        self._keeps_state = True  # it, or its iterator, as long as that works
        # First: who measures asks it whether this is a worker when the fetcher is made.
        self._info = stock_worker._worker_info = renumbered(worker_info(recipe), birth.number, birth.base_seed)
        self._rows = SeededDataset(recipe, self._board, self._collate)
        if recipe.defer:
            self._rows.defer()
        self._arena = packing.Arena(None)
        if stock_collate.default_collate_fn_map[torch.Tensor] is packing._stock_tensor:
            # A custom collate_fn that ends in default_collate stacks into the slot too, and not into /dev/shm.
            stock_collate.default_collate_fn_map[torch.Tensor] = lambda batch, **kw: self._arena.stack(batch, **kw)
        self._begin()

    # --- starting -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        recipe, birth = self._recipe, self._birth
        randomness.seed_stream(birth.base_seed, birth.number)
        try:
            if recipe.worker_init_fn is not None:
                recipe.worker_init_fn(birth.number)
            if birth.random_state is not None:
                randomness.restore(birth.random_state)
            if recipe.iterable:
                self._open_stream()
        except Exception:
            self._init_error = ExceptionWrapper(where=f"in DataLoader worker process {birth.number}")
        if recipe.streams:
            self._note_state()

    def _open_stream(self) -> None:
        recipe, birth = self._recipe, self._birth
        by_dataset = _keeps_state(recipe.dataset)
        if birth.data_state is not None and by_dataset:
            recipe.dataset.load_state_dict(birth.data_state)
        self._fetcher = _DatasetKind.create_fetcher(
            _DatasetKind.Iterable, recipe.dataset, recipe.auto_collation, recipe.collate_fn, recipe.drop_last
        )
        if birth.data_state is not None:
            if not by_dataset:
                self._fetcher.dataset_iter.load_state_dict(birth.data_state)
            return
        for _ in range(birth.replay):
            packed = packing.pack(self._fetcher.fetch([None] * (recipe.batch_size or 0)), packing.Arena(None))
            memory = packing.map_file(packed.file) if packed.file is not None else None
            self._checksum = _checksum(self._checksum, packed.skeleton, packed.spans, memory)
        if self._checksum != birth.checksum:
            raise ReplayDiffers(
                f"worker {birth.number} of the IterableDataset died, and repeating its first {birth.replay} batches "
                "gave other data: give the dataset state_dict()/load_state_dict(), or make its order repeatable"
            )

    # --- listening ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One task, and whatever the parent said in the meantime."""
        self._listen(wait=not self._queue)
        if not self._queue:
            return
        task = self._queue.popleft()
        if isinstance(task, NewEpoch):
            self._birth = self._birth._replace(random_state=None, replay=0, checksum=0, data_state=None)
            self._checksum = 0
            self._open_stream()
            return
        if task.ticket in self._cancelled:
            self._cancelled.discard(task.ticket)
            wire.send(self._wire, plain(Skipped(task.ticket)))
            return
        self._board[0], self._board[1] = task.ticket, NOT_IN_A_ROW
        self._answer(task)
        self._board[0] = 0

    def _listen(self, *, wait: bool) -> None:
        while True:
            try:
                fields, fds = wire.receive(self._wire, wait=wait)
            except BlockingIOError:
                return
            wait = False
            message = named(fields)
            if isinstance(message, (Task, NewEpoch)):
                self._queue.append(message)
            elif isinstance(message, Cancel):
                if any(isinstance(task, Task) and task.ticket == message.ticket for task in self._queue):
                    self._cancelled.add(message.ticket)
            elif isinstance(message, NewSlot):
                self._slots[message.slot] = packing.map_file(fds[0], populate=True)
            elif isinstance(message, DropSlot):
                self._slots.pop(message.slot, None)

    # --- working --------------------------------------------------------------------------------------------------

    def _answer(self, task: Task) -> None:
        fds: list[int] = []
        try:
            answer: Any = self._work(task, fds)
        except Exception as error:
            if self._recipe.iterable and isinstance(error, StopIteration):
                answer = Ended(task.ticket, randomness.capture())
            elif task.several:
                answer = Skipped(task.ticket)
            else:
                where = f"in DataLoader worker process {self._info.id}"
                answer = Failed(task.ticket, _sendable(self._init_error or ExceptionWrapper(where=where)))
        wire.send(self._wire, plain(answer), fds)
        for fd in fds:
            os.close(fd)

    def _work(self, task: Task, fds: list[int]) -> Done:
        if self._init_error is not None:
            self._init_error.reraise()
        began = self._clocks()
        self._drew = None
        memory = self._slots.get(task.slot) if task.slot is not None else None
        self._arena = arena = packing.Arena(memory, task.regions, task.first_row)
        if self._recipe.iterable:
            packed = packing.pack(self._fetcher.fetch(task.indices), arena)
        elif task.several:
            packed = packing.pack_together((self._load(task, *batch) for batch in task.indices), arena)
        else:
            packed = packing.pack(self._load(task, task.batch, task.indices), arena)
        if packed.file is not None:
            fds.append(packed.file)
        drew, state, data_state = self._drew, None, None
        if self._recipe.streams:
            state, drew = self._state_if_drawn()
        if self._recipe.iterable:
            data_state = self._data_state()
            if data_state is None:
                self._sum_up(packed, memory)
        loaded = [indices for _, indices in task.indices] if task.several else [task.indices]
        rows = sum(map(len, loaded)) if self._recipe.auto_collation else len(loaded)
        ended = self._clocks()
        wall_s, cpu_s, run_delay_s = (now - then for now, then in zip(ended, began, strict=True))
        return Done(
            ticket=task.ticket, skeleton=packed.skeleton, spans=packed.spans, in_slot=packed.file is None,
            needs=packed.needs, regions=packed.regions, misfit=arena.misfit or bool(self._rows.bad),
            bad=self._rows.bad, drew=drew, rows=rows,
            ended_s=ended[0], wall_s=wall_s, cpu_s=cpu_s, run_delay_s=run_delay_s,
            random_state=state, data_state=data_state, checksum=self._checksum, fills=self._filling.after_batch(rows),
        )  # fmt: skip

    def _load(self, task: Task, number: int, indices: Any) -> Any:
        if not self._recipe.streams:  # the worker that PyTorch would have asked
            own = self._birth.number if self._recipe.numbered else number % self._recipe.declared
            renumbered(self._info, own, task.key[0])
        batch = self._rows.load(task.key, number, indices, task.first_row, task.leave_out)
        self._drew = self._drew or self._rows.drew
        if task.several and self._rows.bad:
            raise ValueError("a batch with bad samples has to travel by itself")
        return batch

    def _collate(self, samples: Any) -> Any:
        """The loader's collate_fn, into the arena where it is torch's own."""
        if self._recipe.collate_fn is not default_collate:
            return self._recipe.collate_fn(samples)
        return (packing.collate_whole if self._arena.regions is None else packing.collate_parts)(samples, self._arena)

    def _clocks(self) -> tuple[float, float, float]:
        """Wall time, CPU time (a decoder's threads are not waits for storage), and time ready to run without a core."""
        run_delay_s = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9 if self._schedstat is not None else 0.0
        return time.monotonic(), time.process_time(), run_delay_s

    def _state_if_drawn(self) -> tuple[dict[str, Any] | None, bool]:
        if not self._spare_normal and self._drawn_to == randomness.snapshot():
            return None, False
        return self._note_state(), True

    def _note_state(self) -> dict[str, Any]:
        self._drawn_to, state = randomness.snapshot(), randomness.capture()
        self._spare_normal = "numpy" in state and bool(
            state["numpy"][3]
        )  # which can be used up without a trace in a snapshot
        return state

    def _data_state(self) -> Any:
        """Where the stream is. None where that cannot be told: it is repeated then, should this worker die."""
        dataset, iterator = self._recipe.dataset, self._fetcher.dataset_iter
        keeper = dataset if _keeps_state(dataset) else iterator
        if not self._keeps_state or not _keeps_state(keeper):
            return None
        try:
            state = keeper.state_dict()
            pickle.dumps(state)
        except Exception:  # it takes arguments (litdata's, MosaicML's), or what it gives cannot travel
            self._keeps_state = False
            return None
        return state

    def _sum_up(self, packed: packing.Packed, memory: packing.Bytes | None) -> None:
        if packed.file is not None:
            memory = packing.map_file(os.dup(packed.file))
        self._checksum = _checksum(self._checksum, packed.skeleton, packed.spans, memory)


def _keeps_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _checksum(so_far: int, skeleton: bytes, spans: Sequence[packing.Span], memory: packing.Bytes | None) -> int:
    """A running sum over a look at each batch: all of a small buffer, four windows of a large one."""
    total = zlib.crc32(skeleton, so_far)
    for start, size in spans:
        if memory is not None:
            for window in range(0, size, max(1024, size // 4)):
                total = zlib.crc32(memory[start + window : start + min(window + 1024, size)], total)
    return total


def _sendable(error: ExceptionWrapper) -> ExceptionWrapper:
    try:
        pickle.dumps(error)
    except Exception:  # an exception class that cannot leave this process: its text can
        error.exc_type = RuntimeError
    return error
