"""Folders become one trace; of very many ranks a few are read, and the summaries speak for all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from report_runs import rank_of, steps_of

from flatout.diagnose.rank_metrics import metrics_of
from flatout.model.errors import TraceError
from flatout.report import MAX_RANKS_READ, read_run
from flatout.trace import TraceWriter


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """40 ranks in a folder; rank 23 takes twice as long as the others and waits for nobody."""
    folder = tmp_path / "many"
    for rank in range(40):
        recorded = rank_of(steps_of([200.0 if rank == 23 else 100.0] * 5), rank=rank)
        with TraceWriter(folder, recorded.info) as writer:
            for step in recorded.steps:
                waits = tuple(span for span in step.spans if rank != 23 or span.name != "backward")
                writer.write(dataclasses.replace(step, spans=waits))
    return folder


def test_of_many_ranks_a_few_are_read_and_all_are_counted(many: Path) -> None:
    run = read_run([many])
    trace, figures = run.trace, run.by_rank

    read = {rank.info.rank for rank in trace.ranks}
    assert len(read) <= MAX_RANKS_READ
    assert {0, 23} <= read
    assert [one.info.rank for one in figures] == list(range(40))
    assert figures[0].breakdown.steps == 5
    assert figures[0].breakdown.share_of("data") == pytest.approx(0.6)
    assert figures[23].breakdown.step_ms.quantile(0.5) == pytest.approx(200.0, rel=0.011)


def test_few_ranks_are_all_read(many: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for path in many.glob("rank-0000*"):
        shutil.copy(path, few / path.name)

    run = read_run([few])
    trace, figures = run.trace, run.by_rank

    assert len(trace.ranks) == 10
    assert [one.info.rank for one in figures] == list(range(10))


def test_what_two_machines_recorded_is_one_run(many: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, pattern in zip(folders, ("rank-0000*", "rank-0001*"), strict=True):
        folder.mkdir()
        for path in many.glob(pattern):
            shutil.copy(path, folder / path.name)

    trace = read_run(folders).trace
    assert [rank.info.rank for rank in trace.ranks] == list(range(20))

    with pytest.raises(TraceError, match="rank 0 is in more than one"):
        read_run([folders[0], folders[0]])


def test_summary_and_account_give_the_same_figures(many: Path, tmp_path: Path) -> None:
    run = read_run([many])
    figures = run.by_rank
    (again, *_), (first, *_) = metrics_of(run.trace), figures
    assert again.breakdown.steps == first.breakdown.steps
    for name in ("data", "backward", "forward"):
        assert again.breakdown.share_of(name) == pytest.approx(first.breakdown.share_of(name))
    assert json.dumps(again.breakdown.samples_per_s) == json.dumps(first.breakdown.samples_per_s)
