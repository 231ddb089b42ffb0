"""How values are written for people, wherever they are shown."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Escape sequences of terminals (colors, titles, links); then what is left of control characters, but
# for tabs and line ends; then what reverses the order of letters.
_UNPRINTABLE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -~])?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Text without what a terminal would obey instead of showing it."""
    return text if text.isprintable() else _UNPRINTABLE.sub("", text)


def in_full(value: float) -> str:
    """A number to four digits as people write it: 14,130 and 0.3712, never 1.413e+04."""
    whole = len(f"{abs(value):.0f}")
    return f"{float(f'{value:.4g}'):,.0f}" if whole >= 4 else f"{value:,.4g}"


def as_typed(value: object) -> str:
    """A setting as one would type it on a command line or in YAML: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def exit_in_words(code: int) -> str:
    """What a command ended with, by the exit code that a shell would give: exit code 3, or SIGSEGV."""
    try:
        return signal.Signals(code - 128).name if code > 128 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def count_of(number: int, thing: str) -> str:
    """So many of a thing: 1 sample, 1,200 samples, 200 batches."""
    ending = "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{'' if number == 1 else ending}"


def ms(value: float) -> str:
    """Milliseconds with as many digits as mean something: 0.2 µs, 20 µs, 9.31 ms, 1.20 s."""
    if 0 < value < 0.00095:
        return f"{value * 1e3:.1g} µs"
    if value < 0.0995:
        return f"{value * 1e3:.0f} µs"
    if value < 10:
        return f"{value:.2f} ms"
    if value < 1000:
        return f"{value:.1f} ms"
    return f"{value / 1e3:.2f} s"


def ms_a_step(total_ms: float | None, steps: int) -> str:
    """A total as milliseconds a step; empty where it is not known."""
    return "" if total_ms is None else ms(total_ms / max(1, steps))


def duration(value_ms: float) -> str:
    """A length of time: 42.0 s, 3 min 20 s, 2 h 5 min."""
    seconds = value_ms / 1e3
    if seconds < 0.05:
        return ms(value_ms)
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s"


# Every hardware figure that is shown. To add one: a field of GpuSample or HostSample
# (hardware_samples), the code in sample/ that measures it, and an entry here.

MEMORY_FULL_PCT = 95.0  # of a GPU or of the host: near out of memory
# Throttling that does harm. A GPU at its power cap is at work, and an idle one lowers its clocks itself.
HARMFUL_THROTTLES = frozenset(
    {"hardware slowdown", "heat (software slowdown)", "heat (hardware slowdown)", "power brake"}
)

Place = Literal[
    "over time",  # `top` follows it, and gives its mean and quantiles in the JSON summary
    "summary",  # a row in the summary that `top` prints
    "gauge",  # a bar in the live view, of a GPU
    "csv",
    "run",  # `hardware` in the JSON of a run
    "report",  # the table of GPUs in the report of a run; what it says of the machine is in report/run_view.py
]


@dataclass(frozen=True, slots=True)
class Reading:
    """One hardware figure. `name` is its field in a sample, or in what `top` computes from one."""

    name: str
    label: str
    unit: str
    shown: frozenset[Place]
    limit: str = ""  # the field that holds the most it can be
    peak: bool = False  # the highest value counts, not the mean
    short: str = ""  # a label of at most ten characters, where `label` is longer
    color: Literal["work", "claim", "cool", "heat"] = "work"  # of its gauge


def amount(value: float | None, unit: str, most: float | None = None) -> str:
    """A value in its unit, and the most it can be: 71%, 350 W, 70.0/140.0 GiB; a dash where nothing
    was measured."""
    if value is None:
        return "–"
    of = f"/{in_unit(most, unit)}" if most else ""
    return f"{in_unit(value, unit)}{of} {unit}".rstrip().replace(" %", "%")


def in_unit(value: float, unit: str) -> str:
    """A value in a unit, without it: bytes as GiB or MiB/s with one digit, everything else without."""
    size = {"GiB": 2**30, "MiB/s": 2**20}.get(unit)
    return f"{value / size:.1f}" if size else f"{value:.0f}"


def shown_in(place: Place, readings: Iterable[Reading]) -> tuple[Reading, ...]:
    """The readings that appear in a place, in order."""
    return tuple(reading for reading in readings if place in reading.shown)


_CSV: frozenset[Place] = frozenset({"csv"})
_JSON: frozenset[Place] = frozenset({"over time"})
_OVER_TIME: frozenset[Place] = frozenset({"over time", "csv"})
_EVERYWHERE: frozenset[Place] = frozenset({"over time", "summary", "gauge", "csv", "run", "report"})

# The order is that of the CSV columns.
GPU_READINGS = (
    Reading("gpu_util_pct", "GPU-Util", "%", _EVERYWHERE, color="claim"),
    Reading("sm_active_pct", "SM active", "%", _EVERYWHERE),
    Reading("sm_occupancy_pct", "SM occupancy", "%", _OVER_TIME),
    Reading("tensor_active_pct", "tensor active", "%", _EVERYWHERE, short="tensor"),
    Reading("dram_active_pct", "DRAM active", "%", _EVERYWHERE, short="DRAM"),
    Reading("pcie_rx_bytes_s", "PCIe in", "MiB/s", _OVER_TIME),
    Reading("pcie_tx_bytes_s", "PCIe out", "MiB/s", _OVER_TIME),
    Reading(
        "memory_used_bytes", "memory", "GiB", _EVERYWHERE, limit="memory_total_bytes", peak=True, color="heat"
    ),
    Reading("memory_total_bytes", "memory in all", "GiB", _CSV),
    Reading("memory_pct", "memory in use", "%", _JSON, peak=True),
    Reading("power_w", "power", "W", _EVERYWHERE, limit="power_limit_w", color="cool"),
    Reading("power_limit_w", "power limit", "W", _CSV),
    Reading("power_share_pct", "power share", "%", _JSON),
    Reading("energy_j", "energy", "J", _CSV),
    Reading(
        "temperature_c", "temperature", "°C", _EVERYWHERE - {"run"}, peak=True, short="temp.", color="heat"
    ),
    Reading(
        "sm_clock_mhz", "SM clock", "MHz", _OVER_TIME | {"summary", "gauge"}, limit="sm_clock_max_mhz", color="cool"
    ),
    Reading("memory_clock_mhz", "memory clock", "MHz", _CSV),
    Reading("decoder_util_pct", "video decoder", "%", _OVER_TIME),
    Reading("jpeg_util_pct", "JPEG decoder", "%", _OVER_TIME),
    Reading("throttle", "clocks held back by", "", _CSV),
    Reading("pulse_low_pct", "lowest pulse", "%", _CSV),
    Reading("pulse_high_pct", "highest pulse", "%", _CSV),
)  # fmt: skip

HOST_READINGS = (
    Reading("cpu_pct", "CPU", "%", _OVER_TIME | {"summary", "run"}),
    Reading("iowait_pct", "iowait", "%", _OVER_TIME | {"summary"}),
    Reading("run_queue", "run queue", "", _OVER_TIME),
    Reading("switches_s", "context switches a second", "", _JSON),
    Reading("pressure_cpu_pct", "waiting for a core (PSI)", "%", _OVER_TIME),
    Reading("pressure_io_pct", "waiting for storage (PSI)", "%", _OVER_TIME | {"summary"}),
    Reading("pressure_memory_pct", "waiting for memory (PSI)", "%", _OVER_TIME),
    Reading("throttled_pct", "held back by the CPU quota", "%", _JSON),
    Reading("memory_used_bytes", "memory in use", "GiB", _OVER_TIME),
    Reading("memory_total_bytes", "memory in all", "GiB", _CSV),
    Reading("memory_pct", "memory", "%", _JSON | {"summary"}, limit="memory_total_bytes"),
    Reading("page_cache_bytes", "page cache", "GiB", _JSON),
    Reading("swap_used_bytes", "swap", "GiB", _OVER_TIME),
    Reading("shm_used_bytes", "/dev/shm in use", "GiB", _OVER_TIME),
    Reading("shm_pct", "/dev/shm", "%", _JSON),
    Reading("disk_read_bytes_s", "disk reads", "MiB/s", _OVER_TIME | {"summary"}),
    Reading("disk_write_bytes_s", "disk writes", "MiB/s", _OVER_TIME),
    Reading("disk_busy_pct", "busiest disk", "%", _OVER_TIME | {"summary"}),
    Reading("training_cpu_pct", "training, of a core", "%", _JSON),
    Reading("trainer_cpu_pct", "trainer, of a core", "%", _OVER_TIME | {"summary"}),
    Reading("workers", "loader workers", "", _OVER_TIME),
    Reading("worker_cpu_pct", "each worker, of a core", "%", _JSON | {"summary"}),
    Reading("workers_cpu_pct", "all workers, of a core", "%", _CSV),
    Reading("training_rss_bytes", "memory of the training", "GiB", _CSV),
    Reading("training_read_bytes_s", "reads of the training", "MiB/s", _OVER_TIME),
)
