"""Does the loop write to the dataset that it reads?

Without workers stock makes each batch when it is asked for, with the dataset as it is then: a size that the loop sets
every ten batches, noise that it raises step by step. Workers have the dataset as it was. This looks before every batch
whether anything was set on it, or on what it is made of: attributes and slots, what small containers and arrays hold,
what functions have closed over. Large ones are not looked through, nor are global variables.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing.sharedctypes as shared
import sys
import types
from collections import deque
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))
_HOLDS = (list, tuple, set, frozenset, deque)
_LOOKED_INTO = (argparse.Namespace, types.SimpleNamespace)
_LEFT_ALONE = frozenset(("tqdm",))  # modules of what counts by itself
_OURS = frozenset(("_compiled_call_impl",))  # set by whoever times or compiles a model
_MOST_PARTS, _MOST_HELD = 64, 256
_SMALL_BYTES = 4096
_GONE = object()


class Watch:
    """What these things are made of, as it was when this was made."""

    def __init__(self, *things: Any) -> None:
        self._things = things
        self.looked = 0  # times
        self.renew()

    def renew(self) -> None:
        """From now on, as it is now."""
        self._parts: list[tuple[Any, Any]] = []
        known: set[int] = set()
        found: deque[Any] = deque(self._things)
        while found and len(self._parts) < _MOST_PARTS:
            one = found.popleft()
            if type(one) in _PLAIN or id(one) in known:
                continue
            known.add(id(one))
            state = _state(one)
            if state is not None:
                self._parts.append((one, state))
                found.extend(state.values() if isinstance(state, dict) else ())

    def changed(self) -> str | None:
        """What has been set since, in words; None where nothing has."""
        self.looked += 1
        for one, before in self._parts:
            now = _state(one)
            if not isinstance(before, dict) or not isinstance(now, dict):
                if now != before:
                    return type(one).__name__
            elif len(now) != len(before) or not all(_same(now.get(name, _GONE), was) for name, was in before.items()):
                names = (name for name in {**before, **now} if not _same(now.get(name, _GONE), before.get(name, _GONE)))
                return f"{type(one).__name__}, {next(names)}"
        return None


def _state(one: Any) -> Any:
    """What may be set on a thing: by name, or as one value; None where it is not looked at."""
    try:
        return _looked_at(one)
    except Exception:  # an attribute with ideas of its own
        return None


def _looked_at(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        small = one.device.type == "cpu" and one.numel() * one.element_size() <= _SMALL_BYTES
        content = one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if small else b""
        return (0 if one.is_inference() else one._version), content
    if isinstance(one, np.ndarray):
        return one.tobytes() if one.nbytes <= _SMALL_BYTES and not one.dtype.hasobject else None
    if isinstance(one, shared.SynchronizedBase):
        return bytes(memoryview(one.get_obj()))[:_SMALL_BYTES]
    if isinstance(one, dict):
        return dict(one) if len(one) <= _MOST_HELD else len(one)
    if isinstance(one, _HOLDS) and not hasattr(one, "_fields"):
        return dict(enumerate(one)) if len(one) <= _MOST_HELD else len(one)
    if isinstance(one, types.MethodType):
        return {"__self__": one.__self__, "__func__": one.__func__}
    if isinstance(one, functools.partial):
        return {"func": one.func, "args": one.args, "keywords": one.keywords}
    if isinstance(one, types.FunctionType):
        return dict(zip(one.__code__.co_freevars, (cell.cell_contents for cell in one.__closure__ or ()), strict=True))
    if isinstance(one, (type, types.ModuleType, types.BuiltinFunctionType)):
        return None
    module = type(one).__module__.partition(".")[0]
    if (module in sys.stdlib_module_names or module in _LEFT_ALONE) and not isinstance(one, _LOOKED_INTO):
        return None
    kinds = type(one).__mro__
    slots = [name for kind in kinds for name in vars(kind).get("__slots__", ()) if hasattr(one, name)]
    of_class = {name: value for name, value in vars(type(one)).items() if type(value) in _PLAIN}
    own = {name: value for name, value in getattr(one, "__dict__", {}).items() if name not in _OURS}
    return {**of_class, **{name: getattr(one, name) for name in slots}, **own}


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and type(now) in _PLAIN and before == now)
