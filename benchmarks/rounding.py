"""What rounding does to a training, from the same weights on: its loss and its weights beside those of the plain one.

    python benchmarks/rounding.py captcha --data DIR --out FILE [--steps 160] [-- FLAGS]

One run of the workload leads; the others, each with some changes more, go on from its weights every five steps
(src/flatout/inside/weights.py), all of them side by side. Noted of each: whether the same bytes reached the model; how
far its loss is off in the second half of the steps, by the number of steps since it had the leader's weights; and how
far its own had come in five steps, in which direction. "as torch has it": the compiler rounds as it is built to, not as
flatout asks it to (src/flatout/compiling.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.workloads import copied, environment, machine, make_data, split_at_dashes, start  # noqa: E402
from flatout.fix.runs import Launcher, ProofRun, Run  # noqa: E402
from flatout.launch.protocol import WEIGHTS_EVERY as EVERY  # noqa: E402
from flatout.model.plan import Change  # noqa: E402

BF16 = {"precision": "bf16"}
PLANS: dict[str, dict[str, Any]] = {
    "fused optimizer, cuDNN benchmark": {"fused_optimizer": True, "cudnn_benchmark": True},
    "bf16": BF16,
    "bf16, elastic loader, device prefetch": {"loader": "elastic", "device_prefetch": True, **BF16},
    "bf16, compiled": {**BF16, "compile": "reduce-overhead"},
    "bf16, compiled as torch has it": {**BF16, "compile": "reduce-overhead"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["gray", "segment", "captcha", "video"])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--size", choices=["tiny", "small", "full"], default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--at-once", type=int, default=4, help="runs side by side")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    own, extra = split_at_dashes(sys.argv[1:])
    options = parser.parse_args(own)
    data = options.data.resolve() / f"{options.name}-{options.size}"
    make_data(options.name, options.size, data)
    with copied(()) as root, tempfile.TemporaryDirectory(prefix="rounding-") as folder:
        os.environ |= environment(root)
        flags = ["--data", str(data), "--device", options.device, "--epochs", "1000000", "--out", f"{folder}/run"]
        script = str(start(root, options.name)[-1])
        launcher = Launcher([sys.executable, script, *flags, *extra], Path(folder, "runs"))
        runs = made(launcher, options.steps, options.at_once)
    leader = runs.pop("as it is")
    results = {name: beside(leader, run) for name, run in runs.items()}
    told = {"machine": machine(), "workload": options.name, "size": options.size, "steps": options.steps}
    losses = [step.loss for step in leader.proof[0]]
    options.out.write_text(json.dumps({**told, "losses": losses, "results": results}, indent=1) + "\n")
    for name, figures in results.items():
        print(f"{name}: {json.dumps(figures | {'losses': '…', 'drifts': '…', 'moved': figures['moved'][-6:]})}")


def made(launcher: Launcher, steps: int, at_once: int) -> dict[str, Run]:
    """The runs by their names; the last by itself, since it takes a word in the environment."""
    changes = {
        name: tuple(Change(name=key, value=value, safety="equivalent") for key, value in plan.items())
        for name, plan in PLANS.items()
    }
    wanted = [ProofRun(changes=plan, steps=steps, follows=1) for plan in changes.values()]
    first = [ProofRun(changes=(), steps=steps, leads=1), *wanted[:-1]]
    runs = launcher.prove(first, timeout_s=300, at_once=at_once)
    os.environ["TORCHINDUCTOR_EMULATE_PRECISION_CASTS"] = "0"
    runs += launcher.prove(wanted[-1:], timeout_s=300)
    return dict(zip(["as it is", *PLANS], runs, strict=True))


def beside(leader: Run, run: Run) -> dict[str, Any]:
    """A run's figures beside the leader's."""
    if run.code or not run.proof:
        return {"failed": run.reason(), "losses": [], "moved": []}
    pairs = list(zip(leader.proof[0], run.proof[0], strict=False))
    later = pairs[len(pairs) // 2 :]
    size = statistics.fmean(ours.loss or 0.0 for ours, _ in later)
    ages: list[list[float]] = [[] for _ in range(EVERY)]
    for number, (ours, theirs) in enumerate(later, start=len(pairs) // 2):
        if ours.loss is not None and theirs.loss is not None:
            ages[number % EVERY].append((theirs.loss - ours.loss) / size)
    return {
        "seconds": round(run.seconds, 1),
        "refused": run.refused,
        "steps_with_other_bytes": sum(ours.inputs != theirs.inputs for ours, theirs in pairs),
        "loss_off_by_age": [round(statistics.fmean(age), 5) if age else None for age in ages],
        "moved": [[round(part, 4) for part in step.moved] for step in run.proof[0] if step.moved is not None],
        "drifts": [dataclasses.asdict(drift) for drift in run.drifts],
        "losses": [step.loss for step in run.proof[0]],
    }


if __name__ == "__main__":
    main()
