"""How fast a run trains, in samples a second, and whether another is faster beyond the noise.

The mean of all steady steps counts, not the median: sixteen workers that deliver in bursts make most steps
short and a few long. How sure a speed and a gain are is said by `model.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, geometric_mean
from typing import NamedTuple

from flatout.model.formatting import in_full
from flatout.model.plan import Figure
from flatout.model.stats import Gain, Measured, RunNoise, blocks_of, enough, error_of, half_width, unsure, warm_up
from flatout.trace import RankTrace, Step, Trace, Window

FEWEST_STEPS = 12
EVALUATION_AND_CHECKPOINT = ("evaluation", "checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(Measured):
    """Samples a second of all ranks, without evaluation and checkpoints, which took `pauses_s` a sample."""

    steps: int
    unit: str = "samples/s"
    pauses_s: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{in_full(self.value)} {self.unit}"

    @property
    def known_to(self) -> float:
        """Half the width of the 95% interval, as a share."""
        return half_width([(self.error**2, self.freedom)])

    @property
    def with_pauses(self) -> float:
        """The same, with the pauses that were seen in its time."""
        return self.counting(sum(self.pauses_s.values())).value

    def counting(self, pauses_s: float) -> Speed:
        """The same, with pauses of that length a sample in its time."""
        return replace(self, value=1 / (1 / self.value + pauses_s), pauses_s={})

    @property
    def figure(self) -> Figure:
        """As a plan has it."""
        return Figure(median=self.value, spread=self.value * self.error, n=self.steps, unit=self.unit)


class _Row(NamedTuple):
    """One step, or the steps of a window, with what of their time is not training."""

    steps: int
    wall_ms: float
    samples: int
    not_training_ms: dict[str, float]

    @property
    def steady_ms(self) -> float:
        return max(self.wall_ms - sum(self.not_training_ms.values()), 1e-6)


def measure(trace: Trace) -> Speed | None:
    """The speed of a recorded run; None of too few steps."""
    if not trace.ranks:
        return None
    every = _rows(trace.ranks[0])
    rows = _warm(every, _warming_up(trace, every))
    steps = sum(row.steps for row in rows)
    if not enough(steps, _seconds(rows), FEWEST_STEPS) or len(rows) < 2:
        return None
    # Samples are what a larger batch is compared by. Not every step has some: a loader with a batch in hand
    # (Accelerate's) is asked for two in an epoch's first step, for none in its last.
    by_samples = sum(row.samples > 0 for row in rows) > len(rows) / 2
    each = sum(row.samples for row in rows) / steps * len(trace.ranks) if by_samples else 1.0
    # Pauses come at the end of an epoch, and count over all steps.
    every_step = sum(row.steps for row in every)
    pauses_ms = {
        kind: sum(row.not_training_ms[kind] for row in every) / every_step for kind in EVALUATION_AND_CHECKPOINT
    }
    step_ms = _step_ms(rows)
    blocks_ms = [_step_ms(rows[block]) for block in blocks_of(len(rows))]
    return Speed(
        value=each / step_ms * 1e3,
        error=error_of(blocks_ms),
        freedom=len(blocks_ms) - 1,
        steps=steps,
        unit="samples/s" if by_samples else "steps/s",
        pauses_s={kind: ms / each / 1e3 for kind, ms in pauses_ms.items()},
    )


def _seconds(rows: Sequence[_Row]) -> float:
    return sum(row.wall_ms for row in rows) / 1e3


def _step_ms(rows: Sequence[_Row]) -> float:
    return sum(row.steady_ms for row in rows) / sum(row.steps for row in rows)


def _rows(rank: RankTrace) -> list[_Row]:
    """Step by step; of a run too long to be kept so (a whole epoch, for its pauses), window by window."""
    steps = rank.every_step()
    if steps is not None:
        return [_row_of_step(step) for step in steps]
    return [_row_of_window(window) for window in rank.windows]


def _row_of_step(step: Step) -> _Row:
    spent_ms = [(span.name, span.host_ms) for span in step.spans]
    return _row(1, step.wall_ms, step.samples, spent_ms)


def _row_of_window(window: Window) -> _Row:
    spent_ms = [(key.partition("@")[0], spans.total) for key, spans in window.spans_ms.items()]
    return _row(window.wall_ms.count, window.wall_ms.total, window.samples, spent_ms)


def _row(steps: int, wall_ms: float, samples: int | None, spent_ms: Sequence[tuple[str, float]]) -> _Row:
    not_training_ms = dict.fromkeys(("flatout", *EVALUATION_AND_CHECKPOINT), 0.0)
    for name, took_ms in spent_ms:
        if name in not_training_ms:
            not_training_ms[name] += took_ms
    return _Row(steps, wall_ms, samples or 0, not_training_ms)


def _warm(rows: Sequence[_Row], cold_steps: int) -> list[_Row]:
    """The rows without the first so many steps."""
    taken, warm = 0, []
    for row in rows:
        taken += row.steps
        if taken > cold_steps:
            warm.append(row)
    return warm


def _warming_up(trace: Trace, rows: Sequence[_Row]) -> int:
    """Steps that do not count yet; more of them while the elastic loader is finding its workers."""
    steps = sum(row.steps for row in rows)
    facts = trace.ranks[0].facts
    elastic = facts.training_loader.elastic or any(one.name == "loader" and one.applied for one in facts.changes)
    # It begins with one worker and adds others while that helps, for as long as half of a trial.
    cold = steps // 2 if elastic else warm_up(steps)
    if enough(steps - cold, _seconds(_warm(rows, cold)), FEWEST_STEPS):
        return cold
    return max(0, min(cold, steps - FEWEST_STEPS))


def gain_of_rarer_pauses(runs: Sequence[Speed], before_s: float, after_s: float, noise: RunNoise) -> Gain:
    """The gain where only evaluation and checkpoints changed, from `before_s` to `after_s` a sample."""
    # Longer steps make pauses a smaller share: how large would the gain be with steps that much
    # longer, or shorter?
    step_s, sure = 1 / pooled(runs).value, math.exp(unsure(runs, runs, noise))

    def with_steps(longer: float) -> float:
        return (step_s * longer + before_s) / (step_s * longer + after_s)

    return Gain(value=with_steps(1.0), low=with_steps(sure), high=with_steps(1 / sure))


def pooled(runs: Sequence[Speed]) -> Speed:
    """Runs of one plan as one, so that `pooled(after)` over `pooled(before)` is their gain."""
    return Speed(
        value=geometric_mean(run.value for run in runs),
        error=math.sqrt(sum(run.error**2 for run in runs)) / len(runs),
        freedom=min(run.freedom for run in runs),
        steps=sum(run.steps for run in runs),
        unit=runs[0].unit,
        pauses_s={kind: fmean(run.pauses_s[kind] for run in runs) for kind in runs[0].pauses_s},
    )
