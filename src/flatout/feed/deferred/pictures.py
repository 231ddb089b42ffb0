"""Pillow's pictures, turned and mirrored later. A `LaterImage` is one: whoever asks for its pixels gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from flatout.feed.deferred.program import MOVES
from flatout.feed.deferred.value import Value, is_noting, noting

_STRAIGHT = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
_transform, _transpose, _array = Image.Image.transform, Image.Image.transpose, np.array


class LaterImage(Image.Image):
    """What `make` makes: `picture`, each pixel from where `matrix` says, and `colour` for what lies outside."""

    def __init__(
        self,
        picture: Image.Image,
        move: str,
        matrix: tuple[float, ...],
        colour: tuple[float, ...],
        make: Callable[[], Image.Image],
    ) -> None:
        super().__init__()
        self._core: Any = None
        self._make = make
        self._mode, self._size = picture.mode, picture.size
        self.picture, self.move, self.matrix, self.colour = picture, move, matrix, colour

    @property
    def _im(self) -> Any:  # where all of Pillow looks for the pixels
        if self._core is None:
            with noting(False):
                self._core = self._make().im
        return self._core

    @_im.setter
    def _im(self, core: Any) -> None:
        self._core = core

    @property
    def only_noted(self) -> bool:
        """Whether nobody has seen its pixels, or changed them."""
        return self._core is None

    def copy(self) -> Image.Image:
        """Another one, as yet only noted if this one is."""
        if not self.only_noted:
            return super().copy()
        return LaterImage(self.picture, self.move, self.matrix, self.colour, self._make)


def transform(
    self: Any, size: Any, method: Any, data: Any = None, resample: Any = 0, fill: Any = 1, fillcolor: Any = None
) -> Any:
    """`Image.transform`, to which turning comes down in the end."""

    def make() -> Image.Image:
        return _transform(self, size, method, data, resample, fill, fillcolor)

    move = {Image.Resampling.NEAREST: "nearest", Image.Resampling.BILINEAR: "bilinear"}.get(resample)
    affine = method == Image.Transform.AFFINE and tuple(size) == self.size and len(data or ()) == 6
    colour = (0.0,) if fillcolor is None else _numbers_in(fillcolor, len(self.getbands()))
    if not (is_noting() and can_be_noted(self) and affine and move and colour):
        return make()
    before = _as_noted(self)
    if before.move not in ("same", "swap"):
        return make()  # between pixels twice is not the same as once
    return LaterImage(before.picture, move, _after(before.matrix, tuple(map(float, data))), colour, make)


def transpose(self: Any, method: Any) -> Any:
    """`Image.transpose`, where height and width stay."""

    def make() -> Image.Image:
        return _transpose(self, method)

    width, height = map(float, self.size)
    swaps = {
        Image.Transpose.FLIP_LEFT_RIGHT: (-1.0, 0.0, width, 0.0, 1.0, 0.0),
        Image.Transpose.FLIP_TOP_BOTTOM: (1.0, 0.0, 0.0, 0.0, -1.0, height),
        Image.Transpose.ROTATE_180: (-1.0, 0.0, width, 0.0, -1.0, height),
    }
    if not (is_noting() and can_be_noted(self) and method in swaps):
        return make()
    before = _as_noted(self)
    move = max(before.move, "swap", key=MOVES.index)
    return LaterImage(before.picture, move, _after(before.matrix, swaps[method]), before.colour, make)


def pixels(image: Image.Image) -> Value:
    """What `np.array(image)` will be."""
    noted = _as_noted(image)
    shape = (image.height, image.width, *((3,) if image.mode == "RGB" else ()))
    channels = shape[2] if len(shape) == 3 else 1
    colour = noted.colour * channels if len(noted.colour) == 1 else noted.colour
    decoded = Value(op="pixels", shape=shape, dtype="uint8", call=lambda: None, picture=noted.picture)
    return decoded.then("warp", lambda _: _array(image), static=(noted.move,), numbers=(*noted.matrix, *colour))


def can_be_noted(image: Any) -> bool:
    """Whether it is a picture of a kind that cards are taught here."""
    return isinstance(image, Image.Image) and image.mode in ("L", "RGB") and min(image.size) > 0


def _as_noted(image: Any) -> LaterImage:
    """What has been noted of a picture; of one that is there, nothing but its pixels."""
    if isinstance(image, LaterImage) and image.only_noted:
        return image
    image.load()  # its file may be closed by the time they are needed
    return LaterImage(image, "same", _STRAIGHT, (0.0,), lambda: image)


def _numbers_in(colour: Any, channels: int) -> tuple[float, ...]:
    """A number for each channel, or none: Pillow has words for colours too, and numbers that are three in one."""
    parts = colour if isinstance(colour, tuple | list) else (colour,)
    known = len(parts) == channels and all(isinstance(part, int | float) for part in parts)
    return tuple(map(float, parts)) if known else ()


def _after(first: tuple[float, ...], then: tuple[float, ...]) -> tuple[float, ...]:
    """Where pixels come from in the end: `then` says from where in the picture that `first` has made."""
    a, b, c, d, e, f = first
    p, q, r, s, t, u = then
    return a * p + b * s, a * q + b * t, a * r + b * u + c, d * p + e * s, d * q + e * t, d * r + e * u + f
