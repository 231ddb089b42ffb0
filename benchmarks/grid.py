"""An exhaustive grid over workers, prefetching and batch size, and `flatout fix` beside it: what each finds, and when.

    python benchmarks/grid.py gray --data DIR --out FILE [--workers 0 1 2 4] [--prefetch 2 4] [--batch 64 128]

Every point of the grid is a run of the workload with those flags, measured over a window like all variants of
workloads.py; the five best are measured twice more, since the best of many is partly luck. Then `flatout fix` may
change the loader and the batch size and nothing else, and its plan is measured the same way, in turns with the grid's
best. Wanted: 97% of the best, in a tenth of the time. Flags after `--` go to every run.

Started again with the same FILE, it goes on with the points that are missing: a grid takes longer than some machines
are lent.
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
    options = parser.parse_args(own, argparse.Namespace(extra=extra))
    data = options.data.resolve() / f"{options.name}-{options.size}"
    make_data(options.name, options.size, data)
    common = ["--data", str(data), "--device", options.device, "--epochs", "1000000", *options.extra]
    with copied(()) as root:
        result = compare(root, options, common)
    written(options, result)
    best, found = result["best"], result["fix"]
    print(f"the grid's best, {best['flags']}: {best['samples_per_s']:,.0f} samples/s after {result['seconds']:.0f} s")
    print(f"found by fix: {found['samples_per_s']:,.0f} samples/s after {found['seconds']:.0f} s")
    print(f"{result['speed']:.0%} of the speed (goal: {WANTED_SPEED:.0%})")
    print(f"{result['time']:.0%} of the time (goal: {WANTED_TIME:.0%})")


def compare(root: Path, options: argparse.Namespace, common: list[str]) -> dict[str, Any]:
    def speed(flags: list[str], *through: str) -> float:
        figures = measure(root, options.name, [*common, *flags], options.seconds, through=through)
        return float(figures["samples_per_s"])

    def run_once_more(point: dict[str, Any]) -> None:
        start_s = time.monotonic()
        point["runs"].append(speed(point["flags"].split()))
        point["seconds"] += time.monotonic() - start_s
        written(options, {"points": points})

    points = known(options)
    for workers, prefetch, batch in itertools.product(options.workers, options.prefetch, options.batch):
        if not workers and prefetch != options.prefetch[0]:
            continue  # nobody loads ahead
        flags = f"--num-workers {workers} --prefetch {prefetch} --batch-size {batch}"
        flags += " --persistent-workers" if workers else ""
        if not any(point["flags"] == flags for point in points):
            points.append({"flags": flags, "runs": [], "seconds": 0.0})
            run_once_more(points[-1])
            print(f"{len(points):4}  {flags:80} {points[-1]['runs'][0]:10,.0f} samples/s", flush=True)
    best = sorted(points, key=lambda point: -point["runs"][0])[:BEST]
    for place, point in itertools.product(range(1, 1 + AGAIN), best):
        if len(point["runs"]) <= place:
            run_once_more(point)
    seconds = sum(point["seconds"] for point in points)
    chosen = max(best, key=lambda point: statistics.median(point["runs"]))
    with tempfile.TemporaryDirectory(prefix="fix-") as folder:
        plan = Path(folder, "plan.yaml")
        found = fix(root, options.name, common, plan, *WISHES, "--budget", options.budget)
        ours, theirs = [], []
        for _ in range(1 + AGAIN):
            ours.append(speed([], "--plan", str(plan)))
            theirs.append(speed(chosen["flags"].split()))
    fastest, mine = statistics.median(theirs), statistics.median(ours)
    return {
        "points": points,
        "seconds": seconds,
        "best": {"flags": chosen["flags"], "samples_per_s": fastest, "runs": theirs},
        "fix": {"samples_per_s": mine, "runs": ours, "seconds": found["wall_s"], "plan": found["plan"]},
        "speed": mine / fastest,
        "time": found["wall_s"] / seconds,
    }


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What a point's figure depends on beside its own flags."""
    names = ("name", "size", "seconds", "device", "extra")
    return {"machine": machine(), **{name: getattr(options, name) for name in names}}


def written(options: argparse.Namespace, result: dict[str, Any]) -> None:
    part = options.out.with_name(options.out.name + ".part")
    part.write_text(json.dumps({"asked": asked(options), **result}, indent=1) + "\n", encoding="utf-8")
    part.replace(options.out)


def known(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The points that an earlier start of this grid has measured."""
    if not options.out.exists():
        return []
    earlier = json.loads(options.out.read_text(encoding="utf-8"))
    if earlier.get("asked") != asked(options):
        sys.exit(f"{options.out} holds the figures of another grid, or of another machine: choose another file")
    points: list[dict[str, Any]] = earlier["points"]
    return [point for point in points if point["runs"]]


if __name__ == "__main__":
    main()
