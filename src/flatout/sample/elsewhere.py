"""Windows and macOS: what psutil says of the machine. On Linux /proc says more, without psutil."""

from __future__ import annotations

from typing import Any

import psutil

from flatout.trace import DiskSample, HostSample


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
