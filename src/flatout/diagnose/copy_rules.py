"""Rules about what goes between host and GPU: copies of batches, and waits for the GPU in the middle of a step."""

from __future__ import annotations

from flatout.diagnose.gains import MIN_SHARE, gain_if_gpu_spared, gain_if_host_spared, gain_if_removed, rounded
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.finding import Finding

_MIN_COPY_SHARE = 0.01  # page-locking costs nothing, so less of it is worth a word
_MIN_WAIT_SHARE = 0.01
_MANY_COPIES = 16  # in a step


def slow_copies(metrics: RankMetrics) -> Finding | None:
    """Copies from memory that is not page-locked, in many pieces, or while the GPU computes nothing."""
    xray = metrics.xray
    if xray is None or not metrics.step_ms:
        return None
    xrayed_ms = xray.steps * metrics.step_ms
    host = metrics.share("copy")
    pageable_ms = xray.copies_ms.get("HtoD Pageable", 0.0)
    pageable = max(pageable_ms / xrayed_ms, host)
    copies = _copies_a_step(metrics)
    evidence = {"copies_a_step": copies, "copy_share_of_host": rounded(host), "copies_ms": dict(xray.copies_ms)}
    if pageable_ms and pageable >= _MIN_COPY_SHARE:
        return Finding(
            code="copy.pageable",
            title=f"batches are copied from memory that is not page-locked: {pageable:.0%} of the step",
            share=pageable,
            **gain_if_host_spared(metrics, 0.0, pageable),
            confidence=0.9,
            evidence=evidence,
            change="pin_memory",
            value=True,
            advice="DataLoader(pin_memory=True) and .to(device, non_blocking=True)",
        )
    if copies > _MANY_COPIES and host >= MIN_SHARE:
        return Finding(
            code="copy.fragmented",
            title=f"{copies} copies to the GPU in a step",
            share=host,
            **gain_if_host_spared(metrics, 0.0, host * (1 - 1 / copies)),
            confidence=0.6,
            evidence=evidence,
            advice="join the tensors of a batch before copying them",
        )
    at_the_same_time_ms = max(0.0, sum(xray.busy_by_phase_ms.values()) - xray.busy_ms)
    alone = (xray.copies_ms.get("HtoD Pinned", 0.0) - at_the_same_time_ms) / xrayed_ms
    if alone >= MIN_SHARE and (metrics.busy_share or 0.0) >= 0.5:
        return Finding(
            code="copy.blocking",
            title=f"copies to the GPU take {alone:.0%} of the step, in which it computes nothing",
            share=alone,
            **gain_if_gpu_spared(metrics, 0.0, alone),
            confidence=0.6,
            evidence=evidence,
            change="device_prefetch",
            value=True,
            advice="copy the next batch on a side stream: flatout.feed.to_device",
        )
    return None


def waits_for_gpu(metrics: RankMetrics) -> Finding | None:
    """`.item()` and the like: the host waits for the GPU, and the GPU then for the host."""
    saved = metrics.saved_without("sync")
    if saved is None or not metrics.on_gpu:
        return None
    if metrics.busy_share is not None:
        saved = min(saved, 1 - metrics.busy_share)  # a wait for useful work costs nothing
    if saved < _MIN_WAIT_SHARE:
        return None
    waits = sorted((p for p in metrics.breakdown.training if p.name == "sync"), key=lambda part: -part.ms)
    # Replayed batches are waited for as well: a measured ceiling says nothing about these waits.
    gain = gain_if_removed(0.0, saved) if metrics.has_ceiling else gain_if_host_spared(metrics, 0.0, saved)
    lines = [{"where": p.where, "ms_a_step": rounded(p.ms / metrics.breakdown.steps)} for p in waits[:8]]
    return Finding(
        code="sync.item",
        title=f"the host waits for the GPU in mid-step, and the GPU then for the host: {saved:.1%} of the step",
        share=saved,
        **gain,
        confidence=0.7,
        evidence={"lines": lines},
        advice="keep the value on the GPU, and read it only when it is printed",
        where=waits[0].where if waits else None,
    )


def _copies_a_step(metrics: RankMetrics) -> int:
    """Only in steps with events are copies told apart."""
    counts = (sum(span.name == "copy" for span in step.spans) for step in metrics.steps_with_events)
    return max(counts, default=0)
