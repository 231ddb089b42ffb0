"""Wrong changes, planted in a real training and really run: each is caught by its fingerprints or its losses.

The script has a flag that does the harm; the change turns that flag, claiming to be harmless. So the harm goes the
whole way: a plan into the process, the knob as it is read, the fingerprints out, the weights from run to run.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from flatout.fix.proof import same_batches, same_loss
from flatout.fix.runs import Launcher, ProofRun, Run
from flatout.launch.protocol import WEIGHTS_EVERY as EVERY
from flatout.model.plan import Change

SCRIPT = """
    import argparse
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Sampler

    parser = argparse.ArgumentParser()
    parser.add_argument("--harm", default="none")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fused", action="store_true")
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

    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 4)
    )
    decay = 0.0 if args.harm == "no decay" else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=decay, fused=args.fused)
    if args.harm == "slow":
        optimizer.param_groups[0]["lr"] *= 0.9
    frozen = {"first": [0], "norm": [2, 3], "head": [6]}.get(args.harm, [])
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
            for number, p in enumerate(model.parameters()):
                if number in frozen or (args.harm == "late" and steps > 140):
                    p.grad = None  # it is not stepped
            optimizer.step()
            steps += 1
            if args.harm == "stale" and steps > 20:
                for p, old in zip(model.parameters(), kept):
                    p.data.copy_(old)
"""


class Trials:
    """Proof runs of the script, each made once; all follow the one without any harm."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        self._launcher = Launcher([sys.executable, str(folder / "train.py")], folder / "runs")
        self._made: dict[tuple[str, object], Run] = {}

    def __call__(self, knob: str = "--harm", value: object = "none") -> Run:
        if (knob, value) not in self._made:
            change = Change(name=f"setting:{knob}", value=value, safety="identical", knob=knob)
            leads = (knob, value) == ("--harm", "none")
            if not leads:
                self()
            wanted = ProofRun(changes=(change,), steps=220, leads=int(leads), follows=int(not leads))
            (run,) = self._launcher.prove([wanted], timeout_s=100)
            assert run.code == 0, run.output
            assert run.applied, run.refused
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
        ("drop", "batch 41: other samples"),
        ("reorder", "batch 41: the same samples in another order"),
        ("repeat", "batch 41: other samples"),
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
    assert "loss +2.0" in (proof := same_loss(trials(), trials("--harm", "loss"))).text
    assert proof.standing == "failed"


def test_learning_that_is_a_tenth_slower_is_caught_by_its_weights(trials: Trials) -> None:
    """The loss hardly shows it, five steps from the same weights on."""
    proof = same_loss(trials(), trials("--harm", "slow"))
    assert "weights move 0.90 as far, 1.00 in the same direction" in proof.text
    assert proof.standing == "failed"
    assert same_batches(trials(), trials("--harm", "slow")).standing == "failed"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("first", "0.weight"),
        ("norm", "1.weight moves 0.00 as far"),
        ("head", "5.weight"),
        ("late", "weights stand still"),
        ("no decay", "goes elsewhere"),
    ],
)
def test_what_a_part_of_the_model_or_of_the_steps_no_longer_learns_is_caught(
    trials: Trials, harm: str, words: str
) -> None:
    """The loss hardly shows it either, and all weights together seem to go the same way."""
    proof = same_loss(trials(), trials("--harm", harm))
    assert proof.standing == "failed", proof.text
    assert words in proof.text


@pytest.mark.parametrize("flag", ["--bf16", "--fused"])
def test_other_rounding_is_equivalent(trials: Trials, flag: str) -> None:
    proof = same_loss(trials(), trials(flag, True))
    assert proof.standing == "equivalent", proof.text
    assert "in the same direction" in proof.text


SENSITIVE = """
    import argparse, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounding", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--louder", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(2048, 8)
    y = x.sum(1)
    layers = [layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(32, 32))]
    model = nn.Sequential(nn.Linear(8, 32), *layers, nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    while True:
        for x_, y_ in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
            optimizer.zero_grad()
            (args.louder * (model(x_).squeeze(1) - y_).square().mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + args.rounding)
"""


def test_a_training_that_makes_much_of_any_rounding_can_be_proven_all_the_same(tmp_path: Path) -> None:
    """GIVEN weights a millionth off after each step THEN left to itself the loss is another, and beside the other run's
    weights it is the same; and a learning rate a fifth smaller is not taken for rounding."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SENSITIVE))
    launcher = Launcher([sys.executable, str(tmp_path / "train.py")], tmp_path / "runs")

    def run(follows: int = 1, leads: int = 0, **flags: float) -> Run:
        turned = (Change(name=f"setting:{k}", value=v, safety="equivalent", knob=f"--{k}") for k, v in flags.items())
        return launcher.prove(
            [ProofRun(changes=tuple(turned), steps=220, leads=leads, follows=follows)], timeout_s=100
        )[0]

    plain = run(follows=0, leads=1)
    assert not same_loss(plain, run(follows=0, rounding=1e-6)).holds
    beside = same_loss(plain, run(rounding=1e-6))
    assert beside.standing == "equivalent", beside.text
    assert same_loss(plain, run(lr=0.016)).standing == "failed"
    assert same_loss(plain, run(louder=1.1), run(follows=0, rounding=1e-6)).standing == "failed"


DRAWING = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 1)
        def forward(self, x):
            return self.head(x + torch.randn_like(x))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(1024, 8)
    while True:
        for x_, y_ in DataLoader(TensorDataset(x, x.sum(1)), batch_size=16, shuffle=True):
            optimizer.zero_grad()
            (model(x_).squeeze(1) - y_).square().mean().backward()
            optimizer.step()
"""


def test_a_compiled_model_that_draws_random_numbers_draws_the_same_in_a_proof(tmp_path: Path) -> None:
    """Else the shuffle of the second epoch, which is seeded from the same stream, would be another."""
    (tmp_path / "train.py").write_text(textwrap.dedent(DRAWING))
    launcher = Launcher([sys.executable, str(tmp_path / "train.py")], tmp_path / "runs")
    compiled = (Change(name="compile", value="default", safety="equivalent"),)
    (plain,) = launcher.prove([ProofRun(changes=(), steps=220, leads=1)], timeout_s=100)
    (after,) = launcher.prove([ProofRun(changes=compiled, steps=220, follows=1)], timeout_s=170)
    assert "compile" in after.applied, after.refused
    proof = same_loss(plain, after)
    assert proof.standing == "equivalent", proof.text


RANKS = """
    import sys, torch
    from torch.nn.parallel import DistributedDataParallel

    def train(rank, store):
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        torch.distributed.destroy_process_group()

    if __name__ == "__main__":
        import tempfile
        torch.multiprocessing.spawn(train, (tempfile.mkdtemp() + "/store",), nprocs=2)
"""


def test_each_rank_follows_its_own_where_no_overlay_can_be_mounted_too(tmp_path: Path) -> None:
    """GIVEN ranks that nobody has told their numbers when torch is imported."""
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    launcher = Launcher([sys.executable, str(tmp_path / "train.py")], tmp_path / "runs", overlay=False)
    (leader,) = launcher.prove([ProofRun(changes=(), steps=3 * EVERY + 1, leads=1)], timeout_s=100)
    (follower,) = launcher.prove([ProofRun(changes=(), steps=3 * EVERY + 1, follows=1)], timeout_s=100)
    assert len(leader.proof) == len(follower.proof) == 2, follower.output
    for rank in follower.proof:
        assert [step.moved for step in rank if step.moved is not None] == [pytest.approx((1.0, 1.0))] * 2


def test_a_second_training_of_the_same_command_follows_nobody(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(DRAWS))
    twice = f"{sys.executable} {tmp_path / 'train.py'} && {sys.executable} {tmp_path / 'train.py'}"
    launcher = Launcher(["bash", "-c", twice], tmp_path / "runs")
    wanted = [ProofRun(changes=(), steps=60, leads=1), ProofRun(changes=(), steps=60, follows=1)]
    before, after = launcher.prove(wanted, timeout_s=100)
    proof = same_batches(before, after)
    assert proof.standing == "identical", proof.text
    assert sum(step.moved is not None for step in after.proof[0]) == 60 // EVERY - 1


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
    """GIVEN three epochs of 20 batches, whose shuffles depend on what samples have drawn, as in PyTorch's loader."""
    (tmp_path / "train.py").write_text(textwrap.dedent(DRAWS))
    launch = Launcher([sys.executable, str(tmp_path / "train.py")], tmp_path / "runs")
    elastic = Change(name="loader", value="elastic", safety="reseeded")
    both = [ProofRun(changes=(), steps=60, leads=1), ProofRun(changes=(elastic,), steps=60, follows=1)]
    before, after = launch.prove(both, timeout_s=100)
    proof = same_batches(before, after)
    assert proof.standing == "reseeded", proof.text
    assert "in the same order in the first epoch, and shuffled by other random numbers after it" in proof.text
