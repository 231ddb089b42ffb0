"""Ranks that are started without torchrun: how they end, and what is shown of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def ranks(script: str, *, count: int = 2, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flatout.launch.launch_ranks", str(count), "sh", "-c", script]
    return subprocess.run(command, text=True, timeout=60, **({"stderr": subprocess.PIPE} | how))


def test_each_rank_knows_its_place_and_all_end_well() -> None:
    ended = ranks('echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE here, at $MASTER_ADDR" >&2')
    assert ended.returncode == 0
    places = [f"{rank} of 2, {rank} of 2 here, at 127.0.0.1" for rank in range(2)]
    assert sorted(ended.stderr.splitlines()) == places


@pytest.mark.timing
@pytest.mark.parametrize("dies", [0, 1])
def test_the_end_of_one_ends_the_others_and_its_code_is_the_whole_ones(dies: int) -> None:
    started = time.monotonic()
    ended = ranks(f"[ $RANK = {dies} ] && exit 3; exec sleep 50")
    assert ended.returncode == 3
    assert time.monotonic() - started < 20


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    os.mkfifo(held := tmp_path / "held")  # by the rank that dies, for as long as it lives
    ended = ranks(f"[ $RANK = 1 ] && {{ exec 3>{held}; kill -9 $$; }}; cat {held}; exit 1")
    assert ended.returncode == 128 + signal.SIGKILL
    assert ended.stderr == "flatout: rank 1 was killed by SIGKILL\n"


def test_what_ranks_say_alike_is_shown_once_and_what_one_repeats_is_not_held_back() -> None:
    ended = ranks('[ $RANK = 1 ] && sleep 0.5; echo "the same" >&2; [ $RANK = 0 ] && echo "the same" >&2; exit 2')
    assert ended.returncode == 2
    assert ended.stderr == "the same\n" * 2


def test_nobody_waits_for_an_stderr_that_takes_nothing() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ended = ranks("head -c 300000 /dev/zero | tr '\\0' '\\n' >&2", count=1, stderr=full)
    assert ended.returncode == 0


@pytest.mark.timing
def test_what_a_rank_leaves_running_does_not_hold_up_the_end() -> None:
    started = time.monotonic()
    ended = ranks("sleep 20 & exit 0", stderr=subprocess.DEVNULL)
    took_s = time.monotonic() - started
    subprocess.run(["pkill", "-f", "^sleep 20$"], check=False)
    assert ended.returncode == 0
    assert took_s < 10


def test_a_hangup_that_is_not_to_be_heard_is_not() -> None:
    hang_up = "kill -HUP $PPID; kill -HUP $$; exit 0"
    assert ranks(hang_up, count=1, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)).returncode == 0
