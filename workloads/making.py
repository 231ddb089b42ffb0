"""What the five data makers share: a folder of files that is either whole or visibly not.

    recipe ─► claim the folder ─► make the missing items, in parallel ─► name it a data set
              dataset.json.part    item i depends on (seed, i) alone      dataset.json

An item is one or more files; each is written under a temporary name and renamed, so what exists is whole and
an interrupted run goes on where it stopped. The manifest comes last: without `dataset.json` it is not a data set.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "dataset.json"
UNFINISHED = "dataset.json.part"
ITEMS_A_TASK = 16  # few enough that Ctrl-C is answered at once, enough that handing out work costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One size of a data set, before a byte of it is written."""

    items: int  # pieces of work that do not depend on each other
    bytes_each: int  # about what an item takes on disk
    facts: Mapping[str, Any] = field(default_factory=dict)  # what maker and training must know: classes, days …


Paths = Callable[[Recipe, int], Sequence[str]]  # the files of item i, relative to the folder
Make = Callable[[Recipe, np.random.Generator, int], Sequence[bytes]]  # their contents, in the same order


class Refused(Exception):
    """Something the person can fix: one line, exit code 2."""


@contextmanager
def clear_errors() -> Iterator[None]:
    """End in one line and exit code 2 on a `Refused`, also when it was raised in a loader's worker process."""
    try:
        yield
    except Refused as error:
        # A DataLoader hands a worker's error on with the worker's traceback as its text; the message ends it.
        print(str(error).strip().splitlines()[-1].split("Refused: ")[-1], file=sys.stderr)
        raise SystemExit(2) from None


def require(data: str | Path, name: str) -> dict[str, Any]:
    """The manifest of the data set `name` at `data`, or `Refused` with the command that makes it."""
    folder, command = Path(data), f"python -m workloads.{name}.make --size small --out {data}"
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        unfinished = read_manifest(folder / UNFINISHED)
        if unfinished is None:
            raise Refused(f"no {name} data at {data}: make it with  {command}")
        again = f"python -m workloads.{unfinished['name']}.make --size {unfinished['size']} --seed {unfinished['seed']}"
        raise Refused(f"the data at {data} is half made: finish it with  {again} --out {data}")
    if manifest["name"] != name:
        raise Refused(f"{data} holds the data of {manifest['name']}, not of {name}: make that with  {command}-{name}")
    return manifest


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What a manifest says, or None where there is none."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise Refused(f"{path} is damaged: delete {path.parent} and make the data again") from None
    return manifest


def main(name: str, recipes: Mapping[str, Recipe], paths: Paths, make: Make, version: int = 1) -> None:
    """The command line of a maker: `python -m workloads.NAME.make --size SIZE --out DIR`."""
    parser = argparse.ArgumentParser(prog=f"python -m workloads.{name}.make", description=f"Make the data of {name}.")
    parser.add_argument("--size", choices=list(recipes), default="small")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=_cores(), metavar="N")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    recipe = recipes[options.size]
    manifest = {"name": name, "size": options.size, "seed": options.seed, "version": version, "items": recipe.items}
    with clear_errors():
        make_all(options.out, manifest | dict(recipe.facts), recipe, paths, make, options.workers)


def make_all(out: Path, manifest: dict[str, Any], recipe: Recipe, paths: Paths, make: Make, workers: int) -> None:
    """Make what is missing of one data set, then name it one."""
    claim(out, manifest)
    missing = [i for i in range(recipe.items) if not all((out / path).exists() for path in paths(recipe, i))]
    check_disk(out, manifest, len(missing), recipe.bytes_each)
    if missing and (out / MANIFEST).exists():  # files were deleted since: no longer whole
        (out / MANIFEST).replace(out / UNFINISHED)
    if missing:
        make_missing(out, manifest["seed"], recipe, paths, make, missing, workers)
    if (out / UNFINISHED).exists():
        (out / UNFINISHED).replace(out / MANIFEST)
    print(f"{out}: {recipe.items} items of {manifest['name']} ({manifest['size']}), seed {manifest['seed']}")


def claim(out: Path, manifest: dict[str, Any]) -> None:
    """Say in the folder what is being made there; refuse one that holds anything else."""
    wanted = json.loads(json.dumps(manifest))
    found = read_manifest(out / MANIFEST) or read_manifest(out / UNFINISHED)
    if found == wanted:
        return
    if found is not None:
        was = " ".join(f"{key} {found.get(key)}" for key in ("name", "size", "seed", "version"))
        raise Refused(f"{out} was made from another recipe ({was}): choose another folder or delete that one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} exists and is not a data set: choose an empty or a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"cannot make {out}: {error.strerror}") from None
    write(out / UNFINISHED, json.dumps(manifest, indent=1).encode())


def check_disk(out: Path, manifest: dict[str, Any], missing: int, bytes_each: int) -> None:
    """Say what the data set will take, and refuse to start what cannot end."""
    need, free = missing * bytes_each, shutil.disk_usage(out).free
    what = f"{manifest['name']} {manifest['size']}: {missing} of {manifest['items']} items to make in {out}"
    print(f"{what}, about {_size(need)} ({_size(free)} free)", file=sys.stderr)
    if need > free:
        raise Refused(f"{out}: about {_size(need)} needed and only {_size(free)} free")


def make_missing(
    out: Path, seed: int, recipe: Recipe, paths: Paths, make: Make, missing: Sequence[int], workers: int
) -> None:
    """Make these items in worker processes; on Ctrl-C finish what is in hand and leave no process behind."""
    tasks = [missing[i : i + ITEMS_A_TASK] for i in range(0, len(missing), ITEMS_A_TASK)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ProcessPoolExecutor(min(workers, len(tasks)), initializer=_start_worker)
    done = 0
    try:
        futures = [pool.submit(make_items, out, seed, recipe, paths, make, task) for task in tasks]
        with progress(len(missing)) as advance:
            for future in as_completed(futures):
                done += future.result()
                advance(done)
    except KeyboardInterrupt:
        print(f"\nstopped at {done} of {len(missing)}: the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        raise Refused(f"{error.filename or out}: {error.strerror or error}") from None
    except BrokenProcessPool:
        raise Refused("a worker process died (out of memory?): the same command goes on from there") from None
    finally:
        pool.shutdown(cancel_futures=True)


def make_items(out: Path, seed: int, recipe: Recipe, paths: Paths, make: Make, indices: Sequence[int]) -> int:
    """Make and write these items; how many they were."""
    for index in indices:
        contents = make(recipe, np.random.default_rng([seed, index]), index)
        for path, content in zip(paths(recipe, index), contents, strict=True):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            write(out / path, content)
    return len(indices)


def write(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; anywhere else a line for each tenth."""
    if not sys.stderr.isatty():
        tenths = [0]

        def line(done: int) -> None:
            if done * 10 // total > tenths[0]:
                tenths[0] = done * 10 // total
                print(f"{done} of {total}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _start_worker() -> None:
    """Leave Ctrl-C to the maker, and end with it even when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
