"""A run → what the page's charts show: bars in shares of their axis, and lines of at most 1,000 points.

timelines   a typical and a bad step: the host's row, and the GPU's under it
over_time   figures over the run, with evaluations, checkpoints and the like shaded
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from flatout.diagnose.breakdown import KINDS_IN_WORDS, UNSPLIT
from flatout.diagnose.machine import is_gpu_of
from flatout.model.formatting import ms
from flatout.report.account import RecordedRun
from flatout.report.views import (
    EARLIER,
    BarChart,
    ChartBar,
    Mark,
    Plot,
    Plots,
    Series,
    phase_family,
    phase_name,
)
from flatout.trace import GpuSample, RankTrace, Sample, Sketch, Step, Window

T = TypeVar("T")
Points = Iterable[tuple[float, float | None]]

MAX_POINTS = 1_000  # of a line: about one a pixel
MAX_MARKS = 300
SHORTEST_BAR = 0.001  # of a step: what is shorter is joined to the bar before it
SHORTEST_TIE_MS = 0.05  # a GPU that idles longer than this was woken by the host
PAUSES = ("loader start", "evaluation", "checkpoint")
FAMILIES = ("data", "copy", "sync", "pause", "compute", "other")

# The plots of the hardware, each of a line or two: by readings of the GPU, of the host, or of all disks.
HARDWARE = (
    ("GPU", "%", ("SM active", "compute", "sm_active_pct"), ("GPU-Util", "other", "gpu_util_pct")),
    ("Power", "W", ("drawn", "pause", "power_w"), ("limit", "other", "power_limit_w")),
    ("CPU", "% of all cores", ("busy", "data", "cpu_pct"), ("waiting for storage", "other", "iowait_pct")),
    ("Disk", "MB/s", ("read", "copy", "read_bytes_s"), ("written", "other", "write_bytes_s")),
)


# Steps


def timelines(rank: RankTrace) -> list[BarChart]:
    """A typical step and a bad one, where there are steps that differ."""
    steps = [step for step in rank.steps if step.kind == "train" and step.spans]
    if not steps:
        return []
    times = Sketch.merged(window.wall_ms for window in rank.windows)
    typical, bad = (_nearest(steps, times.quantile(q) or 0.0) for q in (0.5, 0.99))
    drawn = [timeline("A typical step (the median)", typical)]
    if bad.wall_ms > typical.wall_ms:
        drawn.append(timeline("A bad step (the 99th percentile)", bad))
    return drawn


def _nearest(steps: Sequence[Step], wall_ms: float) -> Step:
    """The step closest in length. One with GPU events and all its phases may be 10% further off for each."""

    def distance(step: Step) -> float:
        apart = abs(math.log(max(step.wall_ms, 1e-6) / max(wall_ms, 1e-6)))
        return apart + 0.1 * (not step.has_events) + 0.1 * any(span.name == UNSPLIT for span in step.spans)

    return min(steps, key=distance)


def timeline(title: str, step: Step) -> BarChart:
    """A step as two rows of bars on one axis."""
    gpu, tie_ms = _gpu_tiles(step)
    host = _join_alike(((span.start_ms, span.host_ms, span.name, span.where) for span in step.spans), step.wall_ms)
    axis_ms = max([step.wall_ms, *(start + length for start, length, _, _ in gpu)]) or 1.0

    def bar(start: float, length: float, phase: str, *, idle: bool = False, where: str | None = None) -> ChartBar:
        return ChartBar(phase_name(phase), phase_family(phase), start / axis_ms, length / axis_ms, length, idle, where)

    note = f"step {step.index:,}: {ms(step.wall_ms)}."
    rows = [("host", [bar(start, length, name, where=where) for start, length, name, where in host])]
    if not gpu:
        note += " No GPU was timed in this step."
    else:
        rows.append(("GPU", [bar(start, length, name, idle=idle) for start, length, name, idle in gpu]))
        if tie_ms is None:
            note += " The GPU never waited long enough to show how far it ran behind the host."
    every, legend = [one for _, bars in rows for one in bars], []
    for family in FAMILIES:
        labels = dict.fromkeys(one.label for one in every if one.family == family)
        if labels:
            legend.append((family, ", ".join(labels)))
    if any(one.idle for one in every):
        legend.append(("idle", "GPU idle, in the color of its cause"))
    return BarChart(title, note, rows, axis_ms, "ms", legend)


def _join_alike(tiles: Iterable[tuple[float, float, str, T]], wall_ms: float) -> list[tuple[float, float, str, T]]:
    """Tiles (start, length, name, kind): alike neighbours become one, a short one joins the one before."""
    joined: list[tuple[float, float, str, T]] = []
    for start, length, name, kind in tiles:
        if joined and (length < SHORTEST_BAR * wall_ms or joined[-1][2:] == (name, kind)):
            joined[-1] = (joined[-1][0], start + length - joined[-1][0], *joined[-1][2:])
        else:
            joined.append((start, length, name, kind))
    return joined


def _gpu_tiles(step: Step) -> tuple[list[tuple[float, float, str, bool]], float | None]:
    """(start, length, name, idle?) of what the GPU did, end to end, and where it begins in the host's time.

    The events of a step tile the GPU's time, but do not say when the first of them was. An idle GPU
    goes on at the moment the host has launched the span's work, so the longest idle stretch ties the
    two rows together.
    """
    tiles: list[tuple[float, float, str, bool]] = []
    at_ms, tie_ms, longest_ms = 0.0, None, SHORTEST_TIE_MS
    for span in step.spans:
        for length, is_idle in ((span.gpu_idle_ms or 0.0, True), (span.gpu_busy_ms or 0.0, False)):
            if length:
                tiles.append((at_ms, length, span.name, is_idle))
                at_ms += length
            if is_idle and length > longest_ms:
                longest_ms = length
                tie_ms = span.start_ms + span.host_ms - at_ms
    offset_ms = max(0.0, tie_ms or 0.0)
    shifted = [(start + offset_ms, length, name, is_idle) for start, length, name, is_idle in tiles]
    if offset_ms:
        shifted.insert(0, (0.0, offset_ms, EARLIER, False))
    return _join_alike(shifted, step.wall_ms), tie_ms


# The run over time


def over_time(run: RecordedRun) -> list[Plots]:
    """Everything that can be drawn over time; a plot without a point is left out."""
    rank, samples = run.first, run.trace.samples.get(run.first.info.host, ())
    moments = [step.start_s for step in rank.steps[:1]] + [window.start_s for window in rank.windows[:1]]
    moments += [sample.time_s - sample.interval_s for sample in samples[:1]]
    zero_s = min(moments, default=0.0)
    plots = _training(run.stretches, zero_s)
    gpus = [next((gpu for gpu in sample.gpus if is_gpu_of(rank, gpu)), None) for sample in samples]
    times_s = [sample.time_s - zero_s for sample in samples]
    for title, unit, *lines in HARDWARE:
        series: list[Series] = []
        for name, family, reading in lines:
            values = (_reading(sample, gpu, reading) for sample, gpu in zip(samples, gpus, strict=True))
            series.append(line(name, family, zip(times_s, values, strict=True), dashed=bool(series)))
        plots.append(Plot(title, unit, series))
    drawn = [plot._replace(series=[one for one in plot.series if one.x]) for plot in plots]
    drawn = [plot for plot in drawn if plot.series]
    return [Plots(drawn, marks=marks(rank, zero_s))] if drawn else []


def _training(windows: Sequence[Window], zero_s: float) -> list[Plot]:
    """Step times, waits and losses, by single steps or by many."""
    groups = _grouped(windows)
    times = [Sketch.merged(window.wall_ms for window in group) for group in groups]
    x = [group[0].start_s - zero_s for group in groups]
    waits = []
    for group, time in zip(groups, times, strict=True):
        waited_ms = sum(w.spans_ms["data"].total for w in group if "data" in w.spans_ms)
        waits.append(waited_ms / max(1, time.count))
    losses = [Sketch.merged(window.loss for window in group).mean for group in groups]
    one_by_one = all(time.count == 1 for time in times)
    medians, slow = (zip(x, [time.quantile(q) for time in times], strict=True) for q in (0.5, 0.95))
    step_times = [line("each step" if one_by_one else "median", "compute", medians)]
    if not one_by_one:
        step_times.append(line("95th percentile", "other", slow, dashed=True))
    return [
        Plot("Step time", "ms", step_times),
        Plot("Waiting for data", "ms a step", [line("mean", "data", zip(x, waits, strict=True))]),
        Plot("Loss", "", [line("loss", "sync", zip(x, losses, strict=True))]),
    ]


def _reading(sample: Sample, gpu: GpuSample | None, name: str) -> float | None:
    values: list[float | None] = [getattr(disk, name) / 1e6 for disk in sample.host.disks or () if hasattr(disk, name)]
    values += [getattr(one, name) for one in (sample.host, gpu) if hasattr(one, name)]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def line(name: str, family: str, points: Points, *, dashed: bool = False) -> Series:
    """A line of the values that were measured; means of neighbours where there are too many."""
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    groups = _grouped(known)
    x = [group[0][0] for group in groups]
    return Series(name, family, x, [sum(y for _, y in group) / len(group) for group in groups], dashed)


def step_times(name: str, family: str, run: RecordedRun, *, dashed: bool = False) -> Series:
    """Step times by step; medians where not every step was kept."""
    points = []
    for group in _grouped(run.stretches):
        points.append((group[0].first_index, Sketch.merged(window.wall_ms for window in group).quantile(0.5)))
    return line(name, family, points, dashed=dashed)


def _grouped(items: Sequence[T]) -> list[Sequence[T]]:
    """Neighbours together, in at most MAX_POINTS groups of one size."""
    size = max(1, -(-len(items) // MAX_POINTS))
    return [items[i : i + size] for i in range(0, len(items), size)]


def marks(rank: RankTrace, zero_s: float) -> list[Mark]:
    """Evaluations, checkpoints, starts of workers, set-up, X-ray, ceiling. Of too many, the longest."""
    found: list[Mark] = []
    for kind, group in groupby(rank.steps, key=lambda step: KINDS_IN_WORDS.get(step.kind)):
        steps = list(group)
        if kind is not None:
            end_s = steps[-1].start_s + steps[-1].wall_ms / 1e3
            found.append(Mark(kind, steps[0].start_s - zero_s, end_s - steps[0].start_s))
        for step in steps:
            if step.kind in ("train", "tail"):
                found += _pauses_in_step(step, zero_s)
    longest = sorted(found, key=lambda mark: -mark.length_s)[:MAX_MARKS]
    return sorted(longest, key=lambda mark: mark.start_s)


def _pauses_in_step(step: Step, zero_s: float) -> Iterator[Mark]:
    for name in PAUSES:
        spans = [span for span in step.spans if span.name == name]
        if spans:
            length_ms = spans[-1].start_ms + spans[-1].host_ms - spans[0].start_ms
            yield Mark(phase_name(name), step.start_s - zero_s + spans[0].start_ms / 1e3, length_ms / 1e3)
