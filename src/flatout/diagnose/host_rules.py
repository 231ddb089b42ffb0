"""Rules about what the host does while the GPU waits: the script's own code, pauses, copies, waits
for the GPU in mid-step, and steps that grow longer over the run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flatout.diagnose.breakdown import (
    COMPUTING,
    OWN_CODE,
    REST,
    UNSPLIT,
    HotFunction,
    HotLine,
    called_from,
    in_training,
    lines_of,
    lines_where,
    outside_torch,
)
from flatout.diagnose.gains import gain_if_gpu_spared, gain_if_host_spared, gain_if_removed
from flatout.diagnose.rank_metrics import MIN_SHARE, RankMetrics, rounded
from flatout.model.causes import BY_CODE, Finding
from flatout.model.frameworks import FRAMEWORKS
from flatout.trace import Window
from flatout.trace.downsample import window_of

_MIN_OWN_CODE = 0.05  # of the time: a loop's ordinary bookkeeping takes less
_MIN_OWN_CODE_WITHOUT_LINES = 0.25  # where nothing says which code that is
_MOST_LINES = 8
_MIN_COPY_SHARE = 0.01  # page-locking costs nothing, so less of it is worth a word
_MIN_WAIT_SHARE = 0.01
_MANY_COPIES = 16  # in a step
_MIN_GROWTH = 1.25  # times as long at the end as at the beginning
_PIECES = 9  # of the run, whose medians are compared
_MIN_STEPS_A_PIECE = 3
_MOST_DISORDER = 0.2  # of all pairs of pieces, that do not grow
_MIN_MEMORY_GROWTH = 1.2
_HELD_UP = 0.25  # of the time that training waits for a core
_OTHERS_CORES = 0.25  # of all, that others keep busy meanwhile
_LEAST_AT_START = 0.2  # of the first part of the run: growth that bends leads a straight line below that
_IN_WORDS = {"rest": "your own code", "data": "waiting for data", "unsplit": "computing, or in your own code"}


def own_code(metrics: RankMetrics) -> Finding | None:
    """The script's own code takes the time: metrics, pictures, averages of weights, a simulator."""
    share, saved = metrics.share(REST), metrics.saved_without(REST)
    if saved is not None:
        share = min(share, saved)  # while the GPU is at work, it costs nothing
    of_pauses = {where: part for lines in metrics.beside_pauses.values() for where, part in lines.items()}
    share = max(0.0, share - sum(of_pauses.values()))
    functions = lines_where(in_training(metrics.rank), lambda line: line.where not in of_pauses)
    place = "outside forward, backward and optimizer"
    inside = metrics.own_code_inside
    most = max(inside, key=inside.__getitem__)
    if inside[most] > share:
        functions, place = outside_torch(in_training(metrics.rank, (most,))), "beside its tensor operations"
    share += sum(inside.values())
    if share < (_MIN_OWN_CODE if functions else _MIN_OWN_CODE_WITHOUT_LINES):
        return None
    title = f"the script's own code {place} takes {share:.0%} of the time"
    advice = "do it less often, on the GPU, in another process, or in code that is vectorized"
    framework = _framework_around(metrics, functions[0].hottest) if functions else None
    if framework is not None:
        title = f"{framework}'s own loop, {place}, takes {share:.0%} of the time"
        advice = "fewer callbacks, metrics and logs, or larger batches and so fewer steps"
    elif functions:
        first = functions[0]
        name = "at the top level of the script" if first.name == "<module>" else f"in {first.name}"
        title += f", {first.share:.0%} of that {name}"
        if first.hottest.called and first.hottest.share >= first.share / 2:
            title += f", which calls {first.hottest.called}"
    return Finding(
        code="host.python",
        title=title,
        share=share,
        **gain_if_removed(share, share / 2),
        confidence=0.85 if functions else 0.6,
        evidence={"share": rounded(share), "lines": as_evidence(functions)},
        advice=advice,
        where=functions[0].hottest.where if functions else None,
    )


def _framework_around(metrics: RankMetrics, hottest: HotLine) -> str | None:
    """The library whose training loop this line calls: it is known for that, or forward passes come
    out of the same call."""
    library = (hottest.called or "torch").partition(".")[0]
    if any(library in framework.packages and framework.loop_files for framework in FRAMEWORKS):
        return library
    calls = {(line.where, line.called) for line in lines_of(in_training(metrics.rank, ("forward",)))}
    return library if library != "torch" and (hottest.where, hottest.called) in calls else None


def as_evidence(functions: tuple[HotFunction, ...]) -> list[dict[str, object]]:
    """The hottest lines, for people and for JSON."""
    lines = sorted(lines_of(functions), key=lambda line: -line.share)
    return [{"where": str(line), "share": rounded(line.share)} for line in lines[:_MOST_LINES]]


def pause(phase: str, code: str, advice: str) -> Callable[[RankMetrics], Finding | None]:
    """The rule for a phase in which training stands still."""

    def rule(metrics: RankMetrics) -> Finding | None:
        share = metrics.share(phase) + sum(metrics.beside_pauses.get(phase, {}).values())
        if share < MIN_SHARE:
            return None
        times = sum(any(span.name == phase for span in step.spans) for step in metrics.steps)
        title, confidence = f"training stands still for {phase} {share:.0%} of the time", 0.9
        if times == 1 and len(metrics.steps) == metrics.breakdown.steps:
            title, confidence = f"{title}, all at once", 0.3  # how often it comes, one does not tell
        return Finding(
            code=code,
            title=title,
            share=share,
            **gain_if_removed(share, share / 2),  # half as often, or hardly ever
            confidence=confidence,
            evidence={
                "share": rounded(share),
                "steps_recorded_with_it": times,
                "lines": as_evidence(in_training(metrics.rank, (phase,))),
            },
            change=next(iter(BY_CODE[code].changes), None),
            advice=advice,
            where=called_from(metrics.rank, phase),
        )

    return rule


def slow_copies(metrics: RankMetrics) -> Finding | None:
    """Copies from memory that is not page-locked, in many pieces, or while the GPU computes nothing."""
    xray = metrics.xray
    if xray is None or not metrics.step_ms:
        return None
    xrayed_ms, host = xray.steps * metrics.step_ms, metrics.share("copy")
    copies = max((sum(span.name == "copy" for span in step.spans) for step in metrics.steps_with_events), default=0)
    evidence = {"copies_a_step": copies, "copy_share_of_host": rounded(host), "copies_ms": dict(xray.copies_ms)}
    pageable_ms = xray.copies_ms.get("HtoD Pageable", 0.0)
    pageable = max(pageable_ms / xrayed_ms, host)
    if pageable_ms and pageable >= _MIN_COPY_SHARE:
        return Finding(
            code="copy.pageable",
            title=f"batches are copied from memory that is not page-locked: {pageable:.0%} of the step",
            share=pageable,
            **gain_if_host_spared(metrics, pageable),
            confidence=0.9,
            evidence=evidence,
            change="pin_memory",
            value=True,
            advice="DataLoader(pin_memory=True) and .to(device, non_blocking=True)",
        )
    if copies > _MANY_COPIES and host >= MIN_SHARE:
        return Finding(
            code="copy.fragmented",
            title=f"{copies} copies to the GPU in a step",
            share=host,
            **gain_if_host_spared(metrics, host * (1 - 1 / copies)),
            confidence=0.6,
            evidence=evidence,
            advice="join the tensors of a batch before copying them",
        )
    at_the_same_time_ms = max(0.0, sum(xray.busy_by_phase_ms.values()) - xray.busy_ms)
    alone = (xray.copies_ms.get("HtoD Pinned", 0.0) - at_the_same_time_ms) / xrayed_ms
    if alone < MIN_SHARE or (metrics.busy_share or 0.0) < 0.5:
        return None
    return Finding(
        code="copy.blocking",
        title=f"copies to the GPU take {alone:.0%} of the step, in which it computes nothing",
        share=alone,
        **gain_if_gpu_spared(metrics, alone),
        confidence=0.6,
        evidence=evidence,
        change="device_prefetch",
        value=True,
        advice="copy the next batch on a side stream: flatout.feed.to_device",
    )


def waits_for_gpu(metrics: RankMetrics) -> Finding | None:
    """`.item()` and the like: the host waits for the GPU, and the GPU then for the host."""
    saved = metrics.saved_without("sync")
    if saved is None or not metrics.on_gpu:
        return None
    if metrics.busy_share is not None:
        saved = min(saved, 1 - metrics.busy_share)  # a wait for useful work costs nothing
    if saved < _MIN_WAIT_SHARE:
        return None
    waits = sorted((p for p in metrics.breakdown.training if p.name == "sync"), key=lambda part: -part.ms)
    # Replayed batches are waited for as well: a measured ceiling says nothing about these waits.
    gain = gain_if_removed(saved)
    if metrics.ceiling is None:
        gain = gain_if_host_spared(metrics, saved)
    lines = [{"where": p.where, "ms_a_step": rounded(p.ms / metrics.breakdown.steps)} for p in waits[:_MOST_LINES]]
    return Finding(
        code="sync.item",
        title=f"the host waits for the GPU in mid-step, and the GPU then for the host: {saved:.1%} of the step",
        share=saved,
        **gain,
        confidence=0.7,
        evidence={"lines": lines},
        advice="keep the value on the GPU, and read it only when it is printed",
        where=waits[0].where if waits else None,
    )


# Drift


@dataclass(frozen=True, slots=True)
class _RunPart:
    """Some steps that follow each other: how long one takes, and each phase of it."""

    step_ms: float
    phases_ms: dict[str, float]
    steps: int


def drift(metrics: RankMetrics) -> Finding | None:
    """Steps take longer and longer."""
    pieces = _pieces(metrics)
    if len(pieces) < _PIECES:
        return None
    third = len(pieces) // 3
    first, last = _joined(pieces[:third]), _joined(pieces[-third:])
    if not first.step_ms or last.step_ms < _MIN_GROWTH * first.step_ms or not _keeps_growing(pieces):
        return None
    share, sure = _grown(pieces, _at_the_start_ms(pieces)), _grown(pieces, first.step_ms)
    grows = _what_grows(metrics)
    if share < MIN_SHARE or (_others_hold_it_up(metrics) and not grows):
        return None
    grown = {name: ms - first.phases_ms.get(name, 0.0) for name, ms in last.phases_ms.items()}
    phase = max(grown, key=grown.__getitem__, default="")
    phases = {REST: OWN_CODE, UNSPLIT: (*OWN_CODE, *COMPUTING)}.get(phase, (phase,))
    functions = in_training(metrics.rank, phases)
    functions = outside_torch(functions) or functions
    title = f"steps grow from {first.step_ms:.3g} to {last.step_ms:.3g} ms over the run, most in "
    title += " and with them ".join([_IN_WORDS.get(phase, phase), *grows])
    return Finding(
        code="drift.slower",
        title=title,
        share=share,
        **gain_if_removed(share, sure / 2),
        confidence=0.7,
        evidence={
            "first_third_ms": rounded(first.step_ms),
            "last_third_ms": rounded(last.step_ms),
            "grows_most": phase,
            "grown_ms": {name: rounded(ms) for name, ms in grown.items()},
            "lines": as_evidence(functions),
        },
        advice="look for what is kept from step to step: a list or cache that is gone over, a graph behind a loss "
        "that is added up without .item() or .detach()",
        where=functions[0].hottest.where if functions else None,
    )


def _grown(pieces: Sequence[_RunPart], before_ms: float) -> float:
    """The share of the run by which its steps took longer than `before_ms`."""
    spent_ms = sum(piece.step_ms * piece.steps for piece in pieces)
    return max(0.0, 1 - before_ms * sum(piece.steps for piece in pieces) / spent_ms)


def _at_the_start_ms(pieces: Sequence[_RunPart]) -> float:
    """How long a step took before it grew: the line through all parts of the run, at its beginning."""
    ends = list(itertools.accumulate(piece.steps for piece in pieces))
    middles = [end - piece.steps / 2 for end, piece in zip(ends, pieces, strict=True)]
    at_start_ms = statistics.linear_regression(middles, [piece.step_ms for piece in pieces]).intercept
    return min(max(at_start_ms, _LEAST_AT_START * pieces[0].step_ms), pieces[0].step_ms)


def _pieces(metrics: RankMetrics) -> list[_RunPart]:
    """The run in parts of about as many steps each: by its steps where all were kept, else by its windows."""
    steps = metrics.rank.every_step()
    if steps is None:
        return [_part(window, window.wall_ms.quantile(0.5) or 0.0) for window in metrics.rank.windows]
    size = max(_MIN_STEPS_A_PIECE, len(steps) // _PIECES)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    whole = (group for group in groups if len(group) == size)
    return [_part(window_of(group), statistics.median(step.wall_ms for step in group)) for group in whole]


def _part(window: Window, step_ms: float) -> _RunPart:
    phases: dict[str, float] = {}
    for key, sketch in window.spans_ms.items():
        name = key.partition("@")[0]
        phases[name] = phases.get(name, 0.0) + sketch.total / window.wall_ms.count
    return _RunPart(step_ms, phases, window.wall_ms.count)


def _joined(pieces: Sequence[_RunPart]) -> _RunPart:
    names = {name for piece in pieces for name in piece.phases_ms}
    phases = {name: statistics.fmean(piece.phases_ms.get(name, 0.0) for piece in pieces) for name in names}
    return _RunPart(statistics.median(piece.step_ms for piece in pieces), phases, sum(piece.steps for piece in pieces))


def _keeps_growing(pieces: Sequence[_RunPart]) -> bool:
    """Whether nearly every later piece is slower than every earlier one: a load that came and went is
    no drift."""
    times = [piece.step_ms for piece in pieces]
    pairs = [(before, after) for place, before in enumerate(times) for after in times[place + 1 :]]
    return sum(after <= before for before, after in pairs) <= _MOST_DISORDER * len(pairs)


def _others_hold_it_up(metrics: RankMetrics) -> bool:
    """Whether training waits for cores that others have: those who come late make later steps longer."""
    machine = metrics.machine
    others = (machine.cores_others or 0.0) / (machine.cores_of_machine or 1)
    return (machine.trainer_delay or 0.0) >= _HELD_UP and others >= _OTHERS_CORES


def _what_grows(metrics: RankMetrics) -> list[str]:
    """What was seen to grow with the steps, in words."""
    machine = metrics.machine
    rss_bytes = machine.of_trainer("rss_bytes", machine.samples)
    gpu_bytes = (gpu.memory_used_bytes for gpu in machine.gpu_samples)
    seen = {
        "the memory of the training process": _growth(rss_bytes) > _MIN_MEMORY_GROWTH,
        "memory on the GPU": _growth(gpu_bytes) > _MIN_MEMORY_GROWTH,
        "heat (the GPU's clock falls)": _growth(gpu.sm_clock_mhz for gpu in machine.gpu_samples) < 1 / 1.1,
    }
    return [what for what, grows in seen.items() if grows]


def _growth(figures: Iterable[float | None]) -> float:
    """The last value as a multiple of that after a quarter of the time; 1 where there are too few."""
    known = [figure for figure in figures if figure]
    return known[-1] / known[len(known) // 4] if len(known) >= _PIECES else 1.0
