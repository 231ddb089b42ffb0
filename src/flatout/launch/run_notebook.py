"""Runs a notebook from its first cell to its last: `python -m flatout.launch.run_notebook train.ipynb`.

Its kernel is the training process: flatout gets into it by the environment, as into any Python of a
command. What cells print comes out as it comes. Which cells have trained is said at the end; an
exception in a cell is exit code 1.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from flatout.launch.launcher import recordings, say
from flatout.launch.protocol import Options
from flatout.model.formatting import count_of
from flatout.trace import read

_END_OF_A_RUN = "SystemExit"  # as after --max-steps


class _Printing(NotebookClient):  # type: ignore[misc]
    """Prints what comes from a cell, and notes when each one ran."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ran: list[tuple[int, float, float]] = []  # number of the cell, from when, to when

    def output(self, outs: Any, msg: Any, *more: Any) -> Any:
        """A message from the kernel."""
        content = msg["content"]
        if msg["msg_type"] == "stream":
            print(content["text"], end="", file=getattr(sys, content["name"]), flush=True)
        elif "data" in content:
            print(content["data"].get("text/plain", ""), flush=True)
        return super().output(outs, msg, *more)

    def run_cells(self) -> None:
        """Execute all cells in a kernel of their own."""
        with self.setup_kernel():
            for index, cell in enumerate(self.nb.cells):
                began_s = time.monotonic()
                try:
                    self.execute_cell(cell, index)
                finally:
                    self.ran.append((index + 1, began_s, time.monotonic()))


def main(path: Path) -> int:
    """Run it; the exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cells without an id are no concern of ours
        notebook = nbformat.read(path, as_version=4)
    client = _Printing(notebook, timeout=None, resources={"metadata": {"path": str(path.parent)}})
    code = 1
    try:
        client.run_cells()
        code = 0
    except CellExecutionError as problem:
        if problem.ename == _END_OF_A_RUN:
            code = 0
        else:
            print(problem.traceback, file=sys.stderr)
            say(f"cell {client.ran[-1][0]} of {path.name} ended with {problem.ename}")
    except (DeadKernelError, NoSuchKernel) as problem:
        say(f"{path.name}: {problem}")
    _say_what_trained(client.ran)
    return code


def _say_what_trained(ran: list[tuple[int, float, float]]) -> None:
    options = Options.from_environment(os.environ)
    if options is None:
        return
    times_s = [time_s for folder in recordings(options.folder) for time_s in _ends_of_steps(folder)]
    trained = [str(number) for number, from_s, to_s in ran if any(from_s <= time_s <= to_s for time_s in times_s)]
    if trained:
        say(f"{count_of(len(trained), 'cell')} trained: {', '.join(trained)}")


def _ends_of_steps(folder: Path) -> list[float]:
    """When steps ended: each of the first, which are kept one by one, then some."""
    ranks = read(folder).ranks
    steps = [step for rank in ranks for step in rank.steps if step.kind not in ("setup", "tail")]
    later = [window.start_s for rank in ranks for window in rank.windows if window.first_index]
    return later + [step.start_s + step.wall_ms / 1e3 for step in steps]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
