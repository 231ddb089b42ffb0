"""What the hardware sampler sees, as plain values: a part of the trace that no training process
writes or imports.

As in `records`, units are in the names, and what was not measured is None.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU. `sm_pct`: the share of the time it had work there."""

    pid: int
    used_bytes: int | None = None
    name: str | None = None
    sm_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU over one interval. `pulses`: its activity since the sample before, at up to 8 Hz."""

    index: int
    uuid: str
    name: str
    gpu_util_pct: float | None = None
    sm_active_pct: float | None = None
    sm_occupancy_pct: float | None = None
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    pcie_rx_bytes_s: float | None = None
    pcie_tx_bytes_s: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    decoder_util_pct: float | None = None
    jpeg_util_pct: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    pulses: tuple[float, ...] = ()

    @property
    def power_share_pct(self) -> float | None:
        """Power drawn, in per cent of the limit."""
        return share_pct(self.power_w, self.power_limit_w)

    @property
    def memory_pct(self) -> float | None:
        """Memory in use, in per cent of the GPU's."""
        return share_pct(self.memory_used_bytes, self.memory_total_bytes)


def share_pct(part: float | None, whole: float | None) -> float | None:
    """What share of a whole that is; None where one of them is not known."""
    return None if part is None or not whole else 100 * part / whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process of a training over one interval. `role`: trainer, worker (of its loader) or other."""

    pid: int
    role: str
    name: str
    cpu_pct: float | None = None
    run_delay_pct: float | None = None
    rss_bytes: int | None = None
    read_bytes_s: float | None = None
    switches_s: float | None = None
    threads: int | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample:
    """One disk over one interval."""

    name: str
    read_bytes_s: float
    write_bytes_s: float
    busy_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """The machine over one interval; the memory figures are the cgroup's where it has a limit."""

    cpu_pct: float | None = None
    cores_pct: tuple[float, ...] | None = None
    iowait_pct: float | None = None
    run_queue: int | None = None
    switches_s: float | None = None
    pressure_cpu_pct: float | None = None
    pressure_io_pct: float | None = None
    pressure_memory_pct: float | None = None
    throttled_pct: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    page_cache_bytes: int | None = None
    swap_used_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_total_bytes: int | None = None
    disks: tuple[DiskSample, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Everything the sampler saw in one interval: the machine, its GPUs, the training's processes."""

    time_s: float
    interval_s: float
    host: HostSample
    gpus: tuple[GpuSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
