"""What is kept and what is undone, on a training whose right answer is known."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_world
from simulated_world import EFFECTS, START_S, Machine, World, flag, with_loader

from flatout.fix import search
from flatout.fix.offers import Wishes
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import ProofRun, ProofStep, Run
from flatout.fix.search import Search
from flatout.launch import launcher
from flatout.launch.protocol import Trial, note_not_measured
from flatout.model.errors import UsageError
from flatout.model.plan import Change
from flatout.model.turns import TurnsResult
from flatout.trace import Sketch, Trace, WorkerReport
from flatout.trace.downsample import window_of

IN_FP32 = {"autocast": ["None"], "compiled": True}
LAUNCHES = {"idle_by_phase_ms": {"forward": 60.0}, "kernel_us": Sketch.of([3.0] * 100)}  # the host is the limit
ALL = Wishes.of(allow="all")


def fix(world: World, wishes: Wishes | None = None, *, budget_s: float = 600.0, **more: Any) -> FixResult:
    return Search(world, wishes or Wishes(), budget_s=budget_s, clock=world.clock, **more).run()


def verdicts(found: FixResult) -> dict[str, str]:
    return {attempt.change.name: attempt.outcome.verdict for attempt in found.attempts}


def kept(found: FixResult) -> dict[str, Any]:
    return {change.name: change.value for change in found.kept}


def test_a_healthy_training_is_left_alone_within_two_minutes() -> None:
    found = fix(World())
    assert found.kept == ()
    assert found.attempts == []
    assert found.stopped == "at the ceiling of the step itself"
    assert found.seconds < 120


def test_a_starved_training_gets_the_elastic_loader_and_its_proof() -> None:
    world = World(machine=Machine(data_ms=80.0), workers=0)
    found = fix(world)
    assert kept(found)["loader"] == "elastic"
    assert found.gain is not None
    assert found.gain.value == pytest.approx(100 / 21.6, rel=0.03)
    attempt = next(a for a in found.attempts if a.change.name == "loader")
    assert attempt.change.safety == "reseeded"
    assert "the same samples in the same order" in attempt.outcome.proof
    assert found.plan.changes[0].note.startswith("4.")


def test_a_training_that_crashes_after_some_steps_gets_a_remark() -> None:
    class Crashing(World):
        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            return replace(super().run(changes, steps, trial), code=1, output="RuntimeError: boom")

    found = fix(Crashing())
    assert found.remarks == ["the command does not end well without any change: exit code 1: RuntimeError: boom"]


def test_a_training_that_crashes_before_it_can_be_measured_is_no_baseline() -> None:
    class Crashing(World):
        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            few = replace(trial, at_least_s=0.0)
            return replace(super().run(changes, 30, few), code=1, output="RuntimeError: boom")

    with pytest.raises(UsageError, match="the command fails by itself: exit code 1: RuntimeError: boom"):
        fix(Crashing())


def test_the_bottleneck_moves_and_is_followed() -> None:
    """Data first; then, with the data there, precision."""
    world = World(machine=Machine(data_ms=80.0), workers=0, facts=IN_FP32, xray={"tensor_core_ms": 0.0})
    found = fix(world)
    assert list(kept(found)) == ["loader", "device_prefetch", "precision"]
    assert found.gain is not None
    assert found.gain.value == pytest.approx(100 / 11.6, rel=0.05)
    proof = next(a.outcome.proof for a in found.attempts if a.change.name == "precision")
    assert "over the last 100 steps, margin 1%" in proof


def test_the_xray_is_repeated_only_for_faster_runs_with_other_work_for_the_gpu() -> None:
    """Where the GPU is given the same work, the X-ray and the ceiling there are still hold."""
    world = World(machine=Machine(data_ms=30.0, busy=0.4), facts=IN_FP32)
    looks: dict[tuple[str, ...], float | None] = {}

    class Watched(World):
        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            looks.setdefault(tuple(change.name for change in changes), trial.look_below_s)
            return world.run(changes, steps, trial)

        def prove(self, *args: Any, **more: Any) -> list[Run]:
            return world.prove(*args, **more)

        def clock(self) -> float:
            return world.clock()

    found = fix(Watched(), budget_s=3600)
    assert kept(found)["loader"] == "elastic"
    assert kept(found)["precision"] == "bf16"
    assert looks == {
        (): None,
        ("loader", "device_prefetch"): 0.0,
        ("loader", "device_prefetch", "precision"): pytest.approx(0.0206, rel=0.02),  # a step with the loader
    }


@pytest.mark.parametrize(("length", "told"), [(64 * 600, True), (64 * 6_000, False), (64 * 20, False)])
def test_short_epochs_get_a_remark_unless_one_was_measured(length: int, told: bool) -> None:
    found = fix(World(machine=Machine(data_ms=80.0), workers=0, length=length))
    assert kept(found)["loader"] == "elastic"
    assert any(remark.startswith("an epoch takes 13 s now") for remark in found.remarks) is told


@pytest.fixture
def by_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is too slow for turns: changes are judged by runs of their own."""
    monkeypatch.setattr(search, "SLOW_STEP_S", 0.0)


def test_changes_to_computing_are_decided_in_one_run() -> None:
    """GIVEN two that pay and one that does not THEN each has its own verdict and gain, and its speed is theirs."""
    effects = EFFECTS | {"fused_optimizer": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.1)}
    facts = IN_FP32 | {"channels_last": False, "optimizer_fused": False}
    found = fix(World(facts=facts, effects=effects))
    assert kept(found) == {"precision": "bf16", "fused_optimizer": True}
    gains = {attempt.change.name: attempt.gain.value for attempt in found.attempts if attempt.gain is not None}
    assert gains == pytest.approx({"precision": 2.0, "channels_last": 1.0, "fused_optimizer": 1.1})
    assert found.trials[1].what == "precision bf16 + channels_last + fused_optimizer, in turns"
    assert found.trials[1].speed is not None
    assert found.trials[1].speed.value == pytest.approx(2.2 * found.trials[0].speed.value, rel=0.03)
    assert not any(trial.what.startswith("without") for trial in found.trials)


def test_a_change_that_crashes_in_its_turn_does_not_take_the_others_with_it() -> None:
    effects = EFFECTS | {"fused_optimizer": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.1)}
    facts = IN_FP32 | {"channels_last": False, "optimizer_fused": False}
    oom = {"channels_last": "RuntimeError: CUDA error: out of memory"}
    found = fix(World(facts=facts, effects=effects, crash=oom))
    assert kept(found) == {"precision": "bf16", "fused_optimizer": True}
    assert verdicts(found)["channels_last"] == "unsafe"
    assert "the GPU is out of memory" in found.plan.tried[0].note


def test_a_change_that_hangs_in_its_turn_says_where_and_the_others_follow() -> None:
    class StandsStill(World):
        """Its process sees that it hangs, and ends."""

        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            run = super().run(changes, steps, replace(trial, timeout_s=40.0))
            seen = [replace(one, note="at a.py:7" if one.state == "under way" else "") for one in run.turns]
            return replace(run, code=1 if run.hung else run.code, turns=tuple(seen))

    facts = IN_FP32 | {"channels_last": False, "optimizer_fused": False}
    found = fix(StandsStill(facts=facts, hang=frozenset({"channels_last"})))
    assert kept(found) == {"precision": "bf16"}
    assert verdicts(found)["channels_last"] == "unsafe"
    assert found.plan.tried[0].note == "at a.py:7"


def test_a_run_that_ends_before_all_had_their_turns_is_made_once_more_as_one() -> None:
    class Short(World):
        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            run = super().run(changes, steps, trial)
            return replace(run, turns=tuple(TurnsResult(name=name) for name in trial.turns))

    found = fix(Short(facts=IN_FP32))
    assert kept(found) == {"precision": "bf16"}
    assert [trial.what for trial in found.trials[1:3]] == ["precision bf16, in turns", "precision bf16"]


def test_a_crash_when_all_had_their_turns_is_told_as_one() -> None:
    class CrashesLate(World):
        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            run = super().run(changes, steps, trial)
            return replace(run, code=1, output="ValueError: too late") if changes else run

    said: list[str] = []
    listener = ProgressListener()
    listener.say = said.append  # type: ignore[method-assign]
    world = CrashesLate(facts=IN_FP32)
    found = Search(world, Wishes(), budget_s=600.0, clock=world.clock, progress=listener).run()
    assert verdicts(found)["precision"] == "unsafe"
    assert "precision bf16: exit code 1: ValueError: too late. As one" in said


def test_what_gives_nothing_is_undone_and_says_so() -> None:
    world = World(facts=IN_FP32, effects={"precision": lambda m, _: replace(m, compute_ms=0.995 * m.compute_ms)})
    found = fix(world)
    assert found.kept == ()
    assert verdicts(found)["precision"] == "undone"
    assert "no gain, in 8 rounds of turns" in found.plan.tried[0].note


@pytest.mark.usefixtures("by_runs")
def test_luck_is_not_believed() -> None:
    """Machines whose runs differ by a tenth, and changes that do nothing, however often it looks as if they did."""
    idle = {"precision": lambda m, _: m}
    found = [fix(World(facts=IN_FP32, run_noise=0.10, seed=seed, effects=idle), budget_s=3600) for seed in range(8)]
    assert sum(bool(one.kept) for one in found) <= 2
    assert all(one.noise is not None for one in found)
    unsteady = [any(remark.startswith("runs of the same plan vary by ±") for remark in one.remarks) for one in found]
    assert sum(unsteady) >= 2


def test_what_looks_promising_is_settled_before_anything_else_is_tried() -> None:
    found = fix(World(machine=Machine(data_ms=4.6), workers=0), Wishes.of(skip="device-prefetch"), budget_s=3600)
    tried = [trial.what for trial in found.trials]
    assert tried[1] == "elastic loader"
    assert "is close" in tried[2]
    assert kept(found) == {"loader": "elastic"}


@pytest.mark.usefixtures("by_runs")
def test_a_close_call_says_that_there_was_no_time_to_repeat_it() -> None:
    world = World(
        facts=IN_FP32,
        run_noise=0.004,
        effects={"precision": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.028)},
    )
    found = fix(world, budget_s=86)
    (attempt,) = found.attempts
    shortfall = "no gain over 2% was shown, and what time is left is for proof and comparison"
    assert attempt.outcome.note.endswith(shortfall)


@pytest.mark.usefixtures("by_runs")
def test_a_close_call_is_run_again_until_it_is_known() -> None:
    world = World(
        facts=IN_FP32,
        run_noise=0.004,
        effects={"precision": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.028)},
    )
    found = fix(world, budget_s=3600)
    again = [trial.what for trial in found.trials if "again" in trial.what]
    assert any("is close" in what for what in again)
    assert kept(found) == {"precision": "bf16"}


@pytest.mark.usefixtures("by_runs")
def test_what_could_not_be_told_from_noise_gets_one_more_chance_when_time_is_left() -> None:
    """Runs differ by a tenth, and so does the gain: one run of each does not settle it."""
    gain_of_a_tenth = {"precision": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.1)}
    lines: list[str] = []
    listener = ProgressListener()
    listener.say = lines.append  # type: ignore[method-assign]
    found = fix(World(facts=IN_FP32, run_noise=0.10, effects=gain_of_a_tenth), budget_s=3600, progress=listener)
    assert "precision bf16: to be tried again when nothing else is left" in lines
    assert sum("precision bf16" in trial.what and "proof" not in trial.what for trial in found.trials) >= 3
    assert sorted(attempt.change.value for attempt in found.attempts) == ["bf16", "tf32"]  # each is told once


def test_a_loader_that_finds_its_workers_takes_the_place_of_a_number_of_them() -> None:
    """Tried first, the loader cannot be told from noise; a number of workers can; tried again, it does without them."""
    effects = {
        "loader": lambda m, _: replace(m, data_ms=0.3 * m.data_ms),
        "num_workers": lambda m, _: replace(m, data_ms=0.1 * m.data_ms),
    }
    world = World(machine=Machine(data_ms=4.0), workers=0, effects=effects)
    found = fix(world, Wishes.of(only="loader,num-workers"), budget_s=3600)
    assert {"loader", "num_workers"} <= {name for names in world.started for name in names}
    assert not any({"loader", "num_workers"} <= set(names) for names in world.started)
    assert len(found.kept) == 1
    assert sorted(verdicts(found).values()) == ["kept", "undone"]


def test_where_only_and_skip_leave_nothing_to_try_it_says_so() -> None:
    found = fix(World(machine=Machine(data_ms=80.0), workers=0), Wishes.of(only="eval-interval"))
    assert not found.attempts
    assert found.stopped == "nothing of what --only and --skip leave promises more"


def test_a_machine_that_gets_slower_does_not_undo_what_helps_and_is_reported() -> None:
    world = World(machine=Machine(data_ms=80.0), workers=0, drift_a_run=0.03)
    found = fix(world)
    assert kept(found)["loader"] == "elastic"
    assert found.gain is not None
    assert found.gain.value == pytest.approx(100 / 21.6, rel=0.06)  # neighbours in time were compared
    assert any("the machine drifted" in remark for remark in found.remarks)


def test_a_machine_that_gets_faster_gives_nobody_a_gain() -> None:
    """The page cache warms: each run is 1% faster than the one before. A change that does nothing is not kept."""
    world = World(facts=IN_FP32, drift_a_run=-0.01, effects={})
    assert fix(world, budget_s=3600).kept == ()


def test_what_the_last_comparison_does_not_confirm_is_dropped() -> None:
    """It was fast once, and never again."""
    world = World(facts=IN_FP32)
    once = iter([2.0])
    world.effects["precision"] = lambda m, _: replace(m, compute_ms=m.compute_ms / next(once, 0.5))
    found = fix(world)
    assert found.kept == ()
    assert found.gain is None
    assert "not confirmed" in found.plan.tried[0].note


def test_a_crash_is_an_outcome_with_its_place_and_the_rest_of_the_bundle_is_tried() -> None:
    crash = (
        'Traceback (most recent call last):\n  File "/home/me/net.py", line 41, in forward\n    x.view(-1)\n'
        '  File "/venv/lib/python3.11/site-packages/torch/tensor.py", line 9, in view\n'
        "RuntimeError: view size is not compatible with input tensor's size and stride\n"
    )
    world = World(
        facts=IN_FP32 | {"channels_last": False},
        xray={"tensor_core_ms": 0.0},
        crash={"channels_last": crash},
    )
    found = fix(world)
    assert verdicts(found)["channels_last"] == "unsafe"
    note = next(o.note for o in found.plan.tried if o.change.name == "channels_last")
    assert "view size is not compatible" in note
    assert "net.py:41" in note
    assert kept(found) == {"precision": "bf16"}


def test_a_hang_is_an_outcome() -> None:
    world = World(facts=IN_FP32, hang=frozenset({"precision"}))
    found = fix(world)
    assert verdicts(found)["precision"] == "unsafe"
    assert "was ended after" in found.plan.tried[0].note


def test_what_cannot_be_made_says_why_and_the_next_best_is_tried() -> None:
    world = World(machine=Machine(data_ms=80.0), workers=0, refused={"loader": "the dataset is a DataPipe"})
    found = fix(world)
    assert verdicts(found)["loader"] == "not applicable"
    assert kept(found)["num_workers"] >= 2


def test_running_out_of_memory_is_said_in_plain_words() -> None:
    world = World(
        settings=[flag("batch_size", 64)],
        facts={"memory_reserved_bytes": 20 << 30},
        xray=LAUNCHES,
        crash={"batch_size": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"},
    )
    found = fix(world, ALL)
    assert verdicts(found)["batch_size"] == "unsafe"
    assert "the GPU is out of memory" in found.plan.tried[0].note


def test_the_batch_grows_while_that_pays_and_the_learning_rate_with_it() -> None:
    world = World(
        settings=[flag("batch_size", 64, lr=1e-3)],
        facts={"memory_reserved_bytes": 2 << 30},
        xray=LAUNCHES,
    )
    found = fix(world, ALL)
    changes = {change.name: change for change in found.kept}
    batch = changes["batch_size"].value
    assert batch >= 1024
    assert changes["batch_size"].knob == "--batch-size"
    assert changes["learning_rate"].value == pytest.approx(1e-3 * math.sqrt(batch / 64), rel=1e-3)
    assert changes["learning_rate"].safety == "semantic"


def test_what_changes_learning_is_only_tried_when_allowed_and_offered_otherwise() -> None:
    settings = [flag("batch_size", 64)]
    world = World(settings=settings, facts={"memory_reserved_bytes": 2 << 30})
    world.xray = LAUNCHES
    found = fix(world)
    assert found.kept == ()
    assert [change.name for offer in found.withheld for change in offer.changes] == ["batch_size"]


def test_evaluation_is_found_by_looking_at_a_whole_epoch() -> None:
    """A short trial never sees it: 12,800 samples are 200 steps."""
    world = World(machine=Machine(eval_s=2.0), length=19_200, settings=[flag("eval_every", 1)])
    found = fix(world, ALL)
    assert kept(found) == {"eval_interval": 5}
    assert found.gain is not None
    assert found.gain.value == pytest.approx((330 * 0.02 + 2) / (330 * 0.02 + 0.4), rel=0.05)


def test_the_gain_of_rarer_pauses_is_what_they_took_however_much_the_machine_drifts() -> None:
    """GIVEN an evaluation of 2 s after 300 steps of 20 ms, and runs that differ by a fifth."""
    world = World(machine=Machine(eval_s=2.0), length=19_200, settings=[flag("eval_every", 1)], run_noise=0.2)
    found = fix(world, ALL)
    assert kept(found) == {"eval_interval": 5}
    assert found.gain is not None
    assert found.gain.value == pytest.approx((330 * 0.02 + 2) / (330 * 0.02 + 0.4), rel=0.05)
    assert found.speeds is not None
    assert found.speeds[1].with_pauses / found.speeds[0].with_pauses == pytest.approx(found.gain.value)


@pytest.mark.parametrize("first", [False, True])
def test_an_evaluation_in_five_takes_a_fifth_whichever_falls_into_the_trial(first: bool) -> None:
    """GIVEN one of 2 s after 300 steps of 20 ms, THEN the gain is that of a long training: (6.6 + 2) to (6.6 + 0.4)."""
    world = World(machine=Machine(eval_s=2.0, eval_first=first), length=19_200, settings=[flag("eval_every", 1)])
    found = fix(world, ALL)
    assert kept(found) == {"eval_interval": 5}
    assert found.gain is not None
    assert found.gain.value == pytest.approx(8.6 / 7.0, rel=0.04)


def test_an_interval_that_does_nothing_is_found_out() -> None:
    world = World(machine=Machine(eval_s=2.0, eval_knob=False), length=19_200, settings=[flag("eval_every", 1)])
    found = fix(world, ALL)
    assert not found.kept
    assert [a.outcome.note for a in found.attempts] == ["in a trial there are as many pauses as before"]


class NoSecondEpoch(World):
    """Its second epoch ends with an exception."""

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        run = super().run(changes, steps, trial)
        if steps < 600:
            return run
        return Run(changes=tuple(changes), code=1, seconds=run.seconds, output="KeyError: 'acc'")


def test_a_second_epoch_that_fails_is_an_outcome() -> None:
    machine = Machine(eval_s=2.0, eval_first=True)
    found = fix(NoSecondEpoch(machine=machine, length=19_200, settings=[flag("eval_every", 1)]), ALL)
    assert [(a.change.name, a.outcome.verdict) for a in found.attempts] == [("eval_interval", "unsafe")]


class LongEpochs(World):
    """Evaluates every 200 steps, of 20,000 in an epoch; a run that takes too long is ended."""

    def _trace(self, m: Machine, steps: int) -> Trace:
        made = super()._trace(replace(m, batch=64), steps)
        return with_loader(made, length=20_000 * 64)

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        began_s = self.clock_s
        run = super().run(changes, steps, trial)
        if run.seconds <= (trial.timeout_s or 0.0):
            return run
        self.clock_s = began_s + (trial.timeout_s or 0.0)
        return Run(changes=tuple(changes), code=launcher.TIMED_OUT, seconds=(trial.timeout_s or 0.0), output="")


class Stream(World):
    """Nobody knows how long an epoch is."""

    def _trace(self, m: Machine, steps: int) -> Trace:
        made = super()._trace(m, steps)
        return with_loader(made, length=None)


def test_rarer_evaluation_of_a_stream_is_compared_with_its_pauses() -> None:
    """GIVEN an evaluation of 0.4 s after every 20 steps of 20 ms."""
    found = fix(Stream(machine=Machine(eval_s=0.4), length=20 * 64, settings=[flag("eval_steps", 1)]), ALL)
    assert kept(found) == {"eval_interval": 5}
    assert found.paused
    assert found.gain is not None
    assert found.gain.value == pytest.approx((20 * 0.02 + 0.4) / (20 * 0.02 + 0.08), rel=0.1)
    assert not any("epoch" in trial.what for trial in found.trials)


def test_an_epoch_that_there_is_no_time_for_is_not_begun() -> None:
    machine: dict[str, Any] = {"machine": Machine(eval_s=1.5), "length": 200 * 64, "settings": [flag("eval_every", 1)]}
    found = fix(LongEpochs(**machine), ALL, budget_s=300)
    assert [trial.what for trial in found.trials] == ["the command as it is"]
    enough = re.search(r"eval_interval 5: --budget (\d+)m would do", found.stopped)
    assert enough is not None
    assert kept(fix(LongEpochs(**machine), ALL, budget_s=60 * int(enough[1]))) == {"eval_interval": 5}


def test_rarer_evaluation_shows_through_steps_and_runs_that_differ() -> None:
    """It is the pauses that change; what steps and machines are like by luck is the same on both sides."""
    for seed in range(6):
        noisy = World(step_noise=0.3, run_noise=0.1, seed=seed)
        world = replace(noisy, machine=Machine(eval_s=2.0), length=19_200, settings=[flag("eval_every", 1)])
        found = fix(world, Wishes.of(allow="eval_interval", only="eval_interval"))
        assert kept(found) == {"eval_interval": 5}


def test_the_budget_is_kept_and_what_was_not_tried_is_named() -> None:
    world = World(
        machine=Machine(data_ms=80.0), workers=0, facts=IN_FP32 | {"compiled": False}, xray={"tensor_core_ms": 0.0}
    )
    found = fix(world, budget_s=100)
    assert found.seconds <= 100 * 1.1
    assert kept(found).get("loader") == "elastic"  # the most promising came first
    assert found.stopped.startswith("too little time was left to try and prove precision bf16")


def test_a_budget_too_short_for_anything_says_what_would_do() -> None:
    starved = World(machine=Machine(data_ms=80.0), workers=0)
    found = fix(starved, budget_s=40)
    assert found.attempts == []
    assert [offer.changes[0].name for offer in found.untried] == ["loader"]
    enough = re.search(r"--budget (\d+)m would do", found.stopped)
    assert enough is not None
    assert kept(fix(World(machine=Machine(data_ms=80.0), workers=0), budget_s=60 * int(enough[1])))


@pytest.mark.parametrize(("budget_s", "said"), [(60, r"--budget 3m is the least that makes sense"),
                                                (600, r"there is time for \d\d trials, the proof")])  # fmt: skip
def test_what_a_budget_is_enough_for_is_said_after_the_first_run(budget_s: float, said: str) -> None:
    lines: list[str] = []
    listener = ProgressListener()
    listener.say = lines.append  # type: ignore[method-assign]
    fix(World(machine=Machine(data_ms=80.0)), budget_s=budget_s, progress=listener)
    assert re.search(said, lines[1])


@pytest.mark.parametrize("start_s", [3.0, 30.0, 120.0])
def test_the_least_budget_is_enough_for_a_trial_its_proof_and_the_last_comparison(
    start_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_world, "START_S", start_s)
    said: list[str] = []
    listener = ProgressListener()
    listener.say = said.append  # type: ignore[method-assign]
    fix(World(machine=Machine(data_ms=80.0), workers=0), budget_s=start_s + 15, progress=listener)
    enough = re.search(r"--budget (\d+)m is the least", said[1])
    assert enough is not None
    found = fix(World(machine=Machine(data_ms=80.0), workers=0), budget_s=60 * int(enough[1]))
    assert "loader" in kept(found)
    assert found.gain is not None
    assert not [remark for remark in found.remarks if "no time" in remark]
    assert found.trials[-1].what == "with all that was kept"


def test_a_budget_that_would_do_has_time_to_tune_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulated_world.START_S", 3.0)
    eager: dict[str, Any] = {"facts": {"compiled": False}, "xray": {"top_ms": {"elementwise_kernel": 100.0}}}
    found = fix(World(**eager), budget_s=150)
    enough = re.search(r"compile max-autotune: --budget (\d+)m would do", found.stopped)
    assert enough is not None
    tried = fix(World(**eager), budget_s=60 * int(enough[1]))
    assert "compile max-autotune" in [trial.what for trial in tried.trials]


def test_four_minutes_are_enough_for_everything() -> None:
    """Loader, precision, layout, fused optimizer, compile, batch size and evaluation, where a run starts in 10 s."""
    world = World(
        machine=Machine(data_ms=60.0, eval_s=1.5, facts=IN_FP32 | {"compiled": False, "channels_last": False}),
        workers=0,
        length=38_400,
        settings=[flag("batch_size", 64, lr=1e-3, eval_every=1)],
        facts={"memory_reserved_bytes": 4 << 30, "optimizer_fused": False},
        xray=LAUNCHES | {"tensor_core_ms": 0.0},
    )
    found = fix(world, ALL, budget_s=240)
    assert found.seconds <= 260
    assert {"loader", "precision", "batch_size"} <= set(kept(found))
    by_hand_s = (
        38.4 / (256 / (10 / 1.25 * 1.3 + 4.8)) + 1.5 / 5
    )  # bf16, compiled, four times the batch, and its loading
    assert found.gain is not None
    assert found.gain.value > 0.95 * (38.4 / (64 / 80) + 1.5) / by_hand_s


class Captcha(World):
    """A GPU busy in fp32, of which each run uses a sixth; runs share the GPU."""

    def _worker(self, m: Machine) -> WorkerReport:
        return replace(super()._worker(m), random_used=())

    def _proof(self, changes: Sequence[Change], steps: int) -> tuple[ProofStep, ...]:
        return tuple(replace(step, inputs=(str(n),)) for n, step in enumerate(super()._proof(changes, steps)))

    def prove(self, wanted: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        start_s = self.clock_s
        runs = super().prove(wanted, timeout_s=timeout_s, at_once=at_once)
        on_gpu_s = sum(run.metrics.breakdown.training_ms for run in runs) / 1e3
        self.clock_s = max(self.clock_s, start_s + START_S + on_gpu_s)
        return runs


def captcha() -> Captcha:
    def compiled(m: Machine, mode: str) -> Machine:
        step_ms = m.compute_ms / {"default": 1.1, "reduce-overhead": 1.2, "max-autotune": 1.3}[mode]
        return replace(m, compute_ms=step_ms, extra_start_s=40.0, facts={"compiled": True})

    def fuller(m: Machine, value: int) -> Machine:
        return replace(m, batch=value, compute_ms=0.95 * m.compute_ms * value / m.batch)

    return Captcha(
        machine=Machine(batch=256, compute_ms=70.0),
        length=125_440,
        workers=28,
        settings=[flag("batch_size", 256, lr=1e-3, amp=True, compile_model=True)],
        facts={"autocast": ["None"], "compiled": False, "memory_reserved_bytes": 22 << 30},
        xray={"top_ms": {"elementwise_kernel": 300.0}, "tensor_core_ms": 0.0},
        effects=EFFECTS | {"compile": compiled, "batch_size": fuller},
    )


LARGER_BATCH = {"batch_size": 512, "learning_rate": 0.001414}


@pytest.mark.parametrize(("minutes", "more", "gain"), [(4, {}, 2 * 1.2), (6, LARGER_BATCH, 2 * 1.2 / 0.95)])
def test_four_minutes_do_for_a_large_step_that_is_compiled(minutes: int, more: dict[str, Any], gain: float) -> None:
    """THEN all is found that shows in one run; a batch that brings 5% takes repeats, and six minutes."""
    found = fix(captcha(), ALL, budget_s=60 * minutes)
    expected = {"loader": "elastic", "device_prefetch": True, "precision": "bf16", "compile": "reduce-overhead"}
    assert kept(found) == expected | more
    assert found.gain is not None
    assert found.gain.value == pytest.approx(gain, rel=0.03)
    assert found.seconds <= 60 * minutes
    assert [trial.what for trial in found.trials if trial.speed is None] == ["proof: 5 runs side by side"]


def test_where_compiling_changes_the_loss_the_rest_is_proven_without_it() -> None:
    """GIVEN a compiler that rounds where nothing else does THEN it is dropped, and nothing more is run for that."""

    class Misrounded(Captcha):
        def _proof(self, changes: Sequence[Change], steps: int) -> tuple[ProofStep, ...]:
            wrong = 1.1 if any(change.name == "compile" for change in changes) else 1.0
            return tuple(replace(step, loss=wrong * step.loss) for step in super()._proof(changes, steps))

    calm = captcha()
    found = fix(Misrounded(**{field.name: getattr(calm, field.name) for field in fields(calm)}), ALL, budget_s=240)
    assert verdicts(found)["compile"] == "unsafe"
    assert {"precision", "loader"} <= set(kept(found))
    assert [trial.what for trial in found.trials if trial.speed is None] == ["proof: 5 runs side by side"]
    assert found.gain is not None
    assert found.gain.value == pytest.approx(2.0, rel=0.03)


def test_where_there_is_no_time_to_prove_rounding_the_rest_of_an_offer_is_tried() -> None:
    """GIVEN steps of 420 ms, and workers that keep every core busy with pictures."""
    world = World(
        machine=Machine(data_ms=400.0),
        workers=16,
        cpu_pct=97.0,
        facts={"pillow": True, "memory_reserved_bytes": 4 << 30},
        effects=EFFECTS | {"loader": lambda m, _: replace(m, data_ms=0.8 * m.data_ms)},
    )
    found = fix(world, budget_s=240)
    assert kept(found) == {"loader": "elastic", "device_prefetch": True}
    assert "prove gpu_transforms: --budget" in found.stopped


def test_with_time_close_calls_are_run_again_and_kernels_are_tuned() -> None:
    found = fix(captcha(), ALL, budget_s=1200)
    tried = [trial.what for trial in found.trials]
    assert kept(found)["compile"] == "max-autotune"
    assert any(what.startswith("batch_size 512") and "is close" in what for what in tried)
    assert not any(what.startswith("without") for what in tried)  # each was decided by itself


def test_what_there_is_no_time_for_does_not_stand_in_the_way_of_the_rest() -> None:
    """GIVEN no three minutes to tune kernels THEN a whole epoch is looked at all the same, and evaluation is rarer."""
    world = World(
        machine=Machine(eval_s=2.0),
        length=19_200,
        settings=[flag("eval_every", 1)],
        facts={"compiled": False},
        xray={"top_ms": {"elementwise_kernel": 100.0}},
    )
    found = fix(world, ALL, budget_s=240)
    assert kept(found) == {"compile": "reduce-overhead", "eval_interval": 5}
    assert "compile max-autotune" in found.stopped


def test_an_interruption_leaves_what_is_known() -> None:
    world = World(machine=Machine(data_ms=80.0), workers=0, facts=IN_FP32, xray={"tensor_core_ms": 0.0}, interrupt_at=3)
    found = fix(world)
    assert found.interrupted
    assert kept(found) == {"loader": "elastic", "device_prefetch": True}  # rounding that was not looked at is not kept
    assert "interrupted before the proof" in found.plan.changes[0].note


def test_compiling_that_never_pays_back_is_undone() -> None:
    world = World(
        facts={"compiled": False},
        xray={"top_ms": {"elementwise_kernel": 100.0}},
        settings=[flag("epochs", 1)],
        length=2_000,
    )
    found = fix(world)
    assert verdicts(found)["compile"] == "undone"
    assert "more than the 2,000 of the whole training" in found.plan.tried[0].note


def test_where_compiling_never_pays_back_the_rest_stays() -> None:
    world = World(
        settings=[flag("amp", True, compile_model=True, epochs=1)],
        facts={"autocast": ["None"], "compiled": False, "optimizer_fused": True},
        xray={"top_ms": {"elementwise_kernel": 100.0}},
        length=2_000,
    )
    found = fix(world)
    assert verdicts(found)["compile"] == "undone"
    assert kept(found) == {"precision": "bf16"}


def test_where_compiling_fails_the_rest_stays() -> None:
    world = World(
        settings=[flag("amp", True, compile_model=True)],
        facts={"autocast": ["None"], "compiled": False, "optimizer_fused": True},
        xray={"top_ms": {"elementwise_kernel": 100.0}, "tensor_core_ms": 0.0},
        crash={"compile": "torch._dynamo.exc.Unsupported: a generator"},
    )
    found = fix(world)
    assert found.trials[1].what == "precision bf16, in turns"
    assert verdicts(found) == {"precision": "kept", "compile": "unsafe"}


def test_a_change_that_changes_the_loss_is_dropped() -> None:
    def worse(changes: Any, losses: np.ndarray) -> np.ndarray:
        return losses * 1.02 if any(change.name == "precision" for change in changes) else losses

    world = World(facts=IN_FP32, teaches=worse)
    found = fix(world)
    assert found.kept == ()
    assert verdicts(found)["precision"] == "unsafe"
    assert "failed: loss +2.00%" in found.plan.tried[0].note


def test_a_machine_that_never_repeats_its_losses_does_not_refute_the_same_batches() -> None:
    """Atomics in another order: the losses of two runs of one plan differ by 2%, and so may those with a change."""
    runs = itertools.count()

    def chaotic(_: Any, losses: np.ndarray) -> np.ndarray:
        return losses * (1 + 0.02 * (next(runs) % 3))

    found = fix(World(machine=Machine(data_ms=30.0), teaches=chaotic))
    assert kept(found) == {"loader": "elastic", "device_prefetch": True}
    assert any("what the machine alone does" in trial.what for trial in found.trials)


def test_in_a_bundle_only_the_guilty_change_is_dropped() -> None:
    def worse(changes: Any, losses: np.ndarray) -> np.ndarray:
        return losses * 1.05 if any(change.name == "channels_last" for change in changes) else losses

    slower = {**World().effects, "channels_last": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.2)}
    world = World(facts=IN_FP32 | {"channels_last": False}, effects=slower, teaches=worse)
    found = fix(world)
    assert kept(found) == {"precision": "bf16"}
    assert verdicts(found)["channels_last"] == "unsafe"
    assert found.gain is not None
    assert found.gain.value == pytest.approx(2.0, rel=0.03)  # measured again without it


@pytest.mark.usefixtures("by_runs")
def test_rounding_that_brings_nothing_beside_the_others_is_pruned() -> None:
    world = World(facts=IN_FP32 | {"channels_last": False})  # channels_last has no effect in this world
    found = fix(world)
    assert kept(found) == {"precision": "bf16"}
    assert "brings nothing beside the others" in found.plan.tried[0].note


@pytest.mark.usefixtures("by_runs")
def test_where_there_is_no_time_to_prune_that_is_said_once() -> None:
    found = fix(World(facts=IN_FP32 | {"channels_last": False}), budget_s=80)
    assert set(kept(found)) == {"precision", "channels_last"}
    assert "no time to see what each brings alone: precision bf16, channels_last" in found.remarks


def test_a_command_that_fails_without_any_change_is_a_usage_error() -> None:
    class Broken(World):
        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            run = super().run(changes, steps, trial)
            return replace(run, code=1, trace=None, speed=None, output="ModuleNotFoundError: No module named 'torchh'")

    with pytest.raises(UsageError, match=r"the command fails by itself: exit code 1: ModuleNotFoundError"):
        fix(Broken())


@pytest.mark.parametrize(("steps", "hint"), [(20, "takes fewer steps (--steps 20)"), (100, "does not end")])
def test_a_command_that_is_too_slow_or_hangs_gets_a_message(steps: int, hint: str) -> None:
    """Some steps were there when it was ended: they are no baseline, every run would take as long."""
    world = World()

    class Hanging(World):
        def run(self, changes: Sequence[Change], _: int, trial: Trial) -> Run:
            run = world.run(changes, steps, trial)
            return replace(run, code=launcher.TIMED_OUT, trace=world._trace(world.machine, steps))

    with pytest.raises(UsageError, match=f"had taken {steps} of 48 training steps when it was.*{re.escape(hint)}"):
        fix(Hanging())


def test_the_script_s_own_switch_comes_first_and_the_hook_where_it_does_nothing() -> None:
    amp_off = [flag("amp", False)]
    works = World(settings=amp_off, facts=IN_FP32)
    works.effects["precision"] = lambda m, v: replace(
        m, compute_ms=m.compute_ms / 2, facts=m.facts | {"autocast": ["bfloat16"]}
    )
    change = fix(works).kept[0]
    assert (change.value, change.knob) == (True, "--amp")
    deaf = World(settings=amp_off, facts=IN_FP32)
    deaf.effects["precision"] = lambda m, v: m if v is True else replace(m, compute_ms=m.compute_ms / 2)
    found = fix(deaf)
    assert (found.kept[0].value, found.kept[0].knob) == ("bf16", "")
    assert "ran in fp32 without autocast" in found.plan.tried[0].note


def test_a_command_that_flatout_cannot_look_into_says_why(tmp_path: Path) -> None:
    why = "ImportError: cannot import name 'x' from 'numpy' (mtrand.so)"
    note_not_measured(tmp_path, why)

    class Blind(World):
        def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
            return Run(changes=(), code=0, seconds=3.0, folder=tmp_path)

    with pytest.raises(UsageError, match=re.escape(f"could not look into the command: {why}")):
        fix(Blind())


STARVED_IN_FP32 = {"machine": Machine(data_ms=80.0), "workers": 0, "facts": IN_FP32, "xray": {"tensor_core_ms": 0.0}}


class BreaksInTheEnd(World):
    """What was kept ran well until it was proven, and then does not."""

    proving = False

    def prove(self, *args: Any, **options: Any) -> list[Run]:
        self.proving = True
        return super().prove(*args, **options)

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        if self.proving and changes:
            return Run(changes=tuple(changes), code=1, seconds=1.0, output="RuntimeError: an illegal memory access")
        return super().run(changes, steps, trial)


def test_what_breaks_in_the_last_comparison_is_dropped() -> None:
    found = fix(BreaksInTheEnd(machine=Machine(data_ms=80.0), workers=0))
    assert (found.kept, found.gain) == ((), None)
    assert verdicts(found)["loader"] == "unsafe"
    (why,) = {a.outcome.note for a in found.attempts if a.change.name == "loader"}
    assert why == "failed: with all that was kept, exit code 1: RuntimeError: an illegal memory access"
    assert any("was dropped" in remark for remark in found.remarks)


class OtherBytes(World):
    """device_prefetch changes what reaches the model."""

    def _proof(self, changes: Sequence[Change], steps: int) -> Any:
        wrong = any(change.name == "device_prefetch" for change in changes)
        return tuple(replace(step, inputs=(f"{wrong}{step.inputs}",)) for step in super()._proof(changes, steps))


def test_one_change_that_fails_its_proof_does_not_take_the_others_with_it() -> None:
    found = fix(OtherBytes(**STARVED_IN_FP32))
    assert verdicts(found)["device_prefetch"] == "unsafe"
    assert kept(found) == {"loader": "elastic", "precision": "bf16"}
    proofs = {a.change.name: a.outcome.proof for a in found.attempts}
    assert proofs["precision"].startswith("loss +0.00%")
    assert found.measured is not None
    assert {change.name for change in found.measured.changes} == {"loader", "precision"}


class BreaksAlone(World):
    """The command as it was ends early when it is to be proven."""

    def _run(self, changes: Sequence[Change], steps: int, trial: Trial, *, fingerprints: bool = False) -> Run:
        run = super()._run(changes, steps, trial, fingerprints=fingerprints)
        return replace(run, code=1, proof=(), output="OSError: no space") if fingerprints and not changes else run


def test_a_proof_whose_first_run_breaks_takes_no_more_of_them() -> None:
    found = fix(BreaksAlone(**STARVED_IN_FP32))
    assert [trial.what for trial in found.trials if trial.speed is None] == ["proof: the command as it was"]
    assert found.kept == ()
    assert "the command as it was failed: exit code 1: OSError: no space" in found.plan.tried[0].note


class NeverTheSameBytes(World):
    """A critic that is fed what its generator made, on a GPU that adds in any order."""

    def _proof(self, changes: Sequence[Change], steps: int) -> Any:
        run = len(self.started)
        return tuple(replace(step, inputs=(f"{run}{step.inputs}",)) for step in super()._proof(changes, steps))


def test_a_change_is_not_to_blame_for_bytes_that_differ_without_it_too() -> None:
    found = fix(NeverTheSameBytes(machine=Machine(data_ms=80.0), workers=0))
    assert kept(found) == {"loader": "elastic"}
    assert verdicts(found)["device_prefetch"] == "undone"
    assert "without it too" in found.plan.tried[0].note


def test_the_figures_are_those_of_what_was_kept_or_there_are_none() -> None:
    """Interrupted before the proof: precision is dropped, and no run of the rest alone is the last one."""
    whole = World(**STARVED_IN_FP32)
    fix(whole)
    proof_begins = whole.started.index((), 1)
    found = fix(World(**STARVED_IN_FP32, interrupt_at=proof_begins))
    assert "precision" not in kept(found)
    assert "loader" in kept(found)
    assert "precision" in {change.name for change in found.after.changes}  # type: ignore[union-attr]
    assert found.measured is None


def test_the_figures_of_rarer_pauses_are_those_of_the_run_that_showed_them() -> None:
    found = fix(World(machine=Machine(eval_s=2.0), length=19_200, settings=[flag("eval_every", 1)]), ALL)
    assert found.measured is not None
    assert [change.name for change in found.measured.changes] == ["eval_interval"]
    assert "the command as it was, again" not in [trial.what for trial in found.trials]


@pytest.mark.parametrize(
    ("passes", "batches", "loaders", "steps_an_epoch"),
    [
        pytest.param(4, 4, 1, 25, id="gradients of four batches are added up"),
        pytest.param(2, 1, 1, 100, id="a critic and a generator, in one step"),
        pytest.param(1, 0.5, 1, 200, id="a critic and a generator, a step each"),
        pytest.param(1, 2, 2, 100, id="two loaders side by side"),
        pytest.param(2, 2, 2, 100, id="a critic and a generator, and two loaders side by side"),
        pytest.param(2, 4, 2, 50, id="gradients of two batches, each of two loaders"),
        pytest.param(2, 1.25, 2, 100, id="a second loader of small batches"),
    ],
)
def test_an_epoch_has_as_many_steps_as_its_batches_make(
    passes: int, batches: float, loaders: int, steps_an_epoch: int
) -> None:
    run = World(length=6400).run((), 48, Trial(timeout_s=60))
    assert run.trace is not None
    rank = run.trace.ranks[0]
    steps = tuple(replace(step, micro_steps=passes, samples=int(64 * batches)) for step in rank.steps)
    facts = replace(rank.facts, loaders_side_by_side=loaders)
    seen = replace(rank, steps=steps, windows=(window_of(list(steps)),), facts=facts)
    assert replace(run, trace=replace(run.trace, ranks=(seen,))).metrics.steps_an_epoch == steps_an_epoch


def test_an_epoch_is_what_the_sampler_gives_not_what_the_dataset_has() -> None:
    run = World(length=6400).run((), 48, Trial(timeout_s=60))
    assert run.trace is not None
    trace = with_loader(run.trace, batch_size=None, batches=10)
    assert (run.samples_an_epoch, replace(run, trace=trace).samples_an_epoch) == (6400, 640)


def test_a_gain_that_was_not_measured_again_says_so() -> None:
    found = [fix(World(machine=Machine(data_ms=80.0), workers=0), budget_s=budget_s) for budget_s in (600, 100)]
    said = [any("no time was left to measure before and after" in remark for remark in one.remarks) for one in found]
    assert [bool(one.kept) for one in found] == [True, True]
    assert said == [False, True]


# --- what fares otherwise in company ----------------------------------------------------------------------------------

TURNED = {**EFFECTS, "channels_last": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.2)}


def test_changes_that_pass_one_by_one_have_to_pass_together_too() -> None:
    """GIVEN two changes that each add 0.7% to the loss, where 1% is the margin."""

    def worse(changes: Sequence[Change], losses: np.ndarray) -> np.ndarray:
        return losses * (1 + 0.007 * len({"precision", "channels_last"} & {change.name for change in changes}))

    found = fix(World(facts=IN_FP32 | {"channels_last": False}, effects=TURNED, teaches=worse))
    assert kept(found) == {"precision": "bf16"}
    turned = next(a for a in found.attempts if a.change.name == "channels_last")
    assert turned.outcome.verdict == "unsafe"
    assert "loss +1.40%" in turned.outcome.note
    assert turned.outcome.note.endswith("together with precision bf16")


def test_a_last_comparison_that_the_budget_cuts_off_says_nothing_against_what_was_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN that the proof takes one change away, and no time is left to measure the others by themselves."""

    class CutOff(World):
        def _run(self, changes: Sequence[Change], steps: int, trial: Trial, *, fingerprints: bool = False) -> Run:
            began_s = self.clock_s
            run = super()._run(changes, steps, trial, fingerprints=fingerprints)
            if run.seconds <= (trial.timeout_s or 0.0):
                return run
            self.clock_s = began_s + (trial.timeout_s or 0.0)
            return replace(run, code=launcher.TIMED_OUT, seconds=(trial.timeout_s or 0.0))

    def worse(changes: Sequence[Change], losses: np.ndarray) -> np.ndarray:
        return losses * 1.05 if any(change.name == "channels_last" for change in changes) else losses

    monkeypatch.setattr(simulated_world, "START_S", 40)
    found = fix(CutOff(facts=IN_FP32 | {"channels_last": False}, effects=TURNED, teaches=worse), budget_s=315.0)
    assert kept(found) == {"precision": "bf16"}
    assert found.gain is None
    assert "what was kept in the end was not measured as a whole" in found.remarks


def test_without_time_for_a_last_comparison_the_trials_have_to_be_sure() -> None:
    """GIVEN a change that brings nothing, and runs that vary by 2%, THEN luck rarely passes for a gain."""
    worlds = (
        World(facts=IN_FP32, run_noise=0.02, seed=seed, effects={"precision": lambda m, _: m}) for seed in range(20)
    )
    assert sum(bool(fix(world, budget_s=100.0).kept) for world in worlds) <= 1


def test_what_a_dropped_change_had_replaced_is_not_called_kept() -> None:
    def worse(changes: Sequence[Change], losses: np.ndarray) -> np.ndarray:
        return losses * 1.05 if any(change.value == "max-autotune" for change in changes) else losses

    faster = {"default": 1.3, "reduce-overhead": 1.6, "max-autotune": 2.0}
    effects = {**EFFECTS, "compile": lambda m, mode: replace(m, compute_ms=m.compute_ms / faster[mode])}
    found = fix(World(facts={"compiled": False}, machine=Machine(late=0.3), teaches=worse, effects=effects))
    assert found.kept == ()
    assert "kept" not in {attempt.outcome.verdict for attempt in found.attempts}
    assert {(o.change.value, o.verdict) for o in found.plan.tried} >= {
        ("reduce-overhead", "undone"),
        ("max-autotune", "unsafe"),
    }
