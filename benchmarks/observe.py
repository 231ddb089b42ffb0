"""What watching costs, and whether what is seen is true.

    python benchmarks/observe.py top [--out FILE]     about 100 s with a GPU, 40 s without

Cost: `flatout top` at 1 Hz beside a training with 40 loader workers, and `nvidia-smi dmon` in the same run: CPU time
(user and system, of all threads, from /proc/PID/task/*/schedstat) in per cent of one core.

Truth (with a GPU): what `flatout top` reports of loads whose effect is known: nothing, matrix products back to back,
tiny kernels back to back, and a load that goes on and off every four seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.loads import running  # noqa: E402
from benchmarks.machine import describe, figure, headline  # noqa: E402
from flatout import trace  # noqa: E402

WINDOW_S = 3.0
WARM_UP_S = 4.0
PERIOD_S = 4.0

Check = tuple[str, bool]

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["top"])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--workers", type=int, default=40, metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the cost is measured")
    options = parser.parse_args()
    machine = describe()
    print(headline(machine))
    results: dict[str, Any] = {"benchmark": "observe top", "machine": machine}
    with tempfile.TemporaryDirectory() as folder:
        results["cost"] = cost(options.workers, options.seconds, Path(folder))
        if machine["gpu"] is not None:
            results["truth"] = truth(Path(folder))
    checks = [*cost_checks(results["cost"]), *truth_checks(results.get("truth", {}))]
    results["checks"] = dict(checks)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for text, passed in checks:
        print(f"{'✓' if passed else '✗'} {text}")
    sys.exit(0 if all(passed for _, passed in checks) else 1)


def cost(workers: int, seconds: float, folder: Path) -> dict[str, Any]:
    """CPU time of the watchers while a training with many workers runs."""
    summary = folder / "cost.json"
    watchers = {"flatout top": flatout("top", "--interval", "1", "--json", str(summary))}
    if shutil.which("nvidia-smi"):
        watchers["nvidia-smi dmon"] = ["nvidia-smi", "dmon", "-d", "1"]
    with running("train", "--workers", str(workers)) as load:
        started = {
            name: subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
            for name, command in watchers.items()
        }
        try:
            time.sleep(WARM_UP_S)
            shares = cpu_shares({name: child.pid for name, child in started.items()}, seconds)
        finally:
            for child in started.values():
                child.send_signal(signal.SIGINT)
            for child in started.values():
                end(child)
    seen = json.loads(summary.read_text())["host"].get("workers", {}).get("p50")
    result: dict[str, Any] = {"workers": workers, "workers_seen": seen, "steps": load.get("steps"), "interval_s": 1.0}
    for name, values in shares.items():
        result[name] = {"mean_pct_of_a_core": round(sum(values) / len(values), 4)} | figure(values)
        print(f"{name}, 1 Hz, {workers} workers: {result[name]} (% of a core, windows of {WINDOW_S:g} s)")
    return result


def end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def cpu_shares(pids: dict[str, int], seconds: float) -> dict[str, list[float]]:
    """Per cent of a core that each process used, window by window."""
    shares: dict[str, list[float]] = {name: [] for name in pids}
    before = {name: cpu_ns(pid) for name, pid in pids.items()}
    start_s = last_s = time.monotonic()
    while last_s - start_s < seconds:
        time.sleep(WINDOW_S)
        now_s = time.monotonic()
        for name, pid in pids.items():
            now = cpu_ns(pid)
            shares[name].append((now - before[name]) / (now_s - last_s) / 1e7)
            before[name] = now
        last_s = now_s
    return shares


def cpu_ns(pid: int) -> int:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def cost_checks(result: dict[str, Any]) -> list[Check]:
    used = result["flatout top"]["mean_pct_of_a_core"]
    return [
        (f"flatout top saw {result['workers_seen']} of {result['workers']} workers", sees_all(result)),
        (f"flatout top at 1 Hz: {used:.2f}% of a core (goal: below 0.5)", used < 0.5),
    ]


def sees_all(result: dict[str, Any]) -> bool:
    return result["workers_seen"] is not None and abs(result["workers_seen"] / result["workers"] - 1) < 0.02


def truth(folder: Path) -> dict[str, Any]:
    """What is reported of loads whose effect is known."""
    found: dict[str, Any] = {"idle": watch(folder / "idle", seconds=4)[0]}
    if found["idle"]["sm_active_pct"] is None:
        print("this GPU has no GPM counters: there is no truth to check")
        return {}
    for name in ("matmul", "tiny"):
        with running(name):
            time.sleep(2)
            found[name] = watch(folder / name, seconds=5)[0]
    with running("switched", "--period", str(PERIOD_S)) as load:
        found["switched"], window_s = watch(folder / "switched", seconds=5 * PERIOD_S)
    found["switched"]["true_fluctuation"] = round(
        true_fluctuation(load["on_s"], window_s, full_pct=found["matmul"]["sm_active_pct"]), 3
    )
    for name, figures in found.items():
        print(f"{name}: {figures}")
    return found


def watch(folder: Path, *, seconds: float) -> tuple[dict[str, Any], tuple[float, float]]:
    """`flatout top` for so long: its figures of the first GPU, and from when to when it looked."""
    out = folder.with_suffix(".json")
    options = ("--interval", "0.5", "--duration", f"{seconds:g}", "--gpu", "0", "--record", str(folder))
    command = flatout("top", *options, "--json", str(out))
    subprocess.run(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT, check=True)
    gpu = json.loads(out.read_text())["gpus"][0]
    [samples] = trace.read(folder).samples.values()
    names = ("gpu_util_pct", "sm_active_pct", "tensor_active_pct", "power_w")
    figures = {name: gpu.get(name, {}).get("mean") for name in names}
    figures |= {"fluctuation": gpu["fluctuation_pct"], "verdict": gpu["verdict"]["word"], "samples": len(samples)}
    return figures, (samples[0].time_s - samples[0].interval_s, samples[-1].time_s)


def true_fluctuation(on_s: list[list[float]], window_s: tuple[float, float], full_pct: float) -> float:
    """The standard deviation of a GPU that is at `full_pct` while the load is on, and at 0 while it is off."""
    start_s, end_s = window_s
    on = sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in on_s) / (end_s - start_s)
    return full_pct * math.sqrt(on * (1 - on))


def truth_checks(found: dict[str, Any]) -> list[Check]:
    if not found:
        return []
    idle, matmul, tiny, switched = (found[name] for name in ("idle", "matmul", "tiny", "switched"))
    off = abs(switched["fluctuation"] / switched["true_fluctuation"] - 1)
    return [
        (f"idle: SM active {idle['sm_active_pct']:.1f} (goal: 0)", idle["sm_active_pct"] < 1),
        (f"matmul: SM active {matmul['sm_active_pct']:.1f} (goal: above 75)", matmul["sm_active_pct"] > 75),
        (f"matmul: tensor active {matmul['tensor_active_pct']:.1f} (above 60)", matmul["tensor_active_pct"] > 60),
        (f"tiny kernels: GPU-Util {tiny['gpu_util_pct']:.0f} (above 90)", tiny["gpu_util_pct"] > 90),
        (f"tiny kernels: SM active {tiny['sm_active_pct']:.1f} (below 15)", tiny["sm_active_pct"] < 15),
        (f"tiny kernels: verdict {tiny['verdict']}", tiny["verdict"] == "busy but wasteful"),
        (
            f"on and off: fluctuation {switched['fluctuation']:.1f}, in truth {switched['true_fluctuation']:.1f} "
            f"({off:.1%} off; wanted: within 10%)",
            off <= 0.10,
        ),
    ]


def flatout(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flatout", *arguments]


if __name__ == "__main__":
    main()
