"""One loader's feed: hands out the parts of batches, takes in results, redoes what died, and keeps the order.

It is driven by the consumer alone: there is no thread. Enough work for the time of a training step lies with the
workers whenever a batch is handed over, so they go on while the parent is away.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from typing import Any

from torch.utils.data import default_collate

from flatout.feed import packing
from flatout.feed.account import Account
from flatout.feed.epoch import Epoch
from flatout.feed.faults import Faults
from flatout.feed.in_process import InProcess
from flatout.feed.messages import Cancel, Done, Ended, Failed, Recipe, StartWorker, Task
from flatout.feed.numbered import Post, Posts
from flatout.feed.slots import Slots
from flatout.feed.table import Batch, Layout, Part, cut
from flatout.feed.tuning import Tuning
from flatout.feed.worker_pool import Assignment, WorkerHandle, WorkerPool
from flatout.sample.budget import Budget

WORTH_CUTTING_S, PIECE_S = 0.03, 0.01  # a batch that takes a worker less is not divided; how long a piece should take
LATER_PIECE_S = 0.04  # where many come before that batch: a piece costs the training process 50 µs
STALL_S = 0.01  # of waiting, after which a worker may be stuck and others should help
QUICK_S = 2e-3  # batches that take a worker less travel together
TOGETHER, TOGETHER_S, TOGETHER_BYTES = 32, 32e-3, 8 << 20  # at most so many, that take no longer and no more room
AT_ONCE, AT_ONCE_BYTES = 8, 32 << 20  # batches handed over together, at most, and the room that they take
MISHAPS = 3  # among batches that travelled together, after which each travels by itself
SPARE_SLOTS = 4
RESERVE_BYTES = 1 << 30


class BatchScheduler:
    """Workers, slots and the table of one loader, kept from epoch to epoch."""

    def __init__(
        self,
        recipe: Recipe,
        context: Any,
        budget: Budget,
        *,
        workers: int,
        may_do_without: bool,
        page_locked: bool,
        hang_timeout: float,
    ) -> None:
        self.recipe = recipe
        self.crew = WorkerPool(recipe, context)
        self.slots = Slots(budget.memory_available_bytes // 8, page_locked=page_locked, forget=self.crew.forget)
        self.posts = Posts(recipe)
        self.account = Account()
        self.made: deque[Any] = deque()  # batches that are ready, and not asked for yet
        self.pid = os.getpid()
        alone = may_do_without and not recipe.numbered
        self._tuning = Tuning(workers, budget, may_do_without=alone, like=recipe.kind)
        if self.posts:
            self._tuning.hold(len(self.posts), for_good=True)
        self._here: InProcess | None = None
        self._faults = Faults(recipe, self.crew, self.account, hang_timeout)
        self._epoch: Epoch | None = None
        self._table: deque[Batch] = deque()
        self._waiting: deque[Part] = deque()
        self._tickets = 0
        self._layout: Layout | None = None
        self._misfits = 0
        self._row_s = 0.0
        self._batch_s = math.inf
        self._asked_at, self._handed_over = 0.0, 1
        self._batch_bytes = 0
        self._mishaps = 0
        self._cuttable = (
            not recipe.numbered
            and recipe.auto_collation
            and recipe.collate_fn is default_collate
            and not getattr(recipe.dataset, "__getitems__", None)
            and packing.splits()
        )
        # Not __del__: this also runs before the sockets' own when all of it is found in a cycle, and at exit.
        self._end = weakref.finalize(self, _shut, self.crew, self.slots, os.getpid())

    @property
    def workers(self) -> int:
        """How many workers are wanted at present."""
        return len(self.posts) or self._tuning.workers

    @property
    def why(self) -> str:
        """Why that many."""
        return "as declared" if self.posts else self._tuning.why

    def serves(self, recipe: Recipe, *, page_locked: bool) -> bool:
        """Whether batches by this recipe are what is made here."""
        same = recipe == self.recipe and recipe.dataset is self.recipe.dataset
        return same and page_locked == self.slots.page_locked

    def resize(self, workers: int, *, hold: bool = False) -> None:
        """Change the number of workers now; the controller goes on from there, unless it is to `hold`.

        As many as were declared stay as many.
        """
        if self.posts:
            return
        self._tuning.hold(workers, for_good=hold)
        if self._epoch is not None:
            self._scale()

    # --- epochs -----------------------------------------------------------------------------------------------------

    def begin(self, epoch: Epoch, births: list[StartWorker] | None = None, *, turn: int = 0) -> None:
        """Start a pass. `births` tells workers with streams where to begin; without it those of the last pass go on."""
        self.leave()
        self._epoch = epoch
        self._faults.answered()
        for hand in self.crew:
            hand.had_work(time.monotonic())  # what the last pass left undone is no work for this one
        self.posts.begin(self.crew, births, turn)
        self._scale()
        self._fill()

    def leave(self, epoch: Epoch | None = None) -> None:
        """Give up what is left of the present pass (or of `epoch`, if that is it); workers and slots stay."""
        if epoch is not None and epoch is not self._epoch:
            return
        for batch in self._table:
            self._drop(batch)
        self._table.clear()
        self._waiting.clear()
        self.made.clear()
        if self._epoch is not None:
            self._tuning.rest(time.monotonic())
        self._epoch = None

    def ship_again(self) -> None:
        """End all workers, so that the next ones get the dataset as it is now; what was learned stays."""
        self.leave()
        for hand in self.crew:
            for assignment in hand.tasks.values():
                self._writes_no_more(assignment)
        self.crew.close()
        for post in self.posts:
            post.hand = None

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        """End all workers and give all memory back."""
        if not self.closed:
            self.leave()
            self._end()

    def _drop(self, batch: Batch) -> None:
        batch.dropped = True
        if not self.recipe.streams:  # PyTorch's workers finish what they were sent, and their random streams with it
            self._call_off(batch)
        batch.release()
        self._release_slot(batch)

    def _call_off(self, batch: Batch) -> None:
        for hand in self.crew:
            for ticket, assignment in hand.tasks.items():
                if assignment.part.batch is batch:
                    self.crew.tell(hand, Cancel(ticket))

    def _release_slot(self, batch: Batch) -> None:
        """End a divided batch's own hold on its slot; from here on the lease alone keeps it."""
        if batch.slot is not None:
            batch.slot.writers -= 1
            self.slots.give_back(batch.slot)
            batch.slot = None

    # --- the consumer's side ----------------------------------------------------------------------------------------

    def next(self, timeout_s: float, *, heard: bool = False) -> Batch | None:
        """The next finished batch, None at the end; sees to it that workers have enough to do meanwhile.

        Of `several`, which are opened together, the data are in `made`. `heard`: `is_ready` has just been asked.
        """
        began = time.monotonic()
        step_s = (began - self._asked_at) / self._handed_over
        waited = 0.0
        self.slots.collect()
        if not heard:
            self._hear(0)
        batch = self._finished()
        while batch is None:
            if self._waiting or not self._table:
                self._fill()
                if not self._table:
                    self._tuning.rest(time.monotonic())
                    return None
            asked = time.monotonic()
            self._hear(min(max(STALL_S, waited), timeout_s - waited if timeout_s else 1.0, 1.0))
            now = time.monotonic()
            waited += now - asked
            batch = self._finished()
            if batch is None and timeout_s and waited >= timeout_s:
                raise RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds")
            if batch is None and waited >= STALL_S:
                self._faults.end_hung(began)
                self._steal(waited)
        self._take(batch)
        self._open_more(step_s)
        self._fill()
        now = self._asked_at = time.monotonic()
        self._handed_over = max(1, len(self.made) + (not batch.several))
        self._served(self._handed_over, waited, now - began - waited, now)
        return batch

    def is_ready(self) -> bool:
        """Whether `next` has nobody to wait for, and nothing to raise: a batch is finished, or there are no more."""
        if self._epoch is None:
            return False
        if self.crew:
            self._hear(0)
        if not self._table:
            self._fill()
        batch = self._finished()
        return batch.problem() is None if batch is not None else not self._table

    def make_here(self) -> bool:
        """Whether the next batches are in `made`: made just now in this process, as no worker is wanted."""
        if self._table or self.workers or self._epoch is None:
            return False
        began = time.monotonic()
        if self.crew:  # some are about to leave
            self._hear(0)
        self.slots.collect()
        epoch, here = self._epoch, self._here
        if here is None:
            here = self._here = InProcess(self.recipe, drew=self.account.drew)
        epoch.pull_ahead(here.at_once)
        if epoch.coming:
            odd = here.make(epoch.coming, epoch.key, self.made)
            if odd is not None:
                self._table.append(odd)
            now = time.monotonic()
            self._served(len(self.made), now - began, 0.0, now)
        return bool(self.made)

    def _served(self, batches: int, waited: float, parent_s: float, now: float) -> None:
        self.account.batches += batches
        if not self._tuning.served(batches, waited, parent_s, now):
            return
        self._tuning.had_work(sum(hand.had_work(now) for hand in self.crew if hand.tasks))
        working = sum(not hand.retiring for hand in self.crew)
        if self._tuning.decide(working):
            self._scale()
            if self._tuning.workers < working:
                self.slots.trim(keep=SPARE_SLOTS)

    def _take(self, batch: Batch) -> None:
        """Hand a finished batch out of the table, and have another begun in its place."""
        if batch is self._table[0]:
            self._table.popleft()
        else:
            self._table.remove(batch)
        self._release_slot(batch)
        if batch.several:
            self.made.extend(batch.open())
            batch.release()

    def _open_more(self, step_s: float) -> None:
        """Have batches that are there already handed over with this one, which takes less than each by itself (290 µs
        a batch against 430 in a loop on a CPU). No more than are used while a worker makes one, so that none is left
        without work meanwhile, or half of those that are ready: workers that are so far ahead may rest."""
        epoch = self._epoch
        assert epoch is not None
        if self.made or not step_s or not self._batch_bytes:
            return
        ready = len(self._table) - len(self._waiting) - sum(len(hand.tasks) for hand in self.crew)
        enough = max(self._batch_s / step_s, ready / 2)
        most = int(min(AT_ONCE, AT_ONCE_BYTES / self._batch_bytes, enough)) - 1
        if epoch.free() < most:  # near its end a pass is told of each
            return
        while len(self.made) < most and self._table and self._table[0].finished and self._table[0].clean:
            more = self._table[0]
            if more.several:
                return
            try:
                self.made.append(more.open())
            except Exception:  # objects of the script's own, which do so when it is their turn
                return
            self._take(more)
            more.release()

    def _finished(self) -> Batch | None:
        assert self._epoch is not None
        if not self._table:
            return None
        if self._epoch.in_order:
            return self._table[0] if self._table[0].finished else None
        return next((batch for batch in self._table if batch.finished), None)

    def _fill(self) -> None:
        """Pull indices as far ahead as is allowed, and see that every part waiting is with a worker."""
        epoch = self._epoch
        assert epoch is not None
        if not self.workers:
            epoch.pull_ahead(0, self._under_way())
            return
        while self._under_way() < epoch.limit(epoch.ahead if self.posts else self._depth(self._together(epoch))):
            post = self.posts.next(self._has_room)
            batches = epoch.begin(self._together(epoch)) if post is not None or not self.posts else []
            if not batches:
                break
            batch = Batch.of(batches, post.number if post else 0)
            self._cut(batch)
            self._table.append(batch)
            self._waiting.extend(batch.parts)
        while self._waiting:
            part = self._waiting.popleft()
            if part.batch.dropped or part.finished:
                continue
            hand = self._choose(part)
            if hand is None or not self._give(part, hand):
                self._waiting.appendleft(part)
                break

    def _has_room(self, post: Post, among: int) -> bool:
        """Whether a numbered worker is given the next batch: in order it is its turn, else as PyTorch's has room."""
        epoch = self._epoch
        assert epoch is not None
        mine = sum(batch.post == post.number and not batch.finished for batch in self._table)
        return epoch.in_order or mine < epoch.ahead // among

    def _under_way(self) -> int:
        return sum(map(len, self._table))

    def _together(self, epoch: Epoch) -> int:
        """How many of the next batches travel together: to hand over many takes the training process little longer than
        to hand over one. Few at the start of a pass, so that they come soon, and at its end, so that nobody is idle."""
        free = 0 if self.posts else epoch.free() // self._tuning.workers
        if self._batch_s > QUICK_S or free < 2 or self._mishaps >= MISHAPS:
            return 1
        fit = max(1, min(TOGETHER, TOGETHER_BYTES // max(1, self._batch_bytes)))
        self.slots.fit(fit * self._batch_bytes)
        return max(1, min(fit, int(TOGETHER_S / max(1e-6, self._batch_s)), epoch.next_number, free))

    @property
    def _tasks_each(self) -> float:
        """How many tasks a worker has at a time: one, until it is known how large a slot has to be."""
        return self._tuning.depth if self._row_s else 1

    def _depth(self, together: int) -> int:
        """Batches under way: enough for every worker, and a reserve where there is room for one: for a consumer that
        comes in bursts, or because each waits for the slowest of its workers, and the others should not."""
        pieces = len(self._table[-1].parts) if self._table else 1
        enough = max(3, round(self._tasks_each * self._tuning.workers / pieces) + 1)
        reserve = 2 * enough if pieces > 1 else 8 // together
        return together * max(enough, min(reserve, RESERVE_BYTES // max(1, self.slots.size)))

    def _cut(self, batch: Batch) -> None:
        pieces = 1
        if self._cuttable and self._layout is not None and self._misfits < 3 and not batch.several:
            rows = len(batch.indices)
            seconds = rows * self._row_s
            if self.recipe.chunk < rows <= self._layout.rows and seconds > WORTH_CUTTING_S:
                before = sum(len(other.parts) for other in self._table)  # a pass begins with none, and all wait for it
                piece_s = min(LATER_PIECE_S, PIECE_S * (1 + before / self._tuning.workers))
                pieces = min(self._tuning.workers, int(seconds / piece_s))
        if pieces > 1:
            batch.slot = self.slots.take()
            if batch.slot is None:
                pieces = 1
            else:
                batch.slot.writers += 1  # the batch's own hold on it, while parts come and go
                batch.regions = self._layout.regions if self._layout is not None else None
                cut(batch, pieces, self.recipe.chunk)

    # --- handing out ------------------------------------------------------------------------------------------------

    def _choose(self, part: Part) -> WorkerHandle | None:
        if self.posts:
            return self.posts[part.batch.post].hand
        idlest = None
        for hand in self.crew:
            if not hand.retiring and (idlest is None or len(hand.tasks) < len(idlest.tasks)):
                idlest = hand
        # What is more waits here, for who is done first.
        return idlest if idlest is not None and len(idlest.tasks) < self._tasks_each else None

    def _give(self, part: Part, hand: WorkerHandle, *, again: bool = False) -> bool:
        assert self._epoch is not None
        batch = part.batch
        in_parts = len(batch.parts) > 1
        if not batch.several:
            self._faults.leave_out(part)
        if in_parts:
            slot = None if again else batch.slot  # the first worker may yet write there
        else:
            slot = self.slots.take()
        task = Task(
            self._tickets + 1, self._epoch.key, batch.number, part.first_row, part.indices, part.leave_out,
            slot.number if slot else None, batch.regions if in_parts else None, batch.several,
        )  # fmt: skip
        if (slot is not None and not self.crew.show(hand, slot)) or not self.crew.tell(hand, task):
            if slot is not None and not in_parts:
                self.slots.give_back(slot)
            return False
        self._tickets += 1
        if not hand.tasks:
            hand.since = time.monotonic()
        hand.tasks[self._tickets] = Assignment(part, slot)
        part.given += 1
        if slot is not None:
            slot.writers += 1
        return True

    def _steal(self, waited: float) -> None:
        """Give what lies behind a slow sample to workers that have nothing to do.

        A part of a divided batch only where its owner takes far longer than it should: its place in the slot may yet be
        written to, so it travels apart, and this process has to put the batch together.
        """
        if self.posts or self._waiting:
            return
        for idle in [hand for hand in self.crew if not hand.tasks and not hand.retiring]:
            stuck = [
                (assignment.part.batch.number, ticket, hand, assignment.part)
                for hand in self.crew
                for ticket, assignment in list(hand.tasks.items())[1:]
                if assignment.part.given == 1
                and not assignment.part.finished
                and not assignment.part.batch.dropped
                and (len(assignment.part.batch.parts) == 1 or waited > 2 * self._row_s * len(assignment.part.indices))
            ]
            if not stuck:
                return
            _, ticket, owner, part = min(stuck, key=lambda one: one[:2])
            if self._give(part, idle, again=True):
                self.crew.tell(owner, Cancel(ticket))

    # --- taking in --------------------------------------------------------------------------------------------------

    def _hear(self, timeout_s: float) -> None:
        for hand, message, fds in self.crew.listen(timeout_s):
            if message is None:
                self._on_end_of_wire(hand)
                continue
            self._faults.answered()
            assignment = hand.tasks.pop(message.ticket)
            part = assignment.part
            if isinstance(message, Done):
                self._tuning.had_work(hand.had_work(message.ended_s))
            if self.recipe.streams:
                self.posts.track(hand, part.batch, message)
            wanted = self._still_wanted(part)
            part.given -= 1
            if isinstance(message, Done):
                fds = self._on_done(assignment, message, fds) if wanted else fds
            elif wanted and isinstance(message, Failed):
                part.fail(message.error)
            elif wanted and isinstance(message, Ended):
                self._on_stream_end(self.posts[hand.post])
            elif wanted and not part.given:  # one of several went wrong, or it was cancelled and turns out to be wanted
                self._mishaps += part.batch.several
                self._again(part)
            for fd in fds:
                os.close(fd)
            self._writes_no_more(assignment)
            if hand.retiring and not hand.tasks:
                self.crew.dismiss(hand)

    def _still_wanted(self, part: Part) -> bool:
        return not part.batch.dropped and not part.finished and part in part.batch.parts

    def _again(self, part: Part) -> None:
        """Have a part made once more; several batches one by one, so that each has its own fate."""
        if not part.batch.several:
            self._waiting.appendleft(part)
            return
        place = self._table.index(part.batch)
        del self._table[place]
        for each in reversed(part.batch.each()):
            batch = Batch.of([each], part.batch.post)
            self._table.insert(place, batch)
            self._waiting.appendleft(batch.parts[0])

    def _writes_no_more(self, assignment: Assignment) -> None:
        if assignment.slot is not None:
            assignment.slot.writers -= 1
            self.slots.give_back(assignment.slot)

    def _on_done(self, assignment: Assignment, done: Done, fds: list[int]) -> list[int]:
        """Take a result in; the descriptors that are left to close."""
        part, slot = assignment.part, assignment.slot
        batch = part.batch
        in_parts = len(batch.parts) > 1
        if in_parts and slot is not None and done.misfit:
            self._misfits += 1
            self._remake_whole(batch)
            return fds
        if fds:
            memory, fds = packing.map_file(fds[0]), fds[1:]
        elif slot is None:
            memory = packing.empty()
        elif in_parts and batch.memory is not None:
            memory = batch.memory
        else:
            memory = self.slots.lease(slot)
            batch.memory = memory if in_parts else None
        part.packed, part.bad, part.finished = (done.skeleton, done.spans, memory), done.bad, True
        self._tuning.worked(done, len(batch) / len(batch.parts))
        self.account.parts += len(batch)
        self.account.drew |= bool(done.drew)
        self.account.fills = self.account.fills or done.fills
        self._learn(done, len(batch), in_parts=in_parts)
        return fds

    def _learn(self, done: Done, batches: int, *, in_parts: bool) -> None:
        """How long a row takes, how large a slot has to be, and where in it the rows lie."""
        rows = done.rows
        row_s = done.wall_s / max(1, rows)
        self._row_s = 0.9 * self._row_s + 0.1 * row_s if self._row_s else row_s
        if in_parts:
            return
        self._batch_s = self._row_s * rows / batches
        self._batch_bytes = done.needs // batches
        if done.needs > self.slots.size:
            self._layout = None
            self.slots.fit(done.needs)
        elif self._cuttable and done.in_slot and (self._layout is None or self._layout.rows < rows):
            self._layout = Layout.of(done, rows) or self._layout

    def _remake_whole(self, batch: Batch) -> None:
        """Parts that do not go together: let one worker make the batch, as stock would."""
        self._call_off(batch)
        self._make_whole(batch)
        self._waiting.appendleft(batch.parts[0])

    def _make_whole(self, batch: Batch) -> None:
        batch.release()
        self._release_slot(batch)
        cut(batch, 1, self.recipe.chunk)

    def _on_stream_end(self, post: Post) -> None:
        post.active = False
        for batch in [batch for batch in self._table if batch.post == post.number and not batch.finished]:
            self._table.remove(batch)
            self._drop(batch)

    # --- deaths -----------------------------------------------------------------------------------------------------

    def _on_end_of_wire(self, hand: WorkerHandle) -> None:
        """A worker is gone: what it had goes back to waiting, and if nobody sent it away, somebody takes its place."""
        if not hand.leaving:
            self._faults.died(hand)
            self._tuning.died()
        for assignment in reversed(list(hand.tasks.values())):
            part = assignment.part
            part.given -= 1
            self._writes_no_more(assignment)
            if self._still_wanted(part) and not part.given:
                self.account.redone += len(part.batch)
                self._again(part)
        hand.tasks.clear()
        if hand.leaving:
            return
        post = next((post for post in self.posts if post.hand is hand), None)
        if post is not None:
            post.hand = None
            self.posts.man(self.crew, post)
        self._scale()

    def _scale(self) -> None:
        """Bring the number of interchangeable workers to what is wanted."""
        if self.posts or self._epoch is None:
            return
        working = [hand for hand in self.crew if not hand.retiring]
        for _ in range(self._tuning.workers - len(working)):
            self.crew.hire(StartWorker(0, self._epoch.key[0]))
        surplus = max(0, len(working) - self._tuning.workers)
        for hand in sorted(working, key=lambda hand: len(hand.tasks))[:surplus]:
            hand.retiring = True
            if not hand.tasks:
                self.crew.dismiss(hand)
        if not self.workers:
            self._take_back(self._epoch)

    def _take_back(self, epoch: Epoch) -> None:
        """Have this process make all that workers have not finished, and what lies behind it."""
        batches = list(self._table)
        first = next((place for place, batch in enumerate(batches) if not batch.finished), len(batches))
        for batch in reversed(batches[first:]):
            self._drop(batch)
            epoch.coming.extendleft(reversed(batch.each()))
            self._table.pop()
        self._waiting.clear()


def _shut(crew: WorkerPool, slots: Slots, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves them to its parent
        crew.close()
        slots.close()
