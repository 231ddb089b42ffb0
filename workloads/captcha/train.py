"""Slider captchas: a CNN finds the puzzle piece and its notch, settings in config.yaml.

python -m workloads.captcha.train --data data/captcha --epochs 20
torchrun --nproc-per-node 2 -m workloads.captcha.train --data data/captcha
"""

import argparse
import csv
import math
import os
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[2]))
from workloads.making import Refused, clear_errors, require

DEPTHS = (12, 4, 1)  # residual blocks a stage


def settings():
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config", type=Path, default=Path(__file__).with_name("config.yaml"))
    config = first.parse_known_args()[0].config
    if not config.is_file():
        raise Refused(f"no such config file: {config}")
    parser = argparse.ArgumentParser(parents=[first], description="Train the slider captcha network.")
    for key, value in yaml.safe_load(config.read_text()).items():
        kind = type(value) if type(value) in (int, float, str) else yaml.safe_load
        parser.add_argument(f"--{key.replace('_', '-')}", type=kind, default=value)
    parser.add_argument("--resident", action="store_true", help="train on a few batches kept on the device")
    return parser.parse_args()


# ---------------------------------------------------------------- data


class SliderDataset(Dataset):
    """Pictures as height x width x 3 bytes, and the left edges of piece and notch in pixels."""

    def __init__(self, root, sheets):
        self.root = Path(root)
        self.rows = []
        for sheet in sheets:
            with (self.root / "labels" / f"{sheet:04}.csv").open() as file:
                self.rows += [(row["file"], int(row["piece_x"]), int(row["notch_x"])) for row in csv.DictReader(file)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        file, piece_x, notch_x = self.rows[index]
        path = self.root / "images" / file
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise Refused(f"{path} cannot be read: {error}") from None
        return torch.from_numpy(np.array(image)), torch.tensor([piece_x, notch_x], dtype=torch.float32)


def to_device(batch, device):
    return [part.to(device, non_blocking=True) for part in batch]


# ---------------------------------------------------------------- model


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(x + self.norm2(self.conv2(y)))


def halving(before, after):
    conv = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.SiLU())


class SliderNet(nn.Module):
    """Scores each column of the picture for piece and notch; where each is, is the mean column under its scores."""

    def __init__(self, width, depths=DEPTHS):
        super().__init__()
        layers, channels = [halving(3, width)], width
        for stage, depth in enumerate(depths):
            before, channels = channels, width * 2**stage
            layers += [halving(before, channels), *(Residual(channels) for _ in range(depth))]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv1d(channels, 2, 3, padding=1)

    def forward(self, images):
        x = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        columns = self.head(self.body(x).mean(dim=2)).float().softmax(dim=2)
        centres = torch.linspace(0, images.shape[2], columns.shape[2], device=images.device)
        return (columns * centres).sum(dim=2)


# ---------------------------------------------------------------- training


@torch.no_grad()
def slide_error(model, loader, device, use_bf16):
    """How far off, in pixels, the piece would be dropped."""
    model.eval()
    errors = []
    for batch in loader:
        images, edges = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
            found = model(images)
        errors.append((found - edges).diff(dim=1).abs())
    model.train()
    return torch.cat(errors).mean().item()


def main():
    cfg = settings()
    facts = require(cfg.data, "captcha")
    device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: no GPU here that torch can use")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    train_sheets = facts["items"] - facts["val"]
    train_set = SliderDataset(cfg.data, range(train_sheets))
    val_set = SliderDataset(cfg.data, range(train_sheets, facts["items"]))
    if cfg.batch_size * world > len(train_set):
        raise Refused(f"--batch-size {cfg.batch_size} x {world} is more than the {len(train_set)} training pictures")
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(cfg.seed)

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

    use_bf16 = cfg.amp == "bf16"
    model = net = SliderNet(cfg.width).to(device)
    if cfg.channels_last:
        net.to(memory_format=torch.channels_last)
    if world > 1:
        model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in net.parameters()) / 1e6
        print(f"{parameters:.2f} M parameters, {len(train_set)} pictures, batch {cfg.batch_size} x {world}")
        print(f"amp {cfg.amp}, compile {cfg.compile_model}, tf32 {cfg.tf32}, cudnn.benchmark {cfg.cudnn_benchmark}")

    def validate_and_save(epoch):
        if rank == 0:
            print(f"epoch {epoch}  val error {slide_error(net, val_loader, device, use_bf16):.2f} px", flush=True)
            Path(cfg.out).mkdir(parents=True, exist_ok=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(cfg.out) / "last.pt")
        if world > 1:
            dist.barrier()

    if cfg.resident:
        resident = [to_device(batch, device) for batch in islice(loader, 4)]
    losses, piece_errors, notch_errors = [], [], []
    step, last = 0, min(cfg.max_steps or math.inf, cfg.epochs * len(loader))
    logged_at = time.perf_counter()
    for epoch in range(1, cfg.epochs + 1):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in islice(cycle(resident), len(loader)) if cfg.resident else loader:
            images, edges = to_device(batch, device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
                found = model(images)
            loss = F.smooth_l1_loss(found, edges, beta=2.0)
            loss.backward()
            optimizer.step()
            piece_error, notch_error = (found - edges).abs().mean(dim=0)
            losses.append(loss.item())
            piece_errors.append(piece_error.item())
            notch_errors.append(notch_error.item())
            step += 1
            if step % cfg.log_every == 0 and rank == 0:
                loss, piece, notch = (sum(seen) / len(seen) for seen in (losses, piece_errors, notch_errors))
                speed = len(losses) * cfg.batch_size * world / (time.perf_counter() - logged_at)
                print(
                    f"epoch {epoch}  step {step}  loss {loss:.4f}  piece {piece:.2f} px  notch {notch:.2f} px  "
                    f"{speed:.0f} samples/s",
                    flush=True,
                )
                losses, piece_errors, notch_errors = [], [], []
                logged_at = time.perf_counter()
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
