"""What was recorded in flatout-runs: the list, the newest by default, runs beside earlier ones, and what goes."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import printed

from flatout.fix.speed import Speed
from flatout.report import history
from flatout.report.history import PastRun
from flatout.report.terminal import show_runs
from flatout.trace import End, RunInfo, Step, TraceWriter, note_end

TRACES = Path(__file__).parents[2] / "traces"
RUNS = Path("flatout-runs")
COMMAND = ("python", "train.py")
Says = Callable[..., Any]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own."""
    monkeypatch.chdir(tmp_path)


def written_at(folder: Path, time_s: float) -> Path:
    """The folder, whose recordings were written to last at that time."""
    for path in folder.rglob("*.jsonl"):
        os.utime(path, (time_s, time_s))
    return folder


def unpacked(recording: str, name: str, time_s: float) -> Path:
    with tarfile.open(TRACES / f"{recording}.tgz") as archive:
        archive.extractall(RUNS / name, filter="data")
    return written_at(RUNS / name, time_s)


def recorded(name: str, time_s: float, exit_code: int = 0) -> Path:
    """A short recording of COMMAND."""
    folder, info = RUNS / name, RunInfo(name="train", command=COMMAND, host="box", facts={"commit": "0123456789" * 4})
    with TraceWriter(folder, replace(info, rank=0)) as writer:
        for index in range(60):
            writer.write(Step(index=index, start_s=index / 100, wall_ms=10.0 + index % 3, samples=32))
    note_end(folder, info, End(time_s=1.0, exit_code=exit_code))
    return written_at(folder, time_s)


def noted(name: str, speed: float, time_s: float, **other: Any) -> PastRun:
    """A recording, of which only what was noted of it counts."""
    folder = RUNS / name
    folder.mkdir(parents=True)
    (folder / "rank-00000.jsonl").touch()
    past = PastRun(
        folder=str(written_at(folder, time_s)),
        name="train",
        command=COMMAND,
        started_unix_s=0.0,
        device="NVIDIA H200",
        ranks=1,
        steps=100,
        speed=Speed(value=speed, error=0.001, steps=100),
    )
    history.note(replace(past, **other))
    return replace(past, **other)


# The list


def test_the_newest_come_first_with_what_they_have_come_to(flatout_says: Says) -> None:
    unpacked("cpu-data.main-thread", "20261115-120000-train", 1000)
    unpacked("h200-sync.item", "mine", 3000)
    recorded("20261116-120000-train", 2000, exit_code=3)
    code, out, err = flatout_says("runs", "--json", "-")
    assert (code, err) == (0, "")
    listed = json.loads(out)["runs"]
    assert [run["folder"] for run in listed] == [
        str(RUNS / name) for name in ("mine", "20261116-120000-train", "20261115-120000-train")
    ]
    assert [run["verdict"] for run in listed[::2]] == ["sync.item", "data.main-thread"]
    assert listed[0]["device"] == "NVIDIA H200"
    assert listed[0]["hardware"]["sm_active_pct"] > 0
    assert (listed[1]["exit_code"], listed[1]["commit"], listed[1]["command"]) == (3, "0123456789" * 4, list(COMMAND))
    assert listed[1]["speed"]["unit"] == "samples/s"
    assert listed[1]["speed"]["value"] == pytest.approx(32 / 0.011, rel=0.01)


def test_what_a_run_has_come_to_is_read_from_its_trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded("20261116-120000-train", 2000)
    first = history.past_run(folder)
    with monkeypatch.context() as patched:
        patched.setattr(history, "read_run", lambda _: pytest.fail("the trace was read again"))
        assert history.past_run(folder) == first
    of_another_version = (folder / history.KEPT).read_text().replace('"schema": 1', '"schema": 0')
    for damaged in ("{", "[]", '{"schema": 1}', of_another_version):
        (folder / history.KEPT).write_text(damaged)
        assert history.past_run(folder) == first


def test_a_run_that_goes_on_is_read_each_time() -> None:
    folder = RUNS / "20261116-120000-train"
    with TraceWriter(folder, RunInfo(name="train", rank=0)) as writer:
        writer.write(Step(index=0, start_s=0.0, wall_ms=10.0))
        while len((folder / "rank-00000.jsonl").read_text().splitlines()) < 2:
            pass
        past = history.past_run(folder)
        assert past.running
        assert past.row(RUNS)[-1] == "running"
        assert not (folder / history.KEPT).exists()
    assert not history.past_run(folder).running
    assert (folder / history.KEPT).exists()


def test_a_damaged_recording_costs_its_line_alone(flatout_says: Says) -> None:
    recorded("20261116-120000-train", 2000)
    (RUNS / "20261115-120000-train").mkdir()
    (RUNS / "20261115-120000-train" / "rank-00000.jsonl").write_text("nothing of ours\n")
    code, out, err = flatout_says("runs")
    assert code == 0
    assert "20261116" in out
    assert "20261115" not in out
    assert err.count("\n") == 1
    assert "rank-00000.jsonl is not part of a trace" in err


def test_runs_stand_below_their_command_and_columns_without_a_word_are_left_out() -> None:
    healthy = noted("20261116-120000-train", 1297.4, 0, verdict="compute.saturated", hardware={"cpu_pct": 97.0})
    other = ("python", "train.py", "--lr", "a b")
    failed = noted("mine", 640, 0, command=other, exit_code=139, started_unix_s=86400.0 * 365)
    dear = noted("20261115-120000-fix/after", 2.5, 0, money=0.1234, currency="$", exit_code=1)
    heads, runs = history.HEADS, [(past.command, past.row(RUNS)) for past in (healthy, failed)]
    assert printed(lambda console: show_runs(runs, heads, console), width=100) == (
        "recording              begun             verdict            speed            busy     exit\n"
        "python train.py\n"
        "20261116-120000-train                    compute.saturated  1,297 samples/s  CPU 97%\n"
        "python train.py --lr 'a b'\n"
        f"mine                   {failed.row(RUNS)[1]}                     640 samples/s             SIGSEGV\n"
    )
    assert failed.row(RUNS)[1].startswith("19")
    assert dear.row(RUNS) == ("20261115-120000-fix/after", "", "", "2.5 samples/s", "", "0.1234 $", "", "1")


# The newest by default


def test_report_and_compare_take_the_last_ones(flatout_says: Says) -> None:
    recorded("20261116-120000-train", 3000)
    recorded("20261114-120000-train", 1000)
    recorded("20261115-120000-fix/after", 2000)
    code, out, _ = flatout_says("report")
    assert code == 0
    assert out.endswith("Trace: flatout-runs/20261116-120000-train\n")
    code, out, _ = flatout_says("compare", "--json", "-")
    assert code == 0
    compared = json.loads(out)
    traces = [compared[side]["trace"] for side in ("a", "b")]
    assert traces == ["flatout-runs/20261115-120000-fix/after", "flatout-runs/20261116-120000-train"]


@pytest.mark.parametrize(
    ("arguments", "there", "complaint"),
    [
        (("report",), 0, "there is no recording in flatout-runs: flatout run -- python train.py makes one"),
        (("runs",), 0, "there is no recording in flatout-runs: flatout run -- python train.py makes one"),
        (("runs", "no/such"), 1, "there is no recording in no/such: flatout run -- python train.py makes one"),
        (("runs", "a" * 300), 1, f"there is no recording in {'a' * 300}: flatout run -- python train.py makes one"),
        (("compare",), 1, "there is only one recording in flatout-runs: flatout-runs/20261116-120000-train"),
        (("compare", "x"), 1, "with which run is x to be compared? flatout compare A B, or without both the last two"),
    ],
)
def test_where_there_are_none_one_line_says_so(
    flatout_says: Says, arguments: tuple[str, ...], there: int, complaint: str
) -> None:
    for _ in range(there):
        recorded("20261116-120000-train", 2000)
    assert flatout_says(*arguments) == (2, "", f"flatout: {complaint}\n")


# Beside earlier runs


def earlier(*speeds: float) -> None:
    for number, speed in enumerate(speeds):
        noted(f"2026111{number}-120000-train", speed, number)


def test_a_run_beyond_what_the_last_three_vary_by_is_noted() -> None:
    earlier(5000, 1000, 1010, 990)
    now = noted("20261119-120000-train", 850, 9)
    assert history.beside_earlier(now) == (
        "slower than your last 3 runs of this command: 0.85× (0.81 to 0.89) their speed "
        "(flatout compare flatout-runs/20261113-120000-train flatout-runs/20261119-120000-train)"
    )
    assert history.beside_earlier(replace(now, speed=replace(now.speed, value=1300.0))).startswith("faster than")  # type: ignore[type-var]
    assert history.beside_earlier(replace(now, speed=replace(now.speed, value=980.0))) == ""  # type: ignore[type-var]


def test_runs_that_vary_much_hide_a_difference() -> None:
    earlier(1000, 1300, 800)
    assert history.beside_earlier(noted("20261119-120000-train", 850, 9)) == ""


@pytest.mark.parametrize(
    "other",
    [
        {"command": ("python", "train.py", "--lr", "1")},
        {"device": "NVIDIA A100"},
        {"ranks": 2},
        {"speed": None},
        {"speed": Speed(value=850.0, error=0.001, steps=100, unit="steps/s")},
        {"folder": str(RUNS / "20261119-120000-train-2")},  # the second training of a command
    ],
)
def test_runs_that_are_not_alike_are_not_compared(other: dict[str, Any]) -> None:
    earlier(1000, 1010, 990)
    assert history.beside_earlier(noted("20261119-120000-train", 850, 9))
    assert history.beside_earlier(replace(noted("x", 850, 10), **other)) == ""


def test_two_runs_and_trials_of_a_fix_are_too_few() -> None:
    earlier(1000, 1010)
    noted("20261112-120000-fix/before", 1000, 5)
    assert history.beside_earlier(noted("20261119-120000-train", 850, 9)) == ""


# What goes


def test_the_last_ones_stay_and_with_them_all_that_is_not_a_finished_recording_of_ours() -> None:
    """GIVEN old folders of all kinds and three newer recordings WHEN the last two are kept THEN only recordings go."""
    names = [f"2026111{number}-120000-train" for number in range(3)]
    for number, name in enumerate(names, 10):
        recorded(name, number)
    recorded("20261101-120000-fix/before", 1)
    recorded("baseline", 1)
    (recorded("20261102-120000-train", 1) / "notes.txt").touch()
    (recorded("20261103-120000-fix/after", 1).parent / "unfinished").mkdir()
    (RUNS / "20261104-120000-data").mkdir()
    (RUNS / "20261105-120000-train").symlink_to(recorded("mine", 1).absolute())
    going_on = TraceWriter(RUNS / "20261106-120000-train", RunInfo(name="train", rank=0))
    written_at(RUNS / "20261106-120000-train", 1)

    assert history.remove_older(0, RUNS) == 0
    assert history.remove_older(2, RUNS) == 2
    left = {path.name for path in RUNS.iterdir()}
    assert names[0] not in left
    assert "20261101-120000-fix" not in left
    assert left > {*names[1:], "baseline", "mine", ".gitignore"}
    assert {name[:8] for name in left} > {f"2026110{number}" for number in range(2, 7)}

    going_on.close()
    written_at(RUNS / "20261106-120000-train", 1)
    assert history.remove_older(2, RUNS) == 1
