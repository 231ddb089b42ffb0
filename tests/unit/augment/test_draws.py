"""What a sample gets depends on (seed, epoch, index, operation) and on nothing else."""

from __future__ import annotations

import pytest
import torch

from flatout.augment import Affine, Augment, Blur, ColorJitter, Crop, Erase, HFlip, Noise, ResizedCrop, Rotate
from flatout.augment.batch_program import BatchProgram, draw, steps
from flatout.augment.operations import normal, philox

EVERYTHING = [HFlip(), ResizedCrop(20), Affine(30, 0.2, (0.8, 1.2), 10, p=0.5), ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.7),
              Blur(3), Noise(), Erase()]  # fmt: skip
SIZE = (40, 48)


def rows(index: torch.Tensor, operations=EVERYTHING, epoch: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    program = BatchProgram.build(steps(operations), SIZE, 3)
    return dict(zip(program.columns, draw(program, index, epoch, seed).unbind(1), strict=True))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_answers_of_its_authors(counter, key, answer):
    def signed(low: int, high: int) -> int:
        return int.from_bytes((high << 32 | low).to_bytes(8, "little"), "little", signed=True)

    words = philox(torch.tensor([signed(*counter[:2])]), signed(*counter[2:]), signed(*key))

    assert tuple(int(word) for word in words) == answer


def test_a_sample_gets_the_same_in_any_company():
    index = torch.tensor([5, 2**33 + 5, 17, 3, 2**40])
    together = rows(index, epoch=3, seed=9)

    for place, one in enumerate(index):
        alone = rows(one[None], epoch=3, seed=9)
        assert all(torch.equal(alone[name][0], together[name][place]) for name in together)
    assert together["0.HFlip.on"].shape == (5,)


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}, {"seed": 2**40}])
def test_another_epoch_or_seed_draws_other_numbers(other):
    index = torch.arange(64)
    assert not torch.equal(rows(index)["7.Blur.sigma"], rows(index, **other)["7.Blur.sigma"])


def test_index_beyond_32_bits_and_neighbouring_operations_draw_other_numbers():
    index = torch.arange(64)
    first = rows(index, [Rotate(10), Rotate(10)])
    assert not torch.equal(first["0.Rotate.degrees"], first["1.Rotate.degrees"])
    assert not torch.equal(first["0.Rotate.degrees"], rows(index + 2**32, [Rotate(10)])["0.Rotate.degrees"])


def test_numbers_are_uniform_and_probabilities_hold():
    drawn = rows(torch.arange(20_000), [HFlip(0.3), Rotate((-10, 30), p=0.5)])

    degrees = drawn["1.Rotate.degrees"]
    turned = degrees[degrees != 0]
    assert drawn["0.HFlip.on"].mean() == pytest.approx(0.3, abs=0.015)
    assert len(turned) / 20_000 == pytest.approx(0.5, abs=0.015)
    assert turned.min() >= -10
    assert turned.max() < 30
    counts = torch.histc(turned, 10, -10, 30) / len(turned)
    assert torch.allclose(counts, torch.full((10,), 0.1), atol=0.01)


def test_colour_jitter_does_all_or_nothing():
    drawn = rows(torch.arange(500), [ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.5)])
    resting = {"0.Brightness.factor": 1, "1.Contrast.factor": 1, "2.Saturation.factor": 1, "3.Hue.turn": 0}
    neutral = torch.stack([drawn[name] == value for name, value in resting.items()])
    assert torch.equal(neutral.all(0), neutral.any(0))
    assert 0.4 < neutral[0].float().mean() < 0.6


def test_boxes_have_the_asked_area_and_shape_and_lie_inside():
    drawn = rows(torch.arange(5_000), [ResizedCrop(80, scale=(0.2, 0.6), ratio=(0.5, 2.0)), Erase(0.5, (0.1, 0.2))])
    for name, size, low, high in (("0.ResizedCrop", SIZE, 0.2, 0.6), ("1.Erase", (80, 80), 0.1, 0.2)):
        top, left, height, width = (drawn[f"{name}.{part}"] for part in ("top", "left", "height", "width"))
        there = height > 0
        share = (height * width / (size[0] * size[1]))[there]
        assert (top >= 0).all()
        assert (left >= 0).all()
        assert (top + height <= size[0]).all()
        assert (left + width <= size[1]).all()
        assert low * 0.7 < share.min() < share.mean() < share.max() < high * 1.3  # rounded to whole pixels
    assert (drawn["1.Erase.height"] > 0).float().mean() == pytest.approx(0.5, abs=0.03)
    assert (drawn["0.ResizedCrop.height"] > 0).all()
    ratio = drawn["0.ResizedCrop.width"] / drawn["0.ResizedCrop.height"]
    assert 0.45 < ratio.min() < 0.6
    assert 1.8 < ratio.max() < 2.2


def test_a_box_that_never_fits_falls_back_to_the_middle():
    drawn = rows(torch.arange(8), [ResizedCrop(8, scale=(1.0, 1.0), ratio=(3.0, 3.0))])
    assert drawn["0.ResizedCrop.width"].tolist() == [48] * 8
    assert drawn["0.ResizedCrop.height"].tolist() == [16] * 8
    assert drawn["0.ResizedCrop.top"].tolist() == [12] * 8


def test_crops_reach_every_place_and_no_other():
    drawn = rows(torch.arange(3_000), [Crop((38, 46), padding=1)])
    assert sorted(set(drawn["0.Crop.top"].tolist())) == [-1, 0, 1, 2, 3]
    assert sorted(set(drawn["0.Crop.left"].tolist())) == [-1, 0, 1, 2, 3]


def test_normal_numbers_are_normal():
    words = philox(torch.arange(50_000), 0, 7)
    for grain in normal(words[0], words[1]):
        assert grain.mean() == pytest.approx(0, abs=0.02)
        assert grain.std() == pytest.approx(1, abs=0.02)
        assert (grain.abs() < 1).float().mean() == pytest.approx(0.6827, abs=0.01)


def test_params_saved_and_loaded_replay_the_same_pictures(tmp_path):
    images = torch.randint(0, 256, (3, 3, *SIZE), dtype=torch.uint8)
    aug = Augment(EVERYTHING)
    first, params = aug(images, index=torch.tensor([4, 9, 2]), epoch=1, return_params=True)
    torch.save(params, tmp_path / "params.pt")

    again = Augment(EVERYTHING, seed=123)(images, params=torch.load(tmp_path / "params.pt"))

    assert torch.equal(again, first)
    assert len(aug.columns(images)) == params.shape[1]
