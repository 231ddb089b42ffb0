"""video, end to end on a CPU: as written, with a cache, and mended."""

from __future__ import annotations

import random
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import av
import pytest
import torch
from running import ROOT, files, make, run
from torch import nn

from benchmarks.mended import MENDED, Edit, Flags
from workloads.making import Refused
from workloads.video import train as video

CONFIG = ("--config", ROOT / "workloads" / "video" / "config_small.py")
SMALL = (*CONFIG, "--dim", "32", "--depth", "1", "--device", "cpu", "--num-workers", "0", "--decode-threads", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video") / "tiny"
    assert make("video", folder, "--size", "tiny").returncode == 0
    return folder


@pytest.fixture
def cfg(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, SMALL)])
    return video.settings()


def losses(log: str) -> list[float]:
    return [float(number) for number in re.findall(r"step \d+  loss ([\d.]+)  [\d.]+ samples/s", log)]


def test_the_same_seed_makes_the_same_videos(data: Path, tmp_path: Path) -> None:
    make("video", tmp_path / "again", "--size", "tiny", "--workers", "1")
    made = files(data)
    assert files(tmp_path / "again") == made
    make("video", tmp_path / "other", "--size", "tiny", "--seed", "1")
    assert files(tmp_path / "other")["videos/00000_left.mp4"] != made["videos/00000_left.mp4"]


def test_the_videos_are_h264_of_the_size_and_length_the_manifest_says(data: Path) -> None:
    with av.open(str(data / "videos" / "00003_down.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", 64, 48)
        assert sum(1 for _ in container.decode(stream)) == 18


def test_learns_and_saves_what_it_learned(data: Path, tmp_path: Path) -> None:
    # GIVEN the script started by its path, from anywhere, with a worker
    script = ROOT / "workloads" / "video" / "train.py"
    flags = [*CONFIG, "--data", data, "--out", "run", "--epochs", "10", "--batch-size", "6", "--dim", "64"]
    more = ["--depth", "2", "--device", "cpu", "--num-workers", "1", "--decode-threads", "2"]
    more += ["--log-every", "1", "--eval-every", "5"]
    ended = run("python", script, *flags, *more, cwd=tmp_path)

    # THEN the loss falls, the metric is told when asked for, and the checkpoint holds the trained network
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert len(seen) == 10 * 18 // 6
    assert sum(seen[-6:]) < 0.8 * sum(seen[:6])
    assert re.findall(r"epoch (\d+)  val accuracy [01]\.\d+", ended.stdout) == ["5", "10"]
    saved = torch.load(tmp_path / "run" / "last.pt")
    assert saved["epoch"] == 10
    assert saved["model"]["head.weight"].shape == (6, 64)


def test_the_same_seed_gives_the_same_losses(data: Path, train: Callable[..., str]) -> None:
    flags = ("--data", data, *SMALL, "--batch-size", "4", "--max-steps", "3", "--log-every", "1")
    first = losses(train(video, *flags))
    assert len(first) == 3
    assert losses(train(video, *flags)) == first
    assert losses(train(video, *flags, "--seed", "1")) != first


def test_the_class_of_a_clip_is_the_motion_in_its_name(data: Path, cfg: Namespace) -> None:
    paths = sorted((data / "videos").glob("*.mp4"))[:3]
    assert [path.stem for path in paths] == ["00000_left", "00001_right", "00002_up"]
    clips = video.ClipDataset(paths, ["up", "left", "right"], cfg, train=False)
    assert [clips[i][2] for i in range(3)] == [1, 2, 0]


def test_accuracy_is_the_share_of_clips_that_were_right(cfg: Namespace) -> None:
    scores, labels = torch.eye(4), torch.tensor([0, 1, 2, 0])
    assert video.accuracy(nn.Identity(), [(scores, torch.ones(4, 3), labels)], torch.device("cpu"), cfg) == 0.75


def test_attention_stays_within_a_chunk(cfg: Namespace) -> None:
    # GIVEN a clip of two chunks
    cfg.chunk_frames = 8
    model = video.ClipTransformer(6, cfg)
    clip = torch.rand(1, 16, cfg.crop, cfg.crop, 3)

    # THEN its score is the mean of what each chunk scores by itself
    halves = torch.stack([model(clip[:, :8]), model(clip[:, 8:])])
    assert torch.allclose(model(clip), halves.mean(dim=0), atol=1e-5)


def test_jitter_on_the_device_is_the_jitter_of_each_frame(data: Path, cfg: Namespace) -> None:
    # GIVEN the same draws for a clip jittered frame by frame, and for one jittered as a batch
    paths = sorted((data / "videos").glob("*.mp4"))
    clips = {}
    for place in ("cpu", "gpu"):
        cfg.jitter_on = place
        random.seed(3)
        clips[place] = video.ClipDataset(paths, ["down"], cfg, train=True)[3]
    by_frame, (raw, jitter, _) = clips["cpu"][0], clips["gpu"]
    assert raw.dtype == torch.uint8
    assert not torch.equal(jitter, torch.ones(3))

    at_once = video.jitter_colours(raw.unsqueeze(0), jitter.unsqueeze(0))[0]

    # THEN they differ by the rounding of the three steps in bytes, and no more
    difference = (at_once - by_frame).abs() * video.STD * 255
    assert difference.max() < 4


def test_a_cached_video_is_not_decoded_again(
    data: Path, tmp_path: Path, cfg: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data / "videos" / "00003_down.mp4"
    decoded = video.decode(path, threads=1)
    cfg.cache_dir = str(tmp_path / "cache")
    assert (video.read_video(path, cfg) == decoded).all()
    monkeypatch.setattr(video, "decode", None)
    assert (video.read_video(path, cfg) == decoded).all()
    assert list(files(tmp_path / "cache")) == ["00003_down.npy"]


def test_resident_training_loads_a_few_batches_and_no_more(
    data: Path, tmp_path: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    original = video.ClipDataset.__getitem__
    monkeypatch.setattr(video.ClipDataset, "__getitem__", lambda self, i: (loaded.append(i), original(self, i))[1])
    train(video, "--data", data, *SMALL, "--batch-size", "4", "--resident", "--max-steps", "10")
    assert len(loaded) == 4 * 4
    assert not (tmp_path / "run" / "last.pt").exists()


def test_mended_it_still_learns(data: Path, tmp_path: Path) -> None:
    assert not [mend for mend in MENDED["video"] if isinstance(mend, Edit)]  # its own settings are enough
    flags = " ".join(mend.flags for mend in MENDED["video"] if isinstance(mend, Flags)).format(spare=1).split()
    small = ["--data", data, "--out", tmp_path, "--epochs", "10", "--batch-size", "6", "--dim", "64", "--depth", "2"]
    more = ["--device", "cpu", "--log-every", "1", "--eval-every", "10"]
    ended = run("python", "-m", "workloads.video.train", *CONFIG, *flags, *small, *more)
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert sum(seen[-6:]) < 0.8 * sum(seen[:6])
    assert "val accuracy" in ended.stdout


def test_a_video_cut_short_is_named_also_when_a_worker_meets_it(
    data: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    cut = tmp_path / "data" / "videos" / "00002_up.mp4"
    cut.write_bytes(cut.read_bytes()[:2000])
    message = f"{cut} cannot be decoded: Invalid data found when processing input"

    flags = ("--data", tmp_path / "data", *SMALL, "--batch-size", "9", "--epochs", "1")
    assert refusal(video, *flags) == message
    ended = run("python", "-m", "workloads.video.train", *flags, "--out", tmp_path / "run", "--num-workers", "1")
    assert (ended.returncode, ended.stderr) == (2, message + "\n")


def test_a_video_with_too_few_frames_is_named(data: Path, cfg: Namespace) -> None:
    cfg.clip_frames = 100
    path = data / "videos" / "00003_down.mp4"
    with pytest.raises(Refused, match=rf"{path} ends after 18 frames; a clip has 100"):
        video.ClipDataset([path], ["down"], cfg, train=True)[0]


def test_refuses_what_cannot_work(data: Path, gray_data: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert "python -m workloads.video.make" in refusal(video, "--data", tmp_path / "none")
    assert "holds the data of gray" in refusal(video, "--data", gray_data)
    too_many = refusal(video, "--data", data, *SMALL, "--batch-size", "19")
    assert too_many == "--batch-size 19 x 1 is more than the 18 training videos"
    assert "no such config file" in refusal(video, "--config", tmp_path / "none.py")
    assert "config_small.py" in refusal(video, "--data", data, "--device", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_refuses_a_gpu_that_is_not_there(data: Path, refusal: Callable[..., str]) -> None:
    assert "no GPU" in refusal(video, "--data", data, "--device", "cuda")
