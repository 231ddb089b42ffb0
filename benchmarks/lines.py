"""Are the lines right, and what do they cost? The stacks of inside/stacks.py against a clock around each function.

    python benchmarks/lines.py [--seconds 20] [--turns 60] [--out FILE]        a minute or two on a quiet machine

Accuracy: a loop of functions that are Python, numpy, autograd, many small calls, and a wait. Each is timed by a clock
around it; its share of all of that is compared with its share of the looks, in the dense phase and in the sparse one,
in the process itself and in a loader worker.

Cost: steps of about 2 ms, with the sampler looking (sparsely, as it does but for the first ten seconds) and without,
in turns of a quarter of a second, in the order ABBA. The medians of the turns are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from benchmarks.machine import describe, headline  # noqa: E402
from flatout.diagnose.breakdown import hot_functions  # noqa: E402
from flatout.inside.stacks import DENSE_S, StackSampler  # noqa: E402
from flatout.model.records import Stacks  # noqa: E402

TURN_S = 0.25
PHASES = ("rest", "forward", "loss", "backward", "optimizer")
MATRIX = np.random.default_rng(0).random((120, 120))
WEIGHT = torch.randn(256, 256, requires_grad=True)
INPUTS = torch.randn(256, 256)


def plain_python() -> int:
    total = 0
    for number in range(60_000):
        total += number * number
    return total


def in_numpy() -> Any:
    return np.linalg.svd(MATRIX)


def by_autograd() -> None:
    (INPUTS @ WEIGHT).relu().sum().backward()


def many_small_calls() -> dict[str, int]:
    return {str(number): len(str(number)) for number in range(20_000)}


def a_wait() -> None:
    time.sleep(0.005)


WORK: tuple[Callable[[], Any], ...] = (plain_python, in_numpy, by_autograd, many_small_calls, a_wait)


class Work(Dataset[dict[str, float]]):
    """A sample does all of the work, and says how long each part took."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        spent: dict[str, float] = defaultdict(float)
        work(spent)
        return dict(spent)


def work(spent: dict[str, float]) -> None:
    """All of it once, each part on the clock."""
    for part in WORK:
        start_s = time.perf_counter()
        part()
        spent[part.__name__] += time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each loop whose lines are looked at")
    parser.add_argument("--turns", type=int, default=60, help="with and without the sampler")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(headline(describe()))
    rows: dict[str, Any] = {
        "dense looks": accuracy(min(options.seconds, DENSE_S), DENSE_S),
        "sparse looks": accuracy(options.seconds, 0.0),
        "in a worker": in_worker(options.seconds),
    }
    worst = 0.0
    for name, shares in rows.items():
        print(f"\n{name:22}{'clock':>8}{'looks':>8}")
        for part, (clock, looks) in shares.items():
            worst = max(worst, abs(clock - looks))
            print(f"  {part:20}{clock:8.1%}{looks:8.1%}")
    print(f"\nlargest difference: {100 * worst:.1f} points")
    rows["largest difference"] = worst
    rows["cost"] = cost(options.turns)
    print("a step of {without_ms:.3f} ms: {more_us:+.1f} µs ({low_us:+.1f} to {high_us:+.1f})".format(**rows["cost"]))
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": describe(), **rows}, indent=2) + "\n", encoding="utf-8")


@contextmanager
def looking(dense_s: float) -> Iterator[StackSampler]:
    thread = threading.get_ident()
    sampler = StackSampler(lambda: thread, lambda: "rest", dense_s=dense_s)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def accuracy(seconds: float, dense_s: float) -> dict[str, tuple[float, float]]:
    """Shares by the clock and by the looks, for each part of the work."""
    spent: dict[str, float] = defaultdict(float)
    with looking(dense_s) as sampler:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            work(spent)
    return _beside(spent, sampler.record())


def in_worker(seconds: float) -> dict[str, tuple[float, float]]:
    """The same of a loader worker, whose thread is looked at from a thread of its own process."""
    spent: dict[str, float] = defaultdict(float)
    begun_s = time.monotonic()
    work(defaultdict(float))
    samples = max(8, int(seconds / (time.monotonic() - begun_s)))
    for batch in DataLoader(_Looked(samples), batch_size=None, num_workers=1):
        for part, took in batch["spent"].items():
            spent[part] += took
        record = batch["record"]
    return _beside(spent, record)


class _Looked(Work):
    sampler: StackSampler | None = None

    def __getitem__(self, index: int) -> Any:
        if self.sampler is None:
            thread = threading.get_ident()
            type(self).sampler = StackSampler(lambda: thread, lambda: "rest")
            assert self.sampler is not None
            self.sampler.start()
        spent = super().__getitem__(index)
        record = None
        if index == self.length - 1:
            assert self.sampler is not None
            record = self.sampler.record()
        return {"spent": spent, "record": record}


def _beside(spent: dict[str, float], record: Stacks | None) -> dict[str, tuple[float, float]]:
    assert record is not None
    looks = {function.name: function.share for function in hot_functions([record], PHASES)}
    total = sum(spent.values())
    return {part: (took / total, looks.get(part, 0.0)) for part, took in spent.items()}


def cost(turns: int) -> dict[str, float]:
    """What the sparse looks add to a step of about 2 ms: the median of the pairs of turns, and their quartiles."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 128)

    def turn(look: bool) -> float:
        taken = []
        with looking(0.0) if look else _nothing():
            end_s = time.monotonic() + TURN_S
            while time.monotonic() < end_s:
                start_s = time.perf_counter()
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
                taken.append(time.perf_counter() - start_s)
        return 1e3 * statistics.fmean(taken)

    turn(True), turn(False)
    pairs, without = [], []
    for _ in range(turns // 2):
        first, second, third, fourth = turn(True), turn(False), turn(False), turn(True)
        pairs += [first - second, fourth - third]
        without += [second, third]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return {
        "without_ms": statistics.median(without),
        "more_us": 1e3 * middle,
        "low_us": 1e3 * low,
        "high_us": 1e3 * high,
        "pairs": len(pairs),
    }


@contextmanager
def _nothing() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main()
