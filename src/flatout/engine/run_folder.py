"""What is left of a run, in runs/<config>, and what a person sees of it on the way.

    config.yaml    every value that was in force
    train.csv, validation.csv      the same rows in a bar in a terminal, or a line elsewhere; TensorBoard, W&B, MLflow
    checkpoints    state ─► snapshot (host copies) ─► a thread: write to no name ─► fsync ─► step-N.pt, best.pt

Checkpoints are written in the background, whole or not at all, and read back without trust: should a disk
damage one, its checksums tell, and the one before it is taken. Losses stay on the GPU until they are read,
every `log.every` steps. Only the first rank speaks and writes.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import itertools
import os
import pickle
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from flatout.engine.config import CheckpointConfig, Config, LogConfig, as_yaml
from flatout.feed import randomness
from flatout.files import PRIVATE, write_whole, write_whole_by
from flatout.model.errors import FlatoutError, UsageError
from flatout.model.formatting import in_full
from flatout.model.inputs import load_yaml, text_of
from flatout.redact import redact_setting, redact_text

VERSION = 1
MAX_REASON_LETTERS = 200


# ------------------------------------------------------------ the folder


def last_run(asked: Path) -> int:
    """The number of the last run in NAME, NAME-2, NAME-3 …; 0 if there is none."""
    runs = (re.fullmatch(rf"{re.escape(asked.name)}(?:-(\d+))?", path.name) for path in asked.parent.glob("*/"))
    return max((int(run[1] or 1) for run in runs if run), default=0)


def numbered(asked: Path, number: int) -> Path:
    return asked.with_name(f"{asked.name}-{number}") if number > 1 else asked


@contextlib.contextmanager
def new_run_folder(asked: Path) -> Iterator[Path]:
    """A new folder for a run, which no other run takes meanwhile; removed again if it stays empty."""
    for number in itertools.count(last_run(asked) + 1):
        out = numbered(asked, number)
        try:
            out.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except (OSError, ValueError) as problem:  # a NUL in its name is a ValueError
            why = getattr(problem, "strerror", None) or problem
            raise UsageError(f"out: cannot make the folder {out}: {why}") from None
    try:
        yield out
    finally:
        with contextlib.suppress(OSError):  # there is something in it
            out.rmdir()
            out.parent.rmdir()


def write_config(config: Config, out: Path) -> None:
    """Save the config that is in force; one that is there is never overwritten.

    It can be trained with again, so it is whole: secrets in it are for its owner's eyes.
    """
    text = as_yaml(config, secrets=True)
    path, number = out / "config.yaml", 1
    while path.exists() and path.read_text(encoding="utf-8") != text:
        number += 1
        path = out / f"config-{number}.yaml"
    try:
        write_whole(path, text, mode=PRIVATE)
    except OSError as problem:
        raise UsageError(f"out: cannot write {path}: {problem.strerror}") from None


def batch_size_of(out: Path) -> int | None:
    """The batch size that the run in this folder was last trained with, if that can be read."""
    configs = sorted(out.glob("config*.yaml"), key=lambda path: path.stat().st_mtime_ns)
    with contextlib.suppress(UsageError, TypeError, KeyError, IndexError):
        return int(load_yaml(text_of(configs[-1]), str(configs[-1]))["train"]["batch_size"])
    return None


# ------------------------------------------------------------ checkpoints


class Checkpoints:
    """The folder of one run's checkpoints, and the thread that writes them."""

    def __init__(self, folder: Path, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._config = config
        self._say = say
        self._thread: threading.Thread | None = None
        self._unsaved = ""

    def write(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        """Take a snapshot of `state` now and write it in the background, unless there is a NaN in its
        weights."""
        self.wait()
        snapshot, ready = _snapshot({"version": VERSION, **state})
        arguments = step, snapshot, ready, best
        self._thread = threading.Thread(target=self._write, args=arguments, name="flatout-checkpoint")
        self._thread.start()

    def wait(self) -> str:
        """Wait until the one that is being written is done; what there is to say if it is not saved,
        else ""."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._unsaved

    def kept(self) -> str:
        """The newest of them, in words."""
        paths = _by_step(self.folder)
        return f"the newest checkpoint is {paths[0]}" if paths else "there is no checkpoint"

    def _write(self, step: int, state: Any, ready: torch.cuda.Event | None, best: bool) -> None:
        path = self.folder / f"step-{step:09d}.pt"
        self._unsaved = ""
        try:
            if ready is not None:
                # This thread waits for the copies, so that training does not.
                ready.synchronize()
            if any(bool(weights.isnan().any()) for weights in state["model"].values()):
                self._say(f"no checkpoint at step {step}: there is a NaN in the weights")
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            _save(state, path)
            if best:
                _save(state, self.folder / "best.pt")
            for old in _by_step(self.folder)[self._config.keep :]:
                old.unlink()
        except Exception as problem:  # training goes on
            why = _reason(problem)
            self._unsaved = f"the last checkpoint, of step {step}, could not be written ({why}): {self.kept()}"
            self._say(f"no checkpoint at step {step}: {why}; training goes on, older ones are kept")


def newest(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The state in the newest whole checkpoint; damaged ones are reported and skipped."""
    for path in _by_step(folder):
        try:
            state = _load(path)
        except Exception as problem:  # zipfile and unpicklers raise whatever a flipped bit leads them to
            say(f"{path} is damaged ({_reason(problem)}): taking the one before it")
            continue
        if state["version"] != VERSION:
            raise UsageError(f"{path} was not written by this version of flatout train")
        return state
    return None


def _load(path: Path) -> dict[str, Any]:
    """The state in a file, once its checksums are compared: torch.load alone would not look at them."""
    with zipfile.ZipFile(path) as archive:
        if bad := archive.testzip():
            raise zipfile.BadZipFile(f"the checksum of {bad} is wrong")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not isinstance(state.get("version"), int):
        raise zipfile.BadZipFile("it holds no training")
    return state


def _reason(problem: Exception) -> str:
    # torch's message would advise to run whatever code is in it.
    if isinstance(problem, pickle.UnpicklingError):
        return "it holds something else than plain data"
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    text = str(problem).partition("\n")[0][:MAX_REASON_LETTERS]
    return f"{type(problem).__name__}: {text}"


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every random stream."""
    state = randomness.capture()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the random streams back."""
    randomness.restore(dict(state))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _by_step(folder: Path) -> list[Path]:
    """The checkpoints, newest first."""
    return sorted(folder.glob(f"step-{9 * '[0-9]'}.pt"), reverse=True)


def _snapshot(state: Any) -> tuple[Any, torch.cuda.Event | None]:
    """A copy on the host that training no longer touches, and the event after which it is complete."""

    def copied(thing: Any, where: str) -> Any:
        if isinstance(thing, Tensor):
            if not thing.is_cuda:
                return thing.detach().clone()
            host = torch.empty(thing.shape, dtype=thing.dtype, pin_memory=True)
            return host.copy_(thing.detach(), non_blocking=True)
        if isinstance(thing, Mapping):
            return {key: copied(value, f"{where}.{key}") for key, value in thing.items()}
        if isinstance(thing, list | tuple):
            return type(thing)(copied(value, f"{where}[{n}]") for n, value in enumerate(thing))
        if thing is None or isinstance(thing, bool | int | float | str):
            return thing
        raise FlatoutError(f"a checkpoint cannot hold {where}, a {type(thing).__name__}: it could not be read safely")

    copy = copied(state, "state")
    if not torch.cuda.is_initialized():
        return copy, None
    event = torch.cuda.Event()
    event.record()
    return copy, event


class _ErrorKeeper:
    """A file for torch.save, whose C++ side ends the process when a write fails: the error is kept
    until `close`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._problem: OSError | None = None

    def write(self, data: Any) -> int:
        if self._problem is None:
            try:
                self._file.write(data)
            except OSError as problem:
                self._problem = problem
        return len(memoryview(data).cast("B"))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._problem is not None:
            raise self._problem


def _save(state: Any, path: Path) -> None:
    def write(file: IO[bytes]) -> None:
        keeper = _ErrorKeeper(file)
        torch.save(state, keeper)  # type: ignore[arg-type]
        keeper.close()

    write_whole_by(path, write)


# ------------------------------------------------------------ losses, and where they are shown and written


class LossesRead(NamedTuple):
    """The losses of some steps."""

    by_step: dict[int, float]
    then: dict[str, Any]  # what the caller noted when reading began
    samples: int
    seconds: float


class LossLog:
    """Keeps losses on the device until they are read: nothing is launched for them, nothing waits."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._last = self._samples = 0
        self._since: float | None = None
        self._begun: tuple[Tensor, torch.cuda.Event | None, int, dict[str, Any], int, float] | None = None

    def add(self, step: int, loss: Tensor, rows: int) -> bool:
        """One more; whether it is the first, which is no part of the speed: workers and the compiler
        start in it."""
        self._kept.append(loss)
        self._last = step
        if self._since is None:
            self._since = time.monotonic()
            return True
        self._samples += rows
        return False

    def begin_reading(self, then: dict[str, Any]) -> None:
        """Start to copy them to the host; `read` returns them a step later."""
        if not self._kept or self._begun is not None or self._since is None:
            return
        values = torch.stack([loss.float() for loss in self._kept])
        event = None
        if values.is_cuda:
            host = torch.empty(values.shape, pin_memory=True)
            values, event = host.copy_(values, non_blocking=True), torch.cuda.Event()
            event.record()
        now = time.monotonic()
        self._begun = values, event, self._last, then, self._samples, max(now - self._since, 1e-9)
        self._kept, self._samples, self._since = [], 0, now

    def read(self) -> LossesRead | None:
        """The losses whose reading has begun."""
        if self._begun is None:
            return None
        values, event, last, then, samples, seconds = self._begun
        self._begun = None
        if event is not None:
            event.synchronize()
        return LossesRead(dict(enumerate(values.tolist(), last + 1 - len(values))), then, samples, seconds)


Row = Mapping[str, float | int | None]
# The most important first: a narrow terminal cuts off the rest.
_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda loss: f"loss {in_full(loss)}",
    "samples_per_s": lambda speed: f"{in_full(speed)} samples/s",
    "data_wait_pct": "waits for data {:.0f}%".format,
}


class Reporter:
    """Says and writes down what happens; on other ranks than the first it is silent."""

    def __init__(self, config: LogConfig, folder: Path, *, speaks: bool) -> None:
        self._config, self._folder, self._speaks = config, folder, speaks
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._sinks: list[Callable[[str, int, Row], None]] = []
        self._close: list[Callable[[], None]] = []
        self._said: set[str] = set()
        for name in _OPEN if speaks else ():
            if getattr(config, name):  # a mistake is reported before there is a folder
                _import_logger(name)

    def begin(self, begun: int, last: int | None, settings: Mapping[str, Any]) -> None:
        """Training begins after step `begun` and ends at `last`, if that is known."""
        if not self._speaks:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._forget_after(begun)
        self._sinks = [self._csv]
        for name in _OPEN:
            if getattr(self._config, name):
                write, close = _OPEN[name](self._folder, redact_setting("", settings))
                self._sinks.append(write)
                self._close.append(close)
        if self._console.is_terminal and not self._config.quiet:
            words = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True))
            step = TextColumn("step {task.completed}")
            columns = step, BarColumn(None), words, TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._console, auto_refresh=False, expand=True)
            self._bar.add_task("", total=last, completed=begun, text="")
            self._bar.start()

    def say(self, text: str, *, always: bool = True) -> None:
        """One line, above the bar; without `always`, not when quiet."""
        if self._speaks and (always or not self._config.quiet):
            with self._survive_stdout():
                self._console.print(redact_text(text), markup=False)

    def say_once(self, text: str) -> None:
        """As `say`, unless the same was said before, at another step."""
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def trained(self, step: int, row: dict[str, Any]) -> None:
        """How training went since the last time."""
        if not self._speaks:
            return
        self._write("train", step, row)
        words = "  ".join(form(row[name]) for name, form in _SHOWN.items() if row.get(name) is not None)
        if self._bar is None:
            self.say(f"epoch {row['epoch']}  step {step}  {words}", always=False)
            return
        with self._survive_stdout():
            self._bar.update(self._bar.task_ids[0], completed=step, text=words, refresh=True)

    def evaluated(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """What validation gave."""
        if self._speaks:
            self._write("validation", step, {"epoch": epoch, **values})
            text = "  ".join(f"{name} {in_full(value)}" for name, value in values.items())
            self.say(f"epoch {epoch}  step {step}  validation: {text}", always=False)

    def end(self) -> None:
        """Close everything."""
        if self._bar is not None:
            with self._survive_stdout():
                self._bar.stop()
            self._bar = None
        for close in self._close:
            close()
        self._close.clear()

    @contextlib.contextmanager
    def _survive_stdout(self) -> Iterator[None]:
        """A stdout that cannot be written to (a full disk, a closed pipe) does not end the training."""
        try:
            yield
        except OSError as problem:
            with contextlib.suppress(OSError):
                text = f"flatout: stdout cannot be written to: {problem.strerror}; training goes on without\n"
                os.write(2, text.encode())
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def _write(self, kind: str, step: int, row: Row) -> None:
        for sink in self._sinks:
            try:
                sink(kind, step, row)
            except OSError as problem:  # a full disk does not end the training
                why = problem.strerror or str(problem)
                self.say_once(f"metrics of step {step} are not written: {why}; training goes on")

    def _forget_after(self, step: int) -> None:
        """Drop the rows of steps that are taken again after a resume, and a line that a full disk has
        cut off."""
        for path in self._folder.glob("*.csv"):
            heading, *rows = path.read_text().splitlines(keepends=True) or [""]
            kept = [row for row in rows if row.endswith("\n") and int(row.partition(",")[0]) <= step]
            write_whole(path, "".join([heading, *kept]))

    def _csv(self, kind: str, step: int, row: Row) -> None:
        with (self._folder / f"{kind}.csv").open("a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(["step", *row])
            writer.writerow([step, *row.values()])


# ------------------------------------------------------------ other loggers, each as (write, close)


def _import_logger(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.rpartition(".")[2]
        raise UsageError(f"log.{name}: {name} is not installed") from None


def _numbers(kind: str, row: Row) -> dict[str, float]:
    return {f"{kind}/{name}": float(value) for name, value in row.items() if value is not None}


def _tensorboard(folder: Path, settings: Mapping[str, Any]) -> Any:
    writer = _import_logger("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(kind: str, step: int, row: Row) -> None:
        for name, value in _numbers(kind, row).items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    run = _import_logger("wandb").init(dir=str(folder), config=dict(settings), resume="allow", id=folder.name)
    return (lambda kind, step, row: run.log(_numbers(kind, row), step=step)), run.finish


def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Any:
    mlflow = _import_logger("mlflow")
    mlflow.start_run(run_name=folder.name)
    mlflow.log_dict(dict(settings), "config.yaml")
    return (lambda kind, step, row: mlflow.log_metrics(_numbers(kind, row), step=step)), mlflow.end_run


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
