"""Recorded transforms as data: operations that run for a whole batch at once, on any device.

The operations of all samples in a batch are the same; what differs from sample to sample (an angle, a brightness) is a
row of numbers. Where one sample's picture was rotated and another's was not, both are warped: by nothing, for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# How pixels are moved; a later way can do what an earlier one does: nothing moves, pixels swap places, the nearest
# pixel is taken, or pixels are interpolated.
MOVES = ("same", "swap", "nearest", "bilinear")
WARP_NUMBERS = 6  # the rows of an affine matrix; the colour of what lies outside follows
_MAX_COMPILED = 4  # images, masks, and what random branches make of them
_ROUND_UP = 5e-5  # of a gray level and the picture's length: values are truncated, and 99.99 is meant to be 100
_compile = torch.compile  # taken before anything wraps it to time it


@dataclass(frozen=True, slots=True)
class TransformStep:
    """One operation on the results of earlier steps. `static` is what is the same in every sample."""

    op: str
    inputs: tuple[int, ...] = ()
    static: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TransformProgram:
    """Steps in order, the last of which is the result; shape and type are those of one sample."""

    steps: tuple[TransformStep, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_identity(self) -> bool:
        """Whether the result is just the decoded pixels."""
        for step in self.steps:
            unmoved = step.op == "warp" and step.static[0] == "same"
            if step.op not in ("pixels", "tensor") and not unmoved:
                return False
        return True


def merge_programs(programs: Sequence[TransformProgram]) -> TransformProgram | None:
    """One program that does for each sample what its own program does, or None."""
    first = programs[0]
    if all(program == first for program in programs):
        return first
    if any((len(p.steps), p.shape, p.dtype) != (len(first.steps), first.shape, first.dtype) for p in programs):
        return None
    steps = []
    for column in zip(*(program.steps for program in programs), strict=True):
        merged = _merge_steps(column)
        if merged is None:
            return None
        steps.append(merged)
    return replace(first, steps=tuple(steps))


def _merge_steps(steps: Sequence[TransformStep]) -> TransformStep | None:
    if all(step.op == "warp" for step in steps):
        move = max((step.static[0] for step in steps), key=MOVES.index)
        steps = [_with_move(step, move) for step in steps]
    return steps[0] if all(step == steps[0] for step in steps) else None


def _with_move(step: TransformStep, move: str) -> TransformStep:
    """The step with `move`, if that does the same. It does where pixels only swap places."""
    if step.static[0] not in ("same", "swap"):
        return step
    return replace(step, static=(move, *step.static[1:]))


def run_program(program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Tensor:
    """The result for a batch: `pixels` as they were decoded, one row of `numbers` a sample."""
    numbers = numbers.to(torch.float32)
    results: list[Tensor] = []
    for step in program.steps:
        inputs = [results[position] for position in step.inputs]
        results.append(_OPS[step.op](step.static, pixels, numbers, *inputs))
    return results[-1].to(program.dtype).contiguous()


class CompiledPrograms:
    """Runs programs as compiled kernels: step by step, each of some thirty steps reads and writes the whole batch.

    A program is compiled for the first batch size it meets; a smaller last batch runs step by step.
    """

    def __init__(self) -> None:
        self._compiled: dict[TransformProgram, tuple[torch.Size, Callable[[Tensor, Tensor], Tensor]]] = {}
        self.compile_s = 0.0

    @torch.no_grad()
    def __call__(self, program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Tensor:
        if program not in self._compiled and len(self._compiled) < _MAX_COMPILED:
            return self._compile_and_run(program, pixels, numbers)
        shape, compiled = self._compiled.get(program, (None, None))
        if compiled is None or pixels.shape != shape:
            return run_program(program, pixels, numbers)
        return compiled(pixels, numbers)

    def _compile_and_run(self, program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Tensor:
        def step_by_step(pixels: Tensor, numbers: Tensor) -> Tensor:
            return run_program(program, pixels, numbers)

        began = time.perf_counter()
        compiled = _compile(step_by_step, dynamic=False)
        try:
            result = compiled(pixels, numbers)
        except Exception:  # no working compiler; an error of the steps themselves is raised again below
            compiled = step_by_step
            result = step_by_step(pixels, numbers)
        self._compiled[program] = pixels.shape, compiled
        self.compile_s += time.perf_counter() - began
        return result


# --- operations: (static, pixels, numbers, *inputs) ─► a tensor with the batch first ------------


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
    across = torch.arange(width, device=source.device, dtype=torch.float32) + 0.5
    down = torch.arange(height, device=source.device, dtype=torch.float32) + 0.5
    x, y = matrix[:, :, 0] * across, matrix[:, :, 1] * down + matrix[:, :, 2]
    from_x = x[:, 0, None, :] + y[:, 0, :, None]
    from_y = x[:, 1, None, :] + y[:, 1, :, None]
    if move == "bilinear":
        moved = _interpolate(flat, x, y)
    else:
        place = from_y.long().clamp(0, height - 1) * width + from_x.long().clamp(0, width - 1)
        place = place.reshape(batch, -1, 1).expand(-1, -1, flat.shape[-1])
        moved = flat.flatten(1, 2).gather(1, place).view_as(flat)
    if move != "swap":
        inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
        end = start + WARP_NUMBERS
        colour = numbers[:, end : end + colours].reshape(batch, 1, 1, colours)
        moved = torch.where(inside.unsqueeze(-1), moved, colour.to(moved.dtype))
    return moved.reshape(source.shape)


def _interpolate(pixels: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The value at x + y, in both directions, between the four pixels around it; truncated as Pillow does."""
    rows = []
    for row, length in enumerate((pixels.shape[2], pixels.shape[1])):  # from -1 to 1, as grid_sample counts
        rows.append(x[:, row, None, :] * (2 / length) + (y[:, row, :, None] * (2 / length) - 1))
    grid = torch.stack(rows, dim=-1)
    planes = pixels.permute(0, 3, 1, 2).float()
    moved = functional.grid_sample(planes, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return moved.add_(_ROUND_UP * max(planes.shape[2:])).to(torch.uint8).permute(0, 2, 3, 1)


def _mean(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    return source.flatten(1).mean(1, dtype=torch.float64).float()  # exact where all pixels are equal


def _permute(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    return source.permute(0, *(axis + 1 for axis in static))


def _expand(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    return source.unsqueeze(static[0] + 1)


def _cast(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, source: Tensor) -> Tensor:
    dtype = static[0]
    return source.to(torch.float32 if dtype == torch.float64 else dtype)  # float64 is slow on a GPU


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def op(static: tuple[Any, ...], pixels: Tensor, numbers: Tensor, one: Tensor, other: Tensor) -> Tensor:
        dims = max(one.dim(), other.dim())
        return function(_with_dims(one, dims), _with_dims(other, dims))

    return op


def _with_dims(value: Tensor, dims: int) -> Tensor:
    """With that many dimensions: missing ones come right behind the batch, as in any broadcast of two samples."""
    return value.reshape(len(value), *[1] * (dims - value.dim()), *value.shape[1:])


_OPS: dict[str, Callable[..., Tensor]] = {
    "pixels": _pixels,
    "numbers": _numbers,
    "warp": _warp,
    "tensor": _same,
    "mean": _mean,
    "permute": _permute,
    "expand": _expand,
    "cast": _cast,
    "add": _elementwise(torch.add),
    "subtract": _elementwise(torch.subtract),
    "multiply": _elementwise(torch.multiply),
    "divide": _elementwise(torch.true_divide),
    "minimum": _elementwise(torch.minimum),
    "maximum": _elementwise(torch.maximum),
}
