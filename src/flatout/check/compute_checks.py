"""Checks of the computing and of the loop: precision, switches without effect, what the host waits for.

A setting that asks for something which then never happens is a failure: the person believes that it is on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from flatout.check.known_settings import KnownValue, folded, is_setting
from flatout.check.lines import Line, fail, ok, warn
from flatout.check.script import Node, calls_in, last_name, parents, where
from flatout.check.training import Training, TrainingLoop, runs_every_time
from flatout.model.changes import is_on
from flatout.model.frameworks import FRAMEWORKS

_SHOWS = re.compile(r"^(print|logger|logging|log|wandb|tqdm|console|json|yaml|pprint|str|repr|format|add_argument)$")
_PRECISION = ("precision", "fp16", "trainer_precision")
# Where frameworks are asked for lower precision: calls, their keywords, and how each spells bf16.
_FRAMEWORK_PRECISION = {name: options for framework in FRAMEWORKS for name, options in framework.precision.items()}


def check_mixed_precision(training: Training) -> Line | None:
    """Autocast: there, switched on, and not switched off by a spelling."""
    found = _misspelled(training) or _autocast(training) or _of_framework(training)
    if found is not None:
        return found
    if training.script.uses("autocast", "amp", "half", "bfloat16", "float16") or not training.is_complete:
        return None
    reason = "the model is trained in fp32: no autocast, no lower precision anywhere"
    fix = 'with torch.autocast("cuda", torch.bfloat16): around forward pass and loss (before Ampere: torch.float16)'
    return warn(reason, where(training.loops[0].node), fix=fix, code="compute.precision")


def _misspelled(training: Training) -> Line | None:
    """A setting that asks for mixed precision, compared with words that it is not: `amp: true` with 'bf16'."""
    for name, setting in training.settings.about(*_PRECISION):
        reads = _reads(training, name)
        compared = [node.around for node in reads if isinstance(node.around, ast.Compare)]
        constants = [node.value for one in compared for node in ast.walk(one) if isinstance(node, ast.Constant)]
        words = [word for word in constants if isinstance(word, str) and is_on(word) and word != name]
        if not words or not is_on(setting.what) or setting.what in constants or len(compared) < len(reads):
            continue
        if isinstance(setting.what, str) and setting.what.lower() not in map(str.lower, words):
            continue  # another word altogether, which the script may know elsewhere
        reason = (
            f"{name} is {str(setting.what).lower()} ({setting.where}), but the script asks whether it is "
            f"'{words[0]}' ({where(compared[0])}): it stays off, and matrix work runs in fp32"
        )
        return fail(reason, setting.where, fix=setting.set_to(name, words[0]), code="config.ignored")
    return None


def _autocast(training: Training) -> Line | None:
    """torch's own autocast, and whether it is switched on."""
    off = [value for _, value in training.settings.about(*_PRECISION) if not is_on(value.what)]
    calls = training.script.calls("autocast")
    for call in calls:
        place = 0 if "cuda" in ast.unparse(call.func) else None
        enabled = training.argument(call, "enabled", place) or KnownValue(True)
        if enabled.what is True:
            return ok("autocast is on", where(call))
        if isinstance(enabled.what, str):
            reason = f"autocast(enabled=…) takes true or false and raises a TypeError for {enabled.what!r}"
            return fail(reason, enabled.where, fix=enabled.set_to("enabled", True), code="config.ignored")
        if enabled.what is False:
            off.append(enabled)
    # A setting that says off also stands for what the script computes from it.
    if not calls or not off:
        return None
    fix = off[0].set_to("enabled", True if isinstance(off[0].what, bool) else "bf16")
    reason = "autocast is there, but switched off: matrix work runs in fp32"
    return warn(reason, off[0].where, fix=fix, code="compute.precision")


def _of_framework(training: Training) -> Line | None:
    """Lower precision that a framework is asked for."""
    found: Line | None = None
    for call in training.script.calls(*_FRAMEWORK_PRECISION):
        for option, bf16 in _FRAMEWORK_PRECISION[last_name(call.func)].items():
            value = training.argument(call, option)
            if value is not None and value.known and is_on(value.what):
                return ok(f"{option}={value.what}", value.where)
            if value is not None and value.known:
                fix = value.set_to(option, bf16)
                found = found or warn("fp32 is asked for", value.where, fix=fix, code="compute.precision")
    return found


def _reads(training: Training, name: str) -> list[Node]:
    """Where the script reads a setting, but for messages: cfg.name, cfg["name"], getattr(cfg, "name")."""
    found: list[Node] = []
    for node in training.script.nodes:
        text = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(text, str) and folded(text) == folded(name):
            reading = node if isinstance(node, ast.Attribute) else node.around
            user = next((one for one in (reading, *parents(reading)) if isinstance(one, ast.Call | ast.stmt)), None)
            names = re.findall(r"\w+", ast.unparse(user.func)) if isinstance(user, ast.Call) else []
            if not any(map(_SHOWS.match, names)):
                found.append(reading)
    return found


def switch_check(subject: str, fix: str, *other_names: str) -> Callable[[Training], Line | None]:
    """A check that what a setting asks for, the name that `fix` begins with, is used anywhere in the script."""
    names = (re.split(r"[^\w.]", fix)[0], *other_names)

    def check(training: Training) -> Line | None:
        uses = training.script.uses(*(name.rpartition(".")[2] for name in names))
        uses = [node for node in uses if not is_setting(node) and ast.unparse(node) != "re.compile"]
        if uses:
            return ok("used", where(uses[0]))
        for setting, value in training.settings.about(subject):
            if value.what is True and training.is_complete and not _reads(training, setting):
                reason = f"{setting}: true ({value.where}) has no effect: {' or '.join(names)} is never used"
                return fail(reason, value.where, fix=fix, code="config.ignored")
        return None

    return check


def check_host_waits(training: Training) -> Line | None:
    """.item(), .cpu(), print() of what the model gave, every batch."""
    for loop in training.loops:
        names = _names_on_gpu(loop)
        every_batch = [call for call in calls_in(loop.node) if runs_every_time(call, loop.node)]
        fetches = [call for call in every_batch if _fetches(call, names)]
        if fetches:
            what = ", ".join(f"{ast.unparse(call)} ({where(call)})" for call in fetches[:3])
            reason = f"{what} every batch: the host waits until the GPU has nothing left to do"
            fix = "add up on the GPU (total += loss.detach()), and fetch only when you log"
            return warn(reason, where(fetches[0]), fix=fix, code="sync.item")
    return ok("nothing is fetched from the GPU every batch") if training.loops else None


def _fetches(call: ast.Call, names: set[str]) -> bool:
    """Whether a call fetches one of these tensors from the GPU."""
    match call:
        case ast.Call(func=ast.Attribute(value=tensor, attr="item" | "cpu" | "tolist" | "numpy"), args=[]):
            return bool(names & _tensors(tensor))
        case ast.Call(func=ast.Name(id="print" | "float" | "int" | "bool"), args=given):
            return any(names & _tensors(one) for one in given)
    return ast.unparse(call.func) == "torch.cuda.synchronize"


def _names_on_gpu(loop: TrainingLoop) -> set[str]:
    """Names that hold what the model gave: the loss, what it is made of, and what is made of that in turn."""
    assigned: list[tuple[set[str], set[str]]] = []
    for node in ast.walk(loop.node):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = {name for target in targets for name in _tensors(target)} - {"self"}
            assigned.append((stored, _tensors(node.value)))
    names = {name for stored, used in assigned if used for name in stored}
    found = {name for call in calls_in(loop.node) if "backward" in last_name(call.func) for name in _tensors(call)}
    found = (found or {name for name in names if "loss" in name.lower()}) & names
    for stored, used in reversed(assigned):
        if stored & found:
            found |= used & names
    for stored, used in assigned:
        if used & found:
            found |= stored
    return found


# From here on the value is on the host, or is only about the tensor.
_HOST = ("item", "cpu", "tolist", "numpy", "size", "dim", "numel", "shape", "dtype", "device", "ndim")


def _tensors(node: Node) -> set[str]:
    """The names in an expression whose tensors go into its value."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)) if name in _HOST:
            return set()
        case ast.Lambda() | ast.Call(func=ast.Name(id="len" | "float" | "int" | "bool" | "isinstance" | "type")):
            return set()
        case ast.Subscript(value=value):
            return _tensors(value)  # the index does not go into the value
    return {name for part in ast.iter_child_nodes(node) for name in _tensors(part)}
