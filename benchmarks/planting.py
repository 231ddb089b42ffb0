"""What a planted fault is: a training, an edit of its files, and what is true of it. For truth.py.

A `§` in planted code marks the line where the time goes. It is taken out before the script is written, and its file,
line and function are what a report is asked for.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

MARK = "§"
HEALTHY = "compute.saturated"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change of one file of a training; `file` is seen from the script's folder, and empty for the script."""

    do: Callable[[str], str]
    file: str = ""


def after(anchor: str, code: str, file: str = "") -> Edit:
    """Write `code` behind the first line that contains `anchor`, as far in as that one, or as what it opens."""
    return Edit(do=lambda text: _beside(text, anchor, code, 1), file=file)


def before(anchor: str, code: str, file: str = "") -> Edit:
    """Write `code` before the first line that contains `anchor`, as far in as that one."""
    return Edit(do=lambda text: _beside(text, anchor, code, 0), file=file)


def instead(old: str, new: str, file: str = "") -> Edit:
    """Replace every `old`, which has to be there."""

    def edit(text: str) -> str:
        assert old in text, f"nothing is {old!r}"
        return text.replace(old, new)

    return Edit(do=edit, file=file)


def top(code: str, file: str = "") -> Edit:
    """Write `code` at the beginning, behind imports from the future."""
    body = textwrap.dedent(code).strip("\n")
    pattern = r"\A(?:#.*\n|\n)*(?:from __future__.*\n)*"
    return Edit(do=lambda text: re.sub(pattern, lambda m: f"{m[0]}{body}\n\n", text, count=1), file=file)


def _beside(text: str, anchor: str, code: str, offset: int) -> str:
    lines = text.splitlines()
    at = next((n for n, line in enumerate(lines) if anchor in line), None)
    assert at is not None, f"no line with {anchor!r}"
    margin = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    if offset and lines[at].rstrip().endswith(":"):
        margin += "    "
    lines[at + offset : at + offset] = textwrap.indent(textwrap.dedent(code).strip("\n"), margin).splitlines()
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Training:
    """A script without a fault, and how it is run in about half a minute on two cores."""

    name: str
    repo: str  # owner/name, or "" for the workloads of this repository
    path: str
    kind: str
    within: str = "."  # the part of the repository that is copied
    edits: tuple[Edit, ...] = ()
    flags: tuple[str, ...] = ()
    gpu_flags: tuple[str, ...] = ()  # behind the others, on a GPU
    prepare: Callable[[Path], None] = lambda folder: None
    data: str = ""  # the workload's data, and its size: "gray small"
    stand_in: bool = False  # for torchvision
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    steps: int = 150

    @property
    def cpu_only(self) -> bool:
        """Whether its flags keep it from a GPU."""
        return bool({"--use_cpu", "--cpu"} & set(self.flags))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing wrong with a training, written down before it is run."""

    name: str
    training: str
    code: str  # the cause that is true
    also: tuple[str, ...] = ()  # other codes that say the same thing of this fault
    what: str
    function: str | None = None  # where the time goes, if one place of the script is to blame
    edits: tuple[Edit, ...] = ()
    flags: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None
    data: str = ""
    environment: dict[str, str] = field(default_factory=dict)  # with the fault and without it
    broken: dict[str, str] = field(default_factory=dict)  # environment that is the fault
    beside: int = 0  # other programs that compute meanwhile
    cure_flags: tuple[str, ...] = ()  # the training without the fault, where it is not simply the training
    cure_edits: tuple[Edit, ...] = ()
    cure_prepare: Callable[[Path], None] = lambda folder: None
    work: float = 1.0  # samples of a step without the fault, over those of a step with it
    steps: int | None = None
    gpu: bool = False  # makes sense on a GPU only
    cpu_only: bool = False  # what is true on a GPU machine would be something else


@dataclass(frozen=True, kw_only=True)
class Place:
    """A marked line."""

    file: Path
    line: int
    function: str
    first: int  # lines of that function
    last: int


def plant(script: Path, edits: Iterable[Edit]) -> list[Place]:
    """Make the edits in the files, and say where the marks were."""
    texts: dict[Path, str] = {}
    for edit in edits:
        path = (script.parent / edit.file).resolve() if edit.file else script
        texts[path] = edit.do(texts.get(path) or path.read_text(encoding="utf-8"))
    places = []
    for path, text in texts.items():
        path.write_text(text.replace(MARK, ""), encoding="utf-8")
        marked = [number for number, line in enumerate(text.splitlines(), 1) if MARK in line]
        if marked:
            tree = ast.parse(text.replace(MARK, ""))
            places += [_place(path, line, tree) for line in marked]
    return places


def _place(path: Path, line: int, tree: ast.Module) -> Place:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    around = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)]
    if not around:
        return Place(file=path, line=line, function="<module>", first=line, last=line)
    inner = max(around, key=lambda node: node.lineno)
    return Place(file=path, line=line, function=inner.name, first=inner.lineno, last=inner.end_lineno or inner.lineno)


def statements_apart(path: Path, one: int, other: int) -> int:
    """How many statements lie between two lines of a file: 0 if they are in the same one."""
    starts = sorted({node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)})
    return abs(_number(starts, one) - _number(starts, other))


def _number(starts: list[int], line: int) -> int:
    return sum(start <= line for start in starts)
