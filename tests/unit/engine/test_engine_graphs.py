"""A step captured as CUDA graphs, where batches have other shapes. Without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame

from flatout.engine.config import TrainConfig
from flatout.engine.step import ODD_ANYWAY, TrainStep, choose_precision

BATCH = [torch.ones(4, 2), torch.zeros(4, 1)]


class Model(nn.Module):
    """Counts its eager steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.eager_steps = 0
        plain = self.forward

        def compiled(points: Tensor) -> Tensor:
            self.eager_steps += eval_frame._stance.stance == "force_eager"
            return plain(points)

        compiled._torchdynamo_orig_callable = plain  # type: ignore[attr-defined]
        self.forward = compiled  # type: ignore[method-assign,assignment]

    def forward(self, points: Tensor) -> Tensor:
        made: Tensor = self.layer(points)
        return made


def step_of(model: Model, said: list[str], compile: str = "auto") -> TrainStep:
    precision, _ = choose_precision("off", torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = TrainConfig(compile=compile)
    return TrainStep(model, nn.MSELoss(), optimizer, precision, config, said.append, captured=True)


@pytest.mark.parametrize(("compile", "mode"), [("auto", None), ("max-autotune", "max-autotune-no-cudagraphs")])
def test_batches_of_many_shapes_are_compiled_and_not_captured(
    monkeypatch: pytest.MonkeyPatch, compile: str, mode: str | None
) -> None:
    """GIVEN other lengths with as many samples, THEN each is eager at first, and soon nothing is captured."""
    asked: list[Any] = []
    said: list[str] = []

    def recorded(forward: Any, mode: str | None) -> Any:
        asked.append(mode)
        return forward

    monkeypatch.setattr(torch, "compile", recorded)
    model = Model()
    step = step_of(model, said, compile)
    step(BATCH)
    for length in range(1, ODD_ANYWAY + 3):
        step([torch.ones(4, length, 2), torch.zeros(4, length, 1)])
    assert (asked, model.eager_steps) == ([mode], ODD_ANYWAY)
    assert said == ["train.compile: on, without CUDA graphs from here on: batches have many shapes"]


def test_a_batch_of_another_shape_now_and_then_is_eager() -> None:
    """GIVEN one in ten, THEN those alone."""
    model, said = Model(), []
    step = step_of(model, said)
    for number in range(100):
        step(BATCH if number % 10 != 9 else [tensor[:3] for tensor in BATCH])
    assert (said, model.eager_steps) == ([], 10)
