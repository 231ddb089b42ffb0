"""How far the host may run ahead of a GPU, and in which stream of it time is taken; the GPU is played here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.inside.timing import CudaClock
from flatout.inside.trial import Leash


class Queue:
    """A GPU that does nothing by itself."""

    def __init__(self) -> None:
        self.ends: list[Any] = []
        self.done = 0

    def event(self, **_: Any) -> Any:
        queue = self

        class End:
            def record(self, stream: str | None = None) -> None:
                self.stream = stream
                self.number = len(queue.ends)
                queue.ends.append(self)

            def query(self) -> bool:
                return self.number < queue.done

        return End()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    gpu = Queue()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_the_host_waits_for_the_step_so_many_before(queue: Queue) -> None:
    leash = Leash(3)
    assert [leash.step_ended() for _ in range(3)] == [None] * 3
    assert leash.step_ended() is queue.ends[0]
    queue.done = 2
    assert leash.step_ended() is None, "the GPU has come to it"
    assert leash.step_ended() is queue.ends[2]


def test_a_shorter_leash_takes_hold_at_once(queue: Queue) -> None:
    leash = Leash(8)
    assert [leash.step_ended() for _ in range(8)] == [None] * 8
    leash.steps = 2
    assert leash.step_ended() is queue.ends[6]


def test_a_step_is_timed_in_the_stream_that_it_began_in(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a loader that copies in a stream of its own WHEN its copies are marked THEN in the stream of the step."""
    current = "training"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    clock = CudaClock()
    clock.mark(begins=True)
    current = "copies"
    clock.mark(begins=False)
    current = "another training"
    clock.mark(begins=True)
    clock.mark(begins=False)
    assert [end.stream for end in queue.ends] == ["training", "training", "another training", "another training"]
