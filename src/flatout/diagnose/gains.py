"""What mending a cause would give: factors of speed from shares of the step, and the few figures behind them."""

from __future__ import annotations

from typing import Any

from flatout.diagnose.case import Case

WORTH = 0.03  # a cause below this share of the step is not worth a word


def step_gain(case: Case, low: float, high: float) -> dict[str, Any]:
    """The keyword arguments of a gain, from shares of the step saved; capped by the headroom."""
    cap = max(1.0, case.headroom)
    factors = sorted(min(cap, 1 / (1 - min(0.99, max(0.0, saved)))) for saved in (low, high))
    return {
        "gain_low": factors[0],
        "gain_high": factors[1],
        "derived": "measured ceiling" if case.has_ceiling else "model of the step",
    }


def data_saved(case: Case) -> float:
    """The share of a step that would be saved if batches were there when asked for."""
    saved = case.saved_without("data")
    return saved if saved is not None else 0.0


def fed_by(case: Case, workers: float) -> float:
    """The share saved when `workers` load, each as fast as one does now."""
    rate, now = case.samples_a_worker_s, case.breakdown.samples_per_s
    if not rate or not now:
        return 0.0
    return max(0.0, 1 - now / (rate * workers))


def spare_cores(case: Case) -> int:
    """Cores left for loading beside training itself and the system."""
    cores = case.cores or 1.0
    return max(1, int(cores - 1 - cores / 16))


def compute_gain(low: float, high: float) -> dict[str, Any]:
    """Gains that make the step itself shorter are not bounded by the ceiling of the step as it is."""
    factors = sorted(1 / (1 - min(0.95, max(0.0, saved))) for saved in (low, high))
    return {"gain_low": factors[0], "gain_high": factors[1], "derived": "model of the kernels"}


def rounded(value: float | None) -> float | None:
    """As many digits as evidence needs."""
    return round(value, 4) if value is not None else None
