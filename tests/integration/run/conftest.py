"""Makes `observing` importable here, and keeps torch to one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models here are too small for more than one core; and tqdm is to start no thread of its own."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
