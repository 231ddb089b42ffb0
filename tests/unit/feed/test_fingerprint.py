"""A change in a dataset is seen, or it is said that it cannot be told."""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import random
import re
import tempfile
import threading
import tracemalloc
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from flatout.feed import fingerprint as fingerprinting
from flatout.feed.fingerprint import Known, fingerprint


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
        self.many = [(Path(f"{number}.jpg"), -1) for number in range(3_000)]
        self.annotations = [{"file": f"{number}.jpg", "boxes": [[1.0, number]]} for number in range(3_000)]
        self.objects = [Sample(Path(f"{number}.jpg"), [0.0, 1.0]) for number in range(3_000)]
        self.slim = [Slim(number) for number in range(3_000)]
        self.rows = [Row("a.jpg", 1), Row("b.jpg", 2)]
        self.mixed = [None, 1, "one", 1.0, np.int64(1), b"1"]
        self.named = Named([1])
        self.named_by = re.compile("[a-z]+")
        self.settings = SimpleNamespace(size=224)
        self.kind, self.log = np.dtype(np.float32), logging.getLogger("data")
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
    "a tensor through a view": lambda data: data.labels.view(10, 10)[3].add_(1),
    "inside a transform": lambda data: data.transform.steps.append(3),
    "one path of many": lambda data: data.many.__setitem__(2_000, (Path("other.jpg"), -1)),
    "one label of many": lambda data: data.many.__setitem__(2_000, (Path("2000.jpg"), -2)),
    "one box of many": lambda data: data.annotations[2_000]["boxes"].append([0.0, 0]),
    "a key of one of many": lambda data: data.annotations[2_000].update(crowd=None),
    "two of many changed places": lambda data: data.objects.sort(key=lambda one: str(one.path), reverse=True),
    "deep in one object of many": lambda data: data.objects[2_000].box.__setitem__(0, 0.5),
    "a slot of one object of many": lambda data: setattr(data.slim[2_000], "label", 0),
    "a named tuple": lambda data: data.rows.__setitem__(1, Row("b.jpg", 3)),
    "another type, the same value": lambda data: data.mixed.__setitem__(1, True),
    "a number of numpy's": lambda data: data.mixed.__setitem__(4, np.int64(2)),
    "an attribute of a list": lambda data: setattr(data.named, "name", "another"),
    "what a function is called with": lambda data: setattr(data, "loud", functools.partial(print, end="?")),
    "another pattern": lambda data: setattr(data, "named_by", re.compile("[0-9]+")),
    "a setting": lambda data: setattr(data.settings, "size", 256),
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


def counting() -> Callable[[int], int]:
    so_far = 0

    def count(more: int) -> int:
        nonlocal so_far
        so_far += more
        return so_far

    return count


def scaled(value: int, by: int = 2) -> int:
    return value * by


class Colour(Enum):
    RED = 1


class Cropped:
    size = 224
    strengths: ClassVar = [0.1]
    inside = Transform()


class Hidden:
    __slots__ = ("__secret",)

    def set(self, value: int) -> None:
        self.__secret = value


class Shadowing(Slim):
    @property
    def label(self) -> int:  # type: ignore[override]
        return 0


class Slotted(list[int]):
    __slots__ = ("name",)


class Backwards(list[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Word(str):
    pass


def mapped(**how: Any) -> np.memmap[Any, Any]:
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it is there until it is let go of
    np.arange(100).tofile(file.name)
    found = np.memmap(file.name, dtype=np.int64, **how)
    FILES.append(file)
    return found


FILES: list[Any] = []
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "what a bound method belongs to": (lambda: Transform().__init__, lambda it: it.__self__.steps.append(3)),  # type: ignore[misc]
    "what a method of C belongs to": (lambda: [1, 2].__getitem__, lambda it: it.__self__.append(3)),
    "what a function closes over": (counting, lambda it: it(1)),
    "what a function is called with by default": (lambda: scaled, lambda it: setattr(it, "__defaults__", (3,))),
    "an attribute of a function": (lambda: scaled, lambda it: setattr(it, "times", [1])),
    "an attribute of an enum's member": (lambda: Colour.RED, lambda it: setattr(it, "shade", 1)),
    "an attribute of a class": (Cropped, lambda it: setattr(type(it), "size", 256)),
    "within a class": (Cropped, lambda it: it.strengths.append(0.2)),
    "within what a class holds": (Cropped, lambda it: it.inside.steps.append(3)),
    "a method of a class": (Cropped, lambda it: setattr(type(it), "__len__", lambda _: 3)),
    "a class": (lambda: Cropped, lambda it: setattr(it, "size", 288)),
    "a slot with a private name": (Hidden, lambda it: it.set(2)),
    "a slot behind a property": (lambda: object.__new__(Shadowing), lambda it: Slim.label.__set__(it, 5)),  # type: ignore[attr-defined]
    "a slot of a list": (Slotted, lambda it: setattr(it, "name", 1)),
    "a list that says it holds other things": (lambda: Backwards([1, 2]), lambda it: it.__setitem__(0, 7)),
    "an attribute of a word": (lambda: Word("a"), lambda it: setattr(it, "tag", 1)),
    "what a dict makes of a missing key": (lambda: defaultdict(list), lambda it: setattr(it, "default_factory", set)),
    "the order of a dict": (lambda: OrderedDict(a=1, b=1), lambda it: it.move_to_end("a")),
    "a tensor through numpy": (lambda: torch.zeros(9), lambda it: it.numpy().__setitem__(3, 1)),
    "a tensor through its data": (lambda: torch.zeros(9), lambda it: it.data.add_(1)),
    "a tensor turned over": (lambda: torch.arange(9).view(3, 3), lambda it: it.t_()),
    "an attribute of a tensor": (lambda: torch.zeros(9), lambda it: setattr(it, "label", 1)),
    "a weight of a model": (lambda: torch.nn.Linear(2, 2), lambda it: it.bias.data.add_(1)),
    "the mask of an array": (lambda: np.ma.array([1, 2], mask=[0, 0]), lambda it: it.mask.__setitem__(0, True)),  # type: ignore[no-untyped-call]
    "a copy of a mapped file": (lambda: mapped().copy(), lambda it: it.__setitem__(0, 99)),
    "a mapped file, for this process only": (lambda: mapped(mode="c"), lambda it: it.__setitem__(0, 99)),
}


@pytest.mark.parametrize("held", HELD)
def test_a_change_within_what_is_held_is_seen(held: str) -> None:
    make, change = HELD[held]
    it = make()
    before = fingerprint([it])
    assert before is not None
    assert fingerprint([it]) == before
    change(it)
    assert fingerprint([it]) != before


def test_one_thing_in_the_place_of_another_is_seen() -> None:
    file = mapped()
    pairs: list[tuple[Any, Any]] = [
        (range(-1, 9), range(-2, 8)),
        (file[:10], file[10:20]),
        (np.datetime64(50, "Y"), np.datetime64(50, "D")),
        (torch.ones(3, dtype=torch.complex64).mul(1j), torch.ones(3, dtype=torch.complex64).mul(1j).conj()),
    ]
    for one, other in pairs:
        assert fingerprint([one]) is not None
        assert fingerprint([one]) != fingerprint([other])


def test_a_tensor_where_another_one_was_is_another_tensor() -> None:
    data = Transform()
    data.noise = torch.zeros(100_000)  # type: ignore[attr-defined]
    before = fingerprint(data)
    del data.noise  # type: ignore[attr-defined]
    data.noise = torch.ones(100_000)  # type: ignore[attr-defined]  # mostly at the same address
    assert fingerprint(data) != before


SAMPLES = [(f"{number}.png", number % 10) for number in range(2_000)]


@pytest.mark.parametrize(
    ("samples", "write"),
    [
        (SAMPLES, lambda samples: samples.__setitem__(700, ("700.png", False))),
        (SAMPLES, lambda samples: samples.append(("more.png", 0))),
        ([[path] for path, _ in SAMPLES], lambda samples: samples[700].append("more.png")),
        ([(path, [label]) for path, label in SAMPLES], lambda samples: samples[700][1].append(3)),
    ],
    ids=["another of equal value", "one more", "in an entry", "deep in an entry"],
)
def test_what_is_known_of_a_long_list_changes_nothing(samples: list[Any], write: Callable[[list[Any]], None]) -> None:
    samples, known = list(samples), Known()
    before = fingerprint(samples, known=known)
    assert fingerprint(samples, known=known) == fingerprint(samples) == before is not None
    write(samples)
    assert fingerprint(samples, known=known) == fingerprint(samples) != before


def test_what_can_change_and_was_met_before_is_not_taken_for_known() -> None:
    boxes = [SimpleNamespace(width=number) for number in range(2_000)]
    data, known = SimpleNamespace(base=list(boxes), active=list(boxes)), Known()
    fingerprint(data, known=known)
    data.base = None
    before = fingerprint(data, known=known)
    data.active[5].width = 70
    assert fingerprint(data, known=known) not in (before, None)


def test_rows_of_a_table_can_change() -> None:
    rows, known = list(np.zeros(2_000, dtype=[("label", "i8"), ("at", "f8")])), Known()
    before = fingerprint(rows, known=known)
    rows[7]["label"] = 9
    assert fingerprint(rows, known=known) not in (before, None)


def test_a_long_list_of_what_cannot_change_is_gone_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known()
    before = fingerprint(SAMPLES, known=known)
    held = fingerprinting._Walk._held

    def no_long_ones(walk: Any, kind: Any, things: list[Any]) -> int:
        assert SAMPLES not in things
        return held(walk, kind, things)

    monkeypatch.setattr(fingerprinting._Walk, "_held", no_long_ones)
    assert fingerprint(SAMPLES) is None  # it could not
    assert fingerprint(SAMPLES, known=known) == before


def test_one_long_tuple_in_many_samples_takes_no_memory() -> None:
    names = tuple(map(str, range(10_000)))
    tracemalloc.start()
    assert fingerprint([(number, names) for number in range(10_000)]) is None  # a hundred million
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 100e6


OPAQUE = {
    "a stream": io.BytesIO(),
    "a lock": threading.Lock(),
    "an iterator": iter([1]),
    "a hash, with its state in C": hashlib.md5(b"1"),
    "a source's method": np.random.default_rng(0).random,
    "a record with objects in it": np.array([([1],)], dtype=[("boxes", object)])[0],
    "a large tensor": torch.zeros(300 << 20, dtype=torch.uint8),
    "a large array": np.zeros(300 << 20, np.uint8),
    "a source of random numbers": random.Random(0),
}


@pytest.mark.parametrize("opaque", OPAQUE.values(), ids=OPAQUE)
def test_what_cannot_be_looked_into_is_said_to_be_unknown(opaque: object) -> None:
    data = Full()
    data.opaque = opaque  # type: ignore[attr-defined]
    assert fingerprint(data) is None
