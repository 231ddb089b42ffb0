"""Train a small network on files that lie on slow storage. `make demo` lets flatout fix this script.

The slowness is made here: each read waits as long as a busy network drive takes to answer.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    """One file a sample, named NUMBER-LABEL.bin."""

    def __init__(self, folder, latency_ms):
        self.paths = sorted(Path(folder).glob("*.bin"))
        self.latency_ms = latency_ms

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        time.sleep(self.latency_ms / 1000)
        pixels = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        return pixels.float() / 255, int(path.stem.split("-")[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--latency-ms", type=float, default=9)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Files(args.data, args.latency_ms), batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(args.epochs):
        for pixels, labels in loader:
            loss = F.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
