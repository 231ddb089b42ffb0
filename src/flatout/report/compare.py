"""Two traces → Comparison: is the second run faster, beyond what its own noise could explain?

Steps are not independent (a slow disk, a garbage collection, the beat of sixteen workers), so the intervals come from
a bootstrap over blocks of neighbouring steps. They hold the noise within the two runs; what differs between any two
runs of the same training (page cache, clocks, neighbours) only more runs can show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.diagnose.breakdown import Breakdown
from flatout.diagnose.rules import diagnose
from flatout.fix.speed import Gain
from flatout.model.formatting import count_of, in_full
from flatout.model.stats import INTERVAL, RESAMPLES, Floats, resampled_means
from flatout.report.account import Account, account
from flatout.report.chart_data import grouped
from flatout.trace import RankTrace, Sketch, Trace

SCHEMA = 1
FEWEST_STEPS = 40
FEWEST_LOSSES = 8
MOST_BLOCKS = 250
VALUES_A_BLOCK = 16  # quantiles that stand for the steps of a window
MOST_DIFFERENCES = 100
_NO_DIFFERENCE = "no difference shown"
_SHORT_BATCHES = 0.02  # of the samples: what last short batches may take away

# Facts that differ between any two runs, or follow from the others.
_VOLATILE = ("learning_rate", "memory_peak_bytes", "memory_reserved_bytes", "own_cost", "settings", "loaders")


class Ratio(Gain):
    """How many times as fast B is as A, with the interval in which 95% of the resamples lie."""

    __slots__ = ()

    @property
    def verdict(self) -> str:
        """faster, slower or no difference shown."""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else _NO_DIFFERENCE

    def slower_than(self, pct: float) -> bool:
        """Whether B is shown to take more than `pct` per cent longer."""
        return self.high < 1 / (1 + pct / 100)


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
    """One side of the ratios: a run without its first steps."""

    median_ms: float
    samples_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Run A and run B. `typical` compares median steps, `overall` all of the time; per sample where batches differ."""

    a: Account
    b: Account
    per: str
    typical: Ratio | None
    overall: Ratio | None
    reasons: tuple[str, ...]  # why they cannot be compared; then there are no ratios
    cautions: tuple[str, ...]
    differences: tuple[tuple[str, Any, Any], ...]
    losses: Losses | None
    steady_a: Steady | None = None  # what the ratios are of
    steady_b: Steady | None = None

    @property
    def leading(self) -> Ratio | None:
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
    steps_a, steps_b = _blocks(first.ranks[0]), _blocks(second.ranks[0])
    reasons = [*_reasons(a, b), *_too_short("A", a, steps_a), *_too_short("B", b, steps_b)]
    size_a, size_b = _samples_a_step(a), _samples_a_step(b)
    per = "step" if _alike(size_a, size_b) else "sample"
    if per == "sample" and (size_a is None or size_b is None):
        reasons.append("one of them does not say how many samples a step has")
    typical = overall = None
    if not reasons and steps_a is not None and steps_b is not None:
        unit = (size_b or 1.0) / (size_a or 1.0) if per == "sample" else 1.0
        typical, overall = _ratio(steps_a, steps_b, unit, _medians), _ratio(steps_a, steps_b, unit, _means)
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
        steady_a=_steady(steps_a, size_a),
        steady_b=_steady(steps_b, size_b),
    )


# Whether they can be compared


def _reasons(a: Account, b: Account) -> Iterator[str]:
    sets = [_training_set(one) for one in (a, b)]
    if sets[0] is not None and sets[1] is not None and sets[0] != sets[1]:
        yield f"they train on other data: {_described(sets[0])} and {_described(sets[1])}"


def _training_set(one: Account) -> tuple[str, Any] | None:
    """The dataset of the first loader: its class, whatever module it came from, and its length."""
    loaders = one.facts.get("loaders") or ()
    if not loaders:
        return None
    return str(loaders[0].get("dataset", "")).rpartition(".")[2], loaders[0].get("length")


def _described(dataset: tuple[str, Any]) -> str:
    return f"{dataset[0]} of {count_of(dataset[1], 'sample')}" if isinstance(dataset[1], int) else dataset[0]


def _too_short(name: str, one: Account, blocks: _Blocks | None) -> Iterator[str]:
    if blocks is None:
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
    for fact, what in (("gpu", "card"), ("parameters", "number of parameters")):
        ours, theirs = a.facts.get(fact), b.facts.get(fact)
        if ours != theirs:
            yield f"another {what}: {_figure(ours)} and {_figure(theirs)}"
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
    sizes = [loader.get("batch_size") for loader in one.facts.get("loaders") or ()]
    mean = b.samples / b.steps
    size = next((s for s in sizes if isinstance(s, int) and s and abs(mean / s - 1) < _SHORT_BATCHES), None)
    return float(f"{(size or mean) * one.ranks:.6g}")


# How sure one can be


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Neighbouring steps in a row: values that stand for their times, and their mean."""

    step_ms: Floats  # blocks × values
    mean_ms: Floats  # blocks
    weights: Floats  # blocks: steps in each


def _blocks(rank: RankTrace) -> _Blocks | None:
    """The steps of a run in blocks, its first ones left out; None of too few."""
    steps = rank.every_step()
    if steps is not None:
        if len(steps) < FEWEST_STEPS:
            return None
        warm = min(20, len(steps) // 6)
        steady = np.asarray([step.wall_ms for step in steps[warm:]], dtype=np.float64)
        length = max(5, round(1.5 * len(steady) ** (1 / 3)))
        rows = steady[: len(steady) // length * length].reshape(-1, length)
        return _Blocks(rows, rows.mean(axis=1), np.full(len(rows), float(length)))
    sketches = [Sketch.merged(w.wall_ms for w in group) for group in grouped(rank.windows[1:], MOST_BLOCKS)]
    if len(sketches) < 5:
        return None
    places = [(n + 0.5) / VALUES_A_BLOCK for n in range(VALUES_A_BLOCK)]
    values = np.asarray([[sketch.quantile(q) or 0.0 for q in places] for sketch in sketches])
    return _Blocks(
        values,
        np.asarray([sketch.mean or 0.0 for sketch in sketches]),
        np.asarray([float(sketch.count) for sketch in sketches]),
    )


def _medians(blocks: _Blocks, chosen: npt.NDArray[np.intp]) -> Floats:
    some = (chosen[at : at + 100] for at in range(0, len(chosen), 100))  # all at once would take 60 MB and more
    return np.concatenate([np.median(blocks.step_ms[rows].reshape(len(rows), -1), axis=1) for rows in some])


def _means(blocks: _Blocks, chosen: npt.NDArray[np.intp]) -> Floats:
    weights = blocks.weights[chosen]
    means: Floats = (blocks.mean_ms[chosen] * weights).sum(axis=1) / weights.sum(axis=1)
    return means


def _steady(blocks: _Blocks | None, samples: float | None) -> Steady | None:
    if blocks is None:
        return None
    every = np.arange(len(blocks.mean_ms))[None, :]
    speed = samples / float(_means(blocks, every)[0]) * 1e3 if samples is not None else None
    return Steady(median_ms=float(_medians(blocks, every)[0]), samples_per_s=speed)


def _ratio(a: _Blocks, b: _Blocks, unit: float, of: Callable[[_Blocks, npt.NDArray[np.intp]], Floats]) -> Ratio:
    """The speed of B over A's; `unit`: samples in a step of B for each of A."""
    draw = np.random.default_rng(0)
    all_a, all_b = (np.arange(len(x.mean_ms))[None, :] for x in (a, b))
    some_a, some_b = (draw.integers(len(x.mean_ms), size=(RESAMPLES, len(x.mean_ms))) for x in (a, b))
    value = float(of(a, all_a)[0] / of(b, all_b)[0]) * unit
    low, high = np.percentile(of(a, some_a) / of(b, some_b) * unit, INTERVAL)
    return Ratio(value=value, low=min(float(low), value), high=max(float(high), value))


# What else differs


def _differences(a: Account, b: Account) -> Iterator[tuple[str, Any, Any]]:
    """Settings and facts that are not the same in both."""
    both = min(len(one.facts.get("loaders") or ()) for one in (a, b))
    ours, theirs = dict(_settings(a, both)), dict(_settings(b, both))
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)


def _settings(one: Account, loaders: int) -> Iterator[tuple[str, Any]]:
    """Of loaders that the other run did not have, one line each."""
    yield "command", " ".join(one.command)
    yield "ranks", one.ranks
    for number, loader in enumerate(one.facts.get("loaders") or (), 1):
        yield from _flat(f"loader {number}", loader if number <= loaders else loader.get("dataset"))
    for name, value in one.facts.items():
        if name == "changes":
            yield "changed by flatout", [f"{one['name']}={one['value']}" for one in value if one.get("applied")]
        elif name not in _VOLATILE:
            yield from _flat(name, value)
    for source in one.facts.get("settings") or ():
        yield from _flat(str(source.get("file") or source.get("source")), source.get("values") or {})


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
    last_a, last_b = (
        np.asarray([y for x, y in curve if 0.75 * end <= x <= end], dtype=np.float64) for curve in (curve_a, curve_b)
    )
    if min(len(last_a), len(last_b)) < FEWEST_LOSSES:
        return Losses(axis=axis, a=curve_a, b=curve_b)
    draw = np.random.default_rng(0)
    apart = resampled_means(last_b, draw) - resampled_means(last_a, draw)
    low, high = np.percentile(apart, INTERVAL)
    return Losses(
        axis=axis,
        a=curve_a,
        b=curve_b,
        end_a=float(last_a.mean()),
        end_b=float(last_b.mean()),
        low=float(low),
        high=float(high),
    )


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
