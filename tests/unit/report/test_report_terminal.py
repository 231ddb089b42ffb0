"""The account in a terminal of 80 columns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from report_runs import facts, looks, printed, rank_of, recorded, report_of, steps_of, trace_of, worker

from flatout.check import NOT_APPLICABLE, Checklist, Line
from flatout.diagnose.breakdown import Breakdown
from flatout.model.formatting import ms
from flatout.model.records import ExactLines, Facts, OwnCost, StackCount
from flatout.report import run_of, view_of
from flatout.report.comparison import compare
from flatout.report.run_view import ceiling_in_words
from flatout.report.terminal import show, show_checklist, wrapped
from flatout.trace import Note, RankTrace, RunInfo, Sketch, Span, Step, Trace, Xray
from flatout.trace.downsample import window_of

LONG = "a/very/long/way/down/into/the/package/of/somebody/else/train_model.py:1234"


def step(index: int) -> Step:
    spans = (
        Span(name="data", start_ms=0, host_ms=6, gpu_idle_ms=5.5),
        Span(name="forward", start_ms=6, host_ms=2, gpu_busy_ms=3),
        Span(name="sync", start_ms=8, host_ms=1.99, gpu_idle_ms=0.0, where=LONG),
        Span(name="gc", start_ms=9.99, host_ms=0.01),
    )
    return Step(index=index, start_s=index / 100, wall_ms=10, spans=spans, samples=64)


def drawn(width: int = 80) -> list[str]:
    steps = [step(index) for index in range(1, 11)]
    rank = RankTrace(
        info=RunInfo(name="train", rank=0),
        steps=tuple(steps),
        windows=(window_of(steps),),
        notes=(Note(time_s=1.0, text="something that takes many words to say, " * 4),),
        facts=Facts(own_cost=OwnCost(us_per_step=20.0)),
        workers=tuple(replace(worker(None), dataset="Pictures", length=length) for length in (4000, 500)),
        xray=Xray(steps=8, wall_ms=80, busy_ms=24, kernels=800, copies_ms={"HtoD Pageable": 3.0}, matrix_ms=4.0),
    )
    shown = report_of(Trace(ranks=(rank,), samples={}))
    return printed(lambda console: show(shown, console), width).splitlines()


def test_in_a_narrow_terminal_the_figures_stay_whole() -> None:
    narrow = drawn(60)
    data = next(line for line in narrow if line.startswith("waiting for data"))
    assert data.split()[-5:] == ["60.0%", "6.00", "ms", "5.50", "ms"]


def test_in_a_narrow_terminal_bars_of_different_lengths_differ() -> None:
    spans = [Span(name=name, start_ms=0, host_ms=ms) for name, ms in (("data", 6.5), ("sync", 2.4), ("gc", 1.1))]
    run = report_of(trace_of(rank_of([replace(step(index), spans=tuple(spans)) for index in range(60)])))
    lines = printed(lambda console: show(run, console), 60).splitlines()
    bars = [bar for line in lines for bar in re.findall("[▏▎▍▌▋▊▉█]+", line)]
    assert len(set(bars)) == 3


def test_the_lines_that_took_the_time_are_shown_as_they_stand_in_the_file() -> None:
    """GIVEN a third of the time in the loop's own code, most of it at one line
    THEN its source is shown with its share, and it is named in the table of phases."""
    spans = [Span(name="forward", start_ms=0, host_ms=6.0), Span(name="rest", start_ms=6, host_ms=4.0)]
    seen = looks("rest", "metrics.py:12", "f_score", "numpy/hist.py:3", "h = np.histogram(prediction)")
    rank = rank_of([replace(step(index), spans=tuple(spans)) for index in range(60)], stacks=(seen,))
    text = printed(lambda console: show(run_of(trace_of(rank), "runs/one"), console))
    by_phase, _, code = text.partition("Your own code: 40% of training's time")
    assert "mostly metrics.py:12" in " ".join(by_phase.split())
    assert "host.python" in by_phase
    assert [line.split() for line in code.splitlines()[1:4]] == [
        ["metrics.py,", "f_score:", "100%", "of", "that"],
        ["80%", "12", "│", "h", "=", "np.histogram(prediction)", "→", "numpy.hist"],
        ["20%", "13", "│", "return", "total"],
    ]


def test_a_long_set_up_has_a_line_and_its_place() -> None:
    seen = looks("setup", "data.py:12", "read", "pandas/io.py:3", "table = pd.read_csv(path)")
    steps = [replace(step(-1), kind="setup", spans=(), wall_ms=30_000.0), *(step(index) for index in range(60))]
    text = printed(lambda console: show(run_of(trace_of(rank_of(steps, stacks=(seen,))), "runs/one"), console))
    (line,) = (line for line in text.splitlines() if line.startswith("set-up"))
    assert line.split(maxsplit=3) == ["set-up", "30.0", "s", "80% of it at data.py:12 read → pandas.io"]


def test_exact_lines_are_called_exact() -> None:
    spans = [Span(name="forward", start_ms=0, host_ms=6.0), Span(name="rest", start_ms=6, host_ms=4.0)]
    seen = looks("rest", "metrics.py:12", "f_score", "numpy/hist.py:3", "h = np.histogram(prediction)")
    frames = (seen.frames[0], replace(seen.frames[1], where="metrics.py:11", source="total = total + other"))
    stacks = (StackCount(frames=(0, 1), looks=50),)
    exact = ExactLines(time_s=110.0, in_workers=False, frames=frames, stacks=stacks)
    rank = rank_of([replace(step(n), spans=tuple(spans)) for n in range(60)], stacks=(seen,), exact=(exact,))
    run = run_of(trace_of(rank), "runs/one")
    _, _, code = printed(lambda console: show(run, console)).partition("Your own code: 40% of training's time")
    assert [line.split() for line in code.splitlines()[1:3]] == [
        ["metrics.py,", "f_score:", "100%", "of", "that;", "exact", "lines"],
        ["100%", "11", "│", "total", "=", "total", "+", "other"],
    ]
    assert [(line["where"], line["exact"]) for line in run.to_json()["lines"]] == [("metrics.py:11", True)]


@pytest.mark.parametrize(
    ("wait", "told"),
    [
        (Span(name="data", start_ms=0, host_ms=22_100), "ended in a wait of 22.1 s for a batch that did not come"),
        (Span(name="sync", start_ms=0, host_ms=12_000, where="t.py:7"), "a wait of 12.0 s for the GPU (t.py:7)"),
        (Span(name="data", start_ms=0, host_ms=6_000), None),
        (Span(name="rest", start_ms=0, host_ms=60_000), None),
    ],
)
def test_a_run_that_ended_in_a_hang_says_so_first(wait: Span, told: str | None) -> None:
    steps = [step(index) for index in range(1, 11)]
    tail = Step(index=11, start_s=1.0, wall_ms=wait.host_ms, spans=(wait,), kind="tail")
    rank = RankTrace(info=RunInfo(name="train", rank=0), steps=(*steps, tail), windows=(window_of(steps),))
    notes = recorded(Trace(ranks=(rank,), samples={})).notes
    assert (told in notes[0]) if told else not notes


def test_many_waits_that_are_summed_up_are_no_hang() -> None:
    waits = [Span(name=name, start_ms=0, host_ms=50) for name in ("data", "rest") * 32]
    crowd = Span(name="data", start_ms=3200, host_ms=98_400)
    tail = Step(index=1, start_s=1.0, wall_ms=101_600, spans=(*waits, crowd), kind="tail")
    rank = RankTrace(info=RunInfo(name="train", rank=0), steps=(step(0), tail), windows=(window_of([step(0)]),))
    assert not recorded(Trace(ranks=(rank,), samples={})).notes


def test_the_parts_stand_in_order_with_the_idle_time_beside_them() -> None:
    lines = drawn()
    assert lines[2].split() == ["steps", "10", "0.1", "s", "of", "training,", "0.1", "s", "in", "all"]
    top = next(n for n, line in enumerate(lines) if line.startswith("where training's time went"))
    data, forward, wait, place, small = lines[top + 1 : top + 6]
    assert data.startswith("waiting for data")
    assert data.split("█")[-1].split()[1:] == ["60.0%", "6.00", "ms", "5.50", "ms"]
    assert forward.startswith("forward")
    assert wait.startswith("waiting for the GPU at")
    assert "train_model.py:1234" in wait + place
    assert small.startswith("smaller parts")


def test_paragraphs_say_what_they_are_about() -> None:
    lines = drawn()
    at = next(n for n, line in enumerate(lines) if line.startswith("Notes: something"))
    assert lines[at + 1].startswith("  ")
    assert any(line.split() == ["GPU", "busy", "30%", "X-ray", "of", "8", "steps"] for line in lines)
    assert lines[-1] == "Trace: runs/one"


def test_a_path_is_never_cut() -> None:
    assert wrapped(f"in {LONG} today", 40, 3).split("\n") == ["in", f"   {LONG}", "   today"]


def test_loaders_of_one_class_of_data_are_told_apart() -> None:
    loading = [line for line in drawn() if line.startswith("Loading: ")]
    assert ["Pictures of 4,000 samples:" in line for line in loading] == [True, False]
    assert ["Pictures of 500 samples:" in line for line in loading] == [False, True]


@pytest.mark.parametrize(("numbers", "who"), [((0,), "1 worker loads Photos"), ((0, 1), "2 workers load Photos")])
def test_one_worker_is_not_written_as_a_plural(numbers: tuple[int, ...], who: str) -> None:
    rank = rank_of(steps_of([10.0] * 60), workers=tuple(replace(worker(number), length=1) for number in numbers))
    shown = report_of(trace_of(rank))
    assert f"Loading: {who} of 1 sample: " in printed(lambda console: show(shown, console))


@pytest.mark.parametrize(("replayed_ms", "said"), [(5.0, "(2.0×)"), (500.0, None)], ids=["quick", "disturbed"])
def test_a_ceiling_below_the_run_is_not_shown(replayed_ms: float, said: str | None) -> None:
    replays = steps_of([replayed_ms] * 8, kind="replay")
    shown = report_of(trace_of(rank_of([*steps_of([10.0] * 60), *replays])))
    lines = printed(lambda console: show(shown, console)).splitlines()
    told = next(line for line in lines if line.startswith("samples a second"))
    assert told.endswith(said or "no ceiling was measured")


def test_times_of_microseconds_are_not_shown_as_zero() -> None:
    quick = replace(worker(None), sample_ms=Sketch.of([0.04, 0.04, 0.3]), transforms_s={"Rotate": 0.0032})
    shown = report_of(trace_of(rank_of(steps_of([10.0] * 60), workers=(quick,))))
    said = " ".join(printed(lambda console: show(shown, console)).split())
    assert "the training process loads Photos: 40 µs a sample (at worst 0.30 ms)" in said
    assert "10 µs in Rotate" in said
    assert [ms(value) for value in (0.0, 0.0002, 0.0009, 0.001, 0.04)] == ["0 µs", "0.2 µs", "0.9 µs", "1 µs", "40 µs"]


@pytest.mark.parametrize(
    ("batch_sampler", "said"),
    [
        ("builtins.NoneType", "Photos of 200 batches: 10.0 ms a batch"),
        ("torch.BatchSampler", "Photos of 200 samples: 10.0 ms a sample"),
    ],
)
def test_a_dataset_that_hands_out_batches_is_not_said_to_hand_out_samples(batch_sampler: str, said: str) -> None:
    """GIVEN batch_size=None without a batch sampler, and with one, as accelerate makes its loaders."""
    known = facts(loader={"length": 200, "batch_size": None, "batch_sampler": batch_sampler})
    rank = rank_of(steps_of([10.0] * 60), workers=(replace(worker(None), length=200),), facts=known)
    shown = report_of(trace_of(rank))
    assert said in " ".join(printed(lambda console: show(shown, console)).split())


def test_the_speed_of_all_ranks_is_shown_beside_that_of_the_first() -> None:
    steps = [step(index) for index in range(1, 11)]
    ranks = [
        RankTrace(info=RunInfo(name="train", rank=r, world_size=2), steps=tuple(steps), windows=(window_of(steps),))
        for r in (0, 1)
    ]
    shown = report_of(Trace(ranks=tuple(ranks), samples={}))
    told = " ".join(printed(lambda console: show(shown, console), 80).split())
    assert "samples a second 6,400 no ceiling was measured ranks 2 12,800 samples a second; all else" in told


@pytest.mark.parametrize(
    ("most", "words"),
    [
        (250.0, "250 samples/s without the loader (2.5×)"),
        (95.0, "no faster without the loader"),
        (70.0, None),  # others had the cores then
    ],
)
def test_a_ceiling_below_the_speed_of_the_run_is_not_believed(most: float, words: str | None) -> None:
    nothing = {"wall_ms": 0.0, "parts": (), "training_ms": 0.0, "training": (), "steps": 0, "samples": None}
    run = Breakdown(step_ms=Sketch(), samples_per_s=100.0, replay_samples_per_s=most, **nothing)  # type: ignore[arg-type]
    assert ceiling_in_words(run) == words


HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b1m\b\x7f\u202etxt\u2066"


def test_nothing_that_a_terminal_would_obey_reaches_it() -> None:
    """GIVEN hostile text that no reader has cleaned: a name, a note, a place, a line of code, a kernel, a folder."""
    seen = looks("samples", f"{HOSTILE}:20", HOSTILE, f"{HOSTILE}:7", HOSTILE, dataset="Photos")
    waits = (Span(name=HOSTILE, start_ms=0, host_ms=3.0, where=HOSTILE), Span(name="data", start_ms=3, host_ms=7.0))
    rank = rank_of(
        steps_of([10.0] * 60, spans=waits),
        notes=(Note(time_s=1.0, text=HOSTILE),),
        workers=(replace(worker(0), random_used=(HOSTILE,)),),
        stacks=(seen,),
    )
    run = run_of(trace_of(rank), HOSTILE)
    other = run_of(trace_of(replace(rank, facts=Facts(optimizer=HOSTILE))), HOSTILE)
    for report in (run, compare(run, other)):
        text = printed(lambda console, report=report: show(report, console))  # type: ignore[misc]
        assert "red" in text
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_one_line_of_a_checklist_is_not_written_as_a_plural() -> None:
    line = Line(subject="gpu", status=NOT_APPLICABLE, reason="there is none")
    checklist = Checklist(looked_at=("train.py",), lines=(line,))
    text = printed(lambda console: show_checklist(checklist, console, all_lines=True))
    assert f"{NOT_APPLICABLE:<5}1 line  " in text


def test_one_kernel_is_not_written_as_a_plural() -> None:
    one = Xray(steps=8, wall_ms=80, busy_ms=24, kernels=8, kernel_us=Sketch.of([10.0] * 8))
    view = view_of(report_of(trace_of(rank_of(steps_of([10.0] * 60), xray=one))), brief=False)
    (said,) = (
        part for section in view.sections for part in section.parts if "kernel" in part and isinstance(part, str)
    )
    assert "1 kernel a step" in said
