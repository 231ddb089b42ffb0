"""`batch_size: auto`: the fastest batch within a share of the card's memory, not the largest that fits.

Real steps at 32, 64, 128 … samples, until more of them no longer learn faster or no longer fit. Of those about as
fast as the fastest the smallest is taken. Model, optimizer and random streams are put back; every rank takes the same
steps, and what is true of the slowest and the fullest one counts.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from flatout.engine.checkpoint import random_state, set_random_state
from flatout.engine.ranks import Ranks
from flatout.engine.step import Step, TrainConfig, batch_rows, out_of_memory, taken
from flatout.model.errors import UsageError
from flatout.model.formatting import in_full

FIRST = 32
_ABOUT_AS_FAST = 0.97
_WARM_UP, _TIMED = 3, 5


def fastest_batch(step: Step, first: Any, most: int, share: float, ranks: Ranks) -> tuple[int, str]:
    """The batch size to take, and why; `first` is a batch as the step wants it, of any size."""
    device = step.precision.device
    kept = copy.deepcopy(step.model.state_dict()), copy.deepcopy(step.optimizer.state_dict()), random_state(device)
    scale = copy.deepcopy(step.scaler.state_dict())
    speeds: dict[int, float] = {}
    size = min(FIRST, most)
    while True:
        seconds, used = _tried(step, _grown(first, size), device)
        seconds, used = ranks.highest([seconds, used])
        if used > share:
            break
        speeds[size] = size / seconds
        if size == most or (len(speeds) > 2 and speeds[size] < 1.02 * max(list(speeds.values())[:-1])):
            break
        size = min(2 * size, most)
    step.model.load_state_dict(kept[0])
    step.optimizer.load_state_dict(kept[1])
    step.scaler.load_state_dict(scale)
    step.optimizer.zero_grad(set_to_none=True)
    set_random_state(kept[2], device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not speeds:
        raise UsageError(f"train.batch_size: even {min(FIRST, most)} samples take more than {share:.0%} of the memory")
    best = next(size for size in speeds if speeds[size] >= _ABOUT_AS_FAST * max(speeds.values()))
    tried = ", ".join(f"{in_full(speed)} at {size}" for size, speed in speeds.items())
    return best, f"the fastest; samples/s of the step alone, uncompiled: {tried}"


def _tried(step: Step, batch: Any, device: torch.device) -> tuple[float, float]:
    """Seconds a step takes, and the share of the card's memory that it needs (2 where it does not fit)."""
    cuda = device.type == "cuda"
    pieces_before = step.accumulate
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        for number in range(_WARM_UP + _TIMED):
            if number == _WARM_UP:
                if cuda:
                    torch.cuda.synchronize(device)
                started = time.perf_counter()
            step(batch)
            if step.accumulate != pieces_before:  # it ran out of memory, and went on in smaller pieces
                return 1.0, 2.0
        if cuda:
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - started) / _TIMED
    except Exception as problem:
        if not out_of_memory(problem):
            raise
        return 1.0, 2.0
    finally:
        step.accumulate = pieces_before
    if not cuda:
        return seconds, 0.0
    _, total = torch.cuda.mem_get_info(device)
    return seconds, torch.cuda.max_memory_reserved(device) / total


def _grown(batch: Any, size: int) -> Any:
    """A batch of `size` samples, made of those of `batch` over and over: how fast a step is does not depend on them."""
    rows = batch_rows(batch)

    def grown(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return thing[torch.arange(size, device=thing.device) % rows]
        return [thing[place % rows] for place in range(size)]

    return taken(batch, grown)


def scale_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, effective: int) -> str:
    """Bring the learning rate to the batch that is in force; what was done, in words."""
    if config.lr_rule == "none" or config.lr_batch is None:
        return f"the learning rate stays as it is at a batch of {effective} (train.lr_rule: none)"
    factor = effective / config.lr_batch
    factor = factor if config.lr_rule == "linear" else factor**0.5
    for group in optimizer.param_groups:
        group["lr"] *= factor
    rates = ", ".join(f"{group['lr']:.4g}" for group in optimizer.param_groups)
    return (
        f"learning rate times {factor:.4g} = {rates}: {config.lr_rule} from a batch of {config.lr_batch} to {effective}"
    )
