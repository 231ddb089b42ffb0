"""Runs what a person would run: the makers and the scripts of `workloads/`, as processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'quick'}",
    "OMP_NUM_THREADS": "1",  # the machine that runs the tests is shared
}


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, its output kept."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=150)


def make(name: str, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a data maker."""
    return run("python", "-m", f"workloads.{name}.make", "--out", out, *flags)


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path from there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(log: str) -> list[float]:
    """The losses in a training's log, in order."""
    return [float(number) for number in re.findall(r"step \d+  loss ([\d.]+)  \d+ samples/s", log)]
