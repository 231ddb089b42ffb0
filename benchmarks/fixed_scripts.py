"""Public training scripts under `flatout fix`, unmodified: what was kept, what it gave, and how that was proven.

    python benchmarks/fixed_scripts.py SCRIPTS [--gpu] [--only NAME…] [--budget 2m] [--repeats 3] [--out FILE]

SCRIPTS holds checkouts of the repositories below, as OWNER+NAME, at the commit named there; none of their code is in
this repository. Their data is made up, in the files and formats they ask for. What the scripts import (torchvision,
pandas …) has to be installed. A healthy script should be told so within two minutes.

The gain that a fix reports is not taken on trust: afterwards the command runs as it was and with the plan, in turns,
and the speeds of these runs are in the table too. The folder of the script is compared byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.diagnosis import COMMITS, Script, prepare_words  # noqa: E402
from benchmarks.machine import describe, figure, headline  # noqa: E402

COMMITS = COMMITS | {
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "cure-lab/LTSF-Linear": "0c113668a3b88c4c4ee586b8c5ec3e539c4de5a6",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "victoresque/pytorch-template": "41dc06f6f8f3f38c6ed49f01ff7d89cd5688adc4",
    "rixwew/pytorch-fm": "f74ad19771eda104e99874d19dc892e988ec53fa",
}
OURS = ("flatout-plan.yaml", "flatout-runs")
WITHIN_S = 600
CHECKED_STEPS = 400
SETUP = {"OMP_NUM_THREADS": "1"}  # one core for the model, one for its data


def mnist(where: str, train: int = 60_000, test: int = 10_000) -> Callable[[Path], None]:
    """The four files of MNIST, with made-up digits, in a folder beside the script."""

    def make(folder: Path) -> None:
        raw, random = folder / where / "MNIST/raw", np.random.default_rng(0)
        raw.mkdir(parents=True)
        digits = random.integers(0, 160, (10, 28, 28))
        for part, count in (("train", train), ("t10k", test)):
            labels = random.integers(0, 10, count, dtype=np.uint8)
            pictures = (digits[labels] + random.integers(0, 96, (count, 28, 28))).astype(np.uint8)
            (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, count, 28, 28) + pictures.data)
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels.data)

    return make


def photographs(times: int = 1) -> Callable[[Path], None]:
    """JPEG files of 500×375 pixels in a folder for each class, as ImageNet has them, each under so many names."""

    def make(folder: Path) -> None:
        from PIL import Image

        random = np.random.default_rng(0)
        for part, count in (("train", 1200), ("val", 80)):
            for number in range(count):
                small = random.integers(0, 256, (25, 32, 3), dtype=np.uint8)
                path = folder / f"imagenet/{part}/n{number % 10:04d}/{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
                for again in range(1, times):
                    os.link(path, path.with_name(f"{number}-{again}.jpg"))

    return make


def electricity(folder: Path) -> None:
    """Two years of seven hourly series, as ETTh1.csv has them."""
    hours = [str(hour).replace("T", " ") for hour in np.datetime64("2016-07-01T00") + np.arange(17_420)]
    noise = np.random.default_rng(0).normal(0, 0.1, (len(hours), 7))
    values = np.sin(np.arange(len(hours))[:, None] / np.arange(5, 12)) + noise
    rows = (f"{hour}:00:00,{','.join(f'{v:.4f}' for v in row)}" for hour, row in zip(hours, values, strict=True))
    (folder / "dataset").mkdir()
    (folder / "dataset/ETTh1.csv").write_text("\n".join(("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT", *rows)) + "\n")


def ratings(folder: Path) -> None:
    """400,000 ratings of films, as ml-1m/ratings.dat has them; and the folder the script saves to."""
    random = np.random.default_rng(0)
    who, what, how = (random.integers(1, top, 400_000) for top in (6041, 3953, 6))
    lines = (f"{a}::{b}::{c}::978300760" for a, b, c in zip(who, what, how, strict=True))
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    (folder / "chkpt").mkdir()


def characters(folder: Path) -> None:
    """What nanoGPT's prepare.py makes of Shakespeare: 65 characters, a million of them."""
    for part, count in (("train", 1_000_000), ("val", 100_000)):
        np.random.default_rng(0).integers(0, 65, count, dtype=np.uint16).tofile(
            folder / f"data/shakespeare_char/{part}.bin"
        )


_TUTORIAL = {"repo": "yunjey/pytorch-tutorial", "prepare": mnist("../../data")}
_GAN = {"repo": "eriklindernoren/PyTorch-GAN", "prepare": mnist("../../data/mnist")}
SCRIPTS = (
    Script(name="vae", repo="pytorch/examples", path="vae/main.py", prepare=mnist("../data")),
    Script(**_TUTORIAL, name="logistic", path="tutorials/01-basics/logistic_regression/main.py"),
    Script(**_TUTORIAL, name="feedforward", path="tutorials/01-basics/feedforward_neural_network/main.py"),
    Script(**_GAN, name="gan", path="implementations/gan/gan.py"),
    Script(
        name="DLinear", repo="cure-lab/LTSF-Linear", path="run_longExp.py", prepare=electricity,
        flags=("--is_training", "1", "--model_id", "etth1", "--model", "DLinear", "--data", "ETTh1", "--root_path",
               "./dataset/"),
    ),
    Script(
        name="template", repo="victoresque/pytorch-template", path="train.py", flags=("-c", "config.json"),
        prepare=mnist("data"),
    ),
    Script(
        name="fabric", repo="Lightning-AI/pytorch-lightning", prepare=mnist("../../../Datasets"),
        path="examples/fabric/image_classifier/train_fabric.py",
    ),
    Script(
        name="fm", repo="rixwew/pytorch-fm", path="examples/main.py", prepare=ratings,
        flags=("--dataset_name", "movielens1M", "--dataset_path", "ratings.dat", "--model_name",
               "fm", "--device", "cpu"),
    ),
    Script(
        name="imagenet", repo="pytorch/examples", path="imagenet/main.py", prepare=photographs(),
        flags=("imagenet", "-a", "shufflenet_v2_x0_5", "-b", "16", "--no-accel"),
    ),
    Script(
        name="nanoGPT", repo="karpathy/nanoGPT", path="train.py", prepare=characters,
        flags=("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20",
               "--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128",
               "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"),  # its README's command for a CPU
    ),
    Script(name="makemore", repo="karpathy/makemore", path="makemore.py", prepare=prepare_words),
    Script(name="adder", repo="karpathy/minGPT", path="projects/adder/adder.py"),
)  # fmt: skip
ON_A_GPU = (
    Script(
        name="imagenet", repo="pytorch/examples", path="imagenet/main.py", prepare=photographs(10),
        flags=("imagenet", "-a", "resnet50", "-b", "128"),
    ),
    Script(name="mnist", repo="pytorch/examples", path="mnist/main.py", prepare=mnist("../data")),
    Script(name="vae", repo="pytorch/examples", path="vae/main.py", prepare=mnist("../data")),
    Script(**_GAN, name="gan", path="implementations/gan/gan.py"),
    Script(
        name="nanoGPT", repo="karpathy/nanoGPT", path="train.py", prepare=characters,
        flags=("config/train_shakespeare_char.py",),
    ),
    Script(name="adder", repo="karpathy/minGPT", path="projects/adder/adder.py"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, metavar="SCRIPTS")
    parser.add_argument("--gpu", action="store_true", help="on a GPU: other scripts, at their full size")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--budget", default="2m")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side after the fix")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="keep the HTML reports here")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the results as JSON; those of others stay in it"
    )
    options = parser.parse_args()
    machine = describe(("torch", "numpy", "torchvision"))
    print(headline(machine))
    scripts, setup = (ON_A_GPU, {}) if options.gpu else (SCRIPTS, SETUP)
    for script in scripts:
        if options.only and script.name not in options.only:
            continue
        result = try_out(script, options, setup)
        print(f"{script.name}: {result['sentence']} {result.get('checked') or ''}", flush=True)
        if options.out is not None:
            old = json.loads(options.out.read_text(encoding="utf-8"))["results"] if options.out.exists() else []
            every = [r for r in old if r["script"] != script.name] + [result]
            every.sort(key=lambda r: [s.name for s in scripts].index(r["script"]))
            figures = {"benchmark": "fixed_scripts", "machine": machine | setup, "results": every}
            options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def try_out(script: Script, options: argparse.Namespace, setup: dict[str, str]) -> dict[str, Any]:
    """Fix it, look at what that left behind, and measure before and after once more."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "repo")
        shutil.copytree(options.scripts / script.repo.replace("/", "+"), copy, ignore=shutil.ignore_patterns(".git"))
        path = copy / script.path
        script.prepare(path.parent)
        command = ["python", path.name, *script.flags]
        places = filter(None, (str(copy), os.environ.get("PYTHONPATH")))
        environment = os.environ | setup | {"PYTHONPATH": os.pathsep.join(places)}
        before, results = fingerprint(copy), Path(scratch, "fix.json")
        page = (options.pages or Path(scratch)).resolve() / f"{script.name}.html"
        told = {"script": script.name, "repo": script.repo, "commit": COMMITS[script.repo], "path": script.path,
                "flags": list(script.flags), "budget": options.budget, "load_before": os.getloadavg()[0]}  # fmt: skip
        fix = ["fix", "--unprotected", "--budget", options.budget, "--json", str(results), "--html", str(page)]
        said = flatout([*fix, "--", *command], path.parent, environment)
        if not results.exists():
            return told | {"sentence": said[-600:]}
        found = json.loads(results.read_text(encoding="utf-8"))
        told |= {key: found[key] for key in ("sentence", "seconds", "gain", "noise", "remarks", "stopped", "trials")}
        told |= {
            "kept": [
                {key: change[key] for key in ("name", "value", "safety", "knob", "gain", "proof", "permanently")}
                for change in found["kept"]
            ],
            "undone": [{key: change[key] for key in ("name", "value", "verdict", "why")} for change in found["undone"]],
            "untouched": fingerprint(copy) == before,
            "left_running": [p.pid for p in psutil.process_iter(["cmdline"]) if scratch in str(p.info["cmdline"])],
        }
        return told | (checked(command, path.parent, environment, options.repeats) if found["kept"] else {})


def checked(command: list[str], folder: Path, environment: dict[str, str], repeats: int) -> dict[str, Any]:
    """Samples a second as it was and with the plan, in turns, by runs that had no part in the fix."""
    from flatout import trace
    from flatout.fix.speed import measure

    speeds: dict[str, list[float]] = {"before": [], "after": []}
    for turn in range(repeats):
        for side, plan in (("before", []), ("after", ["--plan", "flatout-plan.yaml"])):
            where = folder / f"check-{side}-{turn}"
            run = ["run", "--quiet", "--max-steps", str(CHECKED_STEPS), "--trace", str(where), *plan]
            flatout([*run, "--", *command], folder, environment)
            speed = measure(trace.read(where))
            assert speed is not None
            speeds[side].append(speed.value)
    return {"checked": {side: figure(values, 1) for side, values in speeds.items()}}


def flatout(arguments: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run it; what it said."""
    command = [sys.executable, "-m", "flatout", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=WITHIN_S, check=False).stdout  # fmt: skip


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file by its bytes, except what flatout itself says it writes."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not set(OURS) & set(p.relative_to(folder).parts)]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


if __name__ == "__main__":
    main()
