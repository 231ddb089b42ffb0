"""`--csv`: a row a sample. The columns are named in docs/TOP.md; a value that was not measured is an empty cell."""

from __future__ import annotations

import csv
from typing import IO, Any

from flatout.top.readings import host_readings
from flatout.trace import GpuSample, Sample

HOST_COLUMNS = (
    "time_unix_s", "interval_s", "cpu_pct", "iowait_pct", "run_queue", "pressure_cpu_pct", "pressure_io_pct",
    "pressure_memory_pct", "memory_used_bytes", "memory_total_bytes", "swap_used_bytes", "shm_used_bytes",
    "disk_read_bytes_s", "disk_write_bytes_s", "disk_busy_pct", "trainer_cpu_pct", "workers", "workers_cpu_pct",
    "training_rss_bytes", "training_read_bytes_s",
)  # fmt: skip
GPU_COLUMNS = (
    "gpu_util_pct", "sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct", "pcie_rx_bytes_s",
    "pcie_tx_bytes_s", "memory_used_bytes", "memory_total_bytes", "power_w", "power_limit_w", "energy_j",
    "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "decoder_util_pct", "jpeg_util_pct", "throttle",
    "pulse_low_pct", "pulse_high_pct",
)  # fmt: skip


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
        readings = host_readings(sample, self._cores_allowed)
        readings |= {"time_unix_s": time_unix_s, "interval_s": sample.interval_s, "workers": readings["workers"] or 0}
        row = [readings[name] for name in HOST_COLUMNS]
        gpus = {gpu.index: gpu for gpu in sample.gpus}
        for index in self._cards:
            row += _cells(gpus[index]) if index in gpus else [None] * len(GPU_COLUMNS)
        self._writer.writerow(round(cell, 3) if isinstance(cell, float) else cell for cell in row)
        self._file.flush()


def _cells(gpu: GpuSample) -> list[Any]:
    words = {  # what a cell cannot hold as it stands in the sample
        "throttle": "; ".join(gpu.throttle) if gpu.throttle is not None else None,
        "pulse_low_pct": min(gpu.pulses, default=None),
        "pulse_high_pct": max(gpu.pulses, default=None),
    }
    return [words[name] if name in words else getattr(gpu, name) for name in GPU_COLUMNS]
