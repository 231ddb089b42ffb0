"""numpy's arrays, computed later. What a `LazyArray` cannot record, it answers with the real array."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor

from flatout.feed.deferred.batch import materialize
from flatout.feed.deferred.expression import (
    Expression,
    LazyMemory,
    LazyObject,
    LazyView,
    combine,
    constant,
    is_recording,
)
from flatout.feed.deferred.images import can_be_lazy, pixels_of_image

_array, _asarray, _ascontiguousarray = np.array, np.asarray, np.ascontiguousarray
_RECORDED = {
    np.add: "add",
    np.subtract: "subtract",
    np.multiply: "multiply",
    np.true_divide: "divide",
    np.minimum: "minimum",
    np.maximum: "maximum",
}
_OPERATORS: dict[Any, Callable[..., Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
}
# Methods that leave the array as it is, and whose result is no view of it.
_READ_ONLY = {"max", "min", "sum", "std", "var", "prod", "ptp", "any", "all", "argmax", "argmin", "tolist", "item"}
_READ_ONLY |= {"tobytes", "round", "cumsum", "nonzero"}


class LazyArray(LazyObject, NDArrayOperatorsMixin):
    """To Python and to numpy's own functions, a numpy array."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return np.ndarray if self.shape else self.dtype.type

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        expression = self.expression
        return tuple(self.materialize().shape) if expression is None else expression.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        expression = self.expression
        return self.materialize().dtype if expression is None else np.dtype(expression.dtype)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else len(self.materialize())

    # -- recorded where possible --------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = getattr(ufunc, method)
        out = kwargs.get("out")
        target = out[0] if out is not None and len(out) == 1 else None
        if type(target) is LazyArray and not target.shape:  # a number cannot be changed in place: make another
            return function(*inputs, **{key: kwargs[key] for key in kwargs if key != "out"})
        if method == "__call__" and not kwargs and ufunc in _OPERATORS and any(isinstance(x, Tensor) for x in inputs):
            return _OPERATORS[ufunc](*materialize(inputs))  # torch's rules for types hold
        if method == "__call__" and ufunc in _RECORDED and (not kwargs or (target is not None and len(kwargs) == 1)):
            expression = _combined(ufunc, inputs)
            if expression is not None and not kwargs:
                return LazyArray(LazyMemory(expression))
            if type(target) is LazyArray and target.replace_in_place(expression):
                return target
        if method in ("__call__", "reduce") and out is None:
            read = [x.read_copy() if type(x) is LazyArray else x for x in inputs]
            return function(*read, **kwargs)
        return function(*materialize(inputs), **materialize(kwargs))

    def __array_function__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = {np.clip: "clip", np.mean: "mean", np.transpose: "transpose"}.get(func)
        if method is not None and args[0] is self and not kwargs:
            return getattr(self, method)(*args[1:])
        return func(*materialize(args), **materialize(kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """To torch's functions it is the real array, or the real number."""
        given = [arg.materialize() if type(arg) is LazyArray else arg for arg in args]
        return func(*given, **{key: materialize(arg) for key, arg in (kwargs or {}).items()})

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """As another type, or a copy; with `copy=False` itself where nothing has to be done."""
        expression, wanted = self.expression, np.dtype(dtype)
        if expression is None or args or set(kwargs) - {"copy"} or not wanted.isnative:
            return self.materialize().astype(dtype, *args, **kwargs)
        if wanted == self.dtype:
            return LazyArray(LazyMemory(expression)) if kwargs.get("copy", True) else self
        cast = expression.cast(wanted.name, lambda array: array.astype(dtype))
        if cast is None:
            return self.read_copy().astype(dtype)
        return LazyArray(LazyMemory(cast))

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        """Another array in memory of its own, in C order."""
        expression = self.expression
        if expression is None or args or kwargs:
            return self.materialize().copy(*args, **kwargs)
        return LazyArray(LazyMemory(expression.then("tensor", lambda array: array.copy(), order="C")))

    def clip(self, *limits: Any, **kwargs: Any) -> Any:
        """Not below the first limit, then not above the second."""
        known = len(limits) == 2 and all(_expression_of(limit) is not None for limit in limits)
        if self.expression is None or kwargs or not known:
            return self.materialize().clip(*materialize(limits), **materialize(kwargs))
        return np.minimum(np.maximum(self, limits[0]), limits[1])

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        """Of all elements, recorded; of some, computed at once."""
        expression = self.expression
        if "out" in kwargs:
            return self.materialize().mean(*args, **kwargs)
        if expression is None or args or kwargs:
            return self.read_copy().mean(*args, **kwargs)
        dtype = "float32" if expression.dtype == "float32" else "float64"
        return LazyArray(LazyMemory(expression.then("mean", lambda array: array.mean(), shape=(), dtype=dtype)))

    def transpose(self, *axes: Any) -> Any:
        """A view with the axes in another order."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        if self.expression is None or sorted(order) != list(range(self.ndim)):
            return self.materialize().transpose(*axes)
        order = tuple(order)

        def transposed(array: Any) -> Any:
            return array.transpose(order)

        view = LazyView(lambda expression: expression.reordered(order, transposed), transposed)
        return LazyArray(self._memory, (*self._path, view))

    # -- answered by the real array -----------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        real = self.materialize()
        if copy or (dtype is not None and dtype != real.dtype):
            return _array(real, dtype)
        return _asarray(real)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__array"):
            raise AttributeError(name)
        if name in _READ_ONLY:
            return functools.partial(_read, self, name)
        return getattr(self.materialize(), name)

    def __setattr__(self, name: str, thing: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, thing)
        else:
            setattr(self.materialize(), name, thing)


def _read(array: LazyArray, name: str, *args: Any, **kwargs: Any) -> Any:
    real = array.materialize() if "out" in kwargs else array.read_copy()
    return getattr(real, name)(*materialize(args), **materialize(kwargs))


def _answer_with_real_array(name: str) -> None:
    def answer(self: LazyArray, *args: Any) -> Any:
        return getattr(self.materialize(), name)(*materialize(args))

    setattr(LazyArray, name, answer)


for _name in ("getitem", "setitem", "iter", "contains", "copy", "deepcopy", "reduce_ex", "complex", "index"):
    _answer_with_real_array(f"__{_name}__")
for _name in ("float", "int", "bool", "format", "round", "hash", "str", "repr"):
    _answer_with_real_array(f"__{_name}__")


def lazy_reader(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for np.array and its kin: of an image a lazy array of its pixels, of a lazy array itself or a copy."""

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        lazy = _lazy_argument(args, kwargs)
        if lazy is None:
            return original(*materialize(args), **materialize(kwargs))
        dtype = args[1] if len(args) == 2 else kwargs.get("dtype")
        converted = dtype is not None and np.dtype(dtype) != lazy.dtype
        result = lazy.astype(dtype) if converted else lazy
        if original is _ascontiguousarray:
            return _in_c_order(result)
        if kwargs.get("copy", original is _array) and not converted:
            return LazyArray(LazyMemory(lazy.expression))
        return result

    return read


def _lazy_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The lazy array that a call such as np.array(image) is about, or None."""
    if not is_recording() or not 1 <= len(args) <= 2 or set(kwargs) - {"dtype", "copy"}:
        return None
    thing = LazyArray(LazyMemory(pixels_of_image(args[0]))) if can_be_lazy(args[0]) else args[0]
    return thing if type(thing) is LazyArray and thing.expression is not None else None


def _in_c_order(array: Any) -> Any:
    """What np.ascontiguousarray makes of it: itself, if its elements lie in order."""
    expression = array.expression if type(array) is LazyArray and array.shape else None
    if expression is None or expression.order == "unknown":
        return _ascontiguousarray(materialize(array))
    if expression.order == "C":
        return array
    return LazyArray(LazyMemory(expression.then("tensor", _ascontiguousarray, order="C")))


def _combined(ufunc: Any, inputs: tuple[Any, ...]) -> Expression | None:
    expressions = [_expression_of(thing) for thing in inputs]
    if None in expressions:
        return None
    return combine(_RECORDED[ufunc], expressions, ufunc, _result_type(ufunc, *map(_type_key, inputs)))


def _expression_of(thing: Any) -> Expression | None:
    return thing.expression if type(thing) is LazyArray else constant(thing)


def _type_key(thing: Any) -> Any:
    """All that the type of a result depends on."""
    if type(thing) is LazyArray:
        expression = thing.expression
        return (thing.dtype if expression is None else expression.dtype), thing.ndim
    return (thing.dtype, thing.ndim) if isinstance(thing, np.ndarray | np.generic) else type(thing)


@functools.cache
def _result_type(ufunc: Any, *keys: Any) -> str:
    """The type of a result, found by asking numpy with one element of each."""
    ones = [np.ones((1,) * key[1], key[0])[()] if isinstance(key, tuple) else key(1) for key in keys]
    return str(ufunc(*ones).dtype.name)
