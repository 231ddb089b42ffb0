"""Is it faster? The one statistic of `flatout fix`, `flatout compare` and the end of a trial.

The steady steps of a run are cut into eight blocks of neighbours; Student's t over the means of the
blocks says how well the mean step is known ("batch means"). Steps are not independent: a slow disk or
the rhythm of sixteen workers makes neighbours alike, and a bootstrap over short blocks then calls a
third of equal runs different, at a promised 5%. Means of long blocks hardly depend on each other.
Runs of one plan differ too, by what is assumed until repeats have shown it (`RunNoise`); from three
runs a side on, the runs are the sample.

Only the standard library is used, because the training process imports this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

BLOCKS = 8
MIN_GAIN = 1.02  # what is smaller is not worth a change
ENOUGH_RUNS = 3  # a side: then the runs are the sample
FEW_STEPS, LONG_S = 3, 10.0  # so few steps are enough where they have taken so long in all
USUAL_RUN_NOISE = 0.02  # from run to run, until repeats have shown another
_ASSUMED_REPEATS = 2  # the usual noise weighs as much as so many repeats
_STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)  # 95%, by degrees of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times as fast, with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f} to {self.high:.2f})"

    @property
    def verdict(self) -> str:
        """faster, slower or no difference shown."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no difference shown"

    def slower_than(self, pct: float) -> bool:
        """Whether it is shown to take more than `pct` per cent longer."""
        return self.high < 1 / (1 + pct / 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run has shown, such as its speed, and the standard error of that by its blocks, as a share."""

    value: float
    error: float
    freedom: int = BLOCKS - 1  # degrees of freedom: of few slow steps there are fewer blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNoise:
    """What runs of one plan differ by, as a share (one standard deviation), and how many repeats have
    shown it."""

    sd: float
    repeats: int

    @classmethod
    def seen_in(cls, plans: Iterable[Sequence[Measured]]) -> RunNoise:
        """The noise seen in the runs of several plans, each of which ran once or more."""
        squares, repeats = _ASSUMED_REPEATS * USUAL_RUN_NOISE**2, 0
        for runs in plans:
            squares += _squares(_logs(runs))
            repeats += len(runs) - 1
        return cls(sd=math.sqrt(squares / (_ASSUMED_REPEATS + repeats)), repeats=repeats)

    @property
    def freedom(self) -> float:
        """Its degrees of freedom: few repeats may have been alike by chance."""
        return _ASSUMED_REPEATS + self.repeats if self.repeats else math.inf


ONE_RUN = RunNoise(sd=0.0, repeats=0)  # where only the two runs themselves are compared


def enough(steps: int, seconds: float, usual: int) -> bool:
    """Whether steps suffice to judge by: as many as usual, or a few that have taken long."""
    return steps >= usual or (steps >= FEW_STEPS and seconds >= LONG_S)


def warm_up(steps: int) -> int:
    """How many of a run's first steps do not count: batches lie ready, kernels and caches are cold."""
    return min(50, steps // 5)


def blocks_of(count: int) -> list[slice]:
    """Where `count` items in a row are cut into blocks of nearly one size: eight, or fewer of fewer items."""
    blocks = min(BLOCKS, count)
    edges = [block * count // blocks for block in range(blocks + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


def block_means(values: Sequence[float]) -> list[float]:
    """The means of the blocks that these values in a row are cut into."""
    return [mean_of(values[block]) for block in blocks_of(len(values))]


def mean_of(values: Sequence[float]) -> float:
    """Their mean; `statistics` takes too long to import in every training."""
    return sum(values) / len(values)


def error_of(means: Sequence[float]) -> float:
    """The standard error of the mean of these block means, as a share of it."""
    return math.sqrt(variance_of_mean(means)) / mean_of(means)


def variance_of_mean(means: Sequence[float]) -> float:
    """How far the mean of these block means may be off, squared; infinite of less than two."""
    if len(means) < 2:
        return math.inf
    return _squares(means) / (len(means) - 1) / len(means)


def half_width(parts: Iterable[tuple[float, float]]) -> float:
    """Half the 95% interval of a sum of independent parts, each with its variance and degrees of freedom."""
    known = [(variance, freedom) for variance, freedom in parts if variance > 0]
    if not known:
        return 0.0
    total = sum(variance for variance, _ in known)
    if not math.isfinite(total):
        return total
    uncertain = sum(variance**2 / freedom for variance, freedom in known)  # after Welch and Satterthwaite
    return _student(total**2 / uncertain if uncertain else math.inf) * math.sqrt(total)


def gain(before: Sequence[Measured], after: Sequence[Measured], noise: RunNoise) -> Gain:
    """How many times as fast `after` is as `before`, each of them one run or more of one plan."""
    apart = mean_of(_logs(after)) - mean_of(_logs(before))
    sure = unsure(before, after, noise)
    return Gain(value=math.exp(apart), low=math.exp(apart - sure), high=math.exp(apart + sure))


def unsure(before: Sequence[Measured], after: Sequence[Measured], noise: RunNoise) -> float:
    """Half the 95% interval of the logarithm of a gain."""
    sides = (before, after)
    runs = sum(1 / len(side) for side in sides)
    if min(map(len, sides)) >= ENOUGH_RUNS:
        freedom = len(before) + len(after) - 2
        squares = sum(_squares(_logs(side)) for side in sides)
        return half_width([(runs * squares / freedom, freedom)])
    steps = [((run.error / len(side)) ** 2, run.freedom) for side in sides for run in side]
    return half_width([*steps, (runs * noise.sd**2, noise.freedom)])


def _student(freedom: float) -> float:
    """How many standard errors a 95% interval reaches to either side."""
    return _STUDENT[int(freedom)] if freedom < len(_STUDENT) else 1.96 + 2.6 / freedom


def _logs(runs: Sequence[Measured]) -> list[float]:
    return [math.log(run.value) for run in runs]


def _squares(values: Sequence[float]) -> float:
    """The sum of their squared distances from their mean."""
    mean = mean_of(values)
    return sum((value - mean) ** 2 for value in values)


# A distribution in bounded memory

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
        """A sketch of the values that are there."""
        sketch = cls()
        sketch.extend(values)
        return sketch

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

    def extend(self, values: Iterable[float | None]) -> None:
        """Count the values that are there; as if they were added one by one, in half the time."""
        known = [value for value in values if value is not None and -_HUGE < value < _HUGE]
        if not known:
            return
        buckets, log, ceil = self.buckets, math.log, math.ceil
        for value in known:
            bucket = ceil(log(value / _TINY) / _GROWTH) if value > _TINY else _bucket(value)
            buckets[bucket] = buckets.get(bucket, 0) + 1
        self.count += len(known)
        self.total += sum(known)
        self.squares += sum([v * v for v in known])
        self.low = min(self.low, min(known))
        self.high = max(self.high, max(known))

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
