"""What `flatout top` writes when it is not drawing: a line a sample, and the summary.

Both are plain strings built from data, tested to the letter; colour is laid over the summary's verdict and marks by
`paint` alone, so that a pipe, a log and NO_COLOR get the same words.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator

from flatout.model.formatting import count_of
from flatout.top.figures import GpuFigures, HostFigures, Stats
from flatout.top.readings import host_readings, work_pct
from flatout.top.summary import GpuSummary, TopSummary
from flatout.top.targets import TargetResult
from flatout.top.verdict import tone
from flatout.trace import GpuSample, Sample

_WIDTH = 80
_MARKS = {True: "✓", False: "✗", None: "–"}
_CARDS_HEADER = "GPU active fluct.  p5  p95 util idle longest  mem power heat  verdict"
_CARDS_CELLS = (
    "{:3}", "{:6.0f}%", "{:7.0f}", "{:3.0f}%", "{:4.0f}%", "{:4.0f}%", "{:4.0f}%", "{:6.1f} s", "{:4.0f}%", "{:4.0f} W",
    "{:4.0f}°",
)  # fmt: skip


def percent(value: float | None) -> str:
    """A share: 71%."""
    return "–" if value is None else f"{value:.0f}%"


def amount(value: float | None, unit: str, most: float | None = None) -> str:
    """A value in its unit, and the most it can be: 350 W, 70.0/140.0 GiB."""
    if value is None:
        return "–"
    return f"{_in_unit(value, unit)}/{_in_unit(most, unit)} {unit}" if most else f"{_in_unit(value, unit)} {unit}"


def _in_unit(value: float, unit: str) -> str:
    scale, digits = {"GiB": (2.0**-30, 1), "MiB/s": (2.0**-20, 1)}.get(unit, (1.0, 0))
    return f"{value * scale:.{digits}f}"


def size(value: float | None, per: str = "") -> str:
    """Bytes as a person writes them: 712 MiB, 12.3 GiB; with `per`, a rate: 3.0 MiB/s."""
    if value is None:
        return "–"
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= unit_bytes:
            return f"{value / unit_bytes:.{0 if value >= 100 * unit_bytes else 1}f} {unit}{per}"
    return f"{value:.0f} B{per}"


def duration_text(seconds: float) -> str:
    """A stretch of time: 42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 120:
        return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def line_of(sample: Sample, time_unix_s: float, cores_allowed: float | None = None) -> str:
    """One sample on one line."""
    clock = time.strftime("%H:%M:%S", time.localtime(time_unix_s))
    return " | ".join((clock, *reading_lines(sample, cores_allowed)))


def reading_lines(sample: Sample, cores_allowed: float | None = None) -> Iterator[str]:
    """One sample: a line a card, one for the host, one for the training."""
    host, read = sample.host, host_readings(sample, cores_allowed)
    yield from (_gpu_line(gpu) for gpu in sample.gpus)
    shares = {"iowait": host.iowait_pct, "memory": read["memory_pct"]}
    parts = [f"CPU {percent(read['cpu_pct'])}"]
    parts += [f"{name} {percent(pct)}" for name, pct in shares.items() if pct is not None]
    parts += [f"disk read {size(read['disk_read_bytes_s'], '/s')}"] if host.disks else []
    yield " ".join(parts)
    roles = [process.role for process in sample.processes]
    training = [f"trainer {percent(read['trainer_cpu_pct'])} of a core"] if "trainer" in roles else []
    training += [f"{read['workers']} workers {percent(read['worker_cpu_pct'])} each"] if read["workers"] else []
    if training:
        yield ", ".join(training)


def _gpu_line(gpu: GpuSample) -> str:
    work = percent(work_pct(gpu))
    parts = [f"SM {work}" if gpu.sm_active_pct is not None else f"power share {work} (for SM)"]
    parts.append(f"util {percent(gpu.gpu_util_pct)}")
    parts += [f"tensor {percent(gpu.tensor_active_pct)}"] if gpu.tensor_active_pct is not None else []
    if gpu.memory_pct is not None:
        parts.append(amount(gpu.memory_used_bytes, "GiB", gpu.memory_total_bytes))
    levels = ((gpu.power_w, "W"), (gpu.temperature_c, "°C"), (gpu.sm_clock_mhz, "MHz"))
    parts += [amount(value, unit) for value, unit in levels if value is not None]
    return f"GPU {gpu.index} {' '.join(parts)}"


def summary_lines(summary: TopSummary) -> Iterator[str]:
    """The summary, 80 columns wide."""
    yield f"flatout top · {summary.hostname} · {duration_text(summary.seconds)} · {count_of(summary.samples, 'sample')}"
    yield ""
    yield from textwrap.wrap(f"Verdict: {summary.verdict.word} – {summary.verdict.reason}", _WIDTH)
    if summary.gpus:
        yield ""
        yield from _gpu_table(summary.gpus[0].figures) if len(summary.gpus) == 1 else _cards_table(summary.gpus)
    yield ""
    yield from _host_table(summary.host)
    if summary.targets:
        yield ""
        yield "Targets"
        for name in dict.fromkeys(result.name for result in summary.targets):
            yield _target_line([result for result in summary.targets if result.name == name])
    for note in summary.notes:
        yield ""
        yield from textwrap.wrap(f"Note: {note}.", _WIDTH)


def paint(line: str) -> str:
    """The style of a line of the summary, in rich's words; empty for most."""
    if line.startswith("Verdict: "):
        word = line.removeprefix("Verdict: ").partition(" – ")[0]
        return {"good": "bold green", "bad": "bold yellow", "none": "bold"}[tone(word)]
    if line.startswith("  ✓"):
        return "green"
    return "red" if line.startswith("  ✗") else ""


def _gpu_table(gpu: GpuFigures) -> Iterator[str]:
    yield _header(f"GPU {gpu.index} · {gpu.name}")
    yield _row(gpu.activity_name, "%", gpu.activity)
    if gpu.has_gpm:
        yield _row("GPU-Util", "%", gpu.levels.get("gpu_util_pct"))
    else:
        yield _row("power share", "%", gpu.levels.get("power_share_pct"), " (for SM active)")
    rows = (
        ("tensor active", "%", "tensor_active_pct", None),
        ("DRAM active", "%", "dram_active_pct", None),
        ("memory", "GiB", "memory_used_bytes", gpu.memory_total_bytes),
        ("power", "W", "power_w", gpu.power_limit_w),
        ("temperature", "°C", "temperature_c", None),
        ("SM clock", "MHz", "sm_clock_mhz", gpu.sm_clock_max_mhz),
    )
    for label, unit, name, most in rows:
        if name in gpu.levels:
            yield _row(label, unit, gpu.levels[name], f" of {_in_unit(most, unit)}" if most else "")
    if gpu.activity is not None:
        energy = f", energy {gpu.energy_j / 3600:.2f} Wh" if gpu.energy_j is not None else ""
        idle = f"idle {gpu.idle_pct:.0f}% of the time, longest {gpu.longest_idle_s:.1f} s"
        yield f"  fluctuation {gpu.activity.deviation:.1f} points, {idle}{energy}"
    for reason, pct in gpu.throttled_pct.items():
        if reason != "idle":
            yield f"  clocks held back by {reason}: {pct:.0f}% of the time"


def _cards_table(cards: tuple[GpuSummary, ...]) -> Iterator[str]:
    """Several cards, a row each; every figure of each is in the JSON."""
    yield _CARDS_HEADER
    for card in cards:
        gpu, activity = card.figures, card.figures.activity
        mean, p5, p95 = (activity.mean, activity.p5, activity.p95) if activity is not None else (None, None, None)
        values = [gpu.index, mean, gpu.fluctuation_pct, p5, p95, gpu.mean("gpu_util_pct"), gpu.idle_pct]
        values += (gpu.longest_idle_s, gpu.peak("memory_pct"), gpu.mean("power_w"), gpu.peak("temperature_c"))
        cells = (_cell(value, form) for value, form in zip(values, _CARDS_CELLS, strict=True))
        yield f"{''.join(cells)}  {card.verdict.word}"
    names = {card.figures.activity_name for card in cards}
    energy_j = [card.figures.energy_j for card in cards if card.figures.energy_j is not None]
    used = f"; energy {sum(energy_j) / 3600:.2f} Wh in all" if energy_j else ""
    yield f"  active: {' or '.join(sorted(names))}, mean; mem and heat (°C): peak{used}"


def _cell(value: float | None, form: str) -> str:
    return form.format(value) if value is not None else "–".rjust(len(form.format(0)))


def _host_table(host: HostFigures) -> Iterator[str]:
    cores, workers = host.cores_allowed or host.cores, host.levels.get("workers")
    yield _header(f"Host · {cores:g} cores" if cores else "Host")
    yield _row("CPU", "%", host.levels.get("cpu_pct"))
    total = f" of {host.memory_total_bytes / 2**30:.0f} GiB" if host.memory_total_bytes else ""
    rows = (
        ("iowait", "%", "iowait_pct", ""),
        ("waiting for storage (PSI)", "%", "pressure_io_pct", ""),
        ("memory", "%", "memory_pct", total),
        ("busiest disk", "%", "disk_busy_pct", ""),
        ("disk reads", "MiB/s", "disk_read_bytes_s", ""),
        ("trainer", "%", "trainer_cpu_pct", " of a core"),
        (f"each of {workers.p50:.0f} workers" if workers else "", "%", "worker_cpu_pct", " of a core"),
    )
    yield from (_row(label, unit, host.levels[name], of) for label, unit, name, of in rows if name in host.levels)


def _header(title: str) -> str:
    return f"{title:<36}{'mean':>8}{'sd':>8}{'p5':>8}{'p50':>8}{'p95':>8}"


def _row(label: str, unit: str, stats: Stats | None, of: str = "") -> str:
    values = (stats.mean, stats.deviation, stats.p5, stats.p50, stats.p95) if stats is not None else ()
    cells = [_in_unit(value, unit) for value in values] or ["–"]
    return f"  {f'{label}, {unit}{of}':<34}" + "".join(cell.rjust(8) for cell in cells)


def _target_line(results: list[TargetResult]) -> str:
    """One target; of several cards the one that is furthest from it: missed before unknown before met."""
    order = {False: 0, None: 1, True: 2}
    worst = min(results, key=lambda result: (order[result.met], result.margin or 0.0))
    got = f"{worst.value:.0f}{worst.unit}" if worst.value is not None else "not measured"
    card = f" (GPU {worst.gpu})" if len(results) > 1 else ""
    return f"  {_MARKS[worst.met]} {worst.what:<40}{worst.wish:<19}{got + card:>17}".rstrip()
