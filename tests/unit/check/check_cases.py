"""What the tests of flatout check share: the machine they are judged on, and how a script is looked over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.check import Checklist, Line, Training, look_over
from flatout.sample.budget import Budget
from flatout.trace import GpuSample

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
GIB = 1 << 30


def make_budget(**changes: Any) -> Budget:
    """Sixteen cores and plenty of memory, but for the changes."""
    usual: dict[str, Any] = {
        "cores": 14, "cores_allowed": 16.0, "cores_of_machine": 16, "ranks_on_node": 1, "memory_bytes": 128 * GIB,
        "memory_available_bytes": 100 * GIB, "shm_bytes": 64 * GIB, "shm_free_bytes": 64 * GIB, "reasons": (),
    }  # fmt: skip
    return Budget(**{**usual, **changes})


def make_gpu(index: int = 0) -> GpuSample:
    """An idle GPU."""
    return GpuSample(index=index, uuid=f"GPU-{index}", name="NVIDIA H200")


def check_script(
    script: Path | None,
    *flags: str,
    config: Path | None = None,
    budget: Budget | None = None,
    gpus: tuple[GpuSample, ...] | None = (make_gpu(),),
) -> Checklist:
    """The checklist of a script."""
    return look_over(Training(budget or make_budget(), gpus, script, flags, config))


def line_of(checklist: Checklist, subject: str) -> Line:
    """The one line of a subject."""
    (found,) = (line for line in checklist.lines if line.subject == subject)
    return found
