"""Random numbers that belong to a batch, not to a worker.

torch, numpy and `random` are seeded for every batch from (base seed, epoch, batch), so a sample's
augmentation is the same whichever process computes it, and when it is computed again.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

Key = tuple[int, int]  # the loader's base seed, the epoch
_MASK = (1 << 64) - 1
_SEARCH_DEPTH = 5
_MAX_ATTRIBUTES = 256  # a transform list or a set of attributes has fewer, a table of samples more


def seed_batch(key: Key, batch: int, private: list[Any]) -> None:
    """Seed every generator for one batch; `private` are those that the dataset keeps to itself."""
    seed = _mix(_mix(key[0] & _MASK, key[1]), batch)
    torch.default_generator.manual_seed(seed >> 1)
    random.seed(seed)
    numpy = sys.modules.get("numpy")  # where nobody has imported it, nobody draws from it
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    for number, generator in enumerate(private, 1):
        _seed_private(generator, _mix(seed, number))


def load_numpy_random() -> None:
    """Before a fork: numpy imports its generators on first use, which would take each worker 8 ms."""
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")


def capture() -> dict[str, Any]:
    """The state of torch's, numpy's and Python's generators, in types that `torch.load` accepts."""
    version, words, next_gauss = random.getstate()
    state = {
        "torch": torch.default_generator.get_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), next_gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = now = numpy.random.get_state(legacy=False)
        if now["bit_generator"] == "MT19937":  # and not another one that the script has set
            words = torch.from_numpy(now["state"]["key"].astype("int64"))
            state["numpy"] = ["MT19937", words, now["state"]["pos"], now["has_gauss"], now["gauss"]]
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took, or a part of it."""
    torch.default_generator.set_state(state["torch"])
    if "python" in state:
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), next_gauss))
    if "numpy" in state:
        import numpy

        before = state["numpy"]
        if not isinstance(before, dict):
            name, keys, position, has_gauss, gauss = before
            before = (name, keys.numpy().astype("uint32"), position, has_gauss, gauss)
        numpy.random.set_state(before)


def same_state(one: Any, other: Any) -> bool:
    """Whether two captured states are the same."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(part, other[key]) for key, part in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Leave the generators after the block as they were before it."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


def generators_in(dataset: object) -> list[Any]:
    """Generators that the dataset (or a transform in it) keeps to itself, in a fixed order."""
    return list(_search(dataset, set(), _SEARCH_DEPTH))


def _search(thing: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if depth == 0 or id(thing) in seen or isinstance(thing, (str, bytes, int, float, torch.Tensor, type)):
        return
    seen.add(id(thing))
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    if isinstance(thing, kinds):
        yield thing
        return
    inner = thing
    if not isinstance(thing, (list, tuple)):
        inner = (thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})).values()
    if len(inner) <= _MAX_ATTRIBUTES:
        for value in inner:
            yield from _search(value, seen, depth - 1)


def _seed_private(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def _mix(value: int, other: int) -> int:
    """Two numbers mixed into one of 64 bits (splitmix64)."""
    value = (value ^ (other * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
