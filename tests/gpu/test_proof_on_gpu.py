"""A proof's runs on a real GPU: right changes go the leader's way, compiled as CUDA graphs too; wrong ones do not."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from flatout.fix.proof import same_loss
from flatout.fix.runs import Launcher, ProofRun, Run
from flatout.model.plan import Change

# Where a bright column is, by the mean column under a softmax: gradients are differences of large numbers, and a
# compiler that rounds in other places than eager kernels do goes another way here. Not so bright that its loss comes to
# nothing: from there on rounding is most of what moves weights, and bf16 cannot be proven to go anybody's way.
COLUMNS = """
    import argparse, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    class Columns(Dataset):
        def __len__(self):
            return 65536

        def __getitem__(self, index):
            place = index * 37 % 160
            picture = torch.randn(3, 16, 160, generator=torch.Generator().manual_seed(index))
            picture[:, :, place] += 0.5
            return picture, float(place)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(3, 32, 3, padding=1)]
            for _ in range(6):
                layers += [nn.BatchNorm2d(32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False)]
            self.body, self.head = nn.Sequential(*layers), nn.Conv1d(32, 1, 3, padding=1)

        def forward(self, x):
            columns = self.head(self.body(x).mean(dim=2)).float().softmax(dim=2)
            return (columns * torch.arange(160.0, device=x.device)).sum(dim=2).squeeze(1)

    torch.manual_seed(0)
    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    for pictures, places in DataLoader(Columns(), batch_size=128, shuffle=True, num_workers=4):
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(net(pictures.cuda()), places.float().cuda(), beta=2.0)
        loss.backward()
        optimizer.step()
"""


def change(name: str, value: object, knob: str = "") -> Change:
    return Change(name=name, value=value, safety="equivalent", knob=knob)


BF16 = change("precision", "bf16")


class Trials:
    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(textwrap.dedent(COLUMNS))
        self._launcher = Launcher([sys.executable, str(folder / "train.py")], folder / "runs")
        self.leader = self.run((), leads=1)

    def run(self, changes: Sequence[Change], *, leads: int = 0, follows: int = 0) -> Run:
        wanted = ProofRun(changes=tuple(changes), steps=220, leads=leads, follows=follows)
        (run,) = self._launcher.prove([wanted], timeout_s=170)
        assert run.code == 0, run.output
        assert not run.refused, run.refused
        return run


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("proof"))


@pytest.mark.parametrize(
    "changes",
    [
        (change("fused_optimizer", True), change("cudnn_benchmark", True)),
        (BF16,),
        (BF16, change("fused_optimizer", True), change("compile", "reduce-overhead")),
    ],
    ids=["fused", "bf16", "bf16, compiled"],
)
def test_other_rounding_goes_the_same_way(trials: Trials, changes: tuple[Change, ...]) -> None:
    alone = trials.run(())
    proof = same_loss(trials.leader, trials.run(changes, follows=1), alone)
    assert proof.standing == "equivalent", proof.text


def test_a_learning_rate_a_tenth_smaller_does_not(trials: Trials) -> None:
    proof = same_loss(trials.leader, trials.run((change("learning_rate", 9e-4, "--lr"),), follows=1))
    assert proof.standing == "failed", proof.text
    assert "weights move 0.9" in proof.text
