"""Traces built by hand: a healthy run on a GPU, and changes to it."""

from __future__ import annotations

from typing import Any

from flatout.trace import (
    Facts,
    GpuSample,
    HostSample,
    RankTrace,
    RunInfo,
    Sample,
    Sketch,
    Span,
    Step,
    Trace,
    WorkerReport,
    Xray,
)
from flatout.trace.downsample import window_of
from flatout.trace.reader import from_json

CORES = 16
STEPS = 60

# (phase, host ms, GPU idle ms, GPU busy ms): a step of 20 ms in which the host runs far ahead of the GPU
HEALTHY = (
    ("data", 0.1, 0.0, None),
    ("copy", 0.2, None, 0.2),
    ("forward", 2.0, None, 6.0),
    ("loss", 0.2, None, 0.1),
    ("backward", 15.5, None, 12.7),
    ("optimizer", 2.0, None, 1.0),
)
LOADER = {
    "dataset": "train.Photos",
    "length": 10_000,
    "batch_size": 64,
    "num_workers": 8,
    "persistent_workers": True,
    "pin_memory": True,
    "start_method": "fork",
}
FACTS = {
    "gpu": "NVIDIA H200",
    "gpu_index": 0,
    "gpus_visible": 1,
    "devices": ["cuda:0"],
    "optimizer": "AdamW",
    "optimizer_fused": True,
    "parameter_dtypes": ["float32"],
    "autocast": ["bfloat16"],
    "channels_last": True,
    "compiled": True,
    "memory_reserved_bytes": 100 << 30,
    "settings": [],
}


def steps(*phases: tuple[str, float, float | None, float | None], where: str | None = None) -> tuple[Step, ...]:
    """Sixty steps of these phases, each carrying events."""
    made = []
    for index in range(STEPS):
        spans, at = [], 0.0
        for name, host, idle, busy in phases:
            line = where if name == "sync" else None
            spans.append(Span(name=name, start_ms=at, host_ms=host, gpu_idle_ms=idle, gpu_busy_ms=busy, where=line))
            at += host
        made.append(Step(index=index, start_s=100 + index * at / 1e3, wall_ms=at, spans=tuple(spans), samples=64))
    return tuple(made)


def workers(
    count: int, *, sample_ms: float, busy: float = 0.5, on_core: float = 0.98, delay: float = 0.02, **more: Any
):
    """The last reports of `count` workers that were busy for a share of ten seconds."""
    per = int(10 * busy / (sample_ms / 1e3))
    times = more.pop("times", None) or Sketch.of([sample_ms] * per)
    return tuple(
        WorkerReport(
            time_s=110.0,
            born_s=100.0,
            pid=1000 + n,
            dataset="Photos",
            length=10_000,
            worker=n if count > 1 or more.get("worker") else None,
            batches=per // 64,
            samples=per,
            sample_wall_s=10 * busy,
            sample_cpu_s=10 * busy * on_core,
            run_delay_s=10 * busy * delay,
            waiting_s=10 * (1 - busy),
            collate_s=more.get("collate_s", 0.0),
            sample_ms=times,
            slowest=more.get("slowest", ()),
        )
        for n in range(count)
    )


def xray(**changes: Any) -> Xray:
    """Eight steps of a busy GPU."""
    figures: dict[str, Any] = {
        "steps": 8,
        "wall_ms": 160.0,
        "busy_ms": 156.0,
        "busy_by_phase_ms": {"forward": 48.0, "backward": 100.0, "optimizer": 6.0},
        "idle_by_phase_ms": {"data": 0.5, "rest": 1.0},
        "kernels": 1600,
        "kernel_us": Sketch.of([90.0] * 100),
        "matrix_ms": 110.0,
        "tensor_core_ms": 108.0,
        "copies_ms": {"HtoD Pinned": 1.0},
        "top_ms": {"nvjet_hsh_128x128": 110.0},
    }
    return Xray(**figures | changes)


def hardware(cpu_pct: float = 40.0, *, sm: float = 85.0, io_pct: float = 0.0, **gpu: Any) -> tuple[Sample, ...]:
    """A sample a second beside the steps."""
    gpu = {"memory_total_bytes": 140 << 30, "sm_clock_max_mhz": 1980.0, "sm_clock_mhz": 1980.0, "throttle": ()} | gpu
    return tuple(
        Sample(
            time_s=100.5 + t,
            interval_s=1.0,
            host=HostSample(cpu_pct=cpu_pct, cores_pct=(cpu_pct,) * CORES, pressure_io_pct=io_pct, iowait_pct=io_pct),
            gpus=(GpuSample(index=0, uuid="GPU-0", name="NVIDIA H200", sm_active_pct=sm, **gpu),),
        )
        for t in range(5)
    )


def trace(
    *phases: tuple[str, float, float | None, float | None],
    facts: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    samples: tuple[Sample, ...] | None = None,
    where: str | None = None,
    **rank: Any,
) -> Trace:
    """A run: the healthy one, with what is given put in its place."""
    made = steps(*(phases or HEALTHY), where=where)
    one = {"xray": xray(), "workers": workers(8, sample_ms=1.0, busy=0.4)} | rank
    found = RankTrace(
        info=RunInfo(name="train", host="node", rank=0),
        steps=made,
        windows=(window_of(list(made)),),
        facts=from_json(Facts, FACTS | {"loaders": [LOADER | (loader or {})]} | (facts or {})),
        **one,
    )
    return Trace(ranks=(found,), samples={"node": samples if samples is not None else hardware()})
