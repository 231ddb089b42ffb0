"""A trace of any length stays small, in the file and in memory, and loses no step."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable

import pytest

from flatout.model.records import Record, encode
from flatout.trace import DiskSample, HostSample, ProcessSample, Sample, Span, Step, Window, downsample
from flatout.trace.downsample import Event, LightSteps, SampleDownsampler, StepDownsampler, mean_of, window_of
from flatout.trace.writer import MAX_BYTES

SCALE = 50  # the bounds shrunk by this, so that 100,000 steps are as long to them as 5 million


def a_step(index: int, wall_ms: float = 10.0, spans: tuple[Span, ...] = ()) -> Step:
    return Step(index=index, start_s=index / 100, wall_ms=wall_ms, spans=spans, samples=32, loss=1.0)


def feed(thinner: StepDownsampler, steps: list[Step]) -> tuple[list[Step], list[Window], int]:
    """Push steps as the writer does; the raw steps, the windows and how many bytes they took."""
    written: list[Step | Window] = []
    total = 0
    for step in steps:
        for record in thinner.push(step):
            size = size_of(record)
            thinner.wrote(record, size)
            written.append(record)
            total += size
    written += thinner.flush()
    raw = [record for record in written if isinstance(record, Step)]
    return raw, [record for record in written if isinstance(record, Window)], total


def size_of(record: Record) -> int:
    return len(json.dumps(encode(record), separators=(",", ":"))) + 1


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAW_STEP_BYTES", "BYTES_A_LENGTH", "RAW_SAMPLE_BYTES", "BYTES_A_STRIDE"):
        monkeypatch.setattr(downsample, name, getattr(downsample, name) // SCALE)


@pytest.mark.usefixtures("small_bounds")
def test_millions_of_steps_fit_and_every_one_is_counted() -> None:
    spans = (Span(name="data", start_ms=0.0, host_ms=4.0), Span(name="forward", start_ms=4.0, host_ms=6.0))
    steps = [a_step(i, wall_ms=10 + i % 7, spans=spans) for i in range(100_000)]

    raw, windows, total = feed(StepDownsampler(), steps)

    assert total < MAX_BYTES / SCALE
    assert sum(window.wall_ms.count for window in windows) == len(steps)
    assert sum(window.samples or 0 for window in windows) == 32 * len(steps)
    lengths = [window.wall_ms.count for window in windows]
    assert lengths[0] == downsample.WINDOW_STEPS
    assert lengths[-2] >= 4 * lengths[0]
    assert [step.index for step in raw[: downsample.RAW_STEPS]] == list(range(downsample.RAW_STEPS))
    assert sum(window.spans_ms["data"].total for window in windows) == pytest.approx(4.0 * len(steps))


def plain_steps(walls_ms: list[float], first_index: int = 0) -> LightSteps:
    """Steps that begin with a millisecond of waiting for 32 samples."""
    now_s = first_index / 100
    events: list[Event] = []
    for wall_ms in walls_ms:
        events += [(1, now_s, now_s + 1e-3, 32), None, now_s + wall_ms / 1e3]
        now_s += wall_ms / 1e3
    return LightSteps(
        first_index=first_index, start_s=first_index / 100, events=events, waiting="data", computing="unsplit"
    )


def test_plain_steps_count_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downsample, "RAW_STEPS", 500)
    usual = [10.0 + i % 3 for i in range(100)]
    slow = {8: [*usual[:90], 50.0, *usual[91:]], 15: [50.0, *usual[1:]]}  # neighbours within, and in the bulk before
    for n in range(16, 20):  # and wherever they may come
        slow[n] = [50.0 if random.Random(100 * n + i).random() < 0.04 else wall for i, wall in enumerate(usual)]
    bulks = [plain_steps(slow.get(n, usual), 100 * n) for n in range(20)]
    raw, windows, _ = feed(StepDownsampler(), [step for bulk in bulks for step in bulk.steps()])

    thinner = StepDownsampler()
    written = [record for bulk in bulks for record in thinner.push(bulk)] + thinner.flush()

    assert [record.index for record in written if isinstance(record, Step)] == [step.index for step in raw]
    assert {888, 889, 890, 1_498, 1_499, 1_500} < {step.index for step in raw}
    made = [record for record in written if isinstance(record, Window)]
    assert [(w.first_index, w.last_index) for w in made[1:]] == [
        (b.last_index + 1, w.last_index) for b, w in itertools.pairwise(made)
    ]
    assert made[-1].last_index == 1_999
    for value in (
        lambda w: w.wall_ms.total,
        lambda w: w.spans_ms["data"].total,
        lambda w: w.spans_ms["unsplit"].total,
        lambda w: w.samples,
        lambda w: w.wall_ms.count,
    ):
        assert sum(map(value, made)) == pytest.approx(sum(map(value, windows)))


@pytest.mark.usefixtures("small_bounds")
def test_steps_full_of_spans_leave_room_for_windows() -> None:
    spans = tuple(Span(name="sync", start_ms=1.0, host_ms=0.1, where=f"train.py:{n}") for n in range(300))
    raw, windows, total = feed(StepDownsampler(), [a_step(i, spans=spans) for i in range(1_000)])
    assert total < MAX_BYTES / SCALE
    assert len(raw) < 100
    assert sum(window.wall_ms.count for window in windows) == 1_000
    assert max(len(window.spans_ms) for window in windows) <= downsample.NAMES_A_WINDOW + 1


def test_an_outlier_is_kept_with_its_neighbours() -> None:
    steps = [a_step(i) for i in range(downsample.RAW_STEPS + 500)]
    slow = downsample.RAW_STEPS + 200
    steps[slow] = a_step(slow, wall_ms=100.0)
    raw, _, _ = feed(StepDownsampler(), steps)
    assert [step.index for step in raw[downsample.RAW_STEPS :]] == [slow - 2, slow - 1, slow, slow + 1, slow + 2]


def test_outliers_without_end_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downsample, "RAW_OUTLIERS", 50)
    monkeypatch.setattr(downsample, "RAW_STEPS", 100)
    steps = [a_step(i, wall_ms=10.0 if i % 10 else 100.0) for i in range(5_000)]
    raw, _, _ = feed(StepDownsampler(), steps)
    assert 100 < len(raw) <= 100 + 50 + downsample.NEIGHBOURS


def test_a_restless_start_leaves_outliers_to_be_kept_later() -> None:
    slow = [100.0 if i % 4 == 0 else 10.0 for i in range(20_000)]
    later = [10.0] * 150_000
    later[149_990] = 100.0
    thinner = StepDownsampler()
    bulks = [plain_steps(walls, first) for walls, first in ((slow[n : n + 100], n) for n in range(0, 20_000, 100))]
    bulks += [plain_steps(later[n : n + 100], 20_000 + n) for n in range(0, 150_000, 100)]
    kept = [record.index for bulk in bulks for record in thinner.push(bulk) if isinstance(record, Step)]
    outliers = sum(downsample.RAW_STEPS <= index < 20_000 for index in kept)
    assert outliers <= downsample.OUTLIERS_AT_FIRST + 0.02 * 20_000 + 100
    assert kept[-5:] == list(range(169_988, 169_993))
    assert kept == sorted(set(kept))


def test_a_window_sums_spans_by_name_and_line() -> None:
    spans = (
        Span(name="copy", start_ms=0.0, host_ms=1.0, gpu_idle_ms=0.5),
        Span(name="copy", start_ms=1.0, host_ms=2.0, gpu_idle_ms=0.25),
        Span(name="sync", start_ms=3.0, host_ms=3.0, where="train.py:7"),
    )
    window = window_of([a_step(0, spans=spans), a_step(1, spans=spans)])
    assert {name: sketch.total for name, sketch in window.spans_ms.items()} == {"copy": 6.0, "sync@train.py:7": 6.0}
    assert window.spans_ms["copy"].count == 2
    assert window.gpu_idle_ms == {"copy": 1.5}
    assert (window.first_index, window.last_index) == (0, 1)


@pytest.mark.usefixtures("small_bounds")
def test_weeks_of_samples_fit_and_keep_their_mean(make_sample: Callable[..., Sample]) -> None:
    thinner = SampleDownsampler()
    total, kept = 0, []
    for second in range(6_000):
        sample = make_sample(float(second), sm=float(second % 100), pulses=(1.0, 2.0), workers=2)
        for written in thinner.push(sample):
            total += size_of(written)
            thinner.wrote(size_of(written))
            kept.append(written)
    kept += thinner.flush()

    assert total < MAX_BYTES / SCALE
    assert sum(sample.interval_s for sample in kept) == pytest.approx(6_000)
    over_time = sum((sample.gpus[0].sm_active_pct or 0) * sample.interval_s for sample in kept) / 6_000
    assert over_time == pytest.approx(49.5, abs=0.3)
    assert max(len(sample.gpus[0].pulses) for sample in kept) == 2
    assert kept[-1].time_s == 5_999.0


def test_a_mean_weighs_by_time_and_pairs_like_with_like() -> None:
    def at(time_s: float, interval_s: float, cores: tuple[float, ...], disk: float, pid: int) -> Sample:
        return Sample(
            time_s=time_s,
            interval_s=interval_s,
            host=HostSample(
                cores_pct=cores,
                run_queue=int(interval_s),
                disks=(DiskSample(name="sda", read_bytes_s=disk, write_bytes_s=0.0),),
            ),
            processes=(ProcessSample(pid=pid, role="worker", name="w", cpu_pct=interval_s),),
        )

    mean = mean_of([at(1, 1.0, (0.0, 100.0), 100.0, 5), at(4, 3.0, (100.0, 0.0), 500.0, 6)])

    assert (mean.time_s, mean.interval_s) == (4, 4.0)
    assert mean.host.cores_pct == (75.0, 25.0)
    assert mean.host.disks is not None
    assert mean.host.disks[0].read_bytes_s == 400.0
    assert mean.host.run_queue == 2
    assert [(p.pid, p.cpu_pct) for p in mean.processes] == [(6, 3.0)]


def test_the_mean_of_what_was_never_measured_is_none() -> None:
    sample = Sample(time_s=1.0, interval_s=1.0, host=HostSample())
    assert mean_of([sample, sample]).host == HostSample()
