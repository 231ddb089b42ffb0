"""What a page draws: bars that add up, steps well chosen, series that stay small."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from report_runs import rank_of, recorded, report_of, sample, step, steps_of, trace_of, whole_run, worker

from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.records import Facts
from flatout.report import charts, view_of
from flatout.report.run_view import time_spent
from flatout.report.views import BarChart, ChartBar, Table
from flatout.trace import Span, Step, Trace
from flatout.trace.downsample import window_of


def tables_of(run: Trace) -> dict[str, Table]:
    """The tables of where the time went, by their first heads."""
    return {part.heads[0]: part for part in time_spent(recorded(run)) if isinstance(part, Table)}


def test_the_parts_of_training_add_up_with_their_idle_time() -> None:
    table = tables_of(whole_run())["where training's time went"]

    assert sum(bar.share for bar in table.bars) == pytest.approx(1.0, abs=0.002)
    assert table.rows[0][0] == "waiting for data"
    assert table.bars[0].idle / table.bars[0].share == pytest.approx(0.9, abs=0.02)


def test_the_whole_run_is_training_and_what_is_not() -> None:
    table = tables_of(whole_run())["the whole run"]

    assert sum(bar.share for bar in table.bars) == pytest.approx(1.0)
    assert [row[0] for row in table.rows] == ["training", "set-up", "X-ray"]


def test_a_phase_after_the_last_step_is_not_training() -> None:
    late = (Span(name="data", start_ms=0, host_ms=300.0),)
    tail = Step(index=50, start_s=20.0, wall_ms=300.0, kind="tail", spans=late)
    table = tables_of(trace_of(rank_of((*steps_of([100.0] * 50), tail))))["the whole run"]

    assert [(row[0], row[2]) for row in table.rows] == [
        ("training", "5.0 s"),
        ("waiting for data after the last step", "0.3 s"),
    ]


def test_the_shares_by_cause_add_up_to_100_percent() -> None:
    (causes,) = [one for one in view_of(report_of(whole_run()), brief=True).sections if one.key == "causes"]
    (table,) = causes.parts
    assert isinstance(table, Table)
    assert sum(float(row[1].rstrip("%")) for row in table.rows) == pytest.approx(100.0, abs=0.2)


def test_the_typical_step_is_the_median_and_the_bad_one_the_99th_percentile() -> None:
    times = [100.0] * 97 + [300.0, 310.0, 900.0]
    typical, bad = charts.timelines(rank_of(steps_of(times)))

    assert typical.end == 100.0
    assert bad.end == pytest.approx(305.0, abs=10.0)


def test_a_step_with_gpu_events_is_drawn_rather_than_one_without() -> None:
    blind = [step(index, 100.0, gpu=False) for index in range(20)]
    (drawn,) = charts.timelines(rank_of([*blind, step(20, 98.0)]))

    assert drawn.note.startswith("step 20: ")


def test_a_run_of_one_step_has_one_timeline_and_an_empty_one_none() -> None:
    assert len(charts.timelines(rank_of(steps_of([100.0])))) == 1
    assert charts.timelines(rank_of(())) == []


def rows_of(drawn: BarChart) -> list[Sequence[ChartBar]]:
    return [bars for _, bars in drawn.rows]


def test_the_gpus_row_is_tied_to_the_hosts_where_the_host_woke_it() -> None:
    """GIVEN a host that waits 60 ms for data WHEN the GPU idles for 54 of them THEN both go on at the same moment."""
    drawn = charts.timeline("a step", step(0, 100.0))

    host, gpu = rows_of(drawn)
    data = next(bar for bar in host if bar.label == "waiting for data")
    idle = next(bar for bar in gpu if bar.idle)
    assert "never waited" not in drawn.note
    assert idle.left + idle.width == pytest.approx(data.left + data.width)
    assert gpu[0].label == charts.EARLIER
    assert gpu[0].width == pytest.approx(0.06)


def test_a_gpu_that_never_waited_is_drawn_from_the_start_and_not_anchored() -> None:
    spans = (Span(name="forward", start_ms=0.0, host_ms=10.0, gpu_busy_ms=90.0),)
    drawn = charts.timeline("a step", Step(index=0, start_s=0.0, wall_ms=10.0, spans=spans))

    _, gpu = rows_of(drawn)
    assert "never waited" in drawn.note
    assert gpu[0].left == 0.0
    assert gpu[0].width == pytest.approx(1.0)


def test_a_hundred_tiny_copies_are_one_bar() -> None:
    copies = [Span(name="copy", start_ms=n * 0.1, host_ms=0.08) for n in range(100)]
    gaps = [Span(name="rest", start_ms=n * 0.1 + 0.08, host_ms=0.02) for n in range(100)]
    spans = sorted((*copies, *gaps), key=lambda span: span.start_ms)
    drawn = charts.timeline("a step", Step(index=0, start_s=0.0, wall_ms=30.0, spans=tuple(spans)))

    (host,) = rows_of(drawn)
    assert [bar.label for bar in host] == ["copying to the GPU"]
    assert host[0].ms == pytest.approx(10.0)


def test_every_panel_has_what_was_measured_and_those_without_are_left_out() -> None:
    run = whole_run()
    assert titles_of(run) == ["Step time", "Waiting for data", "Loss", "GPU", "Power", "CPU", "Disk"]

    bare = trace_of(rank_of(steps_of([100.0] * 5)))
    assert titles_of(bare) == ["Step time", "Waiting for data"]


def titles_of(run: Trace) -> list[str]:
    (drawn,) = charts.over_time(recorded(run))
    return [plot.title for plot in drawn.plots]


def test_long_runs_are_drawn_from_windows_in_1000_points_at_most() -> None:
    steps = [step(index, 100.0, start_s=index * 0.1) for index in range(50)]
    window = window_of(steps)
    windows = tuple(dataclasses.replace(window, start_s=n * 5.0) for n in range(5_000))
    rank = rank_of(steps, windows=windows)
    samples = [sample(float(n)) for n in range(9_000)]

    (drawn,) = charts.over_time(recorded(trace_of(rank, samples=samples)))

    assert max(len(series.x) for plot in drawn.plots for series in plot.series) <= charts.MAX_POINTS
    times = drawn.plots[0].series
    assert [series.name for series in times] == ["median", "95th percentile"]
    assert times[0].y[0] == pytest.approx(100.0, rel=0.011)
    assert drawn.plots[1].series[0].y[0] == pytest.approx(60.0)


def test_a_thinned_series_keeps_its_mean() -> None:
    series = charts.line("load", "data", [(n, float(n % 10)) for n in range(20_000)])

    assert len(series.y) == charts.MAX_POINTS
    assert sum(series.y) / len(series.y) == pytest.approx(4.5)


def test_missing_values_are_left_out_of_a_series() -> None:
    series = charts.line("load", "data", [(1.0, None), (2.0, float("nan")), (3.0, 5.0)])
    assert (series.x, series.y) == ([3.0], [5.0])


def test_pauses_and_what_is_not_training_are_marked() -> None:
    run = whole_run()
    marked = charts.marks(run.ranks[0], zero_s=6.0)

    assert [mark.name for mark in marked] == ["set-up", "evaluation", "X-ray"]
    assert marked[1].length_s == pytest.approx(0.8)
    assert marked[1].start_s == pytest.approx(16.0 - 6.0)


def test_a_rank_that_may_see_one_gpu_of_two_is_not_shown_the_other() -> None:
    """GIVEN CUDA_VISIBLE_DEVICES=1, under which torch calls the second GPU its first, and a busy neighbour on that."""
    sample = whole_run().samples["box"][0]
    first, second = ("GPU-77b0-5c", 650.0), ("GPU-5e7a-11", 90.0)
    gpus = tuple(
        dataclasses.replace(sample.gpus[0], index=index, uuid=uuid, power_w=power_w)
        for index, (uuid, power_w) in enumerate((first, second))
    )
    rank = rank_of((), facts=Facts(gpu_index=0, gpu_uuid="5e7a-11"))
    run = trace_of(rank, samples=[dataclasses.replace(sample, gpus=gpus)])
    assert recorded(run).hardware["power_w"] == 90.0
    assert {gpu.index for gpu in RankMetrics(run, rank).machine.gpu_samples} == {1}


@pytest.mark.parametrize(
    ("lives", "at_once"),
    [
        ([(0, 0, 10), (1, 0, 10)], 2),
        ([(0, 0, 10), (1, 0, 10), (0, 10, 20), (1, 10, 20)], 2),  # started again every epoch
        ([(0, 0, 30), (0, 1, 30), (0, 2, 12)], 3),  # flatout's own: interchangeable
        ([(None, 0, 10)], 0),  # the training process
    ],
)
def test_workers_are_counted_that_were_there_at_the_same_time(
    lives: list[tuple[int | None, float, float]], at_once: int
) -> None:
    reports = tuple(
        dataclasses.replace(worker(number), pid=pid, born_s=born, time_s=end)
        for pid, (number, born, end) in enumerate(lives)
    )
    (together,) = recorded(trace_of(rank_of((), workers=reports))).workers
    assert together.at_once == at_once
    again = tuple(dataclasses.replace(report, born_s=report.time_s - 1, samples=0) for report in reports)  # its dataset
    (restarted,) = recorded(trace_of(rank_of((), workers=(*reports, *again)))).workers
    assert restarted.at_once == at_once
