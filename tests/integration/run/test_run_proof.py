"""The run of a proof says what reached the model: the same for the same training, another for any other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observing import write

from flatout.inside.changes.applied import impose_seed
from flatout.inside.changes.computing import LossScale
from flatout.inside.fingerprints import FingerprintLog, _NotingSampler, checksum
from flatout.inside.patches import Patches, Stage, Subscriber
from flatout.inside.root_modules import WeakIdMap
from flatout.launch import launcher
from flatout.launch.protocol import Trial
from flatout.model.plan import Change, Plan

UNSEEDED = """
    import random, sys, torch
    from torch.utils.data import DataLoader, TensorDataset
    rows = torch.arange(64.0).reshape(32, 2)
    if "perturbed" in sys.argv:
        rows[5, 0] += 1e-3
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(2):
        for (batch,) in DataLoader(TensorDataset(rows), batch_size=4, shuffle=True):
            for half in batch.split(2):
                (model(half).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def proof(folder: Path, name: str, *flags: str, plan: Plan | None = None) -> list[dict[str, Any]]:
    command = [sys.executable, str(folder / "train.py"), *flags]
    trial = Trial(seed=1, fingerprints=True)
    code = launcher.run(command, folder=folder / name, max_steps=10, xray=False, plan=plan, trial=trial)
    assert code == 0, (folder / name / launcher.OUTPUT).read_text()
    return [json.loads(line) for line in (folder / name / "proof-00000.jsonl").read_text().splitlines()]


def test_a_proof_tells_the_same_training_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write(tmp_path, train=UNSEEDED)
    first = proof(tmp_path, "first")
    elastic = Plan(changes=(Change(name="loader", value="elastic", safety="reseeded"),))
    fed = proof(tmp_path, "elastic", plan=elastic)
    assert [step["begins"] for step in first if step["begins"] != [None]] == [["here"], ["here"]], "two epochs"
    assert [step["begins"] for step in fed if step["begins"] != [None]] == [["elsewhere"], ["elsewhere"]]
    assert [{**step, "begins": None} for step in fed] == [{**step, "begins": None} for step in first], (
        "one seed, one training: in any process"
    )
    perturbed = proof(tmp_path, "perturbed", "perturbed")
    assert [step["indices"] for step in perturbed] == [step["indices"] for step in first]
    differing = [
        step["step"] for step, other in zip(first, perturbed, strict=True) if step["inputs"] != other["inputs"]
    ]
    assert differing == [step["step"] for step in first if 5 in step["indices"][0]]
    assert [len(step["inputs"]) for step in first] == [2] * len(first), "two micro-steps a step"
    seen = [index for step in first[:8] for batch in step["indices"] for index in batch]
    assert sorted(seen) == list(range(32)) != seen
    assert all(isinstance(step["loss"], float) for step in first)


def test_what_a_model_has_made_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a critic that is fed what its generator made, and a generator a little off THEN what is fed to them by the
    loader is the same, and so is all that counts as data."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write(
        tmp_path,
        train="""
        import sys, torch
        from torch.utils.data import DataLoader
        generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        with torch.no_grad():
            generator.weight.mul_(1 + 1e-6 * ("off" in sys.argv))
        steps = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (generator, critic)]
        for epoch in range(4):
            for real in DataLoader(torch.arange(16.0).reshape(8, 2), batch_size=4):
                made = generator(torch.ones(4, 2))
                critic(made).mean().backward()
                (critic(real) - critic(made.detach())).mean().backward()
                for step in steps:
                    step.step()
                    step.zero_grad()
        """,
    )
    first, off = proof(tmp_path, "first"), proof(tmp_path, "off", "off")
    assert [step["inputs"] for step in first] == [step["inputs"] for step in off]
    assert [step["losses"] for step in first] != [step["losses"] for step in off]
    told = [checksum for step in first for checksum in step["inputs"]]
    assert told.count("0" * 16) == len(told) / 2, "the critic's from the generator, not its real ones, nor the noise"


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16, torch.bool])
def test_a_checksum_sees_every_change_but_not_the_layout(dtype: torch.dtype) -> None:
    tensor = torch.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7).remainder(97).to(dtype)
    known = int(checksum(tensor))
    assert int(checksum(tensor.to(memory_format=torch.channels_last))) == known
    assert int(checksum(tensor.reshape(3, 2, 5, 7))) != known
    changed = tensor.clone()
    changed[1, 2, 4, 6] = 0
    assert int(checksum(changed)) != known
    if dtype != torch.bool:
        assert int(checksum(tensor.flip(3))) != known


@pytest.fixture
def changes() -> Iterator[Subscriber]:
    """A subscriber that changes calls."""
    subscriber = Patches().subscriber(Stage.CHANGE, pytest.fail)
    yield subscriber
    subscriber.leave()


def test_a_generator_is_seeded_where_the_script_does_not(changes: Subscriber) -> None:
    plain = np.random.default_rng
    impose_seed(3, changes)
    assert np.random.default_rng(seed=42).random() == np.random.default_rng(42).random() == plain(42).random()
    first, second = (np.random.default_rng().random() for _ in range(2))
    assert first != second
    changes.leave()
    assert np.random.default_rng is plain
    again = Patches().subscriber(Stage.CHANGE, pytest.fail)
    impose_seed(3, again)
    assert np.random.default_rng().random() == first
    again.leave()


def test_a_scaled_loss_gives_true_gradients_and_skips_what_is_not_finite(changes: Subscriber) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizers = WeakIdMap()
    optimizers.put(optimizer)
    scale = LossScale(changes, optimizers)
    scale.guard([weight])
    scale.guard([weight])  # the next root with the same parameters
    seen: list[float] = []
    weight.register_hook(lambda gradient: seen.append(float(gradient[0])))
    (weight * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.0, -1.0, -2.0]
    assert seen == [1.0]
    optimizer.zero_grad()
    (weight * torch.inf).sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.0, -1.0, -2.0], "the step is skipped"
    assert scale.scale == LossScale.FIRST / 2


def test_what_is_trained_only_later_gets_true_gradients_too(changes: Subscriber) -> None:
    frozen, added = torch.ones(2), torch.ones(2, requires_grad=True)
    weight = torch.ones(2, requires_grad=True)
    optimizers = WeakIdMap()
    optimizers.put(optimizer := torch.optim.SGD([weight, frozen], lr=1.0))
    LossScale(changes, optimizers).guard([weight, frozen])
    optimizer.step()  # without any gradient: nothing happens, as ever
    frozen.requires_grad_(True)
    optimizer.add_param_group({"params": [added]})
    (weight + frozen + added).sum().backward()
    assert [p.grad.tolist() for p in (weight, frozen, added) if p.grad is not None] == [[1.0, 1.0]] * 3
    added.grad = torch.tensor([torch.inf, 1.0])
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0], "what is not finite in a later group skips the step"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_what_sparse_tensors_are_made_of_is_summed_up(layout: Any) -> None:
    def sums(dense: torch.Tensor) -> list[int]:
        proof = FingerprintLog()
        proof.inputs((dense.to_sparse(layout=layout),), {})
        proof.outputs(dense.to_sparse(layout=layout), (), {})
        return [int(value) for value in proof._open["inputs"]]

    eye = torch.eye(4)
    assert sums(eye) == sums(eye.clone())
    assert sums(eye) != sums(2 * eye)
    assert sums(eye) != sums(eye.flip(0))


def test_a_scaled_loss_is_noted_as_it_is_and_unscales_all_that_is_trained(changes: Subscriber) -> None:
    """GIVEN a weight of a loss that is no part of the model, THEN its gradient is a true one too."""
    proof = FingerprintLog()
    proof.install(changes)
    model, free = torch.nn.Linear(2, 1), torch.ones((), requires_grad=True)
    optimizers = WeakIdMap()
    optimizers.put(optimizer := torch.optim.SGD([*model.parameters(), free], lr=1.0))
    LossScale(changes, optimizers).guard(list(model.parameters()))
    loss = model(torch.ones(3, 2)).square().mean() * free
    loss.backward()
    assert [float(noted) for noted in proof._open["losses"]] == [loss.item()]
    assert free.grad is not None
    assert free.grad.item() == pytest.approx(loss.item())
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("asked", "noted"),
    [
        ([3, 1], [3, 1]),
        (torch.tensor([3, 1]), [3, 1]),
        (np.array([3, 1]), [3, 1]),
        ([np.int64(3), torch.tensor(1)], [3, 1]),
        (7, [7]),  # batch_size=None: a sample is a batch
        ([(3, "left"), (1, "right")], [[3, "left"], [1, "right"]]),
        (None, None),  # a stream's
        ([None, None], None),
        (np.array([{}], dtype=object), [{}]),
    ],
)
def test_whatever_a_sampler_gives_is_noted_or_left_alone(asked: Any, noted: list[Any] | None) -> None:
    sampler = _NotingSampler([asked])
    assert [given is asked for given in sampler] == [True]
    assert list(sampler.taken) == [noted]
