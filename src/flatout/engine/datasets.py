"""From data sets to batches on the device: loaders, a share for every rank, epoch by epoch; and the way back.

    a loader of `flatout train`    one pass over all epochs: workers never stop, an epoch is a part of it
    the caller's own loader        a pass for every epoch

The order of the samples follows from the seed and the epoch alone, whatever the number of workers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset
from torch.utils.data import DataLoader as StockLoader

from flatout.engine.chained_epochs import ChainedEpochs
from flatout.engine.checkpoint import random_state, set_random_state
from flatout.engine.config import DataConfig, TrainConfig, build, found
from flatout.engine.ranks import Ranks
from flatout.feed import DataLoader, feed_of, to_device
from flatout.model.errors import UsageError


def datasets(config: DataConfig) -> tuple[Any, Any]:
    """The training and the validation data; None where there is none to validate with."""
    train = build(config.train, "data.train", **config.args)
    val = build(config.val, "data.val", **config.args) if config.val is not None else None
    made = {"train": train} if config.val is None else {"train": train, "val": val}
    for name, dataset in made.items():
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
            raise UsageError(f"data.{name}: a data set is wanted, {type(dataset).__name__} is none")
    return train, val


def train_loader(
    config: DataConfig, dataset: Any, batch_size: int, seed: int, ranks: Ranks, epochs: int
) -> DataLoader[Any]:
    """Batches to learn from. Their order follows from the seed and the epoch alone.

    Workers go on from one epoch to the next without a stop; without workers there is nothing to go on.
    """
    options = _options(config)
    if isinstance(dataset, IterableDataset):  # it decides the order, and who gets what
        return DataLoader(dataset, batch_size, drop_last=config.drop_last, **options)
    if batch_size * ranks.world > len(dataset) and config.drop_last:
        whole = f"{batch_size} x {ranks.world}" if ranks.world > 1 else str(batch_size)
        raise UsageError(f"train.batch_size: {whole} is more than the {len(dataset)} samples of data.train")
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, ranks.world, ranks.rank, shuffle=config.shuffle, seed=seed, drop_last=config.drop_last
    )
    batches = BatchSampler(sampler, batch_size, config.drop_last)
    if config.workers != 0:
        batches = ChainedEpochs(sampler, batch_size, config.drop_last, epochs)
    return DataLoader(dataset, batch_sampler=batches, **options)


def val_loader(config: DataConfig, dataset: Any, batch_size: int, ranks: Ranks, shared: bool) -> DataLoader[Any]:
    """Batches to validate with, in order; if `shared`, each rank has every so-manieth sample."""
    if not shared or isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size, **_options(config))
    return DataLoader(dataset, batch_size, sampler=range(ranks.rank, len(dataset), ranks.world), **_options(config))


def may_begin_early(val_loader: Any, train_loader: Any) -> bool:
    """Whether a pass over the validation data can begin while one over the training data goes on, and gains by it."""
    if not isinstance(val_loader, StockLoader) or val_loader is train_loader:
        return False  # another's own may share something with the training's
    return val_loader.num_workers > 0 and not isinstance(val_loader.dataset, IterableDataset)


def steps_an_epoch(loader: Any) -> int | None:
    """How many batches there are, if that is known: a stream need not have a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def steps_in_all(train: TrainConfig, loader: Any) -> int | None:
    """How many steps the whole training has, if that is known."""
    an_epoch = steps_an_epoch(loader)
    if an_epoch is None:
        return train.max_steps
    steps = train.epochs * an_epoch
    return min(steps, train.max_steps or steps)


def _options(config: DataConfig) -> dict[str, Any]:
    collate = found(config.collate, "data.collate") if config.collate is not None else None
    return {"num_workers": config.workers, "collate_fn": collate, "on_bad_sample": config.on_bad_sample}


_END = object()


class Batches:
    """What a training learns from. `waited_s` counts the time it had to wait for them."""

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        convert: Callable[[Any], Any] | None,
        say: Callable[[str], None],
    ) -> None:
        self.loader = loader
        self.waited_s = 0.0
        self._device, self._say = device, say
        self._on_device = to_device(loader, device, convert=convert)
        self._endless = isinstance(getattr(loader, "batch_sampler", None), ChainedEpochs)
        self._pass: Iterator[Any] | None = None  # over all epochs
        self._epoch_random: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None

    def of_epoch(self, epoch: int, done: int) -> Iterator[Any]:
        """What is left of an epoch of which so many batches are done."""
        batches = self._begun(epoch, done)
        while True:
            started = time.perf_counter()
            batch = next(batches, _END)
            self.waited_s += time.perf_counter() - started
            if batch is _END:
                return
            yield batch

    def state(self) -> dict[str, Any]:
        """What it takes to go on from here."""
        return {
            "random": random_state(self._device),
            "epoch_random": self._epoch_random,
            "loader": self._on_device.state_dict() if self._begins_anywhere() else {},
            "batches": len(self._on_device) if self._endless else None,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Have the next epoch go on from where `state` was taken."""
        self._resumed = state

    def close(self) -> None:
        """End the workers, which would live as long as the loader; iterated again, it has new ones."""
        self._pass = None
        end_workers(self.loader)

    def _begun(self, epoch: int, done: int) -> Iterator[Any]:
        if not self._endless:
            return self._new_pass(epoch, done)
        if self._pass is None:
            self._pass = self._new_pass(epoch, done)
        else:
            self._epoch_random = random_state(self._device)
            _draw_as_a_new_pass()
        return itertools.islice(self._pass, max(0, len(self._on_device) - done))

    def _new_pass(self, epoch: int, done: int) -> Iterator[Any]:
        loader, resumed, self._resumed = self.loader, self._resumed, None
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if resumed is None or (done == 0 and not self._endless):
            if resumed is not None:
                set_random_state(resumed["random"], self._device)
            self._epoch_random = random_state(self._device)
            batches = iter(self._on_device)
            next(itertools.islice(batches, done, done), None)  # of an epoch that an exception has ended
            return batches
        self._epoch_random = resumed["epoch_random"] if done else resumed["random"]
        if self._begins_anywhere() and "base_seed" in resumed["loader"]:
            assert isinstance(loader, DataLoader)
            place = resumed["loader"]
            if self._endless and resumed.get("batches") != len(self._on_device):  # batches are of another size
                place = {**place, "yielded": epoch * len(self._on_device) + min(done, len(self._on_device))}
            loader.load_state_dict(place)
            batches = iter(self._on_device)
        else:
            if done:
                self._say(f"going forward {done} batches of a loader that cannot begin in the middle")
            set_random_state(self._epoch_random, self._device)
            batches = iter(self._on_device)
            next(itertools.islice(batches, done, done), None)
        set_random_state(resumed["random"], self._device)
        if not done:
            _draw_as_a_new_pass()
        return batches

    def _begins_anywhere(self) -> bool:
        return isinstance(self.loader, DataLoader) and self.loader.num_workers > 0


def _draw_as_a_new_pass() -> None:
    """Dropout is the same with one pass over all epochs as with one for each, and after a resume."""
    torch.empty((), dtype=torch.int64).random_()


def end_workers(loader: Any) -> None:
    """End the processes behind a loader, if it has any of ours."""
    feed = feed_of(loader) if isinstance(loader, StockLoader) else None
    if feed is not None:
        feed.close()
