"""Something made of one picture: how a card would make it, and how it is made here.

`here` makes it by the very calls that were noted, with the library that was called, so that whatever nobody could note
gets what it would have got.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flatout.feed.deferred.program import WARP_NUMBERS, Program, Step

DTYPES = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(slots=True, eq=False, kw_only=True)
class Value:
    """One of a program's steps to be. `call` makes it here, of its inputs made here."""

    op: str
    inputs: tuple[Value, ...] = ()
    static: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()
    shape: tuple[int, ...]
    dtype: str
    call: Callable[..., Any]
    picture: Any  # that it is all made of, decoded; None: it is numbers only, or an array that is there already
    _here: Any = field(default=None)

    @property
    def here(self) -> Any:
        """It, made in this process as the script would have made it."""
        if self._here is None:
            with noting(False):
                self._here = self.call(*(value.here for value in self.inputs))
        return self._here

    def then(self, op: str, call: Callable[..., Any], **other: Any) -> Value:
        """What comes of it by one operation more."""
        same: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype, "picture": self.picture}
        return Value(op=op, inputs=(self,), call=call, **(same | other))

    def reordered(self, axes: Sequence[int] | None, call: Callable[..., Any]) -> Value | None:
        """With its axes in this order."""
        if axes is None or sorted(axes) != list(range(len(self.shape))):
            return None
        return self.then("permute", call, static=tuple(axes), shape=tuple(self.shape[axis] for axis in axes))

    def cast(self, dtype: str, call: Callable[..., Any]) -> Value | None:
        """As another type; None where libraries and cards do not agree on what becomes of 256.0, or of -1.0."""
        if dtype == self.dtype:
            return self
        if dtype not in DTYPES or self.picture is None or (self.dtype.startswith("float") and dtype == "uint8"):
            return None
        return self.then("cast", call, static=(DTYPES[dtype],), dtype=dtype)


def together(op: str, values: Sequence[Value | None], call: Callable[..., Any], dtype: str) -> Value | None:
    """What comes of several; None where it cannot be noted."""
    known = [value for value in values if value is not None and (value.picture is not None or value.op == "numbers")]
    pictures = [value.picture for value in known if value.picture is not None]
    one = bool(pictures) and all(picture is pictures[0] for picture in pictures)
    if len(known) < len(values) or not one or dtype not in ("float32", "float64"):
        return None
    try:
        shape = np.broadcast_shapes(*(value.shape for value in known))
    except ValueError:
        return None
    return Value(op=op, inputs=tuple(known), shape=shape, dtype=dtype, call=call, picture=pictures[0])


def program(value: Value) -> tuple[Program, list[float]]:
    """The steps that make a value, and the numbers in them."""
    places: dict[int, int] = {}
    steps: list[Step] = []
    numbers: list[float] = []

    def visit(value: Value) -> int:
        if id(value) not in places:
            inputs = tuple(map(visit, value.inputs))
            static = value.static
            if value.op == "numbers":
                static = (len(numbers), value.shape)
            elif value.op == "warp":
                static = (*static, len(numbers), len(value.numbers) - WARP_NUMBERS)
            numbers.extend(value.numbers)
            steps.append(Step(value.op, inputs, static))
            places[id(value)] = len(steps) - 1
        return places[id(value)]

    visit(value)
    return Program(tuple(steps), value.shape, DTYPES[value.dtype]), numbers


# --- when things are noted -----------------------------------------------------------------------------------------

_noting = False


def is_noting() -> bool:
    """Whether what is done to pictures is to be noted now."""
    return _noting


@contextlib.contextmanager
def noting(yes: bool = True) -> Iterator[None]:
    """Have it noted in here, or not."""
    global _noting
    before, _noting = _noting, yes
    try:
        yield
    finally:
        _noting = before
