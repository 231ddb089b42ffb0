"""Checkpoints: written in the background from a snapshot, whole or not at all, and read back without trust.

    state ─► snapshot (host copies) ─► a thread: write to no name ─► fsync ─► step-N.pt ─► the oldest goes
                                                                               └─► best.pt, the same file

A file under its final name is complete (files.py). Should a disk damage one all the same, its checksums
tell, and the one before it is taken.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from flatout.engine.config import CheckpointConfig
from flatout.feed import randomness
from flatout.files import sync_folder, write_whole_by
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
        self._failed: _Failed | None = None  # the last one, if it could not be written
        self.last_written: Path | None = None

    def write(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        """Take a snapshot of `state` now and write it in the background, unless there is a NaN in its weights."""
        started = time.monotonic()
        self.wait()
        if time.monotonic() - started > 1:
            self._say_once("a checkpoint takes longer to write than the time between two: training waits for it")
        self._failed = None
        snapshot, ready = _snapshot({"version": VERSION, **state})
        self._thread = threading.Thread(
            target=self._write, args=(step, snapshot, ready, best), name="flatout-checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the one that is being written is done."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> str:
        """Wait until all is written; a last one that failed is tried again, with older ones deleted if need be.

        Returns what to say if its weights are not saved; "" if they are.
        """
        self.wait()
        if self._failed is None:
            return ""
        failed, older = self._failed, _by_step(self.folder)
        kept = next((path for path in older if not _damage(path)), None)
        spare = [path for path in older if kept not in (None, path)]
        while not self._write(failed.step, failed.state, None, failed.best):
            if not spare:
                newest = f"the newest checkpoint is {kept}" if kept is not None else "there is no checkpoint"
                return f"the last checkpoint, of step {failed.step}, could not be written ({failed.why}): {newest}"
            with contextlib.suppress(OSError):
                spare.pop().unlink()
        self._say(f"the checkpoint of step {failed.step} is written after all")
        return ""

    def _write(self, step: int, state: Any, ready: torch.cuda.Event | None, best: bool) -> bool:
        """Write it; False if that failed."""
        path = self.folder / f"step-{step:09d}.pt"
        try:
            if ready is not None:
                # This thread waits for the copies, so that training does not.
                ready.synchronize()
            if any(bool(weights.isnan().any()) for weights in state["model"].values()):
                self._say_once(f"no checkpoint at step {step}: there is a NaN in the weights")
                return True
            self.folder.mkdir(parents=True, exist_ok=True)
            _save(state, path)
            if best:
                _link(path, self.folder / "best.pt")
            self.last_written, self._failed = path, None
            for old in _by_step(self.folder)[self._config.keep :]:
                old.unlink()
            return True
        except Exception as problem:  # training goes on, and `finish` tries again
            why = _reason(problem)
            self._failed = _Failed(step, state, best, why)
            self._say_once(f"no checkpoint at step {step}: {why}; training goes on, older ones are kept")
            return False

    def _say_once(self, text: str) -> None:
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A checkpoint that could not be written."""

    step: int
    state: Any
    best: bool
    why: str


def newest(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The state in the newest whole checkpoint; damaged ones are reported and skipped."""
    for path in _by_step(folder):
        try:
            state = _load(path)
        except Exception as problem:  # zipfile and unpicklers raise whatever a flipped bit leads them to
            say(f"{path} is damaged ({_reason(problem)}): taking the one before it")
            continue
        if isinstance(state, dict) and isinstance(state.get("version"), int):
            if state["version"] != VERSION:
                raise UsageError(f"{path} was not written by this version of flatout train")
            return state
        say(f"{path} is damaged (it holds no training): taking the one before it")
    return None


def _load(path: Path) -> Any:
    """The state in a file, once its checksums are compared: torch.load alone would not look at them."""
    if why := _damage(path):
        raise zipfile.BadZipFile(why)
    return torch.load(path, map_location="cpu", weights_only=True)


def _damage(path: Path) -> str:
    """What is wrong with a file by its own checksums; "" if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as problem:  # zipfile trusts its directory
        return _reason(problem)
    return "" if bad is None else f"the checksum of {bad} is wrong"


def _reason(problem: Exception) -> str:
    """One line about it."""
    # torch's message would advise to run whatever code is in it.
    if isinstance(problem, pickle.UnpicklingError):
        return "it holds something else than plain data"
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    text = str(problem).partition("\n")[0][:MAX_REASON_LETTERS]
    if text and isinstance(problem, zipfile.BadZipFile):
        return text
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


def _link(path: Path, name: Path) -> None:
    """The same file under another name, put there in one go."""
    part = name.with_name(f"{name.name}.part")
    part.unlink(missing_ok=True)
    try:
        part.hardlink_to(path)
    except OSError:  # a file system without such links
        with path.open("rb") as whole:
            write_whole_by(name, lambda file: shutil.copyfileobj(whole, file))
        return
    part.replace(name)
    sync_folder(name.parent)


# ------------------------------------------------------------ a checkpoint against the config that resumes it

# These change while a scheduler runs; the rest of its state is config.
_PROGRESS = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")


def misfit(ours: Mapping[str, Any], saved: Mapping[str, Any] | None) -> str:
    """Why a saved state cannot be that of an optimizer or scheduler with a state like `ours`; "" if it may be."""
    if saved is None:
        return "it has none"
    missing = ours.keys() - saved.keys()
    for mine, theirs in zip(ours.get("param_groups", ()), saved.get("param_groups", ()), strict=False):
        missing |= mine.keys() - theirs.keys() - {"initial_lr"}  # that is a scheduler's
    return "it has no " + ", ".join(sorted(missing)) if missing else ""


def overridden(
    optimizer: torch.optim.Optimizer, scheduler: Any, epoch_steps: int | None, state: Mapping[str, Any]
) -> Iterator[str]:
    """A line for each setting whose value in the checkpoint counts, and not the config's."""
    ours, saved = optimizer.param_groups[0], state["optimizer"]["param_groups"][0]
    rate = "initial_lr" if "initial_lr" in ours else "lr"
    kept = {f"optimizer's {key}": (saved.get(key), ours[key]) for key in ours.keys() - {"params", "lr"} | {rate}}
    if scheduler is not None:
        ours, saved = scheduler.state_dict(), state["scheduler"]
        settings = [key for key in ours if not key.startswith("_") and key not in _PROGRESS]
        kept |= {f"scheduler's {key}": (saved[key], ours[key]) for key in settings}
    for name, (then, now) in sorted(kept.items()):
        if isinstance(now, bool | int | float | str) and then != now:
            yield f"the {name} stays as it was: {then} (the config comes to {now})"
    batches = state.get("epoch_steps")
    if batches not in (None, epoch_steps) and state["at"]["batch"]:
        yield f"an epoch had {batches} batches and has {epoch_steps} now: this one goes on at the same number"
