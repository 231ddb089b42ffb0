"""A Finding: one reason why the GPU loses time, its evidence, what fixing it would give, and by which change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.model.causes import CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause. Gains are factors of speed (1.0: none), as a range; `derived` says how they were found.

    The range begins below 1 where fixing this alone may cost, and pays together with another.
    """

    code: str
    title: str  # one sentence: what is wrong, with the number that shows it
    share: float  # of the wall time, 0 to 1
    gain_low: float = 1.0
    gain_high: float = 1.0
    derived: str  # "measured ceiling", "model": never a bare rule of thumb
    confidence: float  # 0 to 1
    evidence: dict[str, Any] = field(default_factory=dict)
    change: str | None = None  # the name of a change, such as num_workers
    value: Any = None  # and its value
    advice: str = ""  # what a person should do, in words
    where: str | None = None  # file:line

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code
        assert 0.0 < self.gain_low <= self.gain_high, (self.code, self.gain_low, self.gain_high)
        assert self.gain_high >= 1.0, (self.code, self.gain_high)
