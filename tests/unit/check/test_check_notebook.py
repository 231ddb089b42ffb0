"""What flatout check makes of a notebook, and of files that are no training script at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from check_cases import check_script, line_of

from flatout.model.errors import UsageError
from flatout.model.inputs import python_lines

BUILD = """\
%matplotlib inline
!pip install torch \\
    torchvision
import torch
from torch.utils.data import DataLoader

loader = DataLoader(train_set, batch_size=8,
                    num_workers=4, shuffle=True)"""
TRAIN = """\
%%time
for epoch in range(30):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        print(loss.item())"""


def notebook(*cells: str) -> str:
    """A notebook with a text cell before those of code, as Jupyter saves it."""
    text = {"cell_type": "markdown", "metadata": {}, "source": ["# A training\n", "of mine"]}
    code = [
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [], "source": source.splitlines(True)}
        for source in cells
    ]
    return json.dumps({"cells": [text, *code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write


def test_the_cells_of_a_notebook_are_looked_over(saved: Callable[[str, str], Path]) -> None:
    checklist = check_script(saved("train.ipynb", notebook(BUILD, "", "%%bash\nls -l", TRAIN)))
    assert checklist.looked_at == ("train.ipynb",)
    workers, waits = line_of(checklist, "persistent_workers"), line_of(checklist, "host waits")
    assert (workers.status, workers.where) == ("warn", "train.ipynb cell 2:7")
    assert (waits.status, waits.where) == ("warn", "train.ipynb cell 5:8")
    assert "loss.item() (train.ipynb cell 5:8) every batch" in waits.reason
    assert not [line for line in checklist.lines if line.subject == "training"]


def test_a_mistake_in_a_cell_is_reported_with_its_place(saved: Callable[[str, str], Path]) -> None:
    script = saved("train.ipynb", notebook(BUILD, "x = 1\ndef f(:"))
    with pytest.raises(UsageError, match=r"^train\.ipynb cell 3:2: not Python: "):
        check_script(script)


@pytest.mark.parametrize(
    ("cell", "python"),
    [
        ("x = 1\n%timeit f(x)\nif x:\n    !ls {x}", ["x = 1", "pass", "if x:", "    pass"]),
        ("y = (5\n  % 3)\nz = '''\n!no magic\n'''", ["y = (5", "  % 3)", "z = '''", "!no magic", "'''"]),
        ("files = !ls\nt = %time f()\ny != x", ["files = None", "t = None", "y != x"]),
        ("torch.cat?\n??f\n%cd \\\n  there\nx", ["pass", "pass", "pass", "", "x"]),
        ("%%writefile a.py\nimport torch\n1", ["pass", "", ""]),
        ("%%capture out\nf()", ["pass", "f()"]),
    ],
)
def test_what_only_ipython_understands_is_left_out_line_by_line(cell: str, python: list[str]) -> None:
    assert python_lines(cell) == python


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.txt", "hello, you there\n", "t.txt:1: not Python"),
        ("t.ipynb", "{", "t.ipynb, line 1: this is not JSON"),
        ("t.ipynb", '{"worksheets": []}', "t.ipynb is not a notebook of format 4"),
        ("t.ipynb", '{"cells": [3]}', "t.ipynb is not a notebook of format 4"),
        ("t.ipynb", "[" * 100_000, "t.ipynb: nested too deeply"),
        ("t.py", f"x = {'-' * 100_000}1", "t.py cannot be read as Python: it is nested too deeply"),
        ("t.py", f"x = {'9' * 5000}", "t.py:1: not Python: "),
        ("t.py", "x = '\0'", "t.py"),
    ],
)
def test_what_is_no_script_is_refused_in_one_line(
    saved: Callable[[str, str], Path], name: str, text: str, complaint: str
) -> None:
    with pytest.raises(UsageError) as raised:
        check_script(saved(name, text))
    assert str(raised.value).startswith(complaint)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("t.json", "{}"), ("t.yaml", "a: 1"), ("t.py", f"for x in y:\n    x.backward()\n    {'a.' * 1200}b(1)")],
)
def test_the_command_refuses_it_in_one_line_too(
    saved: Callable[[str, str], Path], flatout_says: Callable[..., Any], name: str, text: str
) -> None:
    code, out, err = flatout_says("check", saved(name, text))
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_script_without_pytorch_is_no_all_clear(saved: Callable[[str, str], Path]) -> None:
    for name, text in (("t.py", "import os\nprint(os.getcwd())\n"), ("t.txt", "hello\n"), ("t.ipynb", notebook())):
        checklist = check_script(saved(name, text))
        line = line_of(checklist, "training")
        assert (line.status, line.reason) == ("warn", f"no PyTorch training was found in {name}")
        assert not checklist.passed(strict=True)
