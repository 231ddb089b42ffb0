"""What a report of a very long, and of a very wide, run takes: time, memory, and the size of the page.

    python benchmarks/report.py [--steps 1000000] [--ranks 1024] [--out FILE]     about three minutes

Long: a trace of a million steps, thinned as the recorder thins it, beside a day of hardware samples. Wide: 1,024 ranks
of 400 steps each. Both go through `flatout report --html --json` in a process of its own; the goal is 10 s and 1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, figure, headline  # noqa: E402
from flatout.model.records import LoaderFacts, encode  # noqa: E402
from flatout.trace import (  # noqa: E402
    DiskSample,
    Facts,
    FactsRecord,
    GpuSample,
    HostSample,
    ProcessSample,
    RunInfo,
    Sample,
    Span,
    Step,
    TraceWriter,
)
from flatout.trace.downsample import SampleDownsampler, StepDownsampler  # noqa: E402

REPEATS = 3
MOST_S = 10.0
MOST_BYTES = 1_000_000_000
MOST_PAGE_BYTES = 500_000
LOADER = LoaderFacts(dataset="Noise", length=1_000_000, batch_size=64, num_workers=8)
FACTS = Facts(gpu="made up", loaders=(LOADER,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1_024)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    machine = describe(("numpy",))
    print(headline(machine))
    results: dict[str, Any] = {"benchmark": "report", "machine": machine, "load_average": os.getloadavg()[0]}
    print(f"load average {results['load_average']:.1f}: above the number of cores, times are those of a busy machine")
    with tempfile.TemporaryDirectory() as scratch:
        long, wide = Path(scratch, "long"), Path(scratch, "wide")
        write_long(long, options.steps)
        results["long"] = {"steps": options.steps, **measure(long)}
        print(said(f"{options.steps:,} steps", results["long"]))
        write_wide(wide, options.ranks)
        results["wide"] = {"ranks": options.ranks, **measure(wide)}
        print(said(f"{options.ranks:,} ranks", results["wide"]))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    passed = all(within(results[part]) for part in ("long", "wide"))
    print(f"{'✓' if passed else '✗'} each below {MOST_S:g} s, {MOST_BYTES / 1e9:g} GB and {MOST_PAGE_BYTES / 1e6:g} MB")
    sys.exit(0 if passed else 1)


def measure(folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of `flatout report`, a few times over."""
    page, data = folder.with_suffix(".html"), folder.with_suffix(".json")
    command = [sys.executable, "-m", "flatout", "report", str(folder), "--html", str(page), "--json", str(data)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    seconds, cpu, peaks = [], [], []
    for _ in range(REPEATS):
        began = time.monotonic()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        seconds.append(time.monotonic() - began)
        cpu.append(usage.ru_utime + usage.ru_stime)
        peaks.append(usage.ru_maxrss * 1024)
    return {
        "trace_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "seconds": figure(seconds, 2),
        "cpu_seconds": figure(cpu, 2),
        "peak_bytes": max(peaks),
        "page_bytes": page.stat().st_size,
    }


def said(what: str, result: dict[str, Any]) -> str:
    seconds, cpu_s = result["seconds"], result["cpu_seconds"]["median"]
    return (
        f"{what}: trace {result['trace_bytes'] / 1e6:.0f} MB, report in {seconds['median']} s "
        f"(n={seconds['n']}, spread {seconds['spread']}; {cpu_s} s of CPU), "
        f"{result['peak_bytes'] / 1e6:.0f} MB of memory, page {result['page_bytes'] / 1e6:.1f} MB"
    )


def within(result: dict[str, Any]) -> bool:
    """Whether the goal is met."""
    small = result["peak_bytes"] < MOST_BYTES and result["page_bytes"] < MOST_PAGE_BYTES
    return small and result["seconds"]["median"] < MOST_S


def steps_of(count: int, seed: int = 0) -> Iterator[Step]:
    """Steps of about 86 ms, a day of them in a million, one in fifty slow, with an evaluation now and then."""
    draw = random.Random(seed)
    names = (("data", 0.4), ("copy", 0.02), ("forward", 0.2), ("loss", 0.01), ("backward", 0.3), ("optimizer", 0.07))
    at_s = 100.0
    for index in range(count):
        wall_ms = 86.0 * draw.lognormvariate(0, 0.1) * (4 if draw.random() < 0.02 else 1)
        spans, at_ms = [], 0.0
        for name, share in names:
            length = wall_ms * share
            gpu = {"gpu_idle_ms" if name == "data" else "gpu_busy_ms": length} if index % 10 == 0 else {}
            spans.append(Span(name=name, start_ms=at_ms, host_ms=length, **gpu))
            at_ms += length
        if index % 5_000 == 4_999:
            spans.append(Span(name="evaluation", start_ms=at_ms, host_ms=8_000.0))
            wall_ms += 8_000.0
        loss = 3.0 / (1 + index / 1000) if index % 10 == 0 else None
        yield Step(index=index, start_s=at_s, wall_ms=wall_ms, spans=tuple(spans), samples=64, loss=loss)
        at_s += wall_ms / 1e3


def samples_of(seconds: int) -> Iterator[Sample]:
    """One sample a second of a machine with 16 cores, a GPU and eight workers."""
    draw = random.Random(1)
    for second in range(seconds):
        workers = tuple(ProcessSample(pid=n, role="worker", name="python", cpu_pct=90.0) for n in range(8))
        host = HostSample(
            cpu_pct=draw.uniform(40, 60),
            cores_pct=tuple(draw.uniform(0, 100) for _ in range(16)),
            disks=(DiskSample(name="vda", read_bytes_s=2e8, write_bytes_s=1e6),),
        )
        gpu = GpuSample(index=0, uuid="GPU-0", name="made up", sm_active_pct=draw.uniform(30, 50), power_w=400.0)
        yield Sample(time_s=100.0 + second, interval_s=1.0, host=host, gpus=(gpu,), processes=workers)


def write_long(folder: Path, count: int) -> None:
    """As TraceWriter does, but without its clock: a million steps would not fit into its queue at once."""
    folder.mkdir()
    steps, samples = StepDownsampler(), SampleDownsampler()
    info = RunInfo(name="long", host="box", rank=0, started_s=100.0)
    with (folder / "rank-00000.jsonl").open("w", encoding="ascii") as file:
        file.write(json.dumps(encode(info)) + "\n")
        for step in steps_of(count):
            for record in steps.push(step):
                steps.wrote(record, file.write(json.dumps(encode(record), separators=(",", ":")) + "\n"))
        for record in steps.flush():
            file.write(json.dumps(encode(record), separators=(",", ":")) + "\n")
        file.write(json.dumps(encode(FactsRecord(time_s=1.0, values=FACTS))) + "\n")
    with (folder / "hardware-box.jsonl").open("w", encoding="ascii") as file:
        file.write(json.dumps(encode(RunInfo(name="long", host="box", started_s=100.0))) + "\n")
        for sample in samples_of(round(count * 0.0864)):
            for kept in samples.push(sample):
                samples.wrote(file.write(json.dumps(encode(kept), separators=(",", ":")) + "\n"))
        for kept in samples.flush():
            file.write(json.dumps(encode(kept), separators=(",", ":")) + "\n")


def write_wide(folder: Path, ranks: int) -> None:
    """One rank's files, over and over under another number."""
    with TraceWriter(folder, RunInfo(name="wide", host="box", rank=0, world_size=ranks)) as writer:
        for step in steps_of(400):
            writer.write(step)
        writer.write(FactsRecord(time_s=1.0, values=FACTS))
    for name in ("rank-00000.jsonl", "rank-00000.summary.json"):
        text = (folder / name).read_text(encoding="ascii")
        for rank in range(1, ranks):
            copy = folder / name.replace("00000", f"{rank:05d}")
            copy.write_text(text.replace('"rank":0,', f'"rank":{rank},', 1), encoding="ascii")


if __name__ == "__main__":
    main()
