"""Starts the ranks of `flatout train --gpus N` on this machine, and ends as they do.

`python -m flatout.launch.launch_ranks N COMMAND…` does what torchrun does on one machine. Its exit
code is that of the first rank that failed, and a line that several ranks write to stderr is shown
once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

# How long the other ranks get when one has died: to write why, and to end after SIGTERM.
_EXPLAIN_S, _END_S = 5.0, 30.0
_SAME_LINE_S, _REMEMBERED = 5.0, 1_000  # apart; lines
_LAST_WORDS_S = 1.0
_PR_SET_PDEATHSIG = 1


def main(count: int, command: Sequence[str]) -> int:
    """Run the command as so many ranks; the exit code of the first that failed, 0 if none did."""
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
            signal.signal(number, pass_on)
    everywhere = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    for rank in range(count):
        env = {**os.environ, **everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, preexec_fn=end_with_parent))
    shown: dict[bytes, tuple[int, float]] = {}
    threads = []
    for index, process in enumerate(ranks):
        threads.append(threading.Thread(target=_show, args=(index, process.stderr, shown), daemon=True))
        threads[-1].start()
    code = _wait_for_ranks(ranks)
    for thread in threads:
        # A process that the rank started may hold its stderr open for longer.
        thread.join(_LAST_WORDS_S)
    return code


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks are gone. The death of one ends the others, which would wait for it."""
    code, died_at = 0, 0.0
    statuses: list[int | None] = [None]
    while None in statuses:
        statuses = [rank.poll() for rank in ranks]
        failed = [(status, number) for number, status in enumerate(statuses) if status]
        if failed and not code:
            # A rank that was killed explains the failures of those that waited for it.
            status, number = min(failed)
            code, died_at = status, time.monotonic()
            if status < 0:
                code = 128 - status
                print(f"flatout: rank {number} was killed by {signal.Signals(-status).name}", file=sys.stderr)
        if code and time.monotonic() - died_at > _EXPLAIN_S:
            for rank in ranks:
                if time.monotonic() - died_at > _EXPLAIN_S + _END_S:
                    rank.kill()
                else:
                    rank.terminate()
        time.sleep(0.05)
    return code


def _show(rank: int, stderr: IO[bytes], shown: dict[bytes, tuple[int, float]]) -> None:
    for line in stderr:
        first, when = shown.get(line, (rank, 0.0))
        if first == rank or time.monotonic() - when > _SAME_LINE_S:
            if len(shown) > _REMEMBERED:
                shown.clear()
            shown[line] = rank, time.monotonic()
            # The ranks must not wait for a full disk or a closed pipe.
            with contextlib.suppress(OSError):
                os.write(2, line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent() -> None:
    """Ask the system to tell this process when its parent is killed: a training then saves its state
    and ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
