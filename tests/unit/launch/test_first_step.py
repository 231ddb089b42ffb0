"""One line where no training step comes for a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.launch.launcher import FirstStep
from flatout.launch.protocol import REQUEST, is_asked
from flatout.trace import ProcessSample

WORKERS = tuple(ProcessSample(pid=n, role="worker", name="python", threads=16) for n in range(64))


def answered(folder: Path, **answers: str) -> None:
    for pid, doing in answers.items():
        (folder / f"{REQUEST}-{pid}").write_text(doing)


@pytest.mark.parametrize(
    ("answers", "doing"),
    [
        ({"p1": "train.py:3 main: sleep(9)", "p2": "helper.py:1 idle"}, "train.py:3 main: sleep(9); "),
        ({"p1": "train.py:9 → torch/multiprocessing/spawn.py join", "p2": "train.py:3 work"}, "train.py:3 work; "),
        ({"p1": "train.py:9 → multiprocessing/pool.py map"}, "train.py:9 → multiprocessing/pool.py map; "),
        ({}, ""),
    ],
)
def test_after_a_minute_it_asks_says_so_once_and_leaves_no_file(
    tmp_path: Path, answers: dict[str, str], doing: str
) -> None:
    first_step = FirstStep(tmp_path, began_s=100.0)
    assert first_step.look(159.0, WORKERS) is None
    assert not is_asked(tmp_path)
    assert first_step.look(160.0, WORKERS) is None
    assert is_asked(tmp_path)
    answered(tmp_path, **answers)
    text = first_step.look(164.0, WORKERS)
    assert text is not None
    assert text.startswith(f"no training step after 60 s; {doing}64 workers × 16 threads on ")
    assert first_step.look(400.0, WORKERS) is None
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_has_begun_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").touch()
    first_step = FirstStep(tmp_path, began_s=0.0, after_s=1.0)
    assert [first_step.look(now_s, WORKERS) for now_s in (1.0, 5.0)] == [None, None]
    assert not is_asked(tmp_path)


def test_a_command_that_ends_meanwhile_leaves_no_file(tmp_path: Path) -> None:
    first_step = FirstStep(tmp_path, began_s=0.0)
    first_step.look(60.0, ())
    answered(tmp_path, p1="train.py:3")
    first_step.close()
    assert list(tmp_path.iterdir()) == []
