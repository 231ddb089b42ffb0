"""What was in force in one rank of a training: switches, loaders, optimizer, settings read, changes made.

`inside/run_facts.py` fills it in; the diagnosis and the report read it. In a trace it is one JSON object with
the same names. What was not seen is None, or empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """Tokens in the batches of a loader, as far as they were looked at."""

    a_sample: float  # the padding counted
    padding: float | None = None  # share of them


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """The settings of a DataLoader as they were in force."""

    dataset: str  # with its module
    length: int | None = None  # samples
    iterable: bool | None = None
    batch_size: int | None = None
    batches: int | None = None
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    drop_last: bool | None = None
    sampler: str | None = None  # with its module; without it in traces of before
    batch_sampler: str | None = None
    collate: str | None = None
    start_method: str | None = None
    elastic: bool | None = None  # it is flatout's
    framework: str | None = None  # whose loop reads from it: transformers, accelerate, lightning
    trains: bool | None = None  # training takes its batches from it
    made_anew: bool | None = None  # there are several alike, and each has had one pass
    written: str | None = None  # what the loop wrote to in its dataset between two batches
    fills: str | None = None  # what samples fill in its dataset
    tokens: TokenFacts | None = None  # where its batches have any


def length_of(sized: Any) -> int | None:
    """How many samples a dataset says it has, or batches a loader."""
    try:
        return len(sized)
    except Exception:  # a person's own code: a sampler that has no length may say so in any way
        return None


NO_LOADER = LoaderFacts(dataset="")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRead:
    """Settings the script read together: from its command line, YAML or JSON, a Python config module."""

    source: str  # argparse, yaml, json, python
    file: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of argparse: the option that sets each value


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedChange:
    """What became of one change of the plan: made, and how and where; or not, and why."""

    name: str
    value: Any = None
    applied: bool
    how: str = ""
    where: str | None = None  # file:line
    also: tuple[str, ...] = ()  # other places


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientExchange:
    """How long ranks took to exchange gradients: while backward computed, and after it."""

    waited_ms: float
    hidden_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelFacts:
    """How the model was wrapped for several GPUs or ranks."""

    data_parallel: int | None = None  # GPUs of an nn.DataParallel
    find_unused_parameters: bool | None = None  # of DistributedDataParallel
    unused_parameters: bool | None = None  # whether it has found any


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAttention:
    """Attention written out by hand: where its softmax is called, over how many tokens."""

    where: str  # file:line
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """How the ranks of a training talk to each other."""

    backend: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCost:
    """What measuring took of each step."""

    us_per_step: float | None = None
    measuring_us: float | None = None
    writing_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The optimizer and what it trains."""

    optimizer: str | None = None
    optimizer_fused: bool | None = None
    optimizer_foreach: bool | None = None
    learning_rate: float | None = None
    parameters: int | None = None
    parameter_dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    channels_last: bool | None = None  # None: no convolutions that could tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(OptimizerFacts):
    """Everything that was in force, as it was at the end of the run."""

    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    matmul_precision: str | None = None
    tf32_convolutions: bool | None = None
    tf32_matmul: bool | None = None
    autocast: tuple[str, ...] = ()  # the dtypes of the forward passes; "None" is without autocast
    compiled: bool | None = None
    compile_s: float | None = None
    threads: int | None = None
    pillow: bool | None = None
    cores_allowed: float | None = None
    core_numbers: tuple[int, ...] = ()  # of those that the affinity mask allows, where it leaves some out
    versions: dict[str, str] | None = None
    distributed: ProcessGroup | None = None
    gpu: str | None = None
    gpus_visible: int | None = None
    gpu_index: int | None = None
    gpu_uuid: str | None = None
    memory_peak_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_retries: int | None = None
    cuda: str | None = None
    loaders: tuple[LoaderFacts, ...] = ()
    loaders_side_by_side: int | None = None  # read in turn for one step
    gradient_exchange: GradientExchange | None = None
    parallel: ParallelFacts | None = None
    attention: WrittenAttention | None = None
    settings: tuple[SettingsRead, ...] = ()
    own_cost: OwnCost | None = None
    changes: tuple[AppliedChange, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether training ran on a GPU."""
        return bool(self.gpu)

    @property
    def training_loader(self) -> LoaderFacts:
        """The loader training reads from, the one with the most samples; NO_LOADER if none was seen."""
        known = [loader for loader in self.loaders if loader.trains] or self.loaders
        return max(known, key=lambda loader: loader.length or 0, default=NO_LOADER)
