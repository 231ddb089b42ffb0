"""The GPU's side of a step: CUDA events from a pool, and loss values copied beside them.

Only the training thread comes here, never while a graph is captured. Nothing waits for the GPU but a Leash.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import torch

_LOSSES_IN_FLIGHT = 128


class CudaClock:
    """Records events in the stream a step began in, and reads the time between neighbours once they have
    passed.

    It stays with that stream: a loader that copies ahead of time uses another one, and when the GPU reaches
    an event there says nothing about its neighbours here.
    """

    def __init__(self) -> None:
        self._pool: list[Any] = []
        self._stream: Any = None

    def mark(self, *, begins: bool) -> Any:
        """An event, the first of a step or not; None where CUDA is not in use or a graph is being captured."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        if begins:
            before, self._stream = self._stream, torch.cuda.current_stream()
            if before != self._stream:
                self._pool.clear()  # an event belongs to the GPU it was first recorded on
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def between(self, marks: list[Any]) -> list[float] | None:
        """Milliseconds between neighbours; None while the GPU has not reached the last one."""
        if torch.cuda.is_current_stream_capturing() or not marks[-1].query():
            return None
        times = [max(0.0, first.elapsed_time(second)) for first, second in pairwise(marks)]
        if marks[0].device == self._stream.device:
            self._pool += marks
        marks.clear()
        return times


class Leash:
    """Keeps the host within a few steps of the GPU, so that the pace of its steps is the GPU's.

    A queue takes a thousand launches. Without this a trial of small steps would be over before the GPU has
    done half of them, and replayed batches would seem to be trained on as fast as they are handed out.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._ends: deque[Any] = deque()

    def step_ended(self) -> Any:
        """The end of an earlier step that the GPU has to reach before the host goes on, if it has not yet."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        self._ends.append(torch.cuda.Event(blocking=True))
        self._ends[-1].record()
        due = None
        while len(self._ends) > self.steps:
            due = self._ends.popleft()
        return None if due is None or due.query() else due

    def wait(self, end: torch.cuda.Event) -> None:
        """Wait for it, past the wrapper that would call this a wait of the script's."""
        super(torch.cuda.Event, end).synchronize()


class LossReader:
    """Copies scalar losses to the host without waiting for them."""

    def __init__(self) -> None:
        self._slots: Any = None
        self._next = 0

    def take(self, loss: Any) -> Any:
        """A ticket for the value of `loss`, or None where it is not one number."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        loss = loss.detach()
        if not loss.is_cuda:
            return float(loss)
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._slots is None:
            self._slots = torch.zeros(_LOSSES_IN_FLIGHT, pin_memory=True)
        slot = self._slots[self._next % _LOSSES_IN_FLIGHT]
        self._next += 1
        slot.copy_(loss.reshape(()), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return slot, event

    def read(self, ticket: Any) -> float | None:
        """The value behind a ticket, if it has arrived."""
        if isinstance(ticket, float):
            return ticket
        slot, event = ticket
        return float(slot) if event.query() else None
