"""From datasets to batches on the device: loaders, each rank's share of the samples, and how to resume.

    a loader of `flatout train`    one pass over all epochs: workers never stop between them
    a loader of the caller's       a pass for every epoch

The order of the samples depends on the seed and the epoch alone, whatever the number of workers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset
from torch.utils.data import DataLoader as PyTorchLoader

from flatout.engine.config import DataConfig, FactoryConfig, TrainConfig, build, import_path
from flatout.engine.run_folder import random_state, set_random_state
from flatout.feed import DataLoader, feed_of
from flatout.feed.device import OnDevice
from flatout.inside.timing import tensors_in
from flatout.model.errors import UsageError
from flatout.model.formatting import count_of

Shapes = tuple[torch.Size, ...]  # of the tensors in a batch
Share = tuple[int, int]  # of the samples: this rank's number, and of how many


def build_dataset(config: DataConfig, part: FactoryConfig, where: str) -> Any:
    """The training or the validation data."""
    dataset = build(part, where, **config.args)
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        raise UsageError(f"{where}: expected a data set, {type(dataset).__name__} is none")
    return dataset


def train_loader(
    config: DataConfig, dataset: Any, batch_size: int, train: TrainConfig, share: Share
) -> DataLoader[Any]:
    """Batches to learn from; with workers, all epochs are one pass."""
    rank, world = share
    drop_last, options = config.drop_last, _options(config)
    if isinstance(dataset, IterableDataset):  # it decides the order, and which rank gets what
        return DataLoader(dataset, batch_size, drop_last=drop_last, **options)
    if batch_size * world > len(dataset) and drop_last:
        asked = str(batch_size) + f" x {world}" * (world > 1)
        raise UsageError(f"train.batch_size: {asked} is more than the {count_of(len(dataset), 'sample')} of data.train")
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, world, rank, shuffle=config.shuffle, seed=train.seed, drop_last=drop_last
    )
    batches = BatchSampler(sampler, batch_size, drop_last)
    if config.workers != 0:
        batches = ChainedEpochs(sampler, batch_size, drop_last, train.epochs)
    return DataLoader(dataset, batch_sampler=batches, **options)


def val_loader(config: DataConfig, dataset: Any, batch_size: int, share: Share) -> DataLoader[Any]:
    """Batches to validate with, in order."""
    sampler, (rank, world) = None, share
    if world > 1 and not isinstance(dataset, IterableDataset):
        sampler = range(rank, len(dataset), world)
    return DataLoader(dataset, batch_size, sampler=sampler, **_options(config))


def _options(config: DataConfig) -> dict[str, Any]:
    options = {"num_workers": config.workers, "on_bad_sample": config.on_bad_sample}
    if config.collate is not None:
        options["collate_fn"] = import_path(config.collate, "data.collate")
    return options


def steps_per_epoch(loader: Any) -> int | None:
    """How many batches a loader has; None for a stream without a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def steps_in_all(train: TrainConfig, loader: Any) -> int | None:
    """How many steps the whole training has, if that is known."""
    per_epoch = steps_per_epoch(loader)
    if per_epoch is None:
        return train.max_steps
    steps = train.epochs * per_epoch
    return min(steps, train.max_steps or steps)


def end_workers(loader: Any) -> None:
    """End the processes behind a loader of ours."""
    if isinstance(loader, PyTorchLoader) and (feed := feed_of(loader)) is not None:
        feed.close()


class ChainedEpochs(BatchSampler):
    """The batches of all epochs, each epoch in the order that its number gives; its length is that of
    one epoch."""

    sampler: DistributedSampler[Any]

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, drop_last: bool, epochs: int) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.epochs = epochs
        self._first_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass begin with this epoch."""
        self._first_epoch = epoch

    @property
    def in_all(self) -> int:
        """The number of batches of all epochs."""
        return self.epochs * len(self)

    @property
    def first(self) -> int:
        """The number of the batch that a pass begins with."""
        return self._first_epoch * len(self)

    def __iter__(self) -> Iterator[list[int]]:
        return self.beginning_at(self.first)

    def beginning_at(self, number: int) -> Iterator[list[int]]:
        """The batches from this one on; epochs before it are not drawn."""
        first, within = divmod(number, len(self))
        for epoch in range(first, self.epochs):
            self.sampler.set_epoch(epoch)
            yield from itertools.islice(super().__iter__(), within if epoch == first else 0, None)


class Batches:
    """The batches that a training learns from, on the device. `waited_s` is the time spent waiting
    for them."""

    def __init__(
        self, loader: Iterable[Any], on_device: OnDevice, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self.loader = loader
        self.waited_s = 0.0
        self._device, self._say = device, say
        self._on_device = on_device
        self._one_pass = isinstance(getattr(loader, "batch_sampler", None), ChainedEpochs)
        self._begins_anywhere = isinstance(loader, DataLoader) and loader.num_workers > 0
        self._pass: Iterator[Any] | None = None  # over all epochs
        self._epoch_random: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None

    def of_epoch(self, epoch: int, done: int) -> Iterator[Any]:
        """The rest of an epoch after its first `done` batches."""
        batches = self._begin(epoch, done)
        while True:
            started = time.perf_counter()
            batch = next(batches, self)  # itself marks the end
            self.waited_s += time.perf_counter() - started
            if batch is self:
                return
            yield batch

    def state(self) -> dict[str, Any]:
        """What is needed to go on from here."""
        return {
            "random": random_state(self._device),
            "epoch_random": self._epoch_random,
            "loader": self._on_device.state_dict() if self._begins_anywhere else {},
            "batches": len(self._on_device) if self._one_pass else None,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Let the next epoch go on from where `state` was taken."""
        self._resumed = state

    def close(self) -> None:
        """End the workers, which would live as long as the loader; iterated again, it starts new ones."""
        self._pass = None
        end_workers(self.loader)

    def _begin(self, epoch: int, done: int) -> Iterator[Any]:
        if not self._one_pass:
            return self._new_pass(epoch, done)
        if self._pass is None:
            self._pass = self._new_pass(epoch, done)
        else:
            self._epoch_random = random_state(self._device)
            _draw_as_for_a_new_pass()
        return itertools.islice(self._pass, max(0, len(self._on_device) - done))

    def _new_pass(self, epoch: int, done: int) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        samplers: list[Any] = [getattr(place, "sampler", None) for place in (self.loader, batch_sampler)]
        for sampler in (*samplers, batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if resumed is not None:
            if done or self._one_pass:
                return self._resumed_pass(resumed, epoch, done)
            set_random_state(resumed["random"], self._device)
        self._epoch_random = random_state(self._device)
        return self._skip(done)  # done is not 0 in an epoch that an exception has ended

    def _resumed_pass(self, resumed: dict[str, Any], epoch: int, done: int) -> Iterator[Any]:
        self._epoch_random = resumed["epoch_random"] if done else resumed["random"]
        place = resumed["loader"]
        if self._begins_anywhere and "base_seed" in place:
            assert isinstance(self.loader, DataLoader)
            length = len(self._on_device) if self._one_pass else 0
            if self._one_pass and resumed.get("batches") != length:  # batches have another size now
                place = {**place, "yielded": epoch * length + min(done, length)}
            self.loader.load_state_dict(place)
            batches = iter(self._on_device)
        else:
            if done:
                self._say(f"going forward {done} batches of a loader that cannot begin in the middle")
            set_random_state(self._epoch_random, self._device)
            batches = self._skip(done)
        set_random_state(resumed["random"], self._device)
        if not done:
            _draw_as_for_a_new_pass()
        return batches

    def _skip(self, count: int) -> Iterator[Any]:
        batches = iter(self._on_device)
        next(itertools.islice(batches, count, count), None)
        return batches


def _draw_as_for_a_new_pass() -> None:
    """PyTorch's loader draws a seed for each pass: dropout has to be the same with one pass over all
    epochs."""
    torch.empty((), dtype=torch.int64).random_()


# ------------------------------------------------------------ batches of any structure


def batch_rows(batch: Any) -> int:
    """How many samples a batch has: the length of the first tensor in it."""
    for shape in shapes_in(batch):
        if shape:
            return shape[0]
    raise UsageError(f"there is no tensor in a batch, and no telling how many samples it has (got {batch!r:.60})")


def shapes_in(batch: Any) -> Shapes:
    """The shape of every tensor in a batch."""
    return tuple(tensor.shape for tensor in tensors_in(batch))


def pieces(batch: Any, count: int) -> list[Any]:
    """A batch cut into `count` equal batches, fewer where it has fewer samples."""
    if count == 1:
        return [batch]
    rows = batch_rows(batch)
    count = min(count, rows)
    bounds = itertools.pairwise(rows * place // count for place in range(count + 1))
    return [map_samples(batch, itemgetter(slice(start, end))) for start, end in bounds]


def map_samples(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with `change` applied to each of its tensors, and to each list that has one entry a
    sample."""
    rows = batch_rows(batch)

    def within(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return change(thing) if thing.dim() and len(thing) == rows else thing
        if isinstance(thing, Mapping):
            return {key: within(value) for key, value in thing.items()}
        if not isinstance(thing, list | tuple):
            return thing
        if len(thing) == rows and not any(isinstance(value, Tensor | Mapping | list | tuple) for value in thing):
            return change(thing)
        parts = [within(value) for value in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)

    return within(batch)
