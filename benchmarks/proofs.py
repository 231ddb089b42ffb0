"""What `flatout fix` takes for the same training: right changes and wrong ones, in small trainings of many kinds.

    python benchmarks/proofs.py --out FILE [--seeds 3] [--device cpu] [--compiled] [--at-once 2]

Each training of trainings.py leads a proof; with every change it is run again, beside it. Right changes are made as
`fix` makes them, and should be found equivalent; wrong ones by the training's own flags, and none of them may be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe  # noqa: E402
from benchmarks.trainings import TRAININGS  # noqa: E402
from flatout.fix.proof import same_loss  # noqa: E402
from flatout.fix.proof_runs import PARITY_STEPS  # noqa: E402
from flatout.fix.runs import Launcher, ProofRun  # noqa: E402
from flatout.model.plan import Change  # noqa: E402

RIGHT: dict[str, tuple[Change, ...]] = {
    "bf16": (Change(name="precision", value="bf16", safety="equivalent"),),
    "fused optimizer": (Change(name="fused_optimizer", value=True, safety="equivalent"),),
}
COMPILED = {"bf16, compiled": (*RIGHT["bf16"], Change(name="compile", value="default", safety="equivalent"))}
WRONG: dict[str, tuple[str, Any]] = {
    "learning rate a tenth smaller": ("lr", 0.9),
    "loss 2% higher": ("louder", 1.02),
    "no weight decay": ("no-decay", True),
    "first weights not stepped": ("frozen", True),
    "every eighth step taken back": ("stale", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true", help="compile too; on a CPU that takes a minute each")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--only", choices=list(TRAININGS), nargs="+", default=list(TRAININGS))
    options = parser.parse_args()
    right = RIGHT | (COMPILED if options.compiled else {})
    wrong = {
        name: (Change(name=f"setting:{flag}", value=value, safety="equivalent", knob=f"--{flag}"),)
        for name, (flag, value) in WRONG.items()
    }
    rows, began_s = [], time.monotonic()
    for name in options.only:
        for seed in range(options.seeds):
            for change, verdict in verdicts(name, seed, options, right | wrong).items():
                rows.append({"training": name, "seed": seed, "change": change, "right": change in right, **verdict})
                if (change in right) != (verdict["standing"] == "equivalent"):
                    print(f"{name}, seed {seed}, {change}: {verdict['standing']} ({verdict['text']})", flush=True)
            page = {"machine": describe(("torch",)), "seconds": round(time.monotonic() - began_s), "rows": rows}
            options.out.write_text(json.dumps(page, indent=1) + "\n")
    for change in (*right, *wrong):
        found = Counter(row["standing"] for row in rows if row["change"] == change)
        print(f"{change}: {', '.join(f'{count} {standing}' for standing, count in found.most_common())}")


def verdicts(
    name: str, seed: int, options: argparse.Namespace, changes: dict[str, tuple[Change, ...]]
) -> dict[str, dict[str, str]]:
    """What becomes of each change in one training."""
    script = [sys.executable, str(ROOT / "benchmarks" / "trainings.py"), name]
    wanted = [ProofRun(changes=(), steps=PARITY_STEPS, leads=1), ProofRun(changes=(), steps=PARITY_STEPS)]
    wanted += [ProofRun(changes=some, steps=PARITY_STEPS, follows=1) for some in changes.values()]
    with tempfile.TemporaryDirectory(prefix="proofs-") as folder:
        launcher = Launcher([*script, "--seed", str(seed), "--device", options.device], Path(folder))
        leader, alone, *others = launcher.prove(wanted, timeout_s=300, at_once=options.at_once)
    proofs = [same_loss(leader, run, alone) for run in others]
    return {
        change: {"standing": proof.standing, "text": proof.text} for change, proof in zip(changes, proofs, strict=True)
    }


if __name__ == "__main__":
    main()
