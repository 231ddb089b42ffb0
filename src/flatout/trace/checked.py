"""JSON → records with every value checked: a crash, a bad disk or a person may have changed it.

A value of the wrong type, one that is not finite or far too large raises a ValueError that names it. Unknown
keys are ignored. Bad values of facts, which come from people's scripts, are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar, Union

from flatout.model.records import (
    AppliedChange,
    Facts,
    GradientExchange,
    LoaderFacts,
    OwnCost,
    ParallelFacts,
    ProcessGroup,
    SettingsRead,
)
from flatout.model.stats import Sketch

R = TypeVar("R")
Check = Callable[[Any], Any]  # returns the value for the record

_MOST = 1e18  # bytes, milliseconds, counts: more than any run has
_MOST_SECONDS = 1e11  # three thousand years: a calendar can still show them
_MOST_ANY = 1e150  # its square is still a number
# Rounding may take a value that should not be negative below zero.
_SLIGHTLY_NEGATIVE = -1.0
_DEEPEST = 100
# A bad value in one of these is left out; the others are kept.
_LENIENT = frozenset(
    {Facts, LoaderFacts, SettingsRead, AppliedChange, GradientExchange, ParallelFacts, ProcessGroup, OwnCost}
)


def from_json(kind: Callable[..., R], data: Any) -> R:
    """A record of class `kind` from parsed JSON."""
    if type(data) is not dict:
        raise ValueError(f"an object is expected, not {_shown(data)}")
    checks, needed = _checks(kind)
    values = {}
    for name, item in data.items():
        if name not in checks:
            continue
        try:
            values[name] = checks[name](item)
        except ValueError as problem:
            if kind not in _LENIENT:
                raise ValueError(f"{name}: {problem}") from None
    if missing := needed - values.keys():
        raise ValueError(f"{min(missing)} is missing")
    return kind(**values)


@functools.cache
def _checks(kind: Callable[..., Any]) -> tuple[dict[str, Check], frozenset[str]]:
    """How to check each field of a class, and the names of those it needs. Computed once a class."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(typing.cast("type[Any]", kind))
    none = dataclasses.MISSING
    needed = frozenset(f.name for f in fields if f.default is none and f.default_factory is none)
    checks = {f.name: _check(hints[f.name], f.name) for f in fields}
    return checks, needed


def _check(hint: Any, name: str) -> Check:
    arms, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        there = _check(next(arm for arm in arms if arm is not type(None)), name)
        return lambda item: None if item is None else there(item)
    if hint is Any:
        return _plain
    if hint in (str, bool):
        return functools.partial(_of_type, hint)
    if hint is int:
        # The set-up is step -1.
        return functools.partial(_whole, -1 if name == "index" else 0)
    if hint is float:
        return functools.partial(_number, *_limits(name))
    if hint is Sketch:
        return functools.partial(_sketch, *_limits(name))
    if dataclasses.is_dataclass(hint):
        return functools.partial(from_json, typing.cast("type[Any]", hint))
    if origin is dict:
        return functools.partial(_values, _check(arms[1], name))
    if arms[-1] is Ellipsis:
        return functools.partial(_items, _check(arms[0], name), arms[0] in _LENIENT)
    return functools.partial(_row, tuple(_check(arm, name) for arm in arms))


def _limits(name: str) -> tuple[float, float]:
    """The least and the largest value of a number of this name."""
    if name in ("loss", "temperature_c"):
        return -_MOST_ANY, _MOST_ANY
    seconds = name.endswith("_s") and not name.endswith(("bytes_s", "switches_s"))
    return _SLIGHTLY_NEGATIVE, _MOST_SECONDS if seconds else _MOST


def _of_type(kind: type, item: Any) -> Any:
    if type(item) is not kind:
        raise ValueError(f"{'text' if kind is str else 'true or false'} is expected, not {_shown(item)}")
    return item


def _whole(least: int, item: Any) -> Any:
    if type(item) is not int or not least <= item <= _MOST:
        raise ValueError(f"a whole number is expected, not {_shown(item)}")
    return item


def _number(least: float, most: float, item: Any) -> Any:
    # NaN is not between anything.
    if type(item) not in (float, int) or not least <= item <= most:
        raise ValueError(f"a number is expected, not {_shown(item)}")
    return item


def _sketch(least: float, most: float, item: Any) -> Sketch:
    sketch = Sketch.from_json(item)
    if sketch.count:
        _number(least, most, sketch.low)
        _number(least, most, sketch.high)
    return sketch


def _values(check: Check, item: Any) -> dict[str, Any]:
    if type(item) is not dict:
        raise ValueError(f"an object is expected, not {_shown(item)}")
    return {key: check(value) for key, value in item.items()}


def _items(check: Check, lenient: bool, item: Any) -> tuple[Any, ...]:
    """The items, which must all pass the check, or those that do."""
    if type(item) is not list:
        raise ValueError(f"a list is expected, not {_shown(item)}")
    if not lenient:
        return tuple([check(one) for one in item])
    good = []
    for one in item:
        with contextlib.suppress(ValueError):
            good.append(check(one))
    return tuple(good)


def _row(checks: tuple[Check, ...], item: Any) -> tuple[Any, ...]:
    if type(item) is not list or len(item) != len(checks):
        raise ValueError(f"a list of {len(checks)} is expected, not {_shown(item)}")
    return tuple([check(one) for check, one in zip(checks, item, strict=True)])


def _plain(item: Any, depth: int = 0) -> Any:
    """Any JSON whose numbers are finite and that is not nested too deeply."""
    if depth > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    if isinstance(item, dict):
        return {key: _plain(value, depth + 1) for key, value in item.items()}
    if isinstance(item, list):
        return [_plain(value, depth + 1) for value in item]
    return item if item is None or isinstance(item, str | bool) else _number(-_MOST_ANY, _MOST_ANY, item)


def _shown(item: Any) -> str:
    if isinstance(item, dict | list):
        return "an object" if isinstance(item, dict) else "a list"
    text = repr(item) if not isinstance(item, int) or abs(item) < _MOST_ANY else "a number of many digits"
    return text if len(text) <= 40 else f"{text[:39]}…"
