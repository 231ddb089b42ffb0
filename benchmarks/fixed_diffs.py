"""What a fix keeps as a patch (`--diff`), of the five workloads and of public scripts: is the patch what the plan is?

    python benchmarks/fixed_diffs.py SCRIPTS --data DIR [--only NAME…] [--out FILE]        half an hour on two cores

The trainings are those of truth.py, with its stand-in for torchvision and made-up data. What a fix would keep depends
on the machine, so here that is given: two plans for each. One run with the plan says where its changes were made, as in
a fix; then come the same steps as there: the patch, its trial beside the plan, `git apply` in a repository of its own,
and a recording of the edited script, which shows whether each change is in force.
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
from benchmarks.truth import PACKAGES, Failed, laid_out  # noqa: E402

STEPS = 30
BUDGET_S = 150.0  # of the trial of a patch
WITHIN_S = 900
_EPOCHS = ("--epochs", "1000")
# What a training has in place of that of truth.py: few flags that the loader reads, so that defaults are edited.
CASES: dict[str, dict[str, Any]] = {
    "gray": {"flags": (*_EPOCHS, "--width", "4")},
    "stock": {"flags": (*_EPOCHS, "--num-workers", "1", "--hidden", "16", "--layers", "1")},
    "segment": {"flags": (*_EPOCHS, "--width", "8")},
    "captcha": {"flags": (*_EPOCHS, "--width", "4", "--batch-size", "8", "--compile-model", "false")},
    "video": {"flags": (*_EPOCHS, "--config", "config_small.py", "--dim", "32", "--depth", "1")},
    "mnist": {"flags": (*_EPOCHS, "--batch-size", "16")},
    "makemore": {"flags": ("--num-workers", "1", "--n-embd", "16", "--n-embd2", "16")},
    "feedforward": {},
    "vae": {"flags": _EPOCHS},
    "adder": {"flags": ("--trainer.max_iters=100000",)},
    "gan": {"flags": ("--n_epochs", "100")},
    "template": {},
    "convolutional": {},
    "pytorch-cifar": {},
    "super resolution": {"flags": ("--upscale_factor", "4", "--nEpochs", "1000", "--batchSize", "4")},
    "DLinear": {},
    "nanoGPT": {},
}
PLANS: dict[str, dict[str, Any]] = {
    "loader": {"loader": "elastic", "fused_optimizer": True, "cudnn_benchmark": True},
    "by hand": {"num_workers": 2, "persistent_workers": True, "batch_size": 24, "gc_freeze": True},
    "bf16": {"precision": "bf16"},
}
LOADER = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "drop_last")


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(patched_here(sys.argv[2], sys.argv[4:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, metavar="SCRIPTS")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="of workloads/")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--plans", nargs="*", metavar="PLAN", default=["loader", "by hand"])
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the results as JSON; those of others stay in it"
    )
    options = parser.parse_args()
    options.device = "cpu"
    machine = describe(PACKAGES)
    print(headline(machine), flush=True)
    for plan in options.plans:
        for name in options.only or CASES:
            try:
                result = tried(name, plan, options)
            except (Failed, subprocess.SubprocessError) as problem:
                result = {"script": name, "plan": plan, "problem": str(problem)}
            print(json.dumps(result), flush=True)
            if options.out is not None:
                save(options.out, machine, result)


def save(out: Path, machine: dict[str, Any], result: dict[str, Any]) -> None:
    """Add a result to the others."""
    old = json.loads(out.read_text(encoding="utf-8"))["results"] if out.exists() else []
    mine = (result["script"], result["plan"])
    every = [one for one in old if (one["script"], one["plan"]) != mine] + [result]
    every.sort(key=lambda one: (list(PLANS).index(one["plan"]), list(CASES).index(one["script"])))
    figures = {"benchmark": "fixed_diffs", "machine": machine, "steps": STEPS, "results": every}
    out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tried(name: str, plan: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make the patch, try it, apply it, and run what that has made of the script."""
    training = TRAININGS[name]
    if not training.repo:
        training = replace(training, data=f"{training.data.split()[0]} tiny")
    training = replace(training, **CASES[name])
    told: dict[str, Any] = {"script": name, "plan": plan, "repo": training.repo or "this one",
                            "commit": COMMITS.get(training.repo), "flags": list(training.flags),
                            "load_before": os.getloadavg()[0]}  # fmt: skip
    with laid_out(training, options, (), ()) as place:
        folder = place.script.parent
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", "as it is")
        said = run(place, __file__, "--here", plan, "--", *place.command(), *place.flags)
        try:
            found = json.loads(said.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return told | {"problem": said[-800:]}
        return told | found | applied(place, found)


def patched_here(plan: str, command: Sequence[str]) -> dict[str, Any]:
    """In the folder of a script: a plan as if a fix had kept it, its patch, and what came of trying that."""
    from flatout.diagnose.knobs import knobs
    from flatout.fix.fix_command import own_folder
    from flatout.fix.result import FixResult, ProgressListener
    from flatout.fix.runs import Launcher
    from flatout.fix.source_edits import patch_of
    from flatout.fix.try_patch import try_patch
    from flatout.launch.protocol import Trial
    from flatout.model.changes import safety_of
    from flatout.model.plan import Change

    with own_folder() as runs:
        launcher, trial = Launcher(command, runs / "runs", overlay=True), Trial(timeout_s=200.0, look_below_s=0.0)
        result = FixResult(before=launcher.run((), STEPS, trial))
        if result.before is None or result.before.trace is None:
            return {"problem": f"not measured: {result.before and result.before.reason()}"}
        changes = []
        for name, value in PLANS[plan].items():
            knob = ""
            if type(value) is int:
                found = knobs(result.before.metrics.facts.settings, name, lambda one: type(one) is int)
                knob = found[0].text if found else ""
            changes.append(Change(name=name, value=value, safety=safety_of(name), knob=knob))
        result.after = launcher.run(changes, STEPS, trial)
        made = [one for one in changes if one.name in result.after.applied and not result.after.why_not_applied(one)]
        if not result.after.is_measured or not made:
            refused = {one.name: result.after.why_not_applied(one) for one in changes} if result.after.trace else {}
            return {"problem": f"the plan could not be measured: {result.after.reason()}; {refused}"}
        result.write_down(made, "kept", None, run=result.after)
        result.kept = tuple(made)
        result.plan.save(Path("flatout-plan.yaml"))
        patch = patch_of(result, command, Path("flatout-plan.yaml"), Path("fix.diff"))
        Path("fix.diff").write_bytes(patch.diff())
        patch = try_patch(
            patch, command, result, budget_s=BUDGET_S, spent_s=0.0, steps=STEPS, progress=ProgressListener()
        )
    return {
        "kept": [{"name": one.name, "value": one.value, "knob": one.knob} for one in made],
        "edits": list(map(str, patch.files)),
        "command": None if patch.command == tuple(command) else list(patch.command)[1:],
        "by_plan": [one.name for one in patch.by_plan],
        "unwritten": [one.name for one in patch.unwritten],
        "outcome": patch.outcome,
        "tried": patch.tried,
        "diff": patch.diff().decode(),
    }


def applied(place: laid_out, found: dict[str, Any]) -> dict[str, Any]:
    """Whether git takes the patch, and what a recording of the edited script says."""
    from flatout import trace

    if "kept" not in found:
        return {}
    folder, told = place.script.parent, {"applies": None}
    if found["edits"]:
        done = git(folder, "apply", "fix.diff", check=False)
        changed = git(folder, "diff", "--name-only", "--relative").stdout.splitlines()
        told = {"applies": done.returncode == 0 and sorted(changed) == sorted(found["edits"])}
    command = [sys.executable, *found["command"]] if found["command"] else [*place.command(), *place.flags]
    said = run(place, "-m", "flatout", "run", "--quiet", "--max-steps", str(STEPS), "--trace", "edited", "--", *command)
    recorded = trace.read(folder / "edited").ranks if (folder / "edited").is_dir() else ()
    if not recorded or len(recorded[0].every_step() or ()) < STEPS:
        return told | {"runs": False, "problem": said[-800:]}
    facts = recorded[0].facts
    return told | {"runs": True, "in_force": {one["name"]: in_force(one, facts, found) for one in found["kept"]}}


def in_force(change: dict[str, Any], facts: Any, found: dict[str, Any]) -> bool | None:
    """Whether the recording shows the change; None where it does not tell, or it is in no file."""
    name, value, loader = change["name"], change["value"], facts.training_loader
    if name in found["unwritten"]:
        return None
    if name in found["by_plan"]:
        return any(one.name == name and one.applied for one in facts.changes)
    if name == "loader":
        return bool(loader.elastic)
    if name in LOADER:
        return bool(getattr(loader, name) == value)
    if name == "precision":
        return any("bfloat16" in str(one) for one in facts.autocast)
    known = {"fused_optimizer": facts.optimizer_fused, "cudnn_benchmark": facts.cudnn_benchmark}
    return known[name] == value if name in known else None


def run(place: laid_out, *words: str) -> str:
    """Run this Python on it; what was said."""
    done = subprocess.run(
        [sys.executable, *words], cwd=place.script.parent, env=place.environment_of(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=WITHIN_S, check=False,
    )  # fmt: skip
    return done.stdout


def git(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git there."""
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=check)


if __name__ == "__main__":
    main()
