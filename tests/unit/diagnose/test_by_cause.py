"""Training's time by cause: it adds up, no promise goes beyond it, and the verdict is the largest share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from diagnose_cases import HEALTHY, hardware, trace, workers, xray
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recorded import RECORDINGS, unpacked

from flatout.diagnose.by_cause import BESIDE, CauseAccount, by_cause
from flatout.diagnose.rank_metrics import metrics_of
from flatout.diagnose.rules import diagnosis
from flatout.model.causes import Finding
from flatout.model.hardware_samples import ProcessSample
from flatout.model.records import Frame, Stacks, StackTime
from flatout.trace import Trace
from flatout.trace.downsample import window_of

NO_GPU = {"facts": {"gpu": None}, "xray": None}
DANGERS = ("memory.host", "memory.pressure")


def diagnose(made: Trace) -> tuple[Finding, ...]:
    return diagnosis(metrics_of(made)).findings


def account_of(made: Trace) -> CauseAccount:
    account = diagnosis(metrics_of(made)).account
    assert account is not None
    return account


def shares(made: Trace) -> dict[str, float]:
    """By code, or by name where there is none."""
    return {charge.code or charge.name: charge.share for charge in account_of(made).charges}


def share_of_kind(account: CauseAccount, kind: str) -> float:
    return sum(charge.share for charge in account.charges if charge.kind == kind)


def check_that_it_adds_up(made: Trace) -> None:
    told = diagnosis(metrics_of(made))
    found, account = told.findings, told.account
    assert account is not None
    assert sum(charge.share for charge in account.charges) == pytest.approx(1.0)
    assert all(charge.share >= 0 for charge in account.charges)
    useful, remainder = share_of_kind(account, "useful"), share_of_kind(account, "remainder")
    assert remainder < 0.05
    together = 1.0
    for finding in found:
        assert finding.gain_high <= account.most(finding.share) + 1e-9, finding
        if account.share_of(finding):
            assert finding.share == pytest.approx(account.share_of(finding))
            together *= finding.gain_high
    if useful > 0.01:
        assert together <= account.most(1 - useful) + 1e-6
    known = {finding.title for finding in found}
    assert all(charge.name in known for charge in account.charges if charge.code)
    ranked = [finding for finding in found if finding.code not in (*DANGERS, "compute.saturated")]
    if ranked:
        assert ranked[0].share >= max(map(account.share_of, ranked)) - 1e-3


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name.removesuffix(".tgz"))
def test_the_account_of_a_recorded_training_adds_up_and_bounds_every_promise(recording: Path, tmp_path: Path) -> None:
    check_that_it_adds_up(unpacked(recording, tmp_path))


MS = st.floats(0.05, 80.0)
SHARE = st.floats(0.0, 1.0)
NAMES = ("data", "loader start", "copy", "loss", "backward", "optimizer", "rest", "sync", "evaluation", "gc", "flatout")
PHASES = st.dictionaries(st.sampled_from(NAMES), st.tuples(MS, SHARE))
LAUNCHES = ("copy", "forward", "loss", "backward", "optimizer")


@st.composite
def trainings(draw: st.DrawFn) -> Trace:
    """Any training: on a GPU or without one, with any loader, on a machine that is busy or not."""
    phases = {"forward": (10.0, draw(SHARE))} | draw(PHASES)
    step_ms = sum(ms for ms, _ in phases.values())
    spans = []
    for name, (ms, idle) in phases.items():
        spans.append((name, ms, None, ms * idle) if name in LAUNCHES else (name, ms, ms * idle, None))
    on_gpu, count = draw(st.booleans()), draw(st.integers(0, 20))
    more: dict[str, Any] = {"loader": {"num_workers": count, "persistent_workers": draw(st.booleans())}}
    busy, on_core, delay = draw(st.floats(0.01, 1.0)), draw(st.floats(0.01, 1.0)), draw(SHARE)
    more["workers"] = workers(max(1, count), sample_ms=draw(MS), busy=busy, on_core=on_core, delay=delay)
    load = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=90.0, run_delay_pct=100 * draw(SHARE))
    more["samples"] = hardware(draw(st.floats(1, 100)), sm=draw(st.floats(1, 100)), io_pct=draw(st.floats(0, 50)))
    for sample in more["samples"]:
        object.__setattr__(sample, "processes", (load,))
    if not on_gpu:
        return trace(*spans, **NO_GPU, **more)
    work, gaps = draw(SHARE), draw(SHARE)
    busy_ms, idle_ms = 8 * step_ms * work, 8 * step_ms * gaps
    matrix_ms = busy_ms * draw(SHARE)
    kernels = xray(
        wall_ms=8 * step_ms,
        busy_ms=busy_ms,
        busy_by_phase_ms={"forward": busy_ms / 3, "backward": busy_ms / 2, "optimizer": busy_ms / 6},
        idle_by_phase_ms={"forward": idle_ms / 2, "backward": idle_ms / 2},
        matrix_ms=matrix_ms,
        tensor_core_ms=matrix_ms * draw(SHARE),
        copies_ms={draw(st.sampled_from(["HtoD Pinned", "HtoD Pageable"])): busy_ms * draw(SHARE) / 2},
        top_ms={"vectorized_elementwise_kernel": busy_ms * draw(SHARE), "nchwToNhwcKernel": busy_ms * draw(SHARE) / 3},
    )
    facts = {
        "autocast": [draw(st.sampled_from(["None", "bfloat16"]))],
        "compiled": draw(st.booleans()),
        "channels_last": False,
        "optimizer_fused": draw(st.booleans()),
        "gpus_visible": draw(st.integers(1, 4)),
        "memory_reserved_bytes": draw(st.integers(1, 140)) << 30,
        "settings": draw(st.sampled_from([[], [{"source": "argparse", "values": {"amp": True, "compile": True}}]])),
    }
    return trace(*spans, xray=kernels, facts=facts, **more)


@settings(max_examples=50, deadline=None)
@given(trainings())
def test_the_account_of_any_training_adds_up_and_bounds_every_promise(made: Trace) -> None:
    check_that_it_adds_up(made)


def first_steps(count: int, made: Trace) -> Trace:
    """The same, ended after so many steps."""
    steps = made.ranks[0].steps[:count]
    rank = dataclasses.replace(made.ranks[0], steps=steps, windows=(window_of(list(steps)),))
    return dataclasses.replace(made, ranks=(rank,))


BUSY_9_PCT = xray(
    wall_ms=800.0,
    busy_ms=72.0,
    busy_by_phase_ms={"forward": 32.0, "backward": 36.0, "optimizer": 4.0},
    idle_by_phase_ms={"forward": 288.0, "backward": 364.0, "optimizer": 60.0},
    kernels=8 * 4104,
)
LAUNCHES_LATE = (("forward", 40.0, None, 4.0), ("backward", 50.0, None, 4.5), ("optimizer", 9.0, None, 0.5))
SLOW = (("data", 12e3, None, None), ("forward", 6e3, None, None), ("rest", 12e3, None, None))
EXTREMES = {
    "three steps of 30 s": (first_steps(3, trace(*SLOW, **NO_GPU)), "host.python"),
    "a GPU that is idle for 91%": (trace(*LAUNCHES_LATE, xray=BUSY_9_PCT, samples=hardware(sm=9.0)), "launch.bound"),
    "nothing but evaluation": (trace(("evaluation", 20.0, None, None), **NO_GPU), "pause.eval"),
    "nothing but waiting": (trace(("data", 20.0, None, None), **NO_GPU), "data.collate-bound"),
    "nothing told apart": (trace(("unsplit", 20.0, None, None), **NO_GPU), "host.python"),
    "no figures of workers and machine": (
        trace(("data", 30.0, None, None), ("forward", 10.0, None, None), workers=(), samples=(), **NO_GPU),
        None,
    ),
    "phases below zero": (
        trace(("data", -10.0, None, None), ("forward", 30.0, None, None), ("rest", 10.0, None, None), **NO_GPU),
        "host.python",
    ),
    "idle time below zero": (trace(("data", 10.0, -5.0, None), *HEALTHY[1:], ("rest", 9.0, -1.0, None)), None),
    "an X-ray of no time": (trace(("data", 30.0, 30.0, None), *HEALTHY[1:], xray=xray(wall_ms=0.0)), None),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_account_of_an_extreme_training_adds_up_and_bounds_every_promise(name: str) -> None:
    made, verdict = EXTREMES[name]
    check_that_it_adds_up(made)
    if verdict is not None:
        assert diagnose(made)[0].code == verdict


def test_of_a_single_step_nothing_is_judged() -> None:
    assert diagnosis(metrics_of(first_steps(1, trace(*SLOW, **NO_GPU)))).account is None


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


@pytest.mark.parametrize(("cause", "kind"), [("data.main-thread", "idle"), ("compute.precision", "wasteful")])
def test_a_setting_in_vain_is_what_its_cause_is(cause: str, kind: str) -> None:
    [metrics] = metrics_of(trace(("data", 20.0, 20.0, None), *HEALTHY[1:]))
    told = {"title": "in vain", "share": 0.4, "gain_high": 1.5, "derived": "", "confidence": 0.9}
    ignored = Finding(code="config.ignored", evidence={"cause": cause}, **told)
    for finding in (ignored, Finding(code=cause, **told)):
        assert share_of_kind(by_cause(metrics, [finding]), kind) > 0.1


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
    assert verdict.gain_high == pytest.approx(1 / (1 - verdict.share) / (1 - BESIDE * verdict.share))


def test_without_a_gpu_a_promise_leaves_room_for_what_a_cause_takes_from_the_rest_of_the_step() -> None:
    """GIVEN a fifth of the time in evaluation THEN on a GPU it promises just that; else the rest may be faster too."""
    evaluates = (*HEALTHY, ("evaluation", 5.0, 4.0, None))
    on_gpu, without = diagnose(trace(*evaluates))[0], diagnose(trace(*evaluates, **NO_GPU))[0]
    assert (on_gpu.share, on_gpu.gain_high) == pytest.approx((0.2, 1.25))
    assert (without.share, without.gain_high) == pytest.approx((0.2, 1.25 / (1 - 0.2 * BESIDE)))
    assert without.derived.endswith("with what it takes from the rest of the step")


def test_without_a_gpu_samples_that_cost_less_leave_their_cores_to_training() -> None:
    """GIVEN two workers and training on two cores, a tenth of the time without a core and a fifth waiting for data THEN
    both are charged to the samples, whose removal frees the cores."""
    phases = (("data", 20.0, None, None), ("forward", 40.0, None, None), ("backward", 40.0, None, None))
    trainer = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=70.0, run_delay_pct=10.0)
    loads = [ProcessSample(pid=n, role="worker", name="python", cpu_pct=65.0) for n in (1, 2)]
    full = tuple(
        dataclasses.replace(
            one, processes=(trainer, *loads), host=dataclasses.replace(one.host, cores_pct=(100.0, 100.0))
        )
        for one in hardware(100.0)
    )
    made = trace(
        *phases,
        samples=full,
        loader={"num_workers": 2},
        workers=workers(2, sample_ms=25.0, busy=0.97, on_core=0.6, delay=0.1),
        facts={"gpu": None, "cores_allowed": 2},
        xray=None,
    )
    found = diagnose(made)[0]
    assert (found.code, found.share) == ("data.cpu-bound", pytest.approx(0.3))
    assert found.gain_high == pytest.approx(1 / 0.7 / (1 - 0.3 * BESIDE))
    assert "cores that loading takes from training" in found.derived
    check_that_it_adds_up(made)


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


def test_each_wait_has_a_name_though_it_is_too_short_for_a_finding() -> None:
    made = trace(*HEALTHY, ("rest", 0.9, None, None), **NO_GPU)
    assert diagnose(made)[0].code == "compute.saturated"
    assert shares(made) == pytest.approx({"useful work": 0.952, "rest": 0.043, "short waits": 0.005}, abs=0.002)


def test_numpy_between_forward_and_backward_is_the_scripts_own_code() -> None:
    """GIVEN a third of the time between forward and backward, half of it in a metric THEN the metric is named."""
    frames = (
        Frame(where="train.py:20", function="main", own=True, source="loss = F.cross_entropy(out, y)"),
        Frame(where="torch/nn/functional.py:3462", function="cross_entropy"),
        Frame(where="metric.py:9", function="f_score", own=True, source="tp = np.sum(p == t)"),
    )
    times = (
        StackTime(phase="loss", frames=(0, 1), seconds=1.0, looks=50),
        StackTime(phase="loss", frames=(2,), seconds=1.0, looks=50),
    )
    stacks = (Stacks(time_s=110.0, pid=1, frames=frames, stacks=times),)
    thirds = [(phase, 20.0, None, None) for phase in ("forward", "loss", "backward")]
    assert [finding.code for finding in diagnose(trace(*thirds, **NO_GPU))] == ["compute.saturated"]
    verdict = diagnose(trace(*thirds, stacks=stacks, **NO_GPU))[0]
    assert (verdict.code, verdict.where) == ("host.python", "metric.py:9")
    assert verdict.share == pytest.approx(1 / 6)


MODULE = Frame(where="torch/nn/modules/module.py:1776", function="Module._wrapped_call_impl")


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        ("trainer.train()", (Frame(where="transformers/trainer.py:9", function="train"), MODULE)),
        ("accelerator.backward(loss)", (Frame(where="accelerate/accelerator.py:9", function="backward"), MODULE)),
        ("att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))", ()),
    ],
)
def test_what_computes_is_not_the_scripts_own_code(line: str, calls: tuple[Frame, ...]) -> None:
    """GIVEN a forward pass that a framework calls, or that an operator on tensors takes THEN nothing is wrong."""
    here = Frame(where="train.py:20", function="main", own=True, source=line)
    in_library = Frame(where="transformers/activations.py:3", function="forward")
    stacks = seen(("forward", 100, (here, *calls, *(in_library,) * len(calls[:1]))))
    made = trace(("forward", 20.0, None, None), ("backward", 20.0, None, None), stacks=stacks, **NO_GPU)
    assert [finding.code for finding in diagnose(made)] == ["compute.saturated"]


def test_the_time_of_a_frameworks_loop_is_called_that() -> None:
    here = Frame(where="train.py:20", function="main", own=True, source="trainer.train()")
    loop = Frame(where="transformers/trainer.py:9", function="train")
    stacks = seen(("forward", 60, (here, loop, MODULE)), ("rest", 40, (here, loop)))
    made = trace(("forward", 60.0, None, None), ("rest", 40.0, None, None), stacks=stacks, **NO_GPU)
    verdict = diagnose(made)[0]
    assert (verdict.code, verdict.where) == ("host.python", "train.py:20")
    assert verdict.title.startswith("transformers's own loop, outside forward, backward and optimizer, takes 40%")


def test_a_line_that_asks_a_frameworks_loader_for_a_batch_is_no_line_of_a_sample() -> None:
    loop = Frame(where="train.py:20", function="main", own=True, source="for batch in loader:")
    asks = (
        Frame(where="accelerate/data_loader.py:9", function="__iter__"),
        Frame(where="torch/utils/data/dataloader.py:7", function="__next__"),
    )
    sample = Frame(where="data.py:3", function="Photos.__getitem__", own=True, source="return load(path)")
    stacks = seen(("data", 60, (loop, *asks)), ("data", 40, (loop, sample)), ("forward", 40, (loop, MODULE)))
    made = trace(
        ("data", 60.0, None, None), ("forward", 20.0, None, None), loader={"num_workers": 0}, stacks=stacks, **NO_GPU
    )
    found = next(finding for finding in diagnose(made) if finding.code == "data.main-thread")
    assert found.where == "data.py:3"
    assert "data.py:3 Photos.__getitem__ takes 40% of the time of a sample" in found.advice


TRAIN = Frame(where="train.py:41", function="train", own=True, source="loss.backward()")


def seen(*looks_at: tuple[str, float, tuple[Frame, ...]]) -> tuple[Stacks, ...]:
    """Looks at the training thread: the phase, how many, and the stack, outermost first."""
    frames = list(dict.fromkeys(frame for _, _, stack in looks_at for frame in stack))
    times = tuple(
        StackTime(phase=phase, frames=tuple(map(frames.index, stack)), seconds=count / 100, looks=int(count))
        for phase, count, stack in looks_at
    )
    return (Stacks(time_s=110.0, pid=1, frames=tuple(frames), stacks=times),)


def test_a_pause_is_called_from_the_line_where_its_stacks_leave_the_training_loop() -> None:
    """GIVEN an evaluation whose own lines differ THEN its place is the one line of the loop that calls it."""
    call = Frame(where="train.py:45", function="train", own=True, source="test(model)")
    inside = [Frame(where=f"train.py:{line}", function="test", own=True) for line in (60, 61)]
    net = Frame(where="model.py:7", function="Net.forward", own=True)
    stacks = seen(
        ("backward", 40, (TRAIN,)),
        ("forward", 20, (TRAIN, net)),
        ("evaluation", 30, (call, inside[0], net)),
        ("evaluation", 20, (call, inside[1])),
    )
    found = diagnose(trace(*HEALTHY, ("evaluation", 10.0, 9.0, None), stacks=stacks))[0]
    assert (found.code, found.where) == ("pause.eval", "train.py:45")
    assert [line["where"] for line in found.evidence["lines"]] == ["model.py:7 Net.forward", "train.py:61 test"]


def test_what_else_a_line_does_that_mostly_logs_is_a_part_of_logging() -> None:
    """GIVEN a line that logs a picture for 30 ms and makes it for 10, and another with 8 ms of numpy THEN the making is
    charged to logging, and the other is the script's own code."""
    logs = Frame(where="train.py:61", function="train", own=True, source="board.add_image(make_grid(x))")
    grid = Frame(where="torchvision/utils.py:9", function="make_grid")
    score = Frame(where="train.py:70", function="score", own=True, source="s = np.sum(p)")
    stacks = seen(
        ("backward", 40, (TRAIN,)), ("logging", 30, (logs,)), ("rest", 20, (logs, grid)), ("rest", 16, (score,))
    )
    phases = [("forward", 52.0, None, None), ("logging", 30.0, None, None), ("rest", 18.0, None, None)]
    found = {one.code: one for one in diagnose(trace(*phases, stacks=stacks, **NO_GPU))}
    assert (found["pause.logging"].share, found["host.python"].share) == pytest.approx((0.4, 0.08))
    assert (found["pause.logging"].where, found["host.python"].where) == ("train.py:61", "train.py:70")
    check_that_it_adds_up(trace(*phases, stacks=stacks, **NO_GPU))


def test_a_training_step_that_the_optimizer_calls_is_told_from_the_optimizer() -> None:
    """Lightning hands the optimizer a closure, in which the user's training step runs."""
    frames = (Frame(where="model.py:31", function="training_step", own=True, source="v = sorted(w.tolist())"),)
    times = (StackTime(phase="optimizer", frames=(0,), seconds=1.0, looks=50),)
    stacks = (Stacks(time_s=110.0, pid=1, frames=frames, stacks=times),)
    phases = [("backward", 40.0, None, None), ("optimizer", 60.0, None, None)]
    verdict = diagnose(trace(*phases, stacks=stacks, **NO_GPU))[0]
    assert (verdict.code, verdict.where, verdict.share) == ("host.python", "model.py:31", pytest.approx(0.6))
