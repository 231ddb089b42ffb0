"""A training script as a tree one can ask: what a name is bound to, who calls a function, what loops stand around.

`read_program` reads the script and the modules of its own folder and package that it imports, one level deep. Nothing
of it is ever run. What the names are worth is evaluate.py's business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from flatout.diagnose.preflight.settings import shown, text_of
from flatout.errors import UsageError

_AT_MOST_FILES = 24
_AT_MOST_BYTES = 400_000

Function = cst.FunctionDef | cst.Lambda
Scope = cst.Module | cst.ClassDef | cst.FunctionDef | cst.Lambda
Loop = cst.For | cst.While


@dataclass(frozen=True, slots=True)
class Binding:
    """One place where a name gets a value: `node`'s, or part `element` of it; None where it cannot be told."""

    node: cst.BaseExpression | None
    element: int | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call is given. `rest` are the ** mappings; with a * among the positions, they cannot be counted."""

    positional: tuple[cst.BaseExpression, ...]
    keywords: dict[str, cst.BaseExpression]
    rest: tuple[cst.BaseExpression, ...]
    starred: bool

    def get(self, name: str, position: int | None = None) -> cst.BaseExpression | None:
        """The argument of that name, or at that position."""
        if name in self.keywords:
            return self.keywords[name]
        if position is not None and not self.starred and position < len(self.positional):
            return self.positional[position]
        return None


class Module:
    """One file."""

    def __init__(self, path: Path, tree: cst.Module, parents: Any, positions: Any) -> None:
        self.path = path
        self.tree = tree
        self.name = shown(path)
        self.imports: dict[str, str] = {}
        self.starred: list[str] = []  # modules imported with *
        self.functions: dict[str, list[cst.FunctionDef]] = defaultdict(list)
        self.classes: dict[str, cst.ClassDef] = {}
        self.calls: list[cst.Call] = []
        self.assigns: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []  # to an attribute or an item
        self.nodes: list[cst.CSTNode] = []
        self._bindings: dict[tuple[Any, str], list[Binding]] = defaultdict(list)
        self._parents = parents
        self._positions = positions
        self._fill()

    def where(self, node: cst.CSTNode) -> str:
        """file:line of a node."""
        return f"{self.name}:{self.line(node)}"

    def line(self, node: cst.CSTNode) -> int:
        """The line a node begins on."""
        return int(self._positions[node].start.line)

    def text(self, node: cst.CSTNode) -> str:
        """The source of a node."""
        return self.tree.code_for_node(node)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around it."""
        found: cst.CSTNode | None = self._parents.get(node)
        return found

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around it, innermost first."""
        found = self.parent(node)
        while found is not None:
            yield found
            found = self.parent(found)

    def scopes(self, node: cst.CSTNode) -> list[Scope]:
        """Where a name at this node is looked up: functions outwards, the class it stands in directly, the module."""
        found: list[Scope] = []
        for above in self.around(node):
            if isinstance(above, cst.Module | cst.FunctionDef | cst.Lambda) or (
                isinstance(above, cst.ClassDef) and not found
            ):
                found.append(above)
        return found

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """The function it stands in."""
        return next((above for above in self.around(node) if isinstance(above, cst.FunctionDef)), None)

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The class it stands in."""
        return next((above for above in self.around(node) if isinstance(above, cst.ClassDef)), None)

    def loops(self, node: cst.CSTNode) -> list[Loop]:
        """The loops around it within its function, innermost first."""
        found: list[Loop] = []
        below = node
        for above in self.around(node):
            if isinstance(above, cst.FunctionDef | cst.Lambda):
                break
            if isinstance(above, cst.For | cst.While) and below is above.body:
                found.append(above)
            below = above
        return found

    def bindings(self, scope: Scope, name: str) -> list[Binding]:
        """Every place in a scope where a name gets a value."""
        return self._bindings.get((scope, name), [])

    def names_in(self, scope: Scope) -> list[str]:
        """Every name that gets a value in a scope."""
        return [name for bound_in, name in self._bindings if bound_in is scope]

    def dotted(self, node: cst.CSTNode) -> str | None:
        """A.b.c in full: with what was imported put in the place of its alias."""
        if isinstance(node, cst.Name):
            return self.imports.get(node.value, node.value)
        if isinstance(node, cst.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr.value}" if before else None
        return None

    def bind(
        self, scope: Scope, target: cst.CSTNode, value: cst.BaseExpression | None, element: int | None = None
    ) -> None:
        """Note that a target gets a value."""
        if isinstance(target, cst.Name):
            self._bindings[scope, target.value].append(Binding(value, element))
        elif isinstance(target, cst.Tuple | cst.List):
            parts = value.elements if isinstance(value, cst.Tuple | cst.List) else ()
            pairwise = len(parts) == len(target.elements) and element is None
            for position, item in enumerate(target.elements):
                if pairwise:
                    self.bind(scope, item.value, parts[position].value)
                else:
                    self.bind(scope, item.value, value if element is None else None, position)
        elif isinstance(target, cst.Attribute | cst.Subscript) and value is not None:
            self.assigns.append((target, value if element is None else target))

    def _fill(self) -> None:
        collector = _Collector(self)
        self.tree.visit(collector)
        for node in self.nodes:
            if isinstance(node, cst.FunctionDef):
                self.functions[node.name.value].append(node)
            elif isinstance(node, cst.ClassDef):
                self.classes.setdefault(node.name.value, node)
            elif isinstance(node, cst.Call):
                self.calls.append(node)


class _Collector(cst.CSTVisitor):
    """Fills a Module."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self._module = module
        self._scopes: list[Scope] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._module.nodes.append(node)
        if isinstance(node, cst.Module | cst.ClassDef | cst.FunctionDef | cst.Lambda):
            self._scopes.append(node)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        super().on_leave(original_node)
        if self._scopes and original_node is self._scopes[-1]:
            self._scopes.pop()

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            self._module.bind(self._scopes[-1], target.target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if node.value is not None:
            self._module.bind(self._scopes[-1], node.target, node.value)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        if isinstance(node.target, cst.Name):
            self._module.bind(self._scopes[-1], node.target, None)
        else:
            self._module.assigns.append((node.target, node.target))

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._module.bind(self._scopes[-1], node.target, node.value)

    def visit_For(self, node: cst.For) -> None:
        self._module.bind(self._scopes[-1], node.target, None)

    def visit_AsName(self, node: cst.AsName) -> None:
        self._module.bind(self._scopes[-1], node.name, None)

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            full = _dots(alias.name)
            name = alias.asname.name if alias.asname else None
            if isinstance(name, cst.Name):
                self._module.imports[name.value] = full
            else:
                self._module.imports[full.split(".")[0]] = full.split(".")[0]
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        base = "." * len(node.relative) + (_dots(node.module) if node.module else "")
        if isinstance(node.names, cst.ImportStar):
            self._module.starred.append(base)
            return False
        for alias in node.names:
            name = alias.asname.name if alias.asname else alias.name
            if isinstance(name, cst.Name):
                self._module.imports[name.value] = (
                    f"{base}.{_dots(alias.name)}" if base.strip(".") else base + _dots(alias.name)
                )
        return False


def _dots(node: cst.CSTNode) -> str:
    return f"{_dots(node.value)}.{node.attr.value}" if isinstance(node, cst.Attribute) else getattr(node, "value", "")


@dataclass(slots=True)
class Program:
    """The script (first) and the modules of its own that it imports; `missing` names own modules not looked at."""

    modules: list[Module]
    by_name: dict[str, Module] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _calls: dict[str, list[tuple[Module, cst.Call, str]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def script(self) -> Module:
        """The file a person named."""
        return self.modules[0]

    def calls(self, *last_names: str) -> Iterator[tuple[Module, cst.Call, str]]:
        """Every call whose function has a name, with that name in full; or those whose name ends in one of these."""
        if not self._calls:
            for module in self.modules:
                for call in module.calls:
                    name = module.dotted(call.func)
                    if name is None and isinstance(call.func, cst.Attribute):
                        name = f"?.{call.func.attr.value}"
                    if name is not None:
                        self._calls[name.rsplit(".", 1)[-1]].append((module, call, name))
        for last in last_names or self._calls:
            yield from self._calls.get(last, ())

    def calls_of(self, function: cst.FunctionDef, name: str | None = None) -> list[tuple[Module, cst.Call]]:
        """Who calls a function, by its name alone (or by that of its class, for __init__)."""
        return [(module, call) for module, call, _ in self.calls(name or function.name.value)]

    def function(self, module: Module, node: cst.CSTNode) -> tuple[Module, cst.FunctionDef] | None:
        """The function of this program that an expression names, where only one can be meant."""
        name = node.attr.value if isinstance(node, cst.Attribute) else getattr(node, "value", None)
        dotted = module.dotted(node) or ""
        if isinstance(name, str):
            if isinstance(node, cst.Name) and module.functions.get(name):
                found = [(module, function) for function in module.functions[name]]
            else:
                last = dotted.rsplit(".", 1)[-1] if isinstance(node, cst.Name) else name
                found = [(other, function) for other in self.modules for function in other.functions.get(last, [])]
            if len(found) == 1:
                return found[0]
        return None

    def uses(self, *packages: str) -> str | None:
        """The first of these packages that is imported."""
        for module in self.modules:
            for full in (*module.imports.values(), *module.starred):
                for package in packages:
                    if full == package or full.startswith(f"{package}."):
                        return package
        return None

    def find_class(self, name: str) -> tuple[Module, cst.ClassDef] | None:
        """A class of this program."""
        last = name.rsplit(".", 1)[-1]
        return next(((module, module.classes[last]) for module in self.modules if last in module.classes), None)


def arguments(call: cst.Call) -> Arguments:
    """What a call is given, sorted."""
    positional, keywords, rest, starred = [], {}, [], False
    for argument in call.args:
        if argument.star == "**":
            rest.append(argument.value)
        elif argument.star == "*":
            starred = True
        elif argument.keyword is not None:
            keywords[argument.keyword.value] = argument.value
        else:
            positional.append(argument.value)
    return Arguments(tuple(positional), keywords, tuple(rest), starred)


def parse(path: Path) -> Module:
    """One file as a Module; a mistake in it is one line."""
    text = text_of(path)
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as problem:
        raise UsageError(f"{path}:{problem.raw_line}: not Python: {problem.message.splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply to be read") from None
    return Module(path, wrapper.module, wrapper.resolve(ParentNodeProvider), wrapper.resolve(PositionProvider))


def read_program(script: Path) -> Program:
    """A script with the modules of its own folder or package that it imports."""
    program = Program([parse(script)])
    roots = _roots(script)
    for module in [program.script]:
        for full in dict.fromkeys((*module.imports.values(), *module.starred)):
            _follow(program, full, roots, script)
    for module in program.modules[1:]:
        for full in (*module.imports.values(), *module.starred):
            path = _own_file(full, roots, module.path)
            if path is not None and all(path != known.path for known in program.modules):
                program.missing.append(shown(path))
    return program


def _follow(program: Program, full: str, roots: Sequence[Path], importer: Path) -> None:
    path = _own_file(full, roots, importer)
    if path is None:
        return
    known = next((module for module in program.modules if module.path == path), None)
    if known is None:
        if len(program.modules) >= _AT_MOST_FILES or path.stat().st_size > _AT_MOST_BYTES:
            program.missing.append(shown(path))
            return
        try:
            known = parse(path)
        except UsageError:
            program.missing.append(shown(path))  # only the script itself has to be whole
            return
        program.modules.append(known)
    program.by_name[full] = known


def _roots(script: Path) -> list[Path]:
    """Where the script's own modules are looked for: its folder, and the folder its package lies in."""
    folder = script.resolve().parent
    roots = [folder]
    while (folder / "__init__.py").exists():
        folder = folder.parent
        roots.append(folder)
    return roots


def _own_file(full: str, roots: Sequence[Path], importer: Path) -> Path | None:
    """The file behind a module, or behind the module a name was imported from."""
    dots = len(full) - len(full.lstrip("."))
    parts = [part for part in full.strip(".").split(".") if part]
    if dots:
        folder = importer.resolve().parent
        roots = [folder if dots == 1 else folder.parents[dots - 2]]
    for count in (len(parts), len(parts) - 1):
        if count < 1:
            continue
        for root in roots:
            for path in (
                root.joinpath(*parts[:count]).with_suffix(".py"),
                root.joinpath(*parts[:count], "__init__.py"),
            ):
                if path.is_file() and path != importer.resolve():
                    return path
    return None
