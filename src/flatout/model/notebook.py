"""The Python of a Jupyter notebook: its code cells one after the other, with IPython's own lines blanked out.

Every line keeps its place in its cell, so that a message can say `train.ipynb cell 3:12`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from flatout.model.errors import UsageError
from flatout.model.inputs import load_json, text_of

MAX_BYTES = 100_000_000  # notebooks contain their pictures
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")  # cell magics that are followed by Python
_MAGIC = re.compile(r"(?m)^([ \t]*)(?:[%!?](?:.*\\\n)*.*|[\w.]+\?+[ \t]*$)")
_ASSIGNED_MAGIC = re.compile(r"(?m)^([ \t]*[\w., ]+= *)[%!].*")

Cells = list[tuple[int, int]]  # of each: how many lines come before it, its number from 1


def read_notebook(path: Path) -> tuple[str, Cells]:
    """The code of a notebook, and where in it each cell begins."""
    notebook = load_json(text_of(path, MAX_BYTES), str(path))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise UsageError(f"{path} is not a notebook of format 4: save it with a current Jupyter")
    lines: list[str] = []
    begins: Cells = []
    for number, cell in enumerate(cells, 1):
        source = cell.get("source") or ""
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        if cell.get("cell_type") == "code" and text.strip():
            begins.append((len(lines), number))
            lines += python_lines(text)
    return "\n".join(lines), begins


def python_lines(cell: str) -> list[str]:
    """The lines of a cell; those that are not Python become `pass`."""
    first, _, rest = cell.lstrip("\n").partition("\n")
    if first.startswith("%%"):
        if first.split()[0] not in _PYTHON_CELLS:
            return ["pass"] + [""] * cell.count("\n")
        cell = f"pass\n{rest}"
    if not _parses(cell):  # if it does, a line that begins with % is the rest of an expression
        cell = _ASSIGNED_MAGIC.sub(r"\1None", cell)
        cell = _MAGIC.sub(lambda magic: f"{magic[1]}pass" + "\n" * magic[0].count("\n"), cell)
    return cell.split("\n")


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
