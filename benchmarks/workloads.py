"""The five workloads before, at their ceiling and fixed by hand: the ground every later gain is counted from.

    python benchmarks/workloads.py gray stock --data DIR --size full --out results.json [--seconds 12] [-- FLAGS]

| variant        | the script as its author wrote it, and                                                  |
|----------------|-----------------------------------------------------------------------------------------|
| before         | nothing else                                                                            |
| before ceiling | fed from batches already on the device: what the GPU can do in these settings           |
| by hand        | the mistakes fixed: see fixed_by_hand.py                                                |
| by hand ceiling| that, fed from the device                                                               |
| supply         | the fixed loader alone, a worker for each core: what the cores can produce               |
| auto           | (with --auto) under `flatout run --auto`: no trials                                     |
| auto ceiling   | that, fed from the device                                                               |
| auto supply    | its loader drained by nobody                                                            |
| PyTorch's loader | (with --pytorch FLAGS) the script with these flags instead, in the same turns             |
| auto in turns  | (with --in-turns) under --auto, in one run, a second each: fed; from the device; that, |
|                | while as many samples are made beside it                                                |
| fix            | (with --fix BUDGET) with the plan that `flatout fix --allow all` has found by then      |
| fix ceiling    | that plan, fed from the device                                                          |
| fix supply     | that plan's loader drained by nobody                                                    |
| engine         | (with --engine) the same model and data in `flatout train`: see workloads/after         |
| engine ceiling | that, fed from the device                                                               |
| engine supply  | its loader drained by nobody                                                            |

Data that is missing is made first (and so lies in the page cache). Each variant is a process of its own, measured
over a window after a warm-up (see timed.py); the hardware is sampled from here. Flags after `--` go to every variant.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.fixed_by_hand import FIXES, WHOLE_EPOCH, Edit, Flags  # noqa: E402
from benchmarks.machine import describe  # noqa: E402
from flatout.sample.hardware import Sampler  # noqa: E402
from flatout.trace import Sample  # noqa: E402

CORES = len(os.sched_getaffinity(0))
SAMPLE_EVERY_S = 0.5
GRACE_S = 180  # for starting, compiling and warming up
KNOWN_VERSIONS = ("torch", "numpy", "pillow", "simplejpeg", "av", "pyarrow")


class Failed(Exception):
    """A variant did not come to its figures."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(FIXES), metavar="NAME", help=", ".join(FIXES))
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="where NAME-SIZE lies or will be made")
    parser.add_argument("--size", choices=["tiny", "small", "full"], default="full")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="figures of other workloads are kept")
    parser.add_argument("--seconds", type=float, default=12, help="a window lasts; ceilings and supply a third of it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-ceilings", action="store_true", help="of before and by hand")
    parser.add_argument("--no-script", action="store_true", help="neither before nor by hand")
    parser.add_argument("--auto", action="store_true", help="measure flatout run --auto too")
    parser.add_argument("--pytorch", metavar="FLAGS", help="measure the script with these flags beside --auto")
    parser.add_argument("--in-turns", action="store_true", help="measure it against its ceiling in one run, too")
    parser.add_argument("--fix", metavar="BUDGET", help="measure flatout fix too, such as 4m")
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="of auto, fix, engine and what each could do")
    parser.add_argument("--engine", nargs="*", metavar="KEY=VALUE", help="measure flatout train too, so set")
    own, extra = split_at_dashes(sys.argv[1:])
    options = parser.parse_args(own)

    results = load(options.out)
    failed = False
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), flush=True)
    for name in options.names:
        try:
            for known in benchmark(name, options, extra):
                results["workloads"][name] = known
                options.out.write_text(json.dumps(results, indent=1) + "\n")
        except Failed as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
        if name in results["workloads"]:
            print(table(name, results["workloads"][name]), flush=True)
    sys.exit(failed)


def benchmark(name: str, options: argparse.Namespace, extra: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What is known of one workload, after each variant that is asked for: a run that is cut off leaves the others."""
    data = options.data.resolve() / f"{name}-{options.size}"
    make_data(name, options.size, data)
    common = ["--data", str(data), "--device", options.device, "--epochs", "1000000", *extra]
    page: dict[str, Any] = {
        "size": options.size,
        "seconds": options.seconds,
        "extra_flags": list(extra),
        "fixes": [dataclasses.asdict(fix) for fix in FIXES[name]],
        "variants": {},
    }
    with copied(()) as before:
        for variant, measured in itertools.chain(
            script_variants(before, name, common, options) if not options.no_script else (),
            auto_variants(before, name, common, options) if options.auto else (),
            both_in_one_run(before, name, common, options) if options.in_turns else (),
            fix_variants(before, name, common, options, page) if options.fix is not None else (),
            engine_variants(before, name, data, options) if options.engine is not None else (),
        ):
            page["variants"][variant] = measured
            page["ratios"] = ratios(page["variants"])
            latest = measured.get("runs", [measured["samples_per_s"]])[-1]
            print(f"{name}, {variant}: {latest:,.0f} samples/s", flush=True)
            yield page


Measured = Iterator[tuple[str, dict[str, Any]]]
Kind = Callable[..., dict[str, Any]]  # a way to run a workload: (seconds, resident, supply) → figures


def script_variants(root: Path, name: str, common: Sequence[str], options: argparse.Namespace) -> Measured:
    """The script as it is and fixed by hand, and the ceilings of both."""
    long, short = options.seconds, options.seconds / 3
    changes = [fix.flags for fix in FIXES[name] if isinstance(fix, Flags)]
    flags = " ".join(changes).format(spare=max(1, CORES - 2)).split()
    yield "before", measure(root, name, common, long, epochs=1 if name in WHOLE_EPOCH else 0)
    with copied([(name, fix) for fix in FIXES[name] if isinstance(fix, Edit)]) as fixed:
        yield "by hand", measure(fixed, name, [*flags, *common], long)
        if not options.no_ceilings:
            drained = [*flags, "--num-workers", str(CORES), *common]
            yield "before ceiling", measure(root, name, ["--resident", *common], short)
            yield "by hand ceiling", measure(fixed, name, ["--resident", *flags, *common], short)
            yield "supply", measure(fixed, name, drained, short, supply=True)


def fix_variants(
    root: Path, name: str, flags: Sequence[str], options: argparse.Namespace, page: dict[str, Any]
) -> Measured:
    """`flatout fix` of the script as it is, and its plan measured like the others."""
    with tempfile.TemporaryDirectory(prefix="fix-") as folder:
        plan = Path(folder, "plan.yaml")
        html = options.out.resolve().with_name(f"{options.out.stem}-{name}.html")
        page["fix"] = fix(root, name, flags, plan, "--allow", "all", "--budget", options.fix, "--html", html)
        yield from in_turns("fix", through_run(root, name, flags, ["--plan", str(plan)]), options)


def through_run(root: Path, name: str, flags: Sequence[str], through: Sequence[str]) -> Kind:
    """The script under `flatout run` with these options, as it is asked for: resident, or its supply alone."""

    def run(seconds: float, resident: bool = False, supply: bool = False) -> dict[str, Any]:
        words = [*(["--resident"] if resident else []), *flags]
        return measure(root, name, words, seconds, through=through, supply=supply)

    return run


def auto_variants(root: Path, name: str, flags: Sequence[str], options: argparse.Namespace) -> Measured:
    """`flatout run --auto` of the script as it is, and PyTorch's loader as a person would set it."""
    by_hand = [*flags, *options.pytorch.split()] if options.pytorch is not None else None
    beside = {"PyTorch's loader": functools.partial(measure, root, name, by_hand)} if by_hand else {}
    return in_turns("auto", through_run(root, name, flags, ["--auto"]), options, beside)


def both_in_one_run(root: Path, name: str, flags: Sequence[str], options: argparse.Namespace) -> Measured:
    """`--auto` fed by its loader and from the device, in turns of a second: see timed.py."""
    yield "auto in turns", measure(root, name, flags, options.seconds, through=["--auto"], in_turns=True)


def in_turns(
    variant: str, run: Kind, options: argparse.Namespace, beside: Mapping[str, Kind] = MappingProxyType({})
) -> Measured:
    """A variant, its ceiling, what its loader can produce, and others, in turns: neighbours may slow one of them.

    Of several runs the one in the middle counts, and each turn is asked by itself what was possible.
    """
    runs: dict[str, list[dict[str, Any]]] = {variant: [], f"{variant} ceiling": [], f"{variant} supply": []}
    runs |= {which: [] for which in beside}
    for _ in range(options.turns):
        for which, measured in runs.items():
            if which in beside:
                measured.append(beside[which](options.seconds))
            else:
                seconds = options.seconds if which == variant else options.seconds / 3
                measured.append(run(seconds, resident=which.endswith("ceiling"), supply=which.endswith("supply")))
            speeds = [figures["samples_per_s"] for figures in measured]
            middle = measured[speeds.index(statistics.median_low(speeds))]
            outside_pauses = [figures["samples_per_s"] / (1 - figures.get("pause_share", 0)) for figures in measured]
            yield which, {**middle, "runs": speeds, "runs_outside_pauses": outside_pauses}


RATIOS = (
    ("before", "by hand"),
    ("before", "before ceiling"),
    ("by hand", "by hand ceiling"),
    ("supply", "by hand ceiling"),
    ("auto", "before"),
    ("auto", "PyTorch's loader"),
    ("fix", "before"),
    ("fix", "by hand"),
    ("engine", "by hand"),
    ("engine", "fix"),
)


def ratios(variants: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What the variants that were measured say about each other."""
    speed = {variant: figures["samples_per_s"] for variant, figures in variants.items()}
    found = {f"{one} / {other}": speed[one] / speed[other] for one, other in RATIOS if {one, other} <= speed.keys()}
    if "auto in turns" in variants:
        figures = variants["auto in turns"]
        found["auto / its ceiling, in turns"] = statistics.median(figures["shares"])
        found["auto / that with samples made beside it"] = statistics.median(figures["shares_beside"])
    for variant in ("auto", "fix", "engine"):
        if f"{variant} supply" in speed:
            three = (variant, f"{variant} ceiling", f"{variant} supply")
            turns = zip(*(variants[which]["runs_outside_pauses"] for which in three), strict=False)
            shares = [reached / min(ceiling, supply) for reached, ceiling, supply in turns]
            found[f"{variant} / min(its ceiling, supply)"] = statistics.median(shares)
    return found


def fix(root: Path, name: str, flags: Sequence[str], plan: Path, *wishes: str | Path) -> dict[str, Any]:
    """`flatout fix` of a workload, with a `python` on its path that is this one; what it found, and its plan."""
    told, python = plan.with_name("fix.json"), plan.with_name("python")
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    env = environment(root, ROOT / "src") | {"PATH": f"{plan.parent}{os.pathsep}{os.environ['PATH']}"}
    words = [
        "fix",
        "--unprotected",
        *wishes,
        "--out",
        plan,
        "--json",
        told,
        "--",
        *start(root, name),
        *flags,
        "--out",
        plan.parent / "run",
    ]
    start_s = time.monotonic()
    if code := subprocess.run([sys.executable, "-m", "flatout", *words], cwd=plan.parent, env=env).returncode:
        raise Failed(f"flatout fix ended with exit code {code}: flatout {shlex.join(map(str, words))}")
    return {**json.loads(told.read_text()), "wall_s": time.monotonic() - start_s, "plan": plan.read_text()}


def engine_variants(root: Path, name: str, data: Path, options: argparse.Namespace) -> Measured:
    """The workload in `flatout train`, at its ceiling, and what its loader can produce."""
    words = [root / "workloads" / "after" / f"{name}.yaml", f"data.args.root={data}", f"train.device={options.device}"]
    words += ["train.epochs=1000000", "log.quiet=true", *([f"model.args.root={data}"] if name == "stock" else [])]
    words += options.engine
    return in_turns("engine", functools.partial(measure, root, name, words, engine=True), options)


def make_data(name: str, size: str, data: Path) -> None:
    """Have the workload's own maker make its data, or find it made."""
    command = [sys.executable, "-m", f"workloads.{name}.make", "--size", size, "--out", str(data)]
    start = time.monotonic()
    if subprocess.run(command, cwd=ROOT, env=environment(ROOT)).returncode:
        raise Failed("its data could not be made")
    print(f"{name}: data at hand after {time.monotonic() - start:.1f} s", flush=True)


@contextlib.contextmanager
def copied(edits: Sequence[tuple[str, Edit]]) -> Iterator[Path]:
    """A copy of all workloads with these edits made: what runs is never the original."""
    with tempfile.TemporaryDirectory(prefix="workloads-") as folder:
        shutil.copytree(ROOT / "workloads", Path(folder, "workloads"), ignore=shutil.ignore_patterns("__pycache__"))
        for name, edit in edits:
            file = Path(folder, "workloads", name, edit.file)
            text = file.read_text()
            if text.count(edit.old) != 1:
                raise Failed(
                    f"{edit.file} holds {edit.old!r} {text.count(edit.old)} times, not once: correct fixed_by_hand.py"
                )
            file.write_text(text.replace(edit.old, edit.new))
        yield Path(folder)


def measure(
    root: Path,
    name: str,
    flags: Sequence[str | Path],
    seconds: float,
    *,
    epochs: int = 0,
    supply: bool = False,
    engine: bool = False,
    resident: bool = False,
    in_turns: bool = False,
    through: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one variant as a person would start it, with a `python` on its path that times it; then end its tree.

    `through`: options of the `flatout run` that it is started with.
    """
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        figures_file, log = Path(folder, "figures.json"), Path(folder, "log.txt")
        timed = [sys.executable, str(BENCHMARKS / "timed.py"), "--out", str(figures_file), "--seconds", str(seconds)]
        timed += ["--epochs", str(epochs), *(["--supply"] if supply else [])]
        timed += [*(["--resident"] if resident else []), *(["--in-turns"] if in_turns else []), "--"]
        python = Path(folder, "python")
        python.write_text(f'#!/bin/sh\nexec {shlex.join(timed)} "$@"\n')
        python.chmod(0o755)

        command = [*start(root, name), *flags, "--out", Path(folder, "run")]
        if engine:
            command = ["python", BENCHMARKS / "engine.py", *flags, f"out={Path(folder, 'run')}"]
        if through:
            run = ["run", *through, "--quiet", "--no-xray", "--trace", Path(folder, "trace"), "--"]
            command = [sys.executable, "-m", "flatout", *run, *command]
        env = environment(root, ROOT / "src") | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        with log.open("w") as output:
            child = subprocess.Popen(
                command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            samples = watch(child, deadline=time.monotonic() + seconds + 60 * epochs + GRACE_S)
        if not figures_file.exists():
            tail = "\n  ".join(log.read_text().strip().splitlines()[-8:])
            raise Failed(f"no figures (exit code {child.returncode}) from  {shlex.join(map(str, command))}\n  {tail}")
        found = summary(json.loads(figures_file.read_text()), samples)
        if engine:  # such as that it goes on eagerly
            found["said"] = [line for line in log.read_text().splitlines() if line.startswith("train.")]
        return found


def start(root: Path, name: str) -> list[str | Path]:
    """How a person starts this workload."""
    script = root / "workloads" / name
    return ["bash", script / "train.sh"] if (script / "train.sh").exists() else ["python", script / "train.py"]


def watch(child: subprocess.Popen[bytes], deadline: float) -> list[Sample]:
    """Sample the hardware until the child ends or its time is up; leave nothing of its process group behind."""
    samples = []
    try:
        with Sampler(pids=[child.pid]) as sampler:
            while child.poll() is None and time.monotonic() < deadline:
                samples.append(sampler.read())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(SAMPLE_EVERY_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return samples


def summary(figures: dict[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """The child's figures with its steps summed up, and the hardware's over the same window."""
    start_s, end_s = figures.pop("start_s"), figures.pop("end_s")
    step_ms = figures.pop("step_ms", None)
    inside = [sample for sample in samples if start_s + sample.interval_s <= sample.time_s <= end_s]
    figures |= {"window_s": end_s - start_s, **hardware_means(inside)}
    if step_ms:
        twentieths = statistics.quantiles(step_ms, n=20) if len(step_ms) > 1 else step_ms * 19
        figures |= {"steps": len(step_ms), "step_ms_median": statistics.median(step_ms)}
        figures |= {"step_ms_p25": twentieths[4], "step_ms_p75": twentieths[14], "step_ms_p95": twentieths[18]}
    return figures


def hardware_means(samples: Sequence[Sample]) -> dict[str, float | None]:
    """What the first GPU and the machine did on average; None where nothing could be read."""
    gpus = [sample.gpus[0] for sample in samples if sample.gpus]
    fields = ("gpu_util_pct", "sm_active_pct", "tensor_active_pct", "dram_active_pct", "power_w")
    means = {field: _mean([getattr(gpu, field) for gpu in gpus]) for field in fields}
    return means | {"cpu_pct": _mean([sample.host.cpu_pct for sample in samples]), "hardware_samples": len(samples)}


def environment(*roots: Path) -> dict[str, str]:
    """This environment, in which `import workloads` finds those at the first root, in whatever folder one is."""
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [*map(str, roots), *(str(Path(entry).resolve()) for entry in inherited)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def load(out: Path) -> dict[str, Any]:
    """The results file to add to. One file is one machine: figures of two do not belong side by side."""
    here = machine()
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return {"machine": here, "workloads": {}}
    results: dict[str, Any] = json.loads(out.read_text())
    if results["machine"] != here:
        sys.exit(f"{out} holds the figures of another machine: choose another file")
    return results


def machine() -> dict[str, Any]:
    """Where these figures come from."""
    return describe(KNOWN_VERSIONS)


COLUMNS = {
    "samples/s": ("samples_per_s", "{:.0f}"),
    "step ms": ("step_ms_median", "{:.2f}"),
    "p95": ("step_ms_p95", "{:.2f}"),
    "GPU-Util %": ("gpu_util_pct", "{:.0f}"),
    "SM active %": ("sm_active_pct", "{:.0f}"),
    "power W": ("power_w", "{:.0f}"),
    "data wait": ("data_wait_share", "{:.0%}"),
    "pauses": ("pause_share", "{:.0%}"),
    "GPU GB": ("peak_gpu_bytes", None),
    "steps": ("steps", "{:d}"),
}


def table(name: str, result: dict[str, Any]) -> str:
    """The figures of one workload as text."""
    rows = [[name, *COLUMNS]]
    for variant, figures in result["variants"].items():
        cells = []
        for field, form in COLUMNS.values():
            value = figures.get(field)
            cells.append("–" if value is None else form.format(value) if form else f"{value / 1e9:.2f}")
        rows.append([variant, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    ratios = "   ".join(f"{pair}: {value:.2f}" for pair, value in result["ratios"].items())
    return "\n".join(["", *lines, ratios])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def split_at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    main()
