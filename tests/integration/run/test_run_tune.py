"""`flatout run --tune`: trainings with real workers tune themselves, and are what they are without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from observing import Run, call, finish, flatout_run, write

from flatout.launch.protocol import TUNED
from flatout.model.plan import Plan

TRAIN = """
    import argparse, hashlib, os, signal, sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from flatout.feed import controller
    from flatout.inside import compiler, tune
    compiler.load_when_used()
    tune._AT_LEAST_S, tune._STILL_S, tune._STILL_STEPS, tune._GC_AT_LEAST_S = 0.4, 0.5, 10, 0.2
    controller.WINDOW_S = 0.1

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--sample-ms", type=float, default=2.0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--end", default="")
    args = parser.parse_args()

    class Slow(Dataset):
        def __len__(self):
            return 4 * args.batches

        def __getitem__(self, index):
            time.sleep(args.sample_ms / 1e3)  # as of a slow disk
            return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3

    torch.manual_seed(0)
    net = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=args.workers)
    seen, steps = hashlib.sha256(), 0
    for epoch in range(3):
        for samples, labels in loader:
            time.sleep(args.step_ms / 1e3)
            loss = nn.functional.cross_entropy(net(samples), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.update(samples.numpy().tobytes() + labels.numpy().tobytes())
            print(loss.item().hex())
            steps += 1
            if args.end == "crash" and steps == 100:
                raise ValueError("no more")
            if args.end == "wait" and steps == 100:
                sys.stdout.flush()
                open("here", "w").close()
                time.sleep(60)
    print(seen.hexdigest(), net.weight.detach().numpy().tobytes().hex())
    sys.exit(3)
"""


def tuned(folder: Path, *flags: str) -> Run:
    write(folder, train=TRAIN)
    return flatout_run(folder, sys.executable, "train.py", *flags, options=("--tune", "--quiet"))


def notes(run: Run) -> list[str]:
    return [note.text for note in run.observed.rank.notes if note.text.startswith("step ")]


@pytest.mark.timing
def test_a_starving_training_gets_more_workers_and_keeps_them(tmp_path: Path) -> None:
    run = tuned(tmp_path, "--sample-ms", "5", "--batches", "700")
    kept = re.search(
        r"^flatout: (step \d+: (\d+) workers in place of 1: \d+\.\d\d× \(.* to .*\), kept)$", run.err, re.M
    )
    assert kept is not None, run.err
    assert int(kept[2]) > 1
    assert kept[1] in notes(run)
    plan = Plan.load(tmp_path / "flatout-plan.yaml")
    assert [(change.name, change.value) for change in plan.changes] == [("loader", "elastic")]
    assert "what was kept is in flatout-plan.yaml: flatout run --plan flatout-plan.yaml -- " in run.err
    assert {entry.name for entry in run.observed.rank.facts.changes if entry.applied} == {"loader"}


@pytest.mark.parametrize("workers", ["0", "1", "2"])
def test_batches_losses_and_weights_are_the_same_bit_for_bit(tmp_path: Path, workers: str) -> None:
    """GIVEN workers that are switched in mid-pass, THEN the training is what it is bare, its exit code too."""
    run = tuned(tmp_path, "--workers", workers)
    bare = subprocess.run(
        [sys.executable, "train.py", "--workers", workers, "--sample-ms", "0"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.code, run.out) == (bare.returncode, bare.stdout) == (3, bare.stdout)
    assert any("→" in note for note in notes(run)), run.err


def test_a_loader_that_keeps_up_keeps_its_number(tmp_path: Path) -> None:
    run = tuned(tmp_path, "--workers", "2", "--sample-ms", "0", "--step-ms", "10")
    assert run.code == 3
    told = [line for line in run.err.splitlines() if re.match(r"flatout: step \d+: ", line)]
    assert told, run.err
    assert all("workers as declared: " in line or line.endswith("taken back") for line in told), run.err
    assert not any(entry.applied for entry in run.observed.rank.facts.changes)
    assert Plan.load(tmp_path / "flatout-plan.yaml").changes == ()


def test_a_crash_before_anything_is_decided_leaves_no_plan(tmp_path: Path) -> None:
    run = tuned(tmp_path, "--end", "crash", "--sample-ms", "0")
    assert run.code == 1
    assert "ValueError: no more" in run.err
    assert "no plan is written: the training ended before anything was decided" in run.err
    assert not (tmp_path / "flatout-plan.yaml").exists()


def test_ctrl_c_keeps_the_exit_code_and_what_was_decided(tmp_path: Path) -> None:
    write(tmp_path, train=TRAIN)
    train = [sys.executable, "train.py", "--workers", "2", "--sample-ms", "0", "--step-ms", "20", "--end", "wait"]
    process = subprocess.Popen(**call(tmp_path, *train, options=("--tune", "--quiet")))
    while not (tmp_path / "here").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    run = finish(tmp_path, process)
    assert run.code == 130
    assert "KeyboardInterrupt" in run.err
    assert (tmp_path / "flatout-plan.yaml").exists() == (run.folder / TUNED).exists()


def test_a_loader_that_is_not_taken_is_named_with_the_reason(tmp_path: Path) -> None:
    write(
        tmp_path,
        train="""
        import torch
        from torch.utils.data import DataLoader, IterableDataset

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.ones(90, 3))

        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Stream(), batch_size=2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        """,
    )
    run = flatout_run(tmp_path, sys.executable, "train.py", options=("--tune", "--quiet"))
    assert run.code == 0, run.err
    assert any("the loader stays PyTorch's: an IterableDataset" in note for note in notes(run)), run.err


@pytest.mark.parametrize("with_it", [("--auto",), ("--max-steps", "9"), ("--plan", "plan.yaml")])
def test_tuning_goes_with_no_other_way_to_change_a_run(tmp_path: Path, with_it: tuple[str, ...]) -> None:
    run = flatout_run(tmp_path, sys.executable, "train.py", options=("--tune", *with_it))
    assert (run.code, run.out) == (2, "")
    assert (
        run.err == "flatout: --tune goes without --plan, --auto and --max-steps: it decides itself, while you train\n"
    )
