"""Figures → one word, and one sentence that gives its reason in numbers.

The questions at the end are asked in their order, and the first that is answered yes is the verdict: first what is
about to break, then what the numbers hide, then why a card is low, then how it is low.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatout.top.figures import GpuFigures, HostFigures, Stats

__all__ = ["WORDS", "Verdict", "judge", "judge_all", "tone"]

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
        return _without_cards(host, samples)
    worst = min(verdicts, key=lambda index: (_severity(verdicts[index].word), index))
    if len(verdicts) == 1:
        return verdicts[worst]
    idle = [str(index) for index, verdict in verdicts.items() if verdict.word == "idle"]
    reason = f"GPU {worst}: {verdicts[worst].reason}"
    if idle and verdicts[worst].word != "idle":
        reason += f" GPU {', '.join(idle)} {'stands' if len(idle) == 1 else 'stand'} idle."
    return Verdict(word=verdicts[worst].word, reason=reason)


def _severity(word: str) -> tuple[bool, int]:
    """In the order of the questions; what is no news comes last, an idle card too."""
    return tone(word) == "none", WORDS.index(word)


def judge(gpu: GpuFigures, host: HostFigures, samples: int) -> Verdict:
    """The verdict on one card."""
    if samples < ENOUGH_SAMPLES or gpu.activity is None:
        return _too_few(samples)
    answers = ((word, question(gpu, gpu.activity, host)) for word, question in _QUESTIONS)
    return next(Verdict(word=word, reason=reason) for word, reason in answers if reason is not None)


def _too_few(samples: int) -> Verdict:
    return Verdict(word="not enough samples", reason=f"{samples} of the {ENOUGH_SAMPLES} samples a verdict needs.")


def _without_cards(host: HostFigures, samples: int) -> Verdict:
    if samples < ENOUGH_SAMPLES:
        return _too_few(samples)
    full = _memory_full("host", host)
    if full is not None:
        return Verdict(word="near out of memory", reason=full)
    cpu = f"; the CPU is {cpu_pct:.0f}% busy" if (cpu_pct := host.mean("cpu_pct")) is not None else ""
    return Verdict(word="no GPU", reason=f"no NVIDIA card was seen: only the host was measured{cpu}.")


# Each question is answered with the reason why its verdict holds, or with None.


def _near_out_of_memory(gpu: GpuFigures, _: Stats, host: HostFigures) -> str | None:
    return _memory_full("card", gpu) or _memory_full("host", host)


def _memory_full(whose: str, figures: GpuFigures | HostFigures) -> str | None:
    used_pct = figures.peak("memory_pct") or 0.0
    return f"the {whose}'s memory was {used_pct:.1f}% full at its peak." if used_pct > MEMORY_FULL_PCT else None


def _throttled(gpu: GpuFigures, _: Stats, host: HostFigures) -> str | None:
    held = {reason: pct for reason, pct in gpu.throttled_pct.items() if reason in HARMFUL_THROTTLES}
    reason = max(held, key=lambda name: held[name], default=None)
    if reason is None or held[reason] < THROTTLED_SHARE_PCT:
        return None
    at = f" at {clock:.0f} MHz" if (clock := gpu.mean("sm_clock_mhz")) is not None else ""
    of = f" of {gpu.sm_clock_max_mhz:.0f}" if at and gpu.sm_clock_max_mhz else ""
    return f"{reason} held the clocks down for {held[reason]:.0f}% of the time{at}{of}."


def _idle(gpu: GpuFigures, activity: Stats, host: HostFigures) -> str | None:
    """A card that did nothing, and that no training at work holds."""
    if activity.p95 >= IDLE_P95_PCT or gpu.in_use:
        return None
    return f"{_average(gpu, activity)}: nothing used the card."


def _wasteful(gpu: GpuFigures, activity: Stats, host: HostFigures) -> str | None:
    util_pct = gpu.mean("gpu_util_pct") or 0.0
    if util_pct <= WASTEFUL_UTIL_PCT:
        return None
    found = f"SM active is {activity.mean:.0f}%" if activity.mean < WASTEFUL_SM_PCT else None
    if not gpu.has_gpm:
        found = _draws_little(gpu)
    if found is None:
        return None
    kernels = "a kernel is nearly always there, but most of the card has nothing to do"
    return f"GPU-Util reads {util_pct:.0f}%, yet {found}: {kernels}."


def _draws_little(gpu: GpuFigures) -> str | None:
    """Power and clock, where nobody can tell what the SMs do."""
    share_pct, clock, top = gpu.mean("power_share_pct"), gpu.mean("sm_clock_mhz"), gpu.sm_clock_max_mhz
    clock_pct = 100 * clock / top if clock is not None and top else None
    slow = clock_pct is not None and clock_pct < WASTEFUL_CLOCK_PCT
    if share_pct is None or share_pct >= WASTEFUL_POWER_PCT or slow:
        return None
    at = f" at {clock_pct:.0f}% of its top clock" if clock_pct is not None else ""
    return f"the card draws {share_pct:.0f}% of its power limit{at} (stand-ins for SM active)"


def _cpu_bound(gpu: GpuFigures, activity: Stats, host: HostFigures) -> str | None:
    cpu_pct, held_pct = host.mean("cpu_pct") or 0.0, host.mean("throttled_pct") or 0.0
    if activity.mean >= LOW_MEAN_PCT:
        return None
    if cpu_pct > CPU_FULL_PCT:
        of = f" of {cores:g} cores" if (cores := host.cores_allowed or host.cores) else ""
        return f"{cpu_pct:.0f}%{of} are busy while {_average(gpu, activity)}."
    if held_pct >= CPU_QUOTA_HELD_PCT:
        held = f"the cgroup's CPU quota held processes back {held_pct:.0f}% of the time"
        return f"{held} while {_average(gpu, activity)}."
    return None


def _disk_bound(gpu: GpuFigures, activity: Stats, host: HostFigures) -> str | None:
    signs = (
        ("processes stood waiting for storage {:.0f}% of the time", "pressure_io_pct", PRESSURE_IO_HIGH_PCT),
        ("iowait is {:.0f}%", "iowait_pct", IOWAIT_HIGH_PCT),
        ("the busiest disk is {:.0f}% busy", "disk_busy_pct", DISK_FULL_PCT),
    )
    for words, name, threshold in signs:
        seen = host.mean(name) or 0.0
        if activity.mean < LOW_MEAN_PCT and seen >= threshold:
            return f"{words.format(seen)} while {_average(gpu, activity)}."
    return None


def _fluctuating(gpu: GpuFigures, activity: Stats, host: HostFigures) -> str | None:
    if activity.p95 < SWING_P95_PCT or activity.p5 >= SWING_P5_PCT:
        return None
    swing = f"{gpu.activity_name} swings between {activity.p5:.0f}% (p5) and {activity.p95:.0f}% (p95)"
    return f"{swing}: idle {gpu.idle_pct:.0f}% of the time, up to {gpu.longest_idle_s:.1f} s in a row."


def _starved(gpu: GpuFigures, activity: Stats, host: HostFigures) -> str | None:
    if activity.mean >= LOW_MEAN_PCT:
        return None
    cpu_pct, disk_pct, trainer_pct = (host.mean(n) for n in ("cpu_pct", "disk_busy_pct", "trainer_cpu_pct"))
    beside = [f"the CPU is {cpu_pct:.0f}% busy"] if cpu_pct is not None else []
    beside += [f"the busiest disk {disk_pct:.0f}%"] if disk_pct is not None else []
    text = _average(gpu, activity) + (f" while {' and '.join(beside)}" if beside else "")
    if trainer_pct is not None and trainer_pct >= TRAINER_FULL_PCT:
        return f"{text}; the training process itself uses {trainer_pct:.0f}% of a core and may be the limit."
    return f"{text}: the card waits for work{', and neither is the reason' if beside else ''}."


def _healthy(gpu: GpuFigures, activity: Stats, host: HostFigures) -> str:
    stands_in = ""
    if not gpu.has_gpm:
        share_pct = gpu.mean("power_share_pct")
        drawn = f", power at {share_pct:.0f}% of its limit" if share_pct is not None else ""
        stands_in = f" (a stand-in for SM active{drawn})"
    spread = f"a fluctuation of {activity.deviation:.0f} points, idle {gpu.idle_pct:.0f}% of the time"
    return f"{_average(gpu, activity)}{stands_in} with {spread}."


def _average(gpu: GpuFigures, activity: Stats) -> str:
    return f"{gpu.activity_name} averages {activity.mean:.0f}%"


_Question = Callable[[GpuFigures, Stats, HostFigures], str | None]
_QUESTIONS: tuple[tuple[str, _Question], ...] = (
    ("near out of memory", _near_out_of_memory),
    ("throttled", _throttled),
    ("idle", _idle),
    ("busy but wasteful", _wasteful),
    ("CPU-bound", _cpu_bound),
    ("disk-bound", _disk_bound),
    ("fluctuating", _fluctuating),
    ("starved", _starved),
    ("healthy", _healthy),
)
WORDS = (*(word for word, _ in _QUESTIONS), "not enough samples", "no GPU")
