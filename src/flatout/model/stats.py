"""Is it faster? The one statistic of `flatout fix`, `flatout compare` and the end of a trial.

The steady steps of a run are cut into eight blocks of neighbours; Student's t over the means of the
blocks says how well the mean step is known ("batch means", as it is done for simulations that warm up).
Why this one:

- Steps are not independent: a slow disk, a garbage collection or the rhythm of sixteen workers makes
  neighbours alike. Means of long blocks hardly depend on each other, and are nearly normal even where a
  few steps take ten times as long. A bootstrap over short blocks counts neighbours as independent: of two
  equal runs whose steps have a memory of twenty steps it calls a third different, at a promised 5%.
  (Blocks have to be longer than that memory: of 200 such steps eight blocks still err in 15% of the
  pairs, of 1,000 in 6%.)
- Runs of one plan differ too (clocks, page cache, other users), which no number of steps in one run can
  show. What they differ by is assumed until repeats have shown it (`RunNoise`). From three runs a side
  on, the runs themselves are the sample, and a pattern that every run has in its steps no longer counts
  against any of them.
- Speeds are compared as ratios, so errors are relative: those of the logarithm.

Only the standard library is used, because the training process imports this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """What runs of one plan differ by, as a share (one standard deviation), and how many repeats have shown
    that."""

    sd: float
    repeats: int

    @classmethod
    def seen_in(cls, plans: Iterable[Sequence[Measured]], usual: float = USUAL_RUN_NOISE) -> RunNoise:
        """The noise seen in the runs of several plans, each of which ran once or more."""
        squares, repeats = _ASSUMED_REPEATS * usual**2, 0
        for runs in plans:
            squares += _squares(runs)
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
    """How many of a run's first steps do not count: batches lie ready from before, kernels and caches are
    cold."""
    return min(50, steps // 5)


def blocks_of(count: int) -> list[slice]:
    """Where `count` items in a row are cut into blocks of (nearly) one size: eight, or fewer of fewer
    items."""
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
    mean = mean_of(means)
    return sum((one - mean) ** 2 for one in means) / (len(means) - 1) / len(means)


def half_width(parts: Iterable[tuple[float, float]]) -> float:
    """Half the 95% interval of a sum of independent parts, each with its variance and its degrees of
    freedom."""
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
    apart = _mean_log(after) - _mean_log(before)
    sure = unsure(before, after, noise)
    return Gain(value=math.exp(apart), low=math.exp(apart - sure), high=math.exp(apart + sure))


def unsure(before: Sequence[Measured], after: Sequence[Measured], noise: RunNoise) -> float:
    """Half the 95% interval of the logarithm of a gain."""
    sides = (before, after)
    runs = sum(1 / len(side) for side in sides)
    if min(map(len, sides)) >= ENOUGH_RUNS:
        freedom = len(before) + len(after) - 2
        return half_width([(runs * (_squares(before) + _squares(after)) / freedom, freedom)])
    steps = [((run.error / len(side)) ** 2, run.freedom) for side in sides for run in side]
    return half_width([*steps, (runs * noise.sd**2, noise.freedom)])


def _student(freedom: float) -> float:
    """How many standard errors a 95% interval reaches to either side."""
    return _STUDENT[int(freedom)] if freedom < len(_STUDENT) else 1.96 + 2.6 / freedom


def _mean_log(runs: Sequence[Measured]) -> float:
    return mean_of([math.log(run.value) for run in runs])


def _squares(runs: Sequence[Measured]) -> float:
    mean = _mean_log(runs)
    return sum((math.log(run.value) - mean) ** 2 for run in runs)
