"""Pillow's images, numpy's arrays and torch's tensors, computed later.

To the code that has one it is an image, an array or a tensor. What cannot be recorded is answered by the real
one, which stands for it from then on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_map

from flatout.feed.deferred.batch import (
    MOVES,
    WARP_NUMBERS,
    DeferredBatch,
    PlaceholderTensor,
    materialize,
    merge_programs,
)
from flatout.feed.deferred.expression import (
    DTYPES,
    NAMES,
    Expression,
    LazyObject,
    as_program,
    combine,
    constant,
    current_recording,
    materializing,
)

_transform, _transpose = Image.Image.transform, Image.Image.transpose
_array, _asarray, _ascontiguousarray = np.array, np.asarray, np.ascontiguousarray
_from_numpy, _tensor = torch.from_numpy, torch.tensor

# --- Pillow --------------------------------------------------------------------------------------

_IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
_MOVE_OF = {Image.Resampling.NEAREST: "nearest", Image.Resampling.BILINEAR: "bilinear"}


class LazyImage(Image.Image):
    """An image that will be computed by an `expression`: a picture, with each pixel from where a
    matrix says."""

    def __init__(self, expression: Expression) -> None:
        super().__init__()
        picture = expression.picture
        self._core: Any = None
        self._mode, self._size, self.info = picture.mode, picture.size, picture.info.copy()
        self.expression = expression

    @property
    def _im(self) -> Any:  # Pillow reads and writes all pixels through this attribute
        with materializing:
            if self._core is None:
                self._core = self.expression.compute().im
            return self._core

    @_im.setter
    def _im(self, core: Any) -> None:
        self._core = core

    @property
    def is_lazy(self) -> bool:
        """Whether nobody has seen or changed its pixels."""
        return self._core is None


def transform(self: Any, size: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `Image.transform`, which `rotate` calls in the end."""
    recordable = can_be_recorded(self) and method == Image.Transform.AFFINE
    if not recordable or tuple(size) != self.size:
        return _transform(self, size, method, *args, **kwargs)
    given = dict(zip(("data", "resample", "fill", "fillcolor"), args, strict=False)) | kwargs
    data, colour = given.get("data") or (), given.get("fillcolor")
    resample = given.get("resample", Image.Resampling.NEAREST)
    colours = _channel_values(colour, len(self.getbands()))
    before = _image_expression(self)
    # One interpolation, not two.
    if resample not in _MOVE_OF or before.static[0] not in ("same", "swap") or not colours or len(data) != 6:
        return _transform(self, size, method, *args, **kwargs)
    matrix = tuple(map(float, data))

    def call(picture: Image.Image) -> Image.Image:
        return _transform(picture, size, method, matrix, resample, fillcolor=colour)

    return _moved(before, _MOVE_OF[resample], matrix, colours, call)


def transpose(self: Any, method: Any) -> Any:
    """Stands for `Image.transpose`, where height and width stay."""
    width, height = map(float, self.size)
    swaps = {
        Image.Transpose.FLIP_LEFT_RIGHT: (-1.0, 0.0, width, 0.0, 1.0, 0.0),
        Image.Transpose.FLIP_TOP_BOTTOM: (1.0, 0.0, 0.0, 0.0, -1.0, height),
        Image.Transpose.ROTATE_180: (-1.0, 0.0, width, 0.0, -1.0, height),
    }
    if not can_be_recorded(self) or method not in swaps:
        return _transpose(self, method)
    before = _image_expression(self)
    move = max(before.static[0], "swap", key=MOVES.index)
    colours = before.numbers[WARP_NUMBERS:]
    return _moved(before, move, swaps[method], colours, lambda picture: _transpose(picture, method))


def can_be_recorded(image: Any) -> bool:
    """Whether it is an image of a mode that programs know, and transforms are recorded now."""
    if current_recording() is None or not isinstance(image, Image.Image):
        return False
    return image.mode in ("L", "RGB") and min(image.size) > 0


def _image_expression(image: Any) -> Expression:
    """How to compute an image; of a real one a copy of its pixels as they are now, for they may be
    changed."""
    if isinstance(image, LazyImage) and image.is_lazy:
        return image.expression
    picture = image.copy()
    channels = len(picture.getbands())
    shape = (picture.height, picture.width, *([channels] if channels > 1 else []))
    decoded = Expression(op="pixels", shape=shape, dtype="uint8", call=picture.copy, picture=picture)
    numbers = (*_IDENTITY, *[0.0] * channels)
    return decoded.then("warp", lambda image: image, static=("same",), numbers=numbers)


def _moved(
    before: Expression, move: str, matrix: tuple[float, ...], colours: tuple[float, ...], call: Callable[..., Any]
) -> LazyImage:
    """The image moved once more: one warp does for both."""
    (decoded,) = before.inputs
    numbers = (*_compose(before.numbers[:WARP_NUMBERS], matrix), *colours)
    both = decoded.then("warp", lambda picture: call(before.call(picture)), static=(move,), numbers=numbers)
    return LazyImage(both)


def _channel_values(colour: Any, channels: int) -> tuple[float, ...]:
    """A number for each channel, or none: Pillow also knows colour names, and one number for three
    channels."""
    if colour is None:
        return (0.0,) * channels
    parts = colour if isinstance(colour, tuple | list) else (colour,)
    if len(parts) != channels or not all(isinstance(part, int | float) and 0 <= part <= 255 for part in parts):
        return ()
    return tuple(float(int(part)) for part in parts)


def _compose(first: tuple[float, ...], then: tuple[float, ...]) -> tuple[float, ...]:
    """Where pixels come from in the end: `then` says from where in the image that `first` makes."""
    a, b, c, d, e, f = first
    p, q, r, s, t, u = then
    return a * p + b * s, a * q + b * t, a * r + b * u + c, d * p + e * s, d * q + e * t, d * r + e * u + f


# --- operations on two values -------------------------------------------------------------------


def _combined(op: str, function: Callable[..., Any], inputs: Sequence[Any]) -> Expression | None:
    """numpy's or torch's function of two; None where it cannot be recorded."""
    known = [expression for expression in map(_expression_of, inputs) if expression is not None]
    if len(inputs) != 2 or len(known) != 2:
        return None
    try:
        # Its type is found by asking it with one element of each.
        dtype = str(function(*map(_one_element, inputs)).dtype).removeprefix("torch.")
        return combine(op, known, function, dtype)
    except (TypeError, RuntimeError):  # such types, or shapes, cannot be combined
        return None


def _expression_of(thing: Any) -> Expression | None:
    return thing.expression if isinstance(thing, LazyObject) else constant(thing)


def _one_element(thing: Any) -> Any:
    if type(thing) is LazyArray:
        return np.ones((1,) * thing.ndim, thing.dtype)[()]
    if isinstance(thing, LazyTensor):
        return torch.ones((1,) * thing.dim(), dtype=thing.dtype)
    if isinstance(thing, Tensor | np.ndarray) and thing.ndim:
        return thing.reshape(-1)[:1].reshape((1,) * thing.ndim)
    return thing


# --- numpy --------------------------------------------------------------------------------------

_UFUNCS: dict[Any, tuple[str, Callable[..., Any] | None]] = {  # and the operators that torch may answer
    np.add: ("add", operator.add),
    np.subtract: ("subtract", operator.sub),
    np.multiply: ("multiply", operator.mul),
    np.true_divide: ("divide", operator.truediv),
    np.minimum: ("minimum", None),
    np.maximum: ("maximum", None),
}


def _recorded(record: Callable[..., Any]) -> Callable[..., Any]:
    """A method of numpy's that the real array answers where `record` gives nothing, or knows no such
    argument."""

    @functools.wraps(record)
    def method(array: LazyArray, *args: Any, **kwargs: Any) -> Any:
        result = None
        if array.expression is not None:
            with contextlib.suppress(TypeError):
                result = record(array, *args, **kwargs)
        if result is None:
            result = getattr(array.materialize(), record.__name__)(*materialize(args), **materialize(kwargs))
        return result

    return method


class LazyArray(LazyObject, NDArrayOperatorsMixin):
    """To Python and to numpy's own functions, a numpy array."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return np.ndarray if self.shape else self.dtype.type

    @property
    def _described_by(self) -> Any:
        """What has its shape and type: the expression, or the real array, which may have been given
        another."""
        return self._real if self.is_real else self._expression

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self._described_by.shape)

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
        return np.dtype(self._described_by.dtype)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else len(self.materialize())

    # -- recorded where possible ------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = getattr(ufunc, method)
        (target,) = kwargs.get("out") or (None,)
        if type(target) is LazyArray and not target.shape:  # a number cannot be changed in place: make another
            del kwargs["out"]
            return function(*inputs, **kwargs)
        op, of_torch = _UFUNCS.get(ufunc, ("", None))
        if of_torch is not None and not kwargs and any(isinstance(thing, Tensor) for thing in inputs):
            return of_torch(*materialize(inputs))  # torch's rules for types hold
        if op and method == "__call__" and not set(kwargs) - {"out"}:
            expression = _combined(op, ufunc, inputs)
            if expression is not None and target is None:
                return LazyArray(expression)
            if type(target) is LazyArray and target.replace_in_place(expression):
                return target
        return function(*materialize(inputs), **materialize(kwargs))

    def __array_function__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (np.clip, np.mean, np.transpose) and args[0] is self and not kwargs:
            return getattr(self, func.__name__)(*args[1:])
        return func(*materialize(args), **materialize(kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """To torch's functions it is the real array, or the real number."""
        given = [arg.materialize() if type(arg) is LazyArray else arg for arg in args]
        return func(*given, **{key: materialize(arg) for key, arg in (kwargs or {}).items()})

    @_recorded
    def astype(self, dtype: Any, *, copy: bool = True) -> Any:
        """As another type, or a copy; with `copy=False` itself where nothing has to be done."""
        wanted = np.dtype(dtype)
        if not wanted.isnative:
            return None
        if wanted == self.dtype:
            return LazyArray(self._expression) if copy else self
        cast = self._expression.cast(wanted.name, operator.methodcaller("astype", wanted))
        return None if cast is None else LazyArray(cast)

    @_recorded
    def copy(self) -> Any:
        """Another array in memory of its own, in C order."""
        return LazyArray(self._expression.then("copy", operator.methodcaller("copy")))

    @_recorded
    def clip(self, low: Any, high: Any) -> Any:
        """Not below the first limit, then not above the second."""
        if _expression_of(low) is None or _expression_of(high) is None:
            return None
        return np.minimum(np.maximum(self, low), high)

    @_recorded
    def mean(self) -> Any:
        """Of all elements."""
        dtype = "float32" if self.dtype == np.float32 else "float64"
        return LazyArray(self._expression.then("mean", operator.methodcaller("mean"), shape=(), dtype=dtype))

    @_recorded
    def transpose(self, *axes: Any) -> Any:
        """A view with the axes in another order."""
        order = _one_sequence(axes)
        if sorted(order) != list(range(self.ndim)):
            return None
        return LazyArray(self._expression.permuted(order, operator.methodcaller("transpose", order)), self)

    # -- answered by the real array ---------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        real = self.materialize()
        if copy or (dtype is not None and dtype != real.dtype):
            return _array(real, dtype)
        return _asarray(real)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__array"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __setattr__(self, name: str, thing: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, thing)
        else:
            setattr(self.materialize(), name, thing)


def _answer_with_real_array(name: str) -> None:
    def answer(self: LazyArray, *args: Any) -> Any:
        return getattr(self.materialize(), name)(*materialize(args))

    setattr(LazyArray, name, answer)


for _name in ("getitem", "setitem", "iter", "contains", "copy", "deepcopy", "reduce_ex", "complex", "index"):
    _answer_with_real_array(f"__{_name}__")
for _name in ("float", "int", "bool", "format", "round", "hash", "str", "repr"):
    _answer_with_real_array(f"__{_name}__")


def lazy_reader(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for np.array and its kin: of an image a lazy array of its pixels, of a lazy array itself
    or a copy."""

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        lazy = _lazy_argument(args, kwargs)
        if lazy is None:
            return original(*materialize(args), **materialize(kwargs))
        dtype = args[1] if len(args) == 2 else kwargs.get("dtype")
        copies = kwargs.get("copy", original is _array)
        result = lazy.astype(lazy.dtype if dtype is None else dtype, copy=bool(copies))
        if original is not _ascontiguousarray:
            return result
        if type(result) is LazyArray:  # the result may be a copy, and may be a view
            return LazyArray(result._expression.then("copy", original), result)
        return original(result)

    return read


def _lazy_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The lazy array that a call such as np.array(image) is about, or None."""
    if current_recording() is None or not 1 <= len(args) <= 2 or set(kwargs) - {"dtype", "copy"}:
        return None
    thing = args[0]
    if can_be_recorded(thing):
        thing = LazyArray(_image_expression(thing).then("copy", _array))
    return thing if type(thing) is LazyArray and is_lazy(thing) else None


# --- torch --------------------------------------------------------------------------------------

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


class LazyTensor(LazyObject, PlaceholderTensor):
    """A tensor that will be computed from a picture."""

    @staticmethod
    def __new__(cls, expression: Expression, view_of: LazyObject | None = None) -> Any:
        return Tensor._make_wrapper_subclass(cls, expression.shape, dtype=DTYPES[expression.dtype])

    def record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that the GPU can make later; else NotImplemented."""
        if self.expression is None:
            return NotImplemented
        if name not in _RECORDED:
            return _view_copy_or_cast(name, self, args, kwargs)
        # torch has rules of its own for the type: to it, arrays and numbers of numpy's have to be real.
        others = [arg.materialize() if type(arg) is LazyArray else arg for arg in args]
        expression = None if kwargs else _combined(*_RECORDED[name], [self, *others])
        if name in _IN_PLACE:
            return self if self.replace_in_place(expression) else NotImplemented
        return NotImplemented if expression is None else LazyTensor(expression)

    @staticmethod
    def stack_lazily(samples: Sequence[Any], stack: Callable[..., Tensor]) -> Any:
        """A batch of samples that one program computes, or None; `stack` says where its pixels go."""
        known = [sample.expression for sample in samples if is_lazy(sample)]
        if len(known) < len(samples):
            return None
        programs, numbers = zip(*map(as_program, known), strict=True)
        program = merge_programs(programs)
        pixels = [pixels_of(expression) for expression in known]
        if program is None or any(picture.shape != pixels[0].shape for picture in pixels):
            return None
        if program.is_identity:
            return stack(pixels)
        return DeferredBatch(program, stack(pixels), _tensor(numbers, dtype=torch.float64))


def pixels_of(expression: Expression) -> Tensor:
    """The picture an expression starts from, as it was decoded."""
    return _from_numpy(np.require(_asarray(expression.picture), requirements="W"))


def _view_copy_or_cast(name: str, tensor: LazyTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same values as a view, a copy, or of another type; NotImplemented where that cannot be recorded."""
    expression = tensor._expression
    call = operator.methodcaller(name, *args, **kwargs)
    dtype = _requested_dtype(name, args, kwargs)
    if dtype == expression.dtype:
        return tensor
    if dtype is not None:
        cast = expression.cast(dtype, call)
        return NotImplemented if cast is None else LazyTensor(cast)
    shape = expression.shape
    sizes = _one_sequence(args)
    if kwargs:
        return NotImplemented
    if name == "clone":
        return LazyTensor(expression)
    if name == "contiguous":  # which may be a copy, and may be the tensor itself
        return LazyTensor(expression.then("copy", call), tensor)
    if name == "detach" or (name in ("view", "reshape") and sizes == shape):
        return LazyTensor(expression, tensor)
    if name == "permute" and sorted(sizes) == list(range(len(shape))):
        return LazyTensor(expression.permuted(sizes, call), tensor)
    if name == "unsqueeze":
        axis = args[0] % (len(shape) + 1)
        expanded = (*shape[:axis], 1, *shape[axis:])
        return LazyTensor(expression.then("expand", call, static=(axis,), shape=expanded), tensor)
    return NotImplemented


def _one_sequence(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes or axes, given one by one or as a sequence."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        return tuple(args[0])
    return args


def _requested_dtype(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    wanted = [*args, *kwargs.values()]
    if name in _CASTS and not wanted:
        return _CASTS[name]
    if name in ("to", "type") and len(wanted) == 1 and isinstance(wanted[0], torch.dtype):
        return NAMES.get(wanted[0])
    return None


def lazy_tensor_maker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for torch.from_numpy and its kin: of a lazy array, a lazy tensor."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        array = args[0] if len(args) == 1 and set(kwargs) <= {"dtype"} else None
        if type(array) is not LazyArray or not is_lazy(array):
            return original(*materialize(args), **materialize(kwargs))
        tensor = _tensor_of(array)
        if original is _tensor:
            tensor = tensor.clone()
        return tensor if kwargs.get("dtype") is None else tensor.to(kwargs["dtype"])

    return make


def _tensor_of(array: LazyArray) -> Any:
    """The lazy tensor that shares a lazy array's memory."""
    return LazyTensor(array._expression.then("copy", lambda real: _from_numpy(_asarray(real))), array)


# --- samples that hold them ---------------------------------------------------------------------


def collatable(sample: Any) -> Any:
    """A sample as torch's collate has it in the end: what is lazy as a lazy tensor, what is real as it is."""
    return tree_map(_as_tensor, sample)


def _as_tensor(part: Any) -> Any:
    if type(part) is LazyArray and is_lazy(part):
        return _tensor_of(part)
    return part if is_lazy(part) else materialize(part)


def is_lazy(thing: Any) -> bool:
    """Whether it is an array or a tensor that is not real yet."""
    return isinstance(thing, LazyObject) and not thing.is_real
