"""Photo-like pictures out of a random generator: what the image data makers paint on.

Photographs have three things that decide what a JPEG costs to decode: detail at every scale (a spectrum near 1/f),
hard edges where one object hides another, and a little sensor grain. Each is here in the cheapest form numpy has, so
that a 512x512 picture takes milliseconds and a data set of tens of thousands is made in under a minute.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float32]
Picture = NDArray[np.uint8]


def static(rng: np.random.Generator, height: int, width: int) -> Field:
    """White noise in [-1, 1): raw random bytes, ten times cheaper than drawing floats."""
    raw = np.frombuffer(rng.bytes(height * width), np.uint8).reshape(height, width)
    noise: Field = raw.astype(np.float32)
    noise -= 128
    noise /= 128
    return noise


def fractal(rng: np.random.Generator, height: int, width: int, *, finest: int = 2, falloff: float = 0.55) -> Field:
    """Smooth noise summed over octaves, about within [-1, 1]; `finest` is the smallest detail in pixels.

    A larger `falloff` keeps more of the fine detail: 0.5 is the 1/f of photographs, 0.3 reads as soft light.
    """
    shrink = finest
    while min(height, width) // shrink > 8:
        shrink *= 2
    field = static(rng, -(-height // shrink) + 1, -(-width // shrink) + 1)
    weight, total = 1.0, 1.0
    while shrink > 1:
        shrink //= 2
        field = _doubled(field)[: -(-height // shrink) + 1, : -(-width // shrink) + 1]
        if shrink >= finest:
            weight *= falloff
            total += weight
            field += np.float32(weight) * static(rng, *field.shape)
    field *= 1.5 / total
    return field[:height, :width]


def _doubled(field: Field) -> Field:
    """Twice as many rows and columns, in-between values interpolated: (h, w) becomes (2h - 1, 2w - 1)."""
    height, width = field.shape
    out = np.empty((2 * height - 1, 2 * width - 1), np.float32)
    out[::2, ::2] = field
    np.add(field[:, 1:], field[:, :-1], out=out[::2, 1::2])
    out[::2, 1::2] *= 0.5
    np.add(out[2::2], out[:-2:2], out=out[1::2])
    out[1::2] *= 0.5
    return out


class Spot(NamedTuple):
    """A place in a picture: the window that holds it, and axes of its own, -1 to 1 across the thing placed there."""

    rows: slice
    cols: slice
    u: Field
    v: Field


def spot(row: float, col: float, radii: tuple[float, float], angle: float, height: int, width: int) -> Spot:
    """The spot around (row, col), cut off at the picture's border; `radii` are its half-sizes along its own axes."""
    reach = float(np.hypot(*radii))
    rows = slice(max(0, int(row - reach)), min(height, int(row + reach) + 2))
    cols = slice(max(0, int(col - reach)), min(width, int(col + reach) + 2))
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] - np.float32(row)
    x = np.arange(cols.start, cols.stop, dtype=np.float32)[None, :] - np.float32(col)
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return Spot(rows, cols, (x * cos + y * sin) / np.float32(radii[1]), (y * cos - x * sin) / np.float32(radii[0]))


def anywhere(rng: np.random.Generator, height: int, width: int, smallest: float, largest: float) -> Spot:
    """A spot somewhere in the picture, of a size between two shares of its shorter side, turned at random."""
    side = min(height, width)
    radii = (side * rng.uniform(smallest, largest) / 2, side * rng.uniform(smallest, largest) / 2)
    return spot(rng.uniform(0, height), rng.uniform(0, width), radii, rng.uniform(0, np.pi), height, width)


def scene(rng: np.random.Generator, height: int, width: int, *, things: int = 6) -> Field:
    """A photo-like scene, float planes (3, height, width) of about 0 to 255: rough ground, soft light, some things."""
    ground = fractal(rng, height, width, falloff=0.7)
    light = fractal(rng, height, width, finest=16, falloff=0.3)
    base = rng.uniform(80, 170) + rng.uniform(-35, 35, 3)
    roughness = rng.uniform(60, 110) * rng.uniform(0.8, 1.2, 3)
    tint = rng.uniform(-45, 45, 3)
    planes = np.empty((3, height, width), np.float32)
    for plane, level, rough, soft in zip(planes, base, roughness, tint, strict=True):
        np.multiply(ground, np.float32(rough), out=plane)
        plane += light * np.float32(soft)
        plane += np.float32(level)
    for _ in range(things):
        place = anywhere(rng, height, width, 0.1, 0.6)
        cover(planes, place, place.u**2 + place.v**2 < 1, rng.uniform(30, 220) + rng.uniform(-30, 30, 3))
    return planes


def cover(
    planes: Field, place: Spot, inside: NDArray[np.bool_], colour: NDArray[np.float64], solid: float = 0.6
) -> None:
    """Paint a thing over what is there; where it is not wholly `solid` the relief of the ground stays visible in it."""
    share = inside * np.float32(solid)
    for plane, level in zip(planes, colour, strict=True):
        window = plane[place.rows, place.cols]
        window += (np.float32(level) - window) * share


def developed(planes: Field, rng: np.random.Generator, *, grain: float = 10.0) -> Picture:
    """Float planes as the uint8 picture (height, width, 3) a camera would have saved, sensor grain included."""
    noise = static(rng, *planes.shape[1:]) * np.float32(grain)
    picture = np.empty((*planes.shape[1:], 3), np.uint8)
    for channel, plane in enumerate(planes):
        picture[:, :, channel] = np.clip(plane + noise, 0, 255)
    return picture
