"""Workers that die or stand still, the samples to blame for it, and the record of both."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.feed.channel import Recipe
from flatout.feed.epoch import Batch
from flatout.feed.worker_pool import WorkerHandle, WorkerPool
from flatout.model.errors import FlatoutError

_DEATHS_TO_BLAME = 4  # workers that have to die over a sample before it is blamed
_DEATHS_OF_A_BATCH = 16  # ... between samples: a worker that has just started spends most of its time there
_STILLBORN, _STILLBORN_S = 50, 30.0  # so many workers in a row, for so long, that die before their first answer
_PATH_ATTRIBUTES = ("samples", "imgs", "paths", "files", "image_paths", "filenames", "image_files", "items")


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
    """What is known of the deaths of one loader's workers."""

    def __init__(self, pool: WorkerPool, account: FaultCounts, hang_timeout: float) -> None:
        self._pool = pool
        self._account = account
        self._hang_timeout = hang_timeout
        self._lethal: set[Any] = set()  # samples not to be tried again
        self._stillborn = 0
        self._answered_at = 0.0

    def answered(self) -> None:
        """A worker has answered: they work."""
        self._stillborn, self._answered_at = 0, time.monotonic()

    def died(self, worker: WorkerHandle, recipe: Recipe) -> None:
        """Blame the sample the worker was at; `RuntimeError` when workers do nothing but die."""
        self._account.deaths += 1
        self._blame(worker, recipe)
        if not worker.answered:
            self._stillborn += 1
        if self._stillborn >= _STILLBORN and time.monotonic() - self._answered_at > _STILLBORN_S:
            raise RuntimeError(f"DataLoader workers die before their first batch: the last {self._cause(worker)}")

    def leave_out_lethal(self, batch: Batch) -> None:
        """Have a batch made without the samples that are known to kill."""
        if self._lethal:
            batch.leave_out |= {row for row, index in enumerate(batch.indices) if index in self._lethal}

    def end_hung(self, since: float) -> None:
        """End workers that have stood at the same sample for too long; longer each time, as it may be a
        slow one.

        Only the time that the loop spent waiting (since `since`) counts: before, nobody looked.
        """
        now = time.monotonic()
        for worker in self._pool:
            at = worker.position()
            if not worker.tasks or at != worker.seen or not worker.seen_at:
                worker.seen, worker.seen_at = at, now
                continue
            assignment = worker.tasks.get(at[0])
            deaths = sum(assignment.batch.deaths.values()) if assignment else 0
            if now - max(since, worker.seen_at) > self._hang_timeout * 2**deaths and not worker.hung:
                worker.hung = True
                self._pool.kill(worker)

    def _blame(self, worker: WorkerHandle, recipe: Recipe) -> None:
        ticket, row = worker.position()
        assignment = worker.tasks.get(ticket)
        if assignment is None:
            return
        batch = assignment.batch
        batch.deaths[row] = batch.deaths.get(row, 0) + 1
        enough = _DEATHS_TO_BLAME if row >= 0 else _DEATHS_OF_A_BATCH
        if batch.deaths[row] < enough or batch.finished:
            return
        single = row >= 0 and recipe.auto_collation
        index = batch.indices[row] if single else batch.indices
        name = name_of(recipe.dataset, index) if row >= 0 else None
        why = f"{enough} workers died over it; the last one {self._cause(worker)}"
        bad = BadSample(index=index, name=name, why=why)
        if recipe.skip_bad and single:
            self._account.bad.append(bad)
            self._lethal.add(index)
            batch.leave_out |= {row}
        else:
            batch.fail(bad)

    def _cause(self, worker: WorkerHandle) -> str:
        if worker.hung:
            return f"stood still for over {self._hang_timeout:g} s"
        return self._pool.cause_of_death(worker)


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
