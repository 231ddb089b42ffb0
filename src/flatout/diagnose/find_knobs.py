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
    """One value that the script read. `text` is how a Change names the place; empty where it cannot be set there."""

    key: str  # with those that it lies in: train.amp
    value: Any
    source: str
    file: str | None
    text: str

    @property
    def name(self) -> str:
        """The last part of its key."""
        return self.key.rpartition(".")[2]

    def is_called(self, *subjects: str) -> bool:
        """Whether this is what people call one of these."""
        return pattern_of(*subjects).fullmatch(self.name.replace("-", "_")) is not None


def knobs(settings: Iterable[SettingsRead], name: str, fits: Callable[[Any], bool] = lambda value: True) -> list[Knob]:
    """The places for a change, the likeliest first, each once."""
    found = [knob for knob in every_knob(settings) if knob.text and knob.is_called(name) and fits(knob.value)]
    return list({knob.text: knob for knob in reversed(found)}.values())


def knob_for(settings: Iterable[SettingsRead], change: str, value: Any) -> str | None:
    """Where to give a change such a value: by a knob of that very name, or of one that means the same."""
    name, settings = change.removeprefix("setting:"), tuple(settings)
    candidates = [knob for knob in reversed(every_knob(settings)) if knob.text and name in (knob.key, knob.name)]
    if name in SETTING_NAMES:
        candidates += knobs(settings, name)
    for knob in candidates:
        if isinstance(knob.value, bool) == isinstance(value, bool):
            return knob.text
    return None


def every_knob(settings: Iterable[SettingsRead]) -> list[Knob]:
    """Every plain value that was read, in that order."""
    every: list[Knob] = []
    for read in settings:
        for key, value in _leaves(read.values):
            text = ""
            if read.source == "argparse":
                text = str(read.options.get(key, ""))
            elif read.file or read.source in ("yaml", "json"):  # text without a file is named by its kind
                text = f"{read.file or read.source}:{key}"
            every.append(Knob(key=key, value=value, source=read.source, file=read.file, text=text))
    return every


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
