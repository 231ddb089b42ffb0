"""Rules about the machine and about several ranks."""

from __future__ import annotations

import dataclasses
import math

from flatout.diagnose.gains import removed, rounded
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.finding import Finding
from flatout.trace import GpuProcess


def host_memory(case: RankMetrics) -> Finding | None:
    hosts = [sample.host for sample in case.samples]
    shares = [h.memory_used_bytes / h.memory_total_bytes for h in hosts if h.memory_used_bytes and h.memory_total_bytes]
    used = max(shares, default=None)
    swap = [host.swap_used_bytes for host in hosts if host.swap_used_bytes is not None]
    grew = max(swap) - swap[0] if swap else 0
    if (used or 0.0) < 0.95 and grew < 2**28:
        return None
    return Finding(
        code="memory.host",
        title=f"the host runs out of memory: {used or 0:.0%} used, swap grew by {grew / 2**20:.0f} MiB",
        share=0.0,
        derived="model of the machine",
        confidence=0.8,
        evidence={"memory_share": rounded(used), "swap_grew_bytes": grew},
        change="num_workers",
        value=max(1, (case.workers or 2) // 2),
        advice="fewer workers, a smaller prefetch_factor, or a dataset that shares its memory",
    )


def pressure(case: RankMetrics) -> Finding | None:
    """Each retry of the allocator empties its cache and waits for the card."""
    retries, steps = case.facts.memory_retries or 0, case.breakdown.steps
    if retries < max(2, 0.01 * steps):
        return None
    reserved, total = case.facts.memory_reserved_bytes, case.facts.memory_total_bytes
    used = reserved / total if reserved and total else None
    lost = max(0.0, 1 - case.step_ms / (case.breakdown.step_ms.mean or case.step_ms or 1.0))
    batch = case.loader.batch_size
    return Finding(
        code="memory.pressure",
        title=f"the card's memory is full: {retries} times in {steps} steps its cache was emptied to make room",
        share=lost,
        **removed(0.0, lost),
        confidence=0.8,
        evidence={"retries": retries, "memory_share": rounded(used), "slow_steps_share": rounded(lost)},
        change="batch_size" if batch else None,
        value=max(1, batch // 2) if batch else None,
        advice="half the batch with two accumulation steps, activation checkpointing, or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where shapes vary",
    )


def throttled(case: RankMetrics) -> Finding | None:
    words = [gpu.throttle or () for gpu in case.card_samples]
    bad = [w for w in words if any(r.startswith(("heat", "hardware", "power brake")) for r in w)]
    if not words or len(bad) / len(words) < 0.1:
        return None
    clock, most = case.card("sm_clock_mhz").mean or 0.0, case.card("sm_clock_max_mhz").high
    return Finding(
        code="hardware.throttled",
        title=f"the card slows itself down ({', '.join(bad[0])}) {len(bad) / len(words):.0%} of the time",
        share=len(bad) / len(words),
        gain_high=max(1.0, most / clock) if clock and math.isfinite(most) else 1.0,
        derived="model of the machine",
        confidence=0.9,
        evidence={"reasons": sorted({r for w in bad for r in w}), "sm_clock_mhz": rounded(clock)},
        advice="look at cooling and power supply",
    )


def shared_cores(case: RankMetrics) -> Finding | None:
    others, cores, delay = case.cores_others, case.cores_of_machine, case.trainer_delay
    if others is None or not cores or delay is None or others / cores < 0.2 or delay < 0.05:
        return None
    return Finding(
        code="hardware.shared",
        title=f"others keep {others:.1f} of {cores} cores busy: training waits for a core {delay:.0%} of the time",
        share=delay,
        **removed(0.0, delay),
        confidence=0.7,
        evidence={"cores_busy_with_others": rounded(others), "cores": cores, "without_a_core": rounded(delay)},
        advice="give training cores of its own, or end what runs beside it",
    )


def shared_card(case: RankMetrics) -> Finding | None:
    ours = {p.pid for s in case.samples for p in s.processes} | {r.info.pid for r in case.trace.ranks}
    held: dict[int, list[GpuProcess]] = {}
    for process in [p for gpu in case.card_samples for p in gpu.processes or () if p.pid not in ours]:
        held.setdefault(process.pid, []).append(process)
    strangers = []
    for seen in held.values():
        most_pct = max((p.sm_pct for p in seen if p.sm_pct is not None), default=None)
        # A notebook that was left open holds memory; it takes no time from anybody.
        if max(p.used_bytes or 0 for p in seen) > 2**28 and (most_pct is None or most_pct >= 1):
            strangers.append(dataclasses.replace(seen[-1], sm_pct=most_pct))
    if not strangers or not ours:
        return None
    return Finding(
        code="hardware.shared",
        title=f"{len(strangers)} other process(es) use this card",
        share=0.0,
        derived="model of the machine",
        confidence=0.8,
        evidence={
            "processes": [{"pid": p.pid, "name": p.name, "bytes": p.used_bytes, "sm_pct": p.sm_pct} for p in strangers]
        },
        advice="give training a card of its own",
    )


def idle_gpus(case: RankMetrics) -> Finding | None:
    visible, world = case.facts.gpus_visible or 0, case.rank.info.world_size
    if visible <= 1 or world > 1 or len(case.facts.devices) > 1:
        return None
    return Finding(
        code="hardware.idle-gpus",
        title=f"{visible} GPUs are visible and one is used",
        share=1 - 1 / visible,
        gain_high=float(visible),
        derived="model of the machine",
        confidence=0.6,
        evidence={"gpus_visible": visible},
        change="ranks",
        value=visible,
        advice=f"torchrun --nproc-per-node {visible} with DistributedDataParallel",
    )


def straggler(every: tuple[RankMetrics, ...]) -> Finding | None:
    """The culprit waits least where the collectives are, and is slow somewhere else.

    They are in backward; in a model with buffers (batch norms) before forward too, where DDP hands those on.
    """
    if len(every) < 2:
        return None
    found = _slowest(every, ("backward",), ("data", "copy", "forward", "rest"))
    found = found or _slowest(every, ("forward", "backward"), ("data", "copy", "rest"))
    if found is None:
        return None
    slow, lost, cause = found
    rank = every[slow].rank.info.rank
    return Finding(
        code="dist.straggler",
        title=f"the other ranks wait for rank {rank}, which spends more time on {cause}",
        share=lost,
        **removed(0.0, lost),
        confidence=0.7,
        evidence={"rank": rank, "backward_share": [rounded(case.share("backward")) for case in every], "phase": cause},
        advice=f"look at rank {rank} on {every[slow].rank.info.host}",
    )


def _slowest(
    every: tuple[RankMetrics, ...], waiting: tuple[str, ...], working: tuple[str, ...]
) -> tuple[int, float, str] | None:
    """Which of them waits least and works longest, what share of the time others wait for it, and its phase."""
    waits, works = ([sum(map(case.share, phases)) for case in every] for phases in (waiting, working))
    slow = min(range(len(every)), key=lambda i: waits[i])
    lost = sorted(waits)[len(waits) // 2] - waits[slow]
    if lost < 0.05 or works[slow] < max(work for i, work in enumerate(works) if i != slow):
        return None
    return slow, lost, max(working, key=lambda phase: every[slow].share(phase) - every[slow - 1].share(phase))


def collectives(every: tuple[RankMetrics, ...]) -> Finding | None:
    """What the rank waits that waits least: it waits for no other, so for the network. Or else what the X-ray saw."""
    xray, exchanges = every[0].xray, [case.facts.gradient_exchange for case in every]
    if len(every) < 2:
        return None
    if all(exchanges) and every[0].mean_ms:
        spent = min(exchange.waited_ms for exchange in exchanges if exchange)
        share = min(0.99, spent / every[0].mean_ms)
        title = f"ranks wait for each other's gradients {share:.0%} of the step, after backward has computed its own"
    elif xray is not None and xray.wall_ms:
        spent, share = xray.collective_ms / xray.steps, xray.collective_ms / xray.wall_ms
        title = f"collectives take {share:.0%} of the step"
    else:
        return None
    if share < 0.15:
        return None
    return Finding(
        code="dist.comm",
        title=title,
        share=share,
        **removed(0.0, share),
        confidence=0.6,
        evidence={"collective_ms": rounded(spent)},
        advice="accumulate gradients under no_sync, or a larger batch a rank",
    )
