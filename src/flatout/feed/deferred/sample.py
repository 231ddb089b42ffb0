"""One sample after the other with its transforms only noted, and the doubts about that.

Nobody can foresee what code does with what is not quite the array that it takes it for. So a worker makes its first
samples, and later some now and then, both ways from the same random numbers, and compares; and a sample that raises is
made again without noting. From the first difference on nothing is noted any more in that worker, nor where that takes
longer than the work it saves.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flatout.feed import randomness
from flatout.feed.deferred import pictures
from flatout.feed.deferred.arrays import reading
from flatout.feed.deferred.batch import real
from flatout.feed.deferred.program import run
from flatout.feed.deferred.tensors import LaterTensor, all_real, holds_noted, left_to_do, pixels_of, wrapping
from flatout.feed.deferred.value import noting, program

_FIRST, _EVERY = 3, 512  # samples of a worker that are made both ways
_LITTLE_S = 5e-3  # of a sample: what noting may take more than it saves
_NOTHING_IN = 16  # samples without anything to note: then there is nothing to gain
_NOT_MADE = object()
_OFF = 0.02  # of the values' norm, or of whole numbers: rounding, and pixels at an edge


class Samples:
    """A dataset's samples; what can be left to the card is left to it. `off`: not, or no longer."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._made = self._noted = 0
        self._noted_s = self._plain_s = math.inf  # CPU time at the least, of the samples that were made both ways
        self.off = bool(randomness.generators_in(dataset))  # their draws could not be repeated

    def __getitem__(self, index: Any) -> Any:
        return self._get(lambda: self._dataset[index])

    def together(self, indices: Any) -> Any:
        """Several at once, from a dataset that has a way of its own for that."""
        return self._get(lambda: self._dataset.__getitems__(indices))

    def _get(self, make: Callable[[], Any]) -> Any:
        if self.off:
            sample = make()
            return all_real(sample) if self._noted else sample  # a dataset may have kept some
        before, began = randomness.whole_snapshot(), time.thread_time()
        try:
            with noting(), _noting_libraries():
                sample = left_to_do(make())
        except Exception:
            randomness.put_back(before)
            sample = all_real(make())  # raises where it is not the noting that is to blame
            self.off = True
            return sample
        self._made += 1
        self._noted += holds_noted(sample)
        if not self._noted:
            self.off = self._made >= _NOTHING_IN
        elif self._made <= _FIRST or self._made % _EVERY == 0:
            self._noted_s = min(self._noted_s, time.thread_time() - began)
            return self._checked(sample, make, before)
        return sample

    def _checked(self, sample: Any, make: Callable[[], Any], before: tuple[Any, ...]) -> Any:
        """`sample`, if it is what comes of it without noting, with as many random numbers; else that."""
        after = randomness.whole_snapshot()
        randomness.put_back(before)
        began, plain = time.thread_time(), _NOT_MADE
        try:
            plain = make()
            self._plain_s = min(self._plain_s, time.thread_time() - began)
            same = after == randomness.whole_snapshot() and not holds_noted(plain) and alike(sample, plain)
            slow = self._made >= _FIRST and self._noted_s > self._plain_s + _LITTLE_S
            self.off = not same or slow or bool(randomness.generators_in(self._dataset))  # it may have made one since
        except Exception:
            self.off = True
            if plain is _NOT_MADE:  # it cannot be had twice
                plain = sample
                randomness.put_back(after)
        return all_real(plain) if self.off else sample


def alike(noted: Any, plain: Any) -> bool:
    """Whether what a card would make is what was made, but for rounding. What is not noted has to be the same."""
    if isinstance(noted, LaterTensor) and noted.value is not None:
        steps, numbers = program(noted.value)
        made = run(steps, pixels_of(noted.value).unsqueeze(0), torch.tensor([numbers], dtype=torch.float64))
        return _close(made[0], torch.as_tensor(plain))
    if isinstance(noted, Mapping):
        same = isinstance(plain, Mapping) and noted.keys() == plain.keys()
        return same and all(alike(part, plain[key]) for key, part in noted.items())
    if isinstance(noted, list | tuple):
        return len(noted) == len(plain) and all(map(alike, noted, plain))
    if isinstance(noted, Tensor | np.ndarray):
        return type(noted) is type(plain) and bool(np.array_equal(np.asarray(noted), np.asarray(plain)))
    plainly = isinstance(noted, int | float | str | bytes | np.generic)
    return bool(noted == plain) if plainly else type(noted) is type(plain)


def _close(made: Tensor, wanted: Tensor) -> bool:
    if made.shape != wanted.shape or made.dtype != wanted.dtype:
        return False
    if made.is_floating_point():
        return bool((made - wanted).norm() <= _OFF * wanted.norm())
    return bool((made != wanted).float().mean() <= _OFF)


def _given_the_real_thing(original: Callable[..., Any]) -> Callable[..., Any]:
    """For what looks at an array's type, and does something else to what is none."""
    return functools.wraps(original)(lambda *args, **kwargs: original(*real(args), **real(kwargs)))


_PLACES = (
    *((np, name, reading(getattr(np, name))) for name in ("array", "asarray", "ascontiguousarray")),
    *((torch, name, wrapping(getattr(torch, name))) for name in ("from_numpy", "as_tensor", "asarray", "tensor")),
    *((np.random, name, _given_the_real_thing(getattr(np.random, name))) for name in ("shuffle", "permutation")),
    (Image, "fromarray", _given_the_real_thing(Image.fromarray)),
    (Image.Image, "transform", pictures.transform),
    (Image.Image, "transpose", pictures.transpose),
)


@contextlib.contextmanager
def _noting_libraries() -> Iterator[None]:
    """What notes in the libraries' places, where scripts find it by its name; outside of samples all is as it was."""
    before = [(place, name, getattr(place, name)) for place, name, _ in _PLACES]
    try:
        for place, name, function in _PLACES:
            setattr(place, name, function)
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)
