"""A step captured as CUDA graphs: what they return is theirs, and written over by the next pass. Without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.engine.config import TrainConfig
from flatout.engine.step import TrainStep, choose_precision

BATCH = [torch.arange(12.0).reshape(6, 2) / 12, torch.ones(6, 1)]


class Captured(nn.Module):
    """Hands out its own memory, as graphs do; that is not to be in use when it begins again."""

    def __init__(self, written_over: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.later, self.unlearned = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
        self.passes = 0
        self.written_over = written_over
        self.memory = {parameter: torch.zeros_like(parameter) for parameter in self.parameters()}
        self.new: set[nn.Parameter] = set()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._hand_out)
        self.output = torch.zeros(())

    def _hand_out(self, parameter: Any) -> None:
        if self.written_over and parameter in self.new:
            parameter.grad = self.memory[parameter].copy_(parameter.grad)

    def forward(self, points: Tensor) -> Tensor:
        self.new = {parameter for parameter in self.parameters() if parameter.grad is None}
        for parameter, memory in self.memory.items():
            assert parameter.grad is None or parameter.grad.data_ptr() != memory.data_ptr()
            memory.fill_(float("nan"))
        self.passes += 1
        made: Tensor = self.always(points) + self.unlearned(points)
        return made + self.later(points) if self.passes % 3 != 1 else made


def step_of(model: nn.Module, criterion: Any, accumulate: int, captured: bool) -> TrainStep:
    learned = [parameter for name, parameter in model.named_parameters() if not name.startswith("unlearned")]
    precision, _ = choose_precision("off", torch.device("cpu"))
    config = TrainConfig(accumulate=accumulate)
    return TrainStep(model, criterion, torch.optim.SGD(learned, lr=0.1), precision, config, print, captured=captured)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_gradient_is_left_in_memory_that_is_written_over(accumulate: int) -> None:
    """GIVEN a layer that only later pieces use, and one that is not learned, THEN it learns what it learns eagerly."""
    models = Captured(), Captured(written_over=False)
    for model, captured in zip(models, (True, False), strict=True):
        step = step_of(model, nn.MSELoss(), accumulate, captured)
        for _ in range(4):
            step(BATCH)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


class OwnLoss(nn.Module):
    """Its output is the loss, in the same memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.memory = torch.zeros(())

    def forward(self, points: Tensor) -> Tensor:
        loss = self.layer(points).square().mean()
        self.memory.copy_(loss.detach())
        loss.data = self.memory
        return loss


def test_a_loss_that_the_criterion_only_hands_on_stays_what_it_was() -> None:
    step = step_of(OwnLoss(), lambda output, target: output, 1, captured=True)
    first = step(BATCH)
    was = first.item()
    assert step(BATCH).item() != was
    assert first.item() == was
