"""How fast a run trains, in samples a second, and whether another is faster beyond the noise.

The mean of all steady steps counts, not the median: sixteen workers that deliver in bursts make most steps short and a
few long. Two kinds of noise are held apart: that of the steps within a run (a bootstrap over blocks), and that from
run to run (clocks, page cache, neighbours), which only runs of the same plan again can show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flatout.model.formatting import in_full
from flatout.model.plan import Figure
from flatout.model.stats import STUDENT, resampled_means
from flatout.trace import RankTrace, Step, Trace, Window

FEWEST_STEPS = 12
WORTH = 1.02
USUAL_NOISE = 0.02  # from run to run: what is assumed until it is seen …
STEADY_NOISE = 0.01  # … of a card that waits for nothing …
_ASSUMED = 2  # … and then weighs as much as so many repeats
EVALUATION_AND_CHECKPOINT = ("evaluation", "checkpoint")
_SIGMAS = 1.96
_SLOWER = 2.0
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Samples a second of all ranks; `with_pauses` counts evaluation and checkpoints too, which were seen to take
    `pauses_s` a sample. `sd`: of the logarithm."""

    value: float
    with_pauses: float
    sd: float
    steps: int
    unit: str = "samples/s"
    pauses_s: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{in_full(self.value)} {self.unit}"

    @property
    def known_to(self) -> float:
        """Half the width of the 95% interval, as a share."""
        return _SIGMAS * self.sd

    @property
    def figure(self) -> Figure:
        """As a plan has it."""
        return Figure(median=self.value, spread=self.value * self.sd, n=self.steps, unit=self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times as fast, with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f} to {self.high:.2f})"

    @property
    def shortfall(self) -> str:
        """Why it does not count."""
        if self.high < 1:
            return f"{self}: slower"
        return f"{self}: {'too little to be believed of so few runs' if self.low > 1 else 'no gain over 2% was shown'}"

    @property
    def hopeless(self) -> bool:
        """Whether it is sure not to be worth having."""
        return self.high < WORTH


def measure(trace: Trace) -> Speed | None:
    """The speed of a recorded run; None of too few steps."""
    if not trace.ranks:
        return None
    every = np.asarray(_rows(trace.ranks[0])).reshape(-1, 6)
    rows = every[np.cumsum(every[:, 0]) > _warming_up(trace, int(every[:, 0].sum()))]
    counts, walls, own, evaluation, checkpoint, taken = rows.T
    steps = int(counts.sum())
    if steps < FEWEST_STEPS:
        return None
    # A loader with a batch in hand (Accelerate's) is asked for two in an epoch's first step, for none in its last.
    by_samples = np.count_nonzero(taken) > len(rows) / 2
    each = float(taken.sum()) / steps * len(trace.ranks) if by_samples else 1.0
    steady = np.maximum(walls - own - evaluation - checkpoint, 1e-6)
    steady_ms = float(steady.sum()) / steps
    paused_ms = [float(ms / every[:, 0].sum()) for ms in every[:, 3:5].sum(axis=0)]  # at the end of an epoch: all count
    return Speed(
        value=each / steady_ms * 1e3,
        with_pauses=each / (steady_ms + sum(paused_ms)) * 1e3,
        sd=float(np.std(np.log(resampled_means(steady / counts)))),
        steps=steps,
        unit="samples/s" if by_samples else "steps/s",
        pauses_s={kind: ms / each / 1e3 for kind, ms in zip(EVALUATION_AND_CHECKPOINT, paused_ms, strict=True)},
    )


def _rows(rank: RankTrace) -> list[tuple[float, ...]]:
    """Step by step: how many, their time, what of it is ours and what are pauses, and their samples. Of a run too long
    to be kept so (a whole epoch, for its pauses), window by window: of later steps only the odd ones are there."""
    steps, told = rank.every_step(), ("flatout", *EVALUATION_AND_CHECKPOINT)
    if steps is not None:
        return [(1, s.wall_ms, *(_spent_ms(s, name) for name in told), s.samples or 0) for s in steps]
    return [
        (w.wall_ms.count, w.wall_ms.total, *(_total_ms(w, name) for name in told), w.samples or 0) for w in rank.windows
    ]


def _warming_up(trace: Trace, steps: int) -> int:
    """Steps that do not count yet: batches lie ready from before, and the elastic loader is finding its workers."""
    made = trace.ranks[0].facts.get("changes") or ()
    elastic = any(change.get("name") == "loader" and change.get("applied") for change in made)
    return max(0, min(steps // 2 if elastic else min(50, steps // 5), steps - FEWEST_STEPS))


def _spent_ms(step: Step, name: str) -> float:
    return sum(span.host_ms for span in step.spans if span.name == name)


def _total_ms(window: Window, name: str) -> float:
    return sum(spans.total for key, spans in window.spans_ms.items() if key.partition("@")[0] == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The spread of the logarithm of speed from run to run of the same plan; `repeats` is how often it was seen."""

    sd: float
    repeats: int

    @property
    def sigmas(self) -> float:
        """How many times the spread a 95% interval reaches to either side: few repeats may have been alike by luck."""
        return STUDENT[min(_ASSUMED + self.repeats, len(STUDENT) - 1)] if self.repeats else _SIGMAS


def noise_between_runs(every: Iterable[Sequence[Speed]], usual: float = USUAL_NOISE) -> Noise:
    """From all plans that ran more than once."""
    squares, repeats = _ASSUMED * usual**2, 0
    for runs in every:
        squares += _squares(runs)
        repeats += len(runs) - 1
    return Noise(sd=math.sqrt(squares / (_ASSUMED + repeats)), repeats=repeats)


def gain(before: Sequence[Speed], after: Sequence[Speed], noise: Noise, *, pauses: bool = False) -> Gain:
    """How many times as fast `after` is as `before`, each measured once or more."""
    apart, sure = _log(after, pauses) - _log(before, pauses), _unsure(before, after, noise)
    return Gain(value=math.exp(apart), low=math.exp(apart - sure), high=math.exp(apart + sure))


def gain_of_rarer_pauses(before: Sequence[Speed], after: Sequence[Speed], noise: Noise) -> Gain:
    """The gain where only evaluation and checkpoints changed: steps count as equally long, as they are but for luck."""
    sure = math.exp(_unsure(before, after, noise))
    old, new = map(pooled, with_equal_steps(before, after))
    step_s, old_s, new_s = 1 / old.value, 1 / old.with_pauses - 1 / old.value, 1 / new.with_pauses - 1 / new.value

    def with_steps(longer: float) -> float:
        return (step_s * longer + old_s / longer) / (step_s * longer + new_s)

    return Gain(value=with_steps(1.0), low=with_steps(sure), high=with_steps(1 / sure))


def with_equal_steps(before: Sequence[Speed], after: Sequence[Speed]) -> tuple[list[Speed], list[Speed]]:
    """Both, as if a step took them equally long: what is left is the difference of their pauses."""
    value = math.exp((_log(before, pauses=False) + _log(after, pauses=False)) / 2)

    def equal(run: Speed) -> Speed:
        return replace(run, value=value, with_pauses=1 / (1 / value + 1 / run.with_pauses - 1 / run.value))

    return [equal(run) for run in before], [equal(run) for run in after]


def _unsure(before: Sequence[Speed], after: Sequence[Speed], noise: Noise) -> float:
    """Half the width of the 95% interval of the logarithm of a gain."""
    within = sum(sum(run.sd**2 for run in runs) / len(runs) ** 2 for runs in (before, after))
    between = sum(noise.sd**2 / len(runs) for runs in (before, after))
    by_steps = math.hypot(_SIGMAS * math.sqrt(within), noise.sigmas * math.sqrt(between))
    return min(by_steps, _unsure_by_repeats(before, after))


def _unsure_by_repeats(before: Sequence[Speed], after: Sequence[Speed]) -> float:
    """That by the runs alone, where both sides have several: steps may come in a pattern, such as slow ones while forty
    workers fill their queues, that every run has and that says nothing against any of them."""
    if min(len(before), len(after)) < 2:
        return math.inf
    freedom = len(before) + len(after) - 2
    sd = max(STEADY_NOISE, math.sqrt((_squares(before) + _squares(after)) / freedom))
    return STUDENT[min(freedom, len(STUDENT) - 1)] * sd * math.sqrt(1 / len(before) + 1 / len(after))


def pooled(runs: Sequence[Speed]) -> Speed:
    """Runs of one plan as one, so that `pooled(after)` over `pooled(before)` is their gain."""
    return Speed(
        value=math.exp(_log(runs, pauses=False)),
        with_pauses=math.exp(_log(runs, pauses=True)),
        sd=math.sqrt(sum(run.sd**2 for run in runs)) / len(runs),
        steps=sum(run.steps for run in runs),
        unit=runs[0].unit,
    )


def slower_pauses(before: Speed, after: Speed) -> str:
    """What there is to mind where evaluation and checkpoints take back what the steps have gained; else nothing."""
    both = before.pauses_s.keys() & after.pauses_s.keys()  # a faster run gets further: to the first evaluation, say
    then, now = (sum(speed.pauses_s[kind] for kind in both) for speed in (before, after))
    counted = (1 / before.value + then) / (1 / after.value + now)
    # A trial holds the pauses of an epoch that has ended in it, and up to twice as many steps: that much is luck.
    if not then or now < _SLOWER * then or counted * _CLEARLY > after.value / before.value:
        return ""
    return f"evaluation and checkpoints take {now / then:.1f}× as long as before: counted in, {counted:.2f}× as fast"


def _squares(runs: Sequence[Speed]) -> float:
    """How far runs of one plan are from their mean."""
    mean = _log(runs, pauses=False)
    return sum((math.log(run.value) - mean) ** 2 for run in runs)


def _log(runs: Sequence[Speed], pauses: bool) -> float:
    return sum(math.log(run.with_pauses if pauses else run.value) for run in runs) / len(runs)
