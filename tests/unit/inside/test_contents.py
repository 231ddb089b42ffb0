"""What a close proof notes: a few numbers that say how far apart two tensors are, evaluation, and what is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.fix.edit_proof import apart
from flatout.fix.runs import Content
from flatout.inside.fingerprints import FingerprintLog, Projections


def content(tensor: torch.Tensor) -> Content:
    return Content("", tuple(Projections().of(tensor).tolist()))


@pytest.mark.parametrize("shape", [(7,), (3, 64, 64), (5, 1_000_003)])
def test_two_tensors_are_as_far_apart_as_their_projections(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for share in (1e-6, 1e-3):
        other = tensor + share * torch.randn(shape, generator=torch.Generator().manual_seed(2))
        assert share / 5 < apart(content(tensor), content(other)) < 5 * share


def test_places_count_and_layout_does_not() -> None:
    tensor = torch.randn(2, 3, 60, 80, generator=torch.Generator().manual_seed(1))
    known = content(tensor)
    assert apart(known, content(tensor.to(memory_format=torch.channels_last))) == 0
    for other in (tensor.flip(-1), tensor.flip(0), tensor.roll(4096)):
        assert apart(known, content(other)) > 0.1


def test_kinds_of_numbers() -> None:
    whole = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(1))
    assert apart(content(whole), content(whole.int())) == 0
    changed = whole.clone()
    changed[17] += 1
    assert apart(content(whole), content(changed)) > 1e-4
    assert apart(content(whole > 4), content(whole > 3)) > 1e-2
    spun = torch.complex(whole.float(), whole.float())
    assert apart(content(spun), content(spun.conj().resolve_conj())) > 0.1
    assert content(torch.zeros(0)).numbers == (0.0,) * 5
    assert content(torch.tensor([float("nan")])) != content(torch.tensor([1.0]))


def test_drawing_them_draws_nothing_of_the_users() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    content(torch.ones(9))
    assert torch.equal(torch.get_rng_state(), before)


def lines_of(log: FingerprintLog, tmp_path: Path) -> list[dict[str, Any]]:
    log.write(tmp_path / "proof.jsonl")
    return [json.loads(line) for line in (tmp_path / "proof.jsonl").read_text().splitlines()]


def test_a_close_proof_has_evaluation_and_what_is_trained(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5), momentum=0.9, fused=False)
    log = FingerprintLog(closely=True)
    log.roots.put(net)
    for number in range(3):
        log.inputs((torch.ones(4, 2),), {})
        if number == 1:
            log.inputs((torch.zeros(4, 2),), {}, learns=False)
            optimizer.param_groups[0]["lr"] = 0.25
        log.step_ended(None, [optimizer])

    first, second, third = lines_of(log, tmp_path)
    (group, buffers) = first["learned"]
    assert group[0] == "SGD"
    assert (group[1]["lr"], group[1]["momentum"]) == (0.5, 0.9)
    assert not {"params", "fused", "foreach"} & group[1].keys()
    assert group[2] == ["[3, 2]", "[3]", "[3]", "[3]"]
    assert buffers[2] == ["0.1.num_batches_tracked []", "0.1.running_mean [3]", "0.1.running_var [3]"]
    assert second["learned"][0][1]["lr"] == 0.25
    assert third["learned"] == []
    assert [content[0] for content in first["contents"]] == ["float32[4, 2]"]
    assert first["contents"][0][1][0] == pytest.approx(8**0.5)
    assert ("evaluation" in first, "evaluation" in second) == (False, True)
    assert [content[0] for content in second["evaluation"]["contents"]] == ["float32[4, 2]"]


def test_any_other_proof_has_none_of_that(tmp_path: Path) -> None:
    log = FingerprintLog()
    log.inputs((torch.ones(4, 2),), {})
    log.step_ended(None, [])
    (line,) = lines_of(log, tmp_path)
    assert line.keys() == {"step", "inputs", "indices", "begins", "loss", "losses", "moved"}
