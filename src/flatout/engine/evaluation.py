"""Validation: the loss and the metrics over the validation data, on the device, read once at the end.

A metric is a function of (output, target) that gives a number a sample (or a mean), or an object with `update` and
`compute`, as torchmetrics has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.ranks import Ranks
from flatout.engine.section import Count, Every, Often, Section
from flatout.engine.step import Step, batch_rows
from flatout.model.errors import UsageError


class EvaluateConfig(Section):
    """When the validation data is looked at."""

    every: Often = Every(1, "epoch")
    batch_size: Count | None = None  # None: train.batch_size


def can_share(metrics: Mapping[str, Any]) -> bool:
    """Whether ranks may each look at a part of the data: means add up, and torchmetrics gathers by itself."""
    return all(not is_object(metric) or hasattr(metric, "sync") for metric in metrics.values())


@torch.no_grad()
def evaluate(
    step: Step, model: nn.Module, batches: Iterable[Any], metrics: Mapping[str, Any], ranks: Ranks, shared: bool
) -> dict[str, float]:
    """The loss and every metric by name; `shared` if each rank has seen a part."""
    device = step.precision.device
    names = ["loss", *(name for name, metric in metrics.items() if not is_object(metric))]
    sums = torch.zeros(len(names), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    rows = 0
    objects = {name: metric for name, metric in metrics.items() if is_object(metric)}
    for metric in objects.values():
        if hasattr(metric, "to"):
            metric.to(device)
        metric.reset()
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):  # compiling once more, for a short pass, does not pay
            for batch in batches:
                count = batch_rows(batch)
                loss, output, target = step.forward(batch, model)
                output = _full(output)
                rows += count
                sums[0] += loss.detach() * count
                for place, name in enumerate(names[1:], 1):
                    value = _as_tensor(name, metrics[name](output, target), device)
                    sums[place] += value.sum() if value.dim() else value * count
                for metric in objects.values():
                    metric.update(output, target)
    finally:
        model.train(was_training)
    totals = [*sums.tolist(), float(rows)]
    *totals, seen = ranks.total(totals) if shared else totals
    found = {name: value / max(1.0, seen) for name, value in zip(names, totals, strict=True)}
    for name, metric in objects.items():
        value = metric.compute()
        several = {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, Mapping) else None
        found |= {key: float(inner) for key, inner in (several or {name: value}).items()}
    return found


def _as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"metrics.{name} gave {value!r:.60}: a metric gives a number, or one a sample") from None


def is_object(metric: Any) -> bool:
    """Whether it is a metric in the manner of torchmetrics."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _full(output: Any) -> Any:
    """Autocast's output in fp32: a mean of thousands in bf16 is none."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return type(output)(_full(part) for part in output) if type(output) in (list, tuple) else output
