"""What flatout has to know about frameworks that train: one table, read by the loader, the diagnosis and the
check.

A framework that builds a `DataLoader` and calls `backward` and `Optimizer.step` is measured without an entry
here. An entry says what cannot be seen from outside: that its loop is not in the script, that its sampler may
be asked early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework. Classes and functions are named with their module."""

    packages: tuple[str, ...]  # what a script imports
    loop_files: tuple[str, ...] = ()  # how the paths of the files end that run its loop
    loader_module: str = ""  # where the class of its loaders is defined
    has_loop: bool = True  # it runs the training loop, so the script alone does not show what is switched on
    builds_loaders: bool = False  # it builds loaders of those the script has built: its own lines are not to be edited
    pure_samplers: frozenset[str] = frozenset()  # draw when they are started and not in between: may be asked early
    wrapping_samplers: Mapping[str, str] = field(default_factory=dict)  # the attribute that holds the wrapped one
    seeding_modules: tuple[str, ...] = ()  # whose worker_init_fn does nothing but seed
    arguments: tuple[str, ...] = ()  # the class whose arguments configure the loader
    loader_arguments: Mapping[str, tuple[str, object]] = field(default_factory=dict)  # their name for it, the default
    precision: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # a call, its keywords, lower precision


FRAMEWORKS = (
    Framework(
        packages=("torch",),
        has_loop=False,
        pure_samplers=frozenset({
            "torch.utils.data.sampler.SequentialSampler",
            "torch.utils.data.sampler.RandomSampler",
            "torch.utils.data.sampler.SubsetRandomSampler",
            "torch.utils.data.sampler.WeightedRandomSampler",
            "torch.utils.data.distributed.DistributedSampler",
        }),
        wrapping_samplers={"torch.utils.data.sampler.BatchSampler": "sampler"},
    ),
    Framework(
        packages=("flatout",),
        has_loop=False,
        wrapping_samplers={"flatout.engine.datasets.ChainedEpochs": "sampler"},
    ),
    Framework(
        packages=("transformers",),
        loop_files=("/transformers/trainer.py",),
        builds_loaders=True,
        pure_samplers=frozenset({
            "transformers.trainer_pt_utils.LengthGroupedSampler",
            "transformers.trainer_pt_utils.DistributedLengthGroupedSampler",
        }),
        seeding_modules=("transformers.trainer_utils",),
        arguments=("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments"),
        loader_arguments={
            "batch_size": ("per_device_train_batch_size", 8),
            "num_workers": ("dataloader_num_workers", 0),
            "pin_memory": ("dataloader_pin_memory", True),
            "prefetch_factor": ("dataloader_prefetch_factor", None),
            "persistent_workers": ("dataloader_persistent_workers", False),
        },
        precision={
            "transformers.TrainingArguments": {"bf16": True, "fp16": True},
            "transformers.Seq2SeqTrainingArguments": {"bf16": True, "fp16": True},
        },
    ),
    Framework(
        packages=("accelerate",),
        loader_module="accelerate.data_loader",
        builds_loaders=True,
        # It counts the epochs it was asked for, and draws from a generator of its own.
        pure_samplers=frozenset({"accelerate.data_loader.SeedableRandomSampler"}),
        wrapping_samplers={
            "accelerate.data_loader.BatchSamplerShard": "batch_sampler",
            "accelerate.data_loader.SkipBatchSampler": "batch_sampler",
        },
        precision={".Accelerator": {"mixed_precision": "bf16"}},
    ),
    Framework(
        packages=("lightning", "pytorch_lightning"),
        loop_files=("/lightning/pytorch/trainer/trainer.py", "/pytorch_lightning/trainer/trainer.py"),
        builds_loaders=True,
        seeding_modules=("lightning.fabric.utilities.seed", "lightning_fabric.utilities.seed"),
        precision={".Trainer": {"precision": "bf16-mixed"}, ".Fabric": {"precision": "bf16-mixed"}},
    ),
    *(
        Framework(packages=(name,))
        for name in (
            "deepspeed", "ignite", "mmengine", "mmcv", "fastai", "detectron2", "composer", "ultralytics", "colossalai",
            "torchtitan", "torchtune", "catalyst", "timm",
        )
    ),
)  # fmt: skip

# The samplers that may be asked early, by their names with their modules.
PURE_SAMPLERS = frozenset().union(*(framework.pure_samplers for framework in FRAMEWORKS))
# Those that hand out what another sampler says, and the attribute that holds it.
WRAPPING_SAMPLERS = {name: held for framework in FRAMEWORKS for name, held in framework.wrapping_samplers.items()}
SEEDING_MODULES = tuple(name for framework in FRAMEWORKS for name in framework.seeding_modules)


def packages(*, has_loop: bool = False, builds_loaders: bool = False) -> tuple[str, ...]:
    """The packages of the frameworks that do all of these."""
    return tuple(
        package
        for framework in FRAMEWORKS
        for package in framework.packages
        if framework.has_loop >= has_loop and framework.builds_loaders >= builds_loaders
    )


def framework_of(loader_module: str, called_from: Callable[[str], bool]) -> str | None:
    """The framework whose loop begins a pass over a loader, by who is calling and by the loader's own class."""
    for framework in FRAMEWORKS:
        if any(map(called_from, framework.loop_files)):
            return framework.packages[0]
    for framework in FRAMEWORKS:
        if framework.loader_module and framework.loader_module == loader_module:
            return framework.packages[0]
    return None


def may_be_asked_early(sampler: str | None, batch_sampler: str | None) -> bool:
    """Whether these samplers, as a trace names them, are known to take no notice. None: not recorded.

    Traces of older versions hold the name of the class alone: there a script's own `class RandomSampler`
    passes.
    """
    return _is_known(sampler, PURE_SAMPLERS) and _is_known(batch_sampler, WRAPPING_SAMPLERS)


def _is_known(name: str | None, known: Mapping[str, str] | frozenset[str]) -> bool:
    if name is None or name in ("NoneType", "builtins.NoneType"):
        return True
    if "." in name:
        return name in known
    return any(one.rpartition(".")[2] == name for one in known)
