"""Sketch: quantiles right to 1%, sums exact, merging without loss."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.trace import Sketch

values = st.floats(-1e9, 1e9, allow_nan=False)
milliseconds = st.floats(1e-3, 1e7)


@given(st.lists(values, min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_is_right_to_one_per_cent(numbers: list[float], q: float) -> None:
    exact = sorted(numbers)[math.floor(q * (len(numbers) - 1))]
    assert Sketch.of(numbers).quantile(q) == pytest.approx(exact, rel=0.0101, abs=1e-6)


@given(st.lists(milliseconds, min_size=1, max_size=200))
def test_mean_deviation_and_extremes_are_those_of_the_values(numbers: list[float]) -> None:
    sketch = Sketch.of(numbers)
    assert sketch.count == len(numbers)
    assert sketch.mean == pytest.approx(statistics.fmean(numbers))
    assert sketch.deviation == pytest.approx(statistics.pstdev(numbers), rel=1e-3, abs=1e-4 * max(numbers))
    assert (sketch.low, sketch.high) == (min(numbers), max(numbers))


@given(st.lists(values, max_size=50), st.lists(values, max_size=50))
def test_merging_gives_the_sketch_of_all_values(left: list[float], right: list[float]) -> None:
    merged = Sketch.merged([Sketch.of(left), Sketch.of(right)])
    together = Sketch.of([*left, *right])
    assert (merged.count, merged.low, merged.high) == (together.count, together.low, together.high)
    assert merged.buckets == together.buckets
    assert merged.total == pytest.approx(together.total, abs=1e-3)


@given(st.lists(values, max_size=100))
def test_json_and_back_changes_nothing(numbers: list[float]) -> None:
    sketch = Sketch.of(numbers)
    assert Sketch.from_json(json.loads(json.dumps(sketch.to_json()))) == sketch


@given(st.lists(milliseconds, min_size=1, max_size=300), st.sampled_from([8, 16, 64]), st.floats(0, 1))
def test_a_coarse_sketch_is_small_and_still_about_right(numbers: list[float], most: int, q: float) -> None:
    sketch = Sketch.of(numbers)
    coarse = sketch.coarse(most)
    assert len(coarse.buckets) <= most
    assert sum(coarse.buckets.values()) == sketch.count
    exact = sorted(numbers)[math.floor(q * (len(numbers) - 1))]
    answer = coarse.quantile(q)
    assert answer is not None
    # A bucket twice as wide is twice as far off, no more.
    widest = math.log(max(numbers) / min(numbers)) / most * 4 + 0.04
    assert abs(math.log(answer / exact)) <= widest


@given(st.lists(values, max_size=50))
def test_adding_one_by_one_gives_the_same(numbers: list[float]) -> None:
    sketch = Sketch()
    for number in numbers:
        sketch.add(number)
    made = Sketch.of(numbers)
    assert (sketch.count, sketch.low, sketch.high, sketch.buckets) == (made.count, made.low, made.high, made.buckets)
    assert sketch.total == pytest.approx(made.total, rel=1e-9, abs=1e-3)


def test_what_is_not_a_number_is_passed_over() -> None:
    sketch = Sketch.of([1.0, math.nan, math.inf, -math.inf, 1e200, None])
    assert (sketch.count, sketch.high) == (1, 1.0)


def test_nothing_has_no_mean_and_no_quantile() -> None:
    assert (Sketch().mean, Sketch().deviation, Sketch().quantile(0.5)) == (None, None, None)
