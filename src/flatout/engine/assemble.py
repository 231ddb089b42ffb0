"""From a config to a training that runs: everything it names is built, in the order in which one needs the other.

`batch_size: auto` is found here: the fastest batch within a share of the GPU's memory, not the largest that fits. Real
steps are taken at 32, 64, 128 … samples, until more of them no longer learn faster or no longer fit; of those about as
fast as the fastest the smallest is taken. Model, optimizer and random streams are put back. Every rank takes the same
steps, and the slowest and the fullest one decide.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from flatout.augment import Augment
from flatout.engine.checkpoint import random_state, set_random_state
from flatout.engine.config import (
    Config,
    FactoryConfig,
    TrainConfig,
    build,
    effective,
    found,
    load,
    shown,
    without_effect,
)
from flatout.engine.datasets import datasets, steps_in_all, train_loader, val_loader
from flatout.engine.model_setup import Decision, channels_last, decide, device_for, made_ready, switched
from flatout.engine.ranks import Ranks
from flatout.engine.train_step import TrainStep, batch_rows, out_of_memory, taken
from flatout.engine.trainer import Trainer, can_share, is_object
from flatout.feed import to_device
from flatout.files import PRIVATE, write_whole
from flatout.inside.attach import attach
from flatout.launch.protocol import new_folder
from flatout.model.errors import NotSavedError, UsageError
from flatout.model.formatting import in_full
from flatout.model.inputs import load_yaml, text_of


def main(
    path: Path,
    overrides: Sequence[str],
    *,
    preset: str | None,
    resume: bool,
    explain: bool,
    record: bool,
    gpus: int = 1,
) -> Path | None:
    """What `flatout train` does in each rank; the folder of the recording, if `record` asks for one."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, "")  # import paths begin where the person stands
    notes: list[str] = []
    config = load(path, overrides, preset, notes)
    wanted = Path(config.out or f"runs/{path.stem}")
    ranks = Ranks("cpu" if config.train.device == "cpu" or not torch.cuda.is_available() else "cuda")
    if gpus > 1 and config.train.device != "cpu" and not torch.cuda.is_available():
        notes.append(f"--gpus {gpus}: there is no GPU here that torch can use; {ranks.world} ranks train on the CPU")
    with contextlib.ExitStack() as claim:
        if resume or explain or not ranks.first:
            out = _folder(wanted, resume)
        else:
            out = claim.enter_context(_claimed(wanted))
        out, trace = ranks.gathered((out, new_folder(path.stem)))[0]  # the first rank's word
        config = config.model_copy(update={"out": str(out)})
        found_before = _batch_size_of(out) if resume and config.train.batch_size == "auto" else None
        claim.enter_context(attach(trace) if record else contextlib.nullcontext())
        trainer = assemble(config, ranks, found_before)
        assert isinstance(trainer.config, Config)
        for text in (*notes, *without_effect(config)):
            trainer.say(text)
        if explain:
            for decision in trainer.decisions:
                trainer.say(str(decision))
            trainer.say(f"\n{shown(trainer.config)}")
            ranks.leave()
            return None
        if resume and not trainer.resume():
            raise UsageError(f"--resume: there is no whole checkpoint in {out / 'checkpoints'}")
        if trainer.finished:  # as resume has said
            ranks.leave()
            return None
        trainer.say(f"run: {out}", always=not resume and out != wanted)
        if ranks.first:
            _keep(trainer.config, out)
        if ranks.world > 1:  # torchrun ends all when one has died, and each is to say first why it ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # around fit, which hears it; torchrun kills after 30 s
        trainer.fit()
    ranks.leave()
    if trainer.unsaved:
        raise NotSavedError(f"the final weights are not saved: {trainer.unsaved}")
    return trace if record else None


def assemble(config: Config, ranks: Ranks, found_before: int | None = None) -> Trainer:
    """A trainer with everything the config names, and in its own config what `batch_size: auto` has come to: as it was
    `found_before` in this run, or what is fastest now."""
    train = config.train
    device = device_for(train.device, ranks.local_rank)
    _seed(train.seed)
    train_set, val_set = datasets(config.data)
    model = build(config.model, "model")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model: a torch.nn.Module is wanted, {type(model).__name__} is none")
    model.to(device)
    criterion = _taking_two(config.criterion, "criterion") if config.criterion is not None else None
    optimizer, fused = _optimizer(config.optimizer, model, device)
    augmentation = _augmentation(config, device)
    _seed((train.seed + ranks.rank) % 2**32)
    decisions = [fused]
    batch_size = train.batch_size if found_before is None else found_before
    if found_before is not None:
        decisions.append(Decision("train.batch_size", str(batch_size), "as this run has found it", instead=True))
    if batch_size == "auto":
        precision, _ = decide(train.precision, device)
        layout, *_ = made_ready(model, train.model_copy(update={"compile": False}), device)  # as it will train
        step = TrainStep(model, criterion, optimizer, precision, train, say=lambda text: None)
        convert = channels_last if layout.value == "on" else None
        with switched(precision, deterministic=train.deterministic):
            batch_size, why = _fastest(config, train_set, step, convert, augmentation, ranks)
        decisions.append(Decision("train.batch_size", str(batch_size), why, instead=True))
    pieces = min(train.accumulate, batch_size)
    if pieces < train.accumulate:
        why = f"a batch of {batch_size} has no more"
        decisions.append(Decision("train.accumulate", str(pieces), why, instead=True))
    in_force = {"batch_size": batch_size, "accumulate": pieces}
    config = config.model_copy(update={"train": train.model_copy(update=in_force)})
    total = batch_size * ranks.world
    if train.batch_size == "auto" or train.lr_rule != "none":
        scaled = scale_learning_rate(optimizer, train, total)
        decisions.append(Decision("train.lr_rule", train.lr_rule, scaled, instead=True))
    loader = train_loader(config.data, train_set, batch_size, train.seed, ranks, train.epochs)
    workers = f"{loader.num_workers} to begin with" if config.data.workers else "loaded in the training process"
    decisions.append(Decision("data.workers", str(config.data.workers), workers))
    if config.data.workers == 0 and config.data.on_bad_sample == "skip":
        why = "without workers nothing is left out"
        decisions.append(Decision("data.on_bad_sample", "raise", why, instead=True))
    metrics = {name: _taking_two(part, f"metrics.{name}") for name, part in config.metrics.items()}
    shared = ranks.world > 1 and can_share(metrics)
    if ranks.world > 1:
        how = "each rank looks at its part" if shared else "a metric needs all of the data: each rank looks at it"
        decisions.append(Decision("ranks", str(ranks.world), f"one gradient from {total} samples; {how}"))
    val_batch = config.evaluate.batch_size or batch_size
    trainer = Trainer(
        model=model,
        train_loader=loader,
        val_loader=val_loader(config.data, val_set, val_batch, ranks, shared) if val_set is not None else None,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=_scheduler(config, optimizer, loader),
        metrics=metrics,
        augmentation=augmentation,
        config=config,
        device=device,
        ranks=ranks,
        val_shared=shared,
    )
    trainer.decisions += decisions
    if augmentation is not None:
        where = f"on {device.type}, training only; a number of its own for each sample"
        trainer.decisions.append(Decision("augment", type(augmentation).__name__, where))
    return trainer


def _seed(number: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


def _function(part: FactoryConfig, where: str) -> Any:
    """A loss or a metric, or what makes one: `torch.nn.functional:mse_loss`, `torch.nn:CrossEntropyLoss`."""
    thing = found(part.factory, f"{where}.factory")
    made = build(part, where) if isinstance(thing, type) or part.args else thing
    if not callable(made) and not is_object(made):
        raise UsageError(f"{where}: something that can be called is wanted (got {made!r})")
    return made


def _taking_two(part: FactoryConfig, where: str) -> Any:
    """A loss or a metric that can be called with output and target."""
    made = _function(part, where)
    if is_object(made) and not hasattr(made, "reset"):
        raise UsageError(f"{where}: {part.factory} has `update` and `compute`, but no `reset`")
    called = made.update if is_object(made) else made.forward if isinstance(made, torch.nn.Module) else made
    with contextlib.suppress(ValueError):  # of some functions nothing is known
        try:
            inspect.signature(called).bind("output", "target")
        except TypeError as problem:
            raise UsageError(f"{where}: {part.factory} does not take output and target: {problem}") from None
    return made


def _optimizer(
    part: FactoryConfig, model: torch.nn.Module, device: torch.device
) -> tuple[torch.optim.Optimizer, Decision]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("model: it has no parameter to train")
    factory = found(part.factory, "optimizer.factory")
    takes = callable(factory) and "fused" in _parameters(factory)
    more: dict[str, Any] = {"fused": True} if takes and device.type == "cuda" and "foreach" not in part.args else {}
    optimizer = build(part, "optimizer", parameters, **more)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer: a torch.optim.Optimizer is wanted, {type(optimizer).__name__} is none")
    on = bool(part.args.get("fused", more.get("fused")))
    why = (
        "" if on else f"{part.factory} has no fused form" if not takes else f"as given, or the default on {device.type}"
    )
    return optimizer, Decision("fused optimizer", "on" if on else "off", why)


def _parameters(factory: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return ()


def _scheduler(config: Config, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
    """The scheduler; "{steps}" and "{epochs}" among its arguments are those of the whole training."""
    part = config.scheduler
    if part is None:
        return None
    args = dict(part.args)
    for name, value in part.args.items():
        if value == "{epochs}":
            args[name] = config.train.epochs
        elif value == "{steps}":
            args[name] = steps_in_all(config.train, loader)
            if args[name] is None:
                raise UsageError(f"scheduler.args.{name}: the data has no length; give train.max_steps")
    return build(part.model_copy(update={"args": args}), "scheduler", optimizer)


def _augmentation(config: Config, device: torch.device) -> Any:
    if config.augment is None:
        return None
    augmentation = build(config.augment, "augment")
    if not isinstance(augmentation, torch.nn.Module):
        raise UsageError(f"augment: a module such as flatout.augment:Standard is wanted (got {augmentation!r})")
    precision, _ = decide(config.train.precision, device)
    for module in augmentation.modules():
        if isinstance(module, Augment):  # in the form that the model takes, whatever the config left open
            module.dtype = precision.dtype or module.dtype
            module.channels_last = module.channels_last or (device.type == "cuda" and bool(config.train.channels_last))
    return augmentation.to(device)


def _fastest(
    config: Config, dataset: Any, step: TrainStep, convert: Callable[[Any], Any] | None, augmentation: Any, ranks: Ranks
) -> tuple[int, str]:
    """What `batch_size: auto` comes to, tried on the first samples of the data."""
    if isinstance(dataset, IterableDataset):
        raise UsageError("train.batch_size: auto needs data with a length; give a number")
    collate = found(config.data.collate, "data.collate") if config.data.collate else default_collate
    samples = collate([dataset[place] for place in range(min(FIRST, len(dataset)))])
    batch = next(iter(to_device([samples], step.precision.device, convert=convert)))
    if augmentation is not None:
        images, *rest = batch
        batch = [augmentation.eval()(images), *rest]
    return fastest_batch(step, batch, max(1, len(dataset) // ranks.world), config.train.memory_share, ranks)


# -- the run's folder --------------------------------------------------------------------------------------------------


def _folder(wanted: Path, resume: bool) -> Path:
    """`wanted`, or wanted-2, wanted-3 … where there is a run already; to resume, the last of them."""
    pattern = re.compile(rf"{re.escape(wanted.name)}(-(\d+))?")
    beside = wanted.parent.iterdir() if wanted.parent.is_dir() else ()
    taken = {int(match[2] or 1): path for path in beside if (match := pattern.fullmatch(path.name)) and path.is_dir()}
    if resume:
        if not taken:
            raise UsageError(f"--resume: there is no run at {wanted}")
        return taken[max(taken)]
    number = max(taken, default=0) + 1
    return wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")


@contextlib.contextmanager
def _claimed(wanted: Path) -> Iterator[Path]:
    """A new folder for a run, which no other run takes meanwhile; gone again if nothing came of it."""
    out, around = _folder(wanted, resume=False), wanted.parent.exists()
    while True:
        try:
            out.mkdir(parents=True)
            break
        except (OSError, ValueError) as problem:  # a NUL in its name
            if not isinstance(problem, FileExistsError) or not out.is_dir():
                why = getattr(problem, "strerror", None) or problem
                raise UsageError(f"out: cannot make the folder {out}: {why}") from None
            out = _folder(wanted, resume=False)
    try:
        yield out
    finally:
        with contextlib.suppress(OSError):  # where something is in it
            out.rmdir()
            if not around:
                out.parent.rmdir()


def _keep(config: Config, out: Path) -> None:
    """Save the config that is in force beside what comes of it; one that is there is never overwritten.

    It is whole, so that it can be trained with again: secrets in it are for its owner's eyes.
    """
    if not os.access(out, os.W_OK):
        raise UsageError(f"out: cannot write to the folder {out}: no permission, or a read-only disk")
    text = effective(config)
    for name in ("config.yaml", *(f"config-{number}.yaml" for number in range(2, 10_000))):
        path = out / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        if not path.exists():
            try:
                write_whole(path, text, mode=PRIVATE)
            except OSError as problem:
                raise UsageError(f"out: cannot write {path}: {problem.strerror}") from None
            return


def _batch_size_of(out: Path) -> int | None:
    """The batch size that the run in this folder was last trained with, if it has left word of it."""
    configs = sorted(out.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
    with contextlib.suppress(UsageError, TypeError, KeyError):
        size = load_yaml(text_of(configs[-1]), str(configs[-1]))["train"]["batch_size"] if configs else None
        return size if type(size) is int else None
    return None


# -- batch_size: auto

FIRST = 32
_ABOUT_AS_FAST = 0.97
_WARM_UP, _TIMED = 3, 5


def fastest_batch(step: TrainStep, first: Any, most: int, share: float, ranks: Ranks) -> tuple[int, str]:
    """The batch size to take, and why; `first` is a batch as the step wants it, of any size."""
    device = step.precision.device
    kept = copy.deepcopy(step.model.state_dict()), copy.deepcopy(step.optimizer.state_dict()), random_state(device)
    scale = copy.deepcopy(step.scaler.state_dict())
    speeds: dict[int, float] = {}
    size = min(FIRST, most)
    while True:
        seconds, used = _tried(step, _grown(first, size), device)
        seconds, used = ranks.highest([seconds, used])
        if used > share:
            break
        speeds[size] = size / seconds
        if size == most or (len(speeds) > 2 and speeds[size] < 1.02 * max(list(speeds.values())[:-1])):
            break
        size = min(2 * size, most)
    step.model.load_state_dict(kept[0])
    step.optimizer.load_state_dict(kept[1])
    step.scaler.load_state_dict(scale)
    step.optimizer.zero_grad(set_to_none=True)
    set_random_state(kept[2], device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not speeds:
        raise UsageError(f"train.batch_size: even {min(FIRST, most)} samples take more than {share:.0%} of the memory")
    best = next(size for size in speeds if speeds[size] >= _ABOUT_AS_FAST * max(speeds.values()))
    tried = ", ".join(f"{in_full(speed)} at {size}" for size, speed in speeds.items())
    return best, f"the fastest; samples/s of the step alone, uncompiled: {tried}"


def _tried(step: TrainStep, batch: Any, device: torch.device) -> tuple[float, float]:
    """Seconds a step takes, and the share of the card's memory that it needs (2 where it does not fit)."""
    cuda = device.type == "cuda"
    pieces_before = step.accumulate
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        for number in range(_WARM_UP + _TIMED):
            if number == _WARM_UP:
                if cuda:
                    torch.cuda.synchronize(device)
                started = time.perf_counter()
            step(batch)
            if step.accumulate != pieces_before:  # it ran out of memory, and went on in smaller pieces
                return 1.0, 2.0
        if cuda:
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - started) / _TIMED
    except Exception as problem:
        if not out_of_memory(problem):
            raise
        return 1.0, 2.0
    finally:
        step.accumulate = pieces_before
    if not cuda:
        return seconds, 0.0
    _, total = torch.cuda.mem_get_info(device)
    return seconds, torch.cuda.max_memory_reserved(device) / total


def _grown(batch: Any, size: int) -> Any:
    """A batch of `size` samples, made of those of `batch` over and over: how fast a step is does not depend on them."""
    rows = batch_rows(batch)

    def grown(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return thing[torch.arange(size, device=thing.device) % rows]
        return [thing[place % rows] for place in range(size)]

    return taken(batch, grown)


def scale_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, effective: int) -> str:
    """Bring the learning rate to the batch that is in force; what was done, in words."""
    if config.lr_rule == "none" or config.lr_batch is None:
        return f"the learning rate stays as it is at a batch of {effective} (train.lr_rule: none)"
    factor = effective / config.lr_batch
    factor = factor if config.lr_rule == "linear" else factor**0.5
    for group in optimizer.param_groups:
        group["lr"] *= factor
    rates = ", ".join(f"{group['lr']:.4g}" for group in optimizer.param_groups)
    return (
        f"learning rate times {factor:.4g} = {rates}: {config.lr_rule} from a batch of {config.lr_batch} to {effective}"
    )
