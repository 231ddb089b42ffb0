"""Exact lines in the place of sampled ones: a function keeps its time, and its lines share it as py-spy saw them."""

from __future__ import annotations

from flatout.diagnose.breakdown import SAMPLES, HotFunction, in_training, in_workers
from flatout.model.records import ExactLines, Frame, StackCount, Stacks, StackTime
from flatout.trace import RankTrace, RunInfo

Seen = tuple[str, ...]  # "train.py:7 metric", outermost first; a library's file has a folder


def frame(text: str, *, own: bool | None = None) -> Frame:
    where, _, function = text.partition(" ")
    return Frame(where=where, function=function, own="/" not in where if own is None else own, source=f"line {where}")


def sampled(*seen: tuple[str, float, Seen], dataset: str | None = None) -> Stacks:
    """A hundred looks a second at each of these stacks: phase, seconds, frames."""
    names = list(dict.fromkeys(name for _, _, stack in seen for name in stack))
    stacks = tuple(
        StackTime(phase=phase, frames=tuple(map(names.index, stack)), seconds=seconds, looks=round(100 * seconds))
        for phase, seconds, stack in seen
    )
    return Stacks(time_s=110.0, pid=1, frames=tuple(map(frame, names)), stacks=stacks, dataset=dataset)


def exact(*seen: tuple[int, Seen], in_workers: bool = False) -> ExactLines:
    names = list(dict.fromkeys(name for _, stack in seen for name in stack))
    stacks = tuple(StackCount(frames=tuple(map(names.index, stack)), looks=looks) for looks, stack in seen)
    frames = tuple(frame(name, own=False) for name in names)  # py-spy does not know whose a file is
    return ExactLines(time_s=110.0, in_workers=in_workers, frames=frames, stacks=stacks)


def rank(*stacks: Stacks, exact: ExactLines) -> RankTrace:
    return RankTrace(info=RunInfo(name="demo", host="box"), stacks=stacks, exact=(exact,))


def lines(function: HotFunction) -> dict[str, float]:
    return {line.where: round(line.share, 3) for line in function.lines}


def test_the_function_keeps_its_share_and_the_line_is_the_one_that_py_spy_saw() -> None:
    trace = rank(
        sampled(
            ("rest", 0.8, ("train.py:20 main", "train.py:8 metric")),
            ("rest", 0.2, ("train.py:20 main", "train.py:12 log")),
        ),
        exact=exact(
            (90, ("train.py:20 main", "train.py:7 metric")),
            (10, ("train.py:20 main", "train.py:8 metric", "numpy/lib/hist.py:3 histogram")),
            (9, ("train.py:20 main", "train.py:13 log")),  # too few
        ),
    )
    metric, log = in_training(trace)
    assert (metric.name, metric.exact, lines(metric)) == ("metric", True, {"train.py:7": 0.72, "train.py:8": 0.08})
    assert [line.called for line in metric.lines] == [None, "numpy.histogram"]
    assert metric.hottest.source == "line train.py:7"
    assert (log.name, log.exact, lines(log)) == ("log", False, {"train.py:12": 0.2})


def test_a_line_counts_only_for_the_phases_in_which_its_place_was_sampled() -> None:
    forward = "torch/nn/modules/module.py:1 Module._wrapped_call_impl"
    trace = rank(
        sampled(
            ("backward", 5.0, ("train.py:21 main", "torch/_tensor.py:5 Tensor.backward")),
            ("forward", 5.0, ("train.py:20 main", forward)),
            ("logging", 3.0, ("train.py:23 main",)),
            ("rest", 1.0, ("train.py:22 main",)),
        ),
        exact=exact(
            (250, ("train.py:21 main", "flatout/inside/patches.py:9 wrapper", "torch/_tensor.py:5 Tensor.backward")),
            (250, ("train.py:20 main", forward)),
            (150, ("train.py:23 main", "flatout/inside/patches.py:9 wrapper")),  # print, timed
            (50, ("train.py:24 main",)),
        ),
    )
    assert lines(in_training(trace)[0]) == {"train.py:24": 1.0}
    assert lines(in_training(trace, ("logging",))[0]) == {"train.py:23": 1.0}


def test_lines_of_workers_come_from_workers() -> None:
    of_training = exact((100, ("data.py:5 decode",)))
    of_workers = exact((100, ("data.py:4 decode",)), in_workers=True)
    trace = RankTrace(
        info=RunInfo(name="demo", host="box"),
        stacks=(sampled(("samples", 1.0, ("data.py:6 decode",)), dataset="Photos"),),
        exact=(of_training, of_workers),
    )
    assert lines(in_workers(trace, "Photos", (SAMPLES,))[0]) == {"data.py:4": 1.0}


def test_numbers_of_frames_that_are_not_there_are_left_out() -> None:
    stack = StackCount(frames=(7, 0, 99), looks=100)
    damaged = ExactLines(time_s=1.0, in_workers=False, frames=(frame("train.py:7 metric"),), stacks=(stack,))
    trace = rank(sampled(("rest", 1.0, ("train.py:8 metric",))), exact=damaged)
    assert lines(in_training(trace)[0]) == {"train.py:7": 1.0}
