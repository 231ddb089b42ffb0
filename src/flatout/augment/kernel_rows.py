"""The row of a sample on the GPU, bit for bit that of `program.draw`."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from . import ops
from .program import ATTEMPTS, TABLE_WIDTH

_HFLIP, _VFLIP, _CROP = tl.constexpr(ops.HFlip.kind), tl.constexpr(ops.VFlip.kind), tl.constexpr(ops.Crop.kind)
_RESIZE, _RESIZED_CROP = tl.constexpr(ops.Resize.kind), tl.constexpr(ops.ResizedCrop.kind)
_ROTATE = tl.constexpr(ops.Rotate.kind)
_ATTEMPTS, _TABLE_WIDTH = tl.constexpr(ATTEMPTS), tl.constexpr(TABLE_WIDTH)


@triton.jit
def _words(index, epoch, seed, slot, block):
    low = index.to(tl.uint32)
    same = tl.zeros_like(low)
    counter = same + (slot * 256 + block).to(tl.uint32)
    return tl.philox(seed, low, (index >> 32).to(tl.uint32), same + epoch.to(tl.uint32), counter)


@triton.jit
def _uniform(word):
    return (word >> 8).to(tl.float64) * (1.0 / 16777216)


@triton.jit
def _chosen(index, epoch, seed, row):
    """Whether each sample gets this operation."""
    return _uniform(_words(index, epoch, seed, tl.load(row + 2).to(tl.int32), 0)[0]) < tl.load(row + 5)


@triton.jit
def _number(index, epoch, seed, row):
    word = tl.load(row + 3).to(tl.int32)
    w0, w1, w2, w3 = _words(index, epoch, seed, tl.load(row + 1).to(tl.int32), word // 4)
    lane = word % 4
    drawn = tl.load(row + 6) + tl.load(row + 7) * _uniform(
        tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    )
    drawn = tl.where(tl.load(row + 9) != 0, tl.floor(drawn), drawn)
    return tl.where(_chosen(index, epoch, seed, row), drawn, tl.load(row + 8))


@triton.jit
def _box(index, epoch, seed, row):
    """Top, left, height and width of the first attempt that fits."""
    slot = tl.load(row + 1).to(tl.int32)
    on = _chosen(index, epoch, seed, row)
    nothing = tl.zeros_like(index).to(tl.float64)
    top, left = nothing + tl.load(row + 14), nothing + tl.load(row + 15)
    height, width = nothing + tl.load(row + 16), nothing + tl.load(row + 17)
    for attempt in range(_ATTEMPTS):
        w0, w1, w2, w3 = _words(index, epoch, seed, slot, attempt + 1)
        area = tl.load(row + 6) + tl.load(row + 7) * _uniform(w0)
        shape = tl.exp(tl.load(row + 8) + tl.load(row + 9) * _uniform(w1))
        h = tl.floor(tl.sqrt(area / shape) + 0.5)
        w = tl.floor(tl.sqrt(area * shape) + 0.5)
        fits = on & (h >= 1) & (w >= 1) & (h <= tl.load(row + 10)) & (w <= tl.load(row + 11))
        top = tl.where(fits, tl.floor(_uniform(w2) * (tl.load(row + 12) - h + 1)), top)
        left = tl.where(fits, tl.floor(_uniform(w3) * (tl.load(row + 13) - w + 1)), left)
        height = tl.where(fits, h, height)
        width = tl.where(fits, w, width)
        on = on & (fits == 0)
    return top, left, height, width


@triton.jit
def _affine(degrees, right, down, scale, shear_x, shear_y, middle_x, middle_y):
    radian: tl.constexpr = 0.017453292519943295
    turn = degrees * radian
    lean_x = shear_x * radian
    lean_y = shear_y * radian
    lean = tl.sin(lean_x) / tl.cos(lean_x)
    along = tl.cos(turn - lean_y) / tl.cos(lean_y)
    across = tl.sin(turn - lean_y) / tl.cos(lean_y)
    p = (tl.cos(turn) - across * lean) / scale
    q = (tl.sin(turn) + along * lean) / scale
    s = -across / scale
    t = along / scale
    x = middle_x + right
    y = middle_y + down
    return p, q, middle_x - p * x - q * y, s, t, middle_y - s * x - t * y


@triton.jit
def _first_end(low, high):
    """The pixels whose centres lie in the box, one at least."""
    first = tl.ceil(low - 0.5)
    end = tl.floor(high + 0.5)
    middle = tl.floor((low + high) / 2)
    return tl.where(end > first, first, middle), tl.where(end > first, end, middle + 1)


@triton.jit
def _fold(index, epoch, seed, table, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FOLDS: tl.constexpr):
    """The matrix from output to source and the box of the source that may be seen: `program._fold`."""
    nothing = tl.zeros_like(index).to(tl.float64)
    a, b, c, d, e, f = nothing + 1, nothing, nothing, nothing, nothing + 1, nothing
    left, top, right, bottom = nothing, nothing, nothing + WIDTH, nothing + HEIGHT
    for i in tl.static_range(len(FOLDS)):
        row = table + FOLDS[i][1] * _TABLE_WIDTH
        h, w, new_h, new_w = FOLDS[i][2], FOLDS[i][3], FOLDS[i][4], FOLDS[i][5]
        p, q, r, s, t, u = nothing + 1, nothing, nothing, nothing, nothing + 1, nothing
        if FOLDS[i][0] == _HFLIP:
            on = _number(index, epoch, seed, row)
            p, r = 1 - 2 * on, on * w
        elif FOLDS[i][0] == _VFLIP:
            on = _number(index, epoch, seed, row)
            t, u = 1 - 2 * on, on * h
        elif FOLDS[i][0] == _CROP:
            u = _number(index, epoch, seed, row)
            r = _number(index, epoch, seed, row + _TABLE_WIDTH)
        elif FOLDS[i][0] == _RESIZE:
            p, t = (nothing + w) / new_w, (nothing + h) / new_h
        elif FOLDS[i][0] == _RESIZED_CROP:
            u, r, box_h, box_w = _box(index, epoch, seed, row)
            p, t = box_w / new_w, box_h / new_h
        elif FOLDS[i][0] == _ROTATE:
            degrees = -_number(index, epoch, seed, row)
            p, q, r, s, t, u = _affine(degrees, 0.0, 0.0, 1.0, nothing, nothing, w / 2, h / 2)
        else:
            degrees = _number(index, epoch, seed, row)
            x = _number(index, epoch, seed, row + _TABLE_WIDTH)
            y = _number(index, epoch, seed, row + 2 * _TABLE_WIDTH)
            scale = _number(index, epoch, seed, row + 3 * _TABLE_WIDTH)
            shear_x = _number(index, epoch, seed, row + 4 * _TABLE_WIDTH)
            shear_y = _number(index, epoch, seed, row + 5 * _TABLE_WIDTH)
            p, q, r, s, t, u = _affine(degrees, x, y, scale, shear_x, shear_y, w / 2, h / 2)
        a, b, c = a * p + b * s, a * q + b * t, a * r + b * u + c
        d, e, f = d * p + e * s, d * q + e * t, d * r + e * u + f
        if FOLDS[i][6]:
            x, y = c + a * new_w, f + e * new_h
            left, right = tl.maximum(left, tl.minimum(c, x)), tl.minimum(right, tl.maximum(c, x))
            top, bottom = tl.maximum(top, tl.minimum(f, y)), tl.minimum(bottom, tl.maximum(f, y))
    left, right = _first_end(left, right)
    top, bottom = _first_end(top, bottom)
    return a, b, c, d, e, f, left, top, right, bottom


@triton.jit(do_not_specialize=["n", "epoch", "seed"])
def draw_kernel(
    index, rows, sums, table, n, epoch, seed,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr, FOLDS: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, j) draws entry j of the table for a block of samples; the one past the last folds their geometry."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    index = tl.load(index + i, mask=live, other=0)
    entry = tl.program_id(1)
    rows += i * COLUMNS
    if entry == ENTRIES:
        numbers = _fold(index, epoch, seed, table, SIZE[0], SIZE[1], FOLDS)
        for j in tl.static_range(10):
            tl.store(rows + COLUMNS - 10 + j, numbers[j].to(tl.float32), mask=live)
        for j in tl.static_range(SUMS):
            tl.store(sums + j * n + i, tl.zeros_like(index), mask=live)
    else:
        row = table + entry * _TABLE_WIDTH
        rows += tl.load(row + 4).to(tl.int32)
        if tl.load(row) != 0:
            box = _box(index, epoch, seed, row)
            for j in tl.static_range(4):
                tl.store(rows + j, box[j].to(tl.float32), mask=live)
        else:
            tl.store(rows, _number(index, epoch, seed, row).to(tl.float32), mask=live)
