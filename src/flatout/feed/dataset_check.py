"""Does a loop write to the dataset that it reads, or do samples fill it?

With `num_workers=0` PyTorch loads each batch when it is asked for, with the dataset as it is then: a size
that the loop sets every ten batches, noise that it raises step by step, a cache that samples fill. Workers
have a copy of the dataset. So where a loader has none of its own, the dataset, its `collate_fn` and what
they wrap are looked at between the batches of the first pass: attributes, what lists, dicts, arrays and
tensors hold (of large ones a part), numbers and texts in global variables that their methods name. What
other functions read or close over, and writes that begin in a later pass, are not seen.
"""

from __future__ import annotations

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
_CONTAINERS = (tuple, set, frozenset, deque)
_MAX_PARTS = 64  # objects that are looked at
_MAX_ENTRIES = 1024  # of a container or an array; of a larger one a part
_GONE = object()
_IGNORED = frozenset(("_compiled_call_impl",))  # set by PyTorch when a module is compiled

_MAX_BATCHES, _GROWING_BATCHES = 8, 3  # batches that are looked at for a growing cache; that have to grow it in a row
_GROWTH_PER_SAMPLE = 0.9
_MAX_WRAPPED = 4  # datasets within datasets
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
            # Nothing known of it: it is left alone, and so is what it holds.
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
                if not _same(before.get(name, _GONE), now.get(name, _GONE)):
                    return f"{type(part).__name__}, {name}"
        return None


def _state_of(part: Any) -> dict[Any, Any]:
    """What an object holds, by name; nothing where it is left alone."""
    try:
        if isinstance(part, torch.Tensor):
            return _state_of_tensor(part)
        if hasattr(part, "__array_interface__"):
            return _state_of_array(part)
        if isinstance(part, dict):
            return dict(islice(part.items(), _MAX_ENTRIES)) | {"length": len(part)}
        if isinstance(part, list):
            return dict(enumerate(part[:: 1 + len(part) // _MAX_ENTRIES])) | {"length": len(part)}
        if isinstance(part, _CONTAINERS):
            return dict(enumerate(islice(part, _MAX_ENTRIES))) | {"length": len(part)}
        if isinstance(part, functools.partial):
            return {"func": part.func, "args": part.args, "keywords": part.keywords}
        if isinstance(part, types.MethodType):
            return {"__self__": part.__self__}
        return _attributes_of(part)
    except Exception:  # attributes may raise anything
        return {}


def _state_of_tensor(tensor: torch.Tensor) -> dict[Any, Any]:
    state: dict[Any, Any] = {"shape": str(tuple(tensor.shape))}
    if not tensor.is_inference():
        state["version"] = tensor._version
    if tensor.device.type == "cpu":  # reading from the GPU would wait for it
        flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:0].reshape(-1)
        state["values"] = str(flat[:: 1 + flat.numel() // _MAX_ENTRIES].tolist())
    return state


def _state_of_array(array: Any) -> dict[Any, Any]:
    base = array
    while base is not None and type(base).__name__ not in ("memmap", "mmap"):
        base = getattr(base, "base", None)
    if base is not None or array.dtype.hasobject or not array.flags.c_contiguous:  # a mapped file is not read for this
        return {"shape": str(array.shape)}
    return {"shape": str(array.shape), "values": array.reshape(-1)[:: 1 + array.size // _MAX_ENTRIES].tobytes()}


def _attributes_of(part: Any) -> dict[Any, Any]:
    kind: Any = type(part)
    if isinstance(part, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return {}
    standard = kind.__module__.partition(".")[0] in sys.stdlib_module_names | {"tqdm"}
    if standard and kind.__name__ not in ("Namespace", "SimpleNamespace"):
        return {}
    state = {name: value for name, value in vars(kind).items() if type(value) in _CONSTANTS}
    for base in kind.__mro__:
        for name in vars(base).get("__slots__", ()):
            if hasattr(part, name):
                state[name] = getattr(part, name)
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
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return frozenset(names)


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and type(now) in _CONSTANTS and bool(before == now)


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
            self._batches = _MAX_BATCHES + 1
            return None
        growing: dict[str, int] = {}
        for name, size in now.items():
            if self._batches > 1 and size - self._before.get(name, 0) >= max(1.0, _GROWTH_PER_SAMPLE * samples):
                growing[name] = self._times.get(name, 0) + 1
        self._times, self._before = growing, now
        self._batches += 1
        return next((name for name, times in growing.items() if times >= _GROWING_BATCHES), None)


def _sizes(dataset: Any) -> Iterator[tuple[str, int]]:
    """How much each container of a dataset holds, and of those that it wraps."""
    for _ in range(_MAX_WRAPPED):
        kind = type(dataset)
        for name, held in list(getattr(dataset, "__dict__", {}).items()):
            if isinstance(held, (dict, set, deque)):
                yield f"{kind.__name__}, {name}", len(held)
            elif isinstance(held, list) and len(held) <= _MAX_COUNTED:
                yield f"{kind.__name__}, {name}", sum(entry is not None for entry in held)
        for name, held in list(vars(kind).items()):
            if isinstance(held, functools._lru_cache_wrapper):
                yield f"{kind.__name__}, {name}", held.cache_info().currsize
        dataset = getattr(dataset, "dataset", None)
