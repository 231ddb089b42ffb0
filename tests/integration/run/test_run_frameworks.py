"""Frameworks as they come: Lightning, Hugging Face Trainer, Accelerate, and DDP under torchrun."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import Observed, flatout_run, observe, write
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flatout import trace

SAMPLES, BATCH, FEATURES = 32, 4, 6
STEPS = SAMPLES // BATCH


@pytest.fixture(autouse=True)
def _their_habits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They warn, and set an environment variable when imported."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def data() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, 2, (SAMPLES,)))


def late(observed: Observed, name: str) -> bool:
    """Whether a phase is in each of the last steps: by then every module has been found."""
    return all(name in {span.name for span in step.spans} for step in observed.steps[-4:])


def with_evaluation(observed: Observed) -> list[int]:
    return [step.index for step in observed.steps if any(span.name == "evaluation" for span in step.spans)]


def test_lightning(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(FEATURES, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("loss", cross_entropy(self.net(x), y))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train() -> None:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Module(), DataLoader(data(), batch_size=BATCH), DataLoader(data(), batch_size=2 * BATCH))

    observed = observe(tmp_path / "trace", train)
    assert len(observed.steps) == 2 * STEPS - 1
    assert observed.samples() == 2 * SAMPLES, "the sanity check and the validation are not training"
    assert with_evaluation(observed) == [STEPS]
    for name in ("data", "forward", "backward", "optimizer"):
        assert late(observed, name), name
    assert observed.ms("checkpoint") > 0


def test_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def train() -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(FEATURES, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader, validation = accelerator.prepare(
            model, optimizer, DataLoader(data(), batch_size=BATCH), DataLoader(data(), batch_size=BATCH)
        )
        for _ in range(3):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            model.eval()
            for x, _ in validation:
                with torch.no_grad():
                    model(x)
            model.train()

    try:
        observed = observe(tmp_path, train)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert len(observed.steps) == 3 * STEPS // 2 - 1
    assert {step.micro_steps for step in observed.steps} == {2}
    assert observed.samples() == 3 * SAMPLES
    assert with_evaluation(observed) == [STEPS // 2, STEPS]
    assert late(observed, "forward")


def test_hugging_face_trainer(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    rows = [{"input_ids": torch.randint(0, 30, (8,)), "labels": torch.tensor(i % 2)} for i in range(SAMPLES)]

    def train() -> None:
        config = BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            eval_strategy="epoch",
            logging_steps=4,
            save_strategy="epoch",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(
            model=BertForSequenceClassification(config), args=arguments, train_dataset=rows, eval_dataset=rows[:12]
        ).train()

    try:
        observed = observe(tmp_path / "trace", train)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert len(observed.steps) == 2 * STEPS - 1
    assert observed.samples() == 2 * SAMPLES
    assert STEPS in with_evaluation(observed)
    for name in ("data", "forward", "backward", "optimizer"):
        assert late(observed, name), name
    assert observed.ms("checkpoint") > 0


DDP = """
    import hashlib, os, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 2, (64,)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=1)
    model = DistributedDataParallel(torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            micro = number % 2 == 0
            with model.no_sync() if micro else torch.enable_grad():
                torch.nn.functional.cross_entropy(model(x), y).backward()
            if not micro:
                optimizer.step()
                optimizer.zero_grad()
    state = b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + torch.get_rng_state().numpy().tobytes()
    if dist.get_rank() == 0:
        print(hashlib.sha256(state).hexdigest())
    dist.destroy_process_group()
"""


def test_ddp_under_torchrun_is_one_trace_of_two_ranks(tmp_path: Path) -> None:
    write(tmp_path, train=DDP)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    run = flatout_run(tmp_path, *torchrun)
    assert run.code == 0, run.err
    merged = trace.read(run.folder)
    assert [rank.info.rank for rank in merged.ranks] == [0, 1]
    assert {rank.info.world_size for rank in merged.ranks} == {2}
    for rank in merged.ranks:
        observed = Observed(rank)
        assert len(observed.steps) == 7
        assert {(step.micro_steps, step.samples) for step in observed.steps} == {(2, 8)}
        assert {span.name for step in observed.steps for span in step.spans} >= {"data", "forward", "backward"}
        assert sum(report.samples for report in rank.workers) == 64, "each rank has its own workers"
        assert rank.facts.gradient_exchange.waited_ms > 0
    assert run.account is not None
    assert run.account["ranks"] == 2
    bare = flatout_run(tmp_path, *torchrun, env={"FLATOUT": "off"})
    assert bare.out == run.out, "weights and random numbers are the same without us"
