"""Makes the data of `segment`: photo-like JPEGs of things lying on rough ground, with a PNG mask of what lies where.

python -m workloads.segment.make --size small --out data/segment
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from workloads.making import Recipe, main
from workloads.pictures import Picture, anywhere, cover, developed, scene

CLASSES = ("ground", "coin", "crate", "flag")
# A kind has a surface of its own and, loosely, a usual colour. The scene's plain things are ground, of whatever colour.
USUAL_COLOUR = {1: (190, 150, 70), 2: (120, 80, 50), 3: (60, 90, 180)}

RECIPES = {
    "tiny": Recipe(items=40, bytes_each=4_500, facts={"side": 96, "val": 8, "classes": CLASSES}),
    "small": Recipe(items=480, bytes_each=11_000, facts={"side": 160, "val": 80, "classes": CLASSES}),
    "full": Recipe(items=20_000, bytes_each=95_000, facts={"side": 512, "val": 560, "classes": CLASSES}),
}


def paths(recipe: Recipe, index: int) -> Sequence[str]:
    return f"images/{index:06}.jpg", f"masks/{index:06}.png"


def make(recipe: Recipe, rng: np.random.Generator, index: int) -> Sequence[bytes]:
    picture, mask = paint(rng, recipe.facts["side"])
    return encoded(picture, "JPEG", quality=90), encoded(mask, "PNG")


def paint(rng: np.random.Generator, side: int) -> tuple[Picture, NDArray[np.uint8]]:
    """One picture and its mask of class numbers."""
    planes = scene(rng, side, side)
    mask = np.zeros((side, side), np.uint8)
    for _ in range(rng.integers(2, 6)):
        kind = int(rng.integers(1, len(CLASSES)))
        place = anywhere(rng, side, side, 0.25, 0.6)
        u, v = place.u, place.v
        if kind == 1:
            inside, surface = u * u + v * v < 0.8, np.cos(14 * np.hypot(u, v))
        elif kind == 2:
            inside, surface = np.maximum(np.abs(u), np.abs(v)) < 0.75, np.cos(22 * u)
        else:
            inside, surface = (v > -0.7) & (v < 0.8 - 1.9 * np.abs(u)), np.cos(14 * u) * np.cos(14 * v)
        cover(planes, place, inside, USUAL_COLOUR[kind] + rng.uniform(-45, 45, 3), solid=0.8)
        planes[:, place.rows, place.cols] += np.float32(rng.uniform(20, 40)) * surface * inside
        mask[place.rows, place.cols][inside] = kind
    return developed(planes, rng), mask


def encoded(pixels: NDArray[np.uint8], kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


if __name__ == "__main__":
    main("segment", RECIPES, paths, make)
