"""The settings a script has read: its command line, YAML and JSON files, Python config modules. No secret is kept.

The standard library only: it is at work before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

_SECRET = re.compile(
    r"token(?!iz|s?$|s?[_-](len|num|count|limit|type|id))|(auth|access|api|hf|hub)[_-]?tokens?$|^tokens?$"
    r"|secret|passw|passphrase|\bpwd\b|credential|auth(?!or)|private|cookie|dsn|(^|[_.-])key$|apikey|accesskey",
    re.I,
)
_LOOKS_SECRET = re.compile(
    r"\b(hf|sk|ghp|gho|ghs|glpat|xox[abp])[_-][\w-]{16,}|\bAKIA[0-9A-Z]{16}\b|\beyJ[\w-]{10,}\.[\w-]+\.[\w-]+"
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_IN_SHELL = re.compile(r"(?P<name>--?[\w.-]+|\b\w+)(?P<gap>=|\s+)(?P<value>'[^']*'|\"[^\"]*\"|\S+)")
_CONFIG = re.compile(r"config|settings|options", re.I)
_PYTHONS_OWN = os.path.dirname(os.__file__)  # noqa: PTH120  # has a module of how Python itself was built
_HIDDEN = "***"
_MOST_SETTINGS = 400
_MOST_ITEMS = 50
_MOST_SOURCES = 20
_LONGEST_TEXT = 300


def hide_secrets(value: Any, key: str = "") -> Any:
    """The value, with what looks like a secret by its key blotted out, cut to what a report can hold."""
    if _SECRET.search(key):
        return _HIDDEN
    if isinstance(value, dict):
        return {str(k): hide_secrets(v, str(k)) for k, v in list(value.items())[:_MOST_SETTINGS]}
    if isinstance(value, list | tuple):
        return [hide_secrets(v, key) for v in list(value)[:_MOST_ITEMS]]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path | Enum):
        return _blotted(str(value)[:_LONGEST_TEXT])
    return type(value).__name__  # what an object prints may be anything


def hide_in_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """A command line with the values of secret options blotted out, also inside the command of a `bash -c`."""
    shown: list[str] = []
    hide_next = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            shown.append(_HIDDEN)
            hide_next = False
        elif any(gap in word for gap in " \t\n"):
            shown.append(_blotted(_IN_SHELL.sub(_without_value, word)))
        elif equals and _is_secret(name):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(_blotted(word))
            hide_next = word.startswith("-") and _is_secret(word)
    return tuple(shown)


def _is_secret(option: str) -> bool:
    return bool(_SECRET.search(option.lstrip("-")))


def _blotted(text: str) -> str:
    """Text without what looks like a key by itself, and without the password of a URL."""
    return _IN_URL.sub(f"{_HIDDEN}@", _LOOKS_SECRET.sub(_HIDDEN, text))


def _without_value(match: re.Match[str]) -> str:
    name, gap = match["name"], match["gap"]
    option = name.startswith("-") or gap == "="
    return f"{name}{gap}{_HIDDEN}" if option and _is_secret(name) else match[0]


class Settings:
    """Values the script read from its command line, from YAML and JSON files and from Python config modules."""

    def __init__(self) -> None:
        self.read: list[dict[str, Any]] = []
        self._looked_at_modules = False

    def note(self, source: str, where: str | None, values: Any) -> None:
        """Remember one set of values. Files of installed packages are none of the user's settings."""
        if where is not None and "-packages" in str(where):
            return
        entry = {"source": source, "file": where, "values": hide_secrets(values)}
        if isinstance(values, dict) and values and len(self.read) < _MOST_SOURCES and entry not in self.read:
            self.read.append(entry)

    def note_arguments(self, parser: argparse.ArgumentParser, namespace: Any) -> None:
        """Remember what argparse made of the command line, with the option that sets each value."""
        before = len(self.read)
        self.note("argparse", None, vars(namespace))
        if len(self.read) > before:
            self.read[-1]["options"] = {a.dest: a.option_strings[-1] for a in parser._actions if a.option_strings}

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
