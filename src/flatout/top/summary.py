"""Figures → the summary: a verdict with its reason in numbers, and targets met or missed.

Questions are asked in the order of WORDS, and the first that is answered yes is the verdict: first what is about to
break, then what the numbers hide, then why a GPU is low, then how it is low.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flatout.model.readings import HARMFUL_THROTTLES, MEMORY_FULL_PCT
from flatout.model.records import to_json
from flatout.top.figures import FigureBuilder, GpuFigures, HostFigures, Stats

WORDS = (
    "near out of memory", "throttled", "idle", "busy but wasteful", "CPU-bound", "disk-bound", "fluctuating", "starved",
    "healthy", "not enough samples", "no GPU",
)  # fmt: skip
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """One GPU: its figures and the verdict on it."""

    figures: GpuFigures
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
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
    met: bool | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSummary:
    """Everything `flatout top` says at the end."""

    hostname: str
    samples: int
    seconds: float
    verdict: Verdict
    gpus: tuple[GpuSummary, ...]
    host: HostFigures
    targets: tuple[TargetResult, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data; docs/TOP.md names every field. What was not measured is left out."""
        gpus = [_flat(gpu.figures) | {"verdict": to_json(gpu.verdict)} for gpu in self.gpus]
        return {"record": "top-summary", **to_json(self), "gpus": gpus, "host": _flat(self.host)}


def _flat(figures: GpuFigures | HostFigures) -> dict[str, Any]:
    data: dict[str, Any] = to_json(figures)
    levels: dict[str, Any] = data.pop("levels")
    return data | levels


def sum_up(seen: FigureBuilder, *, hostname: str = "", notes: Iterable[str] = ()) -> TopSummary:
    """The summary of the samples seen so far."""
    gpus, host = seen.gpus(), seen.host()
    verdicts = [_first(_ask_gpu(gpu, host, seen.samples)) for gpu in gpus]
    return TopSummary(
        hostname=hostname,
        samples=seen.samples,
        seconds=seen.seconds,
        verdict=_verdict_on_all(gpus, verdicts) or _first(_ask_host(host, seen.samples)),
        gpus=tuple(GpuSummary(figures=gpu, verdict=one) for gpu, one in zip(gpus, verdicts, strict=True)),
        host=host,
        targets=tuple(_check_targets(gpus, host)),
        notes=tuple(notes),
    )


# The verdict


def tone(word: str) -> str:
    """Whether a verdict is good news, bad news, or none."""
    if word == "healthy":
        return "good"
    return "none" if word in ("idle", "not enough samples", "no GPU") else "bad"


def _verdict_on_all(gpus: Sequence[GpuFigures], verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict on the machine: that on its worst GPU. What is no news comes last, an idle GPU too."""
    if len(verdicts) < 2:
        return next(iter(verdicts), None)
    by_gpu = list(zip(gpus, verdicts, strict=True))
    gpu, worst = min(by_gpu, key=lambda one: (tone(one[1].word) == "none", WORDS.index(one[1].word)))
    reason = f"GPU {gpu.index}: {worst.reason}"
    idle = [str(other.index) for other, verdict in by_gpu if verdict.word == "idle" != worst.word]
    if idle:
        reason += f" GPU {', '.join(idle)}: idle."
    return Verdict(word=worst.word, reason=reason)


# Each of these asks its questions in order, and yields the words that apply with their reasons.
_Answers = Iterator[tuple[str, str]]


def _first(answers: _Answers) -> Verdict:
    word, reason = next(answers)
    return Verdict(word=word, reason=f"{reason}.")


def _ask_host(host: HostFigures, samples: int) -> _Answers:
    if samples < ENOUGH_SAMPLES:
        yield _too_few(samples)
    yield from _memory_full("host", host)
    yield "no GPU", f"no NVIDIA GPU was seen: only the host was measured{_beside(host)}"


def _ask_gpu(gpu: GpuFigures, host: HostFigures, samples: int) -> _Answers:
    activity = gpu.activity
    if samples < ENOUGH_SAMPLES or activity is None:
        yield _too_few(samples)
        return
    average = f"{gpu.activity_name} averages {activity.mean:.0f}%"
    is_low = activity.mean < LOW_MEAN_PCT
    yield from _memory_full("GPU", gpu)
    yield from _memory_full("host", host)
    for reason, pct in gpu.throttled_pct.items():
        if reason in HARMFUL_THROTTLES and pct >= THROTTLED_SHARE_PCT:
            yield "throttled", f"{reason} held the clocks down for {pct:.0f}% of the time"
    if activity.p95 < IDLE_P95_PCT and not gpu.in_use:
        yield "idle", f"{average}: nothing used the GPU"
    yield from _wasteful(gpu, activity)
    for word, name, limit, words in HOST_LIMITS:
        pct_seen = host.mean(name)
        if is_low and pct_seen is not None and pct_seen >= limit:
            yield word, f"{words.format(pct_seen)} while {average}"
    if activity.p95 >= SWING_P95_PCT and activity.p5 < SWING_P5_PCT:
        swing = f"{gpu.activity_name} swings between {activity.p5:.0f}% (p5) and {activity.p95:.0f}% (p95)"
        idle = f"idle {gpu.idle_pct:.0f}% of the time, up to {gpu.longest_idle_s:.1f} s in a row"
        yield "fluctuating", f"{swing}: {idle}"
    if is_low:
        yield "starved", f"{average}: the GPU waits for work{_beside(host)}"
    stand_in = "" if gpu.has_gpm else " (a stand-in for SM active)"
    spread = f"a fluctuation of {activity.deviation:.0f} points, idle {gpu.idle_pct:.0f}% of the time"
    yield "healthy", f"{average}{stand_in} with {spread}"


def _too_few(samples: int) -> tuple[str, str]:
    return "not enough samples", f"{samples} of the {ENOUGH_SAMPLES} samples a verdict needs"


def _memory_full(owner: str, figures: GpuFigures | HostFigures) -> _Answers:
    used_pct = figures.peak("memory_pct")
    if used_pct is not None and used_pct > MEMORY_FULL_PCT:
        yield "near out of memory", f"the {owner}'s memory was {used_pct:.1f}% full at its peak"


def _wasteful(gpu: GpuFigures, activity: Stats) -> _Answers:
    util_pct, power_pct, clock = gpu.mean("gpu_util_pct"), gpu.mean("power_share_pct"), gpu.mean("sm_clock_mhz")
    waste = ""
    if gpu.has_gpm and activity.mean < WASTEFUL_SM_PCT:
        waste = f"SM active is {activity.mean:.0f}%"
    elif not gpu.has_gpm and power_pct is not None and power_pct < WASTEFUL_POWER_PCT:
        top_mhz = gpu.sm_clock_max_mhz or 0.0
        if clock is None or clock >= top_mhz * WASTEFUL_CLOCK_PCT / 100:
            waste = f"the GPU draws {power_pct:.0f}% of its power limit (a stand-in for SM active)"
    if waste and util_pct is not None and util_pct > WASTEFUL_UTIL_PCT:
        kernels = "a kernel is nearly always there, but most of the GPU has nothing to do"
        yield "busy but wasteful", f"GPU-Util reads {util_pct:.0f}%, yet {waste}: {kernels}"


def _beside(host: HostFigures) -> str:
    """How full the host is."""
    known = [words.format(pct) for words, name in BESIDE if (pct := host.mean(name)) is not None]
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
    read: Callable[[Any], float | None]

    def check(self, figures: GpuFigures | HostFigures) -> TargetResult:
        value, met, margin, what = self.read(figures), None, None, self.what
        if value is not None:
            margin = min(value - self.at_least, self.at_most - value)
            met = margin >= 0
        if self.name == "sm" and not getattr(figures, "has_gpm", True):
            what += " (stand-in: power share)"
        gpu = getattr(figures, "index", None)
        return TargetResult(
            name=self.name, gpu=gpu, what=what, wish=self.wish, unit=self.unit, value=value, met=met, margin=margin
        )


_ANY = math.inf
_GPU_TARGETS = (
    _Target("sm", "SM active, mean", "at least 80%", "%", 80, _ANY, lambda gpu: gpu.work_pct),
    _Target("util", "GPU-Util, mean", "at least 85%", "%", 85, _ANY, lambda gpu: gpu.mean("gpu_util_pct")),
    _Target("fluctuation", "fluctuation", "at most 10 points", " points", -_ANY, 10, lambda gpu: gpu.fluctuation_pct),
    _Target("memory", "GPU memory, peak", "70 to 90%", "%", 70, 90, lambda gpu: gpu.peak("memory_pct")),
    _Target("power", "power share, mean", "at least 80%", "%", 80, _ANY, lambda gpu: gpu.mean("power_share_pct")),
    _Target(
        "temperature", "temperature, peak", "at most 85 °C", " °C", -_ANY, 85, lambda gpu: gpu.peak("temperature_c")
    ),
)
_CPU_TARGET = _Target("cpu", "CPU, mean", "at most 90%", "%", -_ANY, 90, lambda host: host.mean("cpu_pct"))


def _check_targets(gpus: Sequence[GpuFigures], host: HostFigures) -> Iterator[TargetResult]:
    """Each target against each GPU, and the last against the host."""
    for target in _GPU_TARGETS:
        yield from map(target.check, gpus)
    yield _CPU_TARGET.check(host)
