"""What `%%flatout` makes of its line and of the notebook around it. Real kernels are in tests/integration."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import flatout
from flatout import notebook
from flatout.inside.run_facts import why_workers_fail
from flatout.inside.stacks import cell_of
from flatout.model.inputs import as_script

magic_error = pytest.importorskip("IPython.core.error")
TRAIN = "%%flatout fix --budget 1m\nfor batch in loader:\n    step(batch)"


class Fixed(SimpleNamespace):
    """What `flatout fix` was called with, and how a text of its was translated."""

    command: list[str]
    script: str
    translated: str


@pytest.fixture
def fix(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fixed]:
    """Runs the cell TRAIN after cells that were run, without `flatout fix` itself."""
    fixed = Fixed()

    def run_beside(command: list[str], in_cells: Callable[[str], str]) -> int:
        fixed.command, fixed.script = command, Path(command[-1]).read_text()
        line = fixed.script.splitlines().index("    step(batch)") + 1
        fixed.translated = in_cells(f"({command[-1]}:{line}) python {command[-1]}")
        return 0

    monkeypatch.setattr(notebook, "_run_beside", run_beside)

    def run(*earlier: str, cell: str = TRAIN) -> Fixed:
        first, _, rest = cell.partition("\n")
        magic(["", *earlier, cell])(first.removeprefix("%%flatout"), rest)
        return fixed

    return run


def magic(history: list[str]) -> Callable[[str, str], None]:
    """What `%load_ext flatout` registers in a shell with this history."""
    known: dict[str, Any] = {}
    shell = SimpleNamespace(
        register_magic_function=lambda function, kind: known.update({function.__name__: function}),
        history_manager=SimpleNamespace(input_hist_raw=history),
    )
    flatout.load_ipython_extension(shell)
    function: Callable[[str, str], None] = known["flatout"]
    return function


def save(path: Path, *sources: str) -> dict[str, Any]:
    """A notebook that begins with a cell of text."""
    code = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]
    content = {"cells": [{"cell_type": "markdown", "source": "# Digits"}, *code], "metadata": {}}
    path.write_text(json.dumps(content))
    return content


def test_the_script_is_the_saved_notebook_up_to_the_cell(
    fix: Callable[..., Fixed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "digits.ipynb"
    save(path, "%load_ext flatout", "from __future__ import annotations\nimport torch", TRAIN, "never()")
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    fixed = fix("old()")
    compile(fixed.script, "digits.py", "exec")  # `from __future__` comes first
    assert fixed.script.splitlines()[1:] == ["pass", "pass", "import torch", "pass", *TRAIN.splitlines()[1:]]
    assert fixed.command[6:-1] == ["--budget", "1m", "--", sys.executable]
    assert fixed.translated == "(cell 4:3) python notebook.py"


def test_what_was_run_has_to_do_where_the_cell_is_not_saved(fix: Callable[..., Fixed]) -> None:
    body = TRAIN.partition("\n")[2]
    fixed = fix("loader = slow", "loader = slow", body, f"%%flatout\n{body}")
    assert fixed.script.splitlines()[1:] == ["loader = slow", "pass", *body.splitlines()]  # each cell once
    assert fixed.translated == "(In[5]:3) python notebook.py"


def test_colab_is_asked_for_its_notebook(
    fix: Callable[..., Fixed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = save(tmp_path / "x.ipynb", TRAIN)
    content["metadata"]["colab"] = {"name": "faces.ipynb"}
    message = ModuleType("google.colab._message")
    message.blocking_request = lambda request, timeout_sec: {"ipynb": content}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.setitem(sys.modules, "google.colab._message", message)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    fixed = fix()
    assert Path(fixed.command[-1]).name == "faces.py"
    assert fixed.translated.startswith("(cell 2:3)")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("fix --html page.html", "%%flatout fix takes no --html, --json and --resume"),
        ("--max-steps 0", "--max-steps 0: expected a number from 1 on"),
        ("--max-steps few", "argument --max-steps: invalid int value: 'few'"),
        ("--price x", "--price x: expected a price an hour"),
        ("--trace 'it", "%%flatout --trace 'it: No closing quotation"),
    ],
)
def test_a_mistake_in_the_line_is_one_line(line: str, told: str) -> None:
    with pytest.raises(magic_error.UsageError) as said:
        magic([""])(line, "1 + 1")
    assert str(said.value).startswith(told)
    assert "\n" not in str(said.value)


def test_a_cell_under_the_magic_is_python_to_check() -> None:
    assert as_script([(3, "%%flatout --max-steps 5\nloss.item()")]) == ("pass\nloss.item()", [(0, 3)])


def test_a_cell_has_the_name_that_its_traceback_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"/tmp/ipykernel_1/2.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=known.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert cell_of("/tmp/ipykernel_1/2.py") == "In[3]"
    assert cell_of("train.py") is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert cell_of("/tmp/ipykernel_1/2.py") is None


class Digits:
    """As if a cell had defined it."""


Digits.__module__ = "__main__"


@pytest.mark.parametrize(
    ("workers", "method", "dataset", "fails"),
    [
        (2, "spawn", Digits(), True),
        (2, "forkserver", SimpleNamespace(dataset=Digits()), True),  # as in a Subset
        (2, "fork", Digits(), False),
        (0, "spawn", Digits(), False),
        (2, "spawn", [1, 2], False),
    ],
)
def test_workers_that_are_not_forked_lack_what_cells_define(
    monkeypatch: pytest.MonkeyPatch, workers: int, method: str, dataset: object, fails: bool
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    loader = SimpleNamespace(
        num_workers=workers,
        multiprocessing_context=multiprocessing.get_context(method),
        dataset=dataset,
        collate_fn=None,
        worker_init_fn=None,
    )
    told = why_workers_fail(loader)
    assert told.startswith(f"workers started by {method} cannot get Digits, which a cell defines") == fails
    assert bool(told) == fails
