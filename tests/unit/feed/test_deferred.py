"""Transforms that samples only record: the batch is what it would have been without.

Each sample of a test draws random numbers and does to an image what scripts do. What cannot be recorded is computed in
the worker, bit for bit; what the GPU computes may differ by rounding.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from flatout.feed import LoaderOptions, iterator_for, randomness
from flatout.feed.deferred import batch as batches
from flatout.feed.deferred import samples as sampling
from flatout.feed.deferred.batch import (
    CompiledPrograms,
    DeferredBatch,
    TransformStep,
    call_on_first_use,
    materialize,
    run_program,
)
from flatout.feed.deferred.expression import SampleRecording, as_program
from flatout.feed.deferred.lazy import LazyTensor, collatable
from flatout.feed.deferred.samples import LazySamples, recording_samples, same_sample

SIZE = (48, 32)  # width, height
GREY_LEVEL = 1 / 255
MIRRORED = Image.Transpose.FLIP_LEFT_RIGHT


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    """Smooth, as photos are, and different for every seed."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (5, 7, 3) if mode == "RGB" else (5, 7), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


class Photos(Dataset[Any]):
    """Samples made by one function of a picture's number."""

    def __init__(self, make: Callable[[int], Any], count: int = 24) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def segmented(index: int) -> Any:
    """As `workloads/segment` has it."""
    image, mask = picture(index), picture(index + 100, "L")
    if random.random() < 0.5:
        image, mask = image.transpose(MIRRORED), mask.transpose(MIRRORED)
    angle = random.uniform(-15, 15)
    image = image.rotate(angle, Image.Resampling.BILINEAR)
    mask = mask.rotate(angle, Image.Resampling.NEAREST, fillcolor=255)
    lit = np.clip(np.array(image) * random.uniform(0.8, 1.2), 0, 255)
    mean = lit.mean()
    lit = np.clip(mean + (lit - mean) * random.uniform(0.8, 1.2), 0, 255)
    lit = (np.array(lit) / 255.0 - 0.45) / 0.23
    return torch.from_numpy(lit).permute(2, 0, 1).float(), torch.from_numpy(np.array(mask)).long()


def stamped(index: int) -> Any:
    """As `workloads/gray` has it."""
    image = picture(index, "L")
    if random.random() < 0.5:
        image = ImageOps.mirror(image)
    image = image.rotate(random.uniform(-10, 10))
    pixels = (np.asarray(image, dtype=np.float32) / 255 - 0.5) / 0.25
    return torch.from_numpy(pixels).unsqueeze(0), index % 7


def as_torchvision_does(index: int) -> Any:
    """A flip, ToTensor and Normalize, by the calls that torchvision makes; some pictures are left as they are."""
    image = picture(index)
    if torch.rand(1) < 0.5:
        image = image.transpose(MIRRORED)
    made = torch.from_numpy(np.array(image, np.uint8, copy=True))
    made = made.view(image.size[1], image.size[0], 3).permute((2, 0, 1)).contiguous()
    made = made.to(dtype=torch.float32).div(255).clone()
    mean, std = torch.tensor([0.48, 0.45, 0.4]), torch.tensor([0.2, 0.3, 0.25])
    return made.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)), index


def by_channel(index: int) -> Any:
    """Arrays as they are, with constants a channel, upside down and back, in a dict."""
    image = picture(index).transpose(Image.Transpose.FLIP_TOP_BOTTOM).transpose(Image.Transpose.ROTATE_180)
    pixels = np.asarray(image).astype(np.float32)
    pixels -= np.array([120.0, 110.0, 100.0], dtype=np.float32)
    pixels *= np.float32(random.uniform(0.5, 1.5))
    return {"pixels": np.maximum(pixels, -50).transpose(2, 0, 1), "name": f"{index}.jpg"}


MAKERS = [segmented, stamped, as_torchvision_does, by_channel]


def twice(make: Callable[[int], Any], index: int) -> tuple[Any, Any]:
    """A sample made lazily, without the checks, and the same sample made at once."""
    dataset = Photos(make)
    randomness.seed_batch((index, 0), 0, [])
    plain = dataset[index]
    randomness.seed_batch((index, 0), 0, [])
    with recording_samples(recording := SampleRecording()):
        lazy = collatable(dataset[index])
    return (plain if recording.failed else lazy), plain


def on_gpu(tensor: LazyTensor) -> torch.Tensor:
    steps, numbers = as_program(tensor.expression)
    return run_program(
        steps, sampling.pixels_of(tensor.expression).unsqueeze(0), torch.tensor([numbers], dtype=torch.float64)
    )[0]


def leaves(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return [leaf for part in thing.values() for leaf in leaves(part)]
    return [leaf for part in thing for leaf in leaves(part)] if isinstance(thing, list | tuple) else [thing]


# --- a sample -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_lazy_samples_are_what_they_would_have_been(make: Callable[[int], Any]) -> None:
    for index in range(12):
        lazy, plain = twice(make, index)
        assert isinstance(leaves(lazy)[0], LazyTensor)
        assert same_sample(lazy, plain)
        for later, made in zip(leaves(lazy), leaves(plain), strict=True):
            if isinstance(later, LazyTensor):
                wanted, there = torch.as_tensor(made), on_gpu(later)
                assert torch.equal(later.materialize(), wanted), "computed on the host it is the same bit for bit"
                assert (there.shape, there.dtype) == (wanted.shape, wanted.dtype)
                off = (there - wanted).abs() > (1.3 * GREY_LEVEL / 0.2 if wanted.is_floating_point() else 0)
                assert off.float().mean() < (0.002 if make is not by_channel else 1), "pixels at an edge, no more"


@pytest.mark.parametrize("move", [Image.Resampling.NEAREST, Image.Resampling.BILINEAR])
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("colour", [None, 255, (9, 200, 77)])
def test_images_are_rotated_as_pillow_rotates_them(move: Any, mode: str, colour: Any) -> None:
    """Around any centre, mirrored before and after, with any colour outside: at most one grey level off."""
    if isinstance(colour, tuple) and mode == "L":
        colour = 77

    def make(index: int) -> Any:
        turned = picture(index, mode).transpose(MIRRORED)
        turned = turned.rotate(7.0 * index - 40, move, center=(11, 9), translate=(3, -2), fillcolor=colour)
        return torch.from_numpy(np.array(turned.transpose(Image.Transpose.FLIP_TOP_BOTTOM)))

    for index in range(12):
        lazy, plain = twice(make, index)
        if mode == "RGB" and colour == 255:
            assert torch.equal(lazy.materialize() if isinstance(lazy, LazyTensor) else lazy, plain), "which is red"
            continue
        difference = (on_gpu(lazy).int() - plain.int()).abs()
        assert (difference > 1).float().mean() < 0.01
        assert (difference > 0).float().mean() < 0.03


@pytest.mark.parametrize(
    "what",
    [
        lambda image: np.array(image.rotate(5))[3:9, ::2],
        lambda image: np.roll(np.array(image.rotate(5)), 3, axis=0),
        lambda image: np.array(image.rotate(5).resize((9, 9))),
        lambda image: np.array(image.rotate(5).filter(ImageFilter.GaussianBlur(2))),
        lambda image: np.array(image.rotate(5, Image.Resampling.BILINEAR).rotate(8, Image.Resampling.BILINEAR)),
        lambda image: np.array(image.rotate(5, Image.Resampling.BICUBIC)),
        lambda image: np.array(image.rotate(30, expand=True)),
        lambda image: np.array(image.transpose(Image.Transpose.ROTATE_90)),
        lambda image: np.array(image.transpose(MIRRORED).convert("L")),
        lambda image: np.array(image.transpose(MIRRORED)) + np.uint8(200),
        lambda image: (np.array(image.transpose(MIRRORED)) * 1.7).astype(np.uint8),
        lambda image: np.array(image.transpose(MIRRORED)) / (np.array(image) + 1.5),
        lambda image: np.array(image.transpose(MIRRORED)).astype(np.float32).std(),
        lambda image: np.array(image.transpose(MIRRORED)).mean(axis=(0, 1)),
        lambda image: float(np.array(image.transpose(MIRRORED)).mean()) * 2,
        lambda image: np.sqrt(np.array(image.transpose(MIRRORED)) / 255),
        lambda image: np.stack([np.array(image.transpose(MIRRORED))] * 2),
        lambda image: np.array(image.transpose(MIRRORED)).tolist(),
        lambda image: torch.from_numpy(np.array(image.rotate(5))).sum(),
        lambda image: torch.from_numpy(np.array(image.rotate(5)))[4:8],
        lambda image: torch.nn.functional.interpolate(torch.from_numpy(np.array(image.rotate(5))).float()[None], 9),
        lambda image: torch.tensor(np.array(image.rotate(5)).astype(np.float64) ** 2),
    ],
)
def test_what_cannot_be_recorded_is_computed_at_once_bit_for_bit(what: Callable[[Any], Any]) -> None:
    lazy, plain = twice(lambda index: what(picture(index)), 3)
    if isinstance(lazy, LazyTensor):  # a part of it is lazy after all
        assert np.allclose(on_gpu(lazy), plain, rtol=1e-5)
        lazy = lazy.materialize()
    assert np.array_equal(np.asarray(lazy), np.asarray(plain))


@pytest.mark.parametrize(
    "what",
    [
        lambda image: (np.array(image.rotate(5)) * 1.7).astype(np.uint8),
        lambda image: torch.from_numpy(np.array(image.rotate(5)) / 255).long(),
        lambda image: np.array(image.rotate(5)) + np.uint8(200),
    ],
)
def test_whole_numbers_that_depend_on_rounding_are_computed_at_once(what: Callable[[Any], Any]) -> None:
    lazy, plain = twice(lambda index: what(picture(index)), 3)
    assert type(lazy) is type(plain)


def test_a_change_in_place_is_recorded_for_that_array() -> None:
    def make(index: int) -> Any:
        pixels = np.array(picture(index).transpose(MIRRORED), dtype=np.float32)
        other = pixels.copy()
        pixels /= 255
        other[2:4] = 7.0
        drawn = picture(index).transpose(MIRRORED)
        drawn.paste(9, (0, 0, 5, 5))
        kept = torch.from_numpy(np.array(picture(index).rotate(4))).float()
        kept.add_(1.0)
        return [pixels, other, np.array(drawn), kept]

    lazy, plain = twice(make, 1)
    assert same_sample(lazy, plain)
    made = [part.materialize() if isinstance(part, LazyTensor) else part for part in lazy]
    assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in zip(made, plain, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        "a[5:20, 5:30] = 0", "roi = a[5:20]; roi[:] = 0", "a[5:20].fill(0)", "a.fill(0)", "a.sort(axis=0)",
        "a.T[0] = 0", "np.clip(a, 50, 100, out=a)", "a.clip(50, 100, out=a)", "np.sqrt(a, out=a)",
        "np.multiply(a, 0.2, out=a)", "a.reshape(-1)[:99] = 7", "a.flat[:99] = 7", "a += a[::-1].copy()",
        "np.copyto(a, a[:, ::-1].copy())", "np.putmask(a, a > 100, 0)",
        "np.add.at(a, (slice(5, 20),), 100)", "np.random.shuffle(a)", "np.fliplr(a)[5:20] = 0",
        "b = np.asarray(a); b *= 0.1", "b = np.ascontiguousarray(a); b[5:20] = 0", "b = a.view(); b *= 0.1",
        "b = a.astype(a.dtype); b *= 0; b[0] = 1", "b = np.asarray(a, copy=True); b[:] = 0",
        "m = a.mean(); k = m; k *= 0.5; a -= m",
        "c = a.transpose(2, 0, 1).copy(); c.reshape(-1)[:9] = 0; a += c[0, 0, 0]",
        "c = np.ascontiguousarray(a.transpose(2, 0, 1), dtype=np.float64); c.reshape(-1)[:9] = 0; a += c[0, 0, 0]",
        "t = torch.from_numpy(a); u = t; t *= a.mean() / 100; a += u.mean().item()", "torch.asarray(a).mul_(0.5)",
        "for _ in range(1100): a *= np.float32(0.999)",
        "b = a.astype(a.dtype, copy=False); b /= 9",
        "b = a.transpose(2, 0, 1); b *= 0.1", "torch.from_numpy(a).mul_(0.1)", "t = torch.from_numpy(a); t[5:20] = 0",
        "b = a.copy(); b += 100; b[:3] = 0", "a /= 255; b = a.copy(); b *= 0; a -= 0.5",
        "[row.fill(3) for row in a[:9]]", "a.shape = (48, 32, 3); a[0] = 1; a.shape = (32, 48, 3)",
    ],
)  # fmt: skip
def test_an_array_sees_writes_through_all_of_its_views(change: str) -> None:
    def make(index: int) -> Any:
        a = np.array(picture(index).transpose(MIRRORED), dtype=np.float32)
        exec(change, {"a": a, "np": np, "torch": torch})
        return [torch.from_numpy(a), np.array(a) * 2]

    lazy, plain = twice(make, 2)
    assert same_sample(lazy, plain)
    assert all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(materialize(lazy), plain, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        "t[..., 5:20, 5:30] = 0", "t[0] -= 0.5", "t[0].zero_()", "t.clamp_(0.2, 0.5)", "t.add_(torch.rand(t.shape))",
        "t.masked_fill_(t > 0.5, 0)", "t.copy_(t.flip(-1))", "t.sub_(0.5, alpha=2)", "torch.mul(t, 0.1, out=t)",
        "[channel.sub_(0.1) for channel in t]", "t.numpy()[:, 3] = 9", "t.data.mul_(0.1)", "t.detach().mul_(0.1)",
        "torch.nn.init.uniform_(t)", "t.unsqueeze(0).mul_(0.1)", "t.permute(1, 2, 0).mul_(0.1)", "t.float().mul_(0.1)",
        "t.contiguous().mul_(0.1)", "t.clone().mul_(0.1)", "u = t.clone().clamp_(0, 0.1); t.add_(1)",
        "t.view(t.shape).mul_(3)", "u = t.detach(); u.unsqueeze_(0); u += 1", "t.sub_(np.array(photo).mean() / 255)",
        "t.unsqueeze_(0); t.mul_(0.1); t.squeeze_(0)", "t.div_(t.max())", "torch.nn.functional.relu_(t.sub_(0.5))",
    ],
)  # fmt: skip
def test_a_tensor_sees_writes_through_all_of_its_views(change: str) -> None:
    def make(index: int) -> Any:
        t = torch.from_numpy(np.array(picture(index).transpose(MIRRORED))).permute(2, 0, 1).float().div(255)
        exec(change, {"t": t, "torch": torch, "np": np, "photo": picture(index)})
        return [t, t * 2]

    lazy, plain = twice(make, 2)
    assert same_sample(lazy, plain)
    assert all(map(torch.equal, materialize(lazy), plain))


PICTURES = (
    "{d} = {s}.transpose(MIRRORED)", "{d} = {s}.rotate(7)", "{d} = {s}.rotate(7, BILINEAR)", "{d} = {s}.copy()",
    "{s}.paste(9, (0, 0, 3, 2))", "{d} = np.array({s})", "{d} = np.asarray({s}, dtype=np.float32)",
    "{d} = np.array({s}) / 255",
)  # fmt: skip
ARRAYS = (
    "{d} = np.array({s})", "{d} = np.asarray({s})", "{d} = np.ascontiguousarray({s})", "{d} = {s}.astype(np.float32)",
    "{d} = {s}.astype(np.float32, copy=False)", "{d} = {s}.transpose(2, 0, 1)", "{d} = {s}.clip(10, 100.5)",
    "{d} = {s}.copy()",
    "{d} = {s} - {s}.mean()", "{d} = 1.5 - {s}", "{d} = np.maximum({s}, 3.5)", "{s} *= np.float32(0.5)", "{s} += 1",
    "{s}[1:3] = 7",
    "{s}[..., 0] = 3", "{s}.reshape(-1)[:9] = 5", "{s}.sort(axis=0)", "np.multiply({s}, 0.5, out={s})",
    "{d} = {s}[1:4]",
    "{d} = {s} + {o}", "{s} -= {o}", "{d} = torch.from_numpy({s})", "{d} = torch.as_tensor({s})",
    "{d} = torch.tensor({s})",
    "{d} = {s} * np.array([1.0, 2.0, 3.0])", "{d} = {s}.view()", "{d} = np.ascontiguousarray({s}).reshape(-1)",
)  # fmt: skip
TENSORS = (
    "{d} = {s}.permute(2, 0, 1)", "{d} = {s}.unsqueeze(0)", "{d} = {s}.detach()", "{d} = {s}.clone()",
    "{d} = {s}.contiguous()",
    "{d} = {s}.float()", "{d} = {s}.to(torch.float64)", "{d} = {s}.view({s}.shape)", "{d} = {s}.reshape(-1)",
    "{d} = {s}.div(255)",
    "{d} = {s} - {s}.float().mean()", "{d} = 2 - {s}", "{d} = {s} + {o}", "{s}.sub_({o})", "{s} *= 0.5", "{s}[0] = 1",
    "{s}.clamp_(2, 50)", "{s}.data.mul_(3)", "{d} = {s}.numpy()", "{d} = {s}[0:2]", "{d} = {s}.mean() * {s}",
    "{s}.unsqueeze_(0)",
)  # fmt: skip


def some_code(seed: int) -> list[str]:
    """Lines that can be executed one after the other, on a picture or two, in four variables."""
    draw = random.Random(seed)
    lines = [f"v{number} = picture({seed + number}, {draw.choice(('RGB', 'L'))!r}, (8, 6))" for number in range(2)]
    names = {**CODE}
    exec("\n".join(lines), names)
    while len(lines) < 10:
        source = draw.choice([name for name in ("v0", "v1", "v2", "v3") if name in names])
        kinds = ((Image.Image, PICTURES), (np.ndarray, ARRAYS), (torch.Tensor, TENSORS))
        templates = next((known for kind, known in kinds if isinstance(names[source], kind)), ("{d} = {s}",))
        other = draw.choice([name for name in ("v0", "v1", "v2", "v3") if name in names])
        line = draw.choice(templates).format(s=source, d=f"v{draw.randrange(4)}", o=other)
        trial = {**CODE}
        try:
            exec("\n".join([*lines, line]), trial)
        except Exception:
            continue
        lines, names = [*lines, line], trial
    return lines


CODE = {"np": np, "torch": torch, "picture": picture, "MIRRORED": MIRRORED, "BILINEAR": Image.Resampling.BILINEAR}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 600, 100)], ids=str)
def test_random_code_gives_the_same_result_as_without_recording(seeds: range) -> None:
    """Views, copies and writes of all kinds, one through the other."""
    for seed in seeds:
        lines = some_code(seed)
        plain, lazy = {**CODE}, {**CODE}
        exec("\n".join(lines), plain)
        with recording_samples(recording := SampleRecording()):
            exec("\n".join(lines), lazy)
        if recording.failed:
            continue
        for name in ("v0", "v1", "v2", "v3"):
            one, other = plain.get(name), materialize(lazy.get(name))
            assert np.array_equal(np.asarray(one), np.asarray(other)), "\n".join([f"{name} of {seed}:", *lines])


def test_threads_of_a_sample_write_into_one_array() -> None:
    def make(index: int) -> Any:
        pixels = np.array(picture(index).transpose(MIRRORED), dtype=np.float32)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda channel: pixels.__setitem__((..., channel), channel), range(3)))
        return pixels

    for index in range(10):
        lazy, plain = twice(make, index)
        assert np.array_equal(lazy, plain)


def test_lazy_values_keep_when_their_image_and_constants_change() -> None:
    """One canvas for all pictures, one array for all gains; a picture that is closed."""
    canvas, gains = Image.new("RGB", SIZE), np.ones(3, np.float32)

    def make(index: int) -> Any:
        canvas.paste(picture(index))
        gains[:] = index + 1
        other = picture(index + 50)
        return [np.array(canvas) * gains, np.asarray(other) / 255, other.close()][:2]

    def keep(index: int) -> Any:
        return [part.copy() for part in make(index)]

    wanted = [keep(index) for index in range(4)]
    with recording_samples(SampleRecording()):
        lazy = [collatable(make(index)) for index in range(4)]
    for one, plain in zip(lazy, wanted, strict=True):
        assert all(isinstance(part, LazyTensor) for part in one)
        assert same_sample(one, plain)
        assert all(np.array_equal(real, part) for real, part in zip(materialize(one), plain, strict=True))


def test_a_kept_lazy_array_works_after_recording_has_ended() -> None:
    kept: dict[int, Any] = {}

    def make(index: int) -> Any:
        if index not in kept:
            kept[index] = np.asarray(picture(index), dtype=np.float32) / 255
        return {"pixels": kept[index], "label": index}

    samples = LazySamples(Photos(make))
    for index in (0, 0, 1, 1):
        pixels = samples[index]["pixels"]
        assert torch.equal(torch.as_tensor(pixels), torch.from_numpy(np.asarray(picture(index), np.float32) / 255))
    assert samples.off, "a sample that cannot be repeated is not recorded"


def test_other_threads_record_nothing() -> None:
    with recording_samples(SampleRecording()), ThreadPoolExecutor(1) as pool:
        assert type(pool.submit(lambda: np.array(picture(1).rotate(5))).result()) is np.ndarray


def test_a_lazy_value_outlives_the_file_of_its_image(tmp_path: Any) -> None:
    picture(5).save(tmp_path / "5.png")

    def make(index: int) -> Any:
        with Image.open(tmp_path / "5.png") as file:
            turned = file.transpose(MIRRORED)
        return torch.from_numpy(np.array(turned) / 255)

    lazy, plain = twice(make, 5)
    assert isinstance(lazy, LazyTensor)
    assert same_sample(lazy, plain)


# --- doubts -------------------------------------------------------------------------------------------------------


def test_code_that_branches_on_a_lazy_array_is_detected() -> None:
    def make(index: int) -> Any:
        pixels = np.array(picture(index).rotate(random.uniform(-5, 5)))
        return torch.from_numpy(pixels / 255 if type(pixels) is np.ndarray else pixels / 128)

    samples = LazySamples(Photos(make))
    randomness.seed_batch((1, 0), 0, [])
    found = samples[0]
    randomness.seed_batch((1, 0), 0, [])
    assert type(found) is torch.Tensor
    assert torch.equal(found, make(0))
    assert samples.off


def test_other_random_numbers_are_detected() -> None:
    def make(index: int) -> Any:
        pixels = np.array(picture(index).rotate(5))
        if type(pixels) is not np.ndarray:
            random.random()
        return torch.from_numpy(pixels / 255)

    samples = LazySamples(Photos(make))
    assert type(samples[0]) is torch.Tensor
    assert samples.off


def test_a_sample_that_raises_while_recording_is_made_again_from_the_same_random_numbers() -> None:
    def make(index: int) -> Any:
        pixels = np.array(picture(index).rotate(random.uniform(-5, 5)))
        if type(pixels) is not np.ndarray:
            raise TypeError("an array, please")
        return torch.from_numpy(pixels / 255)

    samples = LazySamples(Photos(make))
    randomness.seed_batch((4, 0), 0, [])
    found = samples[4]
    randomness.seed_batch((4, 0), 0, [])
    assert type(found) is torch.Tensor
    assert torch.equal(found, make(4))


def test_an_error_of_the_script_is_raised() -> None:
    def make(index: int) -> Any:
        if index == 1:
            raise OSError("1.jpg is broken")
        return torch.from_numpy(np.array(picture(index).rotate(5)) / 255)

    samples = LazySamples(Photos(make))
    with pytest.raises(OSError, match="is broken"):
        samples[1]
    assert isinstance(samples[2], LazyTensor)


def test_a_dataset_with_its_own_generator_is_not_recorded() -> None:
    dataset = Photos(segmented)
    dataset.generator = np.random.default_rng(0)  # type: ignore[attr-defined]
    assert LazySamples(dataset).off


def test_recording_ends_where_there_is_nothing_to_record() -> None:
    samples = LazySamples(Photos(lambda index: torch.ones(3) * index))
    assert [samples[index].sum().item() for index in range(20)] == [3.0 * index for index in range(20)]
    assert samples.off


def test_nothing_is_recorded_outside_of_samples() -> None:
    before = np.array, torch.tensor, Image.Image.transform
    assert isinstance(LazySamples(Photos(segmented))[1][0], LazyTensor)
    assert (np.array, torch.tensor, Image.Image.transform) == before
    turned = picture(1).rotate(5)
    assert type(turned) is Image.Image
    assert type(np.array(turned)) is np.ndarray


# --- a batch ------------------------------------------------------------------------------------------------------


def passed(make: Callable[[int], Any], *, defer: bool, count: int = 24, batch: int = 8, workers: int = 2) -> list[Any]:
    torch.manual_seed(3)
    loader = DataLoader(Photos(make, count), batch, shuffle=True, num_workers=workers)
    iterator, why_not = iterator_for(loader, LoaderOptions(defer=defer))
    assert iterator is not None, why_not
    return list(iterator)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("batch", [8, 24])
def test_batches_are_those_of_the_loader_without_recording(make: Callable[[int], Any], batch: int) -> None:
    """The same samples in the same order with the same random numbers; also where workers share a batch."""
    plain, lazy = (passed(make, defer=defer, count=4 * batch, batch=batch) for defer in (False, True))
    for one, other in zip(plain, lazy, strict=True):
        assert isinstance(leaves(other)[0], DeferredBatch)
        for wanted, found in zip(leaves(one), leaves(other), strict=True):
            if isinstance(found, DeferredBatch):
                assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
                assert found.pixels.dtype == torch.uint8
                assert sampling._close(found.materialize(), wanted)
            else:
                assert type(found) is type(wanted)
                assert bool(np.all(np.asarray(found) == np.asarray(wanted)))


def test_images_of_several_sizes_are_computed_in_the_worker() -> None:
    def make(index: int) -> Any:
        size = (48, 32) if index % 3 else (32, 48)
        pixels = np.array(picture(index, size=size).rotate(random.uniform(-5, 5))) / 255
        return torch.from_numpy(pixels).flatten()

    plain, lazy = (passed(make, defer=defer) for defer in (False, True))
    assert all(type(batch) is torch.Tensor for batch in lazy)
    assert all(map(torch.equal, plain, lazy))


def test_a_mean_over_images_of_several_sizes_is_computed_in_the_worker() -> None:
    def make(index: int) -> Any:
        size = (48, 32) if index % 3 else (32, 48)
        return np.array(picture(index, size=size).transpose(MIRRORED)).mean()

    plain, lazy = (passed(make, defer=defer) for defer in (False, True))
    assert all(map(torch.equal, plain, lazy))


class FetchesMany(Photos):
    """Loads whole batches only."""

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


def test_a_dataset_that_loads_whole_batches_may_leave_their_transforms_to_the_gpu() -> None:
    iterator, _ = iterator_for(DataLoader(FetchesMany(stamped), 8, num_workers=1), LoaderOptions(defer=True))
    assert iterator is not None
    first, *_ = iterator
    assert isinstance(first[0], DeferredBatch)


def test_images_that_are_only_decoded_travel_as_ordinary_tensors() -> None:
    lazy = passed(lambda index: torch.from_numpy(np.array(picture(index))), defer=True)
    assert all(type(batch) is torch.Tensor and batch.dtype == torch.uint8 for batch in lazy)


def test_a_collate_function_of_the_script_gets_real_samples() -> None:
    loader = DataLoader(Photos(segmented), 8, num_workers=1, collate_fn=lambda samples: [s[0].numpy() for s in samples])
    iterator, _ = iterator_for(loader, LoaderOptions(defer=True))
    assert iterator is not None
    assert all(type(array) is np.ndarray for batch in iterator for array in batch)


def erased(index: int) -> Any:
    """As torchvision's RandomErasing does it, now and then."""
    tensor = torch.from_numpy(np.array(picture(index))).permute(2, 0, 1).float().div(255)
    if random.random() < 0.1:
        tensor = tensor.clone()
        tensor[..., 5:20, 5:30] = 0.0
    return tensor, index


def test_a_transform_of_some_samples_is_applied_to_those() -> None:
    """Hardly a batch of these has one program; none may lose what it was to be."""
    plain, lazy = (passed(erased, defer=defer, count=128) for defer in (False, True))
    for (one, _), (other, _) in zip(plain, lazy, strict=True):
        assert torch.allclose(other.materialize() if isinstance(other, DeferredBatch) else other, one, atol=1e-6)
    assert any(isinstance(other, DeferredBatch) for other, _ in lazy)


@pytest.mark.parametrize("wrap", [lambda data: Subset(data, range(3, 24)), lambda data: ConcatDataset([data, data])])
def test_wrapped_datasets_are_recorded_too(wrap: Any) -> None:
    def passed_through(*, defer: bool) -> list[Any]:
        torch.manual_seed(3)
        iterator, _ = iterator_for(DataLoader(wrap(Photos(segmented)), 8, num_workers=2), LoaderOptions(defer=defer))
        assert iterator is not None
        return list(iterator)

    for one, other in zip(passed_through(defer=False), passed_through(defer=True), strict=True):
        assert isinstance(other[0], DeferredBatch)
        assert sampling._close(other[0].materialize(), one[0])


@pytest.fixture
def deferred() -> Any:
    return passed(segmented, defer=True)[0][0]


def test_a_loop_that_reads_its_batch_on_the_host_sees_the_values(deferred: Any) -> None:
    made = deferred.materialize().clone()
    assert torch.equal(deferred + 1, made + 1)
    assert torch.equal(deferred[2:4], made[2:4])
    assert torch.equal(torch.cat([deferred, made])[:8], made)
    assert deferred.mean().item() == made.mean().item()
    assert np.array_equal(deferred.numpy(), made.numpy())
    assert torch.equal(deferred.to(torch.float64), made.double())
    assert torch.equal(copy.deepcopy(deferred), made)
    assert repr(deferred) == repr(made)


def test_changes_on_the_host_reach_the_gpu(deferred: Any) -> None:
    version = deferred._version
    made = deferred.materialize().clone()
    deferred.mul_(0.5)
    assert deferred._version != version, "an earlier copy is out of date"
    assert torch.equal(deferred.to("cpu"), made * 0.5)


def test_reading_a_batch_in_inference_mode_leaves_it_trainable(deferred: Any) -> None:
    with torch.inference_mode():
        deferred.mean()
    assert deferred._version == 1
    weight = torch.ones(1, requires_grad=True)
    (deferred * weight).sum().backward()
    assert weight.grad is not None
    deferred.mul_(0.5)


def test_moving_a_batch_to_a_device_computes_it_there(deferred: Any) -> None:
    told: list[bool] = []
    call_on_first_use(lambda: told.append(True))
    for there in (
        deferred.to("meta"),
        deferred.to(device=torch.device("meta"), non_blocking=True),
        deferred.to(torch.empty(0, device="meta", dtype=torch.float32)),
    ):
        assert (type(there), there.device.type, there.shape) == (torch.Tensor, "meta", deferred.shape)
        assert there.dtype == torch.float32
    assert deferred.to("meta", torch.float16).dtype == torch.float16
    assert deferred.to("meta", memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
    assert not deferred.is_real, "and nothing was computed on the host"
    assert told == [True]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch's compiler without code generation, which needs a GPU. Holds what it was asked to compile."""
    asked: list[Any] = []

    def compiled(function: Any, **options: Any) -> Any:
        asked.append(torch.compile(function, backend="eager", fullgraph=True, **options))
        return asked[-1]

    monkeypatch.setattr(batches, "_compile", compiled)
    return asked


def parts(deferred: Any, count: int = 8) -> tuple[Any, Any, Any]:
    whole, pixels, numbers = deferred.parts()
    return whole, pixels[:count], numbers[:count]


def test_a_program_is_compiled_once_for_batches_of_its_first_size(deferred: Any, traced: list[Any]) -> None:
    made, on_gpu = deferred.materialize(), CompiledPrograms()
    for count in (8, 8, 3, 8):
        assert torch.equal(on_gpu(*parts(deferred, count)), made[:count])
    assert len(traced) == 1
    assert on_gpu.compile_s > 0


def test_no_more_than_a_few_programs_are_compiled(deferred: Any, traced: list[Any]) -> None:
    whole, pixels, numbers = parts(deferred)
    on_gpu = CompiledPrograms()
    for number in range(8):
        longer = replace(whole, steps=(*whole.steps, *[TransformStep("copy", (len(whole.steps) - 1,))] * number))
        assert torch.equal(on_gpu(longer, pixels, numbers), deferred.materialize())
    assert len(traced) == batches._MAX_COMPILED


def test_without_a_compiler_transforms_run_step_by_step(deferred: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such compiler")

    monkeypatch.setattr(batches, "_compile", functools.partial(torch.compile, backend=broken))
    on_gpu = CompiledPrograms()
    for _ in range(2):
        assert torch.equal(on_gpu(*parts(deferred)), deferred.materialize())


def test_another_function_can_run_programs_on_the_device(deferred: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_run_on_device", batches._run_on_device)
    batches.run_on_device_with(lambda program, pixels, numbers: pixels)
    assert deferred.to("meta").dtype == torch.uint8


def test_a_deferred_batch_can_be_pickled_and_saved(deferred: Any, tmp_path: Path) -> None:
    torch.save(deferred, tmp_path / "batch.pt")
    made = deferred.materialize().clone()
    assert torch.equal(torch.load(tmp_path / "batch.pt", weights_only=True), made)
    deferred.mul_(2)
    assert torch.equal(pickle.loads(pickle.dumps(deferred)), made * 2)
