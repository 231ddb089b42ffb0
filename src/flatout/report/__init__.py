"""REPORT: what a person sees of a run, of two runs compared, or of a fix.

folders ─► account ─► RecordedRun ────┐
two runs ─► comparison ─► Comparison ─┼─► Report ─┬─► to_json                     the documented JSON
a fix ─► fix_summary ─► FixSummary ───┘           └─► views ─► ReportView ─┬─► terminal   text
                                                                          └─► page       one HTML file

A ReportView is what the Report says, as plain data. `findings` puts findings and changes into words; the page's charts
are SVG of `charts`, from `chart_data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.diagnose.by_cause import by_cause
from flatout.diagnose.rank_metrics import metrics_of
from flatout.diagnose.rules import diagnose_ranks
from flatout.fix.result import FixResult
from flatout.fix.runs import Run
from flatout.report.account import SCHEMA, RankFigures, RecordedRun, account, figures_of_summary
from flatout.report.code_lines import lines_of_run
from flatout.report.comparison import Comparison, compare
from flatout.report.costs import Price, costs_of
from flatout.report.findings import finding_to_json
from flatout.report.fix_summary import FixSummary, summarize
from flatout.trace import Trace, merge, read, read_summaries

MAX_RANKS_READ = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report of a `run`; with a `comparison`, of that run and one before it; with a `fix`, of what it did.

    In a report of a fix, `run` is the training as it is now; it is None if the first run of the fix failed.
    """

    run: RecordedRun | None
    comparison: Comparison | None = None
    fix: FixSummary | None = None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout report`, `flatout compare` or `flatout fix`."""
        if self.fix is not None:
            return self.fix.to_json()
        if self.comparison is not None:
            return self.comparison.to_json()
        assert self.run is not None
        findings = [finding_to_json(finding) for finding in self.run.findings]
        verdict = findings[0]["code"] if findings else None
        return {"schema": SCHEMA, "verdict": verdict, "findings": findings, **self.run.to_json()}


def report_run(folders: Sequence[Path], price: Price | None = None) -> Report:
    """The report of a run, from the folders in which its machines recorded it."""
    return Report(run=read_run(folders, price))


def report_comparison(before: Path, after: Path) -> Report:
    """The report of two runs."""
    a, b = read_run([before]), read_run([after])
    return Report(run=b, comparison=compare(a, b))


def report_fix(result: FixResult, command: Sequence[str], plan_file: str, price: Price | None = None) -> Report:
    """The report of a fix."""
    before, after = _trial(result.before, "before"), _trial(result.measured, "after")
    now = after if result.kept else before
    findings = now.findings if now is not None else ()
    fix = summarize(result, command, plan_file, findings, price)
    comparison = None
    if before is not None and after is not None:
        comparison = compare(before, after)
    return Report(run=after or before, comparison=comparison, fix=fix)


def _trial(trial: Run | None, name: str) -> RecordedRun | None:
    if trial is None or trial.trace is None or not trial.trace.ranks:
        return None
    return run_of(trial.trace, name)


def read_run(folders: Sequence[Path], price: Price | None = None) -> RecordedRun:
    """One run, from the folders in which its machines recorded it. Of many ranks, a few are read in full."""
    traces, by_rank = [], []
    for folder in folders:
        if len(list(folder.glob("rank-*.jsonl"))) <= MAX_RANKS_READ:
            traces.append(read(folder))
            continue
        every = [figures_of_summary(summary) for summary in read_summaries(folder) if summary.info.rank is not None]
        by_rank += every
        traces.append(read(folder, _most_telling(every)))
    trace = merge(*traces) if len(traces) > 1 else traces[0]
    return run_of(trace, ", ".join(str(folder) for folder in folders), by_rank, price)


def run_of(trace: Trace, folder: str, by_rank: Sequence[RankFigures] = (), price: Price | None = None) -> RecordedRun:
    """The run in a trace; `by_rank` where not all of its ranks were read."""
    metrics = metrics_of(trace)
    findings = diagnose_ranks(metrics)
    summed_up = account(trace, folder, metrics, by_rank)
    causes = by_cause(metrics[0], findings) if metrics[0].breakdown.enough else None
    return RecordedRun(
        account=summed_up,
        findings=findings,
        trace=trace,
        costs=costs_of(metrics, summed_up.ranks, price),
        causes=causes,
        lines=lines_of_run(metrics[0]),
    )


def _most_telling(every: Sequence[RankFigures]) -> set[int]:
    """The ranks to read of many: the first, and those at both ends. The slowest wait least for the others."""

    def by_share(name: str) -> list[int]:
        return [figures.rank for figures in sorted(every, key=lambda f: f.shares.get(name, 0.0))]

    by_wait, by_data = by_share("backward"), by_share("data")
    few = MAX_RANKS_READ // 4
    return {min(by_wait, default=0), *by_wait[:few], *by_wait[-few + 1 :], *by_data[:few], *by_data[-few:]}
