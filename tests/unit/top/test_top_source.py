"""Where samples come from: the pace of a live machine, and recordings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from flatout.model.errors import FlatoutError
from flatout.top.figures import Figures
from flatout.top.sample_source import SampleSource, Stop, live, replay
from flatout.trace import Sample

Make = Callable[..., Sample]


def watched(machine, **options) -> SampleSource:
    settings = {"interval_s": 1.0, "cores_allowed": 16.0, "clock": machine.clock}
    return live(machine, **(settings | options))


def test_a_sample_an_interval_until_the_duration_is_over(machine) -> None:
    here = machine()
    taken = list(watched(here, interval_s=2.0, duration_s=10.0).samples(here.stop()))
    assert [sample.time_s for sample in taken] == pytest.approx([102, 104, 106, 108, 110])
    assert all(sample.interval_s == pytest.approx(2.0) for sample in taken)


@pytest.mark.parametrize(("interval_s", "pulses"), [(1.0, 4), (2.0, 8), (0.05, 0)])
def test_pulses_come_four_times_a_second_in_between(machine, interval_s: float, pulses: int) -> None:
    here = machine()
    taken = list(islice(watched(here, interval_s=interval_s).samples(here.stop()), 40))
    assert len(taken[-1].gpus[0].pulses) in (pulses, 1 if interval_s < 0.1 else pulses)
    assert here.pulses_asked <= 4 * (here.clock() - 100.0) + 41


def test_asked_to_stop_it_stops(machine) -> None:
    here = machine()
    stop = here.stop()
    samples = watched(here).samples(stop)
    next(samples)
    stop.asked = True
    assert list(samples) == []


def test_after_falling_behind_the_samples_keep_their_interval(machine) -> None:
    # GIVEN a reading after which ten seconds are gone
    here = machine()
    samples = watched(here).samples(here.stop())
    next(samples)
    here.sleep(10.0)
    # THEN the next comes at once, and the one after that an interval later
    assert next(samples).time_s == pytest.approx(111)
    assert next(samples).time_s == pytest.approx(112)


@pytest.mark.parametrize("phase_s", [0.0, 0.3, 0.77])
@pytest.mark.parametrize("has_gpm", [True, False])
def test_a_load_switched_on_and_off_shows_its_true_fluctuation(machine, phase_s: float, has_gpm: bool) -> None:
    # GIVEN a load with a period of 4 s, read once a second
    def square(t: float) -> float:
        return 96.0 if (t + phase_s) % 4 < 2 else 0.0

    here = machine(square, has_gpm=has_gpm)
    (gpu,) = Figures(watched(here, duration_s=60.0).samples(here.stop())).gpus
    # THEN its standard deviation, 48 points, is found to within a tenth; its idle times to a pulse at either end
    assert gpu.activity.deviation == pytest.approx(48, rel=0.1)
    assert gpu.idle_pct == pytest.approx(50, abs=6.3)
    assert gpu.longest_idle_s == pytest.approx(2, abs=0.51)


def test_a_recording_comes_back_as_it_was(make_sample: Make, record: Callable[..., Path]) -> None:
    samples = [make_sample(float(t), sm=10.0 * t, util=50, pulses=(1.0, 2.5)) for t in range(5)]
    recording = replay(record(samples))
    assert list(recording.samples(Stop())) == samples
    assert recording.info.host == "node-1"


def test_a_recording_keeps_its_pace(machine, make_sample: Make, record: Callable[..., Path]) -> None:
    # GIVEN three seconds of samples played four times as fast
    here = machine()
    folder = record([make_sample(float(t)) for t in range(3)])
    recording = replay(folder, speed=4.0, clock=here.clock)
    assert [here.clock() for _ in recording.samples(here.stop())] == pytest.approx([100.25, 100.5, 100.75])


def test_a_paused_recording_waits(machine, make_sample: Make, record: Callable[..., Path]) -> None:
    # GIVEN a recording that is held for a minute
    here = machine()
    stop = here.stop()
    stop.held = True
    sleep = here.sleep

    def let_go_later(seconds: float) -> None:
        sleep(seconds)
        stop.held = here.clock() < 160.0

    stop._sleep = let_go_later
    recording = replay(record([make_sample(1.0)]), speed=1.0, clock=here.clock)
    assert [here.clock() for _ in recording.samples(stop)] == pytest.approx([160.0], abs=0.21)


def test_only_the_gpus_asked_for(make_sample: Make, record: Callable[..., Path]) -> None:
    folder = record([make_sample(1.0, gpus=3)])
    (sample,) = replay(folder, gpus=(2, 0)).samples(Stop())
    assert [gpu.index for gpu in sample.gpus] == [0, 2]
    with pytest.raises(FlatoutError, match="there is no GPU 7 in"):
        replay(folder, gpus=(7,))


def test_a_recording_of_nothing_or_of_two_machines_is_refused(make_sample: Make, record: Callable[..., Path]) -> None:
    with pytest.raises(FlatoutError, match="holds no hardware samples"):
        replay(record([], "empty"))
    two = record([make_sample()], "two")
    record([make_sample()], "two", host="node-2")
    with pytest.raises(FlatoutError, match=r"holds 2 machines \(node-1, node-2\)"):
        replay(two)
