"""Where a Program trains: the loop over batches, the loop over epochs around it, and what runs every batch.

A training region is the innermost loop that does a backward pass and an optimizer step, or the function that such a
loop calls for every batch. A framework's `training_step` is one too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from flatout.diagnose.preflight.evaluate import Evaluator
from flatout.diagnose.preflight.source import Loop, Module, Program, arguments

# A condition that holds on one rank holds there for every batch.
_ON_ONE_RANK = re.compile(r"rank|main_process|is_main|is_master|master_process|is_primary", re.IGNORECASE)
_EPOCH = re.compile(r"(^|[^a-z])ep(och)?s?([^a-z]|$)|epoch", re.IGNORECASE)
# From here on the value is on the host, or is only about the tensor.
_LEAVES_THE_GPU = frozenset((
    "item", "cpu", "tolist", "numpy", "size", "dim", "numel", "shape", "dtype", "device", "ndim", "len", "float()",
    "int()", "bool()", "isinstance", "type", "requires_grad", "data_ptr", "element_size", "is_cuda",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Region:
    """What runs once a batch; `epochs` is the loop over epochs around it, in whichever function that stands."""

    module: Module
    node: Loop | cst.FunctionDef
    epochs: tuple[Module, Loop] | None

    def holds(self, module: Module, node: cst.CSTNode) -> bool:
        """Whether a node is inside."""
        return module is self.module and any(above is self.node for above in module.around(node))

    def calls(self) -> Iterator[cst.Call]:
        """The calls inside."""
        return (call for call in self.module.calls if self.holds(self.module, call))

    def iterates(self) -> cst.BaseExpression | None:
        """What it loops over."""
        return self.node.iter if isinstance(self.node, cst.For) else None


def find_regions(program: Program) -> list[Region]:
    """Every place that trains."""
    found: list[Region] = []
    for module, node in _backward_places(program):
        if all(node is not region.node for region in found):
            found.append(Region(module, node, _epochs(program, module, node)))
    return found


def _backward_places(program: Program) -> Iterator[tuple[Module, Loop | cst.FunctionDef]]:
    for module in program.modules:
        for call in module.calls:
            if not isinstance(call.func, cst.Attribute):
                continue
            if call.func.attr.value in ("backward", "manual_backward"):
                yield from _place_of(program, module, call)
            elif call.func.attr.value == "zero_grad" and _over_batches(module, call):
                yield module, module.loops(call)[0]  # the backward pass hides in a scaler's call
        for function in module.functions.get("training_step", []):
            if module.class_of(function) is not None:
                yield module, function


def _place_of(program: Program, module: Module, call: cst.Call) -> Iterator[tuple[Module, Loop | cst.FunctionDef]]:
    loops = module.loops(call)
    if loops:
        yield module, next((loop for loop in loops if _steps(module, loop)), loops[0])
        return
    function = module.function_of(call)
    if function is None:
        return
    outside = module.loops(function)  # a closure, as LBFGS wants it
    if outside:
        yield module, outside[0]
    elif any(m.loops(c) for m, c in program.calls_of(function)):
        yield module, function


def _over_batches(module: Module, call: cst.Call) -> bool:
    loops = module.loops(call)
    return bool(loops) and isinstance(loops[0], cst.For) and "range(" not in module.text(loops[0].iter)


def _steps(module: Module, loop: Loop) -> bool:
    return any(
        isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("step", "step_and_update_lr")
        and any(above is loop for above in module.around(call))
        for call in module.calls
    )


def _epochs(
    program: Program, module: Module, node: Loop | cst.FunctionDef, depth: int = 3
) -> tuple[Module, Loop] | None:
    """The loop over epochs around a node, there or where its function is called."""
    for loop in module.loops(node):
        if is_epoch_loop(module, loop):
            return module, loop
    function = node if isinstance(node, cst.FunctionDef) else module.function_of(node)
    if function is None or depth == 0:
        return None
    for caller_module, call in program.calls_of(function):
        if caller_module.function_of(call) is function:
            continue
        found = next(((caller_module, x) for x in caller_module.loops(call) if is_epoch_loop(caller_module, x)), None)
        caller = caller_module.function_of(call)
        found = found or (_epochs(program, caller_module, caller, depth - 1) if caller is not None else None)
        if found is not None:
            return found
    return None


def is_epoch_loop(module: Module, loop: Loop) -> bool:
    """Whether a loop's own words say that it counts epochs."""
    head = (
        f"{module.text(loop.target)} {module.text(loop.iter)}" if isinstance(loop, cst.For) else module.text(loop.test)
    )
    return bool(_EPOCH.search(head)) and "loader" not in head.lower()


def every_time(evaluator: Evaluator, module: Module, node: cst.CSTNode, within: cst.CSTNode) -> bool:
    """Whether a node runs each time `within` does: under no condition but such as always hold."""
    below = statement = node
    for above in module.around(node):
        if above is within:
            return not _skipped_before(module, statement)
        if isinstance(above, cst.IndentedBlock):
            statement = below
        if isinstance(above, cst.If | cst.IfExp) and below is not above.test:
            test = evaluator.value(module, above.test)
            if test.known:
                if bool(test.what) is not (below is above.body):
                    return False
            elif below is not above.body or not _on_one_rank(module.text(above.test)):
                return False
        if isinstance(above, cst.BooleanOperation) and below is above.right:
            return False
        if isinstance(above, cst.FunctionDef | cst.Lambda | cst.ExceptHandler | cst.ClassDef):
            return False
        below = above
    return False


def _on_one_rank(test: str) -> bool:
    return bool(_ON_ONE_RANK.search(test)) and "%" not in test and " and " not in test


def _skipped_before(module: Module, statement: cst.CSTNode) -> bool:
    """Whether an `if step % 10: continue` stands above a statement."""
    block = module.parent(statement)
    if not isinstance(block, cst.IndentedBlock):
        return False
    for earlier in block.body:
        if earlier is statement:
            break
        skips = isinstance(earlier, cst.If) and "%" in module.text(earlier.test)
        if skips and any(isinstance(node, cst.Continue) and earlier in module.around(node) for node in module.nodes):
            return True
    return False


# ---------------------------------------------------------------- what lives on the GPU


def gpu_names(region: Region) -> set[str]:
    """Names that hold results of the model: those the loss is made of, and what is made of them in turn."""
    assigned = _assigned(region)
    from_loader = _targets(region.node.target) if isinstance(region.node, cst.For) else set()
    by_name: dict[str, set[str]] = {}
    for targets, used in assigned:
        for target in targets:
            by_name.setdefault(target, set()).update(used)
    found: set[str] = set()
    losses = set(_losses(region)) or {name for name in by_name if "loss" in name.lower()}
    open_ones = losses & set(by_name)
    while open_ones:
        name = open_ones.pop()
        found.add(name)
        open_ones |= (by_name[name] & set(by_name)) - found
    found -= from_loader - set(by_name)
    grown = True
    while grown:
        more = {target for targets, used in assigned if used & found for target in targets} - found
        grown = bool(more)
        found |= more
    return found


def _losses(region: Region) -> Iterator[str]:
    for call in region.calls():
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("backward", "manual_backward"):
            yield from atoms(region.module, call.func.value)
            for argument in call.args:
                yield from atoms(region.module, argument.value)
    if isinstance(region.node, cst.FunctionDef) and region.node.name.value == "training_step":
        for node in region.module.nodes:
            if isinstance(node, cst.Return) and node.value is not None and region.holds(region.module, node):
                yield from atoms(region.module, node.value)


def _assigned(region: Region) -> list[tuple[set[str], set[str]]]:
    """(names that get a value, names on the GPU it may be made of) for every assignment inside."""
    found = []
    for node in region.module.nodes:
        match node:
            case cst.Assign():
                targets = {name for target in node.targets for name in _targets(target.target)}
            case cst.AugAssign() | cst.AnnAssign() | cst.NamedExpr():
                targets = _targets(node.target)
            case _:
                continue
        if node.value is not None and region.holds(region.module, node):
            found.append((targets, set(atoms(region.module, node.value))))
    return found


def _targets(node: cst.CSTNode) -> set[str]:
    if isinstance(node, cst.Name):
        return {node.value}
    if isinstance(node, cst.Tuple | cst.List):
        return {name for element in node.elements for name in _targets(element.value)}
    if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self":
        return {f"self.{node.attr.value}"}
    return set()


def atoms(module: Module, node: cst.CSTNode) -> Iterator[str]:
    """The names in an expression whose tensors go into its value; not those it only takes the size of, or fetches."""
    match node:
        case cst.Name():
            yield node.value
        case cst.Attribute():
            if node.attr.value in _LEAVES_THE_GPU:
                return
            if isinstance(node.value, cst.Name) and node.value.value == "self":
                yield f"self.{node.attr.value}"
            else:
                yield from atoms(module, node.value)
        case cst.Call():
            yield from _atoms_of_call(module, node)
        case cst.Lambda():
            return
        case cst.Subscript():
            yield from atoms(module, node.value)  # the index does not go into the value
        case cst.Comparison():
            if not any(isinstance(target.operator, cst.Is | cst.IsNot) for target in node.comparisons):
                for child in node.children:
                    yield from atoms(module, child)
        case _:
            for child in node.children:
                yield from atoms(module, child)


def _atoms_of_call(module: Module, call: cst.Call) -> Iterator[str]:
    name = f"{call.func.value}()" if isinstance(call.func, cst.Name) else ""
    if name in _LEAVES_THE_GPU or name.removesuffix("()") in _LEAVES_THE_GPU:
        return
    if isinstance(call.func, cst.Attribute):
        if call.func.attr.value in _LEAVES_THE_GPU:
            return
        yield from atoms(module, call.func.value)
    given = arguments(call)
    for argument in (*given.positional, *given.keywords.values()):
        yield from atoms(module, argument)
