"""Pillow's images, rotated and mirrored later. A `LazyImage` is an image: code that reads its pixels gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from flatout.feed.deferred.expression import Expression, is_recording, materializing, recording_transforms
from flatout.feed.deferred.program import MOVES

_IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
_MOVE_OF = {Image.Resampling.NEAREST: "nearest", Image.Resampling.BILINEAR: "bilinear"}
_transform, _transpose, _array = Image.Image.transform, Image.Image.transpose, np.array
ImageCall = Callable[[Image.Image], Image.Image]


class LazyImage(Image.Image):
    """`picture`, each pixel from where `matrix` says, `colour` for what lies outside; `calls` make it with Pillow."""

    def __init__(
        self,
        picture: Image.Image,
        move: str = "same",
        matrix: tuple[float, ...] = _IDENTITY,
        colour: tuple[float, ...] = (0.0,),
        calls: tuple[ImageCall, ...] = (),
    ) -> None:
        super().__init__()
        self._core: Any = None
        self._mode, self._size, self.info = picture.mode, picture.size, picture.info.copy()
        self.picture, self.move, self.matrix, self.colour, self.calls = picture, move, matrix, colour, calls

    @property
    def _im(self) -> Any:  # Pillow reads and writes all pixels through this attribute
        with materializing:
            if self._core is None:
                self._core = self.compute().im
            return self._core

    @_im.setter
    def _im(self, core: Any) -> None:
        self._core = core

    @property
    def is_lazy(self) -> bool:
        """Whether nobody has seen or changed its pixels."""
        return self._core is None

    def compute(self) -> Image.Image:
        """An image like it, in memory of its own."""
        with recording_transforms(False):
            image = self.picture if self.calls else self.picture.copy()
            for call in self.calls:
                image = call(image)
            return image

    def copy(self) -> Image.Image:
        """Another image, lazy if this one is."""
        return _with_info_of(self, self.twin()) if self.is_lazy else super().copy()

    def twin(self) -> LazyImage:
        """A lazy image of the same pixels."""
        return LazyImage(self.picture, self.move, self.matrix, self.colour, self.calls)


def transform(self: Any, size: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `Image.transform`, which `rotate` calls in the end."""
    recordable = is_recording() and can_be_lazy(self) and method == Image.Transform.AFFINE
    if not recordable or tuple(size) != self.size:
        return _transform(self, size, method, *args, **kwargs)
    given = dict(zip(("data", "resample", "fill", "fillcolor"), args, strict=False)) | kwargs
    data, colour = given.get("data"), given.get("fillcolor")
    resample = given.get("resample", Image.Resampling.NEAREST)
    colours = (0.0,) if colour is None else _channel_values(colour, len(self.getbands()))
    before = _as_lazy(self)
    known = resample in _MOVE_OF and bool(colours) and before.move in ("same", "swap")  # one interpolation, not two
    if not known or data is None or len(data) != 6:
        return _transform(self, size, method, *args, **kwargs)
    matrix = tuple(map(float, data))

    def call(picture: Image.Image) -> Image.Image:
        return _transform(picture, size, method, matrix, resample, fillcolor=colour)

    combined = _compose(before.matrix, matrix)
    lazy = LazyImage(before.picture, _MOVE_OF[resample], combined, colours, (*before.calls, call))
    return _with_info_of(self, lazy)


def transpose(self: Any, method: Any) -> Any:
    """Stands for `Image.transpose`, where height and width stay."""
    if not is_recording() or not can_be_lazy(self):
        return _transpose(self, method)
    width, height = map(float, self.size)
    swaps = {
        Image.Transpose.FLIP_LEFT_RIGHT: (-1.0, 0.0, width, 0.0, 1.0, 0.0),
        Image.Transpose.FLIP_TOP_BOTTOM: (1.0, 0.0, 0.0, 0.0, -1.0, height),
        Image.Transpose.ROTATE_180: (-1.0, 0.0, width, 0.0, -1.0, height),
    }
    if method not in swaps:
        return _transpose(self, method)
    before = _as_lazy(self)
    move = max(before.move, "swap", key=MOVES.index)
    calls = (*before.calls, lambda picture: _transpose(picture, method))
    lazy = LazyImage(before.picture, move, _compose(before.matrix, swaps[method]), before.colour, calls)
    return _with_info_of(self, lazy)


def pixels_of_image(image: Image.Image) -> Expression:
    """What `np.array(image)` is at this moment."""
    lazy = _as_lazy(image)
    shape: tuple[int, ...] = (image.height, image.width)
    colour = lazy.colour
    if image.mode == "RGB":
        shape = (*shape, 3)
        colour = colour * 3 if len(colour) == 1 else colour
    twin = lazy.twin()  # the script may change `lazy` itself
    decoded = Expression(op="pixels", shape=shape, dtype="uint8", call=lambda: None, picture=lazy.picture)
    numbers = (*lazy.matrix, *colour)
    return decoded.then("warp", lambda _: _array(twin.compute()), static=(lazy.move,), numbers=numbers)


def can_be_lazy(image: Any) -> bool:
    """Whether it is an image of a mode that programs know."""
    return isinstance(image, Image.Image) and image.mode in ("L", "RGB") and min(image.size) > 0


def _as_lazy(image: Any) -> LazyImage:
    """The lazy image; of a real one a copy of its pixels as they are now, for they may be changed."""
    return image if isinstance(image, LazyImage) and image.is_lazy else LazyImage(image.copy())


def _with_info_of(image: Image.Image, lazy: LazyImage) -> LazyImage:
    lazy.info = image.info.copy()
    return lazy


def _channel_values(colour: Any, channels: int) -> tuple[float, ...]:
    """A number for each channel, or none: Pillow also knows colour names, and one number for three channels."""
    parts = colour if isinstance(colour, tuple | list) else (colour,)
    if len(parts) != channels or not all(isinstance(part, int | float) and 0 <= part <= 255 for part in parts):
        return ()
    return tuple(float(int(part)) for part in parts)


def _compose(first: tuple[float, ...], then: tuple[float, ...]) -> tuple[float, ...]:
    """Where pixels come from in the end: `then` says from where in the image that `first` makes."""
    a, b, c, d, e, f = first
    p, q, r, s, t, u = then
    return a * p + b * s, a * q + b * t, a * r + b * u + c, d * p + e * s, d * q + e * t, d * r + e * u + f
