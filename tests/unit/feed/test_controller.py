"""The controller against simulated loaders: it has to find the best number from any start, and stay there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from flatout.feed import controller as controller_module
from flatout.feed.channel import Done
from flatout.feed.controller import Controller, Observation, Tuning
from flatout.sample import budget


def run(
    controller: Controller,
    supply: Callable[[int], float],
    *,
    demand: float = 1e9,
    windows: int = 60,
    cores: float = 16,
    cpu_share: float = 1.0,
    delay_share: float = 0.0,
    memory_kills: Callable[[int], int] = lambda window: 0,
    burst: Callable[[int], float] = lambda window: 1.0,
) -> list[int]:
    """The worker counts of so many one-second windows, where n workers make `supply(n)` batches a second at most
    and the consumer takes `demand`, or in a window `burst` times as many as were made in it."""
    counts = []
    for window in range(windows):
        workers = controller.workers
        made = min(supply(workers), demand)
        busy = workers * made / supply(workers)
        controller.observe(
            Observation(
                seconds=1.0,
                batches=round(made * 100 * burst(window)),
                waited_s=max(0.0, 1 - made / demand),
                workers=workers,
                made=round(made * 100),
                made_s=busy,
                cpu_s=busy * (cpu_share - delay_share),
                run_delay_s=busy * delay_share,
                cores=cores,
                memory_kills=memory_kills(window),
            )
        )
        counts.append(controller.workers)
    return counts


def sixteen_threads(workers: int) -> float:
    """Of eight cores, as measured with JPEGs on such a machine: the second thread of a core brings little, but some."""
    known = {0: 0.0, 2: 17.5, 4: 35.1, 8: 65.2, 12: 77.0, 16: 87.5, 40: 60.0}
    below = max(count for count in known if count <= min(workers, 39))
    above = min(count for count in known if count > below)
    return known[below] + (known[above] - known[below]) * (workers - below) / (above - below)


def sixteen_cores(workers: int) -> float:
    """Each of 16 cores makes 10 batches a second; more workers than that get in each other's way."""
    return 10.0 * min(workers, 16) * (1.0 if workers <= 16 else 16 / workers)


@pytest.mark.parametrize("supply", [sixteen_cores, sixteen_threads])
@pytest.mark.parametrize("declared", [1, 4, 16, 40])
def test_finds_all_cores_where_loading_is_the_limit(declared: int, supply: Callable[[int], float]) -> None:
    counts = run(Controller(declared, cores=16), supply)
    assert supply(counts[20]) >= 0.97 * supply(16)
    assert len(set(counts[20:])) == 1, "does not settle"


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("supply", [sixteen_cores, sixteen_threads])
def test_batches_that_come_in_bursts_do_not_mislead_it(supply: Callable[[int], float], every: int) -> None:
    """GIVEN workers that end at the same time, so that a window has two rounds of their batches or only one."""
    counts = run(Controller(16, cores=16), supply, burst=lambda window: 1.5 if window % every else 0.6)
    assert supply(counts[-1]) >= 0.97 * supply(16)
    assert sum(count == 16 for count in counts) >= 55


def test_no_core_is_given_up_on_a_machine_that_drifts() -> None:
    """GIVEN sixteen workers that compute, and neighbours who leave them more of the machine from window to window WHEN
    any other number would seem to be better than the one before THEN none is tried."""
    drift = itertools.count(1.0, 0.1)
    counts = run(Controller(16, cores=16), lambda workers: sixteen_cores(workers) * next(drift), windows=100)
    assert set(counts) == {16}


@pytest.mark.parametrize("declared", [1, 4, 16, 40])
def test_uses_few_workers_where_the_gpu_is_the_limit(declared: int) -> None:
    """GIVEN a consumer that three workers can just feed, THEN it ends with three to five, and never lets it wait."""
    counts = run(Controller(declared, cores=16), sixteen_cores, demand=28)
    assert 3 <= counts[-1] <= 5
    assert all(sixteen_cores(count) >= 28 for count in counts[30:])


@pytest.mark.parametrize("declared", [1, 4, 16, 40])
def test_hardly_anything_is_lost_whatever_the_consumer_takes(declared: int) -> None:
    """The best fixed number of workers gives the consumer all it can take, or all that sixteen cores can make."""
    for demand in (11, 19.5, 21, 31, 42, 57, 73, 88, 104, 121, 139, 152, 163, 175):
        workers = run(Controller(declared, cores=16), sixteen_cores, demand=demand)[-1]
        assert sixteen_cores(workers) >= 0.97 * min(demand, 160), demand


def test_stops_where_more_workers_bring_nothing() -> None:
    """GIVEN a disk that gives 50 batches a second and no more, THEN about five workers are kept, not sixteen."""
    counts = run(Controller(1, cores=16), lambda workers: min(50.0, 10.0 * workers))
    assert 4 <= counts[-1] <= 6
    assert max(counts[20:]) <= 8, "it knows by then that more bring nothing"


@pytest.mark.parametrize("supply", [sixteen_cores, lambda workers: min(120.0, 10.0 * workers)])
def test_many_workers_are_reached_in_a_few_windows(supply: Callable[[int], float]) -> None:
    counts = run(Controller(1, cores=16), supply, windows=8)
    assert counts[-1] >= 12


def test_workers_that_mostly_wait_may_outnumber_the_cores() -> None:
    counts = run(Controller(4, cores=4), lambda workers: 10.0 * workers, cores=4, cpu_share=0.25)
    assert counts[-1] == 16


def test_as_many_as_were_declared_may_wait() -> None:
    declared = run(Controller(40, cores=4), lambda workers: 10.0 * workers, cores=4, cpu_share=0.05, windows=40)
    assert declared[-1] == 40
    computing = run(Controller(40, cores=4), lambda workers: 10.0 * min(4, workers), cores=4, windows=40)
    assert max(computing) <= 4


def test_workers_that_wait_for_a_core_do_not_pass_for_waiting_on_storage() -> None:
    """GIVEN a machine that others use too, so that workers take twice their CPU time, THEN no more are added."""
    controller = Controller(4, cores=4)
    for _ in range(6):
        seen = Observation(
            seconds=1,
            batches=50,
            waited_s=0.9,
            workers=controller.workers,
            made=50,
            made_s=4.0,
            cpu_s=2.0,
            run_delay_s=2.0,
            cores=4,
        )
        controller.observe(seen)
    assert controller.workers <= 4


def test_gives_cores_back_when_another_loader_needs_them() -> None:
    controller = Controller(16, cores=16)
    run(controller, sixteen_cores, windows=10)
    counts = run(controller, sixteen_cores, windows=10, cores=8)
    assert counts[0] == counts[-1] == max(counts) == 8


def test_follows_a_consumer_that_becomes_faster() -> None:
    controller = Controller(8, cores=16)
    run(controller, sixteen_cores, demand=15)
    counts = run(controller, sixteen_cores, demand=90, windows=60)
    assert sixteen_cores(counts[-1]) >= 90


def test_follows_a_consumer_that_becomes_slower() -> None:
    """WHEN all cores were needed, and a few are THEN what was found out before does not keep the others."""
    controller = Controller(1, cores=16)
    run(controller, sixteen_cores)
    assert 3 <= run(controller, sixteen_cores, demand=25, windows=30)[-1] <= 5


def test_comes_down_when_workers_are_killed_for_memory() -> None:
    controller = Controller(8, cores=16)
    counts = run(controller, sixteen_cores, windows=10, memory_kills=lambda window: 1 if window < 6 else 0)
    assert counts[-1] < 8
    assert max(run(controller, sixteen_cores, windows=20)) <= counts[-1]


@pytest.mark.parametrize("busy_s", [2.0, 3.6])
def test_uneven_samples_get_more_batches_ahead_before_more_workers(busy_s: float) -> None:
    """GIVEN workers that stand idle half of the time, or a tenth of it, while the consumer waits."""
    controller = Controller(4, cores=16)
    for _ in range(3):
        controller.observe(
            Observation(
                seconds=1,
                batches=50,
                waited_s=0.2,
                workers=4,
                made=50,
                made_s=busy_s,
                cpu_s=busy_s,
                cores=16,
            )
        )
    assert controller.workers == 4
    assert controller.depth > 2
    assert "unevenly" in controller.why


def test_a_step_down_is_taken_back_when_the_consumer_waits_though_it_became_faster_itself() -> None:
    """GIVEN a consumer that wants little until a few windows after the number of workers has gone down."""
    for slow_windows in range(3, 9):
        controller = Controller(16, cores=16)
        run(controller, sixteen_cores, demand=15, windows=slow_windows)
        counts = run(controller, sixteen_cores, windows=14)
        assert sixteen_cores(counts[-1]) >= 0.97 * 160, slow_windows


def test_a_number_that_memory_allows_is_not_exceeded_by_taking_a_step_back() -> None:
    controller = Controller(8, cores=16)
    run(controller, sixteen_cores, demand=30, windows=4)  # fewer are being tried
    before = controller.workers
    counts = run(controller, sixteen_cores, windows=8, memory_kills=lambda window: 2 if window == 0 else 0)
    assert max(counts) < before


# --- no workers at all ------------------------------------------------------------------------------------------------


def a_pass(workers: int, wait_s: float) -> Observation:
    """Of 20 batches, made by two workers in 0.1 s or in the training process; the loop has waited so long for each."""
    made = 20 if workers else 0
    return Observation(batches=20, waited_s=20 * wait_s, made=made, made_s=0.005 * made, cpu_s=0.005 * made)


@pytest.mark.parametrize(("wait_s", "workers"), [(0.0075, 0), (0.0025, 2)])
def test_a_pass_that_workers_take_longer_to_start_for_than_to_make_is_made_in_the_training_process(
    wait_s: float, workers: int
) -> None:
    controller = Controller(2, cores=4, may_do_without=True)
    controller.observe_pass(a_pass(2, wait_s))
    assert controller.workers == workers
    fixed = Controller(2, cores=4)
    fixed.observe_pass(a_pass(2, wait_s))
    assert fixed.workers == 2


def test_workers_come_back_for_good_where_the_loop_waits_longer_without_them() -> None:
    controller = Controller(2, cores=4, may_do_without=True)
    for workers, wait_s, then in ((2, 0.0075, 0), (0, 0.006, 0), (0, 0.008, 2), (2, 0.0075, 2)):
        controller.observe_pass(a_pass(workers, wait_s))
        assert controller.workers == then


# --- what it is told --------------------------------------------------------------------------------------------------

A_BATCH = Done(
    skeleton=b"", spans=[], needs=0, bad=[],
    wall_s=0.1, cpu_s=0.1, run_delay_s=0.0,
)  # fmt: skip


@pytest.fixture
def eight_cores() -> budget.Budget:
    return dataclasses.replace(budget.measure(), cores=7, cores_allowed=8.0)


def tuning_of(workers: int, cores: budget.Budget) -> Tuning:
    return Tuning(workers, cores, fixed=False, may_do_without=False)


def window_of(loader: Tuning, workers: int, start_s: float) -> None:
    """A second in which the consumer did nothing but wait."""
    loader.end_pass(start_s)
    while not loader.handed_over(0.1, start_s, start_s + 0.1):
        loader.add_batch(A_BATCH)
        start_s += 0.1
    loader.decide(workers)


def test_loaders_that_are_in_use_share_the_cores(eight_cores: budget.Budget) -> None:
    """GIVEN a loader with all cores, WHEN another one is used beside it, THEN it gives half of them back; and none once
    the other has not been asked for a while."""
    train = tuning_of(8, eight_cores)
    val = tuning_of(8, eight_cores)
    train.handed_over(0.1, 99.9, 100.0)
    assert train.cores() == 8.0  # nobody has asked the other yet
    val.handed_over(0.1, 101.9, 102.0)
    window_of(train, 8, 100.0)
    window_of(train, 8, 101.0)
    assert (train.workers, train.why) == (4, "4 cores to use")
    train.handed_over(0.1, 199.9, 200.0)
    assert train.cores() == 8.0


def test_an_evaluation_that_is_over_takes_no_cores_and_no_time(eight_cores: budget.Budget) -> None:
    """GIVEN a training whose pass goes on after an evaluation, THEN it keeps its cores, and nobody thinks it slow."""
    train = tuning_of(8, eight_cores)
    val = tuning_of(8, eight_cores)
    train.handed_over(0.1, 100.0, 100.1)
    val.handed_over(0.1, 100.4, 100.5)
    assert train.cores() == 4.0
    val.end_pass(102.1)
    assert train.cores() == 8.0
    train.handed_over(0.1, 102.1, 102.2)
    assert train._window.seconds == pytest.approx(0.1), "a new window"
    val.end_pass(102.3)  # once more, as the next pass begins: nothing was asked for since
    train.handed_over(0.1, 102.3, 102.4)
    assert train._window.seconds == pytest.approx(0.1 + 0.2)


def test_a_pass_that_was_begun_ahead_has_waited_for_nobody(eight_cores: budget.Budget) -> None:
    val = tuning_of(8, eight_cores)
    val.handed_over(0.1, 102.85, 103.0)
    assert val._window.seconds == pytest.approx(0.15)


def test_kills_for_memory_are_seen_in_the_kernels_count(
    eight_cores: budget.Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN two workers killed by the kernel and one by somebody else, THEN there is one worker fewer."""
    kills = iter([5, 6, 6, 7])
    monkeypatch.setattr(controller_module, "out_of_memory_kills", lambda: next(kills))
    loader = tuning_of(4, eight_cores)
    for _ in range(3):
        loader.count_death()
    window_of(loader, 4, 100.0)
    assert (loader.workers, loader.why) == (3, "workers were killed for memory")


def test_a_number_that_is_held_changes_for_want_of_memory_alone(
    eight_cores: budget.Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 0
    monkeypatch.setattr(controller_module, "out_of_memory_kills", lambda: kills)
    held = tuning_of(1, eight_cores)
    held.set_workers(4, hold=True)
    for start_s in (100.0, 101.0, 102.0):
        window_of(held, 4, start_s)
    assert held.workers == 4, "however long the loop waits"
    kills = 2
    held.count_death()
    window_of(held, 4, 103.0)
    assert (held.workers, held.why) == (3, "workers were killed for memory")
