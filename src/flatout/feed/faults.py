"""Workers that die or stand still, and the samples to blame for it."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from typing import Any

from flatout.feed.account import Account, BadSample, name_of
from flatout.feed.messages import Recipe
from flatout.feed.table import Part
from flatout.feed.worker_pool import WorkerHandle, WorkerPool

LETHAL = 4  # workers that have to die over a sample before it is blamed
STILLBORN, STILLBORN_S = 50, 30.0  # so many workers in a row, for so long, that die without having answered at all


@contextlib.contextmanager
def at_the_file_limit() -> Iterator[None]:
    """Say what to do where this process may open no more files."""
    try:
        yield
    except OSError as problem:
        if problem.errno != errno.EMFILE:
            raise
        raise RuntimeError(
            "Too many open files. Each batch that is kept holds up to two: raise the limit with `ulimit -n`, or keep "
            "copies (`.clone()`). `torch.multiprocessing.set_sharing_strategy('file_system')` helps with PyTorch's own "
            "loader only"
        ) from None


class Faults:
    """What is known of one loader's deaths."""

    def __init__(self, recipe: Recipe, crew: WorkerPool, account: Account, hang_timeout: float) -> None:
        self._recipe = recipe
        self._crew = crew
        self._account = account
        self._hang_timeout = hang_timeout
        self._lethal: set[Any] = set()  # samples not to be tried again
        self._stillborn = 0
        self._answered_at = 0.0

    def answered(self) -> None:
        """Somebody is alive and well."""
        self._stillborn, self._answered_at = 0, time.monotonic()

    def died(self, hand: WorkerHandle) -> None:
        """Count a death against the sample the worker was at; `RuntimeError` when workers do nothing but die."""
        self._account.deaths += 1
        self._blame(hand)
        self._stillborn += not hand.answered
        if self._stillborn >= STILLBORN and time.monotonic() - self._answered_at > STILLBORN_S:
            raise RuntimeError(f"DataLoader workers die before their first batch: the last {self._cause(hand)}")

    def leave_out(self, part: Part) -> None:
        """Have a part made without the samples that are known to kill."""
        if self._lethal:
            part.leave_out |= {row for row, index in enumerate(part.indices) if index in self._lethal}

    def end_hung(self, since: float) -> None:
        """End workers that have stood at the same sample for too long; longer each time, as it may be a slow one.

        Only time that the consumer spent waiting (since `since`) counts: before, nobody looked.
        """
        now = time.monotonic()
        for hand in self._crew:
            at = hand.at()
            if not hand.tasks or at != hand.seen or not hand.seen_at:
                hand.seen, hand.seen_at = at, now
                continue
            assignment = hand.tasks.get(at[0])
            before = sum(assignment.part.batch.deaths.values()) if assignment else 0
            if now - max(since, hand.seen_at) > self._hang_timeout * 2**before and not hand.hung:
                hand.hung = True
                self._crew.kill(hand)

    def _blame(self, hand: WorkerHandle) -> None:
        ticket, row = hand.at()
        assignment = hand.tasks.get(ticket)
        if assignment is None:
            return
        part = assignment.part
        place = part.first_row + row if row >= 0 else -1
        deaths = part.batch.deaths
        deaths[place] = deaths.get(place, 0) + 1
        if deaths[place] < LETHAL or part.finished:
            return
        one = row >= 0 and self._recipe.auto_collation
        index = part.indices[row] if one else part.indices
        why = f"{LETHAL} workers died over it; the last one {self._cause(hand)}"
        bad = BadSample(index=index, name=name_of(self._recipe.dataset, index) if row >= 0 else None, why=why)
        if self._recipe.skip_bad and one:
            self._account.bad.append(bad)
            self._lethal.add(index)
            part.leave_out |= {row}
        else:
            part.fail(bad)

    def _cause(self, hand: WorkerHandle) -> str:
        return f"stood still for over {self._hang_timeout:g} s" if hand.hung else self._crew.cause_of_death(hand)
