"""Is it faster? Seldom a yes where nothing differs, and a yes where 5% do."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from flatout.model.stats import ONE_RUN, Measured, RunNoise, block_means, error_of, gain, half_width

PAIRS = 400
PROMISED = 0.05
# Of 400 pairs, 5% is 20; a rate of 5% gives more than 31 in one of a hundred simulations.
TOO_MANY = 31


def steps_ms(draw: random.Random, count: int = 400, *, around: float = 100.0, stalls: float = 0.0) -> list[float]:
    """Step times whose noise lasts for about five steps, and of which a share are stalls of three to ten steps."""
    noise, times = draw.gauss(0, 1), []
    for _ in range(count):
        noise = 0.8 * noise + 0.6 * draw.gauss(0, 1)
        stall = draw.uniform(3, 10) if draw.random() < stalls else 1.0
        times.append(around * stall * math.exp(0.03 * noise + draw.gauss(0, 0.02)))
    return times


def measured(times_ms: Sequence[float]) -> Measured:
    return Measured(value=1e3 / fmean(times_ms), error=error_of(block_means(times_ms)))


@pytest.mark.parametrize("stalls", [0.0, 0.02])
def test_equal_runs_are_called_different_as_seldom_as_promised(stalls: float) -> None:
    draw = random.Random(34)
    verdicts = [
        gain([measured(steps_ms(draw, stalls=stalls))], [measured(steps_ms(draw, stalls=stalls))], ONE_RUN).verdict
        for _ in range(PAIRS)
    ]
    wrong = PAIRS - verdicts.count("no difference shown")
    assert wrong <= TOO_MANY
    assert wrong > 0, "an interval that never errs is wider than it says"


@pytest.mark.parametrize("runs", [2, 3])
def test_equal_runs_that_differ_by_the_machine_are_called_different_as_seldom(runs: int) -> None:
    """GIVEN runs of one plan that differ by 2%, which the steps of one run do not show."""
    draw = random.Random(35)

    def side() -> list[Measured]:
        return [measured(steps_ms(draw, 100, around=100 * math.exp(draw.gauss(0, 0.02)))) for _ in range(runs)]

    wrong = 0
    for _ in range(PAIRS):
        before, after = side(), side()
        wrong += gain(before, after, RunNoise.seen_in([before, after])).verdict != "no difference shown"
    assert 0 < wrong <= TOO_MANY


def test_a_planted_gain_of_5_percent_is_found() -> None:
    draw = random.Random(36)
    found = []
    for _ in range(100):
        before, after = measured(steps_ms(draw)), measured(steps_ms(draw, around=100 / 1.05))
        found.append(gain([before], [after], ONE_RUN))
    assert sum(one.verdict == "faster" for one in found) >= 97
    assert sum(one.low < 1.05 < one.high for one in found) >= 90


def test_a_planted_gain_of_5_percent_is_found_among_runs_that_differ_by_1() -> None:
    draw = random.Random(37)

    def side(around: float) -> list[Measured]:
        return [measured(steps_ms(draw, around=around * math.exp(draw.gauss(0, 0.01)))) for _ in range(3)]

    found = [gain(side(100.0), side(100 / 1.05), RunNoise.seen_in([])) for _ in range(100)]
    assert sum(one.verdict == "faster" for one in found) >= 90


def test_a_third_more_is_a_gain_though_two_runs_as_it_was_are_a_seventh_apart() -> None:
    """`segment` on an H200: sixteen workers on sixteen cores. A fourth run like the others' mean is still no gain."""

    def ran(value: float) -> Measured:
        return Measured(value=value, error=0.035)

    before = [ran(479.0), ran(416.0)]
    noise = RunNoise.seen_in([before])
    assert gain(before, [ran(592.0)], noise).low > 1
    assert gain(before, [ran(500.0)], noise).low < 1
    assert gain([ran(447.0)], [ran(592.0)], RunNoise.seen_in([])).low > 1.15  # nothing seen yet: a usual machine


def test_runs_that_agree_are_believed_though_their_steps_come_in_a_pattern() -> None:
    """`stock` on an H200: forty workers fill their queues at first, so that early steps take twice as long as later
    ones, in every run alike."""

    def ran(*speeds: float) -> list[Measured]:
        return [Measured(value=value, error=0.4) for value in speeds]

    before, after = ran(60_519, 59_341, 50_144), ran(81_108, 88_484, 94_609)
    assert gain(before, after, RunNoise.seen_in([before, after])).low > 1.2
    assert gain(before[:1], after[:1], RunNoise.seen_in([])).low < 1
    assert gain(before, ran(60_519, 49_341, 70_144), RunNoise.seen_in([])).low < 1
    assert gain(ran(100, 100), ran(103, 103), RunNoise.seen_in([])).low < 1  # two may be alike by chance


@pytest.mark.parametrize(
    ("freedom", "student"), [(1, 12.71), (2, 4.30), (7, 2.36), (9, 2.26), (14, 2.14), (30, 2.04), (math.inf, 1.96)]
)
def test_the_width_of_an_interval_is_students(freedom: float, student: float) -> None:
    assert half_width([(1.0, freedom)]) == pytest.approx(student, abs=0.015)


def test_parts_that_are_known_equally_well_add_their_degrees_of_freedom() -> None:
    assert half_width([(0.5, 7), (0.5, 7)]) == pytest.approx(half_width([(1.0, 14)]))
    assert half_width([]) == 0
