"""`Augment`, the presets and `Schedule` as a user meets them (on the CPU)."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.augment import (
    Affine,
    Augment,
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
    Minimal,
    Noise,
    Normalize,
    Resize,
    ResizedCrop,
    Rotate,
    Saturation,
    Schedule,
    Standard,
    Strong,
    VFlip,
)  # fmt: skip

IMAGES = torch.randint(0, 256, (4, 3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
INDEX = torch.arange(4)


def test_every_layout_and_stride_gives_the_same_pictures():
    aug = Strong()
    expected = aug(IMAGES, index=INDEX)
    wide = torch.zeros(4, 3, 24, 64, dtype=torch.uint8)
    wide[..., ::2] = IMAGES
    channels_last = IMAGES.contiguous(memory_format=torch.channels_last)
    for images in (IMAGES.movedim(1, 3).contiguous(), channels_last, wide[..., ::2]):
        assert torch.equal(aug(images, index=INDEX), expected)
    assert expected.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_output_is_as_asked_also_under_autocast(dtype, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    aug = Standard(dtype=dtype, channels_last=channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        out = aug(IMAGES, index=INDEX)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=layout)
    assert not out.requires_grad
    assert torch.equal(out, aug(IMAGES, index=INDEX))


def test_an_empty_batch_stays_empty():
    out, masks = Standard(size=16)(IMAGES[:0], torch.zeros(0, 24, 32), index=INDEX[:0])
    assert out.shape == (0, 3, 16, 16)
    assert masks.shape == (0, 16, 16)


def test_eval_normalizes_and_nothing_else():
    aug = Standard(mean=(0.5,), std=(0.25,)).eval()
    assert torch.allclose(aug(IMAGES), (IMAGES / 255 - 0.5) / 0.25)
    assert not torch.allclose(aug.train()(IMAGES, index=INDEX), aug.eval()(IMAGES))
    assert Standard(size=16).eval()(IMAGES).shape == (4, 3, 16, 16)
    assert Standard(size=(16, 20)).eval()(IMAGES).shape == (4, 3, 16, 20)
    with pytest.raises(ValueError, match="size must be a number or"):
        Standard(size="16")  # type: ignore[arg-type]


def test_evaluating_a_model_that_holds_it_stops_it():
    model = torch.nn.ModuleDict({"augment": Schedule({0: Strong()})}).eval()
    assert torch.equal(model["augment"](IMAGES), Minimal().eval()(IMAGES))


def test_schedule_goes_by_the_epoch():
    early, late = Minimal(), Strong(seed=5)
    schedule = Schedule({50: late, 0: early})
    for epoch, stage in ((0, early), (49, early), (50, late), (1000, late)):
        assert torch.equal(schedule(IMAGES, index=INDEX, epoch=epoch), stage(IMAGES, index=INDEX, epoch=epoch))


def test_flips_after_colour_operations_are_the_same_as_before():
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    first = Augment([HFlip(1.0), jitter])(IMAGES, index=INDEX, return_params=True)
    last = Augment([jitter, HFlip(1.0)])
    columns = last.columns(IMAGES)
    params = torch.cat([first[1][:, 1:5], first[1][:, :1], first[1][:, 5:]], 1)
    assert columns[4] == "4.HFlip.on"
    assert torch.equal(last(IMAGES, params=params), first[0])


def test_compiled_with_the_step_around_it(monkeypatch):
    with contextlib.suppress(ImportError):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the compiler's progress bar would leave a thread behind
    torch.compiler.reset()
    aug = Standard(size=16)
    step = torch.compile(lambda x, m, i, e: aug(x, m, index=i, epoch=e), fullgraph=True, backend="aot_eager")
    masks = torch.randint(0, 9, (4, 24, 32))
    for epoch in (0, 1, 7):
        expected = aug(IMAGES, masks, index=INDEX, epoch=epoch)
        assert all(torch.equal(a, b) for a, b in zip(step(IMAGES, masks, INDEX, epoch), expected, strict=True))
    torch.compiler.reset()


def test_an_augment_can_be_forgotten():
    from flatout.augment import pipeline

    handle = Standard()._handle
    gc.collect()
    assert handle not in pipeline._alive


AUG = Standard()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: AUG(IMAGES), "index must be a tensor of 4"),
        (lambda: AUG(IMAGES, index=INDEX[:3]), "index must be"),
        (lambda: AUG(IMAGES, index=INDEX.float()), "index must be"),
        (lambda: AUG(IMAGES, index=INDEX, epoch=-1), "epoch must be"),
        (lambda: AUG(IMAGES.float(), index=INDEX), "images must be a uint8 tensor"),
        (lambda: AUG(IMAGES[0], index=INDEX), "images must be NCHW or NHWC"),
        (lambda: AUG(IMAGES.repeat(1, 2, 1, 1), index=INDEX), "images must be NCHW or NHWC with 1 to 4 channels"),
        (lambda: AUG(IMAGES[..., :3], index=INDEX), "layout must be given"),
        (lambda: AUG(IMAGES, torch.zeros(4, 24, 31), index=INDEX), "masks must be"),
        (lambda: AUG(IMAGES[:, :1], index=INDEX), "Normalize.mean must be 1 number or 1"),
        (lambda: AUG(IMAGES, params=torch.zeros(4, 3)), "params must be float32 of"),
        (lambda: Augment([Hue(0.1)])(IMAGES[:, :2], index=INDEX), "channels for Hue must be 1 or 3"),
        (lambda: Augment([Crop(25)])(IMAGES, index=INDEX), "Crop.size must be at most 24×32"),
        (lambda: Augment([Blur(49)])(IMAGES, index=INDEX), "Blur.kernel_size must be"),
        (lambda: HFlip(1.1), "HFlip.p must be a probability"),
        (lambda: ColorJitter(p=-0.1), "ColorJitter.p must be a probability"),
        (lambda: ColorJitter(hue=0.6), "Hue.amount must be within"),
        (lambda: Brightness(-0.1), "Brightness.amount must be"),
        (lambda: Brightness((1.2, 0.8)), "Brightness.amount must be"),
        (lambda: Gamma((0, 1)), "Gamma.amount must be"),
        (lambda: Noise(-1), "Noise.sigma must be"),
        (lambda: Blur(4), "Blur.kernel_size must be odd"),
        (lambda: Affine(scale=(0, 1)), "Affine.scale must be"),
        (lambda: Affine(translate=2), "Affine.translate must be"),
        (lambda: Affine(shear=90), "Affine.shear must be"),
        (lambda: Rotate(400), "Rotate.degrees must be"),
        (lambda: Resize(0), "Resize.size must be"),
        (lambda: Crop((3, 3, 3)), "Crop.size must be"),
        (lambda: ResizedCrop(8, scale=(0.5, 1.5)), "ResizedCrop.scale must be"),
        (lambda: Erase(ratio=(0, 1)), "Erase.ratio must be"),
        (lambda: Normalize((0.5,), (0.0,)), "Normalize.std must be above 0"),
        (lambda: Augment([Brightness(0.1), Rotate(5)]), "Rotate must stand before Brightness"),
        (lambda: Augment([Normalize((0,), (1,)), Invert()]), "Invert must stand before Normalize"),
        (lambda: Augment([Rotate(5), Crop(8), Affine(3)]), "Crop must not stand between"),
        (lambda: Augment(["flip"]), "operations must be"),
        (lambda: Augment([], dtype=torch.float64), "dtype must be"),
        (lambda: Augment([], fill=256), "fill must be"),
        (lambda: Augment([], seed=-1), "seed must be"),
        (lambda: Augment([], layout="HWC"), "layout must be"),
        (lambda: Schedule({1: AUG}), "stages must be"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()


GEOMETRY = st.lists(st.sampled_from([
    HFlip(), VFlip(), Crop((8, 9)), Crop((12, 9), padding=3), Resize((14, 10)), Resize(12, antialias=False),
    ResizedCrop(9), ResizedCrop((13, 9), antialias=False),
]), max_size=3)  # fmt: skip
TURN = st.sampled_from([[], [Rotate(30)], [Affine(20, 0.1, (0.7, 1.3), 10, p=0.5)]])
POINTS = st.lists(st.sampled_from([
    Brightness(0.4), Contrast(0.4), Gamma(0.3), Invert(0.5), Noise(0.1), Erase(0.7), Blur(3, p=0.5),
    Saturation(0.5), Hue(0.2), Grayscale(0.5),
]), max_size=4)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(GEOMETRY, TURN, POINTS, st.integers(0, 5), st.integers(12, 30), st.integers(12, 30), st.sampled_from([1, 3]))
def test_any_list_of_operations_keeps_pictures_in_range(geometry, turn, points, n, height, width, channels):
    images = torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8)
    index = torch.arange(n) * 7
    aug = Augment([*geometry, *turn, *points], fill=9)

    out, masks = aug(images, images[:, 0], index=index, epoch=1)

    assert out.isfinite().all()
    assert out.shape == (n, channels, *masks.shape[1:])
    assert float(out.amin() if n else 0) >= 0
    assert float(out.amax() if n else 0) <= 1 + 1e-5
    if n:
        assert torch.equal(aug(images[-1:], index=index[-1:], epoch=1)[0], out[-1])
