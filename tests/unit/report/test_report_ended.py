"""A run that did not end well: that is said first, in the terminal, the JSON and the page."""

from __future__ import annotations

import dataclasses

import pytest
from report_runs import printed, rank_of, report_of, steps_of, trace_of
from test_report_html import FINDING

from flatout.report.account import how_it_ended
from flatout.report.page import page
from flatout.report.terminal import show
from flatout.trace import End, RankTrace, RunInfo, Trace

CLOSED = End(time_s=9.0)
FAILED = End(time_s=9.0, error="ValueError", where="train.py:31")


def rank(end: End | None, number: int = 0) -> RankTrace:
    """A rank of 60 steps that left this at its end."""
    return rank_of(steps_of([100.0] * 60), end=end, rank=number)


def run(code: int | None, *ranks: RankTrace) -> Trace:
    """A command that ended with this code; None of a recording in which the command went on."""
    machine = RunInfo(name="train", command=("/usr/bin/torchrun", "train.py"), host="box")
    return dataclasses.replace(trace_of(*ranks), machines=(machine,), end=End(time_s=10.0, exit_code=code))


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (run(0, rank(CLOSED)), None),
        (run(0, rank(None)), None),  # as of a process that became another
        (trace_of(rank(None)), None),  # not over, or recorded before that was noted
        (trace_of(rank(CLOSED)), None),  # attached to
        (run(None, rank(CLOSED)), None),  # the first of two trainings
        (run(1, rank(FAILED)), "torchrun ended with exit code 1 after 60 steps: ValueError at train.py:31"),
        (run(3, rank(CLOSED)), "torchrun ended with exit code 3 after 60 steps"),
        (run(139, rank(None)), "torchrun ended with SIGSEGV after at least 60 steps"),
        (run(250, rank(CLOSED)), "torchrun ended with exit code 250 after 60 steps"),
        (run(0, rank(FAILED)), "Training ended after 60 steps: ValueError at train.py:31"),
        (run(None, rank(None)), "Training was killed, or crashed, after at least 60 steps"),
        (
            run(130, rank(dataclasses.replace(FAILED, error="KeyboardInterrupt"))),
            "torchrun was interrupted after 60 steps",
        ),
        (
            run(1, rank(None), rank(FAILED, 1)),
            "torchrun ended with exit code 1 after at least 60 steps: ValueError at train.py:31 (rank 1)",
        ),
    ],
)
def test_how_a_run_ended(ended: Trace, said: str | None) -> None:
    assert how_it_ended(ended) == said


def test_a_failed_run_says_so_before_anything_else() -> None:
    crashed = run(1, rank(FAILED))
    told = report_of(crashed, FINDING)
    said = "torchrun ended with exit code 1 after 60 steps: ValueError at train.py:31"
    first, second, *_ = printed(lambda console: show(told, console)).splitlines()
    assert first == f"{said}."
    assert second.startswith("You could train")
    assert told.to_json()["ended"] == said
    html = page(told)
    assert f">{said}.</h1>" in html
    assert html.index(f"{said}.</h1>") < html.index("You could train")
