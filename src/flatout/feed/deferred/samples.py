"""A dataset's samples with their transforms only recorded, and the checks that this changes nothing.

A worker makes its first samples, and later one now and then, both ways from the same random numbers, and
compares. After the first difference nothing is recorded any more in that worker. A sample that raises, or
that writes to memory which a lazy object looks at too, is made again without recording.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from flatout.feed import randomness
from flatout.feed.deferred import lazy
from flatout.feed.deferred.batch import materialize, run_program
from flatout.feed.deferred.expression import SampleRecording, as_program, recording_transforms
from flatout.feed.deferred.lazy import LazyTensor, collatable, is_lazy, pixels_of

_CHECKED_FIRST, _CHECKED_EVERY = 3, 512  # samples of a worker that are made both ways
_GIVE_UP_AFTER = 16  # samples without anything to record
_MAX_FAILED = 2  # samples, and an eighth of all, that may have to be made again
_TOLERANCE = 0.02  # of the norm, or of whole numbers: rounding, and pixels at an edge


class LazySamples:
    """The samples of a dataset, lazy where they can be. `off`: not, or no longer."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._count = self._lazy_count = self._failed_count = 0
        self.off = bool(randomness.generators_in(dataset))  # their draws could not be repeated

    def __getitem__(self, index: Any) -> Any:
        return self._get(lambda: self._dataset[index])

    def get_many(self, indices: Any) -> Any:
        """Several at once, from a dataset with `__getitems__`."""
        return self._get(lambda: self._dataset.__getitems__(indices))

    def _get(self, make: Callable[[], Any]) -> Any:
        if self.off:
            sample = make()
            return materialize(sample) if self._lazy_count else sample  # the dataset may have kept lazy ones
        before = randomness.capture()
        self._count += 1
        recording = SampleRecording()
        try:
            with recording_samples(recording):
                sample = collatable(make())
        except Exception:
            recording.failed = True
        if recording.failed:
            self._failed_count += 1
            self.off = self._failed_count > _MAX_FAILED + self._count / 8
            randomness.restore(before)
            return materialize(make())  # raises again if it is the script's own error
        self._lazy_count += holds_lazy(sample)
        if not self._lazy_count:
            self.off = self._count >= _GIVE_UP_AFTER
        elif self._count <= _CHECKED_FIRST or self._count % _CHECKED_EVERY == 0:
            return self._checked(sample, make, before)
        return sample

    def _checked(self, sample: Any, make: Callable[[], Any], before: dict[str, Any]) -> Any:
        """`sample` if making it without recording gives the same and draws as much; else what that gives."""
        after = randomness.capture()
        randomness.restore(before)
        plain = sample
        try:
            plain = make()
            drawn_alike = randomness.same_state(after, randomness.capture())
            same = drawn_alike and not holds_lazy(plain) and same_sample(sample, plain)
            self.off = not same or bool(randomness.generators_in(self._dataset))  # it may have made one since
        except Exception:
            self.off = True
            if plain is sample:  # it cannot be made twice
                randomness.restore(after)
        return materialize(plain) if self.off else sample


def holds_lazy(sample: Any) -> bool:
    """Whether any part of it is a lazy array or tensor."""
    return any(map(is_lazy, tree_leaves(sample)))


def same_sample(sample: Any, plain: Any) -> bool:
    """Whether a GPU would compute what was made here, but for rounding. What is not lazy has to be equal."""
    parts, form = tree_flatten(sample)
    plain_parts, plain_form = tree_flatten(plain)
    return form == plain_form and all(map(_same_part, parts, plain_parts))


def _same_part(part: Any, plain: Any) -> bool:
    if isinstance(part, LazyTensor) and part.expression is not None:
        program, numbers = as_program(part.expression)
        pixels = pixels_of(part.expression).unsqueeze(0)
        result = run_program(program, pixels, torch.tensor([numbers], dtype=torch.float64))
        return _close(result[0], torch.as_tensor(plain))
    if isinstance(part, Tensor | np.ndarray):
        return type(part) is type(plain) and bool(np.array_equal(np.asarray(part), np.asarray(plain)))
    if isinstance(part, int | float | str | bytes | np.generic):
        return bool(part == plain)
    return type(part) is type(plain)


def _close(result: Tensor, expected: Tensor) -> bool:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.is_floating_point():
        return bool((result - expected).norm() <= _TOLERANCE * expected.norm())
    return bool((result != expected).float().mean() <= _TOLERANCE)


def _with_real_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that look at an array's type and do something else to any other."""
    return functools.wraps(original)(lambda *args, **kwargs: original(*materialize(args), **materialize(kwargs)))


_REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    *((np, name, lazy.lazy_reader) for name in ("array", "asarray", "ascontiguousarray")),
    *((torch, name, lazy.lazy_tensor_maker) for name in ("from_numpy", "as_tensor", "asarray", "tensor")),
    *((np.random, name, _with_real_arguments) for name in ("shuffle", "permutation")),
    (Image, "fromarray", _with_real_arguments),
    (Image.Image, "transform", lambda _: lazy.transform),
    (Image.Image, "transpose", lambda _: lazy.transpose),
)
_RECORDING = [(owner, name, replace(getattr(owner, name))) for owner, name, replace in _REPLACEMENTS]


@contextlib.contextmanager
def recording_samples(recording: SampleRecording) -> Iterator[None]:
    """Record; with the functions that do, where scripts look them up by name. Outside of samples all
    is as it was."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _RECORDING]
    try:
        for owner, name, function in _RECORDING:
            setattr(owner, name, function)
        with recording_transforms(recording):
            yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
