"""What a run costs, in words and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from report_runs import facts, rank_of, recorded, sample, steps_of, trace_of

from flatout.model.gpus import peak
from flatout.report import view_of
from flatout.report.account import Price, RecordedRun

TOKENS = facts(loader={"tokens": {"a_sample": 100.0, "padding": 0.1}, "batches": 32})


def run_of_six_seconds(price: str = "") -> RecordedRun:
    """60 steps of 100 ms at 300 W, 32 of them in an epoch."""
    rank = rank_of(steps_of([100.0] * 60), facts=TOKENS)
    run = recorded(trace_of(rank, samples=[sample(n, power_w=300.0) for n in range(6)]))
    return dataclasses.replace(run, price=Price.of(price) if price else None)


def test_energy_and_money_are_told_of_the_run_and_of_an_epoch() -> None:
    run = run_of_six_seconds("$3600/h")
    assert view_of(run, brief=True).figures[-3:] == [
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
    name, value, _ = view_of(run_of_six_seconds("600/h"), brief=True).figures[-1]
    assert (name, value) == ("cost", "1 in the currency of --price")


@pytest.mark.parametrize(("ranks", "power_w"), [(1, 300.0), (4, 1200.0)])
def test_every_rank_takes_power(ranks: int, power_w: float) -> None:
    every = (rank_of(steps_of([100.0] * 60), facts=TOKENS, rank=rank) for rank in range(ranks))
    costs = recorded(trace_of(*every, samples=[sample(n, power_w=300.0) for n in range(6)])).costs
    assert costs["energy_wh"] == pytest.approx(power_w * 6 / 3600)


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        ("NVIDIA H200", ("model FLOPs", "20.2%", "200 of 989 TFLOP/s, the maker's figure for half precision")),
        ("NVIDIA H100 PCIe", ("model FLOPs", "26.5%", "200 of 756 TFLOP/s, the maker's figure for half precision")),
        ("A GPU of tomorrow", ("model FLOPs", "200 TFLOP/s", "what this GPU could do is not known")),
    ],
)
def test_what_the_model_computes_is_a_share_of_what_the_maker_states(gpu: str, says: tuple[str, ...]) -> None:
    known = facts(step_flops=20 * 10**12, gpu=gpu, autocast=["torch.bfloat16"])
    run = recorded(trace_of(rank_of(steps_of([100.0] * 60), facts=known)))
    assert says in view_of(run, brief=True).figures
    assert run.to_json()["model_flops"]["tflops"] == pytest.approx(200.0)


def test_no_share_where_nothing_was_counted() -> None:
    run = recorded(trace_of(rank_of(steps_of([100.0] * 60))))
    assert "model FLOPs" not in [row[0] for row in view_of(run, brief=True).figures]
    assert run.to_json()["model_flops"] is None


@pytest.mark.parametrize(
    ("gpu", "precision", "most"),
    [
        ("NVIDIA A100-SXM4-80GB", {}, (19.5, "float32")),
        ("NVIDIA A100-SXM4-80GB", {"tf32_matmul": True}, (156, "TF32")),
        ("Tesla V100-SXM2-32GB", {"tf32_matmul": True}, (15.7, "float32")),
        ("NVIDIA GeForce RTX 4090", {"parameter_dtypes": ["bfloat16"]}, (165, "half precision")),
        ("NVIDIA L40S", {}, (91.6, "float32")),
        ("NVIDIA A1000 Laptop GPU", {}, None),
    ],
)
def test_the_gpu_and_the_precision_in_force_decide_what_is_possible(
    gpu: str, precision: dict[str, Any], most: tuple[float, str] | None
) -> None:
    assert peak(facts(gpu=gpu, **precision)) == most
