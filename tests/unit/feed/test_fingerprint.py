"""A change in a dataset is seen, or it is said that it cannot be told."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.feed.fingerprint import fingerprint


class Transform:
    def __init__(self) -> None:
        self.strength = 0.5
        self.steps = [1, 2]


class Full:
    """A dataset with a bit of everything in it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.root = Path("data")
        self.samples = [(f"{number}.jpg", number % 10) for number in range(1000)]
        self.table = {"a": [1, 2], "b": {"c": 3}}
        self.images = np.zeros((100, 8), np.uint8)
        self.labels = torch.zeros(100)
        self.transform = Transform()
        self.classes = ("cat", "dog")
        self.me = self

    def __len__(self) -> int:
        return 100


CHANGES: dict[str, Callable[[Full], Any]] = {
    "a number": lambda data: setattr(data, "epoch", 1),
    "a new attribute": lambda data: setattr(data, "limit", None),
    "an entry of a long list": lambda data: data.samples.__setitem__(500, ("other.jpg", 0)),
    "deep in a dict": lambda data: data.table["b"].__setitem__("c", 4),
    "an element of an array": lambda data: data.images.__setitem__((50, 3), 1),
    "a tensor in place": lambda data: data.labels[50:60].add_(1),
    "a tensor through a view": lambda data: data.labels.view(10, 10)[3].zero_(),
    "inside a transform": lambda data: data.transform.steps.append(3),
    "another transform": lambda data: setattr(data, "transform", Transform),
}


def test_nothing_changed_is_nothing_changed() -> None:
    data = Full()
    assert fingerprint(data) is not None
    assert fingerprint(data) == fingerprint(data)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    data = Full()
    before = fingerprint(data)
    CHANGES[change](data)
    assert before is not None
    assert fingerprint(data) != before


@pytest.mark.parametrize("opaque", [io.BytesIO(), threading.Lock(), iter([1]), np.zeros(80 << 20, np.uint8)],
                         ids=["a stream", "a lock", "an iterator", "a large array"])  # fmt: skip
def test_what_cannot_be_looked_into_is_said_to_be_unknown(opaque: object) -> None:
    data = Full()
    data.opaque = opaque  # type: ignore[attr-defined]
    assert fingerprint(data) is None
