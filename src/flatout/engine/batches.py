"""The batches of a training, epoch by epoch, on the device; and the way back to where it was left.

a loader of `flatout train`    one pass over all epochs: workers never stop, an epoch is a stretch of it
a loader of the caller's       a pass for every epoch
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as StockLoader

from flatout.engine.checkpoint import random_state, set_random_state
from flatout.feed import DataLoader, feed_of, to_device
from flatout.feed.chained_epochs import ChainedEpochs

_END = object()


class Batches:
    """What a training learns from. `waited_s` counts the time it had to wait for them."""

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        convert: Callable[[Any], Any] | None,
        say: Callable[[str], None],
    ) -> None:
        self.loader = loader
        self.waited_s = 0.0
        self._device, self._say = device, say
        self._on_device = to_device(loader, device, convert=convert)
        self._endless = isinstance(getattr(loader, "batch_sampler", None), ChainedEpochs)
        self._pass: Iterator[Any] | None = None  # over all epochs
        self._epoch_random: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None

    def of_epoch(self, epoch: int, done: int) -> Iterator[Any]:
        """What is left of an epoch of which so many batches are done."""
        batches = self._begun(epoch, done)
        while True:
            started = time.perf_counter()
            batch = next(batches, _END)
            self.waited_s += time.perf_counter() - started
            if batch is _END:
                return
            yield batch

    def state(self) -> dict[str, Any]:
        """What it takes to go on from here."""
        return {
            "random": random_state(self._device),
            "epoch_random": self._epoch_random,
            "loader": self._on_device.state_dict() if self._begins_anywhere() else {},
            "batches": len(self._on_device) if self._endless else None,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Have the next epoch go on from where `state` was taken."""
        self._resumed = state

    def close(self) -> None:
        """End the workers, which would live as long as the loader; iterated again, it has new ones."""
        self._pass = None
        end_workers(self.loader)

    def _begun(self, epoch: int, done: int) -> Iterator[Any]:
        if not self._endless:
            return self._new_pass(epoch, done)
        if self._pass is None:
            self._pass = self._new_pass(epoch, done)
        else:
            self._epoch_random = random_state(self._device)
            _draw_as_a_new_pass()
        return itertools.islice(self._pass, max(0, len(self._on_device) - done))

    def _new_pass(self, epoch: int, done: int) -> Iterator[Any]:
        loader, resumed, self._resumed = self.loader, self._resumed, None
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if resumed is None or (done == 0 and not self._endless):
            if resumed is not None:
                set_random_state(resumed["random"], self._device)
            self._epoch_random = random_state(self._device)
            batches = iter(self._on_device)
            next(itertools.islice(batches, done, done), None)  # of an epoch that an exception has ended
            return batches
        self._epoch_random = resumed["epoch_random"] if done else resumed["random"]
        if self._begins_anywhere() and "base_seed" in resumed["loader"]:
            assert isinstance(loader, DataLoader)
            place = resumed["loader"]
            if self._endless and resumed.get("batches") != len(self._on_device):  # batches are of another size
                place = {**place, "yielded": epoch * len(self._on_device) + min(done, len(self._on_device))}
            loader.load_state_dict(place)
            batches = iter(self._on_device)
        else:
            if done:
                self._say(f"going forward {done} batches of a loader that cannot begin in the middle")
            set_random_state(self._epoch_random, self._device)
            batches = iter(self._on_device)
            next(itertools.islice(batches, done, done), None)
        set_random_state(resumed["random"], self._device)
        if not done:
            _draw_as_a_new_pass()
        return batches

    def _begins_anywhere(self) -> bool:
        return isinstance(self.loader, DataLoader) and self.loader.num_workers > 0


def _draw_as_a_new_pass() -> None:
    """Dropout is the same with one pass over all epochs as with one for each, and after a resume."""
    torch.empty((), dtype=torch.int64).random_()


def end_workers(loader: Any) -> None:
    """End the processes behind a loader, if it has any of ours."""
    feed = feed_of(loader) if isinstance(loader, StockLoader) else None
    if feed is not None:
        feed.close()
