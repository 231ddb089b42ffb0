"""From a config to a training that runs: everything it names is built, in the order in which one
needs the other.

`batch_size: auto` is decided here: the fastest batch within a share of the GPU's memory, not the
largest that fits. Real steps are taken at 32, 64, 128 … samples, until more of them no longer learn
faster or no longer fit; of those about as fast as the fastest the smallest is taken. Model and
optimizer are put back, the random streams seeded again. Every rank takes the same steps, and the
slowest and the fullest one decide.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from flatout.augment import Augment
from flatout.engine.config import Config, FactoryConfig, TrainConfig, as_yaml, build, import_path, load, without_effect
from flatout.engine.datasets import batch_rows, build_dataset, map_samples, steps_in_all, train_loader, val_loader
from flatout.engine.run_folder import batch_size_of, last_run, new_run_folder, numbered, write_config
from flatout.engine.step import (
    Decision,
    Ranks,
    TrainStep,
    choose_device,
    choose_precision,
    out_of_memory,
    prepare_model,
    torch_switches,
)
from flatout.engine.trainer import Trainer, can_share, is_object
from flatout.feed import to_device
from flatout.inside.start import attach
from flatout.launch.protocol import new_folder
from flatout.model.errors import NotSavedError, UsageError
from flatout.model.formatting import count_of, in_full

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
    config = load(path, overrides, preset)
    has_gpu = config.train.device != "cpu" and torch.cuda.is_available()
    ranks = Ranks("cuda" if has_gpu else "cpu")
    asked = Path(config.out or f"runs/{path.stem}")
    with contextlib.ExitStack() as stack:
        out = numbered(asked, last_run(asked))
        if not resume and not explain and ranks.first:
            out = stack.enter_context(new_run_folder(asked))
        elif resume and not out.is_dir():
            raise UsageError(f"--resume: there is no run at {asked}")
        # All ranks use the folders of the first.
        out, trace = ranks.gathered((out, new_folder(path.stem)))[0]
        if record:
            stack.enter_context(attach(trace))
        size_before = batch_size_of(out) if resume and config.train.batch_size == "auto" else None
        changes: dict[str, Any] = {"out": str(out)}
        if size_before is not None:
            changes["train"] = config.train.model_copy(update={"batch_size": size_before})
        trainer = assemble(config.model_copy(update=changes), ranks)
        in_force = trainer.config
        assert isinstance(in_force, Config)
        if gpus > 1 and not has_gpu and config.train.device != "cpu":
            trainer.say(f"--gpus {gpus}: there is no GPU here that torch can use; {ranks.world} ranks train on the CPU")
        if size_before is not None:
            trainer.say(f"train.batch_size: {size_before}  (as it was in this run before)")
        for text in without_effect(config):
            trainer.say(text)
        if explain:
            for decision in trainer.decisions:
                trainer.say(str(decision))
            trainer.say("\n" + as_yaml(in_force, secrets=False))
        elif resume and not trainer.resume():
            raise UsageError(f"--resume: there is no whole checkpoint in {out / 'checkpoints'}")
        if explain or trainer.finished:
            ranks.leave()
            return None
        trainer.say(f"run: {out}", always=not resume and out != asked)
        if ranks.first:
            write_config(in_force, out)
        # torchrun ends all when one has died; outside `fit`, a rank ignores it and says why it ends
        if ranks.world > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        trainer.fit()
    ranks.leave()
    if trainer.unsaved:
        raise NotSavedError(f"the final weights are not saved: {trainer.unsaved}")
    return trace if record else None


def assemble(config: Config, ranks: Ranks) -> Trainer:
    """A trainer with everything the config names; its own config has the batch size that `auto` came to."""
    device = choose_device(config.train.device, ranks.local_rank)
    _seed(config.train.seed)
    data = config.data
    train_set = build_dataset(data, data.train, "data.train")
    val_set = build_dataset(data, data.val, "data.val") if data.val is not None else None
    model = build(config.model, "model")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, {type(model).__name__} is none")
    model.to(device)
    criterion = _build_comparison(config.criterion, "criterion") if config.criterion is not None else None
    optimizer, fused = _build_optimizer(config.optimizer, model, device)
    augmentation = _build_augmentation(config, device)
    size, why = config.train.batch_size, ""
    if size == "auto":
        size, why = _fastest(config, model, criterion, optimizer, augmentation, train_set, ranks)
    _seed((config.train.seed + ranks.rank) % 2**32)
    decisions = [fused, *_instead(config, optimizer, size, why, ranks)]
    sizes = {"batch_size": size, "accumulate": min(config.train.accumulate, size)}
    config = config.model_copy(update={"train": config.train.model_copy(update=sizes)})
    ours = (ranks.rank, ranks.world)
    loader = train_loader(data, train_set, size, config.train, ours)
    metrics = {name: _build_comparison(part, f"metrics.{name}") for name, part in config.metrics.items()}
    shared = ranks.world > 1 and can_share(metrics)
    validation = None
    if val_set is not None:
        validation = val_loader(data, val_set, config.evaluate.batch_size or size, ours if shared else (0, 1))
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
    trainer.decisions += decisions
    return trainer


def _instead(config: Config, optimizer: Optimizer, size: int, why: str, ranks: Ranks) -> Iterator[Decision]:
    """What is in force instead of what the config says; the learning rate is scaled to the batch here."""
    is_auto = config.train.batch_size == "auto"
    if is_auto:
        yield Decision("train.batch_size", str(size), why, instead=True)
    if is_auto or config.train.lr_rule != "none":
        rate = scale_learning_rate(optimizer, config.train, size * ranks.world)
        yield Decision("train.lr_rule", config.train.lr_rule, rate, instead=True)
    if config.data.workers == 0 and config.data.on_bad_sample == "skip":
        yield Decision("data.on_bad_sample", "raise", "without workers nothing is left out", instead=True)


def _seed(number: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


# ------------------------------------------------------------ the parts


def _build_comparison(part: FactoryConfig, where: str) -> Any:
    """A loss or a metric, which is called with output and target: a function, or an instance of a class."""
    built = import_path(part.factory, f"{where}.factory")
    if isinstance(built, type) or part.args:
        built = build(part, where)
    if not callable(built) and not is_object(built):
        raise UsageError(f"{where}: expected something that can be called (got {built!r})")
    return built


def _build_optimizer(part: FactoryConfig, model: nn.Module, device: torch.device) -> tuple[Optimizer, Decision]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("model: it has no parameter to train")
    more: dict[str, Any] = {}
    if device.type == "cuda" and "foreach" not in part.args:
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            if "fused" in inspect.signature(import_path(part.factory, "optimizer.factory")).parameters:
                more = {"fused": True}
    optimizer = build(part, "optimizer", parameters, **more)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer: expected a torch.optim.Optimizer, {type(optimizer).__name__} is none")
    if optimizer.defaults.get("fused"):
        return optimizer, Decision("fused optimizer", "on")
    return optimizer, Decision("fused optimizer", "off", f"as given, or the default on {device.type}")


def _build_scheduler(config: Config, optimizer: Optimizer, loader: Any) -> Any:
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
    if not isinstance(augmentation, nn.Module):
        raise UsageError(f"augment: expected a module such as flatout.augment:Standard (got {augmentation!r})")
    precision, _ = choose_precision(config.train.precision, device)
    for module in augmentation.modules():
        if isinstance(module, Augment):  # its pictures in the form that the model takes
            module.dtype = precision.dtype or module.dtype
            module.channels_last = module.channels_last or (device.type == "cuda" and bool(config.train.channels_last))
    return augmentation.to(device)


# ------------------------------------------------------------ batch_size: auto


def _fastest(
    config: Config,
    model: nn.Module,
    criterion: Any,
    optimizer: Optimizer,
    augmentation: Any,
    dataset: Any,
    ranks: Ranks,
) -> tuple[int, str]:
    """The fastest batch size, tried on the first samples of the data, in the layout in which it will
    train."""
    if isinstance(dataset, IterableDataset):
        raise UsageError("train.batch_size: auto needs data with a length; give a number")
    train = config.train
    device = next(model.parameters()).device
    precision, _ = choose_precision(train.precision, device)
    layout, *_ = prepare_model(model, train.model_copy(update={"compile": False}), device)
    step = TrainStep(model, criterion, optimizer, precision, train, say=lambda text: None)
    in_process = config.data.model_copy(update={"workers": 0})
    samples = next(iter(val_loader(in_process, dataset, min(FIRST_SIZE, len(dataset)), (0, 1))))
    batch = next(iter(to_device([samples], device, channels_last=layout.value == "on")))
    if augmentation is not None:
        images, *rest = batch
        batch = [augmentation.eval()(images), *rest]
    with torch_switches(precision, deterministic=train.deterministic):
        return fastest_batch(step, batch, max(1, len(dataset) // ranks.world), train.memory_share, ranks)


def fastest_batch(step: TrainStep, first: Any, most: int, share: float, ranks: Ranks) -> tuple[int, str]:
    """The batch size to take, and why; `first` is a batch that the step takes, of any size."""
    device = step.precision.device
    stateful: tuple[Any, ...] = (step.model, step.optimizer, step.scaler)
    states = [copy.deepcopy(thing.state_dict()) for thing in stateful]
    least = min(FIRST_SIZE, most)
    speeds: dict[int, float] = {}
    size = least
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
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not speeds:
        few = count_of(least, "sample")
        raise UsageError(f"train.batch_size: even {few} at a time: more than {share:.0%} of the memory")
    best = next(size for size in speeds if speeds[size] >= _ABOUT_AS_FAST * max(speeds.values()))
    tried = ", ".join(f"{in_full(speed)} at {size}" for size, speed in speeds.items())
    return best, f"the fastest; samples/s of the step alone, uncompiled: {tried}"


def _try_batch(step: TrainStep, batch: Any, device: torch.device) -> tuple[float, float]:
    """Seconds a step takes, and the share of the GPU's memory that it needs (2 if it does not fit)."""
    on_gpu, pieces_before, seconds = device.type == "cuda", step.accumulate, 0.0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        for count in (_WARM_UP, _TIMED):
            started = time.perf_counter()
            for _ in range(count):
                step(batch)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds = (time.perf_counter() - started) / count
        fits = step.accumulate == pieces_before  # else it ran out of memory, and went on in smaller pieces
    except Exception as problem:
        if not out_of_memory(problem):
            raise
        fits = False
    step.accumulate = pieces_before
    if not fits:
        return 1.0, 2.0
    if not on_gpu:
        return seconds, 0.0
    _, total = torch.cuda.mem_get_info(device)
    return seconds, torch.cuda.max_memory_reserved(device) / total


def _resize(batch: Any, size: int) -> Any:
    """A batch of `size` samples, those of `batch` over and over: the speed of a step does not depend
    on them."""
    places = [place % batch_rows(batch) for place in range(size)]

    def resize(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return thing[places]
        return [thing[place] for place in places]

    return map_samples(batch, resize)


def scale_learning_rate(optimizer: Optimizer, config: TrainConfig, batch: int) -> str:
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
