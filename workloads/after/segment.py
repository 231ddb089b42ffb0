"""Data and loss of `segment`, and how it is judged."""

import numpy as np
import torch
from torch import nn

from workloads.making import require
from workloads.segment.train import PhotoDataset, read


class Bytes(PhotoDataset):
    """Pictures and masks as they were decoded."""

    def __getitem__(self, index):
        name = self.names[index]
        image = read(self.root / "images" / f"{name}.jpg", "RGB")
        mask = read(self.root / "masks" / f"{name}.png", "L")
        return torch.from_numpy(np.array(image)), torch.from_numpy(np.array(mask))


def data(root, train):
    facts = require(root, "segment")
    names = [f"{index:06}" for index in range(facts["items"])]
    return Bytes(root, names[: -facts["val"]] if train else names[-facts["val"] :])


class MaskLoss(nn.CrossEntropyLoss):
    """Cross entropy with masks of bytes."""

    def forward(self, output, target):
        return super().forward(output, target.long())


class MeanIoU:
    def reset(self):
        self.table = 0

    def update(self, output, target):
        classes = output.shape[1]
        pairs = (target.long() * classes + output.argmax(dim=1)).flatten()
        self.table = self.table + torch.bincount(pairs, minlength=classes**2).view(classes, classes)

    def compute(self):
        hit = self.table.diag()
        return (hit / (self.table.sum(0) + self.table.sum(1) - hit).clamp(min=1)).mean()
