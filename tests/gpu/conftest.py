"""What tests on a GPU share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

NoWaiting = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture
def no_waiting() -> NoWaiting:
    """`with no_waiting():` what makes the host wait for the GPU in there raises a RuntimeError."""

    @contextlib.contextmanager
    def forbidden() -> Iterator[None]:
        with warnings.catch_warnings():  # setting it warns that it does not see every kind of waiting
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbidden
