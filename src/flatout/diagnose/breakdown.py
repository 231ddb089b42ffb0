"""Trace → Breakdown: the wall time of a rank in parts that add up to it.

Training's own phases come from the windows, which cover every training step. In most steps only waits and
pauses were told apart; what they computed is split as in the steps that were looked at closely, and so is the
GPU's idle time. What is not plain training (set-up, the X-ray, a trial's replays, the tail) comes from the
raw steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from flatout.model.stats import enough
from flatout.trace import RankTrace, Sketch, Step

REST, UNSPLIT = "rest", "unsplit"
ENOUGH_STEPS, ENOUGH_MS = 20, 500.0  # less of training than this is not judged, unless its steps are slow
_COMPUTED = ("copy", "forward", "loss", "backward", "optimizer", REST)
_WARM_UP_STEPS = 3  # of a ceiling, at most
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
        return self.training_ms >= ENOUGH_MS and enough(self.steps, self.training_ms / 1e3, ENOUGH_STEPS)

    def share_of(self, name: str) -> float:
        """The share of training time a phase takes, all its lines together."""
        return sum((part.share for part in self.training if part.name == name), 0.0)


@dataclass(frozen=True, slots=True)
class _GpuIdle:
    """How long the GPU stood idle by phase, in the steps with events, and how many times as many steps there were."""

    ms: Mapping[str, float]
    scale: float | None

    def in_phase(self, key: str, most_ms: float) -> float | None:
        if self.scale is None or key not in self.ms:
            return None
        return min(most_ms, self.ms[key] * self.scale)


def breakdown(rank: RankTrace) -> Breakdown:
    """The breakdown of one rank."""
    wall, gpu_steps, samples = Sketch(), 0, None
    by_phase: defaultdict[str, float] = defaultdict(float)
    idle_ms: defaultdict[str, float] = defaultdict(float)
    for window in rank.windows:
        wall.merge(window.wall_ms)
        gpu_steps += window.gpu_steps
        if window.samples is not None:
            samples = (samples or 0) + window.samples
        for key, sketch in window.spans_ms.items():
            by_phase[key] += sketch.total
        for key, ms in window.gpu_idle_ms.items():
            idle_ms[key] += ms
    idle = _GpuIdle(idle_ms, wall.count / gpu_steps if gpu_steps else None)
    training, training_ms = split(by_phase), wall.total
    beside = _beside_training(rank)
    wall_ms = training_ms + sum(beside.values())
    whole = {key: beside.get(key, 0.0) + training.get(key, 0.0) for key in {**beside, **training}}
    speed = None
    if samples and training_ms:
        speed = samples / training_ms * 1e3
    return Breakdown(
        wall_ms=wall_ms,
        parts=_parts(whole, wall_ms, idle),
        training_ms=training_ms,
        training=_parts(training, training_ms, idle),
        steps=wall.count,
        step_ms=wall,
        samples=samples,
        samples_per_s=speed,
        ceiling_samples_per_s=_speed(rank.steps, "resident"),
        replay_samples_per_s=_speed(rank.steps, "replay"),
    )


def split(spans: Mapping[str, float]) -> dict[str, float]:
    """The same time by phase, where what was not looked at closely is shared out like what was."""
    shares = dict(spans)
    unsplit = shares.pop(UNSPLIT, 0.0)
    if not unsplit:
        return shares
    seen = {name: spans[name] for name in _COMPUTED if spans.get(name)} or {REST: 1.0}
    total = sum(seen.values())
    for name, ms in seen.items():
        shares[name] = shares.get(name, 0.0) + unsplit * (ms / total)
    return shares


def _beside_training(rank: RankTrace) -> dict[str, float]:
    """Milliseconds of what is not plain training, by what a person would call it."""
    beside: defaultdict[str, float] = defaultdict(float)
    for step in rank.steps:
        if step.kind == "tail":
            for span in step.spans:
                beside[REST if span.name == UNSPLIT else span.name] += span.host_ms
        elif step.kind != "train":
            beside[KINDS_IN_WORDS.get(step.kind, step.kind)] += step.wall_ms
    return beside


def _parts(spans: Mapping[str, float], total_ms: float, idle: _GpuIdle) -> tuple[Part, ...]:
    parts = []
    for key, ms in sorted(spans.items(), key=lambda item: -item[1]):
        name, _, where = key.partition("@")
        share = ms / total_ms if total_ms else 0.0
        parts.append(Part(name=name, ms=ms, share=share, gpu_idle_ms=idle.in_phase(key, ms), where=where or None))
    return tuple(parts)


def _speed(steps: tuple[Step, ...], kind: str) -> float | None:
    """Samples a second over the steps of a kind, the first few left out."""
    measured = [step for step in steps if step.kind == kind and step.samples]
    measured = measured[min(_WARM_UP_STEPS, max(1, len(measured) // 4)) :]
    if not measured:
        return None
    median_ms, samples = Sketch.of(step.wall_ms for step in measured).quantile(0.5), measured[0].samples
    return samples / median_ms * 1e3 if samples and median_ms else None
