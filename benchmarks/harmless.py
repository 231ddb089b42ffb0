"""Does flatout leave a training as it is? Public scripts, bare and under `flatout run`, on a CPU.

    python benchmarks/harmless.py SCRIPTS [--only NAME…] [--resume] [--out FILE]        about an hour on two cores

SCRIPTS holds checkouts of the repositories below, as OWNER+NAME, at the commit named there; none of their code is in
this repository. What they import has to be installed; their data is made up, in the files and formats they ask for.
A few are shortened by an edit of a number.

Each script runs twice bare, then under `flatout run`, and where it has a DataLoader under `--auto --strict` and
`--auto`. Compared are the exit code, the standard output, the files that are there afterwards by name and bytes, and a
hash of the weights, of the optimizers' state and of the generators of random numbers (`witness.py`). What differs
between bare runs is no difference: times, file names with a date, logs that hold a time. How much of the output and
which files that leaves out is in the JSON. Where a run under flatout seems to differ, up to two more bare runs are made
to see whether they differ there too. `--auto` alone may take flatout's workers where there were none, and says that
samples then draw other random numbers: of such a run only the exit code and the number of steps are compared.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.examples import COMMITS, EXAMPLES, WITNESS, Example  # noqa: E402
from benchmarks.machine import describe, headline  # noqa: E402

HASHES = ("steps", "weights", "optimizer state", "random numbers")
WITHIN_S = 400
BARE_RUNS = 4  # at most
SETUP = {
    "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg",
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "120", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
UNDER = {"run": (), "strict": ("--auto", "--strict"), "auto": ("--auto",)}
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_TIMES = re.compile(
    r"\d+:\d\d(?::\d\d)?(?:\.\d+)?"  # of day, or left
    r"|\d+(?:\.\d+)?(?= ?(?:s|ms|sec|secs|seconds|min|it/s|s/it|samples/s)\b)"
    r"|(?<=SPS: )\d+|(?<=ms/batch )\s*\d+\.\d+"
    r"|(?<=runtime)['\"]?\s*[=:]\s*\S+|(?<=per_second)['\"]?\s*[=:]\s*\S+"
)


# Where torchvision has no operators for this torch: they are declared, and the rest of torchvision is itself.
OPERATORS = """
import importlib.machinery, pathlib, sys
import torch

_library = torch.library.Library("torchvision", "FRAGMENT")
for _name, _results in (
    ("nms", 1), ("qnms", 1), ("roi_align", 1), ("_roi_align_backward", 1), ("qroi_align", 1), ("ps_roi_align", 2),
    ("_ps_roi_align_backward", 1), ("roi_pool", 2), ("_roi_pool_backward", 1), ("ps_roi_pool", 2),
    ("_ps_roi_pool_backward", 1), ("deform_conv2d", 1), ("_deform_conv2d_backward", 5),
):
    _library.define(f"{_name}(Tensor input) -> ({', '.join(['Tensor'] * _results)})")
_here = str(pathlib.Path(__file__).parents[1])
__spec__ = importlib.machinery.PathFinder.find_spec("torchvision", [path for path in sys.path if path != _here])
__file__, __path__ = __spec__.origin, list(__spec__.submodule_search_locations)
exec(compile(pathlib.Path(__file__).read_text(), __file__, "exec"))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, metavar="SCRIPTS")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave what the runs wrote here")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the results as JSON, written after each script")
    options = parser.parse_args()
    machine = describe(("torch", "numpy", "torchvision", "lightning", "transformers", "accelerate", "timm"))
    print(headline(machine))
    results = {}
    if options.out is not None and options.out.exists():
        results = {r["script"]: r for r in json.loads(options.out.read_text(encoding="utf-8"))["results"]}
    with tempfile.TemporaryDirectory(prefix="standin-") as folder:
        have_torchvision(Path(folder))
        for example in EXAMPLES:
            if options.only and example.name not in options.only:
                continue
            if options.resume and example.name in results:
                continue
            result = results[example.name] = try_out(example, options.scripts, options.keep)
            print(line_of(result), flush=True)
            if options.out is not None:
                known = [results[one.name] for one in EXAMPLES if one.name in results]
                figures = {"benchmark": "harmless", "machine": machine, "environment": SETUP, "results": known}
                options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(table(list(results.values()))))


def line_of(result: dict[str, Any]) -> str:
    """One result on a line."""
    said = []
    for how, run in result["runs"].items():
        same = "same" if run["same_bits"] else "reseeded"
        said.append(f"{how}: {', '.join(run['differs']) or same}")
    return f"{'✓' if is_same(result) else '✗'} {result['script']} ({result['kind']}), {'; '.join(said)}"


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """For the documentation: how many scripts of each kind stay as they are, under each form of `flatout run`."""
    yield "| kind | scripts | `run` | `run --auto --strict` | `run --auto` |"
    yield "|---|---|---|---|---|"
    for kind in [*dict.fromkeys(result["kind"] for result in results), None]:
        of_kind = [result for result in results if kind in (result["kind"], None)]
        cells = []
        for how in UNDER:
            runs = [result["runs"][how] for result in of_kind if how in result["runs"]]
            other = sum(run["reseeded"] and not run["same_bits"] for run in runs)
            note = f", {other} of them reseeded" if other else ""
            cells.append(f"{sum(not run['differs'] for run in runs)} of {len(runs)}{note}" if runs else "")
        names = ", ".join(result["script"] for result in of_kind) if kind else f"{len(of_kind)}"
        yield f"| {kind or 'all'} | {names} | {' | '.join(cells)} |"


def is_same(result: dict[str, Any]) -> bool:
    """Whether nothing differs under any form of `flatout run`."""
    return not any(run["differs"] for run in result["runs"].values())


def try_out(example: Example, scripts: Path, keep: Path | None) -> dict[str, Any]:
    """All runs of one script, and what differs between them."""
    with tempfile.TemporaryDirectory(prefix="harmless-") as scratch:
        place = Path(scratch)
        if keep is not None:
            place = keep.resolve() / re.sub(r"\W+", "-", example.name)
            shutil.rmtree(place, ignore_errors=True)
        prepare(example, scripts, place)
        bare = [run(example, place, f"bare-{number}") for number in (1, 2)]
        ways = {}
        for how, options in UNDER.items():
            if how != "run" and not example.loader:
                continue
            tried, record = run(example, place, how, options), recorded(place, how)
            while differences(tried, bare, reseeded=record["reseeded"]) and len(bare) < BARE_RUNS:
                bare.append(run(example, place, f"bare-{len(bare) + 1}"))
            found = differences(tried, bare, reseeded=record["reseeded"])
            ways[how] = {"differs": found, "same_bits": not differences(tried, bare), **record}
        return told(example, bare) | {"runs": ways}


def told(example: Example, bare: list[Run]) -> dict[str, Any]:
    """What is to be known of a script and of its bare runs: what could be compared, and what not."""
    one, lines = bare[0], template(bare)
    left_out = lines.count(None) if lines is not None else len(one.lines) - in_all(bare).total()
    return {
        "script": example.name,
        "kind": example.kind,
        "repo": example.repo,
        "commit": COMMITS[example.repo],
        "path": example.path,
        "flags": list(example.flags),
        "edited": bool(example.edits),
        "exit": one.exit,
        "seconds": [run.seconds for run in bare],
        "optimizer_steps": sum(rank["steps"] for rank in one.seen.values()),
        "compared": [key for key in HASHES if one.seen and len({run.hashes(key) for run in bare}) == 1],
        "lines": len(one.lines),
        "lines_left_out": left_out,
        "files": sorted(settled(bare)),
        "files_left_out": sorted(one.files.keys() - settled(bare).keys()),
    }


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run did: all that has to be the same with flatout."""

    exit: int | None  # None: not done in time
    lines: list[str]  # of its output, times hidden
    unordered: bool = False  # those are words, in any order
    files: dict[str, list[str]]  # written, by a hash of their bytes, or "deleted"; names without numbers
    seen: dict[str, dict[str, Any]]  # by the witness, a rank each
    left: list[str]  # processes still there afterwards
    seconds: float

    def hashes(self, key: str) -> str:
        """Of all ranks."""
        return repr([self.seen[rank][key] for rank in sorted(self.seen)])


def prepare(example: Example, scripts: Path, place: Path) -> None:
    """The world as it is before each run: the repository with made-up data, an empty home, an empty /tmp."""
    copy = place / "before/repo"
    shutil.copytree(scripts / example.repo.replace("/", "+"), copy, symlinks=True,
                    ignore=shutil.ignore_patterns(".git", "__pycache__"))  # fmt: skip
    path = copy / example.path
    text = path.read_text(encoding="utf-8")
    for edit in example.edits:
        text = edit(text)
    path.write_text(text, encoding="utf-8")
    example.prepare(path.parent)
    for name in ("home", "tmp"):
        (place / "before" / name).mkdir(exist_ok=True)
    kernel = place / "jupyter/kernels/witness/kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [sys.executable, WITNESS, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": argv, "display_name": "witness", "language": "python"}))


def run(example: Example, place: Path, name: str, options: Sequence[str] | None = None) -> Run:
    """Run it in a fresh copy of the world: bare, or under `flatout run` with these options."""
    world, witness = place / "world", place / f"witness-{name}"
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(place / "before", world, symlinks=True)
    witness.mkdir()
    before = look(world)
    command = example.command()
    if options is not None:
        ours = ["-m", "flatout", "run", "--quiet", "--trace", str(place / f"trace-{name}"), *options, "--"]
        command = [sys.executable, *ours, *command]
    folder, start_s = (world / "repo" / example.path).parent, time.monotonic()
    with (place / f"{name}.out").open("wb") as out, (place / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment(example, place, witness), stdout=out,
                                   stderr=err, stdin=subprocess.DEVNULL)  # fmt: skip
        try:
            code = process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            code = None
    seconds = round(time.monotonic() - start_s, 1)
    return Run(
        exit=code,
        lines=lines_of(example, (place / f"{name}.out").read_text(encoding="utf-8", errors="replace")),
        unordered=example.unordered,
        files=changed(world, before),
        seen={path.stem: json.loads(path.read_text(encoding="utf-8")) for path in witness.iterdir()},
        left=ended(witness, patience_s=10 if code is not None else 0),
        seconds=seconds,
    )


def environment(example: Example, place: Path, witness: Path) -> dict[str, str]:
    """The same for every run, but for where the witness reports."""
    world = place / "world"
    paths = [world / "repo", ROOT / "src", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HOME": str(world / "home"),
        "TMPDIR": str(world / "tmp"),
        "JUPYTER_PATH": str(place / "jupyter"),
        "WITNESS": str(witness),
        **SETUP,
        **example.environment,
    }


def have_torchvision(folder: Path) -> None:
    """For this process and those it starts, where torchvision has no operators for the torch that is installed."""
    if subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0:
        return
    (folder / "torchvision").mkdir()
    (folder / "torchvision/__init__.py").write_text(OPERATORS, encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def ended(witness: Path, patience_s: float) -> list[str]:
    """What of this run's processes is still there after a while; it is ended."""
    deadline = time.monotonic() + patience_s
    while (left := [p for p in psutil.process_iter() if is_of(p, witness)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for process in left:
        try:
            names.append(" ".join(process.cmdline())[:200])
            process.kill()
        except psutil.Error:
            pass
    return names


def is_of(process: psutil.Process, witness: Path) -> bool:
    """Whether a process belongs to the run that reports there."""
    try:
        return process.environ().get("WITNESS") == str(witness) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def recorded(place: Path, name: str) -> dict[str, Any]:
    """What flatout had to do with the run: without a recording it would be no wonder that nothing differs."""
    from flatout import trace
    from flatout.launch import launcher

    ranks = [rank for folder in launcher.recordings(place / f"trace-{name}") for rank in trace.read(folder).ranks]
    errors = (place / f"{name}.err").read_text(encoding="utf-8", errors="replace").splitlines()
    return {
        "steps_recorded": sum(window.wall_ms.count for rank in ranks for window in rank.windows),
        "xray": any(rank.xray is not None for rank in ranks),
        "changes": sorted({c.name for rank in ranks for c in rank.facts.changes if c.applied}),
        "reseeded": any("samples that draw random numbers draw others" in line for line in errors),
        "notes": sorted({note.text for rank in ranks for note in rank.notes}),
        "said": [line for line in errors if line.startswith("flatout:")],
    }


# --- comparing --------------------------------------------------------------------------------------------------------


def differences(run: Run, bare: list[Run], *, reseeded: bool = False) -> list[str]:
    """In what a run under flatout differs from all bare runs, beyond what they differ in among themselves. Where it is
    `reseeded`, what follows from random numbers is no difference."""
    found = []
    if run.exit not in {one.exit for one in bare}:
        found.append(f"exit code {run.exit}")
    if run.left and not any(one.left for one in bare):
        found.append(f"left running: {run.left[0]}")
    for key in HASHES[:1] if reseeded else HASHES:
        hashes = {one.hashes(key) for one in bare} if run.seen.keys() == bare[0].seen.keys() else set()
        if len(hashes) < 2 and run.hashes(key) not in hashes:
            found.append(key)
    if reseeded:
        return found
    line = differing_line(run.lines, bare)
    if line is not None:
        found.append(f"output: {line}")
    names = [name for name, digests in settled(bare).items() if run.files.get(name) != digests]
    if not names and how_many(run.files) not in [how_many(one.files) for one in bare]:
        names = sorted(name for name, _ in how_many(run.files) ^ how_many(bare[0].files))
    if names:
        found.append(f"files: {', '.join(names[:5])}")
    return found


def lines_of(example: Example, text: str) -> list[str]:
    """An output without times; its words, where several processes write to it and their lines run into each other."""
    lines = [_TIMES.sub("<time>", re.sub(example.times, "<time>", line)) for line in text.splitlines()]
    return re.findall(rf"{_NUMBER}|[^\W\d]+|\S", "\n".join(lines)) if example.unordered else lines


def template(bare: list[Run]) -> list[list[str | None] | None] | None:
    """What the bare outputs have in common: words and numbers, None for what differs; None as a whole where not even
    the number of lines is the same."""
    if bare[0].unordered or len({len(run.lines) for run in bare}) > 1:
        return None
    common: list[list[str | None] | None] = []
    for versions in zip(*(run.lines for run in bare), strict=True):
        split = [re.split(f"({_NUMBER})", line) for line in versions]
        same_words = len({len(parts) for parts in split}) == 1 and len({tuple(parts[::2]) for parts in split}) == 1
        columns = zip(*split, strict=True) if same_words else ()
        common.append([parts[0] if len(set(parts)) == 1 else None for parts in columns] if same_words else None)
    return common


def differing_line(lines: list[str], bare: list[Run]) -> str | None:
    """The first line that is not as in the bare outputs."""
    common = template(bare)
    if common is None:
        missing = in_all(bare) - Counter(lines)
        return f"without {next(iter(missing))[:200]}" if missing else None
    for number, (line, expected) in enumerate(zip(lines, common, strict=False), 1):
        parts = re.split(f"({_NUMBER})", line)
        if expected is not None and (
            len(parts) != len(expected) or any(b is not None and a != b for a, b in zip(parts, expected, strict=True))
        ):
            return f"line {number}: {line[:200]}"
    return f"{len(lines)} lines, not {len(common)}" if len(lines) != len(common) else None


def in_all(bare: list[Run]) -> Counter[str]:
    """The lines that every output has, where they have not as many or not in the same order."""
    return functools.reduce(operator.and_, (Counter(run.lines) for run in bare))


def look(world: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    found = {}
    for path in world.rglob("*"):
        if path.is_file() or path.is_symlink():
            status = path.lstat()
            found[str(path.relative_to(world))] = (status.st_size, status.st_mtime_ns)
    return found


def changed(world: Path, before: dict[str, tuple[int, int]]) -> dict[str, list[str]]:
    """The files that were written and those that are gone, under their names without dates and numbers of processes."""
    after, found = look(world), defaultdict[str, list[str]](list)
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            found[loosely(name)].append("deleted")
        elif before.get(name) != after[name]:
            found[loosely(name)].append(digest(world / name))
    return {name: sorted(digests) for name, digests in found.items()}


def digest(path: Path) -> str:
    """Of what a file holds, or where a link leads."""
    held = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
    return hashlib.sha256(held).hexdigest()


def settled(bare: list[Run]) -> dict[str, list[str]]:
    """The files that every bare run leaves with the same bytes."""
    return {name: digests for name, digests in bare[0].files.items()
            if all(run.files.get(name) == digests for run in bare)}  # fmt: skip


def how_many(files: dict[str, list[str]]) -> set[tuple[str, int]]:
    """Names, and how many files there are of each."""
    return {(name, len(digests)) for name, digests in files.items()}


def loosely(name: str) -> str:
    """A name without its numbers, and without the random words of tempfile."""
    return re.sub(r"\d+", "#", re.sub(r"(?<=tmp)\w{6,10}", "#", name))


if __name__ == "__main__":
    main()
