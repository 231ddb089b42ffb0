"""Loads whose effect on a GPU is known, each in a process of its own.

    python benchmarks/loads.py matmul      8192³ matrix products in bf16, back to back: SMs and tensor cores full
    python benchmarks/loads.py tiny        kernels of one block, back to back: a kernel always there, SMs nearly empty
    python benchmarks/loads.py switched    matmul, two seconds on and two seconds off (--period 4)
    python benchmarks/loads.py train       a small training whose loader has 40 workers (--workers), on CPU or GPU

Prints `ready` once the load is on, works until its stdin closes, and then prints one line of JSON: what it did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

AHEAD = 2  # batches queued on the GPU, so that it never waits for us


@contextlib.contextmanager
def running(*arguments: str, within_s: float = 120) -> Iterator[dict[str, Any]]:
    """The load while it runs: {"pid": …}; what it did is added to that when it has ended."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    load: dict[str, Any] = {"pid": child.pid}
    try:
        first = child.stdout.readline().strip() if select.select([child.stdout], [], [], within_s)[0] else "nothing"
        if first != "ready":
            raise RuntimeError(f"the load {' '.join(arguments)} did not start (it said {first!r})")
        yield load
        child.stdin.close()
        load |= json.loads(child.stdout.readline() or "{}")
        child.wait(within_s)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=["matmul", "tiny", "switched", "train"])
    parser.add_argument("--period", type=float, default=4.0, metavar="SECONDS", help="of switched")
    parser.add_argument("--workers", type=int, default=40, metavar="N", help="of train")
    options = parser.parse_args()
    loads: dict[str, Callable[[], dict[str, Any]]] = {
        "matmul": lambda: keep_busy(matmul()),
        "tiny": lambda: keep_busy(tiny()),
        "switched": lambda: switched(matmul(), options.period),
        "train": lambda: train(options.workers),
    }
    print(json.dumps(loads[options.load]()), flush=True)


def stopped() -> bool:
    """Whether the process that started this one has closed its stdin."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def matmul() -> Callable[[], None]:
    """About 30 ms of full tensor cores on an H200."""
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def batch() -> None:
        for _ in range(20):
            torch.mm(left, right, out=out)

    return batch


def tiny() -> Callable[[], None]:
    """Thousands of kernels of a single block; as a graph, so that the host cannot be too slow to launch them."""
    import torch

    numbers = torch.zeros(128, device="cuda")
    numbers.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5000):
            numbers.add_(1)
    return graph.replay


def keep_busy(batch: Callable[[], None], until: Callable[[], bool] = stopped, announce: bool = True) -> dict[str, Any]:
    """Queue batches without a gap until told to stop."""
    import torch

    marks: list[Any] = []
    batches = 0
    while not until():
        batch()
        batches += 1
        marks.append(torch.cuda.Event())
        marks[-1].record()
        if len(marks) > AHEAD:
            marks.pop(0).synchronize()
            if announce and batches == AHEAD + 1:
                print("ready", flush=True)
    torch.cuda.synchronize()
    return {"batches": batches}


def switched(batch: Callable[[], None], period_s: float) -> dict[str, Any]:
    """On for half a period, off for the other half; when it was on, by CLOCK_MONOTONIC."""
    import torch

    batch()
    torch.cuda.synchronize()
    print("ready", flush=True)
    on_s: list[tuple[float, float]] = []
    while not stopped():
        start_s = time.monotonic()
        keep_busy(batch, until=lambda start_s=start_s: time.monotonic() - start_s >= period_s / 2, announce=False)
        on_s.append((start_s, time.monotonic()))
        select.select([sys.stdin], [], [], max(0.0, start_s + period_s - time.monotonic()))
    return {"on_s": on_s}


def train(workers: int) -> dict[str, Any]:
    """A small convolutional net on made-up pictures, fed by a real DataLoader."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", "This DataLoader will create")  # as many as we want
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.Flatten(), nn.LazyLinear(10))
    model.to(device)
    loader: Any = DataLoader(Pictures(), batch_size=16, num_workers=workers)
    optimizer: Any = None
    steps = 0
    while True:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == 3:
                print("ready", flush=True)
            if stopped():
                return {"steps": steps, "device": device}


class Pictures:
    """Pictures that take a worker a few milliseconds each."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        import torch

        time.sleep(0.02)
        return torch.rand(3, 64, 64), index % 10


if __name__ == "__main__":
    main()
