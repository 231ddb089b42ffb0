"""What one sample says, by the names of docs/TOP.md. The line, the panels, `--csv` and the summary all read it here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from flatout.trace import GpuSample, HostSample, Sample

_HOST_FIELDS = tuple(field.name for field in fields(HostSample))


def work_pct(gpu: GpuSample) -> float | None:
    """SM active; where the card cannot tell, its power share, and never more than GPU-Util."""
    if gpu.sm_active_pct is not None:
        return gpu.sm_active_pct
    return min((value for value in (gpu.power_share_pct, gpu.gpu_util_pct) if value is not None), default=None)


def cpu_budget_pct(sample: Sample, cores_allowed: float | None) -> float | None:
    """How full the cores are that may be used: the machine's, or under a quota the training's own share of it."""
    own = sum(p.cpu_pct or 0.0 for p in sample.processes) / cores_allowed if cores_allowed else 0.0
    if sample.host.cpu_pct is None:
        return min(100.0, own) if own else None
    return min(100.0, max(sample.host.cpu_pct, own))


def host_readings(sample: Sample, cores_allowed: float | None) -> dict[str, Any]:
    """The machine and the training on it: the host's own fields, and what comes of them."""
    host, processes, disks = sample.host, sample.processes, sample.host.disks or ()
    workers = [p for p in processes if p.role == "worker"]
    workers_cpu = _known(p.cpu_pct for p in workers)
    return {name: getattr(host, name) for name in _HOST_FIELDS} | {
        "cpu_pct": cpu_budget_pct(sample, cores_allowed),
        "memory_pct": _share_pct(host.memory_used_bytes, host.memory_total_bytes),
        "shm_pct": _share_pct(host.shm_used_bytes, host.shm_total_bytes),
        "disk_busy_pct": max(_known(disk.busy_pct for disk in disks), default=None),
        "disk_read_bytes_s": _sum(disk.read_bytes_s for disk in disks),
        "disk_write_bytes_s": _sum(disk.write_bytes_s for disk in disks),
        "training_cpu_pct": sum(p.cpu_pct or 0.0 for p in processes) if processes else None,
        "training_rss_bytes": _sum(p.rss_bytes for p in processes),
        "training_read_bytes_s": _sum(p.read_bytes_s for p in processes),
        "trainer_cpu_pct": max(_known(p.cpu_pct for p in processes if p.role == "trainer"), default=None),
        "workers": len(workers) if processes else None,
        "workers_cpu_pct": _sum(workers_cpu),
        "worker_cpu_pct": sum(workers_cpu) / len(workers_cpu) if workers_cpu else None,
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


def _share_pct(part: int | None, whole: int | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None
