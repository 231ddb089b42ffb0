"""Datasets that the feed's tests load, and a comparison that minds types as well as values."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

Point = collections.namedtuple("Point", ["x", "y"])

SHAPES = {
    "tensor": lambda i: torch.full((3, 2), float(i)),
    "pair": lambda i: (torch.full((2,), i), i),
    "dict": lambda i: {"name": f"sample {i}", "image": torch.full((2, 2), i, dtype=torch.uint8), "score": i / 2},
    "nested": lambda i: {"a": [torch.tensor(i), (str(i), b"x")], "point": Point(torch.tensor([i]), float(i))},
    "numpy": lambda i: (np.full((2, 3), i, dtype=np.float32), np.float64(i), np.int32(i)),
    "scalar": lambda i: i,
    "bool": lambda i: i % 2 == 0,
    "string": lambda i: f"only a string {i}",
    "empty": lambda i: torch.empty(0, 3),
    "half": lambda i: torch.full((4,), i, dtype=torch.bfloat16),
}


class Things(Dataset[Any]):
    """`length` samples of one of the shapes above."""

    def __init__(self, length: int, shape: str = "pair") -> None:
        self.length = length
        self.shape = shape

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return SHAPES[self.shape](index)


class Drawing(Things):
    """Samples that draw from all three sources of random numbers."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


def as_list(batch: list[Any]) -> list[Any]:
    """A collate_fn of the simplest kind."""
    return list(batch)


def padded(batch: list[tuple[torch.Tensor, int]]) -> dict[str, Any]:
    """A collate_fn whose batches differ in size."""
    rows = [torch.arange(label % 5 + 1) for _, label in batch]
    return {"rows": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), "sizes": [len(row) for row in rows]}


def same(one: Any, other: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
