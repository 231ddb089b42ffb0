"""The Recorder on a clock that stands still unless told: durations to the letter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.inside.recorder import QUIET, Recorder
from flatout.trace import Span, Step
from flatout.trace.downsample import LightSteps

TRAIN, VALIDATION, OTHER = 1, 2, 3
OPTIMIZER = 7


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1e3


class Gpu:
    """A GPU that does nothing but work `busy_ms` a mark; `reached` says how many marks it has come to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.capturing = False
        self.behind = False
        self.marks = 0
        self.first_marks = 0

    def mark(self, *, begins: bool) -> Any:
        if self.capturing:
            return None
        self.marks += 1
        self.first_marks += begins
        return self._clock.ms

    def between(self, marks: list[Any]) -> list[float] | None:
        if self.behind:
            return None
        return [b - a for a, b in itertools.pairwise(marks)]


COMPUTES = ("copy", "forward", "backward", "optimizer")


class Bench:
    """A Recorder and what it gave, notified as the patches notify it; `phase` spends milliseconds in one."""

    def __init__(self, *, gpu: bool = False) -> None:
        self.clock = Clock()
        self.gpu = Gpu(self.clock)
        self.steps: list[Step] = []
        self.bulks = 0
        self.recorder = Recorder(clock=self.clock, emit=self.take, gpu=self.gpu if gpu else None)

    def take(self, record: Step | LightSteps) -> None:
        if isinstance(record, LightSteps):
            self.bulks += 1
            self.steps += record.steps()
        else:
            self.steps.append(record)

    def rest(self, ms: float) -> None:
        self.clock.ms += ms

    def phase(self, name: str, ms: float, where: str | None = None) -> None:
        if self.recorder.light and name in COMPUTES:
            self.clock.ms += ms
            return
        self.recorder.push(name, where)
        self.clock.ms += ms
        self.recorder.pop()

    def fetch(self, loader: int = TRAIN, ms: float = 1.0, samples: int | None = 8, learns: bool = True) -> None:
        if self.recorder.light:
            if learns and loader in self.recorder.train_loaders:
                start_s = self.clock()
                self.clock.ms += ms
                self.recorder.tape.append((loader, start_s, self.clock(), samples))
                return
            self.recorder.look_closely()
        self.recorder.fetching(loader, learns)
        self.clock.ms += ms
        self.recorder.fetched(samples)

    def forward(self, ms: float = 2.0, *, learns: bool = True, training: bool = True, trained: bool = True) -> None:
        if self.recorder.light:
            if learns and training:
                self.clock.ms += ms
                return
            self.recorder.look_closely()
        self.recorder.forward(learns=learns, training=training, trained=trained)
        self.clock.ms += ms
        self.recorder.pop()

    def backward(self, ms: float = 3.0) -> None:
        if self.recorder.light:
            self.recorder.tape.append(None)
            self.clock.ms += ms
            return
        self.recorder.backward()
        self.clock.ms += ms
        self.recorder.pop()

    def step(self, ms: float = 4.0, optimizer: int = OPTIMIZER) -> bool:
        if self.recorder.light:
            self.clock.ms += ms
            return self.recorder.optimizer_ended(optimizer)
        depth = self.recorder.optimizer_begins()
        self.clock.ms += ms
        self.recorder.leave(depth)
        return self.recorder.optimizer_ended(optimizer)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.fetch()
            self.forward()
            self.rest(0.5)
            self.backward()
            self.step()

    @property
    def last(self) -> Step:
        return self.steps[-1]

    def handed_on(self) -> Step:
        """The step that has just ended: light ones are handed on a few at a time."""
        number = self.recorder.steps - 1
        self.train(200)
        return next(step for step in self.steps if step.index == number)


def spans(step: Step) -> list[tuple[str, float]]:
    return [(span.name, round(span.host_ms, 6)) for span in step.spans if span.host_ms]


def test_a_step_is_tiled_by_its_phases() -> None:
    bench = Bench()
    bench.rest(100)
    bench.train(2)
    assert [(s.kind, s.index, s.wall_ms) for s in bench.steps] == [
        ("setup", -1, pytest.approx(100)),
        ("warmup", 0, pytest.approx(10.5)),
        ("train", 1, pytest.approx(10.5)),
    ]
    assert spans(bench.last) == [("data", 1), ("forward", 2), ("loss", 0.5), ("backward", 3), ("optimizer", 4)]
    assert bench.last.samples == 8


def test_a_phase_inside_another_takes_its_own_time_only() -> None:
    bench = Bench()
    bench.train(1)
    bench.recorder.push("logging")
    bench.rest(1)
    bench.phase("sync", 5, "train.py:3")
    bench.rest(2)
    bench.recorder.pop()
    bench.train(1)
    assert spans(bench.last)[:3] == [("logging", 1), ("sync", 5), ("logging", 2)]
    assert [span.where for span in bench.last.spans if span.name == "sync"] == ["train.py:3"]


@pytest.mark.parametrize("kind", ["warmup", "train", "replay"])
def test_what_the_thread_does_and_for_how_long_is_known_in_steps_of_every_kind(kind: str) -> None:
    """That a call hangs is seen by it, and changes have their turns in steps that are no plain training."""
    bench = Bench()
    bench.train(2)
    bench.recorder.set_kind(kind)
    bench.recorder.push("forward")
    bench.rest(7)
    assert (bench.recorder.doing, bench.recorder.still_s) == ("forward", pytest.approx(0.007))


def test_the_tail_is_what_comes_after_the_last_step() -> None:
    bench = Bench()
    bench.train(2)
    bench.phase("checkpoint", 30)
    bench.recorder.finish()
    assert (bench.last.kind, spans(bench.last)) == ("tail", [("checkpoint", 30)])


def test_many_phases_are_summed_by_name_beyond_the_first() -> None:
    bench = Bench()
    bench.train(1)
    for _ in range(500):
        bench.phase("sync", 1, "a.py:1")
        bench.phase("copy", 1)
    bench.train(1)
    assert len(bench.last.spans) < 80
    assert sum(s.host_ms for s in bench.last.spans if s.name == "sync") == pytest.approx(500)
    ends_ms = [0.0, *itertools.accumulate(s.host_ms for s in bench.last.spans)]
    assert [s.start_ms for s in bench.last.spans] == pytest.approx(ends_ms[:-1]), "an X-ray lays kernels over them"
    assert ends_ms[-1] == pytest.approx(bench.last.wall_ms)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from(["copy", "sync", "logging", "gc", "checkpoint", "rest"])),
            st.tuples(st.just("pop"), st.just("")),
            st.tuples(st.just("wait"), st.floats(0, 1000)),
            st.tuples(st.just("fetch"), st.sampled_from([TRAIN, VALIDATION, OTHER])),
            st.tuples(st.just("forward"), st.tuples(st.booleans(), st.booleans())),
            st.tuples(st.just("backward"), st.just("")),
            st.tuples(st.just("step"), st.sampled_from([1, 2])),
        ),
        max_size=200,
    ),
    st.booleans(),
)
def test_whatever_happens_the_pieces_add_up(events: list[tuple[str, Any]], gpu: bool) -> None:
    bench = Bench(gpu=gpu)
    for name, value in events:
        if name == "push":
            bench.recorder.push(value)
        elif name == "pop":
            bench.recorder.pop()
        elif name == "wait":
            bench.rest(value)
        elif name == "fetch":
            bench.fetch(value)
        elif name == "forward":
            bench.forward(learns=value[0], training=value[1])
        elif name == "backward":
            bench.backward()
        else:
            bench.step(optimizer=value)
    bench.recorder.finish()
    for step in bench.steps:
        assert sum(span.host_ms for span in step.spans) == pytest.approx(step.wall_ms, abs=1e-6)
    assert sum(step.wall_ms for step in bench.steps) == pytest.approx(bench.clock.ms, abs=1e-3)


def test_a_collection_in_the_midst_of_a_cut_loses_no_time() -> None:
    """GIVEN a clock that lets something else happen while it is read WHEN that cuts too THEN nothing is lost."""
    bench = Bench()
    bench.train(1)
    recorder, plain = bench.recorder, bench.clock.__call__
    inside = [False]

    def interrupted() -> float:
        now = plain()
        if not inside[0]:
            inside[0] = True
            bench.rest(1)
            bench.phase("gc", 2)
            inside[0] = False
        return now

    recorder._clock = interrupted
    bench.phase("logging", 5)
    recorder._clock = bench.clock
    bench.train(1)
    assert sum(span.host_ms for span in bench.last.spans) == pytest.approx(bench.last.wall_ms)


# -- evaluation -----------------------------------------------------------------------------------------------------


def evaluated_ms(step: Step) -> float:
    return sum(span.host_ms for span in step.spans if span.name == "evaluation")


def test_evaluation_takes_in_all_of_it_but_logs_and_checkpoints() -> None:
    bench = Bench()
    bench.train(2)
    bench.phase("sync", 6, "a.py:1")  # of the step before
    for _ in range(3):
        bench.fetch(VALIDATION, ms=10)
        bench.forward(20, learns=False, training=False)
        bench.phase("sync", 5, "a.py:2")
    bench.phase("logging", 7)
    bench.train(1)
    assert evaluated_ms(bench.last) == pytest.approx(3 * 35)
    assert {("logging", 7), ("sync", 6)} <= set(spans(bench.last))
    assert bench.last.samples == 8


def test_who_looks_while_it_goes_on_sees_an_evaluation() -> None:
    """A look at the stack is credited at once: from the second batch on, it is known that this is no training."""
    bench, seen = Bench(), []
    bench.train(2)
    for _ in range(3):
        bench.fetch(VALIDATION)
        bench.recorder.forward(learns=False, training=False)
        seen.append(bench.recorder.phase)
        bench.recorder.pop()
    bench.recorder.push("logging")
    seen.append(bench.recorder.phase)
    bench.recorder.pop()
    bench.fetch(TRAIN)
    bench.recorder.forward(learns=True, training=True)
    seen.append(bench.recorder.phase)
    assert seen == ["forward", "evaluation", "evaluation", "logging", "forward"]


def test_who_looks_at_the_first_step_sees_the_set_up() -> None:
    """GIVEN a script that looks at a batch before it builds its model THEN building it is no line of training."""
    bench = Bench()
    bench.fetch(TRAIN)
    seen = [bench.recorder.phase]
    bench.train(1)
    bench.fetch(TRAIN)
    seen.append(bench.recorder.phase)
    assert seen == ["setup", "rest"]


def test_a_batch_in_hand_stays_training_while_another_loader_is_evaluated() -> None:
    bench = Bench()
    bench.train(2)
    bench.fetch(TRAIN, ms=1.5)
    for _ in range(2):
        bench.fetch(VALIDATION, ms=10)
        bench.forward(20, learns=False, training=False)
    bench.forward()
    bench.backward()
    bench.step()
    assert ("data", 1.5) in spans(bench.last)
    assert bench.last.samples == 8
    assert evaluated_ms(bench.last) > 0


def test_two_training_loaders_and_a_teacher_are_no_evaluation() -> None:
    bench = Bench()
    for _ in range(3):
        bench.fetch(TRAIN)
        if bench.recorder.steps:
            bench.forward(learns=False, training=False, trained=False)
        bench.fetch(OTHER)
        bench.forward()
        bench.backward()
        bench.step()
    assert evaluated_ms(bench.last) == 0
    assert bench.last.samples == 16


# -- whose step it is -----------------------------------------------------------------------------------------------


def test_the_last_optimizer_of_a_round_ends_the_step() -> None:
    bench = Bench()
    ends = [bench.step(optimizer=o) for o in (1, 2, 1, 2, 1, 2)]
    assert ends == [True, True, False, True, False, True]
    assert [step.kind for step in bench.steps] == ["setup", "warmup", "train", "train"]


def test_an_optimizer_that_replaces_another_is_soon_followed() -> None:
    bench = Bench()
    ends = [bench.step(optimizer=o) for o in (1, 1, 1, 2, 2, 2, 2)]
    assert ends == [True, True, True, False, True, True, True]


# -- the GPU -------------------------------------------------------------------------------------------------------


def marked(bench: Bench) -> Step:
    return next(step for step in reversed(bench.steps) if any(s.gpu_idle_ms is not None for s in step.spans))


def test_where_nothing_is_launched_the_gpus_time_is_idleness() -> None:
    bench = Bench(gpu=True)
    bench.train(20)
    step = marked(bench)
    for span in step.spans:
        idle, busy = span.gpu_idle_ms, span.gpu_busy_ms
        assert (idle is None) != (busy is None)
        assert (idle is not None) == (span.name in QUIET)
        assert (idle if idle is not None else busy) == pytest.approx(span.host_ms)


def test_a_step_says_which_of_its_marks_is_the_first() -> None:
    bench = Bench(gpu=True)
    bench.train(8)
    assert bench.gpu.first_marks == 8 < bench.gpu.marks


def test_waiting_for_data_in_an_evaluation_is_idleness_too() -> None:
    bench = Bench(gpu=True)
    bench.train(4)  # the fifth step carries marks
    for _ in range(3):
        bench.fetch(VALIDATION, ms=10)
        bench.forward(20, learns=False, training=False)
    bench.train(1)
    named = [span for span in bench.last.spans if span.name == "evaluation"]
    assert sum(span.gpu_idle_ms or 0 for span in named) == pytest.approx(30)
    assert sum(span.gpu_busy_ms or 0 for span in named) == pytest.approx(60)


def test_steps_wait_for_the_gpu_in_order_but_not_for_ever() -> None:
    bench = Bench(gpu=True)
    bench.train(4)
    bench.gpu.behind = True
    before = len(bench.steps)
    bench.train(10)
    assert len(bench.steps) == before
    bench.gpu.behind = False
    bench.train(1)
    assert [step.index for step in bench.steps[1:]] == list(range(15))
    bench.gpu.behind = True
    bench.train(200)
    assert len(bench.steps) > 100


def test_no_mark_is_dropped_while_a_graph_is_captured() -> None:
    bench = Bench(gpu=True)
    bench.gpu.capturing = True
    bench.train(20)
    assert bench.gpu.marks == 0
    assert all(isinstance(span, Span) and span.gpu_busy_ms is None for s in bench.steps for span in s.spans)


def dear_bench() -> Bench:
    """A bench on which a close look takes as long as the step."""
    bench = Bench(gpu=True)
    mark = bench.gpu.mark

    def dear(*, begins: bool) -> Any:
        bench.clock.ms += 1
        return mark(begins=begins)

    bench.gpu.mark = dear  # type: ignore[method-assign]
    bench.train(100)
    while not bench.recorder.light:
        bench.train()
    bench.steps.clear()
    return bench


def test_dear_close_looks_are_taken_rarely() -> None:
    bench = dear_bench()
    before_s = bench.recorder.own_s
    bench.train(5120)
    carrying = [any(s.gpu_idle_ms is not None for s in step.spans) for step in bench.steps]
    assert 10 < sum(carrying) < 40
    gaps = {b - a for a, b in itertools.pairwise(place for place, there in enumerate(carrying) if there)}
    assert len(gaps) > 3  # not every n-th
    marks = sum(len(step.spans) + 1 for step, there in zip(bench.steps, carrying, strict=True) if there)
    assert bench.recorder.own_s - before_s == pytest.approx(marks * 1e-3, rel=0.1)


def test_cheap_close_looks_are_taken_always() -> None:
    bench = Bench(gpu=True)
    bench.train(100)
    assert not any(span.name == "unsplit" for step in bench.steps for span in step.spans)


def test_a_light_step_tells_waits_and_pauses_from_the_rest() -> None:
    bench = dear_bench()
    bench.fetch(ms=7)
    bench.phase("copy", 1)
    bench.forward()
    bench.phase("sync", 5, where="train.py:3")
    bench.backward()
    bench.phase("checkpoint", 9)
    bench.step()
    step = bench.handed_on()
    assert spans(step) == [
        ("data", 7),
        ("unsplit", 3),
        ("sync", 5),
        ("unsplit", 3),
        ("checkpoint", 9),
        ("unsplit", 4),
    ]
    assert step.wall_ms == pytest.approx(31)
    assert step.samples == 8
    assert step.micro_steps == 1


def test_a_collection_in_the_midst_of_a_note_costs_no_time() -> None:
    """The wait was over, and before it was noted a phase came: what is noted then lies before what was cut."""
    bench = dear_bench()
    start_s = bench.clock()
    bench.rest(7)
    end_s = bench.clock()
    bench.phase("gc", 5)
    bench.recorder.tape.append((TRAIN, start_s, end_s, 8))
    bench.rest(3)
    bench.step()
    step = bench.handed_on()
    assert sum(ms for _, ms in spans(step)) == pytest.approx(step.wall_ms) == 19
    assert all(span.host_ms >= 0 for span in step.spans)


def test_light_steps_are_counted_as_they_end() -> None:
    bench = dear_bench()
    steps, measured = bench.recorder.steps, bench.recorder.measured
    while bench.recorder.light:
        bench.train()
        steps, measured = steps + 1, measured + 1
        assert (bench.recorder.steps, bench.recorder.measured) == (steps, measured)
    bench.recorder.finish()
    assert [step.index for step in bench.steps] == list(range(bench.steps[0].index, steps + 1))


def a_long_run(bench: Bench) -> list[Step]:
    """Plain steps, and some with two batches, a pause, an evaluation, or the end of an epoch in them."""
    bench.train(30)
    for _ in range(3):
        bench.fetch()
        bench.backward()
        bench.train(40)
        bench.phase("logging", 2)
        bench.train(40)
        bench.fetch(samples=None)
        bench.fetch(VALIDATION, learns=False)
        bench.forward(learns=False, training=False)
        bench.train(300)
    bench.recorder.finish()
    return bench.steps


def test_steps_handed_on_in_bulk_are_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one, in_bulk = dear_bench(), dear_bench()
    monkeypatch.setattr(one_by_one.recorder, "_hand_on", one_by_one.recorder._play_one_by_one)
    known, made = a_long_run(one_by_one), a_long_run(in_bulk)
    assert (one_by_one.bulks, in_bulk.bulks > 3) == (0, True)
    assert [(s.index, s.kind, s.samples, s.micro_steps) for s in made] == [
        (s.index, s.kind, s.samples, s.micro_steps) for s in known
    ]
    for one, other in zip(known, made, strict=True):
        assert other.wall_ms == pytest.approx(one.wall_ms)
        assert spans(other) == spans(one)


def test_evaluation_is_known_in_a_light_step() -> None:
    bench = dear_bench()
    for _ in range(3):
        bench.fetch(VALIDATION, ms=2, learns=False)
        bench.phase("copy", 1)
        bench.forward(20, learns=False, training=False)
    bench.train()
    step = bench.handed_on()
    assert spans(step)[:2] == [("evaluation", 69), ("data", 1)]
    assert {"forward", "backward", "optimizer"} < {name for name, _ in spans(step)}  # and so the rest of it is split
    assert step.samples == 8


def test_a_step_that_was_split_from_its_middle_says_nothing_of_what_a_close_look_takes() -> None:
    bench = dear_bench()
    bench.fetch(VALIDATION, learns=False)
    bench.forward(learns=False, training=False)
    bench.train()
    bench.steps.clear()
    bench.train(640)
    assert sum(any(s.gpu_idle_ms is not None for s in step.spans) for step in bench.steps) < 40


def test_an_xray_is_always_looked_at_closely() -> None:
    bench = dear_bench()
    bench.recorder.set_kind("xray")
    bench.train()
    step = bench.handed_on()
    assert {"forward", "backward", "optimizer"} <= {span.name for span in step.spans}
