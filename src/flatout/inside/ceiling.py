"""How fast the same step runs when its data is already there: the end of a trial, never of a real training.

After the measured steps a few more are fed with batches kept from before (`replay`: no loader), then with their
device copies (`resident`: no loader and no copy).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatout.inside.patches import Patches, Stage

_KEPT = 4
_STEPS_EACH = 12
_FETCHES_A_STEP = 64  # more than this without a step is no training: give the loader back


class Ceiling:
    """Keeps the last few batches, and gives them back when their time comes."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Any]] = {}
        self._copies: dict[tuple[int, str], Any] = {}
        self._kinds = iter(("replay",) * _STEPS_EACH + ("resident",) * _STEPS_EACH)
        self._replaying = False
        self._fetches = 0
        self._turn = 0
        self.resident = False  # whether device copies are given back, too

    def install(self, patches: Patches, fail: Callable[[Exception], None]) -> None:
        """Answer `.to` and `.cuda` with the device copy made before, while `resident`."""
        self._changes = patches.subscriber(Stage.CHANGE, fail)
        for name in ("to", "cuda"):
            self._changes.around(f"torch.Tensor.{name}", functools.partial(self._move, name))

    def remove(self) -> None:
        """It is over."""
        self._changes.leave()

    def _move(self, name: str, call: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.resident:
            return call(tensor, *args, **kwargs)
        copy = functools.partial(call, tensor, *args, **kwargs)
        return self.copy_of(tensor, f"{name} {args} {kwargs}", copy)

    def keep(self, loader: int, batch: Any) -> None:
        """Remember a batch that came from a loader."""
        self._kept.setdefault(loader, deque(maxlen=_KEPT)).append(_apart(batch))

    def next_step(self) -> str | None:
        """What the next step is, after the measured ones; None when it is all over or cannot be done here."""
        fed, self._fetches = self._fetches, 0
        kind = next(self._kinds, None)
        if not self._kept or (self._replaying and not 0 < fed <= _FETCHES_A_STEP):
            return None
        if kind == "resident" and not torch.cuda.is_initialized():
            return None
        self._replaying = kind is not None
        return kind

    def batch(self, loader: int) -> Any:
        """A kept batch of that loader, while replaying; None otherwise."""
        kept = self._kept.get(loader)
        if not self._replaying or not kept:
            return None
        self._fetches += 1
        if self._fetches > _FETCHES_A_STEP:
            return None
        self._turn += 1
        return _apart(kept[self._turn % len(kept)])

    def copy_of(self, tensor: Any, how: str, copy: Callable[[], Any]) -> Any:
        """The device copy of a kept tensor, made once for each way of asking."""
        key = (id(tensor), how)
        if key not in self._copies:
            made = copy()
            batches = [batch for kept in self._kept.values() for batch in kept]
            if made is tensor or not any(tensor is kept for batch in batches for kept in tensors_in(batch)):
                return made
            self._copies[key] = made
        return self._copies[key]


def _apart(batch: Any) -> Any:
    """The same tensors in containers of their own: scripts pop from their batches."""
    if isinstance(batch, dict):
        return type(batch)({key: _apart(item) for key, item in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_apart(item) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_apart(item) for item in batch)
    return batch


def tensors_in(batch: Any) -> list[Any]:
    """Every tensor of a batch, in order."""
    if isinstance(batch, Mapping):
        return [t for item in batch.values() for t in tensors_in(item)]
    if isinstance(batch, list | tuple):
        return [t for item in batch for t in tensors_in(item)]
    return [batch] if isinstance(batch, torch.Tensor) else []
