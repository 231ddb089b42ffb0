"""Clip classification on H.264 files with a video transformer, settings in config.py.

python -m workloads.video.train --data data/video --epochs 30
python -m workloads.video.train --config workloads/video/config_small.py --data data/video-small
torchrun --nproc-per-node 2 -m workloads.video.train --data data/video
"""

import argparse
import ast
import math
import os
import random
import runpy
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import av
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from av.video.reformatter import VideoReformatter
from PIL import Image, ImageEnhance
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[2]))
from workloads.making import Refused, clear_errors, require

MEAN, STD = 0.45, 0.225
TUBELET, PATCH = 2, 16  # frames and pixels a token covers
THREADED_CONVERSION = int(av.__version__.split(".")[0]) >= 17  # from then on PyAV takes all cores unless told


def python_value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def settings():
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config", type=Path, default=Path(__file__).with_name("config.py"))
    config = first.parse_known_args()[0].config
    if not config.is_file():
        raise Refused(f"no such config file: {config}")
    parser = argparse.ArgumentParser(parents=[first], description="Train the clip classifier.")
    for key, value in runpy.run_path(str(config)).items():
        if key.isupper():
            kind = type(value) if type(value) in (int, float, str) else python_value
            parser.add_argument(f"--{key.lower().replace('_', '-')}", type=kind, default=value)
    parser.add_argument("--resident", action="store_true", help="train on a few batches kept on the device")
    return parser.parse_args()


# ---------------------------------------------------------------- data


def decode(path, threads):
    """All frames of a video, as frames x height x width x 3 bytes."""
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = threads
            convert = VideoReformatter()
            options = {"format": "rgb24"} | ({"threads": threads} if THREADED_CONVERSION else {})
            return np.stack([convert.reformat(frame, **options).to_ndarray() for frame in container.decode(stream)])
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise Refused(f"{path} cannot be decoded: {getattr(error, 'strerror', error)}") from None


def read_video(path, cfg):
    """The frames of a video, from the cache where there is one."""
    if cfg.cache_dir is None:
        return decode(path, cfg.decode_threads)
    cached = Path(cfg.cache_dir) / f"{path.stem}.npy"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            np.save(file, decode(path, cfg.decode_threads))
        part.replace(cached)
    return np.load(cached, mmap_mode="r")


class ClipDataset(Dataset):
    """Clips (frames x height x width x 3), how to jitter their colours, and their classes."""

    def __init__(self, files, classes, cfg, train):
        self.files = files
        self.classes = classes
        self.cfg = cfg
        self.train = train

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        cfg, path = self.cfg, self.files[index]
        video = read_video(path, cfg)
        frames, height, width = video.shape[:3]
        if frames < cfg.clip_frames:
            raise Refused(f"{path} ends after {frames} frames; a clip has {cfg.clip_frames}")
        if self.train:
            start = random.randint(0, frames - cfg.clip_frames)
            top, left = random.randint(0, height - cfg.crop), random.randint(0, width - cfg.crop)
            jitter = [random.uniform(1 - cfg.jitter, 1 + cfg.jitter) for _ in range(3)]
        else:
            start, top, left = 0, (height - cfg.crop) // 2, (width - cfg.crop) // 2
            jitter = [1.0, 1.0, 1.0]
        label = self.classes.index(path.stem.split("_")[1])

        if cfg.jitter_on == "gpu":
            clip = video[start : start + cfg.clip_frames, top : top + cfg.crop, left : left + cfg.crop]
            return torch.from_numpy(np.ascontiguousarray(clip)), torch.tensor(jitter), label
        clip = []
        for frame in video[start : start + cfg.clip_frames]:
            image = Image.fromarray(frame).crop((left, top, left + cfg.crop, top + cfg.crop))
            image = ImageEnhance.Brightness(image).enhance(jitter[0])
            image = ImageEnhance.Contrast(image).enhance(jitter[1])
            image = ImageEnhance.Color(image).enhance(jitter[2])
            clip.append((np.asarray(image, dtype=np.float32) / 255 - MEAN) / STD)
        return torch.from_numpy(np.stack(clip)), torch.tensor(jitter), label


def gray(clips):
    red, green, blue = clips.split(1, dim=-1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def jitter_colours(clips, jitter):
    """What ImageEnhance does to each frame, for a batch of clips at once."""
    brightness, contrast, saturation = jitter.view(-1, 3, 1, 1, 1, 1).unbind(1)
    clips = (clips.float() / 255 * brightness).clamp(0, 1)
    mean = gray(clips).mean(dim=(2, 3), keepdim=True)
    clips = (mean + (clips - mean) * contrast).clamp(0, 1)
    shade = gray(clips)
    clips = (shade + (clips - shade) * saturation).clamp(0, 1)
    return (clips - MEAN) / STD


def to_device(batch, device):
    return [part.to(device, non_blocking=True) for part in batch]


# ---------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, dim)
        x = x + self.out(seen)
        return x + self.mlp(self.norm2(x))


class ClipTransformer(nn.Module):
    """A ViT over tubelets; a long clip is cut into chunks, and the chunks' features are averaged."""

    def __init__(self, classes, cfg):
        super().__init__()
        self.chunk = cfg.chunk_frames
        tokens = (cfg.chunk_frames // TUBELET) * (cfg.crop // PATCH) ** 2
        self.embed = nn.Linear(TUBELET * PATCH * PATCH * 3, cfg.dim)
        self.position = nn.Parameter(torch.randn(1, tokens, cfg.dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(cfg.dim, cfg.heads) for _ in range(cfg.depth)))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, classes)

    def forward(self, clips):
        batch, frames, height, width, _ = clips.shape
        chunks = frames // self.chunk
        tubes = clips.view(
            batch * chunks, self.chunk // TUBELET, TUBELET, height // PATCH, PATCH, width // PATCH, PATCH, 3
        )
        tokens = tubes.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4).flatten(1, 3)
        features = self.norm(self.blocks(self.embed(tokens) + self.position))
        return self.head(features.view(batch, -1, features.shape[-1]).mean(dim=1))


# ---------------------------------------------------------------- training


def predict(model, clips, jitter, cfg):
    if cfg.jitter_on == "gpu":
        clips = jitter_colours(clips, jitter)
    with torch.autocast(clips.device.type, torch.bfloat16, enabled=cfg.amp):
        return model(clips).float()


@torch.no_grad()
def accuracy(model, loader, device, cfg):
    model.eval()
    hits = []
    for batch in loader:
        clips, jitter, labels = to_device(batch, device)
        hits.append(predict(model, clips, jitter, cfg).argmax(dim=1) == labels)
    model.train()
    return torch.cat(hits).float().mean().item()


def main():
    cfg = settings()
    facts = require(cfg.data, "video")
    device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: no GPU here that torch can use")
    if cfg.crop > min(facts["height"], facts["width"]) or cfg.clip_frames > facts["frames"]:
        raise Refused(
            f"{cfg.data} has {facts['frames']} frames of {facts['width']}x{facts['height']}, too small for clips of "
            f"{cfg.clip_frames} at {cfg.crop} px: use --config workloads/video/config_small.py"
        )
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    files = sorted((Path(cfg.data) / "videos").glob("*.mp4"))
    train_set = ClipDataset(files[: -facts["val"]], facts["classes"], cfg, train=True)
    val_set = ClipDataset(files[-facts["val"] :], facts["classes"], cfg, train=False)
    if cfg.batch_size * world > len(train_set):
        raise Refused(f"--batch-size {cfg.batch_size} x {world} is more than the {len(train_set)} training videos")
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(cfg.seed)
    random.seed(cfg.seed + rank)

    sampler = DistributedSampler(train_set, seed=cfg.seed) if world > 1 else None
    loader = DataLoader(
        train_set,
        batch_size=cfg.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        num_workers=cfg.num_workers,
        prefetch_factor=cfg.prefetch_factor if cfg.num_workers else None,
        persistent_workers=cfg.persistent_workers and cfg.num_workers > 0,
        pin_memory=cfg.pin_memory and device.type == "cuda",
    )
    val_loader = DataLoader(val_set, batch_size=cfg.batch_size, num_workers=cfg.num_workers)

    model = net = ClipTransformer(len(facts["classes"]), cfg).to(device)
    if world > 1:
        model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)

    def validate_and_save(epoch):
        if rank == 0:
            print(f"epoch {epoch}  val accuracy {accuracy(net, val_loader, device, cfg):.4f}", flush=True)
            Path(cfg.out).mkdir(parents=True, exist_ok=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(cfg.out) / "last.pt")
        if world > 1:
            dist.barrier()

    if cfg.resident:
        resident = [to_device(batch, device) for batch in islice(loader, 4)]
    step, last = 0, min(cfg.max_steps or math.inf, cfg.epochs * len(loader))
    logged_step, logged_at = 0, time.perf_counter()
    for epoch in range(1, cfg.epochs + 1):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in islice(cycle(resident), len(loader)) if cfg.resident else loader:
            clips, jitter, labels = to_device(batch, device)
            optimizer.zero_grad()
            loss = F.cross_entropy(predict(model, clips, jitter, cfg), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % cfg.log_every == 0 and rank == 0:
                value, now = loss.item(), time.perf_counter()
                speed = (step - logged_step) * cfg.batch_size * world / (now - logged_at)
                logged_step, logged_at = step, now
                print(f"epoch {epoch}  step {step}  loss {value:.4f}  {speed:.1f} samples/s", flush=True)
            if step == last:
                break
        if not cfg.resident and (epoch % cfg.eval_every == 0 or step == last):
            validate_and_save(epoch)
        if step == last:
            break
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    with clear_errors():
        main()
