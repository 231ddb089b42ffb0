"""How fast a recorded run trained."""

from __future__ import annotations

import pytest

from flatout.remedy.speed import Speed, gain, measure, noise_between_runs
from flatout.trace import RankTrace, RunInfo, Span, Step, Trace


def run_of(taken: list[int | None]) -> Trace:
    """Steps of 10 ms, each of which took so many samples from the loader."""
    steps = tuple(
        Step(
            index=n,
            start_s=n / 100,
            wall_ms=10.0,
            spans=(Span(name="forward", start_ms=0.0, host_ms=10.0),),
            samples=samples,
        )
        for n, samples in enumerate(taken)
    )
    return Trace(ranks=(RankTrace(info=RunInfo(name="train"), steps=steps),), samples={})


@pytest.mark.parametrize(
    ("epoch", "speed", "unit"),
    [
        pytest.param([16] * 20, 1600.0, "samples/s", id="a batch a step"),
        pytest.param([32, *[16] * 18, None], 1600.0, "samples/s", id="a batch in hand"),
        pytest.param([None] * 20, 100.0, "steps/s", id="no loader"),
        pytest.param([256, *[None] * 19], 100.0, "steps/s", id="many steps of a batch"),
    ],
)
def test_a_loader_that_is_a_batch_ahead_does_not_change_what_speed_is_measured_in(
    epoch: list[int | None], speed: float, unit: str
) -> None:
    """Else a run that saw the end of an epoch would be compared in steps with one in samples that did not."""
    measured = measure(run_of(epoch * 5))
    assert measured is not None
    assert (measured.value, measured.unit) == (pytest.approx(speed, rel=0.03), unit)


def test_a_third_more_is_a_gain_though_two_runs_as_it_was_are_a_seventh_apart() -> None:
    """`segment` on an H200: sixteen workers on sixteen cores. A fourth run like the others' mean is still no gain."""

    def ran(value: float) -> Speed:
        return Speed(value=value, with_pauses=value, sd=0.035, steps=120)

    before = [ran(479.0), ran(416.0)]
    noise = noise_between_runs([before])
    assert gain(before, [ran(592.0)], noise).low > 1
    assert gain(before, [ran(500.0)], noise).low < 1
    assert gain([ran(447.0)], [ran(592.0)], noise_between_runs([])).low > 1.15  # nothing seen yet: a usual machine
