"""The machine: cores, pressure, memory and disks, from /proc, /sys and the control groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.sample.budget import CgroupFiles, on_linux
from flatout.trace import DiskSample, HostSample

if TYPE_CHECKING:
    from flatout.sample.elsewhere import PsutilHost

_LONG_BYTES = 1 << 18  # /proc/stat lists every interrupt of a large machine
_SECTOR_BYTES = 512
_NOT_DISKS = ("loop", "ram", "zram", "sr", "fd")


def host_of(root: Path) -> Host | PsutilHost:
    """What reads this machine."""
    if on_linux():
        return Host(root)
    from flatout.sample.elsewhere import PsutilHost

    return PsutilHost()


class ProcFile:
    """A /proc file kept open: reading it again costs a third of opening it again."""

    __slots__ = ("_fd",)

    def __init__(self, path: Path | str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError:
            self._fd = -1

    def read(self, longest: int = 4096) -> bytes:
        """What the file says now, up to `longest` bytes; empty when it cannot be read."""
        try:
            return os.pread(self._fd, longest, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Host:
    """Reads the machine; rates are over the time since the read before."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._files = {name: ProcFile(root / "proc" / name) for name in ("stat", "meminfo", "diskstats")}
        self._pressure = {name: ProcFile(root / "proc/pressure" / name) for name in ("cpu", "io", "memory")}
        self._disks = _whole_disks(root)
        self._cgroup = CgroupFiles(root)
        self._before: _Counters | None = None

    def read(self, now_s: float) -> HostSample:
        """The machine since the last read; what is a rate is None the first time."""
        now = _Counters(
            now_s=now_s,
            cores=_cpu_ticks(stat := self._files["stat"].read(_LONG_BYTES)),
            switches=counter(stat, b"\nctxt "),
            pressure_us={name: counter(file.read(), b"total=") for name, file in self._pressure.items()},
            quota_periods=self._cgroup.quota_periods(),
            disks=_disk_counters(self._files["diskstats"].read(_LONG_BYTES), self._disks),
        )
        before, self._before = self._before, now
        rates: dict[str, Any] = {}
        if before is not None and now_s > before.now_s:
            rates = now.since(before)
        return HostSample(run_queue=counter(stat, b"\nprocs_running "), **self._levels(), **rates)

    def close(self) -> None:
        """Give the descriptors back."""
        for file in (*self._files.values(), *self._pressure.values()):
            file.close()

    def _levels(self) -> dict[str, Any]:
        info = self._files["meminfo"].read()
        total, available = kibibytes(info, b"MemTotal:"), kibibytes(info, b"MemAvailable:")
        used = _difference(total, available)
        limited = self._cgroup.memory()
        if limited is not None and (total is None or limited[0] < total):
            total, used = limited
        swap_total, swap_free = kibibytes(info, b"SwapTotal:"), kibibytes(info, b"SwapFree:")
        levels: dict[str, Any] = {
            "memory_total_bytes": total,
            "memory_used_bytes": used,
            "page_cache_bytes": kibibytes(info, b"\nCached:"),
            "swap_used_bytes": _difference(swap_total, swap_free),
        }
        try:
            shm = os.statvfs(self._root / "dev/shm")
        except OSError:
            return levels
        return levels | {
            "shm_total_bytes": shm.f_frsize * shm.f_blocks,
            "shm_used_bytes": shm.f_frsize * (shm.f_blocks - shm.f_bfree),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    """What only counts up, at one moment."""

    now_s: float
    cores: list[tuple[int, int, int]]
    switches: int | None
    pressure_us: dict[str, int | None]
    quota_periods: tuple[int, int] | None
    disks: dict[str, tuple[int, int, int]]

    def since(self, before: _Counters) -> dict[str, Any]:
        seconds = self.now_s - before.now_s
        pairs = zip(self.cores, before.cores, strict=False)
        spent = [(now[0] - was[0], now[1] - was[1], now[2] - was[2]) for now, was in pairs]
        busy = [_pct(ticks - idle - waiting, ticks) for ticks, idle, waiting in spent]

        def stalled_pct(name: str) -> float | None:
            stalled_us = _difference(self.pressure_us[name], before.pressure_us[name])
            if stalled_us is None:
                return None
            return _pct(stalled_us, seconds * 1e6)

        return {
            "cpu_pct": busy[0] if busy else None,
            "cores_pct": tuple(busy[1:]),
            "iowait_pct": _pct(spent[0][2], spent[0][0]) if spent else None,
            "switches_s": rate(self.switches, before.switches, seconds),
            "pressure_cpu_pct": stalled_pct("cpu"),
            "pressure_io_pct": stalled_pct("io"),
            "pressure_memory_pct": stalled_pct("memory"),
            "throttled_pct": _held_back_pct(self.quota_periods, before.quota_periods),
            "disks": tuple(
                DiskSample(
                    name=name,
                    read_bytes_s=(now[0] - before.disks[name][0]) * _SECTOR_BYTES / seconds,
                    write_bytes_s=(now[1] - before.disks[name][1]) * _SECTOR_BYTES / seconds,
                    busy_pct=min(100.0, (now[2] - before.disks[name][2]) / seconds / 10),
                )
                for name, now in self.disks.items()
                if name in before.disks
            ),
        }


def _cpu_ticks(stat: bytes) -> list[tuple[int, int, int]]:
    """(all, idle, waiting for disks) ticks: first of the whole machine, then of each core."""
    found = []
    for line in stat.split(b"\n"):
        if not line.startswith(b"cpu"):
            break
        # The two columns behind, guest times, are part of user time already.
        ticks = [int(word) for word in line.split()[1:9]]
        found.append((sum(ticks), ticks[3], ticks[4]))
    return found


def rate(now: int | None, before: int | None, divisor: float) -> float | None:
    """How much a counter has grown, by the divisor; None where it is not known."""
    grown = _difference(now, before)
    if grown is None:
        return None
    return grown / divisor


def _difference(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return None
    return one - other


def _pct(part: float, whole: float) -> float:
    if whole <= 0:
        return 0.0
    return min(100.0, max(0.0, 100 * part / whole))


def _held_back_pct(now: tuple[int, int] | None, before: tuple[int, int] | None) -> float | None:
    """In what share of its periods the quota held the group back; 0 when the group did not run at all."""
    if now is None or before is None:
        return None
    return _pct(now[0] - before[0], now[1] - before[1])


def counter(text: bytes, label: bytes) -> int | None:
    """The whole number right behind the first `label`."""
    at = text.find(label)
    if at < 0:
        return None
    return int(text[at + len(label) :].split(None, 1)[0])


def kibibytes(meminfo: bytes, label: bytes) -> int | None:
    value = counter(meminfo, label)
    if value is None:
        return None
    return value * 1024


def _whole_disks(root: Path) -> set[str]:
    """Disks; not their partitions, and not what is built upon other disks (RAID, LVM): nothing counts twice."""
    try:
        blocks = [path for path in (root / "sys/block").iterdir() if not path.name.startswith(_NOT_DISKS)]
        return {path.name for path in blocks if not any((path / "slaves").glob("*"))}
    except OSError:
        return set()


def _disk_counters(diskstats: bytes, disks: set[str]) -> dict[str, tuple[int, int, int]]:
    """(sectors read, sectors written, milliseconds busy) by disk."""
    rows = (line.split() for line in diskstats.decode("ascii", "replace").splitlines())
    return {row[2]: (int(row[5]), int(row[9]), int(row[12])) for row in rows if len(row) > 12 and row[2] in disks}
