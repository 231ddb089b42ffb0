"""A command that tells its launcher which signals it has heard is not disturbed when the launcher is gone."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from flatout.launch.protocol import SignalsReceived

SCRIPT = """
import os, signal, sys
from flatout.launch import protocol

signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
protocol.write_down_signals(os.environ)
print("ready", flush=True)
for _ in sys.stdin:
    os.kill(os.getpid(), signal.SIGUSR1)
"""


CLOSES = """
import os, signal
from flatout.launch import protocol

signal.signal(signal.SIGUSR1, lambda *_: None)
protocol.write_down_signals(os.environ)
os.closerange(3, 256)
logs = [open(f"log-{number}", "wb") for number in range(8)]
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_script_that_closes_what_it_inherits_has_no_signals_written_into_its_files(tmp_path: Path) -> None:
    launcher = SignalsReceived()
    environment = {**os.environ, **launcher.environment, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", CLOSES],
        env=environment,
        pass_fds=(launcher.write_end,),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    assert launcher.lately(signal.SIGUSR1, within_s=30)
    launcher.close()
    assert done.stderr == b""
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 8


def test_signals_are_told_and_without_a_launcher_they_make_no_noise() -> None:
    """GIVEN a script with a handler, WHEN its launcher is there and then is not, THEN it handles both signals, the
    launcher has heard of the first, and nothing is written to stderr."""
    launcher = SignalsReceived()
    environment = {**os.environ, **launcher.environment, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        pass_fds=(launcher.write_end,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    print(file=process.stdin, flush=True)
    assert process.stdout.readline() == "handled\n"
    assert launcher.lately(signal.SIGUSR1, within_s=30)
    launcher.close()  # as when it is killed
    out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out, err) == (0, "handled\n", "")


def test_a_command_ends_with_the_terminal_that_flatout_leads(tmp_path: Path) -> None:
    """GIVEN flatout as the terminal's first program (`ssh -t host flatout run …`), WHEN the terminal goes, THEN its
    command gets the SIGHUP that the kernel sends to flatout alone."""
    (tmp_path / "endless.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "flatout", "run", "--", sys.executable, "endless.py"])
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
