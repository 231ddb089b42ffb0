"""A seed for a script that sets none, so that two trials of it are two runs of the same training."""

from __future__ import annotations

import functools
import random
from itertools import count
from typing import Any

import numpy as np
import torch


def impose_seed(imposed: int) -> None:
    """Seed torch, numpy and `random` before the script's first line; one that seeds later has the last word."""
    torch.manual_seed(imposed)
    random.seed(imposed)
    np.random.seed(imposed % (1 << 32))
    numpy_random: Any = np.random
    new_generator, made = numpy_random.default_rng, count()

    @functools.wraps(new_generator)
    def default_rng(seed: Any = None) -> Any:
        return new_generator(seed if seed is not None else [imposed, next(made)])

    numpy_random.default_rng = default_rng
