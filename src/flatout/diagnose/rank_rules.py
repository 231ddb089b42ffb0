"""Rules about several ranks: one that the others wait for, and what exchanging gradients takes."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.diagnose.gains import gain_if_removed, rounded
from flatout.diagnose.rank_metrics import MAX_SAVED, RankMetrics
from flatout.model.finding import Finding

_MIN_STRAGGLING = 0.05  # of the step that the others wait for one rank
_MIN_EXCHANGE = 0.15  # of the step
_MIN_WAITING = 0.10  # of the step, on the mean of all ranks


def straggler(ranks: Sequence[RankMetrics]) -> Finding | None:
    """The rank that waits least where ranks exchange something, and is slow somewhere else.

    They exchange gradients in backward; a model with buffers (batch norms) makes them exchange before forward
    too.
    """
    if len(ranks) < 2:
        return None
    found = _slowest(ranks, ("backward",), ("data", "copy", "forward", "rest"))
    found = found or _slowest(ranks, ("forward", "backward"), ("data", "copy", "rest"))
    if found is None:
        return None
    slow, lost, phase = found
    rank = ranks[slow].rank.info.rank
    waits = [rounded(metrics.share("backward")) for metrics in ranks]
    return Finding(
        code="dist.straggler",
        title=f"the other ranks wait for rank {rank}, which spends more time on {phase}",
        share=lost,
        **gain_if_removed(0.0, lost),
        confidence=0.7,
        evidence={"rank": rank, "backward_share": waits, "phase": phase},
        advice=f"look at rank {rank} on {ranks[slow].rank.info.host}",
    )


def _slowest(
    ranks: Sequence[RankMetrics], waiting: Sequence[str], working: Sequence[str]
) -> tuple[int, float, str] | None:
    """Which rank waits least and works longest, the share of the time the others wait for it, and its phase."""
    waits = [sum(map(metrics.share, waiting)) for metrics in ranks]
    works = [sum(map(metrics.share, working)) for metrics in ranks]
    slow = min(range(len(ranks)), key=lambda i: waits[i])
    lost = sorted(waits)[len(waits) // 2] - waits[slow]
    others_work = max(work for i, work in enumerate(works) if i != slow)
    if lost < _MIN_STRAGGLING or works[slow] < others_work:
        return None
    other = ranks[slow - 1]
    return slow, lost, max(working, key=lambda phase: ranks[slow].share(phase) - other.share(phase))


def gradient_exchange(ranks: Sequence[RankMetrics]) -> Finding | None:
    """What the rank waits that waits least: it waits for no other rank, so for the network."""
    if len(ranks) < 2:
        return None
    first, xray = ranks[0], ranks[0].xray
    waited_ms = [m.facts.gradient_exchange.waited_ms for m in ranks if m.facts.gradient_exchange is not None]
    if len(waited_ms) == len(ranks) and first.mean_ms:
        spent_ms = min(waited_ms)
        share = min(MAX_SAVED, spent_ms / first.mean_ms)
        title = f"ranks wait for each other's gradients {share:.0%} of the step, after backward has computed its own"
    elif xray is not None and xray.wall_ms:
        spent_ms = xray.collective_ms / xray.steps
        share = xray.collective_ms / xray.wall_ms
        title = f"collectives take {share:.0%} of the step"
    else:
        return None
    if share < _MIN_EXCHANGE:
        return None
    return Finding(
        code="dist.comm",
        title=title,
        share=share,
        **gain_if_removed(0.0, share),
        confidence=0.6,
        evidence={"collective_ms": rounded(spent_ms)},
        advice="accumulate gradients under no_sync, or a larger batch a rank",
    )


def scaling(ranks: Sequence[RankMetrics]) -> Finding | None:
    """Ranks wait, now one and now another, and neither one slow rank nor the network explains it."""
    waited_ms = [m.facts.gradient_exchange.waited_ms for m in ranks if m.facts.gradient_exchange is not None]
    if len(ranks) < 2 or len(waited_ms) < len(ranks) or straggler(ranks) or gradient_exchange(ranks):
        return None
    waits = [min(MAX_SAVED, ms / m.mean_ms) for ms, m in zip(waited_ms, ranks, strict=True) if m.mean_ms]
    if len(waits) < len(ranks):
        return None
    lost = sum(waits) / len(waits)
    if lost < _MIN_WAITING:
        return None
    return Finding(
        code="dist.scaling",
        title=f"{len(ranks)} ranks do the work of {len(ranks) * (1 - lost):.1f}: they wait {lost:.0%} of the step for "
        "each other's gradients",
        share=lost,
        **gain_if_removed(0.0, lost),
        confidence=0.5,
        evidence={"ranks": len(ranks), "waiting_share": [rounded(wait) for wait in waits]},
        advice="batches that take equally long on all ranks; accumulate gradients under no_sync; a larger batch a rank",
    )


def data_parallel(metrics: RankMetrics) -> Finding | None:
    """nn.DataParallel: one process drives several GPUs, and copies the model to each of them in every step."""
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
        **gain_if_removed(0.0, share),
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
