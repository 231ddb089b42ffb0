"""What an operation is, and those that move pixels; together with `points` and `batch_program` the specification.

Geometry is described by where in the source an output point comes from: x to the right, y down, in
pixels, a pixel's centre at ½. `batch_program` folds it all into one matrix, which also reads the source there.
An operation that torchvision has too means what it means there, with its numbers drawn for every sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

Size: TypeAlias = tuple[int, int]
Interval: TypeAlias = tuple[float, float]
_ANY_SIZE = (1 << 20, 1 << 20)


class Draw(NamedTuple):
    """A number drawn for each sample: `low + span·u`, floored if `whole`; `neutral` where the operation sits out."""

    name: str
    low: float
    span: float = 0.0
    neutral: float = 0.0
    whole: bool = False


class BoxDraw(NamedTuple):
    """A rectangle drawn by area and log(width / height), ten times if need be to stay within `limit`."""

    area: Interval
    log_ratio: Interval
    limit: Size
    within: Size
    # Top, left, height, width; taken after ten failures, and for samples that do not get the operation.
    fallback: tuple[int, int, int, int]


@dataclass(frozen=True)
class Operation:
    """Base of all; a field `p` is the probability that a sample gets it."""

    def __post_init__(self) -> None:
        require(0 <= self.probability <= 1, f"{type(self).__name__}.p", "a probability from 0 to 1", self.probability)
        self.draws(_ANY_SIZE)  # says what is wrong with the arguments

    @property
    def probability(self) -> float:
        """How likely a sample gets it."""
        return float(getattr(self, "p", 1.0))

    def draws(self, size: Size) -> tuple[Draw, ...] | BoxDraw:
        """What is drawn for each sample of pictures of this size."""
        return ()


def require(ok: bool, what: str, expected: str, got: object) -> None:
    """Raise a ValueError about an argument, unless it is `ok`."""
    if not ok:
        raise ValueError(f"{what} must be {expected} (got {got!r})")


def between(
    name: str, what: str, value: float | Interval, *, around: float | None, low: float, high: float, neutral: float
) -> Draw:
    """Draw between a pair; a number stands for that much either side of `around`, or for itself if that is None."""
    if not isinstance(value, (int, float)):
        first, last = value
    elif around is None:
        first = last = value
    else:
        first, last = around - value, around + value
        if around == 1:
            first = max(first, low)  # factors stop at 0, as in torchvision
    require(low <= first <= last <= high, what, f"within {low:g} to {high:g}, the lower end first", value)
    return Draw(name, first, last - first, neutral)


def _height_width(what: str, value: int | Sequence[int]) -> Size:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    require(len(pair) == 2 and min(pair) >= 1, what, "a number or (height, width), at least 1", value)
    return int(pair[0]), int(pair[1])


@dataclass(frozen=True)
class Geometry(Operation):
    """Moves pixels; `kind` names its formula in the fold and in the kernel."""

    kind: ClassVar[int]

    def out_size(self, size: Size) -> Size:
        """The size it turns pictures of this size into."""
        return size


@dataclass(frozen=True)
class HFlip(Geometry):
    """Mirrored left to right: x ← width − x."""

    p: float = 0.5
    kind: ClassVar[int] = 0

    def draws(self, size: Size) -> tuple[Draw, ...]:
        return (Draw("on", 1.0),)


@dataclass(frozen=True)
class VFlip(HFlip):
    """Mirrored top to bottom: y ← height − y."""

    kind: ClassVar[int] = 1


@dataclass(frozen=True)
class Crop(Geometry):
    """A window at a random place (or the middle) of the picture padded with the fill: x ← x + left."""

    size: int | Size
    padding: int = 0
    center: bool = False
    kind: ClassVar[int] = 2

    def out_size(self, size: Size) -> Size:
        return _height_width("Crop.size", self.size)

    def draws(self, size: Size) -> tuple[Draw, ...]:
        require(self.padding >= 0, "Crop.padding", "≥ 0", self.padding)
        room = [have + 2 * self.padding - new for have, new in zip(size, self.out_size(size), strict=True)]
        require(min(room) >= 0, "Crop.size", f"at most {size[0]}×{size[1]}, the picture, and its padding", self.size)
        if self.center:
            return Draw("top", round(room[0] / 2) - self.padding), Draw("left", round(room[1] / 2) - self.padding)
        top = Draw("top", -self.padding, room[0] + 1, whole=True)
        return top, Draw("left", -self.padding, room[1] + 1, whole=True)


@dataclass(frozen=True)
class Resize(Geometry):
    """To (height, width), or the shorter side to a number: x ← x · width / new width."""

    size: int | Size
    antialias: bool = True
    kind: ClassVar[int] = 3

    def out_size(self, size: Size) -> Size:
        asked = _height_width("Resize.size", self.size)
        if not isinstance(self.size, int):
            return asked
        longer = int(self.size * max(size) / min(size))
        if size[0] <= size[1]:
            return self.size, longer
        return longer, self.size

    def draws(self, size: Size) -> tuple[Draw, ...]:
        self.out_size(size)
        return ()


@dataclass(frozen=True)
class ResizedCrop(Geometry):
    """A window of random area and shape (width / height), resized: x ← left + x · window's width / new width."""

    size: int | Size
    scale: Interval = (0.08, 1.0)
    ratio: Interval = (3 / 4, 4 / 3)
    antialias: bool = True
    kind: ClassVar[int] = 4

    def out_size(self, size: Size) -> Size:
        return _height_width("ResizedCrop.size", self.size)

    def draws(self, size: Size) -> BoxDraw:
        self.out_size(size)
        height, width = size
        require(0 < self.scale[0] <= self.scale[1] <= 1, "ResizedCrop.scale", "a part of the area, 0 to 1", self.scale)
        require(0 < self.ratio[0] <= self.ratio[1], "ResizedCrop.ratio", "above 0, the lower end first", self.ratio)
        box = min(height, round(width / self.ratio[0])), min(width, round(height * self.ratio[1]))
        area = self.scale[0] * height * width, self.scale[1] * height * width
        middle = ((height - box[0]) // 2, (width - box[1]) // 2, *box)
        return BoxDraw(area, (math.log(self.ratio[0]), math.log(self.ratio[1])), size, size, middle)


@dataclass(frozen=True)
class Rotate(Geometry):
    """Turned about its middle by an angle in degrees, counter-clockwise."""

    degrees: float | Interval
    p: float = 1.0
    kind: ClassVar[int] = 5

    def draws(self, size: Size) -> tuple[Draw, ...]:
        return (between("degrees", "Rotate.degrees", self.degrees, around=0, low=-360, high=360, neutral=0),)


@dataclass(frozen=True)
class Affine(Geometry):
    """Sheared, scaled, turned clockwise about its middle, then moved by a part of its size."""

    degrees: float | Interval = 0.0
    translate: float | tuple[float, float] = 0.0
    scale: float | Interval = 1.0
    # A range of x alone, or low and high of x and of y.
    shear: float | Interval | tuple[float, float, float, float] = 0.0
    p: float = 1.0
    kind: ClassVar[int] = 6

    def draws(self, size: Size) -> tuple[Draw, ...]:
        right, down = (self.translate,) * 2 if isinstance(self.translate, (int, float)) else self.translate
        require(0 <= min(right, down) <= max(right, down) <= 1, "Affine.translate", "0 to 1", self.translate)
        shear_x: float | Interval
        if isinstance(self.shear, tuple) and len(self.shear) == 4:
            shear_x, shear_y = self.shear[:2], self.shear[2:]
        else:
            shear_x, shear_y = self.shear, (0.0, 0.0)
        return (
            between("degrees", "Affine.degrees", self.degrees, around=0, low=-360, high=360, neutral=0),
            # In whole pixels, as torchvision's.
            Draw("right", 0.5 - right * size[1], 2 * right * size[1], whole=True),
            Draw("down", 0.5 - down * size[0], 2 * down * size[0], whole=True),
            between("scale", "Affine.scale", self.scale, around=None, low=0.001, high=1000, neutral=1),
            between("shear_x", "Affine.shear", shear_x, around=0, low=-89, high=89, neutral=0),
            between("shear_y", "Affine.shear", shear_y, around=0, low=-89, high=89, neutral=0),
        )
