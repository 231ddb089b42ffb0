"""Which lines of a script took the time: in the training process, and in loader workers of either loader."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from observing import flatout_run, observe, write

from flatout.diagnose.breakdown import COLLATE, SAMPLES, in_training, in_workers
from flatout.inside.recording import process

TRAIN = """
    import time
    import torch
    from torch.utils.data import DataLoader, Dataset, default_collate

    class Pictures(Dataset):
        def __len__(self):
            return 240

        def __getitem__(self, index):
            return self.decode(index), index % 2

        def decode(self, index):
            time.sleep(0.004)
            return torch.randn(6)

    def collate(samples):
        time.sleep(0.04)
        return default_collate(samples)

    def metric(outputs):
        time.sleep(0.03)
        return outputs.mean()

    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in DataLoader(Pictures(), batch_size=4, collate_fn=collate, num_workers=WORKERS):
        outputs = model(inputs)
        torch.nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        metric(outputs)
"""


def line_of(text: str) -> str:
    """Where in the script this is written."""
    number = next(number for number, line in enumerate(TRAIN.splitlines(), 1) if text in line)
    return f"train.py:{number}"


@pytest.mark.parametrize("options", [(), ("--auto",)], ids=["PyTorch's loader", "elastic loader"])
def test_the_function_that_takes_the_time_is_named_in_the_loop_and_in_workers(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    write(tmp_path, train=TRAIN.replace("WORKERS", "2"))
    run = flatout_run(tmp_path, sys.executable, "train.py", options=options)
    assert run.code == 0, run.err
    rank = run.observed.rank
    in_the_loop = in_training(rank)[0]
    assert in_the_loop.name == "metric"
    assert in_the_loop.share > 0.8
    assert in_the_loop.hottest.source == "time.sleep(0.03)"
    assert in_the_loop.hottest.where == line_of("time.sleep(0.03)")
    sample = in_workers(rank, "Pictures", (SAMPLES,))[0]
    assert (sample.name, sample.hottest.where) == ("Pictures.decode", line_of("time.sleep(0.004)"))
    assert sample.share > 0.8
    assert in_workers(rank, "Pictures", (COLLATE,))[0].name == "collate"


def test_without_workers_the_lines_of_samples_are_those_of_waiting_for_data(tmp_path: Path) -> None:
    write(tmp_path, train=TRAIN.replace("WORKERS", "0"))
    rank = flatout_run(tmp_path, sys.executable, "train.py").observed.rank
    names = [function.name for function in in_workers(rank, "Pictures")]
    assert names[:2] == ["collate", "Pictures.decode"]


def test_no_thread_of_ours_is_at_work_while_the_process_forks(tmp_path: Path) -> None:
    at_fork: list[list[str]] = []

    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "flatout-stacks"]

    def train() -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(3):
            parameter.sum().backward()
            optimizer.step()
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, str(len(sys._current_frames())).encode())
            os._exit(0)
        os.waitpid(child, 0)
        at_fork.append([os.read(reading, 10).decode()])
        at_fork.append(ours())
        os.close(reading)
        os.close(writing)

    observe(tmp_path, train)
    assert at_fork == [["1"], ["flatout-stacks"]]
    assert process.recording is not None
    assert not process.recording.stacks.running
    assert not ours()


PREPARES = """
    import subprocess, sys, time
    import torch

    def prepare():
        time.sleep(10)

    if len(sys.argv) > 1:  # a helper
        prepare()
        sys.exit()
    helper = subprocess.Popen([sys.executable, __file__, "helper"])
    prepare()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
    helper.wait()
"""


def test_where_no_step_comes_for_long_one_line_says_what_goes_on(tmp_path: Path) -> None:
    write(tmp_path, train=PREPARES)
    launch = (
        "import sys; from pathlib import Path; from flatout.launch import launcher; "
        "launcher.run([sys.executable, 'train.py'], folder=Path('trace'), ask_after_s=4.0)"
    )
    ended = subprocess.run([sys.executable, "-c", launch], cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("flatout: no training step after 4 s; train.py:")
    assert "prepare: time.sleep(10); " in line
    assert "threads on" in line
    assert not list((tmp_path / "trace").glob("what-now*"))
