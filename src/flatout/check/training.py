"""Where a Program trains: the loop over batches, the loop over epochs around it, and what runs every batch.

A training region is the innermost loop that does a backward pass and an optimizer step, or the function that such a
loop calls for every batch. A framework's `training_step` is one too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.check import tree
from flatout.check.source import Program
from flatout.check.tree import Loop

_EPOCH = re.compile(r"(^|[^a-z])ep(och)?s?([^a-z]|$)|epoch", re.IGNORECASE)
# From here on the value is on the host, or is only about the tensor.
_LEAVES_THE_GPU = frozenset((
    "item", "cpu", "tolist", "numpy", "size", "dim", "numel", "shape", "dtype", "device", "ndim", "requires_grad",
    "data_ptr", "element_size", "is_cuda",
))  # fmt: skip
_HOST_FUNCTIONS = frozenset(("len", "float", "int", "bool", "isinstance", "type"))
BACKWARD = ("backward", "manual_backward")


@dataclass(frozen=True, slots=True)
class Region:
    """What runs once a batch; `epochs` is the loop over epochs around it, in whichever function that stands."""

    node: Loop | ast.FunctionDef
    epochs: Loop | None

    @property
    def where(self) -> str:
        """file:line of it."""
        return tree.where(self.node)

    def calls(self) -> Iterator[ast.Call]:
        """The calls inside."""
        return tree.calls_in(self.node)


def method_of(call: ast.Call) -> str | None:
    """The name of the method a call calls."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def find_regions(program: Program) -> list[Region]:
    """Every place that trains."""
    return [Region(node, _epochs(program, node)) for node in dict.fromkeys(_places(program))]


def _places(program: Program) -> Iterator[Loop | ast.FunctionDef]:
    for module in program.modules:
        for call in module.calls:
            loops = tree.loops(call)
            if method_of(call) in BACKWARD:
                yield from _place_of(program, call, loops)
            elif method_of(call) == "zero_grad" and loops and _over_batches(loops[0]):
                yield loops[0]  # the backward pass hides in a scaler's call
        yield from (one for one in module.functions.get("training_step", []) if tree.class_of(one) is not None)


def _place_of(program: Program, call: ast.Call, loops: list[Loop]) -> Iterator[Loop | ast.FunctionDef]:
    function = tree.function_of(call)
    if loops:
        yield next((loop for loop in loops if _steps(loop)), loops[0])
    elif function is not None and (outside := tree.loops(function)):  # a closure, as LBFGS wants it
        yield outside[0]
    elif function is not None:
        in_a_loop = any(tree.loops(caller) for caller, _ in program.calls(function.name))
        if in_a_loop or (_steps(function) and _handed_over(program, function)):  # as in Engine(train_step)
            yield function


def _over_batches(loop: Loop) -> bool:
    return isinstance(loop, ast.For) and "range(" not in ast.unparse(loop.iter)


def _steps(node: Loop | ast.FunctionDef) -> bool:
    return any(method_of(call) in ("step", "step_and_update_lr") for call in tree.calls_in(node))


def _handed_over(program: Program, function: ast.FunctionDef) -> bool:
    """Whether a function is given to something else to call."""
    return any(
        isinstance(given, ast.Name) and given.id == function.name
        for call, _ in program.calls()
        for given in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def _epochs(program: Program, node: ast.AST, depth: int = 3) -> Loop | None:
    """The loop over epochs around a node, there or where its function is called."""
    for loop in tree.loops(node):
        if is_epoch_loop(loop):
            return loop
    function = node if isinstance(node, ast.FunctionDef) else tree.function_of(node)
    if function is None or depth == 0:
        return None
    callers = (call for call, _ in program.calls(function.name) if tree.function_of(call) is not function)
    return next((found for call in callers if (found := _epochs(program, call, depth - 1))), None)


def is_epoch_loop(loop: Loop) -> bool:
    """Whether a loop's own words say that it counts epochs."""
    head = (loop.target, loop.iter) if isinstance(loop, ast.For) else (loop.test,)
    words = " ".join(ast.unparse(part) for part in head)
    return bool(_EPOCH.search(words)) and "loader" not in words.lower()


# ---------------------------------------------------------------- what lives on the GPU


def gpu_names(region: Region) -> set[str]:
    """Names that hold results of the model: those the loss is made of, and what is made of them in turn."""
    assigned = list(_assigned(region))
    names = {target for targets, _ in assigned for target in targets}
    found = (set(_losses(region)) or {name for name in names if "loss" in name.lower()}) & names
    while more := {name for targets, used in assigned if targets & found for name in used & names} - found:
        found |= more
    while more := {target for targets, used in assigned if used & found for target in targets} - found:
        found |= more
    return found


def _losses(region: Region) -> Iterator[str]:
    for call in region.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr in BACKWARD:
            for part in (call.func.value, *call.args):
                yield from atoms(part)
    if isinstance(region.node, ast.FunctionDef) and region.node.name == "training_step":
        for node in ast.walk(region.node):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from atoms(node.value)


def _assigned(region: Region) -> Iterator[tuple[set[str], set[str]]]:
    """(names that get a value, names on the GPU it may be made of) for every assignment inside."""
    for node in ast.walk(region.node):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield {name for target in targets for name in _targets(target)}, set(atoms(value))
            case (
                ast.AugAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                yield _targets(target), set(atoms(value))


def _targets(node: ast.expr) -> set[str]:
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return {f"self.{name}"}
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return {name for part in parts for name in _targets(part)}
    return set()


def atoms(node: ast.AST) -> Iterator[str]:
    """The names in an expression whose tensors go into its value; not those it only takes the size of, or fetches."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)) if name in _LEAVES_THE_GPU:
            return
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            yield f"self.{name}"
        case ast.Call(func=ast.Name(id=name)) if name in _HOST_FUNCTIONS:
            return
        case ast.Call(func=func, args=given, keywords=named):
            for part in (*([func] if isinstance(func, ast.Attribute) else []), *given, *(k.value for k in named)):
                yield from atoms(part)
        case ast.Subscript(value=value):
            yield from atoms(value)  # the index does not go into the value
        case ast.Lambda():
            return
        case ast.Compare(ops=ops) if any(isinstance(op, ast.Is | ast.IsNot) for op in ops):
            return
        case _:
            for child in ast.iter_child_nodes(node):
                yield from atoms(child)
