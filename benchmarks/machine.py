"""What every benchmark says about its figures: where they come from, and how far they spread."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "psutil", "nvidia-ml-py")


def describe(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Hardware and versions."""
    gpu, driver = _gpu()
    versions = {name: version for name in packages if (version := _version(name)) is not None}
    cores = len(os.sched_getaffinity(0))
    return {
        "gpu": gpu,
        "driver": driver,
        "cpu": _cpu(),
        "cores": cores,
        "python": platform.python_version(),
        **versions,
    }


def headline(machine: dict[str, Any]) -> str:
    """The machine on one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)


def figure(values: Sequence[float], digits: int = 4) -> dict[str, float | int]:
    """n, median, and the spread between the quartiles (of fewer than four values: between the ends)."""
    if len(values) < 4:
        low, high = min(values), max(values)
    else:
        low, _, high = statistics.quantiles(values, n=4)
    return {"n": len(values), "median": round(statistics.median(values), digits), "spread": round(high - low, digits)}


def _gpu() -> tuple[str | None, str | None]:
    if shutil.which("nvidia-smi") is None:
        return None, None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    name, _, driver = (lines[0] if lines else "").partition(",")
    return (name.strip() or None, driver.strip() or None)


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
