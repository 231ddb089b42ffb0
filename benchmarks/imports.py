"""What flatout imports inside a training process, and how long that takes: `python -m benchmarks.imports`.

Python's own `-X importtime` is read twice, of a script that imports torch and makes one step: with flatout inside and
without. What only the first imports is flatout's, but for parts of torch. Of five runs each module's quickest counts,
with its bytecode cached as an installed package has it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from flatout.launch.protocol import INJECTED, VARIABLE, Options

RUNS = 5
LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
SCRIPT = """
import gc
gc.disable()  # a collection of torch's own objects would fall into one import or another
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.ones(8, 4), batch_size=4):
    model(x).sum().backward()
    optimizer.step()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = Options(folder=Path(folder), name="imports", xray=False)
        inside = {VARIABLE: options.to_environment(), "PYTHONPATH": str(INJECTED)}
        base = imported({}).keys()
        runs = [{name: us for name, us in imported(inside).items() if name not in base} for _ in range(RUNS)]
    ours = [{name: us for name, us in run.items() if name.split(".")[0] not in ("torch", "numpy")} for run in runs]
    quickest = {name: min(run.get(name, us) for run in ours) for name, us in ours[0].items()}
    total_ms = sum(quickest.values()) / 1e3
    print(f"{total_ms:.1f} ms beside torch, {len(quickest)} modules, each in its quickest of {RUNS} runs")
    for name, us in sorted(quickest.items(), key=lambda pair: -pair[1])[:25]:
        print(f"{us / 1e3:8.1f} ms  {name}")


def imported(variables: dict[str, str]) -> dict[str, int]:
    """Microseconds each module took to import, those that it imports itself left out."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", SCRIPT],
        env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: int(us) for us, name in LINE.findall(done.stderr)}


if __name__ == "__main__":
    main()
