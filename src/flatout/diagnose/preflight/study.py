"""Everything the checks may ask about one training: its source, its settings, how it is started, the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst

from flatout.budget import Budget
from flatout.diagnose.preflight import arguments as arguments_of
from flatout.diagnose.preflight.evaluate import Evaluator
from flatout.diagnose.preflight.settings import Command, Config, read_data
from flatout.diagnose.preflight.source import Arguments, Module, Program, arguments, read_program
from flatout.diagnose.preflight.training import Region, find_regions
from flatout.diagnose.preflight.values import Table, Value, folded, merged
from flatout.errors import UsageError
from flatout.trace import GpuSample

# Names people give a setting. The first is the one we use when we speak of it.
NAMES = {
    "num_workers": ("num_workers", "workers", "n_workers", "nworkers", "dataloader_num_workers", "loader_workers",
                    "data_workers", "num_data_workers", "workers_per_gpu", "num_loader_workers"),
    "batch_size": ("batch_size", "train_batch_size", "per_device_train_batch_size", "batch_size_per_gpu"),
    "pin_memory": ("pin_memory", "pin_mem", "dataloader_pin_memory"),
    "persistent_workers": ("persistent_workers", "dataloader_persistent_workers"),
    "prefetch_factor": ("prefetch_factor", "dataloader_prefetch_factor"),
    "decode_threads": ("decode_threads", "decoder_threads", "decode_num_threads", "threads_per_worker"),
    "amp": ("amp", "use_amp", "mixed_precision", "precision", "fp16", "bf16", "autocast"),
    "tf32": ("tf32", "allow_tf32", "use_tf32", "enable_tf32"),
    "cudnn_benchmark": ("cudnn_benchmark", "cudnn.benchmark", "benchmark_cudnn"),
    "compile": ("compile", "compile_model", "use_compile", "torch_compile", "torchcompile", "enable_compile"),
    "channels_last": ("channels_last", "use_channels_last"),
    "fused": ("fused", "fused_adam", "fused_optimizer", "fused_adamw"),
    "epochs": ("epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"),
}  # fmt: skip

# Those that run the loop themselves: what they switch on cannot be seen in the script.
FRAMEWORKS = (
    "lightning", "pytorch_lightning", "transformers", "accelerate", "deepspeed", "mmengine", "mmcv", "fastai",
    "detectron2", "ignite", "composer", "ultralytics", "colossalai", "torchtitan", "torchtune", "catalyst", "timm",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is here: the budget of a rank, the cards (None where no driver answers), a data folder that was read."""

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
        """What a script would be told here, by the name of the question."""
        found: dict[str, Any] = {
            "os.cpu_count": self.budget.cores_of_machine,
            "multiprocessing.cpu_count": self.budget.cores_of_machine,
            "torch.multiprocessing.cpu_count": self.budget.cores_of_machine,
        }
        if self.gpus is not None:
            found["torch.cuda.device_count"] = len(self.visible())
        return found


@dataclass(slots=True)
class Study:
    """One training before it starts. Without a script there is no program, and nothing is known of the loop."""

    machine: Machine
    command: Command | None = None
    program: Program | None = None
    evaluator: Evaluator | None = None
    config: Config | None = None
    regions: list[Region] = field(default_factory=list)

    def calls(self) -> Iterator[tuple[Module, cst.Call, str]]:
        """Every call of the program that has a name."""
        return self.program.calls() if self.program is not None else iter(())

    def called(self, *names: str) -> Iterator[tuple[Module, cst.Call]]:
        """The calls of functions of these names; `.name` stands for any method of that name."""
        wanted = dict.fromkeys(name.rsplit(".", 1)[-1] for name in names)
        for module, call, name in self.program.calls(*wanted) if self.program is not None else ():
            if name in names or ("." in name and f".{name.rsplit('.', 1)[-1]}" in names):
                yield module, call

    def value(self, module: Module, node: cst.BaseExpression | None) -> Value:
        """What an expression is worth, and where that was said."""
        return self.evaluator.told(module, node) if self.evaluator is not None else Value()

    def argument(self, module: Module, call: cst.Call, name: str, position: int | None = None) -> Value | None:
        """What a call is given under a name; None where it is not given, unknown where that cannot be told."""
        given: Arguments = arguments(call)
        node = given.get(name, position)
        if node is not None:
            return self.value(module, node)
        for mapping in given.rest:
            table = self.value(module, mapping).what
            if not isinstance(table, Table):
                return Value()
            found = table.get(name)
            if found is not None:
                return found if found.where else Value(found.what, module.where(call), found.knob)
            if not table.complete:
                return Value()
        return Value() if given.starred else None

    def setting(self, subject: str) -> Value:
        """A setting by any of the names people give it, from the arguments and the config file."""
        return next((value for _, value in self.settings(subject)), Value())

    def settings(self, subject: str) -> list[tuple[str, Value]]:
        """Every such setting whose value is known, with its name; those of one name that disagree are left out."""
        wanted = {folded(name) for name in NAMES[subject]}
        found: dict[str, list[Value]] = {}
        tables = [self.evaluator.arguments] if self.evaluator is not None else []
        for table in (*tables, *([self.config.table] if self.config is not None else [])):
            for path, value in table.leaves():
                if folded(path[-1]) in wanted and not (self.evaluator and path[-1] in self.evaluator.mutated):
                    found.setdefault(path[-1], []).append(value)
        agreed = [(name, merged(values)) for name, values in found.items()]
        return [(name, value) for name, value in agreed if value.known]

    def kinds(self, module: Module, node: cst.BaseExpression | None) -> Iterator[str]:
        """The names of the functions and classes whose call an expression may stand for."""
        if self.evaluator is None or node is None:
            return
        for _, found in self.evaluator.sources(module, node):
            if isinstance(found, cst.Call):
                yield module.dotted(found.func) or "?"

    def compiled(self) -> str | None:
        """Where torch.compile is called, or decorates."""
        for module, call in self.called("torch.compile", ".compile"):
            if (module.dotted(call.func) or "").split(".")[0] not in ("re", "regex"):
                return module.where(call)
        for module in self.program.modules if self.program is not None else ():
            for node in module.nodes:
                if isinstance(node, cst.Decorator) and module.dotted(node.decorator) == "torch.compile":
                    return module.where(node)
        return None

    def on_cpu(self) -> bool:
        """Whether the whole training is seen, and nothing of it speaks of a GPU."""
        if self.program is None or not self.regions or self.program.missing or self.framework():
            return False
        return not any(re.search(r"cuda|accelerator|\.to\(", module.tree.code) for module in self.program.modules)

    def framework(self) -> str | None:
        """The framework that may do what the script does not."""
        return self.program.uses(*FRAMEWORKS) if self.program is not None else None

    def assigned(self, *names: str) -> Iterator[tuple[Module, cst.CSTNode, Value]]:
        """Where an attribute such as torch.backends.cudnn.benchmark is set, and to what."""
        for module in self.program.modules if self.program is not None else ():
            for target, given in module.assigns:
                dotted = module.dotted(target) or ""
                if any(dotted == name or ("." in dotted and name.endswith(f".{dotted}")) for name in names):
                    yield module, target, self.value(module, given)


def open_study(machine: Machine, command: Command | None, config: Path | None) -> Study:
    """Read the script and the config file, whichever were named."""
    if command is None:
        return Study(machine, config=read_config(config, machine) if config is not None else None)
    program = read_program(command.script)
    evaluator = Evaluator(program, command=command, machine=machine.answers())
    declared = arguments_of.declared(evaluator)
    path = config or arguments_of.config_by_default(evaluator, declared)
    try:
        read = read_config(path, machine) if path is not None else None
    except UsageError:
        if config is not None:
            raise
        read = None  # nobody named it: what it holds stays unknown
    evaluator.take(read, arguments_of.with_config(evaluator, declared, read) if read is not None else declared)
    return Study(machine, command, program, evaluator, evaluator.config, find_regions(program))


def read_config(path: Path, machine: Machine) -> Config:
    """A config file: YAML, JSON, or a Python module of constants."""
    if path.suffix != ".py":
        return read_data(path)
    program = read_program(path)
    return Config(
        path, Evaluator(program, command=Command(script=path), machine=machine.answers()).constants(program.script)
    )
