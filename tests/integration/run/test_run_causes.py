"""Causes that a small training on the CPU can have: what was measured says so, and the verdict."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from observing import flatout_run, write

from flatout import trace
from flatout.diagnose.rules import diagnose
from flatout.model.records import WrittenAttention

PADDED = """
    import torch
    from torch.utils.data import DataLoader

    def padded(samples):
        ids = torch.zeros(len(samples), 64, dtype=torch.long)
        for row, sample in zip(ids, samples):
            row[: len(sample)] = sample
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    data = [torch.randint(1, 100, (16,)) for _ in range(1600)]
    words, layer = torch.nn.Embedding(100, 128), torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = torch.nn.Sequential(words, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(data, batch_size=16, collate_fn=padded):
        model(batch["input_ids"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

UNUSED = """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", init_method="file://" + INIT, rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()
"""

ATTENTION = """
    import torch

    class Attention(torch.nn.Linear):
        def forward(self, inputs):
            values = super().forward(inputs)
            scores = values @ values.transpose(1, 2) / 4
            weights = torch.nn.functional.softmax(scores, dim=-1)
            return weights @ values

    before = torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax
    model = Attention(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        model(torch.randn(8, 512, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before == (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)
"""


def test_padding_is_counted_in_the_batches_of_a_training(tmp_path: Path) -> None:
    write(tmp_path, train=PADDED)
    run = flatout_run(tmp_path, sys.executable, "train.py", env={"FLATOUT_PRICE": "$3600/h"})
    assert run.code == 0, run.err
    assert run.account is not None
    costs = run.account["costs"]
    assert costs["tokens_per_s"] == pytest.approx(64 * run.account["facts"]["samples_per_s"])
    assert (costs["money"], costs["epoch_money"]) == pytest.approx((costs["seconds"], costs["epoch_s"]))
    assert "75% of them padding" in run.err
    assert " an epoch of " in run.err
    tokens = run.observed.rank.facts.training_loader.tokens
    assert tokens is not None
    assert (tokens.a_sample, tokens.padding) == (64.0, 0.75)
    assert "compute.padding" in [finding.code for finding in diagnose(trace.read(run.folder))]


def test_ddp_says_whether_it_found_unused_parameters(tmp_path: Path) -> None:
    write(tmp_path, train=UNUSED.replace("INIT", repr(str(tmp_path / "init"))))
    run = flatout_run(tmp_path, sys.executable, "train.py")
    assert run.code == 0, run.err
    parallel = run.observed.rank.facts.parallel
    assert parallel is not None
    assert (parallel.find_unused_parameters, parallel.unused_parameters) == (True, False)


def test_attention_written_out_by_hand_is_found_and_softmax_is_put_back(tmp_path: Path) -> None:
    write(tmp_path, train=ATTENTION)
    run = flatout_run(tmp_path, sys.executable, "train.py")
    assert run.code == 0, run.err
    assert run.observed.rank.facts.attention == WrittenAttention(where="train.py:8", length=512)
    found = {finding.code: finding for finding in diagnose(trace.read(run.folder))}
    assert found["compute.attention"].where == "train.py:8"
