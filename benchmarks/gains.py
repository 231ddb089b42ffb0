"""Whether the diagnosis promises what a fix gives: every mistake of a workload, fixed by hand and alone.

    python benchmarks/gains.py gray --size small --data DIR --traces DIR --out FILE [--rounds 1] [-- FLAGS]

1. The script as it is under `flatout run --max-steps N`: its trace, and its report as JSON, stay in --traces.
2. In each round: the script as it is, with one mistake fixed at a time (see fixed_by_hand.py), and as it is once more:
   each in its own process over a window (see timed.py). What ran more than once says how far runs of a script differ.

A row a mistake: the gain that the findings which name it promise, the gain measured, and whether the one holds the
other, as far as runs differ. A mistake that no finding names must cost nothing.

What is in --traces or --out already is not done again: a run that was cut short goes on, and when the rules change the
table is made again from the traces, on any machine. `gray` evaluates every epoch and is measured over several: that
wants its small data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import workloads  # noqa: E402
from benchmarks.fixed_by_hand import MISTAKES, WHOLE_EPOCH, Edit, Flags, Mistake  # noqa: E402
from flatout import trace  # noqa: E402
from flatout.diagnose.rules import diagnose  # noqa: E402
from flatout.model.causes import Finding  # noqa: E402
from flatout.model.stats import USUAL_RUN_NOISE  # noqa: E402

STEPS = {"gray": 200, "segment": 200, "captcha": 120, "video": 130, "stock": 500}  # outlast what is prefetched
EPOCHS = 5  # how often `gray` evaluates when fixed
BEFORE, AGAIN = "as it is", "as it is, again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(MISTAKES), metavar="NAME", help=", ".join(MISTAKES))
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="where NAME-SIZE lies or will be made")
    parser.add_argument("--size", choices=["tiny", "small", "full"], default="full")
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="where the recordings are kept")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=5, help="a window lasts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="are recorded (by workload, if not given)")
    parser.add_argument("--device", default="cuda")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, extra = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    book = Book(options.out)
    failed = False
    for name in options.names:
        try:
            failed |= not compare(name, options, extra, book)
        except workloads.Failed as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
    sys.exit(failed)


class Book:
    """The figures so far, in a file of one machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._here: dict[str, Any] | None = None
        self.kept: dict[str, Any] = {"machine": workloads.machine(), "workloads": {}}
        if path.exists():
            self.kept = json.loads(path.read_text())
        print(", ".join(f"{key} {value}" for key, value in self.kept["machine"].items()), flush=True)

    def page(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """What there is of a workload; measured with these settings, if it is new."""
        page: dict[str, Any] = self.kept["workloads"].setdefault(name, {"settings": settings, "variants": {}})
        return page

    def figures(
        self, name: str, variant: str, settings: dict[str, Any], measured: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Of one variant: those in the book, or else measured now."""
        page = self.page(name, settings)
        known = page["variants"]
        if variant not in known:
            self._here = self._here or workloads.machine()
            if (self.kept["machine"], page["settings"]) != (self._here, settings):
                raise workloads.Failed(f"{self._path} is of another machine, or other settings: choose another file")
            start = time.monotonic()
            known[variant] = measured()
            print(f"{name}, {variant}: {known[variant]['samples_per_s']:,.0f} samples/s ", end="")
            print(f"({time.monotonic() - start:.0f} s)", flush=True)
            self.write()
        return dict(known[variant])

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.kept, indent=1) + "\n")


def compare(name: str, options: argparse.Namespace, extra: Sequence[str], book: Book) -> bool:
    """One workload: record, measure, and print what the two say about each other. Whether every variant ran."""
    data = options.data.resolve() / f"{name}-{options.size}"
    flags = ["--data", str(data), "--device", options.device, "--epochs", "1000000", *extra]
    recording = options.traces.resolve() / name
    named = [mistake for mistake in MISTAKES[name] if mistake.named_by]
    variants: dict[str, tuple[Mistake, ...]] = {BEFORE: (), **{m.what: (m,) for m in named}, AGAIN: ()}
    settings = {"size": options.size, "seconds": options.seconds, "flags": list(extra)}
    page = book.page(name, settings)
    if set(variants) - set(page["variants"]) or not recording.exists():
        workloads.make_data(name, options.size, data)
    if not recording.exists():
        record(name, flags, options.steps or STEPS[name], recording)
    found = diagnose(trace.read(recording))
    print(f"\n{name}: {found[0].code + ': ' + found[0].title if found else 'no verdict'}", flush=True)

    speeds: dict[str, list[float]] = {}
    for turn in range(1, options.rounds + 1):
        for variant, mistakes in variants.items():
            measure = measured_by(name, mistakes, flags, options.seconds)
            entry = variant if turn == 1 else f"{variant} (round {turn})"
            try:
                speed = book.figures(name, entry, settings, measure)["samples_per_s"]
            except workloads.Failed as error:
                if variant == BEFORE and not speeds:
                    raise
                print(f"{name}, {entry}: {error}", file=sys.stderr, flush=True)
                continue
            speeds.setdefault(BEFORE if variant == AGAIN else variant, []).append(speed)
            for mistake in mistakes:
                print(table([row(mistake, found, speeds)]), flush=True)
    rows = [row(mistake, found, speeds) for mistake in named if mistake.what in speeds]
    apart = runs_differ_by(speeds)
    page |= {"verdict": found[0].code if found else None, "runs_differ_by": apart, "mistakes": rows}
    book.write()
    print("\n" + table(rows), flush=True)
    runs = ", ".join(f"{speed:,.0f}" for speed in speeds[BEFORE])
    print(f"as it is: {runs} samples/s; runs differ by {apart:.1%}", flush=True)
    return len(rows) == len(named)


def runs_differ_by(speeds: dict[str, list[float]]) -> float:
    """How far a run of the same script lies from another, usually: of two, what lies between them."""
    logs = [[math.log(speed) for speed in runs] for runs in speeds.values() if len(runs) > 1]
    squares = sum((value - statistics.fmean(runs)) ** 2 for runs in logs for value in runs)
    freedom = sum(len(runs) - 1 for runs in logs)
    return math.sqrt(2 * squares / freedom) if freedom else 0.0


def record(name: str, flags: Sequence[str], steps: int, recording: Path) -> None:
    """The script as it is, under `flatout run`."""
    with workloads.copied(()) as root, tempfile.TemporaryDirectory(prefix="record-") as folder:
        python = Path(folder, "python")
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        told = recording.with_name(f"run-{name}.json")
        recording.parent.mkdir(parents=True, exist_ok=True)
        words = ["run", "--quiet", "--max-steps", str(steps), "--trace", str(recording), "--json", str(told), "--"]
        command = [sys.executable, "-m", "flatout", *words, *workloads.start(root, name), *flags]
        command += ["--out", str(Path(folder, "run"))]
        env = workloads.environment(root, ROOT / "src") | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        start = time.monotonic()
        ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if not recording.exists():
            tail = "\n  ".join((ended.stdout + ended.stderr).strip().splitlines()[-8:])
            raise workloads.Failed(
                f"no trace (exit code {ended.returncode}) from {shlex.join(map(str, command))}\n  {tail}"
            )
        print(f"{name}, {steps} steps recorded ({time.monotonic() - start:.0f} s)", flush=True)


def measured_by(
    name: str, mistakes: Sequence[Mistake], flags: Sequence[str], seconds: float
) -> Callable[[], dict[str, Any]]:
    """How the script is measured with these mistakes fixed."""
    fixes = [fix for mistake in mistakes for fix in mistake.fixes]
    turned = " ".join(fix.flags for fix in fixes if isinstance(fix, Flags))
    edits = [(name, fix) for fix in fixes if isinstance(fix, Edit)]
    words = [*flags, *turned.format(spare=max(1, workloads.CORES - 2)).split()]

    def measured() -> dict[str, Any]:
        with workloads.copied(edits) as root:
            return workloads.measure(root, name, words, seconds, epochs=EPOCHS if name in WHOLE_EPOCH else 0)

    return measured


def row(mistake: Mistake, found: Sequence[Finding], speeds: dict[str, list[float]]) -> dict[str, Any]:
    """What was promised for fixing it, what that gave, and how that fits."""
    names = [finding for finding in found if (finding.code, finding.change) in mistake.named_by]
    promised = [math.prod(getattr(f, end) for f in names) for end in ("gain_low", "gain_high")] if names else None
    noise = 1 + max(USUAL_RUN_NOISE, runs_differ_by(speeds))
    gain = statistics.geometric_mean(speeds[mistake.what]) / statistics.geometric_mean(speeds[BEFORE])
    low, high = promised or (0.0, 1.0)
    fits = low / noise <= gain <= high * noise
    return {
        "mistake": mistake.what,
        "fixes": len(mistake.fixes),
        "found": [f.code for f in names],
        "place": found.index(names[0]) + 1 if names else None,
        "promised": promised,
        "measured": gain,
        "runs": len(speeds[mistake.what]),
        "fits": fits,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a mistake."""

    def lines() -> Iterator[tuple[str, ...]]:
        if len(rows) > 1:
            yield "mistake", "named by", "promised", "measured", ""
        for entry in rows:
            low, high = entry["promised"] or (None, None)
            promised = f"{low:.2f} to {high:.2f}" if low is not None else "–"
            names = " + ".join(entry["found"]) or "no finding"
            fits = "holds" if entry["found"] else "costs nothing"
            misses = "does not hold" if entry["found"] else "missed"
            together = f" ({entry['fixes']} fixes together)" if entry["fixes"] > 1 else ""
            said = fits if entry["fits"] else misses
            yield entry["mistake"] + together, names, promised, f"{entry['measured']:.2f}", said

    drawn = list(lines())
    widths = [max(len(line[place]) for line in drawn) for place in range(len(drawn[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in drawn)


if __name__ == "__main__":
    main()
