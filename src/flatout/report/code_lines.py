"""Stacks → what a report shows of them: code frames of the hottest functions, and flames for the page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.diagnose.breakdown import REST
from flatout.diagnose.hot_lines import COLLATE, OWN_CODE, SAMPLES, HotFunction, HotLine, in_training, in_workers
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.records import Stacks
from flatout.trace import RankTrace

MIN_PHASE = 0.02  # of training's time: of a phase that takes less, no line is shown
MAX_FUNCTIONS, MAX_LINES = 3, 4
MIN_FUNCTION, MIN_LINE = 0.05, 0.03  # of the phase
MAX_DEPTH, MIN_FLAME = 14, 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFrame:
    """The hottest lines of one function of the user's: number, source, what it called, and share."""

    title: str
    lines: Sequence[tuple[str, str, str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLines:
    """The functions that took the time of a phase; shares are of that phase, which takes `share` of training."""

    phase: str
    title: str
    share: float
    functions: tuple[HotFunction, ...]

    def frames(self) -> list[CodeFrame]:
        """The code to show."""
        shown = [function for function in self.functions if function.share >= MIN_FUNCTION]
        return [_frame(function) for function in shown[:MAX_FUNCTIONS]]

    def largest(self) -> list[tuple[str, float]]:
        """The largest lines in words, with their shares; what is left of the phase comes last."""
        lines = sorted(_all_lines(self.functions), key=lambda line: -line.share)
        shown = [(str(line), line.share) for line in lines[:MAX_LINES] if line.share >= MIN_FUNCTION]
        rest = 1.0 - sum(share for _, share in shown)
        return [*shown, ("other lines of your own code", rest)] if shown and rest > 0 else shown

    def to_json(self) -> list[dict[str, Any]]:
        """Every line, as documented."""
        return [
            {
                "phase": self.phase,
                "where": line.where,
                "function": line.function,
                "called": line.called,
                "source": line.source,
                "share_of_phase": line.share,
                "share": line.share * self.share,
            }
            for line in sorted(_all_lines(self.functions), key=lambda line: -line.share)
        ]


def lines_of_run(metrics: RankMetrics) -> tuple[PhaseLines, ...]:
    """The lines of a rank: of the loop's own code, and of what makes samples and batches."""
    rank, dataset = metrics.rank, metrics.loader.dataset.rpartition(".")[2]
    waits = metrics.share("data")
    phases = (
        PhaseLines(phase=REST, title="Your own code", share=metrics.share(REST), functions=in_training(rank, OWN_CODE)),
        PhaseLines(
            phase=SAMPLES, title=f"Samples of {dataset}", share=waits, functions=in_workers(rank, dataset, (SAMPLES,))
        ),
        PhaseLines(
            phase=COLLATE, title="Joining samples", share=waits, functions=in_workers(rank, dataset, (COLLATE,))
        ),
    )
    unlike = {phase.functions: phase for phase in reversed(phases)}  # without workers the last two are the same
    return tuple(phase for phase in unlike.values() if phase.functions and phase.share >= MIN_PHASE)[::-1]


def _frame(function: HotFunction) -> CodeFrame:
    shares: dict[int, float] = {}
    known: dict[int, HotLine] = {}
    for line in function.lines:  # one that called several things is one line of code
        number = int(line.where.rpartition(":")[2] or 0)
        shares[number] = shares.get(number, 0.0) + line.share
        known.setdefault(number, line)
    largest = sorted(shares, key=lambda number: -shares[number])[:MAX_LINES]
    rows = []
    for number in sorted(number for number in largest if shares[number] >= MIN_LINE):
        rows.append((str(number), known[number].source or "", known[number].called or "", shares[number]))
    file = Path(function.hottest.where.rpartition(":")[0]).name
    return CodeFrame(title=f"{file}, {function.name}: {function.share:.0%} of that", lines=rows)


def _all_lines(functions: Iterable[HotFunction]) -> Iterator[HotLine]:
    for function in functions:
        yield from function.lines


@dataclass(slots=True)
class Flame:
    """A call in a flame: how long it took, with what it called, and where that is."""

    name: str
    where: str = ""
    own: bool = True
    seconds: float = 0.0
    calls: dict[str, Flame] = field(default_factory=dict)

    def rows(self) -> list[list[tuple[float, float, Flame]]]:
        """From the outermost call inwards: left, width and call, as shares of the whole."""
        rows: list[list[tuple[float, float, Flame]]] = []
        ahead = [(0.0, self)]
        while ahead and len(rows) < MAX_DEPTH:
            row, below = [], []
            for left, call in ahead:
                width = call.seconds / self.seconds
                if width < MIN_FLAME:
                    continue
                row.append((left, width, call))
                for inner in sorted(call.calls.values(), key=lambda inner: -inner.seconds):
                    below.append((left, inner))
                    left += inner.seconds / self.seconds
            rows.append(row)
            ahead = below
        return [row for row in rows if row]


def flame_of_phase(rank: RankTrace, phase: PhaseLines) -> Flame | None:
    """The calls of a phase, of the training thread or of its workers."""
    if phase.phase == REST:
        return flame_of((stacks for stacks in rank.stacks if stacks.dataset is None), OWN_CODE, phase.title)
    workers = [stacks for stacks in rank.stacks if stacks.dataset is not None]
    if workers:
        return flame_of(workers, (phase.phase,), phase.title)
    return flame_of(rank.stacks, ("data",), phase.title)


def flame_of(all_stacks: Iterable[Stacks], phases: Collection[str], name: str) -> Flame | None:
    """All stacks of some phases as a tree of calls; None where nothing was seen."""
    root = Flame(name)
    for stacks in all_stacks:
        for one in stacks.stacks:
            if one.phase not in phases:
                continue
            root.seconds += one.seconds
            call = root
            for number in one.frames:
                frame = stacks.frames[number]
                label = frame.function if frame.own else f"{frame.where.partition('/')[0]}: {frame.function}"
                call = call.calls.setdefault(f"{frame.where} {label}", Flame(label, frame.where, frame.own))
                call.seconds += one.seconds
    return root if root.seconds else None
