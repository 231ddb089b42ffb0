"""One loader's batches: hands tasks to workers, takes in results, redoes what died, and keeps the order.

It is driven by the training loop alone: there is no thread. With each batch that is handed over, workers get
enough to do while the training process is away. Where they are of no use, each batch is made here when the
loop asks for it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from torch import multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from flatout.feed import packing, randomness
from flatout.feed.channel import Done, Recipe, Task
from flatout.feed.controller import Tuning
from flatout.feed.randomness import Key
from flatout.feed.slots import Slots
from flatout.feed.worker import SeededDataset
from flatout.feed.worker_pool import Assignment, Batch, FaultCounts, WorkerHandle, WorkerPool
from flatout.sample import budget

STALL_S = 0.01  # of waiting, after which a worker may be stuck and others should help
MIN_UNDER_WAY, RESERVE = 3, 8  # batches under way: at least, and where there is room for so many
RESERVE_BYTES = 1 << 30
SPARE_SLOTS = 4
_one_thread = threading.RLock()  # random generators belong to the whole process


class Auto(int):
    """`num_workers="auto"` as it stands in a loader: a number of workers to begin with, which may change.

    Code that makes another loader from this one's attributes, as Lightning does, hands it on.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What our loader can do that PyTorch's arguments do not say."""

    # None: as many as the loader declares; "tuned": as many, none included, until the scheduler is
    # told otherwise.
    workers: Literal["auto", "tuned"] | None = None
    on_bad_sample: Literal["raise", "skip"] = "raise"
    hang_timeout: float = 600.0
    page_locked: bool = False  # whatever the loader's pin_memory says
    defer: bool = False  # leave to the GPU what samples do to their pictures


@dataclass(slots=True, kw_only=True)
class Epoch:
    """One pass. The sampler is asked no earlier than PyTorch would ask it, where that could be noticed."""

    key: Key
    indices: Iterator[Any]  # of one batch after the other
    ahead: int  # how many batches PyTorch would ask for before they are needed
    free_until: int = 0  # batches before this one may be asked for at any time: nobody can tell
    in_order: bool = True
    next_number: int = 0

    def limit(self, depth: int) -> int:
        """How many batches may be under way, where `depth` would be good to have."""
        return depth if self.next_number < self.free_until else self.ahead

    def next(self) -> Batch | None:
        """Ask the sampler for the next batch; None at the end."""
        for indices in self.indices:
            self.next_number += 1
            return Batch(self.next_number - 1, indices)
        return None


class BatchScheduler:
    """Workers, slots and the batches under way of one loader. What was learned stays from pass to pass."""

    def __init__(self, recipe: Recipe, loader: DataLoader[Any], options: LoaderOptions, *, page_locked: bool) -> None:
        self.recipe = recipe
        available = budget.measure()
        self.slots = Slots(available.memory_available_bytes // 8, page_locked=page_locked)
        self.account = FaultCounts()
        self.pool = WorkerPool(loader.multiprocessing_context, self.account, options.hang_timeout)
        self.pid = os.getpid()
        self.left_workers = False  # for the rest of this pass
        self.given_back = ""  # why PyTorch's iterator has to do from the next pass on
        self.checked = False  # whether a pass with workers was watched for writes to the dataset, from its beginning
        self.iterator: Callable[[], Any] = lambda: None  # the latest, if it is still there
        self.declared = int(loader.num_workers) if options.workers == "tuned" else recipe.declared  # by the script
        self._fixed = options.workers is None
        self._persistent = loader.persistent_workers
        may_do_without = _may_do_without(loader)
        self._tuning = Tuning(recipe.declared, available, fixed=self._fixed, may_do_without=may_do_without)
        if options.workers == "tuned":  # no others until `resize`
            self._tuning.set_workers(self.declared, hold=True)
        self._in_process: SeededDataset | None = None
        self._epoch: Epoch | None = None
        self._table: deque[Batch] = deque()  # under way, in order
        self._start_s = 0.0
        # Not __del__: this also runs before the sockets' own when all of it is found in a cycle, and at exit.
        self._end = weakref.finalize(self, _shut, self.pool, self.slots, os.getpid())

    @property
    def workers(self) -> int:
        """How many workers there should be at present."""
        return self._tuning.workers

    @property
    def why(self) -> str:
        """Why that many."""
        return self._tuning.why

    def resize(self, workers: int, *, hold: bool = False) -> None:
        """Change the number of workers now; the controller goes on from there, unless it is to `hold`.

        As many as were declared stay as many.
        """
        if self._fixed:
            return
        self._tuning.set_workers(workers, hold=hold)
        self._scale()

    @property
    def batches_ahead(self) -> int:
        """How many batches may lie ready, or be under way, before the loop asks for them."""
        return self._depth() if self.workers else 0

    @property
    def in_pass(self) -> bool:
        """Whether a pass is going on."""
        return self._epoch is not None

    # --- passes ----------------------------------------------------------------------------------

    def start_workers(self, recipe: Recipe) -> None:
        """New workers for the next pass, with the dataset as it is now; `OSError` where that fails."""
        self.leave()
        self._end_workers()
        # The loop may have changed anything about the loader since the last pass.
        self.recipe, self._in_process, self.left_workers = recipe, None, False
        began = time.monotonic()
        if self.workers:
            self.pool.begin(recipe)
        self._start_s = time.monotonic() - began

    def begin(self, epoch: Epoch) -> None:
        """Start a pass."""
        self.leave()
        self._epoch = epoch
        self.pool.batch_arrived()
        began = time.monotonic()
        self._scale()
        self._fill()
        self._tuning.begin_pass(time.monotonic() - began + self._start_s)
        self._start_s = 0.0

    def leave(self, epoch: Epoch | None = None) -> None:
        """Give up what is left of the present pass (or of `epoch`, if that is it)."""
        if self._epoch is None or (epoch is not None and epoch is not self._epoch):
            return
        for batch in self._table:
            batch.drop()
        self._table.clear()
        self._finish_pass()

    def _finish_pass(self) -> None:
        self._tuning.end_pass(time.monotonic())
        self._epoch = None
        if not self._persistent:
            self._end_workers()

    def _end_workers(self) -> None:
        written = [task.slot for worker in self.pool for task in worker.tasks if task.slot is not None]
        self.pool.end()
        self.slots.retire(written)  # a worker may still be at it

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        """End all workers and give all memory back."""
        if not self.closed:
            self.leave()
            self._end()

    # --- the loop's side -------------------------------------------------------------------------

    def next(self, timeout_s: float) -> Batch | None:
        """The next finished batch, None at the end; sees to it that workers have enough to do meanwhile."""
        began = time.monotonic()
        waited = 0.0
        self.slots.collect()
        if self.workers and self._epoch is not None and not (self.pool.is_open or self.left_workers):
            # A pass that began without workers: they have the dataset as it is now, as each batch so
            # far had it.
            self.pool.begin(self.recipe)
            self._scale()
        self._receive(0)
        while (batch := self._finished()) is None:
            # Nothing for a while: only now is it worth looking for workers that hang, or hold others up.
            if timeout_s and waited >= timeout_s:
                raise RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds")
            if waited >= STALL_S:
                self.pool.end_hung(began)
                self._help_stuck_workers()
            self._fill()
            if not self._table:
                self._finish_pass()
                return None
            asked = time.monotonic()
            if not self._make_in_process():
                self._receive(min(max(STALL_S, waited), timeout_s - waited if timeout_s else 1.0, 1.0))
            waited += time.monotonic() - asked
        self._table.remove(batch)
        self.pool.batch_arrived()
        # Before the loop goes away to compute, so that workers have something to do meanwhile.
        self._fill()
        self._count(waited, began)
        return batch

    def is_ready(self) -> bool:
        """Whether `next` would neither wait nor raise: a batch is finished, or there are no more."""
        if self._epoch is None:
            return False
        self._receive(0)
        if not self._table:
            self._fill()
        batch = self._finished()
        if batch is None:
            return not self._table
        return batch.problem is None

    def _make_in_process(self) -> bool:
        """Make the next batch here, if no worker is to make it: with the random numbers that it would
        have there."""
        batch = next(batch for batch in self._table if not batch.finished)
        # It may have been given to a worker that is about to leave.
        if (self.pool.is_open and self.workers > 0) or self._epoch is None or batch.given:
            return False
        if self._in_process is None:
            self._in_process = SeededDataset(self.recipe, board=[0])
        try:
            with _one_thread, randomness.untouched():
                batch.data = self._in_process.load(self._epoch.key, batch.number, batch.indices, batch.leave_out)
        except Exception as error:
            worker = batch.number % self.recipe.declared  # the one that PyTorch would have asked
            where = f"in DataLoader worker process {worker}"
            batch.fail(error if self.left_workers else ExceptionWrapper(where=where))
        batch.bad, batch.finished = self._in_process.bad, True
        return True

    def leave_workers(self, *handed_out: Batch) -> None:
        """Make the rest of this pass in this process, as PyTorch does with num_workers=0: all that the loop
        has not got yet, and first of all `handed_out`, if that is taken back."""
        batches = [*handed_out, *self._table]
        for batch in batches:
            batch.drop()
        self._table = deque(Batch(batch.number, batch.indices) for batch in batches)
        self._end_workers()
        self.left_workers, self._in_process = True, None

    def _count(self, waited_s: float, asked_at: float) -> None:
        self.account.batches += 1
        if not self._tuning.handed_over(waited_s, asked_at, time.monotonic()):
            return
        working = len(self.pool.working)
        if self._tuning.decide(working):
            self._scale()
            if self.workers < working:
                self.slots.trim(keep=SPARE_SLOTS)

    def _finished(self) -> Batch | None:
        assert self._epoch is not None
        batches = iter(self._table) if not self._epoch.in_order else islice(self._table, 1)
        return next((batch for batch in batches if batch.finished), None)

    # --- handing out -----------------------------------------------------------------------------

    def _fill(self) -> None:
        """Pull indices as far ahead as is allowed, and hand tasks to workers that have room for them."""
        epoch = self._epoch
        assert epoch is not None
        while len(self._table) < epoch.limit(self._depth()):
            batch = epoch.next()
            if batch is None:
                break
            self._table.append(batch)
        while (worker := self._idlest_worker()) is not None:
            batch = next((batch for batch in self._table if batch.waits), None)
            if batch is None or not self._give(batch, worker):
                break

    def _depth(self) -> int:
        """Batches under way: enough for every worker, and a reserve for a loop that takes them in bursts."""
        enough = max(MIN_UNDER_WAY, round(self._tasks_each * self.workers) + 1)
        return max(enough, min(RESERVE, RESERVE_BYTES // max(1, self.slots.size)))

    @property
    def _tasks_each(self) -> float:
        """How many tasks a worker has at a time: one, until it is known how large a slot has to be."""
        return self._tuning.depth if self.account.made_by_workers else 1

    def _idlest_worker(self) -> WorkerHandle | None:
        """Surplus batches stay queued here for the first worker that has room."""
        with_room = [worker for worker in self.pool.working if len(worker.tasks) < self._tasks_each]
        return min(with_room, key=lambda worker: len(worker.tasks), default=None)

    def _give(self, batch: Batch, worker: WorkerHandle) -> bool:
        """Whether a worker could be given this batch: its channel may be full."""
        assert self._epoch is not None
        self.pool.leave_out_lethal(batch)
        # Without a slot the batch travels in a file of its own: a loop that keeps batches is never
        # waited for.
        slot = self.slots.take()
        number = None if slot is None else slot.number
        closed = tuple(worker.slots & self.slots.closed)
        task = Task(self._epoch.key, batch.number, batch.indices, batch.leave_out, number, closed)
        assignment = Assignment(batch, slot)
        given = False
        try:
            given = self.pool.give(worker, task, slot)
        finally:
            if not given:
                assignment.end()
        if given:
            worker.tasks.append(assignment)
            batch.given += 1
        return given

    def _help_stuck_workers(self) -> None:
        """Give what lies behind a slow sample to workers that have nothing to do."""
        if any(batch.waits for batch in self._table):
            return
        for idle in [worker for worker in self.pool.working if not worker.tasks]:
            stuck = [
                assignment.batch
                for owner in self.pool
                for assignment in islice(owner.tasks, 1, None)
                if assignment.batch.given == 1 and not assignment.batch.finished
            ]
            if not stuck:
                return
            # Its owner may come to it all the same: the result that comes first counts.
            self._give(min(stuck, key=lambda batch: batch.number), idle)

    # --- taking in -------------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        for worker, answer, fds in self.pool.receive(timeout_s):
            if answer is None:
                self._on_end_of_channel(worker)
                continue
            self.pool.batch_arrived()
            assignment = worker.tasks.popleft()
            assignment.end()
            batch = assignment.batch
            batch.given -= 1
            memory = packing.map_file(fds[0]) if fds else None
            if isinstance(answer, ExceptionWrapper) and not batch.finished:
                batch.fail(answer)
            elif not batch.finished:
                self._on_done(assignment, Done(*answer), memory)
            if worker.retiring:
                self.pool.let_go(worker)

    def _on_done(self, assignment: Assignment, done: Done, memory: memoryview | None) -> None:
        """Take a result in, which lies in its slot if not in `memory`."""
        batch = assignment.batch
        if memory is None:
            memory = self.slots.lease(assignment.slot) if assignment.slot is not None else memoryview(bytearray())
        batch.packed, batch.bad, batch.finished = (done.skeleton, done.spans, memory), done.bad, True
        self._tuning.add_batch(done)
        self.account.made_by_workers += 1
        self.account.fills = self.account.fills or done.fills
        self.slots.fit(done.needs)

    def _on_end_of_channel(self, worker: WorkerHandle) -> None:
        """A worker is gone: what it had is made again, and another takes its place."""
        self.pool.blame(worker)
        self._tuning.count_death()
        for assignment in worker.tasks:
            assignment.end()
            assignment.batch.given -= 1
            self.account.redone += assignment.batch.waits
        worker.tasks.clear()
        if self.pool.working and self.pool.never_started(worker):  # those that there are have to do
            return
        self._scale()

    def _scale(self) -> None:
        """Bring the number of workers to what it should be, as soon as there may be some."""
        if self._epoch is None or not self.pool.is_open:
            return
        by_tasks = sorted(self.pool.working, key=lambda worker: len(worker.tasks))
        too_many = len(by_tasks) - self.workers
        for _ in range(-too_many):
            self.pool.start_worker()
        for worker in by_tasks[: max(0, too_many)]:
            self.pool.let_go(worker)


def _may_do_without(loader: DataLoader[Any]) -> bool:
    """Whether batches may be made in the training process: the script has asked for no number of workers,
    they have the dataset as it is, and can be forked."""
    if loader.num_workers and not isinstance(loader.num_workers, Auto):
        return False
    context = loader.multiprocessing_context or multiprocessing
    return not loader.persistent_workers and context.get_start_method() == "fork"


def _shut(pool: WorkerPool, slots: Slots, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves them to its parent
        pool.close()
        slots.close()
