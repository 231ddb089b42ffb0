"""Wrong changes, planted in a real training and really run: each is caught by its fingerprints or its losses.

The script has a flag that does the harm; the change turns that flag, claiming to be harmless. So the harm goes the
whole way: a plan into the process, the knob as it is read, the fingerprints out.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from flatout.plan import Change
from flatout.remedy.proof import same_batches, same_loss
from flatout.remedy.running import Launcher, Run

SCRIPT = """
    import argparse
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Sampler

    parser = argparse.ArgumentParser()
    parser.add_argument("--harm", default="none")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Digits(Dataset):
        def __init__(self):
            self.labels = torch.arange(4096) % 4
            self.pixels = torch.randn(4, 16)[self.labels] + 0.8 * torch.randn(4096, 16)
        def __len__(self):
            return 4096
        def __getitem__(self, index):
            return self.pixels[index], self.labels[index]

    class Batches(Sampler):
        def __iter__(self):
            order = torch.randperm(4096).tolist()
            for n in range(256):
                batch = order[16 * n : 16 * n + 16]
                if n == 40 and args.harm == "drop":
                    batch = batch[:-1]
                if n == 40 and args.harm == "reorder":
                    batch = batch[::-1]
                if n == 40 and args.harm == "repeat":
                    batch = order[16 * n - 16 : 16 * n]
                yield batch
        def __len__(self):
            return 256

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    for epoch in range(4):
        for pixels, labels in DataLoader(Digits(), batch_sampler=Batches()):
            if args.harm == "corrupt" and steps == 40:
                pixels[3, 5] += 1e-6
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = nn.functional.cross_entropy(model(pixels).float(), labels)
            if args.harm == "loss":
                loss = loss + 0.02 * loss.detach()  # what is learned stays the same
            optimizer.zero_grad()
            loss.backward()
            kept = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            steps += 1
            if args.harm == "stale" and steps > 20:
                for p, old in zip(model.parameters(), kept):
                    p.data.copy_(old)
"""


class Trials:
    """Proof runs of the script, each made once."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        self._run = Launcher([sys.executable, str(folder / "train.py")], folder / "runs")
        self._made: dict[tuple[str, object], Run] = {}

    def __call__(self, knob: str = "--harm", value: object = "none") -> Run:
        if (knob, value) not in self._made:
            change = Change(name=f"setting:{knob}", value=value, safety="identical", knob=knob)
            run = self._run([change], steps=220, timeout_s=100, fingerprints=True)
            assert run.code == 0, run.output
            assert run.made, run.refused
            self._made[knob, value] = run
        return self._made[knob, value]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("planted"))


@pytest.fixture(autouse=True)
def in_its_folder(trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def test_a_run_is_the_same_as_itself(trials: Trials) -> None:
    """Two runs of their own, of the same plan: the knob of the second is turned to what it was."""
    proof = same_batches(trials(), trials("--bf16", False))
    assert proof.standing == "identical"
    assert "losses equal to the last bit" in proof.text


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("drop", "batch 41: samples are missing"),
        ("reorder", "batch 41: the same samples in another order"),
        ("repeat", "batch 41: samples come more than once"),
    ],
)
def test_harm_done_to_the_samples_is_caught(trials: Trials, harm: str, words: str) -> None:
    proof = same_batches(trials(), trials("--harm", harm))
    assert proof.standing == "failed"
    assert proof.text.startswith(words)


def test_one_changed_bit_in_one_batch_is_not_identical(trials: Trials) -> None:
    assert same_batches(trials(), trials("--harm", "corrupt")).standing != "identical"


def test_weights_that_went_stale_are_caught(trials: Trials) -> None:
    assert same_batches(trials(), trials("--harm", "stale")).standing == "failed"
    assert same_loss(trials(), trials("--harm", "stale")).standing == "failed"


def test_a_loss_that_is_off_by_2_per_cent_is_caught(trials: Trials) -> None:
    proof = same_loss(trials(), trials("--harm", "loss"))
    assert not proof.holds, proof.text


DRAWS = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    torch.manual_seed(0)

    class Noisy(Dataset):
        def __len__(self):
            return 160
        def __getitem__(self, index):
            return torch.full((16,), index / 160) + 0.01 * torch.randn(16), index % 2

    model = nn.Linear(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    for epoch in range(8):
        for pixels, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels), labels).backward()
            optimizer.step()
"""


def test_samples_that_drew_in_the_training_process_may_be_loaded_elsewhere(tmp_path: Path) -> None:
    """GIVEN three epochs of 20 batches, whose shuffles depend on what samples have drawn, as in stock."""
    (tmp_path / "train.py").write_text(textwrap.dedent(DRAWS))
    launch = Launcher([sys.executable, str(tmp_path / "train.py")], tmp_path / "runs")
    elastic = Change(name="loader", value="elastic", safety="reseeded")
    before, after = (launch(changes, steps=60, timeout_s=100, fingerprints=True) for changes in ([], [elastic]))
    proof = same_batches(before, after)
    assert proof.standing == "reseeded", proof.text
    assert "shuffles after the first epoch" in proof.text


def test_bf16_is_equivalent(trials: Trials) -> None:
    proof = same_loss(trials(), trials("--bf16", True))
    assert proof.standing == "equivalent", proof.text
