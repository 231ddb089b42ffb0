"""A plan's changes on a real GPU: copies ahead of time leave every batch as it was; precision and layout show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "run"))

from observing import Run, flatout_run, write

from flatout.model.plan import Change, Plan

TRAIN = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Pictures(Dataset):
        scale = 1.0

        def __len__(self):
            return 250  # the last batch is a small one

        def __getitem__(self, index):
            noise = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
            return self.scale * noise, index % 5

    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = "deterministic" in sys.argv
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 5)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=0 if "rescaled" in sys.argv else 2)
    kept = []  # as for a metric of the whole epoch
    for epoch in range(2):
        for number, (pictures, labels) in enumerate(loader):
            if number % 3 == 0:
                pictures.mul_(0.5)  # in place, on the host: a copy made before is worth nothing
            if number % 3 == 1:
                pictures.numpy()[0] *= 0.25  # where no version is counted
            on_gpu = pictures.to("cuda", non_blocking=True)
            mean = pictures.mean().item()  # the host batch stays a host batch
            out = net(on_gpu)
            assert out.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
            loss = nn.functional.cross_entropy(out, labels.cuda(non_blocking="at once" in sys.argv))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item().hex(), mean.hex())
            kept.append((out.detach(), out.detach().clone()))
            if "rescaled" in sys.argv and number > 4:
                loader.dataset.scale *= 0.9
    assert all(torch.equal(out, was) for out, was in kept)
"""


def run_with(folder: Path, *changes: tuple[str, object], flags: tuple[str, ...] = (), script: str = TRAIN) -> Run:
    folder.mkdir()
    write(folder, train=script)
    plan = Plan(changes=tuple(Change(name=name, value=value, safety="equivalent") for name, value in changes))
    plan.save(folder / "plan.yaml")
    options = ("--plan", "plan.yaml", "--no-xray", "--quiet")
    run = flatout_run(folder, sys.executable, "train.py", *flags, options=options)
    assert run.code == 0, run.err
    return run


def losses(run: Run) -> list[str]:
    return [line for line in run.out.splitlines() if line.startswith("loss")]


@pytest.mark.parametrize("loader", [(), (("loader", "elastic"),)], ids=["stock", "elastic"])
def test_copies_ahead_of_time_leave_every_loss_as_it_was(
    tmp_path: Path, loader: tuple[tuple[str, object], ...]
) -> None:
    plain = run_with(tmp_path / "plain", flags=("deterministic",))
    ahead = run_with(
        tmp_path / "ahead", *loader, ("pin_memory", True), ("device_prefetch", True), flags=("deterministic",)
    )
    assert losses(ahead) == losses(plain) != []
    made = {entry.name: entry.applied for entry in ahead.observed.rank.facts.changes}
    assert made == dict.fromkeys(made, True)


def test_a_script_that_does_not_wait_for_small_copies_makes_them_itself(tmp_path: Path) -> None:
    changes = (("loader", "elastic"), ("pin_memory", True), ("device_prefetch", True))
    hows = {}
    for flags in (("deterministic", "at once"), ("deterministic",)):
        ahead = run_with(tmp_path / str(len(flags)), *changes, flags=flags)
        plain = run_with(tmp_path / f"plain {len(flags)}", flags=flags)
        assert losses(ahead) == losses(plain) != []
        (hows[len(flags)],) = (
            entry.how for entry in ahead.observed.rank.facts.changes if entry.name == "device_prefetch"
        )
    assert "copied by the script" in hows[2]
    assert "one step ahead" in hows[1]


def test_a_loop_that_writes_to_its_dataset_gets_the_losses_it_had(tmp_path: Path) -> None:
    flags = ("deterministic", "rescaled")
    plain = run_with(tmp_path / "plain", flags=flags)
    changes = (("loader", "elastic"), ("pin_memory", True), ("device_prefetch", True))
    assert losses(run_with(tmp_path / "ahead", *changes, flags=flags)) == losses(plain) != []


TURNED = """
    import random, sys, numpy as np, torch
    from PIL import Image
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Photos(Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, index):
            coarse = np.random.default_rng(index).integers(0, 256, (6, 8, 3), dtype=np.uint8)
            photo = Image.fromarray(coarse).resize((96, 64), Image.Resampling.BICUBIC)
            mask = photo.convert("L").point(lambda value: value // 64)
            if random.random() < 0.5:
                photo, mask = (one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for one in (photo, mask))
            angle = random.uniform(-15, 15)
            lit = np.clip(np.array(photo.rotate(angle, Image.Resampling.BILINEAR)) * random.uniform(0.8, 1.2), 0, 255)
            mean = lit.mean()
            lit = (np.clip(mean + (lit - mean) * random.uniform(0.8, 1.2), 0, 255) / 255 - 0.45) / 0.23
            mask = np.array(mask.rotate(angle, fillcolor=255))
            return torch.from_numpy(lit).permute(2, 0, 1).float(), torch.from_numpy(mask)

    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3, padding=1).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(Photos(), batch_size=16, shuffle=True, num_workers=2)
    for epoch in range(3):
        for photos, masks in loader:
            photos, masks = photos.to("cuda", non_blocking=True), masks.cuda(non_blocking=True).long()
            loss = nn.functional.cross_entropy(net(photos), masks, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            off = (masks == 255).sum().item()
            seen = photos.double()
            print("loss", loss.item().hex(), seen.mean().item().hex(), seen.std().item().hex(), off)
"""


@pytest.mark.parametrize(
    "more",
    [(), (("device_prefetch", True),), (("device_prefetch", True), ("compile", "reduce-overhead"))],
    ids=["copied", "ahead", "compiled"],
)
def test_transforms_made_on_the_gpu_are_those_of_the_workers(
    tmp_path: Path, more: tuple[tuple[str, object], ...]
) -> None:
    """The same random numbers, pictures and masks; a grey level here and there."""
    elastic = ("loader", "elastic")
    here = run_with(tmp_path / "here", elastic, script=TURNED)
    there = run_with(tmp_path / "there", elastic, ("gpu_transforms", True), *more, script=TURNED)
    made = {entry.name: entry.applied for entry in there.observed.rank.facts.changes}
    assert made == dict.fromkeys(made, True)
    assert len(losses(here)) == len(losses(there)) == 18
    for one, other in zip(losses(here), losses(there), strict=True):
        ours, theirs = ([float.fromhex(text) for text in line.split()[1:4]] for line in (one, other))
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-3)
        assert int(one.split()[4]) == pytest.approx(int(other.split()[4]), rel=0.02, abs=16)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_precision_layout_and_benchmark_show_and_training_goes_the_same_way(tmp_path: Path, precision: str) -> None:
    plain = run_with(tmp_path / "plain")
    changes = (("precision", precision), ("channels_last", True), ("cudnn_benchmark", True), ("fused_optimizer", True))
    changed = run_with(tmp_path / "changed", *changes)
    facts = changed.observed.rank.facts
    assert all(entry.applied for entry in facts.changes), facts.changes
    assert (facts.channels_last, facts.cudnn_benchmark, facts.optimizer_fused) == (True, True, True)
    if precision == "tf32":
        assert facts.tf32_matmul is True
    else:
        assert facts.autocast == ("bfloat16" if precision == "bf16" else "float16",)
    pairs = zip(losses(plain), losses(changed), strict=True)
    assert max(abs(float.fromhex(a.split()[1]) - float.fromhex(b.split()[1])) for a, b in pairs) < 0.1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_and_captured_training_goes_the_same_way(tmp_path: Path, mode: str) -> None:
    """GIVEN a script that keeps its outputs, THEN graphs do not write over them."""
    plain = run_with(tmp_path / "plain")
    changed = run_with(tmp_path / "changed", ("compile", mode))
    facts = changed.observed.rank.facts
    assert all(entry.applied for entry in facts.changes), facts.changes
    pairs = zip(losses(plain), losses(changed), strict=True)
    assert max(abs(float.fromhex(a.split()[1]) - float.fromhex(b.split()[1])) for a, b in pairs) < 0.1
