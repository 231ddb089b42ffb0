"""A training with nothing to complain of, for flatout check to find nothing in. It is read, never run."""

import argparse

import torch
import torch.nn.functional as F
from images import Pictures
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--num-workers", type=int, default=8)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = [(model(images.to(device)).argmax(1).cpu() == labels).float().mean() for images, labels in loader]
    model.train()
    return torch.stack(hits).mean().item()


def main():
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    train_set, val_set = Pictures("train"), Pictures("val")
    sampler = DistributedSampler(train_set)
    options = {"batch_size": args.batch_size, "num_workers": args.num_workers, "pin_memory": True}
    loader = DataLoader(train_set, sampler=sampler, drop_last=True, persistent_workers=True, **options)
    val_loader = DataLoader(val_set, **options)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.LazyLinear(10))
    net = net.to(device, memory_format=torch.channels_last)
    net.compile()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    total = torch.zeros((), device=device)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step % args.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        if epoch % args.eval_every == 0:
            print(f"accuracy {evaluate(net, val_loader, device):.4f}, loss {total.item():.4f}")
            torch.save(net.state_dict(), "last.pt")


if __name__ == "__main__":
    main()
