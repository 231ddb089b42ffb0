"""Two runs of a proof side by side: every few steps one goes on from the other's weights.

    leads ── weights, buffers and the optimizer's state ──► a file every ten steps
    follows ── how far have mine come since the last one, and which way, beside the leader's? ── then takes the leader's

What rounding makes of a weight is nothing at first, and in some trainings everything after two hundred steps, whoever
rounded. From the same weights on it is ten steps old at the most: what is left to see is what a change does.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from flatout.sense.options import WEIGHTS_OVER

EVERY = 10  # steps
_MOST_BYTES, _MOST_OF_THE_DISK = 8 << 30, 0.2  # of a whole run's weights
_FILES = 22
_LOOK_EVERY_S = 0.02


# How far a run's weights have come, in terms of how far those of another have, and how much in the same direction (a
# cosine).
Moved = tuple[float, float]


class Weights:
    """Those of this rank, told to who follows and taken from who leads. What goes wrong ends that, and nothing else."""

    def __init__(self, leads: Path | None, follows: Path | None, rank: int) -> None:
        self._leads = leads
        self._follows = follows
        self._rank = rank
        self._steps = 0
        self._next = 1  # there is no state of an optimizer before the first step
        self._every: int | None = None
        self._began: list[Any] | None = None  # where leader and follower were together last

    def step_ended(self, optimizers: Iterable[Any], roots: Iterable[Any]) -> Moved | None:
        """A training step is over: every now and then, where this run has come to."""
        self._steps += 1
        if self._steps != self._next or (self._leads is None and self._follows is None):
            return None
        try:
            return self._meet(_State(optimizers, roots))
        except Exception as problem:
            self._leads = self._follows = None
            print(f"flatout: weights are not compared ({type(problem).__name__}: {problem})", file=sys.stderr)
            return None

    def _meet(self, mine: _State) -> Moved | None:
        moved, came = None, None
        theirs = self._theirs()
        if theirs is not None:
            if self._began is not None:
                moved = _moved(self._began, theirs["came"], mine.weights)
            came = _on_host(mine.weights) if self._leads is not None else None
            self._every = theirs["every"]
            mine.take(theirs)
            self._began = [weight.detach().clone() for weight in mine.weights]
        elif self._every is None:
            self._every = self._affordable(mine.bytes) if self._leads is not None else None
        if self._leads is not None:
            self._write(self._leads, mine, came)
        self._next += self._every or 0
        return moved

    def _affordable(self, size: int) -> int | None:
        """How many steps apart files of that size may be; None where they are too large to be written at all."""
        assert self._leads is not None
        most = min(_MOST_BYTES, _MOST_OF_THE_DISK * shutil.disk_usage(self._leads).free)
        times = math.ceil(_FILES * size / most)
        return EVERY * times if 2 * times < _FILES else None

    def _write(self, folder: Path, mine: _State, came: list[Any] | None) -> None:
        path = self._path(folder)
        weights = _on_host(mine.weights) if self._every is not None else []
        rest = mine.rest if self._every is not None else {}
        told = {"every": self._every, "came": came or weights, "weights": weights, **rest}
        torch.save(told, part := path.with_suffix(".part"))
        os.replace(part, path)  # noqa: PTH105 - a script's own pathlib is none of ours

    def _theirs(self) -> dict[str, Any] | None:
        """What the leader had at this step; None where it has come to its end before, or there is none."""
        if self._follows is None:
            return None
        path = self._path(self._follows)
        while not path.exists():
            if (self._follows / WEIGHTS_OVER).exists() and not path.exists():
                break
            time.sleep(_LOOK_EVERY_S)
        theirs: dict[str, Any] | None = torch.load(path, map_location="cpu") if path.exists() else None
        if theirs is None or theirs["every"] is None:
            self._follows = None
            return None
        return theirs

    def _path(self, folder: Path) -> Path:
        return folder / f"{self._rank:05d}-{self._steps:05d}.pt"


class _State:
    """All that a training process learns: what its optimizers train and remember, and its models' buffers."""

    def __init__(self, optimizers: Iterable[Any], roots: Iterable[Any]) -> None:
        known = list(optimizers)
        trained = [(o, p) for o in known for group in o.param_groups for p in group["params"]]
        self.weights = [_local(p) for _, p in trained]
        self._remembered = [o.state.get(p, {}) for o, p in trained]
        self._buffers = [_local(b) for root in roots for b in root.buffers()]

    @property
    def bytes(self) -> int:
        remembered = [_local(v) for state in self._remembered for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in (*self.weights, *self._buffers, *remembered))

    @property
    def rest(self) -> dict[str, Any]:
        """What is not weights, as a file can hold it."""
        remembered = [{k: _plain(v) for k, v in state.items() if _is_plain(v)} for state in self._remembered]
        return {"buffers": _on_host(self._buffers), "remembered": remembered}

    @torch.no_grad()
    def take(self, theirs: dict[str, Any]) -> None:
        """Go on from another's. In place: graphs and views know where things lie."""
        for mine, their in zip(self.weights, theirs["weights"], strict=True):
            mine.copy_(their)
        for mine, their in zip(self._buffers, theirs["buffers"], strict=True):
            mine.copy_(their)
        for state, their in zip(self._remembered, theirs["remembered"], strict=True):
            for key in state.keys() & their.keys():
                if isinstance(state[key], torch.Tensor):
                    _local(state[key]).copy_(torch.as_tensor(their[key]))
                else:
                    state[key] = float(their[key]) if isinstance(state[key], float) else int(their[key])


@torch.no_grad()
def _moved(began: list[Any], theirs: list[Any], mine: list[Any]) -> Moved | None:
    """Sums over all weights, in double precision; None where the leader has not moved at all."""
    sums = torch.zeros(3, dtype=torch.float64)
    for start, their, my in zip(began, theirs, mine, strict=True):
        if start.is_floating_point():
            they, we = ((end.to(start.device).double() - start.double()).flatten() for end in (their, my))
            sums += torch.stack([they @ they, we @ we, they @ we]).cpu()
    they_went, we_went, along = sums.tolist()
    if not they_went:
        return None
    return math.sqrt(we_went / they_went), along / math.sqrt(we_went * they_went) if we_went else 0.0


def _on_host(tensors: Iterable[Any]) -> list[Any]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _local(tensor: Any) -> Any:
    """This rank's part of one that is spread over several."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float)


def _plain(value: Any) -> Any:
    return _local(value).detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
