"""What a call is about: the line it is written on, and what is in its batch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120


def batch_size(batch: Any) -> int | None:
    """How many samples a batch has: the length of the first tensor or list found in it."""
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return batch[0].shape[0]  # nearly always
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, list | tuple):
        items: Any = batch
    elif hasattr(batch, "keys"):
        items = (batch[key] for key in batch)
    else:
        return None
    for item in items:
        size = batch_size(item)
        if size is not None:
            return size
    return len(batch) if isinstance(batch, list) else None


def tensors_in(batch: Any) -> list[Any]:
    """Every tensor of a batch, in order."""
    if isinstance(batch, Mapping):
        return [tensor for item in batch.values() for tensor in tensors_in(item)]
    if isinstance(batch, list | tuple):
        return [tensor for item in batch for tensor in tensors_in(item)]
    return [batch] if isinstance(batch, torch.Tensor) else []


def called_from(file: str) -> bool:
    """Whether a call that is going on is written in a file whose path ends like this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


@functools.lru_cache(maxsize=4096)
def _shown_path(filename: str) -> str | None:
    """How a file is named in a report; None for torch's and our own."""
    if filename.startswith((_OURS, _TORCH, "<")):
        return None
    _, packages, inside = filename.rpartition("-packages/")
    if packages:
        return inside
    try:
        return os.path.relpath(filename) if filename.startswith(str(Path.cwd())) else filename
    except (OSError, ValueError):
        return filename


def caller(beyond: tuple[str, ...] = ()) -> str | None:
    """The file:line of the call: the innermost one that is neither in torch nor ours, nor in the paths `beyond`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = _shown_path(frame.f_code.co_filename)
        if path is not None and not path.startswith(beyond):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def raised_at(trace: TracebackType | None) -> str | None:
    """The file:line where an exception left the script's own code: its innermost frame that is in no package."""
    where = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "-packages/" not in file and not file.startswith(_STANDARD_LIBRARY):
            path = _shown_path(file)
            if path is not None:
                where = f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
