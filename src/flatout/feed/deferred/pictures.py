"""Pillow's pictures, turned and mirrored later. A `LaterImage` is one: whoever asks for its pixels gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from flatout.feed.deferred.program import MOVES
from flatout.feed.deferred.value import Value, is_noting, making, noting

_STRAIGHT = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
_transform, _transpose, _array = Image.Image.transform, Image.Image.transpose, np.array
Made = Callable[[Image.Image], Image.Image]


class LaterImage(Image.Image):
    """`picture`, each pixel from where `matrix` says, and `colour` for what lies outside; made here by `calls`."""

    def __init__(
        self,
        picture: Image.Image,
        move: str = "same",
        matrix: tuple[float, ...] = _STRAIGHT,
        colour: tuple[float, ...] = (0.0,),
        calls: tuple[Made, ...] = (),
    ) -> None:
        super().__init__()
        self._core: Any = None
        self._mode, self._size, self.info = picture.mode, picture.size, picture.info.copy()
        self.picture, self.move, self.matrix, self.colour, self.calls = picture, move, matrix, colour, calls

    @property
    def _im(self) -> Any:  # where all of Pillow looks for the pixels
        with making:
            if self._core is None:
                self._core = self.make().im
            return self._core

    @_im.setter
    def _im(self, core: Any) -> None:
        self._core = core

    def make(self) -> Image.Image:
        """A picture like it, in memory of its own."""
        with noting(False):
            made = self.picture.copy() if not self.calls else self.picture
            for call in self.calls:
                made = call(made)
            return made

    @property
    def only_noted(self) -> bool:
        """Whether nobody has seen its pixels, or changed them."""
        return self._core is None

    def copy(self) -> Image.Image:
        """Another one, as yet only noted if this one is."""
        if not self.only_noted:
            return super().copy()
        return _with_info_of(self, LaterImage(self.picture, self.move, self.matrix, self.colour, self.calls))


def transform(self: Any, size: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """`Image.transform`, to which turning comes down in the end."""
    if not is_noting() or not can_be_noted(self) or method != Image.Transform.AFFINE or tuple(size) != self.size:
        return _transform(self, size, method, *args, **kwargs)
    given = dict(zip(("data", "resample", "fill", "fillcolor"), args, strict=False)) | kwargs
    data, colour = given.get("data"), given.get("fillcolor")
    moves = {Image.Resampling.NEAREST: "nearest", Image.Resampling.BILINEAR: "bilinear"}
    move = moves.get(given.get("resample", Image.Resampling.NEAREST))
    colours = (0.0,) if colour is None else _numbers_in(colour, len(self.getbands()))
    before = _as_noted(self)
    if data is None or len(data) != 6 or move is None or not colours or before.move not in ("same", "swap"):
        return _transform(self, size, method, *args, **kwargs)  # between pixels twice is not the same as once
    matrix = tuple(map(float, data))

    def call(picture: Image.Image) -> Image.Image:
        return _transform(picture, size, method, matrix, moves_back[move], fillcolor=colour)

    moves_back = {name: resample for resample, name in moves.items()}
    later = LaterImage(before.picture, move, _after(before.matrix, matrix), colours, (*before.calls, call))
    return _with_info_of(self, later)


def transpose(self: Any, method: Any) -> Any:
    """`Image.transpose`, where height and width stay."""
    if not is_noting() or not can_be_noted(self):
        return _transpose(self, method)
    width, height = map(float, self.size)
    swaps = {
        Image.Transpose.FLIP_LEFT_RIGHT: (-1.0, 0.0, width, 0.0, 1.0, 0.0),
        Image.Transpose.FLIP_TOP_BOTTOM: (1.0, 0.0, 0.0, 0.0, -1.0, height),
        Image.Transpose.ROTATE_180: (-1.0, 0.0, width, 0.0, -1.0, height),
    }
    if method not in swaps:
        return _transpose(self, method)
    before = _as_noted(self)
    move = max(before.move, "swap", key=MOVES.index)
    calls = (*before.calls, lambda picture: _transpose(picture, method))
    later = LaterImage(before.picture, move, _after(before.matrix, swaps[method]), before.colour, calls)
    return _with_info_of(self, later)


def pixels(image: Image.Image) -> Value:
    """What `np.array(image)` is now."""
    noted = _as_noted(image)
    shape = (image.height, image.width, *((3,) if image.mode == "RGB" else ()))
    channels = shape[2] if len(shape) == 3 else 1
    colour = noted.colour * channels if len(noted.colour) == 1 else noted.colour
    again = LaterImage(noted.picture, noted.move, noted.matrix, noted.colour, noted.calls)  # which nobody changes
    decoded = Value(op="pixels", shape=shape, dtype="uint8", call=lambda: None, picture=noted.picture)
    return decoded.then("warp", lambda _: _array(again.make()), static=(noted.move,), numbers=(*noted.matrix, *colour))


def can_be_noted(image: Any) -> bool:
    """Whether it is a picture of a kind that cards are taught here."""
    return isinstance(image, Image.Image) and image.mode in ("L", "RGB") and min(image.size) > 0


def _as_noted(image: Any) -> LaterImage:
    """What has been noted of a picture; of one that is there, its pixels as they are now: they may be changed."""
    return image if isinstance(image, LaterImage) and image.only_noted else LaterImage(image.copy())


def _with_info_of(image: Image.Image, later: LaterImage) -> LaterImage:
    later.info = image.info.copy()
    return later


def _numbers_in(colour: Any, channels: int) -> tuple[float, ...]:
    """A number for each channel, or none: Pillow has words for colours too, and numbers that are three in one."""
    parts = colour if isinstance(colour, tuple | list) else (colour,)
    known = len(parts) == channels and all(isinstance(part, int | float) and 0 <= part <= 255 for part in parts)
    return tuple(float(int(part)) for part in parts) if known else ()


def _after(first: tuple[float, ...], then: tuple[float, ...]) -> tuple[float, ...]:
    """Where pixels come from in the end: `then` says from where in the picture that `first` has made."""
    a, b, c, d, e, f = first
    p, q, r, s, t, u = then
    return a * p + b * s, a * q + b * t, a * r + b * u + c, d * p + e * s, d * q + e * t, d * r + e * u + f
