"""Each verdict, at its own threshold, with its reason in numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flatout.model.formatting import HARMFUL_THROTTLES
from flatout.sample.gpu import THROTTLE_REASONS
from flatout.top.figures import Figures
from flatout.top.summary import WORDS, TopSummary, Verdict, sum_up
from flatout.trace import DiskSample, Sample

Make = Callable[..., Sample]


def summed(samples: list[Sample]) -> TopSummary:
    return sum_up(Figures(samples, cores_allowed=16.0))


@pytest.fixture
def verdict(make_sample: Make) -> Callable[..., Verdict]:
    """The verdict on five seconds of the same."""

    def of(**fields: Any) -> Verdict:
        return summed([make_sample(float(t), **fields) for t in range(5)]).verdict

    return of


DISK = (DiskSample(name="sda", read_bytes_s=2e8, write_bytes_s=0.0, busy_pct=99.0),)
LOW = {"sm": 30.0, "util": 45.0}
SWINGING = {"sm": 50.0, "util": 60.0, "pulses": (0.0, 0.0, 0.0, 0.0, 95.0, 95.0, 95.0, 95.0)}


@pytest.mark.parametrize(
    ("word", "fields", "reason"),
    [
        ("healthy", {"sm": 92.0, "util": 99.0}, "SM active averages 92% with a fluctuation of 0 points, idle 0% of"),
        ("healthy", {"sm": 70.0, "util": 80.0}, "SM active averages 70%"),
        (
            "starved",
            {"sm": 69.0, "util": 80.0, "cpu": 31.0},
            "SM active averages 69%: the GPU waits for work (CPU 31%)",
        ),
        ("starved", {**LOW, "trainer_cpu": 97.0}, "waits for work (CPU 10%, trainer 97% of a core)"),
        ("starved", {**SWINGING, "pulses": (12.0, 95.0) * 4}, "SM active averages 5"),  # never below 10
        ("starved", {**SWINGING, "pulses": (0.0, 66.0) * 4}, "SM active averages 3"),  # never above 70
        ("fluctuating", {**SWINGING, "pulses": (8.0, 72.0) * 4}, "between 8% (p5) and 72% (p95)"),
        ("fluctuating", SWINGING, "between 0% (p5) and 95% (p95): idle 50% of the time, up to 0.5 s in a row"),
        ("busy but wasteful", {"sm": 8.0, "util": 99.0}, "GPU-Util reads 99%, yet SM active is 8%"),
        ("starved", {"sm": 26.0, "util": 99.0}, "SM active averages 26%"),
        ("CPU-bound", {**LOW, "cpu": 97.0}, "97% of the cores are busy while SM active averages 30%"),
        ("CPU-bound", {**SWINGING, "cpu": 97.0}, "97% of the cores"),
        ("CPU-bound", {**LOW, "host": {"throttled_pct": 40.0}}, "the cgroup's CPU quota held processes back 40%"),
        ("disk-bound", {**LOW, "host": {"iowait_pct": 40.0}}, "iowait is 40% while SM active averages 30%"),
        ("disk-bound", {**LOW, "host": {"pressure_io_pct": 80.0}}, "waited for storage 80% of the time"),
        ("disk-bound", {**LOW, "host": {"disks": DISK}}, "the busiest disk is 99% busy"),
        ("healthy", {"sm": 92.0, "util": 99.0, "cpu": 97.0, "host": {"disks": DISK}}, "SM active averages 92%"),
        (
            "throttled",
            {"sm": 92.0, "gpu": {"throttle": ("heat (hardware slowdown)",)}},
            "heat (hardware slowdown) held the clocks down for 100% of the time.",
        ),
        ("healthy", {"sm": 92.0, "gpu": {"throttle": ("power cap",), "power_w": 700.0}}, "SM active averages 92%"),
        (
            "near out of memory",
            {"sm": 92.0, "gpu": {"memory_used_bytes": 135 << 30}},
            "the GPU's memory was 96.4% full",
        ),
        ("near out of memory", {"sm": 92.0, "host": {"memory_used_bytes": 125 << 30}}, "the host's memory was 97.7%"),
        ("idle", {"sm": 0.0, "util": 0.0}, "SM active averages 0%: nothing used the GPU"),
        ("starved", {"sm": 1.0, "util": 2.0, "trainer_cpu": 60.0}, "SM active averages 1%"),
        ("no GPU", {"gpus": 0, "cpu": 12.0}, "only the host was measured (CPU 12%)"),
        ("near out of memory", {"gpus": 0, "host": {"memory_used_bytes": 125 << 30}}, "the host's memory"),
        ("not enough samples", {"sm": None, "util": None}, "of the 3 samples a verdict needs"),
    ],
)
def test_verdicts(verdict: Callable[..., Verdict], word: str, fields: dict[str, Any], reason: str) -> None:
    found = verdict(**fields)
    assert found.word == word
    assert reason in found.reason


@pytest.mark.parametrize(
    ("word", "power_w", "clock_mhz", "reason"),
    [
        ("busy but wasteful", 200.0, 1900.0, "draws 29% of its power limit (a stand-in for SM active)"),
        ("healthy", 600.0, 1900.0, "(a stand-in for SM active)"),
        ("healthy", 200.0, 700.0, "a stand-in for SM active"),  # a low clock explains the low power
    ],
)
def test_without_gpm_power_and_clock_stand_in(
    verdict: Callable[..., Verdict], word: str, power_w: float, clock_mhz: float, reason: str
) -> None:
    found = verdict(util=99.0, gpu={"power_w": power_w, "sm_clock_mhz": clock_mhz})
    assert found.word == word
    assert reason in found.reason


def test_two_samples_are_not_enough(make_sample: Make) -> None:
    verdict = summed([make_sample(1.0, sm=9), make_sample(2.0, sm=9)]).verdict
    assert verdict == Verdict(word="not enough samples", reason="2 of the 3 samples a verdict needs.")


def test_a_machine_is_judged_by_its_worst_gpu(make_sample: Make) -> None:
    # GIVEN a busy GPU, a starved one and one that nobody uses
    def sample(time_s: float) -> Sample:
        three = make_sample(time_s, gpus=3).gpus
        shares = (95.0, 40.0, 0.0)
        base = make_sample(time_s, cpu=20.0)
        gpus = tuple(
            dataclasses.replace(gpu, sm_active_pct=sm, gpu_util_pct=sm) for gpu, sm in zip(three, shares, strict=True)
        )
        return dataclasses.replace(base, gpus=gpus)

    summary = summed([sample(float(t)) for t in range(5)])
    assert [verdict.word for _, verdict in summary.gpus] == ["healthy", "starved", "idle"]
    assert summary.verdict.word == "starved"
    assert summary.verdict.reason.startswith("GPU 1: SM active averages 40%")
    assert summary.verdict.reason.endswith("GPU 2: idle.")


def test_the_throttle_words_are_those_the_sampler_says() -> None:
    assert set(THROTTLE_REASONS.values()) >= HARMFUL_THROTTLES


def test_the_documented_verdicts_exist() -> None:
    promised = ["healthy", "fluctuating", "starved", "CPU-bound", "disk-bound", "throttled", "idle"]
    assert set(WORDS) == {*promised, "busy but wasteful", "near out of memory", "no GPU", "not enough samples"}
