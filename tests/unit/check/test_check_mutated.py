"""Whatever is in a plan, a config or a script: it is read, or refused in one line. Seeded mutations of right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
from check_cases import SCRIPTS

from flatout.check import check
from flatout.model import changes
from flatout.model.errors import FlatoutError
from flatout.model.plan import Plan

PLAN = """\
plan: 1
changes:
- name: num_workers
  value: 8
  safety: reseeded
  note: the GPU waits
- {name: precision, value: bf16, safety: equivalent, knob: "--amp"}
tried:
- {name: compile, value: default, safety: equivalent, verdict: undone, why: no gain}
"""
YAML = [
    "[", "]", "{", "}", ":", "- ", "\n", "  ", "&a ", "*a", "!!int ", "!!set ", "!!timestamp ", "<<: ", "2001-99-99",
    "#", "1e999", ".nan", "0x", "null", "~", "'", '"', "|\n", "? ", "%YAML 3\n", "---\n", "\t", "\0", "é", "\ud7ff",
]  # fmt: skip
PYTHON = [
    "(", ")", "[", "{", ":", "=", "==", "\n", "    ", "def f(", "class C:", "lambda: ", "for x in ", "import torch",
    "if ", "from . import ", "**", "*", "@", "'", '"""', "\\\n", "\0", "é", "async ", "yield ", "f'{", "9" * 5000,
]  # fmt: skip
WORDS = [
    "None",
    "0",
    "-",
    "not ",
    ".x",
    "(x)",
    "[0]",
    "args",
    "config",
    "loader",
    " or x",
    " + 1",
    "*a",
    "x, ",
    "lambda: ",
]


Mutated = Callable[[str, list[str], int], Iterator[str]]


def look_over(script: Path | None, config: Path | None = None) -> object:
    return check(script, flags=(), config=config, gpus=None)


def read_or_refused(read: Callable[[Path], object], path: Path, texts: Iterator[str]) -> None:
    refused = 0
    for text in texts:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            read(path)
        except FlatoutError as problem:
            complaint, code = str(problem), problem.exit_code
            refused += 1
            assert (code, 10 < len(complaint) < 1000) == (2, True), complaint[:300]
    assert refused > 10  # else the texts were not wrong enough to test anything


def test_plans(tmp_path: Path, mutated: Mutated) -> None:
    def read(path: Path) -> None:
        changes.check(Plan.load(path), str(path))

    read_or_refused(read, tmp_path / "plan.yaml", mutated(PLAN, YAML, 400))


@pytest.mark.parametrize("name", ["asked.yaml", "asked.json"])
def test_configs_that_are_checked(tmp_path: Path, mutated: Mutated, name: str) -> None:
    text = (SCRIPTS / "asked.yaml").read_text()
    if name.endswith("json"):
        text = '{"train": {"amp": true, "lr": 1e-3, "betas": [0.9, 0.99]}, "loader": {"workers": 8}}'
    read_or_refused(lambda path: look_over(None, path), tmp_path / name, mutated(text, YAML, 150))


def test_scripts_that_are_checked(tmp_path: Path, mutated: Mutated) -> None:
    text = (SCRIPTS / "asked.py").read_text()
    read_or_refused(
        look_over,
        tmp_path / "train.py",
        chain(mutated(text, PYTHON, 50), mutated(text, WORDS, 150)),
    )
