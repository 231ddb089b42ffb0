"""A PNG sheet of pictures before and after, written with the standard library alone."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from flatout.files import write_whole


def sheet(before: Tensor, after: Tensor, path: str | Path) -> None:
    """Two rows, the originals (uint8) above what became of them (0 to 1); B×C×H×W, of any two sizes."""
    after = (after * 255).round().clamp(0, 255).to(torch.uint8)
    height = after.shape[2]
    width = max(1, round(before.shape[3] * height / before.shape[2]))
    shrunk = interpolate(before.float(), (height, width), mode="bilinear", antialias=True).round().to(torch.uint8)
    cells = max(width, after.shape[3])
    rows = []
    for pictures in (shrunk, after):
        framed = pad(_rgb(pictures), (2, 2 + cells - pictures.shape[3], 2, 2), value=255)
        rows.append(torch.cat(list(framed), 2))
    write_whole(Path(path), _png(torch.cat(rows, 1)))


def _rgb(pictures: Tensor) -> Tensor:
    channels = pictures.shape[1]
    return pictures[:, :3] if channels >= 3 else pictures[:, :1].expand(-1, 3, -1, -1)


def _png(picture: Tensor) -> bytes:
    """A uint8 3×H×W picture as the bytes of a PNG file."""
    _, height, width = picture.shape
    lines = picture.permute(1, 2, 0).reshape(height, width * 3)
    filtered = pad(lines, (1, 0)).contiguous().numpy().tobytes()  # each line starts with filter type 0

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(filtered)) + chunk(b"IEND", b"")
