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
from flatout.model.formatting import count_of, duration, ms
from flatout.model.records import to_json
from flatout.model.stats import (
    BLOCKS,
    ONE_RUN,
    Gain,
    Measured,
    block_means,
    blocks_of,
    enough,
    error_of,
    gain,
    half_width,
    variance_of_mean,
    warm_up,
)
from flatout.report.account import Account, RecordedRun
from flatout.report.chart_data import Panel, line, phase_name, step_times
from flatout.report.markup import as_text
from flatout.trace import RankTrace, Sketch

SCHEMA = 1
MIN_STEPS = 40
MIN_LOSSES = 8
MAX_DIFFERENCES = 100
NO_DIFFERENCE = "no difference shown"
SHORT_BATCHES = 0.02  # of the samples: what the short last batches of epochs may take away
SMALL_PHASE = 0.002  # of a step: not listed
INTERVALS = (
    "Intervals (95%) hold the noise within the two runs. What differs between any two runs of the same training only "
    "more runs can show."
)
# Facts that differ between any two runs, or follow from the others.
VOLATILE_FACTS = frozenset(("learning_rate", "memory_peak_bytes", "memory_reserved_bytes"))

Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurves:
    """The losses both runs read, and their means over the last quarter of the steps that both did."""

    axis: str
    end_a: float | None = None
    end_b: float | None = None
    low: float | None = None  # of the difference, B less A
    high: float | None = None

    @property
    def verdict(self) -> str:
        """lower, higher, no difference shown, or too few to compare."""
        if self.low is None or self.high is None:
            return "too few to compare"
        if self.low <= 0 <= self.high:
            return NO_DIFFERENCE
        return "lower" if self.high < 0 else "higher"

    def sentence(self) -> str:
        """The answer."""
        if self.end_a is None or self.end_b is None:
            return "Too few were read to compare; they are read in some steps only, fewer as a run goes on."
        apart = f"B − A = {self.end_b - self.end_a:+.4g} ({self.low:+.4g} to {self.high:+.4g}), {self.verdict}"
        return f"Loss over the last quarter of what both did: {self.end_a:.4g} and {self.end_b:.4g}; {apart}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The speed of a run without its first steps, in steps a second."""

    typical: Measured  # by the median step
    overall: Measured  # by all steps, slow ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Run A and run B. `typical` compares median steps, `overall` all steps."""

    a: Account
    b: Account
    per: str
    typical: Gain | None
    overall: Gain | None
    reasons: tuple[str, ...]  # why they cannot be compared; then there are no ratios
    cautions: tuple[str, ...]
    losses: LossCurves | None
    panels: tuple[Panel, ...]
    steady: tuple[Steady | None, Steady | None]

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

    @property
    def differences(self) -> list[tuple[str, Any, Any]]:
        """Settings and facts that are not the same in both."""
        ours, theirs = dict(settings_of(self.a)), dict(settings_of(self.b))
        names = [name for name in (ours | theirs) if ours.get(name) != theirs.get(name)]
        found = [name for name in names if name not in VOLATILE_FACTS]
        return [(name, ours.get(name), theirs.get(name)) for name in found[:MAX_DIFFERENCES]]

    def slower_than(self, pct: float) -> bool:
        """Whether B is shown to be slower by more than `pct` per cent, in either ratio."""
        ratios = [ratio for ratio in (self.typical, self.overall) if ratio is not None]
        return self.verdict == "slower" and any(ratio.slower_than(pct) for ratio in ratios)

    def sentence(self) -> str:
        """The answer: what leads, and the other ratio."""
        typical, overall, leading = self.typical, self.overall, self.leading
        if typical is None or overall is None or leading is None:
            return "Not comparable: " + "; ".join(self.reasons) + "."
        names, other = ("median step", "all steps, slow ones included"), overall
        if leading is overall:
            names, other = (names[1], names[0]), typical
        by_sample = ", by the sample" if self.per == "sample" else ""
        subject = "" if leading.verdict == NO_DIFFERENCE else "B is "
        said = f"{subject}{leading.verdict}"
        speed = f"{leading.value:.2f}× the speed of A, {leading.low:.2f} to {leading.high:.2f}"
        return f"{said[0].upper()}{said[1:]}: {speed} ({names[0]}{by_sample}). {names[1].capitalize()}: {other}."

    def figures(self) -> list[tuple[str, str, str]]:
        """Both runs side by side: name, A → B, speed of B."""
        a, b = _figures(self.a, self.steady[0]), _figures(self.b, self.steady[1])
        ratios = {"median step": self.typical, "samples a second": self.overall}
        return [(name, f"{a[name]} → {b[name]}", str(ratios.get(name) or "")) for name in a]

    def phases(self) -> list[tuple[str, str, str, str]]:
        """The phases of a step in both runs, those that changed most first: name, A, B, change."""
        a, b = phases_ms(self.a.breakdown), phases_ms(self.b.breakdown)
        least = SMALL_PHASE * (self.a.breakdown.step_ms.mean or 0.0)
        found = [(name, a.get(name, 0.0), b.get(name, 0.0)) for name in a | b]
        rows = []
        for name, before, after in sorted(found, key=lambda one: -abs(one[2] - one[1])):
            sign = "−" if after < before else "+"
            if max(before, after) >= least:
                rows.append((phase_name(name), ms(before), ms(after), sign + ms(abs(after - before))))
        return rows

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout compare --json`."""
        typical = overall = losses = None
        if self.typical is not None and self.overall is not None:
            typical = dataclasses.asdict(self.typical)
            overall = {**dataclasses.asdict(self.overall), "verdict": self.overall.verdict}
        if self.losses is not None:
            losses = {"verdict": self.losses.verdict, **dataclasses.asdict(self.losses)}
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
            "losses": losses,
        }


def phases_ms(b: Breakdown) -> dict[str, float]:
    """Milliseconds a step by phase, all lines of a phase together."""
    step_ms = b.training_ms / max(1, b.steps)
    return {part.name: b.share_of(part.name) * step_ms for part in b.training}


def _figures(one: Account, steady: Steady | None) -> dict[str, str]:
    b = one.breakdown
    median_ms, speed = b.step_ms.quantile(0.5) or 0.0, (b.samples_per_s or 0.0) * one.ranks
    if steady is not None:
        median_ms, speed = 1e3 / steady.typical.value, (_samples_a_step(one) or 0.0) * steady.overall.value
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
    reasons = []
    first, second = _training_set(a.account), _training_set(b.account)
    if first and second and first != second:
        reasons.append(f"they train on other data: {first} and {second}")
    for name, run, steady in (("A", a, steady_a), ("B", b, steady_b)):
        if steady is None:
            steps = count_of(run.account.breakdown.steps, "training step")
            reasons.append(f"{name} has {steps}, and fewer than {MIN_STEPS} say too little")
    # Short last batches now and then make no other size.
    alike = size_a == size_b or bool(size_a and size_b and abs(size_a / size_b - 1) < SHORT_BATCHES)
    if not alike and (size_a is None or size_b is None):
        reasons.append("one of them does not say how many samples a step has")
    per, unit_a, unit_b = "step", 1.0, 1.0
    if not alike:
        per, unit_a, unit_b = "sample", size_a or 1.0, size_b or 1.0
    typical = overall = None
    if not reasons and steady_a is not None and steady_b is not None:
        typical = _ratio(steady_a.typical, steady_b.typical, unit_b / unit_a)
        overall = _ratio(steady_a.overall, steady_b.overall, unit_b / unit_a)
    curves = _curve(a.trace.ranks[0], unit_a), _curve(b.trace.ranks[0], unit_b)
    return Comparison(
        a=a.account,
        b=b.account,
        per=per,
        typical=typical,
        overall=overall,
        reasons=tuple(reasons),
        cautions=tuple(_cautions(a, b, by_sample=not alike)),
        losses=_losses(per, *curves),
        panels=_panels(a, b, per, *curves),
        steady=(steady_a, steady_b),
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


def _training_set(one: Account) -> str:
    """The dataset of the first loader: its class, whatever module it came from, and its length."""
    for loader in one.facts.loaders:
        name = loader.dataset.rpartition(".")[2]
        return name if loader.length is None else f"{name} of {count_of(loader.length, 'sample')}"
    return ""


def _cautions(a: RecordedRun, b: RecordedRun, *, by_sample: bool) -> Iterator[str]:
    runs = (("A", a), ("B", b))
    yield from (f"{name}: {run.account.ended}" for name, run in runs if run.account.ended is not None)
    if by_sample:
        sizes = [count_of(round(_samples_a_step(run.account) or 0), "sample") for _, run in runs]
        yield f"a step of A has {sizes[0]}, one of B {sizes[1]}: time for each sample is compared, not for each step"
    first, second = a.account, b.account
    for what, one, other in (
        ("GPU", first.facts.gpu, second.facts.gpu),
        ("number of parameters", first.facts.parameters, second.facts.parameters),
        ("number of ranks", first.ranks, second.ranks),
    ):
        if one != other:
            yield f"another {what}: {as_text(one)} and {as_text(other)}"
    for name, run in runs:  # a difference may be that of others, who had the cores or the GPU meanwhile
        yield from (f"{name}: {finding.title}" for finding in run.findings if finding.code == "hardware.shared")


# How sure one can be


def _steady(rank: RankTrace) -> Steady | None:
    """The speed of a run; None of too few steps."""
    steps = rank.every_step()
    if steps is not None:
        times_ms = [step.wall_ms for step in steps][warm_up(len(steps)) :]
        if not enough(len(steps), sum(step.wall_ms for step in steps) / 1e3, MIN_STEPS):
            return None
        blocks = [times_ms[block] for block in blocks_of(len(times_ms))]
        means_ms, medians_ms = [fmean(block) for block in blocks], [median(block) for block in blocks]
        mean_ms, median_ms = fmean(times_ms), median(times_ms)
    else:
        sketches = [window.wall_ms for window in rank.windows[1:]]
        if len(sketches) < BLOCKS:
            return None
        merged = [Sketch.merged(sketches[block]) for block in blocks_of(len(sketches))]
        means_ms, medians_ms = [one.mean or 0.0 for one in merged], [one.quantile(0.5) or 0.0 for one in merged]
        every = Sketch.merged(sketches)
        mean_ms, median_ms = every.mean or 0.0, every.quantile(0.5) or 0.0
    return Steady(
        typical=Measured(value=1e3 / median_ms, error=error_of(medians_ms), freedom=len(medians_ms) - 1),
        overall=Measured(value=1e3 / mean_ms, error=error_of(means_ms), freedom=len(means_ms) - 1),
    )


def _ratio(a: Measured, b: Measured, samples: float) -> Gain:
    """The speed of B over A's; `samples`: those in a step of B for each of A."""
    return gain([a], [dataclasses.replace(b, value=b.value * samples)], ONE_RUN)


# What else differs


def settings_of(one: Account) -> list[tuple[str, Any]]:
    """What was in force and what the script read, by name."""
    facts = to_json(one.facts)
    settings, loaders, _ = (facts.pop(name, []) for name in ("settings", "loaders", "changes"))
    changes = [f"{change.name}={change.value}" for change in one.facts.changes if change.applied]
    found = [("command", " ".join(one.command)), ("ranks", one.ranks), ("loaders", len(loaders))]
    for number, loader in enumerate(loaders, 1):
        loader.pop("tokens", None)  # counted, not set
        found += _flat(f"loader {number}", loader)
    if changes:
        found.append(("changed by flatout", changes))
    for name, value in facts.items():
        found += _flat(name, value)
    for read in settings:
        found += _flat(read.get("file") or read["source"], read["values"])
    return found


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
        return [(step.index * unit, step.loss) for step in steps if step.loss is not None]
    means = ((window.last_index * unit, window.loss.mean) for window in rank.windows)
    return [(x, y) for x, y in means if y is not None]


def _losses(axis: str, a: Curve, b: Curve) -> LossCurves | None:
    if not a or not b:
        return None
    end = min(a[-1][0], b[-1][0])
    last_a, last_b = ([y for x, y in curve if 0.75 * end <= x <= end] for curve in (a, b))
    if min(len(last_a), len(last_b)) < MIN_LOSSES:
        return LossCurves(axis=axis)
    end_a, end_b = fmean(last_a), fmean(last_b)
    sure = half_width([(variance_of_mean(block_means(last)), BLOCKS - 1) for last in (last_a, last_b)])
    low, high = end_b - end_a - sure, end_b - end_a + sure
    return LossCurves(axis=axis, end_a=end_a, end_b=end_b, low=low, high=high)


def _panels(a: RecordedRun, b: RecordedRun, per: str, losses_a: Curve, losses_b: Curve) -> tuple[Panel, ...]:
    """Both runs in one plot, step by step; and their losses."""
    before, after = ("A", "other"), ("B", "compute")
    times = step_times(before, a.trace.ranks[0], dashed=True), step_times(after, b.trace.ranks[0])
    panels = [Panel(title="Step time by step", unit="ms", series=times, x_unit="steps")]
    curves = line(before, *_columns(losses_a), dashed=True), line(after, *_columns(losses_b))
    panels.append(Panel(title=f"Loss by {per}", unit="", series=curves, x_unit=f"{per}s"))
    return tuple(panel for panel in panels if all(series.x for series in panel.series))


def _columns(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]
