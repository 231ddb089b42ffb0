"""One sampler for everything outside the training process: its GPUs, the machine, the training's
processes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.model.errors import UsageError
from flatout.sample.budget import CgroupFiles, size_of_shm, table_of, text_of
from flatout.sample.gpu import Gpus
from flatout.sample.process import Rates, Tree, find_trainings
from flatout.trace import DiskSample, HostSample, Sample

_FIND_TRAININGS_EVERY_S = 10.0
# GPM allows 8 Hz; at 4 a load switched every 2 s is still seen within a few per cent.
PULSE_EVERY_S = 0.25
_SECTOR_BYTES = 512
_NOT_DISKS = ("loop", "ram", "zram", "sr", "fd")


class Sampler:
    """Call `read` at the pace you want, and `pulse` every PULSE_EVERY_S in between; `close` when done.

    Without `pids` it follows the processes that hold memory on the GPUs, or else those that have loader
    workers. `root` and `nvml` are for tests with recorded data.
    """

    def __init__(
        self,
        *,
        gpus: Sequence[int] | None = None,
        pids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
        nvml: Any = None,
    ) -> None:
        self.notes: list[str] = []
        self._clock = clock
        self._root = root
        self._pids = tuple(pids)
        for pid in pids:
            if not self._is_there(pid):
                raise UsageError(f"there is no process {pid}")
        self._found: tuple[int, ...] = ()
        self._found_s = -math.inf
        self._read_s: float | None = None
        self._gpus = Gpus(gpus, self._note, nvml)
        self._host = host_of(root)
        self._tree = Tree(root)

    def pulse(self) -> None:
        """Look at the GPUs' activity only; it comes out as `GpuSample.pulses` of the next read."""
        self._gpus.pulse(self._clock())

    def due(self, interval_s: float) -> bool:
        """Whether a read is due, when one wants them `interval_s` apart."""
        return self._read_s is None or self._clock() - self._read_s >= interval_s - 0.01

    def read(self) -> Sample:
        """Everything since the last read. The first one has levels, but no rates yet."""
        now_s = self._clock()
        gpus = self._gpus.read(now_s)
        holders = {process.pid for gpu in gpus for process in gpu.processes or ()}
        before_s = now_s if self._read_s is None else self._read_s
        sample = Sample(
            time_s=now_s,
            interval_s=now_s - before_s,
            host=self._host.read(now_s),
            gpus=gpus,
            processes=self._tree.read(now_s, self._followed(now_s, holders), holders),
        )
        self._read_s = now_s
        return sample

    def close(self) -> None:
        """Let go of the driver."""
        self._gpus.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _followed(self, now_s: float, holders: set[int]) -> tuple[int, ...]:
        if self._pids:
            return self._pids
        seen = sorted(filter(self._is_there, holders))
        if seen:
            return tuple(seen)
        if holders:
            self._note("the processes that use the GPUs are not to be seen here: looking for loader workers instead")
        if now_s - self._found_s >= _FIND_TRAININGS_EVERY_S:
            self._found_s = now_s
            self._found = find_trainings(self._root)
        return self._found

    def _is_there(self, pid: int) -> bool:
        return (self._root / "proc" / str(pid)).exists()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def host_of(root: Path) -> Host | PsutilHost:
    """What reads this machine."""
    return Host(root) if sys.platform == "linux" else PsutilHost()


class Host:
    """Reads cores, pressure, memory and disks from /proc, /sys and the control groups."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._proc = root, root / "proc"
        self._disks = _whole_disks(root)
        self._cgroup = CgroupFiles(root)
        self._rates = Rates()

    def read(self, now_s: float) -> HostSample:
        """The machine since the last read; what is a rate is None the first time."""
        rates = self._rates
        rates.next_read(now_s)
        numbers = table_of(self._proc / "stat")
        held_back, periods = self._cgroup.quota_periods() or (None, None)
        since: dict[str, Any] = {
            **self._cores(),
            "switches_s": rates.a_second("switches", numbers.get("ctxt")),
            "pressure_cpu_pct": self._pressure_pct("cpu"),
            "pressure_io_pct": self._pressure_pct("io"),
            "pressure_memory_pct": self._pressure_pct("memory"),
            # In what share of its periods the quota held the group back; 0 when the group did not run at all.
            "throttled_pct": _pct(rates.a_second("held back", held_back), rates.a_second("periods", periods)),
            "disks": tuple(filter(None, self._disk_samples())),
        }
        if not rates.seconds:
            since = {}
        return HostSample(run_queue=numbers.get("procs_running"), **self._levels(), **since)

    def _levels(self) -> dict[str, Any]:
        info = {name: 1024 * number for name, number in table_of(self._proc / "meminfo").items()}
        total, used = info.get("MemTotal:"), _difference(info, "MemTotal:", "MemAvailable:")
        limited = self._cgroup.memory()
        if limited is not None and (total is None or limited[0] < total):
            total, used = limited
        levels = {
            "memory_total_bytes": total,
            "memory_used_bytes": used,
            "page_cache_bytes": info.get("Cached:"),
            "swap_used_bytes": _difference(info, "SwapTotal:", "SwapFree:"),
        }
        shm = size_of_shm(self._root)
        if shm is not None:
            levels |= {"shm_total_bytes": shm[0], "shm_used_bytes": shm[0] - shm[1]}
        return levels

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
            passed = self._rates.a_second(core, sum(ticks))
            waiting = self._rates.a_second(f"{core} waits", ticks[4])
            if not busy:
                iowait = _pct(waiting, passed)
            busy.append(_pct(self._rates.a_second(f"{core} works", sum(ticks) - ticks[3] - ticks[4]), passed))
        cores_pct = tuple(pct for pct in busy[1:] if pct is not None)
        return {"cpu_pct": busy[0] if busy else None, "cores_pct": cores_pct, "iowait_pct": iowait}

    def _pressure_pct(self, name: str) -> float | None:
        """The share of time in which a process waited for this."""
        total_us = text_of(self._proc / "pressure" / name).partition("total=")[2].split()[:1]
        return _at_most_100(self._rates.a_second(f"pressure {name}", int(total_us[0]) if total_us else None, 1e-4))

    def _disk_samples(self) -> Iterator[DiskSample | None]:
        for line in text_of(self._proc / "diskstats").splitlines():
            words = line.split()
            if len(words) > 12 and words[2] in self._disks:
                read, written, busy_ms = int(words[5]), int(words[9]), int(words[12])
                yield _disk(self._rates, words[2], read * _SECTOR_BYTES, written * _SECTOR_BYTES, busy_ms)


class PsutilHost:
    """The machine under Windows and macOS, as far as psutil knows it."""

    def __init__(self) -> None:
        self._rates = Rates()

    def read(self, now_s: float) -> HostSample:
        """As `Host.read`."""
        import psutil  # installed only there

        self._rates.next_read(now_s)
        memory = psutil.virtual_memory()
        cores = tuple(psutil.cpu_percent(percpu=True))  # since the call before
        counters = psutil.disk_io_counters(perdisk=True) or {}
        disks = [_disk(self._rates, name, disk.read_bytes, disk.write_bytes) for name, disk in counters.items()]
        since: dict[str, Any] = {}
        if self._rates.seconds:
            cpu_pct = sum(cores) / max(1, len(cores))
            since = {"cpu_pct": cpu_pct, "cores_pct": cores, "disks": tuple(filter(None, disks))}
        return HostSample(
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            swap_used_bytes=psutil.swap_memory().used,
            **since,
        )


def _disk(
    rates: Rates, name: str, read_bytes: int, written_bytes: int, busy_ms: int | None = None
) -> DiskSample | None:
    """A disk since the last read; None where it is new."""
    read_s, written_s = rates.a_second(f"{name} reads", read_bytes), rates.a_second(f"{name} writes", written_bytes)
    busy_pct = _at_most_100(rates.a_second(f"{name} works", busy_ms, 0.1))
    if read_s is None or written_s is None:
        return None
    return DiskSample(name=name, read_bytes_s=read_s, write_bytes_s=written_s, busy_pct=busy_pct)


def _pct(part: float | None, whole: float | None) -> float | None:
    if part is None or whole is None:
        return None
    return min(100.0, 100 * part / whole) if whole else 0.0


def _at_most_100(pct: float | None) -> float | None:
    return None if pct is None else min(100.0, pct)


def _difference(numbers: dict[str, int], one: str, other: str) -> int | None:
    return numbers[one] - numbers[other] if one in numbers and other in numbers else None


def _whole_disks(root: Path) -> set[str]:
    """Disks; not their partitions, and not what is built upon other disks (RAID, LVM): nothing counts
    twice."""
    try:
        blocks = [path for path in (root / "sys/block").iterdir() if not path.name.startswith(_NOT_DISKS)]
        return {path.name for path in blocks if not any((path / "slaves").glob("*"))}
    except OSError:
        return set()
