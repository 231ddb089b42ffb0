"""The arithmetic behind the benchmarks' figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import describe, figure, headline
from benchmarks.observe import true_fluctuation, truth_checks


def test_half_on_and_half_off_fluctuates_by_half_the_height() -> None:
    on_s = [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert true_fluctuation(on_s, (0.0, 8.0), full_pct=90.0) == pytest.approx(45.0)
    assert true_fluctuation(on_s, (0.0, 2.0), full_pct=90.0) == 0.0
    assert true_fluctuation(on_s, (1.0, 5.0), full_pct=100.0) == pytest.approx(50.0)  # on at both ends
    assert true_fluctuation(on_s, (1.0, 3.5), full_pct=100.0) == pytest.approx(100 * (0.4 * 0.6) ** 0.5)


def test_a_figure_has_n_median_and_spread() -> None:
    assert figure([3.0, 1.0, 2.0]) == {"n": 3, "median": 2.0, "spread": 2.0}
    assert figure([float(n) for n in range(1, 8)]) == {"n": 7, "median": 4.0, "spread": 4.0}


def test_the_truth_is_checked_on_every_load() -> None:
    good = {
        "idle": {"sm_active_pct": 0.0},
        "matmul": {"sm_active_pct": 97.0, "tensor_active_pct": 88.0},
        "tiny": {"gpu_util_pct": 100.0, "sm_active_pct": 0.7, "verdict": "busy but wasteful"},
        "switched": {"fluctuation": 47.0, "true_fluctuation": 48.5},
    }
    assert all(passed for _, passed in truth_checks(good))
    bad = good | {"switched": {"fluctuation": 40.0, "true_fluctuation": 48.5}}
    assert [text.split(":")[0] for text, passed in truth_checks(bad) if not passed] == ["on and off"]


def test_the_machine_in_one_line() -> None:
    machine = describe(["pytest", "no-such-package"])
    assert machine["cores"] >= 1
    assert machine["pytest"] == pytest.__version__
    assert f"pytest {pytest.__version__}" in headline(machine)
    assert "no-such-package" not in machine
