"""Compiled kernels that round where the eager ones do.

Where operations in half precision are fused, torch's compiler leaves out the rounding between them. What the backward
pass makes anew from a value that was saved, rounded, then belongs to another forward pass: with torch 2.11 the
gradients of a compiled soft-argmax were twice as far off as those of eager bf16 (docs/BENCHMARKS.md, `captcha`).
"""

from __future__ import annotations

import os

_VARIABLE = "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"
AS_CODE = "torch._inductor.config.emulate_precision_casts = True"


def round_as_eager() -> None:
    """From now on, in this process; unless the person has said otherwise, or this torch cannot."""
    import torch._inductor.config as config

    if _VARIABLE not in os.environ and hasattr(config, "emulate_precision_casts"):
        config.emulate_precision_casts = True
