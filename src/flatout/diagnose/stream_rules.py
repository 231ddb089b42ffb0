"""A rule about streams: workers that have no shard of their own to read give nothing."""

from __future__ import annotations

from flatout.diagnose.gains import MIN_SHARE, data_saved, gain_if_fed, rounded
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.finding import Finding


def few_shards(metrics: RankMetrics) -> Finding | None:
    """A stream has fewer shards than the loader has workers."""
    loader, saved = metrics.loader, data_saved(metrics)
    name = loader.dataset.rpartition(".")[2]
    gave = {r.worker: r.samples for r in metrics.rank.workers if r.dataset == name and r.worker is not None}
    working = [worker for worker, samples in gave.items() if samples]
    if not loader.iterable or saved < MIN_SHARE or not working or len(working) >= len(gave):
        return None
    return Finding(
        code="data.few-shards",
        title=f"{len(gave) - len(working)} of {len(gave)} workers have nothing to read: the stream has shards for "
        f"{len(working)}",
        share=metrics.share("data"),
        **gain_if_fed(metrics, saved, most=len(gave) / len(working)),
        confidence=0.9,
        evidence={
            "data_share": rounded(metrics.share("data")),
            "samples_by_worker": gave,
            "workers_without_samples": len(gave) - len(working),
        },
        advice="write the data in at least as many files or shards as there are workers (times ranks)",
    )
