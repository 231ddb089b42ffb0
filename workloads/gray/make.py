"""Makes the data of `gray`: grayscale PNG files of worn stamps, a folder for each of eight shapes."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw

from workloads.making import Recipe, main
from workloads.pictures import fractal, static

PIXELS = 128
SHAPES = ("arrow", "bar", "cross", "disc", "frame", "ring", "square", "triangle")


def recipe(train: int, val: int) -> Recipe:
    facts = {"train": train, "val": val, "pixels": PIXELS, "classes": list(SHAPES)}
    return Recipe(items=train + val, bytes_each=16_000, facts=facts)


RECIPES = {"tiny": recipe(192, 64), "small": recipe(2_400, 400), "full": recipe(40_000, 4_000)}


def paths(recipe: Recipe, index: int) -> list[str]:
    split = "train" if index < recipe.facts["train"] else "val"
    return [f"{split}/{SHAPES[index % len(SHAPES)]}/{index:06d}.png"]


def make(recipe: Recipe, rng: np.random.Generator, index: int) -> list[bytes]:
    """A shape of random place, size, turn and tone, stamped into a rough surface."""
    shape = SHAPES[index % len(SHAPES)]
    surface = 0.5 + 0.3 * fractal(rng, PIXELS, PIXELS)
    wear = 0.7 + 0.3 * fractal(rng, PIXELS, PIXELS, falloff=0.7)
    grain = 0.06 * static(rng, PIXELS, PIXELS)
    depth = rng.uniform(0.25, 0.5) * (1 if rng.random() < 0.5 else -1)
    shades = surface + depth * draw(shape, rng) * wear + grain
    file = io.BytesIO()
    Image.fromarray((np.clip(shades, 0, 1) * 255).astype(np.uint8)).save(file, "PNG")
    return [file.getvalue()]


def draw(shape: str, rng: np.random.Generator) -> np.ndarray:
    """The shape as a mask in 0…1."""
    radius = rng.uniform(18, 40)
    x, y = rng.uniform(radius, PIXELS - radius, 2)
    turn = rng.uniform(0, 2 * math.pi)
    mask = Image.new("L", (PIXELS, PIXELS))
    pen = ImageDraw.Draw(mask)
    if shape in ("disc", "ring"):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        if shape == "ring":
            hole = 0.6 * radius
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    else:
        for outline, ink in OUTLINES[shape]:
            corners = np.array(outline) * radius
            turned = corners @ np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
            pen.polygon([(x + dx, y + dy) for dx, dy in turned], fill=ink)
    return np.asarray(mask, np.float32) / 255


def box(half_width: float, half_height: float) -> list[tuple[float, float]]:
    w, h = half_width, half_height
    return [(-w, -h), (w, -h), (w, h), (-w, h)]


# Each shape as polygons around (0, 0) with radius 1, painted in order: 255 is the stamp, 0 takes it away again.
OUTLINES: dict[str, list[tuple[list[tuple[float, float]], int]]] = {
    "arrow": [([(0, -1), (0.8, 0.1), (0.3, 0.1), (0.3, 1), (-0.3, 1), (-0.3, 0.1), (-0.8, 0.1)], 255)],
    "bar": [(box(1, 0.22), 255)],
    "cross": [(box(1, 0.25), 255), (box(0.25, 1), 255)],
    "frame": [(box(0.8, 0.8), 255), (box(0.5, 0.5), 0)],
    "square": [(box(0.75, 0.75), 255)],
    "triangle": [([(0, -1), (0.87, 0.5), (-0.87, 0.5)], 255)],
}

if __name__ == "__main__":
    main("gray", RECIPES, paths, make)
