"""Random numbers that belong to a place in the epoch, not to a worker.

torch, numpy and `random` are seeded anew for every chunk of a batch's samples from (seed, epoch, batch, chunk), so a
sample's augmentation is the same whoever computes it, and when it is computed again. The other way, stock's stream a
worker, is here too, with the means to take a stream from a dead worker to its successor.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data._utils.worker import _generate_state

Key = tuple[int, int]  # the loader's base seed, the epoch
_MASK = (1 << 64) - 1
_numpy: Any = sys.modules.get("numpy")  # PyTorch has imported it, where it is installed


def seed_chunk(key: Key, batch: int, chunk: int, private: list[Any]) -> None:
    """Seed every generator for one chunk of one batch."""
    seed = _mix(_mix(_mix(key[0] & _MASK, key[1]), batch), chunk)
    torch.default_generator.manual_seed(seed >> 1)
    random.seed(seed)
    if _numpy is not None:
        _numpy.random.seed(seed & 0xFFFFFFFF)
    for number, generator in enumerate(private, 1):
        _seed_private(generator, _mix(seed, number))


def seed_stream(base_seed: int, worker: int) -> None:
    """Seed this process as stock seeds its worker of that number."""
    torch.manual_seed(base_seed + worker)
    random.seed(base_seed + worker)
    if _numpy is not None:
        _numpy.random.seed(_generate_state(base_seed, worker))


def capture() -> dict[str, Any]:
    """The state of torch's, numpy's and Python's generators, in types that `torch.load` takes without question."""
    version, words, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), next_gauss],
    }
    if _numpy is not None:
        name, keys, position, has_gauss, gauss = _numpy.random.get_state(legacy=True)
        words = torch.from_numpy(keys.astype(_numpy.int64))
        state["numpy"] = [str(name), words, int(position), int(has_gauss), float(gauss)]
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took, or a part of it."""
    torch.default_generator.set_state(state["torch"])
    if "numpy" in state and _numpy is not None:
        name, keys, position, has_gauss, gauss = state["numpy"]
        _numpy.random.set_state((name, keys.numpy().astype(_numpy.uint32), position, has_gauss, gauss))
    if "python" in state:
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), next_gauss))


def snapshot() -> tuple[Any, ...]:
    """The generators' states in the form that is quickest to take, to compare (`==`) and to put back."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel()), _python_words(), _numpy_words()


def whole_snapshot() -> tuple[Any, ...]:
    """A snapshot with the normal number that numpy keeps for the next time: ten times as slow to take."""
    if _numpy is None:
        return snapshot()
    state = _numpy.random.get_state(legacy=False)
    return *snapshot(), (state["has_gauss"], state["gauss"])


def put_back(taken: tuple[Any, ...]) -> None:
    """Go back to a snapshot, if nothing but draws happened since."""
    torch.default_generator.set_state(torch.frombuffer(bytearray(taken[0]), dtype=torch.uint8))
    random.setstate(taken[1] if len(taken[1]) == 3 else _as_python_has_it(*taken[1]))
    if _numpy is None:
        return
    generator = _numpy_generator()
    if type(generator) is _numpy.random.MT19937:
        ctypes.memmove(generator.ctypes.state_address, taken[2], _MT19937_BYTES)
    else:
        generator.state = pickle.loads(taken[2])
    for has_gauss, gauss in taken[3:]:
        state = _numpy.random.get_state(legacy=False)
        _numpy.random.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Leave the generators after the block as they were before it, seeded or drawn from meanwhile."""
    before = torch.default_generator.get_state(), random.getstate()
    of_numpy = None if _numpy is None else _numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        if of_numpy is not None:
            _numpy.random.set_state(of_numpy)


_MT19937_BYTES = 625 * 4  # its 624 words and the place among them
_python: Any = random._inst  # behind the functions of `random`
_PYTHON_WORDS = id(_python) + object.__basicsize__


def _python_words() -> tuple[Any, ...]:
    """Python's generator: its words and the spare normal number. `getstate` makes an object of every word."""
    if _PYTHON_IS_AS_EXPECTED:
        return ctypes.string_at(_PYTHON_WORDS, _MT19937_BYTES), _python.gauss_next
    return random.getstate()


def _as_python_has_it(words: bytes, gauss: float | None) -> tuple[Any, ...]:
    place, *state = struct.unpack("625I", words)
    return random.Random.VERSION, (*state, place), gauss


def _python_is_as_expected() -> bool:
    """Whether the words lie where every CPython has kept them so far: by comparison."""
    if random.Random.__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    words = ctypes.string_at(_PYTHON_WORDS, _MT19937_BYTES)
    return _as_python_has_it(words, _python.gauss_next) == random.getstate()


_PYTHON_IS_AS_EXPECTED = _python_is_as_expected()


def _numpy_generator() -> Any:
    """The generator behind numpy.random's own functions; only NumPy 1.24 and later have a public name for it."""
    return _numpy.random.mtrand._rand._bit_generator


def _numpy_words() -> bytes:
    """The words of numpy's generator, where it is the usual one: `get_state` takes a hundred times as long."""
    if _numpy is None:
        return b""
    generator = _numpy_generator()
    if type(generator) is _numpy.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return pickle.dumps(generator.state)


_WITHOUT_GENERATORS: tuple[type, ...] = (str, bytes, int, float, torch.Tensor, type)
_GENERATORS: tuple[type, ...] = (torch.Generator, random.Random)
if _numpy is not None:
    _WITHOUT_GENERATORS += (_numpy.ndarray,)
    _GENERATORS += (_numpy.random.Generator, _numpy.random.RandomState)


def generators_in(dataset: object) -> list[Any]:
    """Generators the dataset (or a transform in it) keeps to itself, in a fixed order."""
    return list(_search(dataset, set(), depth=5))


def _search(thing: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if depth == 0 or id(thing) in seen or isinstance(thing, _WITHOUT_GENERATORS):
        return
    seen.add(id(thing))
    if isinstance(thing, _GENERATORS):
        yield thing
        return
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, (list, tuple)):
        inner = list(thing)
    else:
        inner = list(getattr(thing, "__dict__", {}).values())
    if len(inner) <= 256:  # a transform list or a set of attributes, not a table of samples
        for value in inner:
            yield from _search(value, seen, depth - 1)


def _seed_private(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif hasattr(generator, "bit_generator"):  # numpy's
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def _mix(value: int, other: int) -> int:
    """A well-stirred 64-bit number of two (splitmix64)."""
    value = (value ^ (other * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
