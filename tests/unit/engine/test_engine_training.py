"""Real trainings on the CPU: what is learned, in what order, and what becomes of faults on the way."""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import engine_toy
import psutil
import pytest
import torch
from engine_toy import Ready
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from flatout import augment
from flatout.engine import Trainer, run_folder
from flatout.engine import assemble as assembling
from flatout.engine.assemble import main
from flatout.engine.config import LogConfig, load
from flatout.engine.run_folder import Reporter
from flatout.engine.step import _compile
from flatout.feed import DataLoader
from flatout.feed.scheduler import BatchScheduler, Epoch
from flatout.model.errors import FlatoutError, NotSavedError, UsageError


def weights(trainer: Trainer) -> list[torch.Tensor]:
    """Everything training has moved."""
    state = trainer.step.optimizer.state_dict()["state"]
    return [*trainer.model.state_dict().values(), *(value for each in state.values() for value in each.values())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


# -- a training --------------------------------------------------------------------------------------------------------


def test_it_learns_validates_and_writes_down_what_happened(ready: Ready, tmp_path: Path) -> None:
    trainer = ready("train.epochs=12", "log.tensorboard=true")
    results = trainer.fit()
    run = tmp_path / "run"
    assert results["accuracy"] > 0.8
    assert trainer.at.step == 12 * 8
    train, validation = rows(run / "train.csv"), rows(run / "validation.csv")
    assert [int(row["step"]) for row in train] == list(range(4, 97, 4))
    assert float(train[-1]["loss"]) < float(train[0]["loss"])
    assert [int(row["epoch"]) for row in validation] == list(range(1, 13))
    assert float(validation[-1]["accuracy"]) == results["accuracy"]
    assert list((run / "tensorboard").iterdir())


def test_a_first_step_that_takes_long_is_no_part_of_the_speed(ready: Ready, tmp_path: Path) -> None:
    """GIVEN a second of compiling, THEN the first line shows the speed of the steps after it; alone it has none."""
    engine_toy.faults[1] = functools.partial(time.sleep, 1.0)
    ready("checkpoint.every=never", "log.every=1", "train.max_steps=2").fit()
    assert [row["samples_per_s"] != "" for row in rows(tmp_path / "run" / "train.csv")] == [False, True]
    engine_toy.faults[3] = functools.partial(time.sleep, 1.0)
    ready("checkpoint.every=never", f"out={tmp_path / 'long'}").fit()
    first = rows(tmp_path / "long" / "train.csv")[0]
    assert float(first["samples_per_s"]) > 100  # 32 with it


class First:
    """The first batches of another loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return islice(iter(self.loader), 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_validation_may_share_the_loader_of_training(tmp_path: Path, wrapped: bool) -> None:
    loader, model = DataLoader(engine_toy.Points(), 8, num_workers=1, persistent_workers=True), engine_toy.Net()
    trainer = Trainer(
        model=model,
        train_loader=loader,
        val_loader=First(loader) if wrapped else loader,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train": {"epochs": 2}, "log": {"quiet": True}, "out": str(tmp_path)},
        device="cpu",
    )
    trainer.fit()
    assert [sorted(chain(*engine_toy.seen[start : start + 8])) for start in (0, 8)] == [list(range(64))] * 2


def test_every_sample_is_seen_once_an_epoch_in_an_order_that_follows_from_the_seed(ready: Ready) -> None:
    ready("checkpoint.every=never").fit()
    first = list(engine_toy.seen)
    assert [sorted(chain(*first[epoch * 8 : epoch * 8 + 8])) for epoch in range(3)] == [list(range(64))] * 3
    assert first[:8] != first[8:16]
    engine_toy.seen.clear()
    ready("checkpoint.every=never", "data.workers=2").fit()
    assert engine_toy.seen == first


def test_accumulation_learns_what_the_whole_batch_teaches(ready: Ready) -> None:
    whole = ready("model.args.dropout=0", "checkpoint.every=never")
    whole.fit()
    halves = ready("model.args.dropout=0", "train.accumulate=3", "checkpoint.every=never")
    engine_toy.seen.clear()
    halves.fit()
    assert [len(piece) for piece in engine_toy.seen[:3]] == [2, 3, 3]
    for a, b in zip(weights(whole), weights(halves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_trainer_takes_parts_of_ones_own(tmp_path: Path) -> None:
    model = engine_toy.Net()
    trainer = Trainer(
        model=model,
        train_loader=TorchLoader(engine_toy.Points(), 16, shuffle=True),
        val_loader=TorchLoader(engine_toy.Points(seed=1), 16),
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train": {"epochs": 4}, "log": {"quiet": True}, "out": str(tmp_path / "run")},
        device="cpu",
    )
    first = nn.functional.cross_entropy(model(engine_toy.Points().points), torch.zeros(64).long())
    assert trainer.fit()["loss"] < first


def test_a_model_that_returns_its_loss_needs_no_criterion(ready: Ready) -> None:
    trainer = ready("model=engine_toy:Scored", "criterion=null", "metrics={}")
    before = trainer.model.layer.weight.clone()
    assert "loss" in trainer.fit()
    assert not torch.equal(before, trainer.model.layer.weight)


@pytest.mark.parametrize("metric", ["engine_toy:RightShare", "engine_toy:accuracy"])
def test_a_metric_is_a_function_or_an_object(ready: Ready, metric: str) -> None:
    trainer = ready(f"metrics.accuracy={metric}", "evaluate.batch_size=24")
    found = trainer.fit()["accuracy"]
    trainer.model.eval()
    data = engine_toy.Points(seed=1)
    right = sum(int(trainer.model(data[i][0][None]).argmax() == data[i][1]) for i in range(64))
    assert found == pytest.approx(right / 64)


@pytest.mark.parametrize(
    ("often", "at"),
    [
        ("2 epochs", [16, 24]),
        ("10 steps", [10, 20, 24]),
        ("0.000000001 minutes", [5, 9, 13, 17, 21, 24]),  # the clock is looked at when losses are read
        ("never", []),
    ],
)
def test_validation_and_checkpoints_are_as_often_as_was_asked_for(
    ready: Ready, tmp_path: Path, often: str, at: list[int]
) -> None:
    ready(f"evaluate.every={often}", f"checkpoint.every={often}", "checkpoint.keep=9", "checkpoint.best=null").fit()
    run = tmp_path / "run"
    validated = rows(run / "validation.csv") if at else []
    assert [int(row["step"]) for row in validated] == at
    assert sorted(int(path.stem.removeprefix("step-")) for path in run.glob("checkpoints/*.pt")) == at


def test_validation_changes_nothing_in_training(ready: Ready) -> None:
    seldom = ready("evaluate.every=never")
    seldom.fit()
    often = ready("evaluate.every=1 steps", "checkpoint.best=null")
    often.fit()
    assert same(weights(seldom), weights(often))


def test_augmentation_is_for_training_only_and_moves_masks_along(ready: Ready) -> None:
    def pictures(*more: str) -> Trainer:
        return ready(
            "data.train=engine_toy:Pictures", "data.val=engine_toy:Pictures", "model=engine_toy:Convolution",
            "metrics={}", "train.epochs=2", "train.batch_size=16", "data.shuffle=false", *more,
        )  # fmt: skip

    trainer = pictures("augment={factory: flatout.augment:Minimal, args: {seed: 3}}")
    trainer.fit()
    train_1, val_1, train_2, val_2 = trainer.model.pictures
    assert torch.equal(val_1, val_2)
    assert not torch.equal(train_1, val_1)
    assert not torch.equal(train_1, train_2)
    aug = augment.Minimal(seed=3)
    raw = torch.stack([engine_toy.Pictures()[i][0] for i in range(16)])
    assert torch.equal(train_1, aug(raw, index=torch.arange(16), epoch=0))
    masks = torch.stack([engine_toy.Pictures()[i][1] for i in range(16)])
    batch = trainer._augmented([raw, masks], training=False)
    assert torch.equal(batch[1], masks)
    with pytest.raises(UsageError, match="augment: images must be a uint8 tensor"):
        ready("augment=flatout.augment:Minimal").fit()


def test_a_compiler_that_fails_costs_speed_and_not_the_training(ready: Ready, capsys: Any) -> None:
    plain = ready()
    plain.fit()
    trainer = ready()

    def broken(*_: object, **__: object) -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("no compiler here")

    broken._torchdynamo_orig_callable = trainer.model.forward  # type: ignore[attr-defined]
    trainer.model.forward = broken  # type: ignore[method-assign]
    trainer.fit()
    assert "train.compile: off from here on, torch.compile failed (InternalTorchDynamoError" in capsys.readouterr().out
    assert same(weights(plain), weights(trainer))


def test_settings_that_cannot_be_met_are_reported_even_when_quiet(
    ready: Ready, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    ready("train.compile=true", "train.precision=tf32", "train.channels_last=true", "train.max_steps=1").fit()
    assert capsys.readouterr().out.splitlines() == [
        "train.precision: off  (only NVIDIA GPUs have TF32: plain fp32 on cpu)",
        "train.channels_last: off  (there is no 2-d convolution)",
        "train.compile: off  (torch.compile failed: RuntimeError: no compiler here)",
    ]


@pytest.mark.parametrize(
    ("wanted", "ranks", "value", "how"),
    [
        ("auto", 1, "on, with CUDA graphs", "reduce-overhead"),
        ("auto", 2, "on", None),
        (True, 1, "on", None),
        ("max-autotune", 2, "max-autotune", "max-autotune"),
    ],
)
def test_on_a_gpu_a_training_of_one_rank_is_captured(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, ranks: int, value: str, how: str | None
) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(forward: Any, **options: Any) -> Any:
        asked.append(options)
        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    decision = _compile(nn.Linear(1, 1), wanted, torch.device("cuda"), ranks)
    assert decision.value == value
    assert asked == [{"mode": how}]


def test_a_compiled_model_is_compiled_and_learns_the_same(
    ready: Ready, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """All of the compiler but its back end, which would call a C++ compiler."""
    monkeypatch.setattr(engine_toy.Net, "forward", lambda self, points: self.layers(points))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    plain = ready()
    plain.fit()
    torch._dynamo.utils.counters.clear()
    compiled = ready("train.compile=true")
    compiled.fit()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert same(weights(plain), weights(compiled))
    assert not capsys.readouterr().out
    torch._dynamo.reset()


@pytest.mark.parametrize("wanted", ["true", "[layers.0, 'layers.*']"])
def test_activations_recomputed_are_the_same_activations(ready: Ready, wanted: str) -> None:
    kept = ready()
    kept.fit()
    recomputed = ready(f"train.checkpoint_activations={wanted}")
    recomputed.fit()
    assert same(weights(kept), weights(recomputed))
    assert any("4 modules" in str(decision) for decision in recomputed.decisions)


def test_bf16_on_a_cpu_is_bf16(ready: Ready) -> None:
    trainer = ready("train.precision=bf16")
    seen: list[torch.dtype] = []
    trainer.model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.fit()
    assert set(seen) == {torch.bfloat16}


def test_the_fastest_batch_is_found_and_nothing_has_been_learned_by_then(ready: Ready) -> None:
    trainer = ready("train.batch_size=auto", "train.lr_rule=sqrt", "train.lr_batch=16", "checkpoint.every=never")
    size = trainer._batches.loader.batch_sampler.batch_size
    assert size in (32, 64)
    assert trainer.step.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (size / 16) ** 0.5)
    assert not trainer.step.optimizer.state_dict()["state"]
    fresh = ready("checkpoint.every=never")
    assert same(list(trainer.model.state_dict().values()), list(fresh.model.state_dict().values()))


def test_the_fastest_batch_is_looked_for_in_the_layout_that_will_train(ready: Ready) -> None:
    data = "data={train: {factory: engine_toy:Pictures, args: {floats: true}}, workers: 0}"
    settings = ("metrics={}", "train.channels_last=true", "train.checkpoint_activations=[conv]")
    trainer = ready("model=engine_toy:Convolution", data, *settings, "train.batch_size=auto")
    assert trainer.model.pictures
    assert all(pictures.is_contiguous(memory_format=torch.channels_last) for pictures in trainer.model.pictures)
    forward = trainer.model.conv.forward
    assert forward.func is torch.utils.checkpoint.checkpoint  # type: ignore[attr-defined]
    assert not hasattr(forward.args[0], "func")  # once is enough


def test_a_garbage_collection_in_training_does_not_look_through_all_there_is(ready: Ready) -> None:
    gc.unfreeze()  # of what the tests themselves are
    tracked: list[int] = []
    engine_toy.faults[20] = lambda: tracked.append(len(gc.get_objects()))
    trainer = ready("log.every=10", "data.workers=0")
    before = len(gc.get_objects())
    trainer.fit()
    assert tracked[0] < before / 10
    assert gc.get_freeze_count() == 0
    gc.freeze()


def test_without_workers_no_sample_is_left_out_and_a_line_says_so(ready: Ready, capsys: Any) -> None:
    ready("data.workers=0", "data.on_bad_sample=skip", "train.max_steps=1", "log.quiet=true").fit()
    assert "data.on_bad_sample: raise  (without workers nothing is left out)" in capsys.readouterr().out


def test_workers_go_on_from_one_epoch_to_the_next(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN three epochs of eight batches WHEN they are trained on THEN workers got them as one pass, each epoch in the
    order that torch's sampler has for it."""
    passes = []
    begin = BatchScheduler.begin

    def counted(feed: BatchScheduler, epoch: Epoch, *args: Any, **more: Any) -> None:
        passes.append(epoch)
        begin(feed, epoch, *args, **more)

    monkeypatch.setattr(BatchScheduler, "begin", counted)
    trainer = ready("data.workers=2", "data.val=null", "metrics={}")
    trainer.fit()
    assert len(passes) == 1
    sampler = DistributedSampler(range(64), 1, 0, seed=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(chain(*engine_toy.seen[8 * epoch : 8 * epoch + 8])) == list(sampler)


# -- coming back -------------------------------------------------------------------------------------------------------


def stop_at(step: int) -> None:
    engine_toy.faults[step] = lambda: os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stops_at", [11, 16])  # of 24: in the middle of the second epoch, and at its end
@pytest.mark.parametrize(
    ("draws", "workers", "workers_then"), [(False, 0, 2), (False, 2, 0), (True, 1, 2), (True, 0, 0)]
)
def test_a_resumed_training_is_the_same_to_the_bit(
    ready: Ready, tmp_path: Path, draws: bool, workers: int, workers_then: int, stops_at: int
) -> None:
    data = [f"data.train.args.draws={draws}", "train.clip_norm=1.0"]
    data += ["scheduler={factory: torch.optim.lr_scheduler:CosineAnnealingLR, args: {T_max: '{steps}'}}"]
    straight = ready(f"out={tmp_path / 'straight'}", f"data.workers={workers}", *data)
    straight.fit()
    order = list(engine_toy.seen)
    engine_toy.seen.clear()

    stop_at(stops_at)
    broken = ready(f"data.workers={workers}", *data)
    broken.fit()
    assert (broken.stopped_by, broken.at.step) == ("SIGTERM", stops_at)
    resumed = ready(f"data.workers={workers_then}", *data)
    assert resumed.resume()
    resumed.fit()
    assert engine_toy.seen == order
    assert same(weights(straight), weights(resumed))
    assert straight.results == resumed.results
    assert straight.scheduler.get_last_lr() == resumed.scheduler.get_last_lr()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_training_resumed_from_what_an_epoch_has_left_is_the_same_to_the_bit(
    ready: Ready, tmp_path: Path, workers: int
) -> None:
    straight = ready("checkpoint.keep=9", f"data.workers={workers}")
    straight.fit()
    for late in (tmp_path / "run/checkpoints").glob("*.pt"):
        if late.name != "step-000000008.pt":
            late.unlink()
    resumed = ready(f"data.workers={workers}")
    assert resumed.resume()
    assert (resumed.at.epoch, resumed.at.batch) == (1, 0)
    resumed.fit()
    assert same(weights(straight), weights(resumed))


def test_another_optimizer_or_scheduler_than_the_checkpoints_is_refused(
    ready: Ready, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = "scheduler={factory: torch.optim.lr_scheduler:CosineAnnealingLR, args: {T_max: 3}}"
    ready(scheduler).fit()
    with pytest.raises(UsageError, match=r"the optimizer of its checkpoint is not .*: it has no .*momentum"):
        ready(scheduler, "optimizer={factory: torch.optim:SGD, args: {lr: 0.1}}").resume()
    with pytest.raises(UsageError, match=r"the scheduler of its checkpoint is not .*: it has no .*gamma"):
        ready("scheduler={factory: torch.optim.lr_scheduler:StepLR, args: {step_size: 3}}").resume()
    assert ready("train.epochs=4").resume()
    assert "the checkpoint's scheduler is not used: the config has none" in capsys.readouterr().out
    ready("out=" + str(tmp_path / "plain")).fit()
    with pytest.raises(UsageError, match="the scheduler of its checkpoint is not that of this config: it has no T_max"):
        ready("out=" + str(tmp_path / "plain"), scheduler).resume()


def test_the_batch_size_that_was_found_is_written_down_and_kept_when_a_run_goes_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([(16, "the fastest"), (32, "the fastest")])
    monkeypatch.setattr(assembling, "_fastest", lambda *_: next(found))

    def train(*words: str, resume: bool = False) -> str:
        words = ("train.batch_size=auto", "train.lr_rule=sqrt", "train.lr_batch=8", *words)
        main(config, [f"out={tmp_path / 'run'}", *words], preset=None, resume=resume, explain=False, record=False)
        return capsys.readouterr().out

    said = train("train.epochs=1")
    assert "train.batch_size: 16  (the fastest)\n" in said
    assert "learning rate times 1.414" in said
    assert "batch_size: 16\n" in (tmp_path / "run/config.yaml").read_text()
    said = train("train.epochs=2", resume=True)
    assert "train.batch_size: 16  (as it was in this run before)\n" in said
    assert "learning rate times 1.414" in said


def test_a_row_of_metrics_is_of_its_step(ready: Ready, tmp_path: Path) -> None:
    ready("scheduler={factory: torch.optim.lr_scheduler:StepLR, args: {step_size: 1, gamma: 0.5}}").fit()
    train, validation = rows(tmp_path / "run/train.csv"), rows(tmp_path / "run/validation.csv")
    assert [row["step"] for row in train[:2]] == ["4", "8"]
    assert validation[0]["step"] == "8"
    assert [row["samples"] for row in train[:2]] == ["32", "64"]
    assert [float(row["lr"]) for row in train[:2]] == [pytest.approx(1e-2 * 0.5**3), pytest.approx(1e-2 * 0.5**7)]


def test_two_runs_of_one_config_at_a_time_have_their_own_folders(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a run whose data take long to open, WHEN another of the same config begins meanwhile."""
    monkeypatch.chdir(tmp_path)
    opened = assembling.build_dataset

    def train() -> None:
        main(config, [], preset=None, resume=False, explain=False, record=False)

    def slowly(*data: Any) -> Any:
        monkeypatch.setattr(assembling, "build_dataset", opened)
        train()
        return opened(*data)

    monkeypatch.setattr(assembling, "build_dataset", slowly)
    train()
    rows = [len((tmp_path / "runs" / name / "train.csv").read_text().splitlines()) for name in ("toy", "toy-2")]
    assert rows == [7, 7]


def test_a_finished_training_that_is_lengthened_is_the_longer_one(ready: Ready, tmp_path: Path) -> None:
    """With a scheduler that goes by what validation gives: none of it counts twice."""
    plateau = "scheduler={factory: torch.optim.lr_scheduler:ReduceLROnPlateau, args: {patience: 0, threshold: 9}}"
    straight = ready(plateau, f"out={tmp_path / 'straight'}", "train.epochs=3", "data.workers=1")
    straight.fit()
    ready(plateau, "train.epochs=2", "data.workers=1").fit()
    longer = ready(plateau, "train.epochs=3", "data.workers=1")
    assert longer.resume()
    longer.fit()
    assert same(weights(straight), weights(longer))
    assert [row["step"] for row in rows(tmp_path / "run/validation.csv")] == ["8", "16", "24"]


def test_settings_that_differ_from_the_checkpoint_are_reported(
    ready: Ready, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = "scheduler={factory: torch.optim.lr_scheduler:StepLR, args: {step_size: 9, gamma: 0.5}}"
    ready(steps, "train.max_steps=11").fit()
    assert ready(steps).resume()
    assert "stays as it was" not in capsys.readouterr().out
    changed = ready(steps, "optimizer.args.lr=0.5")
    assert changed.resume()
    told = "the optimizer's initial_lr stays as it was: 0.01 (the config comes to 0.5)\n"
    assert told in capsys.readouterr().out


def test_a_stdout_that_takes_nothing_does_not_end_a_training(config: Path, tmp_path: Path) -> None:
    here = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3] / "src")])
    command = [sys.executable, "-m", "flatout", "train", "--here", str(config), "log.quiet=false"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": here},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "flatout: stdout cannot be written to: No space left on device; training goes on without\n"
    assert (tmp_path / "runs/toy/checkpoints/step-000000024.pt").exists()


def test_a_loss_that_is_no_tensor_is_the_persons_mistake(ready: Ready) -> None:
    trainer = ready()
    trainer.step.criterion = lambda output, target: "low"
    with pytest.raises(UsageError, match=r"criterion: expected a tensor as the loss \(got 'low'\)"):
        trainer.fit()


def test_a_metric_that_gives_nothing_is_the_persons_mistake(ready: Ready) -> None:
    trainer = ready()
    trainer.metrics["accuracy"] = lambda output, target: None
    with pytest.raises(UsageError, match=r"metrics.accuracy gave None: a metric gives a number, or one a sample"):
        trainer.fit()


@pytest.mark.parametrize("phase", ["train", "val"])
def test_a_collate_function_that_gives_nothing_is_the_persons_mistake(ready: Ready, phase: str) -> None:
    trainer = ready("train.batch_size=64")
    loader: Any = trainer._batches.loader if phase == "train" else trainer._val_loader
    loader.collate_fn = lambda samples: None
    with pytest.raises(UsageError, match=r"there is no tensor in a batch, .* \(got None\)"):
        trainer.fit()


def test_steps_that_are_taken_again_have_one_row(tmp_path: Path) -> None:
    """A crash after step 30, the last checkpoint at step 20; the disk was full in the middle of a line."""

    reporter = Reporter(LogConfig(quiet=True), tmp_path, speaks=True)
    for first, steps in ((0, (10, 20, 30)), (20, (30, 40))):
        reporter.begin(first, 40, {})
        for step in steps:
            reporter.trained(step, {"epoch": 1, "loss": 0.5})
        with (tmp_path / "train.csv").open("a") as file:
            file.write("3")
        reporter.end()
    reporter.begin(40, 40, {})
    reporter.end()
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == ["10", "20", "30", "40"]


def test_ranks_that_see_other_data_agree_on_what_is_best(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ready("checkpoint.best=accuracy", "checkpoint.best_is=max")
    monkeypatch.setattr(trainer.ranks, "gathered", lambda thing: [{**thing, "accuracy": 0.25}, thing])
    trainer._evaluate()
    assert (trainer.results["accuracy"], trainer.best) == (0.25, 0.25)


def test_metrics_that_cannot_be_written_do_not_end_a_training(
    ready: Ready, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Reporter, "_csv", full)
    trainer = ready()
    trainer.fit()
    assert trainer.at.step == 24
    told = "metrics of step 4 are not written: No space left on device; training goes on\n"
    assert capsys.readouterr().out == told


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_length_is_trained_on_and_resumed(ready: Ready, tmp_path: Path, workers: int) -> None:
    data = ["data.train=engine_toy:Stream", f"data.workers={workers}"]
    straight = ready(f"out={tmp_path / 'straight'}", *data)
    straight.fit()
    order = list(engine_toy.seen)
    assert (straight.last_step, straight.at.step) == (None, 24)
    assert sorted(chain(*order[:8])) == list(range(64))
    engine_toy.seen.clear()
    stop_at(11)
    ready(*data).fit()
    resumed = ready(*data)
    assert resumed.resume()
    resumed.fit()
    assert engine_toy.seen == order
    assert same(weights(straight), weights(resumed))
    with pytest.raises(UsageError, match=r"scheduler.args.T_max: the data has no length; give train.max_steps"):
        ready(*data, "scheduler={factory: torch.optim.lr_scheduler:CosineAnnealingLR, args: {T_max: '{steps}'}}")


def test_a_pytorch_loader_is_resumed_too(tmp_path: Path) -> None:
    def trainer(out: str) -> Trainer:
        torch.manual_seed(0)
        model = engine_toy.Net()
        return Trainer(
            model=model,
            train_loader=TorchLoader(engine_toy.Points(), 8, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.AdamW(model.parameters()),
            config={"train": {"epochs": 3, "device": "cpu"}, "log": {"quiet": True}, "out": str(tmp_path / out)},
        )

    straight = trainer("straight")
    straight.fit()
    engine_toy.seen.clear()
    stop_at(13)
    trainer("run").fit()
    resumed = trainer("run")
    torch.manual_seed(99)
    assert resumed.resume()
    resumed.fit()
    assert same(weights(straight), weights(resumed))


def test_runs_stay_apart_and_configs_are_never_overwritten(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def train(*overrides: str, resume: bool = False) -> None:
        main(config, overrides, preset=None, resume=resume, explain=False, record=False)

    with pytest.raises(UsageError, match="--resume: there is no run at runs/toy"):
        train(resume=True)
    train("train.max_steps=3")
    train("train.max_steps=5")
    train("train.max_steps=7", resume=True)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["toy", "toy-2"]
    assert load(Path("runs/toy-2/config.yaml")).train.max_steps == 5
    assert load(Path("runs/toy-2/config-2.yaml")).train.max_steps == 7
    assert "resumed after step 5: epoch 1, batch 5" in capsys.readouterr().out
    assert not Path("runs/toy/config-2.yaml").exists()


def test_to_resume_what_is_finished_says_so_and_does_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*, resume: bool) -> None:
        main(config, [f"out={tmp_path / 'run'}"], preset=None, resume=resume, explain=False, record=False)

    train(resume=False)
    passes, files = len(engine_toy.seen), {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    train(resume=True)
    said = f"nothing is left to train: {tmp_path / 'run'} ended at step 24; raise train.epochs to go on\n"
    assert capsys.readouterr().out == said
    assert len(engine_toy.seen) == passes
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_never_is_no_checkpoint_not_even_of_the_best(ready: Ready, tmp_path: Path, capsys: Any) -> None:
    stop_at(9)
    trainer = ready("checkpoint.every=never", "checkpoint.best=accuracy")
    trainer.fit()
    assert trainer.best is not None
    assert not list(tmp_path.rglob("*.pt"))
    assert "SIGTERM: stopped at step 9; no checkpoint was asked for" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_one_line(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"out: cannot make the folder .*file/run: Not a directory"):
        main(config, [f"out={tmp_path}/file/run"], preset=None, resume=False, explain=False, record=False)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(100, "loss 0.5403  14,840 samples/s  waits for data 12%"), (60, "loss 0.5403  14,840 samples/s")],
)
def test_a_terminal_shows_whole_numbers_and_what_matters_most_in_any_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, shown: str
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    reporter = Reporter(LogConfig(), tmp_path, speaks=True)
    reporter.begin(0, 20_000, {})
    reporter.trained(1200, {"epoch": 1, "loss": 0.54031, "samples_per_s": 14837.2, "data_wait_pct": 12.0})
    reporter.end()
    plain = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", capsys.readouterr().out)
    line = next(line for line in re.split(r"[\r\n]", plain) if line.startswith("step 1200"))
    assert shown in line
    assert len(line.rstrip()) <= columns
    assert line.rstrip().endswith("-:--:--") or columns < 100


def test_a_checkpoint_of_another_model_is_one_line(ready: Ready) -> None:
    ready().fit()
    with pytest.raises(UsageError, match=r"its checkpoint does not fit this config: .*size mismatch"):
        ready("model.args.hidden=5").resume()


@pytest.mark.parametrize("best_is", ["min", "max"])
def test_the_best_and_the_last_are_kept(ready: Ready, tmp_path: Path, best_is: str) -> None:
    trainer = ready("train.epochs=6", "checkpoint.keep=3", "checkpoint.best=accuracy", f"checkpoint.best_is={best_is}")
    trainer.fit()
    folder = tmp_path / "run" / "checkpoints"
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["best.pt", "step-000000032.pt", "step-000000040.pt", "step-000000048.pt"]
    values = [float(row["accuracy"]) for row in rows(tmp_path / "run" / "validation.csv")]
    best = torch.load(folder / "best.pt", weights_only=True)
    choose = min if best_is == "min" else max
    assert best["best"] == choose(values)
    assert best["at"]["step"] == 8 * (values.index(choose(values)) + 1)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_out_of_memory_halves_the_pieces_and_repeats_the_very_step(ready: Ready, capsys: Any) -> None:
    undisturbed = ready("model.args.dropout=0", "checkpoint.every=never")
    undisturbed.fit()
    order = list(engine_toy.seen)
    engine_toy.seen.clear()
    engine_toy.faults[6] = engine_toy.faults[8] = engine_toy.out_of_memory
    trainer = ready("model.args.dropout=0", "checkpoint.every=never")
    trainer.fit()
    # TrainStep 6 failed whole, then in its second half, and is done in quarters.
    assert [len(piece) for piece in engine_toy.seen[:13]] == [8] * 6 + [4, 4] + [2] * 4 + [2]
    done = engine_toy.seen[:5] + engine_toy.seen[8:]
    assert done[:5] == order[:5]
    assert [list(chain(*done[5 + 4 * i : 9 + 4 * i])) for i in range(19)] == order[5:]
    assert trainer.at.step == undisturbed.at.step
    for a, b in zip(weights(undisturbed), weights(trainer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    out = capsys.readouterr().out
    assert (
        "out of memory: 4 samples at a time from here on instead of 8; train.accumulate is 2, the batch stays 8" in out
    )


def test_out_of_memory_with_one_sample_is_the_end(ready: Ready) -> None:
    for call in range(1, 6):
        engine_toy.faults[call] = engine_toy.out_of_memory
    with pytest.raises(UsageError, match="out of memory with one sample at a time"):
        ready().fit()


@pytest.mark.parametrize("step", [5, 12])
def test_a_loss_that_is_no_number_stops_with_its_step_and_the_last_good_checkpoint(
    ready: Ready, tmp_path: Path, step: int
) -> None:
    trainer = ready("checkpoint.every=2 steps", "checkpoint.keep=100", "checkpoint.best=null")
    engine_toy.faults[step] = lambda: trainer.model.layers[0].weight.data.fill_(math.nan)
    with pytest.raises(
        FlatoutError, match=rf"the loss is not a number at step {step}: .*the newest checkpoint is"
    ) as it:
        trainer.fit()
    named = Path(str(it.value).split()[-1])
    assert int(named.stem.removeprefix("step-")) < step
    for path in named.parent.iterdir():
        assert not any(value.isnan().any() for value in torch.load(path, weights_only=True)["model"].values())


def test_such_steps_can_be_skipped_and_are_counted(ready: Ready, tmp_path: Path) -> None:
    trainer = ready("train.on_nan=skip")
    whole = trainer.step.criterion

    def poisoned(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = whole(output, target)
        return loss * math.nan if len(engine_toy.seen) in (5, 6) and output.requires_grad else loss

    trainer.step.criterion = poisoned
    trainer.fit()
    assert (trainer.at.step, trainer.skipped) == (24, 2)
    assert rows(tmp_path / "run" / "train.csv")[-1]["skipped"] == "2"
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert {int(state["step"]) for state in trainer.step.optimizer.state_dict()["state"].values()} == {22}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], bool]], None]:
    """Checkpoints for which it is told to go to /dev/full, which refuses every byte, as a full disk does."""
    write_whole_by = run_folder.write_whole_by

    def fill(full_for: Callable[[Path], bool]) -> None:
        def write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
            if full_for(path):
                with Path("/dev/full").open("wb", buffering=0) as file:
                    write(file)
            else:
                write_whole_by(path, write)

        monkeypatch.setattr(run_folder, "write_whole_by", write)

    return fill


def number(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def test_a_full_disk_is_reported_once_and_at_the_end(
    ready: Ready, tmp_path: Path, full_disk: Callable[[Callable[[Path], bool]], None], capsys: Any
) -> None:
    full_disk(lambda path: number(path) > 4)
    trainer = ready("checkpoint.every=2 steps", "checkpoint.best=null")
    trainer.fit()
    assert trainer.at.step == 24
    last = tmp_path / "run" / "checkpoints" / "step-000000004.pt"
    assert max(last.parent.iterdir()) == last
    out = capsys.readouterr().out
    assert (
        out.count(f"no checkpoint at step 6: {os.strerror(errno.ENOSPC)}; training goes on, older ones are kept") == 1
    )
    assert out.count("no checkpoint") == 1
    assert trainer.unsaved == (
        f"the last checkpoint, of step 24, could not be written ({os.strerror(errno.ENOSPC)}): "
        f"the newest checkpoint is {last}"
    )
    assert out.splitlines()[-1] == trainer.unsaved
    assert ready().resume()


def test_a_checkpoint_that_failed_is_forgotten_once_a_later_one_is_written(
    ready: Ready, full_disk: Callable[[Callable[[Path], bool]], None]
) -> None:
    full_disk(lambda path: number(path) == 9)
    trainer = ready("checkpoint.every=9 steps", "checkpoint.best=null")
    trainer.fit()
    assert trainer.unsaved == ""


@pytest.mark.parametrize("code", [0, 74])
def test_flatout_train_has_the_last_word_on_weights_that_are_not_saved(
    config: Path, monkeypatch: pytest.MonkeyPatch, flatout_says: Callable[..., Any], code: int
) -> None:
    """GIVEN a training that ended so WHEN its account has been given THEN the last line says so, and the code is 1."""
    from flatout.launch import launcher

    def ran(command: list[str], *, folder: Path, ends_with_us: bool) -> int:
        assert ends_with_us
        print("the account of the run", file=sys.stderr)
        return code

    monkeypatch.chdir(config.parent)
    monkeypatch.setattr(launcher, "run", ran)
    ended, _, err = flatout_says("train", config)
    assert ended == (1 if code else 0)
    assert ("the final weights are not saved" in err.splitlines()[-1]) is bool(code)


def test_the_trainer_below_it_ends_with_a_code_of_its_own(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    full_disk: Callable[[Callable[[Path], bool]], None],
    flatout_says: Callable[..., Any],
) -> None:
    monkeypatch.chdir(config.parent)
    full_disk(lambda path: True)
    ended, _, err = flatout_says("train", "--here", config)
    assert ended == 74
    assert err.splitlines()[-1] == (
        "flatout: the final weights are not saved: the last checkpoint, of step 24, could not be written "
        f"({os.strerror(errno.ENOSPC)}): there is no checkpoint"
    )


def test_under_torchrun_each_rank_ends_with_1(
    config: Path, monkeypatch: pytest.MonkeyPatch, flatout_says: Callable[..., Any]
) -> None:
    def not_saved(*_: Any, **__: Any) -> None:
        raise NotSavedError("the final weights are not saved")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(assembling, "main", not_saved)
    assert flatout_says("train", config) == (1, "", "flatout: the final weights are not saved\n")


def test_what_cannot_be_read_back_safely_is_not_written(ready: Ready) -> None:
    trainer = ready()
    trainer.step.optimizer.param_groups[0]["note"] = Path("somewhere")
    with pytest.raises(FlatoutError, match=r"a checkpoint cannot hold state.optimizer.param_groups\[0\].note, a P"):
        trainer.fit()


def test_switches_of_torch_are_put_back(ready: Ready) -> None:
    def switches() -> list[bool]:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return [torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32]

    before = switches()
    ready("train.deterministic=true").fit()
    assert switches() == before


def test_our_own_loader_is_used_for_what_the_config_names(ready: Ready) -> None:
    assert isinstance(ready()._batches.loader, DataLoader)


@pytest.mark.parametrize("ends", ["with the last epoch", "in mid-epoch", "with an error"])
def test_no_worker_outlives_a_training(ready: Ready, ends: str) -> None:
    """GIVEN somebody who keeps the trainer, WHEN `fit` is over, in whatever way, THEN its processes are gone."""
    trainer = ready("data.workers=2", f"train.max_steps={11 if ends == 'in mid-epoch' else 24}")
    before, workers = set(psutil.Process().children()), set[psutil.Process]()

    def look() -> None:
        workers.update(set(psutil.Process().children()) - before)
        if ends == "with an error":
            raise ValueError("a mistake in the model")

    engine_toy.faults[10] = look
    with pytest.raises(ValueError, match="a mistake") if ends == "with an error" else contextlib.nullcontext():
        trainer.fit()
    assert workers  # of training and, by the second epoch, of validation
    assert not any(process.is_running() for process in workers)
    assert len(list(islice(trainer._batches.loader, 8))) == 8  # it can be used again


def fails_at(forward: int) -> None:
    def stop() -> None:
        raise InterruptedError

    engine_toy.faults[forward] = stop


@pytest.mark.parametrize("batch_size", [4, 16])
def test_another_batch_size_goes_on_in_the_same_epoch(ready: Ready, batch_size: int) -> None:
    fails_at(17)  # two epochs are over
    with pytest.raises(InterruptedError):
        ready("data.workers=2", "train.epochs=8").fit()
    engine_toy.faults.clear()
    engine_toy.seen.clear()
    resumed = ready("data.workers=2", "train.epochs=8", f"train.batch_size={batch_size}")
    assert resumed.resume()
    resumed.fit()
    sampler = DistributedSampler(engine_toy.Points(), 1, 0, seed=0)
    sampler.set_epoch(2)
    assert engine_toy.seen[0] == list(sampler)[:batch_size]


def test_fit_again_after_an_exception_goes_on_in_mid_epoch(ready: Ready) -> None:
    ready("data.workers=2", "checkpoint.every=never").fit()
    whole = list(engine_toy.seen)
    engine_toy.seen.clear()
    fails_at(12)
    trainer = ready("data.workers=2", "checkpoint.every=never")
    with pytest.raises(InterruptedError):
        trainer.fit()
    engine_toy.faults.clear()
    del engine_toy.seen[11:]  # the step that failed is taken again
    trainer.fit()
    assert engine_toy.seen == whole
