"""What the rule of the turns decides on recorded step times, with a change that does nothing and with planted gains.

    python benchmarks/turns_replayed.py --record DIR [--seconds 100] [--only NAME…]
    python benchmarks/turns_replayed.py DIR [--draws 200] [--out FILE]

Recorded are the steps of small trainings on the CPU, beside whatever else runs. `LiveTurns` itself decides,
from random steps on, with the recording as its clock: a step that the change is on for takes its time over the gain.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402
from flatout.inside import trial  # noqa: E402
from flatout.model.turns import Decision, TurnsResult  # noqa: E402

GAINS = (1.0, 1.03, 1.10, 1.25)
CHANGE = "change"
WHAT = (
    "LiveTurns replayed on recorded step times; draws begin at random, and those of one recording overlap; "
    "seconds: median, longest; gain: 5%, median, 95%"
)


# -- the trainings that are recorded: each yields after an optimizer step


def cnn() -> Iterator[None]:
    """Convolutions in fp32, batches made by the loop itself."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(4608, 10))
    yield from _train(model, torch.optim.SGD(model.parameters(), lr=0.01), (32, 3, 16, 16))


def mlp() -> Iterator[None]:
    """Steps of a millisecond or two."""
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10))
    yield from _train(model, torch.optim.AdamW(model.parameters()), (128, 64))


def accumulated() -> Iterator[None]:
    """Gradients of four batches and a OneCycle schedule."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10**9)
    for _ in _train(model, optimizer, (16, 3, 16, 16), micro_steps=4):
        schedule.step()
        yield


def attention() -> Iterator[None]:
    """A layer of a transformer; sequences of different lengths."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, lengths = nn.Sequential(layer, nn.Linear(64, 10)), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        shape = (16, lengths.randint(16, 64), 64)
        model(torch.randn(shape)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def loaded() -> Iterator[None]:
    """Two workers feed it, and it waits for them."""
    loader = torch.utils.data.DataLoader(_Slow(), batch_size=8, num_workers=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(32, 3, 16, 16).mean(0)


def _train(model: nn.Module, optimizer: Any, shape: tuple[int, ...], micro_steps: int = 1) -> Iterator[None]:
    while True:
        for _ in range(micro_steps):
            labels = torch.randint(0, 10, shape[:1])
            nn.functional.cross_entropy(model(torch.randn(shape)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


TRAININGS = {training.__name__: training for training in (cnn, mlp, accumulated, attention, loaded)}


def record(name: str, seconds: float, folder: Path) -> None:
    """Train for so long; what each step took goes into a file."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    steps = TRAININGS[name]()
    for _ in range(20):
        next(steps)
    load, ends_s = os.getloadavg()[0], [time.perf_counter()]
    while ends_s[-1] - ends_s[0] < seconds:
        next(steps)
        ends_s.append(time.perf_counter())
    took_s = [round(end - begin, 7) for begin, end in pairwise(ends_s)]
    told = {"load": [round(load, 1), round(os.getloadavg()[0], 1)], "steps_s": took_s}
    (folder / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
    print(f"{name}: {len(took_s):,} steps, median {statistics.median(took_s) * 1e3:.2f} ms, load {told['load']}")


# -- replaying them


class Switched:
    """Stands in for the changes of a process: one, that makes steps so many times as fast, and the clock they have."""

    def __init__(self, gain: float) -> None:
        self.now_s, self._gain, self._on = 0.0, gain, False

    def switch(self, name: str, *, on: bool) -> None:
        self._on = on

    def try_out(self, name: str) -> None:
        self._on = True

    def why_not_made(self, name: str) -> str:
        return ""

    def step(self, took_s: float) -> None:
        self.now_s += took_s / (self._gain if self._on else 1.0)


def replay(steps_s: Sequence[float], begin: int, gain: float) -> TurnsResult:
    """One change decided in turns, from a step on; the recording begins again where it is over."""
    applied: Any = Switched(gain)
    clock: Any = SimpleNamespace(perf_counter=lambda: applied.now_s)
    with patch.object(trial, "time", clock), tempfile.TemporaryDirectory() as folder:
        turns = trial.LiveTurns(applied, (CHANGE,), Path(folder))
        for number in count(begin):
            applied.step(steps_s[number % len(steps_s)])
            if not turns.step_ended():
                return turns.results[0]
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--only", nargs="*", default=list(TRAININGS), choices=list(TRAININGS))
    parser.add_argument("--draws", type=int, default=200, help="of each gain, over all recordings")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = describe(("torch",))
    print(headline(machine), flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.record:
        for name in options.only:
            record(name, options.seconds, options.folder)
        return
    recordings = {path.stem: json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))}
    results: dict[str, Any] = {"recordings": {}, "gains": {}}
    for name, recording in recordings.items():
        results["recordings"][name] = described(recording)
    for gain in GAINS:
        results["gains"][str(gain)] = told = decided(recordings, gain, options.draws)
        print(f"×{gain}: {json.dumps(told)}", flush=True)
    if options.out:
        told = {"benchmark": "turns_replayed", "machine": machine, "draws": options.draws, **results, "what": WHAT}
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def described(recording: dict[str, Any]) -> dict[str, Any]:
    """How long it is, and how unsteady."""
    steps_s = recording["steps_s"]
    twentieths = statistics.quantiles(steps_s, n=20)
    return {
        "steps": len(steps_s),
        "seconds": round(sum(steps_s), 1),
        "median_ms": round(statistics.median(steps_s) * 1e3, 3),
        "from_5_to_95_percent_ms": [round(twentieths[0] * 1e3, 3), round(twentieths[-1] * 1e3, 3)],
        "load": recording["load"],
    }


def decided(recordings: dict[str, Any], gain: float, draws: int) -> dict[str, Any]:
    """So many changes with this gain, as many in each recording."""
    chance, drawn = random.Random(0), {name: list[TurnsResult]() for name in recordings}
    for _, name in zip(range(draws), cycle(recordings), strict=False):
        steps_s = recordings[name]["steps_s"]
        drawn[name].append(replay(steps_s, chance.randrange(len(steps_s)), gain))
    return summed_up([one for some in drawn.values() for one in some]) | {
        "by_recording": {name: summed_up(some) for name, some in drawn.items() if some}
    }


def summed_up(some: Sequence[TurnsResult]) -> dict[str, Any]:
    """Decisions, how long they took, and what gain was measured; median and longest, or 5%, median and 95%."""
    decisions = Counter(one.decision for one in some)
    faster_s = [one.seconds for one in some if one.decision == "faster"]
    gains = sorted(one.gain.value for one in some if one.gain is not None)
    return {
        "n": len(some),
        **{name: decisions[name] for name in get_args(Decision)},
        "seconds": _median_and_longest([one.seconds for one in some]),
        "seconds_to_faster": _median_and_longest(faster_s) if faster_s else None,
        "gain": [round(gains[int(share * (len(gains) - 1))], 4) for share in (0.05, 0.5, 0.95)],
    }


def _median_and_longest(values: Sequence[float]) -> list[float]:
    return [round(statistics.median(values), 2), round(max(values), 2)]


if __name__ == "__main__":
    main()
