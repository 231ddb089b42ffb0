"""Samples → figures, in memory that does not grow with the run.

Everything is weighted by time, so a sample that stands for several intervals (a thinned recording) counts for as
much as they did. A card's *activity* is what its pulses say, at up to 8 Hz: SM active where the card has GPM
counters, GPU-Util elsewhere. Its *work* is SM active, or where there is none the power share, never above GPU-Util.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flatout.trace import GpuSample, Sample, Sketch

__all__ = ["IDLE_BELOW_PCT", "FigureBuilder", "GpuFigures", "HostFigures", "Stats", "cpu_budget_pct", "work_pct"]

IDLE_BELOW_PCT = 5.0  # a pulse below this is an idle moment
_LONGEST_CARRY_S = 0.25  # faster than GPM can be read, a pulse stands for the samples without one before it

_GPU_LEVELS = (
    "gpu_util_pct",
    "sm_active_pct",
    "sm_occupancy_pct",
    "tensor_active_pct",
    "dram_active_pct",
    "pcie_rx_bytes_s",
    "pcie_tx_bytes_s",
    "memory_used_bytes",
    "memory_pct",
    "power_w",
    "power_share_pct",
    "temperature_c",
    "sm_clock_mhz",
    "decoder_util_pct",
    "jpeg_util_pct",
)
_HOST_LEVELS = (
    "iowait_pct",
    "run_queue",
    "switches_s",
    "pressure_cpu_pct",
    "pressure_io_pct",
    "pressure_memory_pct",
    "throttled_pct",
    "memory_used_bytes",
    "page_cache_bytes",
    "swap_used_bytes",
    "shm_used_bytes",
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """One card over the measured time."""

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
    levels: dict[str, Stats]

    @property
    def activity_name(self) -> str:
        """What the pulses of this card are."""
        return "SM active" if self.has_gpm else "GPU-Util"

    @property
    def work_name(self) -> str:
        """What `work_pct` is: SM active, or what stands in for it."""
        return "SM active" if self.has_gpm else "power share"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """The machine over the measured time. `cpu_pct`: how full the cores are that may be used."""

    cores: int | None
    cores_allowed: float | None
    cpu_pct: Stats | None
    memory_pct: Stats | None
    memory_total_bytes: int | None
    shm_pct: Stats | None
    disk_busy_pct: Stats | None
    disk_read_bytes_s: Stats | None
    disk_write_bytes_s: Stats | None
    training_cpu_pct: Stats | None
    trainer_cpu_pct: Stats | None
    training_read_bytes_s: Stats | None
    workers: Stats | None
    worker_cpu_pct: Stats | None
    levels: dict[str, Stats]


class FigureBuilder:
    """Takes samples one by one; says at any time what they come to."""

    def __init__(self, *, cores_allowed: float | None = None) -> None:
        self.samples = 0
        self.seconds = 0.0
        self._cards: dict[str, _Card] = {}
        self._host = _Host(cores_allowed)

    def add(self, sample: Sample) -> None:
        """Count one sample in."""
        self.samples += 1
        self.seconds += sample.interval_s
        self._host.add(sample)
        busy_pids = {p.pid for p in sample.processes if p.role == "trainer" and (p.cpu_pct or 0) >= 20}
        for gpu in sample.gpus:
            card = self._cards.setdefault(gpu.uuid, _Card())
            card.add(gpu, sample.interval_s, busy_pids)

    def gpus(self) -> tuple[GpuFigures, ...]:
        """The cards seen, by index."""
        return tuple(sorted((card.figures() for card in self._cards.values()), key=lambda figures: figures.index))

    def host(self) -> HostFigures:
        """The machine."""
        return self._host.figures()


def work_pct(gpu: GpuSample) -> float | None:
    """SM active; where the card cannot tell, its power share, and never more than GPU-Util."""
    if gpu.sm_active_pct is not None:
        return gpu.sm_active_pct
    known = [value for value in (gpu.power_share_pct, gpu.gpu_util_pct) if value is not None]
    return min(known, default=None)


def cpu_budget_pct(sample: Sample, cores_allowed: float | None) -> float | None:
    """How full the cores are that may be used: the machine's, or under a quota the training's own share of it."""
    own = sum(p.cpu_pct or 0.0 for p in sample.processes) / cores_allowed if cores_allowed else 0.0
    if sample.host.cpu_pct is None:
        return min(100.0, own) if own else None
    return min(100.0, max(sample.host.cpu_pct, own))


class _Meter:
    """A sketch in which a value counts for its milliseconds."""

    __slots__ = ("_sketch",)

    def __init__(self) -> None:
        self._sketch = Sketch()

    def add(self, value: float | None, seconds: float) -> None:
        if value is not None:
            self._sketch.add(float(value), max(1, round(1000 * seconds)))

    def stats(self) -> Stats | None:
        sketch = self._sketch
        mean, deviation = sketch.mean, sketch.deviation
        p5, p50, p95 = (sketch.quantile(q) for q in (0.05, 0.5, 0.95))
        if mean is None or deviation is None or p5 is None or p50 is None or p95 is None:
            return None
        return Stats(mean=mean, deviation=deviation, p5=p5, p50=p50, p95=p95, low=sketch.low, high=sketch.high)


class _Levels:
    """Meters of several fields of a record, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._meters = {name: _Meter() for name in names}

    def add(self, record: object, seconds: float) -> None:
        for name, meter in self._meters.items():
            meter.add(getattr(record, name), seconds)

    def stats(self) -> dict[str, Stats]:
        found = ((name, meter.stats()) for name, meter in self._meters.items())
        return {name: stats for name, stats in found if stats is not None}


class _Activity:
    """The pulses of a card: how they spread, and for how long at a stretch they were idle."""

    def __init__(self) -> None:
        self._meter = _Meter()
        self._seconds = 0.0
        self._idle_s = 0.0
        self._stretch_s = 0.0
        self._longest_s = 0.0
        self._carry_s = 0.0

    def add(self, pulses: tuple[float, ...], seconds: float) -> None:
        if not pulses:
            self._carry_s = min(self._carry_s + seconds, _LONGEST_CARRY_S)
            return
        each_s = (seconds + self._carry_s) / len(pulses)
        self._carry_s = 0.0
        for pulse in pulses:
            self._meter.add(pulse, each_s)
            self._seconds += each_s
            if pulse < IDLE_BELOW_PCT:
                self._idle_s += each_s
                self._stretch_s += each_s
                self._longest_s = max(self._longest_s, self._stretch_s)
            else:
                self._stretch_s = 0.0

    @property
    def seen(self) -> bool:
        return self._seconds > 0

    @property
    def idle_pct(self) -> float | None:
        return 100 * self._idle_s / self._seconds if self._seconds else None

    @property
    def longest_idle_s(self) -> float:
        return self._longest_s

    def stats(self) -> Stats | None:
        return self._meter.stats()


class _Energy:
    """Energy used: by the card's counter, which is read seldom, and by power times time since its last change."""

    def __init__(self) -> None:
        self._counted_j = 0.0
        self._since_j: float | None = None
        self._counter_j: float | None = None
        self._started = False

    def add(self, gpu: GpuSample, seconds: float) -> None:
        if gpu.power_w is not None:
            self._since_j = (self._since_j or 0.0) + gpu.power_w * seconds
        now_j, before_j = gpu.energy_j, self._counter_j
        # A counter that is there from the first sample on was read when the measuring began.
        if now_j is not None and now_j != before_j and self._started:
            grew = before_j is not None and now_j > before_j
            self._counted_j += now_j - (before_j or 0.0) if grew else self._since_j or 0.0
            self._since_j = 0.0
        self._counter_j = now_j if now_j is not None else before_j
        self._started = True

    def used_j(self) -> float | None:
        return self._counted_j + self._since_j if self._since_j is not None else None


class _Card:
    def __init__(self) -> None:
        self._last: GpuSample | None = None
        self._seconds = 0.0
        self._levels = _Levels(_GPU_LEVELS)
        self._by_sm = _Activity()
        self._by_util = _Activity()
        self._stand_in = _Meter()
        self._energy = _Energy()
        self._throttled_s: dict[str, float] = {}
        self._in_use = False

    def add(self, gpu: GpuSample, seconds: float, busy_pids: set[int]) -> None:
        self._energy.add(gpu, seconds)
        self._last = gpu
        self._seconds += seconds
        self._levels.add(gpu, seconds)
        if gpu.sm_active_pct is not None:
            self._by_sm.add(gpu.pulses or (gpu.sm_active_pct,), seconds)
        else:
            # Until SM active is first seen, nobody knows whether the card has it: keep both accounts.
            self._by_sm.add((), seconds)
            self._by_util.add(gpu.pulses or ((gpu.gpu_util_pct,) if gpu.gpu_util_pct is not None else ()), seconds)
            self._stand_in.add(work_pct(gpu), seconds)
        for reason in gpu.throttle or ():
            self._throttled_s[reason] = self._throttled_s.get(reason, 0.0) + seconds
        self._in_use = self._in_use or any(process.pid in busy_pids for process in gpu.processes or ())

    def figures(self) -> GpuFigures:
        last = self._last
        assert last is not None
        has_gpm = self._by_sm.seen
        activity = self._by_sm if has_gpm else self._by_util
        stats = activity.stats()
        work = stats if has_gpm else self._stand_in.stats()
        return GpuFigures(
            index=last.index,
            uuid=last.uuid,
            name=last.name,
            has_gpm=has_gpm,
            activity=stats,
            fluctuation_pct=stats.deviation if stats is not None else None,
            idle_pct=activity.idle_pct,
            longest_idle_s=activity.longest_idle_s,
            work_pct=work.mean if work is not None else None,
            energy_j=self._energy.used_j(),
            memory_total_bytes=last.memory_total_bytes,
            power_limit_w=last.power_limit_w,
            sm_clock_max_mhz=last.sm_clock_max_mhz,
            in_use=self._in_use,
            throttled_pct={reason: 100 * s / self._seconds for reason, s in sorted(self._throttled_s.items())},
            levels=self._levels.stats(),
        )


class _Host:
    def __init__(self, cores_allowed: float | None) -> None:
        self._cores: int | None = None
        self._cores_allowed = cores_allowed
        self._memory_total_bytes: int | None = None
        self._levels = _Levels(_HOST_LEVELS)
        names = ("cpu_pct", "memory_pct", "shm_pct", "disk_busy_pct", "disk_read_bytes_s", "disk_write_bytes_s")
        ours = ("training_cpu_pct", "trainer_cpu_pct", "training_read_bytes_s", "workers", "worker_cpu_pct")
        self._meters = {name: _Meter() for name in (*names, *ours)}

    def add(self, sample: Sample) -> None:
        host, seconds = sample.host, sample.interval_s
        if host.cores_pct:
            self._cores = len(host.cores_pct)
        self._memory_total_bytes = host.memory_total_bytes or self._memory_total_bytes
        self._levels.add(host, seconds)
        values: dict[str, float | None] = {
            "cpu_pct": cpu_budget_pct(sample, self._cores_allowed),
            "memory_pct": _share_pct(host.memory_used_bytes, host.memory_total_bytes),
            "shm_pct": _share_pct(host.shm_used_bytes, host.shm_total_bytes),
        }
        if host.disks:
            values["disk_busy_pct"] = max((d.busy_pct for d in host.disks if d.busy_pct is not None), default=None)
            values["disk_read_bytes_s"] = sum(d.read_bytes_s for d in host.disks)
            values["disk_write_bytes_s"] = sum(d.write_bytes_s for d in host.disks)
        if sample.processes:
            values |= _training(sample)
        for name, value in values.items():
            self._meters[name].add(value, seconds)

    def figures(self) -> HostFigures:
        return HostFigures(
            cores=self._cores,
            cores_allowed=self._cores_allowed,
            memory_total_bytes=self._memory_total_bytes,
            levels=self._levels.stats(),
            **{name: meter.stats() for name, meter in self._meters.items()},
        )


def _training(sample: Sample) -> dict[str, float | None]:
    """The training's processes in a few numbers; `trainer_cpu_pct` is its busiest trainer's."""
    workers = [p for p in sample.processes if p.role == "worker"]
    worker_cpu = [p.cpu_pct for p in workers if p.cpu_pct is not None]
    reads = [p.read_bytes_s for p in sample.processes if p.read_bytes_s is not None]
    trainers = [p.cpu_pct for p in sample.processes if p.role == "trainer" and p.cpu_pct is not None]
    return {
        "training_cpu_pct": sum(p.cpu_pct or 0.0 for p in sample.processes),
        "trainer_cpu_pct": max(trainers, default=None),
        "training_read_bytes_s": sum(reads) if reads else None,
        "workers": float(len(workers)),
        "worker_cpu_pct": sum(worker_cpu) / len(worker_cpu) if worker_cpu else None,
    }


def _share_pct(part: int | None, whole: int | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None
