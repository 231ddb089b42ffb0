"""The processes of a training: the trainers, their loader workers, and the rest of the tree.

A loader worker is known by the name torch gives it, by being a fork of its parent (the same command line), or by
multiprocessing's own marks on a spawned one. A trainer is a process that holds memory on a card, or has workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from flatout.sense.host import ProcFile
from flatout.trace import ProcessSample

_LOOK_FOR_NEW_S = 5.0
_PSS_EVERY_S = 30.0
_WORKER_NAME = "pt_data_worker"
_SPAWN_MARKS = ("multiprocessing.spawn", "multiprocessing.forkserver", "--multiprocessing-fork")


class Tree:
    """The process trees below `roots`; processes come and go between reads."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._known: dict[int, _Process] = {}
        self._roots: frozenset[int] = frozenset()
        self._holders: frozenset[int] = frozenset()
        self._looked_s = -_LOOK_FOR_NEW_S

    def read(self, now_s: float, roots: Iterable[int], card_holders: Iterable[int] = ()) -> tuple[ProcessSample, ...]:
        """Every process in the trees now. `card_holders` are the processes known to use a GPU."""
        asked, holders = frozenset(roots), frozenset(card_holders)
        if asked != self._roots or holders != self._holders or now_s - self._looked_s >= _LOOK_FOR_NEW_S:
            self._roots, self._holders, self._looked_s = asked, holders, now_s
            self._look_for_new()
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

    def _look_for_new(self) -> None:
        parents = parents_of_all(self._proc) if self._roots else {}
        tree = _below(self._roots, parents)
        for pid in set(self._known) - set(tree):
            self._known.pop(pid).close()
        workers = {pid for pid in tree if pid not in self._roots and _is_worker(self._proc, pid, parents.get(pid))}
        trainers = (self._holders | {parents[pid] for pid in workers if pid in parents}) & set(tree) - workers
        trainers = trainers or self._roots & set(tree)
        for pid in tree:
            role = "worker" if pid in workers else "trainer" if pid in trainers else "other"
            if pid in self._known:
                self._known[pid].role = role
            else:
                self._known[pid] = _Process(self._proc, pid, role)


def parents_of_all(proc: Path = Path("/proc")) -> dict[int, int]:
    """The parent of every process there is."""
    if sys.platform != "linux":
        return {p.pid: p.info["ppid"] for p in psutil.process_iter(["ppid"])}
    parents = {}
    for name in os.listdir(proc):  # noqa: PTH208 - a Path for each of a thousand processes is slow
        if name.isdigit():
            fields = _after_name(_read_once(proc / name / "stat"))
            if fields:
                parents[int(name)] = int(fields[1])
    return parents


def find_trainings(proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Processes that have loader workers: the trainings one can see without asking a card."""
    parents = parents_of_all(proc)
    return tuple(sorted({parents[pid] for pid in parents if _read_once(proc / str(pid) / "comm") == _WORKER_NAME}))


class _Process:
    """One process, its files kept open between reads."""

    __slots__ = ("_before", "_io", "_pid", "_proc", "_pss", "_pss_s", "_schedstat", "_stat", "role")

    def __init__(self, proc: Path, pid: int, role: str) -> None:
        self.role = role
        self._pid = pid
        self._proc = proc
        self._stat = ProcFile(proc / str(pid) / "stat")
        self._schedstat = ProcFile(proc / str(pid) / "schedstat")
        self._io = ProcFile(proc / str(pid) / "io")
        self._before: tuple[float, int, int | None, int | None, int | None] | None = None
        self._pss: int | None = None
        self._pss_s = -_PSS_EVERY_S

    def read(self, now_s: float) -> ProcessSample | None:
        stat = self._stat.read().decode("ascii", "replace")
        fields = _after_name(stat)
        if not fields or fields[0] in "ZX":
            return None
        if now_s - self._pss_s >= _PSS_EVERY_S:
            self._pss_s = now_s
            self._pss = _pss_bytes(self._proc / str(self._pid) / "smaps_rollup")
        ticks = int(fields[11]) + int(fields[12])
        waits = self._schedstat.read().split()
        delay_ns, switches = (int(waits[1]), int(waits[2])) if len(waits) == 3 else (None, None)
        read_bytes = _read_counter(self._io.read())
        before, self._before = self._before, (now_s, ticks, delay_ns, switches, read_bytes)
        rates: dict[str, float | None] = {}
        if before is not None and now_s > before[0]:
            seconds = now_s - before[0]
            rates = {
                "cpu_pct": 100 * (ticks - before[1]) / _TICKS_S / seconds,
                "run_delay_pct": _rate(delay_ns, before[2], seconds * 1e7),
                "switches_s": _rate(switches, before[3], seconds),
                "read_bytes_s": _rate(read_bytes, before[4], seconds),
            }
        return ProcessSample(
            pid=self._pid,
            role=self.role,
            name=stat[stat.find("(") + 1 : stat.rfind(")")],
            state=fields[0],
            threads=int(fields[17]),
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
            pss_bytes=self._pss,
            **rates,
        )

    def close(self) -> None:
        for file in (self._stat, self._schedstat, self._io):
            file.close()


_TICKS_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _rate(now: int | None, before: int | None, divisor: float) -> float | None:
    return (now - before) / divisor if now is not None and before is not None else None


def _after_name(stat: str) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may itself hold spaces and brackets."""
    return stat[stat.rfind(")") + 2 :].split() if ")" in stat else []


def _below(roots: frozenset[int], parents: dict[int, int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    tree: list[int] = []
    todo = sorted(roots & parents.keys(), reverse=True)
    while todo:
        pid = todo.pop()
        if pid not in tree:
            tree.append(pid)
            todo += sorted(children.get(pid, ()), reverse=True)
    return tree


def _is_worker(proc: Path, pid: int, parent: int | None) -> bool:
    if _read_once(proc / str(pid) / "comm") == _WORKER_NAME:
        return True
    command = _read_once(proc / str(pid) / "cmdline")
    if "python" not in command or "resource_tracker" in command:
        return False
    if any(mark in command for mark in _SPAWN_MARKS):
        return True
    return parent is not None and command == _read_once(proc / str(parent) / "cmdline")


def _read_counter(io: bytes) -> int | None:
    """Bytes read, by the process's own count: network file systems do not show up among the disks."""
    at = io.find(b"rchar: ")
    return int(io[at + 7 :].split(None, 1)[0]) if at >= 0 else None


def _pss_bytes(rollup: Path) -> int | None:
    for line in _read_once(rollup).splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def _read_once(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
