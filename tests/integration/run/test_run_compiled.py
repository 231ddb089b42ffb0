"""torch.compile in all its forms: every step is seen, and the compiler does not notice us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import observe
from torch.nn.functional import cross_entropy

STEPS = 8
Step = Callable[[torch.Tensor, torch.Tensor], Any]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def eager_step(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def module(model: Any, optimizer: Any) -> Step:
    return eager_step(torch.compile(model, fullgraph=True, backend="aot_eager"), optimizer)


def in_place(model: Any, optimizer: Any) -> Step:
    model.compile(fullgraph=True, backend="aot_eager")
    return eager_step(model, optimizer)


def loss_function(model: Any, optimizer: Any) -> Step:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    return step


def whole_step(model: Any, optimizer: Any) -> Step:
    return torch.compile(eager_step(model, optimizer), backend="aot_eager")


def optimizer_alone(model: Any, optimizer: Any) -> Step:
    compiled = torch.compile(optimizer.step, backend="aot_eager")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        compiled()

    return step


def train(make: Callable[[Any, Any], Step]) -> tuple[dict[str, int], list[float]]:
    """What the compiler did, and what was learned."""
    from torch._dynamo.utils import counters

    torch.manual_seed(1)
    torch._dynamo.reset()
    counters.clear()
    model = Net()
    step = make(model, torch.optim.Adam(model.parameters()))
    for _ in range(STEPS):
        step(torch.randn(4, 6), torch.randint(0, 2, (4,)))
    done = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    return done, [p.sum().item() for p in model.parameters()]


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [module, in_place, loss_function, whole_step, optimizer_alone])
def test_compiled_training_is_seen_and_left_alone(tmp_path: Path, make: Callable[[Any, Any], Step]) -> None:
    bare = train(make)
    seen = []
    observed = observe(tmp_path, lambda: seen.append(train(make)))
    assert seen == [bare], "the same graphs, graph breaks and weights"
    assert len(observed.steps) == STEPS - 1
    for name in ("forward", "backward", "optimizer"):
        assert observed.count(name) == STEPS - 1, name


@pytest.mark.filterwarnings("ignore")
def test_scripted_and_traced_modules_still_work(tmp_path: Path) -> None:
    def loop() -> None:
        scripted = torch.jit.script(Net())
        traced = torch.jit.trace(Net(), torch.randn(4, 6))
        optimizer = torch.optim.SGD([*scripted.parameters(), *traced.parameters()], lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            x, y = torch.randn(4, 6), torch.randint(0, 2, (4,))
            (cross_entropy(scripted(x), y) + cross_entropy(traced(x), y)).backward()
            optimizer.step()

    assert len(observe(tmp_path, loop).steps) == 4
