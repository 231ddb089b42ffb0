"""Trace → where a rank's time went: by phase (Breakdown), and by line of the user's own code (HotFunction).

The parts of a Breakdown add up to the wall time. Training's own phases come from the windows, which cover every
training step. In most steps only waits and pauses were told apart; what they computed is split as in the steps that
were looked at closely, and so is the GPU's idle time. What is not plain training (set-up, the X-ray, a trial's replays,
the tail) comes from the raw steps.

Time of a line is counted for the innermost line of the user's, with what it called in a library. Lines of one function
are told apart only as far as the looks are sure of them (see inside/stacks.py): the function comes first.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flatout.model.records import Frame, Stacks
from flatout.model.stats import enough
from flatout.trace import RankTrace, Sketch, Step

REST, UNSPLIT = "rest", "unsplit"
ENOUGH_STEPS, ENOUGH_MS = 20, 500.0  # less of training than this is not judged, unless its steps are slow
OWN_CODE = (REST, UNSPLIT)  # phases of the training thread that are the script's own code
SAMPLES, COLLATE = "samples", "collate"  # phases of a worker
ENOUGH_LOOKS = 10  # fewer show a line by accident
_COMPUTED = ("copy", "forward", "loss", "backward", "optimizer", REST)
_IN_THE_LOOP = ("data", "forward", "loss", "backward", "optimizer")  # phases that the training loop itself calls
_WARM_UP_STEPS = 3  # of a ceiling, at most
# What a line calls that is no tensor operation, where its call leaves no frame of Python: numpy in C, a loop, a sleep.
_OUTSIDE_TORCH = re.compile(
    r"\b(np|numpy|scipy|sklearn|pd|cv2|Image|time|json|math|random|re)\.|\.(numpy|tolist|item)\(\)|^(for|while)\b|print\("
)
_NO_FRAME = Frame(where="", function="")
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
    """One phase's share of the wall time. `gpu_idle_ms`: how long the GPU stood idle meanwhile, where known."""

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
    if gpu_steps:  # the steps with events stand for all of them
        idle_ms = defaultdict(float, {key: ms * wall.count / gpu_steps for key, ms in idle_ms.items()})
    training, training_ms = split(by_phase), wall.total
    beside = _beside_training(rank)
    wall_ms = training_ms + sum(beside.values())
    whole = {key: beside.get(key, 0.0) + training.get(key, 0.0) for key in {**beside, **training}}
    return Breakdown(
        wall_ms=wall_ms,
        parts=_parts(whole, wall_ms, idle_ms),
        training_ms=training_ms,
        training=_parts(training, training_ms, idle_ms),
        steps=wall.count,
        step_ms=wall,
        samples=samples,
        samples_per_s=samples / training_ms * 1e3 if samples and training_ms else None,
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


def _parts(spans: Mapping[str, float], total_ms: float, idle_ms: Mapping[str, float]) -> tuple[Part, ...]:
    parts = []
    for key, ms in sorted(spans.items(), key=lambda item: -item[1]):
        name, _, where = key.partition("@")
        share = ms / total_ms if total_ms else 0.0
        idle = min(ms, idle_ms[key]) if key in idle_ms else None
        parts.append(Part(name=name, ms=ms, share=share, gpu_idle_ms=idle, where=where or None))
    return tuple(parts)


def _speed(steps: tuple[Step, ...], kind: str) -> float | None:
    """Samples a second over the steps of a kind, the first few left out."""
    measured = [step for step in steps if step.kind == kind and step.samples]
    measured = measured[min(_WARM_UP_STEPS, max(1, len(measured) // 4)) :]
    if not measured:
        return None
    median_ms, samples = Sketch.of(step.wall_ms for step in measured).quantile(0.5), measured[0].samples
    return samples / median_ms * 1e3 if samples and median_ms else None


# By line


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLine:
    """One line of the user's: its share of the time of the phases that were asked for."""

    where: str  # file:line
    function: str
    source: str | None
    called: str | None  # what it called in a library, as `numpy.histogram2d`
    share: float
    looks: int

    @property
    def outside_torch(self) -> bool:
        """Whether the line is seen to do something else than tensor operations."""
        if self.called is not None:
            return not self.called.startswith(("torch.", "flatout."))
        return bool(_OUTSIDE_TORCH.search((self.source or "").strip()))

    def __str__(self) -> str:
        """`utils.py:32 f_score → numpy.histogram2d`."""
        return f"{self.where} {self.function}" + (f" → {self.called}" if self.called else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HotFunction:
    """A function of the user's with its lines, the hottest first."""

    name: str
    share: float
    lines: tuple[HotLine, ...]

    @property
    def hottest(self) -> HotLine:
        """The line that most of its time went to."""
        return self.lines[0]


def in_training(rank: RankTrace, phases: Collection[str] = OWN_CODE) -> tuple[HotFunction, ...]:
    """Where the training thread of a rank was in these phases."""
    return hot_functions((stacks for stacks in rank.stacks if stacks.dataset is None), phases)


def in_workers(rank: RankTrace, dataset: str, phases: Collection[str] = (SAMPLES,)) -> tuple[HotFunction, ...]:
    """Where the workers that load a dataset were; with `num_workers=0` the training process."""
    workers = [stacks for stacks in rank.stacks if stacks.dataset == dataset]
    return hot_functions(workers, phases) if workers else in_training(rank, ("data",))


def outside_torch(functions: Iterable[HotFunction]) -> tuple[HotFunction, ...]:
    """Those of their lines that do something else than tensor operations, with their share of all of them."""
    return of_lines(functions, operator.attrgetter("outside_torch"))


def of_lines(functions: Iterable[HotFunction], keep: Callable[[HotLine], bool]) -> tuple[HotFunction, ...]:
    """Some of their lines, with their share of all that are kept."""
    lines = [(function, line) for function in functions for line in function.lines if keep(line)]
    total = sum(line.share for _, line in lines) or 1.0
    kept: defaultdict[HotFunction, list[HotLine]] = defaultdict(list)
    for function, line in lines:
        kept[function].append(replace(line, share=line.share / total))
    some = [replace(f, share=sum(line.share for line in own), lines=tuple(own)) for f, own in kept.items()]
    return tuple(sorted(some, key=lambda function: -function.share))


def called_from(rank: RankTrace, phase: str) -> str | None:
    """The line of the training loop that most of a phase is called from: where its stacks leave those of training."""
    stacks = [one for one in rank.stacks if one.dataset is None]
    loop = {_functions(own) for all_stacks in stacks for own, _ in _own_frames(all_stacks, _IN_THE_LOOP)}
    begins = {chain[:length] for chain in loop for length in range(1, len(chain) + 1)}
    seconds: defaultdict[str, float] = defaultdict(float)
    for all_stacks in stacks:
        for own, spent_s in _own_frames(all_stacks, (phase,)):
            chain = _functions(own)
            shared = sum(chain[:length] in begins for length in range(1, len(chain) + 1))
            if shared:
                seconds[own[shared - 1].where] += spent_s
    return max(seconds, key=seconds.__getitem__, default=None)


def _own_frames(stacks: Stacks, phases: Collection[str]) -> Iterator[tuple[list[Frame], float]]:
    """The user's frames of each stack of these phases, outermost first, and how long it was seen."""
    for one in stacks.stacks:
        if one.phase in phases:
            frames = [stacks.frames[number] for number in one.frames if number < len(stacks.frames)]
            yield [frame for frame in frames if frame.own], one.seconds


def _functions(frames: Iterable[Frame]) -> tuple[tuple[str, str], ...]:
    return tuple((frame.where.rpartition(":")[0], frame.function) for frame in frames)


def hot_functions(all_stacks: Iterable[Stacks], phases: Collection[str]) -> tuple[HotFunction, ...]:
    """The functions that took the time of these phases, the hottest first; none where too few looks say so."""
    seconds: defaultdict[tuple[Frame, str | None], float] = defaultdict(float)
    looks: defaultdict[tuple[Frame, str | None], int] = defaultdict(int)
    for stacks in all_stacks:
        for one in stacks.stacks:
            if one.phase not in phases:
                continue
            frames = [stacks.frames[number] for number in one.frames if number < len(stacks.frames)]
            own = next((frame for frame in reversed(frames) if frame.own), _NO_FRAME)
            beyond = next((frame for frame in frames if not frame.own), None)
            seconds[own, _library_call(beyond)] += one.seconds
            looks[own, _library_call(beyond)] += one.looks
    total_s = sum(seconds.values())
    if sum(looks.values()) < ENOUGH_LOOKS or not total_s:
        return ()
    by_function: defaultdict[tuple[str, str], list[HotLine]] = defaultdict(list)
    for (frame, called), spent_s in sorted(seconds.items(), key=lambda item: -item[1]):
        line = HotLine(
            where=frame.where,
            function=frame.function,
            source=frame.source,
            called=called,
            share=spent_s / total_s,
            looks=looks[frame, called],
        )
        if frame.where:
            by_function[frame.where.rpartition(":")[0], frame.function].append(line)
    functions = [
        HotFunction(name=name, share=sum(line.share for line in lines), lines=tuple(lines))
        for (_, name), lines in by_function.items()
    ]
    return tuple(sorted(functions, key=lambda function: -function.share))


def _library_call(frame: Frame | None) -> str | None:
    """A library's function as one would write it: its package and its name."""
    if frame is None:
        return None
    package = frame.where.partition("/")[0].partition(":")[0].removesuffix(".py")
    return f"{package}.{frame.function.rpartition('.')[2]}"
