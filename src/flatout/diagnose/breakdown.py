"""Where a rank's time went: by phase (Breakdown), and by line of the user's own code (HotFunction).

The parts of a Breakdown add up to the wall time. Phases of training come from the windows, which
cover every step. In most steps only waits and pauses were told apart: what those computed, and the
GPU's idle time, is split as in the steps that were timed closely. Set-up, X-ray, a trial's replays
and the tail come from the raw steps.

Time of a line counts for the innermost line of the user's, with what it called in a library. Where
py-spy has looked, a function keeps its time, and its lines share it as py-spy has seen them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flatout.model.records import DECORATORS, WRAPPED_CALL, ExactLines, Frame, Stacks, StackTime
from flatout.model.stats import enough
from flatout.trace import RankTrace, Sketch, Step

REST, UNSPLIT = "rest", "unsplit"
OWN_CODE = (REST, UNSPLIT)  # phases of the training thread that are the script's own code
COMPUTING = ("forward", "loss", "backward", "optimizer")  # phases that compute
SAMPLES, COLLATE = "samples", "collate"  # phases of a worker
ENOUGH_STEPS, ENOUGH_MS = 20, 500.0  # less of training than this is not judged, unless its steps are slow
ENOUGH_LOOKS = 10  # fewer show a line by accident
_WARM_UP_STEPS = 3  # of a ceiling, at most
# What a line calls outside torch that leaves no frame of Python: numpy in C, a loop, a sleep. `math`
# is none of it: it stands beside tensors that the time goes to (`q @ k / math.sqrt(d)`).
_OUTSIDE_TORCH = re.compile(
    r"\b(np|numpy|scipy|sklearn|pd|cv2|Image|time|json|random|re)\.|\.(numpy|tolist|item)\(\)"
    r"|^(for|while)\b|print\("
)
_NO_FRAME = Frame(where="", function="")
_TORCH = "torch/"
# Phases in which the user's line is in a wrapper of flatout's, also where it calls nothing else that
# is Python.
_WRAPPED = frozenset({"copy", "backward", "optimizer", "sync", "checkpoint", "logging", "loader start", "flatout"})
_WRAPPER = "flatout"
# Steps that are not plain training, in words.
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
    """One phase's share of the wall time, and how long the GPU stood idle in it, where known."""

    name: str
    ms: float
    share: float
    gpu_idle_ms: float | None = None
    where: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where one rank's time went. `parts` add up to `wall_ms`; `training` are those of the training
    steps alone."""

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
    step_ms = Sketch.merged(window.wall_ms for window in rank.windows)
    counted = [window.samples for window in rank.windows if window.samples is not None]
    spent_ms: defaultdict[str, float] = defaultdict(float)
    idle_ms: defaultdict[str, float] = defaultdict(float)
    for window in rank.windows:
        for key, sketch in window.spans_ms.items():
            spent_ms[key] += sketch.total
        for key, ms in window.gpu_idle_ms.items():
            idle_ms[key] += ms
    gpu_steps = sum(window.gpu_steps for window in rank.windows)
    if gpu_steps:  # the steps with events stand for all of them
        for key in idle_ms:
            idle_ms[key] = idle_ms[key] * step_ms.count / gpu_steps
    training, training_ms = split(spent_ms), step_ms.total
    whole = _beside_training(rank)
    wall_ms = training_ms + sum(whole.values())
    for key, ms in training.items():
        whole[key] += ms
    samples = sum(counted) if counted else None
    return Breakdown(
        wall_ms=wall_ms,
        parts=_parts(whole, wall_ms, idle_ms),
        training_ms=training_ms,
        training=_parts(training, training_ms, idle_ms),
        steps=step_ms.count,
        step_ms=step_ms,
        samples=samples,
        samples_per_s=samples / training_ms * 1e3 if samples and training_ms else None,
        ceiling_samples_per_s=_speed(rank.steps, "resident"),
        replay_samples_per_s=_speed(rank.steps, "replay"),
    )


def split(spans: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by phase, where time that was not told apart is shared out like time that was."""
    shares = dict(spans)
    unsplit = shares.pop(UNSPLIT, 0.0)
    if not unsplit:
        return shares
    seen = {name: spans[name] for name in ("copy", *COMPUTING, REST) if spans.get(name)} or {REST: 1.0}
    total = sum(seen.values())
    for name, ms in seen.items():
        shares[name] = shares.get(name, 0.0) + unsplit * (ms / total)
    return shares


def _beside_training(rank: RankTrace) -> defaultdict[str, float]:
    """Milliseconds of what is not plain training, by its name in words."""
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
    """Samples a second over the steps of a kind, without the first few."""
    measured = [step for step in steps if step.kind == kind and step.samples]
    measured = measured[min(_WARM_UP_STEPS, max(1, len(measured) // 4)) :]
    median_ms = Sketch.of(step.wall_ms for step in measured).quantile(0.5)
    return (measured[0].samples or 0) / median_ms * 1e3 if median_ms else None


# By line

Function = tuple[str, str]  # file, name


class Call(NamedTuple):
    """What a line of the user's called in a library, as numpy.histogram2d, and whether that went on
    into torch."""

    name: str
    into_torch: bool


Line = tuple[Frame, Call | None]  # a line of the user's, and what it called
Place = tuple[tuple[Function, ...], str | None]  # the user's functions, outermost first, and what the last one called


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLine:
    """One line of the user's: its share of the time of the phases that were asked for."""

    where: str  # file:line
    function: str
    source: str | None
    called: str | None  # what it called in a library, as `numpy.histogram2d`
    share: float
    into_torch: bool = False  # whether that is torch, or went on into torch
    exact: bool = False  # seen by py-spy; a sampled line may be off by a few, within its function

    @property
    def outside_torch(self) -> bool:
        """Whether the line is seen to do something else than tensor operations."""
        if self.called is not None:  # a framework's training loop goes on into torch
            return not self.into_torch and not self.called.startswith("flatout.")
        return bool(_OUTSIDE_TORCH.search((self.source or "").strip()))

    def __str__(self) -> str:
        """`utils.py:32 f_score → numpy.histogram2d`."""
        return f"{self.where} {self.function}" + (f" → {self.called}" if self.called else "")


@dataclass(frozen=True, slots=True)
class HotFunction:
    """A function of the user's: its lines, the hottest first."""

    lines: tuple[HotLine, ...]

    @property
    def hottest(self) -> HotLine:
        """The line that most of its time went to."""
        return self.lines[0]

    @property
    def exact(self) -> bool:
        return self.hottest.exact

    @property
    def name(self) -> str:
        return self.hottest.function

    @property
    def share(self) -> float:
        return sum(line.share for line in self.lines)


def in_training(rank: RankTrace, phases: Collection[str] = OWN_CODE) -> tuple[HotFunction, ...]:
    """Where the training thread of a rank was in these phases."""
    return hot_functions(training_stacks(rank), phases, _exact(rank, in_workers=False))


def in_workers(rank: RankTrace, dataset: str, phases: Collection[str] = (SAMPLES,)) -> tuple[HotFunction, ...]:
    """Where the workers that load a dataset were; with `num_workers=0` the training process."""
    workers = [stacks for stacks in rank.stacks if stacks.dataset == dataset]
    if workers:
        return hot_functions(workers, phases, _exact(rank, in_workers=True))
    computing = _seen(training_stacks(rank), COMPUTING)
    loop = {function for own, _, _ in computing for function in map(_function, own)}  # which only asks for a batch
    return _by_function(line for line in lines_of(in_training(rank, ("data",))) if _function(line) not in loop)


def training_stacks(rank: RankTrace) -> list[Stacks]:
    """What was seen of the training thread."""
    return [stacks for stacks in rank.stacks if stacks.dataset is None]


def lines_of(functions: Iterable[HotFunction]) -> Iterator[HotLine]:
    """The lines of all of them."""
    return (line for function in functions for line in function.lines)


def lines_where(functions: Iterable[HotFunction], keep: Callable[[HotLine], bool]) -> tuple[HotFunction, ...]:
    """Some of their lines, with their share of all that are kept."""
    lines = list(filter(keep, lines_of(functions)))
    total = sum(line.share for line in lines) or 1.0
    return _by_function(replace(line, share=line.share / total) for line in lines)


def outside_torch(functions: Iterable[HotFunction]) -> tuple[HotFunction, ...]:
    """Those of their lines that do something else than tensor operations."""
    return lines_where(functions, lambda line: line.outside_torch)


def called_from(rank: RankTrace, phase: str) -> str | None:
    """The line of the training loop that most of a phase is called from: where its stacks leave those
    of training."""
    stacks = training_stacks(rank)
    loop = {chain for own, _, _ in _seen(stacks, ("data", *COMPUTING)) for chain in _chains(own)}
    seconds: defaultdict[str, float] = defaultdict(float)
    for own, _, seen in _seen(stacks, (phase,)):
        shared = [frame for frame, chain in zip(own, _chains(own), strict=True) if chain in loop]
        if shared:
            seconds[shared[-1].where] += seen.seconds
    return max(seconds, key=seconds.__getitem__, default=None)


def hot_functions(
    all_stacks: Sequence[Stacks], phases: Collection[str], exact: ExactLines | None = None
) -> tuple[HotFunction, ...]:
    """The functions that took the time of these phases, the hottest first; none where too few looks show it.

    Their lines are those of the `exact` stacks, where there are enough of them.
    """
    seconds: defaultdict[Line, float] = defaultdict(float)
    looks = 0
    for own, called, seen in _seen(all_stacks, phases):
        seconds[own[-1] if own else _NO_FRAME, called] += seen.seconds
        looks += seen.looks
    total_s = sum(seconds.values())
    if looks < ENOUGH_LOOKS or not total_s:
        return ()
    exact_looks = _exact_looks(exact, all_stacks, phases) if exact is not None else {}
    lines = []
    for (frame, called), spent_s in sorted(_by_exact_line(seconds, exact_looks).items(), key=lambda item: -item[1]):
        name, into_torch = called or (None, False)
        line = HotLine(
            where=frame.where,
            function=frame.function,
            source=frame.source,
            called=name,
            into_torch=into_torch,
            share=spent_s / total_s,
            exact=_function(frame) in exact_looks,
        )
        if frame.where:
            lines.append(line)
    return _by_function(lines)


def _seen(
    all_stacks: Iterable[Stacks], phases: Collection[str] | None = None
) -> Iterator[tuple[list[Frame], Call | None, StackTime]]:
    """Each stack seen in these phases: the user's frames, outermost first, and what they called in a
    library."""
    for stacks in all_stacks:
        for seen in stacks.stacks:
            if phases is None or seen.phase in phases:
                frames = [stacks.frames[number] for number in seen.frames if number < len(stacks.frames)]
                own = [frame for frame in frames if frame.own]
                yield own, _library_call(frame for frame in frames if not frame.own), seen


def _exact(rank: RankTrace, *, in_workers: bool) -> ExactLines | None:
    return next((exact for exact in rank.exact if exact.in_workers == in_workers), None)


def _by_exact_line(seconds: Mapping[Line, float], looks: Mapping[Function, Mapping[Line, float]]) -> dict[Line, float]:
    """Seconds by line, where the time of a function with exact looks is shared out as those have it."""
    shared: defaultdict[Line, float] = defaultdict(float)
    for line, spent_s in seconds.items():
        exact = looks.get(_function(line[0]), {line: 1.0})
        total = sum(exact.values())
        for exact_line, count in exact.items():
            shared[exact_line] += spent_s * count / total
    return shared


def _exact_looks(
    exact: ExactLines, all_stacks: Sequence[Stacks], phases: Collection[str]
) -> dict[Function, dict[Line, float]]:
    """How often each line was seen in these phases, for the functions that were seen often enough.

    An exact stack has no phase: it counts for these as far as sampled stacks at the same place fell
    into them.
    """
    share = _shares_of_places(all_stacks, phases)
    users = {_file(frame.where) for stacks in all_stacks for frame in stacks.frames if frame.own}
    sources = {frame.where: frame.source for stacks in all_stacks for frame in stacks.frames if frame.source}
    found: defaultdict[Function, defaultdict[Line, float]] = defaultdict(lambda: defaultdict(float))
    for own, called, place, looks in _exact_places(exact, users):
        where = own[-1].where
        line = replace(own[-1], own=True, source=sources.get(where, own[-1].source))
        if weight := share.get(place, 1.0):
            found[_function(line)][line, called] += looks * weight
    return {function: dict(lines) for function, lines in found.items() if sum(lines.values()) >= ENOUGH_LOOKS}


def _exact_places(exact: ExactLines, users: Collection[str]) -> Iterator[tuple[list[Frame], Call | None, Place, int]]:
    """Of each exact stack the user's frames, what the last of them called in a library, the place,
    and the looks."""
    for stack in exact.stacks:
        frames = [exact.frames[number] for number in stack.frames if number < len(exact.frames)]
        frames = [frame for frame in frames if frame.function != WRAPPED_CALL]
        depth = max((n for n, frame in enumerate(frames, 1) if _file(frame.where) in users), default=0)
        own = [frame for frame in frames[:depth] if _file(frame.where) in users]
        inside = [frame for frame in frames[depth:] if not frame.where.startswith("<")]
        called = _library_call(frame for frame in inside if not frame.where.startswith(f"{_WRAPPER}/"))
        if own:
            yield own, called, _place(own, called, wrapped=bool(inside)), stack.looks


def _shares_of_places(all_stacks: Iterable[Stacks], phases: Collection[str]) -> dict[Place, float]:
    """Which share of the time at each place fell into these phases."""
    in_phases: defaultdict[Place, float] = defaultdict(float)
    in_all: defaultdict[Place, float] = defaultdict(float)
    for own, called, seen in _seen(all_stacks):
        place = _place(own, called, wrapped=seen.phase in _WRAPPED)
        in_all[place] += seen.seconds
        in_phases[place] += seen.seconds * (seen.phase in phases)
    return {place: in_phases[place] / spent_s for place, spent_s in in_all.items() if spent_s}


def _place(own: Iterable[Frame], called: Call | None, *, wrapped: bool) -> Place:
    name = _WRAPPER if wrapped else None
    return tuple(map(_function, own)), called.name if called else name


def _chains(own: Iterable[Frame]) -> list[tuple[Function, ...]]:
    """For each frame, the functions that lead to it."""
    functions = tuple(map(_function, own))
    return [functions[: depth + 1] for depth in range(len(functions))]


def _file(where: str) -> str:
    return where.rpartition(":")[0]


def _function(line: Frame | HotLine) -> Function:
    return _file(line.where), line.function


def _by_function(lines: Iterable[HotLine]) -> tuple[HotFunction, ...]:
    groups: defaultdict[Function, list[HotLine]] = defaultdict(list)
    for line in lines:
        groups[_function(line)].append(line)
    functions = (HotFunction(tuple(of_function)) for of_function in groups.values())
    return tuple(sorted(functions, key=lambda function: -function.share))


def _library_call(library: Iterable[Frame]) -> Call | None:
    """A library's function as one would write it, its package and its name: the first of these frames."""
    frames = [frame for frame in library if _file(frame.where) not in DECORATORS]
    if not frames:
        return None
    package = frames[0].where.partition("/")[0].partition(":")[0].removesuffix(".py")
    into_torch = any(frame.where.startswith(_TORCH) for frame in frames)
    return Call(f"{package}.{frames[0].function.rpartition('.')[2]}", into_torch)
