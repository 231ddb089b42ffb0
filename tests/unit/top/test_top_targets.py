"""Targets: what they mean, and what is said about a wrong one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flatout.model.errors import UsageError
from flatout.top.figures import FigureBuilder
from flatout.top.summary import sum_up
from flatout.top.targets import DEFAULT_TARGETS, Target, TargetResult, parse_targets
from flatout.trace import Sample


def check(targets: str, *samples: Sample) -> list[TargetResult]:
    return list(sum_up(FigureBuilder(samples), targets=parse_targets(targets)).targets)


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        ("sm=85", 85.0, True),
        ("sm=85.5", 85.0, False),
        ("sm=60-80", 85.0, False),
        ("util=95", 96.0, True),
        ("power=51", 50.0, False),
        ("temperature=60", 60.0, True),
        ("temperature=59", 60.0, False),
        ("fluctuation=10", 0.0, True),
        ("memory=40-60", 50.0, True),
        ("memory=70-90", 50.0, False),
        ("cpu=90", 10.0, True),
        ("cpu=5", 10.0, False),
    ],
)
def test_met_or_missed(make_sample: Callable[..., Sample], target: str, value: float, met: bool) -> None:
    (result,) = check(target, make_sample(sm=85, util=96))
    assert (result.value, result.met) == (pytest.approx(value), met)


def test_memory_and_temperature_are_judged_at_their_peak(make_sample: Callable[..., Sample]) -> None:
    hot = make_sample(2.0, gpu={"temperature_c": 90.0, "memory_used_bytes": 133 << 30})
    results = check("memory=10-90,temperature=85", make_sample(1.0), hot)
    assert [(r.value, r.met) for r in results] == [(95.0, False), (90.0, False)]


def test_every_card_is_checked_but_the_host_only_once(make_sample: Callable[..., Sample]) -> None:
    results = check("sm=50,cpu=90", make_sample(sm=80, cards=2))
    assert [(r.name, r.gpu) for r in results] == [("sm", 0), ("sm", 1), ("cpu", None)]


def test_what_could_not_be_measured_is_neither_met_nor_missed(make_sample: Callable[..., Sample]) -> None:
    (result,) = check("temperature=85", make_sample(gpu={"temperature_c": None}))
    assert (result.value, result.met, result.margin) == (None, None, None)


def test_a_stand_in_is_called_one(make_sample: Callable[..., Sample]) -> None:
    (result,) = check("sm=85", make_sample(util=99))
    assert result.what == "SM active, mean (stand-in: power share)"
    assert result.value == pytest.approx(50)


def test_parsing_keeps_the_order_and_allows_spaces() -> None:
    assert parse_targets("temperature = 85, memory= 70 - 90") == (
        Target(name="temperature", at_most=85),
        Target(name="memory", at_least=70, at_most=90),
    )


def test_the_usual_targets_can_be_written_down() -> None:
    text = "sm=80,util=85,fluctuation=10,memory=70-90,power=80,temperature=85,cpu=90"
    assert parse_targets(text) == DEFAULT_TARGETS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("memry=70-90", "there is no 'memry' (did you mean memory?)"),
        ("tempreture=80", "did you mean temperature?"),
        ("xyz=3", "known are sm, util, fluctuation"),
        ("", "there is no ''; known are"),
        ("sm", "sm needs a number, such as sm=80"),
        ("sm=", "sm needs a number, such as sm=80"),
        ("sm=high", "sm needs a number from 0 to 100, such as 80 (got 'high')"),
        ("sm=nan", "sm needs a number from 0 to 100"),
        ("sm=120", "sm needs a number from 0 to 100"),
        ("memory=90", "memory needs a range, such as memory=70-90 (got '90')"),
        ("memory=90-70", "the wrong way round: write memory=70-90"),
        ("memory=70-", "memory needs a number from 0 to 100"),
        ("sm=80,sm=90", "sm is given twice"),
    ],
)
def test_a_wrong_target_is_named(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as problem:
        parse_targets(text)
    assert complaint in str(problem.value)
