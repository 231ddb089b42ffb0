"""The kernels in Triton: the row of a sample, bit for bit that of `batch_program.draw`; and what
happens to a pixel.

A pixel is read where the matrix says, changed in registers, and written once.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM109, B007

from __future__ import annotations

import triton
import triton.language as tl

from . import operations as ops
from .batch_program import ATTEMPTS, TABLE_WIDTH

# --- the row of a sample ---

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
    """The matrix from output to source and the box of the source that may be seen: `batch_program._fold`."""
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
            drawn = ()
            for j in tl.static_range(6):
                drawn = drawn + (_number(index, epoch, seed, row + j * _TABLE_WIDTH),)
            p, q, r, s, t, u = _affine(drawn[0], drawn[1], drawn[2], drawn[3], drawn[4], drawn[5], w / 2, h / 2)
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
    """Program (i, j) draws entry j of the table for a block of samples; the one past the last folds
    their geometry."""
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


# --- reading pixels ---

BRIGHTNESS, CONTRAST, SATURATION, HUE, GAMMA = (tl.constexpr(i) for i in range(5))
GRAYSCALE, INVERT, NOISE, ERASE, NORMALIZE = (tl.constexpr(i) for i in range(5, 10))

PIXEL, BILINEAR, WORDS, TENT = (tl.constexpr(i) for i in range(4))  # the images, by the matrix
BUFFER, BLUR_X, BLUR_Y = (tl.constexpr(i) for i in range(4, 7))  # what an earlier pass left
_ONE = tl.constexpr(1 << 24)  # of the fixed-point sums: integers add up to the same in any order


@triton.jit
def _byte(word, BYTE: tl.constexpr):
    return ((word >> (8 * BYTE)) & 0xFF).to(tl.float32)


@triton.jit
def _eight_bytes(word, shift):
    """Bytes from a place on, which need not be a multiple of four: two words out of three aligned ones."""
    w0, w1, w2 = tl.load(word), tl.load(word + 1), tl.load(word + 2)
    low, high = (w1.to(tl.uint64) << 32) | w0, (w2.to(tl.uint64) << 32) | w1
    return (low >> shift).to(tl.uint32), (high >> shift).to(tl.uint32)


@triton.jit
def _whole(place):
    """The nearest whole number as a float and an int, by rounding in the adder: slower ways are a
    fifth of the work."""
    rounded = place + 12582912.0  # 1.5 · 2²³
    return rounded - 12582912.0, rounded.to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _bilinear(
    source, x, y, left, top, right, bottom,
    C: tl.constexpr, STRIDES: tl.constexpr, FILLED: tl.constexpr, FILL: tl.constexpr, IN_WORDS: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """Four pixels around a place weighed; INSIDE: all of them are known to be in the box."""
    x -= 0.5
    y -= 0.5
    floor_x, column = _whole(x)
    floor_y, row = _whole(y)
    part_x = (x - floor_x) + 0.5
    part_y = (y - floor_y) * (1 / 255) + 0.5 / 255
    w11 = part_x * part_y
    w01 = part_x * (1 / 255) - w11
    w10 = part_y - w11
    w00 = 1 / 255 - part_y - w01
    px = ()
    if INSIDE and IN_WORDS:  # three channels side by side: the six bytes of two pixels
        place = row * STRIDES[1] + column * 3
        shift = ((place & 3) * 8).to(tl.uint64)
        word = source.to(tl.pointer_type(tl.uint32)) + (place >> 2)
        a_low, a_high = _eight_bytes(word, shift)
        b_low, b_high = _eight_bytes(word + STRIDES[1] // 4, shift)
        px = (
            w00 * _byte(a_low, 0) + w01 * _byte(a_low, 3) + w10 * _byte(b_low, 0) + w11 * _byte(b_low, 3),
            w00 * _byte(a_low, 1) + w01 * _byte(a_high, 0) + w10 * _byte(b_low, 1) + w11 * _byte(b_high, 0),
            w00 * _byte(a_low, 2) + w01 * _byte(a_high, 1) + w10 * _byte(b_low, 2) + w11 * _byte(b_high, 1),
        )
    else:
        if INSIDE or FILLED:
            p00 = source + (row * STRIDES[1] + column * STRIDES[2])
            p01, p10, p11 = p00 + STRIDES[2], p00 + STRIDES[1], p00 + (STRIDES[1] + STRIDES[2])
        else:
            x0, x1 = _within(column, left, right), _within(column + 1, left, right)
            y0, y1 = _within(row, top, bottom), _within(row + 1, top, bottom)
            p00, p01 = source + (y0 * STRIDES[1] + x0 * STRIDES[2]), source + (y0 * STRIDES[1] + x1 * STRIDES[2])
            p10, p11 = source + (y1 * STRIDES[1] + x0 * STRIDES[2]), source + (y1 * STRIDES[1] + x1 * STRIDES[2])
        if INSIDE or not FILLED:
            m00, m01, m10, m11, other = None, None, None, None, None
        else:
            x0, x1 = (column >= left) & (column < right), (column + 1 >= left) & (column + 1 < right)
            y0, y1 = (row >= top) & (row < bottom), (row + 1 >= top) & (row + 1 < bottom)
            m00, m01, m10, m11, other = x0 & y0, x1 & y0, x0 & y1, x1 & y1, FILL
        for c in tl.static_range(C):
            px = px + (
                w00 * tl.load(p00 + c * STRIDES[0], m00, other).to(tl.float32)
                + w01 * tl.load(p01 + c * STRIDES[0], m01, other).to(tl.float32)
                + w10 * tl.load(p10 + c * STRIDES[0], m10, other).to(tl.float32)
                + w11 * tl.load(p11 + c * STRIDES[0], m11, other).to(tl.float32),
            )
    return px


@triton.jit
def _within(place, first, end):
    return tl.minimum(tl.maximum(place, first), end - 1)


@triton.jit
def _tent(
    source, x, y, reach_x, reach_y, left, top, right, bottom,
    C: tl.constexpr, STRIDES: tl.constexpr, FILLED: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """All pixels within reach weighed: `batch_program._sample`."""
    first_x = tl.floor(x - reach_x) + 1
    first_y = tl.floor(y - reach_y) + 1
    weight = tl.zeros_like(x)
    px = ()
    for c in tl.static_range(C):
        px = px + (tl.zeros_like(x),)
    for i in range(tl.ceil(2 * reach_y).to(tl.int32)):
        for j in range(tl.ceil(2 * reach_x).to(tl.int32)):
            at_x, at_y = first_x + j, first_y + i
            tap = tl.maximum(1 - tl.abs(at_x - x) / reach_x, 0.0) * tl.maximum(1 - tl.abs(at_y - y) / reach_y, 0.0)
            column, row = at_x.to(tl.int32), at_y.to(tl.int32)
            inside = (column >= left) & (column < right) & (row >= top) & (row < bottom)
            if not FILLED:
                tap = tl.where(inside, tap, 0.0)
            place = source + (row * STRIDES[1] + column * STRIDES[2])
            weight += tap
            new = ()
            for k in tl.static_range(C):
                value = tl.load(place + k * STRIDES[0], mask=inside, other=FILL)
                new = new + (px[k] + tap * value.to(tl.float32),)
            px = new
    weight = 255 * tl.maximum(weight, 0.001)  # only pixels past the edge of the output weigh less
    return [value / weight for value in px]


@triton.jit
def _kept(buffer, place, live, C: tl.constexpr, PLANE: tl.constexpr, PACKED: tl.constexpr):
    """A pixel that an earlier pass left."""
    px = ()
    if PACKED:
        word = tl.load(buffer + place, mask=live)
        px = (
            (word & 0x7FF).to(tl.float32) * (1 / 2047),
            ((word >> 11) & 0x7FF).to(tl.float32) * (1 / 2047),
            (word >> 22).to(tl.float32) * (1 / 1023),
        )
    else:
        for c in tl.static_range(C):
            px = px + (tl.load(buffer + (place + c * PLANE), mask=live).to(tl.float32),)
    return px


@triton.jit
def _blurred(
    buffer, x, y, live, sigma,
    C: tl.constexpr, OUT: tl.constexpr, PACKED: tl.constexpr, RADIUS: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """One direction of a blur: `operations.Blur`."""
    px = _kept(buffer, y * OUT[1] + x, live, C, OUT[0] * OUT[1], PACKED)
    if sigma > 0:
        fall = -0.5 * 1.4426950408889634 / (sigma * sigma)
        total = 1.0
        for i in tl.static_range(1, RADIUS + 1):
            weight = tl.exp2(fall * (i * i))
            total += 2 * weight
            for side in tl.static_range(-1, 2, 2):
                if DOWN:
                    row = tl.abs(y + side * i)
                    place = (OUT[0] - 1 - tl.abs(OUT[0] - 1 - row)) * OUT[1] + x
                else:
                    column = tl.abs(x + side * i)
                    place = y * OUT[1] + (OUT[1] - 1 - tl.abs(OUT[1] - 1 - column))
                tap = _kept(buffer, place, live, C, OUT[0] * OUT[1], PACKED)
                new = ()
                for c in tl.static_range(C):
                    new = new + (px[c] + weight * tap[c],)
                px = new
        px = [value / total for value in px]
    return px


# --- point operations ------------------------------------------------------------------------------------------------


@triton.jit
def _gray(px):
    if len(px) == 3:
        value = 0.2989 * px[0] + 0.587 * px[1] + 0.114 * px[2]
    else:
        value = px[0]
        for c in tl.static_range(1, len(px)):
            value += px[c]
        value = value * (1.0 / len(px))
    return value


@triton.jit
def _hue(px, turn):
    r, g, b = px[0], px[1], px[2]
    low = tl.minimum(r, tl.minimum(g, b))
    high = tl.maximum(r, tl.maximum(g, b))
    chroma = high - low
    scale = 1 / tl.where(chroma > 0, chroma, 1.0)
    hue = tl.where(high == g, (b - r) * scale + 2, (r - g) * scale + 4)
    hue = tl.where(high == r, (g - b) * scale, hue) + 6 * turn
    hue = hue - 6 * tl.floor(hue * (1 / 6))
    return (
        low + chroma * tl.clamp(tl.abs(hue - 3) - 1, 0.0, 1.0),
        low + chroma * tl.clamp(2 - tl.abs(hue - 2), 0.0, 1.0),
        low + chroma * tl.clamp(2 - tl.abs(hue - 4), 0.0, 1.0),
    )


@triton.jit
def _normals(radius, angle):
    length = tl.sqrt(-2 * tl.log((radius >> 8).to(tl.float32) * (1 / 16777216) + 1 / 33554432))
    turn = (angle >> 8).to(tl.float32) * (6.283185307179586 / 16777216)
    return length * tl.cos(turn), length * tl.sin(turn)


@triton.jit
def _noisy(px, x, y, sigma, key_low, key_high, WIDTH: tl.constexpr):
    pixel = (y * WIDTH + x).to(tl.uint32)
    zero = tl.zeros_like(pixel)
    key = key_low.to(tl.int64) + (key_high.to(tl.int64) << 24)
    w0, w1, w2, w3 = tl.philox(key, pixel, zero, zero, zero)
    grain = _normals(w0, w1) + _normals(w2, w3)
    new = ()
    for c in tl.static_range(len(px)):
        new = new + (tl.clamp(px[c] + sigma * grain[c], 0.0, 1.0),)
    return new


@triton.jit
def _apply(px, x, y, row, sums, n, OUT: tl.constexpr, POINTS: tl.constexpr):
    """The point operations in order; an item of POINTS is (kind, first column in the row, constants)."""
    for i in tl.static_range(len(POINTS)):
        first = row + POINTS[i][1]
        if POINTS[i][0] == BRIGHTNESS:
            factor = tl.load(first)
            px = [tl.minimum(value * factor, 1.0) for value in px]
        elif POINTS[i][0] == CONTRAST:
            factor = tl.load(first)
            mean = tl.load(sums + POINTS[i][2] * n).to(tl.float32) * (1.0 / _ONE / (OUT[0] * OUT[1]))
            shift = (1 - factor) * mean
            px = [tl.clamp(value * factor + shift, 0.0, 1.0) for value in px]
        elif POINTS[i][0] == SATURATION:
            factor = tl.load(first)
            shift = (1 - factor) * _gray(px)
            px = [tl.clamp(value * factor + shift, 0.0, 1.0) for value in px]
        elif POINTS[i][0] == HUE:
            px = _hue(px, tl.load(first))
        elif POINTS[i][0] == GAMMA:
            gamma = tl.load(first)
            px = [tl.where(value > 0, tl.exp2(gamma * tl.log2(tl.maximum(value, 1e-38))), 0.0) for value in px]
        elif POINTS[i][0] == GRAYSCALE:
            on, value_of_all = tl.load(first) > 0, _gray(px)
            px = [tl.where(on, value_of_all, value) for value in px]
        elif POINTS[i][0] == INVERT:
            on = tl.load(first) > 0
            px = [tl.where(on, 1 - value, value) for value in px]
        elif POINTS[i][0] == NOISE:
            px = _noisy(px, x, y, tl.load(first), tl.load(first + 1), tl.load(first + 2), OUT[1])
        elif POINTS[i][0] == ERASE:
            top, left = tl.load(first), tl.load(first + 1)
            inside = (y >= top) & (y < top + tl.load(first + 2)) & (x >= left) & (x < left + tl.load(first + 3))
            px = [tl.where(inside, POINTS[i][2], value) for value in px]
        elif POINTS[i][0] == NORMALIZE:
            new = ()
            for c in tl.static_range(len(px)):
                new = new + (px[c] * POINTS[i][2 + 2 * c] + POINTS[i][3 + 2 * c],)
            px = new
    return px


# --- a pass ----------------------------------------------------------------------------------------------------------


@triton.jit
def _quarters(values, dtype: tl.constexpr):
    """Every fourth value from the first, second, third and fourth on, as the bits of `dtype`."""
    bits = values.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint64)
    even, odd = tl.split(tl.reshape(bits, [bits.shape[0] // 2, 2]))
    first, third = tl.split(tl.reshape(even, [even.shape[0] // 2, 2]))
    second, fourth = tl.split(tl.reshape(odd, [odd.shape[0] // 2, 2]))
    return first, second, third, fourth


@triton.jit
def _store_quads(sink, px, place, live):
    """Three channels of 16 bits side by side: four pixels are three words of 64 bits, not twelve
    small writes."""
    r0, r1, r2, r3 = _quarters(px[0], sink.dtype.element_ty)
    g0, g1, g2, g3 = _quarters(px[1], sink.dtype.element_ty)
    b0, b1, b2, b3 = _quarters(px[2], sink.dtype.element_ty)
    words = sink.to(tl.pointer_type(tl.uint64)) + place // 4 * 3
    tl.store(words, r0 | (g0 << 16) | (b0 << 32) | (r1 << 48), mask=live)
    tl.store(words + 1, g1 | (b1 << 16) | (r2 << 32) | (g2 << 48), mask=live)
    tl.store(words + 2, b2 | (r3 << 16) | (g3 << 32) | (b3 << 48), mask=live)


@triton.jit
def _matrix_and_box(row, COLUMNS: tl.constexpr):
    derived = row + (COLUMNS - 10)
    numbers = ()
    for i in tl.static_range(6):
        numbers = numbers + (tl.load(derived + i),)
    for i in tl.static_range(6, 10):
        numbers = numbers + (tl.load(derived + i).to(tl.int32),)
    return numbers


@triton.jit
def _gathered(
    source, row, x, y, x0, y0,
    SOURCE: tl.constexpr, C: tl.constexpr, STRIDES: tl.constexpr, COLUMNS: tl.constexpr, FILLED: tl.constexpr,
    FILL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The pixels of a tile, read where the matrix says; its corner is at x0, y0."""
    a, b, c, d, e, f, left, top, right, bottom = _matrix_and_box(row, COLUMNS)
    # where the tile's corner and each of its pixels come from, from the centre of the source's first pixel
    corner_x = a * (x0 + 0.5) + b * (y0 + 0.5) + c - 0.5
    corner_y = d * (x0 + 0.5) + e * (y0 + 0.5) + f - 0.5
    from_x = corner_x + (a * (x - x0).to(tl.float32) + b * (y - y0).to(tl.float32))
    from_y = corner_y + (d * (x - x0).to(tl.float32) + e * (y - y0).to(tl.float32))
    if SOURCE == PIXEL:
        column, line = _whole(from_x)[1], _whole(from_y)[1]
        inside = (column >= left) & (column < right) & (line >= top) & (line < bottom)
        place = source + (line * STRIDES[1] + column * STRIDES[2])
        px = ()
        for channel in tl.static_range(C):
            value = tl.load(place + channel * STRIDES[0], mask=inside, other=FILL)
            px = px + (value.to(tl.float32) * (1 / 255),)
    elif SOURCE == TENT:
        reach_x, reach_y = tl.maximum(tl.sqrt(a * a + b * b), 1.0), tl.maximum(tl.sqrt(d * d + e * e), 1.0)
        px = _tent(source, from_x, from_y, reach_x, reach_y, left, top, right, bottom, C, STRIDES, FILLED, FILL)
    else:
        # a matrix is linear: if the corners of the tile stay clear of the edges, so does all between them
        low_x = corner_x + tl.minimum(a * (TILE[0] - 1), 0.0) + tl.minimum(b * (TILE[1] - 1), 0.0)
        high_x = corner_x + tl.maximum(a * (TILE[0] - 1), 0.0) + tl.maximum(b * (TILE[1] - 1), 0.0)
        low_y = corner_y + tl.minimum(d * (TILE[0] - 1), 0.0) + tl.minimum(e * (TILE[1] - 1), 0.0)
        high_y = corner_y + tl.maximum(d * (TILE[0] - 1), 0.0) + tl.maximum(e * (TILE[1] - 1), 0.0)
        if (low_x >= left + 1) & (high_x < right - 5) & (low_y >= top + 1) & (high_y < bottom - 2):
            px = _bilinear(source, from_x, from_y, left, top, right, bottom,
                           C, STRIDES, FILLED, FILL, SOURCE == WORDS, True)  # fmt: skip
        else:
            px = _bilinear(source, from_x, from_y, left, top, right, bottom,
                           C, STRIDES, FILLED, FILL, SOURCE == WORDS, False)  # fmt: skip
    return px


@triton.jit(do_not_specialize=["n"])
def pass_kernel(
    source, rows, sums, sink, n, source_stride,
    SOURCE: tl.constexpr, C: tl.constexpr, STRIDES: tl.constexpr, OUT: tl.constexpr, OUT_STRIDES: tl.constexpr,
    COLUMNS: tl.constexpr, FILLED: tl.constexpr, FILL: tl.constexpr, POINTS: tl.constexpr, SUM: tl.constexpr,
    STORE: tl.constexpr, PACKED_SOURCE: tl.constexpr, PACKED_SINK: tl.constexpr, QUADS: tl.constexpr,
    RADIUS: tl.constexpr, SIGMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one sample: TILE[0]×TILE[1] pixels, line by line."""
    TILE_W: tl.constexpr = TILE[0]
    TILE_H: tl.constexpr = TILE[1]
    across: tl.constexpr = (OUT[1] + TILE_W - 1) // TILE_W
    tiles: tl.constexpr = across * ((OUT[0] + TILE_H - 1) // TILE_H)
    sample = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    x0 = (tile % across) * TILE_W
    y0 = (tile // across) * TILE_H
    i = tl.arange(0, TILE_W * TILE_H)
    x, y = x0 + i % TILE_W, y0 + i // TILE_W
    if OUT[0] % TILE_H == 0 and OUT[1] % TILE_W == 0:
        live = None
    else:
        live = (x < OUT[1]) & (y < OUT[0])
    row = rows + sample * COLUMNS
    sums += sample
    source += sample.to(tl.int64) * source_stride

    if SOURCE == BUFFER:
        px = _kept(source, y * OUT[1] + x, live, C, OUT[0] * OUT[1], PACKED_SOURCE)
    elif SOURCE == BLUR_X or SOURCE == BLUR_Y:
        sigma = tl.load(row + SIGMA)
        px = _blurred(source, x, y, live, sigma, C, OUT, PACKED_SOURCE, RADIUS, SOURCE == BLUR_Y)
    else:
        px = _gathered(source, row, x, y, x0, y0, SOURCE, C, STRIDES, COLUMNS, FILLED, FILL, TILE)

    px = _apply(px, x, y, row, sums, n, OUT, POINTS)
    if SUM >= 0:
        shade = _gray(px)
        if live is not None:
            shade = tl.where(live, shade, 0.0)
        tl.atomic_add(sums + SUM * n, (tl.sum(shade, 0) * _ONE).to(tl.int64), sem="relaxed")
    if STORE:
        sink += sample.to(tl.int64) * (OUT[0] * OUT[1] * (1 if PACKED_SINK else C))
        place = y * OUT_STRIDES[1] + x * OUT_STRIDES[2]
        if not TILE[2]:
            place = tl.max_contiguous(place, 1)
        if PACKED_SINK:
            # 11, 11 and 10 bits, rounded in the adder
            r = (px[0] * 2047 + 8388608.0).to(tl.uint32, bitcast=True) & 0x7FF
            g = (px[1] * 2047 + 8388608.0).to(tl.uint32, bitcast=True) & 0x7FF
            b = (px[2] * 1023 + 8388608.0).to(tl.uint32, bitcast=True)
            tl.store(sink + place, r | (g << 11) | (b << 22), mask=live)
        elif QUADS:
            i = 4 * tl.arange(0, TILE_W * TILE_H // 4)
            x, y = x0 + i % TILE_W, y0 + i // TILE_W
            if live is not None:
                live = (x < OUT[1]) & (y < OUT[0])
            _store_quads(sink, px, y * OUT[1] + x, live)
        else:
            for channel in tl.static_range(C):
                tl.store(sink + (place + channel * OUT_STRIDES[0]), px[channel].to(sink.dtype.element_ty), mask=live)


@triton.jit
def mask_kernel(
    source, rows, sink, source_stride,
    K: tl.constexpr, STRIDES: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr, FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The nearest pixel of every plane."""
    tiles: tl.constexpr = (OUT[0] * OUT[1] + BLOCK - 1) // BLOCK
    sample = tl.program_id(0) // tiles
    i = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    x, y = (i % OUT[1]).to(tl.float32) + 0.5, (i // OUT[1]).to(tl.float32) + 0.5
    a, b, c, d, e, f, left, top, right, bottom = _matrix_and_box(rows + sample * COLUMNS, COLUMNS)
    column, line = tl.floor(a * x + b * y + c).to(tl.int32), tl.floor(d * x + e * y + f).to(tl.int32)
    inside = (column >= left) & (column < right) & (line >= top) & (line < bottom)
    place = source + sample.to(tl.int64) * source_stride + (line * STRIDES[1] + column * STRIDES[2])
    sink += sample.to(tl.int64) * (K * OUT[0] * OUT[1])
    for k in tl.static_range(K):
        value = tl.load(place + k * STRIDES[0], mask=inside & (i < OUT[0] * OUT[1]), other=FILL)
        tl.store(sink + (i + k * OUT[0] * OUT[1]), value, mask=i < OUT[0] * OUT[1])
