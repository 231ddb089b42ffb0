"""Who is told by the hooks what goes on in a training, beside the times that they take."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any


class Listener:
    """What the session wants to know beside times; the defaults want nothing."""

    replays = False  # whether it will ever answer `replayed_batch` or be `resident`
    resident = False
    next_look = 0  # the step it wants to hear of next
    watched: Container[int] = ()  # loaders of which it wants to hear before and after each batch

    def loader_seen(self, number: int, loader: Any) -> None:
        """A DataLoader is about to begin a pass, and perhaps to start its workers."""

    def fetches(self, loader: int) -> None:
        """A loader that is watched is about to be asked for a batch …"""

    def has_fetched(self, loader: int) -> None:
        """… and has given one."""

    def fetched(self, loader: int, batch: Any) -> None:
        """A batch has come out of a loader, for whoever replays them."""

    def replayed_batch(self, loader: int) -> Any:
        """A batch to give instead of fetching one, or None."""

    def resident_copy(self, tensor: Any, how: str, copy: Callable[[], Any]) -> Any:
        """The device copy of `tensor`, made by `copy` the first time it is asked for like this."""
        return copy()

    def autocast_entered(self, dtype: str) -> None:
        """A region of mixed precision was entered."""

    def backward_begins(self, tensors: Any) -> None:
        """A backward pass is about to run; has to open its phase."""

    def step_ended(self, optimizer: Any) -> None:
        """A training step is over. May raise to end the run."""
