"""The patch layer: one wrapper for each attribute, in the order of the stages, and nothing is left behind."""

from __future__ import annotations

import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout import cli
from flatout.inside import start
from flatout.inside.patches import (
    ELSEWHERE,
    FIRST_STEPS,
    PLAN,
    PROOF,
    RECORDING,
    TABLE,
    TRIAL,
    Patches,
    Stage,
    Subscriber,
)
from flatout.inside.recording import Process
from flatout.inside.run_facts import AttentionWatch
from flatout.launch.protocol import Options, Trial
from flatout.model.plan import Change, Plan

PACKAGES = ("torch", "builtins", "logging", "queue", "concurrent", "numpy", "os", "sys", "io", "tqdm", "argparse")
KINDS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    property, staticmethod, classmethod, type,
)  # fmt: skip


def attributes() -> dict[str, Any]:
    """Every function, class and method of the modules that are patched, by its full name."""
    seen: dict[str, Any] = {}
    modules = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    for module_name, module in modules:
        for name, value in list(vars(module).items()):
            if issubclass(type(value), KINDS):  # isinstance wakes lazy objects
                seen[f"{module_name}.{name}"] = value
            if issubclass(type(value), type) and (value.__module__, value.__qualname__) == (module_name, name):
                held = vars(value).items()
                seen |= {f"{module_name}.{name}.{key}": one for key, one in held if issubclass(type(one), KINDS)}
    return seen


def differing(before: dict[str, Any]) -> set[str]:
    """What is another thing than before, or was not there."""
    return {name for name, value in attributes().items() if before.get(name) is not value}


def full_name(where: str) -> str:
    """An attribute's name by the module and the class that have it."""
    owner, _, name = where.rpartition(".")
    holder: Any = sys.modules.get(owner)
    if holder is not None:
        return where
    module, _, kind = owner.rpartition(".")
    thing = getattr(sys.modules[module], kind, None) if module in sys.modules else None
    return f"{thing.__module__}.{thing.__qualname__}.{name}" if thing is not None else where


def train() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.sum().item() for parameter in model.parameters()]


def test_the_table_is_what_is_replaced_in_a_process_and_all_of_it_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a recording with a proof and every change that patches, THEN nothing but the table differs from before."""
    plan = Plan(
        changes=tuple(
            Change(name=name, value=value, safety="equivalent")
            for name, value in {
                "loader": "elastic", "num_workers": 0, "device_prefetch": True, "fused_optimizer": True,
                "worker_threads": 1, "precision": "bf16",
            }.items()
        )
    )  # fmt: skip
    trial = Trial(seed=1, fingerprints=True)
    plain = train()
    before = attributes()
    process = Process()
    recording = process.begin(
        Options(folder=tmp_path / "trace", name="t", plan=plan, trial=trial, xray=False, max_steps=10**6),
        start.settings,
        start.Ledger(plan.changes),
    )
    monkeypatch.setattr("flatout.inside.run_facts.compiled_frames", lambda: 0)  # other tests of this process compile
    looking = AttentionWatch(process.patches)
    looking.step_ended()
    replaced = differing(before)
    looking.leave()
    recording.close()
    assert process.applied is not None
    process.applied.finish(tmp_path / "proof.jsonl")
    known = {full_name(where) for patch in TABLE for where in patch.attributes}
    assert replaced - known == set(), "replaced, and not in the table"
    assert (known & attributes().keys()) - replaced == set(), "in the table, and not replaced"
    assert differing(before) == set()
    assert train() == plain


def test_the_doctor_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    cli.machine.doctor(json=None, patches=True)
    listed = capsys.readouterr().out
    assert "torch.autograd: backward\n    in a recording: the time of the backward pass; the loss" in listed
    assert listed.count("\n    in ") == len(TABLE) + len(ELSEWHERE)


def test_every_row_says_why_and_when() -> None:
    assert {patch.when for patch in TABLE} == {RECORDING, FIRST_STEPS, PLAN, PROOF, TRIAL}
    assert all(patch.why for patch in TABLE)
    names = [name for patch in TABLE for name in patch.attributes]
    assert len(names) == len(set(names)), "an attribute has one row"


@pytest.fixture
def joined() -> Iterator[Callable[..., Subscriber]]:
    """Subscribers of one layer, that leave in the end; what they raise is collected in `.failures`."""
    patches, subscribers = Patches(), []

    def join(stage: Stage) -> Subscriber:
        failures: list[Exception] = []
        subscriber = patches.subscriber(stage, failures.append)
        subscriber.failures = failures  # type: ignore[attr-defined]
        subscribers.append(subscriber)
        return subscriber

    yield join
    for subscriber in subscribers:
        subscriber.leave()


def test_the_stages_are_passed_in_their_order_whoever_came_first(joined: Callable[..., Subscriber]) -> None:
    passed: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        def handler(call: Any, *args: Any) -> Any:
            passed.append(name)
            return call(*args)

        return handler

    def timed(point: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            passed.append("time")
            return point.call(*args)

        return wrapper

    joined(Stage.OBSERVE).around("torch.save", noted("observe"))
    joined(Stage.TIME).time("torch.save", timed)
    joined(Stage.CHANGE).around("torch.save", noted("change"))
    torch.save([], "/dev/null")
    assert passed == ["time", "observe", "change"]


def test_the_original_is_there_again_when_the_last_one_has_left(joined: Callable[..., Subscriber]) -> None:
    plain = torch.save
    first, second = joined(Stage.OBSERVE), joined(Stage.CHANGE)
    first.before("torch.save", lambda *_: None)
    second.before("torch.save", lambda *_: None)
    first.leave()
    assert torch.save is not plain
    second.leave()
    assert torch.save is plain


def test_an_inherited_method_is_inherited_again(joined: Callable[..., Subscriber]) -> None:
    subscriber = joined(Stage.OBSERVE)
    subscriber.before("torch.Tensor.item", lambda *_: None)
    assert "item" in vars(torch.Tensor)
    subscriber.leave()
    assert "item" not in vars(torch.Tensor)


def test_a_subscriber_that_raises_is_switched_off_alone(joined: Callable[..., Subscriber]) -> None:
    broken, sound = joined(Stage.OBSERVE), joined(Stage.OBSERVE)
    heard: list[Any] = []

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    broken.before("torch.save", fail)
    broken.after("torch.Tensor.item", fail)
    sound.after("torch.save", lambda *_: heard.append(1))
    for _ in range(2):
        torch.save([], "/dev/null")
        assert torch.ones(()).item() == 1.0
    assert [str(problem) for problem in broken.failures] == ["planted"]  # type: ignore[attr-defined]
    assert broken.off
    assert heard == [1, 1]


def test_what_the_script_raises_is_the_scripts(joined: Callable[..., Subscriber]) -> None:
    subscriber = joined(Stage.OBSERVE)
    subscriber.after("torch.save", lambda *_: None)
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save([], "/no-such-folder/x.pt")
    assert not subscriber.off


def test_a_wrapper_looks_like_what_it_stands_for(joined: Callable[..., Subscriber]) -> None:
    signature = inspect.signature(DataLoader.__init__)
    joined(Stage.CHANGE).around("torch.utils.data.dataloader.DataLoader.__init__", lambda call, *a, **k: call(*a, **k))
    assert inspect.signature(DataLoader.__init__) == signature
    loader = DataLoader([1, 2])
    assert isinstance(loader, DataLoader)
    assert pickle.loads(pickle.dumps(loader)).dataset == [1, 2]


def test_a_wrapper_that_somebody_has_wrapped_stays_and_lets_everything_pass(joined: Callable[..., Subscriber]) -> None:
    plain, heard = np.random.default_rng, []
    subscriber = joined(Stage.CHANGE)
    subscriber.before("numpy.random.default_rng", lambda *_: heard.append("ours"))
    ours = np.random.default_rng
    try:
        np.random.default_rng = theirs = lambda *args: ours(*args)
        np.random.default_rng(1)
        subscriber.leave()
        assert np.random.default_rng is theirs
        np.random.default_rng(1)
        assert heard == ["ours"]
    finally:
        np.random.default_rng = plain


def test_only_what_is_in_the_table_can_be_replaced(joined: Callable[..., Subscriber]) -> None:
    with pytest.raises(KeyError, match="not in the table"):
        joined(Stage.CHANGE).before("torch.load", lambda *_: None)


def test_a_recording_puts_back_what_it_found(tmp_path: Path) -> None:
    start.watch_settings()  # stays
    train()
    before = attributes()
    with flatout.attach(tmp_path):
        train()
    assert differing(before) == set()
