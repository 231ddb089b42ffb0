"""The engine on a GPU: no waiting outside log points, the precision that was asked for, compilation that may fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flatout.augment import Minimal
from flatout.engine import Trainer
from flatout.engine.assemble import fastest_batch
from flatout.engine.config import TrainConfig
from flatout.engine.run_folder import newest
from flatout.engine.step import Ranks, TrainStep, choose_precision, uncompile
from flatout.feed import DataLoader
from flatout.model.errors import UsageError

pytestmark = pytest.mark.gpu


class Pictures(Dataset[Any]):
    """Bytes; light ones and dark ones."""

    def __init__(self, count: int = 512) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        light = index % 2
        return torch.randint(100 * light, 156 + 100 * light, (3, 32, 32), dtype=torch.uint8, generator=generator), light


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),  # a bias would be moved by rounding alone: batch norm takes it out
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def trainer(out: Path, model: nn.Module, **settings: Any) -> Trainer:
    train = {"epochs": 2, "compile": False, **settings}
    dtype = torch.float32 if train.get("precision") in ("off", "tf32") else torch.bfloat16
    optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-2, fused=True)
    return Trainer(
        model=model,
        train_loader=DataLoader(Pictures(), 32, shuffle=True, num_workers=2, drop_last=True),
        val_loader=DataLoader(Pictures(64), 32, num_workers=1),
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32),
        augmentation=Minimal(dtype=dtype, channels_last=True),
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float()},
        config={"train": train, "log": {"every": 10, "quiet": True}, "out": str(out)},
        device="cuda",
    )


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_norm": 1.0, "accumulate": 2}, {"precision": "fp16"}, {"precision": "tf32"}, {"compile": "auto"}],
    ids=str,
)
def test_nothing_waits_for_the_gpu_between_log_points(
    tmp_path: Path, forbid_waiting: Callable[[bool], None], settings: dict[str, Any]
) -> None:
    """Every step, its batch, augmentation, loss and schedule; the losses' copy to the host is begun without a wait."""
    ours = trainer(tmp_path, net(), **settings)
    advance, read, end_epoch = ours._advance, ours._read_losses, ours._end_epoch

    ends = False

    def advance_and_watch(loss: Tensor, rows: int) -> None:
        advance(loss, rows)
        forbid_waiting(5 <= ours.at.step < 30)  # the first steps allocate and capture, the last ones end it all

    def read_unwatched() -> set[str]:
        forbid_waiting(False)
        due = read()
        forbid_waiting(not ends and 5 <= ours.at.step < 30)
        return due

    def end_unwatched() -> None:
        nonlocal ends
        forbid_waiting(False)  # validation and a checkpoint do read from the GPU
        ends = True
        end_epoch()
        ends = False

    ours._advance, ours._read_losses = advance_and_watch, read_unwatched  # type: ignore[method-assign]
    ours._end_epoch = end_unwatched  # type: ignore[method-assign]
    ours.fit()
    assert ours.at.step == 32


def test_a_checkpoint_is_taken_without_waiting(tmp_path: Path, no_waiting: Any) -> None:
    ours = trainer(tmp_path, net(), max_steps=8)
    ours.fit()
    ours.at.step += 1
    with no_waiting():
        ours.save()
    ours.checkpoints.wait()
    found = newest(ours.checkpoints.folder, print)
    assert found is not None
    for name, value in ours.model.state_dict().items():
        assert torch.equal(found["model"][name], value.cpu())


@pytest.mark.parametrize(
    ("wanted", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("off", torch.float32)]
)
def test_the_precision_asked_for_is_the_one_computed_in(tmp_path: Path, wanted: str, dtype: torch.dtype) -> None:
    model = net()
    seen: set[torch.dtype] = set()
    model[0].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))  # type: ignore[operator,index]
    ours = trainer(tmp_path, model, precision=wanted)
    assert ours.fit()["accuracy"] > 0.9
    assert seen == {dtype}
    assert ours.step.scaler.is_enabled() == (wanted == "fp16")


def test_a_gpu_without_bf16_gets_fp16_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    precision, decision = choose_precision("bf16", torch.device("cuda"))
    assert (precision.dtype, precision.scaled) == (torch.float16, True)
    assert "has no bf16: fp16 with a loss scaler instead" in str(decision)


def test_layout_and_switches_are_in_force_and_put_back(tmp_path: Path) -> None:
    seen: list[bool] = []
    model = net()
    model[0].register_forward_hook(  # type: ignore[operator,index]
        lambda module, inputs, output: seen.append(
            output.is_contiguous(memory_format=torch.channels_last) and torch.backends.cuda.matmul.allow_tf32
        )
    )
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    ours = trainer(tmp_path, model, max_steps=3)
    ours.fit()
    assert seen
    assert all(seen)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark) == before


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compile", [True, "auto"])
def test_compiled_and_captured_it_learns_the_same(tmp_path: Path, compile: bool | str, accumulate: int) -> None:
    eager = trainer(tmp_path / "eager", net(), precision="off", accumulate=accumulate)
    eager.fit()
    ours = trainer(tmp_path / "ours", net(), precision="off", accumulate=accumulate, compile=compile)
    assert ours.fit()["accuracy"] > 0.9
    assert captured() == (compile == "auto")
    assert uncompile(ours.model), ours.decisions  # it still was: nothing fell back
    for one, other in zip(eager.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def captured() -> bool:
    """Whether there are CUDA graphs of what was compiled."""
    from torch._inductor import cudagraph_trees  # warns as it is imported

    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    return manager is not None and any(manager.roots.values())


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("compiler")
def test_a_model_that_keeps_an_output_is_refused_with_graphs(tmp_path: Path) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = net(), None

        def forward(self, pictures: Tensor) -> Tensor:
            made: Tensor = self.inner(pictures)
            if self.last is not None:
                made = made + 0.1 * self.last
            self.last = made.detach()
            return made

    with pytest.raises(UsageError, match=r"train\.compile=true compiles without them"):
        trainer(tmp_path, Keeping(), compile="auto").fit()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("compiler")
def test_what_cannot_be_compiled_runs_eagerly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fails)
    ours = trainer(tmp_path, net(), compile=True)
    assert ours.fit()["accuracy"] > 0.9
    assert "train.compile: off from here on, torch.compile failed" in capsys.readouterr().out


def test_a_full_gpu_is_met_with_smaller_pieces() -> None:
    """GIVEN a limit on the GPU's memory that a whole batch does not fit into, THEN the step is done in pieces."""

    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1 << 20, 64)

        def forward(self, points: Tensor) -> Tensor:
            wide = points.expand(-1, 1 << 20).clone()  # 4 MiB a sample, and as much again for what follows
            result: Tensor = self.layer(wide * wide)
            return result

    model = Hungry().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    precision, _ = choose_precision("off", torch.device("cuda"))
    said: list[str] = []
    step = TrainStep(model, nn.CrossEntropyLoss(), optimizer, precision, TrainConfig(batch_size=256), said.append)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * 2**30) / total)
    try:
        loss = step([torch.randn(256, 1, device="cuda"), torch.zeros(256, dtype=torch.long, device="cuda")])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert bool(loss.isfinite())
    assert step.accumulate > 1
    assert said[0].startswith("out of memory: 128 samples at a time from here on instead of 256")


def test_the_fastest_batch_stays_within_the_share() -> None:
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    precision, _ = choose_precision("bf16", torch.device("cuda"))
    step = TrainStep(model, nn.CrossEntropyLoss(), optimizer, precision, TrainConfig(), print)
    batch = [torch.randn(32, 3, 32, 32, device="cuda"), torch.zeros(32, dtype=torch.long, device="cuda")]
    weights = [parameter.clone() for parameter in model.parameters()]
    size, why = fastest_batch(step, batch, 1 << 14, 0.2, Ranks("cuda"))
    assert re.match(r"the fastest; samples/s of the step alone, uncompiled: [\d,]+ at 32, ", why)
    assert 32 <= size <= 1 << 14
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not optimizer.state_dict()["state"]
