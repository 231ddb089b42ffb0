"""Stacks → HotLines: which lines of the user's own code the time went to, in the training process or in workers.

Time is counted for the innermost line of the user's, with what it called in a library. Lines of one function are
told apart only as far as the looks are sure of them (see inside/stacks.py): the function comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from flatout.model.records import Frame, Stacks
from flatout.trace import RankTrace

# Phases of the training thread that are the script's own code.
OWN_CODE = ("rest", "unsplit")
SAMPLES, COLLATE = "samples", "collate"  # phases of a worker
ENOUGH_LOOKS = 10  # fewer show a line by accident
_NO_FRAME = Frame(where="", function="")


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLine:
    """One line of the user's: its share of the time of the phases that were asked for."""

    where: str  # file:line
    function: str
    source: str | None
    called: str | None  # what it called in a library, as `numpy.histogram2d`
    share: float
    looks: int

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


def hot_functions(all_stacks: Iterable[Stacks], phases: Collection[str]) -> tuple[HotFunction, ...]:
    """The functions that took the time of these phases, the hottest first; none where too few looks say so."""
    seconds: defaultdict[tuple[Frame, str | None], float] = defaultdict(float)
    looks: defaultdict[tuple[Frame, str | None], int] = defaultdict(int)
    total_s, total_looks = 0.0, 0
    for stacks in all_stacks:
        for one in stacks.stacks:
            if one.phase not in phases:
                continue
            frames = [stacks.frames[number] for number in one.frames if number < len(stacks.frames)]
            own = next((frame for frame in reversed(frames) if frame.own), _NO_FRAME)
            beyond = next((frame for frame in frames if not frame.own), None)
            key = own, _library_call(beyond)
            seconds[key] += one.seconds
            looks[key] += one.looks
            total_s, total_looks = total_s + one.seconds, total_looks + one.looks
    if total_looks < ENOUGH_LOOKS or not total_s:
        return ()
    by_function: defaultdict[str, list[HotLine]] = defaultdict(list)
    for (frame, called), spent_s in seconds.items():
        line = HotLine(
            where=frame.where,
            function=frame.function,
            source=frame.source,
            called=called,
            share=spent_s / total_s,
            looks=looks[frame, called],
        )
        by_function[f"{frame.where.rpartition(':')[0]} {frame.function}"].append(line)
    return _ranked(by_function)


def _ranked(by_function: Mapping[str, list[HotLine]]) -> tuple[HotFunction, ...]:
    functions = [
        HotFunction(
            name=lines[0].function,
            share=sum(line.share for line in lines),
            lines=tuple(sorted(lines, key=lambda line: -line.share)),
        )
        for lines in by_function.values()
        if lines[0].where
    ]
    return tuple(sorted(functions, key=lambda function: -function.share))


def _library_call(frame: Frame | None) -> str | None:
    """A library's function as one would write it: its package and its name."""
    if frame is None:
        return None
    package = frame.where.partition("/")[0].partition(":")[0].removesuffix(".py")
    name = frame.function.rpartition(".")[2]
    return f"{package}.{name}"
