"""Weights that go from run to run, and how far each has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.inject import weights
from flatout.inject.weights import EVERY, Moved, Weights
from flatout.sense.options import WEIGHTS_OVER


class Training:
    """A small one, whose steps tell a `Weights` of themselves."""

    def __init__(
        self,
        own: Weights,
        optimizer: Callable[..., Any] = torch.optim.Adam,
        *,
        frozen_from: float = torch.inf,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        self.own = own
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = optimizer(self.net.parameters(), **how)
        self.frozen_from = frozen_from

    def train(self, steps: int, first: int = 0) -> list[Moved | None]:
        moved = []
        for step in range(first, first + steps):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            (self.net(x).squeeze(1) - x.sum(1)).square().mean().backward()
            if step < self.frozen_from:
                self.optimizer.step()
            moved.append(self.own.step_ended([self.optimizer], [self.net]))
        return moved

    def state(self) -> list[torch.Tensor]:
        remembered = [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        return [t.detach().clone().double() for t in (*self.net.state_dict().values(), *remembered)]


def led(tmp_path: Path, steps: int = 31, **how: Any) -> Training:
    leader = Training(Weights(tmp_path, None, rank=0), **{"lr": 0.01, **how})
    assert leader.train(steps) == [None] * steps
    (tmp_path / WEIGHTS_OVER).touch()
    return leader


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"fused": True})],
)
def test_who_follows_has_the_leaders_weights_buffers_and_memory(tmp_path: Path, optimizer: Any, how: Any) -> None:
    """GIVEN steps twice as long WHEN it has met the leader THEN it is the leader, and knows how far it had strayed."""
    leader = led(tmp_path, optimizer=optimizer, lr=0.01, **({} if "fused" in how else how))
    follower = Training(Weights(None, tmp_path, rank=0), optimizer, lr=0.02, **how)
    moved = follower.train(31)
    assert [step + 1 for step, one in enumerate(moved) if one is not None] == [11, 21, 31]
    assert all(one is None or (one[0] > 1.2 and one[1] > 0.5) for one in moved)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(follower.state(), leader.state(), strict=True))


def test_the_same_training_moves_the_same_way(tmp_path: Path) -> None:
    led(tmp_path)
    moved = Training(Weights(None, tmp_path, rank=0), lr=0.01).train(31)
    assert [one for one in moved if one is not None] == [pytest.approx((1.0, 1.0))] * 3


def test_weights_that_stay_where_they_are_have_not_moved(tmp_path: Path) -> None:
    led(tmp_path)
    moved = Training(Weights(None, tmp_path, rank=0), lr=0.01, frozen_from=11).train(31)
    assert moved[10] == pytest.approx((1.0, 1.0))
    assert moved[20] == moved[30] == (0.0, 0.0)


def test_one_in_the_middle_follows_and_leads(tmp_path: Path) -> None:
    """GIVEN b beside a, and c beside b THEN c is told of b's steps, though b goes on from a's weights each time."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    led(a, 21)
    assert {one for one in Training(Weights(b, a, rank=0), lr=0.02).train(41) if one is not None} != {(1.0, 1.0)}
    (b / WEIGHTS_OVER).touch()
    moved = Training(Weights(None, b, rank=0), lr=0.02).train(41)
    assert [one for one in moved if one is not None] == [pytest.approx((1.0, 1.0))] * 4


def test_it_waits_for_a_leader_that_is_slower_and_not_for_one_that_is_gone(tmp_path: Path) -> None:
    follower = Training(Weights(None, tmp_path, rank=0), lr=0.01)
    leading = threading.Thread(target=led, args=(tmp_path, 15))
    waiting: list[Moved | None] = []
    thread = threading.Thread(target=lambda: waiting.extend(follower.train(31)))
    thread.start()
    leading.start()
    leading.join()
    thread.join(timeout=30)
    assert [step + 1 for step, one in enumerate(waiting) if one is not None] == [11]


def test_weights_too_large_for_the_disk_come_seldom_or_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(t.numel() * t.element_size() for t in led(tmp_path / ".", 1).net.state_dict().values())
    monkeypatch.setattr(weights, "_MOST_BYTES", 22 * size)  # its optimizer remembers twice as much again
    (seldom := tmp_path / "seldom").mkdir()
    led(seldom, 31)
    assert len(list(seldom.glob("*.pt"))) == 2
    assert [s for s, one in enumerate(Training(Weights(None, seldom, 0), lr=0.01).train(31)) if one] == [3 * EVERY]
    monkeypatch.setattr(weights, "_MOST_BYTES", size)
    (never := tmp_path / "never").mkdir()
    led(never, 31)
    assert Training(Weights(None, never, 0), lr=0.01).train(31) == [None] * 31


def test_what_does_not_fit_is_said_and_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    led(tmp_path)
    other = Training(Weights(None, tmp_path, rank=0), lr=0.01)
    other.net.append(nn.Linear(1, 1))
    other.optimizer.add_param_group({"params": other.net[-1].parameters()})
    assert other.train(31) == [None] * 31
    assert capfd.readouterr().err.startswith("flatout: weights are not compared (")
