"""How fast the same step runs when its data is already there: the end of a trial, never of a real training.

After the measured steps a few more are fed with batches kept from before (`replay`: no loader), then with their
device copies (`resident`: no loader and no copy).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_KEPT = 4
_STEPS_EACH = 12


class Ceiling:
    """Keeps the last few batches, and gives them back when their time comes."""

    def __init__(self) -> None:
        self._kept: deque[Any] = deque(maxlen=_KEPT)
        self._copies: dict[int, Any] = {}
        self._kind = "train"
        self._turn = 0

    def keep(self, batch: Any) -> None:
        """Remember a batch that came from the loader."""
        self._kept.append(_apart(batch))

    def kind_of_step(self, beyond: int) -> str | None:
        """What the next step is, `beyond` the measured ones; None when it is all over."""
        if beyond < 0:
            self._kind = "train"
        elif beyond < 2 * _STEPS_EACH and self._kept:
            self._kind = "replay" if beyond < _STEPS_EACH or not torch.cuda.is_initialized() else "resident"
        else:
            return None
        return self._kind

    def batch(self) -> Any:
        """A kept batch, while replaying; None otherwise."""
        if self._kind == "train" or not self._kept:
            return None
        self._turn += 1
        return _apart(self._kept[self._turn % len(self._kept)])

    def copy_of(self, tensor: Any, copy: Callable[[], Any]) -> Any:
        """The device copy of a kept tensor, made once."""
        key = id(tensor)
        if key not in self._copies:
            made = copy()
            if made is tensor or not any(tensor is kept for batch in self._kept for kept in _tensors(batch)):
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


def _tensors(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [t for item in batch.values() for t in _tensors(item)]
    if isinstance(batch, list | tuple):
        return [t for item in batch for t in _tensors(item)]
    return [batch] if isinstance(batch, torch.Tensor) else []
