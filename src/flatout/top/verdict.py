"""Figures → one word, and one sentence that gives its reason in numbers.

Questions are asked in the order of WORDS, and the first that is answered yes is the verdict: first what is about to
break, then what the numbers hide, then why a card is low, then how it is low.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flatout.top.figures import GpuFigures, HostFigures, Stats

WORDS = (
    "near out of memory", "throttled", "idle", "busy but wasteful", "CPU-bound", "disk-bound", "fluctuating", "starved",
    "healthy", "not enough samples", "no GPU",
)  # fmt: skip

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What it comes to: `word` is one of WORDS."""

    word: str
    reason: str


def tone(word: str) -> str:
    """Whether a verdict is good news, bad news, or none."""
    if word == "healthy":
        return "good"
    return "none" if word in ("idle", "not enough samples", "no GPU") else "bad"


def judge_all(verdicts: dict[int, Verdict], host: HostFigures, samples: int) -> Verdict:
    """The verdict on the machine, from those on its cards by index: the worst of them."""
    if not verdicts:
        return _first(_without_cards(host, samples))

    def severity(index: int) -> tuple[bool, int, int]:
        word = verdicts[index].word
        return tone(word) == "none", WORDS.index(word), index  # what is no news comes last, an idle card too

    worst = min(verdicts, key=severity)
    if len(verdicts) == 1:
        return verdicts[worst]
    idle = [str(index) for index, verdict in verdicts.items() if verdict.word == "idle"]
    reason = f"GPU {worst}: {verdicts[worst].reason}"
    if idle and verdicts[worst].word != "idle":
        reason += f" GPU {', '.join(idle)} {'stands' if len(idle) == 1 else 'stand'} idle."
    return Verdict(word=verdicts[worst].word, reason=reason)


def judge(gpu: GpuFigures, host: HostFigures, samples: int) -> Verdict:
    """The verdict on one card."""
    return _first(_with_card(gpu, host, samples))


# Each of these asks its questions in order, and gives the words that hold with their reasons.
_Answers = Iterator[tuple[str, str]]


def _first(answers: _Answers) -> Verdict:
    word, reason = next(answers)
    return Verdict(word=word, reason=reason)


def _without_cards(host: HostFigures, samples: int) -> _Answers:
    if samples < ENOUGH_SAMPLES:
        yield _too_few(samples)
    yield from _memory_full("host", host)
    cpu = f"; the CPU is {cpu_pct:.0f}% busy" if (cpu_pct := host.mean("cpu_pct")) is not None else ""
    yield "no GPU", f"no NVIDIA card was seen: only the host was measured{cpu}."


def _with_card(gpu: GpuFigures, host: HostFigures, samples: int) -> _Answers:
    activity = gpu.activity
    if samples < ENOUGH_SAMPLES or activity is None:
        yield _too_few(samples)
        return
    average = f"{gpu.activity_name} averages {activity.mean:.0f}%"
    is_low = activity.mean < LOW_MEAN_PCT
    yield from _memory_full("card", gpu)
    yield from _memory_full("host", host)
    yield from _throttled(gpu)
    if activity.p95 < IDLE_P95_PCT and not gpu.in_use:
        yield "idle", f"{average}: nothing used the card."
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


def _memory_full(whose: str, figures: GpuFigures | HostFigures) -> _Answers:
    used_pct = figures.peak("memory_pct")
    if used_pct is not None and used_pct > MEMORY_FULL_PCT:
        yield "near out of memory", f"the {whose}'s memory was {used_pct:.1f}% full at its peak."


def _throttled(gpu: GpuFigures) -> _Answers:
    held = {reason: pct for reason, pct in gpu.throttled_pct.items() if reason in HARMFUL_THROTTLES}
    reason = max(held, key=lambda name: held[name], default=None)
    if reason is not None and held[reason] >= THROTTLED_SHARE_PCT:
        at = f" at {clock:.0f} MHz" if (clock := gpu.mean("sm_clock_mhz")) is not None else ""
        of = f" of {gpu.sm_clock_max_mhz:.0f}" if at and gpu.sm_clock_max_mhz else ""
        yield "throttled", f"{reason} held the clocks down for {held[reason]:.0f}% of the time{at}{of}."


def _wasteful(gpu: GpuFigures, activity: Stats) -> _Answers:
    util_pct, share_pct, clock = (gpu.mean(n) for n in ("gpu_util_pct", "power_share_pct", "sm_clock_mhz"))
    if util_pct is None or util_pct <= WASTEFUL_UTIL_PCT:
        return
    clock_pct = 100 * clock / gpu.sm_clock_max_mhz if clock is not None and gpu.sm_clock_max_mhz else None
    found = None
    if gpu.has_gpm and activity.mean < WASTEFUL_SM_PCT:
        found = f"SM active is {activity.mean:.0f}%"
    elif not gpu.has_gpm and share_pct is not None and share_pct < WASTEFUL_POWER_PCT:
        at = f" at {clock_pct:.0f}% of its top clock" if clock_pct is not None else ""
        if clock_pct is None or clock_pct >= WASTEFUL_CLOCK_PCT:
            found = f"the card draws {share_pct:.0f}% of its power limit{at} (stand-ins for SM active)"
    if found is not None:
        kernels = "a kernel is nearly always there, but most of the card has nothing to do"
        yield "busy but wasteful", f"GPU-Util reads {util_pct:.0f}%, yet {found}: {kernels}."


def _cpu_full(host: HostFigures) -> Iterator[str]:
    cpu_pct, held_pct = host.mean("cpu_pct"), host.mean("throttled_pct")
    if cpu_pct is not None and cpu_pct > CPU_FULL_PCT:
        of = f" of {cores:g} cores" if (cores := host.cores_allowed or host.cores) else ""
        yield f"{cpu_pct:.0f}%{of} are busy"
    if held_pct is not None and held_pct >= CPU_QUOTA_HELD_PCT:
        yield f"the cgroup's CPU quota held processes back {held_pct:.0f}% of the time"


def _disk_full(host: HostFigures) -> Iterator[str]:
    signs = (
        ("processes stood waiting for storage {:.0f}% of the time", "pressure_io_pct", PRESSURE_IO_HIGH_PCT),
        ("iowait is {:.0f}%", "iowait_pct", IOWAIT_HIGH_PCT),
        ("the busiest disk is {:.0f}% busy", "disk_busy_pct", DISK_FULL_PCT),
    )
    for words, name, threshold in signs:
        pct = host.mean(name)
        if pct is not None and pct >= threshold:
            yield words.format(pct)


def _waits_for_work(host: HostFigures) -> str:
    cpu_pct, disk_pct, trainer_pct = (host.mean(n) for n in ("cpu_pct", "disk_busy_pct", "trainer_cpu_pct"))
    beside = [f"the CPU is {cpu_pct:.0f}% busy"] if cpu_pct is not None else []
    beside += [f"the busiest disk {disk_pct:.0f}%"] if disk_pct is not None else []
    text = f" while {' and '.join(beside)}" if beside else ""
    if trainer_pct is not None and trainer_pct >= TRAINER_FULL_PCT:
        return f"{text}; the training process itself uses {trainer_pct:.0f}% of a core and may be the limit."
    return f"{text}: the card waits for work{', and neither is the reason' if beside else ''}."


def _stand_in(gpu: GpuFigures) -> str:
    share_pct = gpu.mean("power_share_pct")
    drawn = f", power at {share_pct:.0f}% of its limit" if share_pct is not None else ""
    return f" (a stand-in for SM active{drawn})" if not gpu.has_gpm else ""
