"""Compiled or eager: what is faster stays. On a clock that stands still but for the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame

from flatout.engine.config import TrainConfig
from flatout.engine.model_setup import choose_precision
from flatout.engine.train_step import ODD_ANYWAY, TIMED, WARM, GraphsOrEager, TrainStep

BATCH = [torch.ones(4, 2), torch.zeros(4, 1)]


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0
        self.behind = 0  # how many of the last events the GPU has not come to


class Event:
    """Stands in for the GPU's."""

    clock: Clock

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.ms = self.clock.ms

    def query(self) -> bool:
        return self.clock.behind == 0

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Event, "clock", clock, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return clock


class Model(nn.Module):
    """Takes so long compiled and so long eager, and the first eager steps a second."""

    def __init__(self, clock: Clock, compiled_ms: float, eager_ms: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.eager_steps = 0
        plain = self.forward

        def compiled(points: Tensor) -> Tensor:
            if eval_frame._stance.stance == "force_eager":
                self.eager_steps += 1
                clock.ms += eager_ms if self.eager_steps > WARM else 1000
            else:
                clock.ms += compiled_ms
            return plain(points)

        compiled._torchdynamo_orig_callable = plain  # type: ignore[attr-defined]
        self.forward = compiled  # type: ignore[method-assign,assignment]

    def forward(self, points: Tensor) -> Tensor:
        made: Tensor = self.layer(points)
        return made


def step_of(model: Model, said: list[str], compile: str = "auto") -> TrainStep:
    precision, _ = choose_precision("off", torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return TrainStep(
        model,
        nn.MSELoss(),
        optimizer,
        precision,
        TrainConfig(compile=compile),
        said.append,
        form=GraphsOrEager(contest=True),
    )


@pytest.mark.parametrize(("eager_ms", "goes"), [(12.0, True), (9.7, True), (8.0, False)])
def test_what_is_faster_stays(clock: Clock, eager_ms: float, goes: bool) -> None:
    model, said = Model(clock, 10.0, eager_ms), []
    step = step_of(model, said)
    for _ in range(2 * (WARM + TIMED) + 5):
        step(BATCH)
    assert model.eager_steps == WARM + TIMED
    assert hasattr(model.forward, "_torchdynamo_orig_callable") == goes
    assert said == ([] if goes else ["train.compile: off from here on, a step takes 10.0 ms compiled and 8.0 eager"])


def test_training_does_not_wait_for_the_gpu_to_decide(clock: Clock) -> None:
    model, said = Model(clock, 10.0, 8.0), []
    step = step_of(model, said)
    clock.behind = 1
    for _ in range(2 * (WARM + TIMED) + 5):
        step(BATCH)
    assert (said, model.eager_steps) == ([], WARM + TIMED)
    clock.behind = 0
    step(BATCH)
    assert len(said) == 1


def test_without_memory_for_an_eager_step_the_model_stays_compiled(clock: Clock) -> None:
    model, said = Model(clock, 10.0, 8.0), []
    step = step_of(model, said)
    full: list[Any] = [torch.OutOfMemoryError("CUDA out of memory")]
    inner = step._gradients

    def gradients(batch: Any) -> Tensor:
        if step._form is not None and step._form.eager and full:
            raise full.pop()
        return inner(batch)

    step._gradients = gradients  # type: ignore[method-assign]
    for _ in range(2 * (WARM + TIMED) + 5):
        step(BATCH)
    assert (said, step.accumulate) == (["train.compile: on, there is no memory for an eager step beside it"], 1)
    assert (model.eager_steps, hasattr(model.forward, "_torchdynamo_orig_callable")) == (0, True)


@pytest.mark.parametrize(("compile", "mode"), [("auto", None), ("max-autotune", "max-autotune-no-cudagraphs")])
def test_batches_of_many_shapes_are_compiled_and_not_captured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, compile: str, mode: str | None
) -> None:
    """GIVEN other lengths with as many samples, THEN each is eager at first, and soon nothing is captured."""
    asked: list[Any] = []
    said: list[str] = []

    def recorded(forward: Any, mode: str | None) -> Any:
        asked.append(mode)
        return forward

    monkeypatch.setattr(torch, "compile", recorded)
    model = Model(clock, 10.0, 8.0)
    step = step_of(model, said, compile)
    step(BATCH)
    for length in range(1, ODD_ANYWAY + 3):
        step([torch.ones(4, length, 2), torch.zeros(4, length, 1)])
    assert (asked, model.eager_steps) == ([mode], ODD_ANYWAY + 1)
    assert said == ["train.compile: on, without CUDA graphs from here on: batches have many shapes"]


def test_a_batch_of_another_shape_now_and_then_is_eager(clock: Clock) -> None:
    """GIVEN one in ten, THEN those alone; and they are no part of the contest."""
    said: list[str] = []
    model = Model(clock, 10.0, 12.0)
    step = step_of(model, said)
    for number in range(100):
        step(BATCH if number % 10 != 9 else [tensor[:3] for tensor in BATCH])
    assert (said, model.eager_steps) == ([], WARM + TIMED + 10)


def test_a_training_that_begins_with_a_batch_of_another_shape_is_captured_in_the_usual_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN one resumed at the last batch of an epoch, a small one, THEN it is compiled again for the others."""
    forgotten: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(True))
    said: list[str] = []
    model = Model(clock, 10.0, 12.0)
    step = step_of(model, said)
    step([tensor[:3] for tensor in BATCH])
    for _ in range(2 * (WARM + TIMED) + 3):
        step(BATCH)
    assert (said, forgotten) == ([], [True])
    assert model.eager_steps == 1 + WARM + TIMED  # of as many, the first was the usual one
