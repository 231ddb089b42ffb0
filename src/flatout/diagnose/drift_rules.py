"""A rule about steps that grow longer over the run, and what grows with them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.diagnose.gains import MIN_SHARE, gain_if_removed, rounded
from flatout.diagnose.hot_lines import in_training
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.finding import Finding
from flatout.trace import Step, Window

_MIN_GROWTH = 1.25  # times as long at the end as at the beginning
_PIECES = 9  # of the run, whose medians are compared
_MIN_STEPS_A_PIECE = 3
_MOST_DISORDER = 0.2  # of all pairs of pieces, that do not grow
_MIN_MEMORY_GROWTH = 1.2
_IN_WORDS = {"rest": "your own code", "data": "waiting for data"}


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
    spent_ms = sum(piece.step_ms * piece.steps for piece in pieces)
    share = max(0.0, 1 - first.step_ms * sum(piece.steps for piece in pieces) / spent_ms)
    if share < MIN_SHARE:
        return None
    grown = {name: ms - first.phases_ms.get(name, 0.0) for name, ms in last.phases_ms.items()}
    phase = max(grown, key=grown.__getitem__, default="")
    beside = _what_grows(metrics)
    lines = in_training(metrics.rank, (phase,)) if phase != "rest" else in_training(metrics.rank)
    title = f"steps grow from {first.step_ms:.3g} to {last.step_ms:.3g} ms over the run, most in "
    title += _IN_WORDS.get(phase, phase)
    if beside:
        title += f", and with them {beside}"
    return Finding(
        code="drift.slower",
        title=title,
        share=share,
        **gain_if_removed(share / 2, share),
        confidence=0.7,
        evidence={
            "first_third_ms": rounded(first.step_ms),
            "last_third_ms": rounded(last.step_ms),
            "grows_most": phase,
            "grown_ms": {name: rounded(ms) for name, ms in grown.items()},
        },
        advice="look for what is kept from step to step: a list or cache that is gone over, a graph behind a loss "
        "that is added up without .item() or .detach()",
        where=lines[0].hottest.where if lines else None,
    )


def _pieces(metrics: RankMetrics) -> list[_RunPart]:
    """The run in parts of about as many steps each: by its steps where all were kept, else by its windows."""
    steps = metrics.rank.every_step()
    if steps is None:
        return [_of_window(window) for window in metrics.rank.windows]
    size = max(_MIN_STEPS_A_PIECE, len(steps) // _PIECES)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [_of_steps(group) for group in groups if len(group) == size]


def _of_steps(steps: Sequence[Step]) -> _RunPart:
    phases: dict[str, float] = {}
    for step in steps:
        for span in step.spans:
            phases[span.name] = phases.get(span.name, 0.0) + span.host_ms / len(steps)
    return _RunPart(statistics.median(step.wall_ms for step in steps), phases, len(steps))


def _of_window(window: Window) -> _RunPart:
    phases: dict[str, float] = {}
    for key, sketch in window.spans_ms.items():
        name = key.partition("@")[0]
        phases[name] = phases.get(name, 0.0) + sketch.total / window.wall_ms.count
    return _RunPart(window.wall_ms.quantile(0.5) or 0.0, phases, window.wall_ms.count)


def _joined(pieces: Sequence[_RunPart]) -> _RunPart:
    names = {name for piece in pieces for name in piece.phases_ms}
    phases = {name: statistics.fmean(piece.phases_ms.get(name, 0.0) for piece in pieces) for name in names}
    return _RunPart(statistics.median(piece.step_ms for piece in pieces), phases, sum(piece.steps for piece in pieces))


def _keeps_growing(pieces: Sequence[_RunPart]) -> bool:
    """Whether nearly every later piece is slower than every earlier one: a load that came and went is no drift."""
    times = [piece.step_ms for piece in pieces]
    pairs = [(before, after) for place, before in enumerate(times) for after in times[place + 1 :]]
    return sum(after <= before for before, after in pairs) <= _MOST_DISORDER * len(pairs)


def _what_grows(metrics: RankMetrics) -> str:
    """What was seen to grow with the steps, in words; empty if nothing was."""
    grown = []
    pid = metrics.rank.info.pid
    memory = [p.rss_bytes for sample in metrics.samples for p in sample.processes if p.pid == pid and p.rss_bytes]
    if len(memory) >= _PIECES and memory[-1] > _MIN_MEMORY_GROWTH * memory[len(memory) // 4]:
        grown.append("the memory of the training process")
    on_gpu = [gpu.memory_used_bytes for gpu in metrics.gpu_samples if gpu.memory_used_bytes]
    if len(on_gpu) >= _PIECES and on_gpu[-1] > _MIN_MEMORY_GROWTH * on_gpu[len(on_gpu) // 4]:
        grown.append("memory on the GPU")
    clocks = [gpu.sm_clock_mhz for gpu in metrics.gpu_samples if gpu.sm_clock_mhz]
    if len(clocks) >= _PIECES and clocks[-1] < clocks[len(clocks) // 4] / 1.1:
        grown.append("heat (the GPU's clock falls)")
    return " and ".join(grown)
