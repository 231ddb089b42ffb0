"""A delay planted somewhere shows up under its own name, to the millisecond: the clock is ours and moves when told."""

from __future__ import annotations

import builtins
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observing import Observed, observe
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from flatout.inside import timing

STEPS = 10
DELAY_MS = 10.0


class Clock:
    """Stands still but for planted delays."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def delay(self) -> None:
        self.now_s += DELAY_MS / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    frozen = SimpleNamespace(
        monotonic=lambda: clock.now_s, time=time.time, perf_counter=time.perf_counter, sleep=time.sleep
    )
    monkeypatch.setattr("flatout.inside.recording.time", frozen)
    return clock


class Plan:
    """Where the delay goes."""

    def __init__(self, clock: Clock, where: str) -> None:
        self._clock = clock
        self._where = where

    def at(self, where: str) -> None:
        if where == self._where:
            self._clock.delay()


class Data(Dataset[Any]):
    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return STEPS + 1

    def __getitem__(self, index: int) -> Any:
        self._plan.at("getitem")
        return torch.randn(4), torch.tensor(index % 2)


def slow_collate(plan: Plan) -> Any:
    def collate(samples: Any) -> Any:
        plan.at("collate")
        return torch.utils.data.default_collate(samples)

    return collate


def train(plan: Plan, folder: Path) -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                plan.at("forward")
            return super().forward(x)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            plan.at("logging")

    class Saved:
        def __reduce__(self) -> Any:
            plan.at("checkpoint")
            return (int, ())

    logger = logging.getLogger("planted")
    logger.propagate = False
    logger.handlers = [Handler()]
    logger.setLevel(logging.INFO)
    model = Model(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    validation = DataLoader(Data(Plan(Clock(), "nowhere")), batch_size=3)
    for x, y in DataLoader(Data(plan), batch_size=1, collate_fn=slow_collate(plan)):
        plan.at("loop")
        optimizer.zero_grad()
        output = model(x)
        plan.at("loss")
        loss = cross_entropy(output, y)
        loss.register_hook(lambda gradient: plan.at("backward"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(slowly(plan, model.parameters()), 1.0)
        optimizer.step()
        if plan._where == "item":
            SlowItem.plan = plan
            loss.as_subclass(SlowItem).item()
        with torch.no_grad():
            for v, _ in validation:
                model(v)
                plan.at("evaluation")
                break
        logger.info("a step")
        torch.save(Saved(), folder / "checkpoint.pt")


def slowly(plan: Plan, parameters: Any) -> Any:
    plan.at("clipping")
    yield from parameters


class SlowItem(torch.Tensor):
    """A tensor that takes its time to be read, as one on a busy GPU does."""

    plan: Plan

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "item":
            cls.plan.at("item")
            return 0.0
        return super().__torch_function__(func, types, args, kwargs)


def total(observed: Observed, name: str) -> float:
    return sum(s.host_ms for step in observed.steps for s in step.spans if s.name == name)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("getitem", "data"),
        ("collate", "data"),
        ("loop", "rest"),
        ("forward", "forward"),
        ("loss", "loss"),
        ("backward", "backward"),
        ("clipping", "optimizer"),
        ("item", "sync"),
        ("evaluation", "evaluation"),
        ("logging", "logging"),
        ("checkpoint", "checkpoint"),
    ],
)
def test_a_planted_delay_shows_under_its_name(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    monkeypatch.setattr(timing, "is_on_gpu", lambda tensor: isinstance(tensor, SlowItem))
    observed = observe(tmp_path / "trace", lambda: train(Plan(clock, where), tmp_path))
    assert len(observed.steps) == STEPS
    assert total(observed, name) == pytest.approx(STEPS * DELAY_MS)
    assert sum(step.wall_ms for step in observed.steps) == pytest.approx(STEPS * DELAY_MS), "and nowhere else"
    if name == "sync":
        places = {s.where for step in observed.steps for s in step.spans if s.name == "sync"}
        line = next(
            n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "SlowItem).item()" in text
        )
        assert len(places) == 1
        assert places.pop().endswith(f"{Path(__file__).name}:{line}")


def test_every_way_of_reading_a_tensor_on_the_card_is_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "is_on_gpu", lambda tensor: True)
    ways = {
        "item": lambda t: t.item(),
        "tolist": lambda t: t.tolist(),
        "numpy": lambda t: t.numpy(),
        "cpu": lambda t: t.cpu(),
        "bool": bool,
        "float": float,
        "int": int,
        "print": print,
        "f-string": lambda t: f"{t:.3f}",
    }
    for name, read in ways.items():
        folder = tmp_path / name

        def loop(read: Any = read) -> None:
            weight = torch.ones(1, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.1)
            for _ in range(4):
                weight.sum().backward()
                optimizer.step()
                read(torch.ones(()))

        assert observe(folder, loop).count("sync") == 3, name


def test_logs_of_the_usual_libraries_are_logging(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = {
        "print": lambda number: builtins.print("a line"),
        "logging": lambda number: logging.getLogger("some").warning("a line"),
        "tensorboard": lambda number: board.add_scalar("loss", 0.5, number),
        "tqdm": lambda number: bar.refresh(),
    }
    with SummaryWriter(str(tmp_path / "board")) as board, tqdm(total=4, mininterval=0) as bar:
        for name, log in ways.items():

            def loop(log: Any = log) -> None:
                weight = torch.ones(1, requires_grad=True)
                optimizer = torch.optim.SGD([weight], lr=0.1)
                for number in range(4):
                    weight.sum().backward()
                    optimizer.step()
                    log(number)

            assert observe(tmp_path / name, loop).count("logging") == 3, name


def test_saves_of_the_usual_libraries_are_checkpoints(tmp_path: Path) -> None:
    import safetensors.torch

    state = {"weight": torch.ones(3)}
    ways = {
        "torch": lambda: torch.save(state, tmp_path / "a.pt"),
        "safetensors": lambda: safetensors.torch.save_file(state, tmp_path / "a.safetensors"),
    }
    for name, save in ways.items():

        def loop(save: Any = save) -> None:
            weight = torch.ones(1, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.1)
            for _ in range(4):
                weight.sum().backward()
                optimizer.step()
                save()

        assert observe(tmp_path / name, loop).count("checkpoint") == 3, name
