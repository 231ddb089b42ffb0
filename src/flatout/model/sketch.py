"""Quantiles of a stream in bounded memory, which can be added together.

Values fall into buckets that grow by 2%, to both sides of zero, so a quantile is right to 1% of its value.
Mean and standard deviation come from sums, not from buckets. Two sketches merge without loss: that is what
lets a window, a rank and a run be summed up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

_GROWTH = math.log(1.02)
_TINY = 1e-6  # closer to zero than this is zero
_HUGE = 1e150  # its square is still a number
_FARTHEST = 35_000  # buckets from zero: beyond all that is counted, made coarse or not


@dataclass(slots=True)
class Sketch:
    """A distribution: count, mean, standard deviation, extremes and quantiles."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    buckets: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Sketch:
        """A sketch of the values that are there; as if they were added one by one, in half the time."""
        known = [value for value in values if value is not None and -_HUGE < value < _HUGE]
        if not known:
            return cls()
        buckets: dict[int, int] = {}
        log, ceil = math.log, math.ceil
        for value in known:
            bucket = ceil(log(value / _TINY) / _GROWTH) if value > _TINY else _bucket(value)
            buckets[bucket] = buckets.get(bucket, 0) + 1
        return cls(len(known), sum(known), sum([v * v for v in known]), min(known), max(known), buckets)

    @classmethod
    def merged(cls, sketches: Iterable[Sketch]) -> Sketch:
        """All of these in one."""
        whole = cls()
        for sketch in sketches:
            whole.merge(sketch)
        return whole

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over; what is not a number, or beyond all reason, is passed over."""
        if not abs(value) < _HUGE:
            return
        self.count += times
        self.total += value * times
        self.squares += value * value * times
        if value < self.low:
            self.low = value
        if value > self.high:
            self.high = value
        bucket = _bucket(value)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + times

    def merge(self, other: Sketch) -> None:
        """Add another sketch's values to this one."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        for bucket, times in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + times

    @property
    def mean(self) -> float | None:
        """The arithmetic mean, or None of nothing."""
        return self.total / self.count if self.count else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the population, or None of nothing."""
        if not self.count:
            return None
        mean = self.total / self.count
        return math.sqrt(max(0.0, self.squares / self.count - mean * mean))

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` (0 to 1) of all values lie."""
        if not self.count:
            return None
        rank = q * (self.count - 1)
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen > rank:
                return min(max(_middle(bucket), self.low), self.high)
        return self.high

    def coarse(self, most: int = 128) -> Sketch:
        """The same with at most `most` buckets, each as much wider as that takes."""
        buckets, width = self.buckets, 1
        while len(buckets) > most:
            width *= 2
            buckets = {}
            for bucket, times in self.buckets.items():
                # The last of the buckets that become one, less half the width: their middle stands for all.
                size = -(-abs(bucket) // width) * width - (width - 1) // 2 if bucket else 0
                wide = size if bucket > 0 else -size
                buckets[wide] = buckets.get(wide, 0) + times
        return replace(self, buckets=buckets)

    def to_json(self) -> list[object]:
        """[count, total, squares, low, high, [bucket, times, bucket, times, …]]"""
        pairs = [n for bucket in sorted(self.buckets) for n in (bucket, self.buckets[bucket])]
        if not self.count:
            return [0]
        return [self.count, self.total, self.squares, self.low, self.high, pairs]

    @classmethod
    def from_json(cls, data: Any) -> Sketch:
        """The inverse of `to_json`; ValueError where that is not what `to_json` gives."""
        if data == [0]:
            return cls()
        if type(data) is not list or len(data) != 6 or type(data[5]) is not list or len(data[5]) % 2:
            raise ValueError("a sketch is expected: [count, total, squares, least, greatest, buckets]")
        count, total, squares, low, high, pairs = data
        places, times = pairs[::2], pairs[1::2]
        whole = all(type(number) is int for number in (count, *pairs))
        if not whole or count < 1 or sum(times) != count or min(times) < 0 or max(map(abs, places)) > _FARTHEST:
            raise ValueError("the counts of a sketch do not add up")
        if not all(type(number) in (int, float) and abs(number) < _HUGE**2 for number in (total, squares, low, high)):
            raise ValueError("the sums of a sketch are expected to be numbers")
        slack = count * (1e-4 * max(abs(low), abs(high)) + 1e-4)  # numbers are written with a few digits
        if not (low <= high and count * low - slack <= total <= count * high + slack and squares >= 0):
            raise ValueError("the sums of a sketch do not fit together")
        buckets = dict(zip(places, times, strict=True))
        return cls(count, float(total), float(squares), float(low), float(high), buckets)


def _bucket(value: float) -> int:
    if value > _TINY:
        return math.ceil(math.log(value / _TINY) / _GROWTH)
    return -math.ceil(math.log(-value / _TINY) / _GROWTH) if value < -_TINY else 0


def _middle(bucket: int) -> float:
    return math.copysign(_TINY * math.exp((abs(bucket) - 0.5) * _GROWTH), bucket) if bucket else 0.0
