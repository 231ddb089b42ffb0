"""Turns decide what pays, on step times whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from flatout.model.turns import Rounds, order_of_a_round

STEPS_A_TURN = 2
MOST_ROUNDS = 400


def step_times(chance: random.Random, memory: float, spread: float) -> Iterator[float]:
    """Of a machine with neighbours: each step resembles the one before, and one in fifty takes about twice as long."""
    state = 0.0
    while True:
        state = memory * state + math.sqrt(1 - memory * memory) * chance.gauss(0, spread)
        yield math.exp(state) * (1 + (chance.random() < 0.02) * chance.expovariate(1))


def tried(gain: float, seed: int, memory: float = 0.8, spread: float = 0.05) -> Rounds:
    """A change that makes steps so many times as fast, tried until it is decided."""
    chance, times, rounds = random.Random(seed), step_times(random.Random(seed + 1), memory, spread), Rounds()
    while rounds.decision() == "undecided" and len(rounds.logs) < MOST_ROUNDS:
        sides: dict[bool, list[float]] = {True: [], False: []}
        for on in order_of_a_round(chance):
            sides[on].append(sum(next(times) / (gain if on else 1) for _ in range(STEPS_A_TURN)))
        rounds.add(sides[True], sides[False])
    return rounds


@pytest.mark.parametrize(("memory", "spread"), [(0.0, 0.02), (0.5, 0.05), (0.8, 0.05), (0.95, 0.1)])
def test_a_change_that_does_nothing_is_not_kept(memory: float, spread: float) -> None:
    decisions = [tried(1.0, seed, memory, spread).decision() for seed in range(50)]
    assert decisions.count("faster") == 0
    assert decisions.count("no gain") >= 48


@pytest.mark.parametrize("gain", [1.03, 1.2, 2.0])
def test_a_change_that_pays_is_kept_with_its_gain(gain: float) -> None:
    ended = [tried(gain, seed) for seed in range(20)]
    assert [rounds.decision() for rounds in ended] == ["faster"] * 20
    assert sum(rounds.gain().low <= gain <= rounds.gain().high for rounds in ended) >= 19
    assert all(rounds.gain().low > 1.01 for rounds in ended)


def test_a_change_that_costs_is_not_kept() -> None:
    assert {tried(0.9, seed).decision() for seed in range(10)} == {"no gain"}


def test_a_round_has_both_sides_twice_in_balanced_order() -> None:
    chance = random.Random(0)
    assert {order_of_a_round(chance) for _ in range(50)} == {(True, False, False, True), (False, True, True, False)}


def test_a_burst_in_one_round_does_not_decide() -> None:
    rounds = Rounds()
    for _ in range(20):
        rounds.add([1.0, 1.0], [1.0, 1.0])
    rounds.add([1.0, 1.0], [9.0, 9.0])
    assert rounds.gain().value == pytest.approx(1.0)
