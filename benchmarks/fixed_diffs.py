"""`flatout fix --diff` of the five workloads and of public scripts: is the patch what the plan is?

    python benchmarks/fixed_diffs.py SCRIPTS --data DIR [--only NAME…] [--budget 4m] [--out FILE]

The trainings are those of truth.py, with its stand-in for torchvision and made-up data; their samples wait some
milliseconds each, as for a disk, so that there is something to fix on any machine. Each is copied into a git repository
of its own and fixed with --diff. Then: what came of the trial of the patch; whether `git apply` takes it; whether the
edited script runs; and whether each change is in force in a recording of that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402
from benchmarks.planted_scripts import COMMITS, TRAININGS  # noqa: E402
from benchmarks.planting import after  # noqa: E402
from benchmarks.truth import PACKAGES, Failed, laid_out  # noqa: E402

STEPS = 24
WITHIN_S = 900
WAIT = "import time\ntime.sleep(0.003)"
WAITS = after("def __getitem__(self, ", WAIT)  # as for a disk, so that workers can help
FROM_FILES = {"STANDIN_SIDE": "28", "STANDIN_DELAY": "0.002"}
_EPOCHS = ("--epochs", "1000")
_GPT = ("--trainer.max_iters=100000",)
# What a training has in place of that of truth.py: no flag that the loader reads, so that defaults are edited.
CASES: dict[str, dict[str, Any]] = {
    "gray": {"flags": (*_EPOCHS, "--width", "4"), "edits": (WAITS,)},
    "stock": {"flags": (*_EPOCHS, "--num-workers", "0", "--hidden", "16", "--layers", "1"), "edits": (WAITS,)},
    "segment": {"flags": (*_EPOCHS, "--width", "8"), "edits": (WAITS,)},
    "captcha": {"flags": (*_EPOCHS, "--width", "4", "--amp", "false", "--compile-model", "false"), "edits": (WAITS,)},
    "video": {"flags": (*_EPOCHS, "--config", "config_small.py", "--dim", "32", "--depth", "1"), "edits": (WAITS,)},
    "mnist": {"flags": (*_EPOCHS, "--batch-size", "16"), "environment": FROM_FILES},
    "makemore": {"flags": ("--num-workers", "0", "--n-embd", "16", "--n-embd2", "16"), "edits": (WAITS,)},
    "feedforward from files": {"environment": FROM_FILES, "edits": ()},
    "vae": {"flags": (*_EPOCHS, "--batch-size", "16"), "environment": FROM_FILES},
    "adder": {"flags": _GPT, "edits": (WAITS,)},
    "gan": {"flags": ("--n_epochs", "100", "--batch_size", "16"), "environment": FROM_FILES},
    "template": {"environment": FROM_FILES},
    "convolutional": {"environment": FROM_FILES},
    "logistic": {"environment": FROM_FILES, "edits": ()},
    "super resolution": {"flags": ("--upscale_factor", "4", "--nEpochs", "1000", "--batchSize", "4")},
    "pytorch-cifar": {"environment": FROM_FILES},
}
# What flatout may try: by default the elastic loader.
BY_WORKERS = {"captcha", "mnist", "adder", "template", "convolutional"}
BY_BATCH = {"video", "vae", "super resolution"}
LOADER = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "drop_last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, metavar="SCRIPTS")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="of workloads/")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--budget", default="8m")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the results as JSON; those of others stay in it"
    )
    options = parser.parse_args()
    options.device = "cpu"
    machine = describe(PACKAGES)
    print(headline(machine), flush=True)
    for name in options.only or CASES:
        try:
            result = tried(name, options)
        except Failed as problem:
            result = {"script": name, "problem": str(problem)}
        print(json.dumps({key: value for key, value in result.items() if key != "diff"}), flush=True)
        if options.out is not None:
            old = json.loads(options.out.read_text(encoding="utf-8"))["results"] if options.out.exists() else []
            every = sorted(
                [one for one in old if one["script"] != name] + [result],
                key=lambda one: list(CASES).index(one["script"]),
            )
            figures = {"benchmark": "fixed_diffs", "machine": machine, "budget": options.budget, "results": every}
            options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tried(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fix it, apply the patch, and run what that has made of the script."""
    training = TRAININGS[name]
    if training.repo == "":
        training = replace(training, data=f"{training.data.split()[0]} tiny")
    training = replace(training, **CASES[name])
    told: dict[str, Any] = {"script": name, "repo": training.repo or "this one", "commit": COMMITS.get(training.repo),
                            "flags": list(training.flags), "load_before": os.getloadavg()[0]}  # fmt: skip
    with laid_out(training, options, (), ()) as place:
        folder = place.script.parent
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", "as it is")
        command = [*place.command(), *place.flags]
        wishes = ["--budget", options.budget, "--steps", str(STEPS), "--allow", "batch-size", "--only", only(name)]
        said = flatout(place, "fix", *wishes, "--diff", "fix.diff", "--json", "fix.json", "--", *command)
        if not (folder / "fix.json").exists():
            return told | {"problem": said[-800:]}
        found = json.loads((folder / "fix.json").read_text(encoding="utf-8"))
        told |= {"sentence": found["sentence"], "seconds": found["seconds"], "patch": found["patch"]}
        told["kept"] = [{key: one[key] for key in ("name", "value", "safety", "knob")} for one in found["kept"]]
        told["undone"] = [{key: one[key] for key in ("name", "value", "verdict", "why")} for one in found["undone"]]
        if found["patch"] is None:
            return told
        told["patch"]["command"] = told["patch"]["command"][1:]  # without the path of this Python
        return told | applied(place, found)


def only(name: str) -> str:
    """The changes to try."""
    if name in BY_BATCH:
        return "batch-size"
    return "num-workers,persistent-workers" if name in BY_WORKERS else "loader"


def applied(place: laid_out, found: dict[str, Any]) -> dict[str, Any]:
    """Whether git takes the patch, and what a recording of the edited script says."""
    from flatout import trace

    folder, patch = place.script.parent, found["patch"]
    told: dict[str, Any] = {"applies": None, "diff": ""}
    if patch["edits"]:
        done = git(folder, "apply", "fix.diff", check=False)
        changed = git(folder, "diff", "--name-only", "--relative").stdout.split()
        clean = done.returncode == 0 and sorted(changed) == sorted(patch["edits"])
        told = {"applies": clean, "diff": (folder / "fix.diff").read_text(encoding="utf-8")}
    said = flatout(place, "run", "--quiet", "--max-steps", str(STEPS), "--trace", "edited", "--", *patch["command"])
    told["runs"] = (folder / "edited").is_dir() and bool(trace.read(folder / "edited").ranks)
    if not told["runs"]:
        return told | {"problem": said[-800:]}
    facts = trace.read(folder / "edited").ranks[0].facts
    told["in_force"] = {one["name"]: in_force(one, facts, patch["by_plan"]) for one in found["kept"]}
    return told


def in_force(change: dict[str, Any], facts: Any, by_plan: Sequence[str]) -> bool | None:
    """Whether the recording shows the change; None where it does not tell."""
    name, value = change["name"], change["value"]
    if name in by_plan:
        return any(one.name == name and one.applied for one in facts.changes)
    if name == "loader":
        return bool(facts.training_loader.elastic)
    if name in LOADER:
        return bool(getattr(facts.training_loader, name) == value)
    if change["knob"]:
        return any(value in read.values.values() for read in facts.settings)
    return None


def flatout(place: laid_out, *words: str) -> str:
    """Run flatout on it; what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *words], cwd=place.script.parent, env=place.environment_of(),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=WITHIN_S, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def git(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git there."""
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=check)


if __name__ == "__main__":
    main()
