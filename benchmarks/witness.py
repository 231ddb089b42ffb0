"""Runs a script as `python` would, and leaves hashes behind of what it has trained.

    WITNESS=FOLDER python benchmarks/witness.py SCRIPT ARGS…           or: -m MODULE ARGS…

harmless.py starts every script by this, with and without flatout: seeds are set before the script begins, and when it
has ended a file in FOLDER holds a hash of all that its optimizers stepped, of their state, and of where the generators
of random numbers then are. Nothing of flatout is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

SEED = 0
_stepped: dict[int, Any] = {}
_steps = 0


def main() -> None:
    """Run what the arguments name."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    register_optimizer_step_post_hook(_step_ended)
    process, place = os.getpid(), Path(os.environ["WITNESS"])
    del sys.argv[0]
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if os.getpid() == process:
            rank = os.environ.get("RANK", "0")
            (place / f"rank-{rank}.json").write_text(json.dumps(_seen()), encoding="utf-8")


def _step_ended(optimizer: Any, *_: Any) -> None:
    global _steps
    _steps += 1
    _stepped[id(optimizer)] = optimizer


def _seen() -> dict[str, Any]:
    parameters, state = hashlib.sha256(), hashlib.sha256()
    for optimizer in _stepped.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameters.update(_bytes_of(parameter))
                for value in tree_leaves(optimizer.state.get(parameter)):
                    state.update(_bytes_of(value))
    return {
        "steps": _steps,
        "optimizers": len(_stepped),
        "weights": parameters.hexdigest() if _stepped else None,
        "optimizer state": state.hexdigest() if _stepped else None,
        "random numbers": hashlib.sha256(
            repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())).encode()
        ).hexdigest(),
    }


def _bytes_of(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    return dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


if __name__ == "__main__":
    main()
