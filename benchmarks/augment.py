"""What augmentation costs: Kornia, torchvision, CPU workers and `flatout.augment`, against the floor of the memory.

    python benchmarks/augment.py                               every row but the last two parts
    python benchmarks/augment.py --only segment --data DIR     a whole training, augmented by its workers and by the GPU
    python benchmarks/augment.py --only tiles                  other tiles for the gather, to choose again elsewhere

Every measured call takes another of several input sets in turn, so that nothing is found in the cache because it was
just there. "GPU time" is a captured graph, replayed: no host in it. "Call" is what a training loop sees: the wall time
of a call with its parameters drawn, in a row of calls. Kornia and torchvision start from the same uint8 and end with
normalized float32; ours ends with bfloat16. The floor is a copy within the GPU's memory that moves as many bytes.
DIR holds the data of `python -m workloads.segment.make --size full --out DIR`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.fixed_by_hand import Edit  # noqa: E402
from benchmarks.machine import describe, headline  # noqa: E402
from flatout.augment import Augment, Standard, Strong  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SETS = 4
COMPILE_LIMIT_S = 45
CASES = {
    "standard 32×3×512²": (Standard, 32, 512),
    "standard 256×3×224²": (Standard, 256, 224),
    "strong 32×3×512²": (Strong, 32, 512),
}
Call = Callable[[int], Any]  # of the number of an input set


@dataclass(frozen=True)
class Row:
    """A measured line of the table: milliseconds a batch; None where there is no figure, and the note says why."""

    case: str
    what: str
    median_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    n: int
    note: str = ""


def _row(case: str, what: str, times_ms: list[float], note: str = "") -> Row:
    ordered = sorted(times_ms)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return Row(case, what, statistics.median(ordered), low, high, len(ordered), note)


def _timed_graph(call: Call, repeats: int = 50) -> list[float]:
    """GPU milliseconds a call: all sets captured, replayed between two events."""
    for number in range(SETS):
        call(number)
    graphs, outputs, pool = [], [], torch.cuda.graph_pool_handle()
    for number in range(SETS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs.append(call(number))
        graphs.append(graph)
    times = []
    for _ in range(repeats + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for graph in graphs * 4:
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / (4 * SETS))
    return times[5:]


def _timed_calls(call: Call, repeats: int, calls: int) -> list[float]:
    """Wall milliseconds a call, in rows of calls that end with the GPU's work done."""
    for number in range(SETS):
        call(number)
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for number in range(calls):
            call(number % SETS)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / calls)
    return times


def _pictures(n: int, size: int, sets: int = SETS) -> list[Tensor]:
    """uint8 N×H×W×C on the GPU, as decoders give them: smooth, with noise."""
    made = []
    for number in range(sets):
        torch.manual_seed(number)
        coarse = torch.rand(n, 3, 17, 17, device="cuda")
        smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear") * 230
        made.append((smooth + torch.rand_like(smooth) * 25).to(torch.uint8).movedim(1, 3).contiguous())
    return made


def ours(case: str) -> Iterator[Row]:
    """`flatout.augment` and the floor."""
    preset, n, size = CASES[case]
    nhwc = _pictures(n, size)
    nchw = [images.movedim(3, 1).contiguous() for images in nhwc]
    indices = [torch.arange(number * n, (number + 1) * n, device="cuda") for number in range(SETS)]
    moved = nhwc[0].numel() * (1 + 2)  # uint8 in, bfloat16 out
    copies = [torch.zeros(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in range(SETS)]
    yield _row(
        case, "floor: device-to-device copy of as many bytes", _timed_graph(lambda k: copies[k][1].copy_(copies[k][0]))
    )
    for layout, images in (("NHWC", nhwc), ("NCHW", nchw)):
        for channels_last in (False, True):
            aug = preset(size=size, dtype=torch.bfloat16, channels_last=channels_last)
            epoch = itertools.count()
            out = "channels_last" if channels_last else "NCHW"
            times = _timed_graph(lambda k: aug(images[k], index=indices[k], epoch=1))  # noqa: B023
            yield _row(case, f"flatout, GPU time, {layout} → {out}", times)
            if not channels_last:
                call = lambda k: aug(images[k], index=indices[k], epoch=next(epoch))  # noqa: B023, E731
                yield _row(case, f"flatout, call, {layout} → {out}", _timed_calls(call, repeats=20, calls=200))


def _kornia(case: str) -> torch.nn.Module:
    import kornia.augmentation as K

    if CASES[case][0] is Standard:
        turn = [K.RandomRotation(15.0, p=1.0)]
        colour = [K.RandomBrightness((0.8, 1.2), p=1.0), K.RandomContrast((0.8, 1.2), p=1.0)]
    else:
        turn = [K.RandomAffine(30.0, (0.1, 0.1), (0.8, 1.2), 10.0, p=1.0)]
        colour = [K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0), K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=0.5)]
    normalize = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
    return torch.nn.Sequential(K.RandomHorizontalFlip(0.5), *turn, *colour, normalize).cuda()


def kornia(case: str, compiled: bool = False) -> Iterator[Row]:
    """Kornia as its users write it, and inside `torch.compile`."""
    _, n, size = CASES[case]
    images = [images.movedim(3, 1).contiguous() for images in _pictures(n, size)]
    aug: Any = _kornia(case)
    if compiled:
        aug = torch.compile(aug)
    times = _timed_calls(lambda k: aug(images[k].float() / 255), repeats=10, calls=10)
    yield _row(case, "Kornia, torch.compile" if compiled else "Kornia", times)


def kornia_compiled(case: str) -> Iterator[Row]:
    """In a process of its own, for compiling can take longer than anybody waits."""
    command = [sys.executable, __file__, "--only", "kornia_compiled_here", "--case", case, "--out", "-"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        rows = json.loads(done.stdout)["rows"] if done.returncode == 0 else []
        note = "" if rows else (done.stderr.strip().splitlines() or ["failed"])[-1][:80]
    except subprocess.TimeoutExpired:
        rows, note = [], f"not compiled after {COMPILE_LIMIT_S} s"
    yield from [Row(**row) for row in rows] or [Row(case, "Kornia, torch.compile", None, None, None, 0, note)]


def _torchvision(case: str) -> Any:
    from torchvision.transforms import v2

    bilinear = v2.InterpolationMode.BILINEAR
    if CASES[case][0] is Standard:
        middle = [v2.RandomRotation(15, interpolation=bilinear), v2.ColorJitter(0.2, 0.2)]
    else:
        turn = v2.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, interpolation=bilinear)
        blur = v2.RandomApply([v2.GaussianBlur(5, (0.1, 2.0))], p=0.5)
        middle = [turn, v2.ColorJitter(0.4, 0.4, 0.4, 0.1), blur]
    to_float = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([to_float, v2.RandomHorizontalFlip(), *middle, v2.Normalize(MEAN, STD)])


def torchvision(case: str) -> Iterator[Row]:
    """torchvision v2 on the GPU: one draw for the batch, and one a sample."""
    _, n, size = CASES[case]
    images = [images.movedim(3, 1).contiguous() for images in _pictures(n, size)]
    transform = _torchvision(case)
    yield _row(case, "torchvision, one draw a batch", _timed_calls(lambda k: transform(images[k]), 10, 10))
    one_each = lambda k: torch.stack([transform(image) for image in images[k]])  # noqa: E731
    yield _row(case, "torchvision, one draw a sample", _timed_calls(one_each, 5, 2))


class _Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, case: str, length: int) -> None:
        self.image = torch.randint(0, 256, (3, CASES[case][2], CASES[case][2]), dtype=torch.uint8)
        self.transform, self.length = _torchvision(case), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(self.image)


def cpu_workers(case: str) -> Iterator[Row]:
    """torchvision v2 in the workers of a DataLoader, where most trainings have it."""
    n = CASES[case][1]
    for workers in (4, 8, 16):
        batches = 2 * workers + 8
        loader = torch.utils.data.DataLoader(_Samples(case, n * batches), n, num_workers=workers)
        times, last = [], time.perf_counter()
        for number, _ in enumerate(loader):
            now = time.perf_counter()
            if number == workers:  # every worker has started and made a batch
                start = now
            if number > workers:
                times.append((now - last) * 1e3)
            last = now
        mean_ms = (last - start) * 1e3 / len(times)  # batches arrive in bunches: the mean is what training sees
        ordered = sorted(times)
        yield Row(case, f"CPU, {workers} workers", mean_ms, ordered[0], ordered[-1], len(times), "mean, min to max")


def host(case: str) -> Iterator[Row]:
    """How long the host is busy with one call when the GPU keeps up: a batch of two tiny pictures."""
    images, index = torch.zeros(2, 32, 32, 3, dtype=torch.uint8, device="cuda"), torch.arange(2, device="cuda")
    aug: Augment = CASES[case][0](dtype=torch.bfloat16)
    yield _row(case, "flatout, host time a call", _timed_calls(lambda _: aug(images, index=index, epoch=1), 20, 100))


def tiles(case: str) -> Iterator[Row]:
    """Other tiles for the gather than the one in the kernel."""
    from flatout.augment import kernel_launch

    preset, n, size = CASES[case]
    nhwc, index = _pictures(n, size), torch.arange(n, device="cuda")
    for layout, images in (("NHWC", nhwc), ("NCHW", [images.movedim(3, 1).contiguous() for images in nhwc])):
        sizes = itertools.product((32, 64), (8, 16, 32), (False, True), (2, 4, 8))
        for tile in itertools.starmap(kernel_launch.Tile, sizes):
            with mock.patch.object(kernel_launch, "GATHER", tile):
                aug = preset(size=size, dtype=torch.bfloat16)
                times = _timed_graph(lambda k: aug(images[k], index=index, epoch=1), repeats=10)  # noqa: B023
                yield _row(case, f"{layout}, {tile}", times)


# --- a whole training ------------------------------------------------------------------------------------------------

SEGMENT_S = 8.0
SEGMENT_EDITS = (
    Edit(
        "the same augmentation, of a whole batch where it is; only normalized when it is validation data",
        "train.py",
        old="""\
def to_device(batch, device, cfg):
    images, masks = batch
    images = images.to(device, non_blocking=True)
    masks = masks.to(device, non_blocking=True).long()
    if cfg.channels_last:
        images = images.to(memory_format=torch.channels_last)
    return images, masks
""",
        new="""\
@cache
def augmentation(amp, channels_last):
    dtype = torch.bfloat16 if amp else torch.float32
    return Standard(mean=(MEAN,), std=(STD,), mask_fill=IGNORE, dtype=dtype, channels_last=channels_last)


def to_device(batch, device, cfg, epoch=None):
    images, masks, index = (tensor.to(device, non_blocking=True) for tensor in batch)
    augment = augmentation(cfg.amp, cfg.channels_last).train(epoch is not None)
    images, masks = augment(images, masks, index=index, epoch=epoch or 0)
    return images, masks.long()
""",
    ),
    Edit(
        "bytes travel, as they were decoded",
        "train.py",
        old="""\
        if self.cfg is not None:
            image, mask = augment(image, mask, self.cfg)
        image = (np.array(image) / 255.0 - MEAN) / STD
        return torch.from_numpy(image).permute(2, 0, 1).float(), torch.from_numpy(np.array(mask))
""",
        new="""\
        return torch.from_numpy(np.array(image)), torch.from_numpy(np.array(mask)), index
""",
    ),
    Edit(
        "copied and augmented while the step before is computed",
        "train.py",
        old="""\
        for images, masks in islice(cycle(resident), len(loader)) if cfg.resident else loader:
            images, masks = to_device((images, masks), device, cfg)
""",
        new="""\
        for images, masks in feed.to_device(loader, device, convert=lambda b: to_device(b, device, cfg, epoch)):
""",
    ),
    Edit(
        "the loader that goes with it", "train.py", old="    loader = DataLoader(", new="    loader = feed.DataLoader("
    ),
    Edit(
        "what all this takes",
        "train.py",
        old="from torch.utils.data import DataLoader,",
        new="""\
from functools import cache
from flatout import feed
from flatout.augment import Standard
from torch.utils.data import DataLoader,""",
    ),
)


def segment(data: Path, device: str = "cuda", extra: Sequence[str] = ()) -> dict[str, Any]:
    """The workload as its author wrote it, with its augmentation moved to the GPU, and then with bf16 as well."""
    from benchmarks.workloads import copied, measure

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    flags = ["--data", str(data.resolve()), "--device", device, "--epochs", "1000000", *extra]
    half = ["--amp", "true", "--channels-last", "true"]
    with copied(()) as written, copied([("segment", edit) for edit in SEGMENT_EDITS]) as moved:
        return {
            "as written: 16 workers augment": measure(written, "segment", flags, SEGMENT_S),
            "flatout.augment on the GPU": measure(moved, "segment", flags, SEGMENT_S),
            "the same in bf16, channels_last": measure(moved, "segment", [*flags, *half], SEGMENT_S),
        }


def segment_batch(data: Path) -> Iterator[Row]:
    """What augmenting one batch of its pictures and masks takes: a core running the script's code, and the GPU."""
    import yaml

    from workloads.segment import train as script

    torch.set_num_threads(1)  # as in a worker
    settings = SimpleNamespace(**yaml.safe_load((ROOT / "workloads/segment/config.yaml").read_text()))
    names = [f"{number:06}" for number in range(settings.batch_size)]
    augmented = script.PhotoDataset(data, names, settings)
    with mock.patch.object(script, "read", functools.cache(script.read)):  # read and decoded before the clock starts
        pictures = [
            [torch.from_numpy(np.array(script.read(*place))) for place in _places(data, name)] for name in names
        ]
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for number in range(len(augmented)):
                augmented[number]
            times.append((time.perf_counter() - start) * 1e3)
    yield _row("segment", "the script's own augmentation, one core", times)
    images, masks = (torch.stack(parts).cuda() for parts in zip(*pictures, strict=True))
    sets = [(images.clone(), masks.clone()) for _ in range(SETS)]
    index = torch.arange(len(images), device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        aug = Standard(mean=(script.MEAN,), std=(script.STD,), mask_fill=script.IGNORE, dtype=dtype)
        times = _timed_graph(lambda k: aug(*sets[k], index=index, epoch=1))  # noqa: B023
        yield _row("segment", f"flatout, GPU time, images and masks, {dtype}".replace("torch.", ""), times)


def _places(data: Path, name: str) -> Iterator[tuple[Path, str]]:
    """A picture and its mask, as the script's `read` wants them."""
    yield data / "images" / f"{name}.jpg", "RGB"
    yield data / "masks" / f"{name}.png", "L"


# --- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure, print, write."""
    parts = {part.__name__: part for part in (ours, host, kornia, torchvision, cpu_workers, kornia_compiled, tiles)}
    parts["kornia_compiled_here"] = functools.partial(kornia, compiled=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*parts, "segment"])
    parser.add_argument("--case", choices=CASES, action="append", help="one case only")
    parser.add_argument("--data", type=Path, metavar="DIR", help="of the workload segment")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "augment.json"), help="'-' is stdout")
    options = parser.parse_args()
    if options.only == "segment" and options.data is None:
        parser.error("--only segment wants --data DIR")

    every_case, one_case = ("ours", "kornia", "torchvision"), ("host", "cpu_workers", "kornia_compiled")
    plan = [(name, case) for name in every_case for case in CASES] + [(name, next(iter(CASES))) for name in one_case]
    if options.only:
        plan = [(options.only, case) for case in CASES if options.only in parts]
    show = functools.partial(print, file=sys.stderr if options.out == "-" else sys.stdout, flush=True)
    machine = describe(("torch", "triton", "torchvision", "kornia", "pillow"))
    results: dict[str, Any] = {"machine": machine, "rows": []}
    show(f"{headline(machine)}; ms a batch, {SETS} input sets in turn")

    def take(rows: Iterator[Row]) -> None:
        for row in rows:
            results["rows"].append(asdict(row))
            took = "no figure" if row.n == 0 else f"{row.median_ms:.4f} ({row.p10_ms:.4f} to {row.p90_ms:.4f})"
            show(f"{row.case}: {row.what}: {took}, n={row.n} {row.note}")

    for name, case in plan:
        if not options.case or case in options.case:
            try:
                take(parts[name](case))
            except Exception as error:  # one library that does not run must not cost the rest of the table
                if options.only:
                    raise
                show(f"{case}: {name}: {type(error).__name__}: {error}")
    if options.data:
        from benchmarks.workloads import table

        results["segment"] = segment(options.data)
        show(table("segment", {"variants": results["segment"], "ratios": {}}))
        take(segment_batch(options.data))
    text = json.dumps(results, ensure_ascii=False, indent=1)
    if options.out == "-":
        print(text)
    else:
        Path(options.out).write_text(text + "\n")
        show(f"written: {options.out}")


if __name__ == "__main__":
    main()
