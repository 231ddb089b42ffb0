"""A training script, and its own modules that it imports, as syntax trees; and its loops. Nothing of
them is run.

Every node knows its `file` and the node `around` it, so the functions here take a node alone.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.model.errors import UsageError
from flatout.model.inputs import is_file, read_notebook, text_of

Node = Any  # an ast.AST with two attributes more: `file` and `around`
_LOOPS = (ast.For, ast.While)
_EPOCH = re.compile(r"(^|[^a-z])ep(och)?s?([^a-z]|$)|epoch", re.IGNORECASE)
_EVALUATION = re.compile(r"val|test|eval|dev(?!ice)|infer|predict", re.IGNORECASE)


class SourceFile:
    """One Python file, or the code cells of a notebook."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text, self.cells = read_notebook(path) if path.suffix == ".ipynb" else (text_of(path), [])
        self.nodes: list[Node] = sorted(ast.walk(self._parse(text)), key=lambda node: getattr(node, "lineno", 0))
        self.imports: list[str] = []
        self.assigned: dict[str, Node] = {}  # the value of `name = value`
        self.times_bound: Counter[str] = Counter()
        for node in self.nodes:
            node.file = self
            for child in ast.iter_child_nodes(node):
                child.around = node  # type: ignore[attr-defined]
            match node:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                    self.times_bound[name] += 1
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.assigned[name] = value
                case ast.Import(names=names):
                    self.imports += [alias.name for alias in names]
                case ast.ImportFrom(module=module, names=names):
                    self.imports += [f"{module}.{alias.name}" if module else alias.name for alias in names]

    def _parse(self, text: str) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are for those who run the script
                return ast.parse(text)
        except SyntaxError as problem:
            raise UsageError(f"{self.place(problem.lineno or 1)}: not Python: {problem.msg}") from None
        except (RecursionError, MemoryError, ValueError) as problem:
            why = str(problem) if isinstance(problem, ValueError) else "it is nested too deeply"
            raise UsageError(f"{self.path} cannot be read as Python: {why}") from None

    def place(self, line: int) -> str:
        """`train.py:12`, or `train.ipynb cell 3:12`."""
        earlier = [cell for cell in self.cells if cell[0] < line]
        if not earlier:
            return f"{self.path}:{line}"
        lines_before, number = earlier[-1]
        return f"{self.path} cell {number}:{line - lines_before}"


class Script:
    """The script (its file comes first) and its own modules; `not_read` names those that could not be
    read."""

    def __init__(self, path: Path | None) -> None:
        self.files = [SourceFile(path)] if path is not None else []
        self.not_read: list[str] = []
        for file in self.files:  # the list grows on the way
            folders = [file.path.parent, *file.path.resolve().parents[1:3], self.files[0].path.parent]
            for module in file.imports:
                self._read_module(module, folders)
        self.nodes = [node for file in self.files for node in file.nodes]
        self.packages = {module.split(".")[0] for file in self.files for module in file.imports}

    def _read_module(self, module: str, folders: list[Path]) -> None:
        """Read an imported module, or the one that a name was imported from, if it is the user's own."""
        parts = module.split(".")
        stems = [folder.joinpath(*names) for names in (parts, parts[:-1]) if names for folder in folders]
        paths = [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py") if is_file(path)]
        if not paths or any(paths[0].samefile(file.path) for file in self.files):
            return
        try:
            self.files.append(SourceFile(paths[0]))
        except UsageError:
            self.not_read.append(str(paths[0]))

    def uses(self, *names: str) -> list[Node]:
        """Where one of these names is mentioned, as a name or as an attribute of anything."""
        return [node for node in self.nodes if last_name(node) in names]

    def calls(self, *names: str) -> list[ast.Call]:
        """The calls of a function or method with one of these names."""
        return [node for node in self.nodes if isinstance(node, ast.Call) and last_name(node.func) in names]


def where(node: Node) -> str:
    """file:line of a node."""
    return str(node.file.place(node.lineno))


def parents(node: Node) -> Iterator[Node]:
    """The nodes around it, innermost first."""
    while (node := getattr(node, "around", None)) is not None:
        yield node


def only_value(name: ast.Name) -> Node:
    """The value of a name that gets one once in its file; else None."""
    file: SourceFile = name.file  # type: ignore[attr-defined]
    return file.assigned.get(name.id) if file.times_bound[name.id] == 1 else None


def last_name(node: Node) -> str:
    """The c of a.b.c and of f(x).c."""
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def argument(call: ast.Call, name: str, position: int | None = None) -> Node:
    """What a call is given under a name, or at a position; else None."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position is not None and position < len(call.args) else None


def function_of(node: Node) -> ast.FunctionDef | None:
    """The function around a node."""
    return next((above for above in parents(node) if isinstance(above, ast.FunctionDef)), None)


def loops_around(node: Node) -> list[Node]:
    """The loops of its function in whose body a node stands, innermost first."""
    found: list[Node] = []
    below = node
    for above in parents(node):
        if isinstance(above, ast.FunctionDef | ast.Lambda):
            break
        if isinstance(above, _LOOPS) and below in above.body:
            found.append(above)
        below = above
    return found


def calls_in(node: Node) -> list[ast.Call]:
    """The calls inside a node, line by line."""
    return sorted((part for part in ast.walk(node) if isinstance(part, ast.Call)), key=lambda call: call.lineno)


def evaluates(call: ast.Call) -> bool:
    """Whether a loader or sampler is not for training: by its name, its dataset, the function it is
    built in."""
    statement = next((node for node in parents(call) if isinstance(node, ast.stmt)), None)
    parts = [*getattr(statement, "targets", []), argument(call, "dataset", 0)]
    texts = [ast.unparse(part) for part in parts if part is not None]
    texts.append(getattr(function_of(call), "name", ""))
    telling = next((text for text in texts if "train" in text.lower() or _EVALUATION.search(text)), "train")
    return "train" not in telling.lower()


def find_loops(script: Script) -> dict[Node, Node]:
    """Every loop over batches that trains, or function that trains on one; and the loop over epochs
    around it."""
    places = [next(iter(loops_around(call)), function_of(call)) for call in script.calls("backward", "manual_backward")]
    places += [node for node in script.nodes if getattr(node, "name", "") == "training_step"]
    return {place: _epoch_loop(script, place) for place in places if place is not None}


def _epoch_loop(script: Script, node: Node) -> Node:
    function = node if isinstance(node, ast.FunctionDef) else function_of(node)
    callers = script.calls(function.name) if function is not None else []
    loops = [loop for place in (node, *callers) for loop in loops_around(place)]
    return next((loop for loop in loops if _EPOCH.search(ast.unparse(loop).partition(":\n")[0])), None)


def runs_every_time(node: Node, within: Node) -> bool:
    """Whether a node runs each time `within` does: no condition stands between, and no `continue`
    above it."""
    below = node
    for above in parents(node):
        if isinstance(above, _LOOPS) and below in above.body:
            earlier = above.body[: above.body.index(below)]
            if any(isinstance(one, ast.If) and isinstance(one.body[-1], ast.Continue) for one in earlier):
                return False
        if above is within:
            return True
        if isinstance(above, ast.BoolOp | ast.FunctionDef | ast.Lambda | ast.ExceptHandler):
            return False
        if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
            return False
        below = above
    return False
