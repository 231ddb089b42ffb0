"""What is left of a fix's time, what a run is expected to take, and how many runs go side by side."""

from __future__ import annotations

import pytest
from simulated_world import World

from flatout.fix.runs import runs_at_once
from flatout.fix.trials import COMPILED_AGAIN, COMPILING_S, TUNING_S, TimeBudget
from flatout.launch.protocol import Trial
from flatout.model.plan import Change

ELASTIC = Change(name="loader", value="elastic", safety="reseeded")
COMPILED = Change(name="compile", value="default", safety="equivalent")
TUNED = Change(name="compile", value="max-autotune", safety="equivalent")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_what_was_spent_is_gone() -> None:
    clock = Clock()
    budget = TimeBudget(240.0, clock)
    clock.now_s += 100
    assert (budget.spent_s, budget.left_s) == (100, 140)


def test_a_run_is_expected_to_take_as_long_as_the_longest_so_far() -> None:
    budget = TimeBudget(240.0, Clock())
    for seconds in (16.0, 20.0, 12.0):
        budget.note((), seconds)
    assert budget.run_s([ELASTIC]) == 20


def test_what_compiling_takes_is_guessed_until_it_is_seen_and_less_from_then_on() -> None:
    budget = TimeBudget(240.0, Clock())
    budget.note((), 20.0)
    assert budget.run_s([ELASTIC, COMPILED]) == 20 + COMPILING_S
    assert budget.run_s([TUNED]) == 20 + TUNING_S
    budget.note([COMPILED], 50.0)
    assert budget.run_s([ELASTIC, COMPILED]) == 20 + COMPILED_AGAIN * 30
    assert budget.run_s([ELASTIC]) == 20
    assert budget.run_s([TUNED]) == 20 + TUNING_S


def test_a_run_that_takes_several_times_as_long_as_expected_is_ended() -> None:
    clock = Clock()
    budget = TimeBudget(600.0, clock)
    assert budget.timeout_s(0.0) == 600  # the first: nobody knows what it takes
    budget.note((), 20.0)
    assert budget.timeout_s(20.0) == 140
    clock.now_s += 590
    assert budget.timeout_s(20.0) == 40, "the budget is not overrun by much"


@pytest.mark.parametrize(("needed_s", "minutes"), [(100, 5), (240, 5), (300, 6), (600, 11)])
def test_a_budget_that_would_do_is_in_whole_minutes_and_a_little_more(needed_s: float, minutes: int) -> None:
    assert TimeBudget(240.0, Clock()).enough_m(needed_s) == minutes


@pytest.mark.parametrize(
    ("reserved_gib", "host_gib", "room"),
    [(1, 2, 8), (1, 20, 4), (1, 50, 1), (1, 200, 1), (40, 2, 2), (100, 2, 1)],
    ids=["cores", "host memory", "half of it", "more than there is", "GPU memory", "a full GPU"],
)
def test_as_many_runs_go_side_by_side_as_have_room(reserved_gib: int, host_gib: int, room: int) -> None:
    """GIVEN a GPU with 140 GiB, sixteen cores, and 120 GiB of memory that nobody uses."""
    world = World(facts={"memory_reserved_bytes": reserved_gib << 30}, host_gib=host_gib)
    run = world.run((), 48, Trial(timeout_s=60))
    assert runs_at_once(run, run) == room
