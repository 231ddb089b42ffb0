"""What py-spy writes, as exact lines: which threads count, and what is left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout.launch.exact_lines import find_py_spy, main_threads
from flatout.model.errors import UsageError

TRAIN = "<module> (/home/ann/train.py:20);metric (/home/ann/train.py:7)"
TORCH = "/lib/python3.12/site-packages/torch/utils/data"
IN_WORKER = f"<module> (/home/ann/train.py:9);_worker_loop ({TORCH}/_utils/worker.py:340);decode (/home/ann/data.py:4)"


def test_the_main_thread_of_the_rank_and_those_of_its_workers_are_counted() -> None:
    training, workers = main_threads(
        [
            f'process 7:"python train.py";thread (7): MainThread;{TRAIN} 12\n',
            f'process 7:"python -c a = 1; b = 2";thread (7): MainThread;{TRAIN} 3\n',
            f'process 7:"python train.py";thread (8): QueueFeederThread;{TRAIN} 100\n',
            f'process 7:"python train.py";process 9:"python train.py";thread (9): MainThread;{IN_WORKER} 5\n',
            f'process 7:"python train.py";process 9:"python train.py";thread (11): Thread-1;{IN_WORKER} 100\n',
            f'process 7:"python train.py";process 10:"python train.py";thread (10): MainThread;{IN_WORKER} 2\n',
            f'process 7:"python train.py";process 12:"python other.py";thread (12): MainThread;{TRAIN} 100\n',
        ],
        rank_pid=7,
    )
    assert training == {(("<module>", "/home/ann/train.py", 20), ("metric", "/home/ann/train.py", 7)): 15}
    assert workers == {(("decode", "/home/ann/data.py", 4),): 7}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "12",
        f"thread (7): MainThread;{TRAIN}",
        f"thread (7): MainThread;{TRAIN} 1" + "0" * 5000,
        f"thread (7): MainThread;{TRAIN} -3",
        f"thread (seven): MainThread;{TRAIN} 3",
        f'process 7:"python train.py";{TRAIN} 3',
        "\0\xff 3",
    ],
)
def test_a_damaged_line_is_left_out(line: str) -> None:
    assert main_threads([line], rank_pid=7) == ({}, {})


def test_without_py_spy_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=r"needs the program py-spy, .* pip install 'flatout\[exact\]'"):
        find_py_spy()
    (tmp_path / "py-spy").touch(mode=0o755)
    assert find_py_spy() == str(tmp_path / "py-spy")
