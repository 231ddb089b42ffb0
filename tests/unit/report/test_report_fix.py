"""What a person sees of a fix: the story, the page, and what to do for good."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "fix"))

from report_runs import printed
from simulated_world import Machine, World, flag

from flatout.fix.offers import Wishes
from flatout.fix.patch import FilePatch
from flatout.fix.result import Attempt
from flatout.fix.search import Search
from flatout.fix.speed import Gain
from flatout.model.plan import Change, Outcome
from flatout.report import FixSummary, summarize
from flatout.report.account import Price
from flatout.report.page import page
from flatout.report.terminal import FixProgress, show
from flatout.report.views import permanently


def fixed(
    world: World, allow: str = "", price: Price | None = None, budget_s: float = 600, only: str = ""
) -> FixSummary:
    found = Search(world, Wishes.of(allow=allow, only=only), budget_s=budget_s, clock=world.clock).run()
    return summarize(found, ("python", "train.py"), "flatout-plan.yaml", price)


def with_attempts(fix: FixSummary, *attempts: Attempt, **changes: Any) -> FixSummary:
    return replace(fix, result=replace(fix.result, attempts=list(attempts), **changes))


@pytest.fixture(scope="module")
def starved() -> FixSummary:
    return fixed(
        World(machine=Machine(data_ms=80.0), workers=0, settings=[flag("eval_every", 1)]), price=Price.of("$3.6/h")
    )


def shown(fix: FixSummary) -> str:
    return printed(lambda console: show(fix, console))


def test_the_terminal_shows_what_was_kept_its_proof_and_the_next_command(starved: FixSummary) -> None:
    text = shown(starved)
    assert text.startswith("Trains 4.")
    assert "elastic loader + device_prefetch: 4." in text
    assert "together with" not in text
    assert "reseeded: 60 batches: the same samples in the same order" in text
    assert "to make it permanent: import flatout, and flatout.DataLoader(" in text
    assert text.rstrip().endswith("Train with it:  flatout run --plan flatout-plan.yaml -- python train.py")


def test_a_patch_that_has_failed_is_said_first(starved: FixSummary) -> None:
    files = {Path("train.py"): (b"one", b"two")}
    patch = FilePatch(file=Path("fix.diff"), files=files, command=starved.command)
    failed = replace(starved, patch=replace(patch, outcome="failed", tried="it does not run: exit code 1"))
    assert shown(failed).startswith(
        "Do not use fix.diff, train with the plan: it does not run: exit code 1.\nTrains 4."
    )
    assert failed.to_json()["patch"]["outcome"] == "failed"
    passed = replace(starved, patch=replace(patch, outcome="passed", tried="trains as with the plan (60 steps)"))
    assert shown(passed).startswith("Trains 4.")
    assert "  passed: trains as with the plan (60 steps)\n" in shown(passed)
    assert "the gain above is that of the plan" in shown(failed)
    assert ("git apply" in shown(passed), "git apply" in shown(failed)) == (True, False)


def test_changes_measured_together_show_one_gain(starved: FixSummary) -> None:
    """Each of two changes with a gain of 4.6 would look like 21 times as fast."""
    gain = str(starved.kept[0].gain)
    assert shown(starved).count(gain) == page(starved).count(f"{gain}<") == 1


@pytest.mark.parametrize(
    ("price", "costs"),
    [
        ("3.6/h", r"0\.031\d* in the currency of --price"),
        ("$3.6/h", r"\$0\.031\d*"),
        ("3.6EUR/h", r"0\.031\d* EUR"),
        (" € 3.6 ", r"€0\.031\d*"),
    ],
)
def test_the_cost_of_an_epoch_is_shown_where_nothing_was_kept_too(price: str, costs: str) -> None:
    told = " ".join(shown(fixed(World(machine=Machine()), price=Price.of(price))).split())
    assert "Nothing to change" in told
    assert re.search(rf"an epoch 31\.\d s an epoch costs {costs}", told)


@pytest.mark.parametrize("text", ["", "/h", "much", "2.5.1", "-3/h", "$2.5EUR/h", "2.5/d", "nan"])
def test_a_text_that_is_not_a_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no price"):
        Price.of(text)


def test_before_and_after_have_energy_and_money(starved: FixSummary) -> None:
    rows = {name: value for name, value, _ in starved.figures()}
    assert rows["energy a sample"] == "0.468 J → 0.101 J"  # 300 W at 641 and about 2,960 samples/s
    assert rows["an epoch"].startswith("2 min 36 s → ")
    assert rows["an epoch costs"].startswith("$0.156 → $")
    assert starved.to_json()["currency"] == "$"


def test_the_speeds_shown_are_those_that_the_gain_is_of() -> None:
    """Each side ran more than once, and on a noisy machine the last pair says something else."""
    fix = fixed(World(machine=Machine(data_ms=80.0), workers=0, run_noise=0.2))
    data = fix.to_json()
    before, after = (data[side]["samples_per_s"] for side in ("before", "after"))
    assert after / before == pytest.approx(data["gain"]["value"])
    assert before not in [trial["samples_per_s"] for trial in data["trials"]]


def test_speeds_that_count_pauses_say_so() -> None:
    fix = fixed(World(machine=Machine(eval_s=2.0), length=19_200, settings=[flag("eval_every", 1)]), allow="all")
    assert fix.result.paused
    assert fix.sentence().endswith("samples/s, pauses counted.")
    assert fix.figures()[0][0] == "samples/s, pauses counted"


def test_a_gain_within_the_noise_is_not_called_worthless(starved: FixSummary) -> None:
    tried = replace(starved.kept[0], gain=Gain(value=1.1, low=0.9, high=1.1))
    sentence = with_attempts(starved, tried, kept=()).sentence()
    assert sentence.startswith("Nothing to change. Tried and not kept: elastic loader")


def test_an_unproven_change_is_not_said_to_leave_training_the_same(starved: FixSummary) -> None:
    kept = starved.result.attempts[0]
    unproven = replace(kept, outcome=replace(kept.outcome, proof="not proven: interrupted before the proof"))
    rest = starved.result.attempts[1:]
    text = shown(with_attempts(starved, unproven, *rest))
    assert "said to be reseeded, not proven: interrupted before the proof" in " ".join(text.split())


def test_nothing_to_change_is_said_with_the_reason() -> None:
    text = shown(fixed(World()))
    assert text.startswith("Nothing to change: nothing was worth trying (at the ceiling of the step")
    assert "1 run in 17.9 s" in text
    assert "Train with it" not in text


def test_too_little_time_to_try_is_not_called_nothing_to_change() -> None:
    text = shown(fixed(World(machine=Machine(data_ms=80.0), workers=0), budget_s=40))
    assert text.startswith("Nothing was tried: too little time was left to try and prove elastic loader")


def test_an_interruption_is_not_called_nothing_to_change() -> None:
    text = shown(fixed(World(machine=Machine(data_ms=80.0), workers=0, interrupt_at=1)))
    assert text.startswith("Interrupted: nothing was kept so far.")


def test_findings_that_no_change_can_fix_are_left_to_the_person() -> None:
    """GIVEN evaluation that takes a third of the time and a loader that is too slow WHEN the script has no knob for the
    first THEN that is told with what to do, and what was fixed is not."""
    machine = Machine(data_ms=80.0, eval_s=2.0)
    fix = fixed(World(machine=machine, workers=0, length=19_200))
    assert [finding.code for finding in fix.left] == ["pause.eval"]
    text = " ".join(shown(fix).split())
    assert "Left to you training stands still for evaluation" in text
    assert fix.left[0].advice in text
    assert "Left to you" in page(fix)
    assert [one["code"] for one in fix.to_json()["left"]] == ["pause.eval"]

    knob = fixed(World(machine=machine, workers=0, length=19_200, settings=[flag("eval_every", 1)]))
    assert [offer.changes[0].name for offer in knob.result.withheld] == ["eval_interval"]
    assert not knob.left
    assert "eft to you" not in shown(knob) + page(knob)


def test_waiting_for_data_is_left_to_the_person_after_its_changes_failed() -> None:
    """GIVEN samples loaded in the training process WHEN workers crash it THEN
    what holds it up is not forgotten; where they were seen to bring nothing, it is."""
    machine = Machine(data_ms=80.0)
    fix = fixed(World(machine=machine, workers=0, crash={"num_workers": "RuntimeError: no"}), only="num-workers")
    assert [a.outcome.verdict for a in fix.result.attempts] == ["unsafe"]
    assert [finding.code for finding in fix.left] == ["data.main-thread"]
    assert fix.left[0].advice.endswith("(tried, and not kept)")
    useless = fixed(World(machine=machine, workers=0, effects={}), only="num-workers")
    assert [a.outcome.verdict for a in useless.result.attempts] == ["undone"]
    assert not useless.left


def test_a_fix_fits_the_width_of_the_terminal(starved: FixSummary) -> None:
    console = Console(file=io.StringIO(), width=60)
    show(starved, console)
    FixProgress(console).say("a line that is longer than sixty columns, as those of a fix tend to be")
    lines = console.file.getvalue().splitlines()
    commands = [line for line in lines if line.startswith("Train with it:")]  # to be copied: in one piece
    assert max(len(line) for line in lines if line not in commands) <= 60


def test_the_page_has_both_steps_every_run_and_the_edits(starved: FixSummary) -> None:
    text = page(starved)
    for words in ("Where a step&#x27;s time went, and where it goes", "Runs", "flatout.DataLoader(..., num_workers"):
        assert words in text
    assert "Nothing to change" in page(fixed(World()))


def test_the_json_names_what_was_tried(starved: FixSummary) -> None:
    data = starved.to_json()
    assert data["schema"] == 1
    assert data["gain"]["low"] > 1
    assert [entry["name"] for entry in data["kept"]] == ["loader", "device_prefetch"]
    assert data["kept"][0]["permanently"].startswith("import flatout, and flatout.DataLoader(...")
    assert data["trials"][0]["what"] == "the command as it is"


def attempt(change: Change, where: str = "") -> Attempt:
    return Attempt(outcome=Outcome(change=change, verdict="kept"), where=where)


@pytest.mark.parametrize(
    ("knob", "value", "words"),
    [
        ("--batch-size", 256, "pass --batch-size 256"),
        ("--amp", True, "pass --amp"),
        ("conf/train.yaml:train.batch_size", 256, "in conf/train.yaml: train.batch_size: 256"),
        ("conf/train.yaml:amp", True, "in conf/train.yaml: amp: true"),
        ("config.py:BATCH_SIZE", 256, "in config.py: BATCH_SIZE = 256"),
    ],
)
def test_a_setting_is_changed_permanently_where_the_script_reads_it(knob: str, value: object, words: str) -> None:
    assert permanently(attempt(Change(name="batch_size", value=value, safety="semantic", knob=knob))) == words


def test_a_loader_that_the_trainer_makes_is_no_line_to_edit() -> None:
    ours, workers = (Change(name=name, value=4, safety="reseeded") for name in ("loader", "num_workers"))
    assert permanently(attempt(ours, "train.py:9"), "transformers").startswith("nothing to edit, the Trainer makes")
    assert permanently(attempt(workers, "train.py:9"), "transformers") == (
        "TrainingArguments(..., dataloader_num_workers=4)"
    )


def test_an_edit_is_shown_with_every_place_it_belongs_to() -> None:
    pinned = Change(name="pin_memory", value=True, safety="identical")
    edit = "train.py:3: DataLoader(..., pin_memory=True)"
    assert permanently(attempt(pinned, "train.py:3")) == edit
    elsewhere = replace(attempt(pinned, "train.py:3"), also=("val.py:7", "val.py:9"))
    assert permanently(elsewhere) == f"{edit}; the same at val.py:7, val.py:9"


@pytest.mark.parametrize(
    ("terminal", "shown"),
    [
        ({}, "run 2 of about 5: elastic loader + device_p… ━━╺━━━━━━━━━ 4:15 left, 1.8× so far"),
        ({"no_color": True}, "run 2 of about 5: elastic loader + device_p… ━━           4:15 left, 1.8× so far"),
        ({"width": 50}, "run 2 of abou… ━━╺━━━━━━━━━ 4:15 left, 1.8× so far"),
    ],
    ids=["80 columns", "NO_COLOR", "narrow"],
)
def test_the_progress_on_a_terminal_is_one_line_below_what_is_said(terminal: dict[str, Any], shown: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, highlight=False, **{"width": 80} | terminal)
    with FixProgress(console) as progress:
        progress.say("187.9 samples/s: something holds it up")
        progress.run_begins("elastic loader + device_prefetch \x1b[31m+ [bold]gc_freeze", 255.4, 2, 5, 1.83)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    if terminal.get("no_color"):
        assert "\x1b[3" not in written
        assert "\x1b[9" not in written
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written).replace("\r", "\n").splitlines()
    assert shown in lines
    assert "187.9 samples/s: something holds it up" in lines
    assert max(map(len, lines)) <= console.width


@pytest.mark.parametrize("terminal", [{}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}])
def test_the_progress_in_a_pipe_is_lines(terminal: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False, **terminal)
    with FixProgress(console) as progress:
        progress.run_begins("elastic loader", 255.4, 2, 5, 1.83)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.sub(r"\x1b\[[0-9]*m", "", text) == "… run 2 of about 5: elastic loader (4 min 15 s left, 1.8× so far)\n"


def test_the_progress_is_lines() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    world = World(machine=Machine(data_ms=80.0), workers=0)
    Search(world, Wishes(), budget_s=600, clock=world.clock, progress=FixProgress(console)).run()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "… run 1: the command as it is (10 min 0 s left)"
    assert any(line.startswith("… run 2 of about 5: elastic loader + device_prefetch (") for line in lines)
    assert any(line.startswith("elastic loader + device_prefetch: kept, 4.") for line in lines)
