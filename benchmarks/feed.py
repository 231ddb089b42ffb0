"""The feed against the PyTorch loader, and against what the machine can do at all.

    python benchmarks/feed.py bytes            50 MB uint8 batches into the GPU, by number of workers
    python benchmarks/feed.py jpeg             JPEG → crop 224 → flip → normalized on the GPU
    python benchmarks/feed.py controller       from 1, 4, 16 and 40 declared workers, where loading is the limit
    python benchmarks/feed.py controller-gpu   the same where the consumer is the limit
    python benchmarks/feed.py tiny             a dataset in memory with nothing to gain
    python benchmarks/feed.py starts           passes of 8 batches, for which workers are started each time

Measurements are taken in rounds, each in an order of its own; a row is the median and its spread. They are told, and
written to `--out`, one by one; with `--limit` none is begun that late. A part takes up to 120 s on 16 cores. DALI is
not measured here: its line repeats the figure that was taken on an H200 with 16 cores, and says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from benchmarks.machine import describe, figure, headline
from flatout.feed import DataLoader, feed_of, to_device
from flatout.feed.scheduler import Auto

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CORES = len(os.sched_getaffinity(0))
DALI_IMAGES_S = 8800.0
SETTLE_S = 10.0
PAGE_LOCKED_S = 3.0  # until all slots are made and locked: thirty of 56 MB at 14 workers
MEAN = torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1)
STD = torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1)

warnings.filterwarnings("ignore", message="This DataLoader will create")
warnings.filterwarnings("ignore", message="'pin_memory' argument is set")


# --- what is loaded ---------------------------------------------------------------------------------------------------


class Frames(Dataset[Any]):
    """Bytes that are there already: all a loader has to do is bring 64 of them together and hand them over."""

    def __init__(self, length: int, side: int = 512) -> None:
        self.frames = torch.randint(0, 256, (32, 3, side, side), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.frames[index % 32]


class Photos(Dataset[Any]):
    """JPEG files, decoded, cropped to 224 and flipped at random; as bytes, to be normalized on the GPU."""

    def __init__(self, folder: Path, length: int) -> None:
        self.files = sorted(folder.glob("*.jpg"))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return photo(self.files[index % len(self.files)]), index % 1000


def photo(file: Path) -> torch.Tensor:
    image = decode(file)
    top, left = (int(torch.randint(limit - 224 + 1, ())) for limit in image.shape[1:])
    crop = image[:, top : top + 224, left : left + 224]
    return crop.flip(2) if torch.rand(()) < 0.5 else crop.contiguous()


# The quickest there is.
try:
    import simplejpeg

    DECODER = "simplejpeg"

    def decode(file: Path) -> torch.Tensor:
        pixels = simplejpeg.decode_jpeg(file.read_bytes(), fastdct=False, fastupsample=False)
        return torch.from_numpy(pixels).permute(2, 0, 1)

except ImportError:
    try:
        from torchvision.io import ImageReadMode, decode_jpeg, read_file

        DECODER = "torchvision"

        def decode(file: Path) -> torch.Tensor:
            return decode_jpeg(read_file(str(file)), ImageReadMode.RGB)  # type: ignore[no-any-return]

    except ImportError:
        DECODER = "PIL"

        def decode(file: Path) -> torch.Tensor:
            return torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)


def make_photos(folder: Path, count: int) -> None:
    """Files of 500×375 that cost what photographs cost to decode: noise of many octaves, quality 90."""
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("fork")) as pool:
        list(
            pool.map(_make_photo, [folder / f"{number:05}.jpg" for number in range(count)], range(count), chunksize=16)
        )


def _make_photo(file: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    total = np.zeros((375, 500, 3))
    for octave in range(1, 8):
        small = draw.normal(size=(2 + 2**octave, 3 + 2**octave, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(small[..., channel]).resize((500, 375), Image.Resampling.BICUBIC)
            total[..., channel] += np.asarray(layer) / 1.5**octave
    scaled = (total - total.min()) / (total.max() - total.min()) * 255
    Image.fromarray(scaled.astype(np.uint8)).save(file, quality=90)


def normalized(batch: Any) -> Any:
    images, labels = batch
    return (images.float() - MEAN.to(images.device)) / STD.to(images.device), labels


# --- how it is measured -----------------------------------------------------------------------------------------------


def rate(batches: Iterator[Any], count: Callable[[Any], float], seconds: float, warm_up_s: float = 1.5) -> float:
    """Of whatever `count` counts, per second, after a while of warming up."""
    next(batches)
    begun = time.perf_counter()
    while time.perf_counter() - begun < warm_up_s:
        next(batches)
    _finish()
    total, start = 0.0, time.perf_counter()
    for batch in batches:
        total += count(batch)
        if time.perf_counter() - start > seconds:
            break
    _finish()
    return total / (time.perf_counter() - start)


def _finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def torch_to_gpu(loader: TorchLoader[Any], after: Callable[[Any], Any] = lambda batch: batch) -> Iterator[Any]:
    for batch in loader:
        moved = [part.to(DEVICE, non_blocking=True) for part in (batch if isinstance(batch, list) else [batch])]
        yield after(moved if isinstance(batch, list) else moved[0])


def held(loader: DataLoader[Any], workers: int, on_device: Any) -> Iterator[Any]:
    """Our batches with the number of workers held."""
    iterator = iter(on_device)
    first = next(iterator)
    feed = feed_of(loader)
    if feed is not None:
        feed.resize(workers, hold=True)
    yield first
    yield from iterator


class Measurements:
    """Named measurements, repeated in shuffled rounds; told and saved as they come."""

    def __init__(self, part: str, options: argparse.Namespace) -> None:
        self.seconds: float = options.seconds
        self.unit = ""
        self.values: dict[str, list[float]] = {}
        self._part = part
        self._out: Path | None = options.out
        self._until = time.monotonic() + options.limit
        self._machine = describe()
        self._ways: dict[str, Callable[[], float]] = {}
        print(f"{headline(self._machine)}\n{part}", flush=True)

    def add(self, name: str, measure: Callable[[], float]) -> None:
        self._ways[name] = measure

    def run(self, rounds: int) -> None:
        order = [
            name for seed in range(rounds) for name in random.Random(seed).sample(list(self._ways), len(self._ways))
        ]
        for place, name in enumerate(order, 1):
            if time.monotonic() > self._until and self.values.keys() >= self._ways.keys():
                print(f"  the time is up: {len(order) - place + 1} measurements are left out")
                return
            value = self._ways[name]()
            self.values.setdefault(name, []).append(value)
            print(f"  {place:3}/{len(order)}  {name:34} {value:12.1f} {self.unit}", flush=True)
            self.save([])

    def median(self, name: str) -> float:
        return float(figure(self.values[name])["median"])

    def save(self, notes: list[str]) -> None:
        rows = {name: figure(values) for name, values in sorted(self.values.items())}
        result = {"machine": self._machine, "part": self._part, "unit": self.unit, "rows": rows, "notes": notes}
        if self._out is not None:
            self._out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def conclude(self, title: str, notes: list[str]) -> None:
        print(f"\n{title}\n{'':34} {'median':>10} {'spread':>9}   n   {self.unit}")
        for name in sorted(self.values):
            row = figure(self.values[name])
            print(f"{name:34} {row['median']:10.1f} {row['spread']:9.1f} {row['n']:3}")
        for note in notes:
            print(f"  {note}")
        self.save(notes)


# --- the parts --------------------------------------------------------------------------------------------------------


def bytes_into_gpu(measured: Measurements) -> None:
    dataset, batch_size = Frames(10_000_000), 64
    measured.unit = "GB/s"
    gigabytes = batch_size * 3 * 512 * 512 / 1e9

    def ours(workers: int) -> float:
        loader = DataLoader(dataset, batch_size, num_workers=Auto(workers), pin_memory=DEVICE == "cuda")
        batches = held(loader, workers, to_device(loader, DEVICE))
        return rate(batches, lambda _: gigabytes, measured.seconds, warm_up_s=PAGE_LOCKED_S)

    def with_pytorch(workers: int) -> float:
        loader = TorchLoader(dataset, batch_size, num_workers=workers, pin_memory=DEVICE == "cuda")
        return rate(torch_to_gpu(loader), lambda _: gigabytes, measured.seconds, warm_up_s=PAGE_LOCKED_S)

    for workers in sorted({min(CORES, workers) for workers in (2, 4, 8, 14)}):
        measured.add(f"ours, {workers:2} workers", lambda workers=workers: ours(workers))
        measured.add(f"PyTorch, {workers:2} workers", lambda workers=workers: with_pytorch(workers))
    measured.run(rounds=3)
    notes = []
    for workers in sorted({min(CORES, workers) for workers in (4, 8, 14)}):
        times = measured.median(f"ours, {workers:2} workers") / measured.median(f"PyTorch, {workers:2} workers")
        notes.append(f"{workers} workers: {times:.1f} times PyTorch's (goal: 5)")
    notes.append("wanted: 40 GB/s at 14 workers")
    measured.conclude(f"50 MB uint8 batches to {DEVICE}", notes)


def jpeg(measured: Measurements) -> None:
    measured.unit = "images/s"
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder), 500)
        dataset, batch_size = Photos(Path(folder), 100_000_000), 256

        def ours() -> float:
            loader = DataLoader(dataset, batch_size, num_workers="auto", pin_memory=DEVICE == "cuda")
            on_device = to_device(loader, DEVICE, convert=normalized)
            # Let it settle: that is how it is used.
            return rate(iter(on_device), lambda batch: len(batch[1]), measured.seconds, warm_up_s=SETTLE_S)

        def with_pytorch(workers: int) -> float:
            loader = TorchLoader(dataset, batch_size, num_workers=workers, pin_memory=DEVICE == "cuda")
            return rate(torch_to_gpu(loader, normalized), lambda batch: len(batch[1]), measured.seconds)

        measured.add("ours, auto", ours)
        for workers in sorted({max(1, CORES * share // 8) for share in (8, 12, 16)}):
            measured.add(f"PyTorch, {workers:2} workers", lambda workers=workers: with_pytorch(workers))
        measured.add(f"decoders alone, {CORES} processes", lambda: decoders_alone(Path(folder), measured.seconds))
        measured.run(rounds=3)
    best = max(measured.median(name) for name in measured.values if name.startswith("PyTorch"))
    ceiling = measured.median(f"decoders alone, {CORES} processes")
    mine = measured.median("ours, auto")
    notes = [
        f"decoder: {DECODER}",
        f"ours / decoders alone: {mine / ceiling:.3f} (goal: 0.9)",
        f"ours / PyTorch at its best: {mine / best:.2f} (goal: above 1)",
        f"ours / DALI's CPU pipeline: {mine / DALI_IMAGES_S:.2f} (its {DALI_IMAGES_S:.0f} are a recorded figure)",
    ]
    measured.conclude(f"JPEG 500×375 → crop 224 → flip → normalized on {DEVICE}", notes)


def decoders_alone(folder: Path, seconds: float) -> float:
    """What all cores decode, crop and flip when nobody collects it."""
    context = multiprocessing.get_context("fork")
    go, counts = context.Event(), context.Queue()
    processes = [context.Process(target=_decode_alone, args=(folder, go, seconds, counts)) for _ in range(CORES)]
    for process in processes:
        process.start()
    go.set()
    total = sum(counts.get() for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def _decode_alone(folder: Path, go: Any, seconds: float, counts: Any) -> None:
    torch.set_num_threads(1)
    files = sorted(folder.glob("*.jpg"))
    random.shuffle(files)
    photo(files[0])
    go.wait()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        photo(files[done % len(files)])
        done += 1
    counts.put(done / (time.perf_counter() - start))


# Declared workers: seconds until the figure is taken. It takes longer to find more workers than to give up some.
WHERE_LOADING_IS_THE_LIMIT = {1: 22.0, 4: 18.0, 16: 12.0, 40: 12.0}
WHERE_THE_CONSUMER_IS = {1: 12.0, 4: 8.0, 16: 18.0, 40: 18.0}


def controller(measured: Measurements, step_s: float = 0.0) -> None:
    """Where each start ends up, against the best number held; with `step_s` the consumer takes that long a batch."""
    measured.unit = "images/s"
    starts = WHERE_THE_CONSUMER_IS if step_s else WHERE_LOADING_IS_THE_LIMIT
    ends: dict[int, tuple[int, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder), 500)
        dataset, batch_size = Photos(Path(folder), 100_000_000), 128

        def consumed(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                if step_s:
                    time.sleep(step_s)
                yield batch

        def fixed(workers: int) -> float:
            loader = DataLoader(dataset, batch_size, num_workers=Auto(workers))
            batches = consumed(held(loader, workers, loader))
            return rate(batches, lambda batch: len(batch[1]), measured.seconds, warm_up_s=3.0)

        def from_start(declared: int) -> float:
            loader = DataLoader(dataset, batch_size, num_workers=Auto(declared))
            batches = consumed(iter(loader))
            value = rate(batches, lambda batch: len(batch[1]), measured.seconds, warm_up_s=starts[declared])
            feed = feed_of(loader)
            assert feed is not None
            ends[declared] = (feed.workers, feed.why)
            return value

        grid = sorted({max(1, CORES * share // 16) for share in (2, 4, 8, 12, 14, 16, 20)})
        for workers in grid:
            measured.add(f"held at {workers:2}", lambda workers=workers: fixed(workers))
        for declared in starts:
            measured.add(f"from {declared:2} declared", lambda declared=declared: from_start(declared))
        measured.run(rounds=1)
    best = max(measured.median(f"held at {workers:2}") for workers in grid)
    fewest = next(workers for workers in grid if measured.median(f"held at {workers:2}") >= 0.97 * best)
    notes = [f"best held: {best:.0f} images/s; the fewest that reach 97% of it: {fewest}"]
    for declared, (workers, why) in sorted(ends.items()):
        share = measured.median(f"from {declared:2} declared") / best
        notes.append(f"from {declared}: {share:.3f} of the best (goal: 0.97), {workers} workers: {why}")
    limit = f"a consumer of {step_s * 1000:.0f} ms a batch" if step_s else "loading as fast as it goes"
    measured.conclude(f"controller, {limit}", notes)


def tiny(measured: Measurements) -> None:
    dataset = TensorDataset(torch.randn(40_000, 16), torch.randint(10, (40_000,)))
    measured.unit = "µs/batch"

    def passes(loader: TorchLoader[Any]) -> float:
        list(loader)  # the first pass starts workers, in either loader
        wall, count = time.perf_counter(), 0
        for _ in range(3):
            count += sum(1 for _ in loader)
        return (time.perf_counter() - wall) / count * 1e6

    ways: dict[str, Callable[[], TorchLoader[Any]]] = {}
    for workers in (1, 2):
        ways[f"PyTorch, {workers} workers"] = lambda workers=workers: TorchLoader(
            dataset, 64, shuffle=True, num_workers=workers, persistent_workers=True
        )
        ways[f"ours, {workers} workers"] = lambda workers=workers: DataLoader(
            dataset, 64, shuffle=True, num_workers=workers, persistent_workers=True
        )
    for name, make in ways.items():
        measured.add(name, lambda make=make: passes(make()))
    measured.run(rounds=3)
    for name, make in ways.items():
        measured.values[f"{name}: CPU of next()"] = beside_bare(make(), Bare(dataset, 64, shuffle=True))
    notes = []
    for workers in (1, 2):
        ours = f"ours, {workers} workers"
        times = measured.median(ours) / measured.median(f"PyTorch, {workers} workers")
        spent = measured.median(f"{ours}: CPU of next()")
        notes.append(f"{workers} declared: {times:.3f} times PyTorch's time (goal: at most 1.02)")
        notes.append(f"{workers} declared: the parent spends {spent:.0f} µs a batch (goal: at most 40)")
    auto = DataLoader(dataset, 64, shuffle=True, num_workers="auto")
    for clock, ratios in in_turns(measured, TorchLoader(dataset, 64, shuffle=True), auto).items():
        notes.append(f"auto: {ratios['median']:.3f} times the {clock} time of PyTorch without workers, in turns, "
                     f"spread {ratios['spread']:.3f}, n {ratios['n']} (goal: at most 1.02)")  # fmt: skip
    feed = feed_of(auto)
    assert feed is not None
    notes.append(f"auto has {feed.workers} workers: {feed.why}")
    measured.conclude("tiny: 40,000 rows in memory, batches of 64", notes)


def starts(measured: Measurements, passes: int = 5, rounds: int = 8) -> None:
    """Blocks of short passes with PyTorch's loader and with ours, in turns: wall time, and CPU time of this process."""
    measured.unit = "ms/pass"
    ratios: dict[str, list[float]] = {}
    for ballast_mb in (0, 2000):
        ballast = torch.ones(ballast_mb << 18)  # what a fork has to copy the page tables of
        for workers in (1, 2, 4):
            loaders: dict[str, TorchLoader[Any]] = {
                kind.__module__.partition(".")[0]: kind(range(64), 8, num_workers=workers)  # type: ignore[arg-type]
                for kind in (TorchLoader, DataLoader)
            }
            case = f"{workers} workers, {ballast_mb} MB"
            for loader in loaders.values():
                list(loader)
            for number in range(rounds):
                took = {}
                for name in sorted(loaders, reverse=bool(number % 2)):
                    wall, cpu = time.perf_counter(), time.process_time()
                    for _ in range(passes):
                        list(loaders[name])
                    took[name] = time.perf_counter() - wall, time.process_time() - cpu
                    time.sleep(0.3)  # workers of the last pass may still be ending
                    measured.values.setdefault(f"{case}: {name}", []).append(took[name][0] / passes * 1e3)
                for clock, at in (("wall", 0), ("CPU", 1)):
                    ratios.setdefault(f"{case}: {clock}", []).append(took["flatout"][at] / took["torch"][at])
        del ballast
    notes = []
    for case, found in ratios.items():
        row = figure(found)
        notes.append(f"{case}: {row['median']:.2f} times PyTorch's, spread {row['spread']:.2f}, n {row['n']}")
    measured.conclude("passes of 8 batches, workers started for each", notes)


class Bare(TorchLoader[Any]):
    """What any loader does for a batch: torch's own `__next__`, and the sampler is asked."""

    def _get_iterator(self) -> Any:
        return _BareIterator(self)


class _BareIterator(_BaseDataLoaderIter):
    def _next_data(self) -> Any:
        return self._next_index()


def endless(loader: TorchLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def beside_bare(loader: TorchLoader[Any], bare: TorchLoader[Any], groups: int = 40, group: int = 64) -> list[float]:
    """CPU time a batch that `next()` takes beyond that of a bare loader, in µs; a few of each in turns. The loop
    computes for a millisecond in between, so that nobody waits."""

    def spent(batches: Iterator[Any]) -> float:
        total = 0.0
        for _ in range(group):
            start = time.thread_time()
            next(batches)
            total += time.thread_time() - start
            until = time.perf_counter() + 1e-3
            while time.perf_counter() < until:
                pass
        return total / group * 1e6

    both = endless(loader), endless(bare)
    for batches in both:
        spent(batches)
    return [spent(both[0]) - spent(both[1]) for _ in range(groups)]


def in_turns(
    measured: Measurements, theirs: TorchLoader[Any], ours: TorchLoader[Any], pairs: int = 160
) -> dict[str, Any]:
    """Two loaders, 250 batches of each in turns, so that a busy machine is busy for both: our time over PyTorch's."""
    for loader in (theirs, ours):
        for _ in range(4):  # our own has made up its mind by then
            list(loader)
    loaders = {"PyTorch, in the process": endless(theirs), "ours, auto": endless(ours)}
    ratios: dict[str, list[float]] = {"wall": [], "CPU": []}
    for number in range(pairs):
        took = {}
        for name in sorted(loaders, reverse=bool(number % 2)):
            wall, cpu = time.perf_counter(), time.thread_time()
            for _ in range(250):
                next(loaders[name])
            took[name] = {"wall": time.perf_counter() - wall, "CPU": time.thread_time() - cpu}
            measured.values.setdefault(name, []).append(took[name]["wall"] / 250 * 1e6)
        for clock, found in ratios.items():
            first, second = (took[name][clock] for name in loaders)
            found.append(second / first)
    return {clock: figure(found) for clock, found in ratios.items()}


PARTS: dict[str, Callable[[Measurements], None]] = {
    "bytes": bytes_into_gpu,
    "jpeg": jpeg,
    "controller": controller,
    "controller-gpu": lambda measured: controller(measured, step_s=0.04),
    "tiny": tiny,
    "starts": starts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--limit", type=float, default=1e9, metavar="SECONDS",
                        help="begin no measurement later than that, once there is one of each")  # fmt: skip
    options = parser.parse_args()
    PARTS[options.part](Measurements(options.part, options))


if __name__ == "__main__":
    main()
