"""Semantic segmentation with a small U-Net: 512x512 photos, PNG masks, settings in config.yaml.

python -m workloads.segment.train --data data/segment --epochs 30
torchrun --nproc-per-node 2 -m workloads.segment.train --data data/segment
"""

import argparse
import math
import os
import random
import sys
import time
from itertools import cycle, islice, pairwise
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

MEAN, STD = 0.45, 0.23
IGNORE = 255  # what rotation turns in from outside the picture


def settings():
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config", type=Path, default=Path(__file__).with_name("config.yaml"))
    config = first.parse_known_args()[0].config
    if not config.is_file():
        raise Refused(f"no such config file: {config}")
    parser = argparse.ArgumentParser(parents=[first], description="Train the segmentation U-Net.")
    for key, value in yaml.safe_load(config.read_text()).items():
        kind = type(value) if type(value) in (int, float, str) else yaml.safe_load
        parser.add_argument(f"--{key.replace('_', '-')}", type=kind, default=value)
    parser.add_argument("--resident", action="store_true", help="train on a few batches kept on the device")
    return parser.parse_args()


# ---------------------------------------------------------------- data


def read(path, mode):
    try:
        with Image.open(path) as image:
            return image.convert(mode)
    except (OSError, SyntaxError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None


def augment(image, mask, cfg):
    if random.random() < cfg.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mask = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    angle = random.uniform(-cfg.rotate, cfg.rotate)
    image = image.rotate(angle, Image.Resampling.BILINEAR)
    mask = mask.rotate(angle, Image.Resampling.NEAREST, fillcolor=IGNORE)
    image = np.clip(np.array(image) * random.uniform(1 - cfg.brightness, 1 + cfg.brightness), 0, 255)
    mean = image.mean()
    image = np.clip(mean + (image - mean) * random.uniform(1 - cfg.contrast, 1 + cfg.contrast), 0, 255)
    return image, mask


class PhotoDataset(Dataset):
    def __init__(self, root, names, cfg=None):
        self.root = Path(root)
        self.names = names
        self.cfg = cfg  # with it, pictures are augmented

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        image = read(self.root / "images" / f"{name}.jpg", "RGB")
        mask = read(self.root / "masks" / f"{name}.png", "L")
        if self.cfg is not None:
            image, mask = augment(image, mask, self.cfg)
        image = (np.array(image) / 255.0 - MEAN) / STD
        return torch.from_numpy(image).permute(2, 0, 1).float(), torch.from_numpy(np.array(mask))


def to_device(batch, device, cfg):
    images, masks = batch
    images = images.to(device, non_blocking=True)
    masks = masks.to(device, non_blocking=True).long()
    if cfg.channels_last:
        images = images.to(memory_format=torch.channels_last)
    return images, masks


# ---------------------------------------------------------------- model


def block(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Works at half the picture's resolution; the class scores are brought back up at the end."""

    def __init__(self, classes, width, levels=4):
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.first = block(width, width)
        self.down = nn.ModuleList(block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.merge = nn.ModuleList(block(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        x = self.first(self.stem(x))
        seen = []
        for down in self.down:
            seen.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([up(x), seen.pop()], dim=1))
        return F.interpolate(self.head(x), scale_factor=2, mode="bilinear", align_corners=False)


# ---------------------------------------------------------------- training


@torch.no_grad()
def mean_iou(model, loader, device, cfg, classes):
    model.eval()
    table = torch.zeros(classes, classes, device=device)
    for batch in loader:
        images, masks = to_device(batch, device, cfg)
        with torch.autocast(device.type, torch.bfloat16, enabled=cfg.amp):
            found = model(images).argmax(dim=1)
        table += torch.bincount((masks * classes + found).flatten(), minlength=classes**2).view(classes, classes)
    model.train()
    hit = table.diag()
    return (hit / (table.sum(0) + table.sum(1) - hit).clamp(min=1)).mean().item()


def main():
    cfg = settings()
    facts = require(cfg.data, "segment")
    device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: no GPU here that torch can use")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    names = [f"{index:06}" for index in range(facts["items"])]
    train_set = PhotoDataset(cfg.data, names[: -facts["val"]], cfg)
    val_set = PhotoDataset(cfg.data, names[-facts["val"] :])
    if cfg.batch_size * world > len(train_set):
        raise Refused(f"--batch-size {cfg.batch_size} x {world} is more than the {len(train_set)} training pictures")
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

    model = net = UNet(len(facts["classes"]), cfg.width).to(device)
    if cfg.channels_last:
        net.to(memory_format=torch.channels_last)
    if world > 1:
        model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)

    def validate_and_save(epoch):
        if rank == 0:
            score = mean_iou(net, val_loader, device, cfg, len(facts["classes"]))
            print(f"epoch {epoch}  val IoU {score:.4f}", flush=True)
            Path(cfg.out).mkdir(parents=True, exist_ok=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(cfg.out) / "last.pt")
        if world > 1:
            dist.barrier()

    if cfg.resident:
        resident = [(images.to(device), masks.to(device)) for images, masks in islice(loader, 4)]
    step, last = 0, min(cfg.max_steps or math.inf, cfg.epochs * len(loader))
    logged_step, logged_at = 0, time.perf_counter()
    for epoch in range(1, cfg.epochs + 1):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for images, masks in islice(cycle(resident), len(loader)) if cfg.resident else loader:
            images, masks = to_device((images, masks), device, cfg)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=cfg.amp):
                loss = criterion(model(images), masks)
            loss.backward()
            optimizer.step()
            step += 1
            if step % cfg.log_every == 0 and rank == 0:
                value, now = loss.item(), time.perf_counter()
                speed = (step - logged_step) * cfg.batch_size * world / (now - logged_at)
                logged_step, logged_at = step, now
                print(f"epoch {epoch}  step {step}  loss {value:.4f}  {speed:.0f} samples/s", flush=True)
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
