"""captcha, end to end on a CPU: as written, with the promises its config does not keep, and mended."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import ROOT, files, make, run
from torch import nn

from benchmarks import workloads
from benchmarks.mended import MENDED, Edit, Flags
from workloads.captcha import train as captcha

SMALL = ("--width", "4", "--device", "cpu", "--num-workers", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captcha") / "tiny"
    assert make("captcha", folder, "--size", "tiny").returncode == 0
    return folder


def losses(log: str) -> list[float]:
    return [float(number) for number in re.findall(r"step \d+  loss ([\d.]+)  piece .* samples/s", log)]


def test_the_same_seed_makes_the_same_pictures(data: Path, tmp_path: Path) -> None:
    make("captcha", tmp_path / "again", "--size", "tiny", "--workers", "1")
    made = files(data)
    assert files(tmp_path / "again") == made
    make("captcha", tmp_path / "other", "--size", "tiny", "--seed", "1")
    assert files(tmp_path / "other")["images/0000/000.jpg"] != made["images/0000/000.jpg"]


def test_the_notch_is_dark_where_the_labels_say(data: Path) -> None:
    darker = []
    for sheet in sorted((data / "labels").glob("*.csv")):
        with sheet.open() as file:
            for row in csv.DictReader(file):
                columns = np.array(Image.open(data / "images" / row["file"]).convert("L")).mean(axis=0)
                notch_x = int(row["notch_x"])
                assert 0 <= int(row["piece_x"]) < notch_x
                darker.append(columns[notch_x + 2 : notch_x + 9].mean() < columns.mean())
    assert len(darker) == 8 * 8
    assert np.mean(darker) > 0.7


def test_learns_and_saves_what_it_learned(data: Path, tmp_path: Path) -> None:
    # GIVEN the script started by its path, from anywhere, with a worker
    script = ROOT / "workloads" / "captcha" / "train.py"
    flags = ["--data", data, "--out", "run", "--epochs", "6", "--batch-size", "8", "--lr", "0.005", "--width", "8"]
    more = ["--device", "cpu", "--num-workers", "1", "--log-every", "6", "--eval-every", "3"]
    ended = run("python", script, *flags, *more, cwd=tmp_path)

    # THEN the loss falls, the metric is told when asked for, and the checkpoint holds the trained network
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert len(seen) == 6
    assert seen[-1] < 0.6 * seen[0]
    assert re.findall(r"epoch (\d+)  val error \d+\.\d+ px", ended.stdout) == ["3", "6"]
    saved = torch.load(tmp_path / "run" / "last.pt")
    assert saved["epoch"] == 6
    captcha.SliderNet(width=8).load_state_dict(saved["model"])


def test_the_error_is_how_far_the_piece_would_be_off() -> None:
    found, edges = torch.tensor([[10.0, 90.0], [4.0, 54.0]]), torch.tensor([[12.0, 100.0], [6.0, 56.0]])
    error = captcha.slide_error(nn.Identity(), [(found, edges)], torch.device("cpu"), use_bf16=False)
    assert error == pytest.approx((8 + 0) / 2)  # both ends off by as much: the piece still lands where it belongs


def test_the_network_has_the_size_it_is_known_for() -> None:
    parameters = sum(parameter.numel() for parameter in captcha.SliderNet(width=64).parameters())
    assert 3.3e6 < parameters < 3.9e6


def test_the_same_seed_gives_the_same_losses(data: Path, train: Callable[..., str]) -> None:
    flags = ("--data", data, *SMALL, "--batch-size", "4", "--max-steps", "3", "--log-every", "1")
    first = losses(train(captcha, *flags))
    assert len(first) == 3
    assert losses(train(captcha, *flags)) == first
    assert losses(train(captcha, *flags, "--seed", "1")) != first


def test_what_the_config_promises_does_not_happen(
    data: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN an eye on what the network computes in, and on the compiler
    precisions: list[torch.dtype] = []
    compiled: list[object] = []
    forward = captcha.Residual.forward

    def watched(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        precisions.append(self.conv1(x).dtype)
        return forward(self, x)

    monkeypatch.setattr(captcha.Residual, "forward", watched)
    monkeypatch.setattr(torch, "compile", compiled.append)
    monkeypatch.setattr(nn.Module, "compile", lambda self, *args, **kwargs: compiled.append(self))
    flags = ("--data", data, *SMALL, "--batch-size", "4", "--max-steps", "1", "--resident")

    # WHEN it is trained as configured, THEN it says so and does otherwise
    assert "amp True, compile True" in train(captcha, *flags)
    assert set(precisions) == {torch.float32}
    assert compiled == []

    # AND only the one value that the script compares with switches precision
    precisions.clear()
    train(captcha, *flags, "--amp", "bf16")
    assert set(precisions) == {torch.bfloat16}


def test_resident_training_loads_a_few_batches_and_no_more(
    data: Path, tmp_path: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    original = captcha.SliderDataset.__getitem__
    monkeypatch.setattr(captcha.SliderDataset, "__getitem__", lambda self, i: (loaded.append(i), original(self, i))[1])
    train(captcha, "--data", data, *SMALL, "--batch-size", "4", "--resident", "--max-steps", "10")
    assert len(loaded) == 4 * 4
    assert not (tmp_path / "run" / "last.pt").exists()


def test_mended_it_still_learns(data: Path, tmp_path: Path) -> None:
    flags = " ".join(mend.flags for mend in MENDED["captcha"] if isinstance(mend, Flags)).format(spare=1).split()
    small = ["--width", "8", "--device", "cpu", "--batch-size", "8", "--lr", "0.005", "--epochs", "6"]
    # Compiling for a CPU takes minutes and shows nothing about a GPU.
    small += ["--log-every", "6", "--compile-model", "false"]
    with workloads.copied([("captcha", mend) for mend in MENDED["captcha"] if isinstance(mend, Edit)]) as root:
        script = root / "workloads" / "captcha" / "train.py"
        ended = run("python", script, "--data", data, "--out", tmp_path, *flags, *small)
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert seen[-1] < 0.6 * seen[0]
    assert "val error" in ended.stdout


def test_a_damaged_picture_is_named_also_when_a_worker_meets_it(
    data: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    picture = tmp_path / "data" / "images" / "0001" / "003.jpg"
    picture.write_bytes(picture.read_bytes()[:900])
    message = f"{picture} cannot be read: image file is truncated"

    flags = ("--data", tmp_path / "data", *SMALL, "--batch-size", "16", "--epochs", "1")
    assert refusal(captcha, *flags).startswith(message)
    ended = run("python", "-m", "workloads.captcha.train", *flags, "--out", tmp_path / "run", "--num-workers", "1")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(message)


def test_refuses_what_cannot_work(data: Path, gray_data: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert "python -m workloads.captcha.make" in refusal(captcha, "--data", tmp_path / "none")
    assert "holds the data of gray" in refusal(captcha, "--data", gray_data)
    too_many = refusal(captcha, "--data", data, *SMALL, "--batch-size", "49")
    assert too_many == "--batch-size 49 x 1 is more than the 48 training pictures"
    assert "no such config file" in refusal(captcha, "--config", tmp_path / "none.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_refuses_a_gpu_that_is_not_there(data: Path, refusal: Callable[..., str]) -> None:
    assert "no GPU" in refusal(captcha, "--data", data, "--device", "cuda")
