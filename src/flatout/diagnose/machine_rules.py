"""Rules about the machine (its memory, its GPUs, who else uses them), and about ranks that wait for
each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.diagnose.gains import gain_if_gpu_spared, gain_if_removed
from flatout.diagnose.rank_metrics import MAX_SAVED, MIN_SHARE, RankMetrics, rounded
from flatout.model.causes import Finding
from flatout.model.formatting import HARMFUL_THROTTLES, MEMORY_FULL_PCT, count_of
from flatout.trace import GpuProcess

_FROM_MACHINE = "model of the machine"
_SWAP_GREW_BYTES = 2**28
_ROOM_FOR_ACTIVATIONS = 0.5  # of the GPU's memory in use, at the most
_MIN_THROTTLED = 0.1  # of the samples
_OTHERS_MEMORY_BYTES = 2**28  # a process that holds less of a GPU's memory does not count
_MIN_OTHERS_CORES = 0.2  # of all cores
_MIN_DELAY = 0.05  # of the time that training waits for a core
_MIN_STRAGGLING = 0.05  # of the step that the others wait for one rank
_MIN_EXCHANGE = 0.15  # of the step
_MIN_WAITING = 0.10  # of the step, on the mean of all ranks


def host_memory(metrics: RankMetrics) -> Finding | None:
    """The host's memory is full, or it swaps."""
    hosts = [sample.host for sample in metrics.machine.samples]
    used = metrics.machine.memory_share or 0.0
    swap = [host.swap_used_bytes for host in hosts if host.swap_used_bytes is not None]
    grew = max(swap) - swap[0] if swap else 0
    if used < MEMORY_FULL_PCT / 100 and grew < _SWAP_GREW_BYTES:
        return None
    return Finding(
        code="memory.host",
        title=f"the host runs out of memory: {used:.0%} used, swap grew by {grew / 2**20:.0f} MiB",
        share=0.0,
        derived=_FROM_MACHINE,
        confidence=0.8,
        evidence={"memory_share": rounded(used), "swap_grew_bytes": grew},
        change="num_workers",
        value=max(1, (metrics.workers or 2) // 2),
        advice="fewer workers, a smaller prefetch_factor, or a dataset that shares its memory",
    )


def gpu_memory(metrics: RankMetrics) -> Finding | None:
    """The GPU's memory is full: each retry of the allocator empties its cache and waits for the GPU."""
    steps, retries, batch = metrics.breakdown.steps, metrics.facts.memory_retries or 0, metrics.loader.batch_size
    if retries < max(2, 0.01 * steps):
        return None
    mean_ms = metrics.breakdown.step_ms.mean or metrics.step_ms or 1.0
    lost = max(0.0, 1 - metrics.step_ms / mean_ms)
    return Finding(
        code="memory.pressure",
        title=f"the GPU's memory is full: {retries} times in {steps} steps its cache was emptied to make room",
        share=lost,
        **gain_if_removed(lost),
        confidence=0.8,
        evidence={
            "retries": retries,
            "memory_share": rounded(_memory_used(metrics)),
            "slow_steps_share": rounded(lost),
        },
        change="batch_size" if batch else None,
        value=max(1, batch // 2) if batch else None,
        advice="half the batch with two accumulation steps, activation checkpointing, or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where shapes vary",
    )


def checkpointing(metrics: RankMetrics) -> Finding | None:
    """Activations are computed again in backward, while the memory has room for them."""
    part, used, share = metrics.passed("checkpoint"), _memory_used(metrics), metrics.share("forward")
    if metrics.xray is not None:
        share = metrics.xray.busy_by_phase_ms.get("forward", 0.0) / metrics.xray.wall_ms
    share *= part  # backward does again what forward did
    whose = "the GPU's" if metrics.on_gpu else "the machine's"
    if used is None or used > _ROOM_FOR_ACTIVATIONS or share < MIN_SHARE:
        return None
    return Finding(
        code="memory.checkpointing",
        title=f"activations are computed again in backward, and {whose} memory is {used:.0%} used",
        share=share,
        **gain_if_gpu_spared(metrics, share * metrics.saved_at_most),
        confidence=0.6,
        evidence={"memory_share": rounded(used), "checkpointed_share_of_forward": rounded(part)},
        advice="checkpoint fewer layers, or none (gradient_checkpointing=False), as far as the memory allows",
    )


def _memory_used(metrics: RankMetrics) -> float | None:
    """The share of the GPU's memory that PyTorch has reserved; without one, of the machine's that is
    in use."""
    facts = metrics.facts
    if not metrics.on_gpu:
        return metrics.machine.memory_share
    if not facts.memory_reserved_bytes or not facts.memory_total_bytes:
        return None
    return facts.memory_reserved_bytes / facts.memory_total_bytes


def throttled(metrics: RankMetrics) -> Finding | None:
    """Heat or the power supply holds the clocks down."""
    samples = metrics.machine.gpu_samples
    faults = [gpu.throttle for gpu in samples if HARMFUL_THROTTLES.intersection(gpu.throttle or ())]
    if not samples or len(faults) / len(samples) < _MIN_THROTTLED:
        return None
    share = len(faults) / len(samples)
    clock, top_clock = metrics.machine.gpu("sm_clock_mhz").mean or 0.0, metrics.machine.gpu("sm_clock_max_mhz").high
    gain = 1.0
    if clock and math.isfinite(top_clock):
        gain = max(1.0, top_clock / clock)
    reasons = sorted({reason for reasons in faults for reason in reasons or ()})
    return Finding(
        code="hardware.throttled",
        title=f"the GPU lowers its clocks ({', '.join(faults[0] or ())}) {share:.0%} of the time",
        share=share,
        gain_high=gain,
        derived=_FROM_MACHINE,
        confidence=0.9,
        evidence={"reasons": reasons, "sm_clock_mhz": rounded(clock)},
        advice="look at cooling and power supply",
    )


def shared_cores(metrics: RankMetrics) -> Finding | None:
    """Other processes keep the cores busy that training, or its loader workers, wait for."""
    machine, delay = metrics.machine, metrics.machine.trainer_delay or 0.0
    others, cores = machine.cores_others, machine.cores_of_machine
    if others is None or not cores or others / cores < _MIN_OTHERS_CORES:
        return None
    share, who = delay, f"training waits for a core {delay:.0%} of the time"
    if metrics.workers_lack_cores:
        share = max(delay, metrics.share("data"))
        waits = f"training waits for data {metrics.share('data'):.0%} of the time"
        if delay < _MIN_DELAY:
            who = f"loader workers lack one, and {waits}"
        elif metrics.share("data") >= _MIN_DELAY:
            who += f" itself; loader workers lack one too, and {waits}"
    elif delay < _MIN_DELAY:
        return None
    return Finding(
        code="hardware.shared",
        title=f"others keep {others:.1f} of {cores} cores busy: {who}",
        share=share,
        **gain_if_removed(share),
        confidence=0.7,
        evidence={
            "cores_busy_with_others": rounded(others),
            "cores": cores,
            "without_a_core": rounded(delay),
            "workers_without_a_core": rounded(metrics.work.delay),
        },
        advice="give training cores of its own, or end what runs beside it",
    )


def shared_gpu(metrics: RankMetrics) -> Finding | None:
    """Another process computes on this GPU. One that only holds memory takes no time."""
    ours = {process.pid for sample in metrics.machine.samples for process in sample.processes}
    ours |= {rank.info.pid for rank in metrics.trace.ranks}
    seen: dict[int, list[GpuProcess]] = {}
    for gpu in metrics.machine.gpu_samples:
        for process in gpu.processes or ():
            if process.pid not in ours:
                seen.setdefault(process.pid, []).append(process)
    strangers = []
    for pid, samples in seen.items():
        used_bytes = max(process.used_bytes or 0 for process in samples)
        sm_pct = max((process.sm_pct for process in samples if process.sm_pct is not None), default=None)
        if used_bytes > _OTHERS_MEMORY_BYTES and (sm_pct is None or sm_pct >= 1):
            last = samples[-1]
            strangers.append({"pid": pid, "name": last.name, "bytes": last.used_bytes, "sm_pct": sm_pct})
    if not strangers:
        return None
    who = "1 other process uses" if len(strangers) == 1 else f"{len(strangers)} other processes use"
    return Finding(
        code="hardware.shared",
        title=f"{who} this GPU",
        share=0.0,
        derived=_FROM_MACHINE,
        confidence=0.8,
        evidence={"processes": strangers},
        advice="give training a GPU of its own",
    )


def idle_gpus(metrics: RankMetrics) -> Finding | None:
    """Several GPUs are visible, and one is used."""
    visible, parallel = metrics.facts.gpus_visible or 0, metrics.facts.parallel
    if parallel is not None and parallel.data_parallel:
        return None
    if visible <= 1 or metrics.rank.info.world_size > 1 or len(metrics.facts.devices) > 1:
        return None
    return Finding(
        code="hardware.idle-gpus",
        title=f"{count_of(visible, 'GPU')} are visible and one is used",
        share=1 - 1 / visible,
        gain_high=float(visible),
        derived=_FROM_MACHINE,
        confidence=0.6,
        evidence={"gpus_visible": visible},
        change="ranks",
        value=visible,
        advice=f"torchrun --nproc-per-node {visible} with DistributedDataParallel",
    )


# Several ranks


def straggler(ranks: Sequence[RankMetrics]) -> Finding | None:
    """The rank that waits least where ranks exchange something, and is slow somewhere else.

    They exchange gradients in backward; a model with buffers (batch norms) makes them exchange before
    forward too.
    """
    if len(ranks) < 2:
        return None
    found = _slowest(ranks, ("backward",), ("data", "copy", "forward", "rest"))
    found = found or _slowest(ranks, ("forward", "backward"), ("data", "copy", "rest"))
    if found is None:
        return None
    slow, lost, phase = found
    rank = slow.rank.info.rank
    return Finding(
        code="dist.straggler",
        title=f"the other ranks wait for rank {rank}, which spends more time on {phase}",
        share=lost,
        **gain_if_removed(lost),
        confidence=0.7,
        evidence={"rank": rank, "backward_share": [rounded(m.share("backward")) for m in ranks], "phase": phase},
        advice=f"look at rank {rank} on {slow.rank.info.host}",
    )


def _slowest(
    ranks: Sequence[RankMetrics], waiting: Sequence[str], working: Sequence[str]
) -> tuple[RankMetrics, float, str] | None:
    """The rank that waits least and works longest, the share of the time the others wait for it, and
    its phase."""
    by_wait = sorted(ranks, key=lambda metrics: metrics.share(*waiting))
    slow, median = by_wait[0], by_wait[len(by_wait) // 2]
    lost = median.share(*waiting) - slow.share(*waiting)
    if lost < _MIN_STRAGGLING or slow.share(*working) < max(other.share(*working) for other in by_wait[1:]):
        return None
    return slow, lost, max(working, key=lambda phase: slow.share(phase) - median.share(phase))


def exchange(ranks: Sequence[RankMetrics]) -> Finding | None:
    """What all ranks wait for each other's gradients, as far as no slow rank explains it.

    The rank that waits least waits for no other rank, so for the network. Beyond that, they wait in turn.
    """
    if len(ranks) < 2:
        return None
    xray, waits = ranks[0].xray, []
    for metrics in ranks:
        seen = metrics.facts.gradient_exchange
        if seen is not None and metrics.mean_ms:
            waits.append(min(MAX_SAVED, seen.waited_ms / metrics.mean_ms))
    code, advice = "dist.comm", "accumulate gradients under no_sync, or a larger batch a rank"
    if len(waits) == len(ranks):
        share = min(waits)
        title = f"ranks wait for each other's gradients {share:.0%} of the step, after backward has computed its own"
    elif xray is not None:
        share = xray.collective_ms / xray.wall_ms
        title = f"collectives take {share:.0%} of the step"
    else:
        return None
    if share < _MIN_EXCHANGE:
        share = sum(waits) / len(waits) if waits else 0.0
        if share < _MIN_WAITING or straggler(ranks) is not None:
            return None
        code, advice = "dist.scaling", f"batches that take equally long on all ranks; {advice}"
        title = f"{len(ranks)} ranks do the work of {len(ranks) * (1 - share):.1f}: they wait {share:.0%} of the step "
        title += "for each other's gradients"
    return Finding(
        code=code,
        title=title,
        share=share,
        **gain_if_removed(share),
        confidence=0.6,
        evidence={"ranks": len(ranks), "waiting_ms": rounded(share * ranks[0].mean_ms)},
        advice=advice,
    )


def data_parallel(metrics: RankMetrics) -> Finding | None:
    """nn.DataParallel: one process drives several GPUs, and copies the model to each of them in every
    step."""
    parallel = metrics.facts.parallel
    if parallel is None or not parallel.data_parallel:
        return None
    gpus = parallel.data_parallel
    # Its replicas share one interpreter: of what forward passes take, all but one replica's part may go.
    share = metrics.passed("data parallel") * metrics.share("forward") * (1 - 1 / gpus)
    return Finding(
        code="dist.data-parallel",
        title=f"nn.DataParallel drives {gpus} GPUs from one process",
        share=share,
        **gain_if_removed(share),
        confidence=0.8,
        evidence={"gpus": gpus},
        advice=f"DistributedDataParallel, started by torchrun --nproc-per-node {gpus}",
    )


def unused_parameters(metrics: RankMetrics) -> Finding | None:
    """DistributedDataParallel looks for unused parameters in every step, and there are none."""
    parallel = metrics.facts.parallel
    if parallel is None or not parallel.find_unused_parameters or parallel.unused_parameters is not False:
        return None
    return Finding(
        code="dist.unused-parameters",
        title="DistributedDataParallel looks for unused parameters in every step, and found none",
        share=0.0,
        derived="setting",
        confidence=0.6,
        evidence={"find_unused_parameters": True},
        advice="leave find_unused_parameters out; where some steps do leave parameters out, keep it",
    )
