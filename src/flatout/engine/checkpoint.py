"""Checkpoints: written in the background from a snapshot, whole or not at all, and read back without trust.

    state ─► snapshot (host copies) ─► a thread: write to no name ─► fsync ─► step-N.pt ─► the oldest goes
                                                                               └─► best.pt, the same file

A file under its final name is complete (files.py). Should a disk damage one all the same, its checksums tell, and the
one before it is taken.
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
_LONGEST = 200  # letters of what somebody else says went wrong
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
        """Take a snapshot of `state` now and write it in the background, unless its weights are no numbers."""
        started = time.monotonic()
        self.wait()
        if time.monotonic() - started > 1:
            self._say_once("checkpoints take longer to write than lies between two of them: training waits for them")
        self._failed = None
        snapshot, ready = _snapshot({"version": VERSION, **state})
        arguments = (step, snapshot, ready, best)
        self._thread = threading.Thread(target=self._write, args=arguments, name="flatout-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> str:
        """Until all is written; a last one that failed is tried again, in the place of older ones if it has to be.

        What to say where its weights are not saved; "" where they are.
        """
        self.wait()
        if self._failed is None:
            return ""
        failed, older = self._failed, _steps(self.folder)
        kept = next((path for path in older if not _damage(path)), None)
        for spare in (None, *(path for path in reversed(older) if kept not in (None, path))):
            if spare is not None:
                with contextlib.suppress(OSError):
                    spare.unlink()
            if self._write(failed.step, failed.state, None, failed.best):
                self._say(f"the checkpoint of step {failed.step} is written after all")
                return ""
        newest = f"the newest checkpoint is {kept}" if kept is not None else "there is no checkpoint"
        return f"the last checkpoint, of step {failed.step}, could not be written ({failed.why}): {newest}"

    def _write(self, step: int, state: Any, ready: torch.cuda.Event | None, best: bool) -> bool:
        """Whether it was written, or is not to be."""
        path = self.folder / f"step-{step:09d}.pt"
        try:
            if ready is not None:
                ready.synchronize()  # this thread waits for the copies, the training does not
            if any(bool(weights.isnan().any()) for weights in state["model"].values()):
                self._say_once(f"no checkpoint at step {step}: there are weights that are not a number")
                return True
            self.folder.mkdir(parents=True, exist_ok=True)
            _save(state, path)
            if best:
                _link(path, self.folder / "best.pt")
            self.last_written, self._failed = path, None
            for old in _steps(self.folder)[self._config.keep :]:
                old.unlink()
            return True
        except Exception as problem:  # whatever it is, training goes on, and its end asks what was not written
            why = _in_words(problem)
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
    """The state in the newest whole checkpoint; what is damaged is told and passed over."""
    for path in _steps(folder):
        try:
            state = _load(path)
        except Exception as problem:  # zipfile and unpicklers raise whatever a flipped bit leads them to
            say(f"{path} is damaged ({_in_words(problem)}): taking the one before it")
            continue
        if not isinstance(state, dict) or not isinstance(state.get("version"), int):
            say(f"{path} is damaged (it holds no training): taking the one before it")
            continue
        if state["version"] != VERSION:
            raise UsageError(f"{path} was not written by this version of flatout train")
        return state
    return None


def _load(path: Path) -> Any:
    """What a file holds, once every checksum in it has been compared: torch.load alone would not look at them."""
    if why := _damage(path):
        raise zipfile.BadZipFile(why)
    return torch.load(path, map_location="cpu", weights_only=True)


def _damage(path: Path) -> str:
    """What is wrong with a file by its own checksums; "" where nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as problem:  # zipfile trusts its directory
        return _in_words(problem)
    return f"the checksum of {bad} is wrong" if bad is not None else ""


def _in_words(problem: Exception) -> str:
    """One line about it."""
    if isinstance(problem, pickle.UnpicklingError):  # torch would advise to load it with whatever code it brings
        return "it holds something else than plain data"
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    text = (str(problem).splitlines() or [""])[0][:_LONGEST]
    return text if text and isinstance(problem, zipfile.BadZipFile) else f"{type(problem).__name__}: {text}"


def random_state(device: torch.device) -> dict[str, Any]:
    """Where every random stream stands."""
    state = randomness.capture()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put them back there."""
    randomness.restore(dict(state))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _steps(folder: Path) -> list[Path]:
    """Checkpoints that have their final name, newest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), reverse=True)


def _snapshot(state: Any) -> tuple[Any, torch.cuda.Event | None]:
    """A copy on the host that training no longer touches, and the event after which it is complete."""
    on_gpu = False

    def copied(thing: Any, where: str) -> Any:
        nonlocal on_gpu
        if isinstance(thing, Tensor):
            if not thing.is_cuda:
                return thing.detach().clone()
            on_gpu = True
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
    if not on_gpu:
        return copy, None
    event = torch.cuda.Event()
    event.record()
    return copy, event


class _Sink:
    """A file for torch.save, whose C++ side ends the process when a write fails: the error is kept for afterwards."""

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
        """Raises what went wrong on the way."""
        if self._problem is not None:
            raise self._problem


def _save(state: Any, path: Path) -> None:
    def write(file: IO[bytes]) -> None:
        sink = _Sink(file)
        torch.save(state, sink)  # type: ignore[arg-type]
        sink.close()

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


# -- a checkpoint beside the config that goes on from it ---------------------------------------------------------------

_PROGRESS = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")  # of schedulers; the rest was set


def of_another_kind(ours: Mapping[str, Any], saved: Mapping[str, Any] | None) -> str:
    """Why a saved state cannot be that of an optimizer or scheduler with a state like `ours`; "" if it may be."""
    if saved is None:
        return "it has none"
    missing = ours.keys() - saved.keys()
    for mine, theirs in zip(ours.get("param_groups", ()), saved.get("param_groups", ()), strict=False):
        missing |= mine.keys() - theirs.keys() - {"initial_lr"}  # that is a scheduler's
    return f"it has no {', '.join(sorted(missing))}" if missing else ""


def overridden(
    optimizer: torch.optim.Optimizer, scheduler: Any, epoch_steps: int | None, state: Mapping[str, Any]
) -> Iterator[str]:
    """What is set otherwise than it was in a checkpoint, and does not count; a line each."""
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
