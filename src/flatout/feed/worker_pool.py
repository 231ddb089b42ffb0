"""The workers as the training process sees them: which there are, what each has to do, and which has just
died.

A worker's death is the end of its channel, whatever the cause. Its board then says which task and which row
it was at.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from flatout.feed import channel
from flatout.feed.channel import DropSlot, Message, NewSlot, Recipe, StartWorker, decode, encode
from flatout.feed.epoch import Batch
from flatout.feed.fork_server import Starter, starter_for
from flatout.feed.slots import Slot

_PATIENCE_S = 5.0  # for a worker to end, before it is killed
_BOARD_BYTES = 24


@dataclass(slots=True)
class Assignment:
    """A batch given to a worker, and the slot that it may write to until it answers."""

    batch: Batch
    slot: Slot | None


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker."""

    number: int
    channel: socket
    board: memoryview
    tasks: dict[int, Assignment] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)
    retiring: bool = False  # gets nothing more to do
    answered: bool = False
    hung: bool = False
    seen: tuple[int, int] = (0, 0)
    seen_at: float = 0.0

    @property
    def pid(self) -> int:
        """Its process; 0 until it runs."""
        return self.board[2]

    def position(self) -> tuple[int, int]:
        """The ticket and the row that it is at, or was at when it died."""
        return self.board[0], self.board[1]


class WorkerPool:
    """All workers of one loader. They are started for a pass (`begin`), and end with it (`end`)."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._recipe: Recipe | None = None
        self._starter: Starter | None = None
        self._ending: list[Starter] = []
        self._workers: dict[int, WorkerHandle] = {}  # by the descriptor of the channel
        self._poll = select.poll()
        self._started = 0

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def is_open(self) -> bool:
        """Whether workers can be started."""
        return self._starter is not None

    def begin(self, recipe: Recipe) -> None:
        """Fork the fork server: workers have the dataset as it is now."""
        self.end()
        self._recipe = recipe
        self._starter = starter_for(recipe, self._context)

    def end(self) -> None:
        """Have all workers end, without waiting for that."""
        for worker in list(self):
            self._remove(worker)
        # To wait would take tens of milliseconds of the training's time at the end of each pass.
        if self._starter is not None:
            self._starter.hang_up()
            self._ending.append(self._starter)
            self._starter = None
        self._ending = [starter for starter in self._ending if not starter.reap(0)]

    def close(self) -> None:
        """End all workers, and wait for that."""
        self.end()
        for starter in self._ending:
            starter.reap(_PATIENCE_S)
        self._ending = []

    def start_worker(self) -> WorkerHandle:
        """One more worker."""
        assert self._starter is not None
        self._started += 1
        self._starter.exits()  # read, or they would pile up in its channel
        try:
            near = self._starter.start(self._started)
        except OSError:
            near = self._replace_starter().start(self._started)
        near.setblocking(False)
        board = channel.memory_file(_BOARD_BYTES)
        try:
            worker = WorkerHandle(self._started, near, memoryview(mmap.mmap(board, _BOARD_BYTES)).cast("q"))
            self._workers[near.fileno()] = worker
            self._poll.register(near, select.POLLIN)
            self.send(worker, StartWorker(), board)
        finally:
            os.close(board)
        return worker

    def _replace_starter(self) -> Starter:
        """A new fork server: the one before it was killed."""
        assert self._starter is not None
        assert self._recipe is not None
        self._starter.hang_up()
        self._ending.append(self._starter)
        self._starter = starter_for(self._recipe, self._context)
        return self._starter

    def send(self, worker: WorkerHandle, message: Message, *fds: int) -> bool:
        """False when the worker's channel is full. That of a dead one swallows the message: its end comes
        next."""
        try:
            channel.send(worker.channel, encode(message), fds)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def give_slot(self, worker: WorkerHandle, slot: Slot) -> bool:
        """Make sure that a worker has a slot's memory."""
        if slot.number not in worker.slots:
            if not self.send(worker, NewSlot(slot.number), slot.fd):
                return False
            worker.slots.add(slot.number)
        return True

    def forget_slots(self, slots: list[Slot]) -> None:
        """Have every worker let go of slots that are closed."""
        for slot in slots:
            for worker in self:
                if slot.number in worker.slots:
                    worker.slots.discard(slot.number)
                    self.send(worker, DropSlot(slot.number))

    def receive(self, timeout_s: float) -> list[tuple[WorkerHandle, Any, list[int]]]:
        """What workers have sent; a message of None is a worker's death. Waits for the first for
        `timeout_s`."""
        messages: list[tuple[WorkerHandle, Any, list[int]]] = []
        ready = self._poll.poll(timeout_s * 1000)
        while ready:  # to poll again costs a fifth of reading from a channel that has nothing more
            for descriptor, _ in ready:
                worker = self._workers[descriptor]
                try:
                    fields, fds = channel.receive(worker.channel, wait=False)
                    worker.answered = True
                    messages.append((worker, decode(fields), fds))
                except BlockingIOError:
                    pass
                except (EOFError, OSError) as problem:
                    if isinstance(problem, OSError) and problem.errno == errno.EMFILE:
                        raise  # the worker is alive: this process may open no more files
                    messages.append((worker, None, []))
                    self._remove(worker)
            ready = self._poll.poll(0)
        return messages

    def let_go(self, worker: WorkerHandle) -> None:
        """Have a worker end that gets nothing more to do, once it has done what it has."""
        worker.retiring = True
        if not worker.tasks:
            self._remove(worker)

    def kill(self, worker: WorkerHandle) -> None:
        """End a worker that no longer answers."""
        if worker.pid:  # 0 would be the whole process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Process ids of the workers that have begun to work."""
        return [worker.pid for worker in self if worker.pid]

    def cause_of_death(self, worker: WorkerHandle, patience_s: float = 0.5) -> str:
        """In words, how a worker ended."""
        assert self._starter is not None
        deadline = time.monotonic() + patience_s
        while (status := self._starter.exits().get(worker.number)) is None:
            if time.monotonic() > deadline:
                return "was lost"
            time.sleep(0.005)
        if status >= 0:
            return f"exited with code {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"

    def _remove(self, worker: WorkerHandle) -> None:
        descriptor = worker.channel.fileno()
        if descriptor in self._workers and self._workers[descriptor] is worker:
            del self._workers[descriptor]
            self._poll.unregister(descriptor)
            channel.close_in_children(descriptor, False)
            worker.channel.close()
