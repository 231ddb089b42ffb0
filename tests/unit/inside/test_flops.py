"""How much the model computes in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from flatout.inside.flops import FlopCount
from flatout.inside.root_modules import RootModules
from flatout.inside.run_facts import FlopWatch

PICTURES, WORDS = torch.ones(2, 3, 8, 8), torch.ones(2, 6, 16)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten()), PICTURES),
        (lambda: torch.nn.Linear(16, 5), WORDS),
        (lambda: torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), WORDS),
    ],
)
def test_a_step_is_three_times_the_forward_that_torch_counts(
    model: Callable[[], torch.nn.Module], batch: torch.Tensor
) -> None:
    made, ours, theirs = model(), FlopCount(), FlopCounterMode(display=False)
    ours.around(made)(batch)
    with theirs:
        made(batch)
    assert ours.of_a_step == 3 * theirs.get_total_flops() > 0


def test_calls_of_one_step_are_added_up() -> None:
    count, layer = FlopCount(), torch.nn.Linear(16, 5)
    for _ in range(2):
        count.around(layer)(WORDS)
    assert count.of_a_step == 2 * 3 * 2 * WORDS[..., 0].numel() * 16 * 5


def test_what_cannot_be_counted_is_not_guessed() -> None:
    for model, batch in ((torch.nn.LSTM(16, 8), WORDS), (torch.nn.ReLU(), WORDS)):
        count = FlopCount()
        count.around(model)(batch)
        assert count.of_a_step is None


def test_gradients_and_random_numbers_are_what_they_would_have_been() -> None:
    def gradient(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
        wrap(model)(WORDS).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None] + [torch.rand(1)]

    plain, counted = gradient(lambda model: model), gradient(FlopCount().around)
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))


def test_a_call_that_fails_with_the_count_is_made_again_without_it() -> None:
    """GIVEN a model that does not bear to be looked at, WHEN it is counted, THEN it draws the numbers it would draw."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    def model(batch: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(1)
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")
        return batch * drawn

    count = FlopCount()
    torch.manual_seed(1)
    made = count.around(model)(WORDS)
    torch.manual_seed(1)
    assert torch.equal(made, model(WORDS))
    assert count.of_a_step is None


def test_nothing_is_asked_of_the_gpu_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise RuntimeError("not while a graph is captured")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", asked)
    count = FlopCount()
    assert count.around(torch.nn.Linear(16, 5))(WORDS).shape == (2, 6, 5)
    assert count.of_a_step is None


def test_tensors_in_pieces_are_not_counted() -> None:
    pair = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    count = FlopCount()
    count.around(torch.mm)(pair, pair)
    assert count.of_a_step is None


def test_an_exception_of_the_model_comes_through() -> None:
    with pytest.raises(ValueError, match="mine"):
        FlopCount().around(lambda: (_ for _ in ()).throw(ValueError("mine")))()


@pytest.mark.parametrize(("on_gpu", "compiled", "counted"), [(True, 0, True), (False, 0, False), (True, 1, False)])
def test_one_step_is_counted_on_a_gpu_and_where_nothing_is_compiled(
    on_gpu: bool, compiled: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = RootModules()
    watch = FlopWatch(roots)
    with monkeypatch.context() as machine:
        machine.setattr("torch.cuda.is_initialized", lambda: on_gpu)
        machine.setattr("flatout.inside.run_facts.compiled_frames", lambda: compiled)
        assert watch.step_ended() is counted
    if roots.flops is not None:
        roots.flops.around(torch.nn.Linear(16, 5))(WORDS)
    assert not watch.step_ended()
    assert (watch.of_a_step, roots.flops, watch.is_over) == (3 * 2 * 12 * 16 * 5 if counted else None, None, True)
