"""What people call a setting, in flags and config files. One list for the check, the rules and the remedies."""

from __future__ import annotations

import re

_EVERY = r"_?(every|interval|freq|frequency|period|each)(_?n)?(_?(epochs?|steps?|iters?))?"

# The name is that of the change, where there is one.
NAMES = {
    "batch_size": r"(train_?|micro_?|per_device_?|per_gpu_?|local_?)*batch(_?size)?(_per_(gpu|device))?|bs",
    "num_workers": r"(num_?|n_?)?(data_?(loader)?_?|loader_?|train_?)?(num_?)?workers|workers_per_gpu|nw",
    "prefetch_factor": r"(dataloader_?)?prefetch(_?factor)?",
    "persistent_workers": r"(dataloader_?)?persistent(_?workers)?",
    "pin_memory": r"(dataloader_?)?pin(_?mem(ory)?)?|pinned(_?memory)?",
    "drop_last": r"(dataloader_?)?drop_?last",
    "learning_rate": r"(base_?|max_?|init_?|peak_?)?(lr|learning_?rate)(_?init)?",
    "epochs": r"(num_?|n_?|max_?|total_?)?(train_?)?epochs",
    "eval_interval": rf"(eval(uat(e|ion))?|val(id(at(e|ion))?)?|test){_EVERY}|check_val_every_n_epoch|eval_steps",
    "checkpoint_interval": rf"(save|checkpoint|ckpt){_EVERY}|(save|checkpointing)_steps",
    "precision": r"(use_?)?(amp|bf16|mixed_?precision|autocast)(_?dtype)?",
    "fp16": r"(use_?)?fp16",
    "trainer_precision": r"precision",  # Lightning's; elsewhere it may be about digits
    "tf32": r"(allow_?|use_?|enable_?)?tf32",
    "cudnn_benchmark": r"(cudnn[_.]?)?benchmark(_?cudnn)?",
    "channels_last": r"(use_?)?channels_?last",
    "compile": r"(use_?|enable_?)?(torch_?)?compiled?(_?model)?",
    "fused_optimizer": r"(use_?)?fused(_?adamw?|_?optimizer)?",
    "threads": r"(decode|decoder|reader|read|io|video|cv|opencv|transform|aug\w*)_?(num_?)?threads|threads_per_worker",
    "augment_on": r"(aug\w*|jitter|transforms?|preprocess\w*)_?(on|device|where|backend)",
}

_OFF = frozenset({"", "0", "false", "no", "none", "off", "null", "fp32", "float32", "32", "32-true", "highest"})


def is_on(value: object) -> bool:
    """Whether a setting asks for what it is named after; of a precision, for a lower one."""
    return str(value).strip().lower() not in _OFF


def pattern_of(*subjects: str) -> re.Pattern[str]:
    """What fits any name people give one of these."""
    return re.compile("|".join(NAMES[subject] for subject in subjects), re.IGNORECASE)
