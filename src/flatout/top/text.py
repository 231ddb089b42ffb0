"""What `flatout top` writes when it is not drawing: a line a sample, and the summary.

Both are plain strings built from data, tested to the letter; colour is laid over the summary's verdict and marks by
`paint` alone, so that a pipe, a log and NO_COLOR get the same words.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator

from flatout.top.figures import GpuFigures, HostFigures, Stats, cpu_budget_pct, work_pct
from flatout.top.summary import GpuSummary, TopSummary
from flatout.top.targets import TargetResult
from flatout.trace import GpuSample, Sample

__all__ = ["bytes_text", "line_of", "paint", "reading_lines", "summary_lines"]

_WIDTH = 80
_MARKS = {True: "✓", False: "✗", None: "–"}
_GOOD = ("healthy",)
_UNKNOWN = ("no GPU", "idle", "not enough samples")


def line_of(sample: Sample, time_unix_s: float, cores_allowed: float | None = None) -> str:
    """One sample on one line."""
    clock = time.strftime("%H:%M:%S", time.localtime(time_unix_s))
    return " | ".join((clock, *reading_lines(sample, cores_allowed)))


def reading_lines(sample: Sample, cores_allowed: float | None = None) -> Iterator[str]:
    """One sample: a line a card, one for the host, one for the training."""
    yield from (_gpu_part(gpu) for gpu in sample.gpus)
    yield _host_part(sample, cores_allowed)
    training = _training_part(sample)
    if training:
        yield training


def summary_lines(summary: TopSummary) -> Iterator[str]:
    """The summary, 80 columns wide."""
    title = f"flatout top · {summary.hostname} · {duration_text(summary.seconds)} · {summary.samples} samples"
    yield title
    yield ""
    yield from _wrap(f"Verdict: {summary.verdict.word} – {summary.verdict.reason}")
    if summary.gpus:
        yield ""
    if len(summary.gpus) == 1:
        yield from _gpu_table(summary.gpus[0].figures)
    elif summary.gpus:
        yield from _cards_table(summary.gpus)
    yield ""
    yield from _host_table(summary.host)
    if summary.targets:
        yield ""
        yield "Targets"
        for name in dict.fromkeys(result.name for result in summary.targets):
            yield _target_line([result for result in summary.targets if result.name == name])
    for note in summary.notes:
        yield ""
        yield from _wrap(f"Note: {note}.")


def paint(line: str) -> str:
    """The style of a line of the summary, in rich's words; empty for most."""
    if line.startswith("Verdict: "):
        word = line.removeprefix("Verdict: ").partition(" – ")[0]
        return "bold green" if word in _GOOD else "bold" if word in _UNKNOWN else "bold yellow"
    if line.startswith("  ✓"):
        return "green"
    return "red" if line.startswith("  ✗") else ""


def bytes_text(value: float | None) -> str:
    """Bytes as a person writes them: 712 MiB, 12.3 GiB."""
    if value is None:
        return "–"
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.{0 if value >= 100 * size else 1}f} {unit}"
    return f"{value:.0f} B"


def duration_text(seconds: float) -> str:
    """A stretch of time: 42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 120:
        return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _gpu_part(gpu: GpuSample) -> str:
    work = _pct(work_pct(gpu))
    activity = f"SM {work}" if gpu.sm_active_pct is not None else f"power share {work} (for SM)"
    parts = [f"GPU {gpu.index} {activity}", f"util {_pct(gpu.gpu_util_pct)}"]
    if gpu.tensor_active_pct is not None:
        parts.append(f"tensor {_pct(gpu.tensor_active_pct)}")
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
        parts.append(f"{gpu.memory_used_bytes / 2**30:.1f}/{gpu.memory_total_bytes / 2**30:.1f} GiB")
    for value, unit in ((gpu.power_w, "W"), (gpu.temperature_c, "°C"), (gpu.sm_clock_mhz, "MHz")):
        if value is not None:
            parts.append(f"{value:.0f} {unit}")
    return " ".join(parts)


def _host_part(sample: Sample, cores_allowed: float | None) -> str:
    host = sample.host
    parts = [f"CPU {_pct(cpu_budget_pct(sample, cores_allowed))}"]
    if host.iowait_pct is not None:
        parts.append(f"iowait {_pct(host.iowait_pct)}")
    if host.memory_used_bytes is not None and host.memory_total_bytes:
        parts.append(f"memory {_pct(100 * host.memory_used_bytes / host.memory_total_bytes)}")
    if host.disks:
        parts.append(f"disk read {bytes_text(sum(disk.read_bytes_s for disk in host.disks))}/s")
    return " ".join(parts)


def _training_part(sample: Sample) -> str:
    trainers = [p for p in sample.processes if p.role == "trainer"]
    workers = [p for p in sample.processes if p.role == "worker"]
    parts = []
    if trainers:
        parts.append(f"trainer {_pct(max(p.cpu_pct or 0.0 for p in trainers))} of a core")
    if workers:
        parts.append(f"{len(workers)} workers {_pct(sum(p.cpu_pct or 0.0 for p in workers) / len(workers))} each")
    return ", ".join(parts)


def _gpu_table(gpu: GpuFigures) -> Iterator[str]:
    yield f"{f'GPU {gpu.index} · {gpu.name}':<36}{'mean':>8}{'sd':>8}{'p5':>8}{'p50':>8}{'p95':>8}"
    if gpu.has_gpm:
        yield _row("SM active, %", gpu.activity)
        yield _row("GPU-Util, %", gpu.levels.get("gpu_util_pct"))
    else:
        yield _row("GPU-Util, %", gpu.activity)
        yield _row("power share, % (for SM active)", gpu.levels.get("power_share_pct"))
    for label, name in (("tensor active, %", "tensor_active_pct"), ("DRAM active, %", "dram_active_pct")):
        yield from _row_if(label, gpu.levels.get(name))
    total = f" of {gpu.memory_total_bytes / 2**30:.1f}" if gpu.memory_total_bytes else ""
    yield from _row_if(f"memory, GiB{total}", gpu.levels.get("memory_used_bytes"), scale=2.0**-30, digits=1)
    limit = f" of {gpu.power_limit_w:.0f}" if gpu.power_limit_w else ""
    yield from _row_if(f"power, W{limit}", gpu.levels.get("power_w"))
    yield from _row_if("temperature, °C", gpu.levels.get("temperature_c"))
    top = f" of {gpu.sm_clock_max_mhz:.0f}" if gpu.sm_clock_max_mhz else ""
    yield from _row_if(f"SM clock, MHz{top}", gpu.levels.get("sm_clock_mhz"))
    if gpu.activity is not None and gpu.idle_pct is not None:
        energy = f", energy {gpu.energy_j / 3600:.2f} Wh" if gpu.energy_j is not None else ""
        yield (
            f"  fluctuation {gpu.activity.deviation:.1f} points, idle {gpu.idle_pct:.0f}% of the time, "
            f"longest {gpu.longest_idle_s:.1f} s{energy}"
        )
    for reason, pct in gpu.throttled_pct.items():
        if reason != "idle":
            yield f"  clocks held back by {reason}: {pct:.0f}% of the time"


def _cards_table(cards: tuple[GpuSummary, ...]) -> Iterator[str]:
    """Several cards, a row each; every figure of each is in the JSON."""
    yield "GPU active fluct.  p5  p95 util idle longest  mem power heat  verdict"
    for card in cards:
        gpu = card.figures
        activity = gpu.activity
        cells = (
            (f"{gpu.index}", 3),
            (_pct(activity.mean if activity else None), 7),
            (f"{gpu.fluctuation_pct:.0f}" if gpu.fluctuation_pct is not None else "–", 7),
            (_pct(activity.p5 if activity else None), 4),
            (_pct(activity.p95 if activity else None), 5),
            (_pct(_mean(gpu, "gpu_util_pct")), 5),
            (_pct(gpu.idle_pct), 5),
            (f"{gpu.longest_idle_s:.1f} s", 8),
            (_pct(peak.high if (peak := gpu.levels.get("memory_pct")) else None), 5),
            (f"{watts:.0f} W" if (watts := _mean(gpu, "power_w")) is not None else "–", 6),
            (f"{heat.high:.0f}°" if (heat := gpu.levels.get("temperature_c")) else "–", 5),
        )
        yield "".join(text.rjust(width) for text, width in cells) + f"  {card.verdict.word}"
    names = {card.figures.activity_name for card in cards}
    energy_j = [card.figures.energy_j for card in cards if card.figures.energy_j is not None]
    used = f"; energy {sum(energy_j) / 3600:.2f} Wh in all" if energy_j else ""
    yield f"  active: {' or '.join(sorted(names))}, mean; mem and heat (°C): peak{used}"


def _host_table(host: HostFigures) -> Iterator[str]:
    cores = host.cores_allowed or host.cores
    title = f"Host · {cores:g} cores" if cores else "Host"
    yield f"{title:<36}{'mean':>8}{'sd':>8}{'p5':>8}{'p50':>8}{'p95':>8}"
    yield _row("CPU, %", host.cpu_pct)
    yield from _row_if("iowait, %", host.levels.get("iowait_pct"))
    yield from _row_if("waiting for storage (PSI), %", host.levels.get("pressure_io_pct"))
    total = f" of {host.memory_total_bytes / 2**30:.0f} GiB" if host.memory_total_bytes else ""
    yield from _row_if(f"memory, %{total}", host.memory_pct)
    yield from _row_if("busiest disk, %", host.disk_busy_pct)
    yield from _row_if("disk reads, MiB/s", host.disk_read_bytes_s, scale=2.0**-20, digits=1)
    yield from _row_if("trainer, % of a core", host.trainer_cpu_pct)
    if host.workers is not None and host.workers.high > 0:
        yield from _row_if(f"each of {host.workers.p50:.0f} workers, % of a core", host.worker_cpu_pct)


def _row_if(label: str, stats: Stats | None, *, scale: float = 1.0, digits: int = 0) -> Iterator[str]:
    if stats is not None:
        yield _row(label, stats, scale=scale, digits=digits)


def _row(label: str, stats: Stats | None, *, scale: float = 1.0, digits: int = 0) -> str:
    if stats is None:
        return f"  {label:<34}{'–':>8}"
    values = (stats.mean, stats.deviation, stats.p5, stats.p50, stats.p95)
    return f"  {label:<34}" + "".join(f"{value * scale:>8.{digits}f}" for value in values)


def _target_line(results: list[TargetResult]) -> str:
    """One target; of several cards the one that is furthest from it."""
    worst = min(results, key=_goodness)
    got = f"{worst.value:.0f}{worst.unit}" if worst.value is not None else "not measured"
    card = f" (GPU {worst.gpu})" if len(results) > 1 else ""
    return f"  {_MARKS[worst.met]} {worst.what:<40}{worst.wish:<19}{got + card:>17}".rstrip()


def _goodness(result: TargetResult) -> tuple[int, float]:
    """Missed comes before unknown before met; among equals the one with the smallest margin."""
    order = {False: 0, None: 1, True: 2}[result.met]
    return order, result.margin if result.margin is not None else 0.0


def _mean(gpu: GpuFigures, level: str) -> float | None:
    stats = gpu.levels.get(level)
    return stats.mean if stats is not None else None


def _pct(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}%"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
