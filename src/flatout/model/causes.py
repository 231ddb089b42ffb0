"""The causes flatout can name: one `CauseSpec` each; and a Finding, which is a cause seen in a run.

Their codes are public: JSON, docs and tests use them. The rules in diagnose/ find them,
docs/TROUBLESHOOTING.md has an entry for each, in this order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CauseSpec:
    """One reason why the GPU loses time. `changes`: the names of those that cure it, the usual one first."""

    code: str
    because: str  # ends the sentence "the GPU loses time because …"
    changes: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """Where its entry is in docs/TROUBLESHOOTING.md."""
        return "#" + self.code.replace(".", "")


CAUSES = (
    CauseSpec(
        "data.main-thread", "samples are loaded in the training process (`num_workers=0`)", ("num_workers", "loader")
    ),
    CauseSpec("data.too-few-workers", "every worker is busy and cores are free", ("num_workers", "loader")),
    CauseSpec(
        "data.too-many-workers",
        "workers and their threads outnumber the cores and slow each other down",
        ("num_workers", "worker_threads", "loader"),
    ),
    CauseSpec(
        "data.cpu-bound", "every core this process may use is busy with decoding or transforms", ("gpu_transforms",)
    ),
    CauseSpec("data.disk-bound", "workers wait for storage"),
    CauseSpec(
        "data.slow-samples", "a few samples take far longer than the rest and hold their batches back", ("loader",)
    ),
    CauseSpec("data.collate-bound", "joining samples and moving them between processes is the cost", ("loader",)),
    CauseSpec("data.few-shards", "a stream has fewer shards than workers, so some of them stand idle"),
    CauseSpec("data.worker-start", "workers are started again every epoch", ("persistent_workers", "loader")),
    CauseSpec("copy.pageable", "batches are copied from memory that is not page-locked", ("pin_memory",)),
    CauseSpec("copy.blocking", "copies to the GPU do not overlap with compute", ("device_prefetch",)),
    CauseSpec("copy.fragmented", "a batch is copied in many small pieces"),
    CauseSpec(
        "sync.item", "`.item()`, `.cpu()` or `print()` of a GPU tensor makes the host wait in the middle of a step"
    ),
    CauseSpec("host.python", "the loop's own Python code runs while the GPU waits"),
    CauseSpec(
        "launch.bound",
        "kernels are so small that the host cannot launch them as fast as the GPU ends them",
        ("batch_size", "compile"),
    ),
    CauseSpec("compute.precision", "matrix work runs in fp32 where TF32 or bf16 would do", ("precision",)),
    CauseSpec("compute.layout", "convolutions run in NCHW where channels_last would do", ("channels_last",)),
    CauseSpec("compute.optimizer", "the optimizer step is a loop of small kernels", ("fused_optimizer",)),
    CauseSpec("compute.eager", "elementwise kernels run one by one that `torch.compile` would join", ("compile",)),
    CauseSpec("compute.padding", "much of what is computed is padding, and is thrown away"),
    CauseSpec("compute.attention", "attention is written out by hand, with all its scores in memory"),
    CauseSpec("compute.saturated", "nothing is wrong: the GPU is busy with useful work"),
    CauseSpec("pause.eval", "training stands still for evaluation", ("eval_interval",)),
    CauseSpec("pause.checkpoint", "training stands still for checkpoints", ("checkpoint_interval",)),
    CauseSpec("pause.logging", "training stands still for logging"),
    CauseSpec("pause.gc", "training stands still for Python's garbage collector", ("gc_freeze",)),
    CauseSpec(
        "memory.underused", "the batch uses a small part of the GPU, and a larger one would be faster", ("batch_size",)
    ),
    CauseSpec("memory.pressure", "the GPU's memory is full, and PyTorch's allocator has to make room", ("batch_size",)),
    CauseSpec("memory.checkpointing", "activations are computed twice, and there is memory to keep them"),
    CauseSpec("memory.host", "the host runs out of memory or /dev/shm, swaps or kills workers", ("num_workers",)),
    CauseSpec("hardware.throttled", "heat or the power supply holds the GPU's clocks down"),
    CauseSpec("hardware.shared", "another process uses the GPU or the cores"),
    CauseSpec("hardware.idle-gpus", "visible GPUs are unused", ("ranks",)),
    CauseSpec("dist.straggler", "all ranks wait for one"),
    CauseSpec("dist.comm", "ranks wait for the network"),
    CauseSpec("dist.scaling", "ranks wait for each other in turn"),
    CauseSpec("dist.data-parallel", "`nn.DataParallel` drives several GPUs from one process"),
    CauseSpec("dist.unused-parameters", "`DistributedDataParallel` looks for unused parameters, and there are none"),
    CauseSpec("drift.slower", "steps grow longer over the run"),
    CauseSpec("config.ignored", "a setting the user made has no effect"),
)
CODES = tuple(cause.code for cause in CAUSES)
BY_CODE = {cause.code: cause for cause in CAUSES}


def cured_by(change: str) -> tuple[CauseSpec, ...]:
    """The causes that a change cures."""
    return tuple(cause for cause in CAUSES if change in cause.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause in one run. Gains are factors of speed (1.0: none), as a range; `derived` says how
    they were found.

    The range begins below 1 where fixing this alone may cost, and pays together with another.
    """

    code: str
    title: str  # one sentence: what is wrong, with the number that shows it
    share: float  # of the wall time, 0 to 1
    gain_low: float = 1.0
    gain_high: float = 1.0
    derived: str  # "measured ceiling", "model": never a bare rule of thumb
    confidence: float  # 0 to 1
    evidence: dict[str, Any] = field(default_factory=dict)
    change: str | None = None  # the name of a change, such as num_workers
    value: Any = None  # and its value
    advice: str = ""  # what a person should do, in words
    where: str | None = None  # file:line

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code
        assert 0.0 < self.gain_low <= self.gain_high, (self.code, self.gain_low, self.gain_high)
        assert self.gain_high >= 1.0, (self.code, self.gain_high)
