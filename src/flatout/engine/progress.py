"""What a person sees of a training, and what is written down of it.

Losses stay on the GPU until they are read, every `log.every` steps. They go into a bar in a terminal, or
a line elsewhere; into `metrics.jsonl`, `train.csv` and `validation.csv`; and into TensorBoard, W&B and
MLflow when asked for. Only the first rank speaks.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
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
from torch import Tensor

from flatout.engine.config import LogConfig
from flatout.files import write_whole
from flatout.model.errors import UsageError
from flatout.model.formatting import in_full
from flatout.redact import redact_setting, redact_text
from flatout.sample.gpu import Gpus


@dataclass(frozen=True, slots=True)
class LossSummary:
    """The losses of some steps; NaN and infinity are counted, not summed."""

    then: dict[str, Any]  # what the caller noted when reading began
    last_step: int
    total: float
    count: int
    bad: int
    first_bad: int | None
    samples: int
    seconds: float


class LossLog:
    """Keeps losses on the device until they are read: nothing is launched for them, nothing waits."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._last = self._samples = 0
        self._since: float | None = None
        self.begun: tuple[Tensor, torch.cuda.Event | None, dict[str, Any], int, int, float] | None = None

    def add(self, step: int, loss: Tensor, rows: int) -> None:
        """One more. The time starts with the first, in which workers and the compiler start."""
        self._kept.append(loss)
        self._last = step
        if self._since is None:
            self._since = time.monotonic()
        else:
            self._samples += rows

    def begin_reading(self, then: dict[str, Any]) -> None:
        """Start to copy them to the host; `read` returns them a step later."""
        if not self._kept or self.begun is not None or self._since is None:
            return
        values = torch.stack([loss.float() for loss in self._kept])
        event = None
        if values.is_cuda:
            host = torch.empty(values.shape, pin_memory=True)
            values, event = host.copy_(values, non_blocking=True), torch.cuda.Event()
            event.record()
        now = time.monotonic()
        self.begun = values, event, then, self._last, self._samples, now - self._since
        self._kept, self._samples, self._since = [], 0, now

    def read(self) -> LossSummary | None:
        """The losses whose reading began."""
        if self.begun is None:
            return None
        values, event, then, last, samples, seconds = self.begun
        self.begun = None
        if event is not None:
            event.synchronize()
        numbers = dict(enumerate(values.tolist(), last + 1 - len(values)))
        good = [number for number in numbers.values() if math.isfinite(number)]
        bad = [step for step, number in numbers.items() if not math.isfinite(number)]
        return LossSummary(
            then=then,
            last_step=last,
            total=math.fsum(good),
            count=len(good),
            bad=len(bad),
            first_bad=min(bad, default=None),
            samples=samples,
            seconds=max(seconds, 1e-9),
        )


Row = Mapping[str, float | int | None]
# The most important first: a narrow terminal has no room for all of it beside the bar.
_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda loss: f"loss {in_full(loss)}",
    "samples_per_s": lambda speed: f"{in_full(speed)} samples/s",
    "data_wait_pct": "waits for data {:.0f}%".format,
    "sm_active_pct": "SM active {:.0f}%".format,
    "memory_gb": "{:.1f} GB".format,
}
_KINDS = ("train", "validation")
_MIN_BAR, _TIME_LEFT = 8, len("-:--:--")


class Reporter:
    """Says and writes down what happens; on other ranks than the first it is silent."""

    def __init__(self, config: LogConfig, folder: Path, *, speaks: bool) -> None:
        self._config, self._folder, self._speaks = config, folder, speaks
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._sinks: list[Callable[[str, int, Row], None]] = []
        self._close: list[Callable[[], None]] = []
        self._gpus: Gpus | None = None
        self._unwritten: set[str] = set()
        for name in _OPEN if speaks else ():
            if getattr(config, name):  # a mistake is reported before there is a folder
                _import_logger(name, name)

    def begin(self, step: int, last: int | None, settings: Mapping[str, Any]) -> None:
        """Training starts at `step` and ends at `last`, if that is known."""
        if not self._speaks:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._forget_after(step)
        self._sinks = [self._jsonl, self._csv]
        for name in _OPEN:
            if getattr(self._config, name):
                write, close = _OPEN[name](self._folder, redact_setting("", settings))
                self._sinks.append(write)
                self._close.append(close)
        if torch.cuda.is_initialized():
            self._gpus = Gpus(None, lambda text: None)
            self._close.append(self._gpus.close)
        if self._console.is_terminal and not self._config.quiet:
            self._bar = Progress(
                TextColumn("step {task.completed}"), BarColumn(None), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(), console=self._console, auto_refresh=False, expand=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=last, completed=step, text="")
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
        row |= {"sm_active_pct": self._sm_active(), "memory_gb": None}
        if torch.cuda.is_initialized():
            row["memory_gb"] = torch.cuda.memory_reserved() / 1e9
        self._write("train", step, row)
        words = [form(row[name]) for name, form in _SHOWN.items() if row.get(name) is not None]
        if self._bar is not None:
            room = self._console.width - len(f"step {step}  ") - _MIN_BAR - len("  ") - _TIME_LEFT
            while len("  ".join(words)) > room and len(words) > 1:
                words.pop()
            with self._survive_stdout():
                self._bar.update(self._task, completed=step, text="  ".join(words), refresh=True)
        else:
            self.say("  ".join([f"epoch {row['epoch']}", f"step {step}", *words]), always=False)

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

    def _jsonl(self, kind: str, step: int, row: Row) -> None:
        with (self._folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **row}) + "\n")

    def _forget_after(self, step: int) -> None:
        """Drop the rows of steps that are taken again after a resume, and a line that a full disk has cut off."""
        for path in (self._folder / "metrics.jsonl", *(self._folder / f"{kind}.csv" for kind in _KINDS)):
            with contextlib.suppress(FileNotFoundError):
                lines = path.read_text().splitlines(keepends=True)
                kept = [line for line in lines if _is_row_until(step, line)]
                if kept != lines:
                    write_whole(path, "".join(kept))

    def _csv(self, kind: str, step: int, row: Row) -> None:
        path = self._folder / f"{kind}.csv"
        new = not path.exists() or path.stat().st_size == 0
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["step", *row])
            writer.writerow([step, *row.values()])

    def _sm_active(self) -> float | None:
        if self._gpus is None:
            return None
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return next((gpu.sm_active_pct for gpu in self._gpus.read(time.monotonic()) if gpu.uuid.endswith(uuid)), None)


def _is_row_until(step: int, line: str) -> bool:
    """Whether a line of JSON or CSV is whole, and of a step up to this one, or a heading."""
    try:
        first = line.partition(",")[0]
        if line.startswith("{"):
            first = json.loads(line)["step"]
        return line.endswith("\n") and (first == "step" or int(first) <= step)
    except ValueError:
        return False


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
