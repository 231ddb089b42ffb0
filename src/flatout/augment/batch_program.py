"""From a list of operations to plain data for one input size, the numbers it draws, and what is then
done in PyTorch.

    operations ──► BatchProgram ──► draw(index, epoch, seed) ──► a row of float32 a sample ──► apply
                   table of draws, geometry codes,               the drawn numbers, the inverse matrix, the source box
                   point operations and their columns

The row is all that `apply` and the kernel need to know about a sample. It is computed in float64 and rounded
once, from integers, so CPU and GPU agree on it. `apply` is what the kernel must do, and what runs where there
is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import operations as ops
from .operations import BoxDraw, Draw, Geometry, Operation, Point, Size, philox, require, uniform

ATTEMPTS = 10  # of a box, as in torchvision
TABLE_WIDTH = 18
_TURNS = (ops.Rotate, ops.Affine)
_DERIVED = (*(f"matrix.{i}" for i in range(6)), "box.left", "box.top", "box.right", "box.bottom")


class PlacedOperation(NamedTuple):
    """An operation at its place; the random number of place `gate` decides whether a sample gets it."""

    slot: int
    gate: int
    operation: Operation


class Fold(NamedTuple):
    """One geometric operation as numbers: the size before, the size after, and the first of its draws
    in the table."""

    kind: int
    entry: int
    height: int
    width: int
    new_height: int
    new_width: int
    narrows: int  # what follows must not see the source outside of this window


@dataclass(frozen=True)
class BatchProgram:
    """What is to be done to pictures of one size."""

    size: Size
    out_size: Size
    columns: tuple[str, ...]
    table: tuple[tuple[float, ...], ...]
    folds: tuple[Fold, ...]
    points: tuple[tuple[Point, range], ...]  # with the columns of a row that it takes
    # "pixel": the nearest one; "bilinear"; "tent": bilinear, widened where the picture shrinks.
    sampling: str
    filled: bool  # the source can be left: those places take the fill

    @property
    def matrix_column(self) -> int:
        """Where a row's matrix starts; the box follows it."""
        return len(self.columns) - len(_DERIVED)

    @staticmethod
    def build(steps: Sequence[PlacedOperation], size: Size, channels: int, *, nearest: bool = False) -> BatchProgram:
        """Lay out the draws and fold the sizes for pictures of `size`."""
        columns: list[str] = []
        table: list[tuple[float, ...]] = []
        folds: list[Fold] = []
        points: list[tuple[Point, range]] = []
        now, antialias = size, False
        for place, step in enumerate(steps):
            operation, entry, column = step.operation, len(table), len(columns)
            if isinstance(operation, ops.Resize) and operation.out_size(now) == now:
                continue
            drawn = operation.draws(now)
            names: tuple[str, ...] = ("top", "left", "height", "width")
            if not isinstance(drawn, BoxDraw):
                names = tuple(one.name for one in drawn)
            columns += [f"{step.slot}.{type(operation).__name__}.{name}" for name in names]
            table += _rows(step, column, drawn)
            if isinstance(operation, Geometry):
                after = operation.out_size(now)
                if isinstance(operation, (ops.Resize, ops.ResizedCrop)):
                    antialias |= operation.antialias and (now[0] > after[0] or now[1] > after[1])
                folds.append(Fold(operation.kind, entry, *now, *after, _narrows(steps, place)))
                now = after
            elif isinstance(operation, Point):
                if operation.colour:
                    require(channels in (1, 3), f"channels for {type(operation).__name__}", "1 or 3", channels)
                if not (operation.colour and channels == 1):
                    points.append((operation, range(column, len(columns))))
        sampling = "tent" if antialias else "bilinear"
        if nearest or all(fold.kind <= ops.Crop.kind for fold in folds):
            sampling = "pixel"
        return BatchProgram(
            size=size,
            out_size=now,
            columns=(*columns, *_DERIVED),
            table=tuple(table),
            folds=tuple(folds),
            points=tuple(points),
            sampling=sampling,
            filled=any(isinstance(step.operation, _TURNS) or _padding(step) for step in steps),
        )


def steps(operations: Sequence[Operation]) -> tuple[PlacedOperation, ...]:
    """Number the operations, take ColorJitter apart, and refuse an order that cannot be folded into
    one pass."""
    numbered: list[PlacedOperation] = []
    for operation in operations:
        require(isinstance(operation, Operation), "operations", "a list of augment operations", operation)
        parts: list[Operation] = [operation]
        if isinstance(operation, ops.ColorJitter):
            parts = [*operation.parts()]
        gate = len(numbered)
        numbered += [PlacedOperation(gate + i, gate, part) for i, part in enumerate(parts)]
    seen: list[Operation] = []
    for _, _, operation in numbered:
        name = type(operation).__name__
        # Flips and point operations may change places.
        if isinstance(operation, Geometry) and not isinstance(operation, ops.HFlip) and seen:
            raise ValueError(f"{name} must stand before {type(seen[0]).__name__}: geometry is done first, in one go")
        if isinstance(operation, Point):
            if not isinstance(operation, ops.Erase) and any(isinstance(o, ops.Normalize) for o in seen):
                raise ValueError(f"{name} must stand before Normalize: it takes values from 0 to 1")
            seen.append(operation)
    turns = [i for i, step in enumerate(numbered) if isinstance(step.operation, _TURNS)]
    for step in numbered[min(turns, default=0) : max(turns, default=0)]:
        if isinstance(step.operation, (ops.Crop, ops.ResizedCrop)):
            name = type(step.operation).__name__
            raise ValueError(f"{name} must not stand between two of Rotate and Affine: put it before or after both")
    return tuple(numbered)


def _narrows(steps: Sequence[PlacedOperation], place: int) -> int:
    """Whether a window hides the rest of the source: only if what follows interpolates or leaves the
    window."""
    before, operation, after = steps[:place], steps[place].operation, steps[place + 1 :]
    if any(isinstance(step.operation, _TURNS) for step in before):
        return 0  # a turned window is no box
    resamples = (ops.Resize, ops.ResizedCrop, *_TURNS)
    later = any(isinstance(step.operation, resamples) or _padding(step) for step in after)
    return int(isinstance(operation, ops.ResizedCrop) or (isinstance(operation, ops.Crop) and later))


def _padding(step: PlacedOperation) -> int:
    return getattr(step.operation, "padding", 0)


def _rows(step: PlacedOperation, column: int, drawn: tuple[Draw, ...] | BoxDraw) -> Iterator[tuple[float, ...]]:
    """The table's rows for one operation: is it a box, slot, gate, word, column, p; then the numbers
    of the draw."""
    p = step.operation.probability
    if isinstance(drawn, BoxDraw):
        ranges = [_single(low, high - low) for low, high in (drawn.area, drawn.log_ratio)]
        numbers = (*ranges[0], *ranges[1], *drawn.limit, *drawn.within, *drawn.fallback)
        yield _padded(1, step.slot, step.gate, 0, column, p, *numbers)
    else:
        for i, (_, low, span, neutral, whole) in enumerate(drawn):
            yield _padded(0, step.slot, step.gate, i + 1, column + i, p, *_single(low, span), neutral, whole)


def _single(*numbers: float) -> list[float]:
    """Rounded to float32: so `low + span·u` is rounded just once in float64, with a fused
    multiply-add or without."""
    return [float(np.float32(number)) for number in numbers]


def _padded(*numbers: float) -> tuple[float, ...]:
    return tuple(map(float, numbers)) + (0.0,) * (TABLE_WIDTH - len(numbers))


def draw(program: BatchProgram, index: Tensor, epoch: int, seed: int) -> Tensor:
    """One row a sample: its numbers, its matrix, its box."""

    def words(slot: float, block: int) -> list[Tensor]:
        return [uniform(w) for w in philox(index, (int(slot) << 8 | block) << 32 | epoch, seed)]

    numbers: list[Tensor] = []
    for is_box, slot, gate, word, _, p, *rest in program.table:
        on = words(gate, 0)[0] < p
        if is_box:
            numbers += _draw_box(on, [words(slot, 1 + attempt) for attempt in range(ATTEMPTS)], rest)
        else:
            low, span, neutral, whole = rest[:4]
            number = low + span * words(slot, int(word) // 4)[int(word) % 4]
            if whole:
                number = number.floor()
            numbers.append(torch.where(on, number, neutral))
    nothing = torch.zeros(len(index), dtype=torch.float64, device=index.device)
    return torch.stack([*numbers, *_fold(program, numbers, nothing)], 1).float()


def _draw_box(on: Tensor, attempts: list[list[Tensor]], numbers: list[float]) -> list[Tensor]:
    """Top, left, height and width of the first attempt that fits."""
    area, area_span, ratio, ratio_span, most_height, most_width, within_height, within_width, *fallback = numbers
    box = [torch.full_like(on, value, dtype=torch.float64) for value in fallback]
    for u in attempts:
        size, shape = area + area_span * u[0], torch.exp(ratio + ratio_span * u[1])
        height, width = ((size / shape).sqrt() + 0.5).floor(), ((size * shape).sqrt() + 0.5).floor()
        top, left = (u[2] * (within_height - height + 1)).floor(), (u[3] * (within_width - width + 1)).floor()
        fits = on & (height >= 1) & (width >= 1) & (height <= most_height) & (width <= most_width)
        box = [torch.where(fits, new, old) for new, old in zip((top, left, height, width), box, strict=True)]
        on = on & ~fits
    return box


def _fold(program: BatchProgram, numbers: list[Tensor], nothing: Tensor) -> list[Tensor]:
    """The matrix from output to source, row by row, and the box of the source that may be seen."""
    a, b, c, d, e, f = nothing + 1, nothing, nothing, nothing, nothing + 1, nothing
    left, top, right, bottom = nothing, nothing, nothing + program.size[1], nothing + program.size[0]
    for fold in program.folds:
        first = program.table[fold.entry][4] if fold.entry < len(program.table) else len(numbers)
        drawn = numbers[int(first) :]
        p, q, r, s, t, u = _one_fold(fold, drawn, nothing)
        a, b, c = a * p + b * s, a * q + b * t, a * r + b * u + c
        d, e, f = d * p + e * s, d * q + e * t, d * r + e * u + f
        if fold.narrows:
            across, down = (c, c + a * fold.new_width), (f, f + e * fold.new_height)
            left, right = torch.maximum(left, torch.minimum(*across)), torch.minimum(right, torch.maximum(*across))
            top, bottom = torch.maximum(top, torch.minimum(*down)), torch.minimum(bottom, torch.maximum(*down))
    return [a, b, c, d, e, f, *_pixel_box(left, right, top, bottom)]


def _one_fold(fold: Fold, drawn: list[Tensor], nothing: Tensor) -> tuple[Tensor, ...]:
    """The matrix of one operation: x = p·x' + q·y' + r, y = s·x' + t·y' + u."""
    one, width, height = nothing + 1, nothing + fold.width, nothing + fold.height
    if fold.kind == ops.HFlip.kind:
        return 1 - 2 * drawn[0], nothing, drawn[0] * width, nothing, one, nothing
    if fold.kind == ops.VFlip.kind:
        return one, nothing, nothing, nothing, 1 - 2 * drawn[0], drawn[0] * height
    if fold.kind == ops.Crop.kind:
        return one, nothing, drawn[1], nothing, one, drawn[0]
    if fold.kind == ops.Resize.kind:
        return width / fold.new_width, nothing, nothing, nothing, height / fold.new_height, nothing
    if fold.kind == ops.ResizedCrop.kind:
        return drawn[3] / fold.new_width, nothing, drawn[1], nothing, drawn[2] / fold.new_height, drawn[0]
    # torchvision turns the other way in `rotate` than in `affine`.
    if fold.kind == ops.Rotate.kind:
        return _affine([-drawn[0], nothing, nothing, one, nothing, nothing], width / 2, height / 2)
    return _affine(drawn, width / 2, height / 2)


def _affine(drawn: list[Tensor], middle_x: Tensor, middle_y: Tensor) -> tuple[Tensor, ...]:
    """The inverse of: shear, scale and turn about the middle, then move (torchvision's matrix)."""
    angle, right, down, scale, shear_x, shear_y = drawn[:6]
    turn, lean_x, lean_y = (torch.deg2rad(value) for value in (angle, shear_x, shear_y))
    along, across = torch.cos(turn - lean_y) / torch.cos(lean_y), torch.sin(turn - lean_y) / torch.cos(lean_y)
    p, q = (torch.cos(turn) - across * torch.tan(lean_x)) / scale, (torch.sin(turn) + along * torch.tan(lean_x)) / scale
    s, t = -across / scale, along / scale
    x, y = middle_x + right, middle_y + down
    return p, q, middle_x - p * x - q * y, s, t, middle_y - s * x - t * y


def _pixel_box(left: Tensor, right: Tensor, top: Tensor, bottom: Tensor) -> list[Tensor]:
    """The pixels whose centres lie in the box, from first to one past the last; one at least."""
    edges = []
    for low, high in ((left, right), (top, bottom)):
        first, end = (low - 0.5).ceil(), (high + 0.5).floor()
        middle = ((low + high) / 2).floor()
        edges.append((torch.where(end > first, first, middle), torch.where(end > first, end, middle + 1)))
    return [edges[0][0], edges[1][0], edges[0][1], edges[1][1]]


# ------------------------------------------------------------ in PyTorch


def apply(program: BatchProgram, images: Tensor, rows: Tensor, fill: int) -> Tensor:
    """uint8 B×C×H×W to float32."""
    x = _sample(program, images, rows, fill)
    for operation, columns in program.points:
        x = operation.apply(x, *rows[:, columns.start : columns.stop, None, None, None].unbind(1))
    return x


def apply_masks(program: BatchProgram, masks: Tensor, rows: Tensor, fill: int) -> Tensor:
    """B×K×H×W of any type, the pixel nearest to where the matrix points; never blended."""
    x, y = _places(program, rows)
    return _read_pixels(program, masks, rows, (x + 0.5).floor().long(), (y + 0.5).floor().long(), fill)[0]


def _places(program: BatchProgram, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the source each output pixel comes from, B×1×H×W, counted from the centre of the first
    pixel."""
    a, b, c, d, e, f = rows[:, program.matrix_column :, None, None, None].unbind(1)[:6]
    height, width = program.out_size
    y = torch.arange(height, device=rows.device, dtype=torch.float32)[:, None] + 0.5
    x = torch.arange(width, device=rows.device, dtype=torch.float32) + 0.5
    return a * x + b * y + c - 0.5, d * x + e * y + f - 0.5


def _read_pixels(
    program: BatchProgram, source: Tensor, rows: Tensor, x: Tensor, y: Tensor, fill: int
) -> tuple[Tensor, Tensor]:
    """The source's pixels at whole places, the fill outside of the box; and which lie inside."""
    left, top, right, bottom = rows[:, program.matrix_column + 6 :, None, None, None].unbind(1)
    inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
    height, width = program.size
    place = (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).flatten(2)
    taken = source.flatten(2).gather(2, place.expand(-1, source.shape[1], -1)).view(*source.shape[:2], *x.shape[2:])
    return taken.masked_fill(~inside, fill), inside


def _sample(program: BatchProgram, images: Tensor, rows: Tensor, fill: int) -> Tensor:
    """The source read once, its pixels weighed by a tent: 1 − |distance| / reach along each axis.

    The reach is 1, which is bilinear interpolation; in a "tent" program it grows to the length of source that
    one output pixel covers, which is torchvision's antialiasing. Pixels outside the box count as the fill
    where the geometry can leave the picture, and not at all where it cannot.
    """
    x, y = _places(program, rows)
    if program.sampling == "pixel":
        return _read_pixels(program, images, rows, (x + 0.5).floor().long(), (y + 0.5).floor().long(), fill)[0] / 255
    a, b, _, d, e, _ = rows[:, program.matrix_column :, None, None, None].unbind(1)[:6]
    reach_x = reach_y = torch.ones_like(a)
    if program.sampling == "tent":
        reach_x, reach_y = torch.hypot(a, b).clamp(min=1), torch.hypot(d, e).clamp(min=1)
    first_x, first_y = (x - reach_x).floor() + 1, (y - reach_y).floor() + 1
    total, weight = torch.zeros((), device=rows.device), torch.zeros((), device=rows.device)
    high, wide = ((2 * reach).ceil().flatten().tolist() for reach in (reach_y, reach_x))
    for i in range(int(max(high, default=0))):
        for j in range(int(max(wide, default=0))):
            at_x, at_y = first_x + j, first_y + i
            tap = (1 - (at_x - x).abs() / reach_x).clamp(min=0) * (1 - (at_y - y).abs() / reach_y).clamp(min=0)
            pixels, inside = _read_pixels(program, images, rows, at_x.long(), at_y.long(), fill)
            if not program.filled:
                tap = tap * inside
            total, weight = total + tap * pixels, weight + tap
    return total / (255 * weight)
