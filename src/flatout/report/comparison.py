"""Two runs → Comparison: is the second one faster, beyond what its own noise could explain?

The statistic is that of `flatout fix` (`model.stats`). The intervals hold the noise within the two runs; what differs
between any two runs of the same training (page cache, clocks, neighbours) only more runs can show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from flatout.diagnose.breakdown import Breakdown
from flatout.model.formatting import count_of, duration, in_full, ms
from flatout.model.records import to_json
from flatout.model.stats import (
    BLOCKS,
    ONE_RUN,
    Gain,
    Measured,
    block_means,
    blocks_of,
    error_of,
    gain,
    half_width,
    variance_of_mean,
    warm_up,
)
from flatout.report.account import Account, RecordedRun
from flatout.report.chart_data import Panel, line, phase_name, step_times
from flatout.trace import RankTrace, Sketch

SCHEMA = 1
MIN_STEPS = 40
MIN_LOSSES = 8
MAX_DIFFERENCES = 100
NO_DIFFERENCE = "no difference shown"
SHORT_BATCHES = 0.02  # of the samples: what the short last batches of epochs may take away
SMALL_PHASE = 0.002  # of a step: not listed

# Facts that differ between any two runs, or follow from the others.
VOLATILE_FACTS = frozenset(
    ("changes", "learning_rate", "memory_peak_bytes", "memory_reserved_bytes", "own_cost", "settings", "loaders")
)

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurves:
    """The losses both runs read, and their means over the last quarter of the steps that both did."""

    axis: str
    a: Curve
    b: Curve
    end_a: float | None = None
    end_b: float | None = None
    low: float | None = None  # of the difference, B less A
    high: float | None = None

    @property
    def verdict(self) -> str:
        """lower, higher, no difference shown, or too few to compare."""
        if self.low is None or self.high is None:
            return "too few to compare"
        if self.high < 0:
            return "lower"
        if self.low > 0:
            return "higher"
        return NO_DIFFERENCE

    def sentence(self) -> str:
        """The answer."""
        if self.end_a is None or self.end_b is None:
            return "Losses: too few were read to compare; they are read in some steps only, fewer as a run goes on."
        verdict = self.verdict
        if verdict != NO_DIFFERENCE:
            verdict = f"B's is {verdict}"
        apart = f"B − A = {self.end_b - self.end_a:+.4g} ({self.low:+.4g} to {self.high:+.4g})"
        ends = f"{self.end_a:.4g} and {self.end_b:.4g}"
        return f"Loss over the last quarter of what both did: {ends}; {apart}: {verdict}."

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("axis", "end_a", "end_b", "low", "high")}
        return {"verdict": self.verdict, **values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The speed of a run without its first steps, in steps a second."""

    typical: Measured  # by the median step
    overall: Measured  # by all steps, slow ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Run A and run B. `typical` compares median steps, `overall` all the time; per sample if batches differ."""

    a: Account
    b: Account
    per: str
    typical: Gain | None
    overall: Gain | None
    reasons: tuple[str, ...]  # why they cannot be compared; then there are no ratios
    cautions: tuple[str, ...]
    differences: tuple[tuple[str, Any, Any], ...]
    losses: LossCurves | None
    panels: tuple[Panel, ...] = ()
    steady_a: Steady | None = None
    steady_b: Steady | None = None

    @property
    def leading(self) -> Gain | None:
        """What the verdict is about: the median step, or all steps where these say something else."""
        if self.typical is None or self.overall is None:
            return None
        agree = self.overall.verdict in (self.typical.verdict, NO_DIFFERENCE)
        return self.typical if agree else self.overall

    @property
    def verdict(self) -> str:
        """faster, slower, no difference shown, or not comparable."""
        return self.leading.verdict if self.leading is not None else "not comparable"

    def slower_than(self, pct: float) -> bool:
        """Whether B is shown to be slower by more than `pct` per cent, in its median step or over all its steps."""
        ratios = [ratio for ratio in (self.typical, self.overall) if ratio is not None]
        return self.verdict == "slower" and any(ratio.slower_than(pct) for ratio in ratios)

    def sentence(self) -> str:
        """The answer."""
        typical, overall = self.typical, self.overall
        if typical is None or overall is None:
            return "Not comparable: " + "; ".join(self.reasons) + "."
        by_sample = ", by the sample" if self.per == "sample" else ""
        median, first = f"is {typical.verdict}", f"B is {typical.verdict}"
        if typical.verdict == NO_DIFFERENCE:
            median, first = "shows no difference", "No difference shown"
        if self.leading is overall:
            return (
                f"Over all its steps, slow ones included, B is {overall.verdict}: {overall}{by_sample}. "
                f"Its median step {median}: {typical}."
            )
        speed = f"{typical.value:.2f}× the speed of A, {typical.low:.2f} to {typical.high:.2f}"
        first = f"{first}: {speed} (median step{by_sample})."
        if overall.verdict == typical.verdict and overall.low <= typical.value <= overall.high:
            return first
        return f"{first} Over all steps, slow ones included: {overall}, {overall.verdict}."

    def figures(self) -> list[tuple[str, str, str, str]]:
        """Both runs side by side: name, A, B, speed of B."""
        a, b = _figures(self.a, self.steady_a), _figures(self.b, self.steady_b)
        ratios = {"median step": self.typical, "samples a second": self.overall}
        return [(name, a[name], b[name], str(ratios.get(name) or "")) for name in a]

    def phases(self) -> list[tuple[str, str, str, str]]:
        """The phases of a step in both runs, those that changed most first: name, A, B, change."""
        a, b = phases_ms(self.a.breakdown), phases_ms(self.b.breakdown)
        change = {name: b.get(name, 0.0) - a.get(name, 0.0) for name in (*a, *b)}
        least = SMALL_PHASE * (self.a.breakdown.step_ms.mean or 0.0)
        rows = []
        for name in sorted(change, key=lambda name: -abs(change[name])):
            before, after = a.get(name, 0.0), b.get(name, 0.0)
            if max(before, after) >= least:
                apart = f"+{ms(change[name])}"
                if change[name] < 0:
                    apart = f"−{ms(-change[name])}"
                rows.append((phase_name(name), ms(before), ms(after), apart))
        return rows

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout compare --json`."""
        typical = overall = None
        if self.typical is not None and self.overall is not None:
            typical = dataclasses.asdict(self.typical)
            overall = {**dataclasses.asdict(self.overall), "verdict": self.overall.verdict}
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "per": self.per,
            "typical": typical,
            "overall": overall,
            "reasons": list(self.reasons),
            "cautions": list(self.cautions),
            "a": _side_to_json(self.a),
            "b": _side_to_json(self.b),
            "differences": [{"name": name, "a": a, "b": b} for name, a, b in self.differences],
            "losses": self.losses.to_json() if self.losses is not None else None,
        }


def phases_ms(b: Breakdown) -> dict[str, float]:
    """Milliseconds a step by phase, all lines of a phase together."""
    step_ms = b.training_ms / max(1, b.steps)
    return {part.name: b.share_of(part.name) * step_ms for part in b.training}


def _figures(one: Account, steady: Steady | None) -> dict[str, str]:
    b = one.breakdown
    median_ms = b.step_ms.quantile(0.5) or 0.0
    speed = (b.samples_per_s or 0.0) * one.ranks
    if steady is not None:
        median_ms = 1e3 / steady.typical.value
        speed = (_samples_a_step(one) or 0.0) * steady.overall.value
    return {
        "median step": ms(median_ms),
        "95th percentile": ms(b.step_ms.quantile(0.95) or 0.0),
        "samples a second": f"{speed:,.0f}" if speed else "not known",
        "steps": f"{b.steps:,}",
        "training time": duration(b.training_ms),
    }


def _side_to_json(one: Account) -> dict[str, Any]:
    b = one.breakdown
    return {
        "trace": one.folder,
        "name": one.name,
        "ranks": one.ranks,
        "steps": b.steps,
        "step_ms": {"median": b.step_ms.quantile(0.5), "p95": b.step_ms.quantile(0.95)},
        "samples_per_s": b.samples_per_s,
        "parts": phases_ms(b),
    }


def compare(a: RecordedRun, b: RecordedRun) -> Comparison:
    """Compare two runs: how much faster is the second?"""
    size_a, size_b = _samples_a_step(a.account), _samples_a_step(b.account)
    steady_a, steady_b = _steady(a.trace.ranks[0]), _steady(b.trace.ranks[0])
    reasons = [*_other_data(a.account, b.account)]
    for name, run, steady in (("A", a, steady_a), ("B", b, steady_b)):
        if steady is None:
            steps = run.account.breakdown.steps
            reasons.append(f"{name} has {steps:,} training steps, and fewer than {MIN_STEPS} say too little")
    by_sample = not _alike(size_a, size_b)
    if by_sample and (size_a is None or size_b is None):
        reasons.append("one of them does not say how many samples a step has")
    per, unit_a, unit_b = "step", 1.0, 1.0
    if by_sample:
        per, unit_a, unit_b = "sample", size_a or 1.0, size_b or 1.0
    typical = overall = None
    if not reasons and steady_a is not None and steady_b is not None:
        typical = _ratio(steady_a.typical, steady_b.typical, unit_b / unit_a)
        overall = _ratio(steady_a.overall, steady_b.overall, unit_b / unit_a)
    losses = _losses(per, _curve(a.trace.ranks[0], unit_a), _curve(b.trace.ranks[0], unit_b))
    return Comparison(
        a=a.account,
        b=b.account,
        per=per,
        typical=typical,
        overall=overall,
        reasons=tuple(reasons),
        cautions=tuple(_cautions(a, b, by_sample=by_sample)),
        differences=tuple(_differences(a.account, b.account))[:MAX_DIFFERENCES],
        losses=losses,
        panels=_panels(a, b, losses),
        steady_a=steady_a,
        steady_b=steady_b,
    )


# Whether they can be compared


def _samples_a_step(one: Account) -> float | None:
    """Samples in a step of all ranks; to six digits, so that a last short batch makes no difference."""
    b = one.breakdown
    if not b.samples or not b.steps:
        return None
    size = b.samples / b.steps
    for loader in one.facts.loaders:
        if loader.batch_size and abs(size / loader.batch_size - 1) < SHORT_BATCHES:
            size = loader.batch_size
    return float(f"{size * one.ranks:.6g}")


def _other_data(a: Account, b: Account) -> Iterator[str]:
    first, second = _training_set(a), _training_set(b)
    if first is not None and second is not None and first != second:
        yield f"they train on other data: {_dataset(*first)} and {_dataset(*second)}"


def _training_set(one: Account) -> tuple[str, int | None] | None:
    """The dataset of the first loader: its class, whatever module it came from, and its length."""
    if not one.facts.loaders:
        return None
    loader = one.facts.loaders[0]
    return loader.dataset.rpartition(".")[2], loader.length


def _dataset(name: str, length: int | None) -> str:
    return name if length is None else f"{name} of {count_of(length, 'sample')}"


def _cautions(a: RecordedRun, b: RecordedRun, *, by_sample: bool) -> Iterator[str]:
    runs = (("A", a), ("B", b))
    yield from (f"{name}: {run.account.ended}" for name, run in runs if run.account.ended is not None)
    size_a, size_b = _samples_a_step(a.account), _samples_a_step(b.account)
    if by_sample and size_a and size_b:
        sizes = f"a step of A has {in_full(size_a)} sample{'s' * (size_a != 1)}, one of B {in_full(size_b)}"
        yield f"{sizes}: time for each sample is compared, not for each step"
    elif by_sample:
        yield "their steps have unlike numbers of samples"
    first, second = a.account.facts, b.account.facts
    if first.gpu != second.gpu:
        yield f"another GPU: {first.gpu or 'none'} and {second.gpu or 'none'}"
    if first.parameters != second.parameters:
        yield f"another number of parameters: {_count(first.parameters)} and {_count(second.parameters)}"
    ranks_a, ranks_b = a.account.ranks, b.account.ranks
    if ranks_a != ranks_b:
        yield f"A ran on {count_of(ranks_a, 'rank')}, B on {ranks_b:,}: samples are those of all ranks"
    for name, run in runs:  # a difference may be that of others, who had the cores or the GPU meanwhile
        yield from (f"{name}: {finding.title}" for finding in run.findings if finding.code == "hardware.shared")


def _count(number: int | None) -> str:
    return f"{number:,}" if number is not None else "none"


def _alike(a: float | None, b: float | None) -> bool:
    """Whether steps have as many samples, but for a last short batch now and then."""
    return a == b or (a is not None and b is not None and abs(a / b - 1) < SHORT_BATCHES)


# How sure one can be


def _steady(rank: RankTrace) -> Steady | None:
    """The speed of a run; None of too few steps."""
    steps = rank.every_step()
    if steps is not None:
        times_ms = [step.wall_ms for step in steps][warm_up(len(steps)) :]
        if len(steps) < MIN_STEPS:
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
        typical=Measured(value=1e3 / median_ms, error=error_of(medians_ms)),
        overall=Measured(value=1e3 / mean_ms, error=error_of(means_ms)),
    )


def _ratio(a: Measured, b: Measured, samples: float) -> Gain:
    """The speed of B over A's; `samples`: those in a step of B for each of A."""
    return gain([a], [dataclasses.replace(b, value=b.value * samples)], ONE_RUN)


# What else differs


def _differences(a: Account, b: Account) -> Iterator[tuple[str, Any, Any]]:
    """Settings and facts that are not the same in both."""
    loaders = min(len(one.facts.loaders) for one in (a, b))
    ours, theirs = dict(_settings(a, loaders)), dict(_settings(b, loaders))
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
        applied = (change for change in one.facts.changes if change.applied)
        yield "changed by flatout", [f"{change.name}={change.value}" for change in applied]
    for name, value in to_json(one.facts).items():
        if name not in VOLATILE_FACTS:
            yield from _flat(name, value)
    for read in one.facts.settings:
        yield from _flat(read.file or read.source, read.values)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}: {key}", item)
    else:
        yield name, value


def _curve(rank: RankTrace, unit: float) -> Curve:
    """Losses by step, or by samples seen where a step has `unit` of them."""
    steps = rank.every_step()
    if steps is not None:
        return tuple((step.index * unit, step.loss) for step in steps if step.loss is not None)
    means = ((window.last_index * unit, window.loss.mean) for window in rank.windows)
    return tuple((x, y) for x, y in means if y is not None)


def _losses(axis: str, a: Curve, b: Curve) -> LossCurves | None:
    if not a or not b:
        return None
    end = min(a[-1][0], b[-1][0])
    last_a, last_b = ([y for x, y in curve if 0.75 * end <= x <= end] for curve in (a, b))
    if min(len(last_a), len(last_b)) < MIN_LOSSES:
        return LossCurves(axis=axis, a=a, b=b)
    end_a, end_b = fmean(last_a), fmean(last_b)
    sure = half_width([(variance_of_mean(block_means(last)), BLOCKS - 1) for last in (last_a, last_b)])
    low, high = end_b - end_a - sure, end_b - end_a + sure
    return LossCurves(axis=axis, a=a, b=b, end_a=end_a, end_b=end_b, low=low, high=high)


def _panels(a: RecordedRun, b: RecordedRun, losses: LossCurves | None) -> tuple[Panel, ...]:
    """Both runs in one plot, step by step; and their losses."""
    before = step_times("A", "other", a.trace.ranks[0], dashed=True)
    after = step_times("B", "compute", b.trace.ranks[0])
    panels = [Panel(title="Step time by step", unit="ms", series=(before, after), x_unit="steps")]
    if losses is not None:
        xs, ys = zip(*losses.a, strict=True)
        before = line("A", "other", xs, ys, dashed=True)
        xs, ys = zip(*losses.b, strict=True)
        curves = before, line("B", "compute", xs, ys)
        panels.append(Panel(title=f"Loss by {losses.axis}", unit="", series=curves, x_unit=f"{losses.axis}s"))
    return tuple(panel for panel in panels if all(series.x for series in panel.series))
