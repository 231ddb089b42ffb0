"""The Python in a Jupyter notebook: its code cells one after the other, without what only IPython understands.

Every line stays where it is in its cell, so that a place can be told as `train.ipynb cell 3:12`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from flatout.model.errors import UsageError
from flatout.model.inputs import load_json, text_of

_MOST_BYTES = 100_000_000  # notebooks hold their pictures
_PYTHON_TOO = ("%%time", "%%timeit", "%%capture", "%%prun")  # magics whose cell is Python all the same
_MAGIC = re.compile(r"(\s*)(?:%(?:time|timeit|prun)\s+(?!-)|(?:[%!?]|[\w.]+\?+\s*$).*)")
_ASSIGNED = re.compile(r"(\s*[\w., ]+=\s*)[%!].*")

Cells = list[tuple[int, int]]  # of each: the line before its first, and its number in the notebook, from 1


def read_notebook(path: Path) -> tuple[str, Cells]:
    """The code of a notebook, and where in it each cell begins."""
    notebook = load_json(text_of(path, _MOST_BYTES), str(path))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise UsageError(f"{path} is not a notebook of format 4: save it with a Jupyter of today")
    language = _language(notebook.get("metadata"))
    if language not in ("", "python"):
        raise UsageError(f"{path} is a notebook in {language}, not in Python")
    lines: list[str] = []
    begins: Cells = []
    for number, cell in enumerate(cells, 1):
        source = cell.get("source")
        text = "".join(map(str, source)) if isinstance(source, list) else str(source or "")
        if cell.get("cell_type") == "code" and text.strip():
            begins.append((len(lines), number))
            lines += python_of(text)
    return "\n".join(lines), begins


def python_of(cell: str) -> list[str]:
    """The lines of a cell; those that are not Python are `pass`."""
    lines = cell.split("\n")
    first = lines[0].strip()
    if first.startswith("%%"):
        lines[0] = "pass"
        if first.split()[0] not in _PYTHON_TOO:
            return ["pass"] + [""] * (len(lines) - 1)
    if _parses(lines):  # where a % begins a line, it may well be Python: the rest of an expression
        return lines
    goes_on = False
    for place, line in enumerate(lines):
        ended = line.rstrip().endswith("\\")
        if goes_on:
            lines[place] = ""
        else:
            lines[place] = _without_magic(line)
            ended = ended and lines[place] != line
        goes_on = ended
    return lines


def _without_magic(line: str) -> str:
    if assigned := _ASSIGNED.fullmatch(line):
        return f"{assigned[1]}None"
    found = _MAGIC.match(line)
    if found is None:
        return line
    rest = line[found.end() :]
    return f"{found[1]}{rest or 'pass'}"


def _parses(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _language(metadata: Any) -> str:
    """What the notebook says it is written in; "" where it does not."""
    told = metadata if isinstance(metadata, dict) else {}
    for section, key in (("language_info", "name"), ("kernelspec", "language")):
        named = told.get(section)
        if isinstance(named, dict) and isinstance(named.get(key), str):
            return str(named[key]).lower()
    return ""
