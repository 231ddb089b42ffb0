"""Where a script reads a value that a change is about: its own option, a line of its YAML, a name in its
config.

A knob counts where its name fits and, if the value in force was seen, its value too. The value read last
comes first: scripts read a file, then let the command line have the last word. A trial shows whether a knob
does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flatout.model.changes import SETTING_NAMES, pattern_of
from flatout.model.facts import SettingsRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One place where a value is read: `text` is how a Change names it."""

    text: str
    key: str
    value: Any


def knobs(settings: Iterable[SettingsRead], name: str, fits: Callable[[Any], bool] = lambda value: True) -> list[Knob]:
    """The places for a change, the likeliest first, each once."""
    pattern = pattern_of(name)
    found = [
        knob
        for knob in _all_knobs(settings)
        if pattern.fullmatch(knob.key.rpartition(".")[2].replace("-", "_")) and fits(knob.value)
    ]
    return list({knob.text: knob for knob in reversed(found)}.values())


def knob_for(settings: Iterable[SettingsRead], change: str, value: Any) -> str | None:
    """Where to give a change such a value: by a knob of that very name, or of one that means the same."""
    name, settings = change.removeprefix("setting:"), tuple(settings)
    candidates = [knob for knob in reversed(_all_knobs(settings)) if knob.key == name]
    if name in SETTING_NAMES:
        candidates += knobs(settings, name)
    for knob in candidates:
        if isinstance(knob.value, bool) == isinstance(value, bool):
            return knob.text
    return None


def _all_knobs(settings: Iterable[SettingsRead]) -> list[Knob]:
    every: list[Knob] = []
    for read in settings:
        if read.source == "argparse":
            for key, option in read.options.items():
                if key in read.values:
                    every.append(Knob(text=str(option), key=str(key), value=read.values[key]))
        elif read.file or read.source in ("yaml", "json"):  # text without a file is named by its kind
            for key, value in _leaves(read.values):
                every.append(Knob(text=f"{read.file or read.source}:{key}", key=key, value=value))
    return every


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
