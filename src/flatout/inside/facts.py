"""What is in force in this run: switches, loaders, optimizer, model, versions. Taken by looking; nothing is changed."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flatout.model.sizes import length_of


def loader_facts(loader: Any) -> dict[str, Any]:
    """A DataLoader's settings as they are in force."""
    dataset = loader.dataset
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else torch.multiprocessing.get_start_method(True)
    return {
        "dataset": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "length": length_of(dataset),
        "iterable": iterable,
        "batch_size": loader.batch_size,
        "batches": None if iterable else length_of(loader),  # a stream's loader would hold the script to the answer
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory": loader.pin_memory,
        "drop_last": loader.drop_last,
        "sampler": type(getattr(loader, "sampler", None)).__name__,
        "batch_sampler": type(getattr(loader, "batch_sampler", None)).__name__,
        "collate": getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__),
        "start_method": method,
        "elastic": type(loader).__module__.startswith("flatout."),
    }


def batches_ahead(facts: Mapping[str, Any]) -> int:
    """How many batches the workers of such a loader may have ready, and no more than a quarter of an epoch."""
    if facts["elastic"] or not facts["num_workers"]:
        return 0
    ready = int(facts["num_workers"]) * int(facts["prefetch_factor"] or 2)
    batches = facts.get("batches")
    if not batches:
        length, batch = facts["length"], facts["batch_size"]
        batches = length // batch if length and batch else None
    return min(ready, batches // 4) if batches else ready


def of_optimizer(optimizer: Any) -> dict[str, Any]:
    """It and what it trains, as they are now."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_fused": groups[0].get("fused"),
        "optimizer_foreach": groups[0].get("foreach"),
        "learning_rate": float(groups[0]["lr"]) if "lr" in groups[0] else None,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "devices": sorted({str(p.device) for p in parameters}),
        "channels_last": _channels_last(parameters),
    }


def in_force() -> dict[str, Any]:
    """Switches and machine, as they are now."""
    facts: dict[str, Any] = {
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_convolutions": _guarded(lambda: torch.backends.cudnn.allow_tf32),
        "tf32_matmul": _guarded(lambda: torch.backends.cuda.matmul.allow_tf32),
        "compiled": _compiled_frames() > 0,
        "threads": torch.get_num_threads(),
        "pillow": "PIL.Image" in sys.modules,
        "cores_allowed": _cores_allowed(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        facts["distributed"] = {
            "backend": torch.distributed.get_backend(),
            "world_size": torch.distributed.get_world_size(),
        }
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpus_visible": torch.cuda.device_count(),
            "gpu_index": device,
            "gpu_uuid": str(getattr(torch.cuda.get_device_properties(device), "uuid", "")),
            "memory_peak_bytes": torch.cuda.max_memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "memory_total_bytes": torch.cuda.get_device_properties(device).total_memory,
            "memory_retries": torch.cuda.memory_stats(device).get("num_alloc_retries"),
            "cuda": torch.version.cuda,
        }
    return facts


def gradient_exchange(modules: Iterable[Any]) -> dict[str, float] | None:
    """How long the ranks' gradients take to exchange, while backward computes (`hidden_ms`) and after it (`waited_ms`).

    DistributedDataParallel times that itself: the first steps, and every hundredth.
    """
    for module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            timed = module._get_ddp_logging_data()
            took_ns, hidden_ns = (timed.get(f"avg_backward_{of}_time", 0) for of in ("comm", "compute_comm_overlap"))
            if took_ns:
                return {"hidden_ms": hidden_ns / 1e6, "waited_ms": max(0, took_ns - hidden_ns) / 1e6}
    return None


@functools.cache
def _cores_allowed() -> float:
    from flatout.sample import budget

    return budget.measure().cores_allowed


def _compiled_frames() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["ok"]) if dynamo is not None else 0


def _channels_last(parameters: list[Any]) -> bool | None:
    """Whether convolution weights are in channels_last; None without convolutions that could tell."""
    weights = [p for p in parameters if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] * p.shape[3] > 1]
    if not weights:
        return None
    return all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def _guarded(read: Any) -> Any:
    """Some switches refuse to be read once the user has used the newer interface."""
    try:
        return read()
    except RuntimeError:
        return None
