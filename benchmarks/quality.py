"""Whether `flatout train` learns what the plain script learns: the validation metric of both, seed by seed.

    python benchmarks/quality.py NAME… --data DIR [--size small] [--seeds 3] [--jobs N] [--device cuda] [--out FILE]

Each workload is trained by its script as it is and by the engine with workloads/after/NAME.yaml, over the same data and
the same number of epochs, once a seed. `--jobs` trainings run at the same time, for nobody times them. Both learn
equally well when the means differ by no more than the seeds of either side do among themselves; the engine fails where
it learns less well than that.

The small and tiny data would give the batches of these scripts a handful of steps: there both sides have smaller ones,
in the same proportion to each other, and the smaller networks of workloads/README.md.
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
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402
from benchmarks.workloads import make_data  # noqa: E402

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is compared, and how both sides are scaled down to the small data."""

    printed: str  # by the script, after its last epoch
    column: str  # of the engine's validation.csv: the same
    epochs: int
    script: str
    engine: str
    less_is_better: bool = False


WORKLOADS = {
    "gray": Workload(
        printed=r"val accuracy ([\d.]+)", column="accuracy", epochs=40,
        script="--width 16 --batch-size 16 --num-workers 2 --eval-every 1000",
        engine="model.args.width=16 train.batch_size=64 train.lr_batch=16",
    ),
    "stock": Workload(
        printed=r"val rank correlation (-?[\d.]+)", column="correlation", epochs=5,
        script="--hidden 64 --batch-size 64 --num-workers 2",
        engine="model.args.hidden=64 train.batch_size=256 train.lr_batch=64",
    ),
    "segment": Workload(
        printed=r"val IoU ([\d.]+)", column="iou", epochs=30,
        script="--width 16 --batch-size 16 --num-workers 2 --eval-every 1000",
        engine="model.args.width=16 train.batch_size=16",
    ),
    "captcha": Workload(
        printed=r"val error ([\d.]+)", column="error_px", epochs=10,
        script="--width 16 --batch-size 16 --num-workers 2 --eval-every 1000",
        engine="model.args.width=16 train.batch_size=32 train.lr_batch=16",
        less_is_better=True,
    ),
    "video": Workload(
        printed=r"val accuracy ([\d.]+)", column="accuracy", epochs=10,
        script="--config workloads/video/config_small.py --decode-threads 1 --eval-every 1000",
        engine="data.args.clip_frames=16 data.args.crop=48 model.args.crop=48 model.args.chunk_frames=16 "
        "model.args.dim=128 model.args.depth=3 model.args.heads=4 train.batch_size=8 optimizer.args.lr=1e-3",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--data", type=Path, required=True, help="folder for the data; made there when it is missing")
    parser.add_argument("--size", choices=["tiny", "small", "full"], default="small")
    parser.add_argument("--epochs", type=int, help="of every training, instead of each workload's own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=max(1, CORES // 2), metavar="N", help="trainings at the same time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    machine = describe()
    print(headline(machine))
    for name in options.names:
        make_data(name, options.size, folder(name, options))
    found: dict[str, Any] = {
        name: {"epochs": options.epochs or WORKLOADS[name].epochs, "script": {}, "engine": {}} for name in options.names
    }
    results = {"benchmark": "quality", "machine": machine, "size": options.size, "device": options.device}
    with tempfile.TemporaryDirectory() as runs, ThreadPoolExecutor(options.jobs) as pool:
        trainings = {
            pool.submit(train, name, options, Path(runs, f"{name}-{train.__name__}-{seed}"), seed): (name, train, seed)
            for seed in range(options.seeds)  # one seed after the other: what the first has compiled is at hand then
            for name in options.names
            for train in (script, engine)
        }
        for training in as_completed(trainings):
            name, train, seed = trainings[training]
            of = found[name]
            of[train.__name__][seed], seconds = training.result()
            print(f"{name}, {train.__name__}, seed {seed}: {of[train.__name__][seed]}  ({seconds:.0f} s)", flush=True)
            if len(of["script"]) == len(of["engine"]) == options.seeds:
                print(judged(name, of), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps({**results, "workloads": found}, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(of["engine_is"] in ("worse", None) for of in found.values()))


def judged(name: str, of: dict[str, Any]) -> str:
    """Add to both sides' figures how they compare; that as a line."""
    sides = [[values[seed] for seed in sorted(values)] for values in (of["script"], of["engine"])]
    figures = [value for side in sides for value in side if isinstance(value, float)]
    if len(figures) < sum(map(len, sides)):
        of |= {"apart": None, "spread": None, "engine_is": None}
        return f"✗ {name}: a training failed"
    of["apart"] = statistics.mean(sides[1]) - statistics.mean(sides[0])
    of["spread"] = max(max(side) - min(side) for side in sides)
    better = of["apart"] < 0 if WORKLOADS[name].less_is_better else of["apart"] > 0
    of["engine_is"] = "equal" if abs(of["apart"]) <= of["spread"] else "better" if better else "worse"
    shown = [" ".join(f"{value:.4g}" for value in side) for side in sides]
    compared = f"apart {of['apart']:+.4f}, spread {of['spread']:.4f}"
    mark = "✗" if of["engine_is"] == "worse" else "✓"
    return f"{mark} {name}: script {shown[0]}  engine {shown[1]}  ({compared}: {of['engine_is']})"


def script(name: str, options: argparse.Namespace, out: Path, seed: int) -> tuple[float | str, float]:
    """The metric of the plain script, as its author starts it; or why there is none. And how long it took."""
    of, home = WORKLOADS[name], ROOT / "workloads" / name
    words = ["bash", home / "train.sh"] if (home / "train.sh").exists() else ["python", home / "train.py"]
    words += ["--data", folder(name, options), "--out", out, "--seed", seed, "--epochs", options.epochs or of.epochs]
    words += ["--device", options.device, *(of.script.split() if options.size != "full" else [])]
    printed, seconds = finished(words, options)
    values = re.findall(of.printed, printed)
    return float(values[-1]) if values else printed, seconds


def engine(name: str, options: argparse.Namespace, out: Path, seed: int) -> tuple[float | str, float]:
    """The same of `flatout train` after as many epochs."""
    of, data, epochs = WORKLOADS[name], folder(name, options), options.epochs or WORKLOADS[name].epochs
    words = ["python", "-m", "flatout", "train", ROOT / "workloads" / "after" / f"{name}.yaml", "--quiet"]
    words += [f"data.args.root={data}", *([f"model.args.root={data}"] if name == "stock" else []), f"out={out}"]
    words += [f"train.epochs={epochs}", f"train.seed={seed}", f"train.device={options.device}"]
    words += [f"evaluate.every={epochs} epochs", "checkpoint.every=never", "checkpoint.best=null"]
    words += [*of.engine.split(), "data.workers=2"] if options.size != "full" else []
    printed, seconds = finished(words, options)
    try:
        with (out / "validation.csv").open() as file:
            return float(list(csv.DictReader(file))[-1][of.column]), seconds
    except FileNotFoundError:
        return printed, seconds


def finished(words: list[Any], options: argparse.Namespace) -> tuple[str, float]:
    """What a command printed (the end of it, where it failed), and how long it took."""
    threads = str(max(1, CORES // options.jobs))
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # `python` is this one
    env |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "FLATOUT": "off"}
    env |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    start = time.monotonic()
    done = subprocess.run([str(word) for word in words], cwd=ROOT, env={**os.environ, **env}, capture_output=True)
    printed = done.stdout.decode() if done.returncode == 0 else f"failed: {done.stderr.decode()[-2000:]}"
    return printed, time.monotonic() - start


def folder(name: str, options: argparse.Namespace) -> Path:
    return options.data.resolve() / f"{name}-{options.size}"


if __name__ == "__main__":
    main()
