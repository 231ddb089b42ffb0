"""From data sets to loaders: the elastic loader, the same order at any number of workers, a share for every rank."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset
from torch.utils.data import DataLoader as StockLoader

from flatout.engine.ranks import Ranks
from flatout.engine.section import Part, Section, build, found
from flatout.engine.step import TrainConfig
from flatout.feed import DataLoader
from flatout.feed.chained_epochs import ChainedEpochs
from flatout.model.errors import UsageError


class DataConfig(Section):
    """Where samples come from. `args` go to both factories, beside their own."""

    train: Part
    val: Part | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = "auto"
    collate: str | None = None  # an import path
    shuffle: bool = True
    drop_last: bool = True
    on_bad_sample: Literal["raise", "skip"] = "raise"


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
