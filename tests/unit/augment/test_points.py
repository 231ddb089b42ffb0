"""The point operations against Kornia, the standard library and their formulas written out."""

from __future__ import annotations

import colorsys

import kornia
import numpy as np
import pytest
import torch

from flatout.augment import (
    Blur,
    Brightness,
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

X = torch.rand(4, 3, 13, 17, generator=torch.Generator().manual_seed(0))
FACTOR = torch.tensor([0.0, 0.4, 1.0, 1.7])
WEIGHTS = (0.2989, 0.587, 0.114)


def column(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1, 1, 1, 1)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-5


def test_brightness_is_kornias():
    close(Brightness(0.2).apply(X, column(FACTOR)), kornia.enhance.adjust_brightness_accumulative(X, FACTOR))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_contrast_by_its_formula(channels):
    x = torch.rand(4, channels, 9, 11)
    weights = WEIGHTS if channels == 3 else [1 / channels] * channels
    mean = np.tensordot(weights, x.double().numpy(), (0, 1)).mean((1, 2)).reshape(4, 1, 1, 1)
    f = column(FACTOR).double().numpy()
    expected = np.clip(f * x.double().numpy() + (1 - f) * mean, 0, 1)
    close(Contrast(0.2).apply(x, column(FACTOR)), torch.from_numpy(expected))


def test_contrast_and_saturation_are_kornias_but_for_its_weight_of_red():
    factor = torch.tensor([0.0, 0.3, 0.6, 1.0])  # nothing is clipped, so the difference can be told exactly
    red = (1 - column(factor)) * 1e-4 * X[:, :1]  # .299 against torchvision's .2989
    theirs = kornia.enhance.adjust_contrast_with_mean_subtraction(X, factor)
    close(Contrast(0.2).apply(X, column(factor)), theirs - red.mean((2, 3), keepdim=True))
    theirs = kornia.enhance.adjust_saturation_with_gray_subtraction(X, factor)
    close(Saturation(0.2).apply(X, column(factor)), theirs - red)


def test_hue_is_kornias_and_the_standard_librarys():
    turn = torch.tensor([-0.5, -0.1, 0.0, 0.3])
    ours = Hue(0.5).apply(X, column(turn))
    close(ours, kornia.enhance.adjust_hue(X, turn * 2 * torch.pi))

    for sample, by in enumerate(turn.tolist()):
        r, g, b = X[sample, :, 3, 5].tolist()
        h, s, v = colorsys.rgb_to_hsv(r, g, b)
        assert ours[sample, :, 3, 5].tolist() == pytest.approx(colorsys.hsv_to_rgb((h + by) % 1, s, v), abs=1e-5)


@pytest.mark.parametrize("colour", [(0, 0, 0), (1, 1, 1), (0.5, 0.5, 0.5), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_hue_of_corners_of_the_colour_cube(colour):
    pixel = torch.tensor(colour, dtype=torch.float32).view(1, 3, 1, 1)
    h, s, v = colorsys.rgb_to_hsv(*colour)
    assert Hue(0.5).apply(pixel, column(torch.tensor([0.25]))).flatten().tolist() == pytest.approx(
        colorsys.hsv_to_rgb((h + 0.25) % 1, s, v), abs=1e-6
    )


def test_gamma_and_invert_and_grayscale():
    gamma = torch.tensor([0.5, 1.0, 2.2, 0.9])
    on = torch.tensor([0.0, 1.0, 0.0, 1.0])
    close(Gamma(0.5).apply(X, column(gamma)), kornia.enhance.adjust_gamma(X, gamma))
    inverted = Invert().apply(X, column(on))
    close(inverted[1], 1 - X[1])
    close(inverted[0], X[0])
    grayed = Grayscale().apply(X, column(on))
    close(grayed[3], sum(w * X[3, c] for c, w in enumerate(WEIGHTS)).expand(3, -1, -1))
    close(grayed[2], X[2])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_blur_is_kornias(size):
    sigma = torch.tensor([0.3, 0.8, 1.5, 3.0])
    theirs = kornia.filters.gaussian_blur2d(X, (size, size), sigma[:, None].expand(-1, 2), "reflect")
    close(Blur(size).apply(X, column(sigma)), theirs)
    assert torch.equal(Blur(size).apply(X, column(torch.zeros(4))), X)


def test_normalize_is_kornias_and_takes_one_number_for_all():
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    close(Normalize(mean, std).apply(X), kornia.enhance.normalize(X, torch.tensor(mean), torch.tensor(std)))
    close(Normalize((0.5,), (0.25,)).apply(X), (X - 0.5) / 0.25)


def test_erase_touches_its_rectangle_alone():
    box = [column(torch.tensor(values)) for values in ([2.0] * 4, [3.0] * 4, [4.0, 0, 4, 4], [5.0, 0, 5, 5])]
    erased = Erase(value=0.25).apply(X, *box)
    expected = X.clone()
    expected[[0, 2, 3], :, 2:6, 3:8] = 0.25
    assert torch.equal(erased, expected)


def test_noise_is_its_own_for_every_value_and_stays_in_range():
    x = torch.full((2, 3, 64, 64), 0.5)
    keys = column(torch.tensor([5.0, 5.0])), column(torch.tensor([9.0, 9.0]))
    grain = Noise().apply(x, column(torch.tensor([0.1, 0.05])), *keys) - x
    assert grain[0].std() == pytest.approx(0.1, rel=0.03)
    assert torch.allclose(grain[0], 2 * grain[1], atol=1e-6)  # the same key, the same grain
    assert abs(torch.corrcoef(grain[0].flatten(1))[0, 1]) < 0.05
    noisy = Noise().apply(torch.ones(1, 3, 8, 8), *(column(torch.tensor([value])) for value in (0.5, 1.0, 2.0)))
    assert noisy.max() == 1
    assert noisy.min() >= 0
