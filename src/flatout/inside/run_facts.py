"""What is known of this training process beside its steps: switches, versions, optimizer and loaders;
attention written out by hand. It looks, and changes nothing."""

from __future__ import annotations

import functools
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterable
from typing import Any

import torch

from flatout.inside.patches import Patches, Stage
from flatout.inside.root_modules import RootModules
from flatout.inside.stacks import called_from, caller
from flatout.model.frameworks import FRAMEWORKS
from flatout.model.records import (
    Facts,
    GradientExchange,
    LoaderFacts,
    ParallelFacts,
    ProcessGroup,
    WrittenAttention,
    length_of,
)


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """The optimizer and what it trains, as they are now."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_fused": groups[0].get("fused"),
        "optimizer_foreach": groups[0].get("foreach"),
        "learning_rate": float(groups[0]["lr"]) if "lr" in groups[0] else None,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_dtypes": tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "devices": tuple(sorted({str(p.device) for p in parameters})),
        "channels_last": _channels_last(parameters),
    }


def in_force(optimizer: dict[str, Any]) -> Facts:
    """Switches and machine, as they are now, with what is known of the optimizer."""
    return Facts(
        **optimizer,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        matmul_precision=torch.get_float32_matmul_precision(),
        tf32_convolutions=_guarded(lambda: torch.backends.cudnn.allow_tf32),
        tf32_matmul=_guarded(lambda: torch.backends.cuda.matmul.allow_tf32),
        compiled=compiled_frames() > 0,
        threads=torch.get_num_threads(),
        pillow="PIL.Image" in sys.modules,
        cores_allowed=_cores_allowed(),
        core_numbers=_core_numbers(),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        distributed=_distributed(),
        **_gpu(),
    )


def ranks() -> tuple[int, int]:
    """This process among those that train together, and how many there are, as torch or the
    environment says."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) or 0
    world_size = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")) or 1
    return int(rank), int(world_size)


def _distributed() -> ProcessGroup | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return ProcessGroup(backend=torch.distributed.get_backend(), world_size=torch.distributed.get_world_size())


def _gpu() -> dict[str, Any]:
    """The GPU in use; CUDA is not begun for it."""
    if not torch.cuda.is_initialized():
        return {}
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpus_visible": torch.cuda.device_count(),
        "gpu_index": device,
        "gpu_uuid": str(getattr(properties, "uuid", "")),
        "memory_peak_bytes": torch.cuda.max_memory_allocated(device),
        "memory_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "memory_total_bytes": properties.total_memory,
        "memory_retries": torch.cuda.memory_stats(device).get("num_alloc_retries"),
        "cuda": torch.version.cuda,
    }


def gradient_exchange(modules: Iterable[Any]) -> GradientExchange | None:
    """How long the ranks' gradients take to exchange, while backward computes (`hidden_ms`) and after
    it; timed by DistributedDataParallel in the first steps and every hundredth."""
    for module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            timed = module._get_ddp_logging_data()
            took_ns = timed.get("avg_backward_comm_time", 0)
            hidden_ns = timed.get("avg_backward_compute_comm_overlap_time", 0)
            if took_ns:
                return GradientExchange(hidden_ms=hidden_ns / 1e6, waited_ms=max(0, took_ns - hidden_ns) / 1e6)
    return None


def parallel(modules: Iterable[Any]) -> ParallelFacts | None:
    """How the model was wrapped for several GPUs or ranks; None where it was not."""
    for module in modules:
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            return ParallelFacts(data_parallel=len(module.device_ids))
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            unused = module._get_ddp_logging_data().get("unused_parameter_size")
            return ParallelFacts(
                find_unused_parameters=bool(module.find_unused_parameters),
                unused_parameters=unused > 0 if unused is not None else None,
            )
    return None


@functools.cache
def _cores_allowed() -> float:
    from flatout.sample import budget

    return budget.measure().cores_allowed


def _core_numbers() -> tuple[int, ...]:
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(allowed) if len(allowed) < (os.cpu_count() or 0) else ()


def compiled_frames() -> int:
    """How many functions the compiler has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["ok"]) if dynamo is not None else 0


def _channels_last(parameters: list[Any]) -> bool | None:
    """Whether convolution weights are in channels_last; None where that makes no difference."""
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


# -- loaders


_said: set[str] = set()


def loader_facts(loader: Any) -> LoaderFacts:
    """A DataLoader's settings as they are in force."""
    dataset = loader.dataset
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else torch.multiprocessing.get_start_method(True)
    return LoaderFacts(
        dataset=_qualified_name(dataset),
        length=length_of(dataset),
        iterable=iterable,
        batch_size=loader.batch_size,
        batches=None if iterable else length_of(loader),  # torch warns when a stream has another length than it says
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory=bool(loader.pin_memory),
        drop_last=loader.drop_last,
        sampler=_qualified_name(getattr(loader, "sampler", None)),
        batch_sampler=_qualified_name(getattr(loader, "batch_sampler", None)),
        collate=getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__),
        start_method=method,
        framework=framework_of(type(loader).__module__),
        elastic=type(loader).__module__.startswith("flatout."),
    )


def _qualified_name(value: Any) -> str:
    """The class of a value, with its module: a script may have a RandomSampler of its own."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def framework_of(loader_module: str) -> str | None:
    """The framework whose loop begins a pass over a loader, by its caller and by the loader's own class."""
    for framework in FRAMEWORKS:
        if any(map(called_from, framework.loop_files)):
            return framework.packages[0]
    return next((each.packages[0] for each in FRAMEWORKS if each.loader_module == loader_module), None)


def batches_ahead(loader: LoaderFacts) -> int:
    """How many batches the workers of such a loader may have ready; at most a quarter of an epoch."""
    if loader.elastic or not loader.num_workers:
        return 0
    ready = loader.num_workers * (loader.prefetch_factor or 2)
    batches = loader.batches
    if not batches and loader.length and loader.batch_size:
        batches = loader.length // loader.batch_size
    return min(ready, batches // 4) if batches else ready


def warn_of_workers(loader: Any) -> None:
    """Say once, before PyTorch fails, why its workers cannot get what a cell defines."""
    text = why_workers_fail(loader)
    if text and text not in _said:
        _said.add(text)
        print(f"flatout: {text}", file=sys.stderr)


def why_workers_fail(loader: Any) -> str:
    """Why workers that are not forked cannot start, and what to do; empty where they can."""
    context = loader.multiprocessing_context or multiprocessing
    # Without `allow_none` the start method would be settled, and the script could set none any more.
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if not loader.num_workers or method == "fork" or hasattr(sys.modules["__main__"], "__file__"):
        return ""
    dataset = loader.dataset
    parts = [loader.collate_fn, loader.worker_init_fn, dataset]
    while (dataset := getattr(dataset, "dataset", None)) is not None and len(parts) < 10:  # a Subset, say
        parts.append(dataset)
    names = [getattr(part, "__qualname__", type(part).__name__) for part in parts if _is_of_a_cell(part)]
    if not names:
        return ""
    return (
        f"workers started by {method} cannot get {names[0]}, which a cell defines. Put it in a file (%%writefile "
        f"data.py) and import it (from data import {names[0]}), or give the DataLoader multiprocessing_context='fork'"
    )


def _is_of_a_cell(part: Any) -> bool:
    return getattr(part, "__module__", None) == "__main__"


# -- what the model computes


class FlopWatch:
    """Counts what the model computes in the second step: on a GPU, and where nothing is compiled."""

    def __init__(self, roots: RootModules) -> None:
        self.of_a_step: int | None = None
        self.is_over = False
        self._roots = roots

    def step_ended(self) -> bool:
        """A training step is over; whether the next one is counted, and takes longer."""
        if self.is_over:
            return False
        count = self._roots.flops
        if count is None and torch.cuda.is_initialized() and not compiled_frames():
            from flatout.inside.flops import FlopCount  # takes a tenth of a second

            self._roots.flops = FlopCount()
            return True
        if count is not None:
            self.of_a_step = count.of_a_step
        self.leave()
        return False

    def leave(self) -> None:
        """Count no more."""
        self.is_over, self._roots.flops = True, None


# -- attention written out by hand

_SOFTMAX = ("torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax")
_SCRIPTED = ("torch.jit._script.get_jit_def", "torch.jit._recursive.get_jit_def")  # script itself counts its callers
_STEPS = 3
_MIN_LENGTH = 128  # below this the scores are small
_PRODUCTS = frozenset({"Bmm", "Mm", "Baddbmm", "Addmm"})  # as autograd calls them
_BEFORE_SOFTMAX = frozenset({
    "Add", "Sub", "Mul", "Div", "MaskedFill", "Where", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Reshape",
    "Transpose", "Permute", "Expand", "Clone", "Slice", "Index", "Squeeze", "Unsqueeze", "Alias",
})  # fmt: skip


class AttentionWatch:
    """Looks for a softmax over T×T scores, and the line it is called in; `found` is the longest.

    In the few steps after the first, and where nothing is compiled: a compiler that has seen our
    wrapper would compile again when it is taken off.
    """

    def __init__(self, patches: Patches) -> None:
        self.found: WrittenAttention | None = None
        self._calls = patches.subscriber(Stage.OBSERVE, lambda problem: None)
        self._calls.before("torch.compile", self._compiles)
        self._steps = 0

    @property
    def wants_every_step(self) -> bool:
        """Whether it is to be told when each step ends."""
        return not self._calls.off

    def step_ended(self) -> None:
        """A training step is over."""
        if not self._calls.off:
            self._calls.guarded(self._begin_or_end)

    def _begin_or_end(self) -> None:
        if compiled_frames() or self._steps >= _STEPS:
            self.leave()
        elif not self._steps:
            for softmax in _SOFTMAX:
                self._calls.before(softmax, self._look)
            for scripted in _SCRIPTED:
                self._calls.before(scripted, self._compiles)
        self._steps += 1

    def leave(self) -> None:
        """Look no more."""
        self._calls.leave()

    def _compiles(self, *_: Any, **__: Any) -> None:
        self.leave()

    def _look(self, scores: Any, dim: Any = None, *_: Any, **__: Any) -> None:
        if not isinstance(scores, torch.Tensor) or scores.dim() < 3 or not scores.is_floating_point():
            return
        length = scores.shape[-1]
        if length < _MIN_LENGTH or scores.shape[-2] != length or dim not in (-1, scores.dim() - 1):
            return
        if (self.found is None or length > self.found.length) and _of_a_product(scores.grad_fn):
            where = caller()
            if where is not None:
                self.found = WrittenAttention(where=where, length=length)


def _of_a_product(made_by: Any, most: int = 40) -> bool:
    """Whether scores are a product that was scaled and masked, at the most: no ready-made attention
    does more, such as the leaky ReLU of a graph attention. Of scores without a gradient nobody knows:
    frozen ones count, an evaluation's do not."""
    if made_by is None:
        return torch.is_grad_enabled()
    waiting = [made_by]
    for _ in range(most):
        if not waiting:
            break
        node = waiting.pop(0)
        name = node.name().removesuffix("0").removesuffix("Backward")
        if name in _PRODUCTS:
            return True
        if name in _BEFORE_SOFTMAX:
            waiting += [source for source, _ in node.next_functions if source is not None]
    return False
