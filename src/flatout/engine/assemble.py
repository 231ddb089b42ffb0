"""From a config to a training that runs: everything it names is built, in the order in which one needs the other.

`batch_size: auto` is decided here: the fastest batch within a share of the GPU's memory, not the largest
that fits. Real steps are taken at 32, 64, 128 … samples, until more of them no longer learn faster or no
longer fit; of those about as fast as the fastest the smallest is taken. Model, optimizer and random
streams are put back. Every rank takes the same steps, and the slowest and the fullest one decide.
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
    as_yaml,
    build,
    import_path,
    load,
    without_effect,
)
from flatout.engine.datasets import build_datasets, steps_in_all, train_loader, val_loader
from flatout.engine.model_setup import (
    Decision,
    channels_last,
    choose_device,
    choose_precision,
    prepare_model,
    torch_switches,
)
from flatout.engine.ranks import Ranks
from flatout.engine.train_step import TrainStep, batch_rows, map_samples, out_of_memory
from flatout.engine.trainer import Trainer, can_share, is_object
from flatout.feed import to_device
from flatout.files import PRIVATE, write_whole
from flatout.inside.attach import attach
from flatout.launch.protocol import new_folder
from flatout.model.errors import NotSavedError, UsageError
from flatout.model.formatting import count_of, in_full
from flatout.model.inputs import load_yaml, text_of

FIRST_SIZE = 32
_ABOUT_AS_FAST, _MIN_GAIN = 0.97, 1.02
_WARM_UP, _TIMED = 3, 5


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
        sys.path.insert(0, "")  # import paths begin in the current folder
    notes: list[str] = []
    config = load(path, overrides, preset, notes)
    asked = Path(config.out or f"runs/{path.stem}")
    ranks = Ranks("cuda" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu")
    if gpus > 1 and config.train.device != "cpu" and not torch.cuda.is_available():
        notes.append(f"--gpus {gpus}: there is no GPU here that torch can use; {ranks.world} ranks train on the CPU")
    with contextlib.ExitStack() as stack:
        if resume or explain or not ranks.first:
            out = _run_folder(asked, resume)
        else:
            out = stack.enter_context(_new_run_folder(asked))
        # All ranks use the folders of the first.
        out, trace = ranks.gathered((out, new_folder(path.stem)))[0]
        config = config.model_copy(update={"out": str(out)})
        if record:
            stack.enter_context(attach(trace))
        resumed_size = _batch_size_of(out) if resume and config.train.batch_size == "auto" else None
        trainer = assemble(config, ranks, resumed_size)
        assert isinstance(trainer.config, Config)
        for text in (*notes, *without_effect(config)):
            trainer.say(text)
        if explain:
            for decision in trainer.decisions:
                trainer.say(str(decision))
            trainer.say("\n" + as_yaml(trainer.config, secrets=False))
        elif resume and not trainer.resume():
            raise UsageError(f"--resume: there is no whole checkpoint in {out / 'checkpoints'}")
        if explain or trainer.finished:
            ranks.leave()
            return None
        trainer.say(f"run: {out}", always=not resume and out != asked)
        if ranks.first:
            _write_config(trainer.config, out)
        if (
            ranks.world > 1
        ):  # torchrun ends all when one has died; outside `fit`, a rank ignores it and says why it ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        trainer.fit()
    ranks.leave()
    if trainer.unsaved:
        raise NotSavedError(f"the final weights are not saved: {trainer.unsaved}")
    return trace if record else None


def assemble(config: Config, ranks: Ranks, resumed_size: int | None = None) -> Trainer:
    """A trainer with everything the config names.

    The trainer's own config has the batch size that `auto` came to: `resumed_size`, as in this run
    before, or what is fastest now.
    """
    train = config.train
    device = choose_device(train.device, ranks.local_rank)
    _seed(train.seed)
    train_set, val_set = build_datasets(config.data)
    model = build(config.model, "model")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, {type(model).__name__} is none")
    model.to(device)
    criterion = _build_comparison(config.criterion, "criterion") if config.criterion is not None else None
    optimizer, fused = _build_optimizer(config.optimizer, model, device)
    augmentation = _build_augmentation(config, device)
    _seed((train.seed + ranks.rank) % 2**32)
    decisions = [fused]

    def decide(name: str, value: Any, why: str, *, instead: bool = True) -> None:
        decisions.append(Decision(name, str(value), why, instead=instead))

    batch_size = resumed_size or train.batch_size
    if resumed_size is not None:
        decide("train.batch_size", batch_size, "as it was in this run before")
    if batch_size == "auto":
        precision, _ = choose_precision(train.precision, device)
        # The step is timed in the layout in which it will train.
        layout, *_ = prepare_model(model, train.model_copy(update={"compile": False}), device)
        step = TrainStep(model, criterion, optimizer, precision, train, say=lambda text: None)
        convert = channels_last if layout.value == "on" else None
        with torch_switches(precision, deterministic=train.deterministic):
            batch_size, why = _fastest(config, train_set, step, convert, augmentation, ranks)
        decide("train.batch_size", batch_size, why)
    pieces = min(train.accumulate, batch_size)
    if pieces < train.accumulate:
        decide("train.accumulate", pieces, f"a batch of {batch_size} has no more")
    in_force = train.model_copy(update={"batch_size": batch_size, "accumulate": pieces})
    config = config.model_copy(update={"train": in_force})
    total = batch_size * ranks.world
    if train.batch_size == "auto" or train.lr_rule != "none":
        decide("train.lr_rule", train.lr_rule, scale_learning_rate(optimizer, train, total))
    loader = train_loader(config.data, train_set, batch_size, train.seed, ranks, train.epochs)
    workers = f"{loader.num_workers} to begin with" if config.data.workers else "loaded in the training process"
    decide("data.workers", config.data.workers, workers, instead=False)
    if config.data.workers == 0 and config.data.on_bad_sample == "skip":
        decide("data.on_bad_sample", "raise", "without workers nothing is left out")
    metrics = {name: _build_comparison(part, f"metrics.{name}") for name, part in config.metrics.items()}
    shared = ranks.world > 1 and can_share(metrics)
    if ranks.world > 1:
        how = "a metric needs all validation data: each rank looks at it"
        if shared:
            how = "each rank looks at its part of the validation data"
        decide("ranks", ranks.world, f"one gradient from {count_of(total, 'sample')}; {how}", instead=False)
    validation = None
    if val_set is not None:
        validation = val_loader(config.data, val_set, config.evaluate.batch_size or batch_size, ranks, shared)
    trainer = Trainer(
        model=model,
        train_loader=loader,
        val_loader=validation,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=_build_scheduler(config, optimizer, loader),
        metrics=metrics,
        augmentation=augmentation,
        config=config,
        device=device,
        ranks=ranks,
        val_shared=shared,
    )
    if augmentation is not None:
        where = f"on {device.type}, training only; a number of its own for each sample"
        decide("augment", type(augmentation).__name__, where, instead=False)
    trainer.decisions += decisions
    return trainer


def _seed(number: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


# ------------------------------------------------------------ the parts


def _build_comparison(part: FactoryConfig, where: str) -> Any:
    """A loss or a metric, which is called with output and target: a function, or an instance of a class."""
    built = import_path(part.factory, f"{where}.factory")
    if isinstance(built, type) or part.args:
        built = build(part, where)
    called = built
    if is_object(built):
        if not hasattr(built, "reset"):
            raise UsageError(f"{where}: {part.factory} has `update` and `compute`, but no `reset`")
        called = built.update
    elif isinstance(built, torch.nn.Module):
        called = built.forward
    elif not callable(built):
        raise UsageError(f"{where}: expected something that can be called (got {built!r})")
    with contextlib.suppress(ValueError):  # some functions have no signature
        try:
            inspect.signature(called).bind("output", "target")
        except TypeError as problem:
            raise UsageError(f"{where}: {part.factory} does not take output and target: {problem}") from None
    return built


def _build_optimizer(
    part: FactoryConfig, model: torch.nn.Module, device: torch.device
) -> tuple[torch.optim.Optimizer, Decision]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("model: it has no parameter to train")
    factory = import_path(part.factory, "optimizer.factory")
    can_fuse = False
    with contextlib.suppress(TypeError, ValueError):
        can_fuse = "fused" in inspect.signature(factory).parameters
    more: dict[str, Any] = {}
    if can_fuse and device.type == "cuda" and "foreach" not in part.args:
        more = {"fused": True}
    optimizer = build(part, "optimizer", parameters, **more)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer: expected a torch.optim.Optimizer, {type(optimizer).__name__} is none")
    if part.args.get("fused", more.get("fused")):
        return optimizer, Decision("fused optimizer", "on")
    why = f"as given, or the default on {device.type}" if can_fuse else f"{part.factory} has no fused form"
    return optimizer, Decision("fused optimizer", "off", why)


def _build_scheduler(config: Config, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
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


def _build_augmentation(config: Config, device: torch.device) -> Any:
    if config.augment is None:
        return None
    augmentation = build(config.augment, "augment")
    if not isinstance(augmentation, torch.nn.Module):
        raise UsageError(f"augment: expected a module such as flatout.augment:Standard (got {augmentation!r})")
    precision, _ = choose_precision(config.train.precision, device)
    for module in augmentation.modules():
        if isinstance(module, Augment):  # its pictures in the form that the model takes
            module.dtype = precision.dtype or module.dtype
            module.channels_last = module.channels_last or (device.type == "cuda" and bool(config.train.channels_last))
    return augmentation.to(device)


# ------------------------------------------------------------ batch_size: auto


def _fastest(
    config: Config, dataset: Any, step: TrainStep, convert: Callable[[Any], Any] | None, augmentation: Any, ranks: Ranks
) -> tuple[int, str]:
    """The fastest batch size, tried on the first samples of the data."""
    if isinstance(dataset, IterableDataset):
        raise UsageError("train.batch_size: auto needs data with a length; give a number")
    collate: Any = default_collate
    if config.data.collate:
        collate = import_path(config.data.collate, "data.collate")
    samples = collate([dataset[place] for place in range(min(FIRST_SIZE, len(dataset)))])
    batch = next(iter(to_device([samples], step.precision.device, convert=convert)))
    if augmentation is not None:
        images, *rest = batch
        batch = [augmentation.eval()(images), *rest]
    return fastest_batch(step, batch, max(1, len(dataset) // ranks.world), config.train.memory_share, ranks)


def fastest_batch(step: TrainStep, first: Any, most: int, share: float, ranks: Ranks) -> tuple[int, str]:
    """The batch size to take, and why; `first` is a batch that the step takes, of any size."""
    device = step.precision.device
    stateful: tuple[Any, ...] = (step.model, step.optimizer, step.scaler)
    states = [copy.deepcopy(thing.state_dict()) for thing in stateful]
    random_before = random_state(device)
    speeds: dict[int, float] = {}
    size = min(FIRST_SIZE, most)
    while True:
        seconds, used = ranks.highest(_try_batch(step, _resize(first, size), device))
        if used > share:
            break
        fastest = max(speeds.values(), default=0.0)
        speeds[size] = size / seconds
        if size == most or (len(speeds) > 2 and speeds[size] < _MIN_GAIN * fastest):
            break
        size = min(2 * size, most)
    for thing, state in zip(stateful, states, strict=True):
        thing.load_state_dict(state)
    step.optimizer.zero_grad(set_to_none=True)
    set_random_state(random_before, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not speeds:
        least = min(FIRST_SIZE, most)
        raise UsageError(
            f"train.batch_size: even {count_of(least, 'sample')} at a time: more than {share:.0%} of the memory"
        )
    best = next(size for size in speeds if speeds[size] >= _ABOUT_AS_FAST * max(speeds.values()))
    tried = ", ".join(f"{in_full(speed)} at {size}" for size, speed in speeds.items())
    return best, f"the fastest; samples/s of the step alone, uncompiled: {tried}"


def _try_batch(step: TrainStep, batch: Any, device: torch.device) -> tuple[float, float]:
    """Seconds a step takes, and the share of the GPU's memory that it needs (2 if it does not fit)."""
    on_gpu = device.type == "cuda"
    pieces_before = step.accumulate
    started = 0.0
    try:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        for number in range(_WARM_UP + _TIMED):
            if number == _WARM_UP:
                if on_gpu:
                    torch.cuda.synchronize(device)
                started = time.perf_counter()
            step(batch)
            # It ran out of memory, and went on in smaller pieces.
            if step.accumulate != pieces_before:
                return 1.0, 2.0
        if on_gpu:
            torch.cuda.synchronize(device)
    except Exception as problem:
        if not out_of_memory(problem):
            raise
        return 1.0, 2.0
    finally:
        step.accumulate = pieces_before
    seconds = (time.perf_counter() - started) / _TIMED
    if not on_gpu:
        return seconds, 0.0
    _, total = torch.cuda.mem_get_info(device)
    return seconds, torch.cuda.max_memory_reserved(device) / total


def _resize(batch: Any, size: int) -> Any:
    """A batch of `size` samples, those of `batch` over and over: the speed of a step does not depend on them."""
    rows = batch_rows(batch)

    def resize(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return thing[torch.arange(size, device=thing.device) % rows]
        return [thing[place % rows] for place in range(size)]

    return map_samples(batch, resize)


def scale_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, batch: int) -> str:
    """Scale the learning rate to the batch of all ranks; what was done, in words."""
    if config.lr_rule == "none" or config.lr_batch is None:
        return f"the learning rate stays as it is at a batch of {batch} (train.lr_rule: none)"
    factor = batch / config.lr_batch
    if config.lr_rule == "sqrt":
        factor = factor**0.5
    for group in optimizer.param_groups:
        group["lr"] *= factor
    rates = ", ".join(f"{group['lr']:.4g}" for group in optimizer.param_groups)
    return f"learning rate times {factor:.4g} = {rates}: {config.lr_rule} from a batch of {config.lr_batch} to {batch}"


# ------------------------------------------------------------ the run's folder


def _run_folder(asked: Path, resume: bool) -> Path:
    """The folder asked for, or NAME-2, NAME-3 … where there is a run already; to resume, the last of them."""
    pattern = re.compile(rf"{re.escape(asked.name)}(-(\d+))?")
    beside = asked.parent.iterdir() if asked.parent.is_dir() else ()
    runs = {int(match[2] or 1): path for path in beside if (match := pattern.fullmatch(path.name)) and path.is_dir()}
    last = max(runs, default=0)
    if resume and not runs:
        raise UsageError(f"--resume: there is no run at {asked}")
    if resume:
        return runs[last]
    return asked.with_name(f"{asked.name}-{last + 1}") if runs else asked


@contextlib.contextmanager
def _new_run_folder(asked: Path) -> Iterator[Path]:
    """A new folder for a run, which no other run takes meanwhile; removed again if it stays empty."""
    out, had_parent = _run_folder(asked, resume=False), asked.parent.exists()
    while True:
        try:
            out.mkdir(parents=True)
            break
        except (OSError, ValueError) as problem:  # a NUL in its name is a ValueError
            if not isinstance(problem, FileExistsError) or not out.is_dir():
                why = getattr(problem, "strerror", None) or problem
                raise UsageError(f"out: cannot make the folder {out}: {why}") from None
            out = _run_folder(asked, resume=False)
    try:
        yield out
    finally:
        with contextlib.suppress(OSError):  # there is something in it
            out.rmdir()
            if not had_parent:
                out.parent.rmdir()


def _write_config(config: Config, out: Path) -> None:
    """Save the config that is in force; one that is there is never overwritten.

    It can be trained with again, so it is whole: secrets in it are for its owner's eyes.
    """
    if not os.access(out, os.W_OK):
        raise UsageError(f"out: cannot write to the folder {out}: no permission, or a read-only disk")
    text = as_yaml(config, secrets=True)
    for name in ("config.yaml", *(f"config-{number}.yaml" for number in range(2, 10_000))):
        path = out / name
        if not path.exists():
            try:
                write_whole(path, text, mode=PRIVATE)
            except OSError as problem:
                raise UsageError(f"out: cannot write {path}: {problem.strerror}") from None
            return
        if path.read_text(encoding="utf-8") == text:
            return


def _batch_size_of(out: Path) -> int | None:
    """The batch size that the run in this folder was last trained with, if that can be read."""
    configs = sorted(out.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
    with contextlib.suppress(UsageError, TypeError, KeyError, IndexError):
        size = load_yaml(text_of(configs[-1]), str(configs[-1]))["train"]["batch_size"]
        if type(size) is int:
            return size
    return None
