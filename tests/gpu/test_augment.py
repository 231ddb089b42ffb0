"""The augmentation kernels on a GPU: against the reference, against torchvision, and where training puts them."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config

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
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(n: int = 6, channels: int = 3, height: int = 120, width: int = 150, nhwc: bool = False) -> torch.Tensor:
    """Smooth enough that a millionth of a pixel does not matter, with noise on top."""
    generator = torch.Generator().manual_seed(n + height)
    coarse = torch.rand(n, channels, 9, 9, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1) * 230
    images = (smooth + torch.rand(smooth.shape, generator=generator) * 25).to(torch.uint8)
    return images.movedim(1, 3).contiguous() if nhwc else images


def both(aug: Augment, images: torch.Tensor, masks: torch.Tensor | None = None):
    """(images, masks, params) from the GPU, brought here, and from the CPU."""
    index = torch.arange(len(images)) * 3 + 2**33
    masks = torch.zeros(len(images), *aug._channels_first(images).shape[2:]) if masks is None else masks
    there = aug(images.cuda(), masks.cuda(), index=index.cuda(), epoch=5, return_params=True)
    here = aug(images, masks, index=index, epoch=5, return_params=True)
    return [tensor.cpu() for tensor in there], here


def same_numbers(there: torch.Tensor, here: torch.Tensor) -> None:
    """What is drawn is equal bit by bit; the matrix and box made of it may differ in the last bit."""
    assert torch.equal(there[:, :-10], here[:, :-10])
    assert torch.allclose(there[:, -10:], here[:, -10:], rtol=1e-6, atol=1e-6)


EVERYTHING = [
    [HFlip(), VFlip()],
    [Crop((100, 90), padding=6), HFlip()],
    [Rotate(30)],
    [HFlip(), Affine(30, 0.2, (0.7, 1.4), (-10, 10, -5, 5)), VFlip()],
    [Resize((64, 60))],
    [Resize(200, antialias=False), Crop(100)],
    [ResizedCrop(64), HFlip()],
    [ResizedCrop((80, 100), antialias=False), Rotate(10)],
    [Brightness(0.4), Contrast(0.4), Saturation(0.4), Hue(0.2), Gamma(0.3)],
    [Grayscale(0.5), Invert(0.5), Noise((0.01, 0.2)), Erase(0.8, value=0.5)],
    [Blur(9, (0.1, 3.0), p=0.7), Contrast(0.5), Blur(3)],
    [Rotate(15), Contrast(0.3), Contrast(0.3), Normalize(MEAN, STD)],
]


@pytest.mark.parametrize("nhwc", [True, False])
@pytest.mark.parametrize("operations", EVERYTHING, ids=lambda operations: type(operations[0]).__name__)
def test_the_kernel_does_what_the_reference_does(operations, nhwc):
    images = pictures(nhwc=nhwc)
    (out, masks, params), (expected, expected_masks, expected_params) = both(
        Augment(operations, fill=9), images, torch.randint(0, 9, (6, 120, 150))
    )
    same_numbers(params, expected_params)
    assert (out - expected).abs().max() <= 1e-3  # of which interpolation may take 1/255; see the next two
    assert (masks == expected_masks).float().mean() > 0.9999  # a place on the very edge of two pixels may go either way


@pytest.mark.parametrize(
    "operation",
    [Brightness(0.5), Contrast(0.5), Saturation(0.5), Hue(0.5), Gamma(0.5), Grayscale(), Invert(), Erase(1.0), Blur(5)],
    ids=lambda operation: type(operation).__name__,
)
def test_point_operations_agree_to_1e_5(operation):
    (out, _, _), (expected, _, _) = both(Augment([operation]), pictures())
    assert (out - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", [Minimal, Standard, Strong])
@pytest.mark.parametrize("channels_last", [True, False])
def test_half_precision_agrees_to_1e_2(preset, dtype, channels_last):
    aug = preset(dtype=dtype, channels_last=channels_last, mean=(0.0,), std=(1.0,))
    images = pictures(nhwc=True)
    (out, _, _), _ = both(aug, images)
    exact = preset(mean=(0.0,), std=(1.0,))(images, index=torch.arange(6) * 3 + 2**33, epoch=5)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert (out.float() - exact).abs().max() <= 1e-2


@pytest.mark.parametrize(("n", "channels", "height", "width"), [
    (1, 3, 512, 512), (4096, 3, 24, 20), (3, 1, 33, 257), (5, 2, 64, 64), (2, 4, 99, 31), (1, 3, 1, 1), (2, 3, 7, 2000),
])  # fmt: skip
def test_any_batch_size_channels_and_shape(n, channels, height, width):
    aug = Augment([HFlip(), Rotate(20), Brightness(0.2), Contrast(0.2)], layout="NCHW")
    (out, _, params), (expected, _, expected_params) = both(aug, pictures(n, channels, height, width))
    same_numbers(params, expected_params)
    assert (out - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("channels", [1, 3])
def test_the_nearest_pixel(channels):
    there, here = both(Augment([HFlip(), Rotate(25)], interpolation="nearest"), pictures(channels=channels))
    same = (there[0] - here[0]).abs() < 1e-6  # a division rounds otherwise on the GPU
    assert same.float().mean() > 0.999  # but where two are as near


def test_strided_input_and_an_empty_batch():
    images = pictures(8, 3, 130, 160, nhwc=True)
    for part in (images[1:, 3:, 5:], images[:, ::2, ::3], images[::2, :, 1:]):
        (out, _, _), (expected, _, _) = both(Standard(mean=(0.0,), std=(1.0,)), part)
        assert (out - expected).abs().max() <= 1e-3
    aug = Standard(size=64)
    assert aug(images[:0].cuda(), index=torch.arange(0)).shape == (0, 3, 64, 64)


def test_params_replay():
    images, index = pictures().cuda(), torch.arange(6)
    aug = Strong()
    out, params = aug(images, index=index, epoch=2, return_params=True)
    assert torch.equal(aug(images, params=params), out)
    assert torch.equal(aug(images[3:], params=params[3:]), out[3:])


# --- in the places training puts it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [Minimal, Standard, Strong])
def test_nothing_waits_for_the_gpu(preset, no_waiting):
    images, index = pictures(nhwc=True).cuda(), torch.arange(6, device="cuda")
    aug = preset(dtype=torch.bfloat16)
    masks = torch.zeros(6, 120, 150, dtype=torch.uint8, device="cuda")
    aug(images, masks, index=index)
    with no_waiting():
        out, _ = aug(images, masks, index=index, epoch=1)
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        out.cpu()  # the watch is awake


@pytest.mark.parametrize("preset", [Standard, Strong])
def test_a_captured_graph_replays_with_other_samples(preset):
    aug = preset(size=96, dtype=torch.bfloat16)
    images, index = pictures(nhwc=True).cuda(), torch.arange(6, device="cuda")
    aug(images, index=index, epoch=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = aug(images, index=index, epoch=1)
    for start in (0, 1000):
        index.copy_(torch.arange(start, start + 6))
        graph.replay()
        assert torch.equal(out, aug(images, index=index, epoch=1))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("compiler")
def test_inside_a_compiled_step_under_autocast():
    aug = Schedule({0: Minimal(), 2: Standard(dtype=torch.bfloat16, channels_last=True)})
    layer = torch.nn.Conv2d(3, 8, 3).cuda()
    images, index = pictures().cuda(), torch.arange(6, device="cuda")

    def step(images: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return layer(aug(images, index=index, epoch=3))

    compiled = torch.compile(step, fullgraph=True)(images, index)
    assert (compiled.float() - step(images, index).float()).abs().max() <= 0.05


# --- torchvision -----------------------------------------------------------------------------------------------------


@pytest.fixture
def functional(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its blur is a convolution
    return pytest.importorskip("torchvision.transforms.v2.functional")


def drawn(aug: Augment, images: torch.Tensor):
    """The pictures and, sample by sample, {column: number}, with its picture as float32 in 0..1."""
    out, params = aug(images.cuda(), index=torch.arange(len(images)), epoch=1, return_params=True)
    columns = [column.split(".", 1)[1] for column in aug.columns(images)]
    numbers = [dict(zip(columns, row, strict=True)) for row in params.tolist()]
    return [(ours, sample, n) for ours, sample, n in zip(out, images.cuda() / 255, numbers, strict=True)]


@pytest.mark.parametrize(
    ("operation", "theirs", "column"),
    [
        (Brightness(0.5), "adjust_brightness", "Brightness.factor"),
        (Contrast(0.5), "adjust_contrast", "Contrast.factor"),
        (Saturation(0.5), "adjust_saturation", "Saturation.factor"),
        (Hue(0.5), "adjust_hue", "Hue.turn"),
        (Gamma(0.5), "adjust_gamma", "Gamma.gamma"),
    ],
)
def test_colour_operations_are_torchvisions(functional, operation, theirs, column):
    for ours, sample, numbers in drawn(Augment([operation]), pictures()):
        expected = getattr(functional, theirs)(sample, numbers[column])
        assert (ours - expected).abs().max() <= 1e-5


def test_the_other_point_operations_are_torchvisions(functional):
    for ours, sample, numbers in drawn(Augment([Blur(7, (0.5, 3.0)), Normalize(MEAN, STD)]), pictures()):
        expected = functional.normalize(
            functional.gaussian_blur(sample, [7, 7], [numbers["Blur.sigma"]] * 2), MEAN, STD
        )
        assert (ours - expected).abs().max() <= 1e-5
    for ours, sample, numbers in drawn(Augment([Grayscale(0.5), Invert(0.5)]), pictures()):
        expected = functional.rgb_to_grayscale(sample, 3) if numbers["Grayscale.on"] else sample
        expected = functional.invert(expected) if numbers["Invert.on"] else expected
        assert (ours - expected).abs().max() <= 1e-5
    for ours, sample, numbers in drawn(Augment([Erase(1.0, value=0.3)]), pictures()):
        box = [int(numbers[f"Erase.{part}"]) for part in ("top", "left", "height", "width")]
        assert (ours - functional.erase(sample, *box, torch.tensor(0.3).cuda())).abs().max() <= 1e-5


def test_rotate_and_affine_are_torchvisions(functional):
    bilinear = {"interpolation": functional.InterpolationMode.BILINEAR, "fill": None}
    for ours, sample, numbers in drawn(Augment([Rotate(180)]), pictures()):
        assert (ours - functional.rotate(sample, numbers["Rotate.degrees"], **bilinear)).abs().max() <= 1 / 255
    aug = Augment([Affine(60, 0.2, (0.6, 1.5), (-15, 15, -10, 10))])
    for ours, sample, numbers in drawn(aug, pictures()):
        expected = functional.affine(
            sample,
            numbers["Affine.degrees"],
            [numbers["Affine.right"], numbers["Affine.down"]],
            numbers["Affine.scale"],
            [numbers["Affine.shear_x"], numbers["Affine.shear_y"]],
            **bilinear,
        )
        assert (ours - expected).abs().max() <= 1 / 255


@pytest.mark.parametrize("antialias", [True, False])
def test_crops_and_resizes_are_torchvisions(functional, antialias):
    for ours, sample, numbers in drawn(Augment([ResizedCrop((50, 70), antialias=antialias), HFlip()]), pictures()):
        box = [int(numbers[f"ResizedCrop.{part}"]) for part in ("top", "left", "height", "width")]
        expected = functional.resized_crop(sample, *box, [50, 70], antialias=antialias)
        expected = functional.horizontal_flip(expected) if numbers["HFlip.on"] else expected
        assert (ours - expected).abs().max() <= 1 / 255
    for ours, sample, _ in drawn(Augment([Resize(64, antialias=antialias)]), pictures()):
        assert (ours - functional.resize(sample, [64], antialias=antialias)).abs().max() <= 1 / 255


def test_contrast_takes_its_mean_after_the_geometry_as_a_pipeline_of_torchvision_does(functional):
    bilinear = {"interpolation": functional.InterpolationMode.BILINEAR, "fill": None}
    aug = Augment([HFlip(), Rotate(15), Brightness(0.2), Contrast(0.2), Normalize(MEAN, STD)])
    for ours, sample, numbers in drawn(aug, pictures()):
        expected = functional.horizontal_flip(sample) if numbers["HFlip.on"] else sample
        expected = functional.rotate(expected, numbers["Rotate.degrees"], **bilinear)
        expected = functional.adjust_brightness(expected, numbers["Brightness.factor"])
        expected = functional.adjust_contrast(expected, numbers["Contrast.factor"])
        assert (ours - functional.normalize(expected, MEAN, STD)).abs().max() <= 1 / 255


def test_real_transforms_are_converted():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    v1 = pytest.importorskip("torchvision.transforms")
    for tv in (v1, v2):
        aug = Augment.from_torchvision(
            tv.Compose([
                tv.RandomResizedCrop(64, antialias=True),
                tv.RandomHorizontalFlip(),
                tv.RandomRotation(10, interpolation=v2.InterpolationMode.BILINEAR),
                tv.RandomApply([tv.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                tv.RandomGrayscale(0.2),
                tv.GaussianBlur(5),
                tv.ToTensor() if tv is v1 else tv.ToDtype(torch.float32, scale=True),
                tv.Normalize(MEAN, STD),
                tv.RandomErasing(0.25),
            ])
        )  # fmt: skip
        assert aug.operations == (
            ResizedCrop((64, 64)),
            HFlip(0.5),
            Rotate((-10.0, 10.0)),
            ColorJitter((0.6, 1.4), (0.6, 1.4), (0.6, 1.4), (-0.1, 0.1), p=0.8),
            Grayscale(0.2),
            Blur(5, (0.1, 2.0)),
            Normalize(MEAN, STD),
            Erase(0.25),
        )
        assert aug(pictures().cuda(), index=torch.arange(6)).shape == (6, 3, 64, 64)
        with pytest.raises(ValueError, match="RandAugment"):
            Augment.from_torchvision(tv.Compose([tv.RandAugment()]))
