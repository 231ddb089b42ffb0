"""What one can ask of a node of a script's syntax tree: where it stands, what is around it, what a call is given.

A node knows the node around it and the file it is of (source.py tells it), so a node is all that is handed on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.check.source import Module

Loop = ast.For | ast.While
Scope = ast.Module | ast.ClassDef | ast.FunctionDef


def module_of(node: ast.AST) -> Module:
    """The file a node is of."""
    home: Module = node.home  # type: ignore[attr-defined]
    return home


def where(node: ast.AST) -> str:
    """file:line of a node."""
    return module_of(node).place(getattr(node, "lineno", 1))


def lines(nodes: Iterable[ast.expr | ast.stmt]) -> str:
    """The lines of some nodes of one file: `line 3, 5`, or `cell 3:12, cell 4:1`."""
    found = {node.lineno: module_of(node).line(node.lineno) for node in nodes}
    words = ", ".join(found[number] for number in sorted(found))
    return words if words.startswith("cell") else f"line {words}"


def parent(node: ast.AST) -> ast.AST | None:
    """The node around it."""
    return getattr(node, "parent", None)


def around(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes around it, innermost first."""
    above = parent(node)
    while above is not None:
        yield above
        above = parent(above)


def inside(node: ast.AST, outer: ast.AST) -> bool:
    """Whether a node is part of another."""
    return any(above is outer for above in around(node))


def calls_in(outer: ast.AST) -> Iterator[ast.Call]:
    """The calls inside a node."""
    return (call for call in module_of(outer).calls if inside(call, outer))


def function_of(node: ast.AST) -> ast.FunctionDef | None:
    """The function it stands in."""
    return next((above for above in around(node) if isinstance(above, ast.FunctionDef)), None)


def class_of(node: ast.AST) -> ast.ClassDef | None:
    """The class it stands in."""
    return next((above for above in around(node) if isinstance(above, ast.ClassDef)), None)


def scopes(node: ast.AST) -> list[Scope]:
    """Where a name at this node is looked up: functions outwards, the class it stands in directly, the module."""
    found: list[Scope] = []
    for above in around(node):
        if isinstance(above, ast.Module | ast.FunctionDef) or (isinstance(above, ast.ClassDef) and not found):
            found.append(above)
    return found


def loops(node: ast.AST) -> list[Loop]:
    """The loops around it within its function, innermost first."""
    found: list[Loop] = []
    below = node
    for above in around(node):
        if isinstance(above, ast.FunctionDef | ast.Lambda):
            break
        if isinstance(above, ast.For | ast.While) and below in above.body:
            found.append(above)
        below = above
    return found


def dotted(node: ast.AST) -> str:
    """A.b.c in full, with what was imported put in the place of its alias; empty where it is something else."""
    if isinstance(node, ast.Name):
        return module_of(node).imports.get(node.id, node.id)
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if isinstance(node, ast.Attribute) and before else ""


def last_name(name: str) -> str:
    """The c of a.b.c."""
    return name.rsplit(".", 1)[-1]


# ---------------------------------------------------------------- calls and functions


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


def starred(call: ast.Call) -> bool:
    """Whether a call is given something with *."""
    return any(isinstance(given, ast.Starred) for given in call.args)


def parameters(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """A function's parameters in order, each with its default; but for *args and **kwargs."""
    given = function.args
    placed = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(placed) - len(given.defaults)) + given.defaults
    found = {one.arg: default for one, default in zip(placed, defaults, strict=True)}
    return found | {one.arg: default for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
