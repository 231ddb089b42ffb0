"""Everything the checks may ask about one training: its source, its settings, how it is started, the machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.check import tree
from flatout.check.arguments import read_settings
from flatout.check.evaluate import Evaluator
from flatout.check.settings import Command, Settings
from flatout.check.source import Program, read_program
from flatout.check.training import find_regions
from flatout.check.values import Table, Value
from flatout.model.errors import UsageError
from flatout.sample.budget import Budget
from flatout.trace import GpuSample

# Those that run the loop themselves: what they switch on cannot be seen in the script.
FRAMEWORKS = (
    "lightning", "pytorch_lightning", "transformers", "accelerate", "deepspeed", "mmengine", "mmcv", "fastai",
    "detectron2", "ignite", "composer", "ultralytics", "colossalai", "torchtitan", "torchtune", "catalyst", "timm",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is here: the budget of a rank, and the cards (None where no driver answers)."""

    budget: Budget
    gpus: tuple[GpuSample, ...] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    def visible(self) -> tuple[GpuSample, ...]:
        """The cards that a training started here would see."""
        wanted = self.environ.get("CUDA_VISIBLE_DEVICES")
        if wanted is None or self.gpus is None:
            return self.gpus or ()
        names = [name.strip() for name in wanted.split(",") if name.strip() not in ("", "-1")]
        return tuple(gpu for gpu in self.gpus if str(gpu.index) in names or any(gpu.uuid.startswith(n) for n in names))

    def answers(self) -> dict[str, Any]:
        """What a script would be told here, by the name of the question; a GPU is taken to be there."""
        cores = dict.fromkeys(("os.cpu_count", "multiprocessing.cpu_count"), self.budget.cores_of_machine)
        cards = {"torch.cuda.device_count": len(self.visible())} if self.gpus is not None else {}
        return {**cores, **cards, "torch.cuda.is_available": True}


class Study(Evaluator):
    """One training before it starts. Without a script the program is empty, and nothing is known of the loop."""

    def __init__(self, machine: Machine, command: Command | None, program: Program, settings: Settings) -> None:
        super().__init__(program, settings, machine.answers())
        self.machine, self.command, self.regions = machine, command, find_regions(program)

    def called(self, *names: str) -> Iterator[ast.Call]:
        """The calls of functions of these names; `.name` stands for any method of that name."""
        for call, name in self.program.calls(*dict.fromkeys(map(tree.last_name, names))):
            if name in names or ("." in name and f".{tree.last_name(name)}" in names):
                yield call

    def assigned(self, *names: str) -> Iterator[tuple[ast.expr, Value]]:
        """Where an attribute such as torch.backends.cudnn.benchmark is set, and to what."""
        for target, given in (binding for module in self.program.modules for binding in module.assigns):
            dotted = tree.dotted(target)
            if any(dotted == name or ("." in dotted and name.endswith(f".{dotted}")) for name in names):
                yield target, self.value(given)

    def always(self, node: ast.AST, within: ast.AST) -> bool:
        """Whether a node runs each time `within` does."""
        return self.runs(node, within) is True

    def argument(self, call: ast.Call, name: str, position: int | None = None) -> Value | None:
        """What a call is given under a name; None where it is not given, unknown where that cannot be told."""
        node = tree.argument(call, name, position)
        if node is not None:
            return self.value(node)
        for mapping in tree.spread(call):
            table = self.value(mapping).what
            if not isinstance(table, Table):
                return Value()
            if name in table.entries or not table.complete:
                return table.entries.get(name, Value())
        return Value() if tree.starred(call) else None

    def setting(self, subject: str) -> Value:
        """A setting by any of the names people give it, from the arguments and the config file."""
        return next((value for _, value in self.settings.named(subject)), Value())

    def compiled(self) -> str | None:
        """Where torch.compile is called, or decorates."""
        for call in self.called("torch.compile", ".compile"):
            if tree.dotted(call.func).split(".")[0] not in ("re", "regex"):
                return tree.where(call)
        for node in self.program.nodes():
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            if any(tree.dotted(one) == "torch.compile" for one in decorators):
                return tree.where(node)
        return None

    def framework(self) -> str | None:
        """The framework that may do what the script does not."""
        return self.program.uses(*FRAMEWORKS)

    def trains(self) -> bool:
        """Whether anything of PyTorch is in what was looked at."""
        return bool(self.regions) or self.program.uses("torch", "torchvision", "flatout", *FRAMEWORKS) is not None

    def whole(self) -> bool:
        """Whether all of the training is seen: its loop, every module of its own, and no framework around it."""
        return bool(self.regions) and not self.program.missing and self.framework() is None

    def on_cpu(self) -> bool:
        """Whether the whole training is seen, and nothing of it speaks of a GPU."""
        return self.whole() and not any(
            re.search(r"cuda|accelerator|\.to\(", ast.unparse(module.root)) for module in self.program.modules
        )


def open_study(machine: Machine, command: Command | None, config: Path | None) -> Study:
    """Read the script and the config file, whichever were named."""
    program = read_program(command.script) if command is not None else Program()
    if command is not None and not program.modules[0].is_code():
        raise UsageError(f"{command.script} is not a Python script: there is no code in it")
    return Study(machine, command, program, read_settings(program, command, config, machine.answers()))
