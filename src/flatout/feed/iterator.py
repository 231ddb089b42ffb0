"""The iterator a training loop sees: stock's, as far as the loop and the main process's random stream can tell.

It draws what stock draws when it is made (the sampler's iterator, the base seed), asks the sampler for indices no
earlier than stock would wherever that could be noticed, and leaves the making of batches to the loader's `Feed`.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    RandomSampler,
    _DatasetKind,
)
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import DataLoader as StockLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.feed import randomness
from flatout.feed.account import BadSample, BadSampleError, name_of
from flatout.feed.chained_epochs import ChainedEpochs
from flatout.feed.epoch import Epoch
from flatout.feed.faults import at_the_file_limit
from flatout.feed.messages import StartWorker
from flatout.feed.scheduler import BatchScheduler
from flatout.feed.slots import Slots
from flatout.feed.table import Batch
from flatout.feed.watch import Watch
from flatout.model.frameworks import PURE_SAMPLERS, WRAPPING_SAMPLERS

NOT_YET = object()


@dataclass(slots=True, eq=False)
class Position:
    """How far a pass over the data has got, and what it takes to come back here."""

    base_seed: int
    epoch: int
    random: dict[str, Any]  # what the sampler may draw from, before it did for this pass
    generators: list[torch.Tensor]
    yielded: int = 0
    finished: bool = False
    # Of numbered workers, after each of the last batches: how many there were, whose turn is next, where each is.
    workers: collections.deque[tuple[int, int, list[StartWorker | None]]] = field(
        default_factory=lambda: collections.deque(maxlen=16)
    )


class FeedIterator(_BaseDataLoaderIter):
    """One pass (with persistent workers: pass after pass) over a loader's batches.

    Where the loader has no workers itself, and the loop turns out to write to the dataset, samples to fill it, or one
    to raise, the pass goes on without ours too; `given_back` is told why.
    """

    def __init__(
        self,
        loader: StockLoader[Any],
        feed: BatchScheduler,
        resume: dict[str, Any] | None = None,
        *,
        given_back: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(loader)
        self._given_back = given_back
        self._alone: _Alone | None = None if loader.num_workers else _Alone(loader)
        self._feed = feed
        self._made = feed.made
        self._seed = int(self._base_seed)
        self._epoch_number = 0
        self._generators = generators_of(loader)
        self._pure_sampler = is_pure(loader)
        if resume is not None:
            self._seed = resume["base_seed"]
            self._epoch_number = resume["epoch"]
            randomness.restore(resume["random"])
            for generator, state in zip(self._generators, resume["generators"], strict=True):
                generator.set_state(state)
        skip, turn = (resume["yielded"], resume["turn"]) if resume else (0, 0)
        births = self._births(resume)
        self.position = Position(self._seed, self._epoch_number, {}, [])
        self._begin_at_first: Callable[[], None] | None = None
        if loader.num_workers or resume is not None:
            self._begin(loader, first=True, births=births, skip=skip, turn=turn)
        else:  # stock asks the sampler, which draws, when the first batch is asked for: another loader may come between
            self._begin_at_first = lambda: self._begin(loader, first=True, births=births, skip=0, turn=0)

    def _reset(self, loader: StockLoader[Any], first_iter: bool = False) -> None:
        """Stock's way to say: persistent workers, next epoch."""
        self._epoch_number += 1
        self._begin(loader, first=False, births=None, skip=0, turn=0)

    def _begin(
        self, loader: StockLoader[Any], *, first: bool, births: list[StartWorker] | None, skip: int, turn: int
    ) -> None:
        before = {"torch": torch.default_generator.get_state()} if self._pure_sampler else randomness.capture()
        self.position = Position(self._seed, self._epoch_number, before, [g.get_state() for g in self._generators])
        if loader.num_workers > 0 or not first:  # stock with workers asks the sampler twice at the start
            super()._reset(loader, first)
        endless = self._index_sampler if isinstance(self._index_sampler, ChainedEpochs) else None
        if endless is not None:
            skip = skip or endless.first
            self._sampler_iter = endless.beginning_at(skip)
        else:
            for _ in range(skip if not self._feed.recipe.iterable else 0):
                next(self._sampler_iter)
        if self._alone is not None:
            self._sampler_iter = self._alone.remembered(self._sampler_iter)
        self._num_yielded = self.position.yielded = skip
        self._reached = [post.birth for post in self._feed.posts] if births is None else list(births)
        # A sampler of torch's own draws when it is started and when it has ended, not in between; a last batch that is
        # not full ends it.
        batches = endless.in_all if endless is not None else len(self._index_sampler) if self._pure_sampler else 0
        free = batches - 1 if self._pure_sampler and not self._feed.recipe.streams else 0
        self._epoch = Epoch(
            key=(self._seed, self._epoch_number),
            indices=self._sampler_iter,
            ahead=max(1, (loader.prefetch_factor or 2) * self._num_workers),
            free_until=free,
            in_order=getattr(loader, "in_order", True),
            next_number=skip,
        )
        with at_the_file_limit():
            self._feed.begin(self._epoch, births, turn=turn if self._feed.recipe.streams else skip)

    def _births(self, resume: dict[str, Any] | None) -> list[StartWorker] | None:
        if not self._feed.recipe.streams:
            return None
        fresh = [StartWorker(post.number, self._seed) for post in self._feed.posts]
        if resume is None or resume["workers"] is None:
            return fresh
        if len(resume["workers"]) != len(fresh):
            raise ValueError(
                f"this state was saved with {len(resume['workers'])} numbered workers and cannot go on with "
                f"{len(fresh)}: their number is part of the data's order here"
            )
        return [new._replace(**old) if old else new for new, old in zip(fresh, resume["workers"], strict=True)]

    def _next_data(self) -> Any:
        if self._begin_at_first is not None:
            begin, self._begin_at_first = self._begin_at_first, None
            begin()
        if self._alone is not None and self._alone.is_needed(self._feed.account.fills):
            return self._made_alone(self._alone)
        return self._next_fed()

    def ahead(self) -> Any:
        """The next batch before it is asked for; `NOT_YET` where somebody would have to be waited for."""
        if self._begin_at_first is not None or self.position.finished:
            return NOT_YET
        if not self._feed.workers and self._alone is not None and self._alone.is_needed(self._feed.account.fills):
            return NOT_YET  # it is made here, and would not be as the loop has it by then
        return self._next_fed(heard=True) if self._made or self._feed.is_ready() else NOT_YET

    def in_its_turn(self, batch: Any) -> Any:
        """A batch that was had `ahead`, when it is asked for; made anew where the loop has written to the dataset."""
        alone = self._alone
        if alone is None or self.made_when_asked or not alone.is_needed(self._feed.account.fills):
            return batch
        alone.take_back()
        self.position.yielded -= 1
        return self._made_alone(alone)

    @property
    def made_when_asked(self) -> bool:
        """Whether batches are made in this process and at that moment, as stock does, and none may be had ahead."""
        return self._alone is not None and self._alone.in_force

    def _next_fed(self, *, heard: bool = False) -> Any:
        data = self._fed(heard)
        if self._alone is not None and not self._alone.raises:  # then it has taken its own
            self._alone.forget(self.position.yielded)
        return data

    def _made_alone(self, alone: _Alone) -> Any:
        """As stock does: asked for now, made now."""
        if not self.position.finished:
            self._feed.leave(self._epoch)
            self.position.finished = True  # another pass may have the feed from here on
            if self._given_back is not None and alone.why:
                self._given_back(alone.why)
        data = alone.next()
        self.position.yielded += 1
        return pin_memory(data, self._pin_memory_device) if self._pin_memory else data

    def _fed(self, heard: bool) -> Any:
        position = self.position
        while not position.finished:
            if self._made or self._make_here():
                position.yielded += 1
                data = self._made.popleft()
                if not self._pure_sampler:
                    self._epoch.pull()  # stock asks for another batch whenever it hands one over
                return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
            with at_the_file_limit():
                batch = self._feed.next(self._timeout, heard=heard)
            if batch is None:
                position.finished = True
                break
            if batch.several:
                continue
            if self._alone is not None and not batch.clean and batch.problem() is not None:
                batch.release()
                self._alone.forget(position.yielded)
                self._alone.raises = True  # once more here, where the exception is the script's own
                return self._made_alone(self._alone)
            self._step(batch)
            try:
                if batch.clean or not self._something_wrong(batch):
                    data = batch.open()
                    return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
            finally:
                batch.release()
        raise StopIteration

    def _make_here(self) -> bool:
        made = self._feed.make_here()
        if made and self._alone is not None:
            self._alone.renew()  # what samples leave behind in the dataset is not the loop's doing
        return made

    def _something_wrong(self, batch: Batch) -> bool:
        """Raise what there is to raise; else whether every sample of it is bad."""
        problem = batch.problem()
        if isinstance(problem, ExceptionWrapper):
            problem.reraise()
        elif isinstance(problem, BadSample):
            raise BadSampleError(problem)
        elif problem is not None:
            raise problem
        return self._note_bad(batch)

    def _step(self, batch: Batch) -> None:
        self.position.yielded += 1
        if batch.after is not None:
            self._reached[batch.post] = batch.after
            self.position.workers.append((self.position.yielded, batch.post + 1, list(self._reached)))

    def _note_bad(self, batch: Batch) -> bool:
        """Count samples that were left out; whether none is left."""
        left_out = 0
        for part in batch.parts:
            left_out += len(part.bad) + len(part.leave_out)
            for row, why in part.bad:
                index = part.indices[row]
                name = name_of(self._feed.recipe.dataset, index)
                self._feed.account.bad.append(BadSample(index=index, name=name, why=why))
        return left_out > 0 and left_out == len(batch.indices)

    @property
    def slots(self) -> Slots:
        """The memory this pass's batches lie in."""
        return self._feed.slots

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)
        if feed is not None and hasattr(self, "_epoch") and os.getpid() == feed.pid and not feed.closed:
            feed.leave(self._epoch)


class _Alone:
    """A loader's batches made as stock makes them without workers, from the first one on that nobody has had."""

    def __init__(self, loader: StockLoader[Any]) -> None:
        self._watch = Watch(loader.dataset, loader.collate_fn)
        self._fetcher: Any = _DatasetKind.create_fetcher(
            loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
        )
        self._indices: Iterator[Any] = iter(())
        self._pulled: collections.deque[Any] = collections.deque()  # and not handed out
        self._had = 0
        self._latest: Any = None
        self.why = ""
        self.raises = False

    def remembered(self, indices: Iterator[Any]) -> Iterator[Any]:
        """The same; those that were asked for can be had once more."""
        self._indices = indices
        for one in indices:
            self._pulled.append(one)
            yield one

    def forget(self, had: int) -> None:
        """So many of this pass have been handed out."""
        for _ in range(had - self._had):
            self._latest = self._pulled.popleft()
        self._had = had

    def take_back(self) -> None:
        """Nobody has had the last of them after all."""
        self._pulled.appendleft(self._latest)
        self._had -= 1

    def renew(self) -> None:
        self._watch.renew()

    def is_needed(self, fills: str | None) -> bool:
        """Whether the loop was seen to write to the dataset, samples to fill it, or one to raise."""
        if not self.why:
            written = self._watch.changed()
            self.why = f"the loop writes to what it reads ({written}), which no worker would see" if written else ""
        if not self.why and fills:
            self.why = f"samples fill what they come from ({fills}), and each worker would have one of its own to fill"
        return self.in_force

    @property
    def in_force(self) -> bool:
        return bool(self.why) or self.raises

    def next(self) -> Any:
        indices = self._pulled.popleft() if self._pulled else next(self._indices)
        return self._fetcher.fetch(indices)


def generators_of(loader: StockLoader[Any]) -> list[torch.Generator]:
    """The generators a pass draws from, each once."""
    found: list[torch.Generator] = []
    for owner in (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
            found.append(generator)
    return found


def is_pure(loader: StockLoader[Any]) -> bool:
    """Whether the sampler may be asked early: one of a library that draws only when a pass begins."""
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (held := WRAPPING_SAMPLERS.get(_class_name(sampler))) is not None:
        sampler = getattr(sampler, held)
    if isinstance(sampler, RandomSampler):
        draws_on_the_way = sampler.replacement or sampler.num_samples > len(sampler.data_source)
        if draws_on_the_way:
            return False
    return _class_name(sampler) in PURE_SAMPLERS


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
