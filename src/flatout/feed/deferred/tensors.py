"""torch's tensors, computed later: what becomes of a sample's arrays, and what is collated into a batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.feed.deferred.arrays import LaterArray
from flatout.feed.deferred.batch import Deferred, StandIn, real
from flatout.feed.deferred.program import agreed
from flatout.feed.deferred.value import DTYPES, NAMES, SMALL, Memory, Noted, Value, View, constant, program, together

_asarray, _from_numpy, _tensor = np.asarray, torch.from_numpy, torch.tensor
_OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    name: (op, function)
    for op, function, names in (
        ("add", torch.add, ("add", "add_", "__add__", "__radd__", "__iadd__")),
        ("subtract", torch.sub, ("sub", "sub_", "subtract", "__sub__", "__isub__")),
        ("multiply", torch.mul, ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__")),
        ("divide", torch.true_divide, ("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__")),
    )
    for name in names
}
_IN_PLACE = {name for name in _OPS if name.endswith("_") and not name.endswith("__")}
_IN_PLACE |= {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
_CASTS = {"float": "float32", "double": "float64", "long": "int64"}
# Calls that leave the tensor as it is, and whose result is not a part of it.
_ONLY_READ = {"max", "min", "amax", "amin", "sum", "std", "var", "mean", "any", "all", "item", "tolist", "numel"}
_ONLY_READ |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge"}


class LaterTensor(StandIn):
    """A tensor that is to be computed from a picture."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, held: Noted) -> None:
        self.held = held

    @classmethod
    def of(cls, held: Noted | Value) -> Any:
        """The tensor in this memory, or in one of its own."""
        held = Noted(Memory(held)) if isinstance(held, Value) else held
        value = held.value
        assert value is not None
        return cls(value.shape, DTYPES[value.dtype], held)

    @property
    def value(self) -> Value | None:
        """What it is now; None once it is real."""
        return self.held.value

    def itself(self) -> Tensor | None:
        """The tensor that it is, if it is there."""
        return self.held.itself() if self.value is None else None

    def made(self) -> Tensor:
        """The tensor itself, from now on."""
        made = self.held.itself()
        return made if isinstance(made, Tensor) else _from_numpy(_asarray(made))

    @classmethod
    def noted(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What comes of a call that a card can make for itself."""
        tensor: Any = args[0] if args else None
        if not isinstance(tensor, cls) or tensor.value is None:
            return NotImplemented
        if name in _OPS:
            value = None if kwargs or len(args) != 2 else _combined(name, tensor, args[1])
            if name not in _IN_PLACE:
                return NotImplemented if value is None else cls.of(value)
            return tensor if tensor.held.changed_to(value) else NotImplemented
        found = _viewed(name, tensor, args[1:], kwargs)
        if found is None and name in _ONLY_READ and not kwargs and len(args) == 1:
            apart = tensor.held.apart()
            return getattr(apart, name)()
        return NotImplemented if found is None else found

    @staticmethod
    def stacked(samples: Sequence[Any], stack: Callable[..., Tensor], place: Callable[..., Tensor]) -> Any:
        """A batch of samples that one program makes, or None. `stack` and `place` put its bytes where they belong."""
        values = [sample.value if isinstance(sample, LaterTensor) else None for sample in samples]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        programs, numbers = zip(*map(program, known), strict=True)
        whole = agreed(programs)
        pixels = [*map(pixels_of, known)]
        if whole is None or any(picture.shape != pixels[0].shape for picture in pixels):
            return None
        if whole.trivial:
            return stack(pixels)
        return Deferred.of(whole, stack(pixels), place(_tensor(numbers, dtype=torch.float64)))


def pixels_of(value: Value) -> Tensor:
    """The picture it is made of, as it was decoded."""
    return _from_numpy(np.require(_asarray(value.picture), requirements="W"))


def _combined(name: str, tensor: LaterTensor, other: Any) -> Value | None:
    op, function = _OPS[name]
    try:
        dtype = str(function(_tiny(tensor), _tiny(other)).dtype).removeprefix("torch.")
    except (TypeError, RuntimeError):
        return None
    return together(op, (tensor.value, _value(other)), function, dtype)


def _viewed(name: str, tensor: LaterTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, seen otherwise, copied, or of another type; None where that cannot be noted."""
    held, value = tensor.held, tensor.value
    assert value is not None
    sizes = tuple(args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args)
    if name == "clone" and not args and not kwargs:
        return LaterTensor.of(value)
    if name == "contiguous" and not args and not kwargs and value.order != "unknown":
        fresh = value.then("tensor", lambda made: made.contiguous(), order="C")
        return tensor if value.order == "C" else LaterTensor.of(fresh)
    if name == "detach" or (name in ("view", "reshape") and sizes == value.shape):
        return LaterTensor.of(Noted(held._memory, held._path))
    if name == "permute" and not kwargs and sorted(sizes) == list(range(len(value.shape))):
        return _through(
            held,
            lambda value: value.reordered(sizes, lambda made: made.permute(sizes)),
            lambda made: made.permute(sizes),
        )
    if name == "unsqueeze" and len(args) == 1 and not kwargs:
        axis = args[0] % (len(value.shape) + 1)
        shape = (*value.shape[:axis], 1, *value.shape[axis:])
        return _through(
            held,
            lambda value: value.then("expand", lambda made: made.unsqueeze(axis), static=(axis,), shape=shape),
            lambda made: made.unsqueeze(axis),
        )
    dtype = _dtype_asked_for(name, args, kwargs)
    if dtype is None:
        return None
    if dtype == value.dtype:
        return tensor
    cast = value.cast(dtype, lambda made: made.to(DTYPES[dtype]))
    return LaterTensor.of(cast) if cast is not None else None


def _through(held: Noted, noted: Callable[[Value], Value], seen: Callable[[Any], Any]) -> Any:
    return LaterTensor.of(Noted(held._memory, (*held._path, View(noted, seen))))


def _dtype_asked_for(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name in _CASTS and not args and not kwargs:
        return _CASTS[name]
    asked = [*args, *kwargs.values()]
    if name in ("to", "type") and len(asked) == 1 and isinstance(asked[0], torch.dtype):
        return NAMES.get(asked[0])
    return None


def _value(thing: Any) -> Value | None:
    if isinstance(thing, LaterTensor):
        return thing.value
    if isinstance(thing, Tensor):
        plain = not isinstance(thing, StandIn) and thing.device.type == "cpu" and thing.dtype in NAMES
        if not plain or thing.requires_grad or thing.numel() > SMALL:
            return None
    return constant(thing)


def _tiny(thing: Any) -> Any:
    """Something like it with one element, by which torch tells what type comes of it."""
    if isinstance(thing, LaterTensor) and thing.value is not None:
        return torch.ones((1,) * len(thing.value.shape), dtype=DTYPES[thing.value.dtype])
    if isinstance(thing, Tensor) and not isinstance(thing, StandIn) and thing.numel():
        return thing.detach().reshape(-1)[:1].reshape((1,) * thing.dim())
    return thing


def wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.from_numpy and its kin: of an array that is to be computed, a tensor that is."""

    @functools.wraps(original)
    def wrap(*args: Any, **kwargs: Any) -> Any:
        thing = args[0] if len(args) == 1 and set(kwargs) <= {"dtype"} else None
        if type(thing) is not LaterArray or not can_be_a_tensor(thing):
            return original(*real(args), **real(kwargs))
        later = tensor_over(thing)
        if original is _tensor:
            later = later.clone()
        return later if kwargs.get("dtype") is None else later.to(kwargs["dtype"])

    return wrap


def can_be_a_tensor(array: LaterArray) -> bool:
    """Whether it is still noted, and of a type that torch and cards have."""
    value = array.value
    return value is not None and value.dtype in DTYPES


def tensor_over(array: LaterArray) -> Any:
    """The tensor over an array's memory to be."""

    def over(made: Any) -> Tensor:
        return _from_numpy(_asarray(made))

    return _through(array, lambda value: value.then("tensor", over), over)


def left_to_do(sample: Any) -> Any:
    """A sample as torch's collate has it in the end: what is noted as a tensor, what is real as it is."""
    if type(sample) is LaterArray:
        return tensor_over(sample) if can_be_a_tensor(sample) else sample.itself()
    if isinstance(sample, LaterTensor):
        return sample if sample.value is not None else sample.made()
    return _each(sample, left_to_do)


def all_real(sample: Any) -> Any:
    """A sample with nothing noted in it."""
    if type(sample) is LaterArray:
        return sample.itself()
    return sample.made() if isinstance(sample, LaterTensor) else _each(sample, all_real)


def _each(sample: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with its parts changed; whatever else it is, it itself."""
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(change, sample))
    if type(sample) in (list, tuple):
        return type(sample)(map(change, sample))
    if isinstance(sample, MutableMapping | MutableSequence) and holds_noted(sample):
        other = copy.copy(sample)
        for key in list(sample) if isinstance(sample, MutableMapping) else range(len(sample)):
            other[key] = change(sample[key])
        return other
    return sample


def holds_noted(sample: Any) -> bool:
    """Whether there is something in it that is not real."""
    if isinstance(sample, Mapping):
        return any(map(holds_noted, sample.values()))
    if isinstance(sample, tuple | MutableSequence):
        return any(map(holds_noted, sample))
    return type(sample) is LaterArray or isinstance(sample, LaterTensor)
