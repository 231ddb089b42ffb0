"""Which global variables does the code of a dataset read?

A loop may set them from batch to batch, or from one epoch to the next, as it may set attributes of the dataset:
`noise = 0.1`, `config.SIZE = 64`, `args.mixup = 0`. This finds them in the script's own code: in the methods of what a
dataset is made of, in the functions that these name, and so on; `args.mixup` as that, and not all of `args`. Libraries
are not looked into.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_LIBRARIES = (str(Path(os.__file__).parent), str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_DATA: tuple[type, ...] = (int, float, complex, bool, str, bytes, type(None), torch.Tensor)
_numpy: Any = sys.modules.get("numpy")  # PyTorch has imported it, where it is installed
if _numpy is not None:
    _DATA += (_numpy.generic, _numpy.ndarray)
_HOLDS = (list, tuple, set, frozenset, dict)
_MOST_MET, _MOST_HELD = 1024, 64
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD"))

Name = tuple[str, ...]  # of a variable: "config", "SIZE"


class Globals:
    """The global variables that the code of these things reads."""

    def __init__(self, *things: Any) -> None:
        self._variables: dict[str, tuple[dict[str, Any], Name]] = {}  # the module that each is of, and its name there
        met: dict[int, Any] = {}
        found = deque(things)
        while found and len(met) < _MOST_MET:
            one = found.popleft()
            if type(one) in _DATA or id(one) in met:
                continue
            met[id(one)] = one
            try:
                found.extend(self._read_by(one) if isinstance(one, types.FunctionType) else _made_of(one))
            except Exception:  # a thing with ideas of its own
                continue

    def __bool__(self) -> bool:
        return bool(self._variables)

    def now(self) -> dict[str, Any]:
        """What each is now, in the same order every time; of what is no data only which one it is."""
        return {label: _as_data(_value(*variable)) for label, variable in self._variables.items()}

    def _read_by(self, function: types.FunctionType) -> Iterator[Any]:
        """Note what a function reads. What it names may read more."""
        if not _is_the_scripts(function.__code__.co_filename):
            return
        yield from (cell.cell_contents for cell in function.__closure__ or () if _is_set(cell))
        space = function.__globals__
        for name in _names_in(function.__code__):
            known = _as_far_as_known(space, name)
            if known:
                one = _value(space, known)
                yield one
                if not isinstance(one, (types.FunctionType, types.BuiltinFunctionType, type)):
                    label = ".".join(known)
                    if self._variables.setdefault(label, (space, known))[0] is not space:  # another module's
                        self._variables[f"{space.get('__name__')}.{label}"] = space, known


def _as_far_as_known(space: dict[str, Any], name: Name) -> Name:
    """So much of a name as leads to something by itself; nothing where that belongs to a library."""
    one: Any = space
    for length, part in enumerate(name):
        held = _names_of(one)
        if part not in held:
            return () if isinstance(one, types.ModuleType) else name[:length]
        one = held[part]
        if isinstance(one, types.ModuleType) and not _is_the_scripts(getattr(one, "__file__", None) or "<frozen>"):
            return ()
    return () if isinstance(one, types.ModuleType) else name


def _value(space: dict[str, Any], name: Name) -> Any:
    one: Any = space
    for part in name:
        one = _names_of(one).get(part)
    return one


def _names_of(one: Any) -> dict[str, Any] | types.MappingProxyType[str, Any]:
    if isinstance(one, dict):
        return one
    try:
        held = vars(one)
    except Exception:  # it has none, or ideas of its own
        return {}
    return held if isinstance(held, (dict, types.MappingProxyType)) else {}


def _as_data(one: Any) -> Any:
    return one if isinstance(one, (*_DATA, *_HOLDS)) else id(one)


def _made_of(one: Any) -> Iterator[Any]:
    """What may have code that reads, in a thing that is no function."""
    if isinstance(one, types.MethodType):
        yield from (one.__func__, one.__self__)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, type):
        for held in (held for base in one.__mro__ for held in vars(base).values()):
            method = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
            if isinstance(method, types.FunctionType) and _is_the_scripts(method.__code__.co_filename):
                yield method
    elif isinstance(one, _HOLDS):
        if len(one) <= _MOST_HELD:
            yield from one.values() if isinstance(one, dict) else one
    else:
        yield type(one)
        yield from list(_names_of(one).values())[:_MOST_HELD]


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[Name, ...]:
    """The global variables that it reads, with what it asks of each by name: `config.SIZE`, `config["SIZE"]`."""
    found: dict[Name, None] = {}
    steps = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    for place, step in enumerate(steps):
        if step.opname != "LOAD_GLOBAL":
            continue
        name, rest = [str(step.argval)], deque(steps[place + 1 : place + 9])
        while rest:
            one = rest.popleft()
            if one.opname == "LOAD_CONST" and isinstance(one.argval, str) and rest:
                if rest.popleft().opname != "BINARY_SUBSCR":
                    break
            elif one.opname not in _ATTRIBUTE:
                break
            name.append(str(one.argval))
        found[tuple(name)] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_names_in(constant))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _is_the_scripts(filename: str) -> bool:
    return not (filename.startswith((*_LIBRARIES, "<frozen")) or "-packages/" in filename)
