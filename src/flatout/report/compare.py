"""Two traces → Comparison: is the second run faster, beyond what its own noise could explain?

The statistic is that of `flatout fix` (`model.stats`). The intervals hold the noise within the two runs; what differs
between any two runs of the same training (page cache, clocks, neighbours) only more runs can show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Any

from flatout.diagnose.breakdown import Breakdown
from flatout.diagnose.rules import diagnose
from flatout.model.formatting import count_of, in_full
from flatout.model.records import to_json
from flatout.model.stats import BLOCKS, ONE_RUN, Gain, Measured, blocks_of, error_of, gain, half_width, warm_up
from flatout.report.account import Account, account
from flatout.trace import RankTrace, Sketch, Trace

SCHEMA = 1
FEWEST_STEPS = 40
FEWEST_LOSSES = 8
MOST_DIFFERENCES = 100
_NO_DIFFERENCE = "no difference shown"
_SHORT_BATCHES = 0.02  # of the samples: what last short batches may take away

# Facts that differ between any two runs, or follow from the others.
_VOLATILE = frozenset(
    ("changes", "learning_rate", "memory_peak_bytes", "memory_reserved_bytes", "own_cost", "settings", "loaders")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses both runs read, by step or by sample; and their means over the last quarter of what both did."""

    axis: str
    a: tuple[tuple[float, float], ...]
    b: tuple[tuple[float, float], ...]
    end_a: float | None = None
    end_b: float | None = None
    low: float | None = None  # of the difference, B less A
    high: float | None = None

    @property
    def verdict(self) -> str:
        """lower, higher, no difference shown, or too few to compare."""
        if self.low is None or self.high is None:
            return "too few to compare"
        return "lower" if self.high < 0 else "higher" if self.low > 0 else "no difference shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """One side of the ratios: a run without its first steps, and its speeds, of which they are the ratios."""

    median_ms: float
    samples_per_s: float | None
    typical: Measured  # by the median step
    overall: Measured  # by all steps, slow ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Run A and run B. `typical` compares median steps, `overall` all of the time; per sample where batches differ."""

    a: Account
    b: Account
    per: str
    typical: Gain | None
    overall: Gain | None
    reasons: tuple[str, ...]  # why they cannot be compared; then there are no ratios
    cautions: tuple[str, ...]
    differences: tuple[tuple[str, Any, Any], ...]
    losses: Losses | None
    steady_a: Steady | None = None  # what the ratios are of
    steady_b: Steady | None = None

    @property
    def leading(self) -> Gain | None:
        """What the verdict is of: the median step; all steps where they differ and the median does not say the same."""
        if self.typical is None or self.overall is None:
            return None
        alike = self.overall.verdict in (self.typical.verdict, _NO_DIFFERENCE)
        return self.typical if alike else self.overall

    @property
    def verdict(self) -> str:
        """faster, slower, no difference shown, or not comparable."""
        return self.leading.verdict if self.leading is not None else "not comparable"

    def slower_than(self, pct: float) -> bool:
        """Whether B is shown to be slower, and by more than `pct` per cent in its median step or over all its steps."""
        ratios = [ratio for ratio in (self.typical, self.overall) if ratio is not None]
        return self.verdict == "slower" and any(ratio.slower_than(pct) for ratio in ratios)

    def sentence(self) -> str:
        """The answer."""
        typical, overall = self.typical, self.overall
        if typical is None or overall is None:
            return "Not comparable: " + "; ".join(self.reasons) + "."
        by_the = "" if self.per == "step" else ", by the sample"
        if self.leading is overall:
            median = "shows no difference" if typical.verdict == _NO_DIFFERENCE else f"is {typical.verdict}"
            return (
                f"Over all its steps, slow ones included, B is {overall.verdict}: {overall}{by_the}. "
                f"Its median step {median}: {typical}."
            )
        speed = f"{typical.value:.2f}× the speed of A, {typical.low:.2f} to {typical.high:.2f}"
        first = "No difference shown" if typical.verdict == _NO_DIFFERENCE else f"B is {typical.verdict}"
        first = f"{first}: {speed} (median step{by_the})."
        if overall.verdict == typical.verdict and overall.low <= typical.value <= overall.high:
            return first
        return f"{first} Over all steps, slow ones included: {overall}, {overall.verdict}."

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout compare --json`."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "per": self.per,
            "typical": dataclasses.asdict(self.typical) if self.typical is not None else None,
            "overall": {**dataclasses.asdict(self.overall), "verdict": self.overall.verdict} if self.overall else None,
            "reasons": list(self.reasons),
            "cautions": list(self.cautions),
            "a": _side(self.a),
            "b": _side(self.b),
            "differences": [{"name": name, "a": a, "b": b} for name, a, b in self.differences],
            "losses": self._losses_to_json(),
        }

    def _losses_to_json(self) -> dict[str, Any] | None:
        if self.losses is None:
            return None
        kept = {k: v for k, v in dataclasses.asdict(self.losses).items() if k not in ("a", "b")}
        return {"verdict": self.losses.verdict, **kept}


def compare(first: Trace, second: Trace, folders: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two runs: how much faster is the second?"""
    a, b = account(first, folders[0]), account(second, folders[1])
    size_a, size_b = _samples_a_step(a), _samples_a_step(b)
    steady_a, steady_b = _steady(first.ranks[0], size_a), _steady(second.ranks[0], size_b)
    reasons = [*_reasons(a, b), *_too_short("A", a, steady_a), *_too_short("B", b, steady_b)]
    per = "step" if _alike(size_a, size_b) else "sample"
    if per == "sample" and (size_a is None or size_b is None):
        reasons.append("one of them does not say how many samples a step has")
    typical = overall = None
    if not reasons and steady_a is not None and steady_b is not None:
        samples = (size_b or 1.0) / (size_a or 1.0) if per == "sample" else 1.0
        typical = _ratio(steady_a.typical, steady_b.typical, samples)
        overall = _ratio(steady_a.overall, steady_b.overall, samples)
    return Comparison(
        a=a,
        b=b,
        per=per,
        typical=typical,
        overall=overall,
        reasons=tuple(reasons),
        cautions=(*_ended(a, b), *_cautions(a, b, per), *_in_company("A", first), *_in_company("B", second)),
        differences=tuple(_differences(a, b))[:MOST_DIFFERENCES],
        losses=_losses(first.ranks[0], second.ranks[0], (size_a, size_b) if per == "sample" else None),
        steady_a=steady_a,
        steady_b=steady_b,
    )


# Whether they can be compared


def _reasons(a: Account, b: Account) -> Iterator[str]:
    sets = [_training_set(one) for one in (a, b)]
    if sets[0] is not None and sets[1] is not None and sets[0] != sets[1]:
        yield f"they train on other data: {_described(sets[0])} and {_described(sets[1])}"


def _training_set(one: Account) -> tuple[str, Any] | None:
    """The dataset of the first loader: its class, whatever module it came from, and its length."""
    if not one.facts.loaders:
        return None
    loader = one.facts.loaders[0]
    return loader.dataset.rpartition(".")[2], loader.length


def _described(dataset: tuple[str, Any]) -> str:
    return f"{dataset[0]} of {count_of(dataset[1], 'sample')}" if isinstance(dataset[1], int) else dataset[0]


def _too_short(name: str, one: Account, steady: Steady | None) -> Iterator[str]:
    if steady is None:
        yield f"{name} has {one.breakdown.steps:,} training steps, and fewer than {FEWEST_STEPS} say too little"


def _cautions(a: Account, b: Account, per: str) -> Iterator[str]:
    if per == "sample":
        first, second = _samples_a_step(a), _samples_a_step(b)
        yield (
            f"a step of A has {in_full(first)} sample{'' if first == 1 else 's'}, one of B {in_full(second)}: "
            "time for each sample is compared, not for each step"
            if first and second
            else "their steps have unlike numbers of samples"
        )
    if a.facts.gpu != b.facts.gpu:
        yield f"another card: {_figure(a.facts.gpu)} and {_figure(b.facts.gpu)}"
    if a.facts.parameters != b.facts.parameters:
        yield f"another number of parameters: {_figure(a.facts.parameters)} and {_figure(b.facts.parameters)}"
    if a.ranks != b.ranks:
        yield f"A ran on {a.ranks:,} rank{'s' if a.ranks > 1 else ''}, B on {b.ranks:,}: samples are those of all ranks"


def _ended(a: Account, b: Account) -> Iterator[str]:
    yield from (f"{name}: {one.ended}" for name, one in (("A", a), ("B", b)) if one.ended is not None)


def _in_company(name: str, run: Trace) -> Iterator[str]:
    """That others had the cores or the card meanwhile: then a difference may be theirs."""
    yield from (f"{name}: {found.title}" for found in diagnose(run) if found.code == "hardware.shared")


def _figure(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _alike(a: float | None, b: float | None) -> bool:
    """Whether steps have as many samples, but for a last short batch here and there."""
    return a == b or (a is not None and b is not None and abs(a / b - 1) < _SHORT_BATCHES)


def _samples_a_step(one: Account) -> float | None:
    """Samples in a step of all ranks; to six digits, so that a last short batch makes no difference."""
    b = one.breakdown
    if not b.samples or not b.steps:
        return None
    sizes = [loader.batch_size for loader in one.facts.loaders]
    mean = b.samples / b.steps
    size = next((s for s in sizes if isinstance(s, int) and s and abs(mean / s - 1) < _SHORT_BATCHES), None)
    return float(f"{(size or mean) * one.ranks:.6g}")


# How sure one can be


def _steady(rank: RankTrace, samples: float | None) -> Steady | None:
    """A run without its first steps, with so many samples a step; None of too few steps."""
    steps = rank.every_step()
    if steps is not None:
        times_ms = [step.wall_ms for step in steps][warm_up(len(steps)) :]
        if len(steps) < FEWEST_STEPS:
            return None
        blocks = [times_ms[block] for block in blocks_of(len(times_ms))]
        mean_ms, median_ms = fmean(times_ms), median(times_ms)
        means_ms, medians_ms = [fmean(block) for block in blocks], [median(block) for block in blocks]
    else:
        sketches = [window.wall_ms for window in rank.windows[1:]]
        if len(sketches) < BLOCKS:
            return None
        every = Sketch.merged(sketches)
        merged = [Sketch.merged(sketches[block]) for block in blocks_of(len(sketches))]
        mean_ms, median_ms = every.mean or 0.0, every.quantile(0.5) or 0.0
        means_ms, medians_ms = [one.mean or 0.0 for one in merged], [one.quantile(0.5) or 0.0 for one in merged]
    return Steady(
        median_ms=median_ms,
        samples_per_s=samples / mean_ms * 1e3 if samples is not None else None,
        typical=Measured(value=1e3 / median_ms, error=error_of(medians_ms)),
        overall=Measured(value=1e3 / mean_ms, error=error_of(means_ms)),
    )


def _ratio(a: Measured, b: Measured, samples: float) -> Gain:
    """The speed of B over A's; `samples`: those in a step of B for each of A."""
    return gain([a], [dataclasses.replace(b, value=b.value * samples)], ONE_RUN)


# What else differs


def _differences(a: Account, b: Account) -> Iterator[tuple[str, Any, Any]]:
    """Settings and facts that are not the same in both."""
    both = min(len(one.facts.loaders) for one in (a, b))
    ours, theirs = dict(_settings(a, both)), dict(_settings(b, both))
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)


def _settings(one: Account, loaders: int) -> Iterator[tuple[str, Any]]:
    """Of loaders that the other run did not have, one line each."""
    yield "command", " ".join(one.command)
    yield "ranks", one.ranks
    for number, loader in enumerate(one.facts.loaders, 1):
        yield from _flat(f"loader {number}", to_json(loader) if number <= loaders else loader.dataset)
    if one.facts.changes:
        made = [f"{change.name}={change.value}" for change in one.facts.changes if change.applied]
        yield "changed by flatout", made
    for name, value in to_json(one.facts).items():
        if name not in _VOLATILE:
            yield from _flat(name, value)
    for read in one.facts.settings:
        yield from _flat(read.file or read.source, read.values)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}: {key}", item)
    else:
        yield name, value


def _losses(a: RankTrace, b: RankTrace, sizes: tuple[float | None, float | None] | None) -> Losses | None:
    """By step; by samples seen where steps have unlike numbers of them."""
    unit_a, unit_b = (size or 1.0 for size in sizes) if sizes is not None else (1.0, 1.0)
    curve_a, curve_b = _curve(a, unit_a), _curve(b, unit_b)
    if not curve_a or not curve_b:
        return None
    axis = "sample" if sizes is not None else "step"
    end = min(curve_a[-1][0], curve_b[-1][0])
    last_a, last_b = ([y for x, y in curve if 0.75 * end <= x <= end] for curve in (curve_a, curve_b))
    if min(len(last_a), len(last_b)) < FEWEST_LOSSES:
        return Losses(axis=axis, a=curve_a, b=curve_b)
    end_a, end_b = fmean(last_a), fmean(last_b)
    sure = half_width([(_variance_of_mean(last), BLOCKS - 1) for last in (last_a, last_b)])
    low, high = end_b - end_a - sure, end_b - end_a + sure
    return Losses(axis=axis, a=curve_a, b=curve_b, end_a=end_a, end_b=end_b, low=low, high=high)


def _variance_of_mean(values: Sequence[float]) -> float:
    means = [fmean(values[block]) for block in blocks_of(len(values))]
    return variance(means) / len(means)


def _curve(rank: RankTrace, unit: float) -> tuple[tuple[float, float], ...]:
    steps = rank.every_step()
    if steps is not None:
        return tuple((step.index * unit, step.loss) for step in steps if step.loss is not None)
    means = ((window.last_index * unit, window.loss.mean) for window in rank.windows)
    return tuple((x, y) for x, y in means if y is not None)


def _side(one: Account) -> dict[str, Any]:
    b = one.breakdown
    return {
        "trace": one.folder,
        "name": one.name,
        "ranks": one.ranks,
        "steps": b.steps,
        "step_ms": {"median": b.step_ms.quantile(0.5), "p95": b.step_ms.quantile(0.95)},
        "samples_per_s": b.samples_per_s,
        "parts": phases(b),
    }


def phases(b: Breakdown) -> dict[str, float]:
    """Milliseconds a step by phase, all lines of a phase together."""
    totals: dict[str, float] = {}
    for part in b.training:
        totals[part.name] = totals.get(part.name, 0.0) + part.ms / max(1, b.steps)
    return totals
