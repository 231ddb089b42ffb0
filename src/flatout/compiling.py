"""Compiled kernels that round where the eager ones do, and in a proof draw what the eager ones draw.

Where operations in half precision are fused, torch's compiler leaves out the rounding between them. What the backward
pass makes anew from a value that was saved, rounded, then belongs to another forward pass: with torch 2.11 the
gradients of a compiled soft-argmax were twice as far off as those of eager bf16 (docs/BENCHMARKS.md, `captcha`).
"""

from __future__ import annotations

import os
from typing import Any

_VARIABLE = "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"
AS_CODE = "torch._inductor.config.emulate_precision_casts = True"


def round_as_eager() -> None:
    """From now on, in this process; unless the person has said otherwise, or this torch cannot."""
    import torch._inductor.config as config

    if _VARIABLE not in os.environ and hasattr(config, "emulate_precision_casts"):
        config.emulate_precision_casts = True


def draw_as_eager(module: Any) -> None:
    """From now on, where there is dropout in a model: a compiler has random numbers of its own, and two runs could not
    be compared step by step."""
    import torch._inductor.config as config

    if any(map(_drops, module.modules())):
        config.fallback_random = True


def _drops(part: Any) -> bool:
    """Whether a module leaves out some of its values at random: by itself, or as LSTM and attention do among others."""
    shares = [getattr(part, name, 0.0) for name in ("p", "dropout", "dropout_p", "attn_drop")]
    return any(isinstance(share, float) and share > 0 for share in shares)
