"""How fast a recorded run trained."""

from __future__ import annotations

import pytest

from flatout.fix.speed import measure
from flatout.model.records import AppliedChange, Facts
from flatout.trace import RankTrace, RunInfo, Span, Step, Trace, Window
from flatout.trace.downsample import StepDownsampler


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


def epoch_of(steps: int, evaluation_ms: float, *, elastic: bool = False) -> Trace:
    """Steps of 10 ms as a recorder writes them down, and an evaluation at the end."""
    thinner, raw, windows = StepDownsampler(), [], []
    for index in range(steps):
        pause_ms = evaluation_ms if index == steps - 1 else 0.0
        spans = (Span(name="evaluation", start_ms=10.0, host_ms=pause_ms),) if pause_ms else ()
        step = Step(index=index, start_s=0.0, wall_ms=10.0 + pause_ms, spans=spans, samples=64)
        for record in thinner.push(step):
            (raw if isinstance(record, Step) else windows).append(record)  # type: ignore[arg-type]
    windows += [record for record in thinner.flush() if isinstance(record, Window)]
    changes = (AppliedChange(name="loader", applied=True, how=""),) if elastic else ()
    rank = RankTrace(info=RunInfo(name="train"), steps=tuple(raw), windows=tuple(windows), facts=Facts(changes=changes))
    return Trace(ranks=(rank,), samples={})


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("steps", [500, 9000])
def test_an_evaluation_counts_once_however_long_its_epoch_is(steps: int, elastic: bool) -> None:
    """A long run keeps only its odd steps one by one; and half of it may be the loader's search for workers."""
    speed = measure(epoch_of(steps, steps * 2.0, elastic=elastic))
    assert speed is not None
    assert speed.value == pytest.approx(6400)
    assert speed.with_pauses == pytest.approx(6400 / 1.2)
