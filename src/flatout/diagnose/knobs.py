"""Where a script reads a value that a change is about: its own option, a line of its YAML, a name in its config.

A knob is believed in when its name fits and, where the value in force was seen, its value too. The value read last
comes first: scripts read a file, then let the command line have the last word. Whether turning a knob does anything
is then seen in the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flatout.model.facts import SettingsRead
from flatout.model.setting_aliases import NAMES, pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One place where a value is read: `text` is how a Change names it."""

    text: str
    key: str
    value: Any


def knobs(settings: Iterable[SettingsRead], name: str, fits: Callable[[Any], bool] = lambda value: True) -> list[Knob]:
    """The places for a change, the likeliest first."""
    pattern = pattern_of(name)
    found = [
        knob
        for source in settings
        for knob in _knobs_of(source)
        if pattern.fullmatch(knob.key.rpartition(".")[2].replace("-", "_")) and fits(knob.value)
    ]
    return list({knob.text: knob for knob in reversed(found)}.values())


def knob_for(settings: Iterable[SettingsRead], change: str, value: Any) -> str | None:
    """Where to give a change such a value: by a knob of that very name, or of one that means the same."""
    name = change.removeprefix("setting:")
    settings = tuple(settings)
    every = [knob for source in settings for knob in _knobs_of(source)]
    exact = [knob for knob in reversed(every) if knob.key == name]
    like = knobs(settings, name) if name in NAMES else []
    fit = (knob for knob in (*exact, *like) if isinstance(knob.value, bool) == isinstance(value, bool))
    return next((knob.text for knob in fit), None)


def _knobs_of(read: SettingsRead) -> Iterator[Knob]:
    if read.source == "argparse":
        for key, option in read.options.items():
            if key in read.values:
                yield Knob(text=str(option), key=str(key), value=read.values[key])
    elif read.file or read.source in ("yaml", "json"):  # text that was read without a file has its kind for a name
        for key, value in _leaves(read.values):
            yield Knob(text=f"{read.file or read.source}:{key}", key=key, value=value)


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
