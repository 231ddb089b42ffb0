"""Windows and macOS: what psutil says of the machine and its processes. On Linux /proc says more, without psutil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from flatout.redact import redact_text
from flatout.trace import DiskSample, HostSample, ProcessSample

T = TypeVar("T")


def memory() -> tuple[int, int]:
    """Bytes of memory, and how many of them are available."""
    of_machine = psutil.virtual_memory()
    return int(of_machine.total), int(of_machine.available)


class PsutilHost:
    """The machine."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, Any]] | None = None

    def read(self, now_s: float) -> HostSample:
        memory = psutil.virtual_memory()
        # These are since the call before, so the first call says nothing.
        cores = tuple(psutil.cpu_percent(percpu=True))
        counters = psutil.disk_io_counters(perdisk=True) or {}
        before, self._before = self._before, (now_s, counters)
        rates: dict[str, Any] = {}
        if before is not None and now_s > before[0]:
            seconds = now_s - before[0]
            rates = {
                "cpu_pct": sum(cores) / len(cores) if cores else None,
                "cores_pct": cores,
                "disks": tuple(
                    DiskSample(
                        name=name,
                        read_bytes_s=(now.read_bytes - before[1][name].read_bytes) / seconds,
                        write_bytes_s=(now.write_bytes - before[1][name].write_bytes) / seconds,
                    )
                    for name, now in counters.items()
                    if name in before[1]
                ),
            }
        return HostSample(
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            swap_used_bytes=psutil.swap_memory().used,
            **rates,
        )

    def close(self) -> None:
        """Nothing is held open."""


class PsutilProcesses:
    """The processes of this machine."""

    def has(self, pid: int) -> bool:
        return psutil.pid_exists(pid)

    def pids(self) -> list[int]:
        return psutil.pids()

    def parent(self, pid: int) -> int | None:
        return self._ask(pid, psutil.Process.ppid, None)

    def name(self, pid: int) -> str:
        return self._ask(pid, psutil.Process.name, "")

    def command(self, pid: int) -> str:
        return "\0".join(self._ask(pid, psutil.Process.cmdline, []))

    def is_python(self, pid: int) -> bool:
        return "python" in self.command(pid).lower()

    def session(self, pid: int) -> str | None:
        return None  # psutil does not say

    def _ask(self, pid: int, question: Callable[[psutil.Process], T], otherwise: T) -> T:
        try:
            return question(psutil.Process(pid))
        except psutil.Error:
            return otherwise

    def process(self, pid: int, role: str) -> PsutilProcess:
        return PsutilProcess(pid, role)


class PsutilProcess:
    """One process."""

    def __init__(self, pid: int, role: str) -> None:
        self.role = role
        self._pid = pid
        self._process: psutil.Process | None = None
        self._before: tuple[float, float] | None = None
        self.pss_s: float | None = None

    def measure_pss(self, now_s: float) -> None:
        self.pss_s = now_s  # psutil has it on Linux only

    def read(self, now_s: float) -> ProcessSample | None:
        try:
            self._process = self._process or psutil.Process(self._pid)
            with self._process.oneshot():
                times, name = self._process.cpu_times(), redact_text(self._process.name())
                rss, threads = self._process.memory_info().rss, self._process.num_threads()
        except psutil.Error:
            return None
        before, self._before = self._before, (now_s, times.user + times.system)
        cpu_pct = None
        if before is not None and now_s > before[0]:
            cpu_pct = 100 * (self._before[1] - before[1]) / (now_s - before[0])
        return ProcessSample(pid=self._pid, role=self.role, name=name, rss_bytes=rss, threads=threads, cpu_pct=cpu_pct)

    def close(self) -> None:
        """Nothing is held open."""
