"""numpy's arrays, computed later. What a `LaterArray` cannot note it answers with the array that it stands for."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor

from flatout.feed.deferred.batch import real
from flatout.feed.deferred.pictures import can_be_noted, pixels
from flatout.feed.deferred.value import Memory, Noted, Value, View, constant, is_noting, together

_array, _asarray, _ascontiguousarray = np.array, np.asarray, np.ascontiguousarray
_UFUNCS = {
    np.add: "add",
    np.subtract: "subtract",
    np.multiply: "multiply",
    np.true_divide: "divide",
    np.minimum: "minimum",
    np.maximum: "maximum",
}
_OPERATORS: dict[Any, Callable[..., Any]] = {np.add: operator.add, np.subtract: operator.sub}
_OPERATORS |= {np.multiply: operator.mul, np.true_divide: operator.truediv}
# Methods that leave the array as it is, and whose result is not a part of it.
_ONLY_READ = {"max", "min", "sum", "std", "var", "prod", "ptp", "any", "all", "argmax", "argmin", "tolist", "item"}
_ONLY_READ |= {"tobytes", "round", "cumsum", "nonzero"}


class LaterArray(Noted, NDArrayOperatorsMixin):
    """As good as a numpy array to Python, and to numpy's own functions."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return np.ndarray if self.shape else self.dtype.type

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        value = self.value
        return tuple(self.itself().shape) if value is None else value.shape

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        value = self.value
        return self.itself().dtype if value is None else np.dtype(value.dtype)

    def __len__(self) -> int:
        return len(self.itself()) if not self.shape else self.shape[0]

    # -- noted where possible ---------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *things: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        into = out[0] if out is not None and len(out) == 1 else None
        if type(into) is LaterArray and not into.shape:  # a number: it is not changed, there is another one
            return getattr(ufunc, method)(*things, **{key: kwargs[key] for key in kwargs if key != "out"})
        if ufunc in _OPERATORS and method == "__call__" and not kwargs and any(isinstance(t, Tensor) for t in things):
            return _OPERATORS[ufunc](*real(things))  # torch's rules for types hold
        if method == "__call__" and ufunc in _UFUNCS and (not kwargs or (into is not None and len(kwargs) == 1)):
            values = [*map(_value, things)]
            known = None not in values
            value = (
                together(_UFUNCS[ufunc], values, ufunc, _type_of_result(ufunc, *map(_kind, things))) if known else None
            )
            if value is not None and not kwargs:
                return LaterArray(Memory(value))
            if type(into) is LaterArray and into.changed_to(value):
                return into
        if method in ("__call__", "reduce") and out is None:
            return getattr(ufunc, method)(
                *(thing.apart() if type(thing) is LaterArray else thing for thing in things), **kwargs
            )
        return getattr(ufunc, method)(*real(things), **real(kwargs))

    def __array_function__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = {np.clip: "clip", np.mean: "mean", np.transpose: "transpose"}.get(func)
        if method is not None and args[0] is self and not kwargs:
            return getattr(self, method)(*args[1:])
        return func(*real(args), **real(kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """To torch's functions it is the array, or the number."""
        given = [thing.itself() if type(thing) is LaterArray else thing for thing in args]
        return func(*given, **{key: real(thing) for key, thing in (kwargs or {}).items()})

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """As another type, or a copy; with `copy=False` itself where nothing is to be done."""
        value, wanted = self.value, np.dtype(dtype)
        if value is None or args or set(kwargs) - {"copy"} or not wanted.isnative:
            return self.itself().astype(dtype, *args, **kwargs)
        if wanted == self.dtype:
            return LaterArray(Memory(value)) if kwargs.get("copy", True) else self
        cast = value.cast(wanted.name, lambda array: array.astype(dtype))
        return LaterArray(Memory(cast)) if cast is not None else self.apart().astype(dtype)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        """Another one, in memory of its own, in C's order."""
        value = self.value
        if value is None or args or kwargs:
            return self.itself().copy(*args, **kwargs)
        return LaterArray(Memory(value.then("tensor", lambda array: array.copy(), order="C")))

    def clip(self, *limits: Any, **kwargs: Any) -> Any:
        """Not below the first, then not above the second."""
        if self.value is None or kwargs or len(limits) != 2 or any(_value(limit) is None for limit in limits):
            return self.itself().clip(*real(limits), **real(kwargs))
        return np.minimum(np.maximum(self, limits[0]), limits[1])

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        """Of all elements, noted; of some, at once."""
        value = self.value
        if value is None or args or kwargs:
            return self.apart().mean(*args, **kwargs) if "out" not in kwargs else self.itself().mean(*args, **kwargs)
        dtype = "float32" if value.dtype == "float32" else "float64"
        return LaterArray(Memory(value.then("mean", lambda array: array.mean(), shape=(), dtype=dtype)))

    def transpose(self, *axes: Any) -> Any:
        """The same with its axes in another order."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        if self.value is None or sorted(order) != list(range(self.ndim)):
            return self.itself().transpose(*axes)
        order = tuple(order)

        def turned(array: Any) -> Any:
            return array.transpose(order)

        view = View(lambda value: value.reordered(order, turned), turned)
        return LaterArray(self._memory, (*self._path, view))

    # -- made ---------------------------------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        found = self.itself()
        return _array(found, dtype) if copy or (dtype is not None and dtype != found.dtype) else _asarray(found)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__array"):
            raise AttributeError(name)
        if name in _ONLY_READ:
            return functools.partial(_read, self, name)
        return getattr(self.itself(), name)

    def __setattr__(self, name: str, thing: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, thing)
        else:
            setattr(self.itself(), name, thing)


def _read(array: LaterArray, name: str, *args: Any, **kwargs: Any) -> Any:
    held = array.itself() if "out" in kwargs else array.apart()
    return getattr(held, name)(*real(args), **real(kwargs))


def _answered_by_the_array(name: str) -> None:
    def answer(self: LaterArray, *args: Any) -> Any:
        return getattr(self.itself(), name)(*real(args))

    setattr(LaterArray, name, answer)


for _name in ("getitem", "setitem", "iter", "contains", "copy", "deepcopy", "reduce_ex", "complex", "index"):
    _answered_by_the_array(f"__{_name}__")
for _name in ("float", "int", "bool", "format", "round", "hash", "str", "repr"):
    _answered_by_the_array(f"__{_name}__")


def reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """np.array and its kin: of a picture, what its pixels are; of what is noted, itself or a copy."""

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        if is_noting() and 1 <= len(args) <= 2 and set(kwargs) <= {"dtype", "copy"}:
            thing, dtype = args[0], args[1] if len(args) == 2 else kwargs.get("dtype")
            later = LaterArray(Memory(pixels(thing))) if can_be_noted(thing) else thing
            if type(later) is LaterArray and later.value is not None:
                other = dtype is not None and np.dtype(dtype) != later.dtype
                found = later.astype(dtype) if other else later
                if original is _ascontiguousarray:
                    return _in_order(found)
                copied = kwargs.get("copy", original is _array) and not other
                return LaterArray(Memory(later.value)) if copied else found
        return original(*real(args), **real(kwargs))

    return read


def _in_order(array: Any) -> Any:
    """What np.ascontiguousarray makes of it: itself, if its elements lie in order."""
    value = array.value if type(array) is LaterArray and array.shape else None
    if value is None or value.order == "unknown":
        return _ascontiguousarray(real(array))
    copied = value.then("tensor", _ascontiguousarray, order="C")
    return array if value.order == "C" else LaterArray(Memory(copied))


def _value(thing: Any) -> Value | None:
    return thing.value if type(thing) is LaterArray else constant(thing)


def _kind(thing: Any) -> Any:
    """All that the type of a result depends on."""
    if type(thing) is LaterArray:
        value = thing.value
        return (value.dtype if value is not None else thing.dtype), thing.ndim
    return (thing.dtype, thing.ndim) if isinstance(thing, np.ndarray | np.generic) else type(thing)


@functools.cache
def _type_of_result(ufunc: Any, *kinds: Any) -> str:
    """The type that comes of these; numpy is asked with one element of each."""
    things = [np.ones((1,) * kind[1], kind[0])[()] if isinstance(kind, tuple) else kind(1) for kind in kinds]
    return str(ufunc(*things).dtype.name)
