"""Does a loop write to the dataset that it reads, or do samples fill it?

With `num_workers=0` PyTorch loads each batch with the dataset as it is then: a size that the loop sets every
ten batches, a cache that samples fill. Workers have a copy. So where a loader has none of its own, the
dataset, its `collate_fn` and what they wrap are looked at between the batches of the first pass: attributes,
what containers, arrays and tensors hold (of large ones a part), numbers and texts in global variables that
their methods name.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

_CONSTANTS = frozenset((int, float, complex, bool, str, bytes, type(None)))
_MAX_PARTS = 64  # objects that are looked at
_MAX_ENTRIES = 1024  # of a container or an array; of a larger one a part
_GONE = object()
_IGNORED = frozenset(("_compiled_call_impl",))  # set by PyTorch when a module is compiled

_MAX_BATCHES, _GROWING_BATCHES = 8, 3  # batches that are looked at for a growing cache; that have to grow it in a row
_MAX_WRAPPED = 4  # datasets within datasets that are looked at
_MAX_COUNTED = 200_000  # entries of a list, None or not


class DatasetCheck:
    """What these objects and their parts looked like when this was created or renewed."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self.looked = 0  # times
        self.renew()

    def renew(self) -> None:
        """Compare with how things are now from here on."""
        self._parts: list[tuple[Any, dict[Any, Any]]] = []
        known: set[int] = set()
        to_visit: deque[Any] = deque(self._roots)
        while to_visit and len(self._parts) < _MAX_PARTS:
            part = to_visit.popleft()
            if type(part) in _CONSTANTS or id(part) in known:
                continue
            known.add(id(part))
            state = _state_of(part)
            if state:
                self._parts.append((part, state))
                to_visit.extend(state.values())

    def changed(self) -> str | None:
        """What has been written to since, in words; None where nothing has."""
        self.looked += 1
        for part, before in self._parts:
            now = _state_of(part)
            if list(now) == list(before) and all(map(operator.is_, now.values(), before.values())):
                continue  # nearly always
            for name in {**before, **now}:
                was, is_now = before.get(name, _GONE), now.get(name, _GONE)
                constant = type(was) is type(is_now) and type(was) in _CONSTANTS
                if was is not is_now and not (constant and was == is_now):
                    return f"{type(part).__name__}, {name}"
        return None


def _state_of(part: Any) -> dict[Any, Any]:
    """What an object holds, by name; nothing where it is left alone."""
    try:
        if isinstance(part, torch.Tensor) or hasattr(part, "__array_interface__"):
            return _state_of_numbers(part)
        if isinstance(part, dict):
            return dict(islice(part.items(), _MAX_ENTRIES)) | {"length": len(part)}
        if isinstance(part, (list, tuple)):
            return dict(enumerate(part[:: 1 + len(part) // _MAX_ENTRIES])) | {"length": len(part)}
        if isinstance(part, (set, frozenset, deque)):
            return dict(enumerate(islice(part, _MAX_ENTRIES))) | {"length": len(part)}
        if isinstance(part, functools.partial):
            return {"func": part.func, "args": part.args, "keywords": part.keywords}
        if isinstance(part, types.MethodType):
            return {"__self__": part.__self__}
        return _attributes_of(part)
    except Exception:  # attributes may raise anything
        return {}


def _state_of_numbers(part: Any) -> dict[Any, Any]:
    """Of a tensor or an array. One on the GPU is not read, that would wait for it; nor is a mapped file."""
    state: dict[Any, Any] = {"shape": str(tuple(part.shape))}
    if isinstance(part, torch.Tensor):
        if not part.is_inference():
            state["version"] = part._version
        if part.device.type == "cpu" and part.is_contiguous():
            flat = part.detach().reshape(-1)
            some = flat[:: 1 + len(flat) // _MAX_ENTRIES].contiguous()
            state["values"] = ctypes.string_at(some.data_ptr(), some.nbytes)  # a list of them takes fifty times as long
    elif part.flags.c_contiguous and not part.dtype.hasobject and not _is_mapped(part):
        state["values"] = part.reshape(-1)[:: 1 + part.size // _MAX_ENTRIES].tobytes()
    return state


def _is_mapped(array: Any) -> bool:
    while array is not None:
        if type(array).__name__ in ("memmap", "mmap"):
            return True
        array = getattr(array, "base", None)
    return False


def _attributes_of(part: Any) -> dict[Any, Any]:
    kind: Any = type(part)
    standard = kind.__module__.partition(".")[0] in sys.stdlib_module_names | {"tqdm"}
    if isinstance(part, type) or (standard and kind.__name__ not in ("Namespace", "SimpleNamespace")):
        return {}
    state = {name: value for name, value in vars(kind).items() if type(value) in _CONSTANTS}
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    state.update((name, getattr(part, name)) for name in slots if hasattr(part, name))
    state.update((name, value) for name, value in getattr(part, "__dict__", {}).items() if name not in _IGNORED)
    for variables, name in _globals_named_by(kind):
        if type(variables.get(name)) in _CONSTANTS:
            state[f"global variable {name}"] = variables.get(name)
    return state


@functools.lru_cache(maxsize=256)
def _globals_named_by(kind: type) -> list[tuple[dict[str, Any], str]]:
    return [
        (function.__globals__, name)
        for function in functions_of(kind)
        for name in names_in(function.__code__)
        if type(function.__globals__.get(name)) in _CONSTANTS
    ]


def functions_of(kind: type) -> Iterator[types.FunctionType]:
    """The methods of a class that are not torch's or Python's own."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in {*sys.stdlib_module_names, "torch"}:
            yield from (held for held in vars(base).values() if isinstance(held, types.FunctionType))


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code asks for, in functions within it too."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


class CacheGrowth:
    """Do samples fill a cache in the dataset? Each worker would have one of its own to fill.

    A container that grows by about as much as a batch has samples, several batches in a row, is one.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._before: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._batches = 0

    def after_batch(self, samples: int) -> str | None:
        """The container that is being filled, in words; None where none is known."""
        if self._batches > _MAX_BATCHES:
            return None
        try:
            now = dict(_sizes(self._dataset))
        except Exception:  # containers may raise anything
            self._batches = _MAX_BATCHES
            now = {}
        growing = [name for name, size in now.items() if size - self._before.get(name, 0) >= max(1, 0.9 * samples)]
        if self._batches > 1:  # the first batches fill what has one entry a worker, or a file
            self._times = {name: self._times.get(name, 0) + 1 for name in growing}
        self._before = now
        self._batches += 1
        return next((name for name, times in self._times.items() if times >= _GROWING_BATCHES), None)


def with_wrapped(dataset: Any) -> Iterator[Any]:
    """A dataset, and those that it wraps."""
    for _ in range(_MAX_WRAPPED):
        if dataset is not None:
            yield dataset
        dataset = getattr(dataset, "dataset", None)


def _sizes(dataset: Any) -> Iterator[tuple[str, int]]:
    """How much each container of a dataset holds, and of those that it wraps."""
    for one in with_wrapped(dataset):
        for name, held in [*getattr(one, "__dict__", {}).items(), *vars(type(one)).items()]:
            place = f"{type(one).__name__}, {name}"
            if isinstance(held, (dict, set, deque)):
                yield place, len(held)
            elif isinstance(held, list) and len(held) <= _MAX_COUNTED:
                yield place, sum(entry is not None for entry in held)
            elif isinstance(held, functools._lru_cache_wrapper):
                yield place, held.cache_info().currsize
