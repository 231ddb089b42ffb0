"""How to make a change for good: the flag to pass, the line of a file to change, or the source line with the edit."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from flatout.fix.result import Attempt
from flatout.model.changes import BY_NAME
from flatout.model.formatting import as_typed

_LOADER, _OPTIMIZER = re.compile(r"Loader$"), re.compile(r"(Adam|AdamW|SGD|Adagrad)$")


def as_code(name: str, value: Any, *, by_trainer: bool = False) -> str | None:
    """A change as a line of Python, where there is one; also where the Trainer of transformers makes the loader."""
    spec = BY_NAME.get(name)
    return spec.as_code(value, "transformers" if by_trainer else "") if spec is not None else None


def permanently(attempt: Attempt, *, by_trainer: bool = False) -> str:
    """What to do, in a line or two."""
    change = attempt.change
    if change.knob:
        return ("pass " if change.knob.startswith("-") else "") + by_knob(change.knob, change.value)
    code = as_code(change.name, change.value, by_trainer=by_trainer) or f"{change.name} = {change.value!r}"
    made_by_trainer = by_trainer and change.name in BY_NAME and "transformers" in BY_NAME[change.name].framework_code
    if not attempt.where or made_by_trainer:
        return code
    elsewhere = f"; the same at {', '.join(attempt.also)}" if attempt.also else ""
    return f"{attempt.where}: {_edited(attempt) or code}{elsewhere}"


def by_knob(knob: str, value: Any) -> str:
    """A value as it is given to a flag, or written in a file."""
    if knob.startswith("-"):
        return knob if value is True else f"{knob} {value}"
    file, _, key = knob.rpartition(":")
    written = f"{key} = {value!r}" if file.endswith(".py") else f"{key}: {as_typed(value)}"
    return f"in {file}: {written}"


def _edited(attempt: Attempt) -> str | None:
    """The source line with the argument put in, where that can be told."""
    spec = BY_NAME.get(attempt.change.name)
    file, _, number = attempt.where.rpartition(":")
    if spec is None or not spec.argument or not number.isdigit():
        return None
    try:
        line = Path(file).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return None
    return _with_argument(line, spec.argument.format(attempt.change.value))


def _with_argument(line: str, argument: str) -> str | None:
    """A line with an argument more in the call that takes it; None where that is not all there, or not clear."""
    name = argument.partition("=")[0]
    try:
        code = ast.parse(f"{line} pass" if line.endswith(":") else line)
    except SyntaxError:  # it goes on in the next one
        return None
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)]
    takes = _OPTIMIZER if name == "fused" else _LOADER
    meant = [call for call in calls if takes.search(ast.unparse(call.func))] or calls
    if len(meant) != 1 or any(keyword.arg == name for keyword in meant[0].keywords):
        return None
    raw, end = line.encode(), (meant[0].end_col_offset or 0) - 1  # counted in bytes
    comma = ", " if meant[0].args or meant[0].keywords else ""
    return f"{raw[:end].decode().rstrip(', ')}{comma}{argument}{raw[end:].decode()}"
