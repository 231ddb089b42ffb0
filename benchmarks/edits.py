"""What `flatout try` takes for the same training: edits that are right, and edits that are wrong as people's are.

    python benchmarks/edits.py --out FILE [--draws 2] [--device cpu] [--amp] [--only photos words table]

Each training in edited/ leads a proof; with every edit of edited_cases.py it is run again, and follows it. Of the right
ones most should be found the same, of the wrong ones none may be. Nothing is timed here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.edited_cases import RIGHT, TRAININGS, WRONG, Case  # noqa: E402
from benchmarks.machine import describe  # noqa: E402
from flatout.fix.edit_proof import loss_apart, same_training  # noqa: E402
from flatout.fix.edits import Edit  # noqa: E402
from flatout.fix.runs import EDIT, Launcher, ProofRun  # noqa: E402
from flatout.model.plan import Change  # noqa: E402

STEPS = 60  # as `try` has them where a pass over the data is no longer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--draws", type=int, default=2, help="of each edit that has drawn numbers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="the model computes in bf16, in every run")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--only", nargs="+", default=["photos", "words", "table"], metavar="TRAINING")
    options = parser.parse_args()
    os.environ["DEVICE"] = options.device
    if options.amp:
        os.environ["AMP"] = "1"
    out = options.out.absolute()
    rows: list[dict[str, Any]] = []
    began_s = time.monotonic()
    for training in options.only:
        rows += verdicts(training, options)
        tally = {right: Counter(row["standing"] for row in rows if row["right"] is right) for right in (True, False)}
        page = {
            "machine": describe(("torch",)),
            "device": options.device,
            "bf16": options.amp,
            "seconds": round(time.monotonic() - began_s),
            "right": dict(tally[True]),
            "wrong": dict(tally[False]),
            "rows": rows,
        }
        out.write_text(json.dumps(page, indent=1) + "\n")
    print(f"right: {page['right']}\nwrong: {page['wrong']}")


def verdicts(training: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What becomes of each edit of one training."""
    with tempfile.TemporaryDirectory(prefix="edits-") as place:
        folder = Path(place) / "scripts"  # away from what runs record: what changes there is no news
        folder.mkdir()
        os.chdir(folder)
        cases: dict[str, Case] = {}
        for case in (*RIGHT, *WRONG):
            draws = options.draws if ".." in case.new else 1
            if case.training == training and not (options.amp and case.name == "bf16"):
                cases |= {f"{case.name} {draw}": case for draw in range(draws)}
        edits = {name: _edit(name, case, folder) for name, case in cases.items()}
        before = (sys.executable, str(TRAININGS / f"{training}.py"))
        launcher = Launcher(before, Path(place) / "runs", edits=edits)
        wanted = [ProofRun(changes=(), steps=STEPS, leads=1), ProofRun(changes=(), steps=STEPS, follows=1)]
        for name in edits:
            change = Change(name=EDIT, value=name, safety="equivalent")
            wanted.append(ProofRun(changes=(change,), steps=STEPS, follows=1))
        lead, again, *others = launcher.prove(wanted, timeout_s=300, at_once=options.at_once)
        rows = []
        for (name, case), run in zip(cases.items(), others, strict=True):
            proof = same_training(lead, run, again)
            row = {"training": training, "edit": name, "right": case in RIGHT, "standing": proof.standing}
            rows.append(row | {"text": proof.text, "loss_apart": loss_apart(lead, run), "furthest": _furthest(run)})
            if proof.holds != (case in RIGHT):
                print(f"{training}, {name}: {proof.standing} ({proof.text})", flush=True)
        return rows


def _edit(name: str, case: Case, folder: Path) -> Edit:
    script = folder / f"{name.replace(' ', '-')}.py"
    script.write_text(case.drawn(int(name.split()[-1])))
    return Edit(name=name, command=(sys.executable, str(script)))


def _furthest(run: Any) -> list[Any]:
    """The weights that are furthest off, and how far."""
    return [(drift.name, drift.apart) for drift in sorted(run.drifts, key=lambda one: -one.apart)[:3]]


if __name__ == "__main__":
    main()
