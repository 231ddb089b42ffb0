"""The command line: what a person types, sees on stderr, and gets as exit code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from flatout import __version__
from flatout.cli.output import save_plan
from flatout.fix.result import Attempt, FixResult
from flatout.launch import launcher
from flatout.model.plan import Change, Outcome, Plan
from flatout.trace import RunInfo, Sample, Step, TraceWriter

Run = Callable[..., tuple[int, str, str]]
FLATOUT = [sys.executable, "-m", "flatout"]
TRACE = Path(__file__).parents[1] / "traces" / "cpu-compute.saturated-plain.tgz"


def test_version(flatout_says: Run) -> None:
    assert flatout_says("--version") == (0, f"flatout {__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_says_what_it_is_and_which_verbs_there_are(flatout_says: Run, arguments: tuple[str, ...]) -> None:
    code, out, _ = flatout_says(*arguments)
    assert code == 0
    assert "why a GPU sits idle" in out
    assert "top" in out
    assert "--install-completion" in out


def test_a_verbs_help_names_every_option(flatout_says: Run) -> None:
    code, out, _ = flatout_says("top", "--help")
    assert code == 0
    for option in ("interval", "duration", "once", "gpu", "pid", "fail-below", "json", "csv", "record"):
        assert f"--{option} " in out


@pytest.mark.parametrize("verb", [(), ("top",), ("check",), ("run",), ("train",)])
def test_a_flag_is_shown_without_a_value(flatout_says: Run, verb: tuple[str, ...]) -> None:
    code, out, _ = flatout_says(*verb, "--help")
    assert code == 0
    assert "--help" in out
    assert "bool" not in out.lower()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("tpo",), "No such command 'tpo'"),
        (("top", "--intervall", "1"), "No such option"),
        (("top", "--interval", "often"), "--interval"),
        (("top", "--interval"), "--interval"),
        (("top", "--interval", "-2"), "--interval"),
        (("top", "--interval", "0"), "--interval"),
        (("top", "--interval", "61"), "--interval"),
        (("top", "--fail-below", "101"), "--fail-below"),
        (("run", "--htm", "page.html", "--", "true"), "No such option: --htm"),
        (("fix", "--budgt", "4m", "train.py"), "No such option: --budgt"),
        (("check", "a.py", "--lr", "1"), "the script's own flags stand behind a --: flatout check train.py -- --lr"),
        (("train", "no-such.yaml"), "cannot read no-such.yaml: there is no such file"),
        (("run", "--trace", "here", "--json", "--", "true"), "--json needs a value before the --"),
        (("run", "--html", "/no/such/page.html", "--", "true"), "cannot write /no/such/page.html: there is no folder"),
        (("fix",), "no command given: flatout fix -- python train.py …"),
        (("fix", "--", "no-such-program"), "no-such-program: command not found"),
        (("fix", "--budget", "soon", "train.py"), "--budget soon: expected a time such as 90s, 10m or 1h"),
        (
            ("fix", "--price", "much", "train.py"),
            "--price much: expected a price an hour, such as 2.5/h, $2.5/h or 2.5EUR/h",
        ),
        (("fix", "--allow", "batchsize", "train.py"), "no change or class called batchsize (did you mean batch-size?)"),
        (("fix", "--out", "/no/such/plan.yaml", "train.py"), "there is no folder /no/such"),
        (("fix", "--out", ".", "train.py"), "cannot write .: it is a folder"),
        (("fix", "--json", "-", "--html", "-", "train.py"), "--json - and --html - would both go to stdout"),
        (("fix", "--allow", "eval", "train.py"), "did you mean eval-interval?"),
        (("fix", "--html", "/no/such/page.html", "train.py"), "cannot write /no/such/page.html: there is no folder"),
        (("try", "--patch", "a.diff"), "no command given: flatout try --patch FILE -- python train.py …"),
        (("try", "--", "true"), "what is to be tried? Give one of --patch FILE, --with DIR, --against COMMAND, --env"),
        (("try", "--patch", "a.diff", "--env", "A=1", "--", "true"), "what is to be tried? Give one of"),
        (("try", "--patch", "no-such.diff", "--", "true"), "no-such.diff"),
        (("try", "--with", "no-such-folder", "--", "true"), "--with no-such-folder: there is no such folder"),
        (("try", "--with", ".", "--", "true"), "--with .: this is the current folder"),
        (("try", "--with", "a" * 300, "--", "true"), "there is no such folder"),
        (("try", "--patch", "a" * 300, "--", "true"), "File name too long"),
        (("try", "--env", "A", "--", "true"), "--env A: expected NAME=VALUE"),
        (("try", "--against", "python 'old.py", "--", "true"), "--against python 'old.py: No closing quotation"),
        (("try", "--against", "no-such-program", "--", "true"), "no-such-program: command not found"),
        (("top", "--once", "--gpu", "99"), "there is no GPU 99"),
        (("top", "--once", "--pid", "999999999"), "there is no process 999999999"),
        (("top", "--once", "--record", "/dev/null/run"), "cannot record into /dev/null/run"),
        (("top", "--once", "--json", "/dev/null/sum.json"), "cannot write /dev/null/sum.json"),
        (("top", "--replay", "/nowhere"), "no trace at /nowhere"),
        (("report", "/nowhere"), "no trace at /nowhere"),
        (("top", "--replay", "/dev"), "/dev is not a trace"),
        (("check", "a" * 300), "File name too long"),
        (("fix", "--out", "a" * 300, "true"), "File name too long"),
        (("run", "--html", "a" * 300, "true"), "File name too long"),
        (("top", "--once", "--csv", "a" * 300), "File name too long"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(flatout_says: Run, arguments: tuple[str, ...], complaint: str) -> None:
    code, out, err = flatout_says(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("flatout: ")
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "HF_TOKEN=LEAK", "python", "train.py"), 127),
        (("fix", "HF_TOKEN=LEAK", "python", "train.py"), 2),
        (("fix", "--only", "token=LEAK", "true"), 2),
        (("report", "https://me:LEAK@host/run"), 2),
    ],
)
def test_a_complaint_does_not_repeat_a_secret(
    flatout_says: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ended, out, err = flatout_says(*arguments)
    assert (ended, out) == (code, "")
    assert "***" in err
    assert "LEAK" not in err


def test_no_folder_is_called_like_a_secret() -> None:
    assert launcher.default_folder(["bash", "-c", "HF_TOKEN=LEAK python train.py"]).name.endswith("-train")


def test_the_runs_of_a_fix_are_kept_beside_its_plan(
    flatout_says: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept(Exception):
        pass

    def search(*_: object, keep_in: Path, **__: object) -> None:
        raise Kept(keep_in)

    monkeypatch.setattr("flatout.fix.fix_command.fix", search)
    for plan, folder in ((tmp_path / "plan.yaml", tmp_path / "flatout-runs"), ("plan.yaml", "flatout-runs")):
        with pytest.raises(Kept) as kept:
            flatout_says("fix", "--out", str(plan), "true")
        assert str(Path(str(kept.value)).parent) == str(folder)


def test_a_plan_without_changes_says_so(flatout_says: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("plan: 1\nchanges: []\n")
    code, _, err = flatout_says("run", "--quiet", "--plan", "plan.yaml", "--", "true")
    assert code == 0
    assert "there is no change in plan.yaml: the command runs as it is" in err


def test_the_checklist_fits_a_narrow_terminal(flatout_says: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = flatout_says("check")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "looked at the machine alone: no script was given, as in"
    assert max(map(len, lines)) <= 60


def test_a_gate_that_says_no_is_exit_code_1(flatout_says: Run) -> None:
    code, _, err = flatout_says("top", "--once", "--fail-below", "100")
    assert (code, err.count("\n")) == (1, 1)


def test_our_own_mistake_keeps_its_traceback(flatout_says: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("flatout.top.top_command.run", break_down)
    with pytest.raises(ZeroDivisionError):
        flatout_says("top")


def test_a_second_ctrl_c_is_exit_code_130(flatout_says: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flatout.top.top_command.run", interrupted)
    assert flatout_says("top").code == 130


def test_once_as_json_on_this_machine() -> None:
    done = subprocess.run([*FLATOUT, "top", "--once", "--json", "-"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    reading = json.loads(done.stdout)
    assert reading["record"] == "top-reading"
    assert reading["host"]["memory_total_bytes"] > 0
    assert reading["interval_s"] > 0.4


def test_a_reader_that_leaves_is_no_error() -> None:
    top = subprocess.Popen(
        [*FLATOUT, "top", "--interval", "0.25"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert top.stdout is not None
    assert top.stderr is not None
    first = top.stdout.readline()
    top.stdout.close()
    complaints = top.stderr.read()
    top.stderr.close()
    assert top.wait(timeout=60) == 141
    assert " | CPU" in first
    assert complaints == ""


def test_a_reader_that_leaves_a_table_is_no_error() -> None:
    check = subprocess.Popen([*FLATOUT, "check"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert check.stdout is not None
    assert check.stderr is not None
    check.stdout.close()
    complaints = check.stderr.read()
    check.stderr.close()
    assert (check.wait(timeout=60), complaints) == (141, b"")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_summary(tmp_path: Path, signal_number: signal.Signals) -> None:
    top = subprocess.Popen(
        [*FLATOUT, "top", "--interval", "0.25", "--record", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert top.stdout is not None
    top.stdout.readline()
    top.send_signal(signal_number)
    out, complaints = top.communicate(timeout=60)
    assert top.returncode == 0
    assert "Verdict: " in out
    assert complaints == ""
    assert list((tmp_path / "run").glob("*.summary.json"))


@pytest.mark.parametrize("modules", ["flatout.cli", "flatout.top.top_command, flatout.top.view", "flatout.trace"])
def test_the_read_side_leaves_torch_alone(modules: str) -> None:
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_reading_needs_neither_torch_nor_textual() -> None:
    script = (
        "import sys; from flatout.cli import app; app(['top', '--once'], standalone_mode=False);"
        "sys.exit(any(heavy in sys.modules for heavy in ('torch', 'textual', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("plan: 1\nchanges: []\n", False),
        ("plan: 1\nchanges:\n- {name: gc_freeze, value: true, safety: identical}\n", True),
        ("# half edi", True),
        (None, False),
    ],
)
def test_a_plan_with_changes_is_not_replaced_by_one_without(tmp_path: Path, text: str | None, stays: bool) -> None:
    path = tmp_path / "flatout-plan.yaml"
    if text is not None:
        path.write_text(text)
    save_plan(Plan(), path, has_gains=False)
    assert (path.read_text() == text) == stays


def test_an_older_plan_with_changes_is_kept_under_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, older = tmp_path / "plan.yaml", tmp_path / "plan-1.yaml"
    one = Change(name="loader", value="elastic", safety="identical")
    undone = Plan(tried=(Outcome(change=one, verdict="undone", note="no gain"),))
    for plan in (Plan(), undone):
        save_plan(plan, path, has_gains=True)
        assert capsys.readouterr().err == f"flatout: there is no change in {path}: with it the command runs as it is\n"
    save_plan(Plan(changes=(one,)), path, has_gains=True)
    assert not older.exists()
    save_plan(Plan(changes=(Change(name="pin_memory", value=True, safety="identical"),)), path, has_gains=True)
    assert [change.name for change in Plan.load(older).changes] == ["loader"]
    assert capsys.readouterr().err == f"flatout: the plan that was in {path} is in {older} now\n"


Full = Callable[[], AbstractContextManager[None]]


def test_a_full_disk_leaves_the_older_plan_and_shows_what_was_found(
    flatout_says: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: Full
) -> None:
    """GIVEN a plan that somebody has edited WHEN the disk is full THEN it is as it was, and the new one is printed."""
    path = tmp_path / "plan.yaml"
    path.write_text(before := "plan: 1\nchanges:\n- {name: num_workers, value: 3, safety: reseeded}  # mine\n")
    change = Change(name="pin_memory", value=True, safety="identical")
    tried = Attempt(outcome=Outcome(change=change, verdict="kept"))
    monkeypatch.setattr("flatout.fix.fix_command.fix", lambda *_, **__: FixResult(kept=(change,), attempts=[tried]))
    with full_disk():
        code, out, err = flatout_says("fix", "--out", path, "true")
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    assert code == 2
    assert "- name: pin_memory\n  value: true" in err
    assert err.splitlines()[-1] == (
        f"flatout: the plan is not saved, and what was there stays: cannot write {path}: File too large"
    )
    assert out  # the report


def test_a_file_that_cannot_be_written_does_not_cost_the_report_on_the_terminal(
    flatout_says: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: Full
) -> None:
    monkeypatch.setattr("flatout.fix.fix_command.fix", lambda *_, **__: FixResult())
    path = tmp_path / "fix.html"
    with full_disk():
        code, out, err = flatout_says("fix", "--out", tmp_path / "plan.yaml", "--html", path, "true")
    assert code == 2
    assert err.splitlines()[-1] == f"flatout: cannot write {path}: File too large"
    assert out.startswith("Nothing to change")


def test_a_full_disk_leaves_the_older_results(flatout_says: Run, tmp_path: Path, full_disk: Full) -> None:
    path = tmp_path / "list.json"
    path.write_text("older")
    with full_disk():
        ended = flatout_says("check", "--json", path)
    assert ended == (2, "", f"flatout: cannot write {path}: File too large\n")
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_older_summary_of_top(flatout_says: Run, tmp_path: Path, full_disk: Full) -> None:
    path = tmp_path / "summary.json"
    path.write_text("older")
    with full_disk():
        code, _, err = flatout_says("top", "--once", "--json", path)
    assert (code, err) == (2, f"flatout: cannot write {path}: File too large\n")
    assert path.read_text() == "older"


def test_a_name_that_is_no_utf_8_does_not_cost_the_report(
    flatout_says: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file name is bytes; Python holds those that are no text as surrogates, which no file in UTF-8 can."""
    monkeypatch.chdir(tmp_path)
    with tarfile.open(TRACE) as packed:
        packed.extractall("tr\udcffain", filter="data")
    for part in Path("tr\udcffain").glob("*.jsonl"):
        part.write_text(part.read_text().replace("record.py", "tr\\udcffain.py"))  # as json writes it
    Path("page.html").write_text("older")
    code, _, err = flatout_says("report", "tr\udcffain", "--html", "page.html", "--json", "page.json")
    assert (code, err) == (0, "")
    assert "tr?ain.py" in Path("page.html").read_text(encoding="utf-8")
    assert "tr\udcffain" in json.loads(Path("page.json").read_text(encoding="utf-8"))["trace"]


@pytest.mark.parametrize("verb", ["report", "compare", "top --replay"])
def test_the_name_of_a_file_sends_no_escape_sequence_to_the_terminal(
    verb: str, tmp_path: Path, make_sample: Callable[..., Sample], flatout_says: Callable[..., Any]
) -> None:
    """GIVEN a recording with a damaged line, which is noted, in a folder and in files of hostile names."""
    hostile = "\x1b[31mred\x1b]0;title\x07\x9b1m\b\x7f\u202etxt"
    folder = tmp_path / hostile
    steps = (Step(index=index, start_s=float(index), wall_ms=10.0, samples=1) for index in range(60))
    for rank, records in ((0, steps), (None, (make_sample(float(t), sm=50, util=60) for t in range(4)))):
        with TraceWriter(folder, RunInfo(name="demo", host="box", rank=rank, facts={})) as writer:
            for record in records:
                writer.write(record)
    for path in list(folder.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:3], "damaged", *lines[3:]]) + "\n")
        path.rename(path.with_name(f"{path.stem}{hostile}.jsonl"))

    code, out, err = flatout_says(*verb.split(), *[folder] * (1 + (verb == "compare")))

    assert code == 0
    assert "damaged" in out or verb == "compare"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out + err)
