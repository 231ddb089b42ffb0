"""Which global variables the code of a dataset reads, and that a loop which sets one is seen to."""

from __future__ import annotations

import argparse
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from flatout.feed.variables import Globals
from flatout.feed.watch import Watch

noise = 0.0
scale = 3
strength = 2
unread = 0
flip = 0.5
args = argparse.Namespace(mixup=1.0, epoch=0)
settings = {"size": 8, "epoch": 0}
words = ["cat"]
random_numbers = np.random.default_rng(0)


class Config:
    """As many scripts have it."""

    blur = 1.0
    epoch = 0

    class Model:
        width = 8


def scaled(value: Any) -> Any:
    return value * scale


class Strengthen:
    def __call__(self, value: Any) -> Any:
        return value * strength


class Pictures(Dataset[Any]):
    def __init__(self) -> None:
        self.transforms = [Strengthen()]

    def __len__(self) -> int:
        return len(words)

    @property
    def flips(self) -> bool:
        return random_numbers.random() < flip

    def __getitem__(self, index: int) -> Any:
        picture = torch.zeros(settings["size"]) + noise + args.mixup + Config.blur * Config.Model.width
        picture = sum(scaled(part) for part in picture)
        if len(words) > 100:
            print(never_defined)  # type: ignore[name-defined]  # noqa: F821
        return self.transforms[0](picture)


READ = {
    "noise", "scale", "strength", "flip", "args.mixup", "settings.size", "words", "random_numbers", "Config.blur",
    "Config.Model.width",
}  # fmt: skip


def collate(samples: list[Any]) -> Any:
    return samples


def collate_noisily(samples: list[Any], factor: float) -> Any:
    return [sample * noise * factor for sample in samples]


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, [0]), lambda data: data.__getitem__])
def test_what_the_code_of_a_dataset_reads_is_found_and_nothing_else(wrap: Callable[[Any], Any]) -> None:
    assert Globals(wrap(Pictures()), collate).now().keys() == READ


def test_what_is_no_data_is_told_by_which_one_it_is() -> None:
    assert Globals(Pictures()).now()["random_numbers"] == id(random_numbers)


def test_functions_count_too_with_what_is_given_to_them_beforehand() -> None:
    assert Globals(functools.partial(collate_noisily, factor=2.0)).now() == {"noise": noise}
    assert not Globals(collate)
    assert not Globals(torch.nn.Linear(2, 2), [torch.zeros(1)], np.zeros(3), None, 7)


def test_settings_in_a_module_of_the_scripts_own_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = types.ModuleType("config")
    own.__file__ = "/home/somebody/config.py"
    own.SIZE = own.EPOCHS = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(globals(), "config", own)
    assert Globals(lambda: config.SIZE * np.pi).now() == {"config.SIZE": 3}  # type: ignore[name-defined]  # noqa: F821


def test_variables_of_one_name_in_two_modules_are_two() -> None:
    other = {"noise": 7, "__name__": "other"}
    exec("def augment(): return noise", other)  # as in another file
    other["augment"].__code__ = other["augment"].__code__.replace(co_filename=__file__)  # type: ignore[attr-defined]
    found = Globals(collate_noisily, other["augment"])
    assert found.now() == {"noise": noise, "other.noise": 7}
    other["noise"] = 8
    assert found.now()["other.noise"] == 8


WRITES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "noise": lambda patch: patch.setitem(globals(), "noise", 0.1),
    "scale": lambda patch: patch.setitem(globals(), "scale", 4),
    "strength": lambda patch: patch.setitem(globals(), "strength", 4),
    "args.mixup": lambda patch: patch.setattr(args, "mixup", 0.0),
    "args.mixup, by another args": lambda patch: patch.setitem(globals(), "args", argparse.Namespace()),
    "settings.size": lambda patch: patch.setitem(settings, "size", 16),
    "Config.blur": lambda patch: patch.setattr(Config, "blur", 0.0),
    "Config.Model.width": lambda patch: patch.setattr(Config.Model, "width", 16),
    "random_numbers": lambda patch: patch.setitem(globals(), "random_numbers", np.random.default_rng(1)),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_loop_that_sets_one_is_seen_to(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Pictures())
    assert watch.changed() is None
    WRITES[what](monkeypatch)
    assert watch.changed() == f"a global variable, {what.partition(',')[0]}"
    watch.renew()
    assert watch.changed() is None


def test_a_list_that_is_one_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "words", ["cat"])
    watch = Watch(Pictures())
    words.append("dog")
    assert watch.changed() == "list, 1"


@pytest.mark.parametrize("write", [
    lambda patch: patch.setitem(globals(), "unread", 1),
    lambda patch: patch.setattr(args, "epoch", 1),
    lambda patch: patch.setitem(settings, "epoch", 1),
    lambda patch: patch.setattr(Config, "epoch", 1),
])  # fmt: skip
def test_what_its_code_does_not_read_is_nobodys_business(
    write: Callable[[pytest.MonkeyPatch], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(Pictures())
    write(monkeypatch)
    assert watch.changed() is None


def test_things_with_ideas_of_their_own_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert Globals([Proxy(), collate_noisily]).now() == {"noise": noise}
    monkeypatch.setitem(globals(), "args", Proxy())
    watch = Watch(Pictures())
    assert watch.changed() is None
