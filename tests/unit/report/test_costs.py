"""What a run costs, in words and as JSON."""

from __future__ import annotations

import pytest
from report_runs import facts, rank_of, sample, steps_of, trace_of

from flatout.diagnose.rank_metrics import metrics_of
from flatout.report.costs import Price, RunCosts, costs_of

PRICE = Price.of("$2/h")
HOUR = RunCosts(seconds=3600.0, epoch_s=900.0, power_w=600.0, tokens_per_s=51_234.0, padding=0.25, price=PRICE)


def test_energy_and_money_are_told_of_the_run_and_of_an_epoch() -> None:
    assert HOUR.figures() == [
        ("tokens a second", "51,230", "25% of them padding"),
        ("energy", "600 Wh", "150 Wh an epoch of 15 min 0 s"),
        ("cost", "$2", "$0.5 an epoch of 15 min 0 s"),
    ]
    assert HOUR.to_json() == {
        "seconds": 3600.0,
        "epoch_s": 900.0,
        "tokens_per_s": 51_234.0,
        "energy_wh": 600.0,
        "epoch_energy_wh": 150.0,
        "money": 2.0,
        "epoch_money": 0.5,
        "currency": "$",
    }


def test_what_is_not_known_is_left_out() -> None:
    assert RunCosts(seconds=3600.0).figures() == []
    assert RunCosts(seconds=90.0, price=Price.of("2/h")).figures() == [
        ("cost", "0.05 in the currency of --price", "of 1 min 30 s")
    ]
    assert RunCosts(seconds=36_000.0, power_w=600.0).figures()[0][:2] == ("energy", "6 kWh")


@pytest.mark.parametrize(("ranks", "power_w"), [(1, 300.0), (4, 1200.0)])
def test_they_come_from_the_trace(ranks: int, power_w: float) -> None:
    """GIVEN steps of 100 ms with 32 of 1,000 samples, at 300 W for each rank."""
    tokens = facts(loader={"tokens": {"a_sample": 100.0, "padding": 0.1}, "batches": 32})
    run = trace_of(rank_of(steps_of([100.0] * 60), facts=tokens), samples=[sample(n, power_w=300.0) for n in range(6)])
    costs = costs_of(metrics_of(run), ranks)
    assert (costs.power_w, costs.padding) == (power_w, 0.1)
    assert costs.tokens_per_s == pytest.approx(32_000)
    assert costs.epoch_s == pytest.approx(3.2)
