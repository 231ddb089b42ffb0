"""What is different where training runs in the cells of a notebook. Standard library only.

IPython is asked only where the process has imported it by itself.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

_said: set[str] = set()


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook, which goes on when a training has ended."""
    return "ipykernel" in sys.modules


def cell_of(file: str) -> str | None:
    """What IPython calls the cell behind the file name that it gives to its code: In[3]."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    name_of = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    name = name_of(file) if name_of is not None else None
    return name[1] if name is not None else None


def warn_of_workers(loader: Any) -> None:
    """Say once, before PyTorch fails, why its workers cannot get what a cell defines."""
    text = why_workers_fail(loader)
    if text and text not in _said:
        _said.add(text)
        print(f"flatout: {text}", file=sys.stderr)


def why_workers_fail(loader: Any) -> str:
    """Why workers that are not forked cannot start, and what to do; empty where they can."""
    context = loader.multiprocessing_context or multiprocessing
    # Without `allow_none` the start method would be settled, and the script could set none any more.
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if not loader.num_workers or method == "fork" or hasattr(sys.modules["__main__"], "__file__"):
        return ""
    dataset = loader.dataset
    parts = [loader.collate_fn, loader.worker_init_fn, dataset]
    while (dataset := getattr(dataset, "dataset", None)) is not None and len(parts) < 10:  # a Subset, say
        parts.append(dataset)
    names = [getattr(part, "__qualname__", type(part).__name__) for part in parts if _is_of_a_cell(part)]
    if not names:
        return ""
    return (
        f"workers started by {method} cannot get {names[0]}, which a cell defines. Put it in a file (%%writefile "
        f"data.py) and import it (from data import {names[0]}), or give the DataLoader multiprocessing_context='fork'"
    )


def _is_of_a_cell(part: Any) -> bool:
    return getattr(part, "__module__", None) == "__main__"
