"""When a trial has been measured for long enough, and whether it is then worth a closer look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.inside import trial
from flatout.inside.run_facts import batches_ahead
from flatout.inside.trial import TrialProgress
from flatout.launch.protocol import MOST_STEPS, Options, Trial
from flatout.model.records import LoaderFacts


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trial, "time", made)
    return made


def course(**trial: Any) -> TrialProgress:
    return TrialProgress(Options(folder=Path(), name="train", max_steps=4, trial=Trial(**trial)))


def steps(course: TrialProgress, clock: Clock, count: int, step_s: float, *, measured: int) -> int:
    """So many steps; how many are measured by then."""
    for _ in range(count):
        course.step_begins()
        clock.now_s += step_s
        measured += 1
        course.step_ended(measured)
    return measured


def test_only_measured_steps_count(clock: Clock) -> None:
    """Steps of another kind do not, nor what is done between two, however long it takes."""
    run = course(at_least_s=3.0)
    measured = steps(run, clock, 4, 0.5, measured=0)
    assert not run.is_over()
    run.step_begins()
    clock.now_s += 60.0
    run.step_ended(measured)
    clock.now_s += 60.0
    assert not run.is_over()
    steps(run, clock, 2, 0.5, measured=measured)
    assert run.is_over()


def test_unsteady_steps_are_measured_for_twice_as_long(clock: Clock) -> None:
    for later_s, over in ((0.5, True), (0.2, False)):
        run = course(at_least_s=16.0, known_to=0.02)
        measured = steps(run, clock, 24, 0.5, measured=0)
        while run._trained_s < 16.0:
            measured = steps(run, clock, 1, later_s, measured=measured)
        assert run.is_over() == over
        while run._trained_s < 32.0:
            measured = steps(run, clock, 1, later_s, measured=measured)
        assert run.is_over()


def test_steady_steps_are_measured_for_half_as_long(clock: Clock) -> None:
    for later_s, half in ((0.5, True), (0.45, False)):
        run = course(at_least_s=32.0)
        measured = steps(run, clock, 24, 0.5, measured=0)
        assert not run.is_over()
        steps(run, clock, 16, later_s, measured=measured)
        assert run.is_over() == half


def test_short_steps_end_at_a_number(clock: Clock) -> None:
    run = course(at_least_s=1e9)
    measured = steps(run, clock, MOST_STEPS - 1, 0.001, measured=0)
    assert not run.is_over()
    steps(run, clock, 1, 0.001, measured=measured)
    assert run.is_over()


@pytest.mark.parametrize(("step_s", "count"), [(2.0, 5), (4.0, 3), (20.0, 3), (0.002, 1500)])
def test_of_slow_steps_a_few_that_have_taken_long_are_enough(clock: Clock, step_s: float, count: int) -> None:
    run = TrialProgress(
        Options(folder=Path(), name="train", max_steps=48, trial=Trial(at_least_s=6.0, enough_s=10.0)),
    )
    measured = 0
    while not run.is_over():
        measured = steps(run, clock, 1, step_s if measured % 2 else 1.001 * step_s, measured=measured)
    assert measured <= count
    assert measured * step_s >= 3.0, "half the time, where steps are steady"


def test_batches_that_lay_ready_are_used_up_first_but_not_forever(clock: Clock) -> None:
    run = course(at_least_s=1.0)
    assert [run.warms_up(step, batches_ready=3) for step in range(5)] == [True, True, True, False, False]
    steps(run, clock, 2, 6.0, measured=0)
    assert not run.warms_up(2, batches_ready=30)
    assert not course(fingerprints=True).warms_up(0, batches_ready=30)


def test_several_ranks_count_steps_alone(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clocks differ, and they have to do the same."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = course(at_least_s=1e9, look_below_s=0.0)
    steps(run, clock, 3, 6.0, measured=0)
    assert run.warms_up(3, batches_ready=30)
    assert not run.is_over()
    steps(run, clock, 1, 6.0, measured=3)
    assert run.is_over()
    assert run.is_worth_a_look


def test_what_is_slower_is_not_looked_at(clock: Clock) -> None:
    """By its later steps: a loader that starts with one worker is slow at first."""
    for first_s, later_s, worth in ((1.0, 0.2, True), (0.2, 1.0, False)):
        run = course(look_below_s=0.5)
        measured = steps(run, clock, 10, first_s, measured=0)
        steps(run, clock, 10, later_s, measured=measured)
        assert run.is_worth_a_look == worth


@pytest.mark.parametrize(
    ("facts", "ready"),
    [
        ({"num_workers": 16, "prefetch_factor": 2}, 32),
        ({"num_workers": 0, "prefetch_factor": None}, 0),
        ({"num_workers": 40, "prefetch_factor": 4, "length": 3200, "batch_size": 32}, 25),
        ({"num_workers": 16, "prefetch_factor": 2, "elastic": True}, 0),
        ({"num_workers": 16, "prefetch_factor": 2, "batches": 40}, 10),
    ],
)
def test_how_many_batches_lie_ready(facts: dict[str, Any], ready: int) -> None:
    usual = {"dataset": "D", "elastic": False, "length": 100_000, "batch_size": 32}
    assert batches_ahead(LoaderFacts(**{**usual, **facts})) == ready
