"""`--csv`: a row a sample. The columns are named in docs/TOP.md; a value that was not measured is an empty cell."""

from __future__ import annotations

import csv
from typing import IO, Any

from flatout.model.readings import GPU_READINGS, HOST_READINGS, shown_in
from flatout.top.readings import host_readings
from flatout.trace import GpuSample, Sample

HOST_COLUMNS = ("time_unix_s", "interval_s", *(reading.name for reading in shown_in("csv", HOST_READINGS)))
GPU_COLUMNS = tuple(reading.name for reading in shown_in("csv", GPU_READINGS))


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
