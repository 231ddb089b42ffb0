"""A training script as a tree one can ask: what a name is bound to, who calls a function, what loops stand around.

`read_program` reads the script and the modules of its own folder and package that it imports, one level deep. Nothing
of it is ever run. What the names are worth is evaluate.py's business.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flatout.diagnose.preflight.settings import shown, text_of
from flatout.errors import UsageError

Loop = ast.For | ast.While
Scope = ast.Module | ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True, slots=True)
class Binding:
    """One place where a name gets a value: `node`'s, None where it cannot be told."""

    target: ast.expr
    node: ast.expr | None


class Module:
    """One file."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path, self.tree, self.name = path, tree, shown(path)
        self.imports: dict[str, str] = {}
        self.starred: list[str] = []  # modules imported with *
        self.functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.calls: list[ast.Call] = []
        self.assigns: list[tuple[ast.expr, ast.expr | None]] = []  # to an attribute or an item
        self.nodes: list[ast.AST] = []
        self._parents: dict[ast.AST, ast.AST] = {}
        self._bindings: dict[tuple[Scope, str], list[Binding]] = defaultdict(list)
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            children = list(ast.iter_child_nodes(node))
            self._parents |= dict.fromkeys(children, node)
            self.nodes.append(node)
            self._note(node)
            waiting += reversed(children)

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
                self._bindings[self.scopes(target)[0], name].append(Binding(target, value))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
                for position, part in enumerate(parts):
                    self._bind(part, values[position] if len(values) == len(parts) else None)
            case ast.Attribute() | ast.Subscript():
                self.assigns.append((target, value))
                owner = self.class_of(target)
                if isinstance(target, ast.Attribute) and self.dotted(target.value) == "self" and owner is not None:
                    self._bindings[owner, f"self.{target.attr}"].append(Binding(target, value))

    def where(self, node: ast.AST) -> str:
        """file:line of a node."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node around it."""
        return self._parents.get(node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around it, innermost first."""
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def scopes(self, node: ast.AST) -> list[Scope]:
        """Where a name at this node is looked up: functions outwards, the class it stands in directly, the module."""
        found: list[Scope] = []
        for above in self.around(node):
            if isinstance(above, ast.Module | ast.FunctionDef) or (isinstance(above, ast.ClassDef) and not found):
                found.append(above)
        return found or [self.tree]

    def function_of(self, node: ast.AST) -> ast.FunctionDef | None:
        """The function it stands in."""
        return next((above for above in self.around(node) if isinstance(above, ast.FunctionDef)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class it stands in."""
        return next((above for above in self.around(node) if isinstance(above, ast.ClassDef)), None)

    def inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Whether a node is part of another."""
        return any(above is outer for above in self.around(node))

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops around it within its function, innermost first."""
        found: list[Loop] = []
        below = node
        for above in self.around(node):
            if isinstance(above, ast.FunctionDef | ast.Lambda):
                break
            if isinstance(above, ast.For | ast.While) and below in above.body:
                found.append(above)
            below = above
        return found

    def bindings(self, scope: Scope, name: str) -> list[Binding]:
        """Every place in a scope where a name gets a value."""
        return self._bindings.get((scope, name), [])

    def names_in(self, scope: Scope) -> list[str]:
        """Every name that gets a value in a scope."""
        return [name for bound_in, name in self._bindings if bound_in is scope]

    def imported(self) -> list[str]:
        """Everything it imports, in full."""
        return list(dict.fromkeys((*self.imports.values(), *self.starred)))

    def dotted(self, node: ast.AST) -> str | None:
        """A.b.c in full: with what was imported put in the place of its alias."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else None
        return None


@dataclass(slots=True)
class Program:
    """The script (first) and the modules of its own that it imports; `missing` names own modules not looked at."""

    modules: list[Module] = field(default_factory=list)
    by_name: dict[str, Module] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _calls: dict[str, list[tuple[Module, ast.Call, str]]] = field(default_factory=lambda: defaultdict(list))

    def calls(self, *last_names: str) -> Iterator[tuple[Module, ast.Call, str]]:
        """Every call whose function has a name, with that name in full; or those whose name ends in one of these."""
        if not self._calls:
            for module in self.modules:
                for call in module.calls:
                    name = module.dotted(call.func) or (
                        f"?.{call.func.attr}" if isinstance(call.func, ast.Attribute) else None
                    )
                    if name is not None:
                        self._calls[name.rsplit(".", 1)[-1]].append((module, call, name))
        for last in last_names or tuple(self._calls):
            yield from self._calls.get(last, ())

    def nodes(self) -> Iterator[tuple[Module, ast.AST]]:
        """Every node of every module."""
        return ((module, node) for module in self.modules for node in module.nodes)

    def function(self, module: Module, node: ast.expr) -> tuple[Module, ast.FunctionDef] | None:
        """The function of this program that an expression names, where only one can be meant."""
        last = node.attr if isinstance(node, ast.Attribute) else (module.dotted(node) or "").rsplit(".", 1)[-1]
        own = isinstance(node, ast.Name) and node.id in module.functions
        found = [(m, f) for m in ([module] if own else self.modules) for f in m.functions.get(last, [])]
        return found[0] if len(found) == 1 else None

    def uses(self, *packages: str) -> str | None:
        """The first of these packages that is imported."""
        imported = {full.split(".")[0] for module in self.modules for full in module.imported()}
        return next((package for package in packages if package in imported), None)

    def find_class(self, name: str) -> tuple[Module, ast.ClassDef] | None:
        """A class of this program."""
        last = name.rsplit(".", 1)[-1]
        return next(((module, module.classes[last]) for module in self.modules if last in module.classes), None)


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """What a call is given under a name, or at a position that no * makes uncertain."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    before = call.args[: position + 1] if position is not None else []
    if position is None or len(before) <= position or any(isinstance(given, ast.Starred) for given in before):
        return None
    return before[position]


def spread(call: ast.Call) -> list[ast.expr]:
    """The mappings a call is given with **."""
    return [keyword.value for keyword in call.keywords if keyword.arg is None]


def parameters(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """A function's parameters in order, each with its default; but for *args and **kwargs."""
    given = function.args
    placed = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(placed) - len(given.defaults)) + given.defaults
    found = {one.arg: default for one, default in zip(placed, defaults, strict=True)}
    return found | {one.arg: default for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)}


def parse(path: Path) -> Module:
    """One file as a Module; a mistake in it is one line."""
    try:
        return Module(path, ast.parse(text_of(path)))
    except SyntaxError as problem:
        raise UsageError(f"{path}:{problem.lineno}: not Python: {problem.msg}") from None
    except (RecursionError, ValueError) as problem:
        raise UsageError(f"{path} cannot be read as Python: {problem}") from None


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
                if path.is_file() and path != importer.resolve():
                    return path
    return None
