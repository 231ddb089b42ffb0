"""Small data sets made once a session, and a script's `main` run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from running import ROOT, make

sys.path.insert(0, str(ROOT))

from workloads.making import clear_errors


@pytest.fixture(scope="session")
def gray_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gray") / "tiny"
    assert make("gray", folder, "--size", "tiny").returncode == 0
    return folder


@pytest.fixture(scope="session")
def stock_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "tiny"
    assert make("stock", folder, "--size", "tiny").returncode == 0
    return folder


Train = Callable[..., str]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Train:
    """Run a script's `main` in this process; what it printed."""

    def started(script: ModuleType, *flags: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path / "run"), *map(str, flags)])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # these networks are too small to share out, and the machine is shared already
        try:
            script.main()
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out

    return started


@pytest.fixture
def refusal(train: Train, capsys: pytest.CaptureFixture[str]) -> Train:
    """Run a script that must refuse: exit code 2 and one line, which is returned."""

    def refused(script: ModuleType, *flags: str | Path) -> str:
        with pytest.raises(SystemExit) as ended, clear_errors():
            train(script, *flags)
        assert ended.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return refused
