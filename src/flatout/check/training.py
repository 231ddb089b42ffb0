"""What the checks may ask of one training: its settings, its loader, its loops, and the machine.

Known values are literals, settings, `os.cpu_count()`, and names bound once in their file to one of these.
Everything else is unknown, and no check guesses.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.check.script import (
    LOOPS,
    Node,
    Script,
    argument,
    function_of,
    last_name,
    loops_around,
    only_value,
    parents,
    where,
)
from flatout.check.settings import HOLDER, KnownSettings, KnownValue, setting_path
from flatout.model.frameworks import FRAMEWORKS, RUN_LOOPS
from flatout.sample.budget import Budget
from flatout.trace import GpuSample

Gpus = tuple[GpuSample, ...] | None  # None where no driver answers
# The options of a DataLoader that matter here: place and default.
_OPTIONS: dict[str, tuple[int | None, object]] = {
    "batch_size": (1, 1),
    "num_workers": (5, 0),
    "pin_memory": (7, False),
    "prefetch_factor": (None, None),
    "persistent_workers": (None, False),
}
# Classes of frameworks whose arguments configure the loader, each with its names and defaults for these options.
_CONFIGURES_LOADER = {
    name: framework.loader_arguments
    for framework in FRAMEWORKS
    if framework.loader_arguments
    for name in framework.precision
}
_EPOCH = re.compile(r"(^|[^a-z])ep(och)?s?([^a-z]|$)|epoch", re.IGNORECASE)
_EVALUATION = re.compile(r"val|test|eval|dev(?!ice)|infer|predict", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """The loop over batches, or the function called for each; `epochs` is the loop over epochs around it."""

    node: Node
    epochs: Node


class Training:
    """One training before it starts. Without a script, only its config and the machine are known."""

    def __init__(
        self, budget: Budget, gpus: Gpus, path: Path | None, flags: tuple[str, ...] = (), config: Path | None = None
    ) -> None:
        self.budget, self.gpus, self.path, self.config = budget, gpus, path, config
        self.script = Script(path)
        self.settings = KnownSettings(self.script, flags, config)
        self.loops = find_loops(self.script)
        self.has_epochs = any(loop.epochs for loop in self.loops)
        # Whether all of the training was read: its loop, every module of its own, and no framework around it.
        unread = self.script.not_read or self.script.packages.intersection(RUN_LOOPS)
        self.is_complete = bool(self.loops) and not unread
        loaders = self.script.calls("DataLoader", "StatefulDataLoader")
        self.loader = next((call for call in loaders if len(loaders) == 1 or not is_of_evaluation(call)), None)
        self._configuring = None if loaders else next(iter(self.script.calls(*_CONFIGURES_LOADER)), None)

    def option(self, name: str) -> KnownValue:
        """An option of the training's loader, or of what configures it; without either, a setting of the name."""
        position, default = _OPTIONS[name]
        call = self.loader
        if self._configuring is not None:
            call, position = self._configuring, None
            name, default = _CONFIGURES_LOADER[last_name(call.func)][name]
        if call is None:
            return self.setting(name).named(name)
        value = self.argument(call, name, position) or KnownValue(default, path=(name,))
        return value if value.where else replace(value, where=where(call))

    def setting(self, subject: str) -> KnownValue:
        """A setting by any of the names people give it."""
        return next(iter(self.settings.about(subject)), KnownValue())

    def argument(self, call: ast.Call, name: str, position: int | None = None) -> KnownValue | None:
        """What a call is given under a name; None where it is not given, unknown where that cannot be told."""
        node = argument(call, name, position)
        spread = [keyword.value for keyword in call.keywords if keyword.arg is None]
        for mapping in spread if node is None else ():
            items = _items(mapping)
            if items is None:
                return KnownValue()
            node = items.get(name)
        return self.value(node).named(name) if node is not None else None

    def value(self, node: Node, *, follow: bool = True) -> KnownValue:
        """What an expression is worth; a name is followed one step."""
        match node:
            case ast.Constant(value=what):
                return KnownValue(what, where(node))
            case ast.BoolOp(op=ast.And(), values=[first, *_]) | ast.IfExp(body=first, orelse=ast.Constant(value=None)):
                return self.value(first)  # of `cfg.pin_memory and on_gpu`: a GPU is expected
            case ast.Call() if last_name(node.func) == "cpu_count":
                return KnownValue(self.budget.cores_of_machine, where(node))
            case ast.Name() if follow and (assigned := only_value(node)):
                return self.value(assigned, follow=False)
        path = setting_path(node)
        holder = next((place for place, name in enumerate(path) if HOLDER.fullmatch(name)), len(path))
        return self.settings.at(path[holder + 1 :])


def _items(node: Node) -> dict[str, Node] | None:
    """The items of a dict display, or of a name bound once to one that nothing adds to."""
    if isinstance(node, ast.Name):
        uses = [one for one in node.file.nodes if isinstance(one, ast.Name) and one.id == node.id]  # type: ignore[attr-defined]
        changed = any(isinstance(use.around, ast.Subscript | ast.Attribute) for use in uses)  # type: ignore[attr-defined]
        node = None if changed else only_value(node)
    if not isinstance(node, ast.Dict) or not all(isinstance(key, ast.Constant) for key in node.keys):
        return None
    return {str(getattr(key, "value", "")): value for key, value in zip(node.keys, node.values, strict=True)}


def is_of_evaluation(call: ast.Call) -> bool:
    """Whether a loader or sampler is not for training: by its name, its dataset, the function it is built in."""
    statement = next((node for node in parents(call) if isinstance(node, ast.stmt)), None)
    parts = [*getattr(statement, "targets", []), argument(call, "dataset", 0)]
    texts = [ast.unparse(part) for part in parts if part is not None]
    texts.append(getattr(function_of(call), "name", ""))
    telling = next((text for text in texts if "train" in text.lower() or _EVALUATION.search(text)), "train")
    return "train" not in telling.lower()


def find_loops(script: Script) -> list[TrainingLoop]:
    """Every loop that trains, and every function that trains on one batch."""
    places = [next(iter(loops_around(call)), function_of(call)) for call in script.calls("backward", "manual_backward")]
    places += [node for node in script.nodes if getattr(node, "name", "") == "training_step"]
    return [TrainingLoop(place, _epoch_loop(script, place)) for place in dict.fromkeys(places) if place is not None]


def _epoch_loop(script: Script, node: Node) -> Node:
    """The loop over epochs around a node, or around a call of its function."""
    function = node if isinstance(node, ast.FunctionDef) else function_of(node)
    callers = script.calls(function.name) if function is not None else []
    loops = [loop for place in (node, *callers) for loop in loops_around(place)]
    return next((loop for loop in loops if _EPOCH.search(ast.unparse(loop).partition(":\n")[0])), None)


def runs_every_time(node: Node, within: Node) -> bool:
    """Whether a node runs each time `within` does: no condition stands between, and no `continue` above it."""
    below = node
    for above in parents(node):
        if isinstance(above, LOOPS) and below in above.body:
            earlier = above.body[: above.body.index(below)]
            if any(isinstance(one, ast.If) and isinstance(one.body[-1], ast.Continue) for one in earlier):
                return False
        if above is within:
            return True
        if isinstance(above, ast.BoolOp | ast.FunctionDef | ast.Lambda | ast.ExceptHandler):
            return False
        if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
            return False
        below = above
    return False
