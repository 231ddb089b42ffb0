"""Comparing two runs: differences that are there are shown, others are not, and what cannot be compared says why."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_runs import facts, printed, rank_of, step, steps_of, trace_of
from test_report_html import Page

from flatout.model.records import LoaderFacts
from flatout.model.stats import Gain
from flatout.report import comparison as comparing
from flatout.report import run_of
from flatout.report.comparison import Comparison
from flatout.report.page import page
from flatout.report.terminal import show
from flatout.trace import FactsRecord, HostSample, ProcessSample, RankTrace, RunInfo, Sample, Step, Trace, TraceWriter
from flatout.trace.downsample import window_of


def compare(a: Trace, b: Trace) -> Comparison:
    return comparing.compare(run_of(a, "A"), run_of(b, "B"))


def noisy(seed: int, count: int = 200, around_ms: float = 100.0, spread: float = 0.1) -> list[float]:
    """Step times that drift, as those of a real run do."""
    draw = random.Random(seed)
    drift, times = 0.0, []
    for _ in range(count):
        drift = 0.8 * drift + draw.gauss(0, spread / 2)
        times.append(around_ms * (1 + 0.1 * drift + draw.gauss(0, spread)))
    return times


def recorded(times: list[float], **changes: object) -> Trace:
    return trace_of(rank_of(steps_of(times), facts=facts(**changes)))


def test_a_run_compared_with_itself_shows_no_difference() -> None:
    result = compare(recorded(noisy(1)), recorded(noisy(1)))

    assert result.typical is not None
    assert result.typical.value == pytest.approx(1.0)
    assert result.typical.verdict == "no difference shown"
    assert result.sentence().startswith("No difference shown: 1.00× the speed of A")
    assert not result.slower_than(0)


def test_the_ratio_shown_is_that_of_the_figures_beside_it() -> None:
    """The first steps, which do not count in it, are ten times as slow in A."""
    result = compare(recorded([1000.0] * 20 + [100.0] * 100), recorded([80.0] * 120))

    rows = {name: values for name, *values in result.figures()}
    assert rows["median step"] == ["100.0 ms → 80.0 ms", "1.25× (1.25 to 1.25)"]
    speeds, ratio = rows["samples a second"]
    a, _, b = speeds.partition(" → ")
    assert float(b.replace(",", "")) / float(a.replace(",", "")) == pytest.approx(1.25, rel=0.01)
    assert ratio == "1.25× (1.25 to 1.25)"


def test_noise_alone_is_seldom_taken_for_a_difference() -> None:
    """Of 30 pairs that differ by chance only, 95% intervals may miss a few."""
    verdicts = [compare(recorded(noisy(n)), recorded(noisy(1000 + n))).typical for n in range(30)]
    wrong = sum(ratio is not None and ratio.verdict != "no difference shown" for ratio in verdicts)
    assert wrong <= 5


def test_a_slowdown_of_a_fifth_is_shown_and_its_size_is_in_the_interval() -> None:
    result = compare(recorded(noisy(1)), recorded(noisy(2, around_ms=120.0)))

    assert result.typical is not None
    assert result.typical.verdict == "slower"
    assert result.typical.low < 1 / 1.2 < result.typical.high
    assert result.slower_than(10)
    assert not result.slower_than(30)


def test_a_slowdown_within_the_noise_does_not_fail_the_gate() -> None:
    """GIVEN 11% slower as measured WHEN it may as well be 1% THEN more than 5% is not shown."""
    assert not Gain(value=0.90, low=0.80, high=0.99).slower_than(5)
    assert Gain(value=0.90, low=0.85, high=0.94).slower_than(5)


def test_stalls_that_do_not_change_the_median_count_for_the_gate() -> None:
    stalled = [900.0 if index % 8 == 3 else ms for index, ms in enumerate(noisy(2, count=400))]
    result = compare(recorded(noisy(1, count=400)), recorded(stalled))

    assert result.typical is not None
    assert result.overall is not None
    assert result.overall.verdict == "slower"
    assert result.slower_than(50)
    assert "All steps, slow ones included: 0.5" in result.sentence()


def test_a_faster_median_does_not_hide_that_all_steps_together_are_slower() -> None:
    bursts = [900.0 if index % 8 == 3 else ms / 2 for index, ms in enumerate(noisy(2, count=400))]
    result = compare(recorded(noisy(1, count=400)), recorded(bursts))

    assert result.sentence().startswith("B is slower: 0.6")
    assert "Median step: 1.9" in result.sentence()


@pytest.mark.parametrize(
    ("typical", "overall", "verdict", "fails", "said"),
    [
        (
            Gain(value=1.0, low=0.98, high=1.02),
            Gain(value=1.66, low=1.38, high=1.94),
            "faster",
            False,
            "B is faster: 1.66× the speed of A, 1.38 to 1.94 (all steps, slow ones included)",
        ),
        (
            Gain(value=1.0, low=0.98, high=1.02),
            Gain(value=0.6, low=0.52, high=0.72),
            "slower",
            True,
            "B is slower: 0.60× the speed of A, 0.52 to 0.72 (all steps, slow ones included)",
        ),
        (
            Gain(value=0.5, low=0.48, high=0.52),
            Gain(value=1.66, low=1.38, high=1.94),
            "faster",
            False,
            "B is faster: 1.66× the speed of A, 1.38 to 1.94 (all steps, slow ones included)",
        ),
        (
            Gain(value=0.5, low=0.48, high=0.52),
            Gain(value=0.9, low=0.72, high=1.1),
            "slower",
            True,
            "B is slower: 0.50× the speed of A",
        ),
        (
            Gain(value=0.97, low=0.96, high=0.98),
            Gain(value=0.6, low=0.52, high=0.72),
            "slower",
            True,
            "B is slower: 0.97× the speed of A",
        ),
        (
            Gain(value=1.0, low=0.98, high=1.02),
            Gain(value=0.9, low=0.72, high=1.1),
            "no difference shown",
            False,
            "No difference shown: 1.00×",
        ),
    ],
)
def test_the_headline_the_verdict_and_the_gate_say_the_same(
    typical: Gain, overall: Gain, verdict: str, fails: bool, said: str
) -> None:
    result = dataclasses.replace(compare(recorded(noisy(1)), recorded(noisy(2))), typical=typical, overall=overall)
    assert result.verdict == verdict == result.to_json()["verdict"]
    assert result.slower_than(10) == fails
    assert result.sentence().startswith(said)
    assert verdict in result.sentence().lower().partition(":")[0]


def test_with_another_batch_size_samples_are_compared() -> None:
    """GIVEN twice the batch in 1.5 times the time THEN B is 1.33 times as fast."""
    doubled = [dataclasses.replace(one, samples=64) for one in steps_of(noisy(2, around_ms=150.0))]
    result = compare(recorded(noisy(1)), trace_of(rank_of(doubled, facts=facts(loader={"batch_size": 64}))))

    assert result.per == "sample"
    assert result.typical is not None
    assert result.typical.value == pytest.approx(4 / 3, rel=0.05)
    assert result.typical.verdict == "faster"
    assert any("32 samples, one of B 64 samples" in caution for caution in result.cautions)


def test_two_ranks_make_twice_the_samples() -> None:
    ranks = [rank_of(steps_of(noisy(n)), rank=n) for n in (1, 2)]
    result = compare(recorded(noisy(1)), trace_of(*ranks))

    assert result.per == "sample"
    assert result.typical is not None
    assert result.typical.value == pytest.approx(2.0, rel=0.05)


def test_a_last_short_batch_is_no_other_batch_size() -> None:
    short = [*steps_of(noisy(1)), step(200, samples=7)]
    assert compare(recorded(noisy(1)), trace_of(rank_of(short))).per == "step"


def test_other_data_is_not_compared() -> None:
    result = compare(recorded(noisy(1)), recorded(noisy(2, around_ms=200), loader={"dataset": "Clips", "length": 7}))

    assert result.typical is None
    assert result.sentence() == (
        "Not comparable: they train on other data: Photos of 1,000 samples and Clips of 7 samples."
    )
    assert result.to_json()["verdict"] == "not comparable"
    assert not result.slower_than(0)


def test_too_few_steps_are_not_compared() -> None:
    result = compare(recorded(noisy(1)), recorded(noisy(2, count=20)))
    assert result.reasons == ("B has 20 training steps, and fewer than 40 say too little",)


def test_another_gpu_and_another_model_are_cautions() -> None:
    result = compare(recorded(noisy(1)), recorded(noisy(2), gpu="NVIDIA A100", parameters=2_000_000))

    assert result.typical is not None
    assert result.cautions == (
        "another GPU: NVIDIA H200 and NVIDIA A100",
        "another number of parameters: 1,000,000 and 2,000,000",
    )


def test_steps_that_add_up_gradients_have_as_many_samples_but_for_the_last() -> None:
    """GIVEN two batches a step, and an epoch that ends with one, in B with a short one THEN steps are compared."""
    a = trace_of(rank_of([*steps_of(noisy(1), samples=128), step(200, samples=64)]))
    b = trace_of(rank_of([*steps_of(noisy(1), samples=128), step(200, samples=7)]))
    result = compare(a, b)
    assert (result.per, result.cautions) == ("step", ())


def test_a_run_beside_other_programs_is_a_caution() -> None:
    trainer = ProcessSample(pid=0, role="trainer", name="python", cpu_pct=100.0, run_delay_pct=30.0)
    host = HostSample(cpu_pct=98.0, cores_pct=(98.0,) * 16)
    crowd = [Sample(time_s=10.5 + n, interval_s=1.0, host=host, processes=(trainer,)) for n in range(8)]
    slow = dataclasses.replace(recorded(noisy(2, around_ms=150)), samples={"box": tuple(crowd)})
    (caution,) = compare(recorded(noisy(1)), slow).cautions
    assert caution.startswith("in B others keep 14.7 of 16 cores busy")


def test_what_flatout_changed_is_listed_as_a_person_would_say_it() -> None:
    made = [{"name": "loader", "value": "elastic", "applied": True}, {"name": "pin_memory", "value": True}]
    result = compare(recorded(noisy(1)), recorded(noisy(2), changes=made))
    assert result.differences == [("changed by flatout", None, ["loader=elastic"])]


def test_settings_that_differ_are_listed_and_no_others() -> None:
    result = compare(
        recorded(noisy(1), learning_rate=0.1), recorded(noisy(2), loader={"num_workers": 8}, learning_rate=0.2)
    )
    assert result.differences == [("loader 1: num_workers", 0, 8)]


def test_a_loader_that_one_of_them_lacks_is_a_difference() -> None:
    one = facts()
    val = LoaderFacts(dataset="train.Val", num_workers=8, batch_size=64)
    two = dataclasses.replace(one, loaders=(*one.loaders, val))
    result = compare(*(trace_of(rank_of(steps_of(noisy(1)), facts=known)) for known in (one, two)))
    assert result.differences[:2] == [("loaders", 1, 2), ("loader 2: dataset", None, "train.Val")]


def test_long_runs_are_compared_by_their_windows() -> None:
    def long(seed: int, around_ms: float) -> RankTrace:
        windows, steps = [], []
        for number in range(60):
            part = [step(number * 50 + n, ms) for n, ms in enumerate(noisy(seed + number, 50, around_ms))]
            windows.append(window_of(part))
            steps += part if number == 0 else []
        return rank_of(steps, windows=tuple(windows))

    result = compare(trace_of(long(0, 100.0)), trace_of(long(500, 90.0)))

    assert result.typical is not None
    assert result.typical.verdict == "faster"
    assert result.typical.value == pytest.approx(1 / 0.9, rel=0.02)
    assert compare(trace_of(long(0, 100.0)), trace_of(long(500, 100.0))).typical.verdict == "no difference shown"  # type: ignore[union-attr]


def losing(seed: int, floor: float) -> list[Step]:
    draw = random.Random(seed)
    steps = steps_of(noisy(seed))
    return [dataclasses.replace(s, loss=floor + 2 / (1 + s.index) + draw.gauss(0, 0.01)) for s in steps]


def test_losses_that_end_alike_show_no_difference_and_others_do() -> None:
    a, same, worse = (trace_of(rank_of(losing(*how))) for how in ((1, 0.5), (2, 0.5), (3, 0.6)))

    alike, apart = compare(a, same).losses, compare(a, worse).losses

    assert alike is not None
    assert apart is not None
    assert alike.verdict == "no difference shown"
    assert apart.verdict == "higher"
    assert apart.low is not None
    assert apart.high is not None
    assert apart.low < 0.1 < apart.high + 0.01


def test_runs_without_losses_are_compared_without_them() -> None:
    assert compare(recorded(noisy(1)), recorded(noisy(2))).losses is None


def shown(result: Comparison) -> str:
    return printed(lambda console: show(result, console))


def test_the_terminal_gets_every_figure_in_80_columns() -> None:
    a, b = trace_of(rank_of(losing(1, 0.5))), trace_of(rank_of(losing(2, 0.5), facts=facts(optimizer="SGD " * 40)))
    text = shown(compare(a, b))

    for figure in ("median step", "samples a second", "waiting for data", "over the last quarter", "optimizer"):
        assert figure in text


def test_the_page_shows_both_runs() -> None:
    a, b = trace_of(rank_of(losing(1, 0.5))), trace_of(rank_of(losing(2, 0.5), facts=facts(optimizer="SGD")))
    shown = Page(page(compare(a, b)))

    assert shown.sections == ["phases", "steps", "losses", "differences", "intervals"]
    assert [str(plot["aria-label"]).partition(":")[0] for plot in shown.plots] == [
        "Step time by step ms",
        "Loss by step",
    ]


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """Traces on disk: two alike, one slower by a half, one of other data."""
    runs = {
        "same": recorded(noisy(1)),
        "again": recorded(noisy(2)),
        "slow": recorded(noisy(3, around_ms=150.0)),
        "other": recorded(noisy(4), loader={"dataset": "Clips"}),
    }
    for name, run in runs.items():
        with TraceWriter(tmp_path / name, run.ranks[0].info) as writer:
            for one in run.ranks[0].steps:
                writer.write(one)
            writer.write(FactsRecord(time_s=1.0, values=run.ranks[0].facts))
    return {name: tmp_path / name for name in runs}


@pytest.mark.parametrize(
    ("second", "pct", "code", "said"),
    [
        ("again", "5", 0, ""),
        ("slow", "60", 0, ""),
        ("slow", "20", 1, "is shown to be more than 20% slower"),
        ("other", "5", 2, "cannot tell whether"),
    ],
)
def test_the_gate_says_no_only_to_a_slowdown_that_is_shown(
    flatout_says: Callable[..., Any], saved: dict[str, Path], second: str, pct: str, code: int, said: str
) -> None:
    ended = flatout_says("compare", saved["same"], saved[second], "--fail-if-slower", pct)
    assert ended.code == code
    assert said in ended.err


def test_compare_and_report_write_json_and_html(
    flatout_says: Callable[..., Any], saved: dict[str, Path], tmp_path: Path
) -> None:
    html = tmp_path / "page.html"
    for words in (["compare", saved["same"], saved["slow"]], ["report", saved["same"]]):
        code, out, _ = flatout_says(*words, "--json", "-", "--html", html)
        assert code == 0
        data = json.loads(out)
        assert data["schema"] == 1
        assert "verdict" in data
        Page(html.read_text(encoding="utf-8"))
        html.unlink()


def test_a_recording_of_top_is_called_one(flatout_says: Callable[..., Any], tmp_path: Path) -> None:
    with TraceWriter(tmp_path, RunInfo(name="top", host="here")) as writer:
        writer.write(Sample(time_s=1.0, interval_s=1.0, host=HostSample()))
    ended = flatout_says("report", tmp_path)
    assert ended.code == 2
    assert f"look at it with flatout top --replay {tmp_path}" in ended.err
