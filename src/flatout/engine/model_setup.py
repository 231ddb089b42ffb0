"""The model on its device, in the form that trains fastest there: precision, layout, checkpointing, compilation.

Each of them is a `Decision` that says what is in force and why. What a GPU cannot do becomes what it can;
a setting that can have no effect at all is an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.engine.config import TrainConfig, nearest
from flatout.inside.compiler import round_as_eager
from flatout.model.errors import UsageError

_WITH_GRAPHS = "on, with CUDA graphs"
CAPTURING = (_WITH_GRAPHS, "reduce-overhead", "max-autotune")


@dataclass(frozen=True, slots=True)
class Decision:
    """A setting as it is in force, and why; `instead` of what was asked for, which is said even when quiet."""

    name: str
    value: str
    why: str = ""
    instead: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.value}" + (f"  ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class StepPrecision:
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


def choose_precision(asked: str, device: torch.device) -> tuple[StepPrecision, Decision]:
    """The precision in force on this device."""
    name, why = asked, ""
    if device.type != "cuda":
        name, why = _precision_without_gpu(asked, device)
    elif asked in ("auto", "bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        name, why = "fp16", f"{torch.cuda.get_device_name(device)} has no bf16: fp16 with a loss scaler instead"
    elif asked == "auto":
        name, why = "bf16", "the default on this GPU"
    elif asked == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        name, why = "off", f"{torch.cuda.get_device_name(device)} has no TF32: plain fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    tf32 = device.type == "cuda" and name != "off"
    decision = Decision("train.precision", name, why, instead=asked not in ("auto", name))
    return StepPrecision(device, dtype, tf32, name == "fp16"), decision


def _precision_without_gpu(asked: str, device: torch.device) -> tuple[str, str]:
    if asked == "auto":
        return "off", f"the default on {device.type}"
    if asked == "tf32":
        return "off", f"only NVIDIA GPUs have TF32: plain fp32 on {device.type}"
    if asked == "fp16":
        raise UsageError(f"train.precision: fp16 needs a GPU (the device is {device.type}); use bf16 or off")
    return asked, ""


@contextlib.contextmanager
def torch_switches(precision: StepPrecision, *, deterministic: bool) -> Iterator[None]:
    """Set torch's own switches, and put them back afterwards."""
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


def choose_device(asked: str, local_rank: int) -> torch.device:
    """The device a config names: with several ranks, each has the GPU of its number."""
    has_gpu = torch.cuda.is_available()
    if asked == "cpu" or (asked == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise UsageError(f"train.device: {asked}, but there is no GPU here that torch can use")
    device = torch.device(asked if ":" in asked else f"cuda:{local_rank}")
    if device.index >= torch.cuda.device_count():
        raise UsageError(f"train.device: {device}, but torch sees {torch.cuda.device_count()} GPU(s)")
    torch.cuda.set_device(device)
    return device


def prepare_model(model: nn.Module, config: TrainConfig, device: torch.device, ranks: int = 1) -> list[Decision]:
    """Bring the model to the device, in the form that is fastest there: layout, checkpointing, compilation."""
    model.to(device)
    model.train()
    return [
        _set_layout(model, config.channels_last, device),
        _checkpoint_activations(model, config.checkpoint_activations),
        _compile(model, config.compile, device, ranks),
    ]


def _set_layout(model: nn.Module, asked: bool | str, device: torch.device) -> Decision:
    name = "train.channels_last"
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()):
        return Decision(name, "off", "there is no 2-d convolution", instead=asked is True)
    on, why = bool(asked), ""
    if asked == "auto":
        on, why = device.type == "cuda", f"the default on {device.type}"
    if on:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Decision(name, "on" if on else "off", why)


def channels_last(batch: Any) -> Any:
    """Pictures in the model's layout. Bytes stay as they are: they may well be height x width x channels."""
    if type(batch) not in (list, tuple):
        return batch
    changed = []
    for thing in batch:
        if isinstance(thing, Tensor) and thing.dim() == 4 and thing.is_floating_point():
            thing = thing.contiguous(memory_format=torch.channels_last)
        changed.append(thing)
    return changed


def _checkpoint_activations(model: nn.Module, asked: bool | list[str]) -> Decision:
    """Recompute what the named modules computed when backward needs it, instead of keeping it."""
    name = "train.checkpoint_activations"
    if not asked:
        return Decision(name, "off")
    modules = {path: module for path, module in model.named_modules() if path}
    chosen: list[str] = []
    if asked is True:
        blocks = [path for path in modules if isinstance(_parent(model, path), nn.Sequential | nn.ModuleList)]
        chosen = [path for path in blocks if not any(path.startswith(f"{outer}.") for outer in blocks)]
        if not chosen:
            raise UsageError(f"{name}: no nn.Sequential or nn.ModuleList to take blocks from; name the modules")
    for pattern in asked if isinstance(asked, list) else ():
        matching = [path for path in modules if fnmatchcase(path, pattern)]
        if not matching:
            raise UsageError(f"{name}: no module is called {pattern!r}{nearest(pattern, modules)}")
        chosen += matching
    for path in dict.fromkeys(chosen):
        module = modules[path]
        # batch_size: auto has prepared it before.
        if getattr(module.forward, "func", None) is not checkpoint:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    more = " …" * (len(chosen) > 3)
    return Decision(name, f"{len(set(chosen))} modules", ", ".join(chosen[:3]) + more)


def _parent(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.rpartition(".")[0])


def _compile(model: nn.Module, asked: bool | str, device: torch.device, ranks: int) -> Decision:
    """Compile it; with one rank capture it too: most steps take the host longer to launch than the GPU to run."""
    name, value, why = "train.compile", str(asked), "eager should it fail"
    if asked is False:
        return Decision(name, "off")
    if asked == "auto":
        if device.type != "cuda":
            return Decision(name, "off", f"the default on {device.type}")
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            return Decision(
                name, "off", "the compiler stops before an RNN and goes on behind it, at a cost in every step"
            )
        value, why = _WITH_GRAPHS if ranks == 1 else "on", f"the default on {device.type}"
    elif asked is True:
        value = "on"
    mode = {"on": None, _WITH_GRAPHS: "reduce-overhead"}.get(value, value)
    try:
        round_as_eager()
        # `model.compile()` would pass over an nn.Sequential in silence; the forward method is compiled in any case.
        model.forward = torch.compile(model.forward, mode=mode)
    except Exception as problem:  # without a compiler that works, training goes on eagerly
        why = f"torch.compile failed: {type(problem).__name__}: {problem}"
        return Decision(name, "off", why, instead=True)
    return Decision(name, value, f"{why}; the first step takes longer")


def uncompile(model: nn.Module) -> bool:
    """Take the compiler away from a model again; whether it had one."""
    plain = getattr(model.forward, "_torchdynamo_orig_callable", None)
    if plain is not None:
        model.forward = plain
    return plain is not None
