"""`make demo`: what this machine has, and ten seconds of a small training seen by `flatout top`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loads import running


def main() -> None:
    show("doctor")
    print("\n(starting a small training with two loader workers)", flush=True)
    with running("train", "--workers", "2") as load:
        show("top", "--duration", "10")
    print(f"\n(the training made {load['steps']} steps on the {load['device'].upper()})")


def show(*arguments: str) -> None:
    print(f"\n$ flatout {' '.join(arguments)}\n", flush=True)
    subprocess.run([sys.executable, "-m", "flatout", *arguments], check=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
