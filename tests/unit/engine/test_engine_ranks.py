"""Two ranks under torchrun, on gloo: what they learn together, and what becomes of one when the other dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_toy
import pytest
import torch
import torch.distributed as dist
from engine_toy import Ready
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flatout.engine import trainer as training
from flatout.engine.config import TrainConfig
from flatout.engine.step import TrainStep, choose_precision
from flatout.engine.trainer import Interrupts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def train_on_two(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3] / "src")])}
    command = [*TORCHRUN, "flatout", "train", str(config), *words]
    return subprocess.run(
        command, cwd=config.parent, env={**os.environ, **here}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.timing
def test_two_ranks_learn_what_one_would_and_come_back_when_one_has_died(ready: Ready, config: Path) -> None:
    # GIVEN what one process learns from batches of 16
    alone = ready("model.args.dropout=0", "train.batch_size=16", "checkpoint.every=never")
    alone.fit()

    # WHEN two learn from 8 each, in two pieces, and one of them is killed in the second epoch
    words = ["model.factory=engine_toy:MortalNet", "model.args.dropout=0", "train.accumulate=2", "log.quiet=false"]
    words += ["checkpoint.every=2 steps", "checkpoint.best=null"]
    started = time.monotonic()
    died = train_on_two(config, *words, "model.args.dies_at=13")
    took_s = time.monotonic() - started

    # THEN the other ends soon, and says why in one line
    assert died.returncode != 0
    assert took_s < 60
    told = [line for line in died.stderr.splitlines() if line.startswith("flatout: ")]
    assert len(told) == 1
    assert "rank 0: another rank is gone, training ends after step 6; go on with --resume" in told[0]

    # AND both go on from the last checkpoint to the very weights of the one
    resumed = train_on_two(config, *words, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step 6: epoch 2, batch 2" in resumed.stdout
    assert resumed.stdout.count("validation:") == 2  # of the second and of the third epoch; one rank speaks
    saved = torch.load(config.parent / "runs/toy/checkpoints/step-000000012.pt", weights_only=True)
    for name, weight in alone.model.state_dict().items():
        torch.testing.assert_close(saved["model"][name], weight, rtol=1e-4, atol=1e-6)
    assert f"accuracy {alone.results['accuracy']:.4g}" in resumed.stdout

    # AND it was recorded, rank by rank, with the verdict at the end
    assert len(list(config.parent.glob("flatout-runs/*/rank-*.jsonl"))) == 4
    assert "where training's time went" in resumed.stderr

    # BUT not on another number of ranks
    with pytest.raises(Exception, match=r"saved by 2 rank\(s\), there are 1 now"):
        ready(f"out={config.parent / 'runs/toy'}", "model.args.dropout=0").resume()


@contextlib.contextmanager
def by_ourselves(config: Path, *words: str, gpus: int = 2) -> Iterator[subprocess.Popen[str]]:
    """`flatout train --gpus 2`, which starts its ranks without torchrun."""
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3] / "src")])}
    command = [sys.executable, "-m", "flatout", "train", "--gpus", str(gpus), str(config), *words]
    env = {**os.environ, **here}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=config.parent, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        yield process


def test_our_own_ranks_end_with_one_line_and_the_code_it_deserves(config: Path) -> None:
    with by_ourselves(config, "train.epoch=3") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == f"flatout: {config}: there is no setting train.epoch; did you mean train.epochs?\n"


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_training_saves_its_state_and_ends_when_its_launcher_is_killed(config: Path, gpus: int) -> None:
    """GIVEN a training that would go on for long, WHEN `kill -9` hits the command, THEN nobody trains on behind the
    back of the `--resume` that follows."""
    long = ["train.epochs=3000", "log.quiet=false", "checkpoint.every=100000 steps"]
    with by_ourselves(config, *long, gpus=gpus) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 2"):
                process.kill()
                break
        rest = process.stdout.read()  # until the last process of it has ended
    assert re.search(r"^SIGTERM: stopped at step \d+; go on with --resume$", rest, re.M)
    assert list(config.parent.rglob("step-*.pt"))


def test_ranks_of_the_gpus_option_stop_in_good_order(config: Path) -> None:
    forever = ["train.epochs=100000", "log.quiet=false", "train.device=auto", "checkpoint.every=100000 steps"]
    with by_ourselves(config, *forever) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("epoch 2"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "--gpus 2: there is no GPU here that torch can use; 2 ranks train on the CPU\n" in said
    assert re.search(r"^SIGTERM: stopped at step \d+; go on with --resume$", out, re.M)
    assert "Traceback" not in err
    assert list((config.parent / "runs/toy/checkpoints").glob("step-*.pt"))


@pytest.mark.timing
def test_our_own_ranks_end_soon_when_one_of_them_dies(config: Path) -> None:
    started = time.monotonic()
    with by_ourselves(config, "model.factory=engine_toy:MortalNet", "model.args.dies_at=5") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - started < 50
    told = sorted(line for line in err.splitlines() if line.startswith("flatout: rank"))
    assert told[0].startswith("flatout: rank 0: another rank is gone, training ends after step 5")
    assert told[1] == "flatout: rank 1 was killed by SIGKILL"
    assert "Traceback" not in err


@pytest.mark.parametrize("apart_s", [0.0, 5.0])
def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch, apart_s: float) -> None:
    now = iter([100.0, 100.0 + apart_s])
    monkeypatch.setattr(training.time, "monotonic", lambda: next(now))
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.asked == "SIGINT"
        if apart_s:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    """A group of one, so that DistributedDataParallel can be looked at in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_gradients_travel_once_a_step_however_many_pieces_and_after_running_out_of_memory() -> None:
    exchanged: list[int] = []

    def counted(_, bucket):  # torch wants its own annotations or none
        exchanged.append(bucket.index())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(engine_toy.Net())
    model.register_comm_hook(None, counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision, _ = choose_precision("off", torch.device("cpu"))
    said: list[str] = []
    step = TrainStep(model, nn.CrossEntropyLoss(), optimizer, precision, TrainConfig(accumulate=4), said.append)
    data = engine_toy.Points()
    batch = [data.points[:16], torch.zeros(16).long()]
    step(batch)
    assert (len(engine_toy.seen), exchanged) == (4, [0])
    engine_toy.faults[6] = engine_toy.out_of_memory
    step(batch)
    assert step.accumulate == 8
    assert exchanged == [0, 0]
    assert len(said) == 1
