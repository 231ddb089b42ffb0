"""The processes of a training: the trainers, their loader workers, and the rest of the tree.

A loader worker is known by the name that torch (since 2.5) or flatout gives it. A trainer holds memory on a GPU, or has
workers of its own. A process that has adopted a worker whose trainer died, such as init or a shell, is none. Read from
/proc: on Windows and macOS none are seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from flatout.redact import redact_text
from flatout.sample.budget import table_of, text_of
from flatout.sample.host import Rates
from flatout.trace import ProcessSample

_LOOK_FOR_NEW_S = 5.0
_PSS_AT_ONCE = 8  # the kernel walks all pages of a process for its PSS: milliseconds each
_PSS_PAUSE_S = 4.0  # so a tree of seven comes round every 30 s, a larger one less often
_WORKER_NAMES = ("pt_data_worker", "flatout-worker")
_FORK_SERVER = "multiprocessing.forkserver"
_OUR_FORK_SERVER = "flatout-forksrv"


class Tree:
    """The process trees below `roots`; processes come and go between reads."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = Proc(root / "proc")
        self._known: dict[int, _Process] = {}
        self._roots: frozenset[int] = frozenset()
        self._holders: frozenset[int] = frozenset()
        self._looked_s = -_LOOK_FOR_NEW_S
        self._pss_s = -_PSS_PAUSE_S

    def read(self, now_s: float, roots: Iterable[int], gpu_holders: Iterable[int] = ()) -> tuple[ProcessSample, ...]:
        """Every process in the trees now. `gpu_holders` are the processes known to use a GPU."""
        asked, holders = frozenset(roots), frozenset(gpu_holders)
        if asked != self._roots or holders != self._holders or now_s - self._looked_s >= _LOOK_FOR_NEW_S:
            self._roots, self._holders, self._looked_s = asked, holders, now_s
            self._look_for_new()
        self._measure_some_pss(now_s)
        samples = {pid: process.read(now_s) for pid, process in self._known.items()}
        self._known = {pid: process for pid, process in self._known.items() if samples[pid] is not None}
        return tuple(filter(None, samples.values()))

    def _measure_some_pss(self, now_s: float) -> None:
        """A few at first, then one now and then: the one that has waited longest, trainers before their workers."""
        if now_s - self._pss_s < _PSS_PAUSE_S or not self._known:
            return
        first = all(process.pss_s is None for process in self._known.values())
        waiting = sorted(self._known.values(), key=lambda p: (p.pss_s is not None, p.pss_s or 0.0, p.role != "trainer"))
        for process in waiting[: _PSS_AT_ONCE if first else 1]:
            process.measure_pss(now_s)
        self._pss_s = now_s

    def _look_for_new(self) -> None:
        before, self._known = self._known, {}
        tree = _below(self._proc, self._roots)
        for pid, role in _roles(self._proc, tree, self._roots, self._holders).items():
            self._known[pid] = before.get(pid) or _Process(self._proc.folder / str(pid), pid)
            self._known[pid].role = role


def find_trainings(root: Path = Path("/")) -> tuple[int, ...]:
    """Processes that have loader workers: the trainings that can be seen without asking a GPU."""
    proc = Proc(root / "proc")
    workers = [pid for pid in proc.pids() if proc.name(pid) in _WORKER_NAMES]
    return tuple(sorted(_owners(proc, {pid: proc.parent(pid) for pid in workers})))


def process_ids() -> list[int]:
    """All processes that can be seen."""
    return Proc(Path("/proc")).pids()


def descendants(pid: int) -> set[int]:
    """The children of a process, their children, and so on."""
    return _below(Proc(Path("/proc")), frozenset((pid,))).keys() - {pid}


def _below(proc: Proc, roots: frozenset[int]) -> dict[int, int]:
    """The processes in the trees below `roots`, each with its parent."""
    if not roots:
        return {}
    parents = {pid: parent for pid in proc.pids() if (parent := proc.parent(pid)) is not None}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    tree: dict[int, int] = {}
    todo = sorted(roots & parents.keys(), reverse=True)
    while todo:
        pid = todo.pop()
        if pid not in tree:
            tree[pid] = parents[pid]
            todo += sorted(children.get(pid, ()), reverse=True)
    return tree


def _roles(proc: Proc, tree: dict[int, int], roots: frozenset[int], holders: frozenset[int]) -> dict[int, str]:
    workers = {pid for pid in tree if pid not in roots and proc.name(pid) in _WORKER_NAMES}
    owners = _owners(proc, {pid: tree[pid] for pid in workers})
    trainers = (holders | owners) & tree.keys() - workers or roots & tree.keys()
    return dict.fromkeys(tree, "other") | dict.fromkeys(trainers, "trainer") | dict.fromkeys(workers, "worker")


def _owners(proc: Proc, parents: Mapping[int, int | None]) -> set[int]:
    """The processes that started these workers, not those that adopted an orphan."""
    owners: set[int] = set()
    for worker, parent in parents.items():
        if parent is None:
            continue
        owner = _behind_fork_server(proc, parent)
        if owner not in owners and _has_started(proc, owner, worker):
            owners.add(owner)
    return owners


def _has_started(proc: Proc, owner: int, worker: int) -> bool:
    """Whether it is its worker: a fork has the same command line, unless one has changed its own since; then both are
    Pythons of the same session."""
    command = proc.command(owner)
    if command == proc.command(worker):
        return bool(command)
    return proc.is_python(owner) and proc.session(owner) == proc.session(worker)


def _behind_fork_server(proc: Proc, owner: int) -> int:
    """The trainer of a worker: its parent, or what started its parent, if that is a fork server."""
    while _FORK_SERVER in proc.command(owner) or proc.name(owner) == _OUR_FORK_SERVER:
        owner = proc.parent(owner) or 0
    return owner


class Proc:
    """What /proc says of a process; None or empty when it is not to be seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parents: dict[int, int] = {}  # a parent changes only when it ends: asked for once

    def has(self, pid: int) -> bool:
        return (self.folder / str(pid)).exists()

    def pids(self) -> list[int]:
        if not self.folder.is_dir():  # Windows, macOS
            return []
        there = [int(name) for name in os.listdir(self.folder) if name.isdigit()]  # noqa: PTH208 - Paths are slow
        for gone in self._parents.keys() - set(there):
            del self._parents[gone]
        return there

    def parent(self, pid: int) -> int | None:
        if pid not in self._parents:
            _, fields = stat_of(f"{self.folder}/{pid}")
            if not fields:
                return None
            self._parents[pid] = int(fields[1])
        return self._parents[pid]

    def name(self, pid: int) -> str:
        return text_of(f"{self.folder}/{pid}/comm")

    def command(self, pid: int) -> str:
        return text_of(f"{self.folder}/{pid}/cmdline")

    def is_python(self, pid: int) -> bool:
        try:
            return "python" in os.readlink(f"{self.folder}/{pid}/exe")  # noqa: PTH115 - Paths are slow
        except OSError:  # somebody else's
            return "python" in self.command(pid)

    def session(self, pid: int) -> list[str]:
        return stat_of(f"{self.folder}/{pid}")[1][3:4]


def stat_of(folder: str) -> tuple[str, list[str]]:
    """/proc/PID/stat: the name, which may itself hold spaces and brackets, and the fields behind it."""
    before, _, behind = text_of(f"{folder}/stat").rpartition(")")
    return before.partition("(")[2], behind.split()


class _Process:
    """One process, from read to read."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.role = "other"
        self._pid = pid
        self._folder = str(folder)
        self._rates = Rates()
        self._pss_bytes: int | None = None
        self.pss_s: float | None = None

    def measure_pss(self, now_s: float) -> None:
        """Ask for its share of memory, pages shared with others counted once: costly."""
        self.pss_s = now_s
        pss = table_of(f"{self._folder}/smaps_rollup").get("Pss:")
        self._pss_bytes = None if pss is None else pss * 1024

    def read(self, now_s: float) -> ProcessSample | None:
        """What it did since the last read; None when it has ended."""
        name, fields = stat_of(self._folder)
        if len(fields) < 22 or fields[0] in "ZX":
            return None
        # Of the main thread alone, which trains or loads: how long it waited for a core, and how often it got one.
        waits = text_of(f"{self._folder}/schedstat").split()
        delay_ns, switches = (int(waits[1]), int(waits[2])) if len(waits) == 3 else (None, None)
        rates = self._rates
        rates.next_read(now_s)
        return ProcessSample(
            pid=self._pid,
            role=self.role,
            name=redact_text(name),
            cpu_pct=rates.a_second("ticks", int(fields[11]) + int(fields[12]), 100 / _TICKS_S),
            run_delay_pct=rates.a_second("delay", delay_ns, 1e-7),
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
            pss_bytes=self._pss_bytes,
            read_bytes_s=rates.a_second("read", table_of(f"{self._folder}/io").get("rchar:")),
            switches_s=rates.a_second("switches", switches),
            threads=int(fields[17]),
            state=fields[0],
        )


if hasattr(os, "sysconf"):  # not on Windows
    _TICKS_S, _PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
