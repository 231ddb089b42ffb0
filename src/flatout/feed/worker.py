"""The worker process: takes tasks from its channel one by one, and answers each exactly once.

It writes on its board which row it is at, so that after its death the training process knows which sample it
died over.
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
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from flatout.feed import channel, packing, randomness
from flatout.feed.channel import IDLE, NO_ROW, Done, Recipe, Task
from flatout.feed.dataset_check import CacheGrowth

_LEFT_OUT = object()  # in place of a sample that is bad


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
        self._board[1] = os.getpid()
        self._slots: dict[int | None, memoryview] = {}
        self._queue: deque[Task] = deque()
        self._schedstat: int | None = None  # a sandboxed kernel may have none
        with contextlib.suppress(OSError):
            self._schedstat = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._cache_growth = CacheGrowth(recipe.dataset)
        # First: what measures a fetcher asks, when that is created, whether this is a worker.
        info = torch_worker.WorkerInfo(id=0, num_workers=recipe.declared, seed=0, dataset=recipe.dataset)
        self._info: Any = info
        torch_worker._worker_info = info
        self._dataset = SeededDataset(recipe, self._board)
        if recipe.defer:
            self._dataset.defer_transforms()
        self._arena = packing.Arena(None)
        if torch_collate.default_collate_fn_map[torch.Tensor] is packing.torch_stack:
            # Also for a custom collate_fn that ends in default_collate.
            torch_collate.default_collate_fn_map[torch.Tensor] = lambda batch, **kw: self._arena.stack(batch, **kw)

    def step(self) -> None:
        """One task, and what the training process sent in the meantime."""
        self._read_tasks()
        task = self._queue.popleft()
        self._board[0] = NO_ROW
        files: list[int] = []
        answer: Any
        try:
            answer = tuple(self._make_batch(task, files))
        except Exception:
            answer = _picklable(ExceptionWrapper(where=f"in DataLoader worker process {self._info.id}"))
        self._board[0] = IDLE
        channel.send(self._channel, answer, files)
        for file in files:
            os.close(file)

    def _read_tasks(self) -> None:
        """All that there are; waits for one where there is nothing to do."""
        while True:
            try:
                fields, fds = channel.receive(self._channel, wait=not self._queue)
            except BlockingIOError:
                return
            task = Task(*fields)
            for slot in task.closed:
                del self._slots[slot]
            if fds:
                self._slots[task.slot] = packing.map_file(fds[0], populate=True)
            self._queue.append(task)

    def _make_batch(self, task: Task, files: list[int]) -> Done:
        """The answer to a task; `files` gets the one that holds the batch where it lies in no slot."""
        began = self._clocks()
        # No slot: the first batches come before it is known how large a slot has to be.
        self._arena = packing.Arena(self._slots.get(task.slot))
        number = task.batch % self._recipe.declared  # of the worker that PyTorch would have asked
        object.__setattr__(self._info, "id", number)
        object.__setattr__(self._info, "seed", task.key[0] + number)
        batch = self._dataset.load(task.key, task.batch, task.indices, task.leave_out)
        skeleton, spans, needs, file = packing.pack(batch, self._arena)
        if file is not None:
            files.append(file)
        wall_s, cpu_s, run_delay_s = (now - then for now, then in zip(self._clocks(), began, strict=True))
        fills = self._cache_growth.after_batch(len(task.indices) if self._recipe.auto_collation else 1)
        return Done(skeleton, spans, needs, self._dataset.bad, wall_s, cpu_s, run_delay_s, fills)

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


class SeededDataset:
    """The rows of a map-style dataset as torch's fetcher sees them, in a worker or in the training process.

    All the rest of fetching is PyTorch's (and what measures it there still does): this seeds the random
    generators before each batch, notes on the board which row is being loaded, and leaves bad ones out.
    """

    def __init__(self, recipe: Recipe, board: memoryview | list[int]) -> None:
        self._dataset = self.__wrapped__ = recipe.dataset  # the latter is for measuring: the user knows this one
        self._samples: Any = self._dataset
        self._recipe = recipe
        self._board = board
        self._fetcher: Any = _DatasetKind.create_fetcher(
            _DatasetKind.Map, self, recipe.auto_collation, self._collate, recipe.drop_last
        )
        self._generators = randomness.generators_in(recipe.dataset)
        self._row = 0
        self._leave_out: frozenset[int] = frozenset()
        self.bad: list[tuple[int, str]] = []

    def defer_transforms(self) -> None:
        """Leave to the GPU what samples do to their pictures."""
        from flatout.feed.deferred.samples import LazySamples  # which needs Pillow

        self._samples = LazySamples(self._dataset)

    def load(self, key: randomness.Key, batch: int, indices: Any, leave_out: frozenset[int] = frozenset()) -> Any:
        """A batch, collated."""
        self._leave_out = leave_out
        self._row = 0
        self.bad = []
        randomness.seed_batch(key, batch, self._generators)
        return self._fetcher.fetch(indices)

    def _collate(self, samples: Any) -> Any:
        self._board[0] = NO_ROW
        if self._recipe.skip_bad and self._recipe.auto_collation:
            samples = [sample for sample in samples if sample is not _LEFT_OUT]
            if not samples:
                return None
        return self._recipe.collate_fn(samples)

    def __getitem__(self, index: Any) -> Any:
        row = self._row
        self._row = row + 1
        self._board[0] = row
        if row in self._leave_out:
            return _LEFT_OUT
        try:
            return self._samples[index]
        except Exception as error:
            if not self._recipe.skip_bad:
                raise
            self.bad.append((row, f"{type(error).__name__}: {error}"))
            return _LEFT_OUT

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._dataset, name)
        if name == "__getitems__" and self._samples is not self._dataset:
            return self._samples.get_many
        return attribute
