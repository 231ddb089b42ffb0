"""Folders → one Trace to report on. Of a thousand ranks a few are read; summaries speak for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.diagnose.breakdown import Breakdown, split
from flatout.trace import RunInfo, Sketch, Summary, Trace, merge, read, read_summaries

MOST_READ = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank in a line: `shares` of its training time by phase."""

    rank: int
    host: str
    steps: int
    step_ms: Sketch
    samples_per_s: float | None
    shares: dict[str, float]


def gather(folders: Sequence[Path]) -> tuple[Trace, tuple[RankFigures, ...]]:
    """The trace in these folders, and the figures of those ranks that were too many to read; empty where none were."""
    traces, figures = [], []
    for folder in folders:
        if len(list(folder.glob("rank-*.jsonl"))) <= MOST_READ:
            traces.append(read(folder))
            continue
        every = [of_summary(summary) for summary in read_summaries(folder) if summary.info.rank is not None]
        figures += every
        traces.append(read(folder, _telling(every)))
    return (merge(*traces) if len(traces) > 1 else traces[0]), tuple(figures)


def _telling(every: Sequence[RankFigures]) -> set[int]:
    """The first rank, and those at both ends: slowest by their own work are the ones that wait least for others."""

    def share(name: str) -> list[int]:
        return [figures.rank for figures in sorted(every, key=lambda f: f.shares.get(name, 0.0))]

    by_wait, by_data = share("backward"), share("data")
    few = MOST_READ // 4
    return {min(by_wait, default=0), *by_wait[:few], *by_wait[-few + 1 :], *by_data[:few], *by_data[-few:]}


def of_summary(summary: Summary) -> RankFigures:
    """A rank's figures from its summary."""
    totals: dict[str, float] = {}
    for key, sketch in summary.spans_ms.items():
        name = key.partition("@")[0]
        totals[name] = totals.get(name, 0.0) + sketch.total
    return _figures(summary.info, summary.wall_ms, summary.samples, split(totals))


def of_breakdown(info: RunInfo, b: Breakdown) -> RankFigures:
    """A rank's figures from its account."""
    totals: dict[str, float] = {}
    for part in b.training:
        totals[part.name] = totals.get(part.name, 0.0) + part.ms
    return _figures(info, b.step_ms, b.samples, totals)


def _figures(info: RunInfo, step_ms: Sketch, samples: int | None, totals: dict[str, float]) -> RankFigures:
    all_ms = step_ms.total
    return RankFigures(
        rank=info.rank or 0,
        host=info.host,
        steps=step_ms.count,
        step_ms=step_ms,
        samples_per_s=samples / all_ms * 1e3 if samples and all_ms else None,
        shares={name: ms / all_ms for name, ms in totals.items()} if all_ms else {},
    )
