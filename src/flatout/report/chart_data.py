"""Trace → what a page draws, as plain data: bars in shares of their axis, series of at most 2,000 points.

waterfall   training's time, part by part, down to the work that has to be done
timelines   a typical and a bad step: the host's row, and the GPU's under it
panels      figures over the run, and what is marked on them
lanes       what each loader worker did with its life
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from flatout.diagnose.breakdown import KINDS_IN_WORDS, UNSPLIT, Breakdown
from flatout.report.account import card_of
from flatout.trace import RankTrace, Sample, Sketch, Step, Trace, Window, WorkerReport

T = TypeVar("T")

MOST_POINTS = 2_000
MOST_MARKS = 300
EARLIER = "work of earlier steps"
HAIR = 0.001  # of a step: what is shorter is not drawn for itself

# What each phase is called, and the family of causes that its colour stands for.
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
    "flatout": ("flatout itself, once", "other"),
    "rest": ("everything else", "other"),
    "forward": ("forward", "compute"),
    "loss": ("loss and glue", "compute"),
    "backward": ("backward", "compute"),
    "optimizer": ("optimizer", "compute"),
    UNSPLIT: ("computing", "compute"),
    EARLIER: (EARLIER, "compute"),
}
_PAUSES = ("loader start", "evaluation", "checkpoint")

# What a loader worker does with its life, in the colours of these families.
WORKING = {
    "computing": "compute",
    "waiting for a core": "sync",
    "blocked": "copy",
    "collating": "data",
    "waiting for work": "empty",
}


def words(phase: str) -> str:
    """A phase as a person would say it."""
    return PHASES.get(phase, (phase, ""))[0]


def family(phase: str) -> str:
    """The family of causes a phase belongs to."""
    return PHASES.get(phase, ("", "other"))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: `left` and `width` in shares of the axis. `idle`: the share of the bar in which the GPU stood idle."""

    label: str
    family: str
    left: float
    width: float
    ms: float
    idle: float | None = None
    where: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step, drawn. `anchored`: where the GPU's row begins is known, because the host was seen to wake it."""

    title: str
    step: Step
    host: tuple[Bar, ...]
    gpu: tuple[Bar, ...]
    anchored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot: seconds since the run began, and values."""

    name: str
    family: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot over the run."""

    title: str
    unit: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A stretch of the run that is not a plain training step."""

    name: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One loader worker's life, by what it was doing."""

    worker: WorkerReport
    alive_s: float
    bars: tuple[Bar, ...]


# Bars


def whole_run(b: Breakdown) -> tuple[Bar, ...]:
    """The wall time in one bar: what is not training, and training."""
    inside = {(part.name, part.where): part.ms for part in b.training}
    others = [(words(p.name), "other", p.ms) for p in b.parts if (p.name, p.where) not in inside]
    # A phase of training may occur outside it too (an evaluation after the last step): that part is not training's.
    for part in b.parts:
        extra = part.ms - inside.get((part.name, part.where), part.ms)
        if extra > 1e-6:
            others.append((f"{words(part.name)} after the last step", family(part.name), extra))
    return _in_a_row([*others, ("training", "compute", b.training_ms)], b.wall_ms)


def waterfall(b: Breakdown) -> tuple[Bar, ...]:
    """Training's time from 100% down: first what it is lost to, the largest loss first; at the end the work itself."""
    bars, left = [], 1.0
    for part in sorted(b.training, key=lambda part: family(part.name) == "compute"):
        left -= part.share
        idle = part.gpu_idle_ms / part.ms if part.gpu_idle_ms is not None and part.ms else None
        bars.append(_bar(part.name, max(0.0, left), part.share, part.ms, idle=idle, where=part.where))
    return tuple(bars)


def _bar(
    phase: str, left: float, width: float, ms: float, *, idle: float | None = None, where: str | None = None
) -> Bar:
    return Bar(label=words(phase), family=family(phase), left=left, width=width, ms=ms, idle=idle, where=where)


def _in_a_row(parts: Iterable[tuple[str, str, float]], axis_ms: float) -> tuple[Bar, ...]:
    """One after the other from the left: label, family, milliseconds."""
    bars, left = [], 0.0
    for label, kind, ms in parts:
        width = ms / axis_ms if axis_ms else 0.0
        bars.append(Bar(label=label, family=kind, left=left, width=width, ms=ms))
        left += width
    return tuple(bars)


# Steps


def timelines(rank: RankTrace) -> tuple[Timeline, ...]:
    """A typical step and a bad one, where there are steps that differ."""
    steps = [step for step in rank.steps if step.kind == "train" and step.spans]
    if not steps:
        return ()
    times = Sketch.merged(window.wall_ms for window in rank.windows)
    if not times.count:
        times = Sketch.of(step.wall_ms for step in steps)
    typical = _nearest(steps, times.quantile(0.5) or 0.0)
    bad = _nearest(steps, times.quantile(0.99) or 0.0)
    drawn = [timeline("A typical step (the median)", typical)]
    if bad is not typical and bad.wall_ms > typical.wall_ms:
        drawn.append(timeline("A bad step (the 99th percentile)", bad))
    return tuple(drawn)


def _nearest(steps: list[Step], wall_ms: float) -> Step:
    """The step closest in length, rather one that was looked at closely: that is worth a difference of 10%."""

    def distance(step: Step) -> float:
        apart = abs(math.log(max(step.wall_ms, 1e-6) / max(wall_ms, 1e-6)))
        return apart + 0.1 * (not _on_gpu(step)) + 0.1 * any(span.name == UNSPLIT for span in step.spans)

    return min(steps, key=distance)


def _on_gpu(step: Step) -> bool:
    return any(span.gpu_idle_ms is not None or span.gpu_busy_ms is not None for span in step.spans)


def timeline(title: str, step: Step) -> Timeline:
    """A step as two rows of bars on one axis."""
    gpu, offset_ms = _gpu_row(step)
    host = ((span.start_ms, span.host_ms, span.name, span.where) for span in step.spans)
    axis_ms = max([step.wall_ms, *((start + length) for start, length, _, _ in gpu)]) or 1.0
    return Timeline(
        title=title,
        step=step,
        host=tuple(
            _bar(name, start / axis_ms, length / axis_ms, length, where=where)
            for start, length, name, where in _joined(host, step.wall_ms)
        ),
        gpu=tuple(
            _bar(name, start / axis_ms, length / axis_ms, length, idle=float(is_idle))
            for start, length, name, is_idle in gpu
        ),
        anchored=offset_ms is not None,
    )


def _joined(tiles: Iterable[tuple[float, float, str, T]], wall_ms: float) -> list[tuple[float, float, str, T]]:
    """Tiles (start, length, name, kind) as one sees them: alike neighbours are one, a hair goes with the one before."""
    joined: list[tuple[float, float, str, T]] = []
    for start, length, name, kind in tiles:
        if joined and (length < HAIR * wall_ms or joined[-1][2:] == (name, kind)):
            joined[-1] = (joined[-1][0], start + length - joined[-1][0], *joined[-1][2:])
        else:
            joined.append((start, length, name, kind))
    return joined


def _gpu_row(step: Step) -> tuple[list[tuple[float, float, str, bool]], float | None]:
    """(start, length, name, idle?) of what the GPU did, end to end, and where it begins in the host's time.

    The events of a step tile the GPU's time, but do not say when the first of them was. Where the GPU stood idle it
    went on the moment the host had handed the span over: the longest such wait ties the two rows together.
    """
    tiles: list[tuple[float, float, str, bool]] = []
    at_ms, tie_ms, longest_ms = 0.0, None, 0.05
    for span in step.spans:
        for length, idle in ((span.gpu_idle_ms, True), (span.gpu_busy_ms, False)):
            if not length:
                continue
            tiles.append((at_ms, length, span.name, idle))
            at_ms += length
            if idle and length > longest_ms:
                longest_ms = length
                tie_ms = span.start_ms + span.host_ms - at_ms
    offset_ms = max(0.0, tie_ms) if tie_ms is not None else 0.0
    earlier = [(0.0, offset_ms, EARLIER, False)] if offset_ms else []
    shifted = ((start + offset_ms, length, name, idle) for start, length, name, idle in tiles)
    return _joined([*earlier, *shifted], step.wall_ms), tie_ms


# The run over time


def origin_s(trace: Trace, rank: RankTrace) -> float:
    """The moment from which the page counts."""
    moments = [rank.steps[0].start_s] if rank.steps else []
    moments += [window.start_s for window in rank.windows[:1]]
    moments += [s.time_s - s.interval_s for s in trace.samples.get(rank.info.host, ())[:1]]
    return min(moments, default=0.0)


def panels(trace: Trace, rank: RankTrace) -> tuple[Panel, ...]:
    """Everything that can be drawn over time, those without a figure left out."""
    zero_s = origin_s(trace, rank)
    steps = rank.every_step()
    drawn = _of_steps(steps, zero_s) if steps and len(steps) <= MOST_POINTS else _of_windows(rank.windows, zero_s)
    samples = trace.samples.get(rank.info.host, ())
    drawn += _of_samples(samples, card_of(rank, samples), zero_s)
    return tuple(panel for panel in drawn if panel.series)


def _panel(title: str, unit: str, x: Sequence[float], *curves: tuple[str, str, Sequence[float | None]]) -> Panel:
    """A plot of one curve (name, family, values) or two, the second dashed; without one of which nothing is known."""
    series = (line(name, kind, x, y, dashed=place > 0) for place, (name, kind, y) in enumerate(curves))
    return Panel(title=title, unit=unit, series=tuple(one for one in series if one.x))


def _of_steps(steps: list[Step], zero_s: float) -> list[Panel]:
    x = [step.start_s + step.wall_ms / 1e3 - zero_s for step in steps]
    waits = [sum(span.host_ms for span in step.spans if span.name == "data") for step in steps]
    return [
        _panel("Step time", "ms", x, ("each step", "compute", [step.wall_ms for step in steps])),
        _panel("Waiting for data", "ms a step", x, ("each step", "data", waits)),
        _panel("Loss", "", x, ("loss, as read", "sync", [step.loss for step in steps])),
    ]


def _of_windows(windows: Sequence[Window], zero_s: float) -> list[Panel]:
    groups = grouped(windows, MOST_POINTS)
    x = [group[0].start_s - zero_s for group in groups]
    times = [Sketch.merged(w.wall_ms for w in group) for group in groups]
    medians, slow = ([time.quantile(q) for time in times] for q in (0.5, 0.95))
    waits = [
        sum(w.spans_ms["data"].total for w in group if "data" in w.spans_ms) / max(1, time.count)
        for group, time in zip(groups, times, strict=True)
    ]
    losses = [Sketch.merged(w.loss for w in group).mean for group in groups]
    return [
        _panel("Step time", "ms", x, ("median", "compute", medians), ("95th percentile", "other", slow)),
        _panel("Waiting for data", "ms a step", x, ("mean", "data", waits)),
        _panel("Loss", "", x, ("mean", "sync", losses)),
    ]


def _of_samples(samples: Sequence[Sample], uuid: str | None, zero_s: float) -> list[Panel]:
    x = [sample.time_s - zero_s for sample in samples]
    cards = [next((gpu for gpu in sample.gpus if gpu.uuid == uuid), None) for sample in samples]

    def card(figure: str) -> list[float | None]:
        return [getattr(gpu, figure) if gpu is not None else None for gpu in cards]

    def host(figure: str) -> list[float | None]:
        return [getattr(sample.host, figure) for sample in samples]

    def disks(figure: str) -> list[float | None]:
        every = (sample.host.disks for sample in samples)
        return [sum(getattr(disk, figure) for disk in here) / 1e6 if here else None for here in every]

    active, util = ("SM active", "compute", card("sm_active_pct")), ("GPU-Util", "other", card("gpu_util_pct"))
    drawn, limit = ("drawn", "pause", card("power_w")), ("limit", "other", card("power_limit_w"))
    busy, waiting = ("busy", "data", host("cpu_pct")), ("waiting for storage", "other", host("iowait_pct"))
    read, written = ("read", "copy", disks("read_bytes_s")), ("written", "other", disks("write_bytes_s"))
    return [
        _panel("GPU", "%", x, active, util),
        _panel("Power", "W", x, drawn, limit),
        _panel("CPU", "% of all cores", x, busy, waiting),
        _panel("Disk", "MB/s", x, read, written),
    ]


def line(name: str, kind: str, x: Sequence[float], y: Sequence[float | None], *, dashed: bool = False) -> Series:
    """A series of what is there, thinned to the means of neighbours where there is too much of it."""
    points = [(at, value) for at, value in zip(x, y, strict=True) if value is not None and math.isfinite(value)]
    groups = grouped(points, MOST_POINTS)
    return Series(
        name=name,
        family=kind,
        x=tuple(round(group[0][0], 3) for group in groups),
        y=tuple(float(f"{sum(value for _, value in group) / len(group):.5g}") for group in groups),
        dashed=dashed,
    )


def grouped(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Neighbours together, in at most `most` groups of one size."""
    size = max(1, -(-len(items) // most))
    return [items[i : i + size] for i in range(0, len(items), size)]


def marks(trace: Trace, rank: RankTrace) -> tuple[Mark, ...]:
    """Evaluations, checkpoints and starts of loader workers; set-up, X-ray and ceiling. Of too many, the longest."""
    zero_s = origin_s(trace, rank)
    found, seen = [], []  # type: tuple[list[Mark], list[tuple[str, int]]]
    for kind, group in groupby(rank.steps, key=lambda step: KINDS_IN_WORDS.get(step.kind)):
        steps = list(group)
        if kind is not None:
            end_s = steps[-1].start_s + steps[-1].wall_ms / 1e3
            found.append(Mark(name=kind, start_s=steps[0].start_s - zero_s, length_s=end_s - steps[0].start_s))
        for step in steps:
            if step.kind in ("train", "tail"):
                here = _marks_in(step, zero_s)
                found += here.values()
                seen += ((name, step.index) for name in here)
    found += _marks_in_windows(rank.windows, seen, zero_s)
    longest = sorted(found, key=lambda mark: -mark.length_s)[:MOST_MARKS]
    return tuple(sorted(longest, key=lambda mark: mark.start_s))


def _marks_in(step: Step, zero_s: float) -> dict[str, Mark]:
    found = {}
    for name in _PAUSES:
        spans = [span for span in step.spans if span.name == name]
        if spans:
            end_ms = spans[-1].start_ms + spans[-1].host_ms
            start_s = step.start_s - zero_s + spans[0].start_ms / 1e3
            found[name] = Mark(name=words(name), start_s=start_s, length_s=(end_ms - spans[0].start_ms) / 1e3)
    return found


def _marks_in_windows(windows: Sequence[Window], seen: list[tuple[str, int]], zero_s: float) -> list[Mark]:
    """Pauses in steps of which only the window is left: one mark a window, at its beginning, of their mean length."""
    found = []
    for name in _PAUSES:
        known = sorted(index for pause, index in seen if pause == name)
        for window in windows:
            times = window.spans_ms.get(name)
            drawn = bisect_right(known, window.last_index) - bisect_left(known, window.first_index)
            if times is not None and times.count > drawn:
                length_s = (times.mean or 0.0) / 1e3
                found.append(Mark(name=words(name), start_s=window.start_s - zero_s, length_s=length_s))
    return found


# Loading


def lanes(workers: Iterable[WorkerReport]) -> tuple[Lane, ...]:
    """What each worker that loaded something did with its time; the bars of a lane fill it."""
    drawn = []
    for worker in workers:
        alive_s = worker.time_s - worker.born_s
        if not worker.samples or alive_s <= 0:
            continue
        blocked_s = max(0.0, worker.sample_wall_s - worker.sample_cpu_s)
        delay_s = min(blocked_s, worker.run_delay_s or 0.0)
        computing_s = min(worker.sample_cpu_s, worker.sample_wall_s)
        spent_s = [computing_s, delay_s, blocked_s - delay_s, worker.collate_s]
        spent_s.append(max(0.0, alive_s - sum(spent_s)))  # waiting for work
        parts = [(name, kind, 1e3 * s) for (name, kind), s in zip(WORKING.items(), spent_s, strict=True)]
        drawn.append(Lane(worker=worker, alive_s=alive_s, bars=_in_a_row(parts, 1e3 * sum(spent_s))))
    return tuple(sorted(drawn, key=lambda lane: (lane.worker.dataset, lane.worker.worker or 0)))
