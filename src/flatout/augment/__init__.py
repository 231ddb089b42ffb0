"""Augmentation of whole batches on the GPU, in one pass over memory.

    operations (`ops`, `points`) ─► BatchProgram ─► a row of numbers a sample ─► images, masks

    aug = Standard(size=512)
    images = aug(batch_u8, index=idx, epoch=e)

What a sample gets depends on (seed, epoch, its index in the data set, the operation) and on nothing else.
"""

from .ops import Affine, Crop, HFlip, Operation, Resize, ResizedCrop, Rotate, VFlip
from .pipeline import Augment, Minimal, Schedule, Standard, Strong
from .points import (
    Blur,
    Brightness,
    ColorJitter,
    Contrast,
    Erase,
    Gamma,
    Grayscale,
    Hue,
    Invert,
    Noise,
    Normalize,
    Saturation,
)  # fmt: skip

__all__ = [
    "Affine", "Augment", "Blur", "Brightness", "ColorJitter", "Contrast", "Crop", "Erase", "Gamma", "Grayscale",
    "HFlip", "Hue", "Invert", "Minimal", "Noise", "Normalize", "Operation", "Resize", "ResizedCrop", "Rotate",
    "Saturation", "Schedule", "Standard", "Strong", "VFlip",
]  # fmt: skip
