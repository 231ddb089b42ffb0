"""`make demo`: a starved training mended before your eyes, on the CPU. No GPU needed; below three minutes on two cores.

A few grayscale pictures are made, and `flatout fix` is let loose on workloads/gray/train.py as it is: its two workers
are started anew for every epoch, and it evaluates after each. What was found, what it brought and the proof come as
text; before and after as one HTML file. On a machine that is busy with other things a gain may drown in the noise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flatout.launch import sandbox

ROOT = Path(__file__).resolve().parents[1]
# A network so narrow that a CPU trains it quickly: decoding is what takes the time, as it does on a GPU.
SETTINGS = ("--width", "1", "--num-workers", "2", "--epochs", "1000", "--device", "cpu")
BUDGET = "90s"


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="flatout-demo-"))
    data = folder / "data"
    print("First, some pictures to train on.", flush=True)
    run(sys.executable, "-m", "workloads.gray.make", "--size", "tiny", "--out", str(data))
    print("\nNow a training script that nobody has tuned. flatout tries what would make it faster:\n", flush=True)
    script = str(ROOT / "workloads" / "gray" / "train.py")
    command = ["python", script, *SETTINGS, "--data", str(data)]
    options = ["--budget", BUDGET, "--allow", "eval-interval,checkpoint-interval", "--html", "fix.html"]
    if sandbox.why_no_overlay(command, folder):
        options.insert(0, "--unprotected")  # a script of ours, that writes where it is told to
    print(f"$ flatout fix {' '.join([*options, '--', *command])}\n", flush=True)
    run(sys.executable, "-m", "flatout", "fix", *options, "--", *command, cwd=folder)
    print(f"\nThe whole story, before and after: {folder / 'fix.html'}")
    print(f"The plan: {folder / 'flatout-plan.yaml'}   (delete {folder} when you have seen it)")


def run(*command: str, cwd: Path = ROOT) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited]),
        "OMP_NUM_THREADS": "1",  # one core for the network, so that a small machine has one left
    }
    if subprocess.run(command, cwd=cwd, env=environment, check=False).returncode:
        sys.exit("the demo did not come to its end")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
