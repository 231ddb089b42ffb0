"""Rules about the machine: its memory, its GPUs, and who else uses them."""

from __future__ import annotations

import dataclasses
import math

from flatout.diagnose.gains import MIN_SHARE, gain_if_gpu_spared, gain_if_removed, rounded
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.finding import Finding
from flatout.model.formatting import count_of
from flatout.model.readings import HARMFUL_THROTTLES, MEMORY_FULL_PCT
from flatout.trace import GpuProcess

_FROM_MACHINE = "model of the machine"
_SWAP_GREW_BYTES = 2**28
_ROOM_FOR_ACTIVATIONS = 0.5  # of the GPU's memory in use, at the most
_MIN_THROTTLED = 0.1  # of the samples
_OTHERS_MEMORY_BYTES = 2**28  # a process that holds less of a GPU's memory does not count
_MIN_OTHERS_CORES = 0.2  # of all cores
_MIN_DELAY = 0.05  # of the time that training waits for a core


def host_memory(metrics: RankMetrics) -> Finding | None:
    """The host's memory is full, or it swaps."""
    hosts = [sample.host for sample in metrics.samples]
    used = 0.0
    for host in hosts:
        if host.memory_used_bytes and host.memory_total_bytes:
            used = max(used, host.memory_used_bytes / host.memory_total_bytes)
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
    facts, steps = metrics.facts, metrics.breakdown.steps
    retries = facts.memory_retries or 0
    if retries < max(2, 0.01 * steps):
        return None
    used = None
    if facts.memory_reserved_bytes and facts.memory_total_bytes:
        used = facts.memory_reserved_bytes / facts.memory_total_bytes
    mean_ms = metrics.breakdown.step_ms.mean or metrics.step_ms or 1.0
    lost = max(0.0, 1 - metrics.step_ms / mean_ms)
    batch = metrics.loader.batch_size
    return Finding(
        code="memory.pressure",
        title=f"the GPU's memory is full: {retries} times in {steps} steps its cache was emptied to make room",
        share=lost,
        **gain_if_removed(0.0, lost),
        confidence=0.8,
        evidence={"retries": retries, "memory_share": rounded(used), "slow_steps_share": rounded(lost)},
        change="batch_size" if batch else None,
        value=max(1, batch // 2) if batch else None,
        advice="half the batch with two accumulation steps, activation checkpointing, or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where shapes vary",
    )


def checkpointing(metrics: RankMetrics) -> Finding | None:
    """Activations are computed again in backward, while the GPU's memory has room for them."""
    facts, part = metrics.facts, metrics.passed("checkpoint")
    if not part or not facts.memory_reserved_bytes or not facts.memory_total_bytes:
        return None
    used, share = facts.memory_reserved_bytes / facts.memory_total_bytes, metrics.share("forward")
    if metrics.xray is not None and metrics.xray.wall_ms:
        share = metrics.xray.busy_by_phase_ms.get("forward", 0.0) / metrics.xray.wall_ms
    share *= part  # backward does again what forward did
    if used > _ROOM_FOR_ACTIVATIONS or share < MIN_SHARE:
        return None
    return Finding(
        code="memory.checkpointing",
        title=f"activations are computed again in backward, and the GPU's memory is {used:.0%} used",
        share=share,
        **gain_if_gpu_spared(metrics, 0.0, share * metrics.saved_at_most),
        confidence=0.6,
        evidence={"memory_share": rounded(used), "checkpointed_share_of_forward": rounded(part)},
        advice="checkpoint fewer layers, or none (gradient_checkpointing=False), as far as the memory allows",
    )


def throttled(metrics: RankMetrics) -> Finding | None:
    """Heat or the power supply holds the clocks down."""
    samples = metrics.gpu_samples
    faults = [gpu.throttle for gpu in samples if HARMFUL_THROTTLES.intersection(gpu.throttle or ())]
    if not samples or len(faults) / len(samples) < _MIN_THROTTLED:
        return None
    share = len(faults) / len(samples)
    clock, top_clock = metrics.gpu("sm_clock_mhz").mean or 0.0, metrics.gpu("sm_clock_max_mhz").high
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
    """Other processes keep the cores busy that training waits for."""
    others, cores, delay = metrics.cores_others, metrics.cores_of_machine, metrics.trainer_delay
    if others is None or not cores or delay is None:
        return None
    if others / cores < _MIN_OTHERS_CORES or delay < _MIN_DELAY:
        return None
    return Finding(
        code="hardware.shared",
        title=f"others keep {others:.1f} of {cores} cores busy: training waits for a core {delay:.0%} of the time",
        share=delay,
        **gain_if_removed(0.0, delay),
        confidence=0.7,
        evidence={"cores_busy_with_others": rounded(others), "cores": cores, "without_a_core": rounded(delay)},
        advice="give training cores of its own, or end what runs beside it",
    )


def shared_gpu(metrics: RankMetrics) -> Finding | None:
    """Another process computes on this GPU. One that only holds memory takes no time."""
    ours = {process.pid for sample in metrics.samples for process in sample.processes}
    ours |= {rank.info.pid for rank in metrics.trace.ranks}
    seen: dict[int, list[GpuProcess]] = {}
    for gpu in metrics.gpu_samples:
        for process in gpu.processes or ():
            if process.pid not in ours:
                seen.setdefault(process.pid, []).append(process)
    strangers = []
    for samples in seen.values():
        used_bytes = max(process.used_bytes or 0 for process in samples)
        sm_pct = max((process.sm_pct for process in samples if process.sm_pct is not None), default=None)
        if used_bytes > _OTHERS_MEMORY_BYTES and (sm_pct is None or sm_pct >= 1):
            strangers.append(dataclasses.replace(samples[-1], sm_pct=sm_pct))
    if not strangers or not ours:
        return None
    listed = [{"pid": p.pid, "name": p.name, "bytes": p.used_bytes, "sm_pct": p.sm_pct} for p in strangers]
    verb = "uses" if len(strangers) == 1 else "use"
    return Finding(
        code="hardware.shared",
        title=f"{len(strangers)} other {'process' if len(strangers) == 1 else 'processes'} {verb} this GPU",
        share=0.0,
        derived=_FROM_MACHINE,
        confidence=0.8,
        evidence={"processes": listed},
        advice="give training a GPU of its own",
    )


def idle_gpus(metrics: RankMetrics) -> Finding | None:
    """Several GPUs are visible, and one is used."""
    visible = metrics.facts.gpus_visible or 0
    parallel = metrics.facts.parallel
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
