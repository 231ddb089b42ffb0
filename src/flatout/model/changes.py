"""The changes flatout can make: one `ChangeSpec` each, with everything the rest of flatout has to know about
it.

A plan is checked against these before a run, `fix` offers them, `inside/changes` applies them, the report
says how to make them permanent, and the tables in docs/CHANGES.md are written from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flatout.model.errors import PlanError
from flatout.model.facts import NO_LOADER, Facts
from flatout.model.inputs import short
from flatout.model.plan import Change, Plan, Safety

SETTING = "setting:"  # in front of a key: any value the script reads, by its knob

# What is tried together by `fix`.
Family = Literal["data path", "transforms", "compute", "compile", "batch size", "pauses", "ranks"]
# When a change gets in.
Moment = Literal[
    "command starts",
    "setting read",
    "DataLoader()",
    "pass begins",
    "worker starts",
    "Optimizer()",
    "model call",
    "step ends",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSpec:
    """One change. `code` has {} where the value goes; a value in `code_for` has a line of its own."""

    name: str
    does: str  # one sentence for people
    takes: str  # the values, in words
    fits: Callable[[Any], bool]  # whether a value is one of them
    safety: Safety
    safety_note: str = ""  # when it is of another class
    family: Family
    module: str  # in inside/changes, which applies it
    moment: Moment
    live: bool = False  # can be switched on and off between two steps
    knob_only: bool = False  # only the script can make it, so it needs a knob
    advice_only: bool = False  # named by findings, and made by people alone
    with_elastic_loader: bool = True  # False: the elastic loader decides this, so the two are not combined
    code: str  # how a person writes it
    code_for: Mapping[Any, str] = field(default_factory=dict)
    argument: str = ""  # what to add to the call that the change was made at
    framework_code: Mapping[str, str] = field(default_factory=dict)  # by framework, or framework:value
    settings: str = ""  # a pattern of what people call it in flags and config files
    in_force: Callable[[Facts], Any] | None = None  # the value a trace shows to be in force
    is_off: Callable[[Facts], bool] | None = None  # whether a trace shows that it is not in force …
    off: str = ""  # … and how to say so

    def as_code(self, value: Any, framework: str = "") -> str:
        """The line to write for a value; `framework` is the one that makes the call, if it is not the script."""
        line = self.in_framework(value, framework) or self.code_for.get(value, self.code)
        return line.format(value)

    def in_framework(self, value: Any, framework: str) -> str | None:
        """How to say it to a framework; None where one writes it as everywhere else."""
        line = self.framework_code.get(f"{framework}:{value}")
        if line is None and value not in self.code_for:
            line = self.framework_code.get(framework)
        return line.format(value) if line is not None else None


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def _count_from(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_on(value: Any) -> bool:
    return value is True


def _is_switch(value: Any) -> bool:
    return value is True or value is False


def _no_autocast(facts: Facts) -> bool:
    in_fp32 = facts.parameter_dtypes == ("float32",)
    return facts.on_gpu and in_fp32 and set(facts.autocast) == {"None"}


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and value is not True and value > 0


_TRAINER_LOADER = "nothing to edit, the Trainer makes its loader itself: train with the plan"
ROUND_AS_EAGER = "torch._inductor.config.emulate_precision_casts = True"  # for compiled kernels
_EVERY = r"_?(every|interval|freq|frequency|period|each)(_?n)?(_?(epochs?|steps?|iters?))?"

CHANGES = (
    ChangeSpec(
        name="loader",
        does="Batches come from flatout's own workers, which are started and stopped as training needs them.",
        takes="elastic",
        fits=_one_of("elastic"),
        safety="reseeded",
        safety_note="identical where samples draw no random numbers",
        family="data path",
        module="loading",
        moment="pass begins",
        code="flatout.DataLoader(...) in place of this one, after import flatout; "
        'num_workers="auto" (as it is for a stream, or with a worker_init_fn)',
        framework_code={"transformers": _TRAINER_LOADER},
    ),
    ChangeSpec(
        name="num_workers",
        does="So many worker processes load samples.",
        takes="a whole number from 0",
        fits=_count_from(0),
        safety="reseeded",
        safety_note="identical where samples draw no random numbers",
        family="data path",
        module="loading",
        moment="DataLoader()",
        with_elastic_loader=False,
        code="DataLoader(..., num_workers={})",
        argument="num_workers={}",
        framework_code={"transformers": "TrainingArguments(..., dataloader_num_workers={})"},
        settings=r"(num_?|n_?)?(data_?(loader)?_?|loader_?|train_?)?(num_?)?workers|workers_per_gpu|nw",
        in_force=lambda facts: facts.training_loader.num_workers,
    ),
    ChangeSpec(
        name="prefetch_factor",
        does="Each worker prepares so many batches ahead.",
        takes="a whole number from 1",
        fits=_count_from(1),
        safety="identical",
        family="data path",
        module="loading",
        moment="DataLoader()",
        with_elastic_loader=False,
        code="DataLoader(..., prefetch_factor={})",
        argument="prefetch_factor={}",
        framework_code={"transformers": "TrainingArguments(..., dataloader_prefetch_factor={})"},
        settings=r"(dataloader_?)?prefetch(_?factor)?",
    ),
    ChangeSpec(
        name="pin_memory",
        does="Batches lie in page-locked memory, from which the GPU copies faster and in the background.",
        takes="true or false",
        fits=_is_switch,
        safety="identical",
        family="data path",
        module="loading",
        moment="DataLoader()",
        code="DataLoader(..., pin_memory={})",
        argument="pin_memory={}",
        framework_code={"transformers": "TrainingArguments(..., dataloader_pin_memory={})"},
        settings=r"(dataloader_?)?pin(_?mem(ory)?)?|pinned(_?memory)?",
        is_off=lambda facts: facts.on_gpu and facts.training_loader.pin_memory is False,
        off="the loader does not page-lock its batches",
    ),
    ChangeSpec(
        name="persistent_workers",
        does="Workers stay from one epoch to the next.",
        takes="true or false",
        fits=_is_switch,
        safety="semantic",  # another shuffle from the second epoch on
        safety_note="the shuffle differs from the second epoch on",
        family="data path",
        module="loading",
        moment="DataLoader()",
        code="DataLoader(..., persistent_workers={})",
        argument="persistent_workers={}",
        framework_code={"transformers": "TrainingArguments(..., dataloader_persistent_workers={})"},
        settings=r"(dataloader_?)?persistent(_?workers)?",
        is_off=lambda facts: facts.training_loader.num_workers == 0,
        off="there are no workers to keep",
    ),
    ChangeSpec(
        name="worker_threads",
        does="BLAS, OpenMP and OpenCV use so many threads in each worker.",
        takes="a whole number from 1",
        fits=_count_from(1),
        safety="identical",
        safety_note="as far as a library gives the same result with any number of threads",
        family="data path",
        module="loading",
        moment="worker starts",
        code="torch.set_num_threads({})  # in worker_init_fn",
    ),
    ChangeSpec(
        name="device_prefetch",
        does="The next batch is copied to the GPU while this one is computed.",
        takes="true",
        fits=_is_on,
        safety="identical",
        family="data path",
        module="device_prefetch",
        moment="pass begins",
        live=True,
        code='for batch in flatout.feed.to_device(loader, "cuda"):',
        framework_code={"transformers": _TRAINER_LOADER},
    ),
    ChangeSpec(
        name="gc_freeze",
        does="Python's garbage collector leaves out what lives after the first step.",
        takes="true",
        fits=_is_on,
        safety="identical",
        family="data path",
        module="computing",
        moment="step ends",
        live=True,
        code="gc.collect(); gc.freeze()  # once, before the loop",
    ),
    ChangeSpec(
        name="gpu_transforms",
        does="What samples do to their pictures is done to whole batches on the GPU.",
        takes="true",
        fits=_is_on,
        safety="equivalent",
        family="transforms",
        module="loading",
        moment="pass begins",
        code="flatout.augment on the batch, on the GPU  # instead of the transforms in __getitem__",
    ),
    ChangeSpec(
        name="precision",
        does="The model computes in TF32, bfloat16 or float16.",
        takes="tf32 or bf16 or fp16",
        fits=_one_of("tf32", "bf16", "fp16"),
        safety="equivalent",
        family="compute",
        module="computing",
        moment="model call",
        live=True,
        code='with torch.autocast("cuda", dtype=torch.bfloat16):  # around the forward pass and the loss',
        code_for={
            "tf32": 'torch.set_float32_matmul_precision("high"); torch.backends.cudnn.allow_tf32 = True',
            "fp16": 'torch.autocast("cuda", dtype=torch.float16) around the forward pass, and a GradScaler',
        },
        framework_code={
            "transformers": "TrainingArguments(..., bf16=True)",
            "transformers:fp16": "TrainingArguments(..., fp16=True)",
            "transformers:tf32": "TrainingArguments(..., tf32=True)",
            "accelerate": 'Accelerator(..., mixed_precision="bf16")',
            "accelerate:fp16": 'Accelerator(..., mixed_precision="fp16")',
            "lightning": 'Trainer(..., precision="bf16-mixed")',
            "lightning:fp16": 'Trainer(..., precision="16-mixed")',
        },
        settings=r"(use_?)?(amp|bf16|mixed_?precision|autocast)(_?dtype)?",
        is_off=_no_autocast,
        off="every forward pass ran in fp32 without autocast",
    ),
    ChangeSpec(
        name="channels_last",
        does="The model and its 4-d inputs lie in channels_last memory format.",
        takes="true",
        fits=_is_on,
        safety="equivalent",
        family="compute",
        module="computing",
        moment="model call",
        live=True,
        code="model = model.to(memory_format=torch.channels_last)",
        settings=r"(use_?)?channels_?last",
        is_off=lambda facts: facts.channels_last is False,
        off="the convolutions' weights are not in channels_last",
    ),
    ChangeSpec(
        name="cudnn_benchmark",
        does="cuDNN looks for the fastest kernel for each shape.",
        takes="true",
        fits=_is_on,
        safety="equivalent",
        family="compute",
        module="computing",
        moment="model call",
        live=True,
        code="torch.backends.cudnn.benchmark = True",
        settings=r"(cudnn[_.]?)?benchmark(_?cudnn)?",
        is_off=lambda facts: facts.on_gpu and facts.cudnn_benchmark is False,
        off="cuDNN's benchmark mode is off",
    ),
    ChangeSpec(
        name="fused_optimizer",
        does="Adam, AdamW, SGD and Adagrad step in one kernel.",
        takes="true",
        fits=_is_on,
        safety="equivalent",
        family="compute",
        module="computing",
        moment="Optimizer()",
        live=True,
        code="torch.optim.AdamW(..., fused=True)  # whichever optimizer it is",
        framework_code={"transformers": 'TrainingArguments(..., optim="adamw_torch_fused")'},
        argument="fused=True",
        settings=r"(use_?)?fused(_?adamw?|_?optimizer)?",
        is_off=lambda facts: facts.on_gpu and not facts.optimizer_fused,
        off="the optimizer is not fused",
    ),
    ChangeSpec(
        name="compile",
        does="torch.compile makes fewer and larger kernels of the model, or CUDA graphs.",
        takes="default or reduce-overhead or max-autotune",
        fits=_one_of("default", "reduce-overhead", "max-autotune"),
        safety="equivalent",
        family="compile",
        module="computing",
        moment="model call",
        live=True,
        code=f"model.compile()  # and {ROUND_AS_EAGER}",
        code_for={
            "reduce-overhead": f'model.compile(mode="reduce-overhead")  # and {ROUND_AS_EAGER}',
            "max-autotune": f'model.compile(mode="max-autotune")  # and {ROUND_AS_EAGER}',
        },
        framework_code={
            "transformers": f"TrainingArguments(..., torch_compile=True)  # and {ROUND_AS_EAGER}",
            "transformers:reduce-overhead": "TrainingArguments(..., torch_compile=True, "
            f'torch_compile_mode="reduce-overhead")  # and {ROUND_AS_EAGER}',
            "transformers:max-autotune": "TrainingArguments(..., torch_compile=True, "
            f'torch_compile_mode="max-autotune")  # and {ROUND_AS_EAGER}',
        },
        settings=r"(use_?|enable_?)?(torch_?)?compiled?(_?model)?",
        is_off=lambda facts: facts.compiled is False,
        off="nothing was compiled",
    ),
    ChangeSpec(
        name="batch_size",
        does="A batch holds so many samples.",
        takes="a whole number from 1",
        fits=_count_from(1),
        safety="semantic",
        family="batch size",
        module="knobs",
        moment="setting read",
        knob_only=True,
        code="DataLoader(..., batch_size={})",
        framework_code={"transformers": "TrainingArguments(..., per_device_train_batch_size={})"},
        settings=r"(train_?|micro_?|per_device_?|per_gpu_?|local_?)*batch(_?size)?(_per_(gpu|device))?|bs",
        in_force=lambda facts: facts.training_loader.batch_size,
    ),
    ChangeSpec(
        name="learning_rate",
        does="The learning rate that goes with a larger batch.",
        takes="a number above 0",
        fits=_is_rate,
        safety="semantic",
        family="batch size",
        module="knobs",
        moment="setting read",
        knob_only=True,
        code="lr={}",
        settings=r"(base_?|max_?|init_?|peak_?)?(lr|learning_?rate)(_?init)?",
    ),
    ChangeSpec(
        name="eval_interval",
        does="Training is evaluated less often.",
        takes="a whole number from 1",
        fits=_count_from(1),
        safety="semantic",
        family="pauses",
        module="knobs",
        moment="setting read",
        knob_only=True,
        code="evaluate every {} epochs or steps",
        settings=rf"(eval(uat(e|ion))?|val(id(at(e|ion))?)?|test){_EVERY}|check_val_every_n_epoch|eval_steps",
    ),
    ChangeSpec(
        name="checkpoint_interval",
        does="Checkpoints are saved less often.",
        takes="a whole number from 1",
        fits=_count_from(1),
        safety="semantic",
        family="pauses",
        module="knobs",
        moment="setting read",
        knob_only=True,
        code="save every {} epochs or steps",
        settings=rf"(save|checkpoint|ckpt){_EVERY}|(save|checkpointing)_steps",
    ),
    ChangeSpec(
        name="ranks",
        does="Training runs on so many GPUs.",
        takes="a whole number from 1",
        fits=_count_from(1),
        safety="semantic",
        family="ranks",
        module="",
        moment="command starts",
        advice_only=True,
        code="torchrun --nproc-per-node {} train.py  # with DistributedDataParallel around the model",
    ),
)  # fmt: skip
BY_NAME = {spec.name: spec for spec in CHANGES}
TO_MAKE = tuple(spec.name for spec in CHANGES if not spec.advice_only)  # those flatout makes


def safety_of(name: str) -> Safety:
    """The safety class of a change where nothing more is known; changing any setting may change what is learned."""
    spec = BY_NAME.get(name)
    return spec.safety if spec is not None else "semantic"


def why_without_effect(change: Change, facts: Facts) -> str | None:
    """Why a change that was made by its knob had no effect: the run shows something else in force. None: it had."""
    spec = BY_NAME.get(change.name)
    if spec is None:
        return None
    if spec.in_force is not None and facts.training_loader is not NO_LOADER:
        seen = spec.in_force(facts)
        if seen != change.value:
            return f"{change.knob} was set to {change.value}, but the loader has {change.name}={seen}"
    if spec.is_off is not None and spec.is_off(facts):
        return f"{change.knob} was switched on, but {spec.off}"
    return None


def named(*, family: Family | None = None, moment: Moment | None = None) -> tuple[str, ...]:
    """The names of the changes of a family, or of those that get in at one moment."""
    return tuple(spec.name for spec in CHANGES if family in (None, spec.family) and moment in (None, spec.moment))


def names(*, safety: Safety | None = None) -> str:
    """What a person may ask for by name, as they type it; of one class, or of all."""
    learning_rate = "learning_rate"  # comes with batch_size
    asked = (s.name for s in CHANGES if not s.advice_only and s.name != learning_rate and safety in (None, s.safety))
    return ", ".join(name.replace("_", "-") for name in asked)


def check(plan: Plan, where: str) -> None:
    """Refuse a plan that could not be carried out as it says; `where` is what to call it."""
    for number, change in enumerate(plan.changes, 1):
        _check_change(change, f"{where}: change {number} ({change.name})")


def _check_change(change: Change, place: str) -> None:
    if change.name.startswith(SETTING):
        if not change.knob:
            raise PlanError(f"{place}: needs a knob, such as --amp or train.yaml:amp")
        return
    spec = BY_NAME.get(change.name)
    if spec is None or spec.advice_only:
        near = difflib.get_close_matches(change.name, TO_MAKE, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TO_MAKE)} and {SETTING}KEY"
        raise PlanError(f"{place}: flatout knows no such change ({hint})")
    if change.knob:
        return  # the script knows which values it takes there
    if spec.knob_only:
        option = f"--{change.name.replace('_', '-')}"
        raise PlanError(f"{place}: needs a knob, such as {option}: nothing else can set it")
    if not spec.fits(change.value):
        raise PlanError(f"{place}: value must be {spec.takes} (got {short(change.value)})")


def auto(*, strict: bool) -> Plan:
    """What `flatout run --auto` does without any trial: loader-side changes that are safe wherever they apply."""
    pinned = Change(name="pin_memory", value=True, safety="identical")
    prefetched = Change(name="device_prefetch", value=True, safety="identical")
    if strict:  # only PyTorch's own workers draw the random numbers that they would have drawn
        return Plan(changes=(pinned, prefetched))
    return Plan(changes=(Change(name="loader", value="elastic", safety="reseeded"), pinned, prefetched))
