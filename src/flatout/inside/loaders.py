"""What is seen of the script's loaders: what is in their batches, and what loading samples takes.

    training process   LoaderNotes   writes to the dataset, tokens
    each worker        Meter         time in `__getitem__`, its transforms, collate, and waiting

Wall time, CPU time and run delay together tell a slow disk from too many workers. Now and then a
worker appends its totals to a file of its rank, in one short atomic write.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import json
import multiprocessing.util
import os
import random
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.inside.patches import Patches, Stage, Subscriber
from flatout.inside.run_facts import batches_ahead, loader_facts
from flatout.inside.stacks import StackSampler
from flatout.launch.protocol import RANK
from flatout.model.records import LoaderFacts, Stacks, TokenFacts, encode, length_of
from flatout.redact import redact_text
from flatout.trace import Sketch, WorkerReport

if TYPE_CHECKING:
    from flatout.feed.dataset_check import DatasetCheck

# -- tokens in batches on the CPU

_AT_FIRST, _LATER_EVERY = 16, 64  # batches that are looked at
_MOST_TOKENS = 1 << 12  # of a batch
_LONGEST = 1 << 14  # tokens of a row: a longer one takes too long to look at
_IGNORED = -100  # the label that a loss leaves out
_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"


class TokenCounts:
    """How many tokens a loader's samples have, and how many are padding. A look takes 50 µs at most."""

    def __init__(self) -> None:
        self._asked = 0
        self._off = False
        self._samples, self._tokens, self._shown, self._padding = 0, 0, 0, 0.0  # shown: where padding can be seen

    def wants(self, batch: Any) -> bool:
        """Whether this batch is one to look at."""
        if self._off or _fields(batch) is None:
            return False
        self._asked += 1
        return self._asked <= _AT_FIRST or self._asked % _LATER_EVERY == 0

    def look(self, batch: Any) -> None:
        """Count what is in a batch. An exception ends the counting, and nothing else."""
        try:
            self._count(_fields(batch) or {})
        except Exception:
            self._off = True

    def facts(self) -> TokenFacts | None:
        """What is known by now."""
        if not self._samples:
            return None
        padding = self._padding / self._shown if self._shown else None
        return TokenFacts(a_sample=self._tokens / self._samples, padding=padding)

    def _count(self, batch: Mapping[str, Any]) -> None:
        ids, mask, labels = (_table(batch.get(name)) for name in (_IDS, _MASK, _LABELS))
        first = next((table for table in (mask, ids, labels) if table is not None), None)
        if first is None:
            return
        self._samples += first.shape[0]
        self._tokens += first.numel()
        table = mask if mask is not None else labels
        if table is None or table.shape[1] > _LONGEST:
            return
        rows = table[:: max(1, -(-table.numel() // _MOST_TOKENS))]  # spread: a batch may be sorted by length
        padding = rows.numel() - int(rows.count_nonzero())
        if mask is None:
            padding = _behind_the_labels(rows)
        self._shown += first.numel()
        self._padding += padding / rows.numel() * first.numel()


def _fields(batch: Any) -> Mapping[str, Any] | None:
    """The tensors of a batch by name, where some of them are tokens; they may be the first part of a
    tuple."""
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    return batch if isinstance(batch, Mapping) and (_IDS in batch or _MASK in batch) else None


def _table(tensor: Any) -> torch.Tensor | None:
    """A plain tensor of whole numbers in host memory with samples as rows; None of anything else."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    if tensor.is_nested or tensor.dim() != 2 or not tensor.numel() or tensor.is_floating_point():
        return None
    return tensor


def _behind_the_labels(labels: torch.Tensor) -> int:
    """How many tokens follow the last label of a row; a row without any label counts as full."""
    return int((labels != _IGNORED).view(torch.uint8).flip(1).argmax(1).sum())


# -- what is seen of them

_WATCHED_FOR = 200  # batches


@dataclass(repr=False, eq=False)
class _SeenLoader:
    facts: LoaderFacts
    passes: int = 0
    written: str | None = None  # what the loop wrote to in the dataset
    fills: str | None = None  # what samples fill in it
    tokens: TokenCounts = field(default_factory=TokenCounts)


class LoaderNotes:
    """What is known of the loaders of a run, by number."""

    def __init__(self) -> None:
        self._seen: dict[int, _SeenLoader] = {}
        # Of datasets that the training process reads itself; what grows shows where the size of a
        # batch is known.
        self.watched: dict[int, tuple[DatasetCheck, Callable[[], str | None] | None]] = {}

    def pass_begins(self, number: int, loader: Any) -> None:
        """A loader is about to begin a pass."""
        facts = loader_facts(loader)
        seen = self._seen.setdefault(number, _SeenLoader(facts))
        seen.facts = facts
        seen.passes += 1
        if loader.num_workers == 0 and seen.passes == 1:
            self._watch(number, loader)

    def _watch(self, number: int, loader: Any) -> None:
        from flatout.feed.dataset_check import CacheGrowth, DatasetCheck

        samples = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        grown = None
        if isinstance(samples, int) or loader.batch_sampler is None:
            grown = functools.partial(CacheGrowth(loader.dataset).after_batch, samples or 1)
        self.watched[number] = DatasetCheck(loader.dataset, loader.collate_fn), grown
        weakref.finalize(loader, self.watched.pop, number, None).atexit = False

    def before_batch(self, number: int) -> None:
        """A loader in `watched` is about to be asked for a batch."""
        check, seen = self.watched[number][0], self._seen[number]
        seen.written = seen.written or check.changed()
        if seen.written or check.looked >= _WATCHED_FOR:
            del self.watched[number]

    def after_batch(self, number: int) -> None:
        """The loader has given the batch."""
        if number in self.watched:
            (check, grown), seen = self.watched[number], self._seen[number]
            check.renew()  # what samples write is not the loop's doing
            if grown is not None:
                seen.fills = grown() or seen.fills

    def tokens_of(self, number: int) -> TokenCounts | None:
        """The counts of a loader's tokens; None for a queue of the script's."""
        seen = self._seen.get(number)
        return seen.tokens if seen is not None else None

    def batches_ready(self, train_loaders: set[int]) -> int:
        """How many batches lay ready at the start, where workers had time to load."""
        known = (seen.facts for number, seen in self._seen.items() if number in train_loaders)
        return max(map(batches_ahead, known), default=0)

    def kinds(self, train_loaders: set[int]) -> tuple[LoaderFacts, ...]:
        """The loaders, those that are alike as one."""
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for number, seen in self._seen.items():
            alike[str(seen.facts)].append(number)
        return tuple(self._kind(numbers, train_loaders) for numbers in alike.values())

    def _kind(self, numbers: list[int], train_loaders: set[int]) -> LoaderFacts:
        seen = [self._seen[number] for number in numbers]
        return replace(
            seen[0].facts,
            trains=not train_loaders.isdisjoint(numbers),
            made_anew=len(seen) > 1 == max(one.passes for one in seen),
            written=next((one.written for one in seen if one.written), None),
            fills=next((one.fills for one in seen if one.fills), None),
            tokens=next((tokens for one in seen if (tokens := one.tokens.facts())), None),
        )


# -- the work of loading

_SLOWEST_KEPT = 8
_RANDOM_CHECKS = 16  # samples of a pass
# Timing a sample costs 3 µs: most batches are not measured where samples or batches are quicker than this.
_QUICK_SAMPLE_S, _QUICK_BATCH_S = 100e-6, 1e-3
_MEASURED_AT_FIRST, _THEN_SKIPPED = 16, 15  # batches
_FIRST_REPORT_S, _LAST_REPORT_S = 0.5, 120.0


class Meter:
    """The totals of a worker, or of a training process that loads itself."""

    def __init__(self, dataset: Any, worker: int | None, path: Path | None) -> None:
        self._path = path
        self._worker = worker
        self._dataset, self._length = _named(dataset)
        self._born_s = self._idle_since = self._reported_s = time.monotonic()
        self._report_every_s = _FIRST_REPORT_S
        self._waiting_s = 0.0
        # Batches, samples, their wall time and CPU time, collate: in all, and of the batch measured last.
        self._totals = [0, 0, 0.0, 0.0, 0.0]
        self._latest = [0, 0, 0.0, 0.0, 0.0]
        self._to_skip = 0  # batches that are not measured: each counts as the one measured before it
        self._began_cpu_s = 0.0
        self._loaded: list[tuple[float, int]] = []  # of the present batch: seconds, and samples
        self._sample_ms = Sketch()
        self._slowest: list[tuple[float, int]] = []
        self._random: set[str] = set()
        self._random_checks = 0
        self.transforms_s: defaultdict[str, float] = defaultdict(float)
        self._phase: str | None = None  # samples or collate, while it is at work
        self._stacks: StackSampler | None = None
        if worker is not None:
            thread = threading.get_ident()
            self._stacks = StackSampler(lambda: thread, lambda: self._phase)
            self._stacks.start()

    def measure(self, fetcher: Any) -> None:
        """Time the dataset and the collate function of torch's fetcher, which is made for a pass."""
        self._idle_since = time.monotonic()  # between two passes nothing is asked of a worker
        self._random_checks = 0  # samples may draw random numbers even if those of earlier passes did not
        fetch, collate, source = fetcher.fetch, fetcher.collate_fn, "dataset"
        if hasattr(fetcher, "dataset_iter"):
            source = "dataset_iter"
        plain = getattr(fetcher, source)
        timed = _TimedDataset(plain, self)

        def timed_collate(samples: Any) -> Any:
            self._samples_loaded()
            start = time.perf_counter()
            try:
                return collate(samples)
            finally:
                self._collated(time.perf_counter() - start)

        def timed_fetch(indices: Any) -> Any:
            try:
                if self._batch_begins():
                    setattr(fetcher, source, timed)
                    fetcher.collate_fn = timed_collate
                else:
                    setattr(fetcher, source, plain)
                    fetcher.collate_fn = collate
                return fetch(indices)
            finally:
                self._batch_ended()

        fetcher.fetch = timed_fetch

    def _batch_begins(self) -> bool:
        """The worker has been waiting until now. Whether to measure this batch."""
        self._waiting_s += time.monotonic() - self._idle_since
        self._phase = "samples"
        if self._to_skip:
            self._to_skip -= 1
            self._count_latest()
            return False
        self._loaded = []
        self._began_cpu_s = time.thread_time()
        return True

    def load(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Time how long the dataset takes for a sample, or for those of a list of indices."""
        before = None
        if self._random_checks < _RANDOM_CHECKS:
            before = _random_states()
        start = time.perf_counter()
        sample = get(index)
        seconds = time.perf_counter() - start
        # The first sample of all imports modules and opens files.
        is_first = not self._totals[0] and not self._loaded
        self._loaded.append((seconds, len(index) if isinstance(index, list) else 1))
        if isinstance(index, int) and not is_first:
            heapq.heappush(self._slowest, (seconds, index))
            if len(self._slowest) > _SLOWEST_KEPT:
                heapq.heappop(self._slowest)
        if before is not None:
            self._random_checks += 1
            after = _random_states()
            self._random |= {name for name, state in before.items() if state != after[name]}
        return sample

    def _samples_loaded(self) -> None:
        self._phase = "collate"
        cpu_s = time.thread_time() - self._began_cpu_s
        samples, wall_s = sum(count for _, count in self._loaded), sum(seconds for seconds, _ in self._loaded)
        first = int(not self._totals[0] and samples == len(self._loaded))
        for seconds, count in self._loaded[first:]:
            self._sample_ms.add(seconds / count * 1e3, count)
        self._latest = [1, samples, wall_s, cpu_s, 0.0]

    def _collated(self, seconds: float) -> None:
        self._latest[4] = seconds
        self._count_latest()
        _, samples, wall_s, _, _ = self._latest
        quick = wall_s + seconds < _QUICK_BATCH_S or wall_s < _QUICK_SAMPLE_S * samples
        if quick and self._totals[0] >= _MEASURED_AT_FIRST:
            self._to_skip = _THEN_SKIPPED

    def _batch_ended(self) -> None:
        self._phase = None
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
    """Measures torch's fetchers: in loader workers, and in the training process with num_workers=0."""

    def __init__(self, patches: Patches, in_worker: Callable[[], None]) -> None:
        self._patches = patches
        self._in_worker = in_worker  # called in a loader worker, when it begins
        self._subscriber: Subscriber | None = None
        self._of_this_process: dict[tuple[str, int | None], Meter] = {}
        self._of_worker: dict[int, Meter] = {}  # by process: a worker that stays has a fetcher for each epoch
        self._folder = Path()

    def start(self, folder: Path) -> None:
        """Measure from now on, into this folder."""
        self._folder = folder
        if self._subscriber is None:
            self._subscriber = self._patches.subscriber(Stage.OBSERVE, _fail)
            self._subscriber.around("torch.utils.data.dataloader._DatasetKind.create_fetcher", self._create_fetcher)

    def clear(self) -> None:
        """Forget what was measured: it is another process's."""
        self._of_this_process.clear()

    def finish(self) -> None:
        """Write what was measured, and measure no more."""
        for meter in self._of_this_process.values():
            meter.write()
        self.clear()
        if self._subscriber is not None:
            self._subscriber.leave()
            self._subscriber = None

    def _create_fetcher(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fetcher = call(*args, **kwargs)
        if self._subscriber is not None:
            self._subscriber.guarded(self._measure, fetcher)
        return fetcher

    def _measure(self, fetcher: Any) -> None:
        path = self._folder / f"workers-{int(os.environ.get(RANK, '0')):05d}.jsonl"
        worker: Any = torch.utils.data.get_worker_info()
        if worker is not None and os.getpid() in self._of_worker:
            meter = self._of_worker[os.getpid()]
        elif worker is not None:
            meter = Meter(worker.dataset, worker.id, path)  # the user's own dataset, under any loader
            self._of_worker = {os.getpid(): meter}
            multiprocessing.util.Finalize(None, meter.write, exitpriority=1)
            self._in_worker()
            _time_transforms(worker.dataset, meter.transforms_s)
        else:  # passes over like datasets have one meter
            named = _named(fetcher.dataset)
            meter = self._of_this_process.get(named) or Meter(fetcher.dataset, None, path)
            self._of_this_process[named] = meter
        meter.measure(fetcher)


def _fail(problem: Exception) -> None:
    reason = redact_text(f"{type(problem).__name__}: {problem}")
    print(f"flatout: loader work is not measured ({reason})", file=sys.stderr)


class _TimedDataset:
    """Stands in front of the dataset, or its iterator, inside the fetcher only."""

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
    def __init__(self, transform: Any, spent_s: defaultdict[str, float]) -> None:
        self._transform = transform
        self._spent_s = spent_s

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self._spent_s[type(self._transform).__name__] += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


def _time_transforms(dataset: Any, spent_s: defaultdict[str, float]) -> None:
    """Time each step of a Compose that a worker's dataset holds, which is a copy of its own."""
    for holder in (dataset, getattr(dataset, "dataset", None)):
        for compose in list(getattr(holder, "__dict__", {}).values()):
            steps = getattr(compose, "transforms", None)
            if type(compose).__name__ == "Compose" and isinstance(steps, list):
                # A persistent worker has a meter for each epoch: its transforms were timed in the last one.
                plain = [s._transform if isinstance(s, _TimedTransform) else s for s in steps]
                compose.transforms = [_TimedTransform(s, spent_s) for s in plain]


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
