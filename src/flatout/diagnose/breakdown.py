"""Trace → Breakdown: the wall time of a rank in parts that add up to it.

Training's own phases come from the windows, which cover every training step. In most of these only waits and pauses
were told apart; what they computed is split as the steps were that were looked at closely, and so is the GPU's idle
time. What is not plain training (set-up, the X-ray, a trial's replays, the tail) comes from the raw steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from flatout.trace import RankTrace, Sketch, Step

REST, UNSPLIT = "rest", "unsplit"
_COMPUTED = ("copy", "forward", "loss", "backward", "optimizer", REST)
ENOUGH_STEPS, ENOUGH_MS = 20, 500.0  # less of training than this is not judged
# Steps that are not plain training, as a person would call them.
KINDS_IN_WORDS = {
    "setup": "set-up",
    "warmup": "first step",
    "xray": "X-ray",
    "after xray": "X-ray",
    "replay": "ceiling",
    "resident": "ceiling",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One cause's share of the wall time. `gpu_idle_ms`: how long the GPU stood idle meanwhile, where known."""

    name: str
    ms: float
    share: float
    gpu_idle_ms: float | None = None
    where: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where one rank's time went. `parts` add up to `wall_ms`; `training` are the parts of the training steps alone."""

    wall_ms: float
    parts: tuple[Part, ...]
    training_ms: float
    training: tuple[Part, ...]
    steps: int
    step_ms: Sketch
    samples: int | None
    samples_per_s: float | None
    ceiling_samples_per_s: float | None = None
    replay_samples_per_s: float | None = None

    @property
    def enough(self) -> bool:
        """Whether there is enough of training to judge by."""
        return self.steps >= ENOUGH_STEPS and self.training_ms >= ENOUGH_MS

    def share_of(self, name: str) -> float:
        """The share of training time a phase takes, all its lines together."""
        return sum((part.share for part in self.training if part.name == name), 0.0)


def breakdown(rank: RankTrace) -> Breakdown:
    """The account of one rank."""
    wall, gpu_steps, samples = Sketch(), 0, None
    by_phase: defaultdict[str, float] = defaultdict(float)
    idle: defaultdict[str, float] = defaultdict(float)
    whole: defaultdict[str, float] = defaultdict(float)
    for window in rank.windows:
        wall.merge(window.wall_ms)
        gpu_steps += window.gpu_steps
        samples = (samples or 0) + window.samples if window.samples is not None else samples
        for key, sketch in window.spans_ms.items():
            by_phase[key] += sketch.total
        for key, ms in window.gpu_idle_ms.items():
            idle[key] += ms
    spans, training_ms = split(by_phase), wall.total
    scale = wall.count / gpu_steps if gpu_steps else None
    for step in rank.steps:
        if step.kind == "tail":
            for span in step.spans:
                whole[span.name if span.name != UNSPLIT else REST] += span.host_ms
        elif step.kind != "train":
            whole[KINDS_IN_WORDS.get(step.kind, step.kind)] += step.wall_ms
    wall_ms = training_ms + sum(whole.values())
    for key, ms in spans.items():
        whole[key] += ms
    return Breakdown(
        wall_ms=wall_ms,
        parts=_parts(whole, wall_ms, idle, scale),
        training_ms=training_ms,
        training=_parts(spans, training_ms, idle, scale),
        steps=wall.count,
        step_ms=wall,
        samples=samples,
        samples_per_s=samples / training_ms * 1e3 if samples and training_ms else None,
        ceiling_samples_per_s=_speed(rank.steps, "resident"),
        replay_samples_per_s=_speed(rank.steps, "replay"),
    )


def split(spans: dict[str, float]) -> dict[str, float]:
    """The same time by phase, where what was not looked at closely is shared out as what was."""
    unsplit = spans.get(UNSPLIT, 0.0)
    seen = {name: spans[name] for name in _COMPUTED if spans.get(name)} or {REST: 1.0}
    more = {name: unsplit * (ms / sum(seen.values())) for name, ms in seen.items()} if unsplit else {}
    return {name: spans.get(name, 0.0) + more.get(name, 0.0) for name in {**spans, **more} if name != UNSPLIT}


def _parts(spans: dict[str, float], total_ms: float, idle: dict[str, float], scale: float | None) -> tuple[Part, ...]:
    parts = []
    for key, ms in sorted(spans.items(), key=lambda item: -item[1]):
        name, _, where = key.partition("@")
        idle_ms = min(ms, idle[key] * scale) if scale is not None and key in idle else None
        share = ms / total_ms if total_ms else 0.0
        parts.append(Part(name=name, ms=ms, share=share, gpu_idle_ms=idle_ms, where=where or None))
    return tuple(parts)


def _speed(steps: tuple[Step, ...], kind: str) -> float | None:
    """Samples a second over the steps of a kind, the first few left out as warm-up."""
    chosen = [s for s in steps if s.kind == kind and s.samples][3:]
    times = Sketch.of(s.wall_ms for s in chosen)
    median, per_step = times.quantile(0.5), chosen[0].samples if chosen else None
    return per_step / median * 1e3 if median and per_step else None
