"""Whatever of ours raises inside a training: it is said once, we are gone, and the training's result is the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.inside import loaders, recorder, recording, root_modules, run_facts, timing
from flatout.trace import TraceWriter


def train() -> list[float]:
    """A training that goes through every hook; what it has learned."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    loader, validation = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=20)
    half = torch.compile(lambda x: x / 2, backend="eager")
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(half(x)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for v, _ in validation:
                model(v)
        loss.item()
        print(f"{loss:.3f}", end="")
        torch.save({}, "/dev/null")
    return [p.sum().item() for p in model.parameters()]


def methods(owner: type, *names: str) -> list[Any]:
    return [pytest.param(owner, name, id=f"{owner.__name__}.{name}") for name in names]


EVERY_HOOK = [
    *methods(recorder.Recorder, "push", "pop", "fetching", "fetched", "forward", "backward", "leave"),
    *methods(recorder.Recorder, "optimizer_begins", "optimizer_ended", "set_kind", "finish", "_cut", "_send", "_close"),
    *methods(recording.Recording, "loader_seen", "step_ended"),
    *methods(recording.Recording, "_open_trace", "_write_facts", "_emit", "own_cost"),
    *methods(loaders.LoaderNotes, "pass_begins", "before_batch", "after_batch", "kinds"),
    *methods(root_modules.RootModules, "find", "_time_module", "_note"),
    *methods(timing.Timing, "_number_of", "_written"),
    *methods(timing.LossReader, "take", "read"),
    *methods(TraceWriter, "__init__", "write"),
    pytest.param(timing, "batch_size", id="batch_size"),
    pytest.param(timing, "is_on_gpu", id="is_on_gpu"),
    pytest.param(timing, "caller", id="caller"),
    *(pytest.param(run_facts, name, id=name) for name in ("in_force", "optimizer_facts")),
    pytest.param(loaders, "loader_facts", id="loader_facts"),
]


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return train()


@pytest.mark.parametrize(("owner", "name"), EVERY_HOOK)
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_hook_that_raises_harms_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    undisturbed: list[float],
    owner: Any,
    name: str,
    when: str,
) -> None:
    real: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if when == "at once" or calls[0] >= 4:
            raise ZeroDivisionError("planted")
        return real(*args, **kwargs)

    attachment = flatout.attach(tmp_path)
    monkeypatch.setattr(owner, name, broken)
    learned = train()
    attachment.close()
    monkeypatch.undo()
    assert learned == undisturbed
    said = capfd.readouterr().err.splitlines()
    assert len(said) <= 1
    if said:
        assert said[0] == "flatout stopped measuring: ZeroDivisionError: planted; training goes on"
    if when == "at once" and calls[0]:
        assert said
    assert "item" not in vars(torch.Tensor), "the patches are off"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(7)])
def test_a_signal_during_a_collection_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    """GIVEN a handler that raises in our callback, as a signal during a collection does THEN the script gets it."""
    push = recorder.Recorder.push
    pending = [interruption]

    def interrupted(self: Any, name: str, *rest: Any) -> None:
        if name == "gc" and pending:
            raise pending.pop()
        push(self, name, *rest)

    monkeypatch.setattr(recorder.Recorder, "push", interrupted)

    def collect() -> None:
        gc.collect()
        while not pending:  # the exception comes out of this loop
            pass

    with flatout.attach(tmp_path), pytest.raises(type(interruption)) as caught:
        collect()
    assert getattr(caught.value, "code", None) == getattr(interruption, "code", None)
