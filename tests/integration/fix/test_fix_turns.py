"""Changes switched on and off between the steps of a real training, until it is known what each brings."""

from __future__ import annotations

import sys
from pathlib import Path

from flatout.fix.runs import Launcher, Run
from flatout.launch.protocol import Trial
from flatout.model.changes import safety_of
from flatout.model.plan import Change

# How long a step takes depends on what is in force, by far more than any machine's noise.
SCRIPT = """
import sys, time
import torch
from flatout.inside import trial
trial._HUNG_S = 2.0
compiler = {}
source = "import time\\ndef build():\\n    for _ in range(50): time.sleep(0.1)"
exec(compile(source, "/x/torch/_inductor/build.py", "exec"), compiler)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.head = torch.nn.Linear(144, 2)

    def forward(self, x):
        lower = torch.is_autocast_enabled("cpu")
        time.sleep(0.01 if lower else 0.05)
        if not x.is_contiguous():
            time.sleep(0.05)
        if sys.argv[1] == "crash" and lower:
            x = Broken.apply(x.requires_grad_())
        if sys.argv[1] == "compiles" and lower and compiler:
            compiler.pop("build")()
            compiler.clear()
        if sys.argv[1] == "hang" and lower:
            stand_still()
        if sys.argv[1] == "view":
            x = x.view(len(x), 3, 8, 8)
            return self.head(self.conv(x).view(len(x), -1))
        return self.head(self.conv(x).flatten(1))

def stand_still():
    while True:
        time.sleep(0.1)

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no bf16 here")

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(int(sys.argv[2])):
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 2, (8,))
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def run(folder: Path, kind: str, steps: int, *names: str) -> Run:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    values = {"precision": "bf16", "channels_last": True, "fused_optimizer": True}
    changes = [Change(name=name, value=values[name], safety=safety_of(name)) for name in names]
    runner = Launcher([sys.executable, str(script), kind, str(steps)], folder / "runs")
    trial = Trial(timeout_s=240, turns=names, look_below_s=0.0)
    return runner.run(changes, 20, trial)


def test_what_pays_stays_on_and_what_does_not_is_off_again(tmp_path: Path) -> None:
    ended = run(tmp_path, "plain", 100_000, "precision", "channels_last")
    assert ended.code == 0, ended.output
    precision, layout = ended.turns
    assert (precision.decision, layout.decision) == ("faster", "no gain")
    assert precision.gain is not None
    assert precision.gain.low > 1.1
    assert layout.gain is not None
    assert layout.gain.high < 1
    assert precision.rounds >= 8
    # THEN the steps that are measured have what has paid, and nothing else
    assert ended.speed is not None
    assert ended.metrics.breakdown.steps >= 20
    assert set(ended.applied) == {"precision", "channels_last"}
    assert ended.step_s < 0.05  # of which the script sleeps as much without bf16


def test_a_forward_that_raises_with_a_change_is_repeated_without_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "view", 100_000, "channels_last", "precision")
    assert ended.code == 0, ended.output
    layout, precision = ended.turns
    assert (layout.state, layout.gain) == ("decided", None)
    assert "view size is not compatible" in layout.note
    assert layout.note.endswith("train.py:30")
    assert layout.note == ended.refused["channels_last"]
    assert precision.decision == "faster"


def test_what_ends_the_process_is_the_one_under_way(tmp_path: Path) -> None:
    ended = run(tmp_path, "crash", 100_000, "fused_optimizer", "precision", "channels_last")
    assert ended.code == 1
    assert [result.state for result in ended.turns] == ["decided", "under way", "not reached"]
    assert "no bf16 here" in ended.reason()


def test_a_call_that_hangs_ends_the_run_and_says_where(tmp_path: Path) -> None:
    """GIVEN a change with which a forward pass never returns, THEN that costs seconds, not what the run might take."""
    ended = run(tmp_path, "hang", 100_000, "precision", "channels_last")
    assert (ended.code, ended.hung) == (1, False)
    precision, layout = ended.turns
    assert (precision.state, layout.state) == ("under way", "not reached")
    assert precision.note.startswith("it stood still for ")
    assert "train.py:35 stand_still" in precision.note


def test_a_call_in_which_something_is_compiled_may_take_long(tmp_path: Path) -> None:
    ended = run(tmp_path, "compiles", 100_000, "precision")
    assert ended.code == 0, ended.output
    assert [result.decision for result in ended.turns] == ["faster"]


def test_a_script_that_ends_too_soon_has_decided_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, "plain", 30, "precision")
    assert ended.code == 0, ended.output
    assert [result.state for result in ended.turns] == ["under way"]
