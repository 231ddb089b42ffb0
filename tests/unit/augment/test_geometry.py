"""The folded geometry against `grid_sample`, `interpolate`, slicing and flipping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import grid_sample, interpolate

from flatout.augment import Affine, Augment, Crop, HFlip, Resize, ResizedCrop, Rotate, VFlip

IMAGES = torch.randint(0, 256, (6, 3, 37, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
INDEX = torch.arange(6)
UNIT = IMAGES / 255


def augmented(*operations, images=IMAGES, **options):
    aug = Augment(operations, **options)
    out, params = aug(images, index=INDEX, epoch=2, return_params=True)
    return out, dict(zip(aug.columns(images), params.unbind(1), strict=True))


def by_grid_sample(drawn, size, source=UNIT, mode="bilinear", fill=0.0):
    """grid_sample with the same matrix, in its coordinates from −1 to 1."""
    a, b, c, d, e, f = (drawn[f"matrix.{i}"].double() for i in range(6))
    height, width = IMAGES.shape[2:]
    y, x = torch.meshgrid(torch.arange(size[0]) + 0.5, torch.arange(size[1]) + 0.5, indexing="ij")
    at = [row[:, None, None] for row in (a, b, c, d, e, f)]
    grid_x = (at[0] * x + at[1] * y + at[2]) * 2 / width - 1
    grid_y = (at[3] * x + at[4] * y + at[5]) * 2 / height - 1
    grid = torch.stack([grid_x, grid_y], -1).float()
    return grid_sample(source.float() - fill, grid, mode, padding_mode="zeros", align_corners=False) + fill


@pytest.mark.parametrize(
    "operations",
    [
        [Rotate(180)],
        [HFlip(), Affine(30, 0.2, (0.7, 1.4), (-10, 10, -5, 5)), VFlip()],
        [Rotate(20), Crop((20, 30))],
        [Affine(10, scale=0.9), Resize((30, 64), antialias=False)],
    ],
)
def test_interpolation_is_that_of_grid_sample(operations):
    out, drawn = augmented(*operations)
    assert (out - by_grid_sample(drawn, tuple(out.shape[2:]))).abs().max() <= 1 / 255 / 10


def test_affine_is_shear_then_scale_then_turn_then_move():
    out, drawn = augmented(Affine(40, 0.3, (0.5, 2.0), (-20, 20, -10, 10)))
    for i in range(len(out)):
        angle, right, down, scale, shear_x, shear_y = (
            float(drawn[f"0.Affine.{name}"][i]) for name in ("degrees", "right", "down", "scale", "shear_x", "shear_y")
        )
        turn, lean_x, lean_y = map(math.radians, (angle, shear_x, shear_y))
        turned = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
        sheared = np.array([[1, 0], [-math.tan(lean_y), 1]]) @ np.array([[1, -math.tan(lean_x)], [0, 1]])
        forward = np.eye(3)
        forward[:2, :2] = scale * turned @ sheared
        middle, moved = np.eye(3), np.eye(3)
        middle[:2, 2] = 25, 18.5
        moved[:2, 2] = 25 + right, 18.5 + down
        inverse = np.linalg.inv(moved @ forward @ np.linalg.inv(middle))
        ours = np.array([float(drawn[f"matrix.{j}"][i]) for j in range(6)]).reshape(2, 3)
        np.testing.assert_allclose(ours, inverse[:2], atol=1e-4)
        assert right == round(right)


def test_the_nearest_pixel_is_grid_samples_and_what_masks_take():
    images = torch.randint(1, 256, (5, 1, 33, 41), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    aug = Augment([HFlip(), Rotate(25)], interpolation="nearest")
    index = torch.arange(5)
    turned, masks, rows = aug(images, images[:, 0].long(), index=index, return_params=True)
    assert torch.equal((turned[:, 0] * 255).round().long(), masks)
    assert len(turned.unique()) > 200
    a, b, c, d, e, f = rows[:, -10:-4].T[:, :, None, None]
    y, x = torch.arange(33)[:, None] + 0.5, torch.arange(41) + 0.5
    grid = torch.stack([2 * (a * x + b * y + c) / 41 - 1, 2 * (d * x + e * y + f) / 33 - 1], dim=3)
    theirs = grid_sample(images.float(), grid, mode="nearest", align_corners=False)[:, 0]
    assert (theirs == masks).float().mean() > 0.999  # ties aside


def test_rotation_turns_counter_clockwise_as_torchvisions_does():
    square = IMAGES[:, :, :36, :36]
    out, _ = augmented(Rotate((90, 90)), images=square)
    assert (out - torch.rot90(square / 255, 1, (2, 3))).abs().max() <= 1e-4


def test_affine_turns_clockwise():
    square = IMAGES[:, :, :36, :36]
    out, _ = augmented(Affine((90, 90)), images=square)
    assert (out - torch.rot90(square / 255, -1, (2, 3))).abs().max() <= 1e-4


def test_flips_and_crops_are_exact():
    out, drawn = augmented(HFlip(), VFlip(), Crop((20, 24)))
    for i in range(len(out)):
        expected = UNIT[i]
        expected = expected.flip(2) if drawn["0.HFlip.on"][i] else expected
        expected = expected.flip(1) if drawn["1.VFlip.on"][i] else expected
        top, left = int(drawn["2.Crop.top"][i]), int(drawn["2.Crop.left"][i])
        assert torch.equal(out[i], expected[:, top : top + 20, left : left + 24])
    assert 0 < drawn["0.HFlip.on"].sum() < len(out)


def test_a_padded_crop_shows_the_fill():
    out, drawn = augmented(Crop((37, 50), padding=8), fill=51)
    padded = torch.nn.functional.pad(UNIT, (8, 8, 8, 8), value=0.2)
    for i in range(len(out)):
        top, left = int(drawn["0.Crop.top"][i]) + 8, int(drawn["0.Crop.left"][i]) + 8
        assert torch.allclose(out[i], padded[i, :, top : top + 37, left : left + 50])


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(20, 20), (13, 64), (80, 100)])
def test_resize_is_interpolate(size, antialias):
    out, _ = augmented(Resize(size, antialias=antialias))
    assert (out - interpolate(UNIT, size, mode="bilinear", antialias=antialias)).abs().max() <= 1e-5


def test_resize_by_the_shorter_side():
    assert augmented(Resize(20))[0].shape[2:] == (20, 27)


@pytest.mark.parametrize("antialias", [True, False])
def test_resized_crop_is_slice_and_interpolate(antialias):
    out, drawn = augmented(ResizedCrop((24, 20), antialias=antialias), HFlip(1.0))
    for i in range(len(out)):
        box = (drawn[f"0.ResizedCrop.{part}"][i] for part in ("top", "left", "height", "width"))
        top, left, height, width = map(int, box)
        window = UNIT[i : i + 1, :, top : top + height, left : left + width]
        expected = interpolate(window, (24, 20), mode="bilinear", antialias=antialias)[0].flip(2)
        assert (out[i] - expected).abs().max() <= 1e-5


def test_a_crop_of_a_resize_sees_beyond_its_edge_as_in_torchvision():
    out, drawn = augmented(Resize((20, 26)), Crop((12, 16)))
    resized = interpolate(UNIT, (20, 26), mode="bilinear", antialias=True)
    for i in range(len(out)):
        top, left = int(drawn["1.Crop.top"][i]), int(drawn["1.Crop.left"][i])
        assert (out[i] - resized[i, :, top : top + 12, left : left + 16]).abs().max() <= 1e-5


def test_what_a_crop_cut_off_does_not_come_back_when_turned():
    white = torch.full((6, 1, 40, 40), 255, dtype=torch.uint8)
    out, _ = augmented(Crop((20, 20), center=True), Rotate((45, 45)), images=white)
    assert (out[:, :, 0, 0] == 0).all()  # a corner of the turned square
    assert (out[:, :, 10, 10] == 1).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bool])
def test_masks_follow_the_images_and_are_never_blended(dtype):
    labels = (IMAGES[:, :2] > 128).to(dtype)
    aug = Augment([HFlip(), Affine(30, 0.1, (0.8, 1.2)), Resize((30, 31))], mask_fill=1)
    _, masks, params = aug(IMAGES, labels, index=INDEX, return_params=True)
    drawn = dict(zip(aug.columns(IMAGES), params.unbind(1), strict=True))
    expected = by_grid_sample(drawn, (30, 31), labels, "nearest", 1)
    assert masks.dtype == dtype
    assert (masks == expected.to(dtype)).float().mean() > 0.999  # it may decide ties otherwise
    assert torch.equal(aug(IMAGES, labels[:, 0], index=INDEX)[1], masks[:, 0])
