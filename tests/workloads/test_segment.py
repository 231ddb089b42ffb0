"""segment, end to end on a CPU: as written, and mended."""

from __future__ import annotations

import importlib.util
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from running import ROOT, files, losses, make, run
from torch import nn

from benchmarks import workloads
from benchmarks.mended import MENDED, Edit, Flags
from workloads.segment import train as segment

SMALL = ("--width", "4", "--device", "cpu", "--num-workers", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segment") / "tiny"
    assert make("segment", folder, "--size", "tiny").returncode == 0
    return folder


@pytest.fixture(scope="module")
def mended_copy() -> Iterator[Path]:
    with workloads.copied([("segment", mend) for mend in MENDED["segment"] if isinstance(mend, Edit)]) as root:
        yield root


def test_the_same_seed_makes_the_same_pictures(data: Path, tmp_path: Path) -> None:
    make("segment", tmp_path / "again", "--size", "tiny", "--workers", "1")
    made = files(data)
    assert files(tmp_path / "again") == made
    make("segment", tmp_path / "other", "--size", "tiny", "--seed", "1")
    assert files(tmp_path / "other")["images/000000.jpg"] != made["images/000000.jpg"]


def test_each_class_is_in_the_masks_and_each_mask_fits_its_picture(data: Path) -> None:
    counts = np.zeros(4, int)
    for path in sorted((data / "masks").glob("*.png")):
        mask = np.array(Image.open(path))
        assert np.array(Image.open(data / "images" / f"{path.stem}.jpg")).shape == (*mask.shape, 3)
        counts += np.bincount(mask.ravel(), minlength=4)
    assert (counts > 0.01 * counts.sum()).all()


def test_learns_and_saves_what_it_learned(data: Path, tmp_path: Path) -> None:
    # GIVEN the script started by its path, from anywhere, with a worker
    script = ROOT / "workloads" / "segment" / "train.py"
    flags = ["--data", data, "--out", "run", "--epochs", "5", "--batch-size", "8", "--lr", "0.01", "--width", "8"]
    more = ["--device", "cpu", "--num-workers", "1", "--log-every", "1", "--eval-every", "3"]
    ended = run("python", script, *flags, *more, cwd=tmp_path)

    # THEN the loss falls, the metric is told when asked for, and the checkpoint holds the trained network
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert len(seen) == 5 * 32 // 8
    assert sum(seen[-4:]) < 0.8 * sum(seen[:4])
    assert re.findall(r"epoch (\d+)  val IoU 0\.\d+", ended.stdout) == ["3", "5"]
    saved = torch.load(tmp_path / "run" / "last.pt")
    assert saved["epoch"] == 5
    segment.UNet(4, width=8).load_state_dict(saved["model"])


def test_the_same_seed_gives_the_same_losses(data: Path, train: Callable[..., str]) -> None:
    flags = ("--data", data, *SMALL, "--batch-size", "4", "--max-steps", "3", "--log-every", "1")
    first = losses(train(segment, *flags))
    assert len(first) == 3
    assert losses(train(segment, *flags)) == first
    assert losses(train(segment, *flags, "--seed", "1")) != first


def test_resident_training_loads_a_few_batches_and_no_more(
    data: Path, tmp_path: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    original = segment.PhotoDataset.__getitem__
    monkeypatch.setattr(segment.PhotoDataset, "__getitem__", lambda self, i: (loaded.append(i), original(self, i))[1])
    train(segment, "--data", data, *SMALL, "--batch-size", "4", "--resident", "--max-steps", "10")
    assert len(loaded) == 4 * 4
    assert not (tmp_path / "run" / "last.pt").exists()


def test_only_training_pictures_are_augmented(data: Path) -> None:
    cfg = SimpleNamespace(flip=0.5, rotate=15, brightness=0.2, contrast=0.2)
    names = ["000000"]
    augmented, plain = segment.PhotoDataset(data, names, cfg), segment.PhotoDataset(data, names)
    assert not torch.equal(augmented[0][0], augmented[0][0])
    assert torch.equal(plain[0][0], plain[0][0])
    assert segment.IGNORE not in plain[0][1]


def test_each_picture_is_turned_with_its_mask(data: Path) -> None:
    # GIVEN a picture that shows its own mask, in steps that blurred edges do not hide
    mask = Image.open(data / "masks" / "000001.png")
    image = Image.fromarray(np.array(mask) * 60).convert("RGB")
    cfg = SimpleNamespace(flip=0.5, rotate=15, brightness=0, contrast=0)
    random.seed(0)

    # THEN it still does after every draw, mirrored or not
    turned = set()
    for _ in range(6):
        pixels, turned_mask = segment.augment(image, mask, cfg)
        classes = np.array(turned_mask)
        inside = classes != segment.IGNORE
        assert (np.round(pixels[..., 0] / 60) == classes)[inside].mean() > 0.95
        turned.add(classes.tobytes())
    assert len(turned) == 6


def test_the_score_is_the_mean_share_that_prediction_and_truth_have_in_common() -> None:
    # GIVEN four pixels of class 0 and two of class 1, one of which is taken for class 0
    truth = torch.tensor([[[0, 0, 0], [0, 1, 1]]])
    found = torch.tensor([[[0, 0, 0], [0, 0, 1]]])
    scores = nn.functional.one_hot(found, 2).permute(0, 3, 1, 2).float()
    cfg = SimpleNamespace(channels_last=False, amp=False)
    score = segment.mean_iou(nn.Identity(), [(scores, truth)], torch.device("cpu"), cfg, classes=2)
    assert score == pytest.approx((4 / 5 + 1 / 2) / 2)


def test_mended_it_still_learns(data: Path, mended_copy: Path, tmp_path: Path) -> None:
    flags = " ".join(mend.flags for mend in MENDED["segment"] if isinstance(mend, Flags)).format(spare=1).split()
    script = mended_copy / "workloads" / "segment" / "train.py"
    small = ["--width", "8", "--device", "cpu", "--batch-size", "8", "--lr", "0.01", "--epochs", "5"]
    ended = run("python", script, "--data", data, "--out", tmp_path, *flags, *small, "--log-every", "1")
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert sum(seen[-4:]) < 0.8 * sum(seen[:4])
    assert "val IoU" in ended.stdout


def test_mended_each_picture_is_turned_with_its_mask(data: Path, mended_copy: Path) -> None:
    # GIVEN pictures that show their own masks
    mended = imported(mended_copy / "workloads" / "segment" / "train.py")
    paths = sorted((data / "masks").glob("*.png"))[:8]
    masks = torch.stack([torch.from_numpy(np.array(Image.open(path))) for path in paths])
    images = masks.unsqueeze(1).expand(-1, 3, -1, -1).float() / 255
    cfg = SimpleNamespace(flip=0.5, rotate=15, brightness=0, contrast=0)
    torch.manual_seed(0)

    turned_images, turned_masks = mended.augment_batch(images, masks, cfg)

    # THEN they still do, but for blurred edges, and what was turned in from outside counts for nothing
    inside = turned_masks != segment.IGNORE
    assert 0.8 < inside.float().mean() < 0.99
    agree = (255 * turned_images[:, 0]).round()[inside] == turned_masks[inside]
    assert agree.float().mean() > 0.97
    # AND not all of them were turned alike
    assert len({tuple(mask.flatten().tolist()) for mask in ~inside}) > 4

    # AND with nothing to draw from, nothing changes
    unmoved = mended.augment_batch(images, masks, SimpleNamespace(flip=0, rotate=0, brightness=0, contrast=0))
    assert torch.allclose(unmoved[0], images, atol=1e-5)
    assert torch.equal(unmoved[1].long(), masks.long())


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mended_segment", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_damaged_picture_or_mask_is_named_also_when_a_worker_meets_it(
    data: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    picture, mask = tmp_path / "data" / "images" / "000005.jpg", tmp_path / "data" / "masks" / "000006.png"
    flags = ("--data", tmp_path / "data", *SMALL, "--batch-size", "16", "--epochs", "1")

    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    assert refusal(segment, *flags).startswith(f"{picture} cannot be read: image file is truncated")
    picture.write_bytes(whole)
    mask.write_bytes(mask.read_bytes()[:100])
    ended = run("python", "-m", "workloads.segment.train", *flags, "--out", tmp_path / "run", "--num-workers", "1")
    assert ended.returncode == 2
    assert re.fullmatch(rf"{mask} cannot be read: .*\n", ended.stderr), ended.stderr


def test_refuses_what_cannot_work(data: Path, gray_data: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert "python -m workloads.segment.make" in refusal(segment, "--data", tmp_path / "none")
    assert "holds the data of gray" in refusal(segment, "--data", gray_data)
    too_many = refusal(segment, "--data", data, *SMALL, "--batch-size", "33")
    assert too_many == "--batch-size 33 x 1 is more than the 32 training pictures"
    assert "no such config file" in refusal(segment, "--config", tmp_path / "none.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_refuses_a_gpu_that_is_not_there(data: Path, refusal: Callable[..., str]) -> None:
    assert "no GPU" in refusal(segment, "--data", data, "--device", "cuda")
