"""What a training that tunes itself decides, from the steps it records: simulated, with a clock of their own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.inside import tune
from flatout.inside.changes.ledger import Ledger
from flatout.inside.tune import Seen, Tuner, seen_in
from flatout.launch.protocol import TUNED
from flatout.model.changes import to_tune
from flatout.model.plan import Plan
from flatout.model.stats import Gain
from flatout.model.turns import TurnsResult
from flatout.trace import Span, Step
from flatout.trace.downsample import LightSteps

NO_GPU = "the model is not trained on a GPU"


class Feed:
    """Stands in for a loader's scheduler; left alone, it goes to the number of workers that it likes best."""

    def __init__(self, declared: int, likes: int) -> None:
        self.declared = self.workers = declared
        self.recipe = SimpleNamespace(declared=declared or 2)
        self.likes, self.held = likes, True
        self.why, self.given_back, self.left_workers = "every worker is busy and the loop waits", "", False
        self.resized: list[int] = []

    @property
    def batches_ahead(self) -> int:
        return 2 * self.workers

    def resize(self, workers: int, *, hold: bool) -> None:
        self.workers, self.held = workers, hold
        self.resized.append(workers)

    def choose(self) -> None:
        if not self.held and self.workers != self.likes:
            self.workers += 1 if self.likes > self.workers else -1


class Training:
    """A simulated training: `step(workers)` gives the seconds of a step and those of them that it waits for data."""

    def __init__(
        self,
        folder: Path,
        step: Callable[[int], tuple[float, float]],
        feed: Feed | None,
        *,
        refused: dict[str, str] | None = None,
    ) -> None:
        self.step, self.feed, self.folder = step, feed, folder
        self.steps, self.now_s = 0, 100.0
        self.notes: list[str] = []
        self.switched: list[tuple[str, bool]] = []
        self.collecting: Callable[[], float] = lambda: 0.0  # seconds of a step
        self.handed_back = ""
        refusals = {"device_prefetch": NO_GPU, "pin_memory": "there is no GPU to copy to"} | (refused or {})
        applied: Any = SimpleNamespace(
            ledger=Ledger(to_tune().changes),
            switch=lambda name, on: self.switched.append((name, on)),
            why_not_made=lambda name: refusals.get(name, ""),
            hand_back_loaders=lambda why: setattr(self, "handed_back", why),
        )
        feeds: Any = lambda: [self.feed] if self.feed is not None else []  # noqa: E731
        recording: Any = SimpleNamespace(
            feeds_in_use=feeds,
            recorder=SimpleNamespace(as_own=lambda action: action()),
            note=self.notes.append,
            folder=folder,
        )
        self.tuner = Tuner(applied, recording)

    def train(self, seconds: float) -> None:
        """Train for so long."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            wall_s, waited_s = self.step(self.feed.workers if self.feed is not None else 0)
            spans = tuple(
                Span(name=name, start_ms=0.0, host_ms=s * 1e3)
                for name, s in (("data", waited_s), ("gc", self.collecting()), ("evaluation", 0.0))
            )
            record = Step(index=self.steps, start_s=self.now_s, wall_ms=wall_s * 1e3, spans=spans)
            self.steps, self.now_s = self.steps + 1, self.now_s + wall_s
            self.tuner.saw(record)
            self.tuner.step_ended(self.steps)
            if self.feed is not None:
                self.feed.choose()

    @property
    def plan(self) -> Plan:
        """What lies in the trace's folder."""
        return Plan.load(self.folder / TUNED)


def starving(workers: int) -> tuple[float, float]:
    """A step of 20 ms, whose batch takes a worker 100 ms."""
    wait_s = max(0.0, 0.1 / max(1, workers) - 0.02)
    return 0.02 + wait_s, wait_s


def test_more_workers_are_kept_where_steps_are_faster_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = Feed(1, likes=5)
    training = Training(tmp_path, starving, feed)
    training.train(60)
    assert (feed.workers, feed.held) == (5, True)
    said = capsys.readouterr().err
    assert re.fullmatch(r"flatout: step \d+: 5 workers in place of 1: 5\.00× \(5\.00 to 5\.00\), kept\n", said)
    switches = [note.partition(": ")[2] for note in training.notes if "→" in note]
    assert switches[0] == "1 → 2 workers (every worker is busy and the loop waits)"
    assert switches[3:] == [
        "4 → 5 workers (every worker is busy and the loop waits)",
        "5 → 1 worker (to compare)",
        "1 → 5 workers (kept)",
    ]
    (kept,) = training.plan.changes
    assert (kept.name, kept.value) == ("loader", "elastic")
    assert kept.note in said
    assert not training.tuner.wants_every_step


def test_batches_that_lie_ready_are_used_up_before_anything_is_measured(tmp_path: Path) -> None:
    """GIVEN a queue that makes the steps after a switch quick, two batches a worker that there was."""
    feed = Feed(1, likes=5)
    ready, before = 0, 1

    def step(workers: int) -> tuple[float, float]:
        nonlocal ready, before
        if workers != before:
            ready, before = 2 * before, workers
        ready -= 1
        return (0.02, 0.0) if ready >= 0 else starving(workers)

    training = Training(tmp_path, step, feed)
    training.train(60)
    assert "5 workers in place of 1: 5.00× (5.00 to 5.00), kept" in training.plan.changes[0].note


def test_a_loader_that_keeps_up_is_left_as_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed = Feed(2, likes=7)
    training = Training(tmp_path, lambda _: (0.02, 0.0001), feed)
    training.train(60)
    assert set(feed.resized) == {2}
    assert "2 workers as declared: the loop waits for data in 0.5% of the time" in capsys.readouterr().err
    assert [(o.change.name, o.verdict) for o in training.plan.tried] == [("loader", "undone")]
    assert not training.plan.changes


def test_workers_that_bring_nothing_are_taken_back_and_pytorch_goes_on(tmp_path: Path) -> None:
    feed = Feed(0, likes=3)
    training = Training(tmp_path, lambda _: (0.03, 0.02), feed)
    training.train(60)
    assert (feed.workers, feed.held) == (0, True)
    assert training.handed_back
    assert "3 workers in place of none: 1.00× (1.00 to 1.00), taken back" in training.plan.tried[0].note


def test_a_busy_while_before_is_not_taken_for_a_gain(tmp_path: Path) -> None:
    """GIVEN a machine that others keep busy until there are more workers, WHEN it is fast with or without them."""
    feed = Feed(1, likes=3)
    busy = True

    def step(workers: int) -> tuple[float, float]:
        nonlocal busy
        busy = busy and workers < 3
        return (0.2, 0.1) if busy else (0.03, 0.01)

    training = Training(tmp_path, step, feed)
    training.train(90)
    assert feed.workers == 1
    assert not training.plan.changes


def test_noise_alone_is_seldom_kept(tmp_path: Path) -> None:
    """Of 400 such trainings 4% were."""
    chance, kept = random.Random(3), 0
    for number in range(40):
        (folder := tmp_path / str(number)).mkdir()
        training = Training(folder, lambda _: (0.05 * chance.lognormvariate(0, 0.6), 0.02), Feed(1, likes=3))
        training.train(120)
        kept += bool(training.plan.changes)
    assert kept <= 4


def test_the_loader_is_decided_again_when_the_bottleneck_has_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = Feed(1, likes=2)
    demand_s = 0.1  # what a step computes
    batch_s = 0.1

    def step(workers: int) -> tuple[float, float]:
        wait_s = max(0.0, batch_s / workers - demand_s)
        return demand_s + wait_s, wait_s

    training = Training(tmp_path, step, feed)
    training.train(200)
    assert feed.workers == 1, "it keeps up"
    batch_s, feed.likes = 0.4, 4  # another data set, a slower disk
    training.train(100)
    assert feed.workers == 1, "at most every five minutes"
    training.train(400)
    assert feed.workers == 4
    said = capsys.readouterr().err
    assert "steps take 300% longer than when the loader was decided: the loader is decided again" in said
    assert "4 workers in place of 1: 4.00×" in said
    decisions = len(training.notes)
    training.train(1000)
    assert len(training.notes) == decisions, "nothing has moved since"


def test_what_raises_in_it_ends_the_tuning_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed = Feed(1, likes=5)
    training = Training(tmp_path, starving, feed)
    training.train(5)

    def broken(workers: int, *, hold: bool) -> None:
        raise OSError("no more processes")

    feed.resize = broken  # type: ignore[method-assign]
    training.train(60)
    assert training.tuner.over
    assert not training.tuner.wants_every_step
    said = capsys.readouterr().err
    assert re.fullmatch(r"flatout: step \d+: tuning has ended \(OSError: no more processes\); training goes on\n", said)
    assert training.notes == [said.removeprefix("flatout: ").strip()]
    assert not (tmp_path / TUNED).exists()


def test_why_a_loader_stays_pytorchs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path, starving, None, refused={"loader": "an IterableDataset: …"})
    training.train(60)
    assert "the loader stays PyTorch's: an IterableDataset: …" in capsys.readouterr().err
    assert not (tmp_path / TUNED).exists()


def test_a_loader_made_again_gets_the_number_of_the_last_one(tmp_path: Path) -> None:
    training = Training(tmp_path, starving, Feed(1, likes=5))
    training.train(60)
    training.feed = new = Feed(1, likes=5)
    training.train(1)
    assert (new.workers, new.held) == (5, True)


def test_of_several_ranks_each_loader_chooses_and_nothing_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    feed = Feed(1, likes=4)
    training = Training(tmp_path, starving, feed)
    training.train(60)
    assert (feed.workers, feed.held) == (4, False)
    assert any("4 workers in place of 1, chosen by the loader (ranks are not compared)" in n for n in training.notes)
    assert capsys.readouterr().err == "", "rank 0 says it"
    assert not (tmp_path / TUNED).exists()
    assert ("device_prefetch", True) not in training.switched


@pytest.mark.parametrize(("left", "kept"), [(0.0, True), (0.8, False)])
def test_garbage_collections_are_frozen_where_that_shortens_them(tmp_path: Path, left: float, kept: bool) -> None:
    training = Training(tmp_path, lambda _: (0.02, 0.0), Feed(2, likes=2))
    training.collecting = lambda: 0.001 * (left if ("gc_freeze", True) in training.switched else 1.0)
    training.train(120)
    assert training.switched[-1] == ("gc_freeze", kept)
    assert [change.name for change in training.plan.changes] == ["gc_freeze"] * kept
    assert any("garbage collections took 5.0% of the time" in note for note in training.notes)


@pytest.mark.parametrize(("decision", "kept"), [("faster", True), ("no gain", False)])
def test_copies_ahead_of_time_are_decided_in_turns_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decision: Any, kept: bool
) -> None:
    """GIVEN turns that say so after 100 steps, THEN that is told, and page-locking goes into the plan with it."""

    class Turns:
        def __init__(self, *_: object) -> None:
            self.left = 100
            self.results = [
                TurnsResult(name="device_prefetch", decision=decision, gain=Gain(value=1.1, low=1.0, high=1.2))
            ]

        def step_ended(self) -> bool:
            self.left -= 1
            return self.left > 0

    monkeypatch.setattr(tune, "LiveTurns", Turns)
    training = Training(tmp_path, starving, Feed(5, likes=5), refused={"device_prefetch": "", "pin_memory": ""})
    training.train(60)
    told = f"batches copied to the GPU ahead of time: 1.10× (1.00 to 1.20), {'kept' if kept else 'taken back'}"
    assert any(note.endswith(told) for note in training.notes)
    assert [change.name for change in training.plan.changes] == ["device_prefetch", "pin_memory"] * kept


def test_short_pauses_are_left_alone(tmp_path: Path) -> None:
    training = Training(tmp_path, lambda _: (0.02, 0.0), Feed(2, likes=2))
    training.collecting = lambda: 0.0001
    training.train(120)
    assert ("gc_freeze", True) not in training.switched


def test_a_step_counts_without_evaluation_and_our_own_work() -> None:
    spans = [
        ("data", 5.0),
        ("loader start", 3.0),
        ("evaluation", 100.0),
        ("flatout", 7.0),
        ("gc", 2.0),
        ("forward", 9.0),
    ]
    step = Step(
        index=4,
        start_s=1.0,
        wall_ms=126.0,
        spans=tuple(Span(name=name, start_ms=0.0, host_ms=ms) for name, ms in spans),
    )
    (seen,) = seen_in(step)
    assert seen == pytest.approx(Seen(4, 1.126, 0.019, 0.008, 0.002))
    light = LightSteps(
        first_index=7, start_s=2.0, events=[(1, 2.0, 2.25, 8), None, 2.5, 3.0], waiting="data", computing="unsplit"
    )
    assert list(seen_in(light)) == [Seen(7, 2.5, 0.5, 0.25), Seen(8, 3.0, 0.5, 0.0)]
