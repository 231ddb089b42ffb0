"""Rules about data: loading it, copying it, and waiting for what comes back."""

from __future__ import annotations

import math
from typing import Any

from flatout.diagnose.gains import WORTH, computed, data_saved, fed, removed, rounded, spare_cores, spared
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.facts import NO_LOADER
from flatout.model.finding import Finding
from flatout.model.frameworks import may_be_asked_early
from flatout.model.setting_aliases import pattern_of
from flatout.trace import Sketch

_BUSY = 0.85
_FREE = 0.85
_HELD_BACK = 0.25
_STORAGE = 0.10
_TAIL = 8.0
_JOINING = 0.4
_THREADS = 3  # that a worker has which does nothing in particular
_COPIED = 0.01  # page-locking costs nothing, so less of it is worth a word
_HANDED_OVER = 0.05  # of the step: less than this saved by workers goes into the handing over
_BY_EXCLUSION = 0.10  # of the step: what nothing but the absence of other causes speaks for
_LEAST_OF_A_CORE = 0.25  # that a worker is counted with, however much it waits
_FILLED = 0.7  # of the cores taken by workers: who is without one then has too many beside it
_OTHERS_HAVE_IT = 0.2  # of a core, of the time that it wants one: less, and it is not its own kind that has it
_CROWDED = 0.5  # what a worker more brings at least: hyperthreads share a core, all share caches and memory


def main_thread(case: RankMetrics) -> Finding | None:
    saved = data_saved(case)
    if case.loader.num_workers != 0 or case.elastic or saved < _HANDED_OVER:
        return None
    rate, now = case.samples_a_worker_s, case.breakdown.samples_per_s
    # Who only waits, for a disk or a server, leaves its core to others; no more of them a core than the loader starts.
    wanted = max(1, int(spare_cores(case) / max(_LEAST_OF_A_CORE, case.worker_on_core or 1.0)))
    if rate and now:
        eaten = case.breakdown.ceiling_samples_per_s or now / (1 - min(0.99, saved))
        wanted = min(wanted, math.ceil(eaten / rate) + 1)
    once = rate / now if rate and now else 1.0  # what one worker delivers, as a multiple of what is needed now
    written, fills = case.loader.written, case.loader.fills
    advice = f"num_workers={wanted}"
    if written:
        advice = f"keep the dataset as it is while it is read: the loop writes to it ({written}), which no worker sees"
    elif fills:
        advice = f"fill it before training: samples fill the dataset ({fills}), and each worker would fill its own"
    elif rate and now:
        advice += f": one process makes {rate:,.0f} samples/s, training now eats {now:,.0f}"
    return Finding(
        code="data.main-thread",
        title=f"samples are loaded in the training process: {case.share('data'):.0%} of the time it does nothing else",
        share=case.share("data"),
        **fed(case, saved, once * (1 + _CROWDED * (wanted - 1)), once * wanted),
        confidence=0.95,
        evidence=_loading(case) | {"samples_per_s_in_this_process": rounded(rate)},
        change=None if written or fills else "num_workers",
        value=None if written or fills else wanted,
        advice=advice,
    )


def workers_behind(case: RankMetrics) -> Finding | None:
    """Which of the reasons why workers do not keep up, if they do not."""
    saved = data_saved(case) - (case.start_share - case.share("loader start"))
    found_by_itself = case.elastic and any(report.worker is not None for report in case.reports)
    if not (case.workers or found_by_itself) or saved < WORTH:
        return None
    workers, cores = case.workers, case.cores or 1.0
    busy, on_core, delay = case.worker_busy, case.worker_on_core, case.worker_delay
    if busy is None or on_core is None:
        return None
    evidence = _loading(case)
    common: dict[str, Any] = {"share": case.share("data"), "evidence": evidence}
    if on_core < 0.6 and case.storage_share >= _STORAGE and (delay or 0.0) < _HELD_BACK:
        return Finding(
            code="data.disk-bound",
            title=f"workers wait for storage: on a core only {on_core:.0%} of their loading time",
            **common,
            **fed(case, saved),
            confidence=0.8,
            advice="put the data on a faster disk, in fewer and larger files, or let it fit the page cache",
        )
    slow = _slow_tail(case)
    if slow is not None:
        return Finding(
            code="data.slow-samples",
            title=f"a few samples hold their batches back: the slowest take {slow:.0f} times the median",
            **common,
            **fed(case, saved),
            confidence=0.7,
            change="loader",
            value="elastic",
            advice="look at these samples: "
            + ", ".join(f"index {i} ({ms:.0f} ms)" for ms, i in evidence["slowest"][:3]),
        )
    filled = workers * busy * on_core >= _FILLED * cores
    if (delay or 0.0) >= _HELD_BACK and workers > cores and filled and not case.elastic:
        wanted = spare_cores(case)
        return Finding(
            code="data.too-many-workers",
            title=f"{workers} workers on {cores:g} cores: without a core {delay:.0%} of the time they load",
            **common,
            **fed(case, saved, most=1 / (1 - min(0.99, delay or 0.0))),
            confidence=0.8,
            change="num_workers",
            value=wanted,
            advice=f"num_workers={wanted}",
        )
    few = _asked_for_few(case, saved, common)
    if few is not None:
        return few
    joining, wanting = case.collate_share or 0.0, on_core + (delay or 0.0)
    wants_core = wanting >= 0.5 and on_core >= _OTHERS_HAVE_IT * wanting
    # Who has no core is late to hear of the next batch, too; unless it has too many of its own kind beside it.
    at_work = busy >= 0.5 or (saved >= _BY_EXCLUSION and workers <= cores)
    if (case.cpu_share or 0.0) >= _BUSY and joining <= _JOINING and at_work and wants_core:
        return _cpu_bound(case, saved, common)
    left_out = busy < 0.5 and (case.cpu_share or 1.0) < _FREE and saved >= _BY_EXCLUSION
    if joining > _JOINING or (left_out and not case.elastic):
        return Finding(
            code="data.collate-bound",
            title=f"joining samples is the cost: {joining:.0%} of the workers' work"
            if joining > _JOINING
            else f"handing batches over is the cost: workers are busy loading only {busy:.0%} of the time",
            **common,
            **fed(case, saved),
            confidence=0.6,
            change=None if case.elastic else "loader",
            value=None if case.elastic else "elastic",
            advice="a collate function that works on whole tensors"
            + ("" if case.elastic else "; workers that write into shared, page-locked memory: flatout.DataLoader"),
        )
    if found_by_itself and busy >= 0.5 and wants_core:  # it has tried more workers, and fewer
        return _cpu_bound(case, saved, common)
    if busy >= 0.7 and not case.elastic:
        room = _room(case) if wants_core else max(workers, _room(case))
        wanted = min(workers + room, math.ceil(workers / (1 - min(0.9, saved))))
        if wanted <= workers:
            return _cpu_bound(case, saved, common)
        free = f"{1 - (case.cpu_share or 0.0):.0%} of the CPU is free"
        waiting = f"each is on a core only {on_core:.0%} of that time"
        return Finding(
            code="data.too-few-workers",
            title=f"the workers ({workers}) are {busy:.0%} busy, and {free if wants_core else waiting}",
            **common,
            **fed(case, saved, case.supply * (1 + _CROWDED * (wanted / workers - 1)), case.supply * wanted / workers),
            confidence=0.85,
            change="num_workers",
            value=wanted,
            advice=f"num_workers={wanted}: one worker makes {case.samples_a_worker_s or 0:,.0f} samples/s, "
            f"training now eats {case.breakdown.samples_per_s or 0:,.0f}",
        )
    return None


def _asked_for_few(case: RankMetrics, saved: float, common: dict[str, Any]) -> Finding | None:
    """A sampler of the script's own may notice when it is asked: the elastic loader asks as early as stock would."""
    loader, on_core = case.loader, case.worker_on_core or 1.0
    wanted = int((case.cores or 1.0) / max(_LEAST_OF_A_CORE, on_core))
    early = may_be_asked_early(loader.sampler, loader.batch_sampler)
    if not case.elastic or early or loader.iterable or not 0 < case.workers < wanted or saved < _BY_EXCLUSION:
        return None
    ahead = case.workers * (loader.prefetch_factor or 2)
    return Finding(
        code="data.too-few-workers",
        title=f"the sampler is the script's own, and num_workers={case.workers} lets it be asked {ahead} batches ahead",
        **common,
        **fed(case, saved, most=wanted / case.workers),
        confidence=0.7,
        change="num_workers",
        value=wanted,
        advice=f"num_workers={wanted}: the loader starts as many workers as it needs, but asks no further ahead",
    )


def _cpu_bound(case: RankMetrics, saved: float, common: dict[str, Any]) -> Finding:
    transforms, mean = _transforms(case), case.sample_ms.mean or 0.0
    slowest = max(transforms.items(), key=lambda item: item[1], default=None)
    doing = f"; {slowest[0]} takes {slowest[1]:.1f} ms of them" if slowest else ""
    cpu_ms = (case.sample_ms.quantile(0.5) or 0.0) * (case.worker_on_core or 1.0)
    all_busy = (case.cpu_share or 0.0) >= _BUSY or not case.elastic
    taken = "every core is busy loading" if (case.own_cpu_share or 1.0) >= _BUSY else "no core is free for more workers"
    held_up = taken if all_busy else "no number of workers keeps up"
    moved = min(0.9, sum(transforms.values()) / mean) if mean else 0.0  # what the card could do, where it is seen
    setting = _setting(case, "augment_on", "cpu")
    return Finding(
        code="data.cpu-bound",
        title=f"{held_up}: a sample costs {cpu_ms:.1f} ms of CPU{doing}",
        **common,
        **fed(case, saved, case.supply / (1 - moved)),
        confidence=0.85,
        change=None if not case.on_gpu else f"setting:{setting}" if setting else "gpu_transforms",
        value=None if not case.on_gpu else "gpu" if setting else True,
        advice=f"do less on the CPU: {'transforms on the GPU, ' if case.on_gpu else ''}a faster decoder, or a cache of "
        "decoded data",
    )


def work_for_the_card(case: RankMetrics) -> Finding | None:
    """Augmentation that the script itself can do on the card, while the workers are behind for other reasons too."""
    setting, behind = _setting(case, "augment_on", "cpu"), workers_behind(case)
    on_core = (case.worker_on_core or 0.0) + (case.worker_delay or 0.0)
    if setting is None or not case.on_gpu or behind is None or behind.code == "data.cpu-bound" or on_core < 0.5:
        return None
    median = case.sample_ms.quantile(0.5) or 0.0
    return Finding(
        code="data.cpu-bound",
        title=f"a sample costs {median:.1f} ms in a worker, augmentation and all, and {setting} says 'cpu'",
        share=case.share("data"),
        **fed(case, data_saved(case)),
        confidence=0.4,
        evidence=_loading(case) | {"setting": setting},
        change=f"setting:{setting}",
        value="gpu",
        advice=f"{setting}=gpu: how much of a sample that spares the workers cannot be seen from outside",
    )


def threads_of_workers(case: RankMetrics) -> Finding | None:
    """Workers that each have threads of their own, all together far more than cores."""
    counts = [p.threads for p in case.worker_samples if p.threads is not None]
    workers, cores, saved = case.workers, case.cores, data_saved(case)
    if not counts or not workers or cores is None or saved < WORTH or case.elastic:
        return None
    threads = max(counts) - _THREADS
    if threads < 2 or workers * threads <= 2 * cores:
        return None
    # Without them a worker does all by itself: it no longer stands and waits for its threads, at best. At worst, while
    # cores are free, it takes as much longer as they spared it.
    stands = max(0.0, 1 - (case.worker_on_core or 1.0) - (case.worker_delay or 0.0))
    gains = fed(case, saved, most=1 / (1 - min(0.9, stands)))
    taken = (Sketch.of(p.cpu_pct for p in case.worker_samples).mean or 0.0) / 100 / (case.worker_busy or 1.0)
    if (case.cpu_share or 1.0) < _FREE and taken > 1:
        gains["gain_low"] = 1 / taken
    setting = _setting(case, "threads")
    switches = [p.switches_s for p in case.worker_samples if p.switches_s is not None]
    return Finding(
        code="data.too-many-workers",
        title=f"{workers} workers with up to {threads} threads each on {cores:g} cores: a worker stands and waits for "
        f"them {stands:.0%} of its time",
        share=case.share("data"),
        **gains,
        confidence=0.6,
        evidence=_loading(case)
        | {"threads_a_worker": threads, "switches_a_worker_s": rounded(Sketch.of(switches).quantile(0.5))},
        change=f"setting:{setting}" if setting else "worker_threads",
        value=1,
        advice="one thread a worker, and a worker a core: the workers are the parallelism",
    )


def idle_workers(case: RankMetrics) -> Finding | None:
    """More workers than cores, and training does not even wait for them: what they cost is memory."""
    workers, cores, busy = case.workers, case.cores, case.worker_busy
    if cores is None or workers <= cores or busy is None or case.elastic or workers_behind(case) is not None:
        return None
    wanted, delay = spare_cores(case), case.trainer_delay or 0.0
    held = Sketch.of(p.pss_bytes for p in case.worker_samples).mean
    memory = f", {held / 2**20:,.0f} MiB each" if held else ""
    return Finding(
        code="data.too-many-workers",
        title=f"{workers} workers on {cores:g} cores, at work {busy:.0%} of their time{memory}",
        share=delay,
        **removed(0.0, delay),
        confidence=0.8,
        evidence=_loading(case) | {"trainer_without_a_core": rounded(delay), "bytes_a_worker": rounded(held)},
        change="num_workers",
        value=wanted,
        advice=f"num_workers={wanted}",
    )


def worker_start(case: RankMetrics) -> Finding | None:
    loader, started, share = case.loader, case.share("loader start"), case.start_share
    if loader is NO_LOADER or case.elastic:  # which keeps its workers
        return None
    title, seen = "starting the loader's workers takes", started > 0
    if not seen:
        started, share = _first_start(case)
        epoch = f"epoch of {case.steps_an_epoch or 0:.0f} steps"
        title = f"workers are started for every {epoch}: going by the first, that takes"
    if share < WORTH:
        return None
    shuffled = (loader.sampler or "").endswith("RandomSampler")
    others = "shuffling draws other numbers" if shuffled else "workers go on with what they have, random numbers too"
    advice = f"persistent_workers=True (from the second epoch on, {others})"
    made_anew = loader.made_anew and (case.facts.loaders_side_by_side or 1) == 1
    if made_anew:  # then none of them has an epoch to keep its workers for
        advice = f"make the loader once, before the first epoch, with {advice}"
    return Finding(
        code="data.worker-start",
        title=f"{title} {share:.0%} of the time",
        share=share,
        **(spared(case, started, share) if seen else removed(started, share)),
        confidence=0.9 if seen else 0.6,
        evidence={"persistent_workers": loader.persistent_workers, "start": loader.start_method},
        change=None if made_anew else "persistent_workers",
        value=None if made_anew else True,
        advice=advice,
    )


def _first_start(case: RankMetrics) -> tuple[float, float]:
    """What starting workers anew takes of an epoch, by the one start that was seen: without and with the wait for a
    first batch, beyond what a worker takes to make one. The trace ends before the next epoch."""
    loader, rate, steps = case.loader, case.samples_a_worker_s, case.steps_an_epoch
    if not loader.num_workers or loader.persistent_workers or not rate or not steps:
        return 0.0, 0.0
    spans = [span for step in case.rank.steps if step.kind == "warmup" for span in step.spans]
    start_ms = sum(span.host_ms for span in spans if span.name == "loader start")
    first_ms = next((span.host_ms for span in spans if span.name == "data"), 0.0)
    with_ms = start_ms + max(0.0, first_ms - (loader.batch_size or 1) / rate * 1e3)
    epoch_ms = steps * case.mean_ms
    return start_ms / (epoch_ms + start_ms), with_ms / (epoch_ms + with_ms)


def copies(case: RankMetrics) -> Finding | None:
    xray = case.xray
    if xray is None or not case.step_ms:
        return None
    pageable = xray.copies_ms.get("HtoD Pageable", 0.0) / xray.steps / case.step_ms
    pinned = xray.copies_ms.get("HtoD Pinned", 0.0) / xray.steps / case.step_ms
    host = case.share("copy")
    # Only in steps that were looked at closely are copies told apart.
    count = max((sum(1 for span in step.spans if span.name == "copy") for step in case.marked), default=0)
    evidence = {"copies_a_step": count, "copy_share_of_host": rounded(host), "copies_ms": dict(xray.copies_ms)}
    if max(pageable, host) >= _COPIED and pageable > 0:
        return Finding(
            code="copy.pageable",
            title=f"batches are copied from memory that is not page-locked: {max(pageable, host):.0%} of the step",
            share=max(pageable, host),
            **spared(case, 0.0, max(pageable, host)),
            confidence=0.9,
            evidence=evidence,
            change="pin_memory",
            value=True,
            advice="DataLoader(pin_memory=True) and .to(device, non_blocking=True)",
        )
    if count > 16 and host >= WORTH:
        return Finding(
            code="copy.fragmented",
            title=f"{count} copies to the card in a step",
            share=host,
            **spared(case, 0.0, host * (1 - 1 / count)),
            confidence=0.6,
            evidence=evidence,
            advice="join the tensors of a batch before copying them",
        )
    beside_ms = max(0.0, sum(xray.busy_by_phase_ms.values()) - xray.busy_ms)  # two things at once on the card
    alone = pinned - beside_ms / xray.steps / case.step_ms
    if alone >= WORTH and (case.busy_share or 0.0) >= 0.5:
        return Finding(
            code="copy.blocking",
            title=f"copies to the card take {alone:.0%} of the step, in which it computes nothing",
            share=alone,
            **computed(case, 0.0, alone),
            confidence=0.6,
            evidence=evidence,
            change="device_prefetch",
            value=True,
            advice="copy the next batch on a side stream: flatout.feed.to_device",
        )
    return None


def waits_for_card(case: RankMetrics) -> Finding | None:
    saved = case.saved_without("sync") if case.on_gpu else None
    if saved is not None and case.busy_share is not None:
        saved = min(saved, 1 - case.busy_share)  # a wait for useful work costs nothing
    if saved is None or saved < 0.01:
        return None
    waits = sorted((p for p in case.breakdown.training if p.name == "sync"), key=lambda p: -p.ms)
    return Finding(
        code="sync.item",
        title=f"the host waits for the card in mid-step, and the card then for the host: {saved:.1%} of the step",
        share=saved,
        # Replayed batches are waited for as well: a measured ceiling says nothing of it.
        **(removed(0.0, saved) if case.has_ceiling else spared(case, 0.0, saved)),
        confidence=0.7,
        evidence={"lines": [{"where": p.where, "ms_a_step": rounded(p.ms / case.breakdown.steps)} for p in waits[:8]]},
        advice="keep the value on the card, and read it only when it is printed",
        where=waits[0].where if waits else None,
    )


def _loading(case: RankMetrics) -> dict[str, Any]:
    slowest = sorted(((ms, int(i)) for r in case.reports for ms, i in r.slowest), reverse=True)[:5]
    return {
        "data_share": rounded(case.share("data")),
        "num_workers": case.loader.num_workers,
        "cores": case.cores,
        "cpu_share": rounded(case.cpu_share),
        "workers_busy": rounded(case.worker_busy),
        "on_a_core": rounded(case.worker_on_core),
        "without_a_core": rounded(case.worker_delay),
        "waiting_for_storage": rounded(case.storage_share),
        "sample_ms": {"median": rounded(case.sample_ms.quantile(0.5)), "p99": rounded(case.sample_ms.quantile(0.99))},
        "samples_a_worker_s": rounded(case.samples_a_worker_s),
        "transforms_ms": _transforms(case),
        "slowest": slowest,
    }


def _transforms(case: RankMetrics) -> dict[str, float]:
    samples = sum(r.samples for r in case.reports) or 1
    spent: dict[str, float] = {}
    for report in case.reports:
        for name, seconds in report.transforms_s.items():
            spent[name] = spent.get(name, 0.0) + seconds * 1e3 / samples
    return spent


def _setting(case: RankMetrics, subject: str, value: str | None = None) -> str | None:
    """What the script calls its setting for this, if it read one; with `value`, only where it says so."""
    pattern = pattern_of(subject)
    for read in case.settings:
        if pattern.fullmatch(read.key) and value in (None, str(read.value).lower()):
            return read.key
    return None


def _room(case: RankMetrics) -> int:
    """How many more workers the free cores would carry, each with as much of a core as one takes now."""
    if case.cpu_share is None or case.cores is None:
        return spare_cores(case)
    seen = Sketch.of(p.cpu_pct for p in case.worker_samples).mean  # with all its threads
    takes = seen / 100 if seen else (case.worker_busy or 1.0) * (case.worker_on_core or 1.0)
    return round(case.cores * (1 - case.cpu_share) / max(0.05, takes))


def _slow_tail(case: RankMetrics) -> float | None:
    """How far the slowest hundredth lies above the median, where that hundredth takes a tenth of all loading time.

    A worker that had to wait for a core is no slower sample: what that explains of the tail does not count.
    """
    times = case.sample_ms
    median, p99 = times.quantile(0.5), times.quantile(0.995)
    if not median or not p99 or not times.mean or times.count < 200 or p99 / median < _TAIL:
        return None
    beyond_s = (times.mean - median) * times.count / 1e3
    if sum(r.run_delay_s or 0.0 for r in case.reports) > 0.5 * beyond_s:
        return None
    tail_s = 0.01 * p99 / 1e3 * sum(r.samples for r in case.reports)
    return p99 / median if tail_s > 0.1 * case.worked_s else None
