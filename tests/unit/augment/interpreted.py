"""The kernels under Triton's interpreter against the reference. Run by `test_kernel.py`, in a process of its own.

TRITON_INTERPRET must be set before triton is first imported, and must not reach the other tests.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.augment import (
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
    Resize,
    ResizedCrop,
    Rotate,
    Saturation,
    VFlip,
    batch_program,
)  # fmt: skip
from flatout.augment.batch_program import BatchProgram, draw, steps
from flatout.augment.kernel_launch import KernelPlan

torch.set_num_threads(1)
NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
STANDARD = [HFlip(), Rotate(15), Brightness(0.2), Contrast(0.2), NORMALIZE]
STRONG = [HFlip(), Affine(30, 0.1, (0.8, 1.2), 10), ColorJitter(0.4, 0.4, 0.4, 0.1), Blur(5, p=0.5), NORMALIZE]


def compare(
    operations, images, *, dtype=torch.float32, channels_last=False, fill=7, epoch=4, seed=99 + 2**40, within,
    nearest=False,
):  # fmt: skip
    """The rows bit for bit, the pictures within a tolerance, the masks exactly."""
    n, channels, height, width = images.shape
    program = BatchProgram.build(steps(operations), (height, width), channels, nearest=nearest)
    index = torch.tensor([3 + 7 * 2**33, 12345, 0, 2**31, 9, 2**32])[:n]
    plan = KernelPlan(program, images, dtype=dtype, channels_last=channels_last, fill=fill)

    rows, sums = plan.draw(index, epoch, seed)
    out = plan.apply(images, rows, sums)

    assert torch.equal(rows, draw(program, index, epoch, seed))
    expected = batch_program.apply(program, images, rows, fill)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert (out.float() - expected).abs().max() <= within
    masks = images[:, :1].to(torch.int64)
    assert torch.equal(plan.apply_masks(masks, rows, 255), batch_program.apply_masks(program, masks, rows, 255))
    return plan, rows, out


def pictures(n=2, channels=3, height=36, width=40, nhwc=False):
    shape = (n, height, width, channels) if nhwc else (n, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(n * height))
    return images.movedim(3, 1) if nhwc else images


@pytest.mark.parametrize("channels", [1, 3])
def test_the_nearest_pixel(channels):
    _, _, out = compare([HFlip(), Rotate(25)], pictures(4, channels), within=1e-6, nearest=True)
    assert ((out * 255) - (out * 255).round()).abs().max() < 1e-3


@pytest.mark.parametrize("nhwc", [True, False])
@pytest.mark.parametrize("operations", [STANDARD, STRONG])
def test_presets(operations, nhwc):
    compare(operations, pictures(nhwc=nhwc), within=1e-4)


@pytest.mark.parametrize(("dtype", "channels_last"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("operations", [STANDARD[:-1], STRONG[:-1]])
def test_presets_in_half_precision(operations, dtype, channels_last):
    compare(operations, pictures(n=1, nhwc=True), dtype=dtype, channels_last=channels_last, within=1e-2)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_other_channels(channels):
    points = [Brightness(0.3), Contrast(0.5), Gamma(0.3), Noise(0.1), Blur(3), Contrast(0.5)]
    compare([Rotate(30), *points], pictures(channels=channels, height=20, width=21), within=2e-5)


def test_every_point_operation_alone_is_within_1e_5():
    operations = [Brightness(0.5), Contrast(0.5), Saturation(0.5), Hue(0.5), Gamma(0.5), Grayscale(0.5), Invert(0.5),
                  Noise(0.2), Erase(1.0, value=0.3), Blur(5), NORMALIZE]  # fmt: skip
    for operation in operations:
        compare([operation], pictures(n=2, height=9, width=13), within=1e-5)


@pytest.mark.parametrize(("height", "width"), [(32, 64), (9, 36), (9, 37)])
@pytest.mark.parametrize("operations", [[HFlip(), NORMALIZE], [Rotate(9)], [Contrast(0.5)]])
def test_channels_last_in_words_of_four_pixels_or_one_by_one(operations, height, width):
    images = pictures(n=1, height=height, width=width)
    for dtype, within in ((torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)):
        compare(operations, images, dtype=dtype, channels_last=True, within=within)


def test_replay():
    images = pictures(n=1)
    plan, rows, out = compare(STANDARD, images, within=1e-4)
    assert torch.equal(plan.apply(images, rows, plan.no_sums(rows)), out)


def test_strided_and_offset_input():
    whole = pictures(n=3, height=30, width=44, nhwc=True)
    compare(STANDARD[:-1], whole[1:, :, 3:, 5:], within=1e-4)
    compare([HFlip(), Crop((10, 12), padding=3)], whole[:, :, ::2, ::3], within=1e-6)


GEOMETRY = st.lists(st.sampled_from([
    HFlip(), VFlip(), Crop((8, 9)), Crop((12, 9), padding=3), Resize((14, 10)), Resize(12, antialias=False),
    ResizedCrop(9), ResizedCrop((13, 9), antialias=False),
]), max_size=3)  # fmt: skip
TURN = st.sampled_from([[], [Rotate(30)], [Affine(20, 0.1, (0.7, 1.3), (-10, 10, -5, 5), p=0.5)]])
POINTS = st.lists(st.sampled_from([
    Brightness(0.4), Contrast(0.4), Gamma(0.3), Invert(0.5), Noise(0.1), Erase(0.7), Blur(3, p=0.5), Saturation(0.5),
    Hue(0.2), Grayscale(0.5), ColorJitter(0.3, 0.3, p=0.5),
]), max_size=3)  # fmt: skip


@settings(deadline=None, max_examples=15)
@given(
    GEOMETRY, TURN, POINTS, st.integers(1, 3), st.integers(12, 34), st.integers(12, 34), st.sampled_from([1, 3]),
    st.booleans(), st.integers(0, 255),
)  # fmt: skip
def test_any_list_of_operations(geometry, turn, points, n, height, width, channels, nhwc, fill):
    images = pictures(n, channels, height, width, nhwc)
    compare([*geometry, *turn, *points], images, fill=fill, within=2e-4)
