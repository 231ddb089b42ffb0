"""Train a small residual CNN to tell worn stamps apart.

python -m workloads.gray.train --data data/gray
torchrun --nproc-per-node 4 -m workloads.gray.train --data data/gray
"""

import argparse
import itertools
import math
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[2]))
from workloads.making import Refused, clear_errors, require


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/gray")
    parser.add_argument("--out", default="runs/gray")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--max-steps", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=80, help="channels of the first stage")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=2, help="batches each worker loads ahead")
    parser.add_argument("--persistent-workers", action="store_true")
    parser.add_argument("--pin-memory", action="store_true")
    parser.add_argument("--eval-every", type=int, default=1, help="epochs")
    parser.add_argument("--save-every", type=int, default=1, help="epochs")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resident", action="store_true", help="train on a few batches kept on the device")
    return parser.parse_args()


class Stamps(Dataset):
    def __init__(self, root, classes, train):
        self.samples = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted(Path(root, "train" if train else "val", name).glob("*.png"))
        ]
        self.train = train

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        try:
            with Image.open(path) as file:
                image = file.convert("L")
        except (OSError, SyntaxError, ValueError) as error:
            raise Refused(f"{path} cannot be read: {error}") from error
        if self.train:
            if random.random() < 0.5:
                image = ImageOps.mirror(image)
            image = image.rotate(random.uniform(-10, 10))
        pixels = np.asarray(image, dtype=np.float32) / 255
        pixels = (pixels - 0.5) / 0.25
        return torch.from_numpy(pixels).unsqueeze(0), label


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x))


class StampNet(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1))
                for stage, (inputs, outputs) in enumerate(itertools.pairwise(widths))
            )
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    right = total = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        right += (model(images).argmax(1) == labels).sum()
        total += len(labels)
    model.train()
    return int(right) / total


def main():
    args = parse_args()
    manifest = require(args.data, "gray")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise Refused("--device cuda: no GPU here that torch can use")

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device)
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    random.seed(args.seed + rank)
    torch.manual_seed(args.seed)

    train_set = Stamps(args.data, manifest["classes"], train=True)
    val_set = Stamps(args.data, manifest["classes"], train=False)
    if args.batch_size * world > len(train_set):
        raise Refused(f"--batch-size {args.batch_size} x {world} is more than the {len(train_set)} training images")
    sampler = DistributedSampler(train_set, seed=args.seed) if world > 1 else None
    options = {
        "batch_size": args.batch_size,
        "num_workers": args.num_workers,
        "pin_memory": args.pin_memory and device.type == "cuda",
        "persistent_workers": args.persistent_workers and args.num_workers > 0,
        "prefetch_factor": args.prefetch if args.num_workers > 0 else None,
    }
    train_loader = DataLoader(train_set, shuffle=sampler is None, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)

    model = net = StampNet(len(manifest["classes"]), args.width).to(device)
    if world > 1:
        model = nn.parallel.DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    def save(epoch):
        if rank == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, out / "last.pt")

    def validate(epoch):
        if rank == 0:
            print(f"epoch {epoch}  val accuracy {evaluate(net, val_loader, device):.4f}", flush=True)
        if world > 1:
            dist.barrier()

    if args.resident:
        resident = [(images.to(device), labels.to(device)) for images, labels in itertools.islice(train_loader, 4)]

    step, last = 0, min(args.max_steps or math.inf, args.epochs * len(train_loader))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=last)
    logged_step, logged_at = 0, time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        if sampler is not None:
            sampler.set_epoch(epoch)
        batches = itertools.islice(itertools.cycle(resident), len(train_loader)) if args.resident else train_loader
        for images, labels in batches:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % args.log_every == 0 and rank == 0:
                loss, now = loss.item(), time.perf_counter()
                speed = (step - logged_step) * args.batch_size * world / (now - logged_at)
                logged_step, logged_at = step, now
                print(f"epoch {epoch}  step {step}  loss {loss:.4f}  {speed:.0f} samples/s", flush=True)
            if step == last:
                break
        if not args.resident and (epoch % args.eval_every == 0 or step == last):
            validate(epoch)
        if not args.resident and (epoch % args.save_every == 0 or step == last):
            save(epoch)
        if step == last:
            break
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    with clear_errors():
        main()
