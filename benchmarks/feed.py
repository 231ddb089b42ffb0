"""The feed against the stock loader, and against what the machine can do at all.

    python benchmarks/feed.py                        everything, one part after the other
    python benchmarks/feed.py --only bytes           50 MB uint8 batches into the GPU, by number of workers
    python benchmarks/feed.py --only jpeg            JPEG → crop 224 → flip → normalized on the GPU
    python benchmarks/feed.py --only controller      from 1, 4, 16 and 40 declared workers, where loading is the limit
    python benchmarks/feed.py --only controller-gpu  the same where the consumer is the limit
    python benchmarks/feed.py --only tiny            a dataset in memory with nothing to gain

Measurements of one part are taken in a shuffled order, several times each; a row is the median and its spread. Each
part ends with its table and writes benchmarks/results/feed-PART.json. DALI is not measured here: its line repeats the
figure that was taken on an H200 with 16 cores, and says so.
"""

from __future__ import annotations

import argparse
import io
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
from torch.utils.data import DataLoader as Stock
from torch.utils.data import Dataset, TensorDataset

from benchmarks.machine import describe, figure, headline
from flatout.feed import DataLoader, feed_of, to_device

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CORES = len(os.sched_getaffinity(0))
DALI_IMAGES_S = 8800.0
SETTLE_S = 12.0
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
        return torch.from_numpy(photo(self.files[index % len(self.files)])), index % 1000


def photo(file: Path) -> np.ndarray[Any, Any]:
    image = decode(file.read_bytes())
    top, left = (int(torch.randint(limit - 224 + 1, ())) for limit in image.shape[:2])
    crop = image[top : top + 224, left : left + 224]
    if torch.rand(()) < 0.5:
        crop = crop[:, ::-1]
    return np.ascontiguousarray(crop.transpose(2, 0, 1))


try:
    import simplejpeg

    DECODER = "simplejpeg"

    def decode(data: bytes) -> np.ndarray[Any, Any]:
        return simplejpeg.decode_jpeg(data, fastdct=False, fastupsample=False)  # type: ignore[no-any-return]

except ImportError:
    DECODER = "PIL"

    def decode(data: bytes) -> np.ndarray[Any, Any]:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


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


def rate(batches: Iterator[Any], count: Callable[[Any], float], seconds: float, warm_up_s: float = 2.0) -> float:
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


def stock_to_gpu(loader: Stock[Any], after: Callable[[Any], Any] = lambda batch: batch) -> Iterator[Any]:
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
    """Named measurements, each repeated, all in one shuffled order."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._ways: dict[str, Callable[[], float]] = {}
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, measure: Callable[[], float]) -> None:
        self._ways[name] = measure

    def run(self, repeats: int, seed: int = 0) -> None:
        order = [name for name in self._ways for _ in range(repeats)]
        random.Random(seed).shuffle(order)
        for place, name in enumerate(order, 1):
            value = self._ways[name]()
            self.values.setdefault(name, []).append(value)
            print(f"  {place:3}/{len(order)}  {name:34} {value:12.1f} {self.unit}", flush=True)

    def median(self, name: str) -> float:
        return float(figure(self.values[name])["median"])


def table(title: str, measured: Measurements, notes: list[str]) -> dict[str, Any]:
    print(f"\n{title}\n{'':34} {'median':>10} {'spread':>9}   n   {measured.unit}")
    rows = {}
    for name in sorted(measured.values):
        rows[name] = figure(measured.values[name])
        print(f"{name:34} {rows[name]['median']:10.1f} {rows[name]['spread']:9.1f} {rows[name]['n']:3}")
    for note in notes:
        print(f"  {note}")
    return {"unit": measured.unit, "rows": rows, "notes": notes}


# --- the parts --------------------------------------------------------------------------------------------------------


def bytes_into_gpu(seconds: float) -> dict[str, Any]:
    dataset, batch_size = Frames(10_000_000), 64
    measured = Measurements("GB/s")
    gigabytes = batch_size * 3 * 512 * 512 / 1e9

    def ours(workers: int) -> float:
        loader = DataLoader(dataset, batch_size, num_workers=workers, pin_memory=DEVICE == "cuda")
        return rate(held(loader, workers, to_device(loader, DEVICE)), lambda _: gigabytes, seconds)

    def stock(workers: int) -> float:
        loader = Stock(dataset, batch_size, num_workers=workers, pin_memory=DEVICE == "cuda")
        return rate(stock_to_gpu(loader), lambda _: gigabytes, seconds)

    for workers in sorted({min(CORES, workers) for workers in (2, 4, 8, 14)}):
        measured.add(f"ours, {workers:2} workers", lambda workers=workers: ours(workers))
        measured.add(f"stock, {workers:2} workers", lambda workers=workers: stock(workers))
    measured.run(repeats=3)
    notes = []
    for workers in sorted({min(CORES, workers) for workers in (4, 8, 14)}):
        times = measured.median(f"ours, {workers:2} workers") / measured.median(f"stock, {workers:2} workers")
        notes.append(f"{workers} workers: {times:.1f} times stock (wanted: 5)")
    notes.append("wanted: 40 GB/s at 14 workers")
    return table(f"50 MB uint8 batches to {DEVICE}", measured, notes)


def jpeg(seconds: float) -> dict[str, Any]:
    measured = Measurements("images/s")
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder), 2000)
        dataset, batch_size = Photos(Path(folder), 100_000_000), 256

        def ours() -> float:
            loader = DataLoader(dataset, batch_size, pin_memory=DEVICE == "cuda")
            on_device = to_device(loader, DEVICE, convert=normalized)
            # Let it settle: that is how it is used.
            return rate(iter(on_device), lambda batch: len(batch[1]), seconds, warm_up_s=SETTLE_S)

        def stock(workers: int) -> float:
            loader = Stock(dataset, batch_size, num_workers=workers, pin_memory=DEVICE == "cuda")
            return rate(stock_to_gpu(loader, normalized), lambda batch: len(batch[1]), seconds)

        measured.add("ours, auto", ours)
        for workers in sorted({max(1, CORES * share // 8) for share in (6, 8, 12)}):
            measured.add(f"stock, {workers:2} workers", lambda workers=workers: stock(workers))
        measured.add(f"decoders alone, {CORES} processes", lambda: decoders_alone(Path(folder), seconds))
        measured.run(repeats=3)
    best = max(measured.median(name) for name in measured.values if name.startswith("stock"))
    ceiling = measured.median(f"decoders alone, {CORES} processes")
    mine = measured.median("ours, auto")
    notes = [
        f"decoder: {DECODER}",
        f"ours / decoders alone: {mine / ceiling:.3f} (wanted: 0.9)",
        f"ours / stock at its best: {mine / best:.2f} (wanted: above 1)",
        f"ours / DALI's CPU pipeline: {mine / DALI_IMAGES_S:.2f} (its {DALI_IMAGES_S:.0f} are a recorded figure)",
    ]
    return table(f"JPEG 500×375 → crop 224 → flip → normalized on {DEVICE}", measured, notes)


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


STARTS = {1: 32.0, 4: 22.0, 16: 14.0, 40: 14.0}  # declared workers: seconds until the figure is taken


def controller(seconds: float, step_s: float = 0.0) -> dict[str, Any]:
    """Where each start ends up, against the best number held; with `step_s` the consumer takes that long a batch."""
    measured = Measurements("images/s")
    ends: dict[int, tuple[int, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder), 1000)
        dataset, batch_size = Photos(Path(folder), 100_000_000), 128

        def consumed(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                if step_s:
                    time.sleep(step_s)
                yield batch

        def fixed(workers: int) -> float:
            loader = DataLoader(dataset, batch_size, num_workers=workers)
            batches = consumed(held(loader, workers, loader))
            return rate(batches, lambda batch: len(batch[1]), seconds)

        def from_start(declared: int) -> float:
            loader = DataLoader(dataset, batch_size, num_workers=declared)
            batches = consumed(iter(loader))
            value = rate(batches, lambda batch: len(batch[1]), seconds, warm_up_s=STARTS[declared])
            feed = feed_of(loader)
            assert feed is not None
            ends[declared] = (feed.workers, feed.why)
            return value

        grid = sorted({max(1, CORES * share // 16) for share in (1, 2, 4, 8, 12, 14, 16, 20)})
        for workers in grid:
            measured.add(f"held at {workers:2}", lambda workers=workers: fixed(workers))
        for declared in STARTS:
            measured.add(f"from {declared:2} declared", lambda declared=declared: from_start(declared))
        measured.run(repeats=1)
    best = max(measured.median(f"held at {workers:2}") for workers in grid)
    fewest = next(workers for workers in grid if measured.median(f"held at {workers:2}") >= 0.97 * best)
    notes = [f"best held: {best:.0f} images/s; the fewest that reach 97% of it: {fewest}"]
    for declared, (workers, why) in sorted(ends.items()):
        share = measured.median(f"from {declared:2} declared") / best
        notes.append(f"from {declared}: {share:.3f} of the best (wanted: 0.97), {workers} workers: {why}")
    limit = f"a consumer of {step_s * 1000:.0f} ms a batch" if step_s else "loading as fast as it goes"
    return table(f"controller, {limit}", measured, notes)


def tiny(seconds: float) -> dict[str, Any]:
    dataset = TensorDataset(torch.randn(40_000, 16), torch.randint(10, (40_000,)))
    measured = Measurements("µs/batch")
    cpu: dict[str, list[float]] = {}

    def measure(name: str, make: Callable[[], Stock[Any]]) -> None:
        def passes() -> float:
            loader = make()
            list(loader)  # the first pass starts workers, in either loader
            wall, spent, count = time.perf_counter(), time.process_time(), 0
            for _ in range(3):
                for _ in loader:
                    count += 1
            cpu.setdefault(name, []).append((time.process_time() - spent) / count * 1e6)
            return (time.perf_counter() - wall) / count * 1e6

        measured.add(name, passes)

    for workers in (1, 2):
        measure(f"stock, {workers} workers, persistent", lambda workers=workers: Stock(
            dataset, 64, shuffle=True, num_workers=workers, persistent_workers=True))  # fmt: skip
        measure(f"ours, {workers} workers", lambda workers=workers: DataLoader(
            dataset, 64, shuffle=True, num_workers=workers))  # fmt: skip
    measured.run(repeats=5)
    in_process, auto = Stock(dataset, 64, shuffle=True), DataLoader(dataset, 64, shuffle=True)
    ratios = in_pairs(measured, {"stock, in the process": in_process, "ours, auto": auto}, pairs=40)
    notes = [f"{name}: {figure(values)['median']:.0f} µs of the parent's CPU a batch" for name, values in cpu.items()]
    for workers in (1, 2):
        times = measured.median(f"ours, {workers} workers") / measured.median(f"stock, {workers} workers, persistent")
        notes.append(f"{workers} declared: {times:.3f} times stock's time (wanted: at most 1.02)")
    times, feed = figure(ratios), feed_of(auto)
    assert feed is not None
    notes += [
        f"auto: {times['median']:.3f} times the time of stock without workers, pass by pass, "
        f"spread {times['spread']:.3f} (wanted: at most 1.02)",
        f"auto has {feed.workers} workers: {feed.why}",
    ]
    return table("tiny: 40,000 rows in memory, batches of 64", measured, notes)


def in_pairs(measured: Measurements, loaders: dict[str, Stock[Any]], pairs: int) -> list[float]:
    """Two loaders in turns, so that a busy machine is busy for both: the second's time over the first's."""
    for loader in loaders.values():
        for _ in range(4):  # our own has made up its mind by then
            list(loader)
    ratios = []
    for number in range(pairs):
        took = {}
        for name in sorted(loaders, reverse=bool(number % 2)):
            start = time.perf_counter()
            count = sum(1 for _ in loaders[name])
            took[name] = (time.perf_counter() - start) / count * 1e6
            measured.values.setdefault(name, []).append(took[name])
        first, second = loaders
        ratios.append(took[second] / took[first])
    return ratios


PARTS: dict[str, Callable[[float], dict[str, Any]]] = {
    "bytes": bytes_into_gpu,
    "jpeg": jpeg,
    "controller": controller,
    "controller-gpu": lambda seconds: controller(seconds, step_s=0.04),
    "tiny": tiny,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))} (there are {', '.join(PARTS)})")
    machine = describe()
    print(headline(machine))
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.only.split(","):
        print(f"\n{part}", flush=True)
        result = PARTS[part](options.seconds)
        text = json.dumps({"machine": machine, "part": part, **result}, indent=2, ensure_ascii=False)
        (options.out / f"feed-{part}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
