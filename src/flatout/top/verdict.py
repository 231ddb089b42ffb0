"""Figures → one word, and one sentence that gives its reason in numbers.

The questions are asked in the order of the list below, and the first that is answered yes is the verdict: first what
is about to break, then what the numbers hide, then why a card is low, then how it is low.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatout.top.figures import GpuFigures, HostFigures

__all__ = ["Verdict", "judge", "judge_all"]

ENOUGH_SAMPLES = 3

MEMORY_FULL_PCT = 95.0  # of the card or of the host: near out of memory
THROTTLED_SHARE_PCT = 20.0  # of the time held back by heat or a hardware brake: throttled
# "power cap" is not among them: a card at its limit is a card at work. Nor is "idle": that is no fault either.
HARMFUL_THROTTLES = frozenset(
    {"hardware slowdown", "heat (software slowdown)", "heat (hardware slowdown)", "power brake"}
)
IDLE_P95_PCT = 5.0  # nothing ran for 95% of the time: idle

WASTEFUL_UTIL_PCT = 90.0  # GPU-Util above this, and …
WASTEFUL_SM_PCT = 25.0  # … SM active below this: busy but wasteful
WASTEFUL_POWER_PCT = 40.0  # without SM active: the power share below this, and …
WASTEFUL_CLOCK_PCT = 50.0  # … the clock above this, for at a low clock any work draws little power

LOW_MEAN_PCT = 70.0  # mean activity below this: the card is low, and one asks why
CPU_FULL_PCT = 90.0
CPU_QUOTA_HELD_PCT = 20.0  # of the time the cgroup's quota held the training back
IOWAIT_HIGH_PCT = 25.0
PRESSURE_IO_HIGH_PCT = 50.0
DISK_FULL_PCT = 90.0
TRAINER_FULL_PCT = 90.0  # of one core: the training process itself may be the limit

SWING_P95_PCT = 70.0  # p95 at or above this, and …
SWING_P5_PCT = 10.0  # … p5 below this: fluctuating

# A machine's verdict is that of the card which comes first here.
SEVERITY = (
    "near out of memory",
    "throttled",
    "busy but wasteful",
    "CPU-bound",
    "disk-bound",
    "fluctuating",
    "starved",
    "healthy",
    "idle",
    "not enough samples",
    "no GPU",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What it comes to: `word` is one of SEVERITY."""

    word: str
    reason: str


def judge_all(verdicts: dict[int, Verdict], host: HostFigures, samples: int) -> Verdict:
    """The verdict on the machine, from those on its cards by index: the worst of them."""
    if not verdicts:
        if samples < ENOUGH_SAMPLES:
            return _too_few(samples)
        cpu = f"; the CPU is {host.cpu_pct.mean:.0f}% busy" if host.cpu_pct is not None else ""
        full = _host_memory(host)
        return full or Verdict(word="no GPU", reason=f"no NVIDIA card was seen: only the host was measured{cpu}.")
    worst = min(verdicts, key=lambda index: (SEVERITY.index(verdicts[index].word), index))
    if len(verdicts) == 1:
        return verdicts[worst]
    idle = [str(index) for index, verdict in verdicts.items() if verdict.word == "idle"]
    reason = f"GPU {worst}: {verdicts[worst].reason}"
    if idle and verdicts[worst].word != "idle":
        reason += f" GPU {', '.join(idle)} {'stands' if len(idle) == 1 else 'stand'} idle."
    return Verdict(word=verdicts[worst].word, reason=reason)


def judge(gpu: GpuFigures, host: HostFigures, samples: int) -> Verdict:
    """The verdict on one card."""
    if samples < ENOUGH_SAMPLES or gpu.activity is None:
        return _too_few(samples)
    questions: tuple[Callable[[], Verdict | None], ...] = (
        lambda: _card_memory(gpu) or _host_memory(host),
        lambda: _throttled(gpu),
        lambda: _idle(gpu),
        lambda: _wasteful(gpu),
        lambda: _cpu_bound(gpu, host),
        lambda: _disk_bound(gpu, host),
        lambda: _fluctuating(gpu),
        lambda: _starved(gpu, host),
    )
    return next((answer for question in questions if (answer := question())), None) or _healthy(gpu)


def _too_few(samples: int) -> Verdict:
    return Verdict(word="not enough samples", reason=f"{samples} of the {ENOUGH_SAMPLES} samples a verdict needs.")


def _card_memory(gpu: GpuFigures) -> Verdict | None:
    used = gpu.levels.get("memory_pct")
    if used is None or used.high <= MEMORY_FULL_PCT:
        return None
    return Verdict(word="near out of memory", reason=f"the card's memory was {used.high:.1f}% full at its peak.")


def _host_memory(host: HostFigures) -> Verdict | None:
    used = host.memory_pct
    if used is None or used.high <= MEMORY_FULL_PCT:
        return None
    return Verdict(word="near out of memory", reason=f"the host's memory was {used.high:.1f}% full at its peak.")


def _throttled(gpu: GpuFigures) -> Verdict | None:
    held = {reason: pct for reason, pct in gpu.throttled_pct.items() if reason in HARMFUL_THROTTLES}
    reason = max(held, key=lambda name: held[name], default=None)
    if reason is None or held[reason] < THROTTLED_SHARE_PCT:
        return None
    clock = gpu.levels.get("sm_clock_mhz")
    at = f" at {clock.mean:.0f} MHz" if clock is not None else ""
    of = f" of {gpu.sm_clock_max_mhz:.0f}" if at and gpu.sm_clock_max_mhz else ""
    return Verdict(
        word="throttled", reason=f"{reason} held the clocks down for {held[reason]:.0f}% of the time{at}{of}."
    )


def _idle(gpu: GpuFigures) -> Verdict | None:
    """A card that did nothing, and that no training at work holds."""
    assert gpu.activity is not None
    if gpu.activity.p95 >= IDLE_P95_PCT or gpu.in_use:
        return None
    return Verdict(word="idle", reason=f"{_mean(gpu)}: nothing used the card.")


def _wasteful(gpu: GpuFigures) -> Verdict | None:
    assert gpu.activity is not None
    util, share = gpu.levels.get("gpu_util_pct"), gpu.levels.get("power_share_pct")
    if util is None or util.mean <= WASTEFUL_UTIL_PCT:
        return None
    if gpu.has_gpm:
        if gpu.activity.mean >= WASTEFUL_SM_PCT:
            return None
        found = f"SM active is {gpu.activity.mean:.0f}%"
    else:
        clock_pct = _clock_pct(gpu)
        slow = clock_pct is not None and clock_pct < WASTEFUL_CLOCK_PCT
        if share is None or share.mean >= WASTEFUL_POWER_PCT or slow:
            return None
        at = f" at {clock_pct:.0f}% of its top clock" if clock_pct is not None else ""
        found = f"the card draws {share.mean:.0f}% of its power limit{at} (stand-ins for SM active)"
    return Verdict(
        word="busy but wasteful",
        reason=f"GPU-Util reads {util.mean:.0f}%, yet {found}: "
        "a kernel is nearly always there, but most of the card has nothing to do.",
    )


def _cpu_bound(gpu: GpuFigures, host: HostFigures) -> Verdict | None:
    held = host.levels.get("throttled_pct")
    if not _low(gpu):
        return None
    if host.cpu_pct is not None and host.cpu_pct.mean > CPU_FULL_PCT:
        cores = host.cores_allowed or host.cores
        of = f" of {cores:g} cores" if cores else ""
        return Verdict(word="CPU-bound", reason=f"{host.cpu_pct.mean:.0f}%{of} are busy while {_mean(gpu)}.")
    if held is not None and held.mean >= CPU_QUOTA_HELD_PCT:
        return Verdict(
            word="CPU-bound",
            reason=f"the cgroup's CPU quota held processes back {held.mean:.0f}% of the time while {_mean(gpu)}.",
        )
    return None


def _disk_bound(gpu: GpuFigures, host: HostFigures) -> Verdict | None:
    if not _low(gpu):
        return None
    signs = (
        ("processes stood waiting for storage {:.0f}% of the time", "pressure_io_pct", PRESSURE_IO_HIGH_PCT),
        ("iowait is {:.0f}%", "iowait_pct", IOWAIT_HIGH_PCT),
    )
    for words, name, threshold in signs:
        seen = host.levels.get(name)
        if seen is not None and seen.mean >= threshold:
            return Verdict(word="disk-bound", reason=f"{words.format(seen.mean)} while {_mean(gpu)}.")
    if host.disk_busy_pct is not None and host.disk_busy_pct.mean >= DISK_FULL_PCT:
        busy = f"the busiest disk is {host.disk_busy_pct.mean:.0f}% busy"
        return Verdict(word="disk-bound", reason=f"{busy} while {_mean(gpu)}.")
    return None


def _fluctuating(gpu: GpuFigures) -> Verdict | None:
    activity = gpu.activity
    assert activity is not None
    if activity.p95 < SWING_P95_PCT or activity.p5 >= SWING_P5_PCT:
        return None
    return Verdict(
        word="fluctuating",
        reason=f"{gpu.activity_name} swings between {activity.p5:.0f}% (p5) and {activity.p95:.0f}% (p95): "
        f"idle {gpu.idle_pct:.0f}% of the time, up to {gpu.longest_idle_s:.1f} s in a row.",
    )


def _starved(gpu: GpuFigures, host: HostFigures) -> Verdict | None:
    if not _low(gpu):
        return None
    beside = [f"the CPU is {host.cpu_pct.mean:.0f}% busy"] if host.cpu_pct is not None else []
    if host.disk_busy_pct is not None:
        beside.append(f"the busiest disk {host.disk_busy_pct.mean:.0f}%")
    text = _mean(gpu) + (f" while {' and '.join(beside)}" if beside else "")
    if host.trainer_cpu_pct is not None and host.trainer_cpu_pct.mean >= TRAINER_FULL_PCT:
        text += f"; the training process itself uses {host.trainer_cpu_pct.mean:.0f}% of a core and may be the limit"
    else:
        text += ": the card waits for work, and neither is the reason" if beside else ": the card waits for work"
    return Verdict(word="starved", reason=text + ".")


def _healthy(gpu: GpuFigures) -> Verdict:
    stands_in = ""
    if not gpu.has_gpm:
        share = gpu.levels.get("power_share_pct")
        drawn = f", power at {share.mean:.0f}% of its limit" if share is not None else ""
        stands_in = f" (a stand-in for SM active{drawn})"
    return Verdict(
        word="healthy",
        reason=f"{_mean(gpu)}{stands_in} with a fluctuation of {gpu.fluctuation_pct:.0f} points, "
        f"idle {gpu.idle_pct:.0f}% of the time.",
    )


def _low(gpu: GpuFigures) -> bool:
    return gpu.activity is not None and gpu.activity.mean < LOW_MEAN_PCT


def _mean(gpu: GpuFigures) -> str:
    assert gpu.activity is not None
    return f"{gpu.activity_name} averages {gpu.activity.mean:.0f}%"


def _clock_pct(gpu: GpuFigures) -> float | None:
    clock = gpu.levels.get("sm_clock_mhz")
    return 100 * clock.mean / gpu.sm_clock_max_mhz if clock is not None and gpu.sm_clock_max_mhz else None
