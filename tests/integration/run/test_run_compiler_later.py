"""A trial leaves torch's compiler out for an optimizer that only asks to be left alone; what compiles gets it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from observing import write

from flatout import trace
from flatout.launch import launcher
from flatout.launch.protocol import Trial

TRAINING = """
    import sys
    import torch
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for step in range(6):
        loss = model(torch.ones(2, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print("loaded" if "torch._dynamo.eval_frame" in sys.modules else "spared", f"{loss.item():.6f}")
"""
COMPILING = """
    double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
    print("doubled", double(torch.ones(1)).item(), sys.modules["torch._dynamo"] is torch._dynamo)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    print("to the end")
"""
ASKING = {
    "a module below": "import torch._dynamo.config",
    "a name": "from torch._dynamo import allow_in_graph",
    "an attribute": "torch._dynamo.reset()",
}


def output_of(folder: Path, text: str) -> str:
    write(folder, train=text)
    trial = Trial(seed=1, timeout_s=120)
    command = [sys.executable, str(folder / "train.py")]
    code = launcher.run(command, folder=folder / "trace", max_steps=100, trial=trial)
    said = (folder / "trace" / launcher.OUTPUT).read_text()
    assert code == 0, said
    assert trace.read(folder / "trace").ranks[0].steps
    return said


def test_an_optimizer_does_not_load_it(tmp_path: Path) -> None:
    assert "spared" in output_of(tmp_path, TRAINING)


def test_what_looks_at_every_module_does_not_load_it(tmp_path: Path) -> None:
    """As `inspect` does, for instance in the midst of this import: the compiler wants what is not there yet."""
    first, rest = TRAINING.split("import torch\n", 1)
    assert "spared" in output_of(tmp_path, f"{first}import torch\n    import torch.distributed.tensor\n{rest}")


@pytest.mark.parametrize("question", ASKING.values(), ids=ASKING)
def test_any_other_question_loads_it(tmp_path: Path, question: str) -> None:
    text = f"{TRAINING}    {question}\n    import torch._dynamo as it\n    print('real', 'eval_frame' in vars(it))\n"
    assert "real True" in output_of(tmp_path, text)


def test_what_compiles_gets_it(tmp_path: Path) -> None:
    said = output_of(tmp_path, TRAINING + COMPILING)
    assert "doubled 2.0 True" in said
    assert "to the end" in said
