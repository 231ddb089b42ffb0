"""What the tests of flatout check share: the machine they are judged on, and how a script is looked over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.check import Checklist, Machine, inspect
from flatout.check.checklist import Line
from flatout.check.settings import Command
from flatout.check.study import open_study
from flatout.sample.budget import Budget
from flatout.trace import GpuSample

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
GIB = 1 << 30


def budget(**changes: Any) -> Budget:
    """Sixteen cores and plenty of memory, but for the changes."""
    usual: dict[str, Any] = {
        "cores": 14, "cores_allowed": 16.0, "cores_of_machine": 16, "ranks_on_node": 1, "memory_bytes": 128 * GIB,
        "memory_available_bytes": 100 * GIB, "shm_bytes": 64 * GIB, "shm_free_bytes": 64 * GIB, "reasons": (),
    }  # fmt: skip
    return Budget(**{**usual, **changes})


def card(index: int = 0, **changes: Any) -> GpuSample:
    """An idle card."""
    usual: dict[str, Any] = {"uuid": f"GPU-{index}", "name": "NVIDIA H200", "temperature_c": 35.0, "processes": ()}
    return GpuSample(index=index, **{**usual, **changes})


def machine(**changes: Any) -> Machine:
    """One idle card on that machine."""
    return Machine(**{"budget": budget(), "gpus": (card(),), **changes})


def look_over(
    script: Path | None, *flags: str, config: Path | None = None, on: Machine | None = None, **command: Any
) -> Checklist:
    """The checklist of a script."""
    started = Command(script=script, flags=flags, where="the command line", **command) if script is not None else None
    return inspect(open_study(on or machine(), started, config))


def line(checklist: Checklist, subject: str) -> Line:
    """The one line of a subject."""
    (found,) = (line for line in checklist.lines if line.subject == subject)
    return found
