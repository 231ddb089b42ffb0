"""The processes of a training: the trainers, their loader workers, and the rest of the tree.

A loader worker is known by the name that torch (since 2.5) or flatout gives it. A trainer holds
memory on a GPU, or has started workers. All is read from /proc: on Windows and macOS no processes are
seen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flatout.redact import redact_text
from flatout.sample.budget import table_of, text_of
from flatout.trace import ProcessSample

_LOOK_FOR_NEW_S = 5.0
_WORKER_NAMES = ("pt_data_worker", "flatout-worker")
_FORK_SERVER = "multiprocessing.forkserver"
_OUR_FORK_SERVER = "flatout-forksrv"


class Rates:
    """How fast counters grow from one read to the next."""

    def __init__(self) -> None:
        self.seconds = 0.0  # since the read before; 0 at the first
        self._read_s = math.inf
        self._before: dict[str, int] = {}
        self._now: dict[str, int] = {}

    def next_read(self, now_s: float) -> None:
        """Another read begins."""
        self.seconds = max(0.0, now_s - self._read_s)
        self._read_s = now_s
        self._before, self._now = self._now, {}

    def a_second(self, name: str, count: int | None, factor: float = 1.0) -> float | None:
        """How much a counter has grown a second, times a factor; None where that is not known."""
        if count is None:
            return None
        self._now[name] = count
        if name not in self._before or not self.seconds:
            return None
        return factor * max(0, count - self._before[name]) / self.seconds


class Tree:
    """The process trees below `roots`; processes come and go between reads."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._rates = Rates()
        self._asked: tuple[frozenset[int], frozenset[int]] | None = None
        self._roles: dict[int, str] = {}
        self._looked_s = -math.inf

    def read(self, now_s: float, roots: Iterable[int], gpu_holders: Iterable[int] = ()) -> tuple[ProcessSample, ...]:
        """Every process in the trees now. `gpu_holders` are the processes known to use a GPU."""
        asked = frozenset(roots), frozenset(gpu_holders)
        if asked != self._asked or now_s - self._looked_s >= _LOOK_FOR_NEW_S:
            self._asked, self._looked_s = asked, now_s
            self._roles = _roles(self._proc, *asked)
        self._rates.next_read(now_s)
        return tuple(filter(None, map(self._sample, self._roles)))

    def _sample(self, pid: int) -> ProcessSample | None:
        """What a process did since the last read; None when it has ended."""
        folder = f"{self._proc}/{pid}"
        name, fields = _stat(folder)
        if len(fields) < 22 or fields[0] in "ZX":
            return None
        # Of the main thread alone, which trains or loads: how long it waited for a core, and how
        # often it got one.
        waits = text_of(f"{folder}/schedstat").split()
        delay_ns, switches = (int(waits[1]), int(waits[2])) if len(waits) == 3 else (None, None)
        ticks, a_second = int(fields[11]) + int(fields[12]), self._rates.a_second
        return ProcessSample(
            pid=pid,
            role=self._roles[pid],
            name=redact_text(name),
            cpu_pct=a_second(f"{pid} ticks", ticks, 100 / os.sysconf("SC_CLK_TCK")),
            run_delay_pct=a_second(f"{pid} delay", delay_ns, 1e-7),
            rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            read_bytes_s=a_second(f"{pid} read", table_of(f"{folder}/io").get("rchar:")),
            switches_s=a_second(f"{pid} switches", switches),
            threads=int(fields[17]),
            state=fields[0],
        )


def find_trainings(root: Path = Path("/")) -> tuple[int, ...]:
    """Processes that have loader workers: the trainings that can be seen without asking a GPU."""
    seen = _look(root / "proc")
    return tuple(sorted(_owners(root / "proc", seen, {pid for pid in seen if seen[pid].name in _WORKER_NAMES})))


def process_ids() -> list[int]:
    """All processes that can be seen."""
    return _ids(Path("/proc"))


def descendants(pid: int) -> set[int]:
    """The children of a process, their children, and so on."""
    return set(_below(_look(Path("/proc")), {pid})) - {pid}


class _Seen(NamedTuple):
    """One process, as /proc lists it."""

    name: str
    parent: int
    session: str


def _look(proc: Path) -> dict[int, _Seen]:
    """Every process that can be seen."""
    stats = {pid: _stat(f"{proc}/{pid}") for pid in _ids(proc)}
    return {pid: _Seen(name, int(fields[1]), fields[3]) for pid, (name, fields) in stats.items() if fields}


def _ids(proc: Path) -> list[int]:
    if not proc.is_dir():  # Windows, macOS
        return []
    return [int(name) for name in os.listdir(proc) if name.isdigit()]  # noqa: PTH208 - Paths are slow


def _stat(folder: str) -> tuple[str, list[str]]:
    """/proc/PID/stat: the name, which may itself hold spaces and brackets, and the fields behind it."""
    before, _, behind = text_of(f"{folder}/stat").rpartition(")")
    return before.partition("(")[2], behind.split()


def _roles(proc: Path, roots: frozenset[int], holders: frozenset[int]) -> dict[int, str]:
    """Each process in the trees below `roots`, and what it is."""
    seen: dict[int, _Seen] = {}
    if roots:
        seen = _look(proc)
    tree = _below(seen, roots)
    workers = {pid for pid in tree if pid not in roots and seen[pid].name in _WORKER_NAMES}
    trainers = (holders | _owners(proc, seen, workers)) & set(tree) - workers or roots & set(tree)
    return dict.fromkeys(tree, "other") | dict.fromkeys(trainers, "trainer") | dict.fromkeys(workers, "worker")


def _below(seen: dict[int, _Seen], roots: Iterable[int]) -> list[int]:
    """The processes in the trees below `roots`, each before its children."""
    children: dict[int, list[int]] = {}
    for pid in sorted(seen, reverse=True):
        children.setdefault(seen[pid].parent, []).append(pid)
    tree: dict[int, None] = {}
    todo = sorted(seen.keys() & set(roots), reverse=True)
    while todo:
        pid = todo.pop()
        if pid not in tree:
            tree[pid] = None
            todo += children.get(pid, ())
    return list(tree)


def _owners(proc: Path, seen: dict[int, _Seen], workers: set[int]) -> set[int]:
    """The processes that started these workers; not those that adopted one whose trainer died, such
    as init."""
    owners: set[int] = set()
    for worker in workers:
        owner = seen[worker].parent
        while owner in seen and _is_fork_server(proc, owner, seen[owner].name):
            owner = seen[owner].parent
        if owner in seen and seen[owner].session == seen[worker].session and _is_python(proc, owner):
            owners.add(owner)
    return owners


def _is_fork_server(proc: Path, pid: int, name: str) -> bool:
    return name == _OUR_FORK_SERVER or _FORK_SERVER in text_of(f"{proc}/{pid}/cmdline")


def _is_python(proc: Path, pid: int) -> bool:
    try:
        return "python" in os.readlink(f"{proc}/{pid}/exe")  # noqa: PTH115 - Paths are slow
    except OSError:  # somebody else's
        return "python" in text_of(f"{proc}/{pid}/cmdline")
