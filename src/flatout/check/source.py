"""A training script read: what its names are bound to, what it calls, its functions and classes.

`read_program` reads the script and the modules of its own folder and package that it imports, one level deep. Nothing
of it is ever run. What the names are worth is evaluate.py's business.
"""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flatout.check import tree
from flatout.check.notebook import Cells, read_notebook
from flatout.check.settings import shown
from flatout.model.errors import UsageError
from flatout.model.inputs import is_file, text_of


class Binding(NamedTuple):
    """One place where a name gets a value: `node`'s, None where it cannot be told."""

    target: ast.expr
    node: ast.expr | None


class Module:
    """One file; of a notebook, with its cells."""

    def __init__(self, path: Path, root: ast.Module, cells: Cells | None = None) -> None:
        self.path, self.root, self.name, self._cells = path, root, shown(path), cells
        self.imports: dict[str, str] = {}
        self.starred: list[str] = []  # modules imported with *
        self.functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.calls: list[ast.Call] = []
        self.assigns: list[Binding] = []  # to an attribute or an item
        self.nodes: list[ast.AST] = []
        self.bindings: dict[tuple[tree.Scope, str], list[Binding]] = defaultdict(list)
        waiting: list[ast.AST] = [root]
        while waiting:
            node = waiting.pop()
            children = list(ast.iter_child_nodes(node))
            for child in children:
                child.parent = node  # type: ignore[attr-defined]
            node.home = self  # type: ignore[attr-defined]
            self.nodes.append(node)
            waiting += reversed(children)
        for node in self.nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef(name=name):
                self.functions[name].append(node)
            case ast.ClassDef(name=name):
                self.classes.setdefault(name, node)
            case ast.Call():
                self.calls.append(node)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case ast.AugAssign(target=target) | ast.For(target=target):
                self._bind(target, None)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, None)
            case ast.Import(names=names):
                for alias in names:
                    short = alias.asname or alias.name.split(".")[0]
                    self.imports[short] = alias.name if alias.asname else short
            case ast.ImportFrom(module=module, names=names, level=level):
                base = "." * level + (module or "")
                for alias in names:
                    if alias.name == "*":
                        self.starred.append(base)
                    else:
                        self.imports[alias.asname or alias.name] = base + ("." if module else "") + alias.name

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        match target:
            case ast.Name(id=name):
                self.bindings[tree.scopes(target)[0], name].append(Binding(target, value))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
                for position, part in enumerate(parts):
                    self._bind(part, values[position] if len(values) == len(parts) else None)
            case ast.Attribute() | ast.Subscript():
                self.assigns.append(Binding(target, value))
                owner = tree.class_of(target)
                if isinstance(target, ast.Attribute) and tree.dotted(target.value) == "self" and owner is not None:
                    self.bindings[owner, f"self.{target.attr}"].append(Binding(target, value))

    def line(self, number: int) -> str:
        """A line as it is said: `12`, or `cell 3:12` of a notebook."""
        return _line(number, self._cells)

    def place(self, number: int) -> str:
        """`train.py:12`, or `train.ipynb cell 3:12`."""
        return f"{self.name}{':' if self._cells is None else ' '}{self.line(number)}"

    def is_code(self) -> bool:
        """Whether it does anything: a word or a JSON text is Python too."""
        doing = ast.Call | ast.NamedExpr | ast.Await
        return any(not isinstance(one, ast.Expr) for one in self.root.body) or any(
            isinstance(node, doing) for node in self.nodes
        )

    def imported(self) -> list[str]:
        """Everything it imports, in full."""
        return list(dict.fromkeys((*self.imports.values(), *self.starred)))


@dataclass(slots=True)
class Program:
    """The script (first) and the modules of its own that it imports; `missing` names own modules not looked at."""

    modules: list[Module] = field(default_factory=list)
    by_name: dict[str, Module] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _calls: dict[str, list[tuple[ast.Call, str]]] = field(default_factory=lambda: defaultdict(list))

    def calls(self, *last_names: str) -> Iterator[tuple[ast.Call, str]]:
        """Every call whose function has a name, with that name in full; or those whose name ends in one of these."""
        if not self._calls:
            for call in (call for module in self.modules for call in module.calls):
                method = f"?.{call.func.attr}" if isinstance(call.func, ast.Attribute) else ""
                name = tree.dotted(call.func) or method
                if name:
                    self._calls[tree.last_name(name)].append((call, name))
        for last in last_names or tuple(self._calls):
            yield from self._calls.get(last, ())

    def nodes(self) -> Iterator[ast.AST]:
        """Every node of every module."""
        return (node for module in self.modules for node in module.nodes)

    def function(self, node: ast.expr) -> ast.FunctionDef | None:
        """The function of this program that an expression names, where only one can be meant."""
        last = node.attr if isinstance(node, ast.Attribute) else tree.last_name(tree.dotted(node))
        here = tree.module_of(node)
        own = isinstance(node, ast.Name) and node.id in here.functions
        found = [
            function for module in ([here] if own else self.modules) for function in module.functions.get(last, [])
        ]
        return found[0] if len(found) == 1 else None

    def find_class(self, name: str) -> ast.ClassDef | None:
        """A class of this program."""
        found = (module.classes.get(tree.last_name(name)) for module in self.modules)
        return next((one for one in found if one is not None), None)

    def uses(self, *packages: str) -> str | None:
        """The first of these packages that is imported."""
        imported = {full.split(".")[0] for module in self.modules for full in module.imported()}
        return next((package for package in packages if package in imported), None)


def parse(path: Path) -> Module:
    """One file as a Module; a mistake in it is one line."""
    text, cells = read_notebook(path) if path.suffix == ".ipynb" else (text_of(path), None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python has to say of the text is for those who run it
            root = ast.parse(text)
        return Module(path, root, cells)
    except SyntaxError as problem:
        place = f"{':' if cells is None else ' '}{_line(problem.lineno or 1, cells)}"
        raise UsageError(f"{path}{place}: not Python: {problem.msg}") from None
    except (RecursionError, MemoryError):  # of Python's parser, which has a stack of its own
        raise UsageError(f"{path} cannot be read as Python: it is nested too deeply") from None
    except ValueError as problem:
        raise UsageError(f"{path} cannot be read as Python: {problem}") from None


def _line(number: int, cells: Cells | None) -> str:
    if cells is None:
        return str(number)
    before, cell = next(((before, cell) for before, cell in reversed(cells) if before < number), (0, 1))
    return f"cell {cell}:{number - before}"


def read_program(script: Path) -> Program:
    """A script with the modules of its own folder or package that it imports."""
    first = parse(script)
    program = Program([first])
    roots = [folder := script.resolve().parent]
    while (folder / "__init__.py").exists():
        roots.append(folder := folder.parent)
    for full in first.imported():
        path = _own_file(full, roots, script)
        known = next((module for module in program.modules if module.path == path), None)
        try:
            if path is not None and known is None:
                program.modules.append(known := parse(path))
        except UsageError:
            program.missing.append(shown(path) if path else full)  # only the script itself has to be whole
        if known is not None:
            program.by_name[full] = known
    seen = {module.path.resolve() for module in program.modules}
    deeper = {_own_file(full, roots, module.path) for module in program.modules[1:] for full in module.imported()}
    program.missing += sorted(shown(path) for path in deeper if path is not None and path not in seen)
    return program


def _own_file(full: str, roots: list[Path], importer: Path) -> Path | None:
    """The file behind a module, or behind the module a name was imported from."""
    dots = len(full) - len(full.lstrip("."))
    parts = [part for part in full.strip(".").split(".") if part]
    if dots:
        roots = list(importer.resolve().parents[dots - 1 : dots])
    for some in (parts, parts[:-1]):
        for root in roots if some else ():
            stem = root.joinpath(*some)
            for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                if is_file(path) and path != importer.resolve():
                    return path
    return None
