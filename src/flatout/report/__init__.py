"""REPORT: what a person sees of a run, of two runs compared, of a fix, or of a try.

folders ─► account ─► RecordedRun ────┐             ┌─► to_json       the documented JSON
two runs ─► comparison ─► Comparison ─┼─► a Report ─┴─► view ─┬─► terminal   text
a fix ─► fix_summary ─► FixSummary ───┤                       └─► page       one HTML file, with charts
a try ─► try_summary ─► TrySummary ───┘

A view is what the report says, as plain data: see `views`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from flatout.report.account import Price, RankFigures, RecordedRun, run_of
from flatout.report.comparison import Comparison, compare
from flatout.report.fix_summary import FixSummary, summarize
from flatout.report.run_view import run_view
from flatout.report.try_summary import TrySummary
from flatout.report.views import ReportView
from flatout.trace import merge, read, read_summaries

__all__ = [
    "Comparison",
    "FixSummary",
    "RecordedRun",
    "Report",
    "TrySummary",
    "compare",
    "read_run",
    "run_of",
    "summarize",
    "view_of",
]
MAX_RANKS_READ = 16


Report: TypeAlias = RecordedRun | Comparison | FixSummary | TrySummary


def view_of(report: Report, *, brief: bool) -> ReportView:
    """What a report says; `brief` leaves out what one looks up, and the charts."""
    if isinstance(report, RecordedRun):
        return run_view(report, brief=brief)
    return report.view(brief=brief)


def read_run(folders: Sequence[Path], price: Price | None = None) -> RecordedRun:
    """One run, from the folders in which its machines recorded it. Of many ranks, a few are read in full."""
    traces, by_rank = [], []
    for folder in folders:
        if len(list(folder.glob("rank-*.jsonl"))) <= MAX_RANKS_READ:
            traces.append(read(folder))
            continue
        ranks = [summary for summary in read_summaries(folder) if summary.info.rank is not None]
        every = [RankFigures.of_summary(summary) for summary in ranks]
        by_rank += every
        traces.append(read(folder, _most_telling(every)))
    trace = merge(*traces) if len(traces) > 1 else traces[0]
    return run_of(trace, ", ".join(str(folder) for folder in folders), by_rank, price)


def _most_telling(every: Sequence[RankFigures]) -> set[int]:
    """The ranks to read of many: the first, and those at both ends. The slowest wait least for the others."""

    def by_share(name: str) -> list[int]:
        return [info.rank or 0 for info, _ in sorted(every, key=lambda one: one.breakdown.share_of(name))]

    by_wait, by_data = by_share("backward"), by_share("data")
    few = MAX_RANKS_READ // 4
    return {min(by_wait, default=0), *by_wait[:few], *by_wait[-few + 1 :], *by_data[:few], *by_data[-few:]}
