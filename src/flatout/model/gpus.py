"""What the makers of GPUs say they compute at most, in TFLOP/s of dense products: half precision,
TF32, float32.

A share of such a figure is the usual measure of how well a model uses its GPU. It is none that was
measured here, and reports say so. A GPU that is not in the table has none.
"""

from __future__ import annotations

from flatout.model.records import Facts

_PEAKS = {  # by a part of the driver's name; the longer one counts
    "H200": (989, 494, 67),
    "H100": (989, 494, 67),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835, 417, 60),
    "A100": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6),
    "L4": (121, 60, 30.3),
    "V100": (125, None, 15.7),
    "T4": (65, None, 8.1),
    "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 3090": (71, 35.6, 35.6),
    "RTX 4090": (165, 82.6, 82.6),
    "RTX 5090": (209.5, 104.8, 104.8),
}
_HALF = ("float16", "bfloat16")


def peak(facts: Facts) -> tuple[float, str] | None:
    """The TFLOP/s that the GPU's maker states for the precision of a run, and its name; None where it
    is not known."""
    words = (facts.gpu or "").split()
    names = [name for name in _PEAKS if all(_is_among(part, words) for part in name.split())]
    if not names:
        return None
    half, tf32, full = _PEAKS[max(names, key=len)]
    if any(kind.endswith(_HALF) for kind in (*facts.autocast, *facts.parameter_dtypes)):
        return half, "half precision"
    if facts.tf32_matmul and tf32 is not None:
        return tf32, "TF32"
    return full, "float32"


def _is_among(part: str, words: list[str]) -> bool:
    """Whether a name has this part: `A100` of "NVIDIA A100-SXM4-80GB"."""
    return any(word == part or word.startswith(f"{part}-") for word in words)
