"""What is done to a model before it trains: layout, activation checkpointing, compilation; each decision says why."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.engine.precision import Decision
from flatout.engine.section import nearest
from flatout.engine.step import TrainConfig
from flatout.inside.inductor_rounding import round_as_eager
from flatout.model.errors import UsageError


def device_for(wanted: str, local_rank: int) -> torch.device:
    """The device a config names: of several ranks, each has the card of its number."""
    there = torch.cuda.is_available()
    if wanted == "auto":
        wanted = "cuda" if there else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not there:
        raise UsageError(f"train.device: {wanted}, but there is no GPU here that torch can use")
    device = torch.device(wanted if ":" in wanted else f"cuda:{local_rank}")
    if device.index >= torch.cuda.device_count():
        raise UsageError(f"train.device: {device}, but torch sees {torch.cuda.device_count()} GPU(s)")
    torch.cuda.set_device(device)
    return device


def made_ready(model: nn.Module, config: TrainConfig, device: torch.device, ranks: int = 1) -> list[Decision]:
    """Bring the model to the device, in the form that is fastest there."""
    model.to(device)
    model.train()
    return [
        _layout(model, config.channels_last, device),
        _activations(model, config.checkpoint_activations),
        _compiled(model, config.compile, device, ranks),
    ]


def _layout(model: nn.Module, wanted: bool | str, device: torch.device) -> Decision:
    name = "train.channels_last"
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()):
        return Decision(name, "off", "there is no 2-d convolution", instead=wanted is True)
    on = device.type == "cuda" if wanted == "auto" else bool(wanted)
    if on:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Decision(name, "on" if on else "off", f"the default on {device.type}" if wanted == "auto" else "")


def channels_last(batch: Any) -> Any:
    """Pictures in the model's layout. Bytes stay as they are: they may well be height x width x channels."""

    def changed(thing: Any) -> Any:
        if isinstance(thing, Tensor) and thing.dim() == 4 and thing.is_floating_point():
            return thing.contiguous(memory_format=torch.channels_last)
        return thing

    return [changed(thing) for thing in batch] if type(batch) in (list, tuple) else batch


def _activations(model: nn.Module, wanted: bool | list[str]) -> Decision:
    """Recompute what the named modules computed when backward wants it, instead of keeping it."""
    name = "train.checkpoint_activations"
    if not wanted:
        return Decision(name, "off")
    modules = {path: module for path, module in model.named_modules() if path}
    if wanted is True:
        chosen = [path for path in modules if isinstance(_parent(model, path), nn.Sequential | nn.ModuleList)]
        chosen = [path for path in chosen if not any(path.startswith(f"{outer}.") for outer in chosen)]
        if not chosen:
            raise UsageError(f"{name}: no nn.Sequential or nn.ModuleList to take blocks from; name the modules")
    else:
        chosen = []
        for pattern in wanted:
            matching = [path for path in modules if fnmatchcase(path, pattern)]
            if not matching:
                raise UsageError(f"{name}: no module is called {pattern!r}{nearest(pattern, modules)}")
            chosen += matching
    for path in dict.fromkeys(chosen):
        module = modules[path]
        if getattr(module.forward, "func", None) is not checkpoint:  # made ready before, for batch_size: auto
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return Decision(name, f"{len(set(chosen))} modules", ", ".join(chosen[:3]) + (" …" if len(chosen) > 3 else ""))


def _parent(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.rpartition(".")[0])


WITH_GRAPHS = "on, with CUDA graphs"
CAPTURING = (WITH_GRAPHS, "reduce-overhead", "max-autotune")


def _compiled(model: nn.Module, wanted: bool | str, device: torch.device, ranks: int) -> Decision:
    """Compiled, and of one rank captured too: most steps take the host longer to launch than the card to compute."""
    value, why = "on" if wanted is True else str(wanted), "eager should it fail"
    if wanted == "auto":
        value, why = WITH_GRAPHS if ranks == 1 else "on", f"the default on {device.type}"
        if device.type != "cuda":
            return Decision("train.compile", "off", why)
    if wanted is False:
        return Decision("train.compile", "off")
    mode = {"on": None, WITH_GRAPHS: "reduce-overhead"}.get(value, value)
    try:
        round_as_eager()
        # `model.compile()` would pass over an nn.Sequential in silence; the forward method is compiled in any case.
        model.forward = torch.compile(model.forward, mode=mode)
    except Exception as problem:  # whatever is wrong with the compiler here, training does without it
        why = f"torch.compile failed: {type(problem).__name__}: {problem}"
        return Decision("train.compile", "off", why, instead=True)
    return Decision("train.compile", value, f"{why}; the first step takes longer")
