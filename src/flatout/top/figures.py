"""Samples → figures: what one sample says, and what all of them come to, in bounded memory.

Figures grow with each sample that is added, and can be read at any time.

Everything is weighted by time, so a sample that stands for several intervals (of a long recording)
counts for as much as they did. A GPU's *activity* is what its pulses say, at up to 8 Hz: SM active
where the GPU has GPM counters, GPU-Util elsewhere. Its *work* is SM active, or else the power share,
and never more than GPU-Util.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from flatout.model.formatting import GPU_READINGS, HOST_READINGS, Reading, shown_in
from flatout.model.hardware_samples import share_pct
from flatout.model.records import to_json
from flatout.trace import GpuSample, HostSample, ProcessSample, Sample, Sketch

QUANTILES = (0.05, 0.5, 0.95)
IDLE_BELOW_PCT = 5.0  # a pulse below this is an idle moment
TRAINING_CPU_PCT = 20.0  # of a core: a training process that uses this much is not idle
# In the JSON of a GPU, beside its levels.
OF_THE_GPU = ("index", "uuid", "name", "memory_total_bytes", "power_limit_w", "sm_clock_max_mhz")
OVER_THE_TIME = (
    "has_gpm", "activity", "idle_pct", "longest_idle_s", "work_pct", "energy_j", "in_use", "throttled_pct",
)  # fmt: skip


# One sample


def work_pct(gpu: GpuSample) -> float | None:
    """SM active; where the GPU cannot tell, its power share, and never more than GPU-Util."""
    if gpu.sm_active_pct is not None:
        return gpu.sm_active_pct
    return min(_known((gpu.power_share_pct, gpu.gpu_util_pct)), default=None)


def cpu_budget_pct(sample: Sample, cores_allowed: float | None) -> float | None:
    """How full the usable cores are: the machine's, or under a quota the training's own share of it."""
    own = sum(p.cpu_pct or 0.0 for p in sample.processes) / (cores_allowed or float("inf"))
    if sample.host.cpu_pct is None and not own:
        return None
    return min(100.0, max(sample.host.cpu_pct or 0.0, own))


def host_readings(sample: Sample, cores_allowed: float | None) -> dict[str, Any]:
    """The machine and the training on it, by the names in docs/TOP.md."""
    host, disks, processes = sample.host, sample.host.disks or (), sample.processes
    read: dict[str, Any] = {field.name: getattr(host, field.name) for field in fields(HostSample)}
    read["cpu_pct"] = cpu_budget_pct(sample, cores_allowed)
    read["memory_pct"] = share_pct(host.memory_used_bytes, host.memory_total_bytes)
    read["shm_pct"] = share_pct(host.shm_used_bytes, host.shm_total_bytes)
    read["disk_busy_pct"] = max(_known(disk.busy_pct for disk in disks), default=None)
    read["disk_read_bytes_s"] = _sum(disk.read_bytes_s for disk in disks)
    read["disk_write_bytes_s"] = _sum(disk.write_bytes_s for disk in disks)
    return read | _training_readings(processes)


def _training_readings(processes: Sequence[ProcessSample]) -> dict[str, Any]:
    cpu_pct = {role: _known(one.cpu_pct for one in processes if one.role == role) for role in ("trainer", "worker")}
    total = _sum(cpu_pct["worker"])
    return {
        "training_cpu_pct": sum(process.cpu_pct or 0.0 for process in processes) if processes else None,
        "training_rss_bytes": _sum(process.rss_bytes for process in processes),
        "training_read_bytes_s": _sum(process.read_bytes_s for process in processes),
        "trainer_cpu_pct": max(cpu_pct["trainer"], default=None),
        "workers": sum(process.role == "worker" for process in processes) if processes else None,
        "workers_cpu_pct": total,
        "worker_cpu_pct": total and total / len(cpu_pct["worker"]),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


# All samples


class Levels(dict[str, Sketch]):
    """A distribution for each reading that is followed over time, by name."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        super().__init__((reading.name, Sketch()) for reading in shown_in("over time", readings))

    def peak(self, name: str) -> float | None:
        """The highest value of a reading; None of one that was never seen."""
        return self[name].high if self[name].count else None


class GpuFigures:
    """One GPU over the measured time."""

    def __init__(self, first: GpuSample) -> None:
        self.last = first
        self.levels = Levels(GPU_READINGS)
        self.has_gpm = False
        self.in_use = False
        self.activity = Sketch()  # of its pulses
        self.longest_idle_s = 0.0
        self._idle_s = self._stretch_s = self._active_s = 0.0
        self._seconds = 0.0
        self._work = Sketch()  # without SM active
        # A counter that is there from the first sample on was read when the measuring began.
        self._counter_j = first.energy_j
        self._counted_j = 0.0
        self._since_j: float | None = None  # power times time since the counter was read
        self._throttled_s: dict[str, float] = {}

    def add(self, gpu: GpuSample, seconds: float, training: set[int]) -> None:
        """Count a sample in; `training` are the processes of trainings at work."""
        if gpu.sm_active_pct is not None and not self.has_gpm:  # GPU-Util stood in for it so far
            self.has_gpm, self.activity = True, Sketch()
            self.longest_idle_s = self._idle_s = self._stretch_s = self._active_s = 0.0
        now_pct = gpu.sm_active_pct if self.has_gpm else gpu.gpu_util_pct
        if now_pct is not None:
            self._add_pulses(gpu.pulses or (now_pct,), seconds)
        self.last = gpu
        self._seconds += seconds
        self._add_energy(gpu, seconds)
        for name, sketch in self.levels.items():
            _count(sketch, getattr(gpu, name), seconds)
        _count(self._work, work_pct(gpu), seconds)
        for reason in gpu.throttle or ():
            self._throttled_s[reason] = self._throttled_s.get(reason, 0.0) + seconds
        self.in_use = self.in_use or any(process.pid in training for process in gpu.processes or ())

    def _add_pulses(self, pulses: Sequence[float], seconds: float) -> None:
        """How they spread, and for how long at a stretch the GPU was idle."""
        each_s = seconds / len(pulses)
        for pulse in pulses:
            _count(self.activity, pulse, each_s)
            self._active_s += each_s
            if pulse >= IDLE_BELOW_PCT:
                self._stretch_s = 0.0
                continue
            self._stretch_s += each_s
            self._idle_s += each_s
            self.longest_idle_s = max(self.longest_idle_s, self._stretch_s)

    def _add_energy(self, gpu: GpuSample, seconds: float) -> None:
        """By the GPU's counter, which is read seldom, and by power times time since then."""
        if gpu.power_w is not None:
            self._since_j = (self._since_j or 0.0) + gpu.power_w * seconds
        if gpu.energy_j is None or gpu.energy_j == self._counter_j:
            return
        used_j = self._since_j or 0.0
        if self._counter_j is not None and gpu.energy_j > self._counter_j:  # else it has started again
            used_j = gpu.energy_j - self._counter_j
        self._counted_j += used_j
        self._since_j, self._counter_j = 0.0, gpu.energy_j

    @property
    def activity_name(self) -> str:
        """What the pulses of this GPU are."""
        return "SM active" if self.has_gpm else "GPU-Util"

    @property
    def work_pct(self) -> float | None:
        """Mean SM active, or what stands in for it."""
        return self.activity.mean if self.has_gpm else self._work.mean

    @property
    def idle_pct(self) -> float | None:
        """The share of time in idle pulses."""
        return share_pct(self._idle_s, self._active_s)

    @property
    def energy_j(self) -> float | None:
        """None where its power was never known."""
        return None if self._since_j is None else self._counted_j + self._since_j

    @property
    def throttled_pct(self) -> dict[str, float]:
        """The share of time in which its clocks were held back, by reason."""
        return {reason: 100 * held_s / self._seconds for reason, held_s in sorted(self._throttled_s.items())}

    def to_json(self) -> dict[str, Any]:
        """As documented."""
        values = {name: getattr(self.last, name) for name in OF_THE_GPU}
        values |= {name: getattr(self, name) for name in OVER_THE_TIME}
        return _to_json({**values, "fluctuation_pct": self.activity.deviation, **self.levels})


class Figures:
    """The machine over the measured time with the training on it, and each of its GPUs."""

    def __init__(self, samples: Iterable[Sample] = (), *, cores_allowed: float | None = None) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.levels = Levels(HOST_READINGS)
        self.cores: int | None = None
        self.cores_allowed = cores_allowed
        self.memory_total_bytes: int | None = None
        self._gpus: dict[str, GpuFigures] = {}
        for sample in samples:
            self.add(sample)

    @property
    def gpus(self) -> list[GpuFigures]:
        """The GPUs seen, by index."""
        return sorted(self._gpus.values(), key=lambda gpu: gpu.last.index)

    def add(self, sample: Sample) -> None:
        """Count one sample in."""
        self.samples += 1
        self.seconds += sample.interval_s
        self.cores = len(sample.host.cores_pct or ()) or self.cores
        self.memory_total_bytes = sample.host.memory_total_bytes or self.memory_total_bytes
        readings = host_readings(sample, self.cores_allowed)
        for name, sketch in self.levels.items():
            _count(sketch, readings[name], sample.interval_s)
        trainers = (process for process in sample.processes if process.role == "trainer")
        training = {process.pid for process in trainers if (process.cpu_pct or 0) >= TRAINING_CPU_PCT}
        for gpu in sample.gpus:
            if gpu.uuid not in self._gpus:
                self._gpus[gpu.uuid] = GpuFigures(gpu)
            self._gpus[gpu.uuid].add(gpu, sample.interval_s, training)

    def to_json(self) -> dict[str, Any]:
        """Those of the machine, as documented."""
        about = {name: getattr(self, name) for name in ("cores", "cores_allowed", "memory_total_bytes")}
        return _to_json({**about, **self.levels})


def _count(sketch: Sketch, value: float | None, seconds: float) -> None:
    if value is not None:
        sketch.add(float(value), max(1, round(1000 * seconds)))


def _to_json(figures: dict[str, Any]) -> dict[str, Any]:
    """What was measured; of a distribution a few numbers."""
    measured = {}
    for name, value in figures.items():
        if not isinstance(value, Sketch):
            measured[name] = value
        elif value.count:
            quantiles = {f"p{100 * q:.0f}": value.quantile(q) for q in QUANTILES}
            extremes = {"low": value.low, "high": value.high}
            measured[name] = {"mean": value.mean, "deviation": value.deviation, **quantiles, **extremes}
    return {name: to_json(value) for name, value in measured.items() if value is not None}
