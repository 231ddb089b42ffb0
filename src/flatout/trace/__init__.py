"""The one file format: a folder a run, JSONL inside, one file a rank and one a machine. See docs/TRACE.md.

writer   a run → a folder       downsample  how it stays small
reader   a folder → a Trace
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.model.records import (
    SCHEMA,
    End,
    Facts,
    FactsRecord,
    Note,
    RunInfo,
    Span,
    Step,
    Summary,
    Window,
    WorkerReport,
    Xray,
)
from flatout.model.stats import Sketch
from flatout.trace.writer import TraceWriter, note_end

if TYPE_CHECKING:
    from flatout.model.hardware_samples import DiskSample, GpuProcess, GpuSample, HostSample, ProcessSample, Sample
    from flatout.trace.reader import RankTrace, Trace, merge, read, read_summaries

__all__ = [
    "SCHEMA",
    "DiskSample",
    "End",
    "Facts",
    "FactsRecord",
    "GpuProcess",
    "GpuSample",
    "HostSample",
    "Note",
    "ProcessSample",
    "RankTrace",
    "RunInfo",
    "Sample",
    "Sketch",
    "Span",
    "Step",
    "Summary",
    "Trace",
    "TraceWriter",
    "Window",
    "WorkerReport",
    "Xray",
    "merge",
    "note_end",
    "read",
    "read_summaries",
]


def __getattr__(name: str) -> Any:
    """What reads traces is imported when it is asked for: a training process only writes one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flatout.model import hardware_samples
    from flatout.trace import reader

    return getattr(hardware_samples if hasattr(hardware_samples, name) else reader, name)
