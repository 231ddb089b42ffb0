"""Reading survives a crash, refuses what is not a trace, and joins ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flatout.model.errors import TraceError
from flatout.model.records import ExactLines, Frame, StackCount, encode
from flatout.trace import SCHEMA, RunInfo, Sample, Step, TraceWriter, merge, read, read_summaries


def record(folder: Path, *, rank: int = 0, steps: int = 120) -> Path:
    with TraceWriter(folder, RunInfo(name="demo", host="box", rank=rank, world_size=2)) as writer:
        for index in range(steps):
            writer.write(Step(index=index, start_s=float(index), wall_ms=10.0, samples=1))
    return folder / f"rank-{rank:05d}.jsonl"


def counted(folder: Path) -> int:
    return sum(window.wall_ms.count for window in read(folder).ranks[0].windows)


def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    path = record(tmp_path, steps=70)
    whole = path.read_bytes()
    step_ends = [at + len(line) for at, line in lines_of(whole) if b'"record":"step"' in line]
    for cut in range(whole.index(b"\n"), len(whole), 97):
        path.write_bytes(whole[:cut])
        assert len(read(tmp_path).ranks[0].steps) == sum(end <= cut for end in step_ends)


def lines_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line with the place where it begins."""
    at = 0
    for line in data.splitlines():
        yield at, line
        at += len(line) + 1


def test_steps_after_the_last_window_get_one_of_their_own(tmp_path: Path) -> None:
    path = record(tmp_path, steps=70)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # the run was killed before it closed its last window
    assert counted(tmp_path) == 70


def test_outliers_after_the_last_window_do_not_pass_for_all_steps(tmp_path: Path) -> None:
    path = record(tmp_path, steps=50)
    lone = {"record": "step", "index": 77, "start_s": 77.0, "wall_ms": 900.0}
    path.write_bytes(path.read_bytes() + json.dumps(lone).encode() + b"\n")
    assert counted(tmp_path) == 50
    assert read(tmp_path).ranks[0].steps[-1].index == 77


def test_exact_lines_belong_to_their_rank_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    record(tmp_path, rank=0)
    record(tmp_path, rank=1)
    stacks = (StackCount(frames=(0,), looks=12),)
    frames = (Frame(where="train.py:7", function="metric"),)
    seen = [ExactLines(time_s=1.0, in_workers=workers, frames=frames, stacks=stacks) for workers in (False, True)]
    written = [json.dumps(encode(one)) for one in seen]
    damaged = written[0].replace("12", '"many"')
    (tmp_path / "lines-00001.jsonl").write_text("\n".join([*written, damaged, "main;train 12", ""]))
    first, second = read(tmp_path).ranks
    assert (first.exact, second.exact) == ((), tuple(seen))
    assert "lines-00001.jsonl: 2 damaged lines were left out" in second.notes[-1].text


def test_damaged_lines_and_unknown_records_are_passed_over(tmp_path: Path) -> None:
    path = record(tmp_path, steps=3)
    noise = b'\x00\x00\xff\n[1, 2]\n{"record":"step","index":7}\n{"record":"sample","host":3}\n{"record":"hologram"}\n'
    path.write_bytes(path.read_bytes() + noise)
    assert len(read(tmp_path).ranks[0].steps) == 3


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path)
    path.write_text(path.read_text().replace(f'"schema":{SCHEMA}', '"schema":99'))
    with pytest.raises(TraceError, match=r"has trace schema 99, this flatout reads schema 1: use the flatout version"):
        read(tmp_path)
    summary = tmp_path / "rank-00000.summary.json"
    summary.write_text(summary.read_text().replace(f'"schema":{SCHEMA}', '"schema":99'))
    with pytest.raises(TraceError, match="schema 99"):
        read_summaries(tmp_path)


def test_what_is_not_a_trace_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no such folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="there is no such folder"):
        read_summaries(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"holds no \.jsonl file"):
        read(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "rank-0.jsonl").write_text("")
    with pytest.raises(TraceError, match="it holds 1, the newest is "):
        read(tmp_path / "runs")
    (tmp_path / "data.jsonl").write_text("")
    with pytest.raises(TraceError, match="are empty"):
        read(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "a dataset of somebody"}\n')
    with pytest.raises(TraceError, match="does not describe a run"):
        read(tmp_path)
    (tmp_path / "data.jsonl").write_text(f'{{"record":"run","schema":{SCHEMA}}}\n')
    with pytest.raises(TraceError, match="its first line is damaged"):
        read(tmp_path)
    (tmp_path / "data.jsonl").unlink()
    (tmp_path / "data.jsonl").mkdir()
    with pytest.raises(TraceError, match="Is a directory"):
        read(tmp_path)


def test_a_rank_that_could_not_write_does_not_cost_the_others(tmp_path: Path) -> None:
    record(tmp_path, rank=0)
    (tmp_path / "rank-00001.jsonl").touch()
    assert [rank.info.rank for rank in read(tmp_path).ranks] == [0]


def test_ranks_are_read_in_order_and_joined(tmp_path: Path, make_sample: Callable[..., Sample]) -> None:
    record(tmp_path / "a", rank=1)
    record(tmp_path / "b", rank=0, steps=10)
    for name, seconds in (("a", (1.0, 3.0)), ("b", (2.0, 3.0))):
        with TraceWriter(tmp_path / name, RunInfo(name="top", host="box")) as writer:
            for second in seconds:
                writer.write(make_sample(second))

    joined = merge(read(tmp_path / "a"), read(tmp_path / "b"))

    assert [rank.info.rank for rank in joined.ranks] == [0, 1]
    assert [sample.time_s for sample in joined.samples["box"]] == [1.0, 2.0, 3.0]
    assert [info.host for info in joined.machines] == ["box"]


def test_a_rank_recorded_twice_is_refused(tmp_path: Path) -> None:
    record(tmp_path)
    trace = read(tmp_path)
    with pytest.raises(TraceError, match="rank 0 is in more than one"):
        merge(trace, trace)
