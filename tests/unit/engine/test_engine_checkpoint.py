"""Checkpoints that survive: processes killed at any moment, files cut short, folders with all of that in them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toy import Ready

from flatout.engine.checkpoint import CheckpointConfig, Checkpoints, newest


def state(step: int) -> dict[str, Any]:
    """A state that can be seen to belong together."""
    return {"at": {"step": step}, "model": {"weight": torch.full((40_000,), float(step))}, "ranks": []}


def write_for_ever(folder: Path, step: int, begun: int) -> None:
    """What a training does around its checkpoints, without the rest of it; tells of each that has begun."""
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=2), print)
    while True:
        step += 1
        checkpoints.write(step, state(step), best=step % 3 == 0)
        os.write(begun, b".")


def test_whenever_it_is_killed_a_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """GIVEN a process that writes one checkpoint after the other, WHEN it is killed with -9 at 100 random moments and
    begun again each time from what is found, THEN something whole is always found, and it never goes back."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    folder, step, progress = tmp_path / "checkpoints", 0, 0
    for _ in range(100):
        told, begun = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(folder, step, begun)
            finally:
                os._exit(1)
        for _ in range(moments.choice((1, 2, 3)) + (step == 0)):  # before the first kill one must be there
            os.read(told, 1)
        time.sleep(moments.uniform(0, 0.004))  # about as long as one takes to write
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(begun)
        said: list[str] = []
        found = newest(folder, said.append)
        assert found is not None, seed
        assert not said, (seed, said)
        assert bool((found["model"]["weight"] == found["at"]["step"]).all()), seed
        assert found["at"]["step"] >= step, seed
        progress += found["at"]["step"] > step
        step = found["at"]["step"]
        if (folder / "best.pt").exists():
            assert torch.load(folder / "best.pt", weights_only=True)["at"]["step"] % 3 == 0, seed
    assert progress > 10  # there were some that came to their end


@pytest.mark.parametrize("harm", ["cut", "emptied", "zeroed", "not a checkpoint"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(
    ready: Ready, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    ready("checkpoint.every=2 steps", "train.max_steps=9").fit()
    folder = tmp_path / "run" / "checkpoints"
    last = folder / "step-000000009.pt"
    whole = last.read_bytes()
    half = len(whole) // 2
    last.write_bytes(
        {
            "cut": whole[:-100],
            "emptied": b"",
            "zeroed": whole[: half - 2000] + bytes(4000) + whole[half + 2000 :],
            "not a checkpoint": b"hello",
        }[harm]
    )
    trainer = ready()
    assert trainer.resume()
    assert trainer.at.step == 8
    assert f"{last} is damaged (" in capsys.readouterr().out


def test_what_a_killed_writer_left_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, CheckpointConfig(), print)
    checkpoints.write(1, state(1))
    checkpoints.wait()
    (folder / "step-000000002.pt.part").write_bytes((folder / "step-000000001.pt").read_bytes())
    found = newest(folder, print)
    assert found is not None
    assert found["at"]["step"] == 1
    assert newest(tmp_path / "nowhere", print) is None


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a slow disk, WHEN the weights change after `write`, THEN what is written is what they were."""
    import threading

    from flatout.engine import checkpoint

    gate, save = threading.Event(), checkpoint._save

    def slow(data: Any, path: Path) -> None:
        gate.wait(30)
        save(data, path)

    monkeypatch.setattr(checkpoint, "_save", slow)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), print)
    weights = state(1)
    checkpoints.write(1, weights)
    weights["model"]["weight"].fill_(7.0)
    assert not list(tmp_path.iterdir())
    gate.set()
    checkpoints.wait()
    found = newest(tmp_path, print)
    assert found is not None
    assert bool((found["model"]["weight"] == 1).all())
