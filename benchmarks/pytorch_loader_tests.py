"""PyTorch's own test_dataloader.py, with PyTorch's DataLoader and with `flatout.DataLoader` in its place.

    python benchmarks/pytorch_loader_tests.py FILE [--only WORD] [--timeout 120] [--out JSON]

FILE is test/test_dataloader.py of a PyTorch checkout that matches the installed torch; it is not in this repository. It
needs `pip install expecttest`. Each test runs twice, one after the other, in a pytest of its own kind; a test that
hangs or ends its process is named, and the rest go on. What differs is printed, and said why where that is known: a
difference without a reason exits 1.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "FLATOUT_LOADER_TESTS"  # the file that the plugin below writes to
GRACE_S = 60  # after a test's own timeout, before its process is ended

PRIVATE = {
    f"{kind}::{name}": "looks into iterator._workers, PyTorch's list of processes"
    for kind in ("TestDataLoader", "TestDataLoaderPersistentWorkers")
    for name in ("test_get_worker_info", "test_iterable_style_dataset", "test_partial_workers")
}


def main() -> int:
    options = _options()
    sources = {"pytorch": options.file.read_text(encoding="utf-8")}
    sources["flatout"] = with_ours(sources["pytorch"])
    outcomes = {name: _run(name, source, options) for name, source in sources.items()}
    rows = _compare(outcomes["pytorch"], outcomes["flatout"])
    unexplained = _tell(rows, outcomes)
    if options.out is not None:
        told = {
            "machine": _machine(),
            "date": datetime.date.today().isoformat(),
            "file": {
                "path": "test/test_dataloader.py of pytorch/pytorch",
                "of": options.of,
                "sha256": hashlib.sha256(sources["pytorch"].encode()).hexdigest(),
            },
            "timeout_s": options.timeout,
            "counts": {name: _counts(of) for name, of in outcomes.items()},
            "differences": rows,
            "outcomes": outcomes,
        }
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 1 if unexplained else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="PyTorch's test_dataloader.py")
    parser.add_argument("--of", help="the version or commit that it is of", default=None)
    parser.add_argument("--only", help="tests whose name matches (pytest -k)", default="")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a test may take")
    parser.add_argument("--out", type=Path, default=None, help="write the outcomes there, as JSON")
    return parser.parse_args()


def with_ours(source: str) -> str:
    """The same file, with our DataLoader wherever it means PyTorch's; in the programs that it starts as well."""
    source = re.sub(r"\btorch\.utils\.data\.DataLoader\b", "flatout.DataLoader", source)
    source = re.sub(r"^( *)(from torch\.utils\.data import (?:[^(\n]*\b)?DataLoader\b.*)$",
                    r"\1\2\n\1from flatout import DataLoader", source, flags=re.MULTILINE)  # fmt: skip
    block = r"^from torch\.utils\.data import \([^)]*\bDataLoader,[^)]*\)$"
    return re.sub(block, r"\g<0>\nimport flatout\nfrom flatout import DataLoader", source, flags=re.MULTILINE)


# --- running it -------------------------------------------------------------------------------------------------------


def _run(name: str, source: str, options: argparse.Namespace) -> dict[str, str]:
    """What became of each test. A process that ends early is started again for the tests it did not come to."""
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix=f"loader-tests-{name}-") as folder:
        Path(folder, "test_dataloader.py").write_text(source, encoding="utf-8")
        results = Path(folder, "results.jsonl")
        results.touch()
        while True:
            known = len(outcomes)
            ended = _pytest(Path(folder), results, sorted(outcomes), options)
            begun = _read(results, outcomes)
            if ended == 0 or begun is None:
                return outcomes
            outcomes[begun] = "timeout" if ended < 0 else "crash"
            if len(outcomes) == known:
                raise SystemExit(f"{name}: pytest ends at once (exit code {ended})")


def _pytest(folder: Path, results: Path, done: list[str], options: argparse.Namespace) -> int:
    """One pytest over the tests that are not done: 0 when it came to the end, below 0 when it had to be ended."""
    (folder / "done.txt").write_text("\n".join(done), encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider",
        "-p", "no:xdist", "-p", "pytorch_loader_tests", "--timeout", str(options.timeout), "--timeout-method", "signal",
        *(["-k", options.only] if options.only else []), "test_dataloader.py",
    ]  # fmt: skip
    here = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    settings = os.environ | {RESULTS: str(results), "PYTHONPATH": os.pathsep.join(filter(None, here))}
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=settings, stdout=output, stderr=output, start_new_session=True
        )
        size = -1
        while True:
            try:
                code = process.wait(options.timeout + GRACE_S)
                return 0 if code in (0, 1, 5) else code or 1
            except subprocess.TimeoutExpired:
                if results.stat().st_size == size:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return -1
                size = results.stat().st_size


def _read(results: Path, outcomes: dict[str, str]) -> str | None:
    """Take in what the plugin wrote; the test that was begun last and has not ended."""
    begun = None
    for line in results.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "outcome" in entry:
            outcomes[entry["test"]] = entry["outcome"]
        begun = entry["test"] if "outcome" not in entry else None
    return begun


# --- the plugin, inside that pytest -----------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what is done."""
    done = set(Path(os.environ[RESULTS]).with_name("done.txt").read_text(encoding="utf-8").splitlines())
    items[:] = [item for item in items if _short(item.nodeid) not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _note({"test": _short(nodeid)})


def pytest_runtest_logreport(report: Any) -> None:
    """A test was called, or skipped, or failed around its call."""
    if report.when == "call" or report.outcome != "passed":
        timed_out = report.failed and "Timeout" in str(report.longrepr).rpartition("\n")[2]
        _note({"test": _short(report.nodeid), "outcome": "timeout" if timed_out else report.outcome})


def _note(entry: dict[str, str]) -> None:
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as results:
        results.write(json.dumps(entry) + "\n")


def _short(nodeid: str) -> str:
    return nodeid.partition("::")[2]


# --- telling ----------------------------------------------------------------------------------------------------------


def _compare(theirs: dict[str, str], ours: dict[str, str]) -> list[dict[str, str]]:
    """The tests that differ, with the reason where there is one."""
    rows = []
    for test in sorted(theirs.keys() | ours.keys()):
        pytorch, flatout = theirs.get(test, "missing"), ours.get(test, "missing")
        if pytorch != flatout:
            rows.append({"test": test, "pytorch": pytorch, "flatout": flatout, "why": PRIVATE.get(test, "")})
    return rows


def _tell(rows: list[dict[str, str]], outcomes: dict[str, dict[str, str]]) -> int:
    """Print the table; how many differences have no reason and are not to our credit."""
    for name, of in outcomes.items():
        print(f"{name:8} {len(of)} tests: " + ", ".join(f"{count} {what}" for what, count in _counts(of).items()))
    print(f"\n{'test':72} {'PyTorch':8} {'flatout':8} why")
    for row in rows:
        print(f"{row['test']:72} {row['pytorch']:8} {row['flatout']:8} {row['why'] or '?'}")
    return sum(row["flatout"] != "passed" and not row["why"] for row in rows)


def _counts(outcomes: dict[str, str]) -> dict[str, int]:
    return {what: list(outcomes.values()).count(what) for what in sorted(set(outcomes.values()))}


def _machine() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from benchmarks.machine import describe

    return describe(("torch", "numpy", "expecttest", "pytest", "flatout"))


if __name__ == "__main__":
    raise SystemExit(main())
