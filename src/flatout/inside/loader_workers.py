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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flatout.inside.patches import Patches, Stage, Subscriber
from flatout.inside.stacks import StackSampler
from flatout.launch.protocol import RANK
from flatout.model.facts import length_of
from flatout.model.records import Stacks, encode
from flatout.redact import redact_text
from flatout.trace import Sketch, WorkerReport

_SLOWEST_KEPT = 8
_RANDOM_CHECKS, _PASSES_CHECKED = 16, 8
# Timing a sample costs 3 µs: one below this is timed with its batch, except in every eighth batch.
_QUICK_SAMPLE_S = 100e-6
_CLOSELY_AT_FIRST = 16  # batches
_CLOSELY_EVERY = 8
# Below this, in the training process, only every sixteenth batch is measured.
_QUICK_BATCH_S = 1e-3
_SKIPPED = 15
_FIRST_REPORT_S = 0.5
_LAST_REPORT_S = 120.0


class Meter:
    """Totals of one worker."""

    def __init__(self, dataset: Any, worker: int | None, path: Path | None) -> None:
        self._path = path
        self._worker = worker
        self._dataset, self._length = _named(dataset)
        self._born_s = time.monotonic()
        self._idle_since = self._born_s
        self._report_every_s = _FIRST_REPORT_S
        self._reported_s = self._born_s
        self._batches = self._samples = 0  # measured
        self._skipped = 0  # batches that were not measured: each counts as the one measured before it
        self._latest = (0, 0.0, 0.0, 0.0)  # samples, wall time, CPU time, collate
        self._estimated = [0, 0.0, 0.0, 0.0]  # of the skipped ones
        self._to_skip = 0
        self._wall_s = self._cpu_s = self._collate_s = self._waiting_s = 0.0
        self._sample_ms = Sketch()
        self._loaded_s: list[float] = []  # of the batch that is being loaded
        self._new_samples = 0
        self._began_s = self._began_cpu_s = 0.0
        self._closely = True
        self._slow_s = 0.0  # what a sample must take to be among the slowest
        self._slowest: list[tuple[float, int]] = []
        self._random: set[str] = set()
        self._random_checks = self._passes = 0
        self.transforms_s: dict[str, float] = {}
        self.phase: str | None = None  # samples or collate, while it is at work
        self._stacks: StackSampler | None = None
        if worker is not None:
            thread = threading.get_ident()
            self._stacks = StackSampler(lambda: thread, lambda: self.phase, clock=time.monotonic)
            self._stacks.start()

    def is_of(self, dataset: Any) -> bool:
        """Whether its reports are about such a dataset."""
        return _named(dataset) == (self._dataset, self._length)

    def pass_begins(self) -> None:
        """Another pass over such a dataset. Its samples may draw random numbers even if those before did
        not."""
        self._passes += 1
        if self._passes <= _PASSES_CHECKED:
            self._random_checks = 0

    def load(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Time how long one sample (given a list of indices: several) takes to come out of the dataset."""
        checking = self._random_checks < _RANDOM_CHECKS
        before = _random_states() if checking else None
        start = time.perf_counter()
        sample = get(index)
        seconds = time.perf_counter() - start
        self._loaded_s.append(seconds)
        self._new_samples += len(index) if isinstance(index, list) else 1
        if seconds > self._slow_s and isinstance(index, int) and not self._is_first:
            heapq.heappush(self._slowest, (seconds, index))
            if len(self._slowest) > _SLOWEST_KEPT:
                heapq.heappop(self._slowest)
                self._slow_s = self._slowest[0][0]
        if before is not None:
            self._random_checks += 1
            after = _random_states()
            self._random |= {name for name, state in before.items() if state != after[name]}
        return sample

    @property
    def _is_first(self) -> bool:
        """Whether this is the first sample of all. Its imports and opened files belong to the worker's
        start."""
        return self._batches == 0 and len(self._loaded_s) == 1

    def skips(self) -> bool:
        """Whether the batch that is asked for now is not measured, as others like it were."""
        if not self._to_skip:
            return False
        self._to_skip -= 1
        self._skipped += 1
        for place, amount in enumerate(self._latest):
            self._estimated[place] += amount
        return True

    def batch_begins(self, samples: int | None) -> bool:
        """A batch was asked for: the worker has been waiting until now. Whether to time each of its
        samples."""
        self._waiting_s += time.monotonic() - self._idle_since
        quick = self._samples > 0 and self._wall_s / self._samples < _QUICK_SAMPLE_S
        turn = self._batches < _CLOSELY_AT_FIRST or self._batches % _CLOSELY_EVERY == 0
        self._closely = samples is None or turn or not quick
        if not self._closely and samples is not None:
            self._new_samples = samples
        self.phase = "samples"
        self._began_cpu_s, self._began_s = time.thread_time(), time.perf_counter()
        return self._closely

    def loaded(self) -> None:
        """The samples of a batch are there."""
        self.phase = "collate"
        now_s = time.perf_counter()
        cpu_s = time.thread_time() - self._began_cpu_s
        self._cpu_s += cpu_s
        times, self._loaded_s = self._loaded_s, []
        spent_s = sum(times) if self._closely else now_s - self._began_s
        self._wall_s += spent_s
        self._samples += self._new_samples
        self._latest = (self._new_samples, spent_s, cpu_s, 0.0)
        if times and len(times) < self._new_samples:  # a dataset that gives several at once
            self._sample_ms.add(spent_s / self._new_samples * 1e3, self._new_samples)
        else:
            first = 1 if self._batches == 0 else 0  # the first sample of all belongs to the worker's start
            for seconds in times[first:]:
                self._sample_ms.add(seconds * 1e3)
        self._new_samples = 0

    def collated(self, seconds: float) -> None:
        """The batch is put together; now and then, report."""
        self.phase = None
        self._collate_s += seconds
        self._latest = (*self._latest[:3], seconds)
        self._batches += 1
        self._idle_since = now_s = time.monotonic()
        quick = time.perf_counter() - self._began_s < _QUICK_BATCH_S
        if quick and self._worker is None and self._batches > _CLOSELY_AT_FIRST:
            self._to_skip = _SKIPPED
        if now_s - self._reported_s >= self._report_every_s:
            self._reported_s = now_s
            self._report_every_s = min(_LAST_REPORT_S, self._report_every_s * 1.5)
            self.write()

    def report(self) -> WorkerReport:
        """The totals as they stand, with those of the skipped batches."""
        now_s = time.monotonic()
        samples, wall_s, cpu_s, collate_s = self._estimated
        return WorkerReport(
            time_s=now_s,
            pid=os.getpid(),
            born_s=self._born_s,
            dataset=self._dataset,
            length=self._length,
            worker=self._worker,
            batches=self._batches + self._skipped,
            samples=self._samples + int(samples),
            sample_wall_s=self._wall_s + wall_s,
            sample_cpu_s=self._cpu_s + cpu_s,
            run_delay_s=_run_delay_s(),
            collate_s=self._collate_s + collate_s,
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
            records.append(self._stacks.record(time_s=time.monotonic(), dataset=self._dataset, worker=self._worker))
        line = "".join(json.dumps(encode(record), separators=(",", ":")) + "\n" for record in records)
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
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
    plain, fetch = fetcher.dataset, fetcher.fetch
    timed = _TimedDataset(plain, meter)
    streams = hasattr(fetcher, "dataset_iter")
    if streams:
        fetcher.dataset_iter = _TimedIterator(fetcher.dataset_iter, meter)

    def timed_fetch(indices: Any) -> Any:
        if not streams and meter.skips():
            fetcher.dataset, fetcher.collate_fn = plain, collate
            return fetch(indices)
        fetcher.collate_fn = timed_collate
        if streams:
            meter.batch_begins(None)
        else:
            samples = len(indices) if isinstance(indices, list) else None
            fetcher.dataset = timed if meter.batch_begins(samples) else plain
        return fetch(indices)

    fetcher.fetch = timed_fetch


class _TimedDataset:
    """Stands in front of the dataset inside the fetcher only; everything else sees the user's own."""

    def __init__(self, dataset: Any, meter: Meter) -> None:
        self._dataset = dataset
        self._meter = meter

    def __getitem__(self, index: Any) -> Any:
        return self._meter.load(self._dataset.__getitem__, index)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._dataset, name)
        if name == "__getitems__" and value:
            return lambda indices: self._meter.load(value, indices)
        return value


class _TimedIterator:
    def __init__(self, iterator: Iterator[Any], meter: Meter) -> None:
        self._iterator = iterator
        self._meter = meter

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        return self._meter.load(next, self._iterator)


class _TimedTransform:
    def __init__(self, transform: Any, name: str, meter: Meter) -> None:
        self._transform = transform
        self._name = name
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            spent = self._meter.transforms_s
            spent[self._name] = spent.get(self._name, 0.0) + time.perf_counter() - start

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
                # A persistent worker has a meter for each epoch: its transforms were timed in the last one
                # too.
                plain = [s._transform if isinstance(s, _TimedTransform) else s for s in steps]
                compose.transforms = [_TimedTransform(s, type(s).__name__, meter) for s in plain]


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
