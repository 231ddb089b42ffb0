"""What each operation does, to the letter; together with `batch_program` the specification of the kernels.

Geometry is described by where in the source an output point comes from: x to the right, y down, in pixels, a
pixel's centre at ½. What changes values is a formula in plain PyTorch, of a picture in float32 from 0 to 1,
B×C×H×W. An operation that torchvision has too means what it means there, on floats, with its numbers drawn
for every sample: words of Philox4x32-10, whose counter is (sample index, epoch, operation) and whose key is
the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

Size: TypeAlias = tuple[int, int]
Interval: TypeAlias = tuple[float, float]
_ANY_SIZE = (1 << 20, 1 << 20)
_MASK = 0xFFFFFFFF


class Draw(NamedTuple):
    """A number drawn for each sample: `low + span·u`, floored if `whole`; `neutral` where the
    operation sits out."""

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

    def _between(self, field: str, low: float, high: float, *, around: float | None = None, neutral: float = 0) -> Draw:
        """A number from the interval in a field. A lone number there stands for that much either side of
        `around`, or for itself if that is None."""
        value = getattr(self, field)
        return between(field, f"{type(self).__name__}.{field}", value, low, high, around=around, neutral=neutral)


def require(ok: bool, what: str, expected: str, got: object) -> None:
    """Raise a ValueError about an argument, unless it is `ok`."""
    if not ok:
        raise ValueError(f"{what} must be {expected} (got {got!r})")


def between(
    name: str, what: str, value: float | Interval, low: float, high: float, *, around: float | None, neutral: float
) -> Draw:
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


def _area_range(name: str, scale: Interval, ratio: Interval, size: Size) -> Interval:
    """The areas of a box that takes a part of a picture, in pixels."""
    require(0 <= scale[0] <= scale[1] <= 1, f"{name}.scale", "a part of the area, 0 to 1", scale)
    require(0 < ratio[0] <= ratio[1], f"{name}.ratio", "above 0, the lower end first", ratio)
    return scale[0] * size[0] * size[1], scale[1] * size[0] * size[1]


def _height_width(what: str, value: int | Sequence[int]) -> Size:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    require(len(pair) == 2 and min(pair) >= 1, what, "a number or (height, width), at least 1", value)
    return int(pair[0]), int(pair[1])


# ------------------------------------------------------------ what moves pixels


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
    """A window of random area and shape (width / height), resized: x ← left + x · window's width /
    new width."""

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
        area = _area_range("ResizedCrop", self.scale, self.ratio, size)
        require(area[0] > 0, "ResizedCrop.scale", "above 0", self.scale)
        box = min(height, round(width / self.ratio[0])), min(width, round(height * self.ratio[1]))
        middle = ((height - box[0]) // 2, (width - box[1]) // 2, *box)
        return BoxDraw(area, (math.log(self.ratio[0]), math.log(self.ratio[1])), size, size, middle)


@dataclass(frozen=True)
class Rotate(Geometry):
    """Turned about its middle by an angle in degrees, counter-clockwise."""

    degrees: float | Interval
    p: float = 1.0
    kind: ClassVar[int] = 5

    def draws(self, size: Size) -> tuple[Draw, ...]:
        return (self._between("degrees", -360, 360, around=0),)


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
            self._between("degrees", -360, 360, around=0),
            # In whole pixels, as torchvision's.
            Draw("right", 0.5 - right * size[1], 2 * right * size[1], whole=True),
            Draw("down", 0.5 - down * size[0], 2 * down * size[0], whole=True),
            self._between("scale", 0.001, 1000, neutral=1),
            between("shear_x", "Affine.shear", shear_x, -89, 89, around=0, neutral=0),
            between("shear_y", "Affine.shear", shear_y, -89, 89, around=0, neutral=0),
        )


# ------------------------------------------------------------ random numbers


def philox(index: Tensor, high: Tensor | int, key: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words (held in int64) for each element; 128 bits of counter, 64 of key."""
    zero = torch.zeros_like(index)
    counter, key = zero + high, zero + key
    c0, c1, c2, c3 = index & _MASK, (index >> 32) & _MASK, counter & _MASK, (counter >> 32) & _MASK
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # int64 wraps; the 64 bits are those of the unsigned product.
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32 & _MASK) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32 & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(word: Tensor) -> Tensor:
    """A 32-bit word as a float64 in [0, 1): its upper 24 bits, which float32 holds exactly."""
    return (word >> 8).to(torch.float64) / 2**24


def normal(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normal numbers out of two words (Box and Muller), in float32."""
    length = (-2 * torch.log((uniform(radius) + 2**-25).float())).sqrt()
    turn = uniform(angle).float() * (2 * torch.pi)
    return length * torch.cos(turn), length * torch.sin(turn)


# ------------------------------------------------------------ what changes values


@dataclass(frozen=True)
class Point(Operation):
    """Changes values; `colour` ones need R, G, B and leave a single channel as it is."""

    colour: ClassVar[bool] = False

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        """The new B×C×H×W; each drawn number is B×1×1×1."""
        raise NotImplementedError


def gray(x: Tensor) -> Tensor:
    """0.2989 R + 0.587 G + 0.114 B; the mean of the channels where there are not three."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return 0.2989 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (factor * x + (1 - factor) * other).clamp(0, 1)


@dataclass(frozen=True)
class Brightness(Point):
    """x · factor, held within 0..1; an amount `a` stands for factors of 1 − a to 1 + a."""

    amount: float | Interval
    p: float = 1.0
    # The number that is drawn: its name, the middle, the lowest and the highest.
    drawn: ClassVar[tuple[str, int, float, float]] = ("factor", 1, 0, 1000)

    def draws(self, size: Size) -> tuple[Draw, ...]:
        (name, around, low, high), what = self.drawn, f"{type(self).__name__}.amount"
        return (between(name, what, self.amount, low, high, around=around, neutral=around),)

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        return (x * drawn[0]).clamp(0, 1)


@dataclass(frozen=True)
class Contrast(Brightness):
    """Blended with the mean gray of the sample as it is by now: factor · x + (1 − factor) · mean."""

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        return _blend(x, gray(x).mean((2, 3), keepdim=True), drawn[0])


@dataclass(frozen=True)
class Saturation(Brightness):
    """Blended with the pixel's own gray."""

    colour: ClassVar[bool] = True

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        return _blend(x, gray(x), drawn[0])


@dataclass(frozen=True)
class Gamma(Brightness):
    """x to the power of the factor."""

    drawn: ClassVar[tuple[str, int, float, float]] = ("gamma", 1, 0.01, 100)

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        return x.pow(drawn[0])


@dataclass(frozen=True)
class Hue(Brightness):
    """The hue of HSV turned by a part of the circle, −0.5 to 0.5."""

    colour: ClassVar[bool] = True
    drawn: ClassVar[tuple[str, int, float, float]] = ("turn", 0, -0.5, 0.5)

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        r, g, b = x[:, 0:1], x[:, 1:2], x[:, 2:3]
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        chroma = high - low
        scale = 1 / torch.where(chroma > 0, chroma, 1)
        hue = torch.where(high == g, (b - r) * scale + 2, (r - g) * scale + 4)
        hue = torch.where(high == r, (g - b) * scale, hue)
        # In sixths of the circle: red at 0, green at 2, blue at 4.
        hue = (hue + 6 * drawn[0]) % 6
        shares = (hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()
        return torch.cat([low + chroma * share.clamp(0, 1) for share in shares], 1)


@dataclass(frozen=True)
class Grayscale(Point):
    """Every channel becomes the gray of the pixel."""

    p: float = 0.1
    colour: ClassVar[bool] = True

    def draws(self, size: Size) -> tuple[Draw, ...]:
        return (Draw("on", 1.0),)

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        return torch.where(drawn[0] > 0, gray(x), x)


@dataclass(frozen=True)
class Invert(Grayscale):
    """1 − x."""

    p: float = 0.5
    colour: ClassVar[bool] = False

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        return torch.where(drawn[0] > 0, 1 - x, x)


@dataclass(frozen=True)
class Noise(Point):
    """x + sigma · a standard normal number for every value, held within 0..1."""

    sigma: float | Interval = 0.1
    p: float = 1.0

    def draws(self, size: Size) -> tuple[Draw, ...]:
        return self._between("sigma", 0, 1000), *(
            Draw(name, 0.0, 2.0**24, whole=True) for name in ("key_low", "key_high")
        )

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        sigma, key_low, key_high = drawn
        pixel = torch.arange(x[0, 0].numel(), device=x.device).view(1, 1, *x.shape[2:]).expand(len(x), -1, -1, -1)
        words = philox(pixel, 0, key_low.long() + (key_high.long() << 24))
        grain = torch.cat(normal(words[0], words[1]) + normal(words[2], words[3]), 1)
        return (x + sigma * grain[:, : x.shape[1]]).clamp(0, 1)


@dataclass(frozen=True)
class Erase(Point):
    """A rectangle of random area and shape (height / width) set to `value`; masks keep what they have."""

    p: float = 0.5
    scale: Interval = (0.02, 0.33)
    ratio: Interval = (0.3, 3.3)
    value: float = 0.0

    def draws(self, size: Size) -> BoxDraw:
        area = _area_range("Erase", self.scale, self.ratio, size)
        log_ratio = -math.log(self.ratio[1]), -math.log(self.ratio[0])
        return BoxDraw(area, log_ratio, (size[0] - 1, size[1] - 1), size, (0, 0, 0, 0))

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        top, left, height, width = drawn
        row = torch.arange(x.shape[2], device=x.device).view(-1, 1)
        column = torch.arange(x.shape[3], device=x.device)
        inside = (row >= top) & (row < top + height) & (column >= left) & (column < left + width)
        return torch.where(inside, self.value, x)


@dataclass(frozen=True)
class Blur(Point):
    """A Gaussian of `kernel_size` taps each way, weights exp(−½ (i / sigma)²) summing to one, edges
    reflected."""

    kernel_size: int
    sigma: float | Interval = (0.1, 2.0)
    p: float = 1.0

    @property
    def radius(self) -> int:
        """Taps on either side of the middle one."""
        return self.kernel_size // 2

    def draws(self, size: Size) -> tuple[Draw, ...]:
        require(self.kernel_size % 2 == 1, "Blur.kernel_size", "odd", self.kernel_size)
        require(0 <= self.radius < min(size), "Blur.kernel_size", f"1 to {2 * min(size) - 1} here", self.kernel_size)
        return (self._between("sigma", 0.001, 1000),)

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        taps = torch.arange(-self.radius, self.radius + 1, device=x.device, dtype=torch.float32)
        # A sigma of 0 leaves the middle tap alone.
        weights = torch.exp(-0.5 * (taps / drawn[0].clamp(min=1e-6)) ** 2)
        weights = weights / weights.sum(-1, keepdim=True)
        radius = self.radius
        for axis, margins in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
            padded = torch.nn.functional.pad(x, margins, mode="reflect")
            shifted = (padded.narrow(axis, i, x.shape[axis]) for i in range(self.kernel_size))
            x = torch.stack([w[..., None] * part for w, part in zip(weights.unbind(-1), shifted, strict=True)]).sum(0)
        return x


@dataclass(frozen=True)
class Normalize(Point):
    """(x − mean) / std, one of each a channel or one for all."""

    mean: Sequence[float]
    std: Sequence[float]

    def draws(self, size: Size) -> tuple[Draw, ...]:
        require(len(self.mean) == len(self.std) > 0, "Normalize.std", "as many numbers as mean", self.std)
        require(min(self.std) > 0, "Normalize.std", "above 0", self.std)
        return ()

    def per_channel(self, channels: int) -> list[tuple[float, float]]:
        """(mean, std) of each channel."""
        require(len(self.mean) in (1, channels), "Normalize.mean", f"1 number or {channels}", self.mean)
        return list(zip(self.mean, self.std, strict=True)) * (channels // len(self.mean))

    def apply(self, x: Tensor, *drawn: Tensor) -> Tensor:
        numbers = torch.tensor(self.per_channel(x.shape[1]), device=x.device).T.reshape(2, 1, -1, 1, 1)
        return (x - numbers[0]) / numbers[1]


@dataclass(frozen=True)
class ColorJitter(Operation):
    """Brightness, contrast, saturation and hue in this order, all of them or none."""

    brightness: float | Interval = 0.0
    contrast: float | Interval = 0.0
    saturation: float | Interval = 0.0
    hue: float | Interval = 0.0
    p: float = 1.0

    def draws(self, size: Size) -> tuple[Draw, ...]:
        self.parts()
        return ()

    def parts(self) -> list[Point]:
        """Its operations, without those of amount 0."""
        amounts = self.brightness, self.contrast, self.saturation, self.hue
        kinds = Brightness, Contrast, Saturation, Hue
        return [kind(amount, self.p) for kind, amount in zip(kinds, amounts, strict=True) if amount != 0]
