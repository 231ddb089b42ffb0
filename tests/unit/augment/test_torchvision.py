"""Taking over torchvision transforms, by stand-ins that carry torchvision's attributes (it is not needed to run)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flatout.augment import (
    Affine,
    Augment,
    Blur,
    ColorJitter,
    Crop,
    Erase,
    Grayscale,
    HFlip,
    Noise,
    Normalize,
    Resize,
    ResizedCrop,
    Rotate,
)  # fmt: skip

BILINEAR = SimpleNamespace(value="bilinear")
NEAREST = SimpleNamespace(value="nearest")


def tv(name: str, **attributes: object) -> object:
    made = type(name, (), {"__module__": "torchvision.transforms.v2._x"})()
    made.__dict__.update(attributes)
    return made


CROP = {"size": (224, 224), "scale": (0.2, 1.0), "ratio": (0.75, 1.33), "interpolation": BILINEAR, "antialias": True}
JITTER = tv("ColorJitter", brightness=(0.6, 1.4), contrast=(0.6, 1.4), saturation=None, hue=(-0.1, 0.1))
TRAIN = tv("Compose", transforms=[
    tv("ToImage"),
    tv("RandomResizedCrop", **CROP),
    tv("RandomHorizontalFlip", p=0.5),
    tv("RandomApply", transforms=[JITTER], p=0.8),
    tv("RandomGrayscale", p=0.2),
    tv("RandomApply", transforms=[tv("GaussianBlur", kernel_size=(23, 23), sigma=[0.1, 2.0])], p=0.5),
    tv("ToDtype", dtype=torch.float32, scale=True),
    tv("Normalize", mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.2], inplace=False),
    tv("RandomErasing", p=0.25, scale=(0.02, 0.33), ratio=(0.3, 3.3), value=[0.0]),
])  # fmt: skip


def test_a_training_pipeline():
    aug = Augment.from_torchvision(TRAIN, seed=3)

    assert aug.operations == (
        ResizedCrop((224, 224), (0.2, 1.0), (0.75, 1.33)),
        HFlip(0.5),
        ColorJitter((0.6, 1.4), (0.6, 1.4), 0.0, (-0.1, 0.1), p=0.8),
        Grayscale(0.2),
        Blur(23, (0.1, 2.0), p=0.5),
        Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2)),
        Erase(0.25, (0.02, 0.33), (0.3, 3.3), 0.0),
    )
    assert aug.seed == 3
    assert any("order" in note for note in aug.notes)


def test_geometry_and_its_fill():
    turn = {"interpolation": NEAREST, "expand": False, "center": None, "fill": 128}
    aug = Augment.from_torchvision([
        tv("Resize", size=[256], interpolation=BILINEAR, max_size=None, antialias=True),
        tv("RandomCrop", size=(224, 224), padding=None, pad_if_needed=False, fill=0, padding_mode="constant"),
        tv("RandomRotation", degrees=[-15.0, 15.0], **turn),
        tv("RandomAffine", degrees=[0.0, 0.0], translate=(0.1, 0.2), scale=None, shear=[-5.0, 5.0], **turn),
        tv("GaussianNoise", mean=0.0, sigma=0.1, clip=True),
    ])  # fmt: skip
    assert aug.operations == (
        Resize(256),
        Crop((224, 224)),
        Rotate((-15.0, 15.0)),
        Affine((0.0, 0.0), (0.1, 0.2), 1.0, (-5.0, 5.0)),
        Noise(0.1),
    )
    assert aug.fill == 128
    assert any("nearest" in note for note in aug.notes)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (tv("RandAugment"), "RandAugment"),
        (lambda image: image, "function"),
        (
            tv("Resize", size=[9], interpolation=SimpleNamespace(value="bicubic"), max_size=None, antialias=True),
            "bicubic",
        ),
        (tv("RandomRotation", degrees=[0, 1], interpolation=BILINEAR, expand=True, center=None, fill=0), "expand"),
        (tv("RandomApply", transforms=[tv("RandomInvert", p=0.5), tv("RandomInvert", p=0.5)], p=0.5), "RandomApply"),
        (tv("RandomCrop", size=(8, 8), padding=2, pad_if_needed=False, fill=0, padding_mode="reflect"), "padding"),
        (tv("RandomErasing", p=0.5, scale=(0.1, 0.2), ratio=(0.5, 2), value=None), "value"),
        (tv("ToDtype", dtype=torch.float32, scale=False), "scale"),
        (tv("GaussianBlur", kernel_size=(3, 5), sigma=(1, 1)), "square"),
        (tv("Grayscale", num_output_channels=1), "num_output_channels"),
    ],
)
def test_a_transform_that_cannot_be_converted_is_named(transform, said):
    with pytest.raises(ValueError, match=said):
        Augment.from_torchvision([transform])


def test_two_fills_are_refused():
    crop = {"size": (8, 8), "padding": 2, "pad_if_needed": False, "padding_mode": "constant"}
    with pytest.raises(ValueError, match="fill"):
        Augment.from_torchvision([tv("RandomCrop", fill=0, **crop), tv("RandomCrop", fill=9, **crop)])
