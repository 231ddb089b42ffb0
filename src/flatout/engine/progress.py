"""What a person sees of a training, and what is written down of it.

Losses stay on the GPU until they are read, every `log.every` steps. They go into a bar in a terminal, or
a line elsewhere; into `train.csv` and `validation.csv`; and into TensorBoard, W&B and
MLflow when asked for. Only the first rank speaks.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from flatout.engine.config import LogConfig
from flatout.files import write_whole
from flatout.model.errors import UsageError
from flatout.model.formatting import in_full
from flatout.redact import redact_setting, redact_text


@dataclass(slots=True)
class LossSummary:
    """The losses of some steps; NaN and infinity are counted, not summed."""

    then: dict[str, Any]  # what the caller noted when reading began
    last_step: int
    samples: int
    seconds: float
    total: float = 0.0
    count: int = 0
    bad: int = 0
    first_bad: float = math.inf  # a step


class LossLog:
    """Keeps losses on the device until they are read: nothing is launched for them, nothing waits."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._last = self._samples = 0
        self._since: float | None = None
        self._begun: tuple[LossSummary, Tensor, torch.cuda.Event | None] | None = None

    def add(self, step: int, loss: Tensor, rows: int) -> bool:
        """One more; whether it is the first, which is no part of the speed: workers and the compiler start in it."""
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
        self._begun = LossSummary(then, self._last, self._samples, max(now - self._since, 1e-9)), values, event
        self._kept, self._samples, self._since = [], 0, now

    def read(self) -> LossSummary | None:
        """The losses whose reading began."""
        if self._begun is None:
            return None
        summary, values, event = self._begun
        self._begun = None
        if event is not None:
            event.synchronize()
        for step, loss in enumerate(values.tolist(), summary.last_step + 1 - len(values)):
            if math.isfinite(loss):
                summary.total, summary.count = summary.total + loss, summary.count + 1
            else:
                summary.first_bad, summary.bad = min(summary.first_bad, step), summary.bad + 1
        return summary


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
        self._task: Any = None
        self._sinks: list[Callable[[str, int, Row], None]] = []
        self._close: list[Callable[[], None]] = []
        self._unwritten: set[str] = set()
        for name in _OPEN if speaks else ():
            if getattr(config, name):  # a mistake is reported before there is a folder
                _import_logger(name, name)

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
            self._task = self._bar.add_task("", total=last, completed=begun, text="")
            self._bar.start()

    def say(self, text: str, *, always: bool = True) -> None:
        """One line, above the bar; without `always`, not when quiet."""
        if self._speaks and (always or not self._config.quiet):
            with self._survive_stdout():
                self._console.print(redact_text(text), markup=False)

    def trained(self, step: int, row: dict[str, Any]) -> None:
        """How training went since the last time."""
        if not self._speaks:
            return
        self._write("train", step, row)
        words = "  ".join(form(row[name]) for name, form in _SHOWN.items() if row.get(name) is not None)
        if self._bar is not None:
            with self._survive_stdout():
                self._bar.update(self._task, completed=step, text=words, refresh=True)
        else:
            self.say(f"epoch {row['epoch']}  step {step}  {words}", always=False)

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
                if why not in self._unwritten:
                    self._unwritten.add(why)
                    self.say(f"metrics of step {step} are not written: {why}; training goes on")

    def _forget_after(self, step: int) -> None:
        """Drop the rows of steps that are taken again after a resume, and a line that a full disk has cut off."""
        for path in self._folder.glob("*.csv"):
            heading, *rows = path.read_text().splitlines(keepends=True) or [""]
            kept = [row for row in rows if row.endswith("\n") and int(row.partition(",")[0]) <= step]
            write_whole(path, "".join([heading, *kept]))

    def _csv(self, kind: str, step: int, row: Row) -> None:
        path = self._folder / f"{kind}.csv"
        new = not path.exists() or path.stat().st_size == 0
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["step", *row])
            writer.writerow([step, *row.values()])


# ------------------------------------------------------------ other loggers, each as (write, close)


def _import_logger(module: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"log.{key}: {module.split('.')[0]} is not installed") from None


def _numbers(kind: str, row: Row) -> dict[str, float]:
    return {f"{kind}/{name}": float(value) for name, value in row.items() if value is not None}


def _tensorboard(folder: Path, settings: Mapping[str, Any]) -> Any:
    writer = _import_logger("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(kind: str, step: int, row: Row) -> None:
        for name, value in _numbers(kind, row).items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    run = _import_logger("wandb", "wandb").init(dir=str(folder), config=dict(settings), resume="allow", id=folder.name)
    return (lambda kind, step, row: run.log(_numbers(kind, row), step=step)), run.finish


def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Any:
    mlflow = _import_logger("mlflow", "mlflow")
    mlflow.start_run(run_name=folder.name)
    mlflow.log_dict(dict(settings), "config.yaml")
    return (lambda kind, step, row: mlflow.log_metrics(_numbers(kind, row), step=step)), mlflow.end_run


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
