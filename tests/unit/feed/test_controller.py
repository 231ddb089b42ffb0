"""The controller against simulated loaders: it has to find the best number from any start, and stay there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flatout.feed.controller import Controller, Observation


def run(
    controller: Controller,
    supply: Callable[[int], float],
    *,
    demand: float = 1e9,
    windows: int = 60,
    cores: float = 16,
    cpu_share: float = 1.0,
    memory_kills: Callable[[int], int] = lambda window: 0,
) -> list[int]:
    """The worker counts of so many one-second windows, where n workers make `supply(n)` batches a second at most
    and the consumer takes `demand`."""
    counts = []
    for window in range(windows):
        workers = controller.workers
        made = min(supply(workers), demand)
        busy = workers * made / supply(workers)
        controller.observe(
            Observation(
                seconds=1.0,
                batches=round(made * 100),
                waited_s=max(0.0, 1 - made / demand),
                workers=workers,
                busy_s=busy,
                cpu_s=busy * cpu_share,
                cores=cores,
                memory_kills=memory_kills(window),
            )
        )
        counts.append(controller.workers)
    return counts


def sixteen_cores(workers: int) -> float:
    """Each of 16 cores makes 10 batches a second; more workers than that get in each other's way."""
    return 10.0 * min(workers, 16) * (1.0 if workers <= 16 else 16 / workers)


@pytest.mark.parametrize("declared", [1, 4, 16, 40])
def test_finds_all_cores_where_loading_is_the_limit(declared: int) -> None:
    counts = run(Controller(declared, cores=16), sixteen_cores)
    assert sixteen_cores(counts[30]) >= 0.97 * sixteen_cores(16)
    assert len(set(counts[30:])) == 1, "does not settle"


@pytest.mark.parametrize("declared", [1, 4, 16, 40])
def test_uses_few_workers_where_the_gpu_is_the_limit(declared: int) -> None:
    """GIVEN a consumer that three workers can just feed, THEN it ends with three to five, and never lets it wait."""
    counts = run(Controller(declared, cores=16), sixteen_cores, demand=28)
    assert 3 <= counts[-1] <= 5
    assert all(sixteen_cores(count) >= 28 for count in counts[30:])


def test_stops_where_more_workers_bring_nothing() -> None:
    """GIVEN a disk that gives 50 batches a second and no more, THEN about five workers are kept, not sixteen."""
    counts = run(Controller(1, cores=16), lambda workers: min(50.0, 10.0 * workers))
    assert 4 <= counts[-1] <= 6


def test_workers_that_mostly_wait_may_outnumber_the_cores() -> None:
    counts = run(Controller(4, cores=4), lambda workers: 10.0 * workers, cores=4, cpu_share=0.25)
    assert counts[-1] == 16


def test_workers_that_wait_for_a_core_do_not_pass_for_waiting_on_storage() -> None:
    """GIVEN a machine that others use too, so that workers take twice their CPU time, THEN no more are added."""
    controller = Controller(4, cores=4)
    for _ in range(6):
        seen = Observation(
            seconds=1,
            batches=50,
            waited_s=0.9,
            workers=controller.workers,
            busy_s=4.0,
            cpu_s=2.0,
            run_delay_s=2.0,
            cores=4,
        )
        controller.observe(seen)
    assert controller.workers == 4


def test_gives_cores_back_when_another_loader_needs_them() -> None:
    controller = Controller(16, cores=16)
    run(controller, sixteen_cores, windows=10)
    counts = run(controller, sixteen_cores, windows=5, cores=8)
    assert counts[-1] == 8


def test_follows_a_consumer_that_becomes_faster() -> None:
    controller = Controller(8, cores=16)
    run(controller, sixteen_cores, demand=15)
    counts = run(controller, sixteen_cores, demand=90, windows=60)
    assert sixteen_cores(counts[-1]) >= 90


def test_comes_down_when_workers_are_killed_for_memory() -> None:
    controller = Controller(8, cores=16)
    counts = run(controller, sixteen_cores, windows=10, memory_kills=lambda window: 1 if window < 6 else 0)
    assert counts[-1] == 8 - 3 or counts[-1] < 8
    assert max(run(controller, sixteen_cores, windows=20)) <= counts[-1]


def test_uneven_samples_get_more_batches_ahead_before_more_workers() -> None:
    controller = Controller(4, cores=16)
    for _ in range(3):
        controller.observe(
            Observation(seconds=1, batches=50, waited_s=0.2, workers=4, busy_s=2.0, cpu_s=2.0, cores=16)
        )  # fmt: skip
    assert controller.workers == 4
    assert controller.depth > 2
    assert "unevenly" in controller.why
