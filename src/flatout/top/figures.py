"""Samples → figures: what one sample says, and what all of them come to, in bounded memory.

Everything is weighted by time, so a sample that stands for several intervals (of a long recording) counts for as much
as they did. A GPU's *activity* is what its pulses say, at up to 8 Hz: SM active where the GPU has GPM counters,
GPU-Util elsewhere. Its *work* is SM active, or else the power share, and never more than GPU-Util.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flatout.model.formatting import GPU_READINGS, HOST_READINGS, Reading, shown_in
from flatout.model.records import share_pct
from flatout.trace import GpuSample, HostSample, ProcessSample, Sample, Sketch

IDLE_BELOW_PCT = 5.0  # a pulse below this is an idle moment
TRAINING_CPU_PCT = 20.0  # of a core: a training process that uses this much is not idle
LONGEST_PULSE_S = 0.25  # faster than GPM can be read, a pulse stands for the samples without one before it, up to this


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One quantity over the measured time."""

    mean: float
    deviation: float
    p5: float
    p50: float
    p95: float
    low: float
    high: float

    @classmethod
    def of(cls, sketch: Sketch) -> Stats | None:
        """What a sketch holds; None of an empty one."""
        mean, deviation = sketch.mean, sketch.deviation
        if mean is None or deviation is None:
            return None
        p5, p50, p95 = (sketch.quantile(q) or 0.0 for q in (0.05, 0.5, 0.95))
        return cls(mean=mean, deviation=deviation, p5=p5, p50=p50, p95=p95, low=sketch.low, high=sketch.high)


class Levels(dict[str, Stats]):
    """Readings over the measured time, by name; one that was never seen is not there."""

    def mean(self, name: str) -> float | None:
        """The mean of a reading."""
        return self[name].mean if name in self else None

    def peak(self, name: str) -> float | None:
        """The highest value of a reading."""
        return self[name].high if name in self else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """One GPU over the measured time."""

    index: int
    uuid: str
    name: str
    has_gpm: bool
    activity: Stats | None
    fluctuation_pct: float | None
    idle_pct: float | None
    longest_idle_s: float
    work_pct: float | None
    energy_j: float | None
    memory_total_bytes: int | None
    power_limit_w: float | None
    sm_clock_max_mhz: float | None
    in_use: bool
    throttled_pct: dict[str, float]
    levels: Levels

    @property
    def activity_name(self) -> str:
        """What the pulses of this GPU are."""
        return "SM active" if self.has_gpm else "GPU-Util"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """The machine over the measured time, and the training on it."""

    cores: int | None
    cores_allowed: float | None
    memory_total_bytes: int | None
    levels: Levels


class FigureBuilder:
    """Takes samples one by one; gives the figures of what it has seen at any time."""

    def __init__(self, samples: Iterable[Sample] = (), *, cores_allowed: float | None = None) -> None:
        self.samples = 0
        self.seconds = 0.0
        self._gpus: dict[str, _GpuBuilder] = {}
        self._cores_allowed = cores_allowed
        self._cores: int | None = None
        self._memory_total_bytes: int | None = None
        self._levels = _followed(HOST_READINGS)
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Count one sample in."""
        self.samples += 1
        self.seconds += sample.interval_s
        self._cores = len(sample.host.cores_pct or ()) or self._cores
        self._memory_total_bytes = sample.host.memory_total_bytes or self._memory_total_bytes
        readings = host_readings(sample, self._cores_allowed)
        for name, sketch in self._levels.items():
            _count(sketch, readings[name], sample.interval_s)
        trainers = (process for process in sample.processes if process.role == "trainer")
        training = {process.pid for process in trainers if (process.cpu_pct or 0) >= TRAINING_CPU_PCT}
        for gpu in sample.gpus:
            if gpu.uuid not in self._gpus:
                self._gpus[gpu.uuid] = _GpuBuilder(gpu)
            self._gpus[gpu.uuid].add(gpu, sample.interval_s, training)

    def gpus(self) -> tuple[GpuFigures, ...]:
        """The GPUs seen, by index."""
        return tuple(sorted((gpu.figures() for gpu in self._gpus.values()), key=lambda figures: figures.index))

    def host(self) -> HostFigures:
        """The machine."""
        return HostFigures(
            cores=self._cores,
            cores_allowed=self._cores_allowed,
            memory_total_bytes=self._memory_total_bytes,
            levels=_levels(self._levels),
        )


class _GpuBuilder:
    def __init__(self, first: GpuSample) -> None:
        self._last = first
        self._seconds = 0.0
        self._levels = _followed(GPU_READINGS)
        self._has_gpm = False
        self._activity = _Activity()
        self._work = Sketch()  # without SM active
        # A counter that is there from the first sample on was read when the measuring began.
        self._counter_j = first.energy_j
        self._counted_j = 0.0
        self._since_j: float | None = None  # power times time since the counter was read
        self._throttled_s: dict[str, float] = {}
        self._in_use = False

    def add(self, gpu: GpuSample, seconds: float, training: set[int]) -> None:
        if gpu.sm_active_pct is not None and not self._has_gpm:  # GPU-Util stood in for it so far
            self._has_gpm, self._activity = True, _Activity(self._seconds)
        now_pct = gpu.sm_active_pct if self._has_gpm else gpu.gpu_util_pct
        pulses = gpu.pulses or (now_pct,)
        self._activity.add(pulses if now_pct is not None else (), seconds)
        self._last = gpu
        self._seconds += seconds
        self._add_energy(gpu, seconds)
        for name, sketch in self._levels.items():
            _count(sketch, getattr(gpu, name), seconds)
        _count(self._work, work_pct(gpu), seconds)
        for reason in gpu.throttle or ():
            self._throttled_s[reason] = self._throttled_s.get(reason, 0.0) + seconds
        self._in_use = self._in_use or any(process.pid in training for process in gpu.processes or ())

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

    def figures(self) -> GpuFigures:
        last, seen = self._last, self._activity
        activity = Stats.of(seen.sketch)
        return GpuFigures(
            index=last.index,
            uuid=last.uuid,
            name=last.name,
            has_gpm=self._has_gpm,
            activity=activity,
            fluctuation_pct=getattr(activity, "deviation", None),
            idle_pct=share_pct(seen.idle_s, seen.seconds),
            longest_idle_s=seen.longest_idle_s,
            work_pct=seen.sketch.mean if self._has_gpm else self._work.mean,
            energy_j=self._counted_j + self._since_j if self._since_j is not None else None,
            memory_total_bytes=last.memory_total_bytes,
            power_limit_w=last.power_limit_w,
            sm_clock_max_mhz=last.sm_clock_max_mhz,
            in_use=self._in_use,
            throttled_pct={reason: 100 * s / self._seconds for reason, s in sorted(self._throttled_s.items())},
            levels=_levels(self._levels),
        )


class _Activity:
    """The pulses of a GPU: how they spread, and for how long at a stretch they were idle."""

    def __init__(self, waited_s: float = 0.0) -> None:
        self.sketch = Sketch()
        self.seconds = 0.0
        self.idle_s = 0.0
        self.longest_idle_s = 0.0
        self._stretch_s = 0.0
        self._waited_s = waited_s  # without a pulse

    def add(self, pulses: Sequence[float | None], seconds: float) -> None:
        if not pulses:
            self._waited_s += seconds
            return
        each_s = (seconds + min(self._waited_s, LONGEST_PULSE_S)) / len(pulses)
        self._waited_s = 0.0
        for pulse in _known(pulses):
            _count(self.sketch, pulse, each_s)
            self.seconds += each_s
            self._stretch_s += each_s
            if pulse >= IDLE_BELOW_PCT:
                self._stretch_s = 0.0
                continue
            self.idle_s += each_s
            self.longest_idle_s = max(self.longest_idle_s, self._stretch_s)


def _followed(readings: Iterable[Reading]) -> dict[str, Sketch]:
    """A sketch for each reading that is followed over time."""
    return {reading.name: Sketch() for reading in shown_in("over time", readings)}


def _levels(sketches: dict[str, Sketch]) -> Levels:
    return Levels((name, stats) for name, sketch in sketches.items() if (stats := Stats.of(sketch)) is not None)


def _count(sketch: Sketch, value: float | None, seconds: float) -> None:
    """A value counts for its milliseconds."""
    if value is not None:
        sketch.add(float(value), max(1, round(1000 * seconds)))
