"""`make demo`: flatout fixes a training that waits for slow storage. No GPU needed; below 90 seconds on two cores.

    python -m benchmarks.demo
    python -m benchmarks.demo --measure 10 --out FILE    ten times, beside two processes that keep the cores busy

The latency of the storage is made by the script that is fixed (demo_train.py): each file takes 9 ms to arrive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from flatout.launch import sandbox

ROOT = Path(__file__).resolve().parents[1]
FILES, PIXELS, CLASSES, LATENCY_MS = 2000, 1024, 8, 9
# 120 steps a trial: about nine seconds of storage latency, and long enough for the loader to choose its workers.
OPTIONS = ("--budget", "82s", "--steps", "120", "--html", "fix.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="N", help="run it N times beside two busy processes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --measure: the figures as JSON")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.out)
        return
    folder = demo()
    print(f"\nThe page with before and after:  {folder / 'fix.html'}")
    print("Next, on a training of yours:    .venv/bin/flatout fix -- python train.py")
    print(f"(Delete {folder} when you have seen it.)")


def demo(*, quiet: bool = False) -> Path:
    """Make the data and fix the training; the folder that holds page, plan and result."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-demo-"))
    make_data(folder / "data")
    command = ["python", str(ROOT / "benchmarks" / "demo_train.py"), "--data", str(folder / "data")]
    options = list(OPTIONS)
    if sandbox.why_no_overlay(command, folder):
        options.insert(0, "--unprotected")  # a script of ours, which writes nothing
    if quiet:
        options += ["--json", "fix.json"]
    fix = [*("fix", *options, "--"), *command]
    print(f"A training reads {FILES:,} small files from slow storage: {LATENCY_MS} ms each, and the demo itself makes")
    print("that latency. flatout finds out why the training is slow, tries a fix and proves that training is the same:")
    print(f"\n$ flatout {' '.join(fix)}\n", flush=True)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",  # the network is tiny
    }
    output = subprocess.DEVNULL if quiet else None
    ended = subprocess.run(
        [sys.executable, "-m", "flatout", *fix], cwd=folder, env=environment, stdout=output, stderr=output, check=False
    )
    if ended.returncode:
        sys.exit("the demo did not come to its end")
    return folder


def make_data(folder: Path) -> None:
    """Files of noise, a little brighter for each class."""
    folder.mkdir()
    noise = random.Random(0)
    for index in range(FILES):
        label = index % CLASSES
        pixels = bytearray(noise.randbytes(PIXELS))
        pixels[:: CLASSES - label] = bytes(255 for _ in pixels[:: CLASSES - label])
        (folder / f"{index:05d}-{label}.bin").write_bytes(pixels)


def measure(runs: int, out: Path | None) -> None:
    """What the demo shows on busy cores: gain, proof and time of each run."""
    results = []
    with busy_cores(2):
        for _ in range(runs):
            start_s = time.monotonic()
            folder = demo(quiet=True)
            result = json.loads((folder / "fix.json").read_text())
            results.append({"seconds": round(time.monotonic() - start_s, 1), **outcome(result)})
            print(results[-1], flush=True)
            shutil.rmtree(folder)
    gains = [result["gain"] for result in results]
    seconds = [result["seconds"] for result in results]
    summary = {
        "n": runs,
        "gain_median": round(statistics.median(gains), 2),
        "gain_lowest": min(gains),
        "gain_highest": max(gains),
        "at_least_3x": sum(gain >= 3 for gain in gains),
        "identical": sum(result["proof"] == "identical" for result in results),
        "seconds_median": statistics.median(seconds),
        "seconds_longest": max(seconds),
    }
    print(json.dumps(summary, indent=2))
    if out is not None:
        figures = {"machine": describe(), "load_average": os.getloadavg(), "summary": summary, "runs": results}
        out.write_text(json.dumps(figures, indent=2) + "\n")


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """The gain of a fix, and the safety class that was proven for all that it kept."""
    kept = {change["safety"] for change in result["kept"]}
    gain = result["gain"] or {"value": 1.0, "low": 1.0, "high": 1.0}
    figures = {name: round(gain[name], 2) for name in ("value", "low", "high")}
    return {"gain": figures["value"], "low": figures["low"], "high": figures["high"], "proof": ", ".join(sorted(kept))}


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Processes that compute, one for each core to keep busy."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
