"""torch's tensors, computed later: what becomes of a sample's arrays, and what is collated into a batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.feed.deferred.arrays import LazyArray
from flatout.feed.deferred.batch import DeferredBatch, PlaceholderTensor, materialize
from flatout.feed.deferred.expression import (
    DTYPES,
    MAX_CONSTANT,
    NAMES,
    Expression,
    LazyMemory,
    LazyObject,
    LazyView,
    as_program,
    combine,
    constant,
)
from flatout.feed.deferred.program import merge_programs

_asarray, _from_numpy, _tensor = np.asarray, torch.from_numpy, torch.tensor
_RECORDED: dict[str, tuple[str, Callable[..., Any]]] = {
    name: (op, function)
    for op, function, names in (
        ("add", torch.add, ("add", "add_", "__add__", "__radd__", "__iadd__")),
        ("subtract", torch.sub, ("sub", "sub_", "subtract", "__sub__", "__isub__")),
        ("multiply", torch.mul, ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")),
        ("divide", torch.true_divide, ("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__")),
    )
    for name in names
}
_IN_PLACE = {"add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_CASTS = {"float": "float32", "double": "float64", "long": "int64"}
# Calls that leave the tensor as it is, and whose result is no view of it.
_READ_ONLY = {"max", "min", "amax", "amin", "sum", "std", "var", "mean", "any", "all", "item", "tolist", "numel"}
_READ_ONLY |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge"}


class LazyTensor(PlaceholderTensor):
    """A tensor that will be computed from a picture."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, lazy: LazyObject) -> None:
        self.lazy = lazy

    @classmethod
    def of(cls, lazy: LazyObject | Expression) -> Any:
        """The tensor of a lazy object's memory, or of an expression in memory of its own."""
        if isinstance(lazy, Expression):
            lazy = LazyObject(LazyMemory(lazy))
        expression = lazy.expression
        assert expression is not None
        return cls(expression.shape, DTYPES[expression.dtype], lazy)

    @property
    def expression(self) -> Expression | None:
        """How to compute it; None once it is real."""
        return self.lazy.expression

    def materialize(self) -> Tensor:
        """The real tensor; from now on this object stands for it."""
        real = self.lazy.materialize()
        return real if isinstance(real, Tensor) else _from_numpy(_asarray(real))

    def materialized(self) -> Tensor | None:
        """The real tensor, if it has been computed."""
        return self.lazy.materialize() if self.expression is None else None

    @classmethod
    def record(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that the GPU can make later; else NotImplemented."""
        tensor: Any = args[0] if args else None
        if not isinstance(tensor, cls) or tensor.expression is None:
            return NotImplemented
        if name in _RECORDED:
            expression = _combined(name, tensor, args[1]) if len(args) == 2 and not kwargs else None
            if name in _IN_PLACE:
                return tensor if tensor.lazy.replace_in_place(expression) else NotImplemented
            return NotImplemented if expression is None else cls.of(expression)
        result = _view_copy_or_cast(name, tensor, args[1:], kwargs)
        if result is not None:
            return result
        if name in _READ_ONLY and not kwargs and len(args) == 1:
            return getattr(tensor.lazy.read_copy(), name)()
        return NotImplemented

    @staticmethod
    def stack_lazily(samples: Sequence[Any], stack: Callable[..., Tensor], place: Callable[..., Tensor]) -> Any:
        """A batch of samples that one program computes, or None; `stack` and `place` say where its bytes go."""
        expressions = [sample.expression for sample in samples if isinstance(sample, LazyTensor)]
        known = [expression for expression in expressions if expression is not None]
        if len(known) < len(samples):
            return None
        programs, numbers = zip(*map(as_program, known), strict=True)
        program = merge_programs(programs)
        pixels = [pixels_of(expression) for expression in known]
        if program is None or any(picture.shape != pixels[0].shape for picture in pixels):
            return None
        if program.is_identity:
            return stack(pixels)
        return DeferredBatch.of(program, stack(pixels), place(_tensor(numbers, dtype=torch.float64)))


def pixels_of(expression: Expression) -> Tensor:
    """The picture an expression starts from, as it was decoded."""
    return _from_numpy(np.require(_asarray(expression.picture), requirements="W"))


def _combined(name: str, tensor: LazyTensor, other: Any) -> Expression | None:
    op, function = _RECORDED[name]
    try:
        dtype = str(function(_one_element(tensor), _one_element(other)).dtype).removeprefix("torch.")
    except (TypeError, RuntimeError):
        return None
    return combine(op, (tensor.expression, _expression_of(other)), function, dtype)


def _view_copy_or_cast(name: str, tensor: LazyTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same values as a view, a copy, or of another type; None where that cannot be recorded."""
    lazy, expression = tensor.lazy, tensor.expression
    assert expression is not None
    plain = not kwargs
    sizes = tuple(args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args)
    if name == "clone" and not args and plain:
        return LazyTensor.of(expression)
    if name == "contiguous" and not args and plain and expression.order != "unknown":
        if expression.order == "C":
            return tensor
        return LazyTensor.of(expression.then("tensor", lambda real: real.contiguous(), order="C"))
    if name == "detach" or (name in ("view", "reshape") and sizes == expression.shape):
        return LazyTensor.of(LazyObject(lazy._memory, lazy._path))
    if name == "permute" and plain and sorted(sizes) == list(range(len(expression.shape))):
        return _permuted(lazy, sizes)
    if name == "unsqueeze" and plain and len(args) == 1:
        return _unsqueezed(lazy, expression, args[0])
    dtype = _requested_dtype(name, args, kwargs)
    if dtype is None:
        return None
    if dtype == expression.dtype:
        return tensor
    cast = expression.cast(dtype, lambda real: real.to(DTYPES[dtype]))
    return None if cast is None else LazyTensor.of(cast)


def _permuted(lazy: LazyObject, axes: tuple[int, ...]) -> Any:
    def permute(real: Any) -> Any:
        return real.permute(axes)

    return _view(lazy, lambda expression: expression.reordered(axes, permute), permute)


def _unsqueezed(lazy: LazyObject, expression: Expression, axis: int) -> Any:
    axis %= len(expression.shape) + 1
    shape = (*expression.shape[:axis], 1, *expression.shape[axis:])

    def unsqueeze(real: Any) -> Any:
        return real.unsqueeze(axis)

    return _view(lazy, lambda expression: expression.then("expand", unsqueeze, static=(axis,), shape=shape), unsqueeze)


def _view(lazy: LazyObject, of_expression: Callable[[Expression], Expression], of_real: Callable[[Any], Any]) -> Any:
    return LazyTensor.of(LazyObject(lazy._memory, (*lazy._path, LazyView(of_expression, of_real))))


def _requested_dtype(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    wanted = [*args, *kwargs.values()]
    if name in _CASTS and not wanted:
        return _CASTS[name]
    if name in ("to", "type") and len(wanted) == 1 and isinstance(wanted[0], torch.dtype):
        return NAMES.get(wanted[0])
    return None


def _expression_of(thing: Any) -> Expression | None:
    if isinstance(thing, LazyTensor):
        return thing.expression
    if isinstance(thing, Tensor):
        on_host = not isinstance(thing, PlaceholderTensor) and thing.device.type == "cpu" and thing.dtype in NAMES
        if not on_host or thing.requires_grad or thing.numel() > MAX_CONSTANT:
            return None
    return constant(thing)


def _one_element(thing: Any) -> Any:
    """A tensor of one element like it: torch tells by that which type a result has."""
    if isinstance(thing, LazyTensor) and thing.expression is not None:
        return torch.ones((1,) * len(thing.expression.shape), dtype=DTYPES[thing.expression.dtype])
    if isinstance(thing, Tensor) and not isinstance(thing, PlaceholderTensor) and thing.numel():
        return thing.detach().reshape(-1)[:1].reshape((1,) * thing.dim())
    return thing


def lazy_tensor_maker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for torch.from_numpy and its kin: of a lazy array, a lazy tensor."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        array = args[0] if len(args) == 1 and set(kwargs) <= {"dtype"} else None
        if type(array) is not LazyArray or not _can_be_a_tensor(array):
            return original(*materialize(args), **materialize(kwargs))
        tensor = _tensor_of(array)
        if original is _tensor:
            tensor = tensor.clone()
        return tensor if kwargs.get("dtype") is None else tensor.to(kwargs["dtype"])

    return make


def _can_be_a_tensor(array: LazyArray) -> bool:
    """Whether it is still lazy, and of a type that torch has."""
    expression = array.expression
    return expression is not None and expression.dtype in DTYPES


def _tensor_of(array: LazyArray) -> Any:
    """The lazy tensor that shares a lazy array's memory."""

    def from_array(real: Any) -> Tensor:
        return _from_numpy(_asarray(real))

    return _view(array, lambda expression: expression.then("tensor", from_array), from_array)


def collatable(sample: Any) -> Any:
    """A sample as torch's collate has it in the end: what is lazy as a lazy tensor, what is real as it is."""
    if type(sample) is LazyArray:
        return _tensor_of(sample) if _can_be_a_tensor(sample) else sample.materialize()
    if isinstance(sample, LazyTensor):
        return sample if sample.expression is not None else sample.materialize()
    return _map_container(sample, collatable)


def materialize_sample(sample: Any) -> Any:
    """A sample with nothing lazy in it."""
    if type(sample) is LazyArray or isinstance(sample, LazyTensor):
        return sample.materialize()
    return _map_container(sample, materialize_sample)


def _map_container(sample: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with its parts changed; anything else as it is."""
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(change, sample))
    if type(sample) in (list, tuple):
        return type(sample)(map(change, sample))
    if isinstance(sample, MutableMapping | MutableSequence) and holds_lazy(sample):
        other = copy.copy(sample)
        for key in list(sample) if isinstance(sample, MutableMapping) else range(len(sample)):
            other[key] = change(sample[key])
        return other
    return sample


def holds_lazy(sample: Any) -> bool:
    """Whether any part of it is a lazy array or tensor."""
    if isinstance(sample, Mapping):
        return any(map(holds_lazy, sample.values()))
    if isinstance(sample, tuple | MutableSequence):
        return any(map(holds_lazy, sample))
    return type(sample) is LazyArray or isinstance(sample, LazyTensor)
