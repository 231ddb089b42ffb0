"""The losses of training, left on the device until somebody wants to see them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stretch:
    """What the losses of some steps came to; those that are no numbers are counted, not summed."""

    then: dict[str, Any]  # what was so when reading began
    last_step: int
    total: float
    count: int
    bad: int
    first_bad: int | None
    samples: int
    seconds: float


class Losses:
    """Losses where they were computed, until they are wanted: nothing is launched for them, nothing waits."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._last = self._samples = 0
        self._since: float | None = None
        self.begun: tuple[Tensor, torch.cuda.Event | None, dict[str, Any], int, int, float] | None = None

    def add(self, step: int, loss: Tensor, rows: int) -> None:
        """One more. The first of a training tells nothing of its speed: workers start, and the compiler."""
        self._kept.append(loss)
        self._last = step
        if self._since is None:
            self._since = time.monotonic()
        else:
            self._samples += rows

    def begin_reading(self, then: dict[str, Any]) -> None:
        """Start to bring them to the host; to be read a step later, when that is done."""
        if not self._kept or self.begun is not None or self._since is None:
            return
        values = torch.stack([loss.float() for loss in self._kept])
        event = None
        if values.is_cuda:
            host = torch.empty(values.shape, pin_memory=True)
            values, event = host.copy_(values, non_blocking=True), torch.cuda.Event()
            event.record()
        now = time.monotonic()
        self.begun = values, event, then, self._last, self._samples, now - self._since
        self._kept, self._samples, self._since = [], 0, now

    def read(self) -> Stretch | None:
        """What was begun to be read."""
        if self.begun is None:
            return None
        values, event, then, last, samples, seconds = self.begun
        self.begun = None
        if event is not None:
            event.synchronize()
        numbers = values.tolist()
        good = [number for number in numbers if math.isfinite(number)]
        bad = [place for place, number in enumerate(numbers) if not math.isfinite(number)]
        return Stretch(
            then=then,
            last_step=last,
            total=math.fsum(good),
            count=len(good),
            bad=len(bad),
            first_bad=last - len(numbers) + 1 + bad[0] if bad else None,
            samples=samples,
            seconds=max(seconds, 1e-9),
        )
