"""Checks of the loop: what makes the host wait every batch, and how often training stands still."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import cast

import libcst as cst

from flatout.diagnose.preflight.checklist import Line, ok, unknown, warn
from flatout.diagnose.preflight.loading import evaluation_loaders
from flatout.diagnose.preflight.source import Loop, Module, arguments
from flatout.diagnose.preflight.study import Study
from flatout.diagnose.preflight.training import Region, atoms, every_time, gpu_names, is_epoch_loop
from flatout.diagnose.preflight.values import Value

_FETCHES = ("item", "cpu", "tolist", "numpy")
_EVALUATES = re.compile(r"^_?(run_)?(validate|evaluate|evaluation|validation|test|eval|val)(_|$)", re.IGNORECASE)
_MANY_EPOCHS, _SELDOM_ENOUGH = 10, 5


def check_host_waits(study: Study) -> Line:
    """.item(), .cpu(), print() of what the model gave, every batch."""
    subject = "host waits"
    if not study.regions or study.evaluator is None:
        return unknown(subject, "no training loop was seen")
    for region in study.regions:
        found = list(_fetches(study, region))
        if not found:
            continue
        words = list(dict.fromkeys(word for word, _ in found))
        lines = ", ".join(str(line) for line in sorted({region.module.line(call) for _, call in found}))
        count = f"{len(found)} times " if len(found) > 1 else ""
        return warn(
            subject,
            f"{' and '.join(words)} {count}every batch (line {lines}): "
            "the host waits until the GPU has nothing left to do",
            fix="add up on the GPU (total += loss.detach()), and fetch only when you log",
            code="sync.item",
            where=region.module.where(found[0][1]),
        )
    return ok(
        subject, "nothing is fetched from the GPU every batch", study.regions[0].module.where(study.regions[0].node)
    )


def _fetches(study: Study, region: Region) -> Iterator[tuple[str, cst.Call]]:
    assert study.evaluator is not None
    on_gpu = gpu_names(region)
    for call in region.calls():
        word = _fetch(region.module, call, on_gpu)
        if word is not None and every_time(study.evaluator, region.module, call, region.node):
            yield word, call


def _fetch(module: Module, call: cst.Call, on_gpu: set[str]) -> str | None:
    """What a call fetches from the GPU with, if it does."""
    if isinstance(call.func, cst.Attribute):
        name = call.func.attr.value
        if name in _FETCHES and not call.args and on_gpu & set(atoms(module, call.func.value)):
            return f".{name}()"
        return "torch.cuda.synchronize()" if module.dotted(call.func) == "torch.cuda.synchronize" else None
    if isinstance(call.func, cst.Name) and call.func.value in ("print", "float", "int", "bool"):
        given = arguments(call)
        if any(on_gpu & set(atoms(module, argument)) for argument in given.positional):
            return f"{call.func.value}() of a tensor"
    return None


def check_evaluation(study: Study) -> Line:
    """How often training stops for an evaluation."""
    subject = "evaluation"
    if study.program is None:
        return unknown(subject, "no script to look at")
    for region in _over_batches(study):
        for call in region.calls():
            if _evaluates(study, region.module, call) and _always(study, region.module, call, region.node):
                return warn(
                    subject,
                    "evaluated after every batch",
                    fix="once an epoch, or every few hundred steps",
                    code="pause.eval",
                    where=region.module.where(call),
                )
    slow = any(loader.get("num_workers").what == 0 for loader in evaluation_loaders(study))
    return _each_epoch(study, subject, "pause.eval", lambda m, c: _evaluates(study, m, c), main_thread=slow)


def check_checkpoints(study: Study) -> Line:
    """How often training stops to save."""
    subject = "checkpoints"
    if study.program is None:
        return unknown(subject, "no script to look at")
    for region in _over_batches(study):
        for call in region.calls():
            if _saves(study, region.module, call) and _always(study, region.module, call, region.node):
                return warn(
                    subject,
                    "saved after every batch",
                    fix="once an epoch, or every few thousand steps",
                    code="pause.checkpoint",
                    where=region.module.where(call),
                )
    return _each_epoch(study, subject, "pause.checkpoint", lambda m, c: _saves(study, m, c))


def _over_batches(study: Study) -> Iterator[Region]:
    """Regions that run more than once an epoch: not those with all the data in one batch."""
    for region in study.regions:
        if isinstance(region.node, cst.FunctionDef):
            callers = study.program.calls_of(region.node) if study.program is not None else []
            loops = [(module, loop) for module, call in callers for loop in module.loops(call)[:1]]
        else:
            loops = [(region.module, region.node)]
        if not any(is_epoch_loop(module, loop) for module, loop in loops):
            yield region


def _each_epoch(
    study: Study, subject: str, code: str, wanted: Callable[[Module, cst.Call], bool], *, main_thread: bool = False
) -> Line:
    """How often the loop over epochs comes to a wanted call.

    A knob that stands at every epoch in a long run is worth turning; without one, every epoch is the custom.
    """
    found = next(((m, c, loop) for m, c, loop in _in_epoch_loops(study) if wanted(m, c)), None)
    if found is None:
        return unknown(subject, "none was seen in a loop over epochs")
    module, call, _ = found
    where, every, epochs = module.where(call), _interval(study, *found), study.setting("epochs")
    if not every.is_number():
        return unknown(subject, "under a condition that cannot be told from the source", where=where)
    if every.what != 1:
        return ok(subject, f"every {every.what} epochs", every.where)
    alone = ", and the training process loads all of its data itself" if main_thread else ""
    if every.knob and epochs.is_number() and epochs.what >= _MANY_EPOCHS:
        return warn(
            subject,
            f"{epochs.what} epochs, and after each one training stops for it{alone}",
            fix=every.turned_to("every", _SELDOM_ENOUGH),
            code=code,
            where=every.where,
        )
    if main_thread:
        return warn(
            subject,
            f"after every epoch training stops for it{alone}",
            fix=f"num_workers={min(study.machine.budget.cores, 8)} for the evaluation's loader",
            code=code,
            where=where,
        )
    return ok(subject, "after every epoch", where)


def _in_epoch_loops(study: Study) -> Iterator[tuple[Module, cst.Call, Loop]]:
    """The calls in loops over epochs, but for those of every batch."""
    for region in study.regions:
        if region.epochs is not None:
            module, loop = region.epochs
            for call in module.calls:
                if any(above is loop for above in module.around(call)) and not region.holds(module, call):
                    yield module, call, loop


def _interval(study: Study, module: Module, call: cst.Call, loop: Loop) -> Value:
    """Every how many epochs a call runs, by the `epoch % n` around it; 1 under no condition at all."""
    around = list(module.around(call))
    tests = [above.test for above in around[: around.index(loop)] if isinstance(above, cst.If)]
    counted = [study.value(module, node.right) for test in tests for node in _counts(module, test)]
    if counted:
        return counted[0]
    return Value(1) if _always(study, module, call, loop) else Value()


def _counts(module: Module, test: cst.CSTNode) -> Iterator[cst.BinaryOperation]:
    """The `a % b` in a condition."""
    for node in module.nodes:
        counts = isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo)
        if counts and (node is test or any(above is test for above in module.around(node))):
            yield cast("cst.BinaryOperation", node)


def _always(study: Study, module: Module, call: cst.Call, within: cst.CSTNode) -> bool:
    return study.evaluator is not None and every_time(study.evaluator, module, call, within)


def _evaluates(study: Study, module: Module, call: cst.Call) -> bool:
    """A call of a function of the program that puts the model into evaluation mode and loops."""
    name = module.dotted(call.func) or ""
    return _does(
        study,
        module,
        call,
        lambda m, c: isinstance(c.func, cst.Attribute) and c.func.attr.value == "eval" and not c.args,
    ) or (
        bool(_EVALUATES.match(name.rsplit(".", 1)[-1]))
        and study.program is not None
        and study.program.function(module, call.func) is not None
    )


def _saves(study: Study, module: Module, call: cst.Call) -> bool:
    if module.dotted(call.func) == "torch.save":
        return True
    return _does(study, module, call, lambda m, c: m.dotted(c.func) == "torch.save")


def _does(
    study: Study, module: Module, call: cst.Call, wanted: Callable[[Module, cst.Call], bool], depth: int = 2
) -> bool:
    """Whether a call of a function of the program comes to a wanted call, and does not train."""
    found = study.program.function(module, call.func) if study.program is not None else None
    if found is None or depth == 0:
        return False
    other, function = found
    inner = [c for c in other.calls if any(above is function for above in other.around(c))]
    if any(isinstance(c.func, cst.Attribute) and c.func.attr.value == "backward" for c in inner):
        return False
    return any(
        (wanted(other, c) or _does(study, other, c, wanted, depth - 1)) and _always(study, other, c, function)
        for c in inner
    )
