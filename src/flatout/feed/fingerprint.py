"""Has the dataset changed since it was shipped to the workers?

Stock forks its workers anew for every epoch, so a change made between epochs is always seen. Ours stay; this looks
through all that the dataset holds instead, its functions and classes too, and says None ("cannot tell") rather than
miss a change: then it is shipped again, at stock's price. Global variables that it reads: feed/variables.py.

A dataset holds a million samples of one kind, not a million kinds, so things are looked at by the column: all paths at
once, all labels at once. A million (path, label) take 0.3 s. Of 40,000, which take 16 ms, it takes 0.8 ms where none of
them has become another object since the last time (`Known`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import marshal
import operator
import re
import sys
import types
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from itertools import chain
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, TypeVar

import torch

_numpy: Any = sys.modules.get("numpy")  # PyTorch has imported it, where it is installed
_ARRAYS: Any = () if _numpy is None else (_numpy.ndarray,)
_SCALARS: Any = () if _numpy is None else (_numpy.generic,)
_NUMBERS = frozenset((int, float, complex, bool, type(None)))
_HASHED = frozenset((str, bytes, PosixPath, PurePosixPath, torch.dtype, torch.device))
_NEVER_CHANGE: tuple[type, ...] = (re.Pattern,)
if _numpy is not None:
    _HASHED |= {_numpy.str_, _numpy.bytes_}
    _NEVER_CHANGE += (_numpy.dtype,)
_FIXED = (types.CodeType, types.ModuleType, TypeVar, logging.Logger)
_HOLD_OTHERS = frozenset((list, tuple, set, frozenset, dict, OrderedDict, defaultdict, torch.Size))
_BUILT_IN = _HOLD_OTHERS | {str, bytes, *_ARRAYS, torch.Tensor, functools.partial, object}
_DATA: Any = (*_NUMBERS, str, bytes, *_SCALARS, *_ARRAYS, torch.Tensor, list, tuple, set, frozenset, dict)
_POINTER, _HEAP_TYPE = tuple.__itemsize__, 1 << 9  # the flag of classes that are not static in C
_LONG = 1000  # entries of a list
_MOST_THINGS = 8_000_000
_MOST_ARRAYS = 20_000
_MOST_COLUMNS = 32
_MOST_BYTES = 256 << 20  # a quarter of a second


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class _CannotTell(Exception):
    pass


Known = dict[int, tuple[list[Any], int]]  # long lists of what can never change, by their id: entries, and a number


def fingerprint(*things: object, known: Known | None = None) -> int | None:
    """A number that changes when anything within these things does, or None when that cannot be told cheaply.

    `known`: from the last time, and renewed for the next.
    """
    walk = _Walk(known or {})
    try:
        return walk.of(list(things))
    except Exception:  # also an attribute with ideas of its own
        return None
    finally:
        if known is not None:
            known.clear()
            known.update(walk.known)


class _Walk:
    def __init__(self, known: Known) -> None:
        self._known_before, self.known = known, Known()
        self._places: dict[int, int] = {}  # of what can change or hold itself: in which order it was met
        self._met: list[list[Any]] = []  # keeps what was made on the way, so that no other thing gets its place
        self._things = self._arrays = self._bytes = 0
        self._can_change = 0  # times that something was met which can

    def of(self, things: list[Any]) -> int:
        """One number for all of them."""
        self._has_room_for(len(things))
        self._things += len(things)
        if len(set(map(type, things))) == 1:
            kind = type(things[0])
            return hash((kind, self._alike(kind, things)))
        kinds = list(map(type, things))
        alike: dict[Any, list[Any]] = {kind: [] for kind in kinds}
        for kind, one in zip(kinds, things, strict=True):
            alike[kind].append(one)
        return hash((*kinds, *(self._alike(kind, some) for kind, some in alike.items())))

    def _has_room_for(self, more: int) -> None:
        if self._things + more > _MOST_THINGS:
            raise _CannotTell

    def _alike(self, kind: Any, things: list[Any]) -> int:
        """Things of one kind."""
        if kind in _NUMBERS:
            return zlib.crc32(marshal.dumps(things, 2))  # hash(-1) is hash(-2)
        if kind in _HASHED or issubclass(kind, _NEVER_CHANGE):
            return hash(tuple(things))
        if issubclass(kind, _FIXED):
            return hash(tuple(map(id, things)))
        if issubclass(kind, _SCALARS):
            self._can_change += issubclass(kind, _numpy.void)
            return self._array(_numpy.asarray(things))
        if kind is range:
            return self.of([(one.start, one.stop, one.step) for one in things])
        if kind is tuple:
            return self._held(kind, things)
        self._can_change += 1
        before = len(self._places)
        places = [self._places.setdefault(id(one), len(self._places)) for one in things]
        fresh = [one for place, one in dict(zip(places, things, strict=True)).items() if place >= before]
        self._met.append(fresh)
        return hash((*places, self._inside(kind, fresh))) if fresh else hash(tuple(places))

    def _inside(self, kind: Any, things: list[Any]) -> int:
        if issubclass(kind, type):
            return hash((*map(id, things), *map(self._class, things)))
        if _ARRAYS and kind is _numpy.memmap:
            return hash(tuple(map(self._mapped, things)))
        if kind is torch.Generator:
            return hash(tuple(zlib.crc32(_bytes_of(one.get_state())) for one in things))
        if kind is types.FunctionType:
            return self.of([_parts_of_function(one) for one in things])
        if kind is types.MethodType:
            return self.of([(one.__func__, one.__self__) for one in things])
        if kind is types.BuiltinFunctionType:
            return self.of([(one.__name__, one.__self__) for one in things])
        if issubclass(kind, Enum) or kind is types.SimpleNamespace:
            return self.of([vars(one) for one in things])
        built_in, slots = _made_of(kind)
        attributes = [vars(one) for one in things] if kind.__dictoffset__ else []
        named = (self.of(attributes), *(self.of(_values(slot, things)) for slot in slots))
        return hash((self._content(built_in, things), *named, self.of([kind])))

    def _content(self, built_in: Any, things: list[Any]) -> int | None:
        """What is in them beside their attributes."""
        if built_in is list and len(things) == 1 and list.__len__(things[0]) >= _LONG:
            return self._long(things[0])
        if built_in in _HOLD_OTHERS:
            return self._held(built_in, things)
        if built_in is torch.Tensor:
            return hash(tuple(map(self._tensor, things)))
        if built_in in _ARRAYS:
            return hash(tuple(map(self._array, things)))
        if built_in in (str, bytes):
            return hash(tuple(map(built_in.__hash__, things)))
        return None

    def _held(self, kind: Any, things: list[Any]) -> int:
        """What lists, tuples, sets and dicts hold, whatever a class made of them says that it does."""
        sizes = list(map(kind.__len__, things))
        self._has_room_for(sum(sizes))
        inside = self._columns(sizes, list(chain.from_iterable(map(kind.__iter__, things))))
        if issubclass(kind, dict):
            inside = hash((inside, self._columns(sizes, list(chain.from_iterable(map(kind.values, things))))))
        return hash((*sizes, inside))

    def _long(self, one: list[Any]) -> int:
        """What a long list holds: nothing else, if it holds the very same things, and none of them can change."""
        entries, number = self._known_before.get(id(one), ([], 0))
        if len(entries) != list.__len__(one) or not all(map(operator.is_, entries, list.__iter__(one))):
            can_change = self._can_change
            number, entries = self._held(list, [one]), list.copy(one)
            if self._can_change != can_change:
                return number
        self.known[id(one)] = entries, number
        return number

    def _columns(self, sizes: list[int], held: list[Any]) -> int:
        """All that things of such sizes hold, one after the other; what stands at the same place is mostly alike."""
        width = sizes[0]
        if 1 < width <= _MOST_COLUMNS and len(sizes) > 1 and sizes.count(width) == len(sizes):
            return hash(tuple(self.of(held[place::width]) for place in range(width)))
        return self.of(held)

    def _class(self, kind: type) -> int:
        """Classes hold things too; their methods are told by which they are."""
        if issubclass(kind, Enum):
            return 0  # the members, which are looked at as they are met
        named = [pair for base in kind.__mro__ if base.__flags__ & _HEAP_TYPE for pair in vars(base).items()]
        held = [(name, one) for name, one in named if not name.startswith("__") and _is_data(one)]
        return hash((*(id(one) for _, one in named if not _is_data(one)), self.of(held)))

    def _array(self, array: Any) -> int:
        self._count(array.nbytes)
        if array.dtype.hasobject:
            raise _CannotTell
        return hash(
            (
                array.shape,
                str(array.dtype),
                zlib.crc32(_numpy.ascontiguousarray(array).reshape(-1).view(_numpy.uint8).data),
            )
        )

    def _tensor(self, tensor: torch.Tensor) -> int:
        """By what is in it: numpy, `.data` and C write to it without counting its version up."""
        if tensor.device.type != "cpu":
            raise _CannotTell  # to look there is to wait for the card
        self._count(tensor.numel() * tensor.element_size())
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        return hash((tuple(tensor.shape), tensor.dtype, zlib.crc32(_bytes_of(plain.contiguous()))))

    def _mapped(self, array: Any) -> int:
        """Workers map the same file, unless what is written stays with the process, or it is a copy in memory."""
        if array._mmap is None or array.mode == "c":
            return self._array(array)
        self._count(0)
        file = Path(array.filename).stat()
        place = (array.ctypes.data, array.strides, array.shape, str(array.dtype))
        return hash((str(array.filename), file.st_dev, file.st_ino, *place))

    def _count(self, size_bytes: int) -> None:
        self._arrays += 1
        self._bytes += size_bytes
        if self._arrays > _MOST_ARRAYS or self._bytes > _MOST_BYTES:
            raise _CannotTell


def _is_data(one: Any) -> bool:
    """Whether what a class holds is more than a method or the like."""
    kind: Any = type(one)
    has_attributes = kind.__flags__ & _HEAP_TYPE and kind.__dictoffset__ and not hasattr(kind, "__get__")
    return isinstance(one, _DATA) or bool(has_attributes and not isinstance(one, _FIXED))


_NOTHING = type("_Nothing", (), {})


def _parts_of_function(function: types.FunctionType) -> tuple[Any, ...]:
    """What makes it this function; the globals it reads are not looked at."""
    seen = tuple(_value(lambda cell: cell.cell_contents, cell) for cell in function.__closure__ or ())
    return function.__code__, function.__defaults__, function.__kwdefaults__, vars(function), seen


def _values(slot: Any, things: list[Any]) -> list[Any]:
    try:
        return list(map(slot.__get__, things))
    except AttributeError:  # not all have been set
        return [_value(slot.__get__, one) for one in things]


def _value(read: Callable[[Any], Any], one: Any) -> Any:
    try:
        return read(one)
    except (AttributeError, ValueError):
        return _NOTHING


@functools.lru_cache(maxsize=256)
def _made_of(kind: type) -> tuple[type, tuple[Any, ...]]:
    """What a class is built on, and its slots; there must be no room in it for more than these, in C."""
    built_in = next(base for base in kind.__mro__ if base in _BUILT_IN)
    below = built_in.__mro__
    slots = [
        (base, one) for base in kind.__mro__ for one in vars(base).values() if type(one) is types.MemberDescriptorType
    ]
    dict_inside = not built_in.__dictoffset__ and (
        kind.__dictoffset__ > 0 or built_in.__itemsize__ > 0 > kind.__dictoffset__
    )
    weak_inside = not built_in.__weakrefoffset__ and kind.__weakrefoffset__ > 0
    pointers = sum(base not in below for base, _ in slots) + dict_inside + weak_inside
    static = [base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE and base not in below]
    if static or kind.__basicsize__ > built_in.__basicsize__ + pointers * _POINTER:
        raise _CannotTell
    return built_in, tuple(one for _, one in slots)
