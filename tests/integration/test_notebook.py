"""Notebooks, with real kernels: `%%flatout`, `%%flatout fix`, and `flatout run train.ipynb`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout import trace

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Jupyter's own

BUILD = """
import time, torch
from torch.utils.data import DataLoader, Dataset
import flatout

class Digits(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((3,), float(index))

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

def train(loader):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return "trained"
"""
CELLS = {
    "load": "%load_ext flatout",
    "build": BUILD,
    "pytorch": "%%flatout --no-xray\ntrain(DataLoader(Digits(), batch_size=8, num_workers=2))",
    "ours": "%%flatout --trace ours\ntrain(flatout.DataLoader(Digits(), batch_size=8, num_workers=2))",
    "plain": "train(DataLoader(Digits(), batch_size=8))",
    "nothing": "%%flatout\n6 * 7",
    "raises": "%%flatout --trace raises\ntrain(DataLoader(Digits(), batch_size=8))\n1 / 0",
    "interrupted": "%%flatout --trace interrupted\n"
    "train(DataLoader(Digits(), batch_size=8))\nimport signal\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)",
    "few": "%%flatout --trace few --max-steps 5\nfor _ in range(100):\n    train(DataLoader(Digits(), batch_size=8))",
    "attach": "with flatout.attach('attached'):\n    train(DataLoader(Digits(), batch_size=8))",
    "spawn": "%%flatout\nnext(iter(DataLoader(Digits(), num_workers=1, multiprocessing_context='spawn')))",
    "option": "%%flatout --steps 5\ntrain([])",
}


def saved(path: Path, cells: list[str]) -> Any:
    """A notebook on the disk."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, path)
    return notebook


def executed(path: Path, cells: list[str]) -> Any:
    """The same after a kernel has executed every cell, errors and all."""
    notebook = saved(path, cells)
    client = nbclient.NotebookClient(
        notebook, timeout=150, allow_errors=True, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", "JPY_SESSION_NAME": str(path)})
    return notebook


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder in which a notebook was executed, and the outputs of its cells."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = executed(folder / "digits.ipynb", list(CELLS.values()))
    return folder, {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def text_of(outputs: Any) -> str:
    """All that a cell shows, as text."""
    parts = [output.get("text", "") for output in outputs]
    parts += [output["data"].get("text/html", output["data"]["text/plain"]) for output in outputs if "data" in output]
    parts += ["\n".join(output["traceback"]) for output in outputs if output["output_type"] == "error"]
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(parts))


def steps_in(folder: Path) -> int:
    return sum(step.kind in ("train", "warmup") for step in trace.read(folder).ranks[0].steps)


def test_a_cell_is_recorded_and_its_report_is_shown(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, outputs = ran
    shown = text_of(outputs["pytorch"])
    assert "'trained'" in shown  # the value of the last expression
    assert "median step" in shown
    assert "srcdoc=" in shown
    (recording,) = (folder / "flatout-runs").glob("*-digits")  # the cell "plain" is not recorded
    assert steps_in(recording) == 8
    assert f'href="{recording.relative_to(folder)}/report.html"' in shown
    assert (recording / "report.html").exists()


def test_workers_of_either_loader_get_a_dataset_that_a_cell_defines(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, outputs = ran
    assert "'trained'" in text_of(outputs["ours"])
    (workers,) = {len(trace.read(folder / "ours").ranks[0].workers)}
    assert workers > 0


def test_a_cell_that_trains_nothing_is_one_line(ran: tuple[Path, dict[str, Any]]) -> None:
    _, outputs = ran
    nothing = "flatout: nothing has trained: no call of torch.optim.Optimizer.step was seen"
    assert nothing in text_of(outputs["nothing"]).splitlines()
    assert "42" in text_of(outputs["nothing"])


@pytest.mark.parametrize(
    ("cell", "line", "told"),
    [
        ("raises", "----> 3 1 / 0", "Training ended after 8 steps: ZeroDivisionError at In[7]:3."),
        ("interrupted", "KeyboardInterrupt", "Training was interrupted after 8 steps."),
    ],
)
def test_what_a_cell_raises_is_shown_as_without_us(
    ran: tuple[Path, dict[str, Any]], cell: str, line: str, told: str
) -> None:
    folder, outputs = ran
    shown = text_of(outputs[cell])
    assert line in shown
    assert told in shown
    assert "notebook.py" not in outputs[cell][-1]["traceback"]
    assert "run_cell_magic" not in shown
    assert steps_in(folder / cell) == 8


def test_a_cell_ends_after_max_steps_and_the_kernel_goes_on(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, outputs = ran
    assert not [output for output in outputs["few"] if output["output_type"] == "error"]
    assert steps_in(folder / "few") == 6
    assert "srcdoc=" in text_of(outputs["attach"])
    assert steps_in(folder / "attached") == 8


def test_workers_that_are_not_forked_cannot_get_it_and_flatout_says_what_to_do(
    ran: tuple[Path, dict[str, Any]],
) -> None:
    _, outputs = ran
    assert "flatout: workers started by spawn cannot get Digits, which a cell defines" in text_of(outputs["spawn"])


def test_a_wrong_option_is_one_line(ran: tuple[Path, dict[str, Any]]) -> None:
    _, outputs = ran
    assert "UsageError: unrecognized arguments: --steps 5" in text_of(outputs["option"])


def test_fix_runs_on_the_notebook_up_to_its_cell(tmp_path: Path) -> None:
    slow = BUILD.replace("return torch.full", "time.sleep(0.004)\n        return torch.full").replace("64", "4000")
    cell = "%%flatout fix --budget 60s --only loader --unprotected\ntrain(DataLoader(Digits(), batch_size=8))"
    cells = ["%load_ext flatout", slow, "display(model)", cell, "1 / 0"]
    shown = text_of(executed(tmp_path / "digits.ipynb", cells).cells[3].outputs)
    assert "the script is made of 4 cells, up to this one" in shown
    assert "to try: elastic loader" in shown, shown[:2000]
    assert "elastic loader: undone" in shown or "cell 4:2" in shown  # a busy machine may hide that it pays
    assert "flatout-notebook-" not in shown
    assert (tmp_path / "flatout-plan.yaml").exists()


def test_flatout_run_executes_a_notebook_and_says_which_cell_trained(tmp_path: Path) -> None:
    train = "print(train(DataLoader(Digits(), batch_size=8)), flush=True)"
    saved(tmp_path / "digits.ipynb", [BUILD, train, "1 / 0"])
    command = [sys.executable, "-m", "flatout", "run", "--trace", "trace", "--json", "run.json", "digits.ipynb"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == "trained\n"
    assert "ZeroDivisionError" in ended.stderr
    assert "flatout: 1 cell trained: 2\n" in ended.stderr
    assert json.loads((tmp_path / "run.json").read_text())["facts"]["steps"] == 7
