"""Whether the command has received a signal without us, so that it is not passed on a second time.

A signal to a whole process group looks like one to us alone. But Python can write the number of each signal
that it handles into a file: here into a pipe that the command inherits, unless the command uses another file
(asyncio does). Standard library only: this runs before torch is imported.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import stat
import time
from collections import Counter
from collections.abc import Mapping

_VARIABLE = "FLATOUT_HEARD"
_LISTENS = 0  # no signal: a process writes down what it receives
_LATELY_S = 1.0


class SignalsReceived:
    """Our end of the pipe; `write_end` is for the command to inherit, with this `environment`."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._received: list[tuple[int, float]] = []  # and when
        # Signals that we have passed on, and of which the command will write too.
        self._echoes: Counter[int] = Counter()
        self.listens = False  # whether a process writes down what it receives

    @property
    def environment(self) -> dict[str, str]:
        return {_VARIABLE: f"{self.write_end} {os.fstat(self.write_end).st_ino}"}

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in what was written."""
        now = time.monotonic()
        self._received = [(number, at_s) for number, at_s in self._received if now - at_s < _LATELY_S]
        if select.select([self._read_end], [], [], timeout_s)[0]:
            for number in os.read(self._read_end, 1 << 16):
                self.listens |= number == _LISTENS
                if self._echoes[number]:
                    self._echoes[number] -= 1
                else:
                    self._received.append((number, time.monotonic()))

    def lately(self, number: int, within_s: float) -> bool:
        """Whether a process of the command has received this signal in the last second, or does within `within_s`."""
        end_s = time.monotonic() + within_s
        while True:
            left_s = end_s - time.monotonic()
            self.listen(max(0.0, left_s))
            if any(seen == number for seen, _ in self._received):
                self._received = [(seen, at_s) for seen, at_s in self._received if seen != number]
                return True
            if left_s <= 0:
                return False

    def passed_on(self, number: int) -> None:
        """Note that the command gets this signal from us: what it writes of it is an echo."""
        self._echoes[number] += 1


def write_down(environ: Mapping[str, str]) -> None:
    """In a Python process of the command: have the signals that it receives written into the pipe.

    This process keeps a reading end too: without one, Python complains of a broken pipe when the launcher is
    gone.
    """
    descriptor, _, inode = environ.get(_VARIABLE, "").partition(" ")
    try:
        status = os.fstat(int(descriptor))
        # Another file may have got that descriptor number meanwhile.
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):
            ours = _under_high_number(int(descriptor))
            before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
                os.close(ours)
            else:
                reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                _under_high_number(reading)
                os.close(reading)
                os.write(ours, bytes([_LISTENS]))
    except (OSError, ValueError):  # not inherited, or not the main thread
        return


def _under_high_number(descriptor: int) -> int:
    """The same under a high number: a script that closes what it has inherited gets the low ones for its own
    files, and signals would be written into those."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, min(most, 1024) - 16))
