"""An exhaustive grid over workers, prefetching and batch size, and `flatout fix` beside it: what each finds, and when.

    python benchmarks/grid.py gray --data DIR --out FILE [--workers 0 1 2 4] [--prefetch 2 4] [--batch 64 128]

Every point of the grid is a run of the workload with those flags, measured over a window like all variants of
workloads.py; the five best are measured twice more, since the best of many is partly luck. Then `flatout fix` may
change the loader and the batch size and nothing else, and its plan is measured the same way, in turns with the grid's
best. Wanted: 97% of the best, in a tenth of the time. Flags after `--` go to every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.workloads import copied, fix, machine, make_data, measure, split_at_dashes  # noqa: E402

BEST, AGAIN = 5, 2
WISHES = ("--allow", "batch_size", "--only", "loader,num_workers,prefetch_factor,pin_memory,device_prefetch,batch_size")
WANTED_SPEED, WANTED_TIME = 0.97, 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["gray", "stock"])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--size", choices=["tiny", "small", "full"], default="full")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=6.0, help="a window lasts, and the warm-up before it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", default="4m", help="of flatout fix")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4, 8, 12, 14, 16, 24])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128, 256])
    own, extra = split_at_dashes(sys.argv[1:])
    options = parser.parse_args(own)
    data = options.data.resolve() / f"{options.name}-{options.size}"
    make_data(options.name, options.size, data)
    common = ["--data", str(data), "--device", options.device, "--epochs", "1000000", *extra]
    with copied(()) as root:
        result = compare(root, options, common)
    options.out.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n", encoding="utf-8")
    best, found = result["best"], result["fix"]
    print(f"the grid's best, {best['flags']}: {best['samples_per_s']:,.0f} samples/s after {result['seconds']:.0f} s")
    print(f"found by fix: {found['samples_per_s']:,.0f} samples/s after {found['seconds']:.0f} s")
    print(f"{result['speed']:.0%} of the speed (wanted: {WANTED_SPEED:.0%})")
    print(f"{result['time']:.0%} of the time (wanted: {WANTED_TIME:.0%})")


def compare(root: Path, options: argparse.Namespace, common: list[str]) -> dict[str, Any]:
    def speed(flags: list[str], *through: str) -> float:
        figures = measure(root, options.name, [*common, *flags], options.seconds, through=through)
        return float(figures["samples_per_s"])

    start_s, points = time.monotonic(), []
    for workers, prefetch, batch in itertools.product(options.workers, options.prefetch, options.batch):
        if not workers and prefetch != options.prefetch[0]:
            continue  # nobody loads ahead
        flags = ["--num-workers", str(workers), "--prefetch", str(prefetch), "--batch-size", str(batch)]
        flags += ["--persistent-workers"] if workers else []
        points.append({"flags": " ".join(flags), "runs": [speed(flags)]})
        print(f"{len(points):4}  {points[-1]['flags']:80} {points[-1]['runs'][0]:10,.0f} samples/s", flush=True)
    best = sorted(points, key=lambda point: -point["runs"][0])[:BEST]
    for _, point in itertools.product(range(AGAIN), best):
        point["runs"].append(speed(point["flags"].split()))
    seconds = time.monotonic() - start_s
    chosen = max(best, key=lambda point: statistics.median(point["runs"]))
    with tempfile.TemporaryDirectory(prefix="fix-") as folder:
        plan = Path(folder, "plan.yaml")
        found = fix(root, options.name, common, plan, *WISHES, "--budget", options.budget)
        ours = []
        for _ in range(1 + AGAIN):
            ours.append(speed([], "--plan", str(plan)))
            chosen["runs"].append(speed(chosen["flags"].split()))
    theirs, mine = statistics.median(chosen["runs"][-len(ours) :]), statistics.median(ours)
    return {
        "workload": options.name,
        "size": options.size,
        "flags": common,
        "points": points,
        "seconds": seconds,
        "best": {"flags": chosen["flags"], "samples_per_s": theirs},
        "fix": {"samples_per_s": mine, "runs": ours, "seconds": found["wall_s"], "plan": found["plan"]},
        "speed": mine / theirs,
        "time": found["wall_s"] / seconds,
    }


if __name__ == "__main__":
    main()
