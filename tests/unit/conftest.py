"""What unit tests share: the command, and machines recorded as text (see tests/data/machines/README.md)."""

from __future__ import annotations

import random
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from flatout import cli

MACHINES = Path(__file__).parents[1] / "data" / "machines"


class Said(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def flatout_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs the command here: `flatout_says("top", "--once")`."""

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["flatout", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def mutated() -> Callable[[str, list[str], int], Iterator[str]]:
    """`mutated(text, tokens, 100)`: so many texts made from one, pieces cut out or doubled and tokens put in."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)

    def texts(text: str, tokens: list[str], count: int) -> Iterator[str]:
        for _ in range(count):
            made = text
            for _ in range(chance.choice((1, 1, 2, 4))):
                start = chance.randrange(len(made) + 1)
                end = min(len(made), start + chance.choice((0, 1, 3, 20)))
                put = chance.choice(("", chance.choice(tokens), chance.choice(tokens) * 300, made[start:end] * 2))
                made = made[:start] + put + made[end:]
            yield made

    return texts


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """`with full_disk():` no file grows beyond 512 bytes, as on a disk that fills up in the middle of a write."""

    @contextmanager
    def full() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full


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
