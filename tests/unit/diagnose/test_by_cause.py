"""Training's time by cause: it adds up, and no promise goes beyond it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from diagnose_cases import HEALTHY, hardware, trace, workers, xray
from test_recorded import RECORDINGS, unpacked

from flatout.diagnose.by_cause import by_cause
from flatout.diagnose.rank_metrics import metrics_of
from flatout.diagnose.rules import diagnose
from flatout.model.records import Frame, Stacks, StackTime
from flatout.trace import Trace

NO_GPU = {"facts": {"gpu": None}, "xray": None}


def shares(made: Trace) -> dict[str, float]:
    """By code, or by name where there is none."""
    account = by_cause(metrics_of(made)[0], diagnose(made))
    return {charge.code or charge.name: charge.share for charge in account.charges}


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name.removesuffix(".tgz"))
def test_the_account_of_a_recorded_training_adds_up_and_bounds_every_promise(recording: Path, tmp_path: Path) -> None:
    made = unpacked(recording, tmp_path)
    metrics, found = metrics_of(made)[0], diagnose(made)
    account = by_cause(metrics, found)
    assert sum(charge.share for charge in account.charges) == pytest.approx(1.0)
    assert all(charge.share >= 0 for charge in account.charges)
    for finding in found:
        charge = account.charge_of(finding)
        if charge is not None and charge.kind == "idle" and finding.derived != "measured ceiling":
            assert finding.gain_high <= 1 / (1 - finding.share) + 1e-9, finding.code
            assert finding.share >= charge.share - 1e-9


def test_without_a_gpu_each_wait_is_charged_to_its_cause() -> None:
    made = trace(
        ("data", 60.0, None, None),
        ("forward", 10.0, None, None),
        ("backward", 10.0, None, None),
        ("evaluation", 20.0, None, None),
        loader={"num_workers": 0},
        workers=workers(1, sample_ms=1.0, busy=0.7),
        **NO_GPU,
    )
    assert shares(made) == pytest.approx({"useful work": 0.2, "data.main-thread": 0.6, "pause.eval": 0.2})


def test_on_a_gpu_only_its_idle_time_is_charged_and_its_wasteful_work_is_told_apart() -> None:
    in_fp32 = {"autocast": ["None"]}
    half_idle = (("data", 20.0, 20.0, None), *HEALTHY[1:])
    made = trace(
        *half_idle,
        facts=in_fp32,
        loader={"num_workers": 0},
        workers=workers(1, sample_ms=1.0, busy=0.7),
        xray=xray(tensor_core_ms=0.0),
    )
    charged = shares(made)
    assert charged["data.main-thread"] == pytest.approx(0.5, abs=0.02)
    assert 0 < charged["compute.precision"] < 0.5
    assert charged["useful work"] + charged["compute.precision"] == pytest.approx(0.5, abs=0.03)


def test_the_verdict_is_the_largest_share() -> None:
    """Nine tenths of the time in the loop's own code come before a loader that could be a little faster."""
    made = trace(
        ("data", 4.0, None, None),
        ("forward", 4.0, None, None),
        ("rest", 92.0, None, None),
        loader={"num_workers": 0},
        workers=workers(1, sample_ms=1.0, busy=0.7),
        stacks=(looks("metric", "train.py:7", "numpy/lib/hist.py:3"),),
        **NO_GPU,
    )
    verdict = diagnose(made)[0]
    assert (verdict.code, verdict.where) == ("host.python", "train.py:7")
    assert "metric, which calls numpy.histogram" in verdict.title
    assert verdict.gain_high == pytest.approx(1 / (1 - verdict.share))


def looks(function: str, where: str, called: str) -> Stacks:
    """A hundred looks at the training thread, all at one line."""
    frames = (
        Frame(where=where, function=function, own=True, source="h = np.histogram(x)"),
        Frame(where=called, function="histogram"),
    )
    seen = StackTime(phase="rest", frames=(0, 1), seconds=1.0, looks=100)
    return Stacks(time_s=110.0, pid=1, frames=frames, stacks=(seen,))


def test_a_danger_is_told_before_any_share() -> None:
    full = hardware(99.0)
    for sample in full:
        object.__setattr__(sample.host, "memory_used_bytes", 99)
        object.__setattr__(sample.host, "memory_total_bytes", 100)
    made = trace(("data", 60.0, None, None), ("forward", 20.0, None, None), samples=full, **NO_GPU)
    assert diagnose(made)[0].code == "memory.host"


def test_waits_too_short_for_a_finding_are_the_remainder() -> None:
    made = trace(*HEALTHY, ("rest", 1.0, None, None), **NO_GPU)
    account = by_cause(metrics_of(made)[0], diagnose(made))
    assert account.remainder == pytest.approx(1.1 / 21.0, abs=0.01)
    assert math.isclose(account.useful + account.remainder, 1.0)
