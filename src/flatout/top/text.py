"""What `flatout top` writes when it is not drawing: a line a sample, rows of CSV, and the summary.

Lines are plain strings built from data; color is added to the summary's verdict and marks by `style_of` alone, so that
a pipe, a log and NO_COLOR get the same words.
"""

from __future__ import annotations

import csv
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from flatout.model.formatting import count_of, duration
from flatout.model.readings import GPU_READINGS, HOST_READINGS, Reading, in_unit, shown_in
from flatout.top.figures import GpuFigures, HostFigures, Stats, host_readings, work_pct
from flatout.top.summary import STYLES, GpuSummary, TargetResult, TopSummary, tone
from flatout.trace import GpuSample, Sample

WIDTH = 80
MARKS = {True: "✓", False: "✗", None: "–"}
HOST_COLUMNS = ("time_unix_s", "interval_s", *(reading.name for reading in shown_in("csv", HOST_READINGS)))
GPU_COLUMNS = tuple(reading.name for reading in shown_in("csv", GPU_READINGS))


def percent(value: float | None) -> str:
    """A share: 71%."""
    return "–" if value is None else f"{value:.0f}%"


def amount(value: float | None, unit: str, most: float | None = None) -> str:
    """A value in its unit, and the most it can be: 350 W, 70.0/140.0 GiB."""
    if value is None:
        return "–"
    of = f"/{in_unit(most, unit)}" if most else ""
    return f"{in_unit(value, unit)}{of} {unit}"


def size(value: float | None, per: str = "") -> str:
    """Bytes as a person writes them: 712 MiB, 12.3 GiB; with `per`, a rate: 3.0 MiB/s."""
    if value is None:
        return "–"
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= unit_bytes:
            digits = int(value < 100 * unit_bytes)
            return f"{value / unit_bytes:.{digits}f} {unit}{per}"
    return f"{value:.0f} B{per}"


# One sample


def line_of(sample: Sample, time_unix_s: float, cores_allowed: float | None = None) -> str:
    """One sample on one line."""
    clock = time.strftime("%H:%M:%S", time.localtime(time_unix_s))
    return " | ".join((clock, *reading_lines(sample, cores_allowed)))


def reading_lines(sample: Sample, cores_allowed: float | None = None) -> Iterator[str]:
    """One sample: a line a GPU, one for the host, one for the training."""
    host, read = sample.host, host_readings(sample, cores_allowed)
    yield from map(_gpu_line, sample.gpus)
    parts = [f"CPU {percent(read['cpu_pct'])}"]
    for name, pct in (("iowait", host.iowait_pct), ("memory", read["memory_pct"])):
        if pct is not None:
            parts.append(f"{name} {percent(pct)}")
    if host.disks:
        parts.append(f"disk read {size(read['disk_read_bytes_s'], '/s')}")
    yield " ".join(parts)
    training = []
    if any(process.role == "trainer" for process in sample.processes):
        training.append(f"trainer {percent(read['trainer_cpu_pct'])} of a core")
    if read["workers"]:
        training.append(f"{count_of(read['workers'], 'worker')} {percent(read['worker_cpu_pct'])} each")
    if training:
        yield ", ".join(training)


def _gpu_line(gpu: GpuSample) -> str:
    work = percent(work_pct(gpu))
    parts = [f"SM {work}", f"util {percent(gpu.gpu_util_pct)}"]
    if gpu.sm_active_pct is None:
        parts[0] = f"power share {work} (for SM)"
    if gpu.tensor_active_pct is not None:
        parts.append(f"tensor {percent(gpu.tensor_active_pct)}")
    if gpu.memory_pct is not None:
        parts.append(amount(gpu.memory_used_bytes, "GiB", gpu.memory_total_bytes))
    levels = ((gpu.power_w, "W"), (gpu.temperature_c, "°C"), (gpu.sm_clock_mhz, "MHz"))
    parts += [amount(value, unit) for value, unit in levels if value is not None]
    return f"GPU {gpu.index} {' '.join(parts)}"


class CsvTable:
    """Writes samples as rows. Its columns are settled by the GPUs of the first sample."""

    def __init__(self, file: IO[str], *, cores_allowed: float | None) -> None:
        self._file = file
        self._writer = csv.writer(file, lineterminator="\n")
        self._cores_allowed = cores_allowed
        self._gpus: tuple[int, ...] | None = None

    def write(self, sample: Sample, time_unix_s: float) -> None:
        """One row, flushed, so that a reader at the other end sees it now."""
        if self._gpus is None:
            self._gpus = tuple(gpu.index for gpu in sample.gpus)
            names = (f"gpu{index}_{name}" for index in self._gpus for name in GPU_COLUMNS)
            self._writer.writerow((*HOST_COLUMNS, *names))
        readings = host_readings(sample, self._cores_allowed)
        readings |= {"time_unix_s": time_unix_s, "interval_s": sample.interval_s, "workers": readings["workers"] or 0}
        row = [readings[name] for name in HOST_COLUMNS]
        cells = {gpu.index: _cells(gpu) for gpu in sample.gpus}
        for index in self._gpus:
            row += cells.get(index, [None] * len(GPU_COLUMNS))
        self._writer.writerow(round(cell, 3) if isinstance(cell, float) else cell for cell in row)
        self._file.flush()


def _cells(gpu: GpuSample) -> list[Any]:
    pulses = {"pulse_low_pct": min(gpu.pulses, default=None), "pulse_high_pct": max(gpu.pulses, default=None)}
    cells = [pulses[name] if name in pulses else getattr(gpu, name) for name in GPU_COLUMNS]
    return ["; ".join(cell) if isinstance(cell, tuple) else cell for cell in cells]


# The summary


def summary_lines(summary: TopSummary) -> Iterator[str]:
    """The summary, 80 columns wide."""
    length = duration(1e3 * summary.seconds)
    yield f"flatout top · {summary.hostname} · {length} · {count_of(summary.samples, 'sample')}"
    yield ""
    yield from textwrap.wrap(f"Verdict: {summary.verdict.word} – {summary.verdict.reason}", WIDTH)
    yield ""
    if len(summary.gpus) == 1:
        yield from (*_gpu_table(summary.gpus[0].figures), "")
    elif summary.gpus:
        yield from (*_gpus_table(summary.gpus), "")
    yield from _host_table(summary.host)
    yield ""
    yield "Targets"
    for name in dict.fromkeys(result.name for result in summary.targets):
        yield _target_line([result for result in summary.targets if result.name == name])
    for note in summary.notes:
        yield ""
        yield from textwrap.wrap(f"Note: {note}.", WIDTH)


def style_of(line: str) -> str:
    """The style of a line of the summary, in rich's words; empty for most."""
    if line.startswith("Verdict: "):
        return STYLES[tone(line.removeprefix("Verdict: ").partition(" – ")[0])]
    return {"  ✓": "green", "  ✗": "red"}.get(line[:3], "")


def _gpu_table(gpu: GpuFigures) -> Iterator[str]:
    yield _header(f"GPU {gpu.index} · {gpu.name}")
    yield _row(gpu.activity_name, "%", gpu.activity)
    if not gpu.has_gpm:
        yield _row("power share, as there is no SM active", "%", gpu.levels.get("power_share_pct"))
    others = (reading for reading in shown_in("summary", GPU_READINGS) if reading.label != gpu.activity_name)
    yield from _rows(others, gpu)
    if gpu.activity is not None:
        idle = f"idle {gpu.idle_pct:.0f}% of the time, longest {gpu.longest_idle_s:.1f} s"
        line = f"  fluctuation {gpu.activity.deviation:.1f} points, {idle}"
        if gpu.energy_j is not None:
            line += f", energy {gpu.energy_j / 3600:.2f} Wh"
        yield line
    for reason, pct in gpu.throttled_pct.items():
        if reason != "idle":
            yield f"  clocks held back by {reason}: {pct:.0f}% of the time"


def _gpus_table(gpus: Sequence[GpuSummary]) -> Iterator[str]:
    """Several GPUs, a row each; every figure of each is in the JSON."""
    yield "GPU active   sd util idle   mem   power   heat  verdict"
    for one in gpus:
        gpu = one.figures
        deviation = amount(gpu.fluctuation_pct, "").strip()
        line = f"{gpu.index:>3}{percent(getattr(gpu.activity, 'mean', None)):>7}{deviation:>5}"
        line += f"{percent(gpu.mean('gpu_util_pct')):>5}{percent(gpu.idle_pct):>5}{percent(gpu.peak('memory_pct')):>6}"
        line += f"{amount(gpu.mean('power_w'), 'W'):>8}{amount(gpu.peak('temperature_c'), '°C'):>7}"
        yield f"{line}  {one.verdict.word}"
    names = {one.figures.activity_name for one in gpus}
    yield f"  active: {' or '.join(sorted(names))}, mean; mem and heat: peak"


def _host_table(host: HostFigures) -> Iterator[str]:
    cores, workers, title = host.cores_allowed or host.cores, host.levels.get("workers"), "Host"
    if cores:
        title += f" · {cores:g} cores"
    if workers:
        title += f" · {count_of(round(workers.p50), 'worker')}"
    yield _header(title)
    yield from _rows(shown_in("summary", HOST_READINGS), host)


def _header(title: str) -> str:
    return f"{title:<36}{'mean':>8}{'sd':>8}{'p5':>8}{'p50':>8}{'p95':>8}"


def _rows(readings: Iterable[Reading], figures: GpuFigures | HostFigures) -> Iterator[str]:
    for reading in readings:
        unit, most = reading.unit, getattr(figures, reading.limit or "_", None)
        if most and unit == "%":
            unit += f" of {amount(most, 'GiB')}"
        elif most:
            unit += f" of {in_unit(most, unit)}"
        if reading.name in figures.levels:
            yield _row(reading.label, unit, figures.levels[reading.name])


def _row(label: str, unit: str, stats: Stats | None) -> str:
    cells = ["–"]
    if stats is not None:
        values = (stats.mean, stats.deviation, stats.p5, stats.p50, stats.p95)
        cells = [in_unit(value, unit.partition(" ")[0]) for value in values]
    return f"  {f'{label}, {unit}':<34}" + "".join(cell.rjust(8) for cell in cells)


def _target_line(results: Sequence[TargetResult]) -> str:
    """One target; of several GPUs the one that is furthest from it: missed before unknown before met."""
    order = {False: 0, None: 1, True: 2}
    worst = min(results, key=lambda result: (order[result.met], result.margin or 0.0))
    measured = "not measured"
    if worst.value is not None:
        measured = f"{worst.value:.0f}{worst.unit}"
    if len(results) > 1:
        measured += f" (GPU {worst.gpu})"
    return f"  {MARKS[worst.met]} {worst.what:<40}{worst.wish:<19}{measured:>17}".rstrip()
