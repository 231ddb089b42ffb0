"""What a worker's meter adds up, by a clock of our own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.utils.data import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from flatout.sense import worker
from flatout.sense.worker import Meter, measure_fetcher

SAMPLE_S = 20e-6


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(
            worker,
            "time",
            SimpleNamespace(monotonic=self.read, perf_counter=self.read, thread_time=self.read),
        )

    def read(self) -> float:
        return self.now_s


class Slow:
    """Samples that take 20 µs each, the first of all a hundred times that: it imports."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.loaded = 0

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> int:
        self.clock.now_s += SAMPLE_S if self.loaded else 100 * SAMPLE_S
        self.loaded += 1
        return index


def test_what_goes_by_unmeasured_counts_like_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Slow(Clock(monkeypatch))
    meter = Meter(dataset, None, None)
    fetcher = _MapDatasetFetcher(dataset, True, default_collate, False)
    measure_fetcher(fetcher, meter)
    for first in range(0, 800, 4):
        assert fetcher.fetch([first, first + 1, first + 2, first + 3]).tolist()[0] == first

    report = meter.report()
    assert (report.batches, report.samples) == (200, 800)
    assert 0 < report.sample_ms.count < 400
    assert report.sample_ms.high == pytest.approx(SAMPLE_S * 1e3, rel=0.02), "its first sample is a worker's start"
    measured = report.sample_ms.count + 1
    assert report.sample_wall_s > 800 * SAMPLE_S, "but its time counts"
    assert report.sample_wall_s <= (800 + 100 * 800 / measured) * SAMPLE_S
