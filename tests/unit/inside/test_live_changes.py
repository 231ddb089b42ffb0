"""Changes that are switched while training runs: on, the effect is seen; off, training is as if there had been none."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from flatout.inside.changes.applied import Applied
from flatout.inside.changes.ledger import Ledger
from flatout.inside.patches import Patches
from flatout.inside.root_modules import RootModules
from flatout.launch.protocol import Options
from flatout.model.changes import CHANGES
from flatout.model.errors import UsageError
from flatout.model.plan import Change, Plan

IMAGES, LABELS = torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,))


class Training:
    """A small network and its optimizer, step by step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 4)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(IMAGES), LABELS).backward()
        self.optimizer.step()

    def go_on_from(self, other: Training) -> None:
        """The same weights and the same memory of the optimizer, in a training that was never changed."""
        self.model.load_state_dict(other.model.state_dict())
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            self.optimizer.state[mine] = copy.deepcopy(other.optimizer.state[theirs])

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}

    @property
    def weights(self) -> list[list[float]]:
        return [parameter.flatten().tolist() for parameter in self.model.parameters()]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Applied]]:
    """Apply changes in this process, to what is built from now on."""
    running: list[Applied] = []

    def made(**values: Any) -> Applied:
        plan = Plan(
            changes=tuple(Change(name=name, value=value, safety="equivalent") for name, value in values.items())
        )
        patches = Patches()
        options = Options(folder=tmp_path, name="t", plan=plan)
        running.append(Applied(options, Ledger(plan.changes), lambda: (0, 1), patches, RootModules()))
        return running[-1]

    yield made
    for applied in running:
        applied.finish(tmp_path / "proof.jsonl")


def computes_in_bf16(training: Training) -> bool:
    with torch.no_grad():
        return not torch.equal(training.model(IMAGES), training.model._call_impl(IMAGES))


def is_in_channels_last(training: Training) -> bool:
    weight = training.model[0].weight
    tensors = [weight, *(t for t in training.optimizer.state[weight].values() if t.dim() == 4)]
    laid_out = {tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors}
    assert len(laid_out) == 1, "the optimizer's state lies as the weights do"
    return laid_out.pop()


def has_tf32(_: Training) -> bool:
    return torch.backends.cuda.matmul.allow_tf32


def has_benchmark(_: Training) -> bool:
    return torch.backends.cudnn.benchmark


def is_fused(training: Training) -> bool:
    return training.settings["fused"] is True


def is_frozen(_: Training) -> bool:
    return gc.get_freeze_count() > 0


def is_compiled(training: Training) -> bool:
    before = len(COMPILED)
    with torch.no_grad():
        training.model(IMAGES)
    return len(COMPILED) > before


COMPILED: list[int] = []


def compile_by_counting(function: Callable[..., Any], *, mode: str | None = None) -> Callable[..., Any]:
    """In the place of torch.compile, which takes seconds."""

    def compiled(*args: Any) -> Any:
        COMPILED.append(1)
        return function(*args)

    return compiled


EFFECTS: list[tuple[str, Any, Callable[[Training], bool]]] = [
    ("precision", "bf16", computes_in_bf16),
    ("precision", "tf32", has_tf32),
    ("channels_last", True, is_in_channels_last),
    ("cudnn_benchmark", True, has_benchmark),
    ("compile", "default", is_compiled),
    ("fused_optimizer", True, is_fused),
    ("gc_freeze", True, is_frozen),
]
SWITCHED = pytest.mark.parametrize(("name", "value", "effect"), EFFECTS)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU to switch cuDNN for, and a compiler that takes no time."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "compile", compile_by_counting)
    COMPILED.clear()
    gc.unfreeze()  # what the tests themselves have frozen


@SWITCHED
def test_on_and_off_by_turns(begin: Callable[..., Applied], name: str, value: Any, effect: Any) -> None:
    """GIVEN a change WHEN it is switched while training runs THEN it shows, and afterwards training is as ever."""
    never_changed = Training()
    applied = begin(**{name: value})
    training = Training()
    training.step()
    applied.step_ended(first=True)
    assert effect(training), "it begins switched on"
    for on in (False, True, False):
        applied.switch(name, on=on)
        training.step()
        applied.step_ended(first=True)
        assert effect(training) is on
    assert training.settings == never_changed.settings
    assert not effect(never_changed)
    never_changed.go_on_from(training)
    for one in (training, never_changed):
        one.step()
    assert training.weights == never_changed.weights, "bit for bit"


@SWITCHED
def test_a_change_that_is_off_from_the_start_changes_nothing(
    begin: Callable[..., Applied], name: str, value: Any, effect: Any
) -> None:
    never_changed = Training()
    applied = begin(**{name: value})
    applied.switch(name, on=False)
    training = Training()
    for one in (training, never_changed):
        for _ in range(3):
            one.step()
            applied.step_ended(first=True)
    assert not effect(training)
    assert training.weights == never_changed.weights
    applied.switch(name, on=True)
    training.step()
    assert effect(training)
    applied.switch(name, on=False)


def test_an_optimizer_that_the_script_has_fused_stays_fused(begin: Callable[..., Applied]) -> None:
    applied = begin(fused_optimizer=True)
    optimizer = torch.optim.Adam([torch.ones(2, requires_grad=True)], fused=True)
    applied.switch("fused_optimizer", on=False)
    assert optimizer.param_groups[0]["fused"] is True


class OwnAdam(torch.optim.Adam):
    """Has torch's name for it, and settings and a step of its own."""

    def __init__(self, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": 0.1})


@pytest.mark.parametrize(
    "kind", [OwnAdam, lambda params: torch.optim.Adam(params, foreach=True)], ids=["a step of its own", "foreach"]
)
def test_an_optimizer_that_steps_in_another_way_is_left_alone(begin: Callable[..., Applied], kind: Any) -> None:
    applied = begin(fused_optimizer=True)
    optimizer = kind([torch.ones(2, requires_grad=True)])
    assert not optimizer.param_groups[0].get("fused")
    [entry] = applied.ledger.entries()
    assert (entry.applied, entry.how) == (False, "the script chooses another way of stepping itself")


def test_the_table_of_changes_says_which_can_be_switched(begin: Callable[..., Applied]) -> None:
    values = {"loader": "elastic", "precision": "bf16", "compile": "default", "num_workers": 2, "worker_threads": 1}
    applied = begin(**{spec.name: values.get(spec.name, True) for spec in CHANGES if not spec.knob_only})
    switched = set()
    for spec in CHANGES:
        with contextlib.suppress(UsageError):
            applied.switch(spec.name, on=False)
            switched.add(spec.name)
    live = {spec.name for spec in CHANGES if spec.live}
    assert not live - switched, "nothing makes it: is its class in `kinds` of Computing, or in Loading.install?"
    assert not switched - live


def test_every_change_that_can_be_switched_is_switched_here() -> None:
    """But for the one that test_device_prefetch.py switches."""
    live = {spec.name for spec in CHANGES if spec.live}
    assert not live - {name for name, _, _ in EFFECTS} - {"device_prefetch"}, "without a line in EFFECTS"
