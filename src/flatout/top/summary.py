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

ENOUGH_SAMPLES = 3
THROTTLED_SHARE_PCT = 20.0  # of the time held back by heat or a hardware brake: throttled
IDLE_P95_PCT = 5.0  # nothing ran for 95% of the time: idle

WASTEFUL_UTIL_PCT = 90.0  # GPU-Util above this, and …
WASTEFUL_SM_PCT = 25.0  # … SM active below this: busy but wasteful
WASTEFUL_POWER_PCT = 40.0  # without SM active: the power share below this, and …
WASTEFUL_CLOCK_PCT = 50.0  # … the clock above this, for at a low clock any work draws little power

LOW_MEAN_PCT = 70.0  # mean activity below this is low, and asks for a reason
CPU_FULL_PCT = 90.0
CPU_QUOTA_HELD_PCT = 20.0  # of the time the cgroup's quota held the training back
IOWAIT_HIGH_PCT = 25.0
PRESSURE_IO_HIGH_PCT = 50.0
DISK_FULL_PCT = 90.0
TRAINER_FULL_PCT = 90.0  # of one core: the training process itself may be the limit

SWING_P95_PCT = 70.0  # p95 at or above this, and …
SWING_P5_PCT = 10.0  # … p5 below this: fluctuating


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
    met: bool | None
    margin: float | None


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
    summaries = tuple(GpuSummary(figures=gpu, verdict=_first(_ask_gpu(gpu, host, seen.samples))) for gpu in gpus)
    return TopSummary(
        hostname=hostname,
        samples=seen.samples,
        seconds=seen.seconds,
        verdict=_verdict_on_all({gpu.figures.index: gpu.verdict for gpu in summaries}, host, seen.samples),
        gpus=summaries,
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


def _verdict_on_all(verdicts: dict[int, Verdict], host: HostFigures, samples: int) -> Verdict:
    """The verdict on the machine: that on its worst GPU."""
    if not verdicts:
        return _first(_ask_host(host, samples))

    def severity(index: int) -> tuple[bool, int, int]:
        word = verdicts[index].word
        return tone(word) == "none", WORDS.index(word), index  # what is no news comes last, an idle GPU too

    worst = min(verdicts, key=severity)
    if len(verdicts) == 1:
        return verdicts[worst]
    idle = [str(index) for index, verdict in verdicts.items() if verdict.word == "idle"]
    reason = f"GPU {worst}: {verdicts[worst].reason}"
    if idle and verdicts[worst].word != "idle":
        reason += f" GPU {', '.join(idle)}: idle."
    return Verdict(word=verdicts[worst].word, reason=reason)


# Each of these asks its questions in order, and yields the words that apply with their reasons.
_Answers = Iterator[tuple[str, str]]


def _first(answers: _Answers) -> Verdict:
    word, reason = next(answers)
    return Verdict(word=word, reason=reason)


def _ask_host(host: HostFigures, samples: int) -> _Answers:
    if samples < ENOUGH_SAMPLES:
        yield _too_few(samples)
    yield from _memory_full("host", host)
    cpu_pct, reason = host.mean("cpu_pct"), "no NVIDIA GPU was seen: only the host was measured"
    if cpu_pct is not None:
        reason += f"; the CPU is {cpu_pct:.0f}% busy"
    yield "no GPU", f"{reason}."


def _ask_gpu(gpu: GpuFigures, host: HostFigures, samples: int) -> _Answers:
    activity = gpu.activity
    if samples < ENOUGH_SAMPLES or activity is None:
        yield _too_few(samples)
        return
    average = f"{gpu.activity_name} averages {activity.mean:.0f}%"
    is_low = activity.mean < LOW_MEAN_PCT
    yield from _memory_full("GPU", gpu)
    yield from _memory_full("host", host)
    yield from _throttled(gpu)
    if activity.p95 < IDLE_P95_PCT and not gpu.in_use:
        yield "idle", f"{average}: nothing used the GPU."
    yield from _wasteful(gpu, activity)
    if is_low:
        yield from (("CPU-bound", f"{reason} while {average}.") for reason in _cpu_full(host))
        yield from (("disk-bound", f"{reason} while {average}.") for reason in _disk_full(host))
    if activity.p95 >= SWING_P95_PCT and activity.p5 < SWING_P5_PCT:
        swing = f"{gpu.activity_name} swings between {activity.p5:.0f}% (p5) and {activity.p95:.0f}% (p95)"
        idle = f"idle {gpu.idle_pct:.0f}% of the time, up to {gpu.longest_idle_s:.1f} s in a row"
        yield "fluctuating", f"{swing}: {idle}."
    if is_low:
        yield "starved", average + _waits_for_work(host)
    spread = f"a fluctuation of {activity.deviation:.0f} points, idle {gpu.idle_pct:.0f}% of the time"
    yield "healthy", f"{average}{_stand_in(gpu)} with {spread}."


def _too_few(samples: int) -> tuple[str, str]:
    return "not enough samples", f"{samples} of the {ENOUGH_SAMPLES} samples a verdict needs."


def _memory_full(owner: str, figures: GpuFigures | HostFigures) -> _Answers:
    used_pct = figures.peak("memory_pct")
    if used_pct is not None and used_pct > MEMORY_FULL_PCT:
        yield "near out of memory", f"the {owner}'s memory was {used_pct:.1f}% full at its peak."


def _throttled(gpu: GpuFigures) -> _Answers:
    held = {reason: pct for reason, pct in gpu.throttled_pct.items() if reason in HARMFUL_THROTTLES}
    reason = max(held, key=lambda name: held[name], default=None)
    if reason is None or held[reason] < THROTTLED_SHARE_PCT:
        return
    at, clock = "", gpu.mean("sm_clock_mhz")
    if clock is not None:
        at = f" at {clock:.0f} MHz"
        if gpu.sm_clock_max_mhz:
            at += f" of {gpu.sm_clock_max_mhz:.0f}"
    yield "throttled", f"{reason} held the clocks down for {held[reason]:.0f}% of the time{at}."


def _wasteful(gpu: GpuFigures, activity: Stats) -> _Answers:
    util_pct = gpu.mean("gpu_util_pct")
    if util_pct is None or util_pct <= WASTEFUL_UTIL_PCT:
        return
    waste = f"SM active is {activity.mean:.0f}%" if activity.mean < WASTEFUL_SM_PCT else ""
    if not gpu.has_gpm:
        waste = _low_power(gpu)
    if waste:
        kernels = "a kernel is nearly always there, but most of the GPU has nothing to do"
        yield "busy but wasteful", f"GPU-Util reads {util_pct:.0f}%, yet {waste}: {kernels}."


def _low_power(gpu: GpuFigures) -> str:
    share_pct, clock, at = gpu.mean("power_share_pct"), gpu.mean("sm_clock_mhz"), ""
    if share_pct is None or share_pct >= WASTEFUL_POWER_PCT:
        return ""
    if clock is not None and gpu.sm_clock_max_mhz:
        clock_pct = 100 * clock / gpu.sm_clock_max_mhz
        if clock_pct < WASTEFUL_CLOCK_PCT:
            return ""
        at = f" at {clock_pct:.0f}% of its top clock"
    return f"the GPU draws {share_pct:.0f}% of its power limit{at} (stand-ins for SM active)"


def _cpu_full(host: HostFigures) -> Iterator[str]:
    cpu_pct, held_pct = host.mean("cpu_pct"), host.mean("throttled_pct")
    if cpu_pct is not None and cpu_pct > CPU_FULL_PCT:
        cores = host.cores_allowed or host.cores
        of = f" of {cores:g} cores" if cores else ""
        yield f"{cpu_pct:.0f}%{of} are busy"
    if held_pct is not None and held_pct >= CPU_QUOTA_HELD_PCT:
        yield f"the cgroup's CPU quota held processes back {held_pct:.0f}% of the time"


def _disk_full(host: HostFigures) -> Iterator[str]:
    signs = (
        ("processes waited for storage {:.0f}% of the time", "pressure_io_pct", PRESSURE_IO_HIGH_PCT),
        ("iowait is {:.0f}%", "iowait_pct", IOWAIT_HIGH_PCT),
        ("the busiest disk is {:.0f}% busy", "disk_busy_pct", DISK_FULL_PCT),
    )
    for words, name, threshold in signs:
        pct = host.mean(name)
        if pct is not None and pct >= threshold:
            yield words.format(pct)


def _waits_for_work(host: HostFigures) -> str:
    busy = (("the CPU is {:.0f}% busy", "cpu_pct"), ("the busiest disk {:.0f}%", "disk_busy_pct"))
    known = [words.format(pct) for words, name in busy if (pct := host.mean(name)) is not None]
    beside = f" while {' and '.join(known)}" if known else ""
    trainer_pct = host.mean("trainer_cpu_pct")
    if trainer_pct is not None and trainer_pct >= TRAINER_FULL_PCT:
        return f"{beside}; the training process itself uses {trainer_pct:.0f}% of a core and may be the limit."
    return f"{beside}: the GPU waits for work{', and neither is the reason' if known else ''}."


def _stand_in(gpu: GpuFigures) -> str:
    if gpu.has_gpm:
        return ""
    share_pct = gpu.mean("power_share_pct")
    drawn = f", power at {share_pct:.0f}% of its limit" if share_pct is not None else ""
    return f" (a stand-in for SM active{drawn})"


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
        what, gpu, value, met, margin = self.what, None, self.read(figures), None, None
        if value is not None:
            margin = min(value - self.at_least, self.at_most - value)
            met = margin >= 0
        if isinstance(figures, GpuFigures):
            gpu = figures.index
            if self.name == "sm" and not figures.has_gpm:
                what += " (stand-in: power share)"
        return TargetResult(
            name=self.name, gpu=gpu, what=what, wish=self.wish, unit=self.unit, value=value, met=met, margin=margin
        )


def _hottest(gpu: GpuFigures) -> float | None:
    return gpu.peak("temperature_c")


_ANY = math.inf
_GPU_TARGETS = (
    _Target("sm", "SM active, mean", "at least 80%", "%", 80, _ANY, lambda gpu: gpu.work_pct),
    _Target("util", "GPU-Util, mean", "at least 85%", "%", 85, _ANY, lambda gpu: gpu.mean("gpu_util_pct")),
    _Target("fluctuation", "fluctuation", "at most 10 points", " points", -_ANY, 10, lambda gpu: gpu.fluctuation_pct),
    _Target("memory", "GPU memory, peak", "70 to 90%", "%", 70, 90, lambda gpu: gpu.peak("memory_pct")),
    _Target("power", "power share, mean", "at least 80%", "%", 80, _ANY, lambda gpu: gpu.mean("power_share_pct")),
    _Target("temperature", "temperature, peak", "at most 85 °C", " °C", -_ANY, 85, _hottest),
)
_CPU_TARGET = _Target("cpu", "CPU, mean", "at most 90%", "%", -_ANY, 90, lambda host: host.mean("cpu_pct"))


def _check_targets(gpus: Sequence[GpuFigures], host: HostFigures) -> Iterator[TargetResult]:
    """Each target against each GPU, and the last against the host."""
    for target in _GPU_TARGETS:
        yield from map(target.check, gpus)
    yield _CPU_TARGET.check(host)
