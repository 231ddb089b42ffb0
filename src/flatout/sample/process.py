"""The processes of a training: the trainers, their loader workers, and the rest of the tree.

A loader worker is known by the name that torch (since 2.5) or flatout gives it. A trainer holds memory on a GPU, or has
workers of its own. A process that has adopted a worker whose trainer died, such as init or a shell, is none. Read from
/proc: on Windows and macOS none are seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from flatout.redact import redact_text
from flatout.sample.host import ProcFile, counter, kibibytes, rate
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
        samples = []
        for pid, process in list(self._known.items()):
            sample = process.read(now_s)
            if sample is None:
                process.close()
                del self._known[pid]
            else:
                samples.append(sample)
        return tuple(samples)

    def close(self) -> None:
        """Give the descriptors back."""
        for process in self._known.values():
            process.close()
        self._known.clear()

    def _measure_some_pss(self, now_s: float) -> None:
        """A few at first, then one now and then: the one that has waited longest, trainers before their workers."""
        if now_s - self._pss_s < _PSS_PAUSE_S or not self._known:
            return
        count = 1
        if all(process.pss_s is None for process in self._known.values()):
            count = _PSS_AT_ONCE
        waiting = sorted(self._known.values(), key=lambda p: (p.pss_s is not None, p.pss_s or 0.0, p.role != "trainer"))
        for process in waiting[:count]:
            process.measure_pss(now_s)
        self._pss_s = now_s

    def _look_for_new(self) -> None:
        tree = _below(self._proc, self._roots)
        for pid in self._known.keys() - tree.keys():
            self._known.pop(pid).close()
        for pid, role in _roles(self._proc, tree, self._roots, self._holders).items():
            if pid in self._known:
                self._known[pid].role = role
            else:
                self._known[pid] = _Process(self._proc.folder / str(pid), pid, role)


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
    trainers = (holders | owners) & tree.keys() - workers
    trainers = trainers or roots & tree.keys()
    roles = dict.fromkeys(tree, "other")
    roles |= dict.fromkeys(trainers, "trainer")
    return roles | dict.fromkeys(workers, "worker")


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
            fields = self._fields(pid)
            if not fields:
                return None
            self._parents[pid] = int(fields[1])
        return self._parents[pid]

    def name(self, pid: int) -> str:
        return _text(f"{self.folder}/{pid}/comm").strip()

    def command(self, pid: int) -> str:
        return _text(f"{self.folder}/{pid}/cmdline")

    def is_python(self, pid: int) -> bool:
        try:
            return "python" in os.readlink(f"{self.folder}/{pid}/exe")  # noqa: PTH115 - Paths are slow
        except OSError:  # somebody else's
            return "python" in self.command(pid)

    def session(self, pid: int) -> list[str]:
        return self._fields(pid)[3:4]

    def _fields(self, pid: int) -> list[str]:
        """Those of /proc/PID/stat behind the name, which may itself hold spaces and brackets."""
        return _text(f"{self.folder}/{pid}/stat").rpartition(")")[2].split()


class _ProcessCounters(NamedTuple):
    """What only counts up, at one moment."""

    now_s: float
    ticks: int
    delay_ns: int | None = None  # waiting for a core: of the main thread alone, the one that trains, or loads
    switches: int | None = None
    read_bytes: int | None = None


class _Process:
    """One process, its files kept open between reads."""

    __slots__ = ("_before", "_folder", "_io", "_pid", "_pss", "_schedstat", "_stat", "pss_s", "role")

    def __init__(self, folder: Path, pid: int, role: str) -> None:
        self.role = role
        self._pid = pid
        self._folder = folder
        self._stat = ProcFile(folder / "stat")
        self._schedstat = ProcFile(folder / "schedstat")
        self._io = ProcFile(folder / "io")
        self._before: _ProcessCounters | None = None
        self._pss: int | None = None
        self.pss_s: float | None = None

    def measure_pss(self, now_s: float) -> None:
        """Ask for its share of memory, pages shared with others counted once: costly."""
        self.pss_s = now_s
        self._pss = kibibytes(_text(f"{self._folder}/smaps_rollup").encode(), b"\nPss:")

    def read(self, now_s: float) -> ProcessSample | None:
        """What it did since the last read; None when it has ended."""
        stat = self._stat.read()
        name_end = stat.rfind(b")")
        fields = stat[name_end + 2 :].split(None, 22)
        if len(fields) < 22 or fields[0] in b"ZX":
            return None
        now = _ProcessCounters(
            now_s, int(fields[11]) + int(fields[12]), *self._waits(), counter(self._io.read(), b"rchar:")
        )
        before, self._before = self._before, now
        rates: dict[str, float | None] = {}
        if before is not None and now_s > before.now_s:
            seconds = now_s - before.now_s
            rates = {
                "cpu_pct": 100 * (now.ticks - before.ticks) / _TICKS_S / seconds,
                "run_delay_pct": rate(now.delay_ns, before.delay_ns, seconds * 1e7),
                "switches_s": rate(now.switches, before.switches, seconds),
                "read_bytes_s": rate(now.read_bytes, before.read_bytes, seconds),
            }
        return ProcessSample(
            pid=self._pid,
            role=self.role,
            name=redact_text(stat[stat.find(b"(") + 1 : name_end].decode("utf-8", "replace")),
            state=fields[0].decode("ascii"),
            threads=int(fields[17]),
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
            pss_bytes=self._pss,
            **rates,
        )

    def _waits(self) -> tuple[int | None, int | None]:
        words = self._schedstat.read().split()
        if len(words) != 3:
            return None, None
        return int(words[1]), int(words[2])

    def close(self) -> None:
        for file in (self._stat, self._schedstat, self._io):
            file.close()


_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - read a thousand times a look, and this is the fast way
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
