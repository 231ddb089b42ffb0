"""Where attention is written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from flatout.inside.patches import Patches
from flatout.inside.run_facts import AttentionWatch
from flatout.model.records import WrittenAttention

SOFTMAX = torch.softmax, torch.Tensor.softmax, functional.softmax
SQUARE = torch.zeros(2, 160, 160)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionWatch]:
    monkeypatch.setattr("flatout.inside.run_facts.compiled_frames", lambda: 0)  # other tests of this process compile
    made = AttentionWatch(Patches())
    yield made
    made.leave()
    assert_put_back()


def assert_put_back() -> None:
    assert (torch.softmax, torch.Tensor.softmax, functional.softmax) == SOFTMAX


def found_in(watch: AttentionWatch, call: Callable[[], Any]) -> WrittenAttention | None:
    watch.step_ended()
    call()
    return watch.found


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.softmax(SQUARE, -1),
        lambda: torch.softmax(SQUARE, dim=2),
        lambda: SQUARE.softmax(-1),
        lambda: functional.softmax(SQUARE, dim=-1),
        lambda: torch.nn.Softmax(-1)(SQUARE),
    ],
)
def test_a_softmax_over_a_square_of_scores_is_attention(watch: AttentionWatch, call: Callable[[], Any]) -> None:
    found = found_in(watch, call)
    assert found is not None
    assert found.length == 160
    assert "test_attention.py:" in found.where


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.softmax(SQUARE, 1),
        lambda: torch.softmax(SQUARE[:, :100, :100], -1),
        lambda: torch.softmax(SQUARE[:, :130], -1),
        lambda: torch.softmax(SQUARE[0], -1),
        lambda: functional.scaled_dot_product_attention(SQUARE, SQUARE, SQUARE),
    ],
    ids=["another side", "short", "no square", "no batch", "no softmax"],
)
def test_other_calls_are_not(watch: AttentionWatch, call: Callable[[], Any]) -> None:
    assert found_in(watch, call) is None


def scores(*, bent: bool = False) -> torch.Tensor:
    """Masked scores as attention makes them; `bent` as graph attention does, which no ready-made attention computes."""
    queries = torch.zeros(2, 160, 8, requires_grad=True)
    product = queries @ queries.transpose(-2, -1) / 8**0.5
    product = functional.leaky_relu(product) if bent else product
    return product.masked_fill(torch.ones(160, 160).triu(1) > 0, -1e9)


def test_scores_that_are_more_than_a_scaled_product_are_not(watch: AttentionWatch) -> None:
    assert found_in(watch, lambda: torch.softmax(scores(bent=True), -1)) is None
    with torch.no_grad():  # an evaluation
        assert found_in(watch, lambda: torch.softmax(scores(bent=True), -1)) is None
    assert found_in(watch, lambda: torch.softmax(scores(), -1)) is not None


def test_it_looks_for_three_steps_after_the_first(watch: AttentionWatch) -> None:
    assert_put_back()
    for _ in range(3):
        watch.step_ended()
        assert torch.softmax is not SOFTMAX[0]
        assert watch.wants_every_step
    watch.step_ended()
    assert_put_back()
    assert not watch.wants_every_step


def test_nothing_is_replaced_when_a_compiler_sees_it(watch: AttentionWatch) -> None:
    def attend(scores: torch.Tensor) -> torch.Tensor:
        assert_put_back()
        return scores

    watch.step_ended()
    torch.compile(attend, backend="eager", disable=True)
    assert_put_back()
    watch.step_ended()
    assert_put_back()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_script_can_be_compiled_after_the_first_step(watch: AttentionWatch) -> None:
    watch.step_ended()
    attend = torch.jit.script(scripted)
    assert attend(SQUARE).shape == SQUARE.shape
    assert_put_back()


def scripted(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1)


def test_where_something_is_compiled_it_does_not_look(watch: AttentionWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.inside.run_facts.compiled_frames", lambda: 1)
    watch.step_ended()
    assert_put_back()


def test_what_goes_wrong_ends_the_looking_and_not_the_call(
    watch: AttentionWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.inside.run_facts.caller", lambda: 1 / 0)
    watch.step_ended()
    assert torch.softmax(SQUARE, -1).shape == SQUARE.shape
    assert_put_back()
