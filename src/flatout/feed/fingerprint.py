"""Has the dataset changed since it was shipped to the workers?

Stock forks its workers anew for every epoch, so a change made between epochs is always seen. Ours stay; this looks
through the dataset's attributes instead, and says None ("cannot tell") rather than miss a change: then it is shipped
again, at stock's price.
"""

from __future__ import annotations

import functools
import types
import zlib
from enum import Enum
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_FIXED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType, Enum, PurePath)
_PLAIN_TYPES = frozenset((int, float, complex, str, bytes, bool, type(None)))
_MOST_THINGS = 20_000
_MOST_BYTES = 64 << 20


class _CannotTell(Exception):
    pass


def fingerprint(dataset: object) -> int | None:
    """A number that changes when anything within the dataset does, or None when that cannot be told cheaply."""
    try:
        return _Walk().of(dataset)
    except Exception:  # also an attribute with ideas of its own
        return None


class _Walk:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._things = 0
        self._bytes = 0

    def of(self, thing: Any) -> int:
        if isinstance(thing, _PLAIN):
            return hash((type(thing), thing))
        if isinstance(thing, _FIXED):
            return hash((id(type(thing)), str(thing) if isinstance(thing, PurePath) else id(thing)))
        if id(thing) in self._seen:
            return self._seen[id(thing)]
        self._things += 1
        if self._things > _MOST_THINGS:
            raise _CannotTell
        self._seen[id(thing)] = len(self._seen)
        return self._inside(thing)

    def _inside(self, thing: Any) -> int:
        if isinstance(thing, torch.Tensor):
            # Every change in place counts a tensor's version up, whichever view it was made through.
            return hash((id(thing), thing.data_ptr(), thing._version, tuple(thing.shape), thing.dtype))
        if isinstance(thing, np.memmap):  # workers map the same file
            return hash((str(thing.filename), thing.offset, thing.shape, str(thing.dtype)))
        if isinstance(thing, np.ndarray):
            return self._array(thing)
        if isinstance(thing, (list, tuple, set, frozenset)):
            return self._sequence(thing)
        if isinstance(thing, dict):
            return hash((len(thing), self._sequence(list(thing)), self._sequence(list(thing.values()))))
        if isinstance(thing, torch.Generator):
            return zlib.crc32(thing.get_state().numpy().data)
        return self._object(thing)

    def _array(self, array: np.ndarray[Any, Any]) -> int:
        self._bytes += array.nbytes
        if array.dtype.hasobject or self._bytes > _MOST_BYTES:
            raise _CannotTell
        return hash(
            (array.shape, str(array.dtype), zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))
        )

    def _sequence(self, things: Any) -> int:
        kinds = set(map(type, things))
        if kinds <= _PLAIN_TYPES:
            return hash((type(things), len(things), tuple(things)))
        if kinds == {tuple} and set(map(type, chain.from_iterable(things))) <= _PLAIN_TYPES:
            return hash((type(things), len(things), tuple(things)))  # (path, label) a sample: a million take 0.1 s
        return hash((type(things), *map(self.of, things)))

    def _object(self, thing: Any) -> int:
        """An instance is what its attributes are, if attributes are all it has."""
        kind: Any = type(thing)
        slots = _slots_of(kind)
        found = getattr(thing, "__dict__", None)
        if slots is None or (found is None and not slots and kind.__basicsize__ > object.__basicsize__):
            raise _CannotTell  # state we cannot see
        found = {**(found or {}), **{name: getattr(thing, name) for name in slots if hasattr(thing, name)}}
        return hash((id(kind), self._sequence(list(found)), *map(self.of, found.values())))


@functools.lru_cache(maxsize=256)
def _slots_of(kind: type) -> tuple[str, ...] | None:
    """The slots of a class; None where it, or one it comes from, was made in C and not by a class statement."""
    if any(not base.__flags__ & (1 << 9) for base in kind.__mro__[:-1]):
        return None
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
