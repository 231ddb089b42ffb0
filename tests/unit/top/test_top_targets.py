"""The checklist at the end: what each target looks at, and when it is met."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flatout.top.figures import Figures
from flatout.top.summary import TargetResult, sum_up
from flatout.trace import Sample

Make = Callable[..., Sample]


def check(*samples: Sample) -> dict[tuple[str, int | None], TargetResult]:
    return {(result.name, result.gpu): result for result in sum_up(Figures(samples)).targets}


def test_met_or_missed_and_by_how_much(make_sample: Make) -> None:
    results = check(make_sample(sm=85, util=80))
    expected = {"sm": 5, "util": -5, "fluctuation": 10, "memory": -20, "power": -30, "temperature": 25}
    assert {name: result.margin for (name, gpu), result in results.items() if gpu == 0} == pytest.approx(expected)
    assert [result.met for result in results.values()] == [True, False, True, False, False, True, True]


def test_memory_and_temperature_are_judged_at_their_peak(make_sample: Make) -> None:
    hot = make_sample(2.0, gpu={"temperature_c": 90.0, "memory_used_bytes": 133 << 30})
    results = check(make_sample(1.0), hot)
    peaks = [results["memory", 0], results["temperature", 0]]
    assert [(result.value, result.met) for result in peaks] == [(95.0, False), (90.0, False)]


def test_every_gpu_is_checked_but_the_host_only_once(make_sample: Make) -> None:
    results = check(make_sample(sm=80, gpus=2))
    assert [gpu for name, gpu in results if name in ("sm", "cpu")] == [0, 1, None]


def test_what_could_not_be_measured_is_neither_met_nor_missed(make_sample: Make) -> None:
    result = check(make_sample(gpu={"temperature_c": None}))["temperature", 0]
    assert (result.value, result.met, result.margin) == (None, None, None)


def test_a_stand_in_is_called_one(make_sample: Make) -> None:
    result = check(make_sample(util=99))["sm", 0]
    assert result.what == "SM active, mean (stand-in: power share)"
    assert result.value == pytest.approx(50)
