"""Checks of the loop: what makes the host wait every batch, and how often training stands still."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from flatout.check import tree
from flatout.check.checklist import Line, ok, unknown, warn
from flatout.check.loading import goes_over_evaluation_data
from flatout.check.study import Study
from flatout.check.training import BACKWARD, Region, atoms, gpu_names, is_epoch_loop, method_of
from flatout.check.values import Value

_FETCHES = ("item", "cpu", "tolist", "numpy")
_EVALUATES = re.compile(r"^_?(run_)?(validate|evaluate|evaluation|validation|test|eval|val)(_|$)", re.IGNORECASE)
_MANY_EPOCHS, _SELDOM_ENOUGH = 10, 5

Wanted = Callable[[Study, ast.Call], bool]


def check_host_waits(study: Study) -> Line:
    """.item(), .cpu(), print() of what the model gave, every batch."""
    if not study.regions:
        return unknown("no training loop was seen")
    for region in study.regions:
        on_gpu = gpu_names(region)
        fetches = ((_fetch(call, on_gpu), call) for call in region.calls())
        found = [(word, call) for word, call in fetches if word and study.always(call, region.node)]
        if not found:
            continue
        words = " and ".join(dict.fromkeys(word for word, _ in found))
        lines = tree.lines(call for _, call in found)
        count = f"{len(found)} times " if len(found) > 1 else ""
        reason = f"{words} {count}every batch ({lines}): the host waits until the GPU has nothing left to do"
        fix = "add up on the GPU (total += loss.detach()), and fetch only when you log"
        return warn(reason, tree.where(found[0][1]), fix=fix, code="sync.item")
    return ok("nothing is fetched from the GPU every batch", study.regions[0].where)


def _fetch(call: ast.Call, on_gpu: set[str]) -> str | None:
    """What a call fetches from the GPU with, if it does."""
    match call:
        case ast.Call(func=ast.Attribute(value=tensor, attr=name), args=[]) if name in _FETCHES:
            return f".{name}()" if on_gpu & set(atoms(tensor)) else None
        case ast.Call(func=ast.Name(id="print" | "float" | "int" | "bool" as name), args=given):
            return f"{name}() of a tensor" if any(on_gpu & set(atoms(one)) for one in given) else None
    return "torch.cuda.synchronize()" if tree.dotted(call.func) == "torch.cuda.synchronize" else None


def check_evaluation(study: Study) -> Line:
    """How often training stops for an evaluation."""
    often = _each_batch(
        study, _evaluates, "evaluated", fix="once an epoch, or every few hundred steps", code="pause.eval"
    )
    return often or _each_epoch(study, _begins_evaluation, code="pause.eval")


def check_checkpoints(study: Study) -> Line:
    """How often training stops to save."""
    fix, code = "once an epoch, or every few thousand steps", "pause.checkpoint"
    return _each_batch(study, _saves, "saved", fix=fix, code=code) or _each_epoch(study, _saves, code=code)


def _each_batch(study: Study, wanted: Wanted, done: str, *, fix: str, code: str) -> Line | None:
    for region in study.regions:
        for call in region.calls() if _over_batches(study, region) else ():
            if wanted(study, call) and study.always(call, region.node):
                return warn(f"{done} after every batch", tree.where(call), fix=fix, code=code)
    return None


def _over_batches(study: Study, region: Region) -> bool:
    """Whether a region runs more than once an epoch: not where all the data is one batch."""
    if not isinstance(region.node, ast.FunctionDef):
        return not is_epoch_loop(region.node)
    callers = study.program.calls(region.node.name)
    return not any(is_epoch_loop(loop) for call, _ in callers for loop in tree.loops(call)[:1])


def _each_epoch(study: Study, wanted: Wanted, *, code: str) -> Line:
    """How often the loop over epochs comes to a wanted call.

    A knob that stands at every epoch in a long run is worth turning; without one, every epoch is the custom.
    """
    for region in study.regions:
        loop = region.epochs
        for call in tree.calls_in(loop) if loop is not None else ():
            if loop is not None and not tree.inside(call, region.node) and wanted(study, call):
                return _how_often(study, call, loop, code)
    return _between_batches(study, wanted) or unknown("none was seen in a loop over epochs")


def _between_batches(study: Study, wanted: Wanted) -> Line | None:
    """Every so many batches: what that costs, the source does not tell."""
    for region in study.regions:
        for call in region.calls() if _over_batches(study, region) else ():
            if wanted(study, call):
                every = _interval(study, call, region.node)
                often = f"every {every.what:,} batches" if every.is_number() else "among the batches, now and then"
                return unknown(f"{often}; what that costs shows only in a run", tree.where(call))
    return None


def _how_often(study: Study, call: ast.Call, loop: tree.Loop, code: str) -> Line:
    every, epochs = _interval(study, call, loop), study.setting("epochs")
    if not every.is_number():
        return unknown("under a condition that cannot be told from the source", tree.where(call))
    if every.what != 1:
        return ok(f"every {every.what} epochs", every.where)
    if every.knob and epochs.is_number() and epochs.what >= _MANY_EPOCHS:
        fix = every.turned_to("every", _SELDOM_ENOUGH)
        reason = f"{epochs.what} epochs, and after each one training stops for it"
        return warn(reason, every.where, fix=fix, code=code)
    return ok("after every epoch", tree.where(call))


def _interval(study: Study, call: ast.Call, loop: tree.Loop | ast.FunctionDef) -> Value:
    """Every how many rounds of a loop a call runs, by the `epoch % n` around it; 1 under no condition at all."""
    for above in tree.around(call):
        if above is loop:
            break
        for node in ast.walk(above.test) if isinstance(above, ast.If) else ():
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                return study.value(node.right)
    return Value(1) if study.always(call, loop) else Value()


def _evaluates(study: Study, call: ast.Call) -> bool:
    """A call of a function of the program that is named so, or that comes to an evaluation; or a part of one."""
    if study.program.function(call.func) is None:
        return _of_evaluation(study, call)
    named = _EVALUATES.match(tree.last_name(tree.dotted(call.func)))
    return bool(named) or _does(study, call, lambda inner: method_of(inner) == "eval" or _of_evaluation(study, inner))


def _of_evaluation(study: Study, call: ast.Call) -> bool:
    """Whether a comprehension gives the call its evaluation data: sum(right(model(x), y) for x, y in val_loader)."""
    given = {name for part in (*call.args, *(k.value for k in call.keywords)) for name in atoms(part)}
    parts = [part for above in tree.around(call) for part in getattr(above, "generators", ())]
    return any(given & set(atoms(part.target)) and goes_over_evaluation_data(study, part.iter) for part in parts)


def _begins_evaluation(study: Study, call: ast.Call) -> bool:
    """Also one that is written out in the loop over epochs, from model.eval() on."""
    return _evaluates(study, call) or (method_of(call) == "eval" and not call.args)


def _saves(study: Study, call: ast.Call) -> bool:
    return _does(study, call, lambda inner: tree.dotted(inner.func) == "torch.save")


def _does(study: Study, call: ast.Call, wanted: Callable[[ast.Call], bool], depth: int = 2) -> bool:
    """Whether a call is a wanted one, or one of a function of the program that comes to it and does not train."""
    function = study.program.function(call.func)
    if function is None or depth == 0:
        return wanted(call)
    inner = list(tree.calls_in(function))
    if any(method_of(one) in BACKWARD for one in inner):
        return False
    return any(_does(study, one, wanted, depth - 1) and study.always(one, function) for one in inner)
