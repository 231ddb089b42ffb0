"""What unit tests share: machines recorded as text (see tests/data/machines/README.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

MACHINES = Path(__file__).parents[1] / "data" / "machines"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Path]:
    """`machine("vm-cgroup-v1-before")` is a folder that stands in for /. Planting another moment overwrites in place,
    as /proc does under an open file."""

    def plant(name: str) -> Path:
        root = tmp_path / "machine"
        text = (MACHINES / f"{name}.txt").read_text(encoding="utf-8")
        for path, content in re.findall(r"^==> /(\S+) <==\n(.*?)(?=^==> |\Z)", text, re.MULTILINE | re.DOTALL):
            target = root / path
            if path.endswith("/"):
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(content.replace("\\0", "\0"), encoding="utf-8")
        return root

    return plant
