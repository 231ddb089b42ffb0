"""What is recorded of a lazy array or tensor: how the GPU would compute it, and how it is computed here.

An `Expression` never changes: it computes an array or a tensor by the very calls that were recorded, each
time new. As in numpy and torch, several lazy objects may be views of the same memory, and one may be written
to: then the sample is made again without recording, and no such write has to be followed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatout.feed.deferred.batch import WARP_NUMBERS, TransformProgram, TransformStep

_asarray = np.asarray

DTYPES = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_CONSTANT = 64  # numbers of a constant that travels with every sample
_MAX_DEPTH = 100  # operations on top of each other: more of them are a loop, which is better computed here
_MIN_NUMBER, _MAX_NUMBER = 1e-30, 1e30  # safe in float32 on a GPU

# --- when transforms are recorded ---------------------------------------------------------------


class SampleRecording:
    """Of one sample. `failed`: it has to be made again, as one of two views of the same memory was to
    be real."""

    failed = False


_state = threading.local()


def current_recording() -> SampleRecording | None:
    """What this thread does to pictures is recorded there; None: it is not."""
    return getattr(_state, "recording", None)


@contextlib.contextmanager
def recording_transforms(recording: SampleRecording | None) -> Iterator[None]:
    """Record what this thread does to pictures until the end of the block, or (None) do not."""
    before, _state.recording = current_recording(), recording
    try:
        yield
    finally:
        _state.recording = before


# --- expressions --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Expression:
    """One step of a program to be. `call` computes it here, from its computed inputs."""

    op: str
    inputs: tuple[Expression, ...] = ()
    static: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()
    shape: tuple[int, ...]
    dtype: str
    call: Callable[..., Any]
    picture: Any  # the decoded picture it all comes from, a copy of our own; None: only numbers
    depth: int = 0

    def compute(self) -> Any:
        """The array or tensor, in memory of its own."""
        results: dict[int, Any] = {}

        def compute(expression: Expression) -> Any:
            if id(expression) not in results:
                results[id(expression)] = expression.call(*map(compute, expression.inputs))
            return results[id(expression)]

        with recording_transforms(None):
            return compute(self)

    def then(self, op: str, call: Callable[..., Any], **other: Any) -> Expression:
        """This, with one more operation on it."""
        same: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype, "picture": self.picture}
        return Expression(op=op, inputs=(self,), call=call, depth=self.depth + 1, **(same | other))

    def permuted(self, axes: Sequence[int], call: Callable[..., Any]) -> Expression:
        """This, with its axes in that order."""
        shape = tuple(self.shape[axis] for axis in axes)
        return self.then("permute", call, static=tuple(axes), shape=shape)

    def cast(self, dtype: str, call: Callable[..., Any]) -> Expression | None:
        """This, as another type; None where a small rounding error could become another whole number."""
        to_whole_numbers = self.dtype.startswith("float") and not dtype.startswith("float")
        if dtype not in DTYPES or to_whole_numbers:
            return None
        return self.then("cast", call, static=(DTYPES[dtype],), dtype=dtype)


def constant(thing: Any) -> Expression | None:
    """A few numbers that travel with a sample, copied: the script may change them later."""
    if not isinstance(thing, int | float | np.ndarray | np.generic | torch.Tensor):
        return None
    try:
        values = _asarray(thing)
    except (TypeError, RuntimeError):  # on a GPU, or with a gradient
        return None
    if values.size > _MAX_CONSTANT or values.dtype.kind not in "iuf":
        return None
    numbers = tuple(map(float, values.flat))
    if any(number and not _MIN_NUMBER < abs(number) < _MAX_NUMBER for number in numbers):
        return None
    kept = copy.deepcopy(thing)
    return Expression(op="numbers", numbers=numbers, shape=values.shape, dtype="", call=lambda: kept, picture=None)


def combine(op: str, inputs: Sequence[Expression], call: Callable[..., Any], dtype: str) -> Expression | None:
    """An operation on several expressions; None where it cannot be recorded, `RuntimeError` where
    shapes do not fit."""
    first, *others = [expression.picture for expression in inputs if expression.picture is not None]
    depth = 1 + max(expression.depth for expression in inputs)
    recordable = dtype in ("float32", "float64") and depth <= _MAX_DEPTH
    if not recordable or any(picture is not first for picture in others):
        return None
    shape = tuple(torch.broadcast_shapes(*(expression.shape for expression in inputs)))
    return Expression(op=op, inputs=tuple(inputs), shape=shape, dtype=dtype, call=call, picture=first, depth=depth)


def as_program(expression: Expression) -> tuple[TransformProgram, list[float]]:
    """The steps that compute an expression, and this sample's numbers for them."""
    positions: dict[int, int] = {}
    steps: list[TransformStep] = []
    numbers: list[float] = []

    def visit(expression: Expression) -> int:
        if id(expression) in positions:
            return positions[id(expression)]
        inputs = tuple(map(visit, expression.inputs))
        static = expression.static
        if expression.op == "numbers":
            static = (len(numbers), expression.shape)
        elif expression.op == "warp":
            static = (*static, len(numbers), len(expression.numbers) - WARP_NUMBERS)
        numbers.extend(expression.numbers)
        steps.append(TransformStep(expression.op, inputs, static))
        positions[id(expression)] = len(steps) - 1
        return positions[id(expression)]

    visit(expression)
    return TransformProgram(tuple(steps), expression.shape, DTYPES[expression.dtype]), numbers


# --- lazy objects -------------------------------------------------------------------------------

materializing = threading.RLock()  # threads of one sample have to see the same


class LazyObject:
    """An object that has an expression until it is real. `view_of` is one that looks at the same memory."""

    def __init__(self, expression: Expression, view_of: LazyObject | None = None) -> None:
        self._expression = expression
        self._real: Any = None
        self._recording = current_recording()
        self._views: list[weakref.ref[LazyObject]] = [] if view_of is None else view_of._views
        self._views.append(weakref.ref(self))

    @property
    def is_real(self) -> bool:
        """Whether it has been computed."""
        return self._real is not None

    @property
    def expression(self) -> Expression | None:
        """How to compute it; None once it is real."""
        return None if self.is_real else self._expression

    def materialize(self) -> Any:
        """The array or tensor itself, in memory that may be written to."""
        with materializing:
            if self._real is None:
                self._fail_unless_alone()
                self._real = self._expression.compute()
            return self._real

    def replace_in_place(self, expression: Expression | None) -> bool:
        """Record a change in place, if it keeps shape and type. Whether it was recorded."""
        now = self.expression
        if expression is None or now is None or (expression.shape, expression.dtype) != (now.shape, now.dtype):
            return False
        self._fail_unless_alone()
        self._expression = expression
        return True

    def _fail_unless_alone(self) -> None:
        others = [other for view in self._views if (other := view()) is not None and other is not self]
        if others and self._recording is not None:
            self._recording.failed = True
