"""Rules about loading samples: who loads them, and why they come late.

Opposites are told apart by what was measured: too few workers are busy while cores are free, too many
wait for a core, a slow disk leaves both idle, and where others have the cores neither number is to
blame.
"""

from __future__ import annotations

import math
from typing import Any

from flatout.diagnose.breakdown import COLLATE, SAMPLES, in_workers
from flatout.diagnose.gains import factor, gain_if_fed, gain_if_host_spared, gain_if_samples_spared
from flatout.diagnose.host_rules import as_evidence
from flatout.diagnose.knobs import every_knob
from flatout.diagnose.rank_metrics import CPU_FULL, MIN_SHARE, NO_CORE, RankMetrics, rounded
from flatout.model.causes import Finding
from flatout.model.changes import SETTING
from flatout.model.records import NO_LOADER
from flatout.trace import Sketch

_STORAGE_BOUND = 0.10  # of the time that processes wait for storage
_ON_CORE_WHILE_READING = 0.6  # of loading time: a worker that reads from a slow disk is on a core for less
_MANY_A_CORE, _MOSTLY_WAITS, _IDLE_CORES = 2, 0.8, 0.5  # workers, of their loading time, of the cores
_ALWAYS = 0.9  # of its loading time that a worker wants a core
_CORES_TAKEN = 0.6  # by this run: then it is workers that are in each other's way
_SLOW_TAIL = 8.0  # times the median
_MANY_SAMPLES = 200
_COLLATING = 0.4  # of the workers' work
_OWN_THREADS = 3  # that a worker has which does nothing in particular
_MIN_WAIT_WITHOUT_WORKERS = 0.05  # of the step: handing batches over costs as much
_MIN_WAIT_BY_EXCLUSION = 0.10  # of the step: for causes that only the absence of others speaks for
_MIN_CORE_A_WORKER = 0.25  # that a worker is counted with, however much it waits
_MIN_PART_OF_WISH = 0.2  # on a core, of the time it wants one: with less, others than workers have it
_MIN_LINE = 0.05  # of the time of a sample, that a line is named for
_ADDED_WORKER = 0.5  # of a worker that one more brings at least: hyperthreads share a core, all share caches


def main_thread(metrics: RankMetrics) -> Finding | None:
    """Samples are loaded in the training process."""
    loader, saved = metrics.loader, metrics.data_saved
    if loader.num_workers != 0 or metrics.elastic or saved < _MIN_WAIT_WITHOUT_WORKERS:
        return None
    machine, now = metrics.machine, metrics.breakdown.samples_per_s
    rate = now / metrics.share("data") if now else None  # joining them and the wait for a disk included
    # A worker that waits for a disk or a server leaves its core to others; one that waits for a core
    # does not.
    wants_core = min(1.0, (metrics.work.on_core or 1.0) + (machine.trainer_delay or 0.0))
    wanted = max(1, int(machine.spare_cores / max(_MIN_CORE_A_WORKER, wants_core)))
    one_worker, speeds = 1.0, ""  # what one delivers, as a multiple of what is used now
    if rate and now:
        needed = metrics.breakdown.ceiling_samples_per_s or now * factor(saved)
        wanted = min(wanted, math.ceil(needed / rate) + 1)
        one_worker = rate / now
        speeds = f": one process makes {rate:,.0f} samples/s, training uses {now:,.0f}"
    more: dict[str, Any] = {"change": "num_workers", "value": wanted, "advice": f"num_workers={wanted}{speeds}"}
    as_it_is = "keep the dataset as it is while it is read"
    if loader.written:
        more = {"advice": f"{as_it_is}: the loop writes to it ({loader.written}), which no worker sees"}
    elif loader.fills:
        more = {"advice": f"{as_it_is}: samples fill it ({loader.fills}), and each worker would fill its own"}
    return _late(
        metrics,
        "data.main-thread",
        f"samples are loaded in the training process, which spends {metrics.share('data'):.0%} of its time on that",
        gain_if_fed(metrics, saved, one_worker * (1 + _ADDED_WORKER * (wanted - 1)), one_worker * wanted),
        confidence=0.95,
        **more,
    )


def few_shards(metrics: RankMetrics) -> Finding | None:
    """A stream has fewer shards than the loader has workers."""
    loader, saved = metrics.loader, metrics.data_saved
    gave: dict[int, int] = {}
    for report in metrics.rank.workers:
        if report.dataset == loader.class_name and report.worker is not None:
            # One that evaluation starts again for a few batches may be gone before it has read any.
            gave[report.worker] = gave.get(report.worker, 0) + report.samples
    working = sum(samples > 0 for samples in gave.values())
    idle = len(gave) - working
    if not loader.iterable or saved < MIN_SHARE or not working or not idle:
        return None
    return Finding(
        code="data.few-shards",
        title=f"{idle} of {len(gave)} workers have nothing to read: the stream has shards for {working}",
        share=metrics.share("data"),
        **gain_if_fed(metrics, saved, most=len(gave) / working),
        confidence=0.9,
        evidence={
            "data_share": rounded(metrics.share("data")),
            "samples_by_worker": gave,
            "workers_without_samples": idle,
        },
        advice="write the data in at least as many files or shards as there are workers (times ranks)",
    )


def workers_behind(metrics: RankMetrics) -> Finding | None:
    """The reason why workers do not keep up, if they do not. The first that fits is the one."""
    saved = metrics.data_saved - (metrics.start_share - metrics.share("loader start"))
    unknown = metrics.work.busy is None or metrics.work.on_core is None
    if saved < MIN_SHARE or unknown or not (metrics.workers or _tuned_already(metrics)):
        return None
    if metrics.workers_lack_cores:
        return None  # the wait is charged to those who have them: more workers, or fewer, would wait as well
    reasons = (
        _disk_bound,
        _slow_samples,
        _no_core_for_workers,
        _cpu_bound,
        _collate_bound,
        _too_few_workers,
        _no_core_left,
    )
    return next((found for reason in reasons if (found := reason(metrics, saved)) is not None), None)


def _tuned_already(metrics: RankMetrics) -> bool:
    """Whether flatout's loader has tried more workers, and fewer."""
    return metrics.elastic and any(report.worker is not None for report in metrics.work.reports)


def _wants_core(metrics: RankMetrics) -> bool:
    """Whether the workers want a core most of the time and get a fair part of it."""
    on_core = metrics.work.on_core or 0.0
    wish = on_core + (metrics.work.delay or 0.0)
    return wish >= 0.5 and on_core >= _MIN_PART_OF_WISH * wish


def _disk_bound(metrics: RankMetrics, saved: float) -> Finding | None:
    machine, on_core, delay = metrics.machine, metrics.work.on_core or 0.0, metrics.work.delay or 0.0
    # Far more workers than cores that wait nearly all the time, for nothing on this machine: no
    # counter shows for what (a network disk, a server), but it is not their number that holds them
    # up.
    crowd = metrics.workers >= _MANY_A_CORE * (machine.cores or math.inf)
    crowd_waits = crowd and 1 - on_core - delay >= _MOSTLY_WAITS and (machine.own_cpu_share or 0.0) < _IDLE_CORES
    if on_core >= _ON_CORE_WHILE_READING or delay >= NO_CORE:
        return None
    if machine.storage_share < _STORAGE_BOUND and not crowd_waits:
        return None
    return _late(
        metrics,
        "data.disk-bound",
        f"workers wait for storage, or a server: on a core only {on_core:.0%} of their loading time",
        gain_if_fed(metrics, saved),
        confidence=0.8,
        advice="put the data on a faster disk, in fewer and larger files, or let it fit the page cache",
    )


def _slow_samples(metrics: RankMetrics, saved: float) -> Finding | None:
    """The slowest hundredth lies far above the median, and takes a tenth of all loading time."""
    work = metrics.work
    median, mean, slowest = work.sample_ms.quantile(0.5), work.sample_ms.mean, work.sample_ms.quantile(0.995)
    count = work.sample_ms.count
    if not median or not mean or not slowest or count < _MANY_SAMPLES or slowest < _SLOW_TAIL * median:
        return None
    tail_s = 0.01 * work.total("samples") * slowest / 1e3
    # A worker that had to wait for a core is no slower sample: what that explains of the tail does not count.
    # It may wait for one at any time, but loses no more of loading than it was off a core.
    delay_s = min(work.total("run_delay_s"), work.worked_s * (1 - (work.on_core or 0.0)))
    if tail_s <= 0.1 * work.worked_s or delay_s > 0.5 * (mean - median) * count / 1e3:
        return None
    which = ", ".join(f"index {index} ({ms:.0f} ms)" for ms, index in work.slowest[:3])
    return _late(
        metrics,
        "data.slow-samples",
        f"a few samples hold their batches back: the slowest take {slowest / median:.0f} times the median",
        gain_if_samples_spared(metrics, saved),
        confidence=0.7,
        change="loader",
        value="elastic",
        advice=f"look at these samples: {which}",
    )


def _no_core_for_workers(metrics: RankMetrics, saved: float) -> Finding | None:
    machine, delay = metrics.machine, metrics.work.delay or 0.0
    cores, wanted = machine.cores or 1.0, machine.spare_cores
    # Reports count the worker's own thread: where it always wants a core, others of its threads may
    # have them.
    always = (metrics.work.on_core or 0.0) + delay >= _ALWAYS
    taken = always or (machine.own_cpu_share or 0.0) >= _CORES_TAKEN
    if delay < NO_CORE or metrics.workers <= cores or not taken or metrics.elastic:
        return None
    return _late(
        metrics,
        "data.too-many-workers",
        f"{metrics.workers} workers on {cores:g} cores: without a core {delay:.0%} of the time they load",
        gain_if_fed(metrics, saved, most=factor(delay)),
        phase=None,
        confidence=0.8,
        change="num_workers",
        value=wanted,
        advice=f"num_workers={wanted}",
    )


def _cpu_bound(metrics: RankMetrics, saved: float) -> Finding | None:
    work, machine = metrics.work, metrics.machine
    if (machine.cpu_share or 0.0) < CPU_FULL or (work.collating or 0.0) > _COLLATING or not _wants_core(metrics):
        return None
    # A worker without a core is late to hear about the next batch, unless there are more workers than cores.
    each_may_have_one = saved >= _MIN_WAIT_BY_EXCLUSION and metrics.workers <= (machine.cores or 1.0)
    late = each_may_have_one and (machine.own_cpu_share or 0.0) >= CPU_FULL
    return _samples_cost_cpu(metrics, saved) if late or (work.busy or 0.0) >= 0.5 else None


def _samples_cost_cpu(metrics: RankMetrics, saved: float) -> Finding:
    mean_ms, transforms_ms = metrics.work.sample_ms.mean or 0.0, metrics.work.transforms_ms
    title = f"no number of workers keeps up: a sample costs {mean_ms * (metrics.work.on_core or 1.0):.2g} ms of CPU"
    for_gpu = 0.0  # of a sample's time, that the GPU could do
    if transforms_ms:
        name = max(transforms_ms, key=transforms_ms.__getitem__)
        title += f"; {name} takes {transforms_ms[name]:.2g} ms of them"
        for_gpu = min(0.9, sum(transforms_ms.values()) / (mean_ms or math.inf))
    if metrics.machine.held_up_by_workers >= MIN_SHARE:
        held_up, waits = metrics.machine.held_up_by_workers, metrics.share("data")
        title += f"; training waits for data {waits:.0%} of the time, and {held_up:.0%} for a core that a worker has"
    more: dict[str, Any] = {"advice": "do less on the CPU: a faster decoder, or a cache of decoded data"}
    if metrics.on_gpu:
        advice = "do less on the CPU: transforms on the GPU, a faster decoder, or a cache of decoded data"
        more = {"change": "gpu_transforms", "value": True, "advice": advice}
        setting = _setting(metrics, "augment_on", "cpu")
        if setting is not None:
            more |= {"change": f"{SETTING}{setting}", "value": "gpu"}
    gain = gain_if_samples_spared(metrics, saved, metrics.supply / (1 - for_gpu))
    return _late(metrics, "data.cpu-bound", title, gain, confidence=0.85, **more)


def _collate_bound(metrics: RankMetrics, saved: float) -> Finding | None:
    joining, busy = metrics.work.collating or 0.0, metrics.work.busy or 0.0
    left_over = busy < 0.5 and (metrics.machine.cpu_share or 1.0) < CPU_FULL and not metrics.elastic
    if joining > _COLLATING and busy >= _COLLATING:
        title = f"joining samples is the cost: {joining:.0%} of the workers' work"
    elif left_over and saved >= _MIN_WAIT_BY_EXCLUSION:
        title = f"handing batches over is the cost: workers are busy loading only {busy:.0%} of the time"
    else:
        return None
    advice, change = "a collate function that works on whole tensors", {}
    if not metrics.elastic:
        advice += "; workers that write into shared, page-locked memory: flatout.DataLoader"
        change = {"change": "loader", "value": "elastic"}
    gain = gain_if_samples_spared(metrics, saved)
    return _late(metrics, "data.collate-bound", title, gain, phase=COLLATE, confidence=0.6, advice=advice, **change)


def _too_few_workers(metrics: RankMetrics, saved: float) -> Finding | None:
    workers, machine = metrics.workers, metrics.machine
    busy, on_core, cpu_share = metrics.work.busy or 0.0, metrics.work.on_core or 0.0, machine.cpu_share
    if _tuned_already(metrics) and busy >= 0.5 and _wants_core(metrics):
        return _samples_cost_cpu(metrics, saved)
    if busy < 0.7 or metrics.elastic:
        return None
    room = machine.spare_cores  # for more workers, each with as much of a core as one takes now
    if cpu_share is not None and machine.cores is not None:
        room = round(machine.cores * (1 - cpu_share) / max(0.05, busy * (on_core or 1.0)))
    idle = f"{1 - (cpu_share or 0.0):.0%} of the CPU is free"
    if not _wants_core(metrics):
        room = max(workers, room)
        idle = f"each is on a core only {on_core:.0%} of that time"
    wanted = min(workers + room, math.ceil(workers / (1 - min(0.9, saved))))
    if wanted <= workers:
        return _samples_cost_cpu(metrics, saved)
    least = metrics.supply * (1 + _ADDED_WORKER * (wanted / workers - 1))
    rate, now = metrics.samples_a_worker_s or 0, metrics.breakdown.samples_per_s or 0
    return _late(
        metrics,
        "data.too-few-workers",
        f"the workers ({workers}) are {busy:.0%} busy, and {idle}",
        gain_if_fed(metrics, saved, least, metrics.supply * wanted / workers),
        confidence=0.85,
        change="num_workers",
        value=wanted,
        advice=f"num_workers={wanted}: one worker makes {rate:,.0f} samples/s, training uses {now:,.0f}",
    )


def _no_core_left(metrics: RankMetrics, saved: float) -> Finding | None:
    """The training process has all the cores: its workers wait for one, though they have little to do."""
    delay, own = metrics.work.delay or 0.0, metrics.machine.own_cpu_share or 0.0
    if delay < NO_CORE or own < CPU_FULL or saved < _MIN_WAIT_BY_EXCLUSION:
        return None
    return _late(
        metrics,
        "data.cpu-bound",
        f"workers wait for a core: this run keeps {own:.0%} of its {metrics.machine.cores:g} cores busy itself, and "
        f"training waits for data {metrics.share('data'):.0%} of the time",
        gain_if_fed(metrics, saved),
        phase=None,
        confidence=0.6,
        advice="leave them a core: torch.set_num_threads() with one thread less for each worker, if that pays",
    )


def augmentation_on_cpu(metrics: RankMetrics) -> Finding | None:
    """The script can augment on the GPU and does not, while workers are behind, for whatever reason."""
    setting, saved = _setting(metrics, "augment_on", "cpu"), metrics.data_saved
    if setting is None or not metrics.on_gpu or not metrics.workers or saved < MIN_SHARE or not _wants_core(metrics):
        return None
    sample_ms = metrics.work.sample_ms.mean or 0.0
    return _late(
        metrics,
        "data.cpu-bound",
        f"a sample costs {sample_ms:.1f} ms in a worker, augmentation included, and {setting} is cpu",
        gain_if_fed(metrics, saved),
        confidence=0.4,
        change=f"{SETTING}{setting}",
        value="gpu",
        advice=f"{setting}=gpu: how much of a sample that spares the workers cannot be seen from outside",
    )


def worker_threads(metrics: RankMetrics) -> Finding | None:
    """Workers that each have threads of their own, all together far more than cores."""
    workers, work, machine, saved = metrics.workers, metrics.work, metrics.machine, metrics.data_saved
    if not workers or machine.cores is None or saved < MIN_SHARE or metrics.elastic or metrics.workers_lack_cores:
        return None
    seen = [p for sample in machine.samples for p in sample.processes if p.role == "worker"]
    threads = max((worker.threads or 0 for worker in seen), default=0) - _OWN_THREADS
    if threads < 2 or workers * threads <= 2 * machine.cores:
        return None
    # Without them a worker no longer waits for its threads, at best. At worst, while cores are free,
    # it takes as much longer as they spared it.
    waits = max(0.0, 1 - (work.on_core or 1.0) - (work.delay or 0.0))
    gain = gain_if_fed(metrics, saved, most=1 / (1 - min(0.9, waits)))
    cores_a_worker = (Sketch.of(worker.cpu_pct for worker in seen).mean or 0.0) / 100 / (work.busy or 1.0)
    if (machine.cpu_share or 1.0) < CPU_FULL and cores_a_worker > 1:
        gain["gain_low"] = 1 / cores_a_worker
    setting = _setting(metrics, "threads")
    return _late(
        metrics,
        "data.too-many-workers",
        f"{workers} workers with up to {threads} threads each on {machine.cores:g} cores: a worker stands and waits "
        f"for them {waits:.0%} of its time",
        gain,
        phase=None,
        confidence=0.6,
        evidence={"threads_a_worker": threads},
        change=f"{SETTING}{setting}" if setting else "worker_threads",
        value=1,
        advice="one thread a worker, and a worker a core: the workers are the parallelism",
    )


def worker_start(metrics: RankMetrics) -> Finding | None:
    """Workers are started again for every epoch."""
    loader, started, share = metrics.loader, metrics.share("loader start"), metrics.start_share
    if loader is NO_LOADER or share < MIN_SHARE:
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
        title=f"starting the loader's workers, and waiting for their first batches, takes {share:.0%} of the time",
        share=share,
        **gain_if_host_spared(metrics, share, started),
        confidence=0.9,
        evidence={"persistent_workers": loader.persistent_workers, "start": loader.start_method},
        **more,
    )


def _late(
    metrics: RankMetrics,
    code: str,
    title: str,
    gain: dict[str, Any],
    *,
    advice: str,
    phase: str | None = SAMPLES,
    **more: Any,
) -> Finding:
    """A finding about batches that come late, with what was measured, and the worker's line that
    takes the time of a phase."""
    evidence, where = _measured(metrics) | more.pop("evidence", {}), None
    functions = in_workers(metrics.rank, metrics.loader.class_name, (phase,)) if phase else ()
    if functions and functions[0].hottest.share >= _MIN_LINE:
        hottest = functions[0].hottest
        where = hottest.where
        of_what = "joining a batch" if phase == COLLATE else "a sample"
        advice += f"; {hottest} takes {hottest.share:.0%} of the time of {of_what}"
        evidence["lines"] = as_evidence(functions)
    return Finding(
        code=code,
        title=title,
        share=metrics.share("data"),
        **gain,
        evidence=evidence,
        advice=advice,
        where=where,
        **more,
    )


def _measured(metrics: RankMetrics) -> dict[str, Any]:
    """What is known of loading."""
    work, machine = metrics.work, metrics.machine
    times = work.sample_ms
    return {
        "data_share": rounded(metrics.share("data")),
        "num_workers": metrics.loader.num_workers,
        "cores": machine.cores,
        "cpu_share": rounded(machine.cpu_share),
        "own_cpu_share": rounded(machine.own_cpu_share),
        "workers_busy": rounded(work.busy),
        "on_a_core": rounded(work.on_core),
        "without_a_core": rounded(work.delay),
        "waiting_for_storage": rounded(machine.storage_share),
        "sample_ms": {"median": rounded(times.quantile(0.5)), "p99": rounded(times.quantile(0.99))},
        "samples_a_worker_s": rounded(metrics.samples_a_worker_s),
        "transforms_ms": work.transforms_ms,
        "slowest": work.slowest,
    }


def _setting(metrics: RankMetrics, subject: str, value: str | None = None) -> str | None:
    """What the script calls its setting for this, if it read one; with `value`, only where it has
    this value."""
    for read in every_knob(metrics.facts.settings):
        if read.is_called(subject) and value in (None, str(read.value).lower()):
            return read.name.lower()
    return None
