"""The workers as the parent sees them: who is there, what each has to do, and who has just died.

A worker's death is the end of its wire, whatever the cause. Its board then says which task and which sample it was at.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from socket import SHUT_WR, socket
from typing import Any

from flatout.feed import wire
from flatout.feed.fork_server import Starter, starter_for
from flatout.feed.messages import DropSlot, Message, NewSlot, Recipe, StartWorker, named, plain
from flatout.feed.slots import Slot
from flatout.feed.table import Part


@dataclass(slots=True)
class Assignment:
    """A part given to a worker, and the slot it may write to until it answers."""

    part: Part
    slot: Slot | None


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker. `post` is the number that user code sees where numbers have a meaning, else 0."""

    number: int
    post: int
    wire: socket
    board: memoryview
    tasks: dict[int, Assignment] = field(default_factory=dict)
    since: float = 0.0  # has something to do, as far as that is not counted yet
    slots: set[int] = field(default_factory=set)
    retiring: bool = False  # gets nothing more to do
    leaving: bool = False  # was told to go
    answered: bool = False
    hung: bool = False
    pid: int | None = None
    seen: tuple[int, int] = (0, 0)
    seen_at: float = 0.0

    def had_work(self, until: float) -> float:
        """How long it had something to do, up to then, since it was asked last."""
        took = max(0.0, until - self.since)
        self.since += took
        return took

    def at(self) -> tuple[int, int]:
        """The ticket and the row it is at, or was at when it died."""
        return self.board[0], self.board[1]


class WorkerPool:
    """All workers of one loader."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self._recipe = recipe
        self._context = context
        self._starter: Starter | None = None
        self._hands: dict[int, WorkerHandle] = {}  # by the descriptor of the wire
        self._poll = select.poll()
        self._hired = 0
        self._ends: dict[int, int] = {}  # worker number: exit status

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._hands.values())

    def __len__(self) -> int:
        return len(self._hands)

    def hire(self, birth: StartWorker) -> WorkerHandle:
        """One more worker."""
        self._hired += 1
        try:
            near = self._start().start(self._hired)
        except OSError:  # the nursery died unnoticed
            self._stop()
            near = self._start().start(self._hired)
        near.setblocking(False)
        board = wire.memory_file(16)
        try:
            hand = WorkerHandle(self._hired, birth.number, near, memoryview(mmap.mmap(board, 16)).cast("q"))
            self._hands[near.fileno()] = hand
            self._poll.register(near, select.POLLIN)
            self.tell(hand, birth, board)
        finally:
            os.close(board)
        return hand

    def ready(self) -> None:
        """Fork the nursery now, before anything that cannot be taken back."""
        self._start()

    def _start(self) -> Starter:
        if self._starter is None or not self._starter.alive():
            self._stop()
            self._starter = starter_for(self._recipe, self._context)
        return self._starter

    def _stop(self) -> None:
        if self._starter is not None:
            self._starter.close()
            self._starter = None

    def tell(self, hand: WorkerHandle, message: Message, *fds: int) -> bool:
        """Send; False when the worker's wire is full. That of a dead one swallows the message: its end comes next."""
        try:
            wire.send(hand.wire, plain(message), fds)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def show(self, hand: WorkerHandle, slot: Slot) -> bool:
        """Make sure that a worker has a slot's memory."""
        if slot.number not in hand.slots:
            if not self.tell(hand, NewSlot(slot.number), slot.fd):
                return False
            hand.slots.add(slot.number)
        return True

    def forget(self, slots: list[Slot]) -> None:
        """Have every worker let go of slots that are closed."""
        for slot in slots:
            for hand in self:
                if slot.number in hand.slots:
                    hand.slots.discard(slot.number)
                    self.tell(hand, DropSlot(slot.number))

    def listen(self, timeout_s: float) -> list[tuple[WorkerHandle, Any, list[int]]]:
        """What workers said; a message of None is a worker's death. Waits for the first for `timeout_s`."""
        heard: list[tuple[WorkerHandle, Any, list[int]]] = []
        ready = self._poll.poll(timeout_s * 1000)
        while ready:  # asking again costs a fifth of reading from a wire that has nothing more
            for descriptor, _ in ready:
                hand = self._hands[descriptor]
                try:
                    fields, fds = wire.receive(hand.wire, wait=False)
                    hand.answered = True
                    heard.append((hand, named(fields), fds))
                except BlockingIOError:
                    pass
                except (EOFError, OSError) as problem:
                    if isinstance(problem, OSError) and problem.errno == errno.EMFILE:
                        raise  # it is alive: this process may open no more files
                    heard.append((hand, None, []))
                    self._part_with(hand)
            ready = self._poll.poll(0)
        return heard

    def dismiss(self, hand: WorkerHandle) -> None:
        """Let a worker go. It ends by itself when it hears nothing more; until then it may still be writing."""
        hand.retiring = hand.leaving = True
        if hand.tasks:
            hand.wire.shutdown(SHUT_WR)
        else:
            self._part_with(hand)

    def kill(self, hand: WorkerHandle) -> None:
        """End a worker that no longer answers."""
        if self._starter is not None:
            self._starter.kill(hand.number)

    def news(self) -> None:
        """Take in births and exits."""
        if self._starter is None:
            return
        by_number = {hand.number: hand for hand in self}
        for event in self._starter.events():
            if event.status is not None:
                self._ends[event.worker] = event.status
            elif event.worker in by_number:
                by_number[event.worker].pid = event.pid

    def cause_of_death(self, hand: WorkerHandle, patience_s: float = 0.5) -> str:
        """In words, how a worker ended."""
        deadline = time.monotonic() + patience_s
        self.news()
        while hand.number not in self._ends and time.monotonic() < deadline:
            time.sleep(0.005)
            self.news()
        status = self._ends.get(hand.number)
        if status is None:
            return "was lost"
        if status >= 0:
            return f"exited with code {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"

    def pids(self) -> list[int]:
        """Process ids of the living workers that have reported theirs."""
        self.news()
        return [hand.pid for hand in self if hand.pid is not None]

    def close(self) -> None:
        for hand in list(self):
            self._part_with(hand)
        self._stop()

    def _part_with(self, hand: WorkerHandle) -> None:
        descriptor = hand.wire.fileno()
        if descriptor in self._hands and self._hands[descriptor] is hand:
            del self._hands[descriptor]
            self._poll.unregister(descriptor)
            wire.keep_from_children(descriptor, False)
            hand.wire.close()
