"""torch's tensors, computed later: what becomes of a sample's arrays, and what is collated into a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.feed.deferred.arrays import LaterArray, constant
from flatout.feed.deferred.batch import Deferred, StandIn
from flatout.feed.deferred.program import agreed
from flatout.feed.deferred.value import DTYPES, NAMES, Value, program, together

_asarray, _from_numpy, _tensor = np.asarray, torch.from_numpy, torch.tensor
_OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    name: (op, function)
    for op, function, names in (
        ("add", torch.add, "add add_ __add__ __radd__"),
        ("subtract", torch.sub, "sub sub_ subtract __sub__"),
        ("multiply", torch.mul, "mul mul_ multiply __mul__ __rmul__"),
        ("divide", torch.true_divide, "div div_ divide true_divide __truediv__"),
    )
    for name in names.split()
}
_CASTS = {"float": "float32", "double": "float64", "long": "int64"}


class LaterTensor(StandIn):
    """A tensor that is to be computed from a picture."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, value: Value) -> None:
        self.value = value

    @classmethod
    def of(cls, value: Value) -> Any:
        """The tensor that has this value."""
        return cls(value.shape, DTYPES[value.dtype], value)

    def made(self) -> Tensor:
        """The tensor itself."""
        made: Tensor = self.value.here
        return made

    @classmethod
    def noted(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What comes of a call that a card can make for itself."""
        tensor: Any = args[0] if args else None
        value = _noted(name, tensor, args[1:], kwargs) if isinstance(tensor, cls) else None
        if value is None:
            return NotImplemented
        if not name.endswith("_") or name.endswith("__"):
            return cls.of(value)
        if (value.shape, value.dtype) != (tensor.value.shape, tensor.value.dtype):
            return NotImplemented
        tensor.value = value  # in place
        return tensor

    @staticmethod
    def stacked(samples: Sequence[Any], stack: Callable[..., Tensor], place: Callable[..., Tensor]) -> Any:
        """A batch of samples that one program makes, or None. `stack` and `place` put its bytes where they belong."""
        if not all(isinstance(sample, LaterTensor) for sample in samples):
            return None
        programs, numbers = zip(*(program(sample.value) for sample in samples), strict=True)
        whole = agreed(programs)
        pixels = [pixels_of(sample) for sample in samples]
        if whole is None or any(picture.shape != pixels[0].shape for picture in pixels):
            return None
        if whole.trivial:
            return stack(pixels)
        return Deferred.of(whole, stack(pixels), place(_tensor(numbers, dtype=torch.float64)))


def pixels_of(tensor: LaterTensor) -> Tensor:
    """The picture it is made of, as it was decoded."""
    return _from_numpy(np.require(_asarray(tensor.value.picture), requirements="W"))


def _noted(name: str, tensor: LaterTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value | None:
    value = tensor.value
    sizes = tuple(args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args)
    if name in ("contiguous", "clone", "detach") or (name in ("view", "reshape") and sizes == value.shape):
        return value
    if name == "permute" and not kwargs:
        return value.reordered(sizes, lambda made: made.permute(sizes))
    if name == "unsqueeze" and len(args) == 1:
        axis = args[0] % (len(value.shape) + 1)
        shape = (*value.shape[:axis], 1, *value.shape[axis:])
        return value.then("expand", lambda made: made.unsqueeze(axis), static=(axis,), shape=shape)
    dtype = _dtype_asked_for(name, args, kwargs)
    if dtype is not None:
        return value.cast(dtype, lambda made: made.to(DTYPES[dtype]))
    if name not in _OPS or kwargs or len(args) != 1:
        return None
    op, function = _OPS[name]
    result = function(_tiny(tensor), _tiny(args[0]))
    return together(op, (value, _value(args[0])), function, str(result.dtype).removeprefix("torch."))


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
        return constant(_asarray(thing.detach()), thing) if plain else None
    return constant(_asarray(thing), thing) if isinstance(thing, int | float) else None


def _tiny(thing: Any) -> Any:
    """Something like it with one element, by which torch tells what type comes of it."""
    if not isinstance(thing, LaterTensor):
        return thing
    return torch.ones((1,) * len(thing.value.shape), dtype=DTYPES[thing.value.dtype])


def wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.from_numpy and its kin: of an array that is to be computed, a tensor that is."""

    def wrap(thing: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(thing, LaterArray):
            return original(thing, *args, **kwargs)
        if args or set(kwargs) - {"dtype"} or thing.value.dtype not in DTYPES or thing.value.picture is None:
            return original(thing.value.here, *args, **kwargs)
        later = tensor_of(thing)
        return later.to(kwargs["dtype"]) if kwargs.get("dtype") is not None else later

    return wrap


def tensor_of(array: LaterArray) -> Any:
    """The tensor over an array's memory to be."""
    value = array.value
    return LaterTensor.of(replace(value, call=lambda *_: _from_numpy(np.ascontiguousarray(value.here)), _here=None))


def left_to_do(sample: Any) -> Any:
    """A sample as torch's collate has it in the end: arrays that are to be computed become such tensors."""
    if isinstance(sample, LaterArray):
        noted = sample.value.dtype in DTYPES and sample.value.picture is not None
        return tensor_of(sample) if noted else sample.value.here
    if isinstance(sample, dict):
        return type(sample)((key, left_to_do(part)) for key, part in sample.items())
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(left_to_do, sample))
    return type(sample)(map(left_to_do, sample)) if type(sample) in (list, tuple) else sample
