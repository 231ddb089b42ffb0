"""The whole augmentation in plain PyTorch: what the kernel must do, and what runs where there is no GPU.

The source is read once, where the folded matrix says, weighing its pixels by a tent: 1 − |distance| / reach along each
axis. The reach is 1, which is bilinear interpolation; in a "tent" program it grows to the length of source that one
output pixel covers, which is torchvision's antialiasing. Pixels outside the box count as the fill where the geometry
can leave the picture, and not at all where it cannot. Masks take the nearest pixel and are never blended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .program import Program


def apply(program: Program, images: Tensor, rows: Tensor, fill: int) -> Tensor:
    """uint8 B×C×H×W to float32."""
    x = _sample(program, images, rows, fill)
    for operation, columns in program.points:
        x = operation.apply(x, *rows[:, columns.start : columns.stop, None, None, None].unbind(1))
    return x


def apply_masks(program: Program, masks: Tensor, rows: Tensor, fill: int) -> Tensor:
    """B×K×H×W of any type, the pixel nearest to where the matrix points."""
    x, y = _places(program, rows)
    return _pixels(program, masks, rows, (x + 0.5).floor().long(), (y + 0.5).floor().long(), fill)[0]


def _places(program: Program, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the source each output pixel comes from, B×1×H×W, counted from the centre of the first pixel."""
    a, b, c, d, e, f = rows[:, program.matrix_column :, None, None, None].unbind(1)[:6]
    height, width = program.out_size
    y = torch.arange(height, device=rows.device, dtype=torch.float32)[:, None] + 0.5
    x = torch.arange(width, device=rows.device, dtype=torch.float32) + 0.5
    return a * x + b * y + c - 0.5, d * x + e * y + f - 0.5


def _pixels(program: Program, source: Tensor, rows: Tensor, x: Tensor, y: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    """The source's pixels at whole places, the fill outside of the box; and which lie inside."""
    left, top, right, bottom = rows[:, program.matrix_column + 6 :, None, None, None].unbind(1)
    inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
    height, width = program.size
    place = (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).flatten(2)
    taken = source.flatten(2).gather(2, place.expand(-1, source.shape[1], -1)).view(*source.shape[:2], *x.shape[2:])
    return taken.masked_fill(~inside, fill), inside


def _sample(program: Program, images: Tensor, rows: Tensor, fill: int) -> Tensor:
    x, y = _places(program, rows)
    if program.sampling == "pixel":
        return _pixels(program, images, rows, (x + 0.5).floor().long(), (y + 0.5).floor().long(), fill)[0] / 255
    a, b, _, d, e, _ = rows[:, program.matrix_column :, None, None, None].unbind(1)[:6]
    wide = program.sampling == "tent"
    reach_x = torch.hypot(a, b).clamp(min=1) if wide else torch.ones_like(a)
    reach_y = torch.hypot(d, e).clamp(min=1) if wide else torch.ones_like(a)
    first_x, first_y = (x - reach_x).floor() + 1, (y - reach_y).floor() + 1
    total, weight = torch.zeros((), device=rows.device), torch.zeros((), device=rows.device)
    for i in range(int((2 * reach_y).ceil().amax()) if len(rows) else 0):
        for j in range(int((2 * reach_x).ceil().amax())):
            at_x, at_y = first_x + j, first_y + i
            tap = (1 - (at_x - x).abs() / reach_x).clamp(min=0) * (1 - (at_y - y).abs() / reach_y).clamp(min=0)
            pixels, inside = _pixels(program, images, rows, at_x.long(), at_y.long(), fill)
            tap = tap if program.filled else tap * inside
            total, weight = total + tap * pixels, weight + tap
    return total / (255 * weight)
