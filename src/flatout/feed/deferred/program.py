"""What transforms come to, as data: steps that can be taken for a whole batch at once, on any device.

The steps of two samples are the same; what differs from sample to sample (an angle, a brightness) are numbers. Where a
picture was turned in one sample and left alone in another, both are warped: leaving alone is turning by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# How pixels are moved, the ones that can stand for others last: not at all, one by one to another place, by the nearest
# pixel, or between pixels.
MOVES = ("same", "swap", "nearest", "bilinear")
WARP_NUMBERS = 6  # where each pixel comes from: the rows of an affine matrix; the colour of what is outside follows
_ALMOST = 5e-5  # of a grey level and the picture's length: it is rounded down, and 99.99 is 100


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on what earlier steps made. `static` is what is the same in every sample."""

    op: str
    inputs: tuple[int, ...] = ()
    static: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """Steps in order, the last of which is the result; its shape and type, of one sample."""

    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def trivial(self) -> bool:
        """Whether nothing is left to do: the result is the pixels."""
        left = [step for step in self.steps if step.op not in ("pixels", "tensor")]
        return all(step.op == "warp" and step.static[0] == "same" for step in left)


def agreed(programs: Sequence[Program]) -> Program | None:
    """One program that does what each of these does to its own sample, or None."""
    first = programs[0]
    if all(program == first for program in programs):
        return first
    if len({len(program.steps) for program in programs}) > 1:
        return None
    steps = []
    for column in zip(*(program.steps for program in programs), strict=True):
        step = column[0]
        if step.op == "warp":
            move = max((other.static[0] for other in column if other.op == "warp"), key=MOVES.index)
            column = tuple(replace(s, static=(_lifted(s, move), *s.static[1:])) for s in column)
        if any(other != column[0] for other in column):
            return None
        steps.append(column[0])
    return (
        replace(first, steps=tuple(steps))
        if all(p.shape == first.shape and p.dtype == first.dtype for p in programs)
        else None
    )


def _lifted(step: Step, move: str) -> str:
    """`move`, if it does the same where pixels only change places."""
    return move if step.op == "warp" and step.static[0] in ("same", "swap") else str(step.static[0])


def run(program: Program, pixels: Tensor, numbers: Tensor) -> Tensor:
    """The result for a batch: `pixels` as they were decoded, a row of `numbers` a sample."""
    numbers = numbers.to(torch.float32)
    made: list[Tensor] = []
    for step in program.steps:
        made.append(_OPS[step.op](step.static, pixels, numbers, *(made[at] for at in step.inputs)))
    return made[-1].to(program.dtype).contiguous()


def _pixels(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor) -> Tensor:
    return pixels


def _same(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    return source


def _numbers(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor) -> Tensor:
    start, shape = static
    count = torch.Size(shape).numel()
    return numbers[:, start : start + count].reshape(-1, *shape)


def _warp(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    """Each pixel from where the sample's matrix says, counted from the corner of the picture, as Pillow does."""
    move, start, colours = static
    if move == "same":
        return source
    batch, height, width = source.shape[:3]
    flat = source.reshape(batch, height, width, -1)
    matrix = numbers[:, start : start + WARP_NUMBERS].reshape(batch, 2, 3, 1)
    across, down = (torch.arange(n, device=source.device, dtype=torch.float32) + 0.5 for n in (width, height))
    x, y = matrix[:, :, 0] * across, matrix[:, :, 1] * down + matrix[:, :, 2]
    if move == "bilinear":
        moved = _between_pixels(flat, x, y)
    else:
        from_x, from_y = (x[:, row, None, :] + y[:, row, :, None] for row in (0, 1))
        at = from_y.long().clamp_(0, height - 1) * width + from_x.long().clamp_(0, width - 1)
        at = at.reshape(batch, -1, 1).expand(-1, -1, flat.shape[-1])
        moved = flat.flatten(1, 2).gather(1, at).view_as(flat)
    if move != "swap":
        inside = _within(x[:, 0, None, :] + y[:, 0, :, None], width) & _within(
            x[:, 1, None, :] + y[:, 1, :, None], height
        )
        colour = numbers[:, start + WARP_NUMBERS : start + WARP_NUMBERS + colours].reshape(batch, 1, 1, colours)
        moved = torch.where(inside.unsqueeze(-1), moved, colour.to(moved.dtype))
    return moved.reshape(source.shape)


def _between_pixels(pixels: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """What lies at x + y, in both directions, between the four pixels around it; rounded down."""
    rows = []
    for row, length in enumerate((pixels.shape[2], pixels.shape[1])):  # from -1 to 1, as torch counts
        rows.append(x[:, row, None, :] * (2 / length) + (y[:, row, :, None] * (2 / length) - 1))
    grid = torch.stack(rows, dim=-1)
    planes = pixels.permute(0, 3, 1, 2).float()
    moved = functional.grid_sample(planes, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return moved.add_(_ALMOST * max(planes.shape[2:])).to(torch.uint8).permute(0, 2, 3, 1)


def _within(place: Tensor, length: int) -> Tensor:
    return (place >= 0) & (place < length)


def _mean(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    return source.flatten(1).mean(1, dtype=torch.float64).float()  # of one colour, it is that colour


def _permute(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    return source.permute(0, *(axis + 1 for axis in static))


def _expand(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    return source.unsqueeze(static[0] + 1)


def _cast(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    dtype = static[0]
    return source.to(torch.float32 if dtype == torch.float64 else dtype)  # the card's own arithmetic


def _both(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def op(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, one: Tensor, other: Tensor) -> Tensor:
        dims = max(one.dim(), other.dim())
        return function(_level(one, dims), _level(other, dims))

    return op


def _level(value: Tensor, dims: int) -> Tensor:
    """With so many dimensions: what a sample lacks comes first, behind the batch, as in any broadcast."""
    return value if value.dim() == dims else value.reshape(len(value), *[1] * (dims - value.dim()), *value.shape[1:])


_OPS: dict[str, Callable[..., Tensor]] = {
    "pixels": _pixels,
    "numbers": _numbers,
    "warp": _warp,
    "tensor": _same,
    "mean": _mean,
    "permute": _permute,
    "expand": _expand,
    "cast": _cast,
    "add": _both(torch.add),
    "subtract": _both(torch.subtract),
    "multiply": _both(torch.multiply),
    "divide": _both(torch.true_divide),
    "minimum": _both(torch.minimum),
    "maximum": _both(torch.maximum),
}
