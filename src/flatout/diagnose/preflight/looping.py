"""Checks of the loop: what makes the host wait every batch, and how often training stands still."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from flatout.diagnose.preflight.checklist import Line, ok, unknown, warn
from flatout.diagnose.preflight.source import Loop, Module
from flatout.diagnose.preflight.study import Study
from flatout.diagnose.preflight.training import BACKWARD, Region, atoms, gpu_names, is_epoch_loop, method_of
from flatout.diagnose.preflight.values import Value

_FETCHES = ("item", "cpu", "tolist", "numpy")
_EVALUATES = re.compile(r"^_?(run_)?(validate|evaluate|evaluation|validation|test|eval|val)(_|$)", re.IGNORECASE)
_MANY_EPOCHS, _SELDOM_ENOUGH = 10, 5

Wanted = Callable[[Study, Module, ast.Call], bool]


def check_host_waits(study: Study) -> Line:
    """.item(), .cpu(), print() of what the model gave, every batch."""
    if not study.regions:
        return unknown("no training loop was seen")
    for region in study.regions:
        found = list(_fetches(study, region))
        if not found:
            continue
        words = " and ".join(dict.fromkeys(word for word, _ in found))
        lines = ", ".join(str(line) for line in sorted({call.lineno for _, call in found}))
        count = f"{len(found)} times " if len(found) > 1 else ""
        reason = f"{words} {count}every batch (line {lines}): the host waits until the GPU has nothing left to do"
        fix = "add up on the GPU (total += loss.detach()), and fetch only when you log"
        return warn(reason, region.module.where(found[0][1]), fix=fix, code="sync.item")
    return ok("nothing is fetched from the GPU every batch", study.regions[0].where)


def _fetches(study: Study, region: Region) -> Iterator[tuple[str, ast.Call]]:
    on_gpu = gpu_names(region)
    for call in region.calls():
        word = _fetch(region.module, call, on_gpu)
        if word is not None and study.always(region.module, call, region.node):
            yield word, call


def _fetch(module: Module, call: ast.Call, on_gpu: set[str]) -> str | None:
    """What a call fetches from the GPU with, if it does."""
    match call:
        case ast.Call(func=ast.Attribute(value=tensor, attr=name), args=[]) if name in _FETCHES:
            return f".{name}()" if on_gpu & set(atoms(tensor)) else None
        case ast.Call(func=ast.Name(id="print" | "float" | "int" | "bool" as name), args=given):
            return f"{name}() of a tensor" if any(on_gpu & set(atoms(one)) for one in given) else None
    return "torch.cuda.synchronize()" if module.dotted(call.func) == "torch.cuda.synchronize" else None


def check_evaluation(study: Study) -> Line:
    """How often training stops for an evaluation."""
    each_batch = _each_batch(study, "evaluated", "once an epoch, or every few hundred steps", "pause.eval", _evaluates)
    return each_batch or _each_epoch(study, "pause.eval", _evaluates)


def check_checkpoints(study: Study) -> Line:
    """How often training stops to save."""
    each_batch = _each_batch(study, "saved", "once an epoch, or every few thousand steps", "pause.checkpoint", _saves)
    return each_batch or _each_epoch(study, "pause.checkpoint", _saves)


def _each_batch(study: Study, done: str, fix: str, code: str, wanted: Wanted) -> Line | None:
    for region in study.regions:
        for call in region.calls() if _over_batches(study, region) else ():
            if wanted(study, region.module, call) and study.always(region.module, call, region.node):
                return warn(f"{done} after every batch", region.module.where(call), fix=fix, code=code)
    return None


def _over_batches(study: Study, region: Region) -> bool:
    """Whether a region runs more than once an epoch: not where all the data is one batch."""
    if not isinstance(region.node, ast.FunctionDef):
        return not is_epoch_loop(region.node)
    callers = study.program.calls(region.node.name)
    return not any(is_epoch_loop(loop) for module, call, _ in callers for loop in module.loops(call)[:1])


def _each_epoch(study: Study, code: str, wanted: Wanted) -> Line:
    """How often the loop over epochs comes to a wanted call.

    A knob that stands at every epoch in a long run is worth turning; without one, every epoch is the custom.
    """
    found = next((place for place in _in_epoch_loops(study) if wanted(study, *place[:2])), None)
    if found is None:
        return unknown("none was seen in a loop over epochs")
    where, every, epochs = found[0].where(found[1]), _interval(study, *found), study.setting("epochs")
    if not every.is_number():
        return unknown("under a condition that cannot be told from the source", where)
    if every.what != 1:
        return ok(f"every {every.what} epochs", every.where)
    if every.knob and epochs.is_number() and epochs.what >= _MANY_EPOCHS:
        fix = every.turned_to("every", _SELDOM_ENOUGH)
        reason = f"{epochs.what} epochs, and after each one training stops for it"
        return warn(reason, every.where, fix=fix, code=code)
    return ok("after every epoch", where)


def _in_epoch_loops(study: Study) -> Iterator[tuple[Module, ast.Call, Loop]]:
    """The calls in loops over epochs, but for those of every batch."""
    for region in study.regions:
        module, loop = region.epochs or (region.module, None)
        for call in module.calls if loop is not None else ():
            if loop is not None and module.inside(call, loop) and not module.inside(call, region.node):
                yield module, call, loop


def _interval(study: Study, module: Module, call: ast.Call, loop: Loop) -> Value:
    """Every how many epochs a call runs, by the `epoch % n` around it; 1 under no condition at all."""
    for above in module.around(call):
        if above is loop:
            break
        for node in ast.walk(above.test) if isinstance(above, ast.If) else ():
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                return study.value(module, node.right)
    return Value(1) if study.always(module, call, loop) else Value()


def _evaluates(study: Study, module: Module, call: ast.Call) -> bool:
    """A call of a function of the program that is named so, or that puts the model into evaluation mode."""
    if study.program.function(module, call.func) is None:
        return False
    name = (module.dotted(call.func) or "").rsplit(".", 1)[-1]
    return bool(_EVALUATES.match(name)) or _does(study, module, call, lambda _, m, c: method_of(c) == "eval")


def _saves(study: Study, module: Module, call: ast.Call) -> bool:
    return _does(study, module, call, lambda _, m, c: m.dotted(c.func) == "torch.save")


def _does(study: Study, module: Module, call: ast.Call, wanted: Wanted, depth: int = 2) -> bool:
    """Whether a call is a wanted one, or one of a function of the program that comes to it and does not train."""
    found = study.program.function(module, call.func)
    if found is None or depth == 0:
        return wanted(study, module, call)
    other, function = found
    inner = [one for one in other.calls if other.inside(one, function)]
    if any(method_of(one) in BACKWARD for one in inner):
        return False
    return any(_does(study, other, one, wanted, depth - 1) and study.always(other, one, function) for one in inner)
