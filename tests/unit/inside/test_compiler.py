"""Compiled kernels round where eager ones do, unless the person says otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as config

from flatout.inside.compiler import draw_as_eager, round_as_eager
from flatout.model.changes import ROUND_AS_EAGER

# A column's place under softmax, from scores that were rounded: its gradients are differences of large numbers.
SCRIPT = """
import json, sys, torch
from flatout.inside.compiler import round_as_eager

torch.manual_seed(0)
pictures, weights = torch.randn(256, 32).bfloat16(), torch.randn(32, 40).mul(4).bfloat16()
bias = torch.randn(40).mul(8).bfloat16()

def place(shift):
    columns = (pictures @ weights + bias + shift).float().softmax(dim=1)
    return (columns * torch.linspace(0, 160, 40)).sum(dim=1)

def results(call):
    shift = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    found = call(shift)
    found.square().mean().backward()
    return torch.cat([found.detach(), shift.grad[None]])

eager, apart = results(place), []
for set_up in (lambda: None, round_as_eager):
    torch.compiler.reset()
    set_up()
    apart.append(float((results(torch.compile(place)) - eager).abs().max()))
print(json.dumps(apart))
"""


def test_in_bf16_a_compiled_chain_gives_what_the_eager_one_gives() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=True)
    as_torch_has_it, as_eager = json.loads(done.stdout.splitlines()[-1])
    assert as_torch_has_it > 0.1, "or there is nothing to round"
    assert as_eager < 0.001 * as_torch_has_it


@pytest.fixture
def put_back() -> Iterator[None]:
    before = config.emulate_precision_casts, config.fallback_random
    config.emulate_precision_casts = config.fallback_random = False
    yield
    config.emulate_precision_casts, config.fallback_random = before


@pytest.mark.usefixtures("put_back")
@pytest.mark.parametrize(
    ("call", "draws"),
    [
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0)), False),
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)), True),
        (lambda x: x + torch.randn_like(x), True),
    ],
)
def test_in_a_proof_a_model_draws_what_eager_kernels_draw(call: Callable[..., Any], draws: bool) -> None:
    with draw_as_eager():
        call(torch.ones(2, 2))
    assert config.fallback_random is draws


@pytest.mark.usefixtures("put_back")
def test_what_the_person_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "0")
    round_as_eager()
    assert config.emulate_precision_casts is False


@pytest.mark.usefixtures("put_back")
def test_the_line_to_write_is_the_switch() -> None:
    exec(ROUND_AS_EAGER, {"torch": torch})
    assert config.emulate_precision_casts is True
