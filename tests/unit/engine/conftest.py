"""A config of the toy training, and a way to run it in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import engine_toy
import pytest
import torch
from engine_toy import CONFIG, Ready

from flatout.engine.assemble import assemble
from flatout.engine.config import load
from flatout.engine.step import Ranks
from flatout.engine.trainer import Trainer


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    """No faults and no memory from the test before; one thread, the machine that runs the tests is shared."""
    engine_toy.seen.clear()
    engine_toy.faults.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.modules.pop("cut_short", None)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config as a file."""
    path = tmp_path / "toy.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def ready(config: Path, tmp_path: Path) -> Ready:
    """A trainer of the toy config with overrides; its run is tmp_path/run unless they say otherwise."""

    def assembled(*overrides: str) -> Trainer:
        return assemble(load(config, [f"out={tmp_path / 'run'}", *overrides]), Ranks("cpu"))

    return assembled
