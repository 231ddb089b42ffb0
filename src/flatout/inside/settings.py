"""The settings a script has read: its command line, YAML and JSON files, Python config modules. No secret is kept.

Only the standard library is used, because this runs before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from flatout.model.facts import SettingsRead
from flatout.redact import redact_setting

_CONFIG = re.compile(r"config|settings|options", re.I)
_PYTHONS_OWN = os.path.dirname(os.__file__)  # noqa: PTH120  # there is a module about how Python itself was built
_MOST_SETTINGS = 400
_MOST_ITEMS = 50
_MOST_SOURCES = 20
_LONGEST_TEXT = 300


def _cut(value: Any, longest: int = _LONGEST_TEXT) -> Any:
    """A value, cut to what a report can hold."""
    if isinstance(value, dict):
        return {key: _cut(held, longest) for key, held in list(value.items())[:_MOST_SETTINGS]}
    if isinstance(value, list | tuple):
        return [_cut(held, longest) for held in value[:_MOST_ITEMS]]
    return str(value)[:longest] if isinstance(value, str | Path | Enum) else value


class Settings:
    """Values the script read from its command line, from YAML and JSON files and from Python config modules."""

    def __init__(self) -> None:
        self.read: list[SettingsRead] = []
        self._looked_at_modules = False

    def note(self, source: str, where: str | None, values: Any, options: dict[str, str] | None = None) -> None:
        """Remember one set of values. Files of installed packages are not the user's settings."""
        if where is not None and "-packages" in str(where):
            return
        if not isinstance(values, dict) or not values or len(self.read) >= _MOST_SOURCES:
            return  # a dataset may read a file a sample
        # A secret that is cut short would no longer look like one: hide it first.
        known = redact_setting("", _cut(values, 10 * _LONGEST_TEXT))
        file = str(where) if where is not None else None
        entry = SettingsRead(source=source, file=file, values=_cut(known), options=options or {})
        if entry not in self.read:
            self.read.append(entry)

    def note_arguments(self, parser: argparse.ArgumentParser, namespace: Any) -> None:
        """Remember what argparse made of the command line, with the option that sets each value."""
        options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
        self.note("argparse", None, vars(namespace), options)

    def note_config_modules(self) -> None:
        """Remember plain values of the user's own modules that are called config or settings (once)."""
        if self._looked_at_modules:
            return
        self._looked_at_modules = True
        here = str(Path.cwd())
        for name, module in sys.modules.copy().items():  # in one go: others import
            if not _CONFIG.search(name.rpartition(".")[2]) or name.startswith("flatout."):
                continue
            path = getattr(module, "__file__", None)
            if not path or path.startswith(_PYTHONS_OWN):
                continue
            if not (path.startswith(here) or os.path.dirname(path) in sys.path):  # noqa: PTH120
                continue
            plain = (bool, int, float, str, list, tuple, dict, type(None))
            values = {k: v for k, v in vars(module).items() if not k.startswith("_") and isinstance(v, plain)}
            self.note("python", path, values)
