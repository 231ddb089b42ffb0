"""The causes flatout can name: one `CauseSpec` each. Their codes are public: JSON, docs and tests use them.

The rules in diagnose/ find them, docs/TROUBLESHOOTING.md has an entry for each, in this order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseSpec:
    """One reason why the GPU loses time. `changes` are the names of those that cure it, the usual one first."""

    code: str
    because: str  # ends the sentence "the GPU loses time because …"
    changes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()  # subjects of the script's own settings that cure it (see setting_aliases)

    @property
    def anchor(self) -> str:
        """Where its entry is in docs/TROUBLESHOOTING.md."""
        return "#" + self.code.replace(".", "")


CAUSES = (
    CauseSpec(
        code="data.main-thread",
        because="samples are loaded in the training process (`num_workers=0`)",
        changes=("num_workers", "loader"),
    ),
    CauseSpec(
        code="data.too-few-workers",
        because="every worker is busy and cores are free",
        changes=("num_workers", "loader"),
    ),
    CauseSpec(
        code="data.too-many-workers",
        because="workers and their threads outnumber the cores and slow each other down",
        changes=("num_workers", "worker_threads", "loader"),
        settings=("threads",),
    ),
    CauseSpec(
        code="data.cpu-bound",
        because="every core this process may use is busy with decoding or transforms",
        changes=("gpu_transforms",),
        settings=("augment_on",),
    ),
    CauseSpec(code="data.disk-bound", because="workers wait for storage"),
    CauseSpec(
        code="data.slow-samples",
        because="a few samples take far longer than the rest and hold their batches back",
        changes=("loader",),
    ),
    CauseSpec(
        code="data.collate-bound",
        because="joining samples and moving them between processes is the cost",
        changes=("loader",),
    ),
    CauseSpec(
        code="data.worker-start",
        because="workers are started again every epoch",
        changes=("persistent_workers", "loader"),
    ),
    CauseSpec(
        code="copy.pageable",
        because="batches are copied from memory that is not page-locked",
        changes=("pin_memory",),
    ),
    CauseSpec(
        code="copy.blocking",
        because="copies to the GPU do not overlap with compute",
        changes=("device_prefetch",),
    ),
    CauseSpec(code="copy.fragmented", because="a batch is copied in many small pieces"),
    CauseSpec(
        code="sync.item",
        because="`.item()`, `.cpu()` or `print()` of a GPU tensor makes the host wait in the middle of a step",
    ),
    CauseSpec(
        code="launch.bound",
        because="kernels are so small that the host cannot launch them as fast as the GPU ends them",
        changes=("batch_size", "compile"),
    ),
    CauseSpec(
        code="compute.precision",
        because="matrix work runs in fp32 where TF32 or bf16 would do",
        changes=("precision",),
    ),
    CauseSpec(
        code="compute.layout",
        because="convolutions run in NCHW where channels_last would do",
        changes=("channels_last",),
    ),
    CauseSpec(
        code="compute.optimizer",
        because="the optimizer step is a loop of small kernels",
        changes=("fused_optimizer",),
    ),
    CauseSpec(
        code="compute.eager",
        because="elementwise kernels run one by one that `torch.compile` would join",
        changes=("compile",),
    ),
    CauseSpec(code="compute.saturated", because="nothing is wrong: the GPU is busy with useful work"),
    CauseSpec(code="pause.eval", because="training stands still for evaluation", changes=("eval_interval",)),
    CauseSpec(
        code="pause.checkpoint",
        because="training stands still for checkpoints",
        changes=("checkpoint_interval",),
    ),
    CauseSpec(code="pause.logging", because="training stands still for logging"),
    CauseSpec(
        code="pause.gc",
        because="training stands still for Python's garbage collector",
        changes=("gc_freeze",),
    ),
    CauseSpec(
        code="memory.underused",
        because="the batch uses a small part of the GPU, and a larger one would be faster",
        changes=("batch_size",),
    ),
    CauseSpec(
        code="memory.pressure",
        because="the GPU's memory is full, and PyTorch's allocator has to make room",
        changes=("batch_size",),
    ),
    CauseSpec(
        code="memory.host",
        because="the host runs out of memory or /dev/shm, swaps or kills workers",
        changes=("num_workers",),
    ),
    CauseSpec(code="hardware.throttled", because="heat or the power supply holds the GPU's clocks down"),
    CauseSpec(code="hardware.shared", because="another process uses the GPU or the cores"),
    CauseSpec(code="hardware.idle-gpus", because="visible GPUs are unused", changes=("ranks",)),
    CauseSpec(code="dist.straggler", because="all ranks wait for one"),
    CauseSpec(code="dist.comm", because="ranks wait for the network"),
    CauseSpec(code="config.ignored", because="a setting the user made has no effect"),
)
CODES = tuple(cause.code for cause in CAUSES)
BY_CODE = {cause.code: cause for cause in CAUSES}


def cured_by(change: str) -> tuple[CauseSpec, ...]:
    """The causes that a change cures."""
    return tuple(cause for cause in CAUSES if change in cause.changes)
