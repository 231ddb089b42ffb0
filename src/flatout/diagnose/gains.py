"""What fixing one cause alone would give: `gain_low`, `gain_high` and `derived` of a Finding.

Gains are factors of speed. The upper end is what the evidence leaves room for, the lower end what it
makes sure of, 1.0 for nothing. `derived` says in words where they come from.
"""

from __future__ import annotations

import math
from typing import Any

from flatout.diagnose.rank_metrics import MAX_SAVED, RankMetrics

_FROM_TIME = "share of the time"
LOADER_LIMITS = ", as far as the loader can follow"
_SUPPLY_ERROR = 1.05  # workers were timed while they shared the cores


def factor(saved: float) -> float:
    """How many times as fast training is when a share of its time is saved."""
    return 1 / (1 - min(MAX_SAVED, max(0.0, saved)))


def gain_if_removed(saved: float, sure: float = 0.0) -> dict[str, Any]:
    """A share of the time is no longer spent, surely so much of it."""
    return _gain(factor(sure), factor(saved), _FROM_TIME)


def gain_if_fed(metrics: RankMetrics, saved: float, least: float = 1.0, most: float = math.inf) -> dict[str, Any]:
    """Waiting for data takes a share `saved` less; the loader delivers `least` to `most` times what
    it does now."""
    if not metrics.on_gpu:  # training needs the cores that load, so nothing is sure
        least, most = 1.0, min(most, 1 / max(0.01, metrics.machine.own_cpu_share or 0.0))
    ceiling = metrics.headroom
    if metrics.ceiling is None:
        ceiling = min(factor(saved), ceiling)
    return _gain(min(factor(saved), least), min(most, ceiling), metrics.headroom_source)


def gain_if_samples_spared(metrics: RankMetrics, saved: float, least: float = 1.0) -> dict[str, Any]:
    """The same where samples cost less: their cores are then free for training."""
    if metrics.on_gpu:
        return gain_if_fed(metrics, saved, least)
    freed, derived = metrics.machine.held_up_by_workers, _FROM_TIME
    if freed:
        derived += ", with the cores that loading takes from training"
    return _gain(1.0, factor(saved + freed), derived)


def gain_if_host_spared(metrics: RankMetrics, saved: float, sure: float = 0.0) -> dict[str, Any]:
    """The host needs a share of the step less: no further than the measured ceiling."""
    return _gain(factor(sure), min(factor(saved), metrics.headroom), metrics.headroom_source)


def gain_if_gpu_spared(metrics: RankMetrics, saved: float, sure: float = 0.0) -> dict[str, Any]:
    """The GPU needs a share of the time less: no further than the loader delivers as it is."""
    most, derived = factor(saved), "model of the kernels"
    if most > metrics.supply:
        derived += LOADER_LIMITS
    return _gain(min(factor(sure), metrics.supply), min(most, _SUPPLY_ERROR * metrics.supply), derived)


def _gain(low: float, high: float, derived: str) -> dict[str, Any]:
    high = max(1.0, high)
    return {"gain_low": max(1.0, min(low, high)), "gain_high": high, "derived": derived}
