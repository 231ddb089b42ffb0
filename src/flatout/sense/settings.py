"""The settings a script has read: its command line, YAML and JSON files, Python config modules. No secret is kept.

The standard library only: it is at work before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

_SECRET = re.compile(r"token|secret|passw|api_?key|access_?key|credential|auth|private", re.I)
_MOST_SETTINGS = 400
_LONGEST_TEXT = 300


def hide_secrets(value: Any, key: str = "") -> Any:
    """The value, with what looks like a secret by its key blotted out, cut to what a report can hold."""
    if _SECRET.search(key):
        return "***"
    if isinstance(value, dict):
        return {str(k): hide_secrets(v, str(k)) for k, v in list(value.items())[:_MOST_SETTINGS]}
    if isinstance(value, list | tuple):
        return [hide_secrets(v, key) for v in list(value)[:50]]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:_LONGEST_TEXT]


def hide_in_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """A command line with the values of secret options blotted out."""
    shown: list[str] = []
    hide_next = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            shown.append("***")
            hide_next = False
        elif equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(word)
            hide_next = word.startswith("-") and bool(_SECRET.search(word))
    return tuple(shown)


class Settings:
    """Values the script read from its command line, from YAML and JSON files and from Python config modules."""

    def __init__(self) -> None:
        self.read: list[dict[str, Any]] = []

    def note(self, source: str, where: str | None, values: Any) -> None:
        """Remember one set of values."""
        if isinstance(values, dict) and values and len(self.read) < 20:
            self.read.append({"source": source, "file": where, "values": hide_secrets(values)})

    def note_arguments(self, parser: argparse.ArgumentParser, namespace: Any) -> None:
        """Remember what argparse made of the command line, with the option that sets each value."""
        options = {a.dest: a.option_strings[-1] for a in parser._actions if a.option_strings}
        self.note("argparse", None, vars(namespace))
        if self.read and self.read[-1]["source"] == "argparse":
            self.read[-1]["options"] = options

    def note_config_modules(self) -> None:
        """Remember plain values of the user's own modules that are called config or settings."""
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            last = name.rpartition(".")[2].lower()
            if not path or not re.search(r"config|settings|options", last) or "site-packages" in path:
                continue
            if not path.startswith(str(Path.cwd())) and os.path.dirname(path) not in sys.path:  # noqa: PTH120
                continue
            plain = (bool, int, float, str, list, tuple, dict, type(None))
            values = {k: v for k, v in vars(module).items() if not k.startswith("_") and isinstance(v, plain)}
            self.note("python", path, values)
