"""Copies to the GPU without one: a wire that carries nothing until somebody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatout.feed import to_device


class Wire:
    """Stands in for torch's side stream. A copy is over when its event, or a later one, was waited for."""

    def __init__(self) -> None:
        self.begun = 0
        self.over = 0
        self.most = 0
        self.yours: list[int] = []  # the copies that the user's stream waits for
        self.let_go_early: list[int] = []

    def wait_event(self, event: Event) -> None:
        self.yours.append(event.number)


class Event:
    wire: Wire

    def record(self, wire: Wire) -> None:
        self.number = wire.begun
        wire.begun += 1
        wire.most = max(wire.most, wire.begun - wire.over)

    def query(self) -> bool:
        return self.wire.over > self.number

    def synchronize(self) -> None:
        self.wire.over = max(self.wire.over, self.number + 1)


class Batch:
    """In a slot, which is free as soon as nobody holds it."""

    def __init__(self, wire: Wire, number: int) -> None:
        self.wire = wire
        self.number = number

    def __del__(self) -> None:
        if self.wire.begun > self.number >= self.wire.over:
            self.wire.let_go_early.append(self.number)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(Event, "wire", wire, raising=False)
    stands_in: dict[str, Any] = {
        "is_available": lambda: True,
        "Stream": lambda _device: wire,
        "Event": Event,
        "stream": lambda _stream: contextlib.nullcontext(),
        "current_stream": lambda _device: wire,
    }
    for name, fake in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return wire


def batches(wire: Wire, count: int, *, then: Exception | None = None) -> Iterator[Batch]:
    for number in range(count):
        yield Batch(wire, number)
    if then is not None:
        raise then


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_a_host_that_never_waits_has_only_a_few_copies_on_the_wire(wire: Wire, ahead: int, count: int) -> None:
    """GIVEN a wire that would never be done by itself, THEN every batch comes, in order, and no slot is let go, nor the
    end reached, before its copy is over."""
    arrived = list(to_device(batches(wire, count), "cuda", convert=lambda batch: batch.number, ahead=ahead))
    assert arrived == wire.yours == list(range(count))
    assert wire.most <= ahead + 2
    assert wire.let_go_early == []
    assert wire.over == count


@pytest.mark.parametrize("taken", [1, 7])
def test_leaving_early_waits_for_what_is_on_the_wire(wire: Wire, taken: int) -> None:
    on_device = iter(to_device(batches(wire, 20), "cuda", convert=lambda batch: batch.number))
    assert [next(on_device) for _ in range(taken)] == list(range(taken))
    del on_device
    assert wire.over == wire.begun == taken + 2
    assert wire.let_go_early == []


def test_a_loader_that_raises_is_heard_when_the_wire_is_empty(wire: Wire) -> None:
    failing = batches(wire, 7, then=OSError("no such file"))
    with pytest.raises(OSError, match="no such file"):
        list(to_device(failing, "cuda", convert=lambda batch: batch.number))
    assert wire.over == wire.begun == 7
    assert wire.let_go_early == []
