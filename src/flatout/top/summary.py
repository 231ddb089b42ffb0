"""Figures → the summary: a verdict with its reason in numbers, and targets met or missed; and samples as text.

Questions are asked in the order of WORDS, and the first that is answered yes is the verdict: first
what is about to break, then what the numbers hide, then why a GPU is low, then how it is low.
"""

from __future__ import annotations

import csv
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from flatout.model.formatting import (
    GPU_READINGS,
    HARMFUL_THROTTLES,
    HOST_READINGS,
    MEMORY_FULL_PCT,
    Reading,
    amount,
    count_of,
    duration,
    in_unit,
    shown_in,
)
from flatout.model.records import to_json
from flatout.top.figures import QUANTILES, Figures, GpuFigures, Levels, host_readings, work_pct
from flatout.trace import GpuSample, Sample, Sketch

WORDS = (
    "near out of memory", "throttled", "idle", "busy but wasteful", "CPU-bound", "disk-bound", "fluctuating", "starved",
    "healthy", "not enough samples", "no GPU",
)  # fmt: skip
WIDTH = 80
MARKS = {True: "✓", False: "✗", None: "–"}
HOST_COLUMNS = ("time_unix_s", "interval_s", *(reading.name for reading in shown_in("csv", HOST_READINGS)))
GPU_COLUMNS = tuple(reading.name for reading in shown_in("csv", GPU_READINGS))
STYLES = {"good": "bold green", "bad": "bold yellow", "none": "bold"}  # by the tone of a verdict

ENOUGH_SAMPLES = 3
THROTTLED_SHARE_PCT = 20.0  # of the time held back by heat or a hardware brake: throttled
IDLE_P95_PCT = 5.0  # nothing ran for 95% of the time: idle

WASTEFUL_UTIL_PCT = 90.0  # GPU-Util above this, and …
WASTEFUL_SM_PCT = 25.0  # … SM active below this: busy but wasteful
WASTEFUL_POWER_PCT = 40.0  # without SM active: the power share below this, and …
WASTEFUL_CLOCK_PCT = 50.0  # … the clock above this, for at a low clock any work draws little power

LOW_MEAN_PCT = 70.0  # mean activity below this is low, and asks for a reason
CPU_FULL_PCT = 90.0
SWING_P95_PCT = 70.0  # p95 at or above this, and …
SWING_P5_PCT = 10.0  # … p5 below this: fluctuating

# Why a GPU is low: the verdict, a reading of the host, from where on it is the reason, and that in words.
HOST_LIMITS = (
    ("CPU-bound", "cpu_pct", CPU_FULL_PCT, "{:.0f}% of the cores are busy"),
    ("CPU-bound", "throttled_pct", 20.0, "the cgroup's CPU quota held processes back {:.0f}% of the time"),
    ("disk-bound", "pressure_io_pct", 50.0, "processes waited for storage {:.0f}% of the time"),
    ("disk-bound", "iowait_pct", 25.0, "iowait is {:.0f}%"),
    ("disk-bound", "disk_busy_pct", 90.0, "the busiest disk is {:.0f}% busy"),
)
BESIDE = (
    ("CPU {:.0f}%", "cpu_pct"),
    ("busiest disk {:.0f}%", "disk_busy_pct"),
    ("trainer {:.0f}% of a core", "trainer_cpu_pct"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`word` is one of WORDS."""

    word: str
    reason: str


@dataclass(frozen=True, slots=True)
class TargetResult:
    """A target against what was measured: `margin` is how far inside its bounds it is (below 0: missed).

    `met` and `margin` are None where the quantity could not be measured.
    """

    name: str
    gpu: int | None
    what: str
    wish: str
    unit: str
    value: float | None
    met: bool | None
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSummary:
    """Everything `flatout top` says at the end."""

    hostname: str
    host: Figures
    verdict: Verdict
    gpus: list[tuple[GpuFigures, Verdict]]
    targets: list[TargetResult]
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data; docs/TOP.md names every field. What was not measured is left out."""
        return {
            "record": "top-summary",
            "hostname": self.hostname,
            "samples": self.host.samples,
            "seconds": to_json(self.host.seconds),
            "verdict": to_json(self.verdict),
            "gpus": [{**gpu.to_json(), "verdict": to_json(verdict)} for gpu, verdict in self.gpus],
            "host": self.host.to_json(),
            "targets": to_json(self.targets),
            "notes": list(self.notes),
        }


def sum_up(seen: Figures, *, hostname: str = "", notes: Sequence[str] = ()) -> TopSummary:
    """The summary of the samples seen so far."""
    gpus = [(gpu, _first(_ask_gpu(gpu, seen))) for gpu in seen.gpus]
    verdict = _verdict_on_all(gpus) or _first(_ask_host(seen))
    targets = list(_check_targets(seen))
    return TopSummary(hostname=hostname, host=seen, verdict=verdict, gpus=gpus, targets=targets, notes=notes)


# The verdict


def tone(word: str) -> str:
    """Whether a verdict is good news, bad news, or none."""
    if word == "healthy":
        return "good"
    return "none" if word in ("idle", "not enough samples", "no GPU") else "bad"


def _verdict_on_all(gpus: Sequence[tuple[GpuFigures, Verdict]]) -> Verdict | None:
    """The verdict on the machine: that on its worst GPU. What is no news comes last, an idle GPU too."""
    if len(gpus) < 2:
        return gpus[0][1] if gpus else None
    gpu, worst = min(gpus, key=lambda one: (tone(one[1].word) == "none", WORDS.index(one[1].word)))
    reason = f"GPU {gpu.last.index}: {worst.reason}"
    idle = [str(other.last.index) for other, verdict in gpus if verdict.word == "idle" != worst.word]
    if idle:
        reason += f" GPU {', '.join(idle)}: idle."
    return Verdict(word=worst.word, reason=reason)


# Each of these asks its questions in order, and yields the words that apply with their reasons.
_Answers = Iterator[tuple[str, str]]


def _first(answers: _Answers) -> Verdict:
    word, reason = next(answers)
    return Verdict(word=word, reason=f"{reason}.")


def _ask_host(host: Figures) -> _Answers:
    if host.samples < ENOUGH_SAMPLES:
        yield _too_few(host)
    yield from _memory_full("host", host)
    yield "no GPU", f"no NVIDIA GPU was seen: only the host was measured{_beside(host)}"


def _ask_gpu(gpu: GpuFigures, host: Figures) -> _Answers:
    mean_pct = gpu.activity.mean
    if host.samples < ENOUGH_SAMPLES or mean_pct is None:
        yield _too_few(host)
        return
    p5, p95 = (gpu.activity.quantile(q) or 0.0 for q in (0.05, 0.95))
    average = f"{gpu.activity_name} averages {mean_pct:.0f}%"
    is_low = mean_pct < LOW_MEAN_PCT
    yield from _memory_full("GPU", gpu)
    yield from _memory_full("host", host)
    for reason, pct in gpu.throttled_pct.items():
        if reason in HARMFUL_THROTTLES and pct >= THROTTLED_SHARE_PCT:
            yield "throttled", f"{reason} held the clocks down for {pct:.0f}% of the time"
    if p95 < IDLE_P95_PCT and not gpu.in_use:
        yield "idle", f"{average}: nothing used the GPU"
    yield from _wasteful(gpu, mean_pct)
    for word, name, limit, words in HOST_LIMITS:
        pct_seen = host.levels[name].mean
        if is_low and pct_seen is not None and pct_seen >= limit:
            yield word, f"{words.format(pct_seen)} while {average}"
    if p95 >= SWING_P95_PCT and p5 < SWING_P5_PCT:
        swing = f"{gpu.activity_name} swings between {p5:.0f}% (p5) and {p95:.0f}% (p95)"
        idle = f"idle {gpu.idle_pct:.0f}% of the time, up to {gpu.longest_idle_s:.1f} s in a row"
        yield "fluctuating", f"{swing}: {idle}"
    if is_low:
        yield "starved", f"{average}: the GPU waits for work{_beside(host)}"
    stand_in = " (a stand-in for SM active)" * (not gpu.has_gpm)
    spread = f"a fluctuation of {_points(gpu.activity.deviation or 0.0)}, idle {gpu.idle_pct:.0f}% of the time"
    yield "healthy", f"{average}{stand_in} with {spread}"


def _points(deviation: float) -> str:
    return count_of(round(deviation), "point")


def _too_few(host: Figures) -> tuple[str, str]:
    return "not enough samples", f"{host.samples} of the {ENOUGH_SAMPLES} samples a verdict needs"


def _memory_full(owner: str, figures: GpuFigures | Figures) -> _Answers:
    used_pct = figures.levels.peak("memory_pct")
    if used_pct is not None and used_pct > MEMORY_FULL_PCT:
        yield "near out of memory", f"the {owner}'s memory was {used_pct:.1f}% full at its peak"


def _wasteful(gpu: GpuFigures, mean_pct: float) -> _Answers:
    names = ("gpu_util_pct", "power_share_pct", "sm_clock_mhz")
    util_pct, power_pct, clock = (gpu.levels[name].mean for name in names)
    waste = ""
    if gpu.has_gpm and mean_pct < WASTEFUL_SM_PCT:
        waste = f"SM active is {mean_pct:.0f}%"
    elif not gpu.has_gpm and power_pct is not None and power_pct < WASTEFUL_POWER_PCT:
        top_mhz = gpu.last.sm_clock_max_mhz or 0.0
        if clock is None or clock >= top_mhz * WASTEFUL_CLOCK_PCT / 100:
            waste = f"the GPU draws {power_pct:.0f}% of its power limit (a stand-in for SM active)"
    if waste and util_pct is not None and util_pct > WASTEFUL_UTIL_PCT:
        kernels = "a kernel is nearly always there, but most of the GPU has nothing to do"
        yield "busy but wasteful", f"GPU-Util reads {util_pct:.0f}%, yet {waste}: {kernels}"


def _beside(host: Figures) -> str:
    known = [words.format(pct) for words, name in BESIDE if (pct := host.levels[name].mean) is not None]
    return f" ({', '.join(known)})" if known else ""


# Targets


class _Target(NamedTuple):
    """What a training that uses its GPUs well reaches, in one quantity."""

    name: str
    what: str
    wish: str
    unit: str
    at_least: float
    at_most: float
    value: Callable[[Any], float | None]


def _mean(name: str) -> Callable[[Any], float | None]:
    return lambda figures: figures.levels[name].mean


def _peak(name: str) -> Callable[[Any], float | None]:
    return lambda figures: figures.levels.peak(name)


_ANY = math.inf
_TARGETS = (
    _Target("sm", "SM active, mean", "at least 80%", "%", 80, _ANY, lambda gpu: gpu.work_pct),
    _Target("util", "GPU-Util, mean", "at least 85%", "%", 85, _ANY, _mean("gpu_util_pct")),
    _Target(
        "fluctuation", "fluctuation", "at most 10 points", " points", -_ANY, 10, lambda gpu: gpu.activity.deviation
    ),
    _Target("memory", "GPU memory, peak", "70 to 90%", "%", 70, 90, _peak("memory_pct")),
    _Target("power", "power share, mean", "at least 80%", "%", 80, _ANY, _mean("power_share_pct")),
    _Target("temperature", "temperature, peak", "at most 85 °C", " °C", -_ANY, 85, _peak("temperature_c")),
    _Target("cpu", "CPU, mean", "at most 90%", "%", -_ANY, 90, _mean("cpu_pct")),
)


def _check_targets(host: Figures) -> Iterator[TargetResult]:
    for name, what, wish, unit, at_least, at_most, value_of in _TARGETS:
        for figures in [host] if name == "cpu" else host.gpus:
            index, shown = None, what
            if isinstance(figures, GpuFigures):
                index = figures.last.index
                if name == "sm" and not figures.has_gpm:
                    shown += " (stand-in: power share)"
            value, margin, met = value_of(figures), None, None
            if value is not None:
                margin = min(value - at_least, at_most - value)
                met = margin >= 0
            yield TargetResult(name, index, shown, wish, unit, value, met, margin)


# In text. Lines are plain; color is added by `style_of` alone, so that a pipe, a log and NO_COLOR get
# the same words.


def percent(value: float | None) -> str:
    """A share: 71%."""
    return amount(value, "%")


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


# The summary, in lines


def summary_lines(summary: TopSummary) -> Iterator[str]:
    """The summary, 80 columns wide."""
    host, verdict = summary.host, summary.verdict
    length = duration(1e3 * host.seconds)
    yield f"flatout top · {summary.hostname} · {length} · {count_of(host.samples, 'sample')}"
    yield ""
    yield from textwrap.wrap(f"Verdict: {verdict.word} – {verdict.reason}", WIDTH)
    yield ""
    if len(summary.gpus) == 1:
        yield from (*_gpu_table(summary.gpus[0][0]), "")
    elif summary.gpus:
        yield from (*_gpus_table(summary.gpus), "")
    yield from _host_table(host)
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
    yield _header(f"GPU {gpu.last.index} · {gpu.last.name}")
    yield _row(gpu.activity_name, "%", gpu.activity)
    if not gpu.has_gpm:
        yield _row("power share, as there is no SM active", "%", gpu.levels["power_share_pct"])
    others = (reading for reading in shown_in("summary", GPU_READINGS) if reading.label != gpu.activity_name)
    yield from _rows(others, gpu.levels, gpu.last)
    if gpu.activity.count:
        idle = f"idle {gpu.idle_pct:.0f}% of the time, longest {gpu.longest_idle_s:.1f} s"
        line = f"  fluctuation {gpu.activity.deviation:.1f} points, {idle}"
        if gpu.energy_j is not None:
            line += f", energy {gpu.energy_j / 3600:.2f} Wh"
        yield line
    for reason, pct in gpu.throttled_pct.items():
        if reason != "idle":
            yield f"  clocks held back by {reason}: {pct:.0f}% of the time"


def _gpus_table(gpus: Sequence[tuple[GpuFigures, Verdict]]) -> Iterator[str]:
    """Several GPUs, a row each; every figure of each is in the JSON."""
    yield "GPU active   sd util idle   mem   power   heat  verdict"
    for gpu, verdict in gpus:
        line = f"{gpu.last.index:>3}{percent(gpu.activity.mean):>7}{amount(gpu.activity.deviation, ''):>5}"
        line += f"{percent(gpu.levels['gpu_util_pct'].mean):>5}{percent(gpu.idle_pct):>5}"
        line += f"{percent(gpu.levels.peak('memory_pct')):>6}{amount(gpu.levels['power_w'].mean, 'W'):>8}"
        line += f"{amount(gpu.levels.peak('temperature_c'), '°C'):>7}"
        yield f"{line}  {verdict.word}"
    names = {gpu.activity_name for gpu, _ in gpus}
    yield f"  active: {' or '.join(sorted(names))}, mean; mem and heat: peak"


def _host_table(host: Figures) -> Iterator[str]:
    cores, workers, title = host.cores_allowed or host.cores, host.levels["workers"].quantile(0.5), "Host"
    if cores:
        title += f" · {cores:g} core{'s' * (cores != 1)}"
    if workers is not None:
        title += f" · {count_of(round(workers), 'worker')}"
    yield _header(title)
    yield from _rows(shown_in("summary", HOST_READINGS), host.levels, host)


def _header(title: str) -> str:
    return f"{title:<36}{'mean':>8}{'sd':>8}{'p5':>8}{'p50':>8}{'p95':>8}"


def _rows(readings: Iterable[Reading], levels: Levels, limits: object) -> Iterator[str]:
    """Those that were seen; `limits` holds the most that each can be."""
    for reading in readings:
        unit, most = reading.unit, getattr(limits, reading.limit or "_", None)
        if most:
            unit += f" of {amount(most, 'GiB') if unit == '%' else in_unit(most, unit)}"
        if levels[reading.name].count:
            yield _row(reading.label, unit, levels[reading.name])


def _row(label: str, unit: str, seen: Sketch) -> str:
    values = (seen.mean, seen.deviation, *map(seen.quantile, QUANTILES))
    cells = [in_unit(value, unit.partition(" ")[0]) for value in values if value is not None]
    return f"  {f'{label}, {unit}':<34}" + "".join(cell.rjust(8) for cell in cells or "–")


def _target_line(results: Sequence[TargetResult]) -> str:
    """One target; of several GPUs the one that is furthest from it: missed before unknown before met."""
    order = {False: 0, None: 1, True: 2}
    worst = min(results, key=lambda result: (order[result.met], result.margin or 0.0))
    measured = "not measured"
    if worst.value is not None:
        measured = f"{worst.value:.0f}{worst.unit}"
        if worst.name == "fluctuation":
            measured = _points(worst.value)
    if len(results) > 1:
        measured += f" (GPU {worst.gpu})"
    return f"  {MARKS[worst.met]} {worst.what:<40}{worst.wish:<19}{measured:>17}".rstrip()
