"""What a worker's meter adds up, by a clock of our own."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from flatout.feed.dataset_check import CacheGrowth
from flatout.inside import loaders
from flatout.inside.loaders import Meter, Meters
from flatout.inside.patches import Patches

SAMPLE_S = 20e-6


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(
            loaders,
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
    meter.measure(fetcher)
    for first in range(0, 800, 4):
        assert fetcher.fetch([first, first + 1, first + 2, first + 3]).tolist()[0] == first

    report = meter.report()
    assert (report.batches, report.samples) == (200, 800)
    assert 0 < report.sample_ms.count < 400
    assert report.sample_ms.high == pytest.approx(SAMPLE_S * 1e3, rel=0.02), "its first sample is a worker's start"
    assert report.sample_wall_s == pytest.approx(899 * SAMPLE_S), "but its time counts, once"


class Threads(Dataset[int]):
    """Tells how many threads the process has that loads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return threading.active_count()


def test_a_worker_that_stays_is_measured_as_one_over_all_epochs(tmp_path: Path) -> None:
    """GIVEN persistent workers, for which torch makes a new fetcher in each epoch
    THEN none of them starts threads of ours in each, and the samples of all epochs are counted."""
    meters = Meters(Patches(), in_worker=lambda: None)
    meters.start(tmp_path)
    loader = DataLoader(Threads(), batch_size=4, num_workers=1, persistent_workers=True)
    try:
        threads = [next(iter(loader)).max().item() for _ in range(5)]
    finally:
        del loader
        meters.finish()
    records = [json.loads(line) for line in (tmp_path / "workers-00000.jsonl").read_text().splitlines()]
    assert len(set(threads[1:])) == 1, "after the first batch, with which those of torch begin"
    assert [record["samples"] for record in records if record["record"] == "worker"][-1] == 20


@pytest.mark.parametrize(("holds", "filled"), [("cache", "Caching, cache"), ("rows", "Caching, rows"), ("", None)])
def test_samples_that_fill_their_dataset_are_seen(holds: str, filled: str | None) -> None:
    class Caching:
        def __init__(self) -> None:
            self.cache: dict[int, int] = {}
            self.rows: list[Any] = [None] * 400
            self.opened: list[str] = []
            self.tables = [np.arange(3)] * 5  # which do not compare as numbers do
            self.asked = 0

        def __getitem__(self, index: int) -> int:
            self.asked += 1
            if index % 3 == 0:
                self.opened.append(f"shard {index // 3}")
            if holds:
                getattr(self, holds)[index] = index
            return index

    dataset = Caching()
    filling = CacheGrowth(Subset(dataset, range(400)))  # type: ignore[arg-type]
    said = []
    for batch in range(20):
        for index in range(4):
            dataset[4 * batch + index]
        said.append(filling.after_batch(4))
    assert next((one for one in said if one), None) == filled
    assert said[:3] == [None] * 3


def test_a_container_that_cannot_be_counted_is_no_trouble() -> None:
    class Odd(dict[int, int]):
        def __len__(self) -> int:
            raise RuntimeError("not now")

    dataset = type("Data", (), {})()
    dataset.odd = Odd()
    filling = CacheGrowth(dataset)
    assert [filling.after_batch(4) for _ in range(3)] == [None] * 3
