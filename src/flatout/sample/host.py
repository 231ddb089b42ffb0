"""The machine: cores, pressure, memory and disks, from /proc, /sys and the control groups. On Windows and macOS
psutil says less of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.sample.budget import CgroupFiles, on_linux, table_of, text_of
from flatout.trace import DiskSample, HostSample

_SECTOR_BYTES = 512
_NOT_DISKS = ("loop", "ram", "zram", "sr", "fd")


def host_of(root: Path) -> Host | PsutilHost:
    """What reads this machine."""
    return Host(root) if on_linux() else PsutilHost()


class Rates:
    """How fast counters grow, from one read to the next; None where that is not known."""

    def __init__(self) -> None:
        self.seconds = 0.0  # since the read before
        self._read_s: float | None = None
        self._before: dict[str, int] = {}
        self._now: dict[str, int] = {}

    def next_read(self, now_s: float) -> None:
        """Another read begins."""
        if self._read_s is not None:
            self.seconds = now_s - self._read_s
        self._read_s = now_s
        self._before, self._now = self._now, {}

    def grown(self, name: str, count: int | None) -> int | None:
        """How much the counter of this name has grown."""
        if count is None:
            return None
        self._now[name] = count
        if name not in self._before or self.seconds <= 0:
            return None
        return max(0, count - self._before[name])

    def a_second(self, name: str, count: int | None, factor: float = 1) -> float | None:
        """The same a second, times a factor."""
        grown = self.grown(name, count)
        return None if grown is None else grown * factor / self.seconds


class Host:
    """Reads the machine; rates are over the time since the read before."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._proc = root, root / "proc"
        self._disks = _whole_disks(root)
        self._cgroup = CgroupFiles(root)
        self._rates = Rates()

    def read(self, now_s: float) -> HostSample:
        """The machine since the last read; what is a rate is None the first time."""
        self._rates.next_read(now_s)
        numbers = table_of(self._proc / "stat")
        rates = {
            **self._cores(),
            "switches_s": self._rates.a_second("switches", numbers.get("ctxt")),
            "pressure_cpu_pct": self._pressure_pct("cpu"),
            "pressure_io_pct": self._pressure_pct("io"),
            "pressure_memory_pct": self._pressure_pct("memory"),
            "throttled_pct": self._throttled_pct(),
            "disks": tuple(filter(None, self._disk_samples())),
        }
        if self._rates.seconds <= 0:
            rates = {}
        return HostSample(run_queue=numbers.get("procs_running"), **self._levels(), **rates)

    def _levels(self) -> dict[str, Any]:
        info = {name: 1024 * number for name, number in table_of(self._proc / "meminfo").items()}
        total, used = info.get("MemTotal:"), _difference(info, "MemTotal:", "MemAvailable:")
        limited = self._cgroup.memory()
        if limited is not None and (total is None or limited[0] < total):
            total, used = limited
        levels: dict[str, Any] = {
            "memory_total_bytes": total,
            "memory_used_bytes": used,
            "page_cache_bytes": info.get("Cached:"),
            "swap_used_bytes": _difference(info, "SwapTotal:", "SwapFree:"),
        }
        try:
            shm = os.statvfs(self._root / "dev/shm")
        except OSError:
            return levels
        return levels | {
            "shm_total_bytes": shm.f_frsize * shm.f_blocks,
            "shm_used_bytes": shm.f_frsize * (shm.f_blocks - shm.f_bfree),
        }

    def _cores(self) -> dict[str, Any]:
        """How busy the machine is, which comes first in the file, and each core."""
        busy: list[float | None] = []
        iowait = None
        for line in text_of(self._proc / "stat").splitlines():
            if not line.startswith("cpu"):
                break
            # The two columns behind, guest times, are part of user time already.
            core, *words = line.split()[:9]
            ticks = [int(word) for word in words]
            passed = self._rates.grown(core, sum(ticks))
            waiting = self._rates.grown(f"{core} waits", ticks[4])
            if not busy:
                iowait = _pct(waiting, passed)
            busy.append(_pct(self._rates.grown(f"{core} works", sum(ticks) - ticks[3] - ticks[4]), passed))
        cores_pct = tuple(pct for pct in busy[1:] if pct is not None)
        return {"cpu_pct": busy[0] if busy else None, "cores_pct": cores_pct, "iowait_pct": iowait}

    def _pressure_pct(self, name: str) -> float | None:
        total_us = text_of(self._proc / "pressure" / name).partition("total=")[2].split()[:1]
        share_pct = self._rates.a_second(f"pressure {name}", int(total_us[0]) if total_us else None, 1e-4)
        return None if share_pct is None else min(100.0, share_pct)

    def _throttled_pct(self) -> float | None:
        """In what share of its periods the quota held the group back; 0 when the group did not run at all."""
        held, periods = self._cgroup.quota_periods() or (None, None)
        return _pct(self._rates.grown("held back", held), self._rates.grown("periods", periods))

    def _disk_samples(self) -> Iterator[DiskSample | None]:
        for line in text_of(self._proc / "diskstats").splitlines():
            words = line.split()
            if len(words) > 12 and words[2] in self._disks:
                read, written, busy_ms = int(words[5]), int(words[9]), int(words[12])
                yield _disk(self._rates, words[2], read * _SECTOR_BYTES, written * _SECTOR_BYTES, busy_ms)


def _disk(
    rates: Rates, name: str, read_bytes: int, written_bytes: int, busy_ms: int | None = None
) -> DiskSample | None:
    """A disk since the last read; None where it is new."""
    read_s, written_s = rates.a_second(f"{name} reads", read_bytes), rates.a_second(f"{name} writes", written_bytes)
    busy_pct = rates.a_second(f"{name} works", busy_ms, 0.1)
    if read_s is None or written_s is None:
        return None
    if busy_pct is not None:
        busy_pct = min(100.0, busy_pct)
    return DiskSample(name=name, read_bytes_s=read_s, write_bytes_s=written_s, busy_pct=busy_pct)


def _pct(part: float | None, whole: float | None) -> float | None:
    if part is None or whole is None:
        return None
    return min(100.0, 100 * part / whole) if whole else 0.0


def _difference(numbers: dict[str, int], one: str, other: str) -> int | None:
    return numbers[one] - numbers[other] if one in numbers and other in numbers else None


def _whole_disks(root: Path) -> set[str]:
    """Disks; not their partitions, and not what is built upon other disks (RAID, LVM): nothing counts twice."""
    try:
        blocks = [path for path in (root / "sys/block").iterdir() if not path.name.startswith(_NOT_DISKS)]
        return {path.name for path in blocks if not any((path / "slaves").glob("*"))}
    except OSError:
        return set()


class PsutilHost:
    """The machine under Windows and macOS."""

    def __init__(self) -> None:
        self._rates = Rates()

    def read(self, now_s: float) -> HostSample:
        """As `Host.read`."""
        import psutil  # installed only there

        self._rates.next_read(now_s)
        memory = psutil.virtual_memory()
        # These are since the call before, so the first call says nothing.
        cores = tuple(psutil.cpu_percent(percpu=True))
        counters = psutil.disk_io_counters(perdisk=True) or {}
        disks = [_disk(self._rates, name, disk.read_bytes, disk.write_bytes) for name, disk in counters.items()]
        rates: dict[str, Any] = {}
        if self._rates.seconds > 0:
            rates = {
                "cpu_pct": sum(cores) / max(1, len(cores)),
                "cores_pct": cores,
                "disks": tuple(filter(None, disks)),
            }
        return HostSample(
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            swap_used_bytes=psutil.swap_memory().used,
            **rates,
        )
