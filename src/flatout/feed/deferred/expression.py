"""What is recorded of a lazy object: how the GPU would compute it, how it is computed here, and whose memory it is.

An `Expression` never changes: it computes an array or a tensor by the very calls that were recorded, each time new.
What changes is a `LazyMemory`: several objects may be views of one, as in numpy and torch. As soon as its real memory
is handed out, the script may write there. From then on that memory is used, and nothing in it is recorded any more.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flatout.feed.deferred.program import WARP_NUMBERS, TransformProgram, TransformStep

_numpy: Any = sys.modules.get("numpy")  # PyTorch has imported it, where it is installed

Order = Literal["C", "other", "unknown"]
DTYPES = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_CONSTANT = 64  # numbers of a constant that travels with every sample
_MAX_DEPTH = 100  # operations on top of each other: more of them are a loop, which is better computed here
_MIN_NUMBER, _MAX_NUMBER = 1e-30, 1e30  # safe in float32 on a GPU


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
    order: Order = "C"  # of the elements in memory: it tells a copy from another view
    depth: int = 0

    def compute(self) -> Any:
        """The array or tensor, in memory of its own."""
        results: dict[int, Any] = {}

        def compute(expression: Expression) -> Any:
            if id(expression) not in results:
                results[id(expression)] = expression.call(*map(compute, expression.inputs))
            return results[id(expression)]

        with recording_transforms(False):
            return compute(self)

    def then(self, op: str, call: Callable[..., Any], **other: Any) -> Expression:
        """This, with one more operation on it."""
        same: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype, "picture": self.picture, "order": self.order}
        return Expression(op=op, inputs=(self,), call=call, depth=self.depth + 1, **(same | other))

    def reordered(self, axes: Sequence[int], call: Callable[..., Any]) -> Expression:
        """This, with its axes in that order."""
        order: Order = self.order
        if list(axes) != sorted(axes):
            order = "other" if self.order == "C" and min(self.shape) > 1 else "unknown"
        shape = tuple(self.shape[axis] for axis in axes)
        return self.then("permute", call, static=tuple(axes), shape=shape, order=order)

    def cast(self, dtype: str, call: Callable[..., Any]) -> Expression | None:
        """This, as another type; None where a small rounding error could become another whole number."""
        to_whole_numbers = self.dtype.startswith("float") and not dtype.startswith("float")
        if dtype not in DTYPES or to_whole_numbers:
            return None
        return self.then("cast", call, static=(DTYPES[dtype],), dtype=dtype)


def constant(thing: Any) -> Expression | None:
    """A few numbers that travel with a sample, copied: the script may change them later."""
    kept: Any = thing
    numbers: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    if type(thing) in (int, float):
        numbers = (float(thing),)
    elif isinstance(thing, torch.Tensor) or _is_numpy(thing):
        kept = thing.clone() if isinstance(thing, torch.Tensor) else thing.copy()
        array = _numpy.asarray(kept)
        if array.size > MAX_CONSTANT or array.dtype.kind not in "iuf":
            return None
        numbers, shape = tuple(map(float, array.ravel())), array.shape
    else:
        return None
    if any(number and not _MIN_NUMBER < abs(number) < _MAX_NUMBER for number in numbers):
        return None
    return Expression(op="numbers", numbers=numbers, shape=shape, dtype="", call=lambda: kept, picture=None)


def _is_numpy(thing: Any) -> bool:
    """Whether it is an array or a number of numpy's."""
    return _numpy is not None and isinstance(thing, (_numpy.ndarray, _numpy.generic))


def combine(op: str, inputs: Sequence[Expression | None], call: Callable[..., Any], dtype: str) -> Expression | None:
    """An operation on several expressions; None where it cannot be recorded."""
    known = [expression for expression in inputs if expression is not None]
    pictures = [expression.picture for expression in known if expression.picture is not None]
    if len(known) < len(inputs) or not pictures or any(picture is not pictures[0] for picture in pictures):
        return None
    depth = 1 + max(expression.depth for expression in known)
    if dtype not in ("float32", "float64") or depth > _MAX_DEPTH:
        return None
    try:
        shape = tuple(torch.broadcast_shapes(*(expression.shape for expression in known)))
    except RuntimeError:
        return None
    orders = {expression.order for expression in known if expression.picture is not None and expression.shape}
    order: Order = "C"
    if orders:
        order = orders.pop() if len(orders) == 1 else "unknown"
    return Expression(
        op=op, inputs=tuple(known), shape=shape, dtype=dtype, call=call, picture=pictures[0], order=order, depth=depth
    )


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


# --- memory -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class LazyMemory:
    """The memory of one or more lazy objects: an expression, or real once anybody has it."""

    root: Expression
    real: Any = None


@dataclass(frozen=True, slots=True)
class LazyView:
    """One way to look at the same memory: of an expression, and of a real array or tensor."""

    of_expression: Callable[[Expression], Expression]
    of_real: Callable[[Any], Any]


materializing = threading.RLock()  # threads of one sample that share memory have to see the same


class LazyObject:
    """An object in a memory, seen through `path`."""

    def __init__(self, memory: LazyMemory, path: tuple[LazyView, ...] = ()) -> None:
        self._memory, self._path, self._real = memory, path, None

    @property
    def expression(self) -> Expression | None:
        """How to compute it; None once it is real."""
        if self._memory.real is not None:
            return None
        expression = self._memory.root
        for view in self._path:
            expression = view.of_expression(expression)
        return expression

    def materialize(self) -> Any:
        """The array or tensor itself, in the memory that all views of it share."""
        with materializing, recording_transforms(False):
            if self._real is None:
                memory = self._memory
                if memory.real is None:
                    memory.real = memory.root.compute()
                real = _same_memory(memory.real)
                for view in self._path:
                    real = view.of_real(real)
                self._real = real
            return self._real

    def seen_through(self, view: LazyView) -> tuple[LazyMemory, tuple[LazyView, ...]]:
        """Its memory, looked at in one more way."""
        return self._memory, (*self._path, view)

    def reordered(self, axes: Sequence[int], call: Callable[..., Any]) -> tuple[LazyMemory, tuple[LazyView, ...]]:
        """Its memory, with the axes in that order."""
        return self.seen_through(LazyView(lambda expression: expression.reordered(axes, call), call))

    def replace_in_place(self, expression: Expression | None) -> bool:
        """Record a change in place, if all of its memory changes and keeps its form. Whether it was recorded."""
        now = self.expression
        if expression is None or now is None or self._path or expression.order == "unknown":
            return False
        if (expression.shape, expression.dtype, expression.order) != (now.shape, now.dtype, now.order):
            return False
        self._memory.root = expression
        return True


def _same_memory(real: Any) -> Any:
    """The same memory as another object, whose shape can be changed on its own."""
    if isinstance(real, torch.Tensor):
        return real.detach()
    return real.view() if _is_numpy(real) else real


# --- when transforms are recorded ---------------------------------------------------------------

_state = threading.local()


def is_recording() -> bool:
    """Whether what this thread does to pictures is recorded now."""
    return getattr(_state, "on", False)


@contextlib.contextmanager
def recording_transforms(on: bool = True) -> Iterator[None]:
    """Record what this thread does to pictures, or do not, until the end of the block."""
    before, _state.on = is_recording(), on
    try:
        yield
    finally:
        _state.on = before
