"""A change in a dataset is seen, or it is said that it cannot be told."""

from __future__ import annotations

import functools
import io
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flatout.feed.fingerprint import fingerprint


class Transform:
    def __init__(self) -> None:
        self.strength = 0.5
        self.steps = [1, 2]


class Row(NamedTuple):
    path: str
    label: int


class Named(list[int]):
    name = "a list"


@dataclass
class Sample:
    path: Path
    box: list[float]


@dataclass(slots=True)
class Slim:
    label: int


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
        self.many = [(Path(f"{number}.jpg"), -1) for number in range(30_000)]
        self.annotations = [{"file": f"{number}.jpg", "boxes": [[1.0, number]]} for number in range(30_000)]
        self.objects = [Sample(Path(f"{number}.jpg"), [0.0, 1.0]) for number in range(30_000)]
        self.slim = [Slim(number) for number in range(30_000)]
        self.rows = [Row("a.jpg", 1), Row("b.jpg", 2)]
        self.mixed = [None, 1, "one", 1.0, np.int64(1), b"1"]
        self.named = Named([1])
        self.loud = functools.partial(print, end="!")
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
    "one path of many": lambda data: data.many.__setitem__(20_000, (Path("other.jpg"), -1)),
    "one label of many": lambda data: data.many.__setitem__(20_000, (Path("20000.jpg"), -2)),
    "one box of many": lambda data: data.annotations[20_000]["boxes"].append([0.0, 0]),
    "a key of one of many": lambda data: data.annotations[20_000].update(crowd=None),
    "two of many changed places": lambda data: data.objects.sort(key=lambda one: str(one.path), reverse=True),
    "deep in one object of many": lambda data: data.objects[20_000].box.__setitem__(0, 0.5),
    "a slot of one object of many": lambda data: setattr(data.slim[20_000], "label", 0),
    "a named tuple": lambda data: data.rows.__setitem__(1, Row("b.jpg", 3)),
    "another type, the same value": lambda data: data.mixed.__setitem__(1, True),
    "a number of numpy's": lambda data: data.mixed.__setitem__(4, np.int64(2)),
    "an attribute of a list": lambda data: setattr(data.named, "name", "another"),
    "what a function is called with": lambda data: setattr(data, "loud", functools.partial(print, end="?")),
    "another transform": lambda data: setattr(data, "transform", Transform),
}


def test_nothing_changed_is_nothing_changed() -> None:
    data = Full()
    assert fingerprint(data) is not None
    assert fingerprint(data) == fingerprint(data)


def test_many_that_hold_each_other_come_to_an_end() -> None:
    data = Full()
    data.pairs = [[number] for number in range(1000)]  # type: ignore[attr-defined]
    for pair in data.pairs:  # type: ignore[attr-defined]
        pair += [data, data.pairs, data.samples]  # type: ignore[attr-defined]
    before = fingerprint(data)
    assert before is not None
    data.pairs[500][0] = -1  # type: ignore[attr-defined]
    assert fingerprint(data) != before


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    data = Full()
    before = fingerprint(data)
    CHANGES[change](data)
    assert before is not None
    assert fingerprint(data) != before


OPAQUE = {
    "a stream": io.BytesIO(),
    "a lock": threading.Lock(),
    "an iterator": iter([1]),
    "a large array": np.zeros(80 << 20, np.uint8),
    "a source of random numbers": random.Random(0),
}


@pytest.mark.parametrize("opaque", OPAQUE.values(), ids=OPAQUE)
def test_what_cannot_be_looked_into_is_said_to_be_unknown(opaque: object) -> None:
    data = Full()
    data.opaque = opaque  # type: ignore[attr-defined]
    assert fingerprint(data) is None
