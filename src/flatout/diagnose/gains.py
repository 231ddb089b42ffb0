"""What mending one cause, and nothing else, would give: a range of factors of speed.

Its upper end is what the evidence leaves room for, its lower end what the evidence makes sure of; 1.0 where that is
nothing.

    fed        batches come sooner   what replaying a step without its waits saves is sure, as far as the loader can
                                     then deliver; the measured ceiling is the most
    spared     the host does less    what replaying a step without it saves, up to the same ceiling
    computed   the card does less    its kernels shrink; no further than the loader delivers as it is
    removed    a pause, or a wait    that share of the time, in part or in whole
"""

from __future__ import annotations

import math
from typing import Any

from flatout.diagnose.rank_metrics import RankMetrics

WORTH = 0.03  # a cause below this share of the step is not worth a word
KERNELS = "model of the kernels"
HELD_BACK = ", as far as the loader can follow"
_KNOWN_TO = 1.05  # how fast workers can deliver, as seen while they share the cores
BOUNDED = ("measured ceiling", "model of the step")  # gains that share what the ceiling leaves


def fed(case: RankMetrics, saved: float, least: float = 1.0, most: float = math.inf) -> dict[str, Any]:
    """Waiting for batches takes a share `saved` less; the loader delivers `least` to `most` times what is eaten now."""
    replayed = _factor(saved)
    if not case.on_gpu:  # who trains needs the cores that load: nothing is sure, and more than all of them nobody has
        least, most = 1.0, min(most, 1 / max(0.01, case.own_cpu_share or 0.0))
    ceiling = case.headroom if case.has_ceiling else min(replayed, case.headroom)
    return _range(min(replayed, least), most, ceiling, _by(case))


def spared(case: RankMetrics, low: float, high: float) -> dict[str, Any]:
    """The host needs these shares of the step less."""
    return _range(_factor(low), _factor(high), case.headroom, _by(case))


def computed(case: RankMetrics, low: float, high: float) -> dict[str, Any]:
    """The card needs these shares of the time less."""
    sure, most, derived = min(_factor(low), case.supply), _factor(high), KERNELS
    if most > case.supply:
        derived += HELD_BACK
    return _range(sure, most, _KNOWN_TO * case.supply, derived)


def removed(low: float, high: float) -> dict[str, Any]:
    """These shares of the time are no longer spent."""
    return _range(_factor(low), _factor(high), math.inf, "share of the time")


def _range(low: float, high: float, cap: float, derived: str) -> dict[str, Any]:
    high = max(1.0, min(high, cap))
    return {"gain_low": max(1.0, min(low, high)), "gain_high": high, "derived": derived}


def _factor(saved: float) -> float:
    return 1 / (1 - min(0.99, max(0.0, saved)))


def _by(case: RankMetrics) -> str:
    return BOUNDED[0] if case.has_ceiling else BOUNDED[1]


def data_saved(case: RankMetrics) -> float:
    """The share of a step that would be saved if batches were there when asked for."""
    saved = case.saved_without("data")
    return saved if saved is not None else 0.0


def spare_cores(case: RankMetrics) -> int:
    """Cores left for loading beside training itself and the system."""
    cores = case.cores or 1.0
    return max(1, int(cores - 1 - cores / 16))


def rounded(value: float | None) -> float | None:
    """As many digits as evidence needs."""
    return round(value, 4) if value is not None else None
