"""A trace that was damaged, or made by somebody else: what is wrong with it is said, and the rest is read."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.damage import end_of, shown, unpacked
from flatout.model.errors import TraceError
from flatout.model.records import LoaderFacts
from flatout.report import terminal
from flatout.trace import Facts, FactsRecord, Note, RankTrace, RunInfo, Span, Step, TraceWriter, reader

MUTATIONS = 40


def recorded(folder: Path, *, steps: int = 5, facts: Facts | None = None) -> Path:
    """A recording of a few steps; its file."""
    with TraceWriter(folder, RunInfo(name="demo", host="box", rank=0)) as writer:
        for index in range(steps):
            writer.write(Step(index=index, start_s=float(index), wall_ms=10.0, samples=1))
        writer.write(FactsRecord(time_s=1.0, values=facts or Facts()))
    return folder / "rank-00000.jsonl"


def with_line(path: Path, number: int, line: str | bytes) -> None:
    """Put another line in the place of one of them."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = (line.encode() if isinstance(line, str) else line) + b"\n"
    path.write_bytes(b"".join(lines))


def read_from(path: Path) -> RankTrace:
    return reader.read(path.parent).ranks[0]


def test_damage_of_any_kind_ends_in_a_summary_or_in_one_line(tmp_path: Path) -> None:
    """benchmarks/damage.py does the same a thousand times."""
    small = ("cpu-data.main", "cpu-data.slow", "cpu-dist.comm", "cpu-compute.saturated-fed", "h200-copy", "h200-sync")
    originals = unpacked(tmp_path / "originals", lambda name: name.startswith(small))
    assert len(originals) >= len(small)
    for seed in range(MUTATIONS):
        how, end, said = shown(originals, tmp_path / "damaged", seed)
        assert end in ("shown", "one line"), f"seed {seed}, {how}: {end}: {said}"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"record":"step","index":7,"start_s":1.0}', "wall_ms is missing"),
        ('{"record":"step","index":7,"start_s":1.0,"wall_ms":"10"}', "wall_ms: a number is expected, not '10'"),
        ('{"record":"step","index":7,"start_s":1.0,"wall_ms":NaN}', "it is not JSON"),
        ('{"record":"step","index":7,"start_s":1.0,"wall_ms":1e999}', "wall_ms: a number is expected, not inf"),
        ('{"record":"step","index":7,"start_s":1.0,"wall_ms":-5.0}', "wall_ms: a number is expected, not -5.0"),
        ('{"record":"step","index":true,"start_s":1.0,"wall_ms":5.0}', "index: a whole number is expected, not True"),
        ('{"record":"step","index":7,"start_s":1.0,"wall_ms":5.0,"spans":{}}', "spans: a list is expected"),
        ('{"record":[],"index":7}', "it does not say what it is"),
        ("[1, 2]", "it is not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00garbage", "it is not JSON"),
    ],
)
def test_a_damaged_line_is_left_out_and_said(line: str | bytes, why: str, tmp_path: Path) -> None:
    path = recorded(tmp_path)
    with_line(path, 3, line)
    rank = read_from(path)
    assert [step.index for step in rank.steps] == [0, 2, 3, 4]
    assert [note.text.startswith("rank-00000.jsonl: 1 damaged line was left out (line 3: ") for note in rank.notes] == [
        True
    ]
    assert why in rank.notes[0].text


def test_a_last_line_that_a_crash_has_cut_off_is_no_damage(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"record":"step","index":7,"sta')
    assert read_from(path).notes == ()


def test_a_damaged_first_line_is_named(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    run = json.loads(path.read_bytes().splitlines()[0])
    with_line(path, 1, json.dumps({**run, "host": 3}))
    with pytest.raises(TraceError, match=r"its first line is damaged \(host: text is expected, not 3\)"):
        read_from(path)


def test_facts_that_are_not_what_they_should_be_are_left_out(tmp_path: Path) -> None:
    good = {"dataset": "m.D", "batch_size": 8}
    facts = {"loaders": [good, 3, {"batch_size": 4}, good | {"batch_size": "x"}], "autocast": 3, "of_my_own": [1, {}]}
    path = recorded(tmp_path)
    values = {**facts, "memory_retries": -1, "own_cost": []}
    number = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if '"record":"facts"' in line)
    with_line(path, number, json.dumps({"record": "facts", "time_s": 1.0, "values": values}))
    assert read_from(path).facts == Facts(
        loaders=(LoaderFacts(dataset="m.D", batch_size=8), LoaderFacts(dataset="m.D"))
    )


def test_half_a_character_is_read_as_what_can_be_written(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    with_line(path, 3, '{"record":"note","time_s":1.0,"text":"half \\ud83d, whole \\ud83d\\ude00"}')
    assert read_from(path).notes[0].text == "half ?, whole \U0001f600"


def test_a_trace_too_large_for_memory_is_read_in_part_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path, steps=1000)
    whole = len(read_from(path).steps)
    monkeypatch.setattr(reader, "MOST_IN_MEMORY", 200_000)
    rank = read_from(path)
    assert 0 < len(rank.steps) < whole / 2
    assert [note.text.startswith("rank-00000.jsonl: larger than flatout reads: its last ") for note in rank.notes] == [
        True
    ]


def test_a_line_without_an_end_is_not_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LONGEST_LINE", 10_000)
    path = recorded(tmp_path)
    with_line(path, 3, "x" * 100_000)
    rank = read_from(path)
    assert [step.index for step in rank.steps] == [0, 2, 3, 4]
    assert "line 3: longer than 0.01 MB" in rank.notes[0].text


@pytest.fixture
def at_most_ten_seconds() -> Iterator[None]:
    signal.alarm(10)
    yield
    signal.alarm(0)


@pytest.mark.usefixtures("at_most_ten_seconds")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-00000.jsonl")
    with pytest.raises(TraceError, match="it is not a file"):
        reader.read(tmp_path)


@pytest.mark.parametrize("verb", ["report", "compare", "top --replay"])
def test_what_no_check_has_seen_is_one_line_too(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flatout_says: Callable[..., Any]
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("wall_ms")

    monkeypatch.setattr(terminal, "show", fails)
    monkeypatch.setattr("flatout.report.compare", fails)
    monkeypatch.setattr("flatout.top.top_command.run", fails)
    path = recorded(tmp_path)
    folders = [path.parent] * (2 if verb == "compare" else 1)
    code, _, said = flatout_says(*verb.split(), *folders)
    assert (code, said.count("\n")) == (2, 1)
    assert f"{tmp_path} cannot be shown: this trace is damaged (KeyError: 'wall_ms', at " in said


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_hostile_trace_sends_no_escape_sequence_to_the_terminal(
    verb: str, tmp_path: Path, flatout_says: Callable[..., Any]
) -> None:
    """GIVEN a trace whose every text holds colors, a window title, a bell, a backspace and reversed letters."""
    hostile = "\x1b[31mred\x1b]0;title\x07\x9b1m\b\x7f\u202etxt"
    loader = LoaderFacts(dataset=hostile, length=9, batch_size=3)
    info = RunInfo(name=hostile, host=hostile, rank=0, command=(hostile,))
    folders = [tmp_path / name for name in ("a", "b")]
    for number, folder in enumerate(folders):
        with TraceWriter(folder, info) as writer:
            for index in range(60):
                span = Span(name=hostile, start_ms=0.0, host_ms=10.0, where=hostile)
                writer.write(Step(index=index, start_s=float(index), wall_ms=10.0, spans=(span,)))
            writer.write(Note(time_s=1.0, text=hostile))
            writer.write(FactsRecord(time_s=1.0, values=Facts(optimizer=hostile * (number + 1), loaders=(loader,))))
    shown_folders = folders if verb == "compare" else folders[:1]

    code, out, err = flatout_says(verb, *shown_folders)

    assert code == 0
    assert "red" in out
    assert "title" not in out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out + err)


def test_the_harness_knows_a_traceback_when_it_sees_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("not ours to catch")

    monkeypatch.setattr(terminal, "show", fails)
    end, said = end_of(["report", str(recorded(tmp_path).parent)])
    assert end == "traceback"
    assert "not ours to catch" in said
