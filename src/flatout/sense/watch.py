"""Does the loop write to the dataset that it reads?

Without workers stock makes each batch when it is asked for, with the dataset as it is then: a size that the loop sets
every ten batches, noise that it raises step by step. Workers have the dataset as it was. This looks before every batch
whether anything was set on it, or on what it is made of; large arrays are not looked through.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None), tuple))
_HOLDS = (list, dict, set, deque)
_LOOKED_INTO = (argparse.Namespace, types.SimpleNamespace)
_MOST_PARTS, _MOST_HELD = 64, 64
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
            if id(one) in known:
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
    if isinstance(one, torch.Tensor):
        return one._version if not one.is_inference() else None
    if isinstance(one, np.ndarray):
        return one.tobytes() if one.nbytes <= _SMALL_BYTES and not one.dtype.hasobject else None
    if isinstance(one, _HOLDS):
        if len(one) > _MOST_HELD:
            return len(one)
        return dict(one) if isinstance(one, dict) else dict(enumerate(one))
    if isinstance(one, types.MethodType):
        return {"__self__": one.__self__}
    if isinstance(one, functools.partial):
        return {"func": one.func, "keywords": one.keywords}
    module = type(one).__module__.partition(".")[0]
    if not hasattr(one, "__dict__") or isinstance(one, (type, types.ModuleType, types.FunctionType)):
        return None
    if module in sys.stdlib_module_names and not isinstance(one, _LOOKED_INTO):
        return None
    of_class = {name: value for name, value in vars(type(one)).items() if type(value) in _PLAIN}
    return {**of_class, **vars(one)}


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and type(now) in _PLAIN and before == now)
