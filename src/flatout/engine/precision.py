"""Numbers and kernels: in which precision a step is computed, and the switches of torch that go with it.

`amp: true`, `bf16`, `fp16`, `tf32`, `off` mean what a person means. What a card cannot do becomes what it can, and
the decision says so; what can have no effect at all is an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

from flatout.engine.section import nearest
from flatout.model.errors import UsageError

_MEANS = {
    "auto": ("auto",),
    "off": ("off", "false", "no", "none", "fp32", "float32", "32", "full"),
    "tf32": ("tf32", "tensorfloat32"),
    "bf16": ("bf16", "bfloat16", "bf16-mixed", "true", "on", "yes", "amp", "mixed"),
    "fp16": ("fp16", "float16", "half", "16", "16-mixed"),
}
_NAMES = {word: name for name, words in _MEANS.items() for word in words}


def _read(value: Any) -> Any:
    """The name of a precision, however a person spells it; YAML reads `off` as False and `16` as a number."""
    word = str(value).strip().lower().removeprefix("torch.") if isinstance(value, str | bool | int) else None
    if word not in _NAMES:
        hint = nearest(word, _NAMES) if word and not word.isdigit() else ""
        raise ValueError(f"one of {', '.join(_MEANS)}{hint}")
    return _NAMES[word]


PrecisionName = Annotated[Literal["auto", "off", "tf32", "bf16", "fp16"], BeforeValidator(_read)]


@dataclass(frozen=True, slots=True)
class Decision:
    """One switch as it is in force, and why; `instead` of what was asked for, which is said even when quiet."""

    name: str
    value: str
    why: str = ""
    instead: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.value}{f'  ({self.why})' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class Precision:
    """What a step is computed in: `dtype` under autocast (None: as the model is), TF32 or not, scaled or not."""

    device: torch.device
    dtype: torch.dtype | None
    tf32: bool
    scaled: bool

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For one forward pass: autocast left on keeps stale copies of the weights."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def decide(wanted: str, device: torch.device) -> tuple[Precision, Decision]:
    """The precision in force on this device."""
    name, why = wanted, ""
    if device.type != "cuda":
        name, why = _without_gpu(wanted, device)
    elif wanted in ("auto", "bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        name, why = "fp16", f"{torch.cuda.get_device_name(device)} has no bf16: fp16 with a loss scaler instead"
    elif wanted == "auto":
        name, why = "bf16", "the default on this card"
    elif wanted == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        name, why = "off", f"{torch.cuda.get_device_name(device)} has no TF32: plain fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    tf32 = device.type == "cuda" and name != "off"
    decision = Decision("train.precision", name, why, instead=wanted not in ("auto", name))
    return Precision(device, dtype, tf32, name == "fp16"), decision


def _without_gpu(wanted: str, device: torch.device) -> tuple[str, str]:
    if wanted == "auto":
        return "off", f"the default on {device.type}"
    if wanted == "tf32":
        return "off", f"TF32 is a matter of NVIDIA cards: plain fp32 on {device.type}"
    if wanted == "fp16":
        raise UsageError(f"train.precision: fp16 needs a GPU (the device is {device.type}); use bf16 or off")
    return wanted, ""


@contextlib.contextmanager
def switched(precision: Precision, *, deterministic: bool) -> Iterator[None]:
    """torch's own switches as they are wanted, and back as they were."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled()
    kept = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    if deterministic and precision.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    matmul.allow_tf32, cudnn.allow_tf32 = precision.tf32, precision.tf32
    cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = kept
        torch.use_deterministic_algorithms(before)
