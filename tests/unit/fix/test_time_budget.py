"""What a proof and a comparison are thought to take."""

from __future__ import annotations

import pytest
from simulated_world import START_S, Machine, World

from flatout.fix.proof_runs import IDENTITY_STEPS, PARITY_STEPS
from flatout.fix.result import FixResult
from flatout.fix.time_budget import COMPILED_AGAIN, COMPILING_S, TimeBudget
from flatout.model.plan import Change

BF16 = Change(name="precision", value="bf16", safety="equivalent")
ELASTIC = Change(name="loader", value="elastic", safety="reseeded")
PREFETCHED = Change(name="device_prefetch", value=True, safety="identical")
COMPILED = Change(name="compile", value="default", safety="equivalent")
LARGER = Change(name="batch_size", value=128, safety="semantic")
ROOMY = {"memory_reserved_bytes": 1 << 30}


def purse(world: World, *kept: Change) -> TimeBudget:
    before, now = (world(plan, steps=48, timeout_s=60, at_least_s=6.0) for plan in ((), kept))
    return TimeBudget(FixResult(before=before, after=now, kept=kept), 240.0, lambda: 0.0)


@pytest.mark.parametrize("busy", [0.2, 1.0])
def test_runs_side_by_side_share_the_card(busy: float) -> None:
    """GIVEN two runs of 100 ms a step, and one of half that THEN a card that is busy all the time takes their sum."""
    at_work = purse(World(machine=Machine(compute_ms=100.0, busy=busy), facts=ROOMY), BF16)
    longest_s, all_s = PARITY_STEPS * 0.1, PARITY_STEPS * (0.1 + 0.05 + 0.1)
    expected_s = max(1.5 * (START_S + longest_s), START_S + busy * all_s)
    assert at_work.reserve_s(compare=False) == pytest.approx(expected_s, rel=0.1)


def test_runs_side_by_side_share_the_cores_and_those_without_room_come_after_them() -> None:
    """GIVEN workers that keep every core busy THEN all of it is theirs to do; and half the room takes twice as long."""
    every = (ELASTIC, PREFETCHED, BF16)
    loading = World(machine=Machine(compute_ms=100.0, busy=0.1), facts=ROOMY, cpu_pct=100.0)
    training_s = IDENTITY_STEPS * (0.1 + 0.1) + PARITY_STEPS * (0.1 + 0.05 + 0.1)
    assert purse(loading, *every).reserve_s(compare=False) == pytest.approx(START_S + training_s, rel=0.1)
    crowded = World(machine=Machine(compute_ms=100.0, busy=1.0), facts={"memory_reserved_bytes": 40 << 30})
    assert purse(crowded, *every).room == 2
    two_of_them_s = 1.5 * (2 * START_S + 2 * PARITY_STEPS * 0.1)  # what is compared with, and it again
    assert purse(crowded, *every).reserve_s(compare=False) == pytest.approx(two_of_them_s, rel=0.1)


@pytest.mark.parametrize(("gib", "room"), [(2, 8), (20, 4), (50, 1), (200, 1)])
def test_as_many_go_side_by_side_as_the_hosts_memory_holds(gib: int, room: int) -> None:
    """GIVEN a card with room for many, sixteen cores, and 120 GiB of memory that nobody uses."""
    assert purse(World(facts=ROOMY, host_gib=gib), ELASTIC).room == room


@pytest.mark.parametrize(("batch", "again"), [((), COMPILED_AGAIN), ((LARGER,), 1.0)])
def test_a_proof_compiles_anew_where_the_batch_has_been_another_since(batch: tuple[Change, ...], again: float) -> None:
    world = World(machine=Machine(compute_ms=100.0, busy=0.2), facts=ROOMY)
    eager, compiled = (purse(world, *batch).reserve_s(plan, compare=False) for plan in ((BF16,), (BF16, COMPILED)))
    assert compiled - eager == pytest.approx(again * COMPILING_S, abs=2)


def test_weights_that_go_from_run_to_run_take_their_time() -> None:
    """GIVEN 10 million of them THEN 44 times; of very many only as many as there is room for."""

    def reserve_s(weights: float) -> float:
        facts = ROOMY | {"parameters": int(weights)}
        return purse(World(machine=Machine(compute_ms=20.0, busy=0.2), facts=facts), BF16).reserve_s(compare=False)

    assert reserve_s(10e6) - reserve_s(0) == pytest.approx(1.5 * 11, rel=0.1)
    assert reserve_s(1e9) - reserve_s(0) == pytest.approx(1.5 * 18, rel=0.1)


def test_what_changes_learning_takes_no_proof() -> None:
    assert purse(World(), LARGER).reserve_s(compare=False) == 0


def test_what_other_rounding_is_held_against_may_be_faster_than_the_command_as_it_was() -> None:
    starved = purse(World(machine=Machine(data_ms=400.0, compute_ms=20.0), facts=ROOMY), ELASTIC, BF16)
    slow_s = starved.reserve_s(compare=False)
    starved.unrounded = World(machine=Machine(compute_ms=20.0))((), steps=48, timeout_s=60)
    assert starved.reserve_s(compare=False) < slow_s / 2


def test_what_was_compiled_once_starts_sooner() -> None:
    compiled = purse(World(machine=Machine(compute_ms=100.0)), COMPILED)
    now = compiled._now
    again_s = compiled.cost_s(now, 10) - 10 * 0.08
    assert now.seconds - 6 > START_S + 20
    assert again_s == pytest.approx(START_S + COMPILED_AGAIN * 25, abs=2)


def test_what_promises_much_may_take_the_time_of_the_comparison() -> None:
    at_work = purse(World(), BF16)
    assert at_work.reserve_s() > at_work.reserve_s(compare=False) + 2 * START_S
