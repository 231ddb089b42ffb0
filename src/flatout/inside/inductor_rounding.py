"""Compiled kernels that round where the eager ones do, and in a proof draw what the eager ones draw.

Where operations in half precision are fused, torch's compiler leaves out the rounding between them. What the backward
pass makes anew from a value that was saved, rounded, then belongs to another forward pass: with torch 2.11 the
gradients of a compiled soft-argmax were twice as far off as those of eager bf16 (docs/BENCHMARKS.md, `captcha`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_VARIABLE = "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"


def round_as_eager() -> None:
    """From now on, in this process; unless the person has said otherwise, or this torch cannot."""
    import torch._inductor.config as config

    if _VARIABLE not in os.environ and hasattr(config, "emulate_precision_casts"):
        config.emulate_precision_casts = True


@contextmanager
def draw_as_this() -> Iterator[None]:
    """Around an eager call of a model: where it draws random numbers, compiled ones draw the same from then on. A
    compiler has a stream of its own, and two runs could not be compared step by step."""
    import torch
    import torch._inductor.config as config

    before = _streams()
    yield
    if not all(map(torch.equal, before, _streams())):
        config.fallback_random = True


def _streams() -> list[Any]:
    """Where the random streams of the host and the cards stand."""
    import torch

    cards = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [generator.get_state() for generator in (torch.default_generator, *cards)]
