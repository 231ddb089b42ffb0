"""How to make a change for good: the flag to pass, the line of a file to change, or the source line with the edit."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from flatout.fix.result import Attempt
from flatout.inside import inductor_rounding
from flatout.model.formatting import as_typed

# What a person would write. {} is the value.
CODE = {
    "loader": "flatout.DataLoader(...) in place of this one, after import flatout; "
    'num_workers="auto" (as it is for a stream, or with a worker_init_fn)',
    "num_workers": "DataLoader(..., num_workers={})",
    "prefetch_factor": "DataLoader(..., prefetch_factor={})",
    "persistent_workers": "DataLoader(..., persistent_workers={})",
    "pin_memory": "DataLoader(..., pin_memory={})",
    "batch_size": "DataLoader(..., batch_size={})",
    "device_prefetch": 'for batch in flatout.feed.to_device(loader, "cuda"):',
    "gpu_transforms": "flatout.augment on the batch, on the GPU  # instead of the transforms in __getitem__",
    "worker_threads": "torch.set_num_threads({})  # in worker_init_fn",
    "precision": 'with torch.autocast("cuda", dtype=torch.bfloat16):  # around the forward pass and the loss',
    "fused_optimizer": "torch.optim.AdamW(..., fused=True)  # whichever optimizer it is",
    "channels_last": "model = model.to(memory_format=torch.channels_last)",
    "compile": f"model.compile()  # and {inductor_rounding.AS_CODE}",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "gc_freeze": "gc.collect(); gc.freeze()  # once, before the loop",
}
_AS_ARGUMENT = {"fused_optimizer": "fused=True"} | {
    name: f"{name}={{}}" for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
}
# Of the loader that transformers' Trainer makes itself: its TrainingArguments, or nothing.
_OF_TRAINER = {
    name: f"TrainingArguments(..., dataloader_{name}={{}})"
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
}
_OF_TRAINER |= {
    "batch_size": "TrainingArguments(..., per_device_train_batch_size={})",
    "loader": "nothing to edit, the Trainer makes its loader itself: train with the plan",
    "device_prefetch": "nothing to edit, the Trainer makes its loader itself: train with the plan",
}
_LOADER, _OPTIMIZER = re.compile(r"Loader$"), re.compile(r"(Adam|AdamW|SGD|Adagrad)$")
_OTHERWISE: dict[tuple[str, Any], str] = {
    ("precision", "tf32"): 'torch.set_float32_matmul_precision("high"); torch.backends.cudnn.allow_tf32 = True',
    ("precision", "fp16"): 'torch.autocast("cuda", dtype=torch.float16) around the forward pass, and a GradScaler',
    ("compile", "reduce-overhead"): f'model.compile(mode="reduce-overhead")  # and {inductor_rounding.AS_CODE}',
    ("compile", "max-autotune"): f'model.compile(mode="max-autotune")  # and {inductor_rounding.AS_CODE}',
}


def as_code(name: str, value: Any, *, by_trainer: bool = False) -> str | None:
    """A change as a line of Python, where there is one; also where the Trainer of transformers makes the loader."""
    line = _OTHERWISE.get((name, value), CODE.get(name))
    if by_trainer:
        line = _OF_TRAINER.get(name, line)
    return line.format(value) if line is not None else None


def permanently(attempt: Attempt, *, by_trainer: bool = False) -> str:
    """What to do, in a line or two."""
    change = attempt.change
    if change.knob:
        return ("pass " if change.knob.startswith("-") else "") + by_knob(change.knob, change.value)
    code = as_code(change.name, change.value, by_trainer=by_trainer) or f"{change.name} = {change.value!r}"
    if not attempt.where or (by_trainer and change.name in _OF_TRAINER):
        return code
    elsewhere = f"; the same at {', '.join(attempt.also)}" if attempt.also else ""
    return f"{attempt.where}: {_edited(attempt) or code}{elsewhere}"


def by_knob(knob: str, value: Any) -> str:
    """A value as it is given to a flag, or written in a file."""
    if knob.startswith("-"):
        return knob if value is True else f"{knob} {value}"
    file, _, key = knob.rpartition(":")
    written = f"{key} = {value!r}" if file.endswith(".py") else f"{key}: {as_typed(value)}"
    return f"in {file}: {written}"


def _edited(attempt: Attempt) -> str | None:
    """The source line with the argument put in, where that can be told."""
    argument = _AS_ARGUMENT.get(attempt.change.name)
    file, _, number = attempt.where.rpartition(":")
    if argument is None or not number.isdigit():
        return None
    try:
        line = Path(file).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return None
    return _with_argument(line, argument.format(attempt.change.value))


def _with_argument(line: str, argument: str) -> str | None:
    """A line with an argument more in the call that takes it; None where that is not all there, or not clear."""
    name = argument.partition("=")[0]
    try:
        code = ast.parse(f"{line} pass" if line.endswith(":") else line)
    except SyntaxError:  # it goes on in the next one
        return None
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)]
    takes = _OPTIMIZER if name == "fused" else _LOADER
    meant = [call for call in calls if takes.search(ast.unparse(call.func))] or calls
    if len(meant) != 1 or any(keyword.arg == name for keyword in meant[0].keywords):
        return None
    raw, end = line.encode(), (meant[0].end_col_offset or 0) - 1  # counted in bytes
    comma = ", " if meant[0].args or meant[0].keywords else ""
    return f"{raw[:end].decode().rstrip(', ')}{comma}{argument}{raw[end:].decode()}"
