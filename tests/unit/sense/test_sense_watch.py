"""Whether a loop writes to the dataset that it reads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flatout.sense.watch import Watch


class Resize:
    def __init__(self) -> None:
        self.size = 16

    def __call__(self, picture: Any) -> Any:
        return picture


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


WRITES: dict[str, Callable[[Pictures], object]] = {
    "Pictures, noise": lambda data: setattr(data, "noise", 0.1),
    "Pictures, crop": lambda data: setattr(data, "crop", 8),
    "Resize, size": lambda data: setattr(data.transforms[0], "size", 24),
    "dict, flip": lambda data: data.config.update(flip=0.1),
    "list, 1": lambda data: data.transforms.append(Resize()),
    "list": lambda data: data.paths.append("one.png"),
    "ndarray": lambda data: data.weights.__setitem__(3, 2.0),
    "Tensor": lambda data: data.seen.add_(1),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_is_set_on_a_dataset_or_on_what_it_is_made_of_is_seen(what: str) -> None:
    data = Pictures()
    watch = Watch(data)
    assert watch.changed() is None
    WRITES[what](data)
    assert watch.changed() == what
    watch.renew()
    assert watch.changed() is None


def test_what_is_set_on_its_class_is_seen() -> None:
    data = type("Sized", (Pictures,), {"size": 16})()
    watch = Watch(data)
    type(data).size = 24
    assert watch.changed() == "Sized, size"


def test_the_same_value_again_and_what_is_logged_are_no_change() -> None:
    data = Pictures()
    watch = Watch(data, [data])
    data.transforms[0].size = int("16")
    data.noise = 0.0
    data.log.isEnabledFor(logging.INFO)
    del data.noise
    assert watch.changed() is None
