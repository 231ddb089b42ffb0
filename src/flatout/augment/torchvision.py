"""Reading a torchvision transform (v1 or v2) as our operations, without importing torchvision.

What would come out otherwise than in torchvision is either refused with a ValueError or said in a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from . import operations as ops

# These are not needed: Augment takes uint8 and gives floats.
_CONVERSIONS = {"ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "ToImageTensor", "Identity"}


def convert(transform: Any) -> tuple[list[ops.Operation], int, tuple[str, ...]]:
    """The operations, the fill, and what will be different."""
    notes: list[str] = []
    fills: set[int] = set()
    operations = [operation for part in _flat(transform) for operation in _one(part, notes, fills)]
    if len(fills) > 1:
        raise ValueError(f"from_torchvision: transforms with one fill expected (got {sorted(fills)})")
    return operations, max(fills, default=0), tuple(dict.fromkeys(notes))


def _flat(transform: Any) -> Iterable[Any]:
    if isinstance(transform, (list, tuple, torch.nn.Sequential)):
        parts = transform
    elif _name(transform) == "Compose":
        parts = transform.transforms
    else:
        return [transform]
    return [inner for part in parts for inner in _flat(part)]


def _name(transform: Any) -> str:
    """The name of a transform of torchvision's own; else ""."""
    if type(transform).__module__.split(".")[0] != "torchvision":
        return ""
    return type(transform).__name__


def _one(transform: Any, notes: list[str], fills: set[int]) -> list[ops.Operation]:
    name = _name(transform)
    if name in _CONVERSIONS:
        return []
    if name in ("ToDtype", "ConvertImageDtype"):
        scaled = name == "ConvertImageDtype" or transform.scale or transform.dtype == torch.uint8
        if not scaled:
            _refuse(name, "scale=True expected: values go from 0 to 1")
        return []
    if name == "RandomApply":
        inner = [operation for part in _flat(list(transform.transforms)) for operation in _one(part, notes, fills)]
        if len(inner) != 1 or not hasattr(inner[0], "p"):
            _refuse(name, "exactly one transform with a probability expected in it")
        changed: Any = inner[0]
        return [replace(changed, p=changed.p * transform.p)]
    if name not in _READERS:
        _refuse(name or type(transform).__name__, "not known; leave it out, or use one of flatout's instead")
    for attribute in ("expand", "center", "pad_if_needed", "max_size"):
        if getattr(transform, attribute, None):
            _refuse(name, f"{attribute}={getattr(transform, attribute)!r} is not supported")
    _check_interpolation(name, transform, notes)
    if name == "ColorJitter":
        notes.append("ColorJitter: always in the order brightness, contrast, saturation, hue; torchvision shuffles it")
    fill = getattr(transform, "fill", None)
    if isinstance(fill, (list, tuple)) and len(set(fill)) == 1:
        fill = fill[0]
    if fill is not None and (name != "RandomCrop" or transform.padding):
        if not isinstance(fill, (int, float)):
            _refuse(name, "one number expected as fill")
        fills.add(int(fill))
    return [_READERS[name](transform)]


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"from_torchvision: {name} cannot be converted: {why}")


def _check_interpolation(name: str, transform: Any, notes: list[str]) -> None:
    way = getattr(transform, "interpolation", None)
    way = getattr(way, "value", way)
    if way in ("nearest", 0) and name in ("RandomRotation", "RandomAffine"):
        notes.append(f"{name}: bilinear, where torchvision takes the nearest pixel, as interpolation='nearest' does")
    elif way not in (None, "bilinear", 2):
        _refuse(name, f"interpolation {way} is not supported, bilinear is")


def _size(size: Any) -> Any:
    """torchvision keeps a lone number as itself or as [number]."""
    if isinstance(size, int):
        return size
    if len(size) == 1:
        return size[0]
    return int(size[0]), int(size[1])


def _square(size: Any) -> Any:
    if not isinstance(size, int) and len(size) != 2:
        return int(size[0]), int(size[0])
    return _size(size)


def _affine(t: Any) -> ops.Operation:
    given: dict[str, Any] = {name: getattr(t, name) for name in ("translate", "scale", "shear")}
    return ops.Affine(tuple(t.degrees), **_as_tuples(given))


def _as_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Without those that are None."""
    return {name: tuple(value) for name, value in values.items() if value is not None}


def _crop(t: Any) -> ops.Operation:
    padding = t.padding if isinstance(t.padding, (list, tuple)) else [t.padding or 0]
    if len(set(padding)) != 1 or (padding[0] and t.padding_mode != "constant"):
        _refuse("RandomCrop", "the same constant padding on all sides expected")
    return ops.Crop(_square(t.size), int(padding[0]))


def _jitter(t: Any) -> ops.Operation:
    amounts: dict[str, Any] = {name: getattr(t, name) for name in ("brightness", "contrast", "saturation", "hue")}
    return ops.ColorJitter(**_as_tuples(amounts))


def _erase(t: Any) -> ops.Operation:
    value = t.value if isinstance(t.value, (list, tuple)) else [t.value]
    if len(set(value)) != 1 or not isinstance(value[0], (int, float)):
        _refuse("RandomErasing", "one number expected as value")
    return ops.Erase(t.p, tuple(t.scale), tuple(t.ratio), float(value[0]))


def _blur(t: Any) -> ops.Operation:
    if len(set(t.kernel_size)) != 1:
        _refuse("GaussianBlur", "a square kernel expected")
    return ops.Blur(int(t.kernel_size[0]), tuple(t.sigma))


def _noise(t: Any) -> ops.Operation:
    if t.mean != 0 or not t.clip:
        _refuse("GaussianNoise", "mean=0 and clip=True expected")
    return ops.Noise(float(t.sigma))


def _grayscale(t: Any) -> ops.Operation:
    if t.num_output_channels != 3:
        _refuse("Grayscale", "num_output_channels=3 expected: the number of channels stays")
    return ops.Grayscale(1.0)


_READERS: dict[str, Callable[[Any], ops.Operation]] = {
    "RandomHorizontalFlip": lambda t: ops.HFlip(t.p),
    "RandomVerticalFlip": lambda t: ops.VFlip(t.p),
    "RandomCrop": _crop,
    "CenterCrop": lambda t: ops.Crop(_square(t.size), center=True),
    "Resize": lambda t: ops.Resize(_size(t.size), t.antialias is not False),
    "RandomResizedCrop": lambda t: ops.ResizedCrop(
        _square(t.size), tuple(t.scale), tuple(t.ratio), t.antialias is not False
    ),
    "RandomRotation": lambda t: ops.Rotate(tuple(t.degrees)),
    "RandomAffine": _affine,
    "ColorJitter": _jitter,
    "RandomGrayscale": lambda t: ops.Grayscale(t.p),
    "Grayscale": _grayscale,
    "RandomInvert": lambda t: ops.Invert(t.p),
    "GaussianNoise": _noise,
    "RandomErasing": _erase,
    "GaussianBlur": _blur,
    "Normalize": lambda t: ops.Normalize(tuple(t.mean), tuple(t.std)),
}
