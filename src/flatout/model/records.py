"""What a trace is made of: plain values, and how they become JSON (`trace/reader.py` reads them back).

Units are in the names. What was not measured is None and is not written. A number that is not finite counts
as not measured; an empty tuple counts as measured ("no throttling" is not "throttling unknown").
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from flatout.model.stats import Sketch

if TYPE_CHECKING:
    from flatout.model.hardware_samples import Sample

SCHEMA = 1
SPANS_A_STEP = 64  # one by one; more of them are summed up by name
_MS_DIGITS = 5  # of a span: a hundredth of a microsecond


# What was in force: inside/run_facts.py fills it in


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

    @property
    def class_name(self) -> str:
        """The dataset's class, as workers report it."""
        return self.dataset.rpartition(".")[2]

    @property
    def ready_made(self) -> bool:
        """Whether the dataset hands out whole batches (`batch_size=None`), and no batch sampler says
        what is in one."""
        return self.batch_size is None and self.batch_sampler in (None, "builtins.NoneType")


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
class Facts:
    """Everything that was in force, as it was at the end of the run: the optimizer and what it trains
    first."""

    optimizer: str | None = None
    optimizer_fused: bool | None = None
    optimizer_foreach: bool | None = None
    learning_rate: float | None = None
    parameters: int | None = None
    parameter_dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    channels_last: bool | None = None  # None: no convolutions that could tell
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
    step_flops: int | None = None  # of the model, forward and backward
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


# What happened


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Who wrote a file of the trace: one rank of a training, or the hardware sampler of one machine."""

    name: str
    command: tuple[str, ...] = ()
    host: str = ""
    rank: int | None = None
    world_size: int = 1
    pid: int = 0
    started_unix_s: float = 0.0
    started_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)  # made in the training thread: frozen ones take three times as long
class Span:
    """One stretch of a step: what the host did, and what the GPU did meanwhile.

    Where nothing is launched the GPU's time is idleness (`gpu_idle_ms`). Where kernels are launched it is
    their work and the gaps between them (`gpu_busy_ms`); the X-ray tells the two apart.
    """

    name: str
    start_ms: float
    host_ms: float
    gpu_idle_ms: float | None = None
    gpu_busy_ms: float | None = None
    where: str | None = None


@dataclass(slots=True, kw_only=True)  # not frozen for the same reason
class Step:
    """One optimizer step, from the end of the one before to its own end."""

    index: int
    start_s: float
    wall_ms: float
    spans: tuple[Span, ...] = ()
    samples: int | None = None
    loss: float | None = None
    micro_steps: int = 1
    kind: str = "train"

    @property
    def has_events(self) -> bool:
        """Whether CUDA events timed the GPU in it."""
        return any(span.gpu_idle_ms is not None or span.gpu_busy_ms is not None for span in self.spans)


@dataclass(slots=True, kw_only=True)  # steps are added to it
class Window:
    """Many steps in one record: a sketch of their wall times, and of their spans by name.

    The GPU's milliseconds are sums over the `gpu_steps` of them that carried events.
    """

    first_index: int
    last_index: int
    start_s: float
    wall_ms: Sketch
    spans_ms: dict[str, Sketch] = field(default_factory=dict)
    gpu_steps: int = 0
    gpu_idle_ms: dict[str, float] = field(default_factory=dict)
    gpu_busy_ms: dict[str, float] = field(default_factory=dict)
    samples: int | None = None
    loss: Sketch = field(default_factory=Sketch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something a person should know about the run."""

    time_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsRecord:
    """What was in force in a rank. The last one counts."""

    time_s: float
    values: Facts = field(default_factory=Facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Xray:
    """A few steps kernel by kernel. Idle time is by what the host was doing, busy time by who launched it."""

    steps: int
    wall_ms: float
    busy_ms: float
    busy_by_phase_ms: dict[str, float] = field(default_factory=dict)
    idle_by_phase_ms: dict[str, float] = field(default_factory=dict)
    launched_late_ms: float = 0.0
    kernels: int = 0
    kernel_us: Sketch = field(default_factory=Sketch)
    matrix_ms: float = 0.0
    tensor_core_ms: float = 0.0
    collective_ms: float = 0.0
    copies_ms: dict[str, float] = field(default_factory=dict)
    top_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What one loader worker has done so far (totals since its start; the last report counts)."""

    time_s: float
    pid: int
    born_s: float
    dataset: str
    length: int | None = None
    worker: int | None = None  # None: the training process itself (num_workers=0)
    batches: int = 0
    samples: int = 0
    sample_wall_s: float = 0.0
    sample_cpu_s: float = 0.0
    run_delay_s: float | None = None
    collate_s: float = 0.0
    waiting_s: float = 0.0
    sample_ms: Sketch = field(default_factory=Sketch)
    slowest: tuple[tuple[float, float], ...] = ()
    transforms_s: dict[str, float] = field(default_factory=dict)
    random_used: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How it ended. In a rank's file: it closed its recording, because of an `error` (its type) that nobody
    caught if there was one; a process that was killed has no such record. In a machine's: the command's
    `exit_code`.
    """

    time_s: float
    exit_code: int | None = None
    error: str | None = None
    where: str | None = None


@dataclass(slots=True, kw_only=True)  # the writer counts in it
class Summary:
    """Totals of one file's training steps, small enough to read a thousand of them."""

    info: RunInfo
    wall_ms: Sketch = field(default_factory=Sketch)
    spans_ms: dict[str, Sketch] = field(default_factory=dict)
    samples: int | None = None
    dropped: int = 0
    ended: bool = False


# Files of torch that only stand around its functions: `zero_grad` was called, not `inner`. Stacks
# leave them out.
WRAPPED_CALL = "flatout_call"  # a frame of ours that bears a line of the user's, for PyTorch's warnings
DECORATORS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/utils/_contextlib.py")
# Where a loader worker begins; what lies outside is the training process that was forked.
WORKER_BEGINS = ("torch/utils/data/_utils/worker.py", "flatout/feed/worker.py")


def function_name(qualified: str) -> str:
    """The name of a function as stacks have it; a comprehension has that of the function around it."""
    parts = [part for part in qualified.split(".") if part != "<locals>"]
    while len(parts) > 1 and parts[-1].startswith("<"):
        parts.pop()
    return ".".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a stack. `own`: it is the user's, not a library's; only such a line has its `source`."""

    where: str
    function: str
    own: bool = False
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTime:
    """How long one stack was seen in one phase: `frames` by number, outermost first."""

    phase: str
    frames: tuple[int, ...]
    seconds: float
    looks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Where a process has spent its time so far, by line: the training thread, or a worker that loads
    `dataset`."""

    time_s: float
    pid: int
    frames: tuple[Frame, ...]
    stacks: tuple[StackTime, ...]
    passed_s: dict[str, float] = field(default_factory=dict)  # forward passes in checkpoint, in data parallel
    dataset: str | None = None
    worker: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCount:
    """How often one stack was seen: `frames` by number, outermost first."""

    frames: tuple[int, ...]
    looks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactLines:
    """Where a rank's main thread was, or those of its loader workers together, as py-spy saw it from outside.

    Its lines are exact, but it knows no phases, and only by its path whose a file is: Stacks know both.
    """

    time_s: float
    in_workers: bool
    frames: tuple[Frame, ...]
    stacks: tuple[StackCount, ...]


Record: TypeAlias = (
    "RunInfo | Step | Window | Note | Sample | Summary | FactsRecord | Xray | WorkerReport | Stacks | ExactLines | End"
)
_KINDS = {
    "RunInfo": "run",
    "Step": "step",
    "Window": "window",
    "Note": "note",
    "Sample": "sample",
    "Summary": "summary",
    "FactsRecord": "facts",
    "Xray": "xray",
    "WorkerReport": "worker",
    "Stacks": "stacks",
    "ExactLines": "exact lines",
    "End": "end",
}


def kind_of(record: type[Any]) -> str:
    """What records of a class are called in a trace."""
    return _KINDS[record.__name__]


def encode(record: Record) -> dict[str, Any]:
    """A record as JSON-ready data, tagged with its kind; what opens a file carries the schema version too."""
    data = {"record": kind_of(type(record)), **to_json(record)}
    if isinstance(record, RunInfo | Summary):
        data["schema"] = SCHEMA
    return data


def to_json(value: Any) -> Any:
    """Any value as JSON-ready data: None left out, floats cut, what JSON does not know in words."""
    if isinstance(value, float):
        return _shortened(value)
    if value is None or isinstance(value, str | int):
        return value
    if type(value) is Span:
        return _span_to_json(value)
    if isinstance(value, Sketch):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields_to_json(value)
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    return _shortened(float(value)) if isinstance(value, numbers.Real) else str(value)


def _fields_to_json(record: Any) -> dict[str, Any]:
    data = {}
    for known in dataclasses.fields(record):
        plain = to_json(getattr(record, known.name))
        if plain is not None and not (plain == [] and known.default == ()):
            data[known.name] = plain
    return data


def _span_to_json(span: Span) -> dict[str, Any]:
    """Without reflection: a dozen spans are written with each step, while training needs the interpreter."""
    data: dict[str, Any] = {
        "name": span.name,
        "start_ms": round(span.start_ms, _MS_DIGITS),
        "host_ms": round(span.host_ms, _MS_DIGITS),
    }
    if span.gpu_idle_ms is not None:
        data["gpu_idle_ms"] = round(span.gpu_idle_ms, _MS_DIGITS)
    if span.gpu_busy_ms is not None:
        data["gpu_busy_ms"] = round(span.gpu_busy_ms, _MS_DIGITS)
    if span.where is not None:
        data["where"] = span.where
    return data


def _shortened(value: float) -> float | None:
    """Six digits behind the point; for small numbers, six that count: a loss of 1e-7 is not 0."""
    if not math.isfinite(value):
        return None
    return round(value, 6) if abs(value) >= 1 else float(f"{value:.6g}")
