"""The workers as the training process sees them: which there are, what each has to do, which has just
died, and why.

A worker's death is the end of its channel. It was at the first of its tasks then, and its board says at which
row.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from flatout.feed import channel, packing
from flatout.feed.channel import BOARD_BYTES, IDLE, Recipe, Span, Task
from flatout.feed.fork_server import Starter, starter_for
from flatout.feed.slots import Slot
from flatout.model.errors import FlatoutError

_PATIENCE_S = 5.0  # for a worker to end, before it is killed
_DEATHS_TO_BLAME = 4  # workers that have to die over a sample before it is blamed
_DEATHS_OF_A_BATCH = 16  # ... between samples: a worker that has just started spends most of its time there
_MOST_IN_VAIN = 20  # times in a row that workers die, and those in their place too, before their first answer
_PATH_ATTRIBUTES = ("samples", "imgs", "paths", "files", "image_paths", "filenames", "image_files", "items")


@dataclass(slots=True, eq=False)
class Batch:
    """One batch on its way, and what has become of it. `problem` is to be raised in its place."""

    number: int
    indices: Any
    leave_out: frozenset[int] = frozenset()  # rows known to be bad
    finished: bool = False  # or nobody wants it any more
    given: int = 0  # to how many workers it is given right now
    deaths: dict[int, int] = field(default_factory=dict)  # row: workers that died over it
    bad: Sequence[tuple[int, str]] = ()
    data: Any = None  # of a batch made in this process
    packed: tuple[bytes, Sequence[Span], memoryview] | None = None  # of one that a worker has made
    problem: Any = None

    @property
    def waits(self) -> bool:
        """Whether it is still to be made, and no worker has it."""
        return not (self.given or self.finished)

    def drop(self) -> None:
        """The worker that makes it may go on: what comes of it is thrown away."""
        self.finished = True
        self.release()

    def fail(self, problem: Any) -> None:
        """There will be no data, only something to raise."""
        self.finished, self.problem = True, problem

    def open(self) -> Any:
        """The batch as the loop gets it."""
        if self.packed is None:
            return self.data
        return packing.unpack(*self.packed)

    def release(self) -> None:
        """Let go of its data and memory."""
        self.data = self.packed = self.problem = None


@dataclass(slots=True)
class Assignment:
    """A batch given to a worker, and the slot that it may write to until it answers."""

    batch: Batch
    slot: Slot | None

    def end(self) -> None:
        """The worker writes no more."""
        if self.slot is not None:
            self.slot.taken = False


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker."""

    number: int
    channel: socket
    board: memoryview
    tasks: deque[Assignment] = field(default_factory=deque)  # it answers them in their order
    slots: set[int] = field(default_factory=set)  # whose memory it has
    retiring: bool = False  # gets nothing more to do
    answers: int = 0
    given_up: bool = False  # it will die, and all that it has is made again
    hung: bool = False
    seen: tuple[int, int] = (0, 0)  # answers, and the row on its board
    seen_at: float = 0.0

    @property
    def pid(self) -> int:
        """Its process; 0 until it runs."""
        return self.board[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A sample that was left out or given up: its index, its file where the dataset shows one, and why."""

    index: Any
    name: str | None
    why: str


class BadSampleError(FlatoutError, RuntimeError):
    """A sample kills every worker that touches it."""

    def __init__(self, bad: BadSample) -> None:
        self.bad = bad
        name = f" ({bad.name})" if bad.name else ""
        super().__init__(
            f"sample {bad.index}{name} cannot be loaded: {bad.why}. "
            "Leave such samples out with DataLoader(..., on_bad_sample='skip')"
        )


@dataclass(slots=True)
class FaultCounts:
    """What has happened to a loader's batches so far."""

    batches: int = 0  # handed to the loop
    made_by_workers: int = 0
    deaths: int = 0  # of workers
    redone: int = 0  # batches that a worker died over
    fills: str | None = None  # what of the dataset they were seen to fill
    bad: list[BadSample] = field(default_factory=list)


class WorkerPool:
    """All workers of one loader. They are started for a pass (`begin`), and end with it (`end`)."""

    def __init__(self, context: Any, account: FaultCounts, hang_timeout: float) -> None:
        self._context = context
        self._account = account
        self._hang_timeout = hang_timeout
        self._recipe: Recipe | None = None
        self._starter: Starter | None = None
        self._ending: list[Starter] = []
        self._workers: dict[int, WorkerHandle] = {}  # by the descriptor of the channel
        self._poll = select.poll()
        self._started = 0  # workers so far
        self._lethal: set[Any] = set()  # samples not to be tried again
        self._in_vain = self._in_vain_up_to = 0  # such deaths in a row, and the workers started by the last

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._workers.values())

    @property
    def working(self) -> list[WorkerHandle]:
        """Those that may get more to do."""
        return [worker for worker in self if not worker.retiring]

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
        self._hang_up()
        # To wait would take tens of milliseconds of the training's time at the end of each pass.
        self._ending = [starter for starter in self._ending if not starter.reap(0)]

    def close(self) -> None:
        """End all workers, and wait for that."""
        self.end()
        for starter in self._ending:
            starter.reap(_PATIENCE_S)
        self._ending = []

    def _hang_up(self) -> None:
        if self._starter is not None:
            self._starter.hang_up()
            self._ending.append(self._starter)
            self._starter = None

    def start_worker(self) -> WorkerHandle:
        """One more worker."""
        assert self._starter is not None
        assert self._recipe is not None
        self._started += 1
        self._starter.exits()  # read, or they would pile up in its channel
        try:
            near = self._starter.start(self._started)
        except OSError:
            self._hang_up()  # the fork server was killed
            self._starter = starter_for(self._recipe, self._context)
            near = self._starter.start(self._started)
        near.setblocking(False)
        board = channel.memory_file(BOARD_BYTES)
        try:
            worker = WorkerHandle(self._started, near, memoryview(mmap.mmap(board, BOARD_BYTES)).cast("q"))
            worker.board[0] = IDLE
            self._workers[near.fileno()] = worker
            self._poll.register(near, select.POLLIN)
            with contextlib.suppress(OSError):  # it has died already: the end of its channel comes next
                channel.send(near, None, [board])
        finally:
            os.close(board)
        return worker

    def give(self, worker: WorkerHandle, task: Task, slot: Slot | None) -> bool:
        """Have a worker make a batch, in a slot if there is one; False when its channel is full.

        The channel of a dead worker swallows the task: its end comes next.
        """
        new = slot is not None and slot.number not in worker.slots
        try:
            channel.send(worker.channel, tuple(task), [slot.fd] if slot is not None and new else ())
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        worker.slots.difference_update(task.closed)
        if slot is not None:
            worker.slots.add(slot.number)
        return True

    def receive(self, timeout_s: float) -> Iterator[tuple[WorkerHandle, Any, list[int]]]:
        """What workers have sent, one by one: what goes wrong with one leaves the others where they are.

        None is a worker's death. Waits for the first for `timeout_s`.
        """
        ready = self._poll.poll(timeout_s * 1000)
        while ready:  # to poll again costs a fifth of reading from a channel that has nothing more
            for descriptor, _ in ready:
                worker = self._workers.get(descriptor)
                if worker is None:  # let go since
                    continue
                try:
                    answer, fds = channel.receive(worker.channel, wait=False)
                except BlockingIOError:
                    continue
                except (EOFError, OSError) as problem:
                    if isinstance(problem, OSError) and problem.errno == errno.EMFILE:
                        # An answer is lost: nobody knows what the next ones are to.
                        worker.given_up = True
                        self._kill(worker)
                        raise
                    self._remove(worker)
                    yield worker, None, []
                    continue
                worker.answers += 1
                if worker.given_up:
                    for fd in fds:
                        os.close(fd)
                    continue
                yield worker, answer, fds
            ready = self._poll.poll(0)

    def let_go(self, worker: WorkerHandle) -> None:
        """Have a worker end that gets nothing more to do, once it has done what it has."""
        worker.retiring = True
        if not worker.tasks:
            self._remove(worker)

    def _kill(self, worker: WorkerHandle) -> None:
        if worker.pid:  # 0 would be the whole process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def never_started(self, worker: WorkerHandle) -> bool:
        """Whether the system permitted no process for this worker."""
        return self._starter is not None and isinstance(self._starter.exits().get(worker.number), str)

    def _cause_of_death(self, worker: WorkerHandle) -> str:
        if worker.hung:
            return f"stood still for over {self._hang_timeout:g} s"
        assert self._starter is not None
        deadline = time.monotonic() + 0.5
        while (status := self._starter.exits().get(worker.number)) is None:
            if time.monotonic() > deadline:
                return "was lost"
            time.sleep(0.005)
        if isinstance(status, str):
            return status
        if status >= 0:
            return f"exited with code {status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-status, f'signal {-status}')}"

    def _remove(self, worker: WorkerHandle) -> None:
        descriptor = worker.channel.fileno()
        if self._workers.pop(descriptor, None) is not None:  # it was not removed before
            self._poll.unregister(descriptor)
            channel.close_in_children(descriptor, False)
            worker.channel.close()

    # --- deaths ----------------------------------------------------------------------------------

    def batch_arrived(self) -> None:
        """From a worker, or at the loop: while there are any, that workers are killed is nothing of
        the data's."""
        self._in_vain = 0

    def blame(self, worker: WorkerHandle) -> None:
        """Count a death, and what the worker was at; `RuntimeError` when workers do nothing but die."""
        self._account.deaths += 1
        if worker.tasks and worker.board[0] != IDLE:
            self._blame(worker, worker.tasks[0].batch, worker.board[0])
        # Those that were there at the last such death are no further sign: a fork server takes all with it.
        if not worker.answers and worker.number > self._in_vain_up_to:
            self._in_vain += 1
            self._in_vain_up_to = self._started
        if self._in_vain >= _MOST_IN_VAIN:
            cause = self._cause_of_death(worker)
            raise RuntimeError(f"DataLoader workers die before their first batch: the last {cause}")

    def leave_out_lethal(self, batch: Batch) -> None:
        """Have a batch made without the samples that are known to kill."""
        if self._lethal:
            batch.leave_out |= {row for row, index in enumerate(batch.indices) if index in self._lethal}

    def end_hung(self, since: float) -> None:
        """End workers that have stood at the same sample for too long.

        Only the time that the loop spent waiting (since `since`) counts: before, nobody looked.
        """
        now = time.monotonic()
        for worker in self:
            at = worker.answers, worker.board[0]
            if not worker.tasks or at != worker.seen or not worker.seen_at:
                worker.seen, worker.seen_at = at, now
            elif now - max(since, worker.seen_at) > self._hang_timeout and not worker.hung:
                worker.hung = True
                self._kill(worker)

    def _blame(self, worker: WorkerHandle, batch: Batch, row: int) -> None:
        assert self._recipe is not None
        batch.deaths[row] = batch.deaths.get(row, 0) + 1
        enough = _DEATHS_TO_BLAME if row >= 0 else _DEATHS_OF_A_BATCH
        if batch.deaths[row] < enough or batch.finished:
            return
        single = row >= 0 and self._recipe.auto_collation
        index = batch.indices[row] if single else batch.indices
        name = name_of(self._recipe.dataset, index) if row >= 0 else None
        why = f"{enough} workers died over it; the last one {self._cause_of_death(worker)}"
        bad = BadSample(index=index, name=name, why=why)
        if self._recipe.skip_bad and single:
            self._account.bad.append(bad)
            self._lethal.add(index)
            batch.leave_out |= {row}
        else:
            batch.fail(BadSampleError(bad))


def name_of(dataset: Any, index: Any) -> str | None:
    """The file behind a sample, if the dataset keeps a list of them."""
    try:
        while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # a Subset
            dataset, index = dataset.dataset, dataset.indices[index]
        for attribute in _PATH_ATTRIBUTES:
            files = getattr(dataset, attribute, None)
            if files is None or callable(files):
                continue
            entry = files[index]
            for part in entry if isinstance(entry, (tuple, list)) else [entry]:
                if isinstance(part, (str, Path)):
                    return str(part)
    except Exception:  # user code may do anything here, and the name is a courtesy
        pass
    return None
