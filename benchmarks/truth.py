"""Is what flatout says of a training true? Faults planted into public scripts and into the five of workloads/.

    python benchmarks/truth.py SCRIPTS --data DIR [--repeats 3] [--only NAME…] [--resume] [--device cpu] [--out FILE]
    python benchmarks/truth.py SCRIPTS --data DIR --bare                 the clock alone: does everything run?
    python benchmarks/truth.py SCRIPTS --data DIR --lanes 7 --out FILE   seven at once, on two cores each
    python benchmarks/truth.py SCRIPTS --data DIR --traces DIR --again --out FILE     kept recordings, by today's rules

SCRIPTS holds checkouts of the repositories of planted_scripts.py, as OWNER+NAME, at the commit named there; none of
their code is in this repository. What they import has to be installed (accelerate, datasets, evaluate, gymnasium,
lightning, matplotlib, pandas, pillow, requests, scipy, sentencepiece, six, tensorboard, transformers, tyro);
torchvision is replaced by a stand-in, and all data is made up. DIR is where the data of workloads/ is, or will be made.

The faults are those of planted.py, which was written before any of them was run. For each of them, in turns:

1. the script with the fault and without it, bare, on the clock of truth/clock.py: what the fault costs;
2. the script with the fault under `flatout run --json`: whether the verdict is the cause that is true, whether the
   planted function is named and its line (within one statement), and whether the gain that the finding promises holds
   the one measured.

Of a training without a fault, a finding that promises more than 1.1 times the speed is a false alarm. The machine has
to be otherwise idle: where others compute on its cores, that is the truth about every training (hardware.shared).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.diagnosis import company  # noqa: E402
from benchmarks.harmless import SETUP  # noqa: E402
from benchmarks.machine import describe, headline  # noqa: E402
from benchmarks.planted import FAULTS, HEALTHY  # noqa: E402
from benchmarks.planted_scripts import COMMITS, TRAININGS  # noqa: E402
from benchmarks.planting import Edit, Fault, Place, Training, plant, statements_apart  # noqa: E402

PACKAGES = ("torch", "numpy", "lightning", "transformers", "accelerate", "datasets", "gymnasium", "flatout")
TOOLS = Path(__file__).with_name("truth")
WITHIN_S = 300
ALARM = 1.1  # times the speed
NOISE = 0.05  # a gain is held when it is this near to the promised range
HOT_LINES = 5  # of a list of hot lines, those that a person looks at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, metavar="SCRIPTS")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="faults, healthy trainings, or causes")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--bare", action="store_true", help="without flatout")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the steps, to try things out")
    parser.add_argument("--lanes", type=int, metavar="N", help="N at once, each on two cores of its own (CPU)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the results as JSON, written after each fault")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="keep the recordings")
    parser.add_argument("--again", action="store_true", help="judge the recordings in --traces by the rules of today")
    options = parser.parse_args()
    if options.lanes:
        in_lanes(options)
        return
    machine = describe(PACKAGES)
    print(headline(machine), flush=True)
    if os.getloadavg()[0] > 0.5:
        print(f"not idle: load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if options.again:
        judge_again(options)
        return
    results: dict[str, dict[str, Any]] = {}
    if options.resume and options.out is not None and options.out.exists():
        results = {r["name"]: r for r in json.loads(options.out.read_text(encoding="utf-8"))["results"]}
    for fault in wanted(options):
        name = name_of(fault)
        if name in results:
            continue
        try:
            result = tried(fault, options) if isinstance(fault, Fault) else tried_healthy(fault, options)
        except Failed as problem:
            result = {"problem": str(problem)}
        results[name] = {"name": name, **about(fault), **result}
        print(line_of(results[name]), flush=True)
        if options.out is not None:
            save(options, machine, list(results.values()))
    if not options.bare:
        print("\n" + "\n".join(table(list(results.values()))))


def save(options: argparse.Namespace, machine: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write what there is so far."""
    figures = {"benchmark": "truth", "machine": machine, "device": options.device, "n": options.repeats,
               "results": results}  # fmt: skip
    options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def in_lanes(options: argparse.Namespace) -> None:
    """Several at once, each on a pair of cores that is its alone; then one table."""
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= 2 * options.lanes, f"{options.lanes} lanes need {2 * options.lanes} cores"
    pairs: queue.Queue[str] = queue.Queue()
    for lane in range(options.lanes):
        pairs.put(f"{cores[2 * lane]},{cores[2 * lane + 1]}")
    machine, results = describe(PACKAGES) | {"lanes": options.lanes}, list[dict[str, Any]]()

    def try_one(one: Fault | Training) -> list[dict[str, Any]]:
        pair = pairs.get()
        out = options.out.with_suffix(f".{pair.partition(',')[0]}.json")
        out.unlink(missing_ok=True)
        command = ["taskset", "-c", pair, sys.executable, __file__, str(options.scripts), "--data", str(options.data),
                   "--repeats", str(options.repeats), "--fraction", str(options.fraction), "--only", name_of(one),
                   "--out", str(out), *(["--traces", str(options.traces)] if options.traces else [])]  # fmt: skip
        # Of a machine with a GPU too: this is about the processor.
        run = subprocess.run(command, capture_output=True, text=True, check=False,
                             env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
        pairs.put(pair)
        if out.exists():
            return list(json.loads(out.read_text(encoding="utf-8"))["results"])
        return [{"name": name_of(one), **about(one), "problem": tail(run.stdout + run.stderr)}]

    with concurrent.futures.ThreadPoolExecutor(options.lanes) as pool:
        list(pool.map(functools.partial(_workload_data, folder=options.data), data_of(wanted(options))))
        for run in concurrent.futures.as_completed([pool.submit(try_one, one) for one in wanted(options)]):
            results += run.result()
            print(line_of(results[-1]), flush=True)
            save(options, machine, results)
    print("\n" + "\n".join(table(results)))


def judge_again(options: argparse.Namespace) -> None:
    """What the rules of today say of the recordings that were kept; the clock's figures stay what they were."""
    figures = json.loads(options.out.read_text(encoding="utf-8"))
    known = {name_of(one): one for one in (*FAULTS, *TRAININGS.values())}
    for result in figures["results"]:
        one = known[result["name"]]
        fault = one if isinstance(one, Fault) else None
        training = TRAININGS[fault.training] if fault else one
        for number, before in enumerate(result.get("reports", [])):
            with laid_out(training, options, (fault.edits,) if fault else (), (), fault) as place:
                trace, told = kept_trace(options, result["name"], number), place.folder / "report.json"
                said = place.run([sys.executable, "-m", "flatout", "report", str(trace), "--json", str(told)], {})
                if not told.exists():
                    raise Failed(f"{result['name']}: {tail(said)}")
                text = told.read_text(encoding="utf-8").replace(before["folder"], str(place.folder))
                report = json.loads(text)
                report["findings"] = report.get("findings") or []
                now = judged(report, fault, place.places) if fault else judged_healthy(report)
            if fault:
                now["gain_held"] = holds(now["promised"], result["gain"], result["step_ms"])
            result["reports"][number] = now | {"folder": before["folder"]}
        print(line_of(result), flush=True)
    options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n" + "\n".join(table(figures["results"])))


def name_of(one: Fault | Training) -> str:
    """What a result is called."""
    return one.name if isinstance(one, Fault) else f"healthy: {one.name}"


def kept_trace(options: argparse.Namespace, name: str, number: int) -> Path:
    """Where the recording of a run is kept."""
    return Path(options.traces, f"{re.sub('[^A-Za-z0-9]+', '-', name)}-{number}").resolve()


def wanted(options: argparse.Namespace) -> Iterator[Fault | Training]:
    """The faults that this machine can show, then the trainings without one."""
    on_gpu = options.device == "cuda"
    for fault in FAULTS:
        elsewhere = not fault.gpu and (fault.cpu_only or TRAININGS[fault.training].cpu_only) if on_gpu else fault.gpu
        if not elsewhere and (not options.only or {fault.name, fault.code} & set(options.only)):
            yield fault
    for name in HEALTHY:
        if not options.only or {name, f"healthy: {name}", "healthy"} & set(options.only):
            yield TRAININGS[name]


def data_of(some: Iterable[Fault | Training]) -> set[str]:
    """The data of workloads/ that these need."""
    needed = {one.data or (TRAININGS[one.training].data if isinstance(one, Fault) else "") for one in some}
    return needed - {""}


class Failed(Exception):
    """A run that gave no figures; the message says why."""


# --- one fault --------------------------------------------------------------------------------------------------------


def about(fault: Fault | Training) -> dict[str, Any]:
    """What was stated beforehand."""
    training = TRAININGS[fault.training] if isinstance(fault, Fault) else fault
    of_script = {"training": training.name, "kind": training.kind, "repo": training.repo or "this one",
                 "commit": COMMITS.get(training.repo), "path": training.path, "ranks": training.ranks}  # fmt: skip
    if isinstance(fault, Training):
        return of_script | {"code": None}
    return of_script | {"what": fault.what, "code": fault.code, "also": list(fault.also), "function": fault.function}


def tried(fault: Fault, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides on the clock, and what flatout says of the one with the fault, as often as was asked for."""
    training = TRAININGS[fault.training]
    steps = max(int((fault.steps or training.steps) * options.fraction), 8)
    times: dict[str, list[float]] = {"with": [], "without": []}
    starts, reports, marked = [], [], []
    for number in range(options.repeats):
        with laid_out(training, options, (fault.edits,), (fault.prepare,), fault) as bare:
            with company(fault.beside):
                told = clocked(bare, [*bare.flags, *fault.flags], fault.broken, steps)
            marked = [f"{place.file.name}:{place.line} {place.function}" for place in bare.places]
            starts.append(told["start_s"])
            times["with"].append(told["seconds"] / told["steps"])
        with laid_out(training, options, (fault.cure_edits,), (fault.cure_prepare,), fault) as cured:
            told = clocked(cured, [*cured.flags, *fault.cure_flags], {}, steps)
            times["without"].append(told["seconds"] / told["steps"])
        if not options.bare:
            with laid_out(training, options, (fault.edits,), (fault.prepare,), fault) as ours, company(fault.beside):
                report = reported(ours, [*ours.flags, *fault.flags], fault.broken, steps)
                reports.append(judged(report, fault, ours.places))
                reports[-1] |= kept(ours, options, fault.name, number)
    gain = statistics.median(times["with"]) / statistics.median(times["without"]) * fault.work
    for report in reports:
        report["gain_held"] = holds(report["promised"], gain, times)
    return {
        "steps": steps,
        "start_s": round(statistics.median(starts), 1),
        "step_ms": {side: [round(1e3 * value, 2) for value in values] for side, values in times.items()},
        "gain": round(gain, 3),
        "marked": marked,
        "load": os.getloadavg()[0],
        "reports": reports,
    }


def tried_healthy(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    """What flatout finds where nothing was planted."""
    reports = []
    steps = max(int(training.steps * options.fraction), 8)
    for number in range(options.repeats):
        with laid_out(training, options, (), ()) as ours:
            if options.bare:
                told = clocked(ours, ours.flags, {}, steps)
                return {"steps": steps, "start_s": round(told["start_s"], 1), "reports": [],
                        "step_ms": {"without": [round(1e3 * told["seconds"] / told["steps"], 2)]}}  # fmt: skip
            report = reported(ours, ours.flags, {}, steps)
            reports.append(judged_healthy(report) | kept(ours, options, name_of(training), number))
    return {"steps": steps, "load": os.getloadavg()[0], "reports": reports}


def kept(training: laid_out, options: argparse.Namespace, name: str, number: int) -> dict[str, Any]:
    """Keep the recording of a run, if that was asked for; where the script lay is in it."""
    if options.traces is None:
        return {}
    shutil.copytree(training.folder / "trace", kept_trace(options, name, number), dirs_exist_ok=True)
    return {"folder": str(training.folder)}


def holds(promised: Sequence[float] | None, gain: float, times: dict[str, list[float]]) -> bool:
    """Whether the measured gain lies in the promised range, as far as runs differ."""
    if promised is None:
        return False
    apart = max((max(values) / min(values) - 1 for values in times.values() if len(values) > 1), default=0.0)
    slack = 1 + max(NOISE, apart / 2)
    return promised[0] / slack <= gain <= promised[1] * slack


# --- reading a report -------------------------------------------------------------------------------------------------


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """What of a report is kept."""
    keys = ("code", "title", "share", "gain_low", "gain_high", "where")
    kept = [{key: finding.get(key) for key in keys} for finding in report["findings"][:6]]
    return {"verdict": report.get("verdict"), "steps": report.get("facts", {}).get("steps"), "findings": kept}


def judged(report: dict[str, Any], fault: Fault, places: Sequence[Place]) -> dict[str, Any]:
    """What it says of the fault."""
    right = {fault.code, *fault.also}
    finding = next((f for f in report["findings"] if f["code"] in right), None)
    said = list(said_places(report))
    return summary(report) | {
        "right": report.get("verdict") in right,
        "among": finding is not None,
        "named": any(names(one, place) for one in said for place in places) if places else None,
        "line": any(near(one, place) for one in said for place in places) if places else None,
        "said": [f"{Path(one.file).name}:{one.line}" for one in said[:8]],
        "promised": [finding["gain_low"], finding["gain_high"]] if finding is not None else None,
    }


def judged_healthy(report: dict[str, Any]) -> dict[str, Any]:
    """What it says where nothing was planted."""
    return summary(report) | {"alarms": [f["code"] for f in report["findings"] if promise(f) > ALARM]}


def promise(finding: dict[str, Any]) -> float:
    """The middle of what is promised."""
    return math.sqrt(max(finding["gain_low"], 0) * max(finding["gain_high"], 0))


@dataclass(frozen=True, kw_only=True)
class Said:
    """A place that a report names."""

    file: str
    line: int | None
    function: str | None = None


def said_places(report: dict[str, Any]) -> Iterator[Said]:
    """Where the findings point to, and the first of the hot lines, in whatever form the report has them."""
    for finding in report["findings"]:
        yield from _places_in(finding.get("where"))
        yield from _places_in(finding.get("lines"))
        yield from _places_in((finding.get("evidence") or {}).get("lines"))
    yield from _places_in(report.get("lines"))
    yield from _places_in(report.get("account"))


def _places_in(value: Any) -> Iterator[Said]:
    if isinstance(value, str):
        file, _, line = value.partition(" ")[0].rpartition(":")  # of "train.py:32 f_score → numpy.sum"
        if file and line.isdigit():
            yield Said(file=file, line=int(line))
    elif isinstance(value, list):
        for one in value[:HOT_LINES]:
            yield from _places_in(one)
    elif isinstance(value, dict):
        file, line = value.get("file") or value.get("path"), value.get("line")
        if isinstance(file, str):
            yield Said(file=file, line=line if isinstance(line, int) else None, function=value.get("function"))
        for key in ("where", "lines", "causes", "parts", "phases"):
            yield from _places_in(value.get(key))


def names(said: Said, place: Place) -> bool:
    """Whether that is in the planted function; in a script's main part, whether it is near the planted line."""
    if place.function == "<module>":
        return near(said, place)
    inside = said.line is not None and place.first <= said.line <= place.last
    return _same_file(said, place) and (inside or said.function == place.function)


def near(said: Said, place: Place) -> bool:
    """Whether that is the planted line, or a statement beside it."""
    return _same_file(said, place) and said.line is not None and statements_apart(place.file, said.line, place.line) < 2


def _same_file(said: Said, place: Place) -> bool:
    parts = Path(said.file).parts
    return place.file.parts[-min(len(parts), len(place.file.parts)) :] == parts or place.file == Path(said.file)


# --- running ----------------------------------------------------------------------------------------------------------


class laid_out:
    """A copy of a training with its edits and its data, in a folder that goes away."""

    def __init__(
        self,
        training: Training,
        options: argparse.Namespace,
        edits: Iterable[Sequence[Edit]],
        makers: Iterable[Any],
        fault: Fault | None = None,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="truth-", ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name)
        self.training = training
        self.on_gpu = options.device == "cuda"
        self.script = _copy(training, options.scripts, self.folder / "repo")
        training.prepare(self.script.parent)
        for make in makers:
            make(self.script.parent)
        plant(self.script, training.edits)
        self.places = [place for some in edits for place in plant(self.script, some)]
        self.flags = [*training.flags, *(training.gpu_flags if self.on_gpu else ())]
        self.environment = training.environment | (fault.environment if fault else {})
        data = (fault.data if fault else "") or training.data
        if data:
            self.flags = ["--data", str(_workload_data(data, options.data)), *self.flags]

    def __enter__(self) -> laid_out:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def run(self, command: Sequence[str], environment: dict[str, str]) -> str:
        """Run it to its end, or for five minutes; what it said last."""
        process = subprocess.Popen(command, cwd=self.script.parent, env=self.environment_of() | environment,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, errors="replace", start_new_session=True)  # fmt: skip
        try:
            return process.communicate(timeout=WITHIN_S)[0][-1500:]
        except subprocess.TimeoutExpired:
            return f"not done within {WITHIN_S} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # workers that the clock left behind
            except ProcessLookupError:
                pass
            process.wait()

    def command(self, *before: str) -> list[str]:
        """What a person types, with `before` between Python and the script."""
        if self.training.ranks > 1:
            ranks = str(self.training.ranks)
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            return [sys.executable, *launcher, *before, self.script.name]
        return [sys.executable, *before, self.script.name]

    def environment_of(self) -> dict[str, str]:
        inner = self.folder / "repo"
        # The stand-in is a library, as what it stands for: its lines are not the user's.
        libraries = [TOOLS / "site-packages"] if self.training.stand_in else []
        paths = [inner, *libraries, ROOT / "src", os.environ.get("PYTHONPATH")]
        (self.folder / "tmp").mkdir(exist_ok=True)
        setup = {key: value for key, value in SETUP.items() if key != "OMP_NUM_THREADS" or not self.on_gpu}
        return {
            **os.environ,
            **setup,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "HF_HOME": str(self.folder / "huggingface"),
            "TMPDIR": str(self.folder / "tmp"),
            **self.environment,
        }


def _copy(training: Training, scripts: Path, target: Path) -> Path:
    """The script of a training, in a copy of its repository."""
    unwanted = shutil.ignore_patterns(".git", "__pycache__")
    if not training.repo:
        shutil.copytree(ROOT / "workloads", target / "workloads", ignore=unwanted)
        return target / "workloads" / training.path
    source = scripts / training.repo.replace("/", "+")
    if not (source / training.path).exists():
        raise Failed(f"{training.path} of {training.repo} is not among the checkouts")
    shutil.copytree(source / training.within, target / training.within, ignore=unwanted)
    return target / training.path


def _workload_data(data: str, folder: Path) -> Path:
    """The data of a workload, made the first time."""
    name, size = data.split()
    place = folder.resolve() / f"{name}-{size}"
    if not (place / "dataset.json").exists():
        make = [sys.executable, "-m", f"workloads.{name}.make", "--size", size, "--out", str(place)]
        subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return place


def clocked(training: laid_out, flags: Sequence[str], broken: dict[str, str], steps: int) -> dict[str, Any]:
    """The script on the benchmark's own clock."""
    told = training.folder / "clock.json"
    clock = {"CLOCK": str(told), "CLOCK_STEPS": str(steps)}
    said = training.run([*training.command(str(TOOLS / "clock.py")), *flags], broken | clock)
    if not told.exists():
        raise Failed(f"bare: {tail(said)}")
    found: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    if found["steps"] < 1:
        raise Failed(f"bare: it ended after a step: {tail(said)}")
    return found


def reported(training: laid_out, flags: Sequence[str], broken: dict[str, str], steps: int) -> dict[str, Any]:
    """The script under `flatout run`: its report."""
    told, trace = training.folder / "report.json", training.folder / "trace"
    ours = [sys.executable, "-m", "flatout"]
    run = ["run", "--quiet", "--trace", str(trace), "--json", str(told), "--max-steps", str(steps), "--"]
    said = training.run([*ours, *run, *training.command(), *flags], broken)
    if not told.exists() and trace.exists():
        said += training.run([*ours, "report", str(trace), "--json", str(told)], {})
    if not told.exists():
        raise Failed(f"flatout: {tail(said)}")
    found: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    return found | {"findings": found.get("findings") or []}


def tail(said: str) -> str:
    """The end of what a run said, on a line."""
    return " ".join(said.split())[-400:]


# --- telling ----------------------------------------------------------------------------------------------------------


def line_of(result: dict[str, Any]) -> str:
    """One result on a line."""
    if "problem" in result:
        return f"? {result['name']}: {result['problem']}"
    took = ", ".join(f"{statistics.median(ms):.4g} ms {side}" for side, ms in result.get("step_ms", {}).items())
    clock = f"{took}, start {result['start_s']} s" if took else ""
    if result["code"] is None:
        alarms = sorted({code for report in result["reports"] for code in report["alarms"]})
        verdicts = ", ".join(str(report["verdict"]) for report in result["reports"])
        return f"{'✗' if alarms else '✓'} {result['name']}: {verdicts} {clock} {' '.join(alarms)}"
    told = []
    for report in result["reports"]:
        promised = "–".join(f"{end:.2f}" for end in report["promised"]) if report["promised"] else "nothing"
        told.append(f"{report['verdict']} (function {mark(report['named'])}, line {mark(report['line'])}, "
                    f"promised {promised} {mark(report['gain_held'])})")  # fmt: skip
    right = mark(all(report["right"] for report in result["reports"])) if told else ""
    return f"{right} {result['name']} [{result['code']}]: gain {result['gain']:.2f} ({clock}) {'; '.join(told)}"


def mark(value: bool | None) -> str:
    """As it is printed."""
    return "·" if value is None else "✓" if value else "✗"


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """How often it was right, a line a family of causes; of all repeats."""
    yield "| family | runs | verdict | function | line | gain |"
    yield "|---|---|---|---|---|---|"
    faults = [r for r in results if r["code"] is not None]
    families = [*dict.fromkeys(r["code"].partition(".")[0] for r in faults)]
    for family in [*families, None]:
        some = [r for r in faults if family in (None, r["code"].partition(".")[0])]
        runs = [report for r in some for report in r.get("reports", [])]
        cells = [_share(runs, key) for key in ("right", "named", "line", "gain_held")]
        yield f"| {family or 'all'} | {len(runs)} | {' | '.join(cells)} |"
    healthy = [report for r in results if r["code"] is None for report in r.get("reports", [])]
    quiet = sum(not report["alarms"] for report in healthy)
    yield ""
    yield f"no false alarm in {quiet} of {len(healthy)} healthy runs"
    broken = [r["name"] for r in results if "problem" in r]
    if broken:
        yield f"without figures: {', '.join(broken)}"


def _share(runs: list[dict[str, Any]], key: str) -> str:
    asked = [report[key] for report in runs if report[key] is not None]
    return f"{sum(asked)} of {len(asked)}" if asked else ""


if __name__ == "__main__":
    main()
