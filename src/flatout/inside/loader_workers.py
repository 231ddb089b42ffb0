"""What a loader worker spends its time on: the user's `__getitem__`, the transforms in it, collate, and
waiting.

Wall time, CPU time and run delay together tell a slow disk from too many workers. The dataset is wrapped
where PyTorch builds its fetcher, in the worker (or in the training process, with num_workers=0). Now and
then each worker appends its totals to a file of its rank: one short atomic write, and nothing is shared
that a kill could corrupt.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import multiprocessing.util
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flatout.inside.patches import Patches, Stage, Subscriber
from flatout.inside.stacks import StackSampler
from flatout.launch.protocol import RANK
from flatout.model.records import Stacks, encode, length_of
from flatout.redact import redact_text
from flatout.trace import Sketch, WorkerReport

_SLOWEST_KEPT = 8
_RANDOM_CHECKS, _PASSES_CHECKED = 16, 8
# Timing a sample costs 3 µs: where samples or batches are quicker than this, most batches are not measured.
_QUICK_SAMPLE_S, _QUICK_BATCH_S = 100e-6, 1e-3
_MEASURED_AT_FIRST, _THEN_SKIPPED = 16, 15  # batches
_FIRST_REPORT_S, _LAST_REPORT_S = 0.5, 120.0


class Meter:
    """Totals of one worker."""

    def __init__(self, dataset: Any, worker: int | None, path: Path | None) -> None:
        self._path = path
        self._worker = worker
        self._dataset, self._length = _named(dataset)
        self._born_s = self._idle_since = self._reported_s = time.monotonic()
        self._report_every_s = _FIRST_REPORT_S
        self._waiting_s = 0.0
        # Batches, samples, wall time and CPU time of the samples, collate: in all, and of the batch measured last.
        self._totals = [0, 0, 0.0, 0.0, 0.0]
        self._latest = [0, 0, 0.0, 0.0, 0.0]
        self._to_skip = 0  # batches that are not measured: each counts as the one measured before it
        self._began_cpu_s = 0.0
        self._loaded: list[tuple[float, int]] = []  # of the batch that is being loaded: seconds, and samples
        self._sample_ms = Sketch()
        self._slowest: list[tuple[float, int]] = []
        self._random: set[str] = set()
        self._random_checks = self._passes = 0
        self.transforms_s: defaultdict[str, float] = defaultdict(float)
        self.phase: str | None = None  # samples or collate, while it is at work
        self._stacks: StackSampler | None = None
        if worker is not None:
            thread = threading.get_ident()
            self._stacks = StackSampler(lambda: thread, lambda: self.phase)
            self._stacks.start()

    def is_of(self, dataset: Any) -> bool:
        """Whether its reports are about such a dataset."""
        return _named(dataset) == (self._dataset, self._length)

    def pass_begins(self) -> None:
        """Another pass over such a dataset. Its samples may draw random numbers even if those before did not."""
        self._passes += 1
        if self._passes <= _PASSES_CHECKED:
            self._random_checks = 0

    def batch_begins(self) -> bool:
        """A batch was asked for: the worker has been waiting until now. Whether to measure it."""
        self._waiting_s += time.monotonic() - self._idle_since
        self.phase = "samples"
        if self._to_skip:
            self._to_skip -= 1
            self._count_latest()
            return False
        self._loaded = []
        self._began_cpu_s = time.thread_time()
        return True

    def load(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Time how long one sample (given a list of indices: several) takes to come out of the dataset."""
        before = None
        if self._random_checks < _RANDOM_CHECKS:
            before = _random_states()
        start = time.perf_counter()
        sample = get(index)
        seconds = time.perf_counter() - start
        self._loaded.append((seconds, len(index) if isinstance(index, list) else 1))
        if isinstance(index, int) and not self._is_first:
            heapq.heappush(self._slowest, (seconds, index))
            if len(self._slowest) > _SLOWEST_KEPT:
                heapq.heappop(self._slowest)
        if before is not None:
            self._random_checks += 1
            after = _random_states()
            self._random |= {name for name, state in before.items() if state != after[name]}
        return sample

    @property
    def _is_first(self) -> bool:
        """Whether this is the first sample of all. Its imports and opened files belong to the worker's start."""
        return not self._totals[0] and len(self._loaded) == 1

    def loaded(self) -> None:
        """The samples of a batch are there."""
        self.phase = "collate"
        cpu_s = time.thread_time() - self._began_cpu_s
        samples, wall_s = sum(count for _, count in self._loaded), sum(seconds for seconds, _ in self._loaded)
        first = int(not self._totals[0] and samples == len(self._loaded))
        for seconds, count in self._loaded[first:]:
            self._sample_ms.add(seconds / count * 1e3, count)
        self._latest = [1, samples, wall_s, cpu_s, 0.0]

    def collated(self, seconds: float) -> None:
        """The batch is put together."""
        self._latest[4] = seconds
        self._count_latest()
        _, samples, wall_s, _, _ = self._latest
        quick = wall_s + seconds < _QUICK_BATCH_S or wall_s < _QUICK_SAMPLE_S * samples
        if quick and self._totals[0] >= _MEASURED_AT_FIRST:
            self._to_skip = _THEN_SKIPPED

    def batch_ended(self) -> None:
        """The worker waits from now on; now and then, report."""
        self.phase = None
        self._idle_since = now_s = time.monotonic()
        if now_s - self._reported_s >= self._report_every_s:
            self._reported_s = now_s
            self._report_every_s = min(_LAST_REPORT_S, self._report_every_s * 1.5)
            self.write()

    def _count_latest(self) -> None:
        self._totals = [total + latest for total, latest in zip(self._totals, self._latest, strict=True)]

    def report(self) -> WorkerReport:
        """The totals as they stand."""
        batches, samples, wall_s, cpu_s, collate_s = self._totals
        return WorkerReport(
            time_s=time.monotonic(),
            pid=os.getpid(),
            born_s=self._born_s,
            dataset=self._dataset,
            length=self._length,
            worker=self._worker,
            batches=int(batches),
            samples=int(samples),
            sample_wall_s=wall_s,
            sample_cpu_s=cpu_s,
            run_delay_s=_run_delay_s(),
            collate_s=collate_s,
            waiting_s=self._waiting_s,
            sample_ms=self._sample_ms.coarse(48),
            slowest=tuple((seconds * 1e3, index) for seconds, index in sorted(self._slowest, reverse=True)),
            transforms_s=dict(self.transforms_s),
            random_used=tuple(sorted(self._random)),
        )

    def write(self) -> None:
        """Append the totals to the rank's file of worker reports."""
        if self._path is None:
            return
        records: list[WorkerReport | Stacks] = [self.report()]
        if self._stacks is not None:
            records.append(self._stacks.record(dataset=self._dataset, worker=self._worker))
        lines = "".join(json.dumps(encode(record), separators=(",", ":")) + "\n" for record in records)
        try:
            with open(self._path, "ab", buffering=0) as file:  # noqa: PTH123
                file.write(lines.encode())
        except OSError:
            self._path = None


class Meters:
    """Measures what PyTorch fetches samples with: in loader workers, and in the training process with
    num_workers=0."""

    def __init__(self, patches: Patches, in_worker: Callable[[], None]) -> None:
        self._patches = patches
        self._in_worker = in_worker  # called in a loader worker, when it begins
        self._subscriber: Subscriber | None = None
        self._meters: list[Meter] = []
        self._folder: Path | None = None

    def start(self, folder: Path) -> None:
        """Measure from now on, into this folder."""
        self._folder = folder
        if self._subscriber is None:
            self._subscriber = self._patches.subscriber(Stage.OBSERVE, _fail)
            self._subscriber.around("torch.utils.data.dataloader._DatasetKind.create_fetcher", self._create_fetcher)

    def clear(self) -> None:
        """Forget what was measured: it is another process's."""
        self._meters.clear()

    def finish(self) -> None:
        """Write what was measured, and measure no more."""
        for meter in self._meters:
            meter.write()
        self._meters.clear()
        if self._subscriber is not None:
            self._subscriber.leave()
            self._subscriber = None

    def _create_fetcher(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fetcher = call(*args, **kwargs)
        if self._subscriber is not None:
            self._subscriber.guarded(self._measure, fetcher)
        return fetcher

    def _measure(self, fetcher: Any) -> None:
        assert self._folder is not None
        path = self._folder / f"workers-{int(os.environ.get(RANK, '0')):05d}.jsonl"
        worker: Any = torch.utils.data.get_worker_info()
        if worker is not None:
            meter = Meter(worker.dataset, worker.id, path)  # the user's own dataset, under any loader
            self._meters = [meter]
            multiprocessing.util.Finalize(None, meter.write, exitpriority=1)
            self._in_worker()
        else:
            meter = self._meter_of(fetcher.dataset, path)
        meter.pass_begins()
        measure_fetcher(fetcher, meter)

    def _meter_of(self, dataset: Any, path: Path) -> Meter:
        """The one meter of all such datasets that the training process reads itself."""
        for meter in self._meters:
            if meter.is_of(dataset):
                return meter
        self._meters.append(Meter(dataset, None, path))
        return self._meters[-1]


def _fail(problem: Exception) -> None:
    reason = redact_text(f"{type(problem).__name__}: {problem}")
    print(f"flatout: loader work is not measured ({reason})", file=sys.stderr)


def measure_fetcher(fetcher: Any, meter: Meter) -> None:
    """Put `meter` around the dataset and the collate function of torch's fetcher."""
    collate = fetcher.collate_fn

    def timed_collate(samples: Any) -> Any:
        meter.loaded()
        start = time.perf_counter()
        try:
            return collate(samples)
        finally:
            meter.collated(time.perf_counter() - start)

    _time_transforms(meter)
    fetch, source = fetcher.fetch, "dataset"
    if hasattr(fetcher, "dataset_iter"):
        source = "dataset_iter"
    plain = getattr(fetcher, source)
    timed = _TimedDataset(plain, meter)

    def timed_fetch(indices: Any) -> Any:
        try:
            if meter.batch_begins():
                setattr(fetcher, source, timed)
                fetcher.collate_fn = timed_collate
            else:
                setattr(fetcher, source, plain)
                fetcher.collate_fn = collate
            return fetch(indices)
        finally:
            meter.batch_ended()

    fetcher.fetch = timed_fetch


class _TimedDataset:
    """Stands in front of the dataset, or its iterator, inside the fetcher only; everything else sees the user's own."""

    def __init__(self, dataset: Any, meter: Meter) -> None:
        self._dataset = dataset
        self._meter = meter

    def __getitem__(self, index: Any) -> Any:
        return self._meter.load(self._dataset.__getitem__, index)

    def __next__(self) -> Any:
        try:
            return self._meter.load(next, self._dataset)
        except StopIteration:
            self._meter.write()  # a worker that has no shard gives nothing, and is not asked again
            raise

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._dataset, name)
        if name == "__getitems__" and value:
            return lambda indices: self._meter.load(value, indices)
        return value


class _TimedTransform:
    def __init__(self, transform: Any, meter: Meter) -> None:
        self._transform = transform
        self._spent = meter.transforms_s

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self._spent[type(self._transform).__name__] += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


def _time_transforms(meter: Meter) -> None:
    """Time each step of a Compose the dataset holds. Only in a worker, whose dataset is a copy of its own."""
    worker = torch.utils.data.get_worker_info()
    if worker is None:
        return
    for holder in (worker.dataset, getattr(worker.dataset, "dataset", None)):
        for compose in list(getattr(holder, "__dict__", {}).values()):
            steps = getattr(compose, "transforms", None)
            if type(compose).__name__ == "Compose" and isinstance(steps, list):
                # A persistent worker has a meter for each epoch: its transforms were timed in the last one too.
                plain = [s._transform if isinstance(s, _TimedTransform) else s for s in steps]
                compose.transforms = [_TimedTransform(s, meter) for s in plain]


def _named(dataset: Any) -> tuple[str, int | None]:
    named = getattr(dataset, "__dict__", {}).get("__wrapped__", dataset)
    return type(named).__name__, length_of(named)


def _random_states() -> dict[str, Any]:
    torch_state = torch.default_generator.get_state()
    states = {
        "torch": hash(ctypes.string_at(torch_state.data_ptr(), torch_state.numel())),
        "random": hash(random.getstate()),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:  # without it, nobody draws from it
        numpy_state = numpy.random.get_state()
        states["numpy"] = hash((numpy_state[1].tobytes(), numpy_state[2]))
    return states


def _run_delay_s() -> float | None:
    """How long this thread has been ready to run but had no core."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
