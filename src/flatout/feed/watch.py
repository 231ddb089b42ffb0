"""Does the loop write to the dataset that it reads?

Without workers stock makes each batch when it is asked for, with the dataset as it is then: a size that the loop sets
every ten batches, noise that it raises step by step. Workers have the dataset as it was. This looks before every batch
whether anything was set on it, or on what it is made of: attributes and slots, what containers and arrays hold (a
thousand places of large ones), what functions have closed over; and global variables that its code reads.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import mmap
import multiprocessing.sharedctypes as shared
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

import torch

from flatout.feed.variables import Globals

_numpy: Any = sys.modules.get("numpy")  # PyTorch has imported it, where it is installed

_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))
_HOLDS = (list, tuple, set, frozenset, deque)
_LOOKED_INTO = (argparse.Namespace, types.SimpleNamespace)
_LEFT_ALONE = frozenset(("tqdm",))  # modules of what counts by itself
_OURS = frozenset(("_compiled_call_impl",))  # set by whoever times or compiles a model
_MOST_PARTS, _MOST_HELD = 64, 256
_MOST_ENTRIES = 1024  # of a large container or array, spread over it: a step that writes to many is seen to
_SMALL_BYTES, _LARGE_BYTES = 4096, 1 << 28
_GONE = object()
_FILLED_LOOKS, _FILLED_TIMES = 8, 3  # batches
_FILLED_BY = 0.9  # entries for a sample
_COUNTED = 200_000  # entries of a list, None or not
_WRAPPED = 4  # datasets in datasets


class Watch:
    """What these things are made of, as it was when this was made."""

    def __init__(self, *things: Any) -> None:
        variables = Globals(*things)
        self._things = (variables, *things) if variables else things
        self.looked = 0  # times
        self.renew()

    def renew(self) -> None:
        """From now on, as it is now."""
        self._parts: list[tuple[Any, Callable[[Any], Any], Any]] = []
        known: set[int] = set()
        found: deque[Any] = deque(self._things)
        while found and len(self._parts) < _MOST_PARTS:
            one = found.popleft()
            if type(one) in _PLAIN or id(one) in known:
                continue
            known.add(id(one))
            look = _looked_at(_way_to_look, one)
            state = _looked_at(look, one) if look is not None else None
            if state is not None:
                self._parts.append((one, look, state))
                found.extend(state.values() if isinstance(state, dict) else ())

    def changed(self) -> str | None:
        """What has been set since, in words; None where nothing has."""
        self.looked += 1
        for one, look, before in self._parts:
            now = _looked_at(look, one)
            if not isinstance(before, dict) or not isinstance(now, dict):
                if now != before:
                    return type(one).__name__
            elif not _untouched(now, before):
                names = (name for name in {**before, **now} if not _same(now.get(name, _GONE), before.get(name, _GONE)))
                if (name := next(names, _GONE)) is not _GONE:
                    return f"{'a global variable' if isinstance(one, Globals) else type(one).__name__}, {name}"
        return None


class Filling:
    """Do samples fill the dataset that they come from: a cache, which each worker would have one of?

    A container of its own that grows by as much as there are samples in a batch, several batches in a row, says so; one
    that grows by less has a file of each shard in it, or the like. Only the first few batches are looked at.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._before: dict[str, int] = {}
        self._grown: dict[str, int] = {}
        self._looks = 0

    def after_batch(self, samples: int) -> str | None:
        """What is being filled, in words; None where that is not known, or no longer looked at."""
        if self._looks > _FILLED_LOOKS:
            return None
        try:
            now = dict(_held_by(self._dataset))
        except Exception:  # a container with ideas of its own
            self._looks = _FILLED_LOOKS + 1
            return None
        if self._looks > 1:
            least = max(1.0, _FILLED_BY * samples)
            grown = (name for name, held in now.items() if held - self._before.get(name, 0) >= least)
            self._grown = {name: self._grown.get(name, 0) + 1 for name in grown}
        self._before, self._looks = now, self._looks + 1
        return next((name for name, times in self._grown.items() if times >= _FILLED_TIMES), None)


def _held_by(dataset: Any) -> Iterator[tuple[str, int]]:
    """How much each container of a dataset holds, and of those that it wraps."""
    for _ in range(_WRAPPED):
        of = type(dataset).__name__
        own, cached = list(getattr(dataset, "__dict__", {}).items()), list(vars(type(dataset)).items())
        for name, one in own:
            if isinstance(one, (dict, set, deque)) or (isinstance(one, list) and len(one) <= _COUNTED):
                empty = sum(map(operator.is_, one, repeat(None))) if isinstance(one, list) else 0
                yield f"{of}, {name}", len(one) - empty
        for name, one in cached:
            if isinstance(one, functools._lru_cache_wrapper):
                yield f"{of}, {name}", one.cache_info().currsize
        dataset = getattr(dataset, "dataset", None)


def _looked_at(look: Callable[[Any], Any], one: Any) -> Any:
    """What is seen when a thing is looked at: by name, or as one value; None where that cannot be told."""
    try:
        return look(one)
    except Exception:  # an attribute with ideas of its own
        return None


def _way_to_look(one: Any) -> Callable[[Any], Any] | None:
    """How a thing is looked at, by what it is; None where it is left alone."""
    for kinds, look in _WAYS:
        if isinstance(one, kinds):
            return look
    if isinstance(one, _HOLDS) and not hasattr(one, "_fields"):
        return _entries
    if isinstance(one, (type, types.ModuleType, types.BuiltinFunctionType)):
        return None
    module = type(one).__module__.partition(".")[0]
    if (module in sys.stdlib_module_names or module in _LEFT_ALONE) and not isinstance(one, _LOOKED_INTO):
        return None
    return _attributes


def _tensor(one: Any) -> Any:
    small = one.device.type == "cpu" and one.numel() * one.element_size() <= _SMALL_BYTES
    plain = one.detach().contiguous()
    content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if small else b""
    return (0 if one.is_inference() else one._version), content


def _array(one: Any) -> Any:
    if one.dtype.hasobject or one.nbytes > _LARGE_BYTES or _is_mapped(one):
        return None
    if one.nbytes <= _SMALL_BYTES or not one.flags.c_contiguous:
        return one.tobytes() if one.nbytes <= _SMALL_BYTES else None
    return one.view(_numpy.ndarray).reshape(-1)[:: 1 + one.size // _MOST_ENTRIES].tobytes()


def _values(one: Any) -> Any:
    return dict(one) if len(one) <= _MOST_HELD else _Entries(len(one), list(islice(one.values(), _MOST_ENTRIES)))


def _entries(one: Any) -> Any:
    if len(one) <= _MOST_HELD:
        return dict(enumerate(one))
    return _Entries(len(one), one[:: 1 + len(one) // _MOST_ENTRIES]) if isinstance(one, list) else len(one)


def _closed_over(one: Any) -> Any:
    return dict(zip(one.__code__.co_freevars, (cell.cell_contents for cell in one.__closure__ or ()), strict=True))


def _attributes(one: Any) -> Any:
    kind: Any = type(one)
    slots = {name: getattr(one, name) for name in _slots(kind) if hasattr(one, name)}
    of_class = {name: value for name, value in vars(kind).items() if type(value) in _PLAIN}
    own = {name: value for name, value in getattr(one, "__dict__", {}).items() if name not in _OURS}
    return {**of_class, **slots, **own}


@functools.lru_cache(maxsize=256)
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))


_WAYS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Globals, Globals.now),
    (torch.Tensor, _tensor),
    *([(_numpy.ndarray, _array)] if _numpy is not None else []),
    (shared.SynchronizedBase, lambda one: bytes(memoryview(one.get_obj()))[:_SMALL_BYTES]),
    (dict, _values),
    (types.MethodType, lambda one: {"__self__": one.__self__, "__func__": one.__func__}),
    (functools.partial, lambda one: {"func": one.func, "args": one.args, "keywords": one.keywords}),
    (types.FunctionType, _closed_over),
)


def _is_mapped(array: Any) -> bool:
    """Whether looking at it would read from a disk."""
    while array is not None and not isinstance(array, (_numpy.memmap, mmap.mmap)):
        array = getattr(array, "base", None)
    return array is not None


class _Entries:
    """Some of what a large container holds: the same where each is the same object, however they compare."""

    def __init__(self, length: int, some: list[Any]) -> None:
        self._length, self._some = length, some

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Entries) or self._length != other._length:
            return False
        return all(map(operator.is_, self._some, other._some))

    __hash__ = None  # type: ignore[assignment]


def _untouched(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether the very same things go by the same names, as they nearly always do."""
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) and all(map(operator.is_, now.values(), before.values()))


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and type(now) in _PLAIN and before == now)
