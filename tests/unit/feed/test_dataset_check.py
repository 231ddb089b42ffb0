"""Whether a loop writes to the dataset that it reads."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.feed.dataset_check import DatasetCheck


class Resize:
    def __init__(self) -> None:
        self.size = 16

    def __call__(self, picture: Any) -> Any:
        return picture


@dataclasses.dataclass(slots=True)
class Options:
    blur: float = 0.0


class Pictures:
    noise = 0.0

    def __init__(self) -> None:
        self.transforms = [Resize()]
        self.config = {"flip": 0.5}
        self.weights = np.ones(8)
        self.seen = torch.zeros(3)
        self.paths = [f"{number}.png" for number in range(100_000)]
        self.log = logging.getLogger("pictures")
        self.turn = functools.partial(max, key=len)
        self.load = self.transforms[0].__call__
        self.options = Options()
        self.pair = ({"cut": 1}, 2)
        self.scale = (np.ones(3), 2)
        self.many = list(range(200))
        self.shift = {"by": 0}
        self.mixed = functools.partial(sum, [[0.5]])
        self.bar = type("tqdm", (), {"__module__": "tqdm.std", "n": 0})()


WRITES: dict[str, Callable[[Pictures], object]] = {
    "Pictures, noise": lambda data: setattr(data, "noise", 0.1),
    "Pictures, crop": lambda data: setattr(data, "crop", 8),
    "Resize, size": lambda data: setattr(data.transforms[0], "size", 24),
    "dict, flip": lambda data: data.config.update(flip=0.1),
    "list, length": lambda data: data.transforms.append(Resize()),
    "ndarray, values": lambda data: data.weights.__setitem__(3, 2.0),
    "Tensor, values": lambda data: data.seen.data.add_(1),
    "Options, blur": lambda data: setattr(data.options, "blur", 1.0),
    "dict, cut": lambda data: data.pair[0].update(cut=2),
    "Pictures, scale": lambda data: setattr(data, "scale", (data.scale[0] + 1, 2)),
    "list, 150": lambda data: data.many.__setitem__(150, 7),
    "dict, by": lambda data: data.shift.update(by=1),
    "list, 0": lambda data: data.mixed.args[0][0].__setitem__(0, 0.7),
}


@pytest.mark.parametrize("entries", [1_000, 50_000])
@pytest.mark.parametrize("make", [list, lambda n: dict(enumerate(n)), lambda n: np.array(n, dtype=float)])
def test_labels_that_every_step_writes_to_are_seen_within_a_few(entries: int, make: Callable[[Any], Any]) -> None:
    data = Pictures()
    data.labels = labels = make([0.5] * entries)  # type: ignore[attr-defined]
    watch = DatasetCheck(data)
    assert watch.changed() is None
    at = np.random.default_rng(0)
    for step in range(20):
        for place in at.integers(entries, size=32):
            labels[int(place)] = float(step + place)
        if watch.changed():
            break
    assert step < 10


def test_a_memory_map_is_not_read_for_it(tmp_path: Path) -> None:
    data = Pictures()
    data.mapped = np.memmap(tmp_path / "large", np.uint8, "w+", shape=1 << 20)  # type: ignore[attr-defined]
    watch = DatasetCheck(data)
    data.mapped[:] = 1  # type: ignore[attr-defined]
    assert watch.changed() is None


@pytest.mark.parametrize("what", WRITES)
def test_what_is_set_on_a_dataset_or_on_what_it_is_made_of_is_seen(what: str) -> None:
    data = Pictures()
    watch = DatasetCheck(data)
    assert watch.changed() is None
    WRITES[what](data)
    assert watch.changed() == what
    watch.renew()
    assert watch.changed() is None


@pytest.mark.parametrize("entries", [200, 300, 40_000])
def test_what_is_another_is_seen_however_it_compares(entries: int) -> None:
    data = Pictures()
    data.labels = [1] * entries  # type: ignore[attr-defined]
    watch = DatasetCheck(data)
    data.labels[:] = [True] * entries  # type: ignore[attr-defined]
    assert watch.changed()


def test_things_that_have_changed_names_are_seen() -> None:
    level = {"easy": 1, "hard": 2}
    watch = DatasetCheck(level)
    level.clear()
    level.update(hard=1, easy=2)
    assert watch.changed() == "dict, easy"


def test_what_is_set_on_its_class_is_seen() -> None:
    data = type("Sized", (Pictures,), {"size": 16})()
    watch = DatasetCheck(data)
    type(data).size = 24
    assert watch.changed() == "Sized, size"


def test_what_cannot_even_be_told_what_it_is_is_no_trouble() -> None:
    gone = weakref.proxy(Pictures())
    assert DatasetCheck([gone]).changed() is None


def test_what_cannot_be_looked_at_is_no_trouble() -> None:
    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not now")

    assert DatasetCheck(Odd(), [Odd()]).changed() is None


def test_a_model_that_flatout_times_is_not_written_to() -> None:
    model = torch.nn.Linear(2, 2)
    watch = DatasetCheck({"teacher": model})
    model._compiled_call_impl = model.forward  # type: ignore[assignment]
    assert watch.changed() is None
    model.weight.data.add_(1)
    assert watch.changed() == "Parameter, values"


def test_the_same_value_again_and_what_is_logged_are_no_change() -> None:
    data = Pictures()
    watch = DatasetCheck(data, [data])
    data.transforms[0].size = int("16")
    data.noise = 0.0
    data.log.isEnabledFor(logging.INFO)
    del data.noise
    data.bar.n += 1
    assert watch.changed() is None
