"""Does the diagnosis name the fault? Public training scripts, one fault planted in each, on a CPU.

    python benchmarks/diagnosis.py SCRIPTS [--only NAME…] [--out FILE]         about ten minutes on two cores

SCRIPTS holds checkouts of the repositories below, as OWNER+NAME, at the commit named there; none of their code is in
this repository. A fault is planted into a copy of the script by an edit of a line or two, by a flag, or in the data.
The data is made up: pictures are decoded from PNG by a stand-in for torchvision, which the benchmark writes beside the
script. A script runs under `flatout run --max-steps`; what counts is the verdict. Beside them run scripts without a
fault: what they are accused of is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402

COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "kuangliu/pytorch-cifar": "49b7aa97b0c12fe0d4054e670403a16b6b834ddd",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
}
STEPS = 150
WITHIN_S = 240
HEALTHY = "compute.saturated"
Edit = Callable[[str], str]


def after(line: str, code: str) -> Edit:
    """Write `code` behind each line that contains `line`, as far in as that one."""

    def edit(text: str) -> str:
        changed, count = re.subn(
            rf"^([ \t]*)([^#\n]*{re.escape(line)}.*)$", lambda m: f"{m[0]}\n{m[1]}{code}", text, flags=re.MULTILINE
        )
        assert count, f"no line with {line}"
        return changed

    return edit


def instead(pattern: str, code: str) -> Edit:
    """Replace what matches."""

    def edit(text: str) -> str:
        changed, count = re.subn(pattern, code, text)
        assert count, f"nothing matches {pattern}"
        return changed

    return edit


def first(code: str) -> Edit:
    """Write `code` at the beginning (behind imports from the future)."""
    return lambda text: re.sub(r"\A(from __future__.*\n)?", lambda m: f"{m[0]}{code}\n", text)


def with_workers(count: int, more: str = "") -> Edit:
    """Give the first loader of yunjey's tutorials so many workers."""
    return lambda text: re.sub(r"(batch_size=batch_size, *\n)", rf"\1 num_workers={count}, {more}\n", text, count=1)


def prepare_words(folder: Path) -> None:
    (folder / "names.txt").write_text("\n".join(f"{i:x}{i * 7919 % 65537:x}" for i in range(20_000)))


def prepare_tokens(folder: Path) -> None:
    import numpy as np

    for part in ("train", "val"):
        target = folder / "data/openwebtext"
        target.mkdir(parents=True, exist_ok=True)
        np.random.default_rng(0).integers(0, 50_000, 400_000, dtype=np.uint16).tofile(target / f"{part}.bin")


@dataclass(frozen=True, kw_only=True)
class Script:
    """A public script, how it runs here, the fault planted in it, and the verdict that fault deserves."""

    name: str
    repo: str
    path: str
    expect: str = HEALTHY
    fault: str = "none"
    edits: tuple[Edit, ...] = ()
    flags: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None
    beside: int = 0
    steps: int = STEPS
    environment: dict[str, str] = field(default_factory=dict)


_MNIST = {"repo": "pytorch/examples", "path": "mnist/main.py"}
NANO = (
    "--device=cpu", "--compile=False", "--n_layer=2", "--n_head=2", "--n_embd=128", "--block_size=64", "--batch_size=8",
    "--gradient_accumulation_steps=1", "--dtype=float32",
)  # fmt: skip
_TUTORIAL = "tutorials/01-basics"
_LATER = "tutorials/02-intermediate"

SCRIPTS = (
    # -- with a fault
    Script(
        **_MNIST, name="mnist: evaluation", expect="pause.eval", fault="evaluates after every 20th batch",
        edits=(
            after("optimizer.step()", "if batch_idx % 20 == 0: test(model, device, args.test_loader); model.train()"),
            after("test_loader = torch.utils.data.DataLoader", "args.test_loader = test_loader"),
        ),
    ),
    Script(
        name="vae: decoding", repo="pytorch/examples", path="vae/main.py", expect="data.main-thread",
        fault="pictures of 512 pixels are decoded in the training process", steps=60,
        environment={"STANDIN_SIDE": "512"},
    ),
    Script(
        name="mnist_rnn: collector", repo="pytorch/examples", path="mnist_rnn/main.py", expect="pause.gc",
        fault="gc.collect() after every step",
        edits=(after("optimizer.step()", "import gc; gc.collect()"),),
    ),
    Script(
        name="logistic: crowd", repo="yunjey/pytorch-tutorial", path=f"{_TUTORIAL}/logistic_regression/main.py",
        expect="data.too-many-workers", fault="24 workers on two cores, pictures of 200 pixels",
        edits=(with_workers(24),), environment={"STANDIN_SIDE": "200"},
    ),
    Script(
        name="dcgan: checkpoints", repo="pytorch/examples", path="dcgan/main.py", expect="pause.checkpoint",
        fault="both nets are saved after every step",
        edits=(after("optimizerG.step()", "torch.save([netG.state_dict(), netD.state_dict()] * 4, 'now.pth')"),),
        flags=("--dataset", "fake", "--imageSize", "64", "--batchSize", "2", "--ngf", "16", "--ndf", "16"),
    ),
    Script(
        name="makemore: logging", repo="karpathy/makemore", path="makemore.py", expect="pause.logging",
        fault="a histogram of every weight into TensorBoard at every step", prepare=prepare_words,
        edits=(
            after(
                "optimizer.step()",
                "[writer.add_histogram(name, p.detach(), step) for name, p in model.named_parameters()]",
            ),
        ),
        flags=("--num-workers", "1"),
    ),
    Script(
        name="minGPT adder: slow samples", repo="karpathy/minGPT", path="projects/adder/adder.py",
        expect="data.slow-samples", fault="one sample in a hundred takes 60 ms of computing",
        edits=(
            after("def __getitem__(self, idx):", "    sum(range(3_000_000 * (idx % 100 == 0)))"),
        ),
        flags=("--trainer.num_workers=1",),
    ),
    Script(
        name="nanoGPT: evaluation", repo="karpathy/nanoGPT", path="train.py", expect="pause.eval",
        fault="--eval_interval=20", flags=(*NANO, "--eval_interval=20", "--eval_iters=8"), prepare=prepare_tokens,
    ),
    Script(
        name="pytorch-cifar: heavy transforms", repo="kuangliu/pytorch-cifar", path="main.py", expect="data.cpu-bound",
        fault="pictures of 400 pixels to decode, a small net, two workers for two cores",
        edits=(
            instead(r"net = SimpleDLA\(\)", "net = LeNet()"),
            instead("from utils import progress_bar", "progress_bar = print"),  # the original wants a terminal
        ),
        environment={"STANDIN_SIDE": "400"}, steps=60,
    ),
    Script(
        name="feedforward: restarts", repo="yunjey/pytorch-tutorial",
        path=f"{_TUTORIAL}/feedforward_neural_network/main.py", expect="data.worker-start",
        fault="two workers are started for each of many epochs of six steps",
        edits=(with_workers(2), instead("num_epochs = 5", "num_epochs = 200")),
        environment={"STANDIN_LENGTH": "600"},
    ),
    Script(
        name="logistic: far away", repo="yunjey/pytorch-tutorial", path=f"{_TUTORIAL}/logistic_regression/main.py",
        expect="data.too-few-workers", fault="each sample comes from a store that takes 2 ms, and there is one worker",
        edits=(with_workers(1),), environment={"STANDIN_DELAY": "0.002"},
    ),
    Script(
        name="convolutional: company", repo="yunjey/pytorch-tutorial",
        path=f"{_LATER}/convolutional_neural_network/main.py", expect="hardware.shared",
        fault="three other programs compute on the same cores", beside=3,
    ),
    Script(
        name="bidirectional: collate", repo="yunjey/pytorch-tutorial",
        path=f"{_LATER}/bidirectional_recurrent_neural_network/main.py", expect="data.collate-bound",
        fault="a collate function that copies pixel by pixel",
        edits=(
            first(
                "def by_pixel(samples):\n"
                "    batch = torch.zeros(len(samples), 1, 28, 28)\n"
                "    for n, (x, _) in enumerate(samples):\n"
                "        for i in range(28):\n"
                "            for j in range(28):\n"
                "                batch[n, 0, i, j] = x[0, i, j]\n"
                "    return batch, torch.tensor([y for _, y in samples])"
            ),
            with_workers(1, "collate_fn=by_pixel,"),
        ),
        steps=60,
    ),
    Script(
        **_MNIST, name="mnist: ignored", expect="config.ignored", fault="--compile is read and never used",
        edits=(after("parser = argparse.ArgumentParser", "parser.add_argument('--compile', action='store_true')"),),
        flags=("--compile", "--batch-size", "256"), environment={"STANDIN_READY": "1"},
    ),
    # -- without one
    Script(**_MNIST, name="mnist", environment={"STANDIN_READY": "1"}, flags=("--batch-size", "256")),
    Script(name="nanoGPT", repo="karpathy/nanoGPT", path="train.py", flags=NANO, prepare=prepare_tokens),
    Script(
        name="makemore", repo="karpathy/makemore", path="makemore.py", prepare=prepare_words,
        flags=("--num-workers", "1"),
    ),
    Script(
        name="minGPT adder", repo="karpathy/minGPT", path="projects/adder/adder.py", flags=("--trainer.num_workers=1",),
    ),
    Script(
        name="mnist_rnn", repo="pytorch/examples", path="mnist_rnn/main.py", environment={"STANDIN_READY": "1"},
    ),
)  # fmt: skip

# What the scripts use of torchvision, with pictures that are there (READY) or have to be decoded from PNG.
STAND_IN = """
import io, os, sys, time, types
import torch
from PIL import Image

SIDE, DELAY = int(os.environ.get("STANDIN_SIDE", 28)), float(os.environ.get("STANDIN_DELAY", 0))
READY, LENGTH = bool(os.environ.get("STANDIN_READY")), int(os.environ.get("STANDIN_LENGTH", 60_000))

class Pictures(torch.utils.data.Dataset):
    def __init__(self, root=None, train=True, transform=None, target_transform=None, download=False, side=28, mode="L"):
        self.transform, self.side, self.mode = transform, side, mode
        self.length = LENGTH if train else LENGTH // 20
        noise = os.urandom(SIDE * SIDE * (3 if mode == "RGB" else 1))
        stored = io.BytesIO()
        Image.frombytes(mode, (SIDE, SIDE), noise).save(stored, "PNG")
        self.stored = stored.getvalue()
        self.ready = transform(self._decoded()) if READY else None
        self.data = torch.randint(0, 256, (1000, side, side), dtype=torch.uint8)
        self.targets = torch.arange(1000) % 10
    def _decoded(self):
        picture = Image.open(io.BytesIO(self.stored)).convert(self.mode)
        return picture.resize((self.side, self.side)) if picture.size[0] != self.side else picture
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        if DELAY:
            time.sleep(DELAY)
        if self.ready is not None:
            return self.ready, int(index) % 10
        picture = self._decoded()
        return self.transform(picture) if self.transform else picture, int(index) % 10

class MNIST(Pictures):
    pass

class CIFAR10(Pictures):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, side=32, mode="RGB", **kwargs)

class FakeData(Pictures):
    def __init__(self, size=1000, image_size=(3, 224, 224), num_classes=10, transform=None):
        super().__init__(transform=transform, side=image_size[1], mode="RGB")
        self.length = size

class Compose:
    def __init__(self, transforms): self.transforms = list(transforms)
    def __call__(self, x):
        for transform in self.transforms: x = transform(x)
        return x

class ToTensor:
    def __call__(self, picture):
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(picture.size[1], picture.size[0], -1).permute(2, 0, 1).float() / 255

class Normalize:
    def __init__(self, mean, std): self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    def __call__(self, x): return (x - self.mean) / self.std

class RandomHorizontalFlip:
    def __call__(self, picture): return picture.transpose(0) if torch.rand(1) < 0.5 else picture

class RandomCrop:
    def __init__(self, size, padding=0): self.size, self.padding = size, padding
    def __call__(self, picture):
        at = torch.randint(-self.padding, self.padding + 1, (2,)).tolist()
        return picture.crop((*at, at[0] + self.size, at[1] + self.size))

datasets, transforms, utils = (types.ModuleType(f"torchvision.{n}") for n in ("datasets", "transforms", "utils"))
for module in (datasets, transforms, utils):
    sys.modules[module.__name__] = module
for thing in (MNIST, CIFAR10, FakeData): setattr(datasets, thing.__name__, thing)
for thing in (Compose, ToTensor, Normalize, RandomHorizontalFlip, RandomCrop):
    setattr(transforms, thing.__name__, thing)
utils.save_image = lambda *a, **k: None
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, metavar="SCRIPTS")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    machine = describe(("torch", "numpy"))
    print(headline(machine))
    results = []
    for script in SCRIPTS:
        if options.only and script.name not in options.only:
            continue
        result = try_out(script, options.scripts)
        results.append(result)
        print(
            f"{'✓' if result['right'] else '✗'} {script.name}: {', '.join(result['found']) or result['problem']}",
            flush=True,
        )
    planted = [r for r in results if r["expected"] != HEALTHY]
    healthy = [r for r in results if r["expected"] == HEALTHY]
    print(f"verdict right in {sum(r['right'] for r in planted)} of {len(planted)} with a fault; "
          f"no alarm in {sum(r['right'] for r in healthy)} of {len(healthy)} without")  # fmt: skip
    if options.out is not None:
        figures = {"benchmark": "diagnosis", "machine": machine, "results": results}
        options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def try_out(script: Script, scripts: Path) -> dict[str, Any]:
    """Plant, run, and read the verdict."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "repo")
        shutil.copytree(scripts / script.repo.replace("/", "+"), copy, ignore=shutil.ignore_patterns(".git"))
        path = copy / script.path
        text = path.read_text(encoding="utf-8")
        for edit in script.edits:
            text = edit(text)
        path.write_text(text, encoding="utf-8")
        script.prepare(path.parent)
        (Path(scratch, "standin")).mkdir()
        Path(scratch, "standin", "torchvision.py").write_text(STAND_IN, encoding="utf-8")
        problem = run(script, path, Path(scratch))
        return {
            "script": script.name,
            "repo": script.repo,
            "commit": COMMITS[script.repo],
            "path": script.path,
            "fault": script.fault,
            "expected": script.expect,
            **verdict(script, Path(scratch, "trace"), problem),
        }


def run(script: Script, path: Path, scratch: Path) -> str:
    """Run it; what went wrong, if anything did."""
    places = [ROOT / "src", path.parents[len(Path(script.path).parts) - 1], scratch / "standin"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(place) for place in places),
        "OMP_NUM_THREADS": "1",
        **script.environment,
    }
    command = [sys.executable, "-m", "flatout", "run", "--quiet", "--trace", str(scratch / "trace"), "--max-steps",
               str(script.steps), "--", sys.executable, path.name, *script.flags]  # fmt: skip
    with company(script.beside):
        try:
            done = subprocess.run(
                command, cwd=path.parent, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done within {WITHIN_S} s"
    return "" if done.returncode == 0 else textwrap.shorten(done.stderr[-400:], 300)


def verdict(script: Script, folder: Path, problem: str) -> dict[str, Any]:
    """What the diagnosis says, and whether it is right."""
    from flatout import trace
    from flatout.diagnose.rank_metrics import metrics_of
    from flatout.diagnose.rules import diagnose
    from flatout.model.errors import TraceError

    try:
        recorded = trace.read(folder)
    except TraceError as trouble:
        return {"found": [], "right": False, "among": False, "problem": f"{problem} {trouble}"}
    if not recorded.ranks:
        return {"found": [], "right": False, "among": False, "problem": problem or "no training step was seen"}
    metrics, found = metrics_of(recorded)[0], diagnose(recorded)
    codes = [finding.code for finding in found]
    return {
        "found": codes,
        "right": codes[:1] == [script.expect] and (script.expect != HEALTHY or len(codes) == 1),
        "among": script.expect in codes,
        "title": found[0].title if found else None,
        "steps": metrics.breakdown.steps,
        "shares": {part.name: round(part.share, 3) for part in metrics.breakdown.training if part.share >= 0.01},
        "cores_busy_with_others": metrics.machine.cores_others,
        "problem": problem,
    }


@contextmanager
def company(count: int) -> Iterator[None]:
    """Other programs that compute meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in busy:
            program.kill()
            program.wait()


if __name__ == "__main__":
    main()
