"""`--csv`: a row a sample. The columns are named in docs/TOP.md; a value that was not measured is an empty cell."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import IO

from flatout.top.figures import cpu_budget_pct
from flatout.trace import GpuSample, Sample

__all__ = ["GPU_COLUMNS", "HOST_COLUMNS", "CsvTable"]

HOST_COLUMNS = (
    "time_unix_s",
    "interval_s",
    "cpu_pct",
    "iowait_pct",
    "run_queue",
    "pressure_cpu_pct",
    "pressure_io_pct",
    "pressure_memory_pct",
    "memory_used_bytes",
    "memory_total_bytes",
    "swap_used_bytes",
    "shm_used_bytes",
    "disk_read_bytes_s",
    "disk_write_bytes_s",
    "disk_busy_pct",
    "trainer_cpu_pct",
    "workers",
    "workers_cpu_pct",
    "training_rss_bytes",
    "training_read_bytes_s",
)
GPU_COLUMNS = (
    "gpu_util_pct",
    "sm_active_pct",
    "sm_occupancy_pct",
    "tensor_active_pct",
    "dram_active_pct",
    "pcie_rx_bytes_s",
    "pcie_tx_bytes_s",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_w",
    "power_limit_w",
    "energy_j",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "decoder_util_pct",
    "jpeg_util_pct",
    "throttle",
    "pulse_low_pct",
    "pulse_high_pct",
)


class CsvTable:
    """Writes samples as rows. Its columns are settled by the cards of the first sample."""

    def __init__(self, file: IO[str], *, cores_allowed: float | None) -> None:
        self._file = file
        self._writer = csv.writer(file, lineterminator="\n")
        self._cores_allowed = cores_allowed
        self._cards: tuple[int, ...] | None = None

    def write(self, sample: Sample, time_unix_s: float) -> None:
        """One row, flushed, so that a reader at the other end sees it now."""
        if self._cards is None:
            self._cards = tuple(gpu.index for gpu in sample.gpus)
            names = (f"gpu{index}_{name}" for index in self._cards for name in GPU_COLUMNS)
            self._writer.writerow((*HOST_COLUMNS, *names))
        host = self._host_cells(sample, time_unix_s)
        gpus = {gpu.index: gpu for gpu in sample.gpus}
        row = [host[name] for name in HOST_COLUMNS]
        for index in self._cards:
            cells = _gpu_cells(gpus.get(index))
            row += [cells.get(name) for name in GPU_COLUMNS]
        self._writer.writerow(_short(row))
        self._file.flush()

    def _host_cells(self, sample: Sample, time_unix_s: float) -> dict[str, object]:
        disks = sample.host.disks or ()
        trainers = [p for p in sample.processes if p.role == "trainer"]
        workers = [p for p in sample.processes if p.role == "worker"]
        busy = [disk.busy_pct for disk in disks if disk.busy_pct is not None]
        derived: dict[str, object] = {
            "time_unix_s": time_unix_s,
            "interval_s": sample.interval_s,
            "cpu_pct": cpu_budget_pct(sample, self._cores_allowed),
            "disk_read_bytes_s": sum(disk.read_bytes_s for disk in disks) if disks else None,
            "disk_write_bytes_s": sum(disk.write_bytes_s for disk in disks) if disks else None,
            "disk_busy_pct": max(busy, default=None),
            "trainer_cpu_pct": max((p.cpu_pct for p in trainers if p.cpu_pct is not None), default=None),
            "workers": len(workers),
            "workers_cpu_pct": _sum(p.cpu_pct for p in workers),
            "training_rss_bytes": _sum(p.rss_bytes for p in sample.processes),
            "training_read_bytes_s": _sum(p.read_bytes_s for p in sample.processes),
        }
        plain = {name: getattr(sample.host, name) for name in HOST_COLUMNS if name not in derived}
        return plain | derived


def _gpu_cells(gpu: GpuSample | None) -> dict[str, object]:
    if gpu is None:
        return {}
    derived: dict[str, object] = {
        "throttle": "; ".join(gpu.throttle) if gpu.throttle is not None else None,
        "pulse_low_pct": min(gpu.pulses, default=None),
        "pulse_high_pct": max(gpu.pulses, default=None),
    }
    return {name: getattr(gpu, name) for name in GPU_COLUMNS if name not in derived} | derived


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _short(row: list[object]) -> list[object]:
    return [round(cell, 3) if isinstance(cell, float) else cell for cell in row]
