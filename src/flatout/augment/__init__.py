"""Augmentation of whole batches on the GPU, in one pass over memory.

    operations ─► BatchProgram ─► a row of numbers a sample ─► images, masks

    aug = Standard(size=512)
    images = aug(batch_u8, index=idx, epoch=e)

What a sample gets depends on (seed, epoch, its index in the data set, the operation) and on nothing else.
"""

from .operations import (
    Affine,
    Blur,
    Brightness,
    ColorJitter,
    Contrast,
    Crop,
    Erase,
    Gamma,
    Grayscale,
    HFlip,
    Hue,
    Invert,
    Noise,
    Normalize,
    Operation,
    Resize,
    ResizedCrop,
    Rotate,
    Saturation,
    VFlip,
)  # fmt: skip
from .pipeline import Augment, Minimal, Schedule, Standard, Strong

__all__ = [
    "Affine", "Augment", "Blur", "Brightness", "ColorJitter", "Contrast", "Crop", "Erase", "Gamma", "Grayscale",
    "HFlip", "Hue", "Invert", "Minimal", "Noise", "Normalize", "Operation", "Resize", "ResizedCrop", "Rotate",
    "Saturation", "Schedule", "Standard", "Strong", "VFlip",
]  # fmt: skip
