"""Marks in the GPU's queue: CUDA events from a pool, and loss values that travel beside them.

Only the training thread comes here, never during a graph capture, and nothing waits for the GPU but a Leash.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import torch

_LOSSES_IN_FLIGHT = 128


class CudaClock:
    """Drops events into the stream that a step began in, and reads the time between neighbours once they have passed.

    Always that one: a loader that copies ahead of time, ours or the script's, does so in a stream of its own, and what
    the card comes to there says nothing about when it came to its neighbour here.
    """

    def __init__(self) -> None:
        self._pool: list[Any] = []
        self._stream: Any = None
        self._raw_stream: tuple[int, int] | None = None

    def mark(self, *, begins: bool) -> Any:
        """An event, the first of a step or not; None where there is no CUDA in use or a graph is being captured."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        if begins:
            self._follow()
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _follow(self) -> None:
        """To the stream that is current now; looking it up costs more than recording into it."""
        device = torch._C._cuda_getDevice()
        raw = (device, torch._C._cuda_getCurrentRawStream(device))
        if raw != self._raw_stream:
            self._raw_stream, self._stream = raw, torch.cuda.current_stream()
            self._pool.clear()  # an event stays with the card that it was first recorded on

    def between(self, marks: list[Any]) -> list[float] | None:
        """Milliseconds between neighbours; None while the GPU has not come to the last."""
        if torch.cuda.is_current_stream_capturing() or not marks[-1].query():
            return None
        times = [max(0.0, a.elapsed_time(b)) for a, b in pairwise(marks)]
        if marks[0].device == self._stream.device:
            self._pool += marks
        marks.clear()
        return times


class Leash:
    """Lets the host run ahead of the card by a few steps: farther away, the pace of its steps is its own.

    A queue takes a thousand launches. Without this a trial of small steps would be over before the card has done half
    of them, and batches given out again would seem to be trained on as fast as they are handed over.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._ends: deque[Any] = deque()

    def step_ended(self) -> Any:
        """The end of an earlier step that the card has to come to before the host goes on, if it has not yet."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        end = torch.cuda.Event(blocking=True)
        end.record()
        self._ends.append(end)
        due = None
        while len(self._ends) > self.steps:
            due = self._ends.popleft()
        return due if due is not None and not due.query() else None

    def wait(self, end: torch.cuda.Event) -> None:
        """Until the card comes to it; past the hook that would take it for a wait of the script's."""
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
