"""Does a change pay? Decided while training runs: a few steps with it, a few without, in turns.

Two turns with the change and two without make a round, ABBA or BAAB by chance, so that a drift of the
machine takes from both sides alike. What a round says is one number: the logarithm of how much longer
its steps took without the change. Rounds are looked at as they come, so the interval of their mean is
a confidence sequence: it may be looked at after each round and still covers the truth for all of them
together. (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and
asymptotic confidence sequences", 2021.)

Only the standard library is used: this decides inside the training process.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flatout.model.stats import Gain

Decision = Literal["faster", "no gain", "undecided"]
State = Literal["decided", "under way", "not reached"]

PAYS = 1.01  # a change is kept when it is shown to bring more than this
WITHIN_S = 25.0  # a change is decided, or it stays undecided
_ERROR = 0.05  # how often a confidence sequence may miss the truth
_SURE_ENOUGH, _SURE_SHARE = 0.02, 1 / 3  # how precisely a kept gain is known: to 2%, or a third of it
_FEWEST_ROUNDS = 8
_TUNED_TO_ROUNDS = 30  # where the sequence is narrowest
_SPREADS = 3.0  # how far from the median a round may lie; what is farther counts as lying there
_NORMAL = 1.4826  # a median absolute deviation times this is a standard deviation
_NEIGHBOURS = 4  # rounds in a row are averaged in so many groups at the most, where neighbours are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsResult:
    """What turns have shown of one change; `note`: why it could not be made, or where it hung."""

    name: str
    state: State = "not reached"
    decision: Decision = "undecided"
    gain: Gain | None = None
    rounds: int = 0
    steps: int = 0
    seconds: float = 0.0
    note: str = ""


@dataclass(slots=True)
class Rounds:
    """The rounds of one change so far."""

    logs: list[float] = field(default_factory=list)

    def add(self, with_it: Sequence[float], without: Sequence[float]) -> None:
        """A round is over: what its steps took on both sides."""
        self.logs.append(math.log(sum(without) / len(without)) - math.log(sum(with_it) / len(with_it)))

    def gain(self) -> Gain:
        """How many times as fast steps are with the change, and the interval."""
        logs = _winsorized(self.logs)
        middle, unsure = statistics.fmean(logs), self._unsure(logs)
        return Gain(value=math.exp(middle), low=math.exp(middle - unsure), high=math.exp(middle + unsure))

    def decision(self) -> Decision:
        """Whether more rounds are needed to say."""
        if len(self.logs) < _FEWEST_ROUNDS:
            return "undecided"
        gain = self.gain()
        if gain.high < PAYS * PAYS:  # it may be faster by one per cent, but not by two
            return "no gain"
        half_width = (math.log(gain.high) - math.log(gain.low)) / 2
        known = half_width <= max(_SURE_ENOUGH, _SURE_SHARE * math.log(gain.value))
        return "faster" if gain.low > PAYS and known else "undecided"

    def _unsure(self, logs: Sequence[float]) -> float:
        """Half the width of the confidence sequence, of the widest of single rounds and of means of
        neighbours."""
        widths = [_half_width(logs)]
        for size in (2, _NEIGHBOURS):
            means = [statistics.fmean(logs[at : at + size]) for at in range(0, len(logs) - size + 1, size)]
            if len(means) >= _FEWEST_ROUNDS:
                widths.append(_half_width(means, tuned_to=_TUNED_TO_ROUNDS / size))
        return max(widths)


def order_of_a_round(chance: random.Random) -> tuple[bool, bool, bool, bool]:
    """Which of the four turns of a round have the change."""
    first = chance.random() < 0.5
    return first, not first, not first, first


def _winsorized(values: Sequence[float]) -> list[float]:
    """The values; those far out are drawn in: an evaluation or a neighbour's burst fell into them."""
    if len(values) < _FEWEST_ROUNDS:
        return list(values)
    middle = statistics.median(values)
    spread = _SPREADS * _NORMAL * statistics.median([abs(value - middle) for value in values])
    return [min(max(value, middle - spread), middle + spread) for value in values]


def _half_width(values: Sequence[float], tuned_to: float = _TUNED_TO_ROUNDS) -> float:
    """Half the width of the confidence sequence of their mean."""
    count = len(values)
    if count < 2:
        return math.inf
    at_best = (-2 * math.log(_ERROR) + math.log(-2 * math.log(_ERROR)) + 1) / tuned_to
    grown = count * at_best + 1
    # The spread of few values may be too small by chance: Student's correction, for the most part.
    deviation = statistics.stdev(values) * math.sqrt((count + 1) / max(1, count - 3))
    return deviation * math.sqrt(2 * grown / (count * count * at_best) * math.log(math.sqrt(grown) / _ERROR))
