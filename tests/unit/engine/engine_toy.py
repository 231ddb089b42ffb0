"""A training small enough to run in a blink: parts named in configs by `engine_toy:…`, and faults to put into it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from flatout.engine.trainer import Trainer

CONFIG = """\
model: engine_toy:Net
data:
  train: engine_toy:Points
  val: {factory: engine_toy:Points, args: {seed: 1}}
  workers: 0
criterion: torch.nn:CrossEntropyLoss
optimizer: {factory: torch.optim:AdamW, args: {lr: 1e-2}}
metrics: {accuracy: engine_toy:accuracy}
train: {epochs: 3, batch_size: 8, device: cpu}
log: {every: 4, quiet: true}
"""

Ready = Callable[..., Trainer]

seen: list[list[int]] = []  # which samples each forward pass of training had, in their order
faults: dict[int, Callable[[], Any]] = {}  # what happens in the n-th forward pass of training


class Points(Dataset[Any]):
    """Eight numbers each, and whether their sum is positive; the first number also says which sample it is."""

    def __init__(self, count: int = 64, seed: int = 0, draws: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 8, generator=generator)
        self.points[:, 0] = torch.arange(count) / 1024
        self.draws = draws

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        point = self.points[index]
        if self.draws:
            noise = torch.tensor([0.0, *(random.gauss(0, 0.01) for _ in range(7))])
            return point + noise, (point[1:].sum() > 0).long()
        return point, (point[1:].sum() > 0).long()


class Stream(IterableDataset[Any]):
    """The points one after the other, of an unknown number."""

    def __iter__(self) -> Iterator[Any]:
        points, info = Points(), get_worker_info()
        for index in range(info.id if info else 0, len(points), info.num_workers if info else 1):
            yield points[index]


class Pictures(Dataset[Any]):
    """Bytes (or floats), and a mask of the same size."""

    def __init__(self, floats: bool = False) -> None:
        self.floats = floats

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        picture = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8, generator=generator)
        return picture.float() if self.floats else picture, (picture[0] > 127).long()


class Net(nn.Module):
    """Two layers, with dropout between them, so that random streams matter."""

    def __init__(self, hidden: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 2))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            seen.append((points[:, 0] * 1024).round().int().tolist())
            faults.get(len(seen), lambda: None)()
        result: Tensor = self.layers(points)
        return result


class Convolution(nn.Module):
    """A score for each of two classes at each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.pictures: list[Tensor] = []

    def forward(self, pictures: Tensor) -> Tensor:
        self.pictures.append(pictures)
        result: Tensor = self.conv(pictures)
        return result


class Scored(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(points), labels)


class RightShare:
    """A metric with a memory, which ranks cannot share."""

    def reset(self) -> None:
        self.right = self.all = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.right += int((output.argmax(1) == target).sum())
        self.all += len(target)

    def compute(self) -> float:
        return self.right / self.all


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")


def not_a_data_set() -> int:
    return 3


def nothing() -> None:
    """What a factory gives that forgot to return something."""


def gives_up() -> None:
    raise SystemExit(7)


a_number = 3


class MortalNet(Net):
    """Kills the process of rank 1 in the middle of training, the first time."""

    def __init__(self, dies_at: int | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dies_at = dies_at

    def forward(self, points: Tensor) -> Tensor:
        if self.training and len(seen) == self.dies_at and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(points)
