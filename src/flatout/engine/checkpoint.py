"""Checkpoints: written in the background from a snapshot, whole or not at all, and read back without trust.

    state ─► snapshot (host copies) ─► a thread: write to no name ─► fsync ─► step-N.pt, best.pt ─► the oldest goes

A file under its final name is complete (files.py). Should a disk damage one all the same, its checksums
tell, and the one before it is taken.
"""

from __future__ import annotations

import pickle
import re
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from flatout.engine.config import CheckpointConfig
from flatout.feed import randomness
from flatout.files import write_whole_by
from flatout.model.errors import FlatoutError, UsageError

VERSION = 1
MAX_REASON_LETTERS = 200
_NAME = re.compile(r"step-(\d+)\.pt")


class Checkpoints:
    """The folder of one run's checkpoints, and the thread that writes them."""

    def __init__(self, folder: Path, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._config = config
        self._say = say
        self._said: set[str] = set()
        self._thread: threading.Thread | None = None
        self._unsaved = ""
        self.last_written: Path | None = None

    def write(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        """Take a snapshot of `state` now and write it in the background, unless there is a NaN in its weights."""
        self.wait()
        snapshot, ready = _snapshot({"version": VERSION, **state})
        self._thread = threading.Thread(
            target=self._write, args=(step, snapshot, ready, best), name="flatout-checkpoint"
        )
        self._thread.start()

    def wait(self) -> str:
        """Wait until the one that is being written is done; what there is to say if it is not saved, else ""."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._unsaved

    def _write(self, step: int, state: Any, ready: torch.cuda.Event | None, best: bool) -> None:
        path = self.folder / f"step-{step:09d}.pt"
        self._unsaved = ""
        try:
            if ready is not None:
                # This thread waits for the copies, so that training does not.
                ready.synchronize()
            if any(bool(weights.isnan().any()) for weights in state["model"].values()):
                self._say_once(f"no checkpoint at step {step}: there is a NaN in the weights")
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            _save(state, path)
            if best:
                _save(state, self.folder / "best.pt")
            self.last_written = path
            for old in _by_step(self.folder)[self._config.keep :]:
                old.unlink()
        except Exception as problem:  # training goes on
            why = _reason(problem)
            kept = next(
                (f"the newest checkpoint is {path}" for path in _by_step(self.folder)), "there is no checkpoint"
            )
            self._unsaved = f"the last checkpoint, of step {step}, could not be written ({why}): {kept}"
            self._say_once(f"no checkpoint at step {step}: {why}; training goes on, older ones are kept")

    def _say_once(self, text: str) -> None:
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


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
    """One line about it."""
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
    """Checkpoints that have their final name, newest first."""
    return sorted((path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)), reverse=True)


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
    """A file for torch.save, whose C++ side ends the process when a write fails: the error is kept until `close`."""

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
