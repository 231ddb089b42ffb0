"""Whether `flatout train` learns what the plain script learns: the validation metric of both, seed by seed.

    python benchmarks/quality.py NAME… --data DIR [--size small] [--epochs N] [--seeds 3] [--device cuda] [--out FILE]

Each workload is trained by its script as it is and by the engine with workloads/after/NAME.yaml, over the same data and
the same number of epochs, once a seed; the seeds of one side run at the same time, for nobody times them. The engine
passes when the means differ by no more than the seeds of either side do among themselves.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402
from benchmarks.workloads import make_data  # noqa: E402

# What the script prints at the end of an epoch, and the column of the engine's validation.csv that is the same.
METRICS = {
    "gray": (r"val accuracy ([\d.]+)", "accuracy"),
    "segment": (r"val IoU ([\d.]+)", "iou"),
    "captcha": (r"val error ([\d.]+)", "error_px"),
    "video": (r"val accuracy ([\d.]+)", "accuracy"),
    "stock": (r"val rank correlation (-?[\d.]+)", "correlation"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=METRICS, metavar="NAME")
    parser.add_argument("--data", type=Path, required=True, help="folder for the data; made there when it is missing")
    parser.add_argument("--size", default="small")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    machine = describe()
    print(headline(machine))
    results: dict[str, Any] = {"benchmark": "quality", "machine": machine, "size": options.size, "workloads": {}}
    for name in options.names:
        data = options.data / f"{name}-{options.size}"
        make_data(name, options.size, data)
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.seeds) as pool:
            seeds = range(options.seeds)
            sides = {
                run.__name__: list(pool.map(partial(run, name, data, options, Path(folder)), seeds))
                for run in (script, engine)
            }
        apart = abs(statistics.mean(sides["engine"]) - statistics.mean(sides["script"]))
        spread = max(max(values) - min(values) for values in sides.values())
        results["workloads"][name] = sides | {"apart": apart, "spread": spread, "epochs": options.epochs}
        shown = "  ".join(f"{side} {', '.join(f'{v:.4f}' for v in values)}" for side, values in sides.items())
        print(
            f"{'✓' if apart <= spread else '✗'} {name}: {shown}  (apart {apart:.4f}, spread {spread:.4f})", flush=True
        )
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def script(name: str, data: Path, options: argparse.Namespace, folder: Path, seed: int) -> float:
    """The metric of the plain script, as its author starts it."""
    start = ["bash", "train.sh"] if (ROOT / "workloads" / name / "train.sh").exists() else [sys.executable, "train.py"]
    words = [
        start[0],
        str(ROOT / "workloads" / name / start[1]),
        "--data",
        str(data),
        "--out",
        f"{folder}/script-{seed}",
    ]
    words += ["--seed", str(seed), "--epochs", str(options.epochs), "--device", options.device]
    printed = finished(words)
    return float(re.findall(METRICS[name][0], printed)[-1])


def engine(name: str, data: Path, options: argparse.Namespace, folder: Path, seed: int) -> float:
    """The metric of `flatout train` after as many epochs."""
    out = folder / f"engine-{seed}"
    words = ["python", "-m", "flatout", "train", str(ROOT / "workloads" / "after" / f"{name}.yaml"), "--quiet"]
    words += [f"data.args.root={data}", f"train.epochs={options.epochs}", f"train.seed={seed}", f"out={out}"]
    words += [f"train.device={options.device}", "evaluate.every=1 epochs", "checkpoint.every=never"]
    if name == "stock":
        words.append(f"model.args.root={data}")
    finished(words)
    with next(out.rglob("validation.csv")).open() as file:
        return float(list(csv.DictReader(file))[-1][METRICS[name][1]])


def finished(words: list[str]) -> str:
    """What a command printed, once it has ended well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is this one, in train.sh too
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
