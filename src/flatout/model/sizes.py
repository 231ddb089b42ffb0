"""How long something is, as far as it says."""

from __future__ import annotations

from typing import Any


def length_of(sized: Any) -> int | None:
    """How many samples a dataset says it has, or batches a loader."""
    try:
        return len(sized)
    except Exception:  # a person's own code: a sampler that has no length may say so in any way
        return None
