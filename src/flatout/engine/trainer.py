"""The trainer: its loop is `fit`, on one screen; what it does not do itself is in the modules beside it.

    loader ─► device (copies ahead) ─► augmentation ─► TrainStep ─► losses stay on the GPU
                                                          │            └─► read every log.every steps, one step late
                          evaluate, checkpoint ◄── when due

A metric is a function of (output, target) that gives a number a sample (or a mean), or an object with
`update` and `compute`, as torchmetrics has them.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flatout.engine.config import TrainerConfig, nearest, validate
from flatout.engine.datasets import Batches, batch_rows, end_workers, steps_in_all, steps_per_epoch
from flatout.engine.run_folder import Checkpoints, LossLog, Reporter, newest, random_state, set_random_state
from flatout.engine.step import (
    CAPTURING,
    Decision,
    Ranks,
    TrainStep,
    choose_device,
    choose_precision,
    prepare_model,
    torch_switches,
)
from flatout.feed import to_device
from flatout.model.errors import FlatoutError, UsageError

_AT_ONCE_S = 1.0
# What gloo and NCCL say when another rank is gone.
_LOST_A_RANK = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed", "NCCL", "remote process")


@dataclass(slots=True)
class TrainingPosition:
    """How far a training is."""

    epoch: int = 0
    batch: int = 0  # of this epoch
    step: int = 0
    samples: int = 0  # of this rank


class Trainer:
    """Trains a model.

    `decisions` says what is in force and why; `results` what the last validation gave; `unsaved` why the last
    checkpoint could not be written, if so.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        train_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Any] | None = None,
        val_loader: Iterable[Any] | None = None,
        scheduler: Any = None,
        metrics: Mapping[str, Any] | None = None,
        augmentation: nn.Module | None = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        ranks: Ranks | None = None,
        val_shared: bool = False,
    ) -> None:
        self.config = _checked(config, metrics or {})
        config, train = self.config, self.config.train
        asked = train.device if device is None else str(device)
        self.ranks = ranks or Ranks("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")
        self.device = choose_device(asked, self.ranks.local_rank)
        self.out = Path(config.out or "runs/train")
        self.reporter = Reporter(config.log, self.out, speaks=self.ranks.first)
        self.say = self.reporter.say
        precision, decision = choose_precision(train.precision, self.device)
        layout, activations, compiled = prepare_model(model, train, self.device, self.ranks.world)
        self.decisions = [Decision("train.device", str(self.device)), decision, layout, activations, compiled]
        self.model = model
        if isinstance(criterion, nn.Module):
            criterion.to(self.device)
        whole, captured = self._across_ranks(model), compiled.value in CAPTURING
        self.step = TrainStep(whole, criterion, optimizer, precision, train, self.say, captured=captured)
        self.scheduler, self.metrics, self.augmentation = scheduler, dict(metrics or {}), augmentation
        self.checkpoints = Checkpoints(self.out / "checkpoints", config.checkpoint, self.reporter.say_once)
        self._val_loader, self._val_shared = val_loader, val_shared
        on_device = functools.partial(to_device, device=self.device, channels_last=layout.value == "on")
        self._batches = Batches(train_loader, on_device(train_loader), self.device, self.say)
        self._val_batches = on_device(val_loader) if val_loader is not None else None
        self._epoch_steps = steps_per_epoch(train_loader)
        self.last_step = steps_in_all(train, train_loader)
        if self.last_step == 0:
            raise UsageError("there is not one batch to train on")
        self.at = TrainingPosition()
        self.results: dict[str, float] = {}
        self.best: float | None = None
        self.stopped_by: str | None = None
        self.unsaved = ""
        self.skipped = 0  # steps whose loss was not a number
        self._losses = LossLog()
        self._interrupts = Interrupts()
        self._frozen = False
        self._evaluated_at = self._saved_at = -1  # steps
        self._done_at = dict.fromkeys(("evaluate", "checkpoint"), time.monotonic())

    # ------------------------------------------------------------ the loop

    def fit(self) -> dict[str, float]:
        """Train to the end, or until asked to stop; returns what the last validation gave."""
        with self._running():
            while not self._over():
                for batch in self._batches.of_epoch(self.at.epoch, self.at.batch):
                    loss = self.step(self._augmented(batch, training=True))
                    self._advance(loss, batch_rows(batch))
                    if self._over() and not self._epoch_is_done():
                        break
                else:
                    self._end_epoch()
            self._end()
        return self.results

    def _advance(self, loss: Tensor, rows: int) -> None:
        at = self.at
        at.step, at.batch, at.samples = at.step + 1, at.batch + 1, at.samples + rows
        if self._losses.add(at.step, loss, rows):  # the first step: workers and the compiler have started
            self._batches.waited_s = 0.0
        due = self._read_losses()  # if their reading began at the step before
        if at.step % self.config.log.every == 0:
            self._begin_reading(at.epoch + 1)
        self._schedule("step")
        self._do(due | self._due("step", at.step))

    def _end_epoch(self) -> None:
        self.at.epoch, self.at.batch = self.at.epoch + 1, 0
        self._schedule("epoch")
        self._do(self._due("epoch", self.at.epoch))

    def _end(self) -> None:
        self._begin_reading(self.at.epoch + (self.at.batch > 0))
        self._read_losses()
        if self.stopped_by is None and self._evaluated_at != self.at.step and self.config.evaluate.every is not None:
            self._do({"evaluate"})
        if self._saved_at != self.at.step and self.config.checkpoint.every is not None:
            self.save()
        self.unsaved = self.checkpoints.wait()
        if self.stopped_by is not None:
            then = self.unsaved or "go on with --resume"
            if self.config.checkpoint.every is None:
                then = "no checkpoint was asked for"
            self.say(f"{self.stopped_by}: stopped at step {self.at.step}; {then}")
        elif self.unsaved:
            self.say(self.unsaved)

    def _epoch_is_done(self) -> bool:
        """Whether the last step of a training was also the last of an epoch, so that what is due then
        is done."""
        return self.stopped_by is None and self.at.batch == self._epoch_steps

    def _over(self) -> bool:
        if self.ranks.world == 1:  # several agree on it when losses are read
            self.stopped_by = self._interrupts.asked
        return self.finished or self.stopped_by is not None

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.at.step >= (self.last_step or math.inf) or self.at.epoch >= self.config.train.epochs

    @contextmanager
    def _running(self) -> Iterator[None]:
        settings = self.config.model_dump(mode="json")
        deterministic = self.config.train.deterministic
        with torch_switches(self.step.precision, deterministic=deterministic), self._interrupts:
            try:
                self.reporter.begin(self.at.step, self.last_step, settings)
                for decision in self.decisions:
                    self.say(str(decision), always=decision.instead)
                yield
            except RuntimeError as problem:
                if self.ranks.world == 1 or not any(word in str(problem) for word in _LOST_A_RANK):
                    raise
                raise FlatoutError(
                    f"rank {self.ranks.rank}: another rank is gone, training ends after step {self.at.step}; "
                    f"go on with --resume ({str(problem).splitlines()[0]})"
                ) from None
            finally:
                self.checkpoints.wait()
                if self._frozen:
                    gc.unfreeze()
                    self._frozen = False
                self._batches.close()
                end_workers(self._val_loader)
                self.reporter.end()

    def _augmented(self, batch: Any, *, training: bool) -> Any:
        """The batch with its images augmented, and its target moved with them if it has their height
        and width."""
        if self.augmentation is None:
            return batch
        images, *between, target = batch
        first = (self.at.batch * self.ranks.world + self.ranks.rank) * len(images)
        places = torch.arange(first, first + len(images), device=images.device)  # in the epoch
        sizes = images.shape[-2:], images.shape[1:3]
        masks = None
        if isinstance(target, Tensor) and target.dim() > 2 and target.shape[-2:] in sizes:
            masks = target
        self.augmentation.train(training)
        try:
            augmented = self.augmentation(images, masks, index=places, epoch=self.at.epoch)
        except ValueError as problem:
            raise UsageError(f"augment: {problem}") from None
        if masks is None:
            return [augmented, *between, target]
        images, target = augmented
        return [images, *between, target]

    # ------------------------------------------------------------ when something is due

    def _due(self, unit: str, number: int = 0) -> set[str]:
        due = set()
        for name, done_at in self._done_at.items():
            count, _, units = (getattr(self.config, name).every or "").partition(" ")
            if units.removesuffix("s") != unit:
                continue
            is_due = number % float(count) == 0
            if unit == "minute":
                is_due = time.monotonic() - done_at >= 60 * float(count)
            if is_due:
                due.add(name)
        return due

    def _do(self, due: set[str]) -> None:
        best = False
        if "evaluate" in due and self._val_batches is not None:
            # Those from before it; an evaluation waits for the GPU anyway.
            due = due | self._read_losses()
            best = self._evaluate()
        if "checkpoint" in due or (best and self.config.checkpoint.every is not None):
            self.save(best=best)

    def _evaluate(self) -> bool:
        """Validate; whether the result is the best so far."""
        assert self._val_batches is not None
        # Training draws the same numbers, however often it validates.
        random = random_state(self.device)
        torch.default_generator.manual_seed(self.at.step)
        with torch.no_grad():  # by which flatout knows an evaluation
            batches = (self._augmented(batch, training=False) for batch in self._val_batches)
            results = evaluate(self.step, self.model, batches, self.metrics, self.ranks, self._val_shared)
        # All ranks have to agree on what is best.
        self.results = self.ranks.gathered(results)[0]
        set_random_state(random, self.device)
        self._evaluated_at, self._done_at["evaluate"] = self.at.step, time.monotonic()
        self.reporter.evaluated(self.at.step, self.at.epoch + (self.at.batch > 0), self.results)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(self.results["loss"])
        return self._note_best()

    def _note_best(self) -> bool:
        name = self.config.checkpoint.best
        if name is None:
            return False
        if name not in self.results:
            raise UsageError(f"checkpoint.best: there is no metric {name!r}{nearest(name, self.results)}")
        value, best = self.results[name], self.best
        sign = {"min": -1, "max": 1}[self.config.checkpoint.best_is]
        if not math.isfinite(value) or (best is not None and sign * value <= sign * best):
            return False
        self.best = value
        return True

    def _schedule(self, after: str) -> None:
        due = self.scheduler is not None and self.config.train.scheduler_per == after
        if due and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _begin_reading(self, epoch: int) -> None:
        lr = self.step.optimizer.param_groups[0]["lr"]
        self._losses.begin_reading({"epoch": epoch, "lr": lr, "samples": self.at.samples * self.ranks.world})

    def _read_losses(self) -> set[str]:
        """Report the losses since the last time; ranks agree on them, and on what is due now, which
        is returned."""
        read = self._losses.read()
        if read is None:
            return set()
        if not self._frozen and gc.get_freeze_count() == 0:
            # The garbage collector need not look through what is there by now, again and again.
            gc.collect()
            gc.freeze()
            self._frozen = True
        good = [loss for loss in read.by_step.values() if math.isfinite(loss)]
        bad = [step for step, loss in read.by_step.items() if not math.isfinite(loss)]
        total, count, samples = self.ranks.total([sum(good), len(good), read.samples])
        due, stop = self._due("minute"), self._interrupts.asked is not None
        mine = [len(bad), -min(bad, default=math.inf), stop, *(name in due for name in self._done_at)]
        bad_steps, first_bad, stop_now, *due_now = self.ranks.highest(mine)
        self.skipped += int(bad_steps)
        row: dict[str, Any] = {"epoch": read.then["epoch"], "loss": None, "lr": read.then["lr"]}
        row |= {"samples": read.then["samples"], "samples_per_s": None, "data_wait_pct": None, "skipped": self.skipped}
        if count:
            row["loss"] = total / count
        if samples:
            row["samples_per_s"] = samples / read.seconds
            row["data_wait_pct"] = min(100.0, 100 * self._batches.waited_s / read.seconds)
        self._batches.waited_s = 0.0
        self.reporter.trained(max(read.by_step), row)
        if bad_steps:
            self._not_a_number(int(-first_bad))
        if stop_now:
            self.stopped_by = self._interrupts.asked or "stop"
        return set(itertools.compress(self._done_at, due_now))

    def _not_a_number(self, step: int) -> None:
        if self.config.train.on_nan == "skip":
            self.say(f"the loss is not a number at step {step}: skipped, {self.skipped} such step(s) so far")
            return
        self.checkpoints.wait()
        raise FlatoutError(f"the loss is not a number at step {step}: training stopped; {self.checkpoints.kept()}")

    # ------------------------------------------------------------ coming back

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint, in the background."""
        self._saved_at, self._done_at["checkpoint"] = self.at.step, time.monotonic()
        ranks = self.ranks.gathered(self._batches.state())
        if not self.ranks.first:
            return
        state = {
            "at": asdict(self.at),
            "model": self.model.state_dict(),
            "optimizer": self.step.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.step.scaler.state_dict(),
            "accumulate": self.step.accumulate,
            "best": self.best,
            "ranks": ranks,
        }
        self.checkpoints.write(self.at.step, state, best=best)

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        state = newest(self.checkpoints.folder, self.say)
        if state is None:
            return False
        try:
            self._take(state)
        except UsageError:
            raise
        except Exception as problem:  # what is in it is not what was written, or not what this config builds
            why = " ".join(str(problem).split()) or type(problem).__name__
            raise UsageError(f"{self.out}: its checkpoint does not fit this config: {why}") from None
        self._saved_at = self.at.step
        if self.finished:
            most = self.config.train.max_steps
            limit = "train.max_steps" if most and self.at.step >= most else "train.epochs"
            self.say(f"nothing is left to train: {self.out} ended at step {self.at.step}; raise {limit} to go on")
        else:
            self.say(f"resumed after step {self.at.step}: epoch {self.at.epoch + 1}, batch {self.at.batch}")
        return True

    def _take(self, state: dict[str, Any]) -> None:
        if len(state["ranks"]) != self.ranks.world:
            raise UsageError(f"{self.out}: saved by {len(state['ranks'])} rank(s), there are {self.ranks.world} now")
        ours, saved = self.step.optimizer.param_groups[0], state["optimizer"]["param_groups"][0]
        self._compare("optimizer", ours, saved)
        if self.scheduler is not None:
            self._compare("scheduler", self.scheduler.state_dict(), state["scheduler"] or {})
        moving = {"params", "lr" if "initial_lr" in ours else ""}
        for name in sorted(ours.keys() - moving):
            was, new = saved.get(name), ours[name]
            if was != new:
                self.say(f"the optimizer's {name} stays as it was: {was} (the config comes to {new})")
        self.model.load_state_dict(state["model"])
        self.step.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        elif state["scheduler"] is not None:
            self.say("the checkpoint's scheduler is not used: the config has none")
        self.step.scaler.load_state_dict(state["scaler"])
        self.step.accumulate = max(self.step.accumulate, state["accumulate"])
        self.at, self.best = TrainingPosition(**state["at"]), state["best"]
        self._batches.resume(state["ranks"][self.ranks.rank])

    def _compare(self, part: str, ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        unknown = ours.keys() - saved.keys() - {"initial_lr"}  # which a scheduler adds to the optimizer's
        missing = ", ".join(sorted(key for key in unknown if not key.startswith("_")))
        if missing:
            raise UsageError(
                f"{self.out}: the {part} of its checkpoint is not that of this config: it has no {missing}"
            )

    def _across_ranks(self, model: nn.Module) -> nn.Module:
        if self.ranks.world == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)


def _checked(config: TrainerConfig | Mapping[str, Any] | None, metrics: Mapping[str, Any]) -> TrainerConfig:
    """The settings, if each of them can have an effect."""
    if not isinstance(config, TrainerConfig):
        config = validate(TrainerConfig, dict(config or {}), "config")
    if type(config) is TrainerConfig:  # the parts are the caller's own
        for name in {"batch_size", "memory_share", "lr_rule", "lr_batch", "seed"} & config.train.model_fields_set:
            raise UsageError(f"train.{name} has no effect here: you made loaders and optimizer yourself")
    best, known = str(config.checkpoint.best), ["None", "loss", *metrics]
    if best.split(".")[0] not in known:
        hint = nearest(best, known)
        raise UsageError(f"checkpoint.best must be one of {', '.join(known[1:])} (got {best!r:.60}){hint}")
    return config


# ------------------------------------------------------------ how a training ends


class Interrupts:
    """SIGTERM and Ctrl-C as a request to stop after this step; a second one, over a second later,
    ends the process.

    (The same signal often comes twice at once: to the process group, and from the launcher.)
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._asked_at > _AT_ONCE_S:
            self.__exit__()
            signal.raise_signal(number)


# ------------------------------------------------------------ validation


def can_share(metrics: Mapping[str, Any]) -> bool:
    """Whether ranks may each look at a part of the data: means add up, and torchmetrics gathers by itself."""
    return all(not is_object(metric) or hasattr(metric, "sync") for metric in metrics.values())


def evaluate(
    step: TrainStep, model: nn.Module, batches: Iterable[Any], metrics: Mapping[str, Any], ranks: Ranks, shared: bool
) -> dict[str, float]:
    """The loss and every metric by name; `shared` if each rank has seen a part."""
    device = step.precision.device
    functions = {name: metric for name, metric in metrics.items() if not is_object(metric)}
    objects = {name: metric for name, metric in metrics.items() if is_object(metric)}
    for metric in objects.values():
        if hasattr(metric, "to"):
            metric.to(device)
        metric.reset()
    sums = dict.fromkeys(("loss", *functions), torch.zeros((), dtype=torch.float64, device=device))
    seen, was_training = 0, model.training
    model.eval()
    try:
        # Compiling once more, for a short pass, does not pay.
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                rows = batch_rows(batch)
                loss, output, target = step.forward(batch, model)
                output = _as_fp32(output)
                values = {"loss": loss.detach()}
                values |= {name: _as_tensor(name, one(output, target), device) for name, one in functions.items()}
                for name, value in values.items():
                    sums[name] = sums[name] + (value.sum() if value.dim() else value * rows)
                for metric in objects.values():
                    metric.update(output, target)
                seen += rows
    finally:
        model.train(was_training)
    totals = [*torch.stack(list(sums.values())).tolist(), float(seen)]
    if shared:
        totals = ranks.total(totals)
    results = {name: total / max(1.0, totals[-1]) for name, total in zip(sums, totals[:-1], strict=True)}
    for name, metric in objects.items():
        value = metric.compute()
        if isinstance(value, Mapping):
            results |= {f"{name}.{key}": float(inner) for key, inner in value.items()}
        else:
            results[name] = float(value)
    return results


def _as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"metrics.{name} gave {value!r:.60}: a metric gives a number, or one a sample") from None


def is_object(metric: Any) -> bool:
    """Whether it is a metric with `update` and `compute`, as torchmetrics has them."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _as_fp32(output: Any) -> Any:
    """Autocast's output in fp32: a mean of thousands in bf16 is useless."""
    if isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16):
        return output.float()
    return type(output)(_as_fp32(part) for part in output) if type(output) in (list, tuple) else output
