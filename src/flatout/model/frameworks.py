"""What flatout has to know about frameworks that train, for the loader, the diagnosis and the check.

A framework that builds a `DataLoader` and calls `backward` and `Optimizer.step` is measured without an entry
here. An entry says what cannot be seen from outside: that its loop is not in the script, that its sampler may
be asked early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework that runs the training loop and builds loaders of those the script has built."""

    packages: tuple[str, ...]  # what a script imports
    loop_files: tuple[str, ...] = ()  # how the paths of the files end that run its loop
    saves: tuple[str, ...] = ()  # its functions that write a checkpoint: module, class, function
    loader_module: str = ""  # where the class of its loaders is defined
    seeding_modules: tuple[str, ...] = ()  # whose worker_init_fn does nothing but seed
    precision: Mapping[str, Mapping[str, object]]  # a class, its arguments that ask for lower precision
    loader_arguments: Mapping[str, tuple[str, object]] = field(default_factory=dict)  # name, default


_BF16_OR_FP16 = {"bf16": True, "fp16": True}
FRAMEWORKS = (
    Framework(
        packages=("transformers",),
        loop_files=("/transformers/trainer.py",),
        saves=("transformers.trainer.Trainer._save_checkpoint",),
        seeding_modules=("transformers.trainer_utils",),
        precision={"TrainingArguments": _BF16_OR_FP16, "Seq2SeqTrainingArguments": _BF16_OR_FP16},
        loader_arguments={
            "batch_size": ("per_device_train_batch_size", 8),
            "num_workers": ("dataloader_num_workers", 0),
            "pin_memory": ("dataloader_pin_memory", True),
            "prefetch_factor": ("dataloader_prefetch_factor", None),
            "persistent_workers": ("dataloader_persistent_workers", False),
        },
    ),
    Framework(
        packages=("accelerate",),
        saves=("accelerate.accelerator.Accelerator.save_state",),
        loader_module="accelerate.data_loader",
        precision={"Accelerator": {"mixed_precision": "bf16"}},
    ),
    Framework(
        packages=("lightning", "pytorch_lightning"),
        loop_files=("/lightning/pytorch/trainer/trainer.py", "/pytorch_lightning/trainer/trainer.py"),
        saves=(
            "lightning.pytorch.trainer.trainer.Trainer.save_checkpoint",
            "pytorch_lightning.trainer.trainer.Trainer.save_checkpoint",
        ),
        seeding_modules=("lightning.fabric.utilities.seed", "lightning_fabric.utilities.seed"),
        precision={"Trainer": {"precision": "bf16-mixed"}, "Fabric": {"precision": "bf16-mixed"}},
    ),
)
BUILD_LOADERS = tuple(name for framework in FRAMEWORKS for name in framework.packages)
SEEDING_MODULES = tuple(name for framework in FRAMEWORKS for name in framework.seeding_modules)
# Packages that run the training loop, so that the script alone does not show what is switched on.
RUN_LOOPS = (
    *BUILD_LOADERS,
    *("deepspeed", "ignite", "mmengine", "mmcv", "fastai", "detectron2", "composer", "ultralytics"),
    *("colossalai", "torchtitan", "torchtune", "catalyst", "timm"),
)
# Samplers that draw when they are started and not in between: they may be asked early.
PURE_SAMPLERS = frozenset({
    "torch.utils.data.sampler.SequentialSampler",
    "torch.utils.data.sampler.RandomSampler",
    "torch.utils.data.sampler.SubsetRandomSampler",
    "torch.utils.data.sampler.WeightedRandomSampler",
    "torch.utils.data.distributed.DistributedSampler",
    "transformers.trainer_pt_utils.LengthGroupedSampler",
    "transformers.trainer_pt_utils.DistributedLengthGroupedSampler",
    # It counts the epochs it was asked for, and draws from a generator of its own.
    "accelerate.data_loader.SeedableRandomSampler",
})  # fmt: skip
# Those that hand out what another sampler says, and the attribute that holds it.
WRAPPING_SAMPLERS = {
    "torch.utils.data.sampler.BatchSampler": "sampler",
    "flatout.engine.datasets.ChainedEpochs": "sampler",
    "accelerate.data_loader.BatchSamplerShard": "batch_sampler",
    "accelerate.data_loader.SkipBatchSampler": "batch_sampler",
}
