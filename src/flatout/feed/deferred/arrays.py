"""numpy's arrays, computed later. What a `LaterArray` cannot note it answers with the array that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from flatout.feed.deferred.batch import filled
from flatout.feed.deferred.pictures import can_be_noted, pixels
from flatout.feed.deferred.value import Value, is_noting, together

_SMALL = 64  # numbers: a constant that may go along with every sample
_array, _asarray = np.array, np.asarray
_UFUNCS = {
    np.add: "add",
    np.subtract: "subtract",
    np.multiply: "multiply",
    np.true_divide: "divide",
    np.minimum: "minimum",
    np.maximum: "maximum",
}


class LaterArray(NDArrayOperatorsMixin):
    """Not a numpy array, but to numpy's own functions as good as one."""

    def __init__(self, value: Value) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return len(self.value.shape)

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.value.shape)

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return np.dtype(self.value.dtype)

    def __len__(self) -> int:
        return self.value.shape[0]

    # -- noted where possible ---------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *things: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if method == "__call__" and ufunc in _UFUNCS and not kwargs:
            dtype = ufunc(*map(_tiny, things)).dtype.name
            value = together(_UFUNCS[ufunc], [*map(_value, things)], ufunc, dtype)
            if value is not None and out is None:
                return LaterArray(value)
            if value is not None and out == (self,) and (value.shape, value.dtype) == (self.shape, self.value.dtype):
                self.value = value
                return self
        if out is not None:
            kwargs["out"] = real(out)
        return getattr(ufunc, method)(*map(real, things), **kwargs)

    def __array_function__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = {np.clip: self.clip, np.mean: self.mean, np.transpose: self.transpose}.get(func)
        if method is not None and args[0] is self:
            return method(*args[1:], **kwargs)
        return func(*real(args), **real(kwargs))

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """As another type."""
        value = self.value.cast(np.dtype(dtype).name, lambda array: array.astype(dtype))
        return LaterArray(value) if value is not None else self.value.here.astype(dtype, *args, **kwargs)

    def copy(self, *_: Any) -> LaterArray:
        """Another one; what is done to it in place stays with it."""
        return LaterArray(self.value)

    def clip(self, *limits: Any, **kwargs: Any) -> Any:
        """Not below the first, then not above the second."""
        if kwargs or len(limits) != 2 or any(_value(limit) is None for limit in limits):
            return self.value.here.clip(*real(limits), **real(kwargs))
        return np.minimum(np.maximum(self, limits[0]), limits[1])

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        """Of all elements."""
        if args or kwargs or self.value.picture is None:
            return self.value.here.mean(*args, **kwargs)
        dtype = "float32" if self.value.dtype == "float32" else "float64"
        return LaterArray(self.value.then("mean", lambda array: array.mean(), shape=(), dtype=dtype))

    def transpose(self, *axes: Any) -> Any:
        """With its axes in another order."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        value = self.value.reordered(order, lambda array: array.transpose(order))
        return LaterArray(value) if value is not None else self.value.here.transpose(*axes)

    # -- made ---------------------------------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return _array(self.value.here, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value.here, name)

    def __getitem__(self, key: Any) -> Any:
        return self.value.here[key]

    def __setitem__(self, key: Any, thing: Any) -> None:
        array = _array(self.value.here)
        array[key] = real(thing)
        self.value = Value(op="given", shape=array.shape, dtype=array.dtype.name, call=lambda: array, picture=None)

    def __iter__(self) -> Any:
        return iter(self.value.here)

    def __float__(self) -> float:
        return float(self.value.here)

    def __int__(self) -> int:
        return int(self.value.here)

    def __bool__(self) -> bool:
        return bool(self.value.here)


def reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """np.array and its kin: of a picture, what will be its pixels."""

    def read(thing: Any, *args: Any, **kwargs: Any) -> Any:
        if is_noting() and len(args) <= 1 and set(kwargs) <= {"dtype", "copy"}:
            later = LaterArray(pixels(thing)) if can_be_noted(thing) else thing
            if isinstance(later, LaterArray):
                dtype = args[0] if args else kwargs.get("dtype")
                return later.copy() if dtype is None else later.astype(dtype)
        return original(thing, *args, **kwargs)

    return read


def constant(array: Any, itself: Any) -> Value | None:
    """A few numbers that go along with a sample; `itself` is what the script has."""
    if array.size > _SMALL or array.dtype.kind not in "iuf":
        return None
    numbers = tuple(map(float, array.ravel()))
    return Value(
        op="numbers", numbers=numbers, shape=array.shape, dtype=array.dtype.name, call=lambda: itself, picture=None
    )


def real(thing: Any) -> Any:
    """The same with every array and tensor in it made."""
    if isinstance(thing, LaterArray):
        return thing.value.here
    if type(thing) in (list, tuple):
        return type(thing)(map(real, thing))
    if type(thing) is dict:
        return {key: real(part) for key, part in thing.items()}
    return filled(thing)


def _value(thing: Any) -> Value | None:
    if isinstance(thing, LaterArray):
        return thing.value
    if isinstance(thing, int | float | np.generic | np.ndarray):
        return constant(_asarray(thing), thing)
    return None


def _tiny(thing: Any) -> Any:
    """Something like it with one element, by which numpy tells what type comes of it."""
    if not isinstance(thing, LaterArray):
        return thing
    return np.ones((1,) * thing.ndim, thing.value.dtype)
