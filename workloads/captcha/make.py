"""Makes the data of `captcha`: photos with a puzzle piece cut out of them and lying at the left edge, as JPEG.

    python -m workloads.captcha.make --size small --out data/captcha

An item is a sheet of pictures with one CSV of where piece and notch are (the left edge of each, in pixels).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from workloads.making import Recipe, main
from workloads.pictures import Field, Picture, developed, scene

RECIPES = {
    "tiny": Recipe(items=8, bytes_each=20_000, facts={"sheet": 8, "val": 2, "height": 40, "width": 80}),
    "small": Recipe(items=60, bytes_each=125_000, facts={"sheet": 20, "val": 6, "height": 80, "width": 160}),
    "full": Recipe(items=6_400, bytes_each=400_000, facts={"sheet": 20, "val": 128, "height": 160, "width": 320}),
}


def paths(recipe: Recipe, index: int) -> Sequence[str]:
    sheet = range(recipe.facts["sheet"])
    return [*(f"images/{index:04}/{number:03}.jpg" for number in sheet), f"labels/{index:04}.csv"]


def make(recipe: Recipe, rng: np.random.Generator, index: int) -> Sequence[bytes]:
    pictures, lines = [], ["file,piece_x,notch_x"]
    for number in range(recipe.facts["sheet"]):
        picture, piece_x, notch_x = puzzle(rng, recipe.facts["height"], recipe.facts["width"])
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=90)
        pictures.append(file.getvalue())
        lines.append(f"{index:04}/{number:03}.jpg,{piece_x},{notch_x}")
    return [*pictures, "\n".join(lines).encode() + b"\n"]


def puzzle(rng: np.random.Generator, height: int, width: int) -> tuple[Picture, int, int]:
    """One picture, and the columns where the piece lies and where it belongs."""
    planes = scene(rng, height, width)
    shape, rim = jigsaw(round(0.28 * height), int(rng.integers(4)))
    side = len(shape)
    row = int(rng.integers(0, height - side))
    piece_x = int(rng.integers(0, width // 12))
    notch_x = int(rng.integers(piece_x + side + width // 16, width - side))
    notch = planes[:, row : row + side, notch_x : notch_x + side]
    cut = notch.copy()
    notch *= 1 - np.float32(rng.uniform(0.4, 0.6)) * shape
    piece = planes[:, row : row + side, piece_x : piece_x + side]
    piece += (cut - piece) * shape
    piece += (np.float32(235) - piece) * rim
    return developed(planes, rng), piece_x, notch_x


@lru_cache
def jigsaw(side: int, turns: int) -> tuple[Field, NDArray[np.float32]]:
    """A square with a knob on one edge and a bay in the next, and its rim: 1 inside, 0 outside, quarter-turned."""
    y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
    shape = np.maximum(np.abs(x), np.abs(y)) < 0.68
    shape |= np.hypot(x, y + 0.75) < 0.25
    shape &= np.hypot(x - 0.6, y) > 0.25
    shape = np.rot90(shape, turns)
    inner = shape.copy()
    for axis in (0, 1):
        inner &= np.roll(shape, 1, axis) & np.roll(shape, -1, axis)
    return shape.astype(np.float32), (shape & ~inner).astype(np.float32)


if __name__ == "__main__":
    main("captcha", RECIPES, paths, make)
