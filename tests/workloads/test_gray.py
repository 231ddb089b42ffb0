"""gray, end to end on a CPU."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import ROOT, losses, run
from torch import nn

from workloads.gray import train as gray

SMALL = ("--width", "8", "--device", "cpu")


def test_learns_and_saves_what_it_learned(gray_data: Path, tmp_path: Path) -> None:
    # GIVEN the script started by its path, from anywhere
    script = ROOT / "workloads" / "gray" / "train.py"
    flags = ["--data", gray_data, "--out", "run", "--epochs", "6", "--batch-size", "16", "--lr", "3e-3"]
    ended = run("python", script, *flags, *SMALL, "--log-every", "1", "--eval-every", "3", cwd=tmp_path)

    # THEN the loss falls, the metric is told when asked for, and the checkpoint holds the trained network
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert len(seen) == 6 * 192 // 16
    assert sum(seen[-12:]) < 0.9 * sum(seen[:12])
    assert re.findall(r"epoch (\d+)  val accuracy [01]\.\d+", ended.stdout) == ["3", "6"]
    saved = torch.load(tmp_path / "run" / "last.pt")
    assert saved["epoch"] == 6
    gray.StampNet(8, width=8).load_state_dict(saved["model"])


def test_the_same_seed_gives_the_same_losses(gray_data: Path, train: Callable[..., str]) -> None:
    flags = ("--data", gray_data, *SMALL, "--batch-size", "8", "--max-steps", "3", "--log-every", "1")
    first = losses(train(gray, *flags))
    assert len(first) == 3
    assert losses(train(gray, *flags)) == first
    assert losses(train(gray, *flags, "--seed", "1")) != first


def test_accuracy_is_the_share_of_images_that_were_right() -> None:
    batches = [(torch.eye(3), torch.tensor([0, 1, 0])), (torch.eye(1), torch.tensor([0]))]
    assert gray.evaluate(nn.Identity(), batches, torch.device("cpu")) == 3 / 4


# The script as it is, but for what each rank tells in the end: which images it trained on, and its network's weights.
TELLING = """
import json, os, pathlib, sys
from workloads.gray import train as gray

images, networks = [], []
load, build = gray.Stamps.__getitem__, gray.StampNet.__init__
gray.Stamps.__getitem__ = lambda self, i: (images.append(i) if self.train else None, load(self, i))[1]
gray.StampNet.__init__ = lambda self, *args: (networks.append(self), build(self, *args))[1]
gray.main()
told = {"images": images, "weights": [p.sum().item() for p in networks[0].parameters()]}
pathlib.Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))
"""


def test_two_processes_train_one_network(gray_data: Path, tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    launcher = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    flags = ("--data", gray_data, "--out", "run", "--batch-size", "8", "--log-every", "2", "--max-steps", "4")
    ended = run(*launcher, "telling.py", *flags, *SMALL, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(losses(ended.stdout)) == 2  # of one rank only
    assert ended.stdout.count("val accuracy") == 1
    assert (tmp_path / "run" / "last.pt").exists()

    # THEN each rank learned from images of its own, and both ended with the same network
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert len(first["images"]) == len(second["images"]) == 4 * 8
    assert not set(first["images"]) & set(second["images"])
    assert first["weights"] == second["weights"]


def test_resident_training_loads_a_few_batches_and_no_more(
    gray_data: Path, tmp_path: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    original = gray.Stamps.__getitem__
    monkeypatch.setattr(gray.Stamps, "__getitem__", lambda self, i: (loaded.append(i), original(self, i))[1])
    log = train(gray, "--data", gray_data, *SMALL, "--batch-size", "8", "--resident", "--max-steps", "10")
    assert len(loaded) == 4 * 8
    assert "val accuracy" not in log
    assert not (tmp_path / "run" / "last.pt").exists()


def test_a_damaged_image_is_named_also_when_a_worker_meets_it(
    gray_data: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    shutil.copytree(gray_data, tmp_path / "gray")
    victim = tmp_path / "gray" / "train" / "disc" / "000011.png"
    victim.write_bytes(victim.read_bytes()[:5000])
    message = f"{victim} cannot be read: image file is truncated"

    flags = ("--data", tmp_path / "gray", *SMALL, "--epochs", "1")
    assert refusal(gray, *flags) == message
    ended = run("python", "-m", "workloads.gray.train", *flags, "--out", tmp_path / "run", "--num-workers", "1")
    assert (ended.returncode, ended.stderr) == (2, message + "\n")


def test_refuses_what_cannot_work(
    gray_data: Path, stock_data: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    assert "python -m workloads.gray.make" in refusal(gray, "--data", tmp_path / "none")
    assert "holds the data of stock" in refusal(gray, "--data", stock_data)
    too_many = refusal(gray, "--data", gray_data, *SMALL, "--batch-size", "193")
    assert too_many == "--batch-size 193 x 1 is more than the 192 training images"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_refuses_a_gpu_that_is_not_there(gray_data: Path, refusal: Callable[..., str]) -> None:
    assert "no GPU" in refusal(gray, "--data", gray_data, "--device", "cuda")
