"""What a run costs, in words and as JSON."""

from __future__ import annotations

import dataclasses

import pytest
from report_runs import facts, rank_of, recorded, sample, steps_of, trace_of

from flatout.report.account import Price, RecordedRun

TOKENS = facts(loader={"tokens": {"a_sample": 100.0, "padding": 0.1}, "batches": 32})


def run_of_six_seconds(price: str = "") -> RecordedRun:
    """60 steps of 100 ms at 300 W, 32 of them in an epoch."""
    rank = rank_of(steps_of([100.0] * 60), facts=TOKENS)
    run = recorded(trace_of(rank, samples=[sample(n, power_w=300.0) for n in range(6)]))
    return dataclasses.replace(run, price=Price.of(price) if price else None)


def test_energy_and_money_are_told_of_the_run_and_of_an_epoch() -> None:
    run = run_of_six_seconds("$3600/h")
    assert run.view(brief=True).figures[-3:] == [
        ("tokens a second", "32,000", "10% of them padding"),
        ("energy", "0.5 Wh", "0.2667 Wh an epoch of 3.2 s"),
        ("cost", "$6", "$3.2 an epoch of 3.2 s"),
    ]
    assert run.costs == pytest.approx(
        {
            "seconds": 6.0,
            "epoch_s": 3.2,
            "tokens_per_s": 32_000.0,
            "energy_wh": 0.5,
            "epoch_energy_wh": 4 / 15,
            "money": 6.0,
            "epoch_money": 3.2,
            "currency": "$",
        }
    )


def test_a_price_without_a_sign_is_in_the_currency_of_the_option() -> None:
    name, value, _ = run_of_six_seconds("600/h").view(brief=True).figures[-1]
    assert (name, value) == ("cost", "1 in the currency of --price")


@pytest.mark.parametrize(("ranks", "power_w"), [(1, 300.0), (4, 1200.0)])
def test_every_rank_takes_power(ranks: int, power_w: float) -> None:
    every = (rank_of(steps_of([100.0] * 60), facts=TOKENS, rank=rank) for rank in range(ranks))
    costs = recorded(trace_of(*every, samples=[sample(n, power_w=300.0) for n in range(6)])).costs
    assert costs["energy_wh"] == pytest.approx(power_w * 6 / 3600)
