"""The processes that train together: who they are, what they agree on, and how they end.

What ranks agree on travels between hosts (gloo), beside the gradients and without the GPU; all of them
ask at the same steps. Cores of the node are shared out among its ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from flatout.sample import budget

_AT_ONCE_S = 1.0


class Ranks:
    """This process among those that train together; a single one agrees with itself."""

    def __init__(self, device_type: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1") or 1)
        self._ours = False
        if dist.is_available() and dist.is_initialized():
            self.world = dist.get_world_size()
        elif self.world > 1:
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
            self._ours = True
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._host = dist.new_group(backend="gloo") if self.world > 1 else None
        if budget.measure().ranks_on_node > 1:
            torch.set_num_threads(max(1, int(budget.measure().cores_allowed)))

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def total(self, values: Iterable[float]) -> list[float]:
        """The sums over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def highest(self, values: Iterable[float]) -> list[float]:
        """The highest values of any rank."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Iterable[float], how: Any) -> list[float]:
        if self._host is None:
            return list(values)
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, how, group=self._host)
        return numbers.tolist()

    def gathered(self, thing: Any) -> list[Any]:
        """What every rank has, in the order of the ranks."""
        if self._host is None:
            return [thing]
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing, group=self._host)
        return things

    def leave(self) -> None:
        """End the process group that was started here."""
        if self._ours:
            dist.destroy_process_group()
            self._ours = False


def lost_contact(problem: BaseException) -> bool:
    """Whether an error means that another rank is gone."""
    words = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed", "NCCL", "remote process")
    return isinstance(problem, RuntimeError) and any(word in str(problem) for word in words)


class Interrupts:
    """SIGTERM and Ctrl-C as a request to stop after this step; a second one, over a second later, ends the process.

    (The same signal often comes twice at once: to the process group, and from the launcher.)
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._asked_at > _AT_ONCE_S:
            self.__exit__()
            signal.raise_signal(number)
