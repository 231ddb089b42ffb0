"""What fixing one cause alone would give: a range of factors of speed, as keyword arguments of a Finding.

Its upper end is what the evidence leaves room for, its lower end what the evidence makes sure of, 1.0 for
nothing.

    gain_if_fed         batches come sooner: sure is what replaying a step without its waits saves, as far as the
                        loader can then deliver; the measured ceiling is the most
    gain_if_host_spared the host does less: what replaying a step without it saves, up to the same ceiling
    gain_if_gpu_spared  the GPU does less: its kernels shrink, no further than the loader delivers as it is
    gain_if_removed     a pause or a wait: that share of the time, in part or in whole
"""

from __future__ import annotations

import math
from typing import Any

from flatout.diagnose.rank_metrics import MAX_SAVED, RankMetrics

MIN_SHARE = 0.03  # of the time: a cause that takes less is not reported
FROM_KERNELS = "model of the kernels"
LOADER_LIMITS = ", as far as the loader can follow"
FROM_CEILING, FROM_STEP = "measured ceiling", "model of the step"
BOUNDED = (FROM_CEILING, FROM_STEP)  # such gains share what the ceiling leaves
_SUPPLY_ERROR = 1.05  # workers were timed while they shared the cores


def gain_if_fed(metrics: RankMetrics, saved: float, least: float = 1.0, most: float = math.inf) -> dict[str, Any]:
    """Waiting for batches takes a share `saved` less; the loader delivers `least` to `most` times what is used now."""
    replayed = factor(saved)
    if not metrics.on_gpu:  # training needs the cores that load, so nothing is sure
        least, most = 1.0, min(most, 1 / max(0.01, metrics.own_cpu_share or 0.0))
    ceiling = metrics.headroom
    if not metrics.has_ceiling:
        ceiling = min(replayed, ceiling)
    return _range(min(replayed, least), most, ceiling, _source(metrics))


def gain_if_host_spared(metrics: RankMetrics, low: float, high: float) -> dict[str, Any]:
    """The host needs these shares of the step less."""
    return _range(factor(low), factor(high), metrics.headroom, _source(metrics))


def gain_if_gpu_spared(metrics: RankMetrics, low: float, high: float) -> dict[str, Any]:
    """The GPU needs these shares of the time less."""
    most, derived = factor(high), FROM_KERNELS
    if most > metrics.supply:
        derived += LOADER_LIMITS
    return _range(min(factor(low), metrics.supply), most, _SUPPLY_ERROR * metrics.supply, derived)


def gain_if_removed(low: float, high: float) -> dict[str, Any]:
    """These shares of the time are no longer spent."""
    return _range(factor(low), factor(high), math.inf, "share of the time")


def factor(saved: float) -> float:
    """How many times as fast training is when a share of its time is saved."""
    return 1 / (1 - min(MAX_SAVED, max(0.0, saved)))


def data_saved(metrics: RankMetrics) -> float:
    """The share of a step that would be saved if batches were there when asked for."""
    return metrics.saved_without("data") or 0.0


def spare_cores(metrics: RankMetrics) -> int:
    """Cores left for loading beside training itself and the system."""
    cores = metrics.cores or 1.0
    return max(1, int(cores - 1 - cores / 16))


def rounded(value: float | None) -> float | None:
    """As many digits as evidence needs."""
    return round(value, 4) if value is not None else None


def _range(low: float, high: float, most: float, derived: str) -> dict[str, Any]:
    high = max(1.0, min(high, most))
    return {"gain_low": max(1.0, min(low, high)), "gain_high": high, "derived": derived}


def _source(metrics: RankMetrics) -> str:
    return FROM_CEILING if metrics.has_ceiling else FROM_STEP
