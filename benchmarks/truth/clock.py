"""Runs a training script as `python` would, takes the time of its optimizer steps, and ends it after the last one.

    CLOCK=FILE CLOCK_STEPS=N python benchmarks/truth/clock.py SCRIPT ARGS…

The clock of truth.py: it knows nothing of flatout, and nothing of flatout is imported. Time runs from the end of a step
in the first sixth of the steps to the end of the last one, with everything that happens in between.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = int(os.environ["CLOCK_STEPS"])
PROCESS = os.getpid()
BORN = time.perf_counter()
ended: list[float] = []


def step_ended(*_):
    if os.getpid() != PROCESS:
        return
    if len(ended) in (STEPS // 6, STEPS - 1) and torch.cuda.is_available():
        torch.cuda.synchronize()
    ended.append(time.perf_counter())
    if len(ended) == STEPS:
        tell()
        sys.stdout.flush()
        os._exit(0)  # no epilogue of the script: it would evaluate, save or draw


def tell():
    first = min(STEPS // 6, len(ended) - 1)
    if os.environ.get("RANK", "0") == "0" and len(ended) > first >= 0:
        told = {"start_s": ended[0] - BORN, "steps": len(ended) - 1 - first, "seconds": ended[-1] - ended[first]}
        Path(os.environ["CLOCK"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    register_optimizer_step_post_hook(step_ended)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    tell()  # it ended before its last step
