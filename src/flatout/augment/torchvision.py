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
    if fill is not None and (name != "RandomCrop" or transform.padding):
        fills.add(int(_lone(name, fill, "one number expected as fill")))
    return [_READERS[name](transform)]


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"from_torchvision: {name} cannot be converted: {why}")


def _lone(name: str, value: Any, expected: str) -> Any:
    """A number, also one that stands several times in a sequence."""
    first, *others = value if isinstance(value, (list, tuple)) else [value]
    if not isinstance(first, (int, float)) or any(other != first for other in others):
        _refuse(name, expected)
    return first


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
    return ops.Affine(tuple(t.degrees), **_given(t, "translate", "scale", "shear"))


def _given(t: Any, *names: str) -> dict[str, Any]:
    """These attributes, without those that are None."""
    return {name: tuple(getattr(t, name)) for name in names if getattr(t, name) is not None}


def _crop(t: Any) -> ops.Operation:
    expected = "the same constant padding on all sides expected"
    padding = _lone("RandomCrop", t.padding or 0, expected)
    if padding and t.padding_mode != "constant":
        _refuse("RandomCrop", expected)
    return ops.Crop(_square(t.size), int(padding))


def _jitter(t: Any) -> ops.Operation:
    return ops.ColorJitter(**_given(t, "brightness", "contrast", "saturation", "hue"))


def _erase(t: Any) -> ops.Operation:
    value = _lone("RandomErasing", t.value, "one number expected as value")
    return ops.Erase(t.p, tuple(t.scale), tuple(t.ratio), float(value))


def _blur(t: Any) -> ops.Operation:
    return ops.Blur(int(_lone("GaussianBlur", t.kernel_size, "a square kernel expected")), tuple(t.sigma))


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
