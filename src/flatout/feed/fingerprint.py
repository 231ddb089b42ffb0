"""Has the dataset changed since it was shipped to the workers?

Stock forks its workers anew for every epoch, so a change made between epochs is always seen. Ours stay; this looks
through all that the dataset holds instead, and says None ("cannot tell") rather than miss a change: then it is shipped
again, at stock's price.

A dataset holds a million samples of one kind, not a million kinds, so things are looked at by the column: all paths at
once, all labels at once. A million (path, label) take 0.3 s.
"""

from __future__ import annotations

import functools
import marshal
import types
import zlib
from enum import Enum
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_NUMBERS = frozenset((int, float, complex, bool, type(None)))
_HASHED = (str, bytes, range, PurePath, torch.dtype, torch.device, torch.Size)
_FIXED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType, Enum)
_HOLD_OTHERS = (list, tuple, set, frozenset, dict)
_POINTER, _HEAP_TYPE = tuple.__itemsize__, 1 << 9  # the flag of classes that are not static in C
_MOST_THINGS = 8_000_000
_MOST_ARRAYS = 20_000
_MOST_COLUMNS = 32
_MOST_BYTES = 64 << 20


class _CannotTell(Exception):
    pass


def fingerprint(dataset: object) -> int | None:
    """A number that changes when anything within the dataset does, or None when that cannot be told cheaply."""
    try:
        return _Walk().of([dataset])
    except Exception:  # also an attribute with ideas of its own
        return None


class _Walk:
    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # of what can change or hold itself: in which order it was met
        self._things = self._arrays = self._bytes = 0

    def of(self, things: list[Any]) -> int:
        """One number for all of them."""
        self._things += len(things)
        if self._things > _MOST_THINGS:
            raise _CannotTell
        if len(set(map(type, things))) == 1:
            kind = type(things[0])
            return hash((kind, self._alike(kind, things)))
        kinds = list(map(type, things))
        parts = [self._alike(kind, [one for one in things if type(one) is kind]) for kind in dict.fromkeys(kinds)]
        return hash((*kinds, *parts))

    def _alike(self, kind: Any, things: list[Any]) -> int:
        """Things of one kind."""
        if kind in _NUMBERS:
            return zlib.crc32(marshal.dumps(things, 2))  # hash(-1) is hash(-2)
        if issubclass(kind, _HASHED):
            return hash(tuple(things))
        if issubclass(kind, _FIXED):
            return hash(tuple(map(id, things)))
        if issubclass(kind, np.generic):
            return zlib.crc32(np.asarray(things).tobytes())
        if kind is tuple:
            return self._held(kind, things)
        before = len(self._places)
        places = [self._places.setdefault(id(one), len(self._places)) for one in things]
        fresh = [one for place, one in dict(zip(places, things, strict=True)).items() if place >= before]
        return hash((*places, self._inside(kind, fresh))) if fresh else hash(tuple(places))

    def _inside(self, kind: Any, things: list[Any]) -> int:
        if issubclass(kind, torch.Tensor):
            # Every change in place counts a tensor's version up, whichever view it was made through.
            self._count(things)
            return hash(tuple((one.data_ptr(), one._version, tuple(one.shape), one.dtype) for one in things))
        if issubclass(kind, np.memmap):  # workers map the same file
            return hash(tuple((str(one.filename), one.offset, one.shape, str(one.dtype)) for one in things))
        if issubclass(kind, np.ndarray):
            self._count(things)
            return hash(tuple(map(self._array, things)))
        if issubclass(kind, torch.Generator):
            return hash(tuple(zlib.crc32(one.get_state().numpy().data) for one in things))
        if kind is functools.partial:
            return self.of([(one.func, one.args, one.keywords, vars(one)) for one in things])
        if issubclass(kind, _HOLD_OTHERS):
            attributes = [vars(one) for one in things] if kind.__dictoffset__ else []
            return hash((self._held(kind, things), self.of(attributes)))
        return self._objects(kind, things)

    def _held(self, kind: Any, things: list[Any]) -> int:
        """What lists, tuples, sets and dicts hold."""
        sizes = list(map(len, things))
        inside = self._columns(sizes, list(chain.from_iterable(things)))
        if issubclass(kind, dict):
            inside = hash((inside, self._columns(sizes, list(chain.from_iterable(map(dict.values, things))))))
        return hash((*sizes, inside))

    def _columns(self, sizes: list[int], held: list[Any]) -> int:
        """All that things of such sizes hold, one after the other; what stands at the same place is mostly alike."""
        width = sizes[0]
        if 1 < width <= _MOST_COLUMNS and len(sizes) > 1 and sizes.count(width) == len(sizes):
            return hash(tuple(self.of(held[place::width]) for place in range(width)))
        return self.of(held)

    def _array(self, array: np.ndarray[Any, Any]) -> int:
        self._bytes += array.nbytes
        if array.dtype.hasobject or self._bytes > _MOST_BYTES:
            raise _CannotTell
        return hash(
            (array.shape, str(array.dtype), zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))
        )

    def _objects(self, kind: Any, things: list[Any]) -> int:
        """Instances are what their attributes are, if attributes are all they have."""
        slots = _slots_of(kind)
        if slots is None:
            raise _CannotTell  # state we cannot see
        attributes = [vars(one) for one in things] if kind.__dictoffset__ else []
        found = [[getattr(one, name, _NOTHING) for one in things] for name in slots]
        return hash((self.of(attributes), *map(self.of, found)))

    def _count(self, arrays: list[Any]) -> None:
        self._arrays += len(arrays)
        if self._arrays > _MOST_ARRAYS:
            raise _CannotTell


_NOTHING = type("_Nothing", (), {})


@functools.lru_cache(maxsize=256)
def _slots_of(kind: type) -> tuple[str, ...] | None:
    """The slots of a class; None where it, or one it comes from, has room for more than these, in C."""
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    seen = object.__basicsize__ + (len(names) + 2) * _POINTER  # two: attributes, and weak references
    if kind.__basicsize__ > seen or any(not base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1]):
        return None
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
