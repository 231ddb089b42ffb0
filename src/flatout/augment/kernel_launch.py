"""The kernels: the source is read where the matrix says, every operation is done in registers, the
result written once.

    draw_kernel   index, epoch, seed ──► a row a sample (`batch_program`)
    pass_kernel   source ──► gather or load ──► point operations ──► store; on the way the sum of the gray values
    mask_kernel   the nearest pixel of any type

A program is one pass; a contrast, which needs a mean first, and a blur end one that leaves its result in a
buffer. Nothing here waits for the GPU or allocates on the host: it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import operations as ops
from . import triton_kernels as kernels
from .batch_program import BatchProgram

POINTS = (
    ops.Brightness, ops.Contrast, ops.Saturation, ops.Hue, ops.Gamma,
    ops.Grayscale, ops.Invert, ops.Noise, ops.Erase, ops.Normalize,
)  # fmt: skip


class Tile(NamedTuple):
    """The pixels of one program, line by line. By trial on an H200, as are the other choices here."""

    width: int
    height: int
    # Several neighbours a thread, stored together; a gather wants them in different threads.
    wide: bool
    warps: int


GATHER = Tile(32, 8, False, 2)
STREAM = Tile(32, 32, True, 4)


def in_words(images: Tensor) -> bool:
    """Whether whole words may be read: three channels side by side, every line at a multiple of four
    bytes."""
    strides = images.stride()
    return strides[1:] == (1, strides[2], 3) and not (strides[0] | strides[2] | images.data_ptr()) & 3


class KernelPlan:
    """A program prepared for one kind of input: the constants of each launch, and the table on the device."""

    def __init__(
        self, program: BatchProgram, images: Tensor, *, dtype: torch.dtype, channels_last: bool, fill: int
    ) -> None:
        channels, device, strides = images.shape[1], images.device, tuple(images.stride()[1:])
        self.program, self.channels, self.dtype = program, channels, dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.packed = channels == 3 and dtype != torch.float32
        self.table = torch.tensor(program.table, dtype=torch.float64, device=device)
        bilinear = kernels.WORDS if in_words(images) else kernels.BILINEAR
        gather = {"pixel": kernels.PIXEL, "tent": kernels.TENT, "bilinear": bilinear}[program.sampling].value
        self.passes, self.sums = _passes(program, gather, channels, self.packed)
        self.drawing = {
            "SIZE": program.size,
            "COLUMNS": len(program.columns),
            "ENTRIES": len(program.table),
            "FOLDS": tuple(tuple(fold) for fold in program.folds),
            "SUMS": self.sums,
            "BLOCK": 32,
            "num_warps": 1,
            "enable_fp_fusion": True,
        }
        height, width = program.out_size
        planes = (height * width, width, 1)
        for constants in self.passes:
            last = constants is self.passes[-1]
            constants |= {
                "C": channels,
                "STRIDES": strides,
                "OUT": program.out_size,
                "OUT_STRIDES": (1, width * channels, channels) if last and channels_last else planes,
                "COLUMNS": len(program.columns),
                "FILLED": program.filled,
                "FILL": fill,
                "QUADS": last and channels_last and self.packed and width % 4 == 0,
                "num_warps": constants["TILE"].warps,
                "enable_fp_fusion": True,
            }
            constants["TILE"] = tuple(constants["TILE"][:3])

    def draw(self, index: Tensor, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """A row a sample, and zeroes for the sums of `apply`."""
        n = len(index)
        rows = torch.empty(n, len(self.program.columns), device=index.device)
        sums = torch.empty(self.sums, n, dtype=torch.int64, device=index.device)
        grid = (triton.cdiv(n, 32), len(self.program.table) + 1)
        kernels.draw_kernel[grid](index, rows, sums, self.table, n, epoch, seed, **self.drawing)
        return rows, sums

    def no_sums(self, rows: Tensor) -> Tensor:
        """The zeroes that `draw` would have left."""
        return torch.zeros(self.sums, len(rows), dtype=torch.int64, device=rows.device)

    def apply(self, images: Tensor, rows: Tensor, sums: Tensor) -> Tensor:
        """uint8 B×C×H×W of any strides to the augmented pictures."""
        n, (height, width) = len(images), self.program.out_size
        source, stride = images, images.stride(0)
        for constants in self.passes:
            if constants is self.passes[-1]:
                size = (n, self.channels, height, width)
                sink = torch.empty(size, dtype=self.dtype, device=images.device, memory_format=self.memory_format)
            elif not constants["STORE"]:
                sink = rows
            elif self.packed:
                sink = torch.empty(n, 1, height, width, dtype=torch.uint32, device=images.device)
            else:
                kept = torch.float32 if self.dtype == torch.float32 else torch.float16
                sink = torch.empty(n, self.channels, height, width, dtype=kept, device=images.device)
            tile_width, tile_height = constants["TILE"][:2]
            grid = (n * triton.cdiv(width, tile_width) * triton.cdiv(height, tile_height),)
            kernels.pass_kernel[grid](source, rows, sums, sink, n, stride, **constants)
            if constants["STORE"]:
                source, stride = sink, sink.stride(0)
        return sink

    def apply_masks(self, masks: Tensor, rows: Tensor, fill: int) -> Tensor:
        """B×K×H×W of any type and strides, the nearest pixel by the same geometry."""
        n, planes = masks.shape[:2]
        height, width = self.program.out_size
        sink = torch.empty(n, planes, height, width, dtype=masks.dtype, device=masks.device)
        kernels.mask_kernel[(n * triton.cdiv(height * width, 1024),)](
            masks, rows, sink, masks.stride(0), K=planes, STRIDES=tuple(masks.stride()[1:]), OUT=self.program.out_size,
            COLUMNS=len(self.program.columns), FILL=fill, BLOCK=1024,
        )  # fmt: skip
        return sink


def _passes(program: BatchProgram, gather: int, channels: int, packed: bool) -> tuple[list[dict[str, Any]], int]:
    """The launches, and how many sums they take between them."""
    passes: list[dict[str, Any]] = []
    source: dict[str, Any] = {"SOURCE": gather, "PACKED_SOURCE": False, "RADIUS": 0, "SIGMA": 0, "TILE": GATHER}
    if gather == kernels.PIXEL.value:
        source["TILE"] = STREAM
    buffer = {"SOURCE": kernels.BUFFER.value, "PACKED_SOURCE": packed, "RADIUS": 0, "SIGMA": 0, "TILE": STREAM}
    pending: list[tuple[float, ...]] = []
    sums = 0

    def launch(sum_: int = -1, store: bool = True, last: bool = False) -> None:
        chosen = {"POINTS": tuple(pending), "SUM": sum_, "STORE": store, "PACKED_SINK": packed and not last}
        passes.append(source | chosen)

    for operation, columns in program.points:
        if isinstance(operation, ops.Blur):
            launch()
            pending = []
            source = buffer | {"SOURCE": kernels.BLUR_X.value, "RADIUS": operation.radius, "SIGMA": columns.start}
            launch()
            source = source | {"SOURCE": kernels.BLUR_Y.value}
            continue
        if isinstance(operation, ops.Contrast):
            # Reading it once more costs little.
            again = source["SOURCE"] in (kernels.PIXEL.value, kernels.BUFFER.value)
            launch(sums, store=not again)
            if not again:
                source, pending = buffer, []
            pending.append((kernels.CONTRAST.value, columns.start, sums))
            sums += 1
        else:
            pending.append((POINTS.index(type(operation)), columns.start, *_constants(operation, channels)))
    launch(last=True)
    return passes, sums


def _constants(operation: ops.Point, channels: int) -> list[float]:
    if isinstance(operation, ops.Erase):
        return [float(operation.value)]
    if isinstance(operation, ops.Normalize):
        return [number for mean, std in operation.per_channel(channels) for number in (1 / std, -mean / std)]
    return []
