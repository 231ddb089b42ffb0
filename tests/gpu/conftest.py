"""What tests on a GPU share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

ForbidWaiting = Callable[[bool], None]
NoWaiting = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture
def forbid_waiting() -> Iterator[ForbidWaiting]:
    """`forbid_waiting(True)`: from here on what makes the host wait for the GPU raises a RuntimeError."""

    def forbid(yes: bool) -> None:
        with warnings.catch_warnings():  # setting it warns that it does not see every kind of waiting
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
            torch.cuda.set_sync_debug_mode("error" if yes else "default")

    yield forbid
    forbid(False)


@pytest.fixture
def no_waiting(forbid_waiting: ForbidWaiting) -> NoWaiting:
    """`with no_waiting():` what makes the host wait for the GPU in there raises a RuntimeError."""

    @contextlib.contextmanager
    def forbidden() -> Iterator[None]:
        forbid_waiting(True)
        try:
            yield
        finally:
            forbid_waiting(False)

    return forbidden


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's compiler, which knows of nothing yet and leaves neither processes nor threads behind."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # of its progress bar
    torch.compiler.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch.compiler.reset()
