"""What becomes of a damaged trace: recorded trainings with bits flipped, lines cut, values swapped for hostile ones.

    python benchmarks/damage.py [--mutations 1000] [--large-mb 1000] [--out FILE]     about three minutes

Each damaged trace is shown by `report` (terminal, JSON and page), `compare` and `top --replay`, in this process. It
must end with exit code 0 or with one clear line and exit code 2: never with a traceback, never after more than 60 s,
and the whole of it in less than 1 GB. `net` counts what only the last net of the command line has caught.

Then traces of a gigabyte, which no run of flatout's leaves: of steps, of windows that are mostly names, and of one
line. `report` must show each in less than 1 GB, with a note of what was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402
from flatout import cli  # noqa: E402

TRACES = ROOT / "tests" / "traces"
VERBS = ("report", "page", "compare", "replay")
LONGEST_S = 60
MOST_BYTES = 1_000_000_000
NET = "this trace is damaged"
DEEP = "[" * 200_000 + "]" * 200_000

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -7, 3.7, -0.5, 1e-300, 1e15, -1e15, 1e308, 2**63, -(2**70), 10**400,
    float("nan"), float("inf"), float("-inf"), "", "x", "1", "NaN", "../../etc/passwd", "\0", "\ud800", "\x1b[31m",
    "é" * 50, "y" * 99_999, [], [0], [[]], [None], [1, 2, 3], [[1]], ["a", "b"], {}, {"a": 1}, {"name": 1}, [{}],
    {"": 0}, [0] * 1000, {"a": {"b": {"c": [1]}}},
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of the seeds")
    parser.add_argument("--large-mb", type=int, default=1000, metavar="N", help="size of the large traces")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    machine = describe()
    print(headline(machine))
    signal.signal(signal.SIGALRM, _too_long)
    ends: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        originals = unpacked(Path(folder) / "originals")
        for seed in range(options.first, options.first + options.mutations):
            signal.alarm(LONGEST_S)
            how, end, words = shown(originals, Path(folder) / "damaged", seed)
            signal.alarm(0)
            ends[end] += 1
            if end in ("traceback", "hang", "net", "other"):
                failures.append({"seed": seed, "how": how, "end": end, "said": words[-2000:]})
                print(f"{seed}: {end}: {how}\n{words[-1500:]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    large = {kind: shown_large(kind, options.large_mb) for kind in LARGE}
    figures = {
        "benchmark": "damage",
        "machine": machine,
        "mutations": options.mutations,
        "recordings": len(originals),
        "ends": dict(ends.most_common()),
        "peak_rss_bytes": peak,
        "large": large,
        "failures": failures,
    }
    for kind, one in large.items():
        print(f"{options.large_mb:,} MB of {kind}: {one}")
    wrong = ends["traceback"] + ends["hang"] + ends["other"]
    bounded = all(one["note"] and one["peak_rss_bytes"] < MOST_BYTES for one in large.values())
    passed = not wrong and peak < MOST_BYTES and bounded
    print(f"{dict(ends)}, {peak / 1e6:,.0f} MB at most: {'PASS' if passed else 'FAIL'}")
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def unpacked(into: Path, names: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """The recorded trainings, each in a folder."""
    folders = []
    for recording in sorted(path for path in TRACES.glob("*.tgz") if names(path.name)):
        folder = into / recording.name.removesuffix(".tgz")
        with tarfile.open(recording) as archive:
            archive.extractall(folder, filter="data")
        folders.append(folder)
    return folders


def shown(originals: list[Path], folder: Path, seed: int) -> tuple[str, str, str]:
    """One of them, damaged by this seed, shown by one of the verbs: what was done, how it ended, and what was said."""
    draw = random.Random(seed)
    original, verb = draw.choice(originals), VERBS[seed % len(VERBS)]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    how = f"{original.name}, {verb}: " + "; ".join(damage(folder, draw) for _ in range(draw.choice((1, 1, 2, 4))))
    return how, *end_of(words_for(verb, original, folder))


def words_for(verb: str, original: Path, folder: Path) -> list[str]:
    """The command line."""
    out = str(folder.with_name("out"))
    return {
        "report": ["report", str(folder)],
        "page": ["report", str(folder), "--json", out + ".json", "--html", out + ".html"],
        "compare": ["compare", str(original), str(folder), "--html", out + ".html", "--json", out + ".json"],
        "replay": ["top", "--replay", str(folder)],
    }[verb]


def end_of(words: list[str]) -> tuple[str, str]:
    """How the command ended, and what it said on stderr: "shown", "one line", or what must not be."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        typed = mock.patch.object(sys, "argv", ["flatout", *words])
        with typed, contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as ended:
        said.seek(0)
        text = said.read()
        if NET in text:
            return "net", text
        if ended.code == 0:
            return "shown", text
        return ("one line" if ended.code == 2 and text.count("\n") == 1 else "other"), f"{ended.code}: {text}"
    except TimeoutError:
        return "hang", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    return "other", "it did not end"


def _too_long(*_: object) -> None:
    raise TimeoutError


# Size

_SPANS = [{"name": name, "start_ms": 0, "host_ms": 20.0} for name in ("data", "forward", "backward", "optimizer")]
LARGE: dict[str, dict[str, Any] | str] = {  # a record, again and again; or text without an end
    "steps": {"record": "step", "index": 1, "start_s": 1.0, "wall_ms": 80.0, "samples": 32, "spans": _SPANS},
    "windows": {
        "record": "window", "first_index": 0, "last_index": 9, "start_s": 1.0, "wall_ms": [1, 1, 1, 1, 1, [1, 1]],
        "spans_ms": {str(name): [0] for name in range(1000)},
    },
    "one line": "x" * 100_000,
}  # fmt: skip


def shown_large(kind: str, megabytes: int) -> dict[str, Any]:
    """How much memory `report` takes of a trace of so many of these, and what it says of it."""
    again = LARGE[kind]
    piece = again if isinstance(again, str) else json.dumps(again) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "rank-00000.jsonl").open("w", encoding="utf-8") as file:
            file.write('{"record":"run","schema":1,"name":"large","rank":0}\n')
            step = {"record": "step", "index": 0, "start_s": 1.0, "wall_ms": 1.0}
            file.write(json.dumps(step) + "\n")
            for _ in range(megabytes * 1_000_000 // len(piece)):
                file.write(piece)
        script = "import resource, sys; from flatout import cli; sys.argv[1:] = ['report', sys.argv[1]]\n"
        script += "try: cli.main()\n"
        script += "finally: print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
        done = subprocess.run(
            [sys.executable, "-c", script, folder], capture_output=True, text=True, check=False, cwd=ROOT / "src"
        )
    said = " ".join(done.stdout.split())
    note = said.partition("Notes: ")[2].partition(" Trace: ")[0]
    return {"code": done.returncode, "peak_rss_bytes": int(said.rpartition(" ")[2]), "note": note}


# Damage


def damage(folder: Path, draw: random.Random) -> str:
    """Damage one file of a trace; what was done, in words."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".json"))
    lines = [path for path in files if path.suffix == ".jsonl"]
    path = draw.choice(lines if lines and draw.random() < 0.95 else files)
    to_values = draw.random() < 0.75
    kind = draw.choice(
        (swap, swap, swap, delete, everywhere, everywhere) if to_values else (flip, cut, stuff, mix, nest)
    )
    return f"{kind.__name__} in {path.name}: {kind(path, draw)}"


def swap(path: Path, draw: random.Random) -> str:
    """One value becomes a hostile one."""
    return _in_one_line(path, draw, lambda place, key: _put(place, key, draw.choice(HOSTILE)))


def delete(path: Path, draw: random.Random) -> str:
    """One value goes."""
    return _in_one_line(path, draw, _gone)


def everywhere(path: Path, draw: random.Random) -> str:
    """A value becomes hostile in every record of its kind."""
    records = _records(path)
    if not records:
        return "nothing"
    kind = draw.choice(sorted({str(record.get("record")) for record in records}))
    like = [record for record in records if str(record.get("record")) == kind]
    route, value = _route(draw.choice(like), draw), draw.choice(HOSTILE)
    for record in like:
        with contextlib.suppress(LookupError, TypeError):
            place: Any = record
            for key in route[:-1]:
                place = place[key]
            place[route[-1]] = value
    _write(path, records)
    return f"{kind} {route} = {_cut(value)}"


def flip(path: Path, draw: random.Random) -> str:
    """Bits flip."""
    data = bytearray(path.read_bytes())
    count = draw.choice((1, 3, 30, 1000))
    for _ in range(count if data else 0):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"{count} bits"


def cut(path: Path, draw: random.Random) -> str:
    """The end, the beginning or a piece of the middle is missing."""
    data = path.read_bytes()
    a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    pieces = {"end": data[:a], "beginning": data[b:], "middle": data[:a] + data[b:], "all": b""}
    which = draw.choice(list(pieces))
    path.write_bytes(pieces[which])
    return which


def stuff(path: Path, draw: random.Random) -> str:
    """Something foreign is written into it."""
    data = path.read_bytes()
    foreign = draw.choice(
        (b"\0" * 4096, b"\xff\xfe\xfd", b"\n\n\n", b"{}\n", b"[]\n", b'{"record":[]}\n', b"\n1e999\n")
    )
    place = draw.choice((draw.randrange(len(data) + 1), data.find(b"\n") + 1))
    path.write_bytes(data[:place] + foreign + data[place:])
    return f"{foreign[:12]!r} at {place}"


def mix(path: Path, draw: random.Random) -> str:
    """Lines come twice, in another order, or without an end between them."""
    first, *rest = path.read_bytes().splitlines(keepends=True) or [b""]
    which = draw.choice(("twice", "shuffled", "joined"))
    if which == "twice":
        rest = rest * 2
    elif which == "shuffled":
        draw.shuffle(rest)
    else:
        rest = [line.rstrip(b"\n") if draw.random() < 0.1 else line for line in rest]
    path.write_bytes(first + b"".join(rest))
    return which


def nest(path: Path, draw: random.Random) -> str:
    """A value is nested without end, or nearly so."""
    deep = draw.choice((DEEP, "[" * 90 + "]" * 90, '{"a":' * 500 + "1" + "}" * 500, "9" * 5000))

    def bury(place: Any, key: Any) -> None:
        place[key] = "DEEP"

    said = _in_one_line(path, draw, bury)
    path.write_bytes(path.read_bytes().replace(b'"DEEP"', deep.encode(), 1))
    return said


def _in_one_line(path: Path, draw: random.Random, change: Callable[[Any, Any], object]) -> str:
    """Change one place of one record; kinds that are few are as likely as those that are many."""
    records = _records(path)
    if not records:
        return "nothing"
    kind = draw.choice(sorted({str(record.get("record")) for record in records}))
    record = draw.choice([record for record in records if str(record.get("record")) == kind])
    route = _route(record, draw)
    place: Any = record
    for key in route[:-1]:
        place = place[key]
    change(place, route[-1])
    _write(path, records)
    value = place[route[-1]] if isinstance(place, dict) and route[-1] in place else "…"
    return f"{kind} {route} = {_cut(value)}"


def _put(place: Any, key: Any, value: Any) -> None:
    place[key] = value


def _gone(place: Any, key: Any) -> None:
    del place[key]


def _route(record: dict[str, Any], draw: random.Random) -> list[Any]:
    """The way to some value: each level is as likely to be the last as to be gone through."""
    route: list[Any] = []
    place: Any = record
    while True:
        inner = place.items() if isinstance(place, dict) else enumerate(place)
        key, value = draw.choice(list(inner))
        route.append(key)
        if not isinstance(value, dict | list) or not value or draw.random() < 0.3:
            return route
        place = value


def _records(path: Path) -> list[dict[str, Any]]:
    def read() -> Iterator[dict[str, Any]]:
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(data := json.loads(line), dict) and data:
                    yield data

    return list(read())


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _cut(value: Any) -> str:
    return repr(value)[:60] if not isinstance(value, int) or abs(value) < 1e300 else "a huge number"


if __name__ == "__main__":
    main()
