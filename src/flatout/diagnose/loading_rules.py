"""Rules about loading samples: who loads them, and why they come late.

Opposites are told apart by evidence: too few workers are busy while cores are free, too many wait for a core,
and a slow disk leaves both idle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.gains import (
    MIN_SHARE,
    data_saved,
    factor,
    gain_if_fed,
    gain_if_host_spared,
    gain_if_removed,
    rounded,
    spare_cores,
)
from flatout.diagnose.rank_metrics import RankMetrics, host_ms_in
from flatout.model.changes import SETTING
from flatout.model.facts import NO_LOADER
from flatout.model.finding import Finding
from flatout.trace import Sketch

_CPU_FULL = 0.85  # of the cores
_STORAGE_BOUND = 0.10  # of the time that processes wait for storage
_ON_CORE_WHILE_READING = 0.6  # of loading time: a worker that reads from a slow disk is on a core for less
_NO_CORE = 0.25  # of loading time that a worker is ready and has no core
_OTHERS_CORES = 0.4  # of all cores, that others keep busy
_CORES_TAKEN = 0.7  # by workers: then it is workers that they are in each other's way
_SLOW_TAIL = 8.0  # times the median
_COLLATING = 0.4  # of the workers' work
_OWN_THREADS = 3  # that a worker has which does nothing in particular
_MIN_WAIT_WITHOUT_WORKERS = 0.05  # of the step: handing batches over costs as much
_MIN_WAIT_BY_EXCLUSION = 0.10  # of the step: for causes that only the absence of others speaks for
_MIN_CORE_A_WORKER = 0.25  # that a worker is counted with, however much it waits
_MIN_PART_OF_WISH = 0.2  # on a core, of the time it wants one: with less, others than workers have it
_ADDED_WORKER = 0.5  # of a worker that one more brings at least: hyperthreads share a core, all share caches


@dataclass(frozen=True)
class _Behind:
    """Workers that do not keep up: what the reasons are told apart by."""

    metrics: RankMetrics
    saved: float  # of the step, if batches were there when asked for
    busy: float  # of the workers' time
    on_core: float  # of their loading time
    delay: float  # of their loading time, ready and without a core

    def finding(
        self,
        code: str,
        title: str,
        *,
        least: float = 1.0,
        most: float = math.inf,
        confidence: float,
        change: str | None = None,
        value: Any = None,
        advice: str,
    ) -> Finding:
        """A reason; `least` and `most`: how many times what is used now the loader delivers without it."""
        return Finding(
            code=f"data.{code}",
            title=title,
            share=self.metrics.share("data"),
            **gain_if_fed(self.metrics, self.saved, least, most),
            confidence=confidence,
            evidence=_evidence(self.metrics),
            change=change,
            value=value,
            advice=advice,
        )

    @property
    def others_have_the_cores(self) -> bool:
        """Whether workers wait for cores that processes of others keep busy."""
        metrics = self.metrics
        cores = metrics.cores_of_machine or math.inf
        full = (metrics.cpu_share or 0.0) >= _CPU_FULL
        return full and self.delay >= _NO_CORE and (metrics.cores_others or 0.0) >= _OTHERS_CORES * cores

    @property
    def wants_core(self) -> bool:
        """Whether the workers want a core most of the time and get a fair part of it."""
        wish = self.on_core + self.delay
        return wish >= 0.5 and self.on_core >= _MIN_PART_OF_WISH * wish

    @property
    def tuned_already(self) -> bool:
        """Whether flatout's loader has tried more workers, and fewer."""
        return self.metrics.elastic and any(report.worker is not None for report in self.metrics.reports)


def main_thread(metrics: RankMetrics) -> Finding | None:
    """Samples are loaded in the training process."""
    loader, saved = metrics.loader, data_saved(metrics)
    if loader.num_workers != 0 or metrics.elastic or saved < _MIN_WAIT_WITHOUT_WORKERS:
        return None
    rate, now = metrics.samples_a_worker_s, metrics.breakdown.samples_per_s
    # A worker that waits for a disk or a server leaves its core to others; one that waits for a core does not.
    wants = min(1.0, (metrics.worker_on_core or 1.0) + (metrics.worker_delay or 0.0))
    wanted = max(1, int(spare_cores(metrics) / max(_MIN_CORE_A_WORKER, wants)))
    one_worker = 1.0  # what it delivers, as a multiple of what is used now
    advice = ""
    if rate and now:
        needed = metrics.breakdown.ceiling_samples_per_s or now * factor(saved)
        wanted = min(wanted, math.ceil(needed / rate) + 1)
        one_worker = rate / now
        advice = f": one process makes {rate:,.0f} samples/s, training uses {now:,.0f}"
    share = metrics.share("data")
    more: dict[str, Any] = {"change": "num_workers", "value": wanted, "advice": f"num_workers={wanted}{advice}"}
    as_it_is = "keep the dataset as it is while it is read"
    if loader.written:
        more = {"advice": f"{as_it_is}: the loop writes to it ({loader.written}), which no worker sees"}
    elif loader.fills:
        more = {"advice": f"{as_it_is}: samples fill it ({loader.fills}), and each worker would fill its own"}
    return Finding(
        code="data.main-thread",
        title=f"samples are loaded in the training process, which spends {share:.0%} of its time on that",
        share=share,
        **gain_if_fed(metrics, saved, one_worker * (1 + _ADDED_WORKER * (wanted - 1)), one_worker * wanted),
        confidence=0.95,
        evidence=_evidence(metrics) | {"samples_per_s_in_this_process": rounded(rate)},
        **more,
    )


def workers_behind(metrics: RankMetrics) -> Finding | None:
    """The reason why workers do not keep up, if they do not. The first that fits is the one."""
    saved = data_saved(metrics) - (metrics.start_share - metrics.share("loader start"))
    busy, on_core = metrics.worker_busy, metrics.worker_on_core
    if saved < MIN_SHARE or busy is None or on_core is None:
        return None
    behind = _Behind(metrics=metrics, saved=saved, busy=busy, on_core=on_core, delay=metrics.worker_delay or 0.0)
    if not metrics.workers and not behind.tuned_already:
        return None
    if behind.others_have_the_cores:
        return None  # the wait is charged to them: more workers, or fewer, would wait as well
    return (
        _disk_bound(behind)
        or _slow_samples(behind)
        or _no_core_for_workers(behind)
        or _cpu_bound(behind)
        or _collate_bound(behind)
        or _too_few_workers(behind)
    )


def _disk_bound(behind: _Behind) -> Finding | None:
    reads = behind.on_core < _ON_CORE_WHILE_READING and behind.delay < _NO_CORE
    if not reads or behind.metrics.storage_share < _STORAGE_BOUND:
        return None
    return behind.finding(
        "disk-bound",
        f"workers wait for storage: on a core only {behind.on_core:.0%} of their loading time",
        confidence=0.8,
        advice="put the data on a faster disk, in fewer and larger files, or let it fit the page cache",
    )


def _slow_samples(behind: _Behind) -> Finding | None:
    slow = _slow_tail(behind.metrics)
    if slow is None:
        return None
    which = ", ".join(f"index {index} ({ms:.0f} ms)" for ms, index in behind.metrics.slowest_samples[:3])
    return behind.finding(
        "slow-samples",
        f"a few samples hold their batches back: the slowest take {slow:.0f} times the median",
        confidence=0.7,
        change="loader",
        value="elastic",
        advice=f"look at these samples: {which}",
    )


def _slow_tail(metrics: RankMetrics) -> float | None:
    """How far the slowest hundredth lies above the median, where it takes a tenth of all loading time.

    A worker that had to wait for a core is no slower sample: what that explains of the tail does not count.
    """
    times = metrics.sample_ms
    median, slowest = times.quantile(0.5), times.quantile(0.995)
    if not median or not slowest or not times.mean or times.count < 200 or slowest / median < _SLOW_TAIL:
        return None
    above_median_s = (times.mean - median) * times.count / 1e3
    if sum(report.run_delay_s or 0.0 for report in metrics.reports) > 0.5 * above_median_s:
        return None
    tail_s = 0.01 * slowest / 1e3 * sum(report.samples for report in metrics.reports)
    return slowest / median if tail_s > 0.1 * metrics.worked_s else None


def _no_core_for_workers(behind: _Behind) -> Finding | None:
    metrics, cores = behind.metrics, behind.metrics.cores or 1.0
    taken = metrics.workers * behind.busy * behind.on_core >= _CORES_TAKEN * cores
    if behind.delay < _NO_CORE or metrics.workers <= cores or not taken or metrics.elastic:
        return None
    wanted = spare_cores(metrics)
    return behind.finding(
        "too-many-workers",
        f"{metrics.workers} workers on {cores:g} cores: without a core {behind.delay:.0%} of the time they load",
        most=factor(behind.delay),
        confidence=0.8,
        change="num_workers",
        value=wanted,
        advice=f"num_workers={wanted}",
    )


def _cpu_bound(behind: _Behind) -> Finding | None:
    metrics = behind.metrics
    full = (metrics.cpu_share or 0.0) >= _CPU_FULL and (metrics.collate_share or 0.0) <= _COLLATING
    # A worker without a core is late to hear about the next batch, unless there are more workers than cores.
    at_work = behind.busy >= 0.5
    if behind.saved >= _MIN_WAIT_BY_EXCLUSION and metrics.workers <= (metrics.cores or 1.0):
        at_work = True
    return _samples_cost_cpu(behind) if full and at_work and behind.wants_core else None


def _samples_cost_cpu(behind: _Behind) -> Finding:
    metrics, mean_ms = behind.metrics, behind.metrics.sample_ms.mean or 0.0
    cpu_ms = (metrics.sample_ms.quantile(0.5) or 0.0) * (metrics.worker_on_core or 1.0)
    title = f"no number of workers keeps up: a sample costs {cpu_ms:.1f} ms of CPU"
    if metrics.transforms_ms:
        name, ms = max(metrics.transforms_ms.items(), key=lambda item: item[1])
        title += f"; {name} takes {ms:.1f} ms of them"
    for_gpu = 0.0  # of a sample's time, that the GPU could do
    if mean_ms:
        for_gpu = min(0.9, sum(metrics.transforms_ms.values()) / mean_ms)
    change: str | None = None
    value: Any = None
    advice = "do less on the CPU: a faster decoder, or a cache of decoded data"
    if metrics.on_gpu:
        setting = _setting(metrics, "augment_on", "cpu")
        change, value = "gpu_transforms", True
        if setting is not None:
            change, value = f"{SETTING}{setting}", "gpu"
        advice = "do less on the CPU: transforms on the GPU, a faster decoder, or a cache of decoded data"
    least = metrics.supply / (1 - for_gpu)
    return behind.finding("cpu-bound", title, least=least, confidence=0.85, change=change, value=value, advice=advice)


def _collate_bound(behind: _Behind) -> Finding | None:
    metrics, joining = behind.metrics, behind.metrics.collate_share or 0.0
    left_over = behind.busy < 0.5 and (metrics.cpu_share or 1.0) < _CPU_FULL and not metrics.elastic
    if joining > _COLLATING:
        title = f"joining samples is the cost: {joining:.0%} of the workers' work"
    elif left_over and behind.saved >= _MIN_WAIT_BY_EXCLUSION:
        title = f"handing batches over is the cost: workers are busy loading only {behind.busy:.0%} of the time"
    else:
        return None
    advice = "a collate function that works on whole tensors"
    if metrics.elastic:
        return behind.finding("collate-bound", title, confidence=0.6, advice=advice)
    advice += "; workers that write into shared, page-locked memory: flatout.DataLoader"
    return behind.finding("collate-bound", title, confidence=0.6, change="loader", value="elastic", advice=advice)


def _too_few_workers(behind: _Behind) -> Finding | None:
    metrics, workers = behind.metrics, behind.metrics.workers
    if behind.tuned_already and behind.busy >= 0.5 and behind.wants_core:
        return _samples_cost_cpu(behind)
    if behind.busy < 0.7 or metrics.elastic:
        return None
    room = _room_for_workers(metrics)
    if not behind.wants_core:
        room = max(workers, room)
    wanted = min(workers + room, math.ceil(workers / (1 - min(0.9, behind.saved))))
    if wanted <= workers:
        return _samples_cost_cpu(behind)
    idle = f"each is on a core only {behind.on_core:.0%} of that time"
    if behind.wants_core:
        idle = f"{1 - (metrics.cpu_share or 0.0):.0%} of the CPU is free"
    least = metrics.supply * (1 + _ADDED_WORKER * (wanted / workers - 1))
    rate, now = metrics.samples_a_worker_s or 0, metrics.breakdown.samples_per_s or 0
    return behind.finding(
        "too-few-workers",
        f"the workers ({workers}) are {behind.busy:.0%} busy, and {idle}",
        least=least,
        most=metrics.supply * wanted / workers,
        confidence=0.85,
        change="num_workers",
        value=wanted,
        advice=f"num_workers={wanted}: one worker makes {rate:,.0f} samples/s, training uses {now:,.0f}",
    )


def _room_for_workers(metrics: RankMetrics) -> int:
    """How many more workers the free cores would carry, each with as much of a core as one takes now."""
    if metrics.cpu_share is None or metrics.cores is None:
        return spare_cores(metrics)
    takes = (metrics.worker_busy or 1.0) * (metrics.worker_on_core or 1.0)
    return round(metrics.cores * (1 - metrics.cpu_share) / max(0.05, takes))


def augmentation_on_cpu(metrics: RankMetrics) -> Finding | None:
    """The script can augment on the GPU and does not, while the workers are behind for other reasons too."""
    setting, behind = _setting(metrics, "augment_on", "cpu"), workers_behind(metrics)
    on_core = (metrics.worker_on_core or 0.0) + (metrics.worker_delay or 0.0)
    if setting is None or not metrics.on_gpu or on_core < 0.5:
        return None
    if behind is None or behind.code == "data.cpu-bound":
        return None
    median = metrics.sample_ms.quantile(0.5) or 0.0
    return Finding(
        code="data.cpu-bound",
        title=f"a sample costs {median:.1f} ms in a worker, augmentation and all, and {setting} says 'cpu'",
        share=metrics.share("data"),
        **gain_if_fed(metrics, data_saved(metrics)),
        confidence=0.4,
        evidence=_evidence(metrics) | {"setting": setting},
        change=f"{SETTING}{setting}",
        value="gpu",
        advice=f"{setting}=gpu: how much of a sample that spares the workers cannot be seen from outside",
    )


def worker_threads(metrics: RankMetrics) -> Finding | None:
    """Workers that each have threads of their own, all together far more than cores."""
    counts = [process.threads for process in metrics.worker_samples if process.threads is not None]
    workers, cores, saved = metrics.workers, metrics.cores, data_saved(metrics)
    if not counts or not workers or cores is None or saved < MIN_SHARE or metrics.elastic:
        return None
    threads = max(counts) - _OWN_THREADS
    if threads < 2 or workers * threads <= 2 * cores:
        return None
    # Without them a worker no longer waits for its threads, at best. At worst, while cores are free, it takes as
    # much longer as they spared it.
    waits = max(0.0, 1 - (metrics.worker_on_core or 1.0) - (metrics.worker_delay or 0.0))
    gain = gain_if_fed(metrics, saved, most=1 / (1 - min(0.9, waits)))
    cores_a_worker = (Sketch.of(p.cpu_pct for p in metrics.worker_samples).mean or 0.0) / 100
    cores_a_worker /= metrics.worker_busy or 1.0
    if (metrics.cpu_share or 1.0) < _CPU_FULL and cores_a_worker > 1:
        gain["gain_low"] = 1 / cores_a_worker
    switches = Sketch.of(process.switches_s for process in metrics.worker_samples).quantile(0.5)
    setting = _setting(metrics, "threads")
    return Finding(
        code="data.too-many-workers",
        title=f"{workers} workers with up to {threads} threads each on {cores:g} cores: a worker stands and waits for "
        f"them {waits:.0%} of its time",
        share=metrics.share("data"),
        **gain,
        confidence=0.6,
        evidence=_evidence(metrics) | {"threads_a_worker": threads, "switches_a_worker_s": rounded(switches)},
        change=f"{SETTING}{setting}" if setting else "worker_threads",
        value=1,
        advice="one thread a worker, and a worker a core: the workers are the parallelism",
    )


def idle_workers(metrics: RankMetrics) -> Finding | None:
    """More workers than cores, and training does not even wait for them: what they cost is memory."""
    workers, cores, busy = metrics.workers, metrics.cores, metrics.worker_busy
    if cores is None or workers <= cores or busy is None or metrics.elastic:
        return None
    if workers_behind(metrics) is not None:
        return None
    wanted, delay = spare_cores(metrics), metrics.trainer_delay or 0.0
    title = f"{workers} workers on {cores:g} cores, at work {busy:.0%} of their time"
    held_bytes = Sketch.of(process.pss_bytes for process in metrics.worker_samples).mean
    if held_bytes:
        title += f", {held_bytes / 2**20:,.0f} MiB each"
    more = {"trainer_without_a_core": rounded(delay), "bytes_a_worker": rounded(held_bytes)}
    return Finding(
        code="data.too-many-workers",
        title=title,
        share=delay,
        **gain_if_removed(0.0, delay),
        confidence=0.8,
        evidence=_evidence(metrics) | more,
        change="num_workers",
        value=wanted,
        advice=f"num_workers={wanted}",
    )


def worker_start(metrics: RankMetrics) -> Finding | None:
    """Workers are started again for every epoch."""
    loader, started, share = metrics.loader, metrics.share("loader start"), metrics.start_share
    if loader is NO_LOADER:
        return None
    if started > 0:
        title, confidence = "starting the loader's workers takes", 0.9
        gains = gain_if_host_spared(metrics, started, share)
    else:
        started, share = _first_start(metrics)
        epoch = f"epoch of {metrics.steps_an_epoch or 0:.0f} steps"
        title = f"workers are started for every {epoch}: going by the first, that takes"
        gains, confidence = gain_if_removed(started, share), 0.6
    if share < MIN_SHARE:
        return None
    note = "workers go on with what they have, random numbers too"
    if (loader.sampler or "").rpartition(".")[2] == "RandomSampler":
        note = "shuffling draws other numbers"
    advice = f"persistent_workers=True (from the second epoch on, {note})"
    more: dict[str, Any] = {"change": "persistent_workers", "value": True, "advice": advice}
    if loader.made_anew and (metrics.facts.loaders_side_by_side or 1) == 1:
        # A loader of one epoch keeps its workers for nothing.
        more = {"advice": f"make the loader once, before the first epoch, with {advice}"}
    return Finding(
        code="data.worker-start",
        title=f"{title} {share:.0%} of the time",
        share=share,
        **gains,
        confidence=confidence,
        evidence={"persistent_workers": loader.persistent_workers, "start": loader.start_method},
        **more,
    )


def _first_start(metrics: RankMetrics) -> tuple[float, float]:
    """The share of an epoch that starting workers takes, by the one start that was seen: without and with the
    wait for a first batch beyond what a worker takes to make one. The trace ends before the next epoch."""
    loader, rate, steps = metrics.loader, metrics.samples_a_worker_s, metrics.steps_an_epoch
    if not loader.num_workers or loader.persistent_workers or not rate or not steps:
        return 0.0, 0.0
    warm_up = [step for step in metrics.rank.steps if step.kind == "warmup"]
    start_ms = sum(host_ms_in(step, "loader start") for step in warm_up)
    waits_ms = (span.host_ms for step in warm_up for span in step.spans if span.name == "data")
    beyond_ms = next(waits_ms, 0.0) - (loader.batch_size or 1) / rate * 1e3
    with_wait_ms = start_ms + max(0.0, beyond_ms)
    epoch_ms = steps * metrics.mean_ms
    return start_ms / (epoch_ms + start_ms), with_wait_ms / (epoch_ms + with_wait_ms)


def _evidence(metrics: RankMetrics) -> dict[str, Any]:
    times = metrics.sample_ms
    return {
        "data_share": rounded(metrics.share("data")),
        "num_workers": metrics.loader.num_workers,
        "cores": metrics.cores,
        "cpu_share": rounded(metrics.cpu_share),
        "workers_busy": rounded(metrics.worker_busy),
        "on_a_core": rounded(metrics.worker_on_core),
        "without_a_core": rounded(metrics.worker_delay),
        "waiting_for_storage": rounded(metrics.storage_share),
        "sample_ms": {"median": rounded(times.quantile(0.5)), "p99": rounded(times.quantile(0.99))},
        "samples_a_worker_s": rounded(metrics.samples_a_worker_s),
        "transforms_ms": metrics.transforms_ms,
        "slowest": metrics.slowest_samples,
    }


def _setting(metrics: RankMetrics, subject: str, value: str | None = None) -> str | None:
    """What the script calls its setting for this, if it read one; with `value`, only where it has this value."""
    for read in metrics.settings:
        if read.is_called(subject) and value in (None, str(read.value).lower()):
            return read.name.lower()
    return None
