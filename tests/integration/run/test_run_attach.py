"""`flatout.attach()`, from inside a script or a notebook."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from observing import flatout_run, write

import flatout
from flatout import trace


def train(steps: int = 5) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        weight.square().sum().backward()
        optimizer.step()


def test_cells_of_a_notebook_are_recorded_from_attach_to_close(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)  # made in an earlier cell
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = flatout.attach(tmp_path)
    for _ in range(5):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    attachment.close()
    train()  # no longer recorded
    (rank,) = trace.read(tmp_path).ranks
    assert [step.kind for step in rank.steps].count("train") == 4
    assert {span.name for span in rank.steps[-2].spans} >= {"forward", "backward", "optimizer"}


def test_attaching_again_records_into_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with flatout.attach(tmp_path / name) as attachment:
            train()
        assert attachment.folder == tmp_path / name
        assert len(trace.read(tmp_path / name).ranks) == 1


def test_switched_off_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT", "off")
    with flatout.attach(tmp_path / "trace") as attachment:
        train()
    assert attachment.folder is None
    assert not (tmp_path / "trace").exists()


def test_under_flatout_run_there_is_one_recording(tmp_path: Path) -> None:
    write(
        tmp_path,
        train="""
        import flatout, torch
        print(flatout.attach().folder.name)
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            weight.sum().backward()
            optimizer.step()
        """,
    )
    run = flatout_run(tmp_path, sys.executable, "train.py")
    assert run.out == "trace\n", run.err
    assert len(run.observed.steps) == 3
    assert not (tmp_path / "flatout-runs").exists()


def test_a_forked_process_that_trains_gets_its_own_recording(tmp_path: Path) -> None:
    with flatout.attach(tmp_path / "trace"):
        train(3)
        child = multiprocessing.get_context("fork").Process(target=train, args=(6,))
        child.start()
        child.join(30)
    assert child.exitcode == 0
    mine, theirs = (trace.read(tmp_path / name).ranks[0] for name in ("trace", "trace-2"))
    assert [sum(s.kind in ("warmup", "train") for s in rank.steps) for rank in (mine, theirs)] == [3, 6]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="PyTorch has no reason to warn")
def test_what_pytorch_warns_of_names_the_line_that_it_names_without_us(tmp_path: Path) -> None:
    """GIVEN a recording, WHEN a loader is to pin memory for a GPU that is not there, THEN the warning is PyTorch's."""
    attachment = flatout.attach(tmp_path)
    with pytest.warns(UserWarning, match="no accelerator is found") as told:
        iter(torch.utils.data.DataLoader([0.0], pin_memory=True))
    attachment.close()
    assert [Path(warning.filename).name for warning in told] == ["dataloader.py"]


def test_importing_flatout_leaves_torch_alone() -> None:
    look = "import sys, flatout; flatout.attach; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", look], check=True)
    with pytest.raises(AttributeError, match="no attribute 'detach'"):
        flatout.detach  # noqa: B018


def train_and_fail() -> None:
    train()
    raise ZeroDivisionError


def test_a_with_block_ends_with_the_summary_of_what_it_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "here-2"):  # one that holds a recording is left as it is
        with flatout.attach("here"):
            train()
        assert f"Trace: {folder}\n" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), flatout.attach("here"):
        train_and_fail()
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith("Training ended after 5 steps: ZeroDivisionError at ")
    with flatout.attach("nothing"):
        pass
    assert capsys.readouterr().err == "flatout: nothing has trained: no call of torch.optim.Optimizer.step was seen\n"
