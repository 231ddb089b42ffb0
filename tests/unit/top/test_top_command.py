"""A whole run of `flatout top`, on a machine whose time passes at once."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from flatout.model.errors import FlatoutError, GateFailed, UsageError
from flatout.top.summary import GPU_COLUMNS, HOST_COLUMNS, TopSummary
from flatout.top.top_command import TopOptions, run
from flatout.trace import DiskSample, GpuSample, HostSample, Sample, read

Make = Callable[..., Sample]
DOCS = Path(__file__).parents[3] / "docs" / "TOP.md"


@pytest.fixture
def top(machine) -> Callable[..., TopSummary]:
    """Runs top on a machine at 80% (or the one given)."""

    def go(here=None, *, terminal: tuple[int, int] | None = None, **options: Any) -> TopSummary:
        here = here or machine()
        return run(
            TopOptions(**options),
            find_terminal=lambda: os.terminal_size(terminal) if terminal else None,
            make_sampler=lambda **_: here,
            stop=here.stop(),
            clock=here.clock,
        )

    return go


def test_a_line_a_sample_and_then_the_summary(top, machine, capsys: pytest.CaptureFixture[str]) -> None:
    here = machine(lambda _: 91.0)
    summary = top(here, duration_s=5.0)
    lines = capsys.readouterr().out.splitlines()
    assert [" | GPU 0 SM 91% util 91%" in line for line in lines[:6]] == [True] * 5 + [False]
    assert lines[5].endswith("· 5.0 s · 5 samples")
    assert "Verdict: healthy – SM active averages 91%" in lines[7]
    assert summary.verdict.word == "healthy"
    assert here.closed


def test_ctrl_c_ends_with_the_summary(top, machine, capsys: pytest.CaptureFixture[str]) -> None:
    # GIVEN a machine on which somebody presses Ctrl-C after four seconds
    here = machine()
    sleep = here.sleep

    def press(seconds: float) -> None:
        sleep(seconds)
        if here.clock() >= 104.5:
            os.kill(os.getpid(), signal.SIGINT)

    here.sleep = press
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert top(here).host.samples == 4
    assert "Verdict: healthy" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_once_as_json_is_one_reading_and_nothing_else(top, machine, capsys: pytest.CaptureFixture[str]) -> None:
    here = machine(lambda _: 42.0)
    here.notes.append("this GPU is old")
    top(here, once=True, json_to="-")
    reading = json.loads(capsys.readouterr().out)
    assert reading["record"] == "top-reading"
    assert reading["interval_s"] == pytest.approx(0.5)
    assert reading["gpus"][0]["sm_active_pct"] == pytest.approx(42.0)
    assert reading["host"]["cpu_pct"] == 10.0
    assert reading["notes"] == ["this GPU is old"]


def test_once_in_words(top, capsys: pytest.CaptureFixture[str]) -> None:
    top(once=True)
    out = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in out] == ["GPU", "CPU"]


def test_the_summary_as_json(top, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top(duration_s=4.0, json_to=str(tmp_path / "sum.json"))
    summary = json.loads((tmp_path / "sum.json").read_text())
    assert summary["record"] == "top-summary"
    assert summary["samples"] == 4
    assert summary["verdict"]["word"] == "healthy"
    (gpu,) = summary["gpus"]
    assert gpu["activity"]["mean"] == pytest.approx(80)
    assert gpu["fluctuation_pct"] == pytest.approx(0, abs=0.1)
    assert gpu["gpu_util_pct"]["p95"] == pytest.approx(80)
    assert gpu["verdict"]["word"] == "healthy"
    assert summary["targets"][1] == {
        "name": "util",
        "gpu": 0,
        "what": "GPU-Util, mean",
        "wish": "at least 85%",
        "unit": "%",
        "value": pytest.approx(80),
        "met": False,
        "margin": pytest.approx(-5),
    }
    assert "Verdict" in capsys.readouterr().out


def test_json_on_stdout_stands_alone(top, capsys: pytest.CaptureFixture[str]) -> None:
    top(duration_s=4.0, json_to="-")
    assert json.loads(capsys.readouterr().out)["samples"] == 4


def test_a_row_a_sample(top, machine, tmp_path: Path) -> None:
    disks = (DiskSample(name="sda", read_bytes_s=2e6, write_bytes_s=1e6, busy_pct=30.0),)
    here = machine(gpus=2, trainer_cpu=90.0, workers=3, host={"disks": disks})
    top(here, duration_s=3.0, csv_to=str(tmp_path / "rows.csv"))
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert len(rows) == 3
    assert list(rows[0]) == [*HOST_COLUMNS, *(f"gpu{i}_{name}" for i in (0, 1) for name in GPU_COLUMNS)]
    expected = {
        "interval_s": "1.0",
        "disk_read_bytes_s": "2000000.0",
        "disk_busy_pct": "30.0",
        "trainer_cpu_pct": "90.0",
        "workers": "3",
        "workers_cpu_pct": "150.0",
        "gpu1_sm_active_pct": "80.0",
        "gpu1_power_w": "350.0",
        "gpu1_throttle": "",
        "gpu1_energy_j": "",
        "gpu0_pulse_high_pct": "80.0",
    }
    assert {name: rows[1][name] for name in expected} == expected


def test_rows_that_no_longer_fit_on_the_disk_are_one_line(top, tmp_path: Path, full_disk: Callable[[], Any]) -> None:
    path = tmp_path / "rows.csv"
    with full_disk(), pytest.raises(UsageError, match=f"^cannot write {path}: File too large$"):
        top(duration_s=20.0, csv_to=str(path))


def test_rows_on_stdout_stand_alone_and_outlive_a_gpu(
    top, make_sample: Make, record: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record([make_sample(1.0, sm=80, gpus=2), make_sample(2.0, sm=80, gpus=1)])
    top(replay_from=folder, csv_to="-")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["gpu1_sm_active_pct"] for row in rows] == ["80", ""]
    assert rows[0]["time_unix_s"] == "1000000001.0"


def test_a_recording_sums_up_to_what_was_seen_live(top, machine, tmp_path: Path, capsys) -> None:
    # GIVEN a swinging load, recorded while it was summed up
    here = machine(lambda t: 95.0 if t % 3 < 1.2 else 2.0)
    here.notes.append("this GPU is old")
    seen = top(here, duration_s=30.0, record_to=tmp_path / "run")
    capsys.readouterr()
    # WHEN it is replayed
    replayed = top(replay_from=tmp_path / "run")
    # THEN nothing is lost, and only the summary is printed
    assert _rounded(replayed) == _rounded(seen)
    assert seen.notes == ["this GPU is old"]
    assert capsys.readouterr().out.startswith("flatout top · ")
    assert len(read(tmp_path / "run").samples[seen.hostname]) == 30


def test_a_replay_can_be_summed_up_as_json(top, make_sample: Make, record: Callable[..., Path], capsys) -> None:
    folder = record([make_sample(float(t), sm=88, gpus=2) for t in range(4)])
    top(replay_from=folder, json_to="-", gpus=(1,), terminal=(80, 24))
    assert [gpu["index"] for gpu in json.loads(capsys.readouterr().out)["gpus"]] == [1]


def test_the_gate_passes_a_gpu_that_did_enough(top) -> None:
    assert top(duration_s=4.0, fail_below_pct=80.0).verdict.word == "healthy"


def test_the_gate_fails_a_gpu_that_did_not(top, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GateFailed, match=r"GPU 0: mean SM active is 80\.0%, below the 85% asked for"):
        top(duration_s=4.0, fail_below_pct=85.0, json_to=str(tmp_path / "sum.json"))
    assert "Verdict" in capsys.readouterr().out
    assert (tmp_path / "sum.json").exists()


def test_the_gate_names_the_stand_in(top, machine) -> None:
    with pytest.raises(GateFailed, match=r"mean power share \(standing in for SM active\) is 50\.0%"):
        top(machine(has_gpm=False), duration_s=4.0, fail_below_pct=60.0)


def test_the_gate_fails_without_a_gpu(top, machine) -> None:
    with pytest.raises(GateFailed, match="no GPU was measured"):
        top(machine(gpus=0), duration_s=4.0, fail_below_pct=10.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"duration_s": 0.0}, "--duration must be at least one interval, 1 s (got 0)"),
        ({"duration_s": 1.0, "interval_s": 2.0}, "--duration must be at least one interval, 2 s (got 1)"),
        ({"duration_s": float("inf")}, "--duration must be"),
        ({"json_to": "-", "csv_to": "-"}, "cannot both write to -"),
        ({"json_to": "x", "csv_to": "x"}, "cannot both write to x"),
        ({"once": True, "duration_s": 5.0}, "--once and --duration cannot go together"),
        ({"speed": 2.0}, "--speed goes with --replay only"),
        ({"speed": 0.0, "replay_from": Path("x")}, "--speed must be above 0"),
        ({"replay_from": Path("x"), "record_to": Path("y")}, "--replay and --record cannot go together"),
        ({"replay_from": Path("x"), "pids": (1,)}, "--replay and --pid cannot go together"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    top, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as problem:
        top(**options)
    assert complaint in str(problem.value)
    assert "\n" not in str(problem.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json_to", "csv_to"])
@pytest.mark.parametrize("place", ["missing/sum", "file/sum", "."])
def test_a_file_that_cannot_be_written_is_said_before_measuring(
    top, machine, tmp_path: Path, name: str, place: str
) -> None:
    (tmp_path / "file").write_text("kept")
    here = machine()
    with pytest.raises(UsageError, match=r"^cannot write "):
        top(here, duration_s=5.0, record_to=tmp_path / "run", **{name: str(tmp_path / place)})
    assert here.clock() == 100.0
    assert here.closed
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_recorded_into(top, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="cannot record into"):
        top(duration_s=5.0, record_to=tmp_path / "file" / "run", csv_to=str(tmp_path / "rows.csv"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_recording_is_never_written_over(top, tmp_path: Path) -> None:
    top(duration_s=2.0, record_to=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UsageError, match="already holds a recording"):
        top(duration_s=2.0, record_to=tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_sampler_that_refuses_leaves_nothing(tmp_path: Path) -> None:
    def refuse(gpus: object, pids: object) -> Any:
        raise UsageError("there is no GPU 9")

    options = TopOptions(gpus=(9,), duration_s=2.0, record_to=tmp_path / "run", csv_to=str(tmp_path / "rows.csv"))
    with pytest.raises(FlatoutError, match="there is no GPU 9"):
        run(options, find_terminal=lambda: None, make_sampler=refuse)
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_of_20_columns(top, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs at least 60 columns and 20 lines .* use --duration, or pipe"):
        top(terminal=(20, 24), record_to=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert top(terminal=(20, 24), duration_s=3.0).host.samples == 3


def test_without_textual_it_says_what_to_install_and_goes_on_in_text(
    top, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flatout.top.view", raising=False)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(UsageError, match=r"needs Textual: pip install 'flatout\[top\]'. Without it: flatout top --dur"):
        top(terminal=(80, 24), record_to=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert top(terminal=(80, 24), duration_s=3.0).host.samples == 3


def test_every_field_and_column_is_in_the_guide(top, machine, tmp_path: Path) -> None:
    # GIVEN a machine on which everything can be measured
    guide = DOCS.read_text(encoding="utf-8")
    disks = (DiskSample(name="sda", read_bytes_s=1.0, write_bytes_s=1.0, busy_pct=1.0),)
    here = machine(
        trainer_cpu=1.0,
        workers=1,
        gpu={field.name: 1.0 for field in fields(GpuSample) if field.default is None}
        | {"throttle": ("idle",), "processes": ()},
        host={field.name: 1.0 for field in fields(HostSample)} | {"cores_pct": (1.0,), "disks": disks},
    )
    top(here, duration_s=4.0, json_to=str(tmp_path / "sum.json"))
    summary = json.loads((tmp_path / "sum.json").read_text())
    names = {*HOST_COLUMNS, *GPU_COLUMNS, *summary, *summary["gpus"][0], *summary["host"], *summary["targets"][0]}
    assert not {name for name in names if f"`{name}`" not in guide}


def test_it_runs_on_a_thread_that_may_not_handle_signals(top) -> None:
    found: list[TopSummary] = []
    thread = threading.Thread(target=lambda: found.append(top(duration_s=3.0)))
    thread.start()
    thread.join()
    assert found[0].host.samples == 3


def _rounded(summary: TopSummary) -> Any:
    """As the recording rounds it: six digits."""
    return json.loads(json.dumps(summary.to_json()), parse_float=lambda text: float(f"{float(text):.4g}"))
