"""What is known of this training process beside its steps: switches, versions and optimizer; its loaders, and how much
of their batches is padding; attention written out by hand. It looks, and changes nothing."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from flatout.inside.patches import Patches, Stage
from flatout.inside.stacks import called_from, caller
from flatout.model.frameworks import framework_of
from flatout.model.records import (
    Facts,
    GradientExchange,
    LoaderFacts,
    OptimizerFacts,
    ParallelFacts,
    ProcessGroup,
    TokenFacts,
    WrittenAttention,
    length_of,
)

if TYPE_CHECKING:
    from flatout.feed.dataset_check import CacheGrowth, DatasetCheck

_WATCHED_FOR = 200  # batches


def optimizer_facts(optimizer: Any) -> OptimizerFacts:
    """The optimizer and what it trains, as they are now."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    return OptimizerFacts(
        optimizer=type(optimizer).__name__,
        optimizer_fused=groups[0].get("fused"),
        optimizer_foreach=groups[0].get("foreach"),
        learning_rate=float(groups[0]["lr"]) if "lr" in groups[0] else None,
        parameters=sum(p.numel() for p in parameters),
        parameter_dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        devices=tuple(sorted({str(p.device) for p in parameters})),
        channels_last=_channels_last(parameters),
    )


def in_force(optimizer: OptimizerFacts) -> Facts:
    """Switches and machine, as they are now, with what is known of the optimizer."""
    return Facts(
        **dataclasses.asdict(optimizer),
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
    """How long the ranks' gradients take to exchange, while backward computes (`hidden_ms`) and after it (`waited_ms`).

    DistributedDataParallel times that itself: the first steps, and every hundredth.
    """
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


# -- loaders -------------------------------------------------------------------------------------------


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
        batches=None if iterable else length_of(loader),  # a stream's loader would hold the script to the answer
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory=bool(loader.pin_memory),
        drop_last=loader.drop_last,
        sampler=_qualified_name(getattr(loader, "sampler", None)),
        batch_sampler=_qualified_name(getattr(loader, "batch_sampler", None)),
        collate=getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__),
        start_method=method,
        elastic=type(loader).__module__.startswith("flatout."),
    )


def _qualified_name(value: Any) -> str:
    """The class of a value, with its module: a script may have a class of its own that is called RandomSampler."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def batches_ahead(loader: LoaderFacts) -> int:
    """How many batches the workers of such a loader may have ready, and no more than a quarter of an epoch."""
    if loader.elastic or not loader.num_workers:
        return 0
    ready = loader.num_workers * (loader.prefetch_factor or 2)
    batches = loader.batches
    if not batches and loader.length and loader.batch_size:
        batches = loader.length // loader.batch_size
    return min(ready, batches // 4) if batches else ready


@dataclasses.dataclass(repr=False, eq=False)
class _WatchedData:
    """A dataset that the training process reads itself: what its loop writes to in it, and what samples fill."""

    check: DatasetCheck
    growth: CacheGrowth | None = None  # where it is known how many samples a batch has
    samples: int = 1


class LoaderNotes:
    """What is known of the loaders of a run, by number."""

    def __init__(self) -> None:
        self._facts: dict[int, LoaderFacts] = {}
        self._passes: dict[int, int] = {}
        self._seen: dict[int, dict[str, str]] = {}  # by loader: `written` and `fills`
        self.watched: dict[int, _WatchedData] = {}
        self.tokens = TokenCounts()

    def pass_begins(self, number: int, loader: Any) -> None:
        """A loader is about to begin a pass."""
        framework = framework_of(type(loader).__module__, called_from)
        self._facts[number] = dataclasses.replace(loader_facts(loader), framework=framework)
        self._passes[number] = self._passes.get(number, 0) + 1
        if loader.num_workers == 0 and self._passes[number] == 1:
            from flatout.feed.dataset_check import CacheGrowth, DatasetCheck

            samples = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            self.watched[number] = watch = _WatchedData(DatasetCheck(loader.dataset, loader.collate_fn))
            if isinstance(samples, int) or loader.batch_sampler is None:
                watch.growth, watch.samples = CacheGrowth(loader.dataset), samples or 1
            weakref.finalize(loader, self.watched.pop, number, None).atexit = False

    def before_batch(self, number: int) -> None:
        """A loader that is watched is about to be asked for a batch."""
        watch = self.watched.get(number)
        if watch is None:
            return
        written = watch.check.changed()
        if written:
            self._seen.setdefault(number, {})["written"] = written
        if written or watch.check.looked >= _WATCHED_FOR:
            self.watched.pop(number, None)

    def after_batch(self, number: int) -> None:
        """It has given one."""
        watch = self.watched.get(number)
        if watch is None:
            return
        watch.check.renew()  # what samples leave behind is not the loop's doing
        filled = watch.growth is not None and watch.growth.after_batch(watch.samples)
        if filled:
            self._seen.setdefault(number, {})["fills"] = filled

    def batches_ready(self, train_loaders: set[int]) -> int:
        """How many batches lay ready at the start, where workers had time to load."""
        known = [self._facts[number] for number in train_loaders if number in self._facts]
        return max((batches_ahead(facts) for facts in known), default=0)

    def kinds(self, train_loaders: set[int]) -> tuple[LoaderFacts, ...]:
        """One of those that are alike."""
        alike: dict[str, list[int]] = {}
        for number, facts in self._facts.items():
            alike.setdefault(str(facts), []).append(number)
        return tuple(self._kind(numbers, train_loaders) for numbers in alike.values())

    def _kind(self, numbers: list[int], train_loaders: set[int]) -> LoaderFacts:
        seen: Any = {}
        for number in numbers:
            seen = {**self._seen.get(number, {}), **seen}
        trains = not train_loaders.isdisjoint(numbers)
        made_anew = len(numbers) > 1 == max(self._passes[number] for number in numbers)
        tokens = next((known for number in numbers if (known := self.tokens.of(number)) is not None), None)
        return dataclasses.replace(self._facts[numbers[0]], trains=trains, made_anew=made_anew, tokens=tokens, **seen)


# -- tokens: how many a sample has, and how many are padding, in a few batches on the CPU -----------------

_AT_FIRST = 16  # batches of a loader, each of them looked at
_LATER_EVERY = 64
_MOST_TOKENS = 1 << 12  # of a batch
_LONGEST = 1 << 14  # tokens of a row: a longer one takes too long to look at
_IGNORED = -100  # the label that a loss leaves out
_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"


class TokenCounts:
    """Counts by loader, over the batches that were looked at: those with `attention_mask` or `input_ids` in them, of a
    large one only some rows. A look takes some 50 µs at the most."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._counts: dict[int, list[float]] = {}  # samples, tokens; of those where padding shows: tokens, padding
        self._off = False

    def wants(self, loader: int, batch: Any) -> bool:
        """Whether this batch is one to look at."""
        if self._off or _fields(batch) is None:
            return False
        asked = self._asked[loader] = self._asked.get(loader, 0) + 1
        return asked <= _AT_FIRST or asked % _LATER_EVERY == 0

    def look(self, loader: int, batch: Any) -> None:
        """Count what is in a batch. What goes wrong ends the counting, and nothing else."""
        try:
            self._count(loader, _fields(batch) or {})
        except Exception:
            self._off = True

    def of(self, loader: int) -> TokenFacts | None:
        """What is known of a loader's batches."""
        samples, tokens, shown, padding = self._counts.get(loader, [0.0] * 4)
        if not samples:
            return None
        return TokenFacts(a_sample=tokens / samples, padding=padding / shown if shown else None)

    def _count(self, loader: int, batch: Mapping[str, Any]) -> None:
        ids, mask, labels = (_table(batch.get(name)) for name in (_IDS, _MASK, _LABELS))
        first = next((table for table in (mask, ids, labels) if table is not None), None)
        if first is None:
            return
        counts = self._counts.setdefault(loader, [0.0] * 4)
        counts[0] += first.shape[0]
        counts[1] += first.numel()
        table = mask if mask is not None else labels
        if table is None or table.shape[1] > _LONGEST:
            return
        looked = _some_rows(table)
        if mask is not None:
            padding = looked.numel() - int(looked.count_nonzero())
        else:
            padding = _behind_the_labels(looked)
        counts[2] += first.numel()
        counts[3] += padding / looked.numel() * first.numel()


def _fields(batch: Any) -> Mapping[str, Any] | None:
    """The tensors of a batch by name, where some of them are tokens; they may be the first part of a tuple."""
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Mapping) and (_IDS in batch or _MASK in batch):
        return batch
    return None


def _table(tensor: Any) -> torch.Tensor | None:
    """A plain tensor of whole numbers with samples as rows; None of anything else, or of one that is not at hand."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    if tensor.is_nested or tensor.dim() != 2 or not tensor.numel() or tensor.is_floating_point():
        return None
    return tensor


def _some_rows(table: torch.Tensor) -> torch.Tensor:
    """Rows spread over the whole of it: a batch may be sorted by length."""
    return table[:: max(1, -(-table.numel() // _MOST_TOKENS))]


def _behind_the_labels(labels: torch.Tensor) -> int:
    """How many tokens follow the last label of a row: those without one before it may be a prompt, or words that were
    not masked. A row without any label counts as full."""
    return int((labels != _IGNORED).view(torch.uint8).flip(1).argmax(1).sum())


# -- attention written out by hand -----------------------------------------------------------------------

_SOFTMAX = ("torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax")
_SCRIPTED = ("torch.jit._script.get_jit_def", "torch.jit._recursive.get_jit_def")  # script itself counts its callers
_STEPS = 3
_MIN_LENGTH = 128  # below this the scores are small


class AttentionWatch:
    """Looks for a softmax over the last side of a square of T×T scores, and the line it is called in; `found` is the
    longest.

    It looks after the first step, for a few steps, and only where nothing is compiled: a compiler that has seen our
    wrapper would compile again when it is taken off. What goes wrong ends the looking, and nothing else.
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
        where = caller() if self.found is None or length > self.found.length else None
        if where is not None:
            self.found = WrittenAttention(where=where, length=length)
