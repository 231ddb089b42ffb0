"""Trace → what the charts of a page show: bars in shares of their axis, and series of few points.

waterfall   training's time, part by part, down to the work that has to be done
timelines   a typical and a bad step: the host's row, and the GPU's under it
panels      figures over the run, and the marks of evaluations, checkpoints and the like
lanes       what each loader worker did with its time
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from flatout.diagnose.breakdown import KINDS_IN_WORDS, UNSPLIT, Breakdown
from flatout.diagnose.rank_metrics import is_gpu_of
from flatout.trace import GpuSample, RankTrace, Sample, Sketch, Step, Trace, Window, WorkerReport

T = TypeVar("T")

MAX_POINTS = 1_000  # of a series: about one a pixel
MAX_MARKS = 300
EARLIER = "work of earlier steps"
SHORTEST_BAR = 0.001  # of a step: what is shorter is joined to the bar before it
SHORTEST_TIE_MS = 0.05  # a GPU that idles longer than this was woken by the host

# What each phase is called, and the family of causes that its color stands for.
PHASES = {
    "data": ("waiting for data", "data"),
    "loader start": ("starting the loader", "data"),
    "copy": ("copying to the GPU", "copy"),
    "sync": ("waiting for the GPU", "sync"),
    "held": ("the GPU has enough to do", "compute"),
    "evaluation": ("evaluation", "pause"),
    "checkpoint": ("checkpoint", "pause"),
    "logging": ("logging", "pause"),
    "gc": ("garbage collection", "pause"),
    "flatout": ("flatout's one-time setup", "other"),
    "rest": ("your code outside these phases", "other"),
    "forward": ("forward", "compute"),
    "loss": ("loss", "compute"),
    "backward": ("backward", "compute"),
    "optimizer": ("optimizer", "compute"),
    UNSPLIT: ("computing", "compute"),
    EARLIER: (EARLIER, "compute"),
}
PAUSES = ("loader start", "evaluation", "checkpoint")

WORKER_STATES = ("computing", "waiting for a core", "blocked", "collating", "waiting for work")

Curve = tuple[str, str]  # a series' name, and its family

# The plots of the hardware, each of a curve or two: by readings of the GPU, of the host, or of all disks.
HARDWARE = (
    ("GPU", "%", ("SM active", "compute", "sm_active_pct"), ("GPU-Util", "other", "gpu_util_pct")),
    ("Power", "W", ("drawn", "pause", "power_w"), ("limit", "other", "power_limit_w")),
    ("CPU", "% of all cores", ("busy", "data", "cpu_pct"), ("waiting for storage", "other", "iowait_pct")),
    ("Disk", "MB/s", ("read", "copy", "read_bytes_s"), ("written", "other", "write_bytes_s")),
)


def phase_name(phase: str) -> str:
    """A phase in words."""
    return PHASES.get(phase, (phase, ""))[0]


def phase_family(phase: str) -> str:
    """The family of causes a phase belongs to."""
    return PHASES.get(phase, ("", "other"))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: `left` and `width` in shares of the axis, `idle` the share of it in which the GPU was idle."""

    label: str
    family: str
    left: float
    width: float
    ms: float
    idle: float | None = None
    where: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step. `anchored`: the GPU's row is tied to the host's, which was seen to wake the GPU."""

    title: str
    step: Step
    host: tuple[Bar, ...]
    gpu: tuple[Bar, ...]
    anchored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot."""

    name: str
    family: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot. Its x axis is in seconds since the run began, or in `x_unit`."""

    title: str
    unit: str
    series: tuple[Series, ...]
    x_unit: str = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A stretch of the run that is not a plain training step."""

    name: str
    start_s: float
    length_s: float


# Bars


def whole_run(b: Breakdown) -> tuple[Bar, ...]:
    """The wall time in one bar: what is not training, and training."""
    training = {(part.name, part.where): part.ms for part in b.training}
    others = []
    for part in b.parts:
        beside_ms = part.ms - training.get((part.name, part.where), 0.0)
        if (part.name, part.where) not in training:
            others.append((phase_name(part.name), "other", part.ms))
        elif beside_ms > 1e-6:  # an evaluation after the last step, say
            others.append((f"{phase_name(part.name)} after the last step", phase_family(part.name), beside_ms))
    return _side_by_side([*others, ("training", "compute", b.training_ms)])


def waterfall(b: Breakdown) -> tuple[Bar, ...]:
    """Training's time from 100% down: what it is lost to, the largest loss first, then the work itself."""
    bars, left = [], 1.0
    for part in sorted(b.training, key=lambda part: phase_family(part.name) == "compute"):
        left -= part.share
        idle = None
        if part.gpu_idle_ms is not None and part.ms:
            idle = part.gpu_idle_ms / part.ms
        bars.append(_bar(part.name, max(0.0, left), part.share, part.ms, idle=idle, where=part.where))
    return tuple(bars)


def _bar(
    phase: str, left: float, width: float, ms: float, *, idle: float | None = None, where: str | None = None
) -> Bar:
    family = phase_family(phase)
    return Bar(label=phase_name(phase), family=family, left=left, width=width, ms=ms, idle=idle, where=where)


def _side_by_side(parts: Sequence[tuple[str, str, float]]) -> tuple[Bar, ...]:
    """Bars that fill their axis, one after the other: label, family, milliseconds."""
    bars, left = [], 0.0
    axis_ms = sum(ms for _, _, ms in parts) or 1.0
    for label, family, ms in parts:
        bars.append(Bar(label=label, family=family, left=left, width=ms / axis_ms, ms=ms))
        left += ms / axis_ms
    return tuple(bars)


# Steps


def timelines(rank: RankTrace) -> tuple[Timeline, ...]:
    """A typical step and a bad one, where there are steps that differ."""
    steps = [step for step in rank.steps if step.kind == "train" and step.spans]
    if not steps:
        return ()
    times = Sketch.merged(window.wall_ms for window in rank.windows)
    typical, bad = (_nearest(steps, times.quantile(q) or 0.0) for q in (0.5, 0.99))
    drawn = [timeline("A typical step (the median)", typical)]
    if bad.wall_ms > typical.wall_ms:
        drawn.append(timeline("A bad step (the 99th percentile)", bad))
    return tuple(drawn)


def _nearest(steps: list[Step], wall_ms: float) -> Step:
    """The step closest in length. One with GPU events and all its phases may be 10% further off for each."""

    def distance(step: Step) -> float:
        apart = abs(math.log(max(step.wall_ms, 1e-6) / max(wall_ms, 1e-6)))
        has_events = any(span.gpu_idle_ms is not None or span.gpu_busy_ms is not None for span in step.spans)
        return apart + 0.1 * (not has_events) + 0.1 * any(span.name == UNSPLIT for span in step.spans)

    return min(steps, key=distance)


def timeline(title: str, step: Step) -> Timeline:
    """A step as two rows of bars on one axis."""
    tiles, tie_ms = _gpu_tiles(step)
    host_tiles = ((span.start_ms, span.host_ms, span.name, span.where) for span in step.spans)
    axis_ms = max([step.wall_ms, *(start + length for start, length, _, _ in tiles)]) or 1.0
    host = [
        _bar(name, start / axis_ms, length / axis_ms, length, where=where)
        for start, length, name, where in _join_alike(host_tiles, step.wall_ms)
    ]
    gpu = [
        _bar(name, start / axis_ms, length / axis_ms, length, idle=float(is_idle))
        for start, length, name, is_idle in tiles
    ]
    return Timeline(title=title, step=step, host=tuple(host), gpu=tuple(gpu), anchored=tie_ms is not None)


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

    The events of a step tile the GPU's time, but do not say when the first of them was. An idle GPU goes on at the
    moment the host has launched the span's work, so the longest idle stretch ties the two rows together.
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


def panels(trace: Trace, rank: RankTrace) -> tuple[Panel, ...]:
    """Everything that can be drawn over time; a plot without a point is left out."""
    zero_s, steps = _start_s(trace, rank), rank.every_step()
    if steps and len(steps) <= 2 * MAX_POINTS:
        drawn = _step_panels(steps, zero_s)
    else:
        drawn = _window_panels(rank.windows, zero_s)
    samples = trace.samples.get(rank.info.host, ())
    gpus = [next((gpu for gpu in sample.gpus if is_gpu_of(rank, gpu)), None) for sample in samples]
    x = [sample.time_s - zero_s for sample in samples]
    for title, unit, *curves in HARDWARE:
        ys = [[_reading(*one, name) for one in zip(samples, gpus, strict=True)] for _, _, name in curves]
        drawn.append(_panel(title, unit, x, *(((n, f), y) for (n, f, _), y in zip(curves, ys, strict=True))))
    return tuple(panel for panel in drawn if panel.series)


def _reading(sample: Sample, gpu: GpuSample | None, name: str) -> float | None:
    values: list[float | None] = [getattr(disk, name) / 1e6 for disk in sample.host.disks or () if hasattr(disk, name)]
    values += [getattr(one, name) for one in (sample.host, gpu) if hasattr(one, name)]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _start_s(trace: Trace, rank: RankTrace) -> float:
    """The moment that is second 0 of the page."""
    moments = [step.start_s for step in rank.steps[:1]] + [window.start_s for window in rank.windows[:1]]
    moments += [sample.time_s - sample.interval_s for sample in trace.samples.get(rank.info.host, ())[:1]]
    return min(moments, default=0.0)


def _panel(title: str, unit: str, x: Sequence[float], *curves: tuple[Curve, Sequence[float | None]]) -> Panel:
    """A plot of one curve or two, the second dashed. Empty curves are left out."""
    series = [line(curve, x, y, dashed=place > 0) for place, (curve, y) in enumerate(curves)]
    return Panel(title=title, unit=unit, series=tuple(one for one in series if one.x))


def _step_panels(steps: list[Step], zero_s: float) -> list[Panel]:
    x = [step.start_s + step.wall_ms / 1e3 - zero_s for step in steps]
    waits = [sum(span.host_ms for span in step.spans if span.name == "data") for step in steps]
    return [
        _panel("Step time", "ms", x, (("each step", "compute"), [step.wall_ms for step in steps])),
        _panel("Waiting for data", "ms a step", x, (("each step", "data"), waits)),
        _panel("Loss", "", x, (("loss", "sync"), [step.loss for step in steps])),
    ]


def _window_panels(windows: Sequence[Window], zero_s: float) -> list[Panel]:
    groups = grouped(windows, MAX_POINTS)
    x = [group[0].start_s - zero_s for group in groups]
    times = [Sketch.merged(w.wall_ms for w in group) for group in groups]
    medians, slow = ([time.quantile(q) for time in times] for q in (0.5, 0.95))
    losses = [Sketch.merged(w.loss for w in group).mean for group in groups]
    waits = []
    for group, time in zip(groups, times, strict=True):
        waited_ms = sum(w.spans_ms["data"].total for w in group if "data" in w.spans_ms)
        waits.append(waited_ms / max(1, time.count))
    return [
        _panel("Step time", "ms", x, (("median", "compute"), medians), (("95th percentile", "other"), slow)),
        _panel("Waiting for data", "ms a step", x, (("mean", "data"), waits)),
        _panel("Loss", "", x, (("mean", "sync"), losses)),
    ]


def line(curve: Curve, x: Sequence[float], y: Sequence[float | None], *, dashed: bool = False) -> Series:
    """A series of the values that were measured, thinned to means of neighbours where there are too many."""
    points = [(at, value) for at, value in zip(x, y, strict=True) if value is not None and math.isfinite(value)]
    groups = grouped(points, MAX_POINTS)
    return Series(
        name=curve[0],
        family=curve[1],
        x=tuple(group[0][0] for group in groups),
        y=tuple(sum(value for _, value in group) / len(group) for group in groups),
        dashed=dashed,
    )


def step_times(curve: Curve, rank: RankTrace, *, dashed: bool = False) -> Series:
    """Step times by step; medians of windows where not every step was kept."""
    steps = rank.every_step()
    if steps is not None:
        return line(curve, [s.index for s in steps], [s.wall_ms for s in steps], dashed=dashed)
    groups = grouped(rank.windows, MAX_POINTS)
    medians = [Sketch.merged(w.wall_ms for w in group).quantile(0.5) for group in groups]
    return line(curve, [group[0].first_index for group in groups], medians, dashed=dashed)


def grouped(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Neighbours together, in at most `most` groups of one size."""
    size = max(1, -(-len(items) // most))
    return [items[i : i + size] for i in range(0, len(items), size)]


def marks(trace: Trace, rank: RankTrace) -> tuple[Mark, ...]:
    """Evaluations, checkpoints, starts of workers, set-up, X-ray, ceiling. Of too many, the longest."""
    zero_s = _start_s(trace, rank)
    found: list[Mark] = []
    for kind, group in groupby(rank.steps, key=lambda step: KINDS_IN_WORDS.get(step.kind)):
        steps = list(group)
        if kind is not None:
            end_s = steps[-1].start_s + steps[-1].wall_ms / 1e3
            found.append(Mark(name=kind, start_s=steps[0].start_s - zero_s, length_s=end_s - steps[0].start_s))
        for step in steps:
            if step.kind in ("train", "tail"):
                found += _pauses_in_step(step, zero_s)
    longest = sorted(found, key=lambda mark: -mark.length_s)[:MAX_MARKS]
    return tuple(sorted(longest, key=lambda mark: mark.start_s))


def _pauses_in_step(step: Step, zero_s: float) -> Iterator[Mark]:
    for name in PAUSES:
        spans = [span for span in step.spans if span.name == name]
        if spans:
            length_ms = spans[-1].start_ms + spans[-1].host_ms - spans[0].start_ms
            start_s = step.start_s - zero_s + spans[0].start_ms / 1e3
            yield Mark(name=phase_name(name), start_s=start_s, length_s=length_ms / 1e3)


# Loading


def lanes(workers: Iterable[WorkerReport]) -> list[tuple[str, float, list[float]]]:
    """Each worker that loaded something: its name, its milliseconds, and their shares by WORKER_STATES."""
    found = []
    for worker in sorted(workers, key=lambda worker: (worker.dataset, worker.worker or 0)):
        alive_s = worker.time_s - worker.born_s
        if not worker.samples or alive_s <= 0:
            continue
        blocked_s = max(0.0, worker.sample_wall_s - worker.sample_cpu_s)
        delay_s = min(blocked_s, worker.run_delay_s or 0.0)
        computing_s = min(worker.sample_cpu_s, worker.sample_wall_s)
        spent_s = [computing_s, delay_s, blocked_s - delay_s, worker.collate_s]
        spent_s.append(max(0.0, alive_s - sum(spent_s)))  # waiting for work
        name = "trainer" if worker.worker is None else f"worker {worker.worker}"
        found.append((name, 1e3 * alive_s, [s / sum(spent_s) for s in spent_s]))
    return found
