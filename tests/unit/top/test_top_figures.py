"""Samples → figures: what each number means."""

from __future__ import annotations

import pickle
import random
import statistics
from collections.abc import Callable
from itertools import groupby

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.top.figures import Figures, GpuFigures, cpu_budget_pct
from flatout.trace import DiskSample, Sample

Make = Callable[..., Sample]


def figures_of(samples: list[Sample]) -> GpuFigures:
    return Figures(samples).gpus[0]


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=50)
@given(seconds=st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=8), min_size=1, max_size=12))
def test_agree_with_a_sum_by_hand(make_sample: Make, seconds: list[list[float]]) -> None:
    # GIVEN a second a sample, each with its own number of pulses
    samples = [make_sample(float(t), sm=50, pulses=tuple(pulses)) for t, pulses in enumerate(seconds)]
    gpu = figures_of(samples)
    # THEN every pulse counts for its share of the second
    weighted = [(pulse, 1 / len(pulses)) for pulses in seconds for pulse in pulses]
    mean = sum(pulse * s for pulse, s in weighted) / len(seconds)
    spread = (sum((pulse - mean) ** 2 * s for pulse, s in weighted) / len(seconds)) ** 0.5
    idle_s = sum(s for pulse, s in weighted if pulse < 5)
    stretches = [sum(s for _, s in run) for is_idle, run in groupby(weighted, lambda w: w[0] < 5) if is_idle]
    assert gpu.activity.mean == pytest.approx(mean, abs=0.5)
    assert gpu.activity.deviation == pytest.approx(spread, abs=0.5)
    assert gpu.idle_pct == pytest.approx(100 * idle_s / len(seconds))
    assert gpu.longest_idle_s == pytest.approx(max(stretches, default=0.0))


def test_a_thinned_sample_counts_for_the_time_it_stands_for(make_sample: Make) -> None:
    short = make_sample(1.0, sm=10, pulses=(10.0,))
    long = make_sample(10.0, sm=90, pulses=(90.0,), interval_s=9.0)
    assert figures_of([short, long]).activity.mean == pytest.approx(82)


def test_an_idle_stretch_goes_on_over_samples(make_sample: Make) -> None:
    pulses = [(90.0, 0.0), (0.0, 0.0), (2.0, 90.0), (0.0, 90.0)]
    samples = [make_sample(float(t), sm=50, pulses=pair) for t, pair in enumerate(pulses)]
    assert figures_of(samples).longest_idle_s == pytest.approx(2.0)


def test_without_pulses_the_mean_of_the_sample_counts(make_sample: Make) -> None:
    gpu = figures_of([make_sample(1.0, sm=20, util=99), make_sample(2.0, sm=40, util=99)])
    assert gpu.activity.mean == pytest.approx(30)
    assert gpu.activity.deviation == pytest.approx(10)


def test_gpu_util_stands_in_for_sm_active_only_until_that_is_known(make_sample: Make) -> None:
    samples = [make_sample(float(t), sm=None if t == 0 else 50.0, util=100.0) for t in range(3)]
    gpu = figures_of(samples)
    assert gpu.activity_name == "SM active"
    assert gpu.activity.mean == pytest.approx(50)


def test_without_gpm_power_stands_in_for_work_but_never_above_util(make_sample: Make) -> None:
    # GIVEN half the power limit drawn, first with and then without a kernel on the GPU
    gpu = figures_of([make_sample(1.0, util=90, pulses=(90.0,)), make_sample(2.0, util=0, pulses=(0.0,))])
    assert not gpu.has_gpm
    assert gpu.activity_name == "GPU-Util"
    assert gpu.activity.mean == pytest.approx(45)
    assert gpu.work_pct == pytest.approx(25)


def test_a_gpu_that_vanishes_keeps_what_was_seen_of_it(make_sample: Make) -> None:
    first, second = Figures([make_sample(1.0, sm=80, gpus=2), make_sample(2.0, sm=60, gpus=1)]).gpus
    assert (first.activity.mean, second.activity.mean) == (70, 80)


def test_energy_follows_the_counter_and_power_where_it_stands_still(make_sample: Make) -> None:
    # GIVEN a counter that was read when the measuring began, and again at the third second of five
    counter = [1000.0, 1000.0, 1900.0, 1900.0, 1900.0]
    samples = [make_sample(float(t), gpu={"energy_j": j, "power_w": 350.0}) for t, j in enumerate(counter)]
    # THEN 900 J by the counter, and two seconds at 350 W
    assert figures_of(samples).energy_j == pytest.approx(900 + 700)


def test_energy_without_a_counter_is_power_times_time(make_sample: Make) -> None:
    assert figures_of([make_sample(2.0, interval_s=2.0, gpu={"power_w": 350.0})]).energy_j == pytest.approx(700)


def test_energy_survives_a_counter_that_starts_again(make_sample: Make) -> None:
    samples = [make_sample(float(t), gpu={"energy_j": j, "power_w": 100.0}) for t, j in enumerate((900.0, 5.0, 5.0))]
    assert figures_of(samples).energy_j == pytest.approx(300)


def test_energy_is_unknown_without_power(make_sample: Make) -> None:
    assert figures_of([make_sample(gpu={"power_w": None})]).energy_j is None


def test_under_a_quota_the_cpu_figure_is_the_share_of_the_quota(make_sample: Make) -> None:
    # GIVEN 2 cores of 16 and a training that uses both, on a machine that is otherwise idle
    sample = make_sample(cpu=12.0, trainer_cpu=100.0, workers=2)
    assert cpu_budget_pct(sample, cores_allowed=2.0) == 100.0
    assert cpu_budget_pct(sample, cores_allowed=16.0) == pytest.approx(12.5)
    assert cpu_budget_pct(make_sample(cpu=None), cores_allowed=None) is None


def test_the_host_in_figures(make_sample: Make) -> None:
    disks = tuple(
        DiskSample(name=n, read_bytes_s=1e6, write_bytes_s=0.0, busy_pct=b) for n, b in (("a", 20.0), ("b", 70.0))
    )
    sample = make_sample(cpu=40.0, trainer_cpu=90.0, workers=4, host={"disks": disks, "iowait_pct": 3.0})
    host = Figures([sample], cores_allowed=16.0)
    expected = {
        "disk_busy_pct": 70,
        "disk_read_bytes_s": 2e6,
        "workers": 4,
        "worker_cpu_pct": 50,
        "trainer_cpu_pct": 90,
        "training_cpu_pct": 290,
        "memory_pct": 25,
        "iowait_pct": 3,
    }
    assert {name: host.levels[name].mean for name in expected} == expected
    assert host.cores == 16


def test_throttling_is_a_share_of_the_time(make_sample: Make) -> None:
    held = make_sample(3.0, interval_s=3.0, gpu={"throttle": ("power cap",)})
    assert figures_of([make_sample(1.0), held]).throttled_pct == {"power cap": 75.0}


def test_quantiles_are_right_to_two_per_cent(make_sample: Make) -> None:
    values = [random.Random(7).uniform(0, 100) for _ in range(400)]
    activity = figures_of([make_sample(float(t), sm=v) for t, v in enumerate(values)]).activity
    quantiles = statistics.quantiles(values, n=20, method="inclusive")
    assert activity.quantile(0.05) == pytest.approx(quantiles[0], rel=0.02, abs=0.3)
    assert activity.quantile(0.5) == pytest.approx(quantiles[9], rel=0.02, abs=0.5)
    assert activity.quantile(0.95) == pytest.approx(quantiles[18], rel=0.02, abs=0.5)


def test_memory_does_not_grow_with_the_run(make_sample: Make) -> None:
    chance = random.Random(1)
    builder = Figures()

    def feed(count: int) -> int:
        for _ in range(count):
            pulses = tuple(chance.uniform(0, 100) for _ in range(8))
            builder.add(make_sample(sm=chance.uniform(0, 100), util=chance.uniform(0, 100), pulses=pulses))
        return len(pickle.dumps(builder))

    early = feed(500)
    assert feed(4000) < 1.5 * early
