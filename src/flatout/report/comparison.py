"""Two runs → Comparison: is the second one faster, beyond what its own noise could explain?

The statistic is that of `flatout fix` (`model.stats`). The intervals hold the noise within the two
runs; what differs between any two runs of the same training (page cache, clocks, neighbours) only
more runs can show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from flatout.diagnose.breakdown import Breakdown
from flatout.diagnose.machine_rules import shared_cores, shared_gpu
from flatout.model.formatting import count_of, duration, ms
from flatout.model.records import NO_LOADER
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
from flatout.report.account import RecordedRun, dataset_in_words
from flatout.report.views import Plot, Plots, ReportSection, ReportView, Table, as_text, phase_name
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
Speeds = tuple[Measured, Measured]


class Losses(NamedTuple):
    """The mean losses over the last quarter of the steps that both runs did; the interval is of B less A."""

    axis: str
    end_a: float
    end_b: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """lower, higher, or no difference shown."""
        if self.low <= 0 <= self.high:
            return NO_DIFFERENCE
        return "lower" if self.high < 0 else "higher"

    def sentence(self) -> str:
        """The answer."""
        apart = f"B − A = {self.end_b - self.end_a:+.2g} ({self.low:+.2g} to {self.high:+.2g})".replace("-", "−")
        ends = f"{self.end_a:.4g} (A) and {self.end_b:.4g} (B)"
        return f"{ends} over the last quarter of what both did; {apart}: {self.verdict}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Run A and run B. `typical` compares median steps, `overall` all steps."""

    a: RecordedRun
    b: RecordedRun
    speeds: tuple[Speeds | None, Speeds | None]
    per: str
    typical: Gain | None
    overall: Gain | None
    reasons: tuple[str, ...]  # why they cannot be compared; then there are no ratios
    cautions: tuple[str, ...]

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
    def curves(self) -> list[list[tuple[float, float]]]:
        """The losses of each, by step or by samples seen."""
        curves = []
        for run in (self.a, self.b):
            unit = 1.0 if self.per == "step" else _size(run) or 1.0
            means = ((window.last_index * unit, window.loss.mean) for window in run.stretches)
            curves.append([(x, y) for x, y in means if y is not None])
        return curves

    @property
    def losses(self) -> Losses | None:
        """How the losses compare; None where one of the runs read too few."""
        curves = self.curves
        end = min(curve[-1][0] if curve else 0.0 for curve in curves)
        last_a, last_b = ([y for x, y in curve if 0.75 * end <= x <= end] for curve in curves)
        if min(len(last_a), len(last_b)) < MIN_LOSSES:
            return None
        end_a, end_b = fmean(last_a), fmean(last_b)
        sure = half_width([(variance_of_mean(block_means(last)), BLOCKS - 1) for last in (last_a, last_b)])
        return Losses(self.per, end_a, end_b, end_b - end_a - sure, end_b - end_a + sure)

    @property
    def differences(self) -> list[tuple[str, Any, Any]]:
        """Settings and facts that are not the same in both."""
        ours, theirs = dict(self.a.settings()), dict(self.b.settings())
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
        by_sample = ", by the sample" * (self.per == "sample")
        subject = "B is " * (leading.verdict != NO_DIFFERENCE)
        said = f"{subject}{leading.verdict}"
        speed = f"{leading.value:.2f}× the speed of A, {leading.low:.2f} to {leading.high:.2f}"
        return f"{said[0].upper()}{said[1:]}: {speed} ({names[0]}{by_sample}). {names[1].capitalize()}: {other}."

    def figures(self) -> list[tuple[str, str, str]]:
        """Both runs side by side: name, A → B, speed of B."""
        a, b = (_figures(*side) for side in zip((self.a, self.b), self.speeds, strict=True))
        ratios = {"median step": self.typical, "samples a second": self.overall}
        return [(name, f"{a[name]} → {b[name]}", str(ratios.get(name) or "")) for name in a]

    def phases(self, first: str, second: str) -> Table:
        """The phases of a step in both runs, those that changed most first."""
        a, b = phases_ms(self.a.breakdown), phases_ms(self.b.breakdown)
        least = SMALL_PHASE * (self.a.breakdown.step_ms.mean or 0.0)
        found = [(name, a.get(name, 0.0), b.get(name, 0.0)) for name in a | b]
        rows = []
        for name, before, after in sorted(found, key=lambda one: -abs(one[2] - one[1])):
            sign = "−" if after < before else "+"
            if max(before, after) >= least:
                rows.append((phase_name(name), ms(before), ms(after), sign + ms(abs(after - before))))
        title = "A step, the phases that changed most first"
        return Table(title, ("a step's time", first, second, "change"), rows)

    def plots(self) -> list[Plots]:
        """Both runs in one plot, step by step; and their losses."""
        from flatout.report.charts import line, step_times  # the page alone needs them

        times = step_times("A", "other", self.a, dashed=True), step_times("B", "compute", self.b)
        losses_a, losses_b = self.curves
        losses = line("A", "other", losses_a, dashed=True), line("B", "compute", losses_b)
        drawn = [
            Plots([Plot("Step time by step", "ms", times)], unit=""),
            Plots([Plot(f"Loss by {self.per}", "", losses)], unit=""),
        ]
        return [one for one in drawn if all(series.x for series in one.plots[0].series)]

    def view(self, *, brief: bool) -> ReportView:
        """What a comparison says."""
        losses = [known.sentence() for known in (self.losses,) if known is not None]
        rows = [(name, as_text(a), as_text(b)) for name, a, b in self.differences]
        differences = Table("Settings and facts", ("what differs", "A", "B"), rows, numbers_from=3)
        sections = [ReportSection("phases", "Where a step's time goes", [self.phases("A", "B")])]
        if not brief:
            sections.append(ReportSection("steps", "Step by step", self.plots()))
        sections.append(ReportSection("losses", "Loss", losses))
        sections.append(ReportSection("differences", "What differs", [differences]))
        if not brief:
            sections.append(ReportSection("intervals", "Intervals", [INTERVALS]))
        return ReportView(
            about=("flatout compare", f"{self.a.folder} (A)", f"{self.b.folder} (B)"),
            headlines=[self.sentence()],
            notes=self.cautions,
            figures=self.figures(),
            sections=sections,
        )

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout compare --json`."""
        typical, overall, losses = self.typical, self.overall, self.losses
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "per": self.per,
            "typical": dataclasses.asdict(typical) if typical is not None else None,
            "overall": {**dataclasses.asdict(overall), "verdict": overall.verdict} if overall is not None else None,
            "reasons": list(self.reasons),
            "cautions": list(self.cautions),
            "a": _to_json(self.a),
            "b": _to_json(self.b),
            "differences": [{"name": name, "a": a, "b": b} for name, a, b in self.differences],
            "losses": {"verdict": losses.verdict, **losses._asdict()} if losses is not None else None,
        }


def phases_ms(b: Breakdown) -> dict[str, float]:
    """Milliseconds a step by phase, all lines of a phase together."""
    step_ms = b.training_ms / max(1, b.steps)
    return {part.name: b.share_of(part.name) * step_ms for part in b.training}


def compare(a: RecordedRun, b: RecordedRun) -> Comparison:
    """Compare two runs: how much faster is the second?"""
    reasons = []
    data_a, data_b = _training_set(a), _training_set(b)
    if data_a and data_b and data_a != data_b:
        reasons.append(f"they train on other data: {data_a} and {data_b}")
    speeds_a, speeds_b = _speeds(a.first), _speeds(b.first)
    for name, run, speeds in (("A", a, speeds_a), ("B", b, speeds_b)):
        if speeds is None:
            steps = count_of(run.breakdown.steps, "training step")
            reasons.append(f"{name} has {steps}, and fewer than {MIN_STEPS} say too little")
    # Short last batches now and then make no other size.
    size_a, size_b = _size(a), _size(b)
    alike = size_a == size_b or bool(size_a and size_b and abs(size_a / size_b - 1) < SHORT_BATCHES)
    if not alike and (size_a is None or size_b is None):
        reasons.append("one of them does not say how many samples a step has")
    typical = overall = None
    if not reasons and speeds_a is not None and speeds_b is not None:
        samples = 1.0 if alike else (size_b or 1.0) / (size_a or 1.0)
        faster = [dataclasses.replace(speed, value=speed.value * samples) for speed in speeds_b]
        typical, overall = (gain([one], [other], ONE_RUN) for one, other in zip(speeds_a, faster, strict=True))
    return Comparison(
        a=a,
        b=b,
        speeds=(speeds_a, speeds_b),
        per="step" if alike else "sample",
        typical=typical,
        overall=overall,
        reasons=tuple(reasons),
        cautions=tuple(_cautions(a, b, by_sample=not alike)),
    )


def _cautions(a: RecordedRun, b: RecordedRun, *, by_sample: bool) -> Iterator[str]:
    """What to note before one believes the ratios."""
    runs = (("A", a), ("B", b))
    yield from (f"{name}: {run.ended}" for name, run in runs if run.ended is not None)
    if by_sample:
        sizes = [count_of(round(_size(run) or 0), "sample") for run in (a, b)]
        yield f"a step of A has {sizes[0]}, one of B {sizes[1]}: time for each sample is compared, not for each step"
    for what, one, other in (
        ("GPU", a.facts.gpu, b.facts.gpu),
        ("number of parameters", a.facts.parameters, b.facts.parameters),
        ("number of ranks", a.ranks, b.ranks),
    ):
        if one != other:
            yield f"another {what}: {as_text(one)} and {as_text(other)}"
    for name, run in runs:  # a difference may be that of others, who had the cores or the GPU meanwhile
        for others in (shared_cores(run.metrics[0]), shared_gpu(run.metrics[0])):
            if others is not None:
                yield f"in {name} {others.title}"


def _size(run: RecordedRun) -> float | None:
    b = run.breakdown
    return b.samples / b.steps * run.ranks if b.samples and b.steps else None


def _training_set(run: RecordedRun) -> str:
    """The dataset of the first loader: its class, whatever module it came from, and its length."""
    loader = next(iter(run.facts.loaders), NO_LOADER)
    return dataset_in_words(loader.class_name, loader.length)


def _figures(run: RecordedRun, speeds: Speeds | None) -> dict[str, str]:
    b = run.breakdown
    median_ms, speed = b.step_ms.quantile(0.5) or 0.0, (b.samples_per_s or 0.0) * run.ranks
    if speeds is not None:
        typical, overall = speeds
        median_ms, speed = 1e3 / typical.value, (_size(run) or 0.0) * overall.value
    return {
        "median step": ms(median_ms),
        "95th percentile": ms(b.step_ms.quantile(0.95) or 0.0),
        "samples a second": f"{speed:,.0f}" if speed else "not known",
        "steps": f"{b.steps:,}",
        "training time": duration(b.training_ms),
    }


def _to_json(run: RecordedRun) -> dict[str, Any]:
    b = run.breakdown
    return {
        "trace": run.folder,
        "name": run.first.info.name,
        "ranks": run.ranks,
        "steps": b.steps,
        "step_ms": {"median": b.step_ms.quantile(0.5), "p95": b.step_ms.quantile(0.95)},
        "samples_per_s": b.samples_per_s,
        "parts": phases_ms(b),
    }


def _speeds(rank: RankTrace) -> Speeds | None:
    """Its steps a second without the first steps: by the median step, and by all of them. None of too few."""
    steps = rank.every_step()
    if steps is None:
        sketches = [window.wall_ms for window in rank.windows[1:]]
        if len(sketches) < BLOCKS:
            return None
        merged = map(Sketch.merged, (sketches, *(sketches[block] for block in blocks_of(len(sketches)))))
        step_ms = [(sketch.quantile(0.5) or 0.0, sketch.mean or 0.0) for sketch in merged]
    else:
        if not enough(len(steps), sum(step.wall_ms for step in steps) / 1e3, MIN_STEPS):
            return None
        times_ms = [step.wall_ms for step in steps][warm_up(len(steps)) :]
        parts = (times_ms, *(times_ms[block] for block in blocks_of(len(times_ms))))
        step_ms = [(median(part), fmean(part)) for part in parts]
    medians_ms, means_ms = zip(*step_ms, strict=True)  # of all steps, and of each block
    return _speed(*medians_ms), _speed(*means_ms)


def _speed(step_ms: float, *blocks_ms: float) -> Measured:
    return Measured(value=1e3 / step_ms, error=error_of(blocks_ms), freedom=len(blocks_ms) - 1)
