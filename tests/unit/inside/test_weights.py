"""Weights that go from run to run, and how far each has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.inside.weights import Moved, Weights
from flatout.launch.protocol import WEIGHTS_EVERY as EVERY
from flatout.launch.protocol import WEIGHTS_OVER, Trial


def weights(
    leads: Path | None = None, follows: Path | None = None, ranks: tuple[int, int] = (0, 1), **trial: Any
) -> Weights:
    return Weights(Trial(**{"leads": leads, "follows": follows, "weights_bytes": 1 << 30, **trial}), lambda: ranks)


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


def led(tmp_path: Path, steps: int = 4 * EVERY, *, weights_bytes: int = 1 << 30, **how: Any) -> Training:
    leader = Training(weights(tmp_path, weights_bytes=weights_bytes), **{"lr": 0.01, **how})
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
    follower = Training(weights(follows=tmp_path), optimizer, lr=0.02, **how)
    moved = follower.train(4 * EVERY)
    assert [step + 1 for step, one in enumerate(moved) if one is not None] == [2 * EVERY, 3 * EVERY, 4 * EVERY]
    assert all(one is None or (one[0] > 1.2 and one[1] > 0.5) for one in moved)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(follower.state(), leader.state(), strict=True))


def test_the_same_training_moves_the_same_way(tmp_path: Path) -> None:
    led(tmp_path)
    follower = Training(weights(follows=tmp_path), lr=0.01)
    assert [one for one in follower.train(4 * EVERY) if one is not None] == [pytest.approx((1.0, 1.0))] * 3
    told = follower.own.drifts()
    assert [drift["name"] for drift in told] == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert {(drift["drift"], drift["coherence"], drift["length"]) for drift in told} == {(0.0, 0.0, 1.0)}
    assert [(drift["size"], drift["dims"]) for drift in told][:2] == [(32, 2), (8, 1)]


def test_weights_that_stay_where_they_are_have_not_moved(tmp_path: Path) -> None:
    led(tmp_path)
    follower = Training(weights(follows=tmp_path), lr=0.01, frozen_from=2 * EVERY)
    moved = follower.train(4 * EVERY)
    assert moved[2 * EVERY - 1] == pytest.approx((1.0, 1.0))
    assert moved[3 * EVERY - 1] == moved[-1] == (0.0, 0.0)
    assert {drift["length"] for drift in follower.own.drifts()} == {0.0}


def test_what_is_off_the_same_way_each_time_adds_up(tmp_path: Path) -> None:
    led(tmp_path, 44 * EVERY, optimizer=torch.optim.AdamW, weight_decay=0.1)
    follower = Training(weights(follows=tmp_path), torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    moved = [one for one in follower.train(44 * EVERY) if one is not None]
    assert all(abs(length - 1) < 0.1 for length, _ in moved[:5])
    assert max(drift["coherence"] for drift in follower.own.drifts()) > 3


def test_one_in_the_middle_follows_and_leads(tmp_path: Path) -> None:
    """GIVEN b beside a, and c beside b THEN c sees b's steps, though b goes on from a's weights each time."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    led(a, 2 * EVERY)
    assert {one for one in Training(weights(b, a), lr=0.02).train(5 * EVERY) if one is not None} != {(1.0, 1.0)}
    (b / WEIGHTS_OVER).touch()
    moved = Training(weights(follows=b), lr=0.02).train(5 * EVERY)
    assert [one for one in moved if one is not None] == [pytest.approx((1.0, 1.0))] * 4


def test_it_waits_for_a_leader_that_is_slower_and_not_for_one_that_is_gone(tmp_path: Path) -> None:
    follower = Training(weights(follows=tmp_path), lr=0.01)
    leading = threading.Thread(target=led, args=(tmp_path, 2 * EVERY + 1))
    waiting: list[Moved | None] = []
    thread = threading.Thread(target=lambda: waiting.extend(follower.train(4 * EVERY)))
    thread.start()
    leading.start()
    leading.join()
    thread.join(timeout=30)
    assert [step + 1 for step, one in enumerate(waiting) if one is not None] == [2 * EVERY]


def test_it_does_not_wait_forever_for_one_that_nobody_says_is_gone(tmp_path: Path) -> None:
    led(tmp_path, EVERY)
    (tmp_path / WEIGHTS_OVER).unlink()
    assert Training(weights(follows=tmp_path, timeout_s=0.2), lr=0.01).train(4 * EVERY) == [None] * (4 * EVERY)


def test_a_rank_follows_its_own_and_only_where_all_of_them_lead(tmp_path: Path) -> None:
    for rank in (0, 1):
        Training(weights(tmp_path, ranks=(rank, 2)), lr=0.01 * (1 + rank)).train((3 - rank) * EVERY)
    (tmp_path / WEIGHTS_OVER).touch()
    for rank in (0, 1):
        moved = Training(weights(follows=tmp_path, ranks=(rank, 2)), lr=0.01 * (1 + rank)).train(4 * EVERY)
        assert [step + 1 for step, one in enumerate(moved) if one is not None] == [2 * EVERY]
        assert moved[2 * EVERY - 1] == pytest.approx((1.0, 1.0))


def test_weights_too_large_for_the_disk_come_seldom_or_never(tmp_path: Path) -> None:
    size = 3 * sum(t.numel() * t.element_size() for t in led(tmp_path, EVERY).net.state_dict().values())
    (seldom := tmp_path / "seldom").mkdir()
    led(seldom, 61, weights_bytes=11 * size)  # for 44 files of that size: every fourth is there
    moved = Training(weights(follows=seldom), lr=0.01).train(61)
    assert [step + 1 for step, one in enumerate(moved) if one is not None] == [5 * EVERY, 9 * EVERY]
    (never := tmp_path / "never").mkdir()
    led(never, 61, weights_bytes=size)
    assert Training(weights(follows=never), lr=0.01).train(61) == [None] * 61


def test_weights_are_taken_unseen_by_a_backward_pass_that_is_not_over(tmp_path: Path) -> None:
    """A critic's step ends before its generator's begins, whose graph is there already."""
    led(tmp_path)
    follower = Training(weights(follows=tmp_path), lr=0.01)
    follower.train(EVERY - 1)
    early = follower.net(torch.ones(2, 4)).sum()
    before = follower.state()
    follower.own.step_ended([follower.optimizer], [follower.net])
    assert not all(torch.equal(now, then) for now, then in zip(follower.state(), before, strict=True))
    early.backward()


def test_weights_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    def masked(own: Weights) -> Training:
        training = Training(own, lr=0.01)
        mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
        training.optimizer.add_param_group({"params": [mask]})
        training.net.register_buffer("wide", torch.zeros(1).expand(3))
        return training

    masked(weights(tmp_path)).train(4 * EVERY)
    moved = masked(weights(follows=tmp_path)).train(4 * EVERY)
    assert [one for one in moved if one is not None] == [pytest.approx((1.0, 1.0))] * 3


def test_runs_side_by_side_meet_by_one_thread_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a training of three threads WHEN it meets its leader THEN by one, and trains by three again."""
    led(tmp_path)
    threads, usual, moved = [], torch.get_num_threads(), Weights._moved
    monkeypatch.setattr(Weights, "_moved", lambda *args: (threads.append(torch.get_num_threads()), moved(*args))[1])
    torch.set_num_threads(3)
    try:
        Training(weights(follows=tmp_path), lr=0.01).train(4 * EVERY)
        assert (threads, torch.get_num_threads()) == ([1, 1, 1], 3)
    finally:
        torch.set_num_threads(usual)


def test_what_does_not_fit_is_said_and_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    led(tmp_path)
    other = Training(weights(follows=tmp_path), lr=0.01)
    other.net.append(nn.Linear(1, 1))
    other.optimizer.add_param_group({"params": other.net[-1].parameters()})
    assert other.train(4 * EVERY) == [None] * (4 * EVERY)
    assert capfd.readouterr().err.startswith("flatout: weights are not compared (")


def test_a_close_proof_compares_buffers_and_what_the_leader_does_not_train(tmp_path: Path) -> None:
    leader = Training(weights(tmp_path, closely=True), torch.optim.SGD, lr=0.01)
    leader.net[3].bias.requires_grad_(False)  # type: ignore[union-attr]
    leader.train(4 * EVERY)
    follower = Training(weights(follows=tmp_path, closely=True), torch.optim.SGD, lr=0.01)
    follower.net[1].momentum = 0.2  # type: ignore[assignment]
    follower.net[3].register_buffer("cache", torch.ones(3))
    follower.train(4 * EVERY)
    told = {row["name"]: row for row in follower.own.drifts()}
    assert told["3.bias"]["apart"] == torch.inf
    assert told["1.running_mean"]["apart"] > 0.1
    assert (told["1.running_mean"]["learned"], told["3.weight"]["learned"]) == (False, True)
    assert told["1.num_batches_tracked"]["apart"] == 0
    assert "3.cache" not in told
