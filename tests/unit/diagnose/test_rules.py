"""Each cause is found where it is, and only there."""

from __future__ import annotations

import dataclasses

import pytest
from diagnose_cases import CORES, FACTS, HEALTHY, LOADER, hardware, steps, trace, workers, xray

from flatout.diagnose.rank_metrics import metrics_of
from flatout.diagnose.rules import diagnose
from flatout.model.causes import CODES, Finding
from flatout.model.records import Frame, GradientExchange, Stacks, StackTime
from flatout.report.views import gain
from flatout.trace import Facts, GpuProcess, ProcessSample, RankTrace, RunInfo, Sketch, Span, Step, Trace
from flatout.trace.downsample import window_of
from flatout.trace.reader import from_json

NO_GPU = {"facts": {"gpu": None}, "xray": None}
STARVED = (("data", 60.0, 55.0, None), *HEALTHY[1:])


def codes(made: Trace) -> list[str]:
    return [finding.code for finding in diagnose(made)]


def first(made: Trace) -> Finding:
    return diagnose(made)[0]


def test_a_healthy_run_is_called_healthy_and_nothing_else() -> None:
    assert codes(trace()) == ["compute.saturated"]


@pytest.mark.parametrize(
    ("outside", "verdict"), [(3.0, ["compute.saturated"]), (25.0, ["host.python"])], ids=["little", "more"]
)
def test_without_a_gpu_the_scripts_own_code_between_the_phases_is_not_called_computing(
    outside: float, verdict: list[str]
) -> None:
    """A simulator stepped in Python, say."""
    assert codes(trace(*HEALTHY, ("rest", outside, None, None), facts={"gpu": None}, xray=None)) == verdict


@pytest.mark.parametrize("short", [steps(*STARVED)[:10], steps(("forward", 0.5, None, 0.5))], ids=["few", "quick"])
def test_too_few_or_too_quick_steps_are_not_judged(short: tuple[Step, ...]) -> None:
    """Others have the cores while a training of 60 steps is over in 0.03 s: who can say."""
    waits = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=100.0, run_delay_pct=50.0)
    busy = tuple(dataclasses.replace(sample, processes=(waits,)) for sample in hardware(99.0))
    rank = RankTrace(info=RunInfo(name="t", host="node", rank=0), steps=short, windows=(window_of(list(short)),))
    assert diagnose(Trace(ranks=(rank,), samples={"node": busy})) == ()


def test_loading_in_the_training_process() -> None:
    made = trace(*STARVED, loader={"num_workers": 0}, workers=workers(1, sample_ms=1.0, busy=0.7))
    found = first(made)
    assert (found.code, found.change) == ("data.main-thread", "num_workers")
    # one process makes 1,000 samples/s; without waiting the GPU would eat 64 in 20 ms, 3,200/s: four, and one to spare
    assert found.value == 5
    # the GPU stands idle in 55 of 80 ms
    assert found.share == pytest.approx(0.69, abs=0.01)
    assert 2.5 < found.gain_low < found.gain_high <= 1 / (1 - found.share) + 1e-9


def test_without_a_gpu_feeding_gives_no_more_than_the_cores_have_left() -> None:
    """Who trains needs the cores that are to load."""
    made = trace(*STARVED, loader={"num_workers": 0}, workers=workers(1, sample_ms=1.0, busy=0.7), facts={"gpu": None})
    trains = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=80.0 * CORES)
    busy = tuple(dataclasses.replace(sample, processes=(trains,)) for sample in hardware(99.0))  # others are here too
    found = first(dataclasses.replace(made, samples={"node": busy}))
    assert (found.code, found.gain_low, found.gain_high) == ("data.main-thread", 1.0, pytest.approx(1.25))


@pytest.mark.parametrize(("ceiling_ms", "most"), [(16.0, 3.2), (40.0, 2.0)])
def test_neither_the_ceiling_nor_the_share_of_the_wait_is_exceeded(ceiling_ms: float, most: float) -> None:
    made = trace(*STARVED, loader={"num_workers": 0}, workers=workers(1, sample_ms=1.0, busy=0.7))
    quick = [dataclasses.replace(step, kind="resident", wall_ms=ceiling_ms) for step in made.ranks[0].steps]
    rank = dataclasses.replace(made.ranks[0], steps=(*made.ranks[0].steps, *quick))
    found = first(dataclasses.replace(made, ranks=(rank,)))
    assert (found.gain_high, found.derived) == (pytest.approx(most, rel=0.01), "measured ceiling")


def test_the_elastic_loader_is_not_told_how_many_workers_to_have() -> None:
    elastic = {"changes": [{"name": "loader", "value": "elastic", "applied": True}]}
    here = {"loader": {"num_workers": 0}, "workers": workers(1, sample_ms=1.0, busy=0.7)}
    crowd = {"loader": {"num_workers": 40}, "workers": workers(2, sample_ms=20.0, busy=0.95, delay=0.6)}
    for case in (here, crowd):
        assert "num_workers" in [f.change for f in diagnose(trace(*STARVED, **case))]
        assert "num_workers" not in [f.change for f in diagnose(trace(*STARVED, **case, facts=elastic))]
        imported = case | {"loader": case["loader"] | {"elastic": True}}
        assert "num_workers" not in [f.change for f in diagnose(trace(*STARVED, **imported))]


def test_samples_that_wait_for_a_server_get_more_workers_than_cores() -> None:
    """GIVEN two cores and samples that take no CPU THEN loading them is said to be worth several times the speed."""
    loader = {"num_workers": 0, "prefetch_factor": None}
    waiting = workers(1, sample_ms=1.0, busy=0.99, on_core=0.03, delay=0.0)
    found = first(trace(*STARVED, loader=loader, workers=waiting, facts={"cores_allowed": 2}))
    assert (found.code, found.value) == ("data.main-thread", 4)
    assert found.gain_high > 2
    computing = workers(1, sample_ms=1.0, busy=0.99)
    assert first(trace(*STARVED, loader=loader, workers=computing, facts={"cores_allowed": 2})).value == 1


def test_loading_that_waits_for_a_core_asks_for_no_more_workers_than_there_are_cores() -> None:
    """GIVEN samples that are on a core a quarter of their time, for others have the cores THEN one worker is named."""
    load = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=30.0, run_delay_pct=70.0)
    busy = tuple(dataclasses.replace(sample, processes=(load,)) for sample in hardware(99.0))
    waiting = workers(1, sample_ms=1.0, busy=0.99, on_core=0.25)
    made = trace(*STARVED, loader={"num_workers": 0}, workers=waiting, facts={"cores_allowed": 2}, samples=busy)
    assert first(made).value == 1


def test_how_fast_one_process_loads_is_what_training_waits_for() -> None:
    """GIVEN samples of 2 µs that take long to join THEN no rate is told that the wait beside it contradicts."""
    quick = workers(1, sample_ms=0.002, busy=0.001, times=Sketch.of([0.002] * 500))
    made = trace(*STARVED, loader={"num_workers": 0}, workers=quick)
    waits_ms = {name: ms for name, ms, _, _ in STARVED}["data"]
    assert f"one process makes {64 / waits_ms * 1e3:,.0f} samples/s" in first(made).advice


def test_workers_waiting_for_something_else_are_not_too_many() -> None:
    few_cores = {"loader": {"num_workers": 11}, "facts": {"cores_allowed": 2}}
    waiting = workers(11, sample_ms=20.0, busy=0.95, on_core=0.1, delay=0.45)
    assert "data.too-many-workers" not in codes(trace(*STARVED, **few_cores, workers=waiting))
    threads = workers(11, sample_ms=20.0, busy=0.95, on_core=0.05, delay=0.9)
    assert "data.too-many-workers" in codes(trace(*STARVED, **few_cores, workers=threads)), "theirs have the cores"
    crowded = workers(11, sample_ms=20.0, busy=0.95, on_core=0.18, delay=0.8)
    assert "data.too-many-workers" in codes(trace(*STARVED, **few_cores, workers=crowded))


@pytest.mark.parametrize("declared", [0, 8])
@pytest.mark.parametrize("cpu_pct", [75.0, 95.0])
def test_where_the_elastic_loader_cannot_keep_up_the_samples_are_the_cost(declared: int, cpu_pct: float) -> None:
    """GIVEN that it finds its workers itself, so that their number is no advice THEN what can spare them work is."""
    behind = {"loader": {"num_workers": declared, "elastic": True}, "samples": hardware(cpu_pct)}
    jitter = {"settings": [{"source": "argparse", "file": None, "values": {"jitter_on": "cpu"}}]}
    found = first(trace(*STARVED, **behind, workers=workers(14, sample_ms=150.0, busy=0.8), facts=jitter))
    assert (found.code, found.change, found.value) == ("data.cpu-bound", "setting:jitter_on", "gpu")
    assert found.title.startswith("no number of workers keeps up")
    waiting = workers(14, sample_ms=150.0, busy=0.8, on_core=0.1)
    assert "data.cpu-bound" not in codes(trace(*STARVED, **behind, workers=waiting, facts=jitter))


def test_a_ceiling_below_the_run_itself_says_nothing() -> None:
    """Others had the cores while it was measured."""
    made = trace(*STARVED, loader={"num_workers": 0}, workers=workers(1, sample_ms=1.0, busy=0.7), xray=None)
    slow = [dataclasses.replace(step, kind="replay", wall_ms=2 * step.wall_ms) for step in made.ranks[0].steps]
    rank = dataclasses.replace(made.ranks[0], steps=(*made.ranks[0].steps, *slow))
    assert codes(dataclasses.replace(made, ranks=(rank,))) == codes(made)


def test_too_few_workers_are_busy_while_cores_are_free() -> None:
    made = trace(*STARVED, loader={"num_workers": 2}, workers=workers(2, sample_ms=2.0, busy=0.95))
    found = first(made)
    assert found.code == "data.too-few-workers"
    assert 2 < found.value <= 14


def test_too_many_workers_wait_for_a_core() -> None:
    held = workers(40, sample_ms=20.0, busy=0.95, on_core=0.4, delay=0.55)
    found = first(trace(*STARVED, loader={"num_workers": 40}, workers=held, samples=hardware(99.0)))
    assert (found.code, found.value) == ("data.too-many-workers", 14)


def test_workers_that_wait_for_a_server_are_too_few_however_busy_the_cores_are() -> None:
    made = trace(
        *STARVED,
        loader={"num_workers": 2},
        workers=workers(2, sample_ms=20.0, busy=0.98, on_core=0.1),
        samples=hardware(97.0),
    )
    found = first(made)
    assert found.code == "data.too-few-workers"
    assert found.value > 2


@pytest.mark.parametrize(("gpu", "change"), [("NVIDIA H200", "gpu_transforms"), (None, None)])
def test_all_cores_busy_is_cpu_bound_not_too_few_workers(gpu: str | None, change: str | None) -> None:
    made = trace(
        *STARVED,
        loader={"num_workers": 16},
        workers=workers(16, sample_ms=25.0, busy=0.97, delay=0.05),
        samples=hardware(97.0),
        facts={"gpu": gpu},
    )
    found = first(made)
    assert (found.code, found.change) == ("data.cpu-bound", change)
    assert ("GPU" in found.advice) == bool(gpu), "no GPU, no advice to use one"


@pytest.mark.parametrize(("augment_on", "offered"), [("cpu", True), ("gpu", False)])
def test_a_script_that_can_augment_on_the_gpu_is_told_so_whatever_holds_its_workers_up(
    augment_on: str, offered: bool
) -> None:
    read = {"source": "argparse", "values": {"augment_on": augment_on}}
    made = trace(
        *STARVED,
        loader={"num_workers": 2},
        workers=workers(2, sample_ms=25.0, busy=0.97),
        facts={"gpu": "NVIDIA H200", "settings": [read]},
    )
    found = [finding for finding in diagnose(made) if finding.change == "setting:augment_on"]
    assert [finding.value for finding in found] == ["gpu"] * offered


def test_a_sample_costs_the_time_that_it_is_on_a_core() -> None:
    made = trace(
        *STARVED,
        loader={"num_workers": 16},
        workers=workers(16, sample_ms=20.0, busy=0.97, on_core=0.6, delay=0.2),
        samples=hardware(97.0),
    )
    assert "a sample costs 12 ms of CPU" in first(made).title


def test_workers_without_cores_because_of_other_programs_are_not_cpu_bound() -> None:
    """GIVEN samples that sleep, on cores that others keep busy WHEN workers come to a core late THEN a faster decoder
    is no fix."""
    sleeping = workers(16, sample_ms=1.3, busy=0.52, on_core=0.03, delay=0.57)
    made = trace(*STARVED, loader={"num_workers": 16, "elastic": True}, workers=sleeping, samples=hardware(97.0))
    assert "data.cpu-bound" not in codes(made)


def test_workers_whose_threads_outnumber_the_cores() -> None:
    # GIVEN workers that are off their core a fifth of the time, though they are not held up, and 12 threads in one
    seen = ProcessSample(pid=1000, role="worker", name="python", cpu_pct=110.0, switches_s=3000.0, threads=15)
    busy = tuple(dataclasses.replace(s, processes=(seen,)) for s in hardware(60.0))
    read = [{"source": "argparse", "values": {"decode_threads": 12}}]
    slow = workers(8, sample_ms=20.0, busy=0.9, on_core=0.78)
    found = diagnose(trace(*STARVED, workers=slow, samples=busy, facts={"settings": read}))
    crowd = next(f for f in found if f.code == "data.too-many-workers")
    assert (crowd.change, crowd.value) == ("setting:decode_threads", 1)
    # THEN without them a worker no longer stands and waits, at best; at worst it misses what they did on free cores
    assert (crowd.gain_low, crowd.gain_high) == pytest.approx((1 / (1.10 / 0.9), 1 / (1 - 0.2)))
    assert gain(crowd) == "0.82 to 1.25× as fast on its own"
    full = tuple(dataclasses.replace(s, processes=(seen,)) for s in hardware(97.0))
    found = diagnose(trace(*STARVED, workers=slow, samples=full, facts={"settings": read}))
    assert next(f for f in found if f.change == "setting:decode_threads").gain_low == 1.0


def test_threads_of_workers_that_lack_a_core_to_others_are_not_to_blame() -> None:
    """GIVEN a worker with many threads that waits for nothing but a core, which others have THEN those are named."""
    seen = ProcessSample(pid=1000, role="worker", name="python", cpu_pct=30.0, threads=40)
    load = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=30.0, run_delay_pct=60.0)
    full = tuple(dataclasses.replace(one, processes=(load, seen)) for one in hardware(97.0))
    slow = workers(1, sample_ms=20.0, busy=0.9, on_core=0.3, delay=0.7, worker=True)
    made = trace(*STARVED, loader={"num_workers": 1}, workers=slow, samples=full)
    assert [one for one in codes(made) if not one.startswith("compute")] == ["hardware.shared"]


@pytest.mark.parametrize(("batch_sampler", "rate"), [("builtins.NoneType", 64_000.0), ("torch.BatchSampler", 1_000.0)])
def test_how_fast_a_worker_is_where_the_loader_has_no_batch_size(batch_sampler: str, rate: float) -> None:
    """GIVEN a dataset that hands out whole batches, or a batch sampler, as accelerate makes its loaders."""
    loader = {"batch_size": None, "batch_sampler": batch_sampler}
    [metrics] = metrics_of(trace(loader=loader, workers=workers(8, sample_ms=1.0)))
    assert metrics.samples_a_worker_s == pytest.approx(rate)


def test_workers_that_wait_for_storage() -> None:
    made = trace(
        *STARVED, workers=workers(8, sample_ms=30.0, busy=0.97, on_core=0.1), samples=hardware(10.0, io_pct=60.0)
    )
    assert first(made).code == "data.disk-bound"


@pytest.mark.parametrize(("cores", "code"), [(4, "data.disk-bound"), (8, "data.too-few-workers")])
def test_many_workers_that_wait_for_nothing_on_this_machine_wait_for_storage(cores: int, code: str) -> None:
    """GIVEN eight workers on a core 1% of the time, idle cores THEN with four cores their number is not to blame."""
    ours = ProcessSample(pid=1000, role="worker", name="python", cpu_pct=2.0)
    quiet = tuple(dataclasses.replace(one, processes=(ours,) * 8) for one in hardware(10.0))
    slow = workers(8, sample_ms=120.0, busy=0.99, on_core=0.01)
    made = trace(*STARVED, workers=slow, samples=quiet, facts={"cores_allowed": cores})
    assert first(made).code == code


def test_slow_samples_that_compute_are_slow_though_workers_wait_for_cores_at_other_times() -> None:
    """GIVEN samples of 400 ms that are on a core all along, and workers that often waited for one between samples."""
    tail = Sketch.of([2.0] * 980 + [400.0] * 20)
    slow = workers(8, sample_ms=2.0, busy=0.9, on_core=0.95, delay=1.5, times=tail, slowest=((410.0, 77.0),))
    assert first(trace(*STARVED, workers=slow)).code == "data.slow-samples"


def test_a_few_slow_samples_are_named() -> None:
    tail = Sketch.of([2.0] * 980 + [400.0] * 20)
    slow = workers(8, sample_ms=2.0, busy=0.9, times=tail, slowest=((410.0, 77.0), (402.0, 12.0)))
    found = first(trace(*STARVED, workers=slow))
    assert found.code == "data.slow-samples"
    assert "index 77" in found.advice


def test_slow_samples_are_not_reported_where_collate_takes_much_longer() -> None:
    tail = Sketch.of([0.02] * 980 + [2.0] * 20)
    made = trace(*STARVED, workers=workers(8, sample_ms=0.02, busy=0.01, times=tail, collate_s=8.0))
    assert first(made).code == "data.collate-bound"


def test_handing_batches_over_is_the_cost() -> None:
    made = trace(*STARVED, workers=workers(8, sample_ms=1.0, busy=0.3, collate_s=6.0))
    assert (first(made).code, first(made).change) == ("data.collate-bound", "loader")
    elastic = {"changes": [{"name": "loader", "value": "elastic", "applied": True}]}
    again = first(trace(*STARVED, workers=workers(8, sample_ms=1.0, busy=0.3, collate_s=6.0), facts=elastic))
    assert (again.code, again.change) == ("data.collate-bound", None)
    assert "flatout.DataLoader" not in again.advice
    idle = workers(8, sample_ms=1.0, busy=0.3)
    assert "data.collate-bound" in codes(trace(*STARVED, workers=idle))
    assert "data.collate-bound" not in codes(trace(*STARVED, workers=idle, facts=elastic)), "ours hands over in slots"


def test_no_worker_is_advised_where_the_loop_writes_to_its_dataset() -> None:
    writes = {"num_workers": 0, "written": "Pictures, size"}
    made = trace(*STARVED, loader=writes, workers=workers(1, sample_ms=1.0, busy=0.7))
    assert (first(made).code, first(made).change, first(made).value) == ("data.main-thread", None, None)
    assert "writes to it (Pictures, size), which no worker sees" in first(made).advice


def test_a_larger_loader_that_evaluates_is_not_taken_for_the_one_that_trains() -> None:
    evaluates = LOADER | {"length": 10**9, "num_workers": 3, "trains": False}
    made = trace(facts={"loaders": [evaluates, LOADER | {"num_workers": 5, "trains": True}]})
    assert metrics_of(made)[0].loader.num_workers == 5
    old = trace(facts={"loaders": [LOADER | {"num_workers": 5}, LOADER | {"length": 10**9, "num_workers": 3}]})
    assert metrics_of(old)[0].loader.num_workers == 3, "of a recording that does not say"


@pytest.mark.parametrize(
    ("sampler", "others"),
    [("RandomSampler", "shuffling draws other numbers"), ("DistributedSampler", "workers go on with what they have")],
)
def test_the_advice_says_what_keeping_workers_changes_for_this_sampler(sampler: str, others: str) -> None:
    loader = {"persistent_workers": False, "sampler": sampler}
    made = trace(("loader start", 6.0, 6.0, None), *HEALTHY, loader=loader)
    assert others in next(one.advice for one in diagnose(made) if one.code == "data.worker-start")


def test_workers_started_again_and_again() -> None:
    for elastic in (False, True):
        loader = {"persistent_workers": False, "elastic": elastic}
        made = trace(("loader start", 6.0, 6.0, None), *HEALTHY, loader=loader)
        assert "data.worker-start" in codes(made)


def test_a_loader_built_for_every_epoch_should_be_built_once() -> None:
    new_loader = {"persistent_workers": False, "made_anew": True}
    made = trace(("loader start", 6.0, 6.0, None), *HEALTHY, loader=new_loader)
    (found,) = (one for one in diagnose(made) if one.code == "data.worker-start")
    assert (found.change, found.value) == (None, None)
    assert found.advice.startswith("make the loader once, before the first epoch, with persistent_workers=True")
    two = trace(("loader start", 6.0, 6.0, None), *HEALTHY, loader=new_loader, facts={"loaders_side_by_side": 2})
    assert [one.change for one in diagnose(two) if one.code == "data.worker-start"] == ["persistent_workers"]


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        ("evaluation", "pause.eval"),
        ("checkpoint", "pause.checkpoint"),
        ("logging", "pause.logging"),
        ("gc", "pause.gc"),
    ],
)
def test_pauses(phase: str, code: str) -> None:
    assert codes(trace((phase, 5.0, 4.0, None), *HEALTHY)) == [code]


def test_one_pause_does_not_tell_how_often_it_comes() -> None:
    plain, long = steps(*HEALTHY), steps(("evaluation", 400.0, None, None), *HEALTHY)
    made = (long[0], *plain[1:])
    rank = dataclasses.replace(trace().ranks[0], steps=made, windows=(window_of(list(made)),))
    found = first(Trace(ranks=(rank,), samples={"node": hardware()}))
    assert (found.code, found.confidence) == ("pause.eval", 0.3)


def test_pageable_copies() -> None:
    made = trace(*HEALTHY, loader={"pin_memory": False}, xray=xray(copies_ms={"HtoD Pageable": 16.0}))
    found = first(made)
    assert (found.code, found.change, found.value) == ("copy.pageable", "pin_memory", True)


def test_many_small_copies() -> None:
    small = [("copy", 0.1, None, 0.1)] * 20
    assert "copy.fragmented" in codes(trace(*small, *HEALTHY[2:]))


def test_many_small_copies_show_in_the_few_steps_that_were_looked_at_closely() -> None:
    close = steps(*[("copy", 0.1, None, 0.1)] * 20, *HEALTHY[2:])
    light = steps(("data", 0.1, None, None), ("unsplit", 22.0, None, None)) * 2
    made = trace()
    rank = dataclasses.replace(made.ranks[0], steps=(*close, *light), windows=(window_of(list(close + light)),))
    assert "copy.fragmented" in codes(dataclasses.replace(made, ranks=(rank,)))


def test_copies_that_nothing_overlaps() -> None:
    found = first(trace(*HEALTHY, xray=xray(copies_ms={"HtoD Pinned": 16.0})))
    assert (found.code, found.change) == ("copy.blocking", "device_prefetch")


def test_copies_that_overlap_with_compute_are_not_reported() -> None:
    # GIVEN 172 ms of kernels and copies in 156 ms
    beside = xray(copies_ms={"HtoD Pinned": 16.0}, busy_by_phase_ms={"forward": 56.0, "backward": 100.0, "copy": 16.0})
    assert codes(trace(*HEALTHY, xray=beside)) == ["compute.saturated"]


def test_a_small_batch_on_a_large_gpu() -> None:
    found = first(trace(facts={"memory_reserved_bytes": 2 << 30}, samples=hardware(sm=10.0)))
    assert (found.code, found.value) == ("memory.underused", 256)


def test_ranks_that_wait_for_the_network() -> None:
    ranks = tuple(
        dataclasses.replace(r, info=RunInfo(name="t", host="node", rank=n, world_size=2))
        for n, r in enumerate((trace(xray=xray(collective_ms=60.0)).ranks[0],) * 2)
    )
    assert "dist.comm" in codes(Trace(ranks=ranks, samples={"node": hardware()}))


@pytest.mark.parametrize(("waited_ms", "share"), [((9.0, 8.0), 0.4), ((9.0, 0.5), None)], ids=["network", "straggler"])
def test_the_shortest_wait_of_a_rank_is_the_network(waited_ms: tuple[float, ...], share: float | None) -> None:
    """GIVEN steps of 20 ms, and gradients that are there so long after backward is through with its own."""
    ranks = tuple(
        dataclasses.replace(
            trace(facts={"gradient_exchange": {"hidden_ms": 5.0, "waited_ms": ms}}).ranks[0],
            info=RunInfo(name="t", host="node", rank=n, world_size=2),
        )
        for n, ms in enumerate(waited_ms)
    )
    found = [f.share for f in diagnose(Trace(ranks=ranks, samples={"node": hardware()})) if f.code == "dist.comm"]
    assert found == ([pytest.approx(share)] if share else [])


def test_a_sync_that_empties_the_queue_is_found_with_its_line() -> None:
    # GIVEN 6 ms of host work after each wait, while the GPU's queue is empty
    made = trace(
        ("rest", 6.0, None, 0.0),
        ("forward", 1.0, None, 8.0),
        ("backward", 1.0, None, 12.0),
        ("sync", 18.0, 0.0, None),
        where="train.py:88",
    )
    # THEN without the wait that work would hide behind the GPU's 20 ms
    found = next(f for f in diagnose(made) if f.code == "sync.item")
    assert found.where == "train.py:88"
    assert found.share == pytest.approx(6 / 26, abs=0.01)


def test_the_gain_of_removing_a_sync_is_not_bounded_by_the_ceiling() -> None:
    # GIVEN 6 ms in each step of 26 in which nothing runs, and replayed batches that are as slow
    phases = (("rest", 6.0, None, 6.0), ("forward", 2.0, None, 20.0), ("sync", 18.0, 0.0, None))
    gaps = {"idle_by_phase_ms": {"rest": 48.0}, "busy_by_phase_ms": {"forward": 160.0}, "busy_ms": 160.0}
    made = trace(*phases, xray=xray(**gaps, wall_ms=208.0))
    replayed = tuple(dataclasses.replace(step, kind="replay") for step in made.ranks[0].steps)
    rank = dataclasses.replace(made.ranks[0], steps=(*made.ranks[0].steps, *replayed))
    found = next(f for f in diagnose(dataclasses.replace(made, ranks=(rank,))) if f.code == "sync.item")
    assert found.gain_high == pytest.approx(26 / 20, rel=0.01)


def test_a_sync_that_waits_for_useful_work_is_not_reported() -> None:
    ahead = (("forward", 1.0, None, 8.0), ("backward", 1.0, None, 12.0), ("sync", 18.0, 0.0, None))
    assert "sync.item" not in codes(trace(*ahead, where="train.py:88"))


def test_a_step_of_tiny_kernels_is_launch_bound() -> None:
    host = (("forward", 8.0, None, 8.0), ("backward", 9.0, None, 9.0), ("optimizer", 1.0, None, 1.0))
    tiny = xray(
        busy_ms=24.0,
        wall_ms=150.0,
        idle_by_phase_ms={"forward": 60.0, "backward": 62.0},
        kernels=8000,
        kernel_us=Sketch.of([3.0] * 100),
        matrix_ms=0.0,
        tensor_core_ms=0.0,
    )
    found = first(trace(*host, xray=tiny, workers=workers(8, sample_ms=0.2, busy=0.1)))
    assert found.code == "launch.bound"
    assert found.gain_high > 3


def test_fp32_matrix_work() -> None:
    found = first(trace(facts={"autocast": ["None"]}, xray=xray(tensor_core_ms=10.0)))
    assert (found.code, found.value) == ("compute.precision", "bf16")


def test_shorter_kernels_do_not_help_while_launches_are_late() -> None:
    """A forward pass with holes between its kernels gains nothing; a backward pass without any does."""
    work = {"forward": 40.0, "backward": 40.0}
    fp32 = {"facts": {"autocast": ["None"]}}
    gains = [
        next(
            (f.gain_high for f in diagnose(trace(**fp32, xray=made)) if f.code == "compute.precision"),
            None,
        )
        for made in (
            xray(tensor_core_ms=10.0, busy_by_phase_ms=work, idle_by_phase_ms={}),
            xray(tensor_core_ms=10.0, busy_by_phase_ms=work, idle_by_phase_ms={"forward": 40.0}),
            xray(tensor_core_ms=10.0, busy_by_phase_ms=work, idle_by_phase_ms={"forward": 40.0, "backward": 40.0}),
        )
    ]
    whole, half, none = gains
    assert whole > half > 1.05
    assert none == 1.0


def test_shorter_kernels_do_not_help_while_the_loader_is_the_limit() -> None:
    # GIVEN fp32 work, and eight workers that deliver a tenth more than the 64 samples that are eaten in 80 ms
    fp32 = {"facts": {"autocast": ["None"]}, "xray": xray(wall_ms=720.0, tensor_core_ms=10.0)}
    behind = workers(8, sample_ms=8 * 80 / (1.1 * 64), busy=0.9)
    alone = next(f for f in diagnose(trace(*STARVED, **fp32, workers=behind)) if f.code == "compute.precision")
    assert alone.gain_high == pytest.approx(1.1 * 1.05, rel=0.01)
    assert "the loader" in alone.derived
    assert first(trace(**fp32)).gain_high > 2


def test_convolutions_that_transpose_their_data() -> None:
    made = trace(facts={"channels_last": False}, xray=xray(top_ms={"nchwToNhwcKernel": 20.0, "nvjet": 100.0}))
    assert codes(made) == ["compute.layout"]


@pytest.mark.parametrize(
    ("facts", "title", "change"),
    [
        ({"optimizer": "AdamW", "optimizer_foreach": False}, "AdamW steps in a loop", "fused_optimizer"),
        ({"optimizer": "AdamW", "optimizer_foreach": None}, "AdamW is not fused, and takes", "fused_optimizer"),
        ({"optimizer": "Lion", "optimizer_foreach": None}, "Lion steps in a loop", None),  # torch cannot fuse it
    ],
)
def test_an_optimizer_of_many_small_kernels(facts: dict[str, object], title: str, change: str | None) -> None:
    many = xray(busy_by_phase_ms={"optimizer": 12.0}, idle_by_phase_ms={"optimizer": 6.0})
    found = diagnose(trace(facts={"optimizer_fused": None, **facts}, xray=many))
    [finding] = [one for one in found if one.code == "compute.optimizer"]
    assert finding.title.startswith(title)
    assert finding.change == change
    assert ("fused=True)" in finding.advice) == (change is not None)


def test_elementwise_chains() -> None:
    eager = xray(top_ms={"vectorized_elementwise_kernel<4>": 60.0})
    assert codes(trace(facts={"compiled": False}, xray=eager)) == ["compute.eager"]


def test_an_optimizer_s_elementwise_kernels_are_not_the_model_s() -> None:
    looping = xray(
        top_ms={"vectorized_elementwise_kernel<4>": 60.0}, busy_by_phase_ms={"forward": 96.0, "optimizer": 60.0}
    )
    facts = {"compiled": False, "optimizer": "AdamW", "optimizer_foreach": False, "optimizer_fused": None}
    assert codes(trace(facts=facts, xray=looping)) == ["compute.optimizer"]


def test_late_launches_are_reported_beside_a_longer_wait_for_data() -> None:
    # GIVEN a step half of which is a wait, and a GPU that waits for launches through most of the rest
    late = xray(
        wall_ms=640.0,
        busy_ms=40.0,
        busy_by_phase_ms={"forward": 20.0, "backward": 20.0},
        idle_by_phase_ms={"data": 540.0, "forward": 30.0, "backward": 30.0},
        kernel_us=Sketch.of([5.0] * 100),
    )
    found = diagnose(trace(*STARVED, xray=late))
    [launches] = [finding for finding in found if finding.code == "launch.bound"]
    assert launches.share == pytest.approx(60 / 640, rel=0.01)


def test_an_earlier_run_s_wait_for_data_does_not_make_late_launches_look_small() -> None:
    # GIVEN steps that wait for no data any more, with the X-ray of a run that waited three quarters of its time
    waited = xray(
        wall_ms=640.0,
        busy_ms=100.0,
        busy_by_phase_ms={"forward": 100.0},
        idle_by_phase_ms={"data": 480.0, "forward": 60.0},
        kernel_us=Sketch.of([3.0] * 100),
    )
    [launches] = [f for f in diagnose(trace(*HEALTHY, xray=waited)) if f.code == "launch.bound"]
    # THEN what the GPU waits for launches is held against a step without that wait
    assert launches.share == pytest.approx(60 / 160, rel=0.01)


def test_a_gpu_held_down_by_heat() -> None:
    hot = hardware(throttle=("heat (software slowdown)",), sm_clock_mhz=1400.0)
    found = first(trace(samples=hot))
    assert found.code == "hardware.throttled"
    assert found.gain_high == pytest.approx(1980 / 1400, rel=0.02)


def test_a_power_cap_on_a_busy_gpu_is_no_fault() -> None:
    assert codes(trace(samples=hardware(throttle=("power cap",)))) == ["compute.saturated"]


@pytest.mark.parametrize(
    ("sm_pct", "most_pct"),
    [((None, None), None), ((35.0, 0.0), 35.0), ((None, 35.0), 35.0), ((None, 0.0), 0.0), ((0.0, 0.0), 0.0)],
)
def test_another_process_on_the_gpu_counts_only_if_it_computes(
    sm_pct: tuple[float | None, float | None], most_pct: float | None
) -> None:
    """GIVEN what the driver reported of its use at first and later, THEN only one that is known never to have computed
    is left alone."""
    early, late = (hardware(processes=(GpuProcess(pid=4242, used_bytes=8 << 30, sm_pct=pct),)) for pct in sm_pct)
    made = trace(*STARVED, samples=(*early[:2], *late[2:]))
    found = [f for f in diagnose(made) if f.code == "hardware.shared"]
    told = [process["sm_pct"] for finding in found for process in finding.evidence["processes"]]
    assert told == ([] if most_pct == 0 else [most_pct])


def test_gpu_memory_so_full_that_the_allocator_retries() -> None:
    full = {"memory_retries": 9, "memory_reserved_bytes": 138 << 30, "memory_total_bytes": 140 << 30}
    found = first(trace(facts=full))
    assert (found.code, found.change, found.value) == ("memory.pressure", "batch_size", 32)
    assert codes(trace(facts=full | {"memory_retries": 1})) == ["compute.saturated"]


@pytest.mark.parametrize(("ours_pct", "codes_expected"), [(100.0, ["hardware.shared"]), (1550.0, [])])
def test_other_programs_on_the_cores(ours_pct: float, codes_expected: list[str]) -> None:
    """GIVEN 16 cores that are all busy, and a trainer that waits for one; it matters whose work that is."""
    trainer = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=ours_pct, run_delay_pct=30.0)
    busy = tuple(dataclasses.replace(s, processes=(trainer,)) for s in hardware(98.0))
    found = diagnose(trace(samples=busy, loader={"num_workers": 0}, **NO_GPU))
    assert [f.code for f in found if f.code != "compute.saturated"] == codes_expected


@pytest.mark.parametrize(("neighbours_pct", "codes_expected"), [(98.0, ["hardware.shared"]), (50.0, [])])
def test_other_programs_count_on_the_cores_that_the_affinity_mask_allows(
    neighbours_pct: float, codes_expected: list[str]
) -> None:
    """GIVEN a training that may use two cores of sixteen, THEN what is done on the other fourteen is no matter."""
    trainer = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=100.0, run_delay_pct=30.0)
    cores_pct = (neighbours_pct, neighbours_pct, *[98.0] * 14)
    busy = tuple(
        dataclasses.replace(s, processes=(trainer,), host=dataclasses.replace(s.host, cores_pct=cores_pct))
        for s in hardware(98.0)
    )
    masked = {"gpu": None, "core_numbers": [0, 1]}
    found = diagnose(trace(samples=busy, loader={"num_workers": 0}, facts=masked, xray=None))
    assert [f.code for f in found if f.code != "compute.saturated"] == codes_expected


def test_a_busy_gpu_loses_nothing_to_other_programs_on_the_cores() -> None:
    trainer = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=100.0, run_delay_pct=30.0)
    busy = tuple(dataclasses.replace(s, processes=(trainer,)) for s in hardware(98.0))
    assert codes(trace(samples=busy, loader={"num_workers": 0})) == ["compute.saturated"]


def test_cores_that_are_not_ours_do_not_hide_that_ours_are_busy() -> None:
    # GIVEN 4 of 16 cores, kept busy by the workers
    load = tuple(ProcessSample(pid=n, role="worker", name="python", cpu_pct=97.0) for n in range(4))
    quarter = tuple(dataclasses.replace(s, processes=load) for s in hardware(25.0))
    busy = workers(4, sample_ms=25.0, busy=0.97)
    made = trace(*STARVED, loader={"num_workers": 4}, workers=busy, samples=quarter, facts={"cores_allowed": 4.0})
    assert first(made).code == "data.cpu-bound"


def test_unused_gpus() -> None:
    found = first(trace(facts={"gpus_visible": 4}))
    assert (found.code, found.value) == ("hardware.idle-gpus", 4)


@pytest.mark.parametrize(
    ("setting", "value", "fact"),
    [
        ("amp", True, {"autocast": ["None"]}),
        ("compile_model", True, {"compiled": False}),
        ("tf32", True, {"tf32_matmul": False}),
        ("cudnn_benchmark", True, {"cudnn_benchmark": False}),
        ("channels_last", True, {"channels_last": False}),
    ],
)
def test_settings_without_effect(setting: str, value: object, fact: dict[str, object]) -> None:
    read = [{"source": "yaml", "file": "config.yaml", "values": {"train": {setting: value}}}]
    found = [f for f in diagnose(trace(facts=fact | {"settings": read})) if f.code == "config.ignored"]
    assert [f.evidence["setting"] for f in found] == [setting]


@pytest.mark.parametrize("value", [False, "off", "none", "no", 0])
def test_a_switch_that_is_off_is_not_ignored(value: object) -> None:
    read = [{"source": "yaml", "file": "c.yaml", "values": {"compile": value}}]
    assert "config.ignored" not in codes(trace(facts={"compiled": False, "settings": read}))


def test_a_setting_of_a_file_that_the_command_line_switches_off_is_not_ignored() -> None:
    file = {"source": "yaml", "file": "train.yaml", "values": {"compile_model": True}}
    off = {"source": "argparse", "values": {"compile_model": False}}
    assert "config.ignored" in codes(trace(facts={"compiled": False, "settings": [file]}))
    assert "config.ignored" not in codes(trace(facts={"compiled": False, "settings": [file, off]}))


@pytest.mark.parametrize("waits_ms", [(0.0, 14.0), (14.0, 0.0)], ids=["for gradients", "for buffers"])
def test_the_culprit_waits_least_for_the_others(waits_ms: tuple[float, float]) -> None:
    forward_ms, backward_ms = 5.0 + waits_ms[0], 10.0 + waits_ms[1]
    quick = steps(("data", 1.0, 1.0, None), ("forward", forward_ms, None, 5.0), ("backward", backward_ms, None, 10.0))
    slow = steps(("data", 15.0, 15.0, None), ("forward", 5.0, None, 5.0), ("backward", 10.0, None, 10.0))
    ranks = tuple(
        RankTrace(
            info=RunInfo(name="t", host="node", rank=n, world_size=3),
            steps=made,
            windows=(window_of(list(made)),),
            facts=from_json(Facts, FACTS | {"loaders": [LOADER]}),
        )
        for n, made in enumerate((quick, slow, quick))
    )
    found = next(f for f in diagnose(Trace(ranks=ranks, samples={})) if f.code == "dist.straggler")
    assert (found.evidence["rank"], found.evidence["phase"]) == (1, "data")


def test_padding_is_worth_at_most_its_share_of_what_is_computed() -> None:
    found = first(trace(loader={"tokens": {"a_sample": 512.0, "padding": 0.5}}))
    assert (found.code, found.gain_low) == ("compute.padding", 1.0)
    assert 1.6 < found.gain_high <= 2.0


@pytest.mark.parametrize("padding", [0.1, None], ids=["little", "unknown"])
def test_little_padding_is_no_fault(padding: float | None) -> None:
    assert codes(trace(loader={"tokens": {"a_sample": 512.0, "padding": padding}})) == ["compute.saturated"]


def test_padding_is_worth_nothing_while_the_loader_cannot_follow() -> None:
    slow = workers(2, sample_ms=2.0, busy=0.95)
    made = trace(*STARVED, loader={"num_workers": 2, "tokens": {"a_sample": 512.0, "padding": 0.8}}, workers=slow)
    padding = next(finding for finding in diagnose(made) if finding.code == "compute.padding")
    assert padding.gain_high < 1.3


WRITTEN = {"attention": {"where": "train.py:12", "length": 512}, "compiled": False}


def test_attention_written_out_by_hand_is_worth_what_its_softmax_takes() -> None:
    kernels = {"nvjet_hsh_128x128": 110.0, "softmax_warp_forward": 16.0, "cunn_SoftMaxBackward": 8.0}
    found = first(trace(facts=WRITTEN, xray=xray(top_ms=kernels | {"cunn_LogSoftMaxForward": 6.0})))
    assert (found.code, found.where) == ("compute.attention", "train.py:12")
    assert found.gain_high == pytest.approx(1 / (1 - 24 / 160), rel=0.01)
    assert codes(trace(facts=WRITTEN)) == ["compute.saturated"]
    assert "compute.attention" not in codes(trace(xray=xray(top_ms=kernels)))


def test_without_an_x_ray_looks_at_its_lines_tell_what_attention_takes() -> None:
    """GIVEN as many looks at the product, the softmax and a projection THEN two thirds of what is computed count."""
    sources = {11: "att = q @ k.transpose(-2, -1)", 12: "att = F.softmax(att, -1)", 13: "y = self.proj(y)"}
    frames = tuple(Frame(where=f"train.py:{n}", function="attend", own=True, source=sources[n]) for n in sources)
    times = tuple(StackTime(phase="forward", frames=(n,), seconds=5.0, looks=50) for n in range(3))
    stacks = (Stacks(time_s=110.0, pid=1, frames=frames, stacks=times),)
    slow = (*HEALTHY[:2], ("forward", 20.0, None, None), *HEALTHY[3:])
    found = diagnose(trace(*slow, facts=WRITTEN | {"gpu": None}, xray=None, stacks=stacks))
    written = next(finding for finding in found if finding.code == "compute.attention")
    assert written.share == pytest.approx(2 / 3 * 35.7 / 38, abs=0.01)
    assert codes(trace(*slow, facts=WRITTEN | {"gpu": None}, xray=None)) == ["compute.saturated"]


def looks(forward_s: float, **passed_s: float) -> tuple[Stacks, ...]:
    """Looks at the training thread in its forward passes."""
    time = StackTime(phase="forward", frames=(), seconds=forward_s, looks=100)
    names = {name.replace("_", " "): seconds for name, seconds in passed_s.items()}
    return (Stacks(time_s=110.0, pid=1, frames=(), stacks=(time,), passed_s=names),)


@pytest.mark.parametrize("used", [40, 100])
def test_activations_are_computed_again_while_there_is_room_for_them(used: int) -> None:
    memory = {"memory_reserved_bytes": used << 30, "memory_total_bytes": 140 << 30}
    found = diagnose(trace(facts=memory, stacks=looks(10.0, checkpoint=8.0)))
    assert [f.code for f in found] == (["memory.checkpointing"] if used == 40 else ["compute.saturated"])
    if used == 40:  # forward is 48 of 160 ms, and four fifths of it are done again
        assert (found[0].share, found[0].gain_high) == (pytest.approx(0.24), pytest.approx(1 / 0.76))
    assert codes(trace(facts=memory, stacks=looks(10.0))) == ["compute.saturated"]


@pytest.mark.parametrize("used", [40, 100])
def test_without_a_gpu_it_is_the_machine_s_memory_that_has_room_for_activations(used: int) -> None:
    room = tuple(
        dataclasses.replace(
            one, host=dataclasses.replace(one.host, memory_used_bytes=used << 30, memory_total_bytes=140 << 30)
        )
        for one in hardware()
    )
    found = diagnose(trace(samples=room, stacks=looks(10.0, checkpoint=8.0), **NO_GPU))
    assert ("memory.checkpointing" in [f.code for f in found]) == (used == 40)


def test_data_parallel_is_named_and_its_gpus_are_not_called_unused() -> None:
    several = {"gpus_visible": 4, "parallel": {"data_parallel": 4}}
    found = diagnose(trace(facts=several, stacks=looks(10.0, data_parallel=10.0)))
    assert [f.code for f in found] == ["compute.saturated", "dist.data-parallel"]  # of each step it takes little
    assert found[1].gain_high == pytest.approx(1 / (1 - 0.1 * 0.75), rel=0.01)
    assert codes(trace(facts=several)) == ["compute.saturated", "dist.data-parallel"]


@pytest.mark.parametrize(
    ("looks_for", "finds", "told"),
    [(True, False, True), (True, True, False), (False, False, False), (True, None, False)],
)
def test_looking_for_unused_parameters_where_there_are_none(looks_for: bool, finds: bool | None, told: bool) -> None:
    found = diagnose(trace(facts={"parallel": {"find_unused_parameters": looks_for, "unused_parameters": finds}}))
    assert [f.code for f in found] == ["compute.saturated"] + ["dist.unused-parameters"] * told
    assert found[-1].gain_high == 1.0


@pytest.mark.parametrize(
    ("waited_ms", "told"), [((2.4, 2.6), ["dist.scaling"]), ((0.5, 0.4), []), ((6.0, 6.0), ["dist.comm"])]
)
def test_ranks_that_wait_for_each_other_in_turn(waited_ms: tuple[float, float], told: list[str]) -> None:
    made = trace().ranks[0]
    ranks = tuple(
        dataclasses.replace(
            made,
            info=RunInfo(name="t", host="node", rank=n, world_size=2),
            facts=dataclasses.replace(made.facts, gradient_exchange=GradientExchange(waited_ms=ms)),
        )
        for n, ms in enumerate(waited_ms)
    )
    found = [f for f in diagnose(Trace(ranks=ranks, samples={})) if f.code.startswith("dist")]
    assert [f.code for f in found] == told
    assert all(1 < f.gain_high <= 1 / (1 - max(waited_ms) / 20) + 0.01 for f in found)


def test_gains_together_promise_no_more_than_the_ceiling() -> None:
    made = trace(("loader start", 10.0, 10.0, None), *STARVED, loader={"num_workers": 0})
    bounded = [f for f in diagnose(made) if f.derived in ("measured ceiling", "model of the step")]
    product = 1.0
    for finding in bounded:
        product *= finding.gain_high
    assert len(bounded) >= 2
    assert product <= 90.0 / 19.5 + 0.1


def test_a_finding_has_a_known_code() -> None:
    assert len(set(CODES)) == len(CODES)
    with pytest.raises(AssertionError):
        Finding(code="data.bad", title="", share=0, gain_low=1, gain_high=1, derived="", confidence=1)


def test_the_gpu_is_judged_by_its_training_and_not_by_the_x_ray() -> None:
    """Starting the kernel profiler takes a second or more, in which nothing is trained; samples after the last step
    that was kept raw count, if it is a window that goes on."""
    made = steps(*HEALTHY)  # 1.2 s
    looking = Step(index=60, start_s=101.2, wall_ms=2_000.0, kind="xray")
    later = [dataclasses.replace(step, index=100 + n, start_s=103.2 + 0.02 * n) for n, step in enumerate(made)]
    busy = hardware()
    idle = tuple(dataclasses.replace(s, gpus=(dataclasses.replace(s.gpus[0], sm_active_pct=0.0),)) for s in busy)
    run = trace(samples=tuple(i if 101.2 < s.time_s - 0.5 < 103.2 else s for i, s in zip(idle, busy, strict=True)))
    rank = dataclasses.replace(run.ranks[0], steps=(*made, looking), windows=(window_of(list(made)), window_of(later)))
    machine = metrics_of(dataclasses.replace(run, ranks=(rank,)))[0].machine
    assert [s.time_s for s in machine.samples] == [101.5, 104.5]
    assert machine.gpu("sm_active_pct").mean == pytest.approx(85.0)


def test_an_x_ray_that_saw_no_kernels_says_nothing() -> None:
    """GIVEN one whose GPU seems to wait all the time THEN it counts no more than none at all."""
    blind = xray(busy_ms=0.0, busy_by_phase_ms={}, idle_by_phase_ms={"forward": 150.0}, kernels=0)
    assert diagnose(trace(xray=blind)) == diagnose(trace(xray=None))


def test_a_stream_with_fewer_shards_than_workers() -> None:
    loader = {"num_workers": 4, "iterable": True}
    busy = dataclasses.replace(workers(1, sample_ms=2.0, busy=0.9)[0], worker=0)
    idle = [dataclasses.replace(busy, worker=n, pid=2000 + n, samples=0, sample_wall_s=0.0) for n in (1, 2, 3)]
    found = first(trace(*STARVED, loader=loader, workers=(busy, *idle)))
    assert found.code == "data.few-shards"
    assert found.evidence["workers_without_samples"] == 3
    assert found.gain_high <= 1 / (1 - found.share) + 1e-9
    all_read = tuple(dataclasses.replace(busy, worker=n, pid=2000 + n) for n in range(4))
    assert "data.few-shards" not in codes(trace(*STARVED, loader=loader, workers=all_read))
    stopped = tuple(dataclasses.replace(one, pid=3000 + one.worker, samples=0) for one in idle)
    assert "data.few-shards" not in codes(trace(*STARVED, loader=loader, workers=(*all_read, *stopped)))


def growing(*step_ms: float) -> Trace:
    """Ten steps of each of these lengths, one after the other; what grows is in the script's own code."""
    made, at_s = [], 100.0
    for index in range(10 * len(step_ms)):
        ms = step_ms[index // 10]
        spans = (Span(name="forward", start_ms=0.0, host_ms=10.0), Span(name="rest", start_ms=10.0, host_ms=ms - 10.0))
        made.append(Step(index=index, start_s=at_s, wall_ms=ms, spans=spans, samples=64))
        at_s += ms / 1e3
    rank = RankTrace(info=RunInfo(name="t", host="node", rank=0), steps=tuple(made), windows=(window_of(made),))
    return Trace(ranks=(rank,), samples={})


def test_steps_that_grow_over_the_run() -> None:
    found = next(f for f in diagnose(growing(*(20.0 + 4 * n for n in range(12)))) if f.code == "drift.slower")
    assert found.evidence["grows_most"] == "rest"
    # of 42 ms in the mean: the line through all steps begins at 18 ms, and the first third of them takes 24
    assert found.share == pytest.approx(1 - 18 / 42, abs=0.03)
    assert found.gain_low == pytest.approx(1 / (1 - (1 - 24 / 42) / 2), abs=0.05)


def test_where_steps_grow_that_were_not_split_looks_tell_the_line() -> None:
    """A hook is added again and again: forward grows, in steps that were not looked at closely."""
    made = growing(*(20.0 + 4 * n for n in range(12)))
    spans = [dataclasses.replace(step.spans[1], name="unsplit", host_ms=step.wall_ms) for step in made.ranks[0].steps]
    unsplit = [dataclasses.replace(step, spans=(span,)) for step, span in zip(made.ranks[0].steps, spans, strict=True)]
    frames = (Frame(where="net.py:9", function="hook", own=True, source="stats.append(float(o.abs().mean().item()))"),)
    hook = StackTime(phase="forward", frames=(0,), seconds=1.0, looks=100)
    rank = dataclasses.replace(
        made.ranks[0],
        steps=tuple(unsplit),
        windows=(window_of(unsplit),),
        stacks=(Stacks(time_s=110.0, pid=1, frames=frames, stacks=(hook,)),),
    )
    found = next(f for f in diagnose(Trace(ranks=(rank,), samples={})) if f.code == "drift.slower")
    assert (found.where, found.evidence["grows_most"]) == ("net.py:9", "unsplit")


def test_workers_without_a_core_because_training_has_them_all() -> None:
    """GIVEN a worker with little to do that waits for a core, and a training process that keeps all of them busy."""
    late = workers(1, sample_ms=1.0, busy=0.06, on_core=0.9, delay=1.0, worker=True, collate_s=0.6)
    ours = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=1500.0)
    loading = ProcessSample(pid=1, role="worker", name="python", cpu_pct=5.0)
    busy = tuple(dataclasses.replace(sample, processes=(ours, loading)) for sample in hardware(97.0))
    waits = (("data", 4.0, None, None), ("forward", 10.0, None, None), ("backward", 10.0, None, None))
    made = trace(*waits, loader={"num_workers": 1}, workers=late, samples=busy, facts={"gpu": None}, xray=None)
    found = diagnose(made)[0]
    assert (found.code, found.change) == ("data.cpu-bound", None)
    assert found.title.startswith("workers wait for a core: this run keeps 94% of its 16 cores busy itself")
    assert found.gain_high < 1.2


def test_steps_that_grow_while_others_take_the_cores_are_no_drift() -> None:
    made = growing(*(20.0 + 4 * n for n in range(12)))
    rank = dataclasses.replace(made.ranks[0], facts=dataclasses.replace(made.ranks[0].facts, gpu=None))
    ours = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=800.0, run_delay_pct=45.0)
    crowded = tuple(dataclasses.replace(sample, processes=(ours,)) for sample in hardware(99.0))
    quiet = tuple(dataclasses.replace(sample, processes=(ours,)) for sample in hardware(52.0))
    assert "drift.slower" in codes(Trace(ranks=(rank,), samples={"node": quiet}))
    assert "drift.slower" not in codes(Trace(ranks=(rank,), samples={"node": crowded}))


@pytest.mark.parametrize(
    "pace", [(20.0,) * 12, (*(20.0,) * 4, *(60.0,) * 3, *(20.0,) * 5), tuple(64.0 - 4 * n for n in range(12))]
)
def test_a_load_that_comes_and_goes_is_no_drift(pace: tuple[float, ...]) -> None:
    assert "drift.slower" not in codes(growing(*pace))


def test_workers_that_wait_for_cores_which_others_keep_busy_are_not_the_cause() -> None:
    """GIVEN four workers that are without a core most of the time, and two programs of others on all cores
    THEN neither more workers nor a faster decoder is advised: the wait is charged to those who have the cores."""
    late = workers(4, sample_ms=20.0, busy=0.9, on_core=0.25, delay=0.7)
    ours = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=60.0, run_delay_pct=40.0)
    loading = tuple(ProcessSample(pid=n, role="worker", name="python", cpu_pct=25.0) for n in range(1, 5))
    busy = tuple(dataclasses.replace(sample, processes=(ours, *loading)) for sample in hardware(99.0))
    made = trace(*STARVED, loader={"num_workers": 4}, workers=late, samples=busy, facts={"gpu": None}, xray=None)
    found = diagnose(made)
    assert [finding.code for finding in found] == ["hardware.shared"]
    assert "training waits for a core 40% of the time itself; loader workers lack one too, and" in found[0].title
    assert found[0].share >= 0.7
