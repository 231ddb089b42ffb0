"""Steps made by hand, whose answer is known without a computer."""

from __future__ import annotations

import pytest

from flatout.diagnose.rank_metrics import replayed_ms, saved_in_step
from flatout.trace import Span, Step


def step(*spans: tuple[str, float, float | None, float | None]) -> Step:
    """A step of (name, host ms, GPU idle ms, GPU busy ms)."""
    made, start = [], 0.0
    for name, host, idle, busy in spans:
        made.append(Span(name=name, start_ms=start, host_ms=host, gpu_idle_ms=idle, gpu_busy_ms=busy))
        start += host
    return Step(index=0, start_s=0.0, wall_ms=start, spans=tuple(made))


def test_a_step_bound_by_the_gpu_takes_the_gpus_time() -> None:
    assert replayed_ms(step(("forward", 2.0, None, 30.0), ("backward", 3.0, None, 40.0))) == pytest.approx(70.0)


def test_a_step_bound_by_data_takes_the_hosts_time() -> None:
    stalled = step(("data", 50.0, 45.0, None), ("forward", 2.0, None, 4.0), ("backward", 3.0, None, 6.0))
    assert replayed_ms(stalled) == pytest.approx(55.0)
    assert saved_in_step(stalled, "data") == pytest.approx(1 - 10 / 55)


def test_a_sync_that_waits_for_useful_work_costs_nothing() -> None:
    # GIVEN a host far ahead of the GPU that waits at the end of each step
    waiting = step(("forward", 1.0, None, 30.0), ("sync", 29.0, 0.0, None))
    # WHEN the wait is taken away THEN the GPU still needs its 30 ms
    assert replayed_ms(waiting) == pytest.approx(30.0)
    assert saved_in_step(waiting, "sync") == pytest.approx(0.0)


def test_a_sync_that_empties_the_queue_is_charged_with_the_idle_time_after_it() -> None:
    # GIVEN 10 ms of host work after each wait, during which the GPU has nothing in its queue
    harmful = step(("rest", 10.0, None, 0.0), ("forward", 1.0, None, 20.0), ("sync", 19.0, 0.0, None))
    assert replayed_ms(harmful) == pytest.approx(30.0)
    # WHEN the wait goes THEN host work hides behind the GPU's 20 ms
    assert saved_in_step(harmful, "sync") == pytest.approx(1 - 20 / 30)


def test_the_hold_of_a_measurement_does_not_count() -> None:
    # GIVEN a wait for data that a queue of work hides, and a host that is kept from filling it further
    held = step(("data", 5.0, 0.0, None), ("forward", 1.0, None, 30.0), ("held", 24.0, 0.0, None))
    assert replayed_ms(held) == pytest.approx(30.0)
    assert saved_in_step(held, "data") == pytest.approx(0.0)
    # WHEN the data takes longer than the GPU THEN the host is the slower one, with or without the leash
    late = step(("data", 35.0, 4.0, None), ("forward", 1.0, None, 30.0), ("held", 1.0, 0.0, None))
    assert replayed_ms(late) == pytest.approx(36.0)


def test_gaps_seen_by_the_xray_are_not_gpu_work() -> None:
    # GIVEN the same, where the events around the host's work read 10 ms, though nothing runs between them
    harmful = step(("rest", 10.0, None, 10.0), ("forward", 1.0, None, 20.0), ("sync", 19.0, 0.0, None))
    assert saved_in_step(harmful, "sync") == pytest.approx(0.0)
    assert saved_in_step(harmful, "sync", at_work={"rest": 0.0}) == pytest.approx(1 - 20 / 30)


def test_a_step_without_events_has_no_answer() -> None:
    assert replayed_ms(step(("forward", 2.0, None, None))) is None
    assert saved_in_step(step(("forward", 2.0, None, None)), "sync") is None
