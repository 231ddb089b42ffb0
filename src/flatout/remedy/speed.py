"""How fast a run trains, in samples a second, and whether another is faster beyond the noise.

The mean of all steady steps counts, not the median: sixteen workers that deliver in bursts make most steps short and a
few long. Two kinds of noise are held apart: that of the steps within a run (a bootstrap over blocks), and that from
run to run (clocks, page cache, neighbours), which only runs of the same plan again can show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flatout.diagnose.resample import resampled_means
from flatout.trace import Step, Trace

FEWEST_STEPS = 12
LEAST_NOISE = 0.01  # from run to run, until more is seen
_PAUSES = ("evaluation", "checkpoint")
_NOT_TRAINING = ("flatout",)
_SIGMAS = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Samples a second of all ranks; `with_pauses` counts evaluation and checkpoints too. `sd`: of the logarithm."""

    value: float
    with_pauses: float
    sd: float
    steps: int
    unit: str = "samples/s"

    @property
    def known_to(self) -> float:
        """Half the width of the 95% interval, as a share."""
        return _SIGMAS * self.sd


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times as fast, with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f} to {self.high:.2f})"


def measure(trace: Trace) -> Speed | None:
    """The speed of a recorded run; None of too few steps."""
    if not trace.ranks:
        return None
    steps = [step for step in trace.ranks[0].steps if step.kind == "train"]
    steps = steps[min(50, len(steps) // 5) :]
    if len(steps) < FEWEST_STEPS:
        return None
    own, pauses = (np.asarray([_spent_ms(step, names) for step in steps]) for names in (_NOT_TRAINING, _PAUSES))
    walls = np.asarray([step.wall_ms for step in steps]) - own
    known = [step.samples for step in steps if step.samples]
    ranks = len(trace.ranks)
    each = float(np.mean(known)) * ranks if len(known) == len(steps) else 1.0
    steady = np.maximum(walls - pauses, 1e-6)
    return Speed(
        value=each / float(steady.mean()) * 1e3,
        with_pauses=each / float(walls.mean()) * 1e3,
        sd=float(np.std(np.log(resampled_means(steady)))),
        steps=len(steps),
        unit="samples/s" if len(known) == len(steps) else "steps/s",
    )


def _spent_ms(step: Step, names: Sequence[str]) -> float:
    return sum(span.host_ms for span in step.spans if span.name in names)


def noise_between_runs(repeats: Iterable[Sequence[Speed]]) -> float:
    """The spread of the logarithm of speed from run to run of the same plan, over all plans that ran more than once."""
    squares, freedom = 0.0, 0
    for runs in repeats:
        logs = [math.log(run.value) for run in runs]
        mean = sum(logs) / len(logs) if logs else 0.0
        squares += sum((value - mean) ** 2 for value in logs)
        freedom += max(0, len(logs) - 1)
    return max(LEAST_NOISE, math.sqrt(squares / freedom)) if freedom else LEAST_NOISE


def gain(before: Sequence[Speed], after: Sequence[Speed], noise: float, *, pauses: bool = False) -> Gain:
    """How many times as fast `after` is as `before`, each measured once or more."""
    apart = _log(after, pauses) - _log(before, pauses)
    sure = _SIGMAS * math.sqrt(_variance(before, noise) + _variance(after, noise))
    return Gain(value=math.exp(apart), low=math.exp(apart - sure), high=math.exp(apart + sure))


def _log(runs: Sequence[Speed], pauses: bool) -> float:
    return sum(math.log(run.with_pauses if pauses else run.value) for run in runs) / len(runs)


def _variance(runs: Sequence[Speed], noise: float) -> float:
    return (sum(run.sd**2 for run in runs) / len(runs) + noise**2) / len(runs)
