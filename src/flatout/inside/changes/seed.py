"""A seed for a script that sets none, so that two trials of it are two runs of the same training."""

from __future__ import annotations

import functools
import random
from itertools import count
from typing import Any

import torch

from flatout.inside.imports import when_imported


def impose_seed(imposed: int) -> None:
    """Seed torch, numpy and `random` before the script's first line; one that seeds later has the last word."""
    torch.manual_seed(imposed)
    random.seed(imposed)
    when_imported("numpy", functools.partial(_seed_numpy, imposed))


def _seed_numpy(imposed: int, numpy: Any) -> None:
    numpy.random.seed(imposed % (1 << 32))
    new_generator, number = numpy.random.default_rng, count()

    @functools.wraps(new_generator)
    def default_rng(seed: Any = None) -> Any:
        if seed is None:
            seed = [imposed, next(number)]
        return new_generator(seed)

    numpy.random.default_rng = default_rng
