"""One sample after the other with its transforms only noted, and the doubts about that.

Code that asks whether something *is* a numpy array may go another way with one that notes. So a worker makes its first
samples, and later some now and then, both ways from the same random numbers, and compares; and a sample that raises is
made again without noting. From the first difference on nothing is noted any more in that worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flatout.feed import randomness
from flatout.feed.deferred import pictures
from flatout.feed.deferred.arrays import reading
from flatout.feed.deferred.program import run
from flatout.feed.deferred.tensors import LaterTensor, left_to_do, pixels_of, wrapping
from flatout.feed.deferred.value import noting, program

_FIRST, _EVERY = 3, 512  # samples of a worker that are made both ways
_NOTHING_IN = 16  # samples without anything to note: then there is nothing to gain
_OFF = 0.02  # of the values' norm, or of whole numbers: rounding, and pixels at an edge


class Samples:
    """A dataset's samples; what can be left to the card is left to it. `off`: not, or no longer."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._made = self._noted = 0
        self.off = bool(randomness.generators_in(dataset))  # their draws could not be repeated
        _patch()

    def __getitem__(self, index: Any) -> Any:
        if self.off:
            return self._dataset[index]
        before = randomness.snapshot()
        try:
            with noting():
                sample = left_to_do(self._dataset[index])
        except Exception:
            randomness.put_back(before)
            sample = self._dataset[index]  # raises where it is not the noting that is to blame
            self.off = True
            return sample
        self._made += 1
        self._noted += _holds_noted(sample)
        if not self._noted:
            self.off = self._made >= _NOTHING_IN
        elif self._made <= _FIRST or self._made % _EVERY == 0:
            return self._checked(sample, index, before)
        return sample

    def _checked(self, sample: Any, index: Any, before: tuple[Any, ...]) -> Any:
        """`sample`, if it is what comes of it without noting; else that."""
        after = randomness.snapshot()
        randomness.put_back(before)
        plain = self._dataset[index]
        if after == randomness.snapshot() and alike(sample, plain):
            return sample
        self.off = True
        return plain


def alike(noted: Any, plain: Any) -> bool:
    """Whether what a card would make is what was made, but for rounding. What is not noted has to be the same."""
    if isinstance(noted, LaterTensor):
        steps, numbers = program(noted.value)
        made = run(steps, pixels_of(noted).unsqueeze(0), torch.tensor([numbers], dtype=torch.float64))
        return _close(made[0], torch.as_tensor(plain))
    if isinstance(noted, Mapping):
        return isinstance(plain, Mapping) and all(alike(part, plain[key]) for key, part in noted.items())
    if isinstance(noted, list | tuple):
        return len(noted) == len(plain) and all(map(alike, noted, plain))
    if isinstance(noted, Tensor | np.ndarray):
        return type(noted) is type(plain) and bool(np.array_equal(np.asarray(noted), np.asarray(plain)))
    return bool(noted == plain) if isinstance(noted, int | float | str | bytes) else type(noted) is type(plain)


def _close(made: Tensor, wanted: Tensor) -> bool:
    if made.shape != wanted.shape or made.dtype != wanted.dtype:
        return False
    if made.is_floating_point():
        return bool((made - wanted).norm() <= _OFF * wanted.norm())
    return bool((made != wanted).float().mean() <= _OFF)


def _holds_noted(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return any(map(_holds_noted, sample.values()))
    if isinstance(sample, list | tuple):
        return any(map(_holds_noted, sample))
    return isinstance(sample, LaterTensor)


def _patch() -> None:
    """Once a process, put what notes in the libraries' places, where scripts find it by its name."""
    if Image.Image.transform is pictures.transform:
        return
    Image.Image.transform, Image.Image.transpose = pictures.transform, pictures.transpose  # type: ignore[method-assign]
    for name in ("array", "asarray", "ascontiguousarray"):
        setattr(np, name, reading(getattr(np, name)))
    for name in ("from_numpy", "as_tensor", "tensor"):
        setattr(torch, name, wrapping(getattr(torch, name)))
