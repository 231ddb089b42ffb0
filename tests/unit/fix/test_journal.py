"""A fix that was interrupted goes on: with what it has measured, and with nothing else."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_world import Machine, World

from flatout.fix import journal
from flatout.fix.journal import JOURNAL, UNFINISHED, Journal, basis_of, can_resume, held, to_resume
from flatout.fix.offers import Wishes
from flatout.fix.result import FixResult
from flatout.fix.runs import ProofRun, Run
from flatout.fix.search import Search
from flatout.launch.protocol import Trial
from flatout.model.errors import UsageError
from flatout.model.plan import Change

IN_FP32 = {"autocast": ["None"], "compiled": False}
LONG_S = 36_000.0


class Recording(World):
    """A world whose runs leave a folder, and look the same however often the fix was interrupted before."""

    folder: Path
    numbers: Iterator[int]
    leads: set[int]  # whose weights are there to follow

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        self.leads = set()
        return self._recorded(super().run(changes, steps, trial))

    def prove(self, wanted: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        self.leads |= {one.leads for one in wanted}
        assert {one.follows for one in wanted} - {0} <= self.leads, "its leader was not run in this proof"
        return [self._recorded(run) for run in super().prove(wanted, timeout_s=timeout_s, at_once=at_once)]

    def _recorded(self, run: Run) -> Run:
        place = self.folder / f"{next(self.numbers):02d}"
        place.mkdir(parents=True)
        (place / "run.pickle").write_bytes(pickle.dumps(run))
        return replace(run, folder=place)


def read_again(changes: tuple[Change, ...], code: int, seconds: float, folder: Path, *, asked: int) -> Run:
    run: Run = pickle.loads((folder / "run.pickle").read_bytes())
    assert (run.code, run.seconds) == (code, seconds)
    assert [change.name for change in run.changes] == [change.name for change in changes]
    return replace(run, changes=changes, folder=folder)


def world_in(folder: Path, **more: Any) -> Recording:
    """One whose data is late, whose GPU computes in fp32, and one of whose changes crashes it."""
    settings: dict[str, Any] = {
        "machine": Machine(data_ms=80.0),
        "workers": 0,
        "facts": IN_FP32,
        "xray": {"tensor_core_ms": 0.0},
        "run_noise": 0.0,
        "step_noise": 0.002,
        "crash": {"compile": "RuntimeError: boom"},
    }
    world = Recording(**settings | more)
    world.folder, world.numbers, world.leads = folder, itertools.count(1), set()
    return world


def fix(world: Recording, place: Path, *, budget_s: float = LONG_S, wishes: Wishes | None = None) -> FixResult:
    place.mkdir(exist_ok=True)
    runner = Journal(world, place, {}, {}, read=read_again)
    result = Search(runner, wishes or Wishes(), budget_s=budget_s, clock=world.clock).run()
    shutil.rmtree(world.folder, ignore_errors=True)  # as the scratch folder of a fix
    return result


def decided(result: FixResult) -> list[tuple[str, Any, str]]:
    return [(a.change.name, a.change.value, a.outcome.verdict) for a in result.attempts]


def test_a_fix_interrupted_before_any_of_its_runs_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole = world_in(tmp_path / "whole")
    expected = fix(whole, tmp_path / "journal")
    assert [name for name, _, verdict in decided(expected) if verdict == "kept"] == [
        "loader",
        "device_prefetch",
        "precision",
    ]
    trials = next(number for number, made in enumerate(expected.trials) if made.what.startswith("proof"))
    for stop in range(1, len(whole.started)):
        place = tmp_path / f"{stop}"
        first = world_in(tmp_path / "first", interrupt_at=stop)
        assert fix(first, place).interrupted
        second = world_in(tmp_path / "second")
        result = fix(second, place)
        assert decided(result) == decided(expected), stop
        assert [str(c) for c in result.kept] == [str(c) for c in expected.kept], stop
        assert [trial.what for trial in result.trials] == [trial.what for trial in expected.trials], stop
        # No trial is made twice; of a proof under way, and of the last comparison, what there was of it.
        twice = Counter(first.started) + Counter(second.started) - Counter(whole.started)
        assert twice.total() <= max(0, stop - trials), stop
        if stop == len(whole.started) - 1:
            assert twice.total() == 1, "the proof was over, and the comparison begins again"


def test_a_fix_may_be_interrupted_again_and_again(tmp_path: Path) -> None:
    expected = fix(world_in(tmp_path / "whole"), tmp_path / "journal")
    runs = 0
    for _ in range(30):
        world = world_in(tmp_path / "some", interrupt_at=4)
        result = fix(world, tmp_path / "resumed")
        runs += len(world.started)
        if not result.interrupted:
            break
    assert decided(result) == decided(expected)


def test_after_a_spent_budget_only_what_was_not_tried_runs_and_the_end_is_measured_anew(tmp_path: Path) -> None:
    place = tmp_path / "journal"
    first, second = world_in(tmp_path / "first"), world_in(tmp_path / "second")
    cut_short = fix(first, place, budget_s=110)
    assert cut_short.out_of_time
    assert "precision" not in {name for name, _, _ in decided(cut_short)}
    result = fix(second, place)
    assert {change.name for change in result.kept} == {"loader", "device_prefetch", "precision"}
    assert () not in second.started[:1], "the baseline is there already"
    assert second.started[-2:] == [(), ("loader", "device_prefetch", "precision")]
    assert any("precision" in names for names in second.started)


def test_a_proof_of_another_plan_is_of_no_use(tmp_path: Path) -> None:
    """Its runs go on from weights that are gone: all of a proof is made in one go."""
    place, only_data = tmp_path / "journal", Wishes.of(skip="equivalent")
    runs = len(fix(world_in(tmp_path / "whole"), tmp_path / "other", wishes=only_data).trials)
    assert fix(world_in(tmp_path / "first", interrupt_at=runs - 1), place, wishes=only_data).interrupted
    assert '"after": "' in (place / JOURNAL).read_text().replace('"after": ""', ""), "a proof was over"
    second = world_in(tmp_path / "second")
    result = fix(second, place)
    assert [change.name for change in result.kept] == ["loader", "device_prefetch", "precision"]
    assert all(attempt.outcome.proof for attempt in result.attempts if attempt.is_kept)
    made_again = [trial.what for trial in result.trials if trial.what.startswith("proof")]
    assert made_again[0] == "proof: the command as it was"
    assert () in second.started


def test_a_run_that_had_less_time_than_there_is_now_is_made_again(tmp_path: Path) -> None:
    place, runs = tmp_path / "journal", tmp_path / "runs"
    place.mkdir()
    for timeout_s, started in ((60.0, 1), (60.0, 0), (600.0, 1), (300.0, 0)):
        world = world_in(runs, hang=frozenset({"loader"}))
        loader = Change(name="loader", value="elastic", safety="reseeded")
        assert Journal(world, place, {}, {}, read=read_again).run((loader,), 48, Trial(timeout_s=timeout_s)).hung
        assert len(world.started) == started
        shutil.rmtree(runs, ignore_errors=True)


def test_what_does_not_fit_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 1)
    place, said = tmp_path / "journal", list[str]()
    place.mkdir()
    runner = Journal(world_in(tmp_path / "runs"), place, {}, {}, read=read_again, say=said.append)
    for _ in range(2):
        assert runner.run((), 48, Trial(timeout_s=60)).is_measured
    assert said == ["what is measured from now on cannot be resumed: recordings take more than 0 MB"]
    assert not list(place.iterdir())


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import model")
    Path("model.py").write_text("")
    return ["python", "train.py", "--token", "LEAK"]


def unfinished_fix(command: list[str], folder: Path = Path("flatout-runs/1-fix")) -> Path:
    place = folder / UNFINISHED
    place.mkdir(parents=True)
    world = world_in(folder / "runs")
    Journal(world, place, basis_of(command), {"only": "loader"}, read=read_again).run((), 48, Trial(timeout_s=60))
    return folder


def test_the_last_unfinished_fix_of_a_command_is_found(command: list[str]) -> None:
    runs = Path("flatout-runs")
    older, newer, other = (unfinished_fix(words, runs / f"{number}-fix") for number, words in enumerate(
        (command, command, ["python", "train.py"])))  # fmt: skip
    os.utime(older / UNFINISHED / JOURNAL, (1, 1))
    assert to_resume(command, runs).folder == newer
    assert to_resume(command, runs).options == {"only": "loader"}
    assert to_resume(command, runs, older).folder == older
    with pytest.raises(UsageError, match=r"2-fix cannot be resumed: it is of another command: python train\.py$"):
        to_resume(command, runs, other)
    assert can_resume(newer)


def test_nothing_to_go_on_with_is_one_line(command: list[str]) -> None:
    runs = Path("flatout-runs")
    with pytest.raises(UsageError, match="there is nothing to go on with: no unfinished fix in flatout-runs"):
        to_resume(command, runs)
    with pytest.raises(UsageError, match="--resume elsewhere: there is no unfinished fix"):
        to_resume(command, runs, Path("elsewhere"))
    unfinished_fix(["python", "train.py", "--token", "LEAK"])
    with pytest.raises(UsageError, match=r"1-fix is of another command: python train\.py --token '\*\*\*'$"):
        to_resume(["python", "other.py"], runs)


@pytest.mark.parametrize("name", ["train.py", "model.py"])
def test_a_script_that_has_changed_is_named(command: list[str], name: str) -> None:
    folder = unfinished_fix(command)
    Path(name).write_text("import torch")
    with pytest.raises(UsageError, match=f"cannot be resumed: .*/{name} has changed since"):
        to_resume(command, folder.parent)


@pytest.mark.parametrize(
    ("name", "was"), [("flatout", "0.0.1"), ("torch", "1.0"), ("GPUs", "NVIDIA H200"), ("cores", 1000)]
)
def test_another_machine_or_version_is_named(command: list[str], name: str, was: object) -> None:
    place = Path("flatout-runs/1-fix") / UNFINISHED
    place.mkdir(parents=True)
    basis = basis_of(command) | {name: was}
    runner = Journal(world_in(Path("runs")), place, basis, {}, read=read_again)
    runner.run((), 48, Trial(timeout_s=60))
    with pytest.raises(UsageError, match=f"cannot be resumed: {name} was {was}, and is .* now"):
        to_resume(command, Path("flatout-runs"))


def test_another_torch_in_the_command_shows_when_it_has_run(tmp_path: Path) -> None:
    place = tmp_path / UNFINISHED
    place.mkdir()
    for version, asked in (("2.1", 48), ("2.2", 49)):
        facts = {"versions": {"python": "3.12", "torch": version}}
        runner = Journal(world_in(tmp_path / version, facts=facts), place, {}, {}, read=read_again)
        if asked == 49:
            runner.run((), 48, Trial(timeout_s=60))
            with pytest.raises(UsageError, match=r"trained with torch 2\.1 on NVIDIA H200, and does with torch 2\.2"):
                runner.run((), asked, Trial(timeout_s=60))
        else:
            runner.run((), asked, Trial(timeout_s=60))


def test_two_fixes_do_not_use_one_journal(tmp_path: Path) -> None:
    folder = tmp_path / "flatout-runs" / "1-fix"
    with held(folder):
        assert folder.is_dir()
        with pytest.raises(UsageError, match="is still running"), held(folder):
            pass
    assert not folder.parent.exists(), "one that has measured nothing leaves nothing"


def test_no_secret_is_kept_and_nobody_else_reads_it(command: list[str]) -> None:
    place = unfinished_fix(command) / UNFINISHED
    assert "LEAK" not in (place / JOURNAL).read_text()
    assert (place / JOURNAL).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{}", '{"journal": 1}', '{"journal": 1, "runs": [{"asked": 1}]}',
    '{"journal": 1, "of": {}, "options": {}, "runs": [{"asked": "", "seconds": 1, "timeout_s": 1, '
    '"runs": [{"name": "../../x", "code": 0, "seconds": 1}]}]}'])  # fmt: skip
def test_a_damaged_journal_is_one_line(command: list[str], text: str) -> None:
    folder = unfinished_fix(command)
    (folder / UNFINISHED / JOURNAL).write_text(text)
    with pytest.raises(UsageError, match=r"journal\.json"):
        Journal(world_in(Path("runs")), to_resume(command, folder.parent, folder).folder / UNFINISHED, {}, {})
