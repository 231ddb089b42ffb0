"""Runs built by hand, whose figures are known, for the tests of what is made of them."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from flatout.model.causes import Finding
from flatout.model.hardware_samples import DiskSample
from flatout.model.records import Frame, Stacks, StackTime
from flatout.model.stats import Sketch
from flatout.report import run_of
from flatout.report.account import RecordedRun
from flatout.trace import (
    Facts,
    GpuSample,
    HostSample,
    Note,
    RankTrace,
    RunInfo,
    Sample,
    Span,
    Step,
    Trace,
    Window,
    WorkerReport,
    Xray,
)
from flatout.trace.downsample import window_of
from flatout.trace.reader import from_json

BATCH = 32
DATASET = "Photos"


def printed(show: Callable[[Console], None], width: int = 80) -> str:
    """What is shown in a terminal of this width; no line is wider than that, or ends with a space."""
    file = io.StringIO()
    show(Console(file=file, width=width, highlight=False))
    lines = file.getvalue().splitlines()
    assert not [line for line in lines if line.endswith(" ")]
    assert not [line for line in lines if len(line) > width and "flatout run --plan" not in line]  # to be copied
    return file.getvalue()


def recorded(trace: Trace) -> RecordedRun:
    """The run in a trace."""
    return run_of(trace, "runs/one")


def looks(phase: str, where: str, function: str, called: str, source: str, **worker: Any) -> Stacks:
    """Eighty looks at one line, and twenty at the line after it."""
    file, _, number = where.partition(":")
    frames = (
        Frame(where="train.py:99", function="main", own=True, source="main()"),
        Frame(where=where, function=function, own=True, source=source),
        Frame(where=called, function=called.rpartition("/")[2].partition(".")[0]),
        Frame(where=f"{file}:{int(number) + 1}", function=function, own=True, source="return total"),
    )
    stacks = (
        StackTime(phase=phase, frames=(0, 1, 2), seconds=0.8, looks=80),
        StackTime(phase=phase, frames=(0, 3), seconds=0.2, looks=20),
    )
    return Stacks(time_s=110.0, pid=worker.get("worker") or 1, frames=frames, stacks=stacks, **worker)


def report_of(trace: Trace, *findings: Finding) -> RecordedRun:
    """The report of a trace with these findings."""
    return dataclasses.replace(recorded(trace), findings=findings)


def step(index: int, wall_ms: float = 100.0, *, gpu: bool = True, loss: float | None = None, **more: Any) -> Step:
    """A step of which 60% is waiting for data, a tenth .item(), and the rest work; the GPU idles in the wait."""
    lengths = (("data", 0.6), ("copy", 0.05), ("forward", 0.1), ("backward", 0.1), ("sync", 0.1), ("optimizer", 0.05))
    spans, at_ms = [], 0.0
    for name, share in lengths:
        length = share * wall_ms
        idle = 0.9 * length if name == "data" else None
        busy = length if name not in ("data", "sync") else None
        spans.append(
            Span(
                name=name,
                start_ms=at_ms,
                host_ms=length,
                gpu_idle_ms=idle if gpu else None,
                gpu_busy_ms=busy if gpu else None,
                where="train.py:42" if name == "sync" else None,
            )
        )
        at_ms += length
    given: dict[str, Any] = {"start_s": 10 + index * 0.1, "samples": BATCH, "spans": tuple(spans), "loss": loss}
    return Step(index=index, wall_ms=wall_ms, **(given | more))


def steps_of(times_ms: Sequence[float], **more: Any) -> tuple[Step, ...]:
    """One step for each time."""
    return tuple(step(index, wall_ms, **more) for index, wall_ms in enumerate(times_ms))


def rank_of(steps: Sequence[Step], *, rank: int = 0, **more: Any) -> RankTrace:
    """A rank that kept all of its steps."""
    training = [one for one in steps if one.kind == "train"]
    windows: tuple[Window, ...] = (window_of(training),) if training else ()
    info = RunInfo(name="train", command=("python", "train.py"), host="box", rank=rank, started_unix_s=1.7e9)
    return RankTrace(info=info, steps=tuple(steps), **({"windows": windows, "facts": facts()} | more))


def facts(**changes: Any) -> Facts:
    """What was in force."""
    loader = {"dataset": "__main__.Photos", "length": 1000, "batch_size": BATCH, "num_workers": 0}
    known: dict[str, Any] = {
        "optimizer": "AdamW",
        "parameters": 1_000_000,
        "gpu": "NVIDIA H200",
        "gpu_index": 0,
        "own_cost": {"us_per_step": 50.0},
        "loaders": [loader | changes.pop("loader", {})],
        "settings": [
            {"source": "argparse", "values": {"num_workers": 0}, "options": {"num_workers": "--workers"}},
        ],
    }
    return from_json(Facts, known | changes)


def trace_of(*ranks: RankTrace, samples: Sequence[Sample] = (), notes: Sequence[Note] = ()) -> Trace:
    """A run of these ranks on one machine."""
    return Trace(ranks=ranks, samples={"box": tuple(samples)} if samples else {}, notes=tuple(notes))


def whole_run() -> Trace:
    """A run that has everything a report can show."""
    evaluated = (Span(name="evaluation", start_ms=0.0, host_ms=800.0), Span(name="rest", start_ms=800, host_ms=100.0))
    steps = [
        step(-1, 2000.0, kind="setup", start_s=7.0, spans=()),
        *steps_of([100.0 + index % 7 for index in range(60)]),
        step(60, 900.0, start_s=16.0, spans=evaluated),
        step(61, 130.0, kind="xray", start_s=17.0),
    ]
    steps = [dataclasses.replace(one, loss=2.0 / (1 + max(0, one.index))) for one in steps]
    return trace_of(
        rank_of(
            steps,
            xray=xray(),
            workers=tuple(worker(n) for n in range(4)),
            stacks=(
                looks(
                    "samples", "data.py:20", "Photos.decode", "PIL/Image.py:7", "im = <b>open</b>(f)", dataset="Photos"
                ),
            ),
        ),
        samples=[sample(7.0 + n) for n in range(12)],
        notes=[Note(time_s=8.0, text="the <b>disk</b> was full")],
    )


def xray() -> Xray:
    """Eight steps in which the GPU was busy for a fifth of the time."""
    return Xray(
        steps=8,
        wall_ms=800.0,
        busy_ms=160.0,
        busy_by_phase_ms={"forward": 60.0, "backward": 100.0},
        idle_by_phase_ms={"data": 640.0},
        kernels=800,
        kernel_us=Sketch.of([10.0] * 800),
        matrix_ms=100.0,
        tensor_core_ms=25.0,
        copies_ms={"HtoD Pageable": 8.0},
        top_ms={"void gemm<float>(int)": 80.0, "relu": 20.0},
    )


def worker(number: int | None) -> WorkerReport:
    """Ten seconds of a worker: four computing, one waiting for a core, one blocked, one collating."""
    return WorkerReport(
        time_s=20.0,
        pid=100 + (number or 0),
        born_s=10.0,
        dataset="Photos",
        worker=number,
        batches=10,
        samples=320,
        sample_wall_s=6.0,
        sample_cpu_s=4.0,
        run_delay_s=1.0,
        collate_s=1.0,
        sample_ms=Sketch.of([10.0] * 320),
        slowest=((250.0, 4711),),
        transforms_s={"Rotate": 3.2},
        random_used=("random",),
    )


def sample(time_s: float, **gpu: Any) -> Sample:
    """One second of the machine."""
    given: dict[str, Any] = {"sm_active_pct": 20.0, "gpu_util_pct": 80.0, "power_w": 250.0, "power_limit_w": 700.0}
    return Sample(
        time_s=time_s,
        interval_s=1.0,
        host=HostSample(
            cpu_pct=40.0, iowait_pct=1.0, disks=(DiskSample(name="vda", read_bytes_s=5e6, write_bytes_s=0.0),)
        ),
        gpus=(GpuSample(index=0, uuid="GPU-0", name="NVIDIA H200", **(given | gpu)),),
    )
