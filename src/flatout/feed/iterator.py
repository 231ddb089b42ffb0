"""The iterator a training loop sees: PyTorch's, as far as the loop and the main process's random
stream can tell.

It draws what PyTorch draws when it is created (the sampler's iterator, the base seed), asks the sampler for
indices no earlier than PyTorch would wherever that could be noticed, and leaves the rest to the loader's
`BatchScheduler`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import DataLoader as TorchLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.feed import randomness
from flatout.feed.dataset_check import DatasetCheck
from flatout.feed.scheduler import BatchScheduler, Epoch
from flatout.feed.slots import Slots
from flatout.feed.worker_pool import BadSample, Batch, name_of
from flatout.model.frameworks import PURE_SAMPLERS, WRAPPING_SAMPLERS

NOT_YET = object()


@dataclass(slots=True, eq=False)
class PassPosition:
    """How far a pass over the data has got, and what it takes to come back here."""

    base_seed: int
    epoch: int
    random: dict[str, Any]  # what the sampler may draw from, before it did for this pass
    generators: list[torch.Tensor]
    yielded: int = 0
    finished: bool = False


class FeedIterator(_BaseDataLoaderIter):
    """One pass (with persistent workers: pass after pass) over a loader's batches.

    Where the loader has no workers itself, the rest of the pass is made in this process as soon as the loop
    turns out to write to the dataset, samples to fill it, or one to raise. `give_back` gets the reason of the
    first two.
    """

    def __init__(
        self,
        loader: TorchLoader[Any],
        scheduler: BatchScheduler,
        resume: dict[str, Any] | None = None,
        *,
        check: Callable[[], DatasetCheck] | None = None,
        give_back: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(loader)
        self._give_back = give_back
        self._begin_check = check
        self._check: DatasetCheck | None = None  # from the moment on when there are workers
        if check is not None and scheduler.workers:
            self._check, scheduler.checked = check(), True
        self._as_script = loader.num_workers == 0  # what goes wrong is the script's own, with no worker in it
        self._scheduler = scheduler
        self._latest: Batch | None = None
        self._generators = generators_of(loader)
        self._pure_sampler = is_pure(loader)
        self.position = PassPosition(int(self._base_seed), 0, {}, [])
        if resume is not None:
            self.position = PassPosition(resume["base_seed"], resume["epoch"], {}, [], resume["yielded"])
            randomness.restore(resume["random"])
            for generator, state in zip(self._generators, resume["generators"], strict=True):
                generator.set_state(state)
        self._begin_at_first: TorchLoader[Any] | None = None
        if loader.num_workers or resume is not None:
            self._begin(loader, first=True)
        else:  # PyTorch asks the sampler, which draws, for the first batch: another loader may come between
            self._begin_at_first = loader

    def _reset(self, loader: TorchLoader[Any], first_iter: bool = False) -> None:
        """PyTorch calls this with persistent workers for the next epoch."""
        self.position = PassPosition(self.position.base_seed, self.position.epoch + 1, {}, [])
        self._begin(loader, first=False)

    def _begin(self, loader: TorchLoader[Any], *, first: bool) -> None:
        position, skip = self.position, self.position.yielded
        position.random = {"torch": torch.default_generator.get_state()} if self._pure_sampler else randomness.capture()
        position.generators = [generator.get_state() for generator in self._generators]
        if loader.num_workers > 0 or not first:  # PyTorch with workers asks the sampler twice at the start
            super()._reset(loader, first)
        sampler: Any = self._index_sampler
        # A sampler of torch's own draws when it is started and when it has ended; a batch that is not
        # full ends it.
        batches = len(sampler) if self._pure_sampler else 0
        if is_chained(sampler):
            skip = skip or sampler.first
            self._sampler_iter = sampler.beginning_at(skip)
            if self._pure_sampler:
                batches = sampler.in_all
        else:
            for _ in itertools.islice(self._sampler_iter, skip):
                pass
        self._num_yielded = position.yielded = skip
        self._epoch = Epoch(
            key=(position.base_seed + (_rank() << 48), position.epoch),
            indices=self._sampler_iter,
            ahead=max(1, (loader.prefetch_factor or 2) * self._num_workers),
            free_until=batches - 1,
            in_order=getattr(loader, "in_order", True),
            next_number=skip,
        )
        with _at_the_file_limit():
            self._scheduler.begin(self._epoch)

    # --- the next batch --------------------------------------------------------------------------

    def _next_data(self) -> Any:
        if self._begin_at_first is not None:
            loader, self._begin_at_first = self._begin_at_first, None
            self._begin(loader, first=True)
        # Asked before each batch: the loop may have written to the dataset since the last one.
        if self._must_leave_workers():
            self._scheduler.leave_workers()
        return self._next()

    def ahead(self) -> Any:
        """The next batch before it is asked for; `NOT_YET` where that takes waiting, or could be noticed."""
        if self._begin_at_first is not None or self.position.finished or self.made_when_asked:
            return NOT_YET
        if self._must_leave_workers() or not self._scheduler.is_ready():
            return NOT_YET
        return self._next()

    def in_its_turn(self, data: Any) -> Any:
        """A batch that was fetched `ahead`; made again where the loop has written to the dataset since."""
        if self._latest is None or not self._must_leave_workers():
            return data
        # Nobody has seen that batch: its indices are the next ones again.
        self._scheduler.leave_workers(self._latest)
        self.position.yielded -= 1
        return self._next()

    @property
    def made_when_asked(self) -> bool:
        """Whether batches are made in this process and at that moment, and none may be had ahead."""
        return self._scheduler.left_workers

    def _must_leave_workers(self) -> bool:
        if not self._as_script or self.made_when_asked or self.position.finished:
            return False
        if self._check is None and self._begin_check is not None and self._scheduler.workers:
            self._check = self._begin_check()
        if self._check is not None and (written := self._check.changed()):
            why = f"the loop writes to what it reads ({written}), which no worker would see"
        elif fills := self._scheduler.account.fills:
            why = f"samples fill what they come from ({fills}), and each worker would have one of its own to fill"
        else:
            return False
        self._give_workers_up(why)
        return True

    def _give_workers_up(self, why: str) -> None:
        self._scheduler.given_back = why
        if self._give_back is not None:
            self._give_back(why)

    def _next(self) -> Any:
        position = self.position
        while not position.finished:
            batch = self._next_batch()
            if batch is None:
                position.finished = True
                break
            if self._as_script and batch.problem is not None and not self.made_when_asked:
                self._scheduler.leave_workers(batch)  # once more here, where the exception is the script's own
                continue
            position.yielded += 1
            if self._as_script:  # its indices alone: its data would keep a slot
                self._latest = Batch(batch.number, batch.indices)
            try:
                if not self._handle_problem(batch):
                    data = batch.open()
                    return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
            finally:
                batch.release()
        raise StopIteration

    def _next_batch(self) -> Batch | None:
        try:
            with _at_the_file_limit():
                return self._scheduler.next(self._timeout)
        except (OSError, RuntimeError) as problem:
            if not self._as_script or self.made_when_asked:
                raise
            self._give_workers_up(f"workers cannot work here: {problem}")  # the script asked for none
            self._scheduler.leave_workers()
            return self._scheduler.next(self._timeout)

    def _handle_problem(self, batch: Batch) -> bool:
        """Raise what there is to raise. Else whether all samples of the batch were left out."""
        problem = batch.problem
        if isinstance(problem, ExceptionWrapper):
            problem.reraise()
        elif problem is not None:
            raise problem
        for row, why in batch.bad:
            index = batch.indices[row]
            name = name_of(self._scheduler.recipe.dataset, index)
            self._scheduler.account.bad.append(BadSample(index=index, name=name, why=why))
        left_out = len(batch.bad) + len(batch.leave_out)
        return left_out > 0 and left_out == len(batch.indices)

    @property
    def slots(self) -> Slots:
        """The memory this pass's batches lie in."""
        return self._scheduler.slots

    def __del__(self) -> None:
        scheduler = getattr(self, "_scheduler", None)
        if scheduler is not None and hasattr(self, "_epoch") and os.getpid() == scheduler.pid and not scheduler.closed:
            scheduler.leave(self._epoch)


@contextlib.contextmanager
def _at_the_file_limit() -> Iterator[None]:
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


def _rank() -> int:
    """Ranks that were seeded alike still draw other numbers for their samples."""
    return int(os.environ.get("RANK", "0"))


def generators_of(loader: TorchLoader[Any]) -> list[torch.Generator]:
    """The generators a pass draws from, each once."""
    generators: list[torch.Generator] = []
    for owner in (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in generators):
            generators.append(generator)
    return generators


def is_pure(loader: TorchLoader[Any]) -> bool:
    """Whether the sampler may be asked early: one of a library that draws only when a pass begins."""
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (held := WRAPPING_SAMPLERS.get(_class_name(sampler))) is not None:
        sampler = getattr(sampler, held)
    draws_in_between = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples > len(sampler.data_source)
    )
    return not draws_in_between and _class_name(sampler) in PURE_SAMPLERS


def is_chained(sampler: Any) -> bool:
    """Whether it is flatout's own sampler of all epochs one after the other (`flatout.engine.datasets`)."""
    return isinstance(sampler, BatchSampler) and hasattr(sampler, "beginning_at")


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
