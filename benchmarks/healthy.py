"""Trainings with nothing wrong in them under `flatout fix`: nothing may be kept, and that is to be said in two minutes.

    python benchmarks/healthy.py [--budget 4m] [--out FILE]

They are those of tests/traces/record.py whose recordings are the healthy ones: on a GPU large products, convolutions
in NHWC and a transformer in bf16, both fed by four workers; without one the CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests" / "traces")]

import record  # noqa: E402

from benchmarks.machine import describe, headline  # noqa: E402

WITHIN_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    machine = describe(("torch", "numpy"))
    print(headline(machine))
    on_gpu = record.gpu_here() is not None
    names = [n for n in record.TRAININGS if n.startswith(record.HEALTHY) and record.needs_gpu(n) == on_gpu]
    results = {}
    for name in names:
        results[name] = found = fixed(name, options.budget)
        kept = ", ".join(change["name"] for change in found["kept"]) or "nothing"
        print(f"{name}: {kept} kept after {found['seconds']:.0f} s; {found['stopped']}", flush=True)
        if options.out is not None:
            figures = {"benchmark": "healthy", "machine": machine, "results": results}
            options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(any(found["kept"] or found["seconds"] > WITHIN_S for found in results.values()))


def fixed(name: str, budget: str) -> dict[str, Any]:
    """What `flatout fix --allow all` says of it."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["fix", "--unprotected", "--budget", budget, "--allow", "all", "--json", "fix.json", "--"]
        words += [sys.executable, record.__file__, "--train", name]
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "flatout", *words], cwd=folder, env=environment, check=True)
        found = json.loads(Path(folder, "fix.json").read_text(encoding="utf-8"))
    wanted = ("sentence", "kept", "undone", "trials", "noise", "remarks", "stopped", "seconds")
    return {key: found[key] for key in wanted}


if __name__ == "__main__":
    main()
