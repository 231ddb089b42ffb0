"""What augmentation costs: Kornia, torchvision, CPU workers and `flatout.augment`, against the floor of the memory.

    python benchmarks/augment.py                  every row, a table and benchmarks/results/augment.json
    python benchmarks/augment.py --variants       tiles, patches and ways to read the source, tried side by side

Every measured call takes another of several input sets in turn, so that nothing is found in the cache because it was
just there. "GPU time" is a captured graph, replayed: no host in it. "Call" is what a training loop sees: the wall time
of a call with its parameters drawn, in a row of calls. Kornia and torchvision start from the same uint8 and end with
normalized float32; ours ends with bfloat16. The floor is one elementwise kernel that reads the bytes and writes them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.augment import Augment, Standard, Strong

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
    """A measured line of the table: milliseconds a batch."""

    case: str
    what: str
    median_ms: float
    p10_ms: float
    p90_ms: float
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
    outputs = [torch.empty(n, 3, size, size, dtype=torch.bfloat16, device="cuda") for _ in range(SETS)]
    yield _row(case, "floor: bytes in and out once", _timed_graph(lambda k: outputs[k].copy_(nchw[k])))
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
        rows = json.loads(done.stdout.splitlines()[-1])["rows"] if done.returncode == 0 else []
        note = "" if rows else (done.stderr.strip().splitlines() or ["failed"])[-1][:80]
    except subprocess.TimeoutExpired:
        rows, note = [], f"not compiled after {COMPILE_LIMIT_S} s"
    yield from [Row(**row) for row in rows] or [Row(case, "Kornia, torch.compile", *[float("nan")] * 3, 0, note)]


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


# --- variants --------------------------------------------------------------------------------------------------------


def _variants() -> list[tuple[str, dict[str, Any]]]:
    """Names and what to set in `flatout.augment.kernel`."""
    from flatout.augment.kernel import GATHER, STREAM, Tile

    made: dict[str, dict[str, Any]] = {}
    patches = [(32, 1), (16, 2), (8, 4)]
    tiles = [(32, 16, 4), (32, 32, 4), (32, 32, 8), (64, 32, 4), (64, 32, 8), (32, 8, 2)]
    for keep, (pw, ph), (w, h, warps), wide in itertools.product((True, False), patches, tiles, (False, True)):
        if (wide or not keep) and (w, h, warps) not in ((32, 32, 4), (64, 32, 8)):
            continue
        name = f"{'keep' if keep else 'again'} tile {w}×{h} patch {pw}×{ph} warps {warps}{' wide' if wide else ''}"
        made[name] = {"KEEP": keep, "GATHER": Tile(w, h, pw, ph, wide, True, warps)}
    made["keep, bytes converted"] = {"KEEP": True, "GATHER": GATHER._replace(bits=False)}
    for w, h, warps in ((32, 16, 4), (32, 32, 8), (64, 32, 4), (128, 16, 4), (256, 4, 4), (512, 2, 4), (512, 4, 8)):
        stream = STREAM._replace(width=w, height=h, patch_width=w, warps=warps)
        made[f"keep, stream {w}×{h} warps {warps}"] = {"KEEP": True, "STREAM": stream}
    return list(made.items())


@contextlib.contextmanager
def _set(module: Any, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _ways(settings: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    yield "NHWC words", settings, True
    yield "NHWC bytes", {**settings, "in_words": lambda images: False}, True
    yield "NCHW bytes", settings, False


def _compile_one(number: int, case: str) -> None:
    """Leave a variant's kernels in Triton's cache on disk."""
    from flatout.augment import kernel

    preset, _, size = CASES[case]
    nhwc = torch.zeros(16, size, size, 3, dtype=torch.uint8, device="cuda")
    for _, settings, last in _ways(_variants()[number][1]):
        with _set(kernel, settings):
            images = nhwc if last else nhwc.movedim(3, 1).contiguous()
            preset(size=size, dtype=torch.bfloat16)(images, index=torch.arange(16), epoch=1)
    torch.cuda.synchronize()


def variants(case: str) -> Iterator[Row]:
    """All variants of the kernel, compiled side by side first."""
    from flatout.augment import kernel

    preset, n, size = CASES[case]
    names = _variants()
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_one, range(len(names)), [case] * len(names)))
    nhwc = _pictures(n, size)
    nchw = [images.movedim(3, 1).contiguous() for images in nhwc]
    index = torch.arange(n, device="cuda")
    for name, chosen in names:
        for way, settings, last in _ways(chosen):
            with _set(kernel, settings):
                images = nhwc if last else nchw
                aug = preset(size=size, dtype=torch.bfloat16)
                times = _timed_graph(lambda k: aug(images[k], index=index, epoch=1), repeats=10)  # noqa: B023
                yield _row(case, f"{way}: {name}", times)


def kernels(case: str) -> Iterator[Row]:
    """Each launch of one call, by the profiler."""
    preset, n, size = CASES[case]
    index = torch.arange(n, device="cuda")
    nhwc = _pictures(n, size)
    for layout, images in (("NHWC", nhwc), ("NCHW", [images.movedim(3, 1).contiguous() for images in nhwc])):
        aug: Augment = preset(size=size, dtype=torch.bfloat16)
        for number in range(SETS):
            aug(images[number], index=index, epoch=1)
        torch.cuda.synchronize()
        calls = 5 * SETS
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for number in range(calls):
                aug(images[number % SETS], index=index, epoch=1)
            torch.cuda.synchronize()
        launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        launched = sorted((e for e in launched if "kernel" in e.name), key=lambda e: e.time_range.start)
        each = len(launched) // calls
        for place in range(each):
            times = [event.time_range.elapsed_us() / 1e3 for event in launched[place::each]]
            yield _row(case, f"{layout}: launch {place}, {launched[place].name}", times)


def host(case: str) -> Iterator[Row]:
    """How long the host is busy with one call when the GPU keeps up: a batch of two tiny pictures."""
    images, index = torch.zeros(2, 32, 32, 3, dtype=torch.uint8, device="cuda"), torch.arange(2, device="cuda")
    aug: Augment = CASES[case][0](dtype=torch.bfloat16)
    yield _row(case, "flatout, host time a call", _timed_calls(lambda _: aug(images, index=index, epoch=1), 20, 100))


# --- the table -------------------------------------------------------------------------------------------------------


def _machine() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpu_threads": str(torch.get_num_threads()),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="try ways to launch the kernel instead")
    parser.add_argument("--only", help="one of ours, kornia, kornia_compiled, torchvision, cpu_workers, kernels, host")
    parser.add_argument("--case", choices=CASES, action="append", help="one case only")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "augment.json"), help="'-' is stdout")
    options = parser.parse_args()
    torch.cuda.init()

    parts: list[tuple[Callable[[str], Iterator[Row]], str]] = []
    standard, smaller, strong = CASES
    if options.variants:
        parts = [(kernels, standard), (host, standard), (variants, standard), (kernels, smaller), (kernels, strong)]
    else:
        everything = [(ours, case) for case in CASES] + [(host, standard)]
        everything += [(part, case) for case in CASES for part in (kornia, torchvision)]
        parts = [*everything, (cpu_workers, standard), (kornia_compiled, standard)]
    if options.only:
        functions = {f.__name__: f for f in (ours, kornia, kornia_compiled, torchvision, cpu_workers, kernels, host)}
        functions["kornia_compiled_here"] = lambda case: kornia(case, compiled=True)
        parts = [(functions[options.only], case) for case in CASES]
    parts = [(part, case) for part, case in parts if not options.case or case in options.case]

    machine, rows, to_stdout = _machine(), [], options.out == "-"
    show = (lambda *_, **__: None) if to_stdout else print
    show(", ".join(f"{key} {value}" for key, value in machine.items()), f"; ms a batch, {SETS} input sets in turn")
    for part, case in parts:
        try:
            for row in part(case):
                rows.append(row)
                spread = f"({row.p10_ms:.4f} to {row.p90_ms:.4f}, n={row.n})"
                if part is variants:  # many lines: keep them short
                    show(f"{row.median_ms:.4f} {row.what}", flush=True)
                else:
                    show(f"{row.median_ms:9.4f}  {row.case}: {row.what} {spread} {row.note}", flush=True)
        except Exception as error:  # one library that does not run must not cost the rest of the table
            show(f"{case:22} {part.__name__}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if to_stdout:
                raise
    text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, ensure_ascii=False)
    if to_stdout:
        print(text)
    else:
        path = Path(options.out).with_suffix(".variants.json" if options.variants else ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        print(f"written: {path.name}")


if __name__ == "__main__":
    main()
