"""How sure a mean is, when neighbours are alike: a bootstrap over blocks of a series."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

RESAMPLES = 2_000
INTERVAL = (2.5, 97.5)
STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)  # half that interval, by degrees of freedom

Floats = npt.NDArray[np.float64]


def resampled_means(values: Floats, draw: np.random.Generator | None = None) -> Floats:
    """Means of resamples by blocks that wrap round the end."""
    draw = draw or np.random.default_rng(0)
    length = max(1, round(len(values) ** (1 / 3)))
    starts = draw.integers(len(values), size=(RESAMPLES, -(-len(values) // length), 1))
    places = (starts + np.arange(length)) % len(values)
    means: Floats = values[places.reshape(RESAMPLES, -1)].mean(axis=1)
    return means
