"""What is noted: how a card would make something of a picture, how it is made here, and whose memory it would be.

A `Value` never changes: it says how to make an array or a tensor, by the very calls that were noted, anew each time.
What changes is a `Memory`: several objects may be views of one, as in numpy and torch. As soon as real memory of it is
given out, somebody may write there, and it is the truth from then on: nothing that lies in it is noted any more.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flatout.feed.deferred.program import WARP_NUMBERS, Program, Step

_numpy: Any = sys.modules.get("numpy")  # PyTorch has imported it, where it is installed

Order = Literal["C", "other", "unknown"]
DTYPES = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SMALL = 64  # numbers: a constant that may go along with every sample
_DEEPEST = 100  # operations on top of each other: more than that is a loop, and better made here
_LEAST, _MOST = 1e-30, 1e30  # what a card can count with, in float32 and with room to spare


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
    picture: Any  # that it is all made of, which nobody else has; None: only numbers
    order: Order = "C"  # how elements would lie in memory: by this a copy is told from the same thing once more
    depth: int = 0

    def make(self) -> Any:
        """It, in memory of its own."""
        made: dict[int, Any] = {}

        def make(value: Value) -> Any:
            if id(value) not in made:
                made[id(value)] = value.call(*map(make, value.inputs))
            return made[id(value)]

        with noting(False):
            return make(self)

    def then(self, op: str, call: Callable[..., Any], **other: Any) -> Value:
        """What comes of it by one operation more."""
        same: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype, "picture": self.picture, "order": self.order}
        return Value(op=op, inputs=(self,), call=call, depth=self.depth + 1, **(same | other))

    def reordered(self, axes: Sequence[int], call: Callable[..., Any]) -> Value:
        """With its axes in this order."""
        known = self.order == "C" and min(self.shape) > 1
        order: Order = self.order if list(axes) == sorted(axes) else "other" if known else "unknown"
        shape = tuple(self.shape[axis] for axis in axes)
        return self.then("permute", call, static=tuple(axes), shape=shape, order=order)

    def cast(self, dtype: str, call: Callable[..., Any]) -> Value | None:
        """As another type; None where a rounding more or less would make another whole number of it."""
        if dtype not in DTYPES or (self.dtype.startswith("float") and not dtype.startswith("float")):
            return None
        return self.then("cast", call, static=(DTYPES[dtype],), dtype=dtype)


def constant(thing: Any) -> Value | None:
    """A few numbers that go along with a sample, as they are now: the script may change them later."""
    kept: Any = thing
    numbers: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    if type(thing) in (int, float):
        numbers = (float(thing),)
    elif isinstance(thing, torch.Tensor) or hasattr(thing, "__array_interface__"):
        kept = thing.clone() if isinstance(thing, torch.Tensor) else thing.copy()
        array = _numpy.asarray(kept)
        if array.size > SMALL or array.dtype.kind not in "iuf":
            return None
        numbers, shape = tuple(map(float, array.ravel())), array.shape
    else:
        return None
    if any(number and not _LEAST < abs(number) < _MOST for number in numbers):
        return None
    return Value(op="numbers", numbers=numbers, shape=shape, dtype="", call=lambda: kept, picture=None)


def together(op: str, values: Sequence[Value | None], call: Callable[..., Any], dtype: str) -> Value | None:
    """What comes of several; None where it cannot be noted."""
    known = [value for value in values if value is not None]
    pictures = [value.picture for value in known if value.picture is not None]
    one = bool(pictures) and all(picture is pictures[0] for picture in pictures)
    depth = 1 + max((value.depth for value in known), default=0)
    if len(known) < len(values) or not one or dtype not in ("float32", "float64") or depth > _DEEPEST:
        return None
    try:
        shape = tuple(torch.broadcast_shapes(*(value.shape for value in known)))
    except RuntimeError:
        return None
    orders = {value.order for value in known if value.picture is not None and value.shape}
    order: Order = orders.pop() if len(orders) == 1 else "C" if not orders else "unknown"
    return Value(
        op=op, inputs=tuple(known), shape=shape, dtype=dtype, call=call, picture=pictures[0], order=order, depth=depth
    )


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


# --- memory -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Memory:
    """What one or more objects lie in: noted, or real from the moment that somebody has it."""

    root: Value
    real: Any = None


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at the same memory: of a value, and of a real array or tensor."""

    noted: Callable[[Value], Value]
    real: Callable[[Any], Any]


making = threading.RLock()  # threads of one sample that look at the same have to see the same


def _alias(made: Any) -> Any:
    """The same memory as another object, whose shape is its own."""
    if isinstance(made, torch.Tensor):
        return made.detach()
    is_array = _numpy is not None and isinstance(made, _numpy.ndarray)
    return made.view() if is_array else made


class Noted:
    """An object in a memory, seen through `path`."""

    def __init__(self, memory: Memory, path: tuple[View, ...] = ()) -> None:
        self._memory, self._path, self._real = memory, path, None

    @property
    def value(self) -> Value | None:
        """What it is now; None once it is real."""
        if self._memory.real is not None:
            return None
        value = self._memory.root
        for view in self._path:
            value = view.noted(value)
        return value

    def itself(self) -> Any:
        """The array or tensor itself, in the memory that whoever looks at the same has too."""
        with making, noting(False):
            if self._real is None:
                memory = self._memory
                if memory.real is None:
                    memory.real = memory.root.make()
                found = _alias(memory.real)
                for view in self._path:
                    found = view.real(found)
                self._real = found
            return self._real

    def apart(self) -> Any:
        """An array or tensor like it that nobody else has, to be read and dropped."""
        value = self.value
        return self.itself() if value is None else value.make()

    def changed_to(self, value: Value | None) -> bool:
        """Note a change in place, where it is all of its memory that changes, and remains what it is."""
        now = self.value
        if value is None or now is None or self._path:
            return False
        same = (value.shape, value.dtype, value.order) == (now.shape, now.dtype, now.order)
        if not same or value.order == "unknown":
            return False
        self._memory.root = value
        return True


# --- when things are noted ------------------------------------------------------------------------------------------

_state = threading.local()


def is_noting() -> bool:
    """Whether what this thread does to pictures is to be noted now."""
    return getattr(_state, "on", False)


@contextlib.contextmanager
def noting(yes: bool = True) -> Iterator[None]:
    """Have it noted in here, or not."""
    before, _state.on = is_noting(), yes
    try:
        yield
    finally:
        _state.on = before
