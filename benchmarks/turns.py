"""Changes decided in turns while a training runs, beside the same changes in runs of their own.

    python benchmarks/turns.py [--data DIR] [--out FILE] [--only NAME…] [--apart]

Of each workload: what the turns say of each compute change and how long that took; the speed of the run with what they
kept; with --apart also the gain of each by a run without and a run with it, as trials do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402
from flatout.fix.runs import Launcher  # noqa: E402
from flatout.launch.protocol import TURNS, Trial  # noqa: E402
from flatout.model.changes import safety_of  # noqa: E402
from flatout.model.plan import Change  # noqa: E402

CHANGES = {"precision": "bf16", "channels_last": True, "fused_optimizer": True, "cudnn_benchmark": True}
WORKLOADS: dict[str, tuple[str, ...]] = {
    "captcha": ("--amp", "false", "--compile-model", "false", "--tf32", "false", "--cudnn-benchmark", "false"),
    "stock": (),
    "gray": ("--num-workers", "8"),
    "segment": ("--num-workers", "8"),
    "video": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--size", default="small")
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--compile", action="store_true", help="and compiling, last")
    parser.add_argument("--apart", action="store_true", help="each change in runs of its own, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = describe(("torch",))
    print(headline(machine), flush=True)
    results = {}
    for name in options.only:
        results[name] = workload(name, options)
        if options.out:
            told = {"benchmark": "turns", "machine": machine, "results": results}
            options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def workload(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One training: in turns, and apart."""
    data = options.data.resolve() / f"{name}-{options.size}"
    script = str(ROOT / "workloads" / name / "train.py")
    command = [sys.executable, script, "--data", str(data), "--epochs", "1000", *WORKLOADS[name]]
    wanted = CHANGES | ({"compile": "default"} if options.compile else {})
    changes = [Change(name=key, value=value, safety=safety_of(key)) for key, value in wanted.items()]
    scratch = Path(tempfile.mkdtemp(prefix="turns-"))
    runner = Launcher(command, scratch)

    def run(some: list[Change], turns: tuple[str, ...] = ()) -> Any:
        return runner.run(some, 48, Trial(at_least_s=6.0, look_below_s=0.0, timeout_s=240, turns=turns))

    began_s = time.monotonic()
    live = run(changes, tuple(wanted))
    told: dict[str, Any] = {
        "seconds": round(time.monotonic() - began_s, 1),
        "code": live.code,
        "speed": str(live.speed),
    }
    path = live.folder / TURNS
    told["turns"] = json.loads(path.read_text()) if path.exists() else live.reason()
    print(f"{name}: {told['seconds']} s, {told['speed']}, exit code {live.code}", flush=True)
    if live.code:
        print(live.output[-1500:])
    for one in told["turns"] if isinstance(told["turns"], list) else []:
        gain = one["gain"] and "{value:.3f} ({low:.3f} to {high:.3f})".format(**one["gain"])
        taken = f"{one['rounds']} rounds, {one['steps']} steps, {one['seconds']:.1f} s"
        print(f"  {one['name']:16} {one['state']}, {one['decision']:10} {gain or one['note']} {taken}", flush=True)
    if options.apart:
        told["apart"] = {}
        kept: list[Change] = []
        before = run(kept)
        for change in changes:
            after = run([*kept, change])
            gain = after.speed.value / before.speed.value if after.speed and before.speed else None
            told["apart"][change.name] = gain
            print(f"  apart: {change.name:16} {gain and round(gain, 3)} ({after.seconds:.0f} s a run)", flush=True)
            if gain and gain > 1.01:
                kept, before = [*kept, change], after
        told["apart speed"] = str(before.speed)
    shutil.rmtree(scratch, ignore_errors=True)
    return told


if __name__ == "__main__":
    main()
