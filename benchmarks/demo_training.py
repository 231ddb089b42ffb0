"""What `make demo` mends: workloads/gray/train.py as it is, with its pictures on a store that takes 5 ms to answer.

A network drive does that. Here it is a sleep, so that there is something to mend on a laptop too, however busy it is.
"""

from __future__ import annotations

import time
from typing import Any

from workloads.gray import train

ANSWERS_IN_S = 0.005


class FarAway(train.Stamps):
    """The same pictures, from further away."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(ANSWERS_IN_S)
        return super().__getitem__(index)


if __name__ == "__main__":
    train.Stamps = FarAway  # type: ignore[misc]
    train.main()
