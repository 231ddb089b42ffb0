"""What `flatout run` costs a training, and whether what it says is true.

    python benchmarks/observe_run.py [--out FILE]     about 4 minutes

Cost: a training whose step takes about 2 ms and one of about 20 ms, observed and not by turns of ten steps, many
hundred times over; the median difference in time a step. The X-ray is off: it is taken once in a run, not in every
step. What remains while the wrappers are off (a look at a flag in each wrapper, a microsecond or two) is not in it.

Truth: 10 ms planted into `__getitem__`, the loop, before `.item()`, evaluation, a log line and a checkpoint; what each
is reported as, a step.

Identity: the hash of all losses and weights with deterministic settings, bare and under `flatout run`. Memory and
start-up: of a process that imports torch and trains a little, bare and under `flatout run`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

_before_torch_s = time.perf_counter()
import torch  # noqa: E402

IMPORT_TORCH_S = time.perf_counter() - _before_torch_s
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

import flatout  # noqa: E402
from benchmarks.machine import describe, headline  # noqa: E402
from flatout import trace  # noqa: E402
from flatout.diagnose.breakdown import Breakdown, breakdown  # noqa: E402
from flatout.trace.downsample import RAW_STEPS  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DELAY_S = 0.010
COST_FOR_S, WRITING_FOR_S, STEPS_A_TURN = 30.0, 6.0, 10
CARD_HZ = 1.7e9  # about; what it comes to is measured
TRUTH_STEPS = 60

COST_US, COST_SHARE, MEMORY_MB, START_S, TRUTH_SHARE = 50.0, 0.005, 60.0, 0.3, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    machine = describe()
    print(headline(machine))
    results: dict[str, Any] = {"benchmark": "observe run", "machine": machine, "checks": {}}
    with tempfile.TemporaryDirectory() as name:
        for part in options.only or PARTS:
            for figures, text, passed in PARTS[part](Path(name)):
                results |= {part: results.get(part, {}) | figures}
                results["checks"][text] = passed
                print(f"{'✓' if passed else '✗'} {text}", flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


Check = tuple[dict[str, Any], str, bool]  # figures, what they say, whether that is as wanted


# -- cost -----------------------------------------------------------------------------------------------------------


class Training:
    """A training of a plain shape: products of matrices in its step decide how long that takes."""

    def __init__(self, step_ms: float) -> None:
        width = 1024 if DEVICE == "cuda" else 64
        layers = [torch.nn.Linear(width, width) for _ in range(8)]
        self._model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(DEVICE)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._data = TensorDataset(torch.randn(4096, width), torch.randint(0, 10, (4096,)))
        self.batches = self.endless()
        self._big = torch.randn(width, width, device=DEVICE)
        self._rounds = 0
        self.run(50)
        base_s, self._rounds = self.run(100), 50
        each_s = max(1e-6, (self.run(30) - base_s) / 50)
        self._rounds = max(0, round((step_ms / 1e3 - base_s) / each_s))

    def endless(self) -> Iterator[Any]:
        """Batches without end. What measures loading is put around it here, if it is there by now."""
        batches = iter(DataLoader(self._data, batch_sampler=itertools.cycle(torch.arange(4096).view(-1, 8).tolist())))
        next(batches)
        return batches

    def run(self, steps: int) -> float:
        """Seconds a step, over so many; two more come before."""
        self._step()
        self._step()
        sync()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        sync()
        return (time.perf_counter() - start) / steps

    def hurry(self, steps: int) -> None:
        """So many steps that take no longer than they must."""
        rounds, self._rounds = self._rounds, 0
        self.run(steps)
        self._rounds = rounds

    def _step(self) -> None:
        x, y = (tensor.to(DEVICE) for tensor in next(self.batches))
        self._optimizer.zero_grad()
        output = self._model(x)
        for _ in range(self._rounds):
            output = output + (self._big @ self._big).mean() * 0
        torch.nn.functional.cross_entropy(output, y).backward()
        self._optimizer.step()


def costs(folder: Path) -> Iterator[Check]:
    for step_ms in (2, 20):
        figures = cost(step_ms, folder)
        added, share, off_by = figures["added_us"], figures["share"], figures["standard_error_us"]
        said = f"cost of a step of {figures['bare_ms']:.1f} ms: {added:+.0f} ± {off_by:.0f} µs, {share:+.2%}, of that "
        said += f"{figures['writing_us']:.0f} µs on a thread of its own; {figures['said_us']:.0f} µs by its own account"
        yield {f"{step_ms} ms": figures}, said, added <= COST_US if step_ms < 10 else share <= COST_SHARE


def cost(step_ms: float, folder: Path) -> dict[str, Any]:
    """Hundreds of short stretches, with the wrappers on and off by turns: the machine's own moods last longer than two.

    The thread that writes the trace goes on all the while. What it takes is measured over steps in a row, none of them
    left out, and is added, as if training waited for it.
    """
    training = Training(step_ms)
    with flatout.attach(folder / f"cost-{step_ms}", xray=False) as attachment:
        recording = attachment._recording
        assert recording is not None
        batches = {False: training.batches, True: training.endless()}
        training.batches = batches[True]
        training.hurry(RAW_STEPS)  # the first steps of a run are written one by one
        training.run(50)
        before = dict(dataclasses.asdict(recording.own_cost()), steps=recording.recorder.steps)
        training.run(round(WRITING_FOR_S * 1e3 / step_ms))
        time.sleep(1.0)  # until all of them are written
        after = dict(dataclasses.asdict(recording.own_cost()), steps=recording.recorder.steps)
        pairs, end_s = [], time.monotonic() + COST_FOR_S
        while time.monotonic() < end_s:
            order = (True, False) if len(pairs) % 2 else (False, True)
            turn = {observed: training_for(training, recording, observed, batches[observed]) for observed in order}
            pairs.append((turn[False], turn[True]))
    counted = after["steps"] - before["steps"]
    own = {
        key: (after[key] * after["steps"] - before[key] * before["steps"]) / counted
        for key in ("us_per_step", "writing_us")
    }
    added_us = [(observed - bare) * 1e6 for bare, observed in pairs]
    low, _, high = statistics.quantiles(added_us, n=4)
    added, bare_s = statistics.median(added_us) + own["writing_us"], statistics.median(bare for bare, _ in pairs)
    return {
        "turns": len(pairs),
        "steps_a_turn": STEPS_A_TURN,
        "bare_ms": bare_s * 1e3,
        "added_us": added,
        "added_us_quartiles": [low, high],
        "standard_error_us": 1.25 * (high - low) / 1.35 / math.sqrt(len(added_us)),  # of a median
        "writing_us": own["writing_us"],
        "share": added / 1e6 / bare_s,
        "said_us": own["us_per_step"],
    }


def training_for(training: Training, recording: Any, observed: bool, batches: Iterator[Any]) -> float:
    recording._time.off, training.batches = not observed, batches
    try:
        return training.run(STEPS_A_TURN)
    finally:
        recording._time.off = False


def sync() -> None:
    """Wait for the GPU, unobserved: it is the benchmark that waits, not the training."""
    if DEVICE == "cuda":
        torch._C._cuda_synchronize()


# -- truth ----------------------------------------------------------------------------------------------------------

PLANTS = {
    "getitem": "data",
    "loop": "rest",
    "item": "sync",
    "evaluation": "evaluation",
    "logging": "logging",
    "checkpoint": "checkpoint",
}


class Samples(Dataset[Any]):
    def __init__(self, delay: Callable[[str], None]) -> None:
        self._delay = delay

    def __len__(self) -> int:
        return TRUTH_STEPS + 1

    def __getitem__(self, index: int) -> Any:
        self._delay("getitem")
        return torch.ones(256), torch.tensor(index % 10)


def truths(folder: Path) -> Iterator[Check]:
    for where, name in PLANTS.items():
        if where == "item" and DEVICE != "cuda":
            continue
        planted, seen = truth(where, folder)
        said = f"{planted:.1f} ms planted into {where}: {seen:.2f} ms as {name}"
        yield {where: {"planted_ms": planted, "seen_ms": seen}}, said, abs(seen - planted) <= TRUTH_SHARE * planted


def truth(where: str, folder: Path) -> tuple[float, float]:
    """A planted delay, and what is reported of it, in milliseconds a step, beyond the same training without it."""
    planted, planted_ms = reported(where, folder), DELAY_S * 1e3
    if planted_on_gpu:  # cycles of a clock that moves: what they really took
        planted_ms = statistics.mean(start.elapsed_time(end) for start, end in planted_on_gpu[1:])
    evaluating_s = statistics.fmean(evaluated_s)
    name, bare = PLANTS[where], reported("nowhere", folder)
    if where == "evaluation":  # what it does besides takes longer after a delay: all that was added
        planted_ms = (evaluating_s - statistics.fmean(evaluated_s)) * 1e3
    seen = (part_ms(planted, name) - part_ms(bare, name)) / TRUTH_STEPS
    return planted_ms, seen


def part_ms(b: Breakdown, name: str) -> float:
    return sum(part.ms for part in b.training if part.name == name)


def reported(where: str, folder: Path) -> Breakdown:
    def delay(place: str) -> None:
        if place == where:
            busy_until(time.perf_counter() + DELAY_S)

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            delay("logging")

    class Saved:
        def __reduce__(self) -> Any:
            delay("checkpoint")
            return (int, ())

    logger = logging.getLogger("observe_run")
    logger.propagate, logger.handlers = False, [Slow()]
    logger.setLevel(logging.INFO)
    model = torch.nn.Linear(256, 10).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    validation = DataLoader(TensorDataset(torch.ones(8, 256)), batch_size=4)
    place = Path(tempfile.mkdtemp(dir=folder))
    planted_on_gpu.clear()
    evaluated_s.clear()
    with flatout.attach(place / "trace", xray=False):
        for x, y in DataLoader(Samples(delay), batch_size=1):
            delay("loop")
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
            if where == "item" and DEVICE == "cuda":
                planted_on_gpu.append(gpu_sleeps(DELAY_S))
            loss.item()
            start_s = time.perf_counter()
            with torch.no_grad():
                for (batch,) in validation:
                    model(batch.to(DEVICE))
                delay("evaluation")
            evaluated_s.append(time.perf_counter() - start_s)
            logger.info("a step")
            torch.save(Saved(), place / "checkpoint.pt")
    return breakdown(trace.read(place / "trace").ranks[0])


def busy_until(end_s: float) -> None:
    while time.perf_counter() < end_s:
        pass


evaluated_s: list[float] = []
planted_on_gpu: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []


def gpu_sleeps(seconds: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Keep the GPU busy for about so long; the events around it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(round(seconds * CARD_HZ))
    end.record()
    return start, end


# -- identity, memory, start-up -------------------------------------------------------------------------------------


def child() -> None:
    """A little deterministic training; prints its hash, its memory and how long importing torch took it."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(512, 32), torch.randint(0, 4, (512,)))
    digest = hashlib.sha256()
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
            digest.update(loss.detach().cpu().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(json.dumps({"hash": digest.hexdigest(), "memory_mb": memory / 1e6, "import_s": IMPORT_TORCH_S}))


def beside(folder: Path) -> Iterator[Check]:
    """Bare and under `flatout run` in turns: the hash, the memory at the end, and the time `import torch` takes."""
    mine = [sys.executable, str(Path(__file__).resolve()), "--child"]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found: dict[str, list[Any]] = {"bare": [], "observed": []}
    for turn in range(4):
        under = [sys.executable, "-m", "flatout", "run", "--quiet", "--trace", str(folder / f"beside-{turn}"), "--"]
        for words, kind in ((mine, "bare"), ([*under, *mine], "observed")):
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, cwd=folder)
            found[kind].append(json.loads(done.stdout.strip().splitlines()[-1]))
    memory = {kind: statistics.median(one["memory_mb"] for one in found[kind]) for kind in found}
    start = {kind: min(one["import_s"] for one in found[kind]) for kind in found}  # the fastest: disks have moods
    hashes = {one["hash"] for kind in found for one in found[kind]}
    yield {"identical": len(hashes) == 1}, "losses, weights and random numbers are bit-identical", len(hashes) == 1
    added = memory["observed"] - memory["bare"]
    yield {"memory_mb": memory}, f"host memory: {added:+.0f} MB", added <= MEMORY_MB
    added = start["observed"] - start["bare"]
    yield {"import_torch_s": start}, f"start-up beyond importing torch: {added:+.2f} s", added <= START_S


PARTS: dict[str, Callable[[Path], Iterator[Check]]] = {"cost": costs, "truth": truths, "beside": beside}


if __name__ == "__main__":
    main()
