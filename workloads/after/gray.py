"""Data and augmentation of `gray`, and how it is judged."""

import numpy as np
import torch
from PIL import Image

from flatout.augment import Augment, HFlip, Normalize, Rotate
from workloads.gray.train import Refused, Stamps
from workloads.making import require


class Bytes(Stamps):
    """Stamps as they were decoded."""

    def __getitem__(self, index):
        path, label = self.samples[index]
        try:
            with Image.open(path) as file:
                return torch.from_numpy(np.array(file.convert("L"))).unsqueeze(0), label
        except (OSError, SyntaxError, ValueError) as error:
            raise Refused(f"{path} cannot be read: {error}") from error


def data(root, train):
    return Bytes(root, require(root, "gray")["classes"], train=train)


def augmentation():
    """What the script does to each picture on the CPU: mirrored or not, turned by up to 10 degrees, around 0.

    The nearest pixel, as PIL takes it: between pixels their noise would be smoothed, and validation's is not.
    """
    return Augment([HFlip(0.5), Rotate(10), Normalize([0.5], [0.25])], interpolation="nearest")


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float()
