"""The worker process: takes tasks from its channel one by one, and answers each exactly once.

It first writes on its board (a few bytes shared with the training process) which task and which row it is
at, so that after its death the training process knows which sample it died over; and its process id.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import time
from collections import deque
from socket import socket
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from flatout.feed import channel, packing
from flatout.feed.channel import Cancel, Done, DropSlot, Failed, NewSlot, Recipe, Skipped, Task, decode, encode
from flatout.feed.dataset_check import CacheGrowth
from flatout.feed.seeded_dataset import NO_ROW, SeededDataset, renumber, worker_info


def main(recipe: Recipe, connection: socket) -> None:
    """Work until the training process hangs up."""
    try:
        _, (board,) = channel.receive(connection)
        worker = _Worker(recipe, connection, board)
        while True:
            worker.step()
    except (EOFError, ConnectionError):
        pass


class _Worker:
    def __init__(self, recipe: Recipe, connection: socket, board: int) -> None:
        self._recipe = recipe
        self._channel = connection
        self._board = memoryview(mmap.mmap(board, 0)).cast("q")
        self._board[2] = os.getpid()
        self._slots: dict[int, memoryview] = {}
        self._queue: deque[Task] = deque()
        self._cancelled: set[int] = set()
        self._schedstat: int | None = None  # a sandboxed kernel may have none
        with contextlib.suppress(OSError):
            self._schedstat = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._cache_growth = CacheGrowth(recipe.dataset)
        # First: what measures a fetcher asks, when that is created, whether this is a worker.
        self._info = torch_worker._worker_info = worker_info(recipe)
        self._dataset = SeededDataset(recipe, self._board, self._collate)
        if recipe.defer:
            self._dataset.defer_transforms()
        self._arena = packing.Arena(None)
        if torch_collate.default_collate_fn_map[torch.Tensor] is packing.torch_stack:
            # A custom collate_fn that ends in default_collate stacks into the slot too, and not into
            # /dev/shm.
            torch_collate.default_collate_fn_map[torch.Tensor] = lambda batch, **kw: self._arena.stack(batch, **kw)

    def step(self) -> None:
        """One task, and what the training process sent in the meantime."""
        self._read_messages(wait=not self._queue)
        if not self._queue:
            return
        task = self._queue.popleft()
        if task.ticket in self._cancelled:
            self._cancelled.discard(task.ticket)
            channel.send(self._channel, encode(Skipped(task.ticket)))
            return
        self._board[0], self._board[1] = task.ticket, NO_ROW
        self._answer(task)
        self._board[0] = 0

    def _read_messages(self, *, wait: bool) -> None:
        while True:
            try:
                fields, fds = channel.receive(self._channel, wait=wait)
            except BlockingIOError:
                return
            wait = False
            message = decode(fields)
            if isinstance(message, Task):
                self._queue.append(message)
            elif isinstance(message, Cancel):
                if any(task.ticket == message.ticket for task in self._queue):
                    self._cancelled.add(message.ticket)
            elif isinstance(message, NewSlot):
                self._slots[message.slot] = packing.map_file(fds[0], populate=True)
            elif isinstance(message, DropSlot):
                self._slots.pop(message.slot, None)

    def _answer(self, task: Task) -> None:
        fds: list[int] = []
        answer: Done | Failed
        try:
            answer = self._make_batch(task, fds)
        except Exception:
            where = f"in DataLoader worker process {self._info.id}"
            answer = Failed(task.ticket, _picklable(ExceptionWrapper(where=where)))
        channel.send(self._channel, encode(answer), fds)
        for fd in fds:
            os.close(fd)

    def _make_batch(self, task: Task, fds: list[int]) -> Done:
        began = self._clocks()
        # No slot: the first batches come before it is known how large a slot has to be.
        memory = self._slots.get(task.slot) if task.slot is not None else None
        self._arena = arena = packing.Arena(memory)
        renumber(self._info, task.batch % self._recipe.declared, task.key[0])  # as the worker PyTorch would have asked
        batch = self._dataset.load(task.key, task.batch, task.indices, task.leave_out)
        packed = packing.pack(batch, arena)
        if packed.file is not None:
            fds.append(packed.file)
        ended = self._clocks()
        rows = len(task.indices) if self._recipe.auto_collation else 1
        wall_s, cpu_s, run_delay_s = (now - then for now, then in zip(ended, began, strict=True))
        return Done(
            ticket=task.ticket,
            skeleton=packed.skeleton,
            spans=packed.spans,
            needs=packed.needs,
            bad=self._dataset.bad,
            wall_s=wall_s,
            cpu_s=cpu_s,
            run_delay_s=run_delay_s,
            fills=self._cache_growth.after_batch(rows),
        )

    def _collate(self, samples: Any) -> Any:
        """The loader's collate_fn, into the arena where it is torch's own."""
        if self._recipe.collate_fn is default_collate:
            return packing.collate_into(self._arena, samples)
        return self._recipe.collate_fn(samples)

    def _clocks(self) -> tuple[float, float, float]:
        """Wall time, CPU time (a decoder's threads are not waits for storage), and time ready to run
        without a core."""
        run_delay_s = 0.0
        if self._schedstat is not None:
            run_delay_s = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
        return time.monotonic(), time.process_time(), run_delay_s


def _picklable(error: ExceptionWrapper) -> ExceptionWrapper:
    try:
        pickle.dumps(error)
    except Exception:  # an exception class that cannot leave this process: its text can
        error.exc_type = RuntimeError
    return error
