"""`flatout train` as a script that timed.py can run: `python engine.py CONFIG KEY=VALUE…`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # not this folder: it has a workloads.py of its own

from flatout.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "--here"]
    main()
