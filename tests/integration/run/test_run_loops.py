"""Training loops as people write them, recorded in this process: every step is seen, and each phase by its name."""

from __future__ import annotations

import copy
import gc
import logging
import queue
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from observing import Observed, observe
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import flatout
from flatout.feed.dataset_check import DatasetCheck

BATCH = 4
FEATURES = 6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(FEATURES, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def loader(samples: int = 24, **settings: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, FEATURES), torch.randint(0, 2, (samples,)))
    return DataLoader(data, **({"batch_size": BATCH} | settings))


def learn(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    until_s = time.perf_counter() + 1e-4  # on a quick machine a loss is too short to be a phase of its own
    while time.perf_counter() < until_s:
        pass
    loss.backward()
    optimizer.step()


def kinds(observed: Observed) -> list[str]:
    return [step.kind for step in observed.rank.steps]


def names(observed: Observed) -> set[str]:
    return {span.name for step in observed.steps for span in step.spans}


AS_ANY = pytest.mark.parametrize("closely", [True, False], ids=["closely", "lightly"])


def test_a_plain_loop_is_seen_step_by_step(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for x, y in loader():
                learn(model, optimizer, x, y)

    observed = observe(tmp_path, train)
    assert kinds(observed) == ["setup", "warmup", *["train"] * 11, "tail"]
    assert observed.samples() == 2 * 24
    for name in ("data", "forward", "loss", "backward", "optimizer"):
        assert observed.count(name) == 11, name
    assert all(step.loss is not None and step.micro_steps == 1 for step in observed.steps)
    assert "evaluation" not in names(observed)


def test_the_account_adds_up_to_the_wall_time(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(5):
            for x, y in loader():
                learn(model, optimizer, x, y)
                logging.getLogger("quiet").info("a step")

    b = observe(tmp_path, train).breakdown
    assert sum(part.ms for part in b.training) == pytest.approx(b.training_ms, rel=1e-6)
    assert sum(part.ms for part in b.parts) == pytest.approx(b.wall_ms, rel=1e-6)


def test_a_step_that_is_not_looked_at_closely_takes_few_calls_of_ours(tmp_path: Path) -> None:
    """What a recording costs is counted in calls, which do not depend on the machine."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and ("/flatout/" in code.co_filename or code.co_name == "is_dynamo_compiling"):
            calls[code.co_name] += 1

    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(loader(BATCH * 360)):
            if number == 310:  # what the loop does to its dataset is looked at before, and facts are written at 300
                sys.setprofile(count)
            learn(model, optimizer, x.to("cpu"), y.to("cpu"))
        sys.setprofile(None)

    observe(tmp_path, train, closely=False)
    assert sum(calls.values()) / 50 < 30, calls.most_common(20)


@AS_ANY
def test_two_models_with_two_optimizers_make_one_step(tmp_path: Path, closely: bool) -> None:
    def train() -> None:
        generator, judge = torch.nn.Linear(3, FEATURES), Net()
        of_generator = torch.optim.Adam(generator.parameters())
        of_judge = torch.optim.Adam(judge.parameters())
        for x, _ in loader(40):
            with torch.no_grad():
                fake = generator(torch.randn(len(x), 3))
            of_judge.zero_grad()
            (judge(x).mean() - judge(fake).mean()).backward()
            of_judge.step()
            of_generator.zero_grad()
            judge(generator(torch.randn(len(x), 3))).mean().backward()
            of_generator.step()

    observed = observe(tmp_path, train, closely=closely)
    assert kinds(observed) == ["setup", "warmup", "warmup", *["train"] * 9, "tail"]
    assert [step.micro_steps for step in observed.steps] == [2] * 9
    assert observed.samples() == 40
    assert "evaluation" not in names(observed)


@AS_ANY
def test_a_queue_behind_a_loader_is_no_second_loader(tmp_path: Path, closely: bool) -> None:
    """A thread that page-locks batches hands them to the loader by such a queue, in the midst of the wait for them."""
    ready: queue.Queue[torch.Tensor] = queue.Queue()

    class Handed(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            ready.put(torch.ones(3))
            return ready.get()

    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Handed(), batch_size=4):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    observed = observe(tmp_path, train, closely=closely)
    assert {step.samples for step in observed.steps} == {4}
    assert observed.samples() == 64
    assert all([span.name for span in step.spans].count("data") == 1 for step in observed.steps)


@AS_ANY
def test_accumulation_counts_micro_steps(tmp_path: Path, closely: bool) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(loader(48)):
            cross_entropy(model(x), y).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    observed = observe(tmp_path, train, closely=closely)
    assert [(step.micro_steps, step.samples) for step in observed.steps] == [(4, 16)] * 2


@AS_ANY
def test_a_step_that_the_scaler_skips_is_a_step(tmp_path: Path, closely: bool) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, (x, y) in enumerate(loader()):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if number in (2, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert len(observe(tmp_path, train, closely=closely).steps) == 5


@AS_ANY
def test_two_optimizers_under_one_scaler_make_one_step(tmp_path: Path, closely: bool) -> None:
    def train() -> None:
        models = Net(), Net()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, (x, y) in enumerate(loader()):
            for model in models:
                loss = cross_entropy(model(x), y)
                scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()

    assert len(observe(tmp_path, train, closely=closely).steps) == 5


@AS_ANY
def test_an_optimizer_that_calls_another_makes_one_step(tmp_path: Path, closely: bool) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def train() -> None:
        model = Net()
        torch.optim.SGD(model.parameters(), lr=0.1)  # torch hooks a class when its first object is made
        optimizer = Twice(model.parameters(), lr=0.1)
        for x, y in loader():
            learn(model, optimizer, x, y)

    assert len(observe(tmp_path, train, closely=closely).steps) == 5


@AS_ANY
def test_an_optimizer_step_that_raised_is_left_behind(tmp_path: Path, closely: bool) -> None:
    class Stubborn(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls in (2, 4, 9, 10):
                raise RuntimeError("not now")
            return super().step(closure)

    def train() -> None:
        model = Net()
        optimizer = Stubborn(model.parameters(), lr=0.1)
        for x, y in loader(60):
            try:
                learn(model, optimizer, x, y)
            except RuntimeError:
                continue

    observed = observe(tmp_path, train, closely=closely)
    assert len(observed.steps) == 10
    assert observed.count("data") == 10


@AS_ANY
def test_lbfgs_closures_are_part_of_their_step(tmp_path: Path, closely: bool) -> None:
    def train() -> None:
        torch.manual_seed(0)  # some nets have learned it all after a step: then there is one pass alone
        model = Net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for x, y in loader():

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    observed = observe(tmp_path, train, closely=closely)
    assert len(observed.steps) == 5
    assert observed.samples() == 24
    assert all(step.micro_steps > 1 for step in observed.steps)
    if closely:
        assert observed.count("forward") == observed.count("backward") == 5


# -- evaluation -----------------------------------------------------------------------------------------------------


def no_grad_outside(model: Any, data: DataLoader[Any]) -> None:
    model.eval()
    with torch.no_grad():
        for x, _ in data:
            model(x)
    model.train()


def no_grad_inside(model: Any, data: DataLoader[Any]) -> None:
    model.eval()
    for x, _ in data:
        with torch.no_grad():
            model(x)
    model.train()


def inference_mode(model: Any, data: DataLoader[Any]) -> None:
    with torch.inference_mode():
        for x, _ in data:
            model(x)


def without_eval_mode(model: Any, data: DataLoader[Any]) -> None:
    for x, _ in data:
        with torch.no_grad():
            model(x)


def without_no_grad(model: Any, data: DataLoader[Any]) -> None:
    model.eval()
    for x, _ in data:
        model(x)
    model.train()


def one_batch_by_hand(model: Any, data: DataLoader[Any]) -> None:
    x, _ = next(iter(data))
    with torch.no_grad():
        model(x)


def without_a_loader(model: Any, data: DataLoader[Any]) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(BATCH, FEATURES))
    model.train()


@pytest.mark.parametrize(
    "evaluate",
    [
        no_grad_outside,
        no_grad_inside,
        inference_mode,
        without_eval_mode,
        without_no_grad,
        one_batch_by_hand,
        without_a_loader,
    ],
)
@pytest.mark.parametrize("between", ["steps", "epochs"])
@pytest.mark.parametrize("closely", [True, False])
def test_evaluation_is_told_from_training(
    tmp_path: Path, evaluate: Callable[..., None], between: str, closely: bool
) -> None:
    """GIVEN three epochs of 6 steps WHEN evaluating every third step or each epoch THEN it shows, and only there."""

    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training, validation = loader(), loader(20)
        for _ in range(3):
            for number, (x, y) in enumerate(training, start=1):
                learn(model, optimizer, x, y)
                if between == "steps" and number % 3 == 0:
                    evaluate(model, validation)
            if between == "epochs":
                evaluate(model, validation)

    observed = observe(tmp_path, train, closely=closely)
    with_evaluation = [step.index for step in observed.steps if any(s.name == "evaluation" for s in step.spans)]
    assert with_evaluation == ([3, 6, 9, 12, 15] if between == "steps" else [6, 12])
    assert observed.samples() == 3 * 24, "samples of the evaluation are not training's"
    assert observed.count("data") == 17
    if closely:
        assert observed.count("forward") == 17, "training's own forward passes keep their name"
    else:
        assert observed.count("unsplit") >= 10, "most steps are light"
    tail = next(step for step in observed.rank.steps if step.kind == "tail")
    assert "evaluation" in {span.name for span in tail.spans}
    assert "forward" not in {span.name for span in tail.spans}


def test_evaluation_on_the_training_set_is_evaluation(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = loader()
        for _ in range(2):
            for x, y in training:
                learn(model, optimizer, x, y)
            no_grad_inside(model, training)

    observed = observe(tmp_path, train)
    assert observed.samples() == 2 * 24
    assert observed.count("evaluation") == 1


def test_evaluation_before_training_is_not_training(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training, validation = loader(), loader(20)
        no_grad_outside(model, validation)
        for _ in range(2):
            for x, y in training:
                learn(model, optimizer, x, y)
            no_grad_outside(model, validation)

    observed = observe(tmp_path, train)
    assert observed.samples() == 2 * 24
    assert observed.count("evaluation") == 1


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_teacher_inside_a_step_is_not_evaluation(tmp_path: Path, mode: str) -> None:
    def train() -> None:
        student = Net()
        teacher = copy.deepcopy(student).train(mode == "train")
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(3):
            for x, _ in loader():  # a loader of its own for each epoch
                with torch.no_grad():
                    wanted = teacher(x)
                optimizer.zero_grad()
                (student(x) - wanted).square().mean().backward()
                optimizer.step()

    observed = observe(tmp_path, train)
    assert "evaluation" not in names(observed)
    assert observed.samples() == 3 * 24
    forwards = [sum(span.name == "forward" for span in step.spans) for step in observed.steps]
    assert forwards == [2] * 17, "the teacher's pass and the student's"


# -- where batches come from ----------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(24):
            yield torch.randn(FEATURES), torch.randint(0, 2, ())


class Indexed(Dataset[Any]):
    def __init__(self, length: int = 24) -> None:
        self.length = length
        self.noise = 0.0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.randn(FEATURES), torch.tensor(index % 2)


def by_batch_sampler() -> DataLoader[Any]:
    data = Indexed()
    return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(), batch_size=BATCH),
        lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=1),
        lambda: DataLoader(Indexed(), batch_size=BATCH, sampler=RandomSampler(range(24))),
        by_batch_sampler,
        lambda: DataLoader(Indexed(), batch_size=BATCH, num_workers=2),
        lambda: DataLoader(Indexed(), batch_size=BATCH, num_workers=1, persistent_workers=True),
        lambda: flatout.DataLoader(Indexed(), batch_size=BATCH, num_workers=3),
    ],
    ids=["iterable", "iterable-worker", "sampler", "batch-sampler", "workers", "persistent", "ours"],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_loader_is_seen(tmp_path: Path, make: Callable[[], DataLoader[Any]]) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = make()
        for _ in range(2):
            for x, y in data:
                learn(model, optimizer, x, y)

    observed = observe(tmp_path, train)
    assert len(observed.steps) == 11
    assert observed.samples() == 48
    assert observed.count("data") == 11
    (facts,) = observed.rank.facts.loaders
    assert facts.dataset.rpartition(".")[2] in ("Stream", "Indexed")
    if facts.num_workers == 3:
        return  # our own workers may be ended before their last word
    assert sum(report.samples for report in observed.rank.workers) == 48
    assert observed.rank.workers[0].random_used == ("torch",)


def test_a_look_at_the_dataset_is_no_wait_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN looks at the dataset, before each batch, that take 20 ms THEN they are our own work."""
    monkeypatch.setattr(DatasetCheck, "changed", lambda _check: time.sleep(0.02))

    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(Indexed(40), batch_size=2):
            learn(model, optimizer, x, y)

    spans = [span for step in observe(tmp_path, train).steps for span in step.spans]
    looks_ms = sum(span.host_ms for span in spans if span.name == "flatout")
    waits_ms = sum(span.host_ms for span in spans if span.name == "data")
    assert looks_ms > 18 * 20
    assert waits_ms < looks_ms / 2


@pytest.mark.parametrize("new_loader", [True, False])
def test_what_loop_and_loader_do_to_each_other_is_seen(tmp_path: Path, new_loader: bool) -> None:
    """GIVEN loaders for training, made once or for every epoch, and a larger one for evaluation WHEN the loop writes to
    the training's dataset in mid-epoch THEN each is told by the loader it is about."""

    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data, val = Indexed(24), DataLoader(Indexed(96), batch_size=4)
        made = DataLoader(data, batch_size=4)
        for epoch in range(3):
            for step, (x, y) in enumerate(DataLoader(data, batch_size=4) if new_loader and epoch else made):
                learn(model, optimizer, x, y)
                if step == 3 and not new_loader:
                    data.noise += 0.1
            with torch.no_grad():
                for x, _ in val:
                    model(x)

    facts = {loader.length: loader for loader in observe(tmp_path, train).rank.facts.loaders}
    told = {length: (f.trains, f.made_anew, f.written) for length, f in facts.items()}
    assert told == {24: (True, new_loader, None if new_loader else "Indexed, noise"), 96: (False, False, None)}


class SlowToBegin(Dataset[Any]):
    """What is slow is a worker's first sample, whichever that is, and one of all."""

    begun = False

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0 if self.begun else 0.2)
        self.begun = True
        time.sleep(0.1 if index == 13 else 0.001)
        return torch.zeros(3)


def test_the_first_sample_of_a_worker_is_not_called_slow(tmp_path: Path) -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(SlowToBegin(), batch_size=4, num_workers=2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    reports = observe(tmp_path, train).rank.workers
    assert sum(report.samples for report in reports) == 16
    assert max(entry for report in reports for entry in report.slowest)[1] == 13
    assert max(report.sample_ms.high for report in reports) == pytest.approx(101, abs=60)
    assert sum(report.sample_wall_s for report in reports) > 0.5, "but its time counts"


def test_batches_that_go_by_unmeasured_count_all_the_same(tmp_path: Path) -> None:
    """Loading a batch takes microseconds, and in the training process: most are not looked at, none is lost."""

    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.randn(800, 3)), batch_size=4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    (report,) = observe(tmp_path, train).rank.workers
    assert (report.batches, report.samples) == (200, 800)
    assert 0 < report.sample_ms.count < 400


def test_passes_over_like_datasets_in_the_training_process_are_one_loading(tmp_path: Path) -> None:
    """A new loader for every batch has one meter, whose few first looks at random numbers are its last."""

    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            (x,) = next(iter(DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)))
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    (report,) = observe(tmp_path, train).rank.workers
    assert report.samples == 120


class Drawing(Dataset[Any]):
    """Draws where it trains, and not where it is evaluated."""

    def __init__(self, trains: bool) -> None:
        self.trains = trains

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3) if self.trains else torch.zeros(3)


def test_random_numbers_are_seen_after_a_pass_without_any(tmp_path: Path) -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            for x in DataLoader(Drawing(trains=False), batch_size=4):
                model(x)
        for x in DataLoader(Drawing(trains=True), batch_size=4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    (report,) = observe(tmp_path, train).rank.workers
    assert report.random_used == ("torch",)


class Add:
    def __call__(self, value: float) -> float:
        time.sleep(0.001)
        return value + 1


class Compose:
    """As torchvision has it."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Transformed(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = Compose([Add(), Add()])

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(self.transform(index)))


def test_transforms_of_workers_that_stay_are_timed_once_an_epoch(tmp_path: Path) -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(Transformed(), batch_size=4, num_workers=1, persistent_workers=True)
        for _ in range(4):
            for x in data:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    reports = observe(tmp_path, train).rank.workers
    assert {name for report in reports for name in report.transforms_s} == {"Add"}
    for report in reports:
        assert report.transforms_s["Add"] <= report.sample_wall_s, "those of later epochs are not its own"


def test_what_the_script_lets_go_of_is_not_held(tmp_path: Path) -> None:
    class Large(TensorDataset):
        pass

    def train() -> list[Callable[[], Any]]:
        gone: list[Callable[[], Any]] = []
        for _ in range(3):
            model, dataset = torch.nn.Linear(3, 1), Large(torch.randn(24, 3))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            for (x,) in DataLoader(dataset, batch_size=4):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            gone += [weakref.ref(dataset), weakref.ref(optimizer), weakref.ref(model.weight)]
        del model, dataset, optimizer, x
        gc.collect()
        assert [one() for one in gone] == [None] * 9
        return gone

    observed = observe(tmp_path, train)
    assert observed.rank.facts.optimizer == "Adam", "but what was known of it is told"


def test_a_step_that_raised_does_not_keep_what_its_callers_had(tmp_path: Path) -> None:
    class Full(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().step(closure)

    def attempt(optimizer: Any, held: list[Any]) -> None:
        large = torch.nn.Linear(3, 3)
        held.append(weakref.ref(large))
        optimizer.fails = True
        optimizer.step()

    def train() -> None:
        model = Net()
        optimizer = Full(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(loader(120)):
            learn(model, optimizer, x, y)
            held: list[Any] = []
            try:
                attempt(optimizer, held)
            except RuntimeError:
                optimizer.fails = False
            assert held[0]() is None, number

    assert len(observe(tmp_path, train, closely=False).steps) == 29


@pytest.mark.parametrize("kept", [False, True])
def test_a_loader_made_for_one_loop_is_watched_as_long(tmp_path: Path, kept: bool) -> None:
    class Sized(TensorDataset):
        size = 1

    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = Sized(torch.randn(40, 3))
        loaders = [DataLoader(data, batch_size=4) for _ in range(2)] if kept else []
        for epoch in range(2):
            for (x,) in loaders[epoch] if kept else DataLoader(data, batch_size=4):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                data.size += 1

    (facts,) = observe(tmp_path, train).rank.facts.loaders
    assert facts.written == "Sized, size"


def test_a_file_for_every_batch_is_no_cache(tmp_path: Path) -> None:
    class Sharded(Dataset[Any]):
        def __init__(self) -> None:
            self.files: dict[int, str] = {}

        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> Any:
            self.files[index // 4] = "open"
            return torch.ones(3)

    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = Sharded()
        for x in DataLoader(data, batch_sampler=BatchSampler(range(80), 4, drop_last=False)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    (facts,) = observe(tmp_path, train).rank.facts.loaders
    assert facts.fills is None


def test_a_group_without_parameters_is_no_trouble(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": []}], lr=0.1)
        doubled = torch.compile(lambda x: 2 * x, backend="eager")
        for x, y in loader():
            learn(model, optimizer, doubled(x) / 2, y)

    assert len(observe(tmp_path, train).steps) == 5


def test_two_loaders_at_once_are_both_training(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x, y), (more, _) in zip(loader(), loader(), strict=True):
            with torch.no_grad():
                model(more)
            learn(model, optimizer, x, y)

    observed = observe(tmp_path, train)
    assert observed.samples() == 48
    assert "evaluation" not in names(observed)
    assert observed.rank.facts.loaders_side_by_side == 2


def test_batches_fetched_by_hand_are_seen(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(loader())
        following = next(batches, None)
        while following is not None:
            x, y = following
            following = next(batches, None)  # a prefetcher takes the next before it gives this
            learn(model, optimizer, x, y)

    observed = observe(tmp_path, train)
    assert observed.samples() == 24
    assert observed.count("data") == 5


def test_a_prefetching_thread_is_seen_by_its_queue(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ready: queue.Queue[Any] = queue.Queue(2)

        def fill() -> None:
            for batch in loader():
                ready.put(batch)
            ready.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        while (batch := ready.get()) is not None:
            learn(model, optimizer, *batch)
        thread.join()

    observed = observe(tmp_path, train)
    assert len(observed.steps) == 5
    assert observed.count("data") == 5
    assert [step.samples for step in observed.steps] == [BATCH] * 5


def test_waiting_for_a_future_is_waiting_for_data(tmp_path: Path) -> None:
    asked = threading.Event()

    def batch() -> Any:
        asked.wait(5)
        return torch.randn(BATCH, FEATURES), torch.randint(0, 2, (BATCH,))

    class Impatient(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.clear()
            return super().forward(x)

    def train() -> None:
        model = Impatient()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ThreadPoolExecutor(1) as pool:
            for _ in range(4):
                future = pool.submit(batch)
                threading.Timer(0.1, asked.set).start()
                learn(model, optimizer, *future.result())

    assert observe(tmp_path, train).count("data") == 3


def test_an_iterator_of_ones_own_leaves_its_time_to_the_rest(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in (torch.randn(BATCH, FEATURES) for _ in range(6)):
            learn(model, optimizer, x, torch.zeros(BATCH, dtype=torch.long))

    observed = observe(tmp_path, train)
    assert len(observed.steps) == 5
    assert observed.count("forward") == observed.count("rest") == 5
    assert observed.samples() == 0


def test_training_in_a_thread_is_followed(tmp_path: Path) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loop() -> None:
            for x, y in loader():
                learn(model, optimizer, x, y)

        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()

    observed = observe(tmp_path, train)
    assert len(observed.steps) == 5
    assert observed.count("data") == observed.count("forward") == 5


# -- models ---------------------------------------------------------------------------------------------------------


def test_a_model_whose_parts_are_called_is_seen_by_its_parts(tmp_path: Path) -> None:
    class Framed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.net(x), y)

    def train() -> None:
        model = Framed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader(40):
            optimizer.zero_grad()
            model.training_step(x, y).backward()
            optimizer.step()

    observed = observe(tmp_path, train)
    assert ["forward" in {span.name for span in step.spans} for step in observed.steps][-5:] == [True] * 5


def test_models_can_be_copied_and_pickled_while_recorded(tmp_path: Path) -> None:
    class Keeper(Net):
        def __getstate__(self) -> Any:
            return self.__dict__  # leaves nothing out, ours neither

    copies = []

    def train() -> None:
        model = Keeper()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader():
            learn(model, optimizer, x, y)
        copies.append(copy.deepcopy(model))
        torch.save(model, tmp_path / "model.pt")
        copies.append(torch.load(tmp_path / "model.pt", weights_only=False))

    Keeper.__qualname__ = "Keeper"
    globals()["Keeper"] = Keeper
    observe(tmp_path / "trace", train)
    x = torch.randn(BATCH, FEATURES)
    assert torch.equal(copies[0](x), copies[1](x))


def test_a_loaded_model_is_seen(tmp_path: Path) -> None:
    torch.save(Net(), tmp_path / "model.pt")

    def train() -> None:
        model = torch.load(tmp_path / "model.pt", weights_only=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader():
            learn(model, optimizer, x, y)

    assert observe(tmp_path / "trace", train).count("forward") == 5


def test_everything_is_taken_off_again(tmp_path: Path) -> None:
    owners = (torch, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.autograd, DataLoader, queue.Queue)
    before = [dict(vars(owner)) for owner in owners]

    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader():
            learn(model, optimizer, x, y)
        assert "item" in vars(torch.Tensor)

    observe(tmp_path, train)
    for owner, attributes in zip(owners, before, strict=True):
        changed = {name for name, value in vars(owner).items() if attributes.get(name, value) is not value}
        added = vars(owner).keys() - attributes.keys()
        assert not changed | added, owner


@pytest.mark.parametrize(("wanted", "seen"), [(True, ("bfloat16",)), (False, ("None",))])
def test_mixed_precision_is_seen_where_it_is_entered(tmp_path: Path, wanted: bool, seen: tuple[str, ...]) -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=wanted):
                loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    assert observe(tmp_path, train).rank.facts.autocast == seen
