"""The changes flatout can make: one `ChangeSpec` each, with everything that flatout has to know about it.

A plan is checked against these before a run, `fix` offers them, `inside/changes` applies them, the report
says how to make them permanent, and the tables in docs/CHANGES.md are written from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flatout.model.errors import UsageError
from flatout.model.inputs import did_you_mean, short
from flatout.model.plan import Change, Plan, Safety
from flatout.model.records import NO_LOADER, Facts

SETTING = "setting:"  # in front of a key: any value the script reads, by its knob

# What is tried together by `fix`.
Family = Literal["data path", "transforms", "compute", "compile", "batch size", "pauses", "ranks"]
# When a change gets in. A setting is read by the script, so it needs a knob; what has to be there before
# the command starts is advice for people.
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


@dataclass(frozen=True, slots=True)
class Values:
    """The values that a change takes."""

    words: str
    fit: Callable[[Any], bool]


_ON = Values("true", lambda value: value is True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSpec:
    """One change. `code` has {} where the value goes."""

    name: str
    does: str  # one sentence for people
    takes: Values = _ON
    safety: Safety
    safety_note: str = ""  # when it is of another class
    family: Family
    moment: Moment
    live: bool = False  # can be switched on and off between two steps
    code: str  # how a person writes it
    code_for: Mapping[str, str] = field(default_factory=dict)  # for a value, a framework, or framework:value
    behind_imports: tuple[Any, ...] = ()  # values whose `code` is a line for the whole script, behind its imports
    argument: str = ""  # what to add to the call that the change was made at
    settings: str = ""  # a pattern of what people call it in flags and config files
    is_off: Callable[[Facts], bool] | None = None  # whether a trace shows that it is not in force …
    off: str = ""  # … and how to say so

    @property
    def advice_only(self) -> bool:
        """Whether it is named by findings, and made by people alone."""
        return self.moment == "command starts"

    @property
    def knob_only(self) -> bool:
        """Whether only the script can make it, by a setting that it reads."""
        return self.moment == "setting read"

    @property
    def safety_in_words(self) -> str:
        """Its class, and when it is of another; or that it is advice."""
        if self.advice_only:
            return "advice: yours to make"
        return f"{self.safety}; {self.safety_note}" if self.safety_note else self.safety

    @property
    def code_to_write(self) -> str:
        """The line to write for its usual value; N stands for a number."""
        first = self.takes.words.partition(" ")[0]
        return self.code.format({"true": "True", "a": "N"}.get(first, first))

    def as_code(self, value: Any, framework: str = "") -> str:
        """The line to write for a value; `framework` is the one that makes the call, if it is not the
        script."""
        special = (f"{framework}:{value}", str(value), framework)
        line = next((self.code_for[key] for key in special if key in self.code_for), self.code)
        return line.format(value)


_SWITCH = Values("true or false", lambda value: isinstance(value, bool))
_RATE = Values("a number above 0", lambda value: type(value) in (int, float) and value > 0)
_FROM_0 = Values("a whole number from 0", lambda value: type(value) is int and value >= 0)
_FROM_1 = Values("a whole number from 1", lambda value: type(value) is int and value >= 1)


def _one_of(*names: str) -> Values:
    return Values(" or ".join(names), lambda value: isinstance(value, str) and value in names)


def _loader_argument(name: str, **more: Any) -> ChangeSpec:
    return ChangeSpec(
        name=name,
        family="data path",
        moment="DataLoader()",
        code=f"DataLoader(..., {name}={{}})",
        argument=f"{name}={{}}",
        code_for={"transformers": f"TrainingArguments(..., dataloader_{name}={{}})"},
        **more,
    )


def _by_knob(name: str, *, takes: Values = _FROM_1, **more: Any) -> ChangeSpec:
    return ChangeSpec(name=name, takes=takes, safety="semantic", moment="setting read", **more)


def _no_autocast(facts: Facts) -> bool:
    in_fp32 = facts.parameter_dtypes == ("float32",)
    return facts.on_gpu and in_fp32 and set(facts.autocast) == {"None"}


_UNLESS_RANDOM = "identical where samples draw no random numbers"
_TRAINER_LOADER = "nothing to edit, the Trainer makes its loader itself: train with the plan"
ROUND_AS_EAGER = "torch._inductor.config.emulate_precision_casts = True"  # for compiled kernels
_EVERY = r"_?(every|interval|freq|frequency|period|each)(_?n)?(_?(epochs?|steps?|iters?))?"

CHANGES = (
    ChangeSpec(
        name="loader",
        does="Batches come from flatout's own workers, which are started and stopped as training needs them.",
        takes=_one_of("elastic"),
        safety="reseeded",
        safety_note=_UNLESS_RANDOM,
        family="data path",
        moment="pass begins",
        code='import flatout, and flatout.DataLoader(..., num_workers="auto") here; '
        "a stream, or a loader with a worker_init_fn, keeps its num_workers",
        code_for={"transformers": _TRAINER_LOADER},
    ),
    _loader_argument(
        "num_workers",
        does="So many worker processes load samples.",
        takes=_FROM_0,
        safety="reseeded",
        safety_note=_UNLESS_RANDOM,
        settings=r"(num_?|n_?)?(data_?(loader)?_?|loader_?|train_?)?(num_?)?workers|workers_per_gpu|nw",
    ),
    _loader_argument(
        "prefetch_factor",
        does="Each worker prepares so many batches ahead.",
        takes=_FROM_1,
        safety="identical",
        settings=r"(dataloader_?)?prefetch(_?factor)?",
    ),
    _loader_argument(
        "pin_memory",
        does="Batches lie in page-locked memory, from which the GPU copies faster and in the background.",
        takes=_SWITCH,
        safety="identical",
        settings=r"(dataloader_?)?pin(_?mem(ory)?)?|pinned(_?memory)?",
        is_off=lambda facts: facts.on_gpu and facts.training_loader.pin_memory is False,
        off="the loader does not page-lock its batches",
    ),
    _loader_argument(
        "persistent_workers",
        does="Workers stay from one epoch to the next.",
        takes=_SWITCH,
        safety="semantic",
        safety_note="the shuffle differs from the second epoch on",
        settings=r"(dataloader_?)?persistent(_?workers)?",
        is_off=lambda facts: facts.training_loader.num_workers == 0,
        off="there are no workers to keep",
    ),
    ChangeSpec(
        name="worker_threads",
        does="BLAS, OpenMP and OpenCV use so many threads in each worker.",
        takes=_FROM_1,
        safety="identical",
        safety_note="as far as a library gives the same result with any number of threads",
        family="data path",
        moment="worker starts",
        code="torch.set_num_threads({})  # in worker_init_fn",
    ),
    ChangeSpec(
        name="device_prefetch",
        does="The next batch is copied to the GPU while this one is computed.",
        safety="identical",
        family="data path",
        moment="pass begins",
        live=True,
        code='for batch in flatout.feed.to_device(loader, "cuda"):',
        code_for={"transformers": _TRAINER_LOADER},
    ),
    ChangeSpec(
        name="gc_freeze",
        does="Python's garbage collector leaves out what lives after the first step.",
        safety="identical",
        family="data path",
        moment="step ends",
        live=True,
        code="gc.collect(); gc.freeze()  # once, before the loop",
    ),
    ChangeSpec(
        name="gpu_transforms",
        does="What samples do to their pictures is done to whole batches on the GPU.",
        safety="equivalent",
        family="transforms",
        moment="pass begins",
        code="flatout.augment on the batch, on the GPU  # instead of the transforms in __getitem__",
    ),
    ChangeSpec(
        name="precision",
        does="The model computes in TF32, bfloat16 or float16.",
        takes=_one_of("tf32", "bf16", "fp16"),
        safety="equivalent",
        family="compute",
        moment="model call",
        live=True,
        code='with torch.autocast("cuda", dtype=torch.bfloat16):  # around the forward pass and the loss',
        code_for={
            "tf32": 'torch.set_float32_matmul_precision("high"); torch.backends.cudnn.allow_tf32 = True',
            "fp16": 'torch.autocast("cuda", dtype=torch.float16) around the forward pass, and a GradScaler',
            "transformers:bf16": "TrainingArguments(..., bf16=True)",
            "transformers:fp16": "TrainingArguments(..., fp16=True)",
            "transformers:tf32": "TrainingArguments(..., tf32=True)",
            "accelerate:bf16": 'Accelerator(..., mixed_precision="bf16")',
            "accelerate:fp16": 'Accelerator(..., mixed_precision="fp16")',
            "lightning:bf16": 'Trainer(..., precision="bf16-mixed")',
            "lightning:fp16": 'Trainer(..., precision="16-mixed")',
        },
        behind_imports=("tf32",),
        settings=r"(use_?)?(amp|bf16|mixed_?precision|autocast)(_?dtype)?",
        is_off=_no_autocast,
        off="every forward pass ran in fp32 without autocast",
    ),
    ChangeSpec(
        name="channels_last",
        does="The model and its 4-d inputs lie in channels_last memory format.",
        safety="equivalent",
        family="compute",
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
        safety="equivalent",
        family="compute",
        moment="model call",
        live=True,
        code="torch.backends.cudnn.benchmark = True",
        behind_imports=(True,),
        settings=r"(cudnn[_.]?)?benchmark(_?cudnn)?",
        is_off=lambda facts: facts.on_gpu and facts.cudnn_benchmark is False,
        off="cuDNN's benchmark mode is off",
    ),
    ChangeSpec(
        name="fused_optimizer",
        does="Adam, AdamW, SGD and Adagrad step in one kernel.",
        safety="equivalent",
        family="compute",
        moment="Optimizer()",
        live=True,
        code="torch.optim.AdamW(..., fused=True)  # whichever optimizer it is",
        code_for={"transformers": 'TrainingArguments(..., optim="adamw_torch_fused")'},
        argument="fused=True",
        settings=r"(use_?)?fused(_?adamw?|_?optimizer)?",
        is_off=lambda facts: facts.on_gpu and not facts.optimizer_fused,
        off="the optimizer is not fused",
    ),
    ChangeSpec(
        name="compile",
        does="torch.compile makes fewer and larger kernels of the model, or CUDA graphs.",
        takes=_one_of("default", "reduce-overhead", "max-autotune"),
        safety="equivalent",
        family="compile",
        moment="model call",
        live=True,
        code=f'model.compile(mode="{{}}")  # and {ROUND_AS_EAGER}',
        code_for={
            "transformers": 'TrainingArguments(..., torch_compile=True, torch_compile_mode="{}")'
            f"  # and {ROUND_AS_EAGER}",
        },
        settings=r"(use_?|enable_?)?(torch_?)?compiled?(_?model)?",
        is_off=lambda facts: facts.compiled is False,
        off="nothing was compiled",
    ),
    _by_knob(
        "batch_size",
        does="A batch holds so many samples.",
        family="batch size",
        code="DataLoader(..., batch_size={})",
        code_for={"transformers": "TrainingArguments(..., per_device_train_batch_size={})"},
        settings=r"(train_?|micro_?|per_device_?|per_gpu_?|local_?)*batch(_?size)?(_per_(gpu|device))?|bs",
    ),
    _by_knob(
        "learning_rate",
        does="The learning rate that goes with a larger batch.",
        takes=_RATE,
        family="batch size",
        code="lr={}",
        settings=r"(base_?|max_?|init_?|peak_?)?(lr|learning_?rate)(_?init)?",
    ),
    _by_knob(
        "eval_interval",
        does="Training is evaluated less often.",
        family="pauses",
        code="evaluate every {} epochs or steps",
        settings=rf"(eval(uat(e|ion))?|val(id(at(e|ion))?)?|test){_EVERY}|check_val_every_n_epoch|eval_steps",
    ),
    _by_knob(
        "checkpoint_interval",
        does="Checkpoints are saved less often.",
        family="pauses",
        code="save every {} epochs or steps",
        settings=rf"(save|checkpoint|ckpt){_EVERY}|(save|checkpointing)_steps",
    ),
    ChangeSpec(
        name="ranks",
        does="Training runs on so many GPUs.",
        takes=_FROM_1,
        safety="semantic",
        family="ranks",
        moment="command starts",
        code="torchrun --nproc-per-node {} train.py  # with DistributedDataParallel around the model",
    ),
)
BY_NAME = {spec.name: spec for spec in CHANGES}
TO_MAKE = tuple(spec.name for spec in CHANGES if not spec.advice_only)  # those flatout makes
# What people call a setting, in flags and config files.
SETTING_NAMES = {spec.name: spec.settings for spec in CHANGES if spec.settings} | {
    "epochs": r"(num_?|n_?|max_?|total_?)?(train_?)?epochs",
    "fp16": r"(use_?)?fp16",
    "trainer_precision": r"precision",  # Lightning's; elsewhere it may be about digits
    "tf32": r"(allow_?|use_?|enable_?)?tf32",
    "threads": r"(decode|decoder|reader|read|io|video|cv|opencv|transform|aug\w*)_?(num_?)?threads|threads_per_worker",
    "augment_on": r"(aug\w*|jitter|transforms?|preprocess\w*)_?(on|device|where|backend)",
}
_COUNTED_IN_LOADER = ("num_workers", "batch_size")  # a trace shows which value was in force


_OFF = frozenset({"", "0", "false", "no", "none", "off", "null", "fp32", "float32", "32", "32-true", "highest"})


def is_on(value: object) -> bool:
    """Whether a setting asks for what it is named after; of a precision, for a lower one."""
    return str(value).strip().lower() not in _OFF


def pattern_of(*subjects: str) -> re.Pattern[str]:
    """What fits any name people give one of these."""
    return re.compile("|".join(SETTING_NAMES[subject] for subject in subjects), re.IGNORECASE)


def safety_of(name: str) -> Safety:
    """The safety class of a change where no more is known; any setting may change what is learned."""
    spec = BY_NAME.get(name)
    return spec.safety if spec is not None else "semantic"


def why_without_effect(change: Change, facts: Facts) -> str | None:
    """Why a change by a knob had no effect: the run shows something else in force. None: it had."""
    loader = facts.training_loader
    if change.name in _COUNTED_IN_LOADER and loader is not NO_LOADER:
        seen = getattr(loader, change.name)
        if seen != change.value:
            return f"{change.knob} was set to {change.value}, but the loader has {change.name}={seen}"
    spec = BY_NAME.get(change.name)
    if spec is not None and spec.is_off is not None and spec.is_off(facts):
        return f"{change.knob} was switched on, but {spec.off}"
    return None


def named(*, family: Family | None = None, moment: Moment | None = None) -> tuple[str, ...]:
    """The names of the changes of a family, or of those that get in at one moment."""
    asked = (spec for spec in CHANGES if family in (None, spec.family) and moment in (None, spec.moment))
    return tuple(spec.name for spec in asked)


def names(*, safety: Safety | None = None) -> str:
    """What a person may ask for by name; of one class, or of all. A learning rate comes with its
    batch size."""
    asked = (name for name in TO_MAKE if name != "learning_rate" and safety in (None, BY_NAME[name].safety))
    return ", ".join(name.replace("_", "-") for name in asked)


def check(plan: Plan, where: str) -> None:
    """Refuse a plan that could not be carried out as it says; `where` is what to call it."""
    for number, change in enumerate(plan.changes, 1):
        problem = _problem(change)
        if problem:
            raise UsageError(f"{where}: change {number} ({change.name}): {problem}")


def _problem(change: Change) -> str:
    """Why a change cannot be made as a plan says; empty where it can."""
    if change.name.startswith(SETTING):
        return "" if change.knob else "needs a knob, such as --amp or train.yaml:amp"
    if change.name not in TO_MAKE:
        return f"flatout knows no such change ({did_you_mean(change.name, (*TO_MAKE, SETTING + 'KEY'))})"
    spec = BY_NAME[change.name]
    if change.knob:
        return ""  # the script knows which values it takes there
    if spec.knob_only:
        return f"needs a knob, such as --{change.name.replace('_', '-')}: nothing else can set it"
    if not spec.takes.fit(change.value):
        return f"value must be {spec.takes.words} (got {short(change.value)})"
    return ""


def auto(*, strict: bool) -> Plan:
    """What `flatout run --auto` does without any trial: changes of loading that are safe wherever they apply.

    With `strict` PyTorch's own workers draw the random numbers that they would have drawn.
    """
    chosen = {"loader": "elastic", "pin_memory": True, "device_prefetch": True}
    if strict:
        del chosen["loader"]
    return _plan_of(chosen)


def to_tune() -> Plan:
    """What `flatout run --tune` decides while training runs: none of it changes what is learned."""
    return _plan_of({"loader": "elastic", "pin_memory": True, "device_prefetch": True, "gc_freeze": True})


def _plan_of(chosen: Mapping[str, Any]) -> Plan:
    return Plan(changes=tuple(Change(name=n, value=v, safety=safety_of(n)) for n, v in chosen.items()))
