"""Whether the command has heard a signal by itself, so that it is not passed on to it a second time.

Who signals a whole process group cannot be told from who signals us alone. But Python writes the number of each signal
that it has a handler for into a file of one's choice: here into a pipe that the command inherits, unless it chooses
another (asyncio does). Standard library only: it is at work before torch is imported.
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
_HERE = 0  # no signal: somebody listens
_LATELY_S = 1.0


class SignalsReceived:
    """Our end of the pipe; `write_end` is for the command to inherit, with this `environment`."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._heard: list[tuple[int, float]] = []  # and when
        self._echoes: Counter[int] = Counter()  # of what we have passed on ourselves, still to come
        self.listens = False  # somebody does

    @property
    def environment(self) -> dict[str, str]:
        return {_VARIABLE: f"{self.write_end} {os.fstat(self.write_end).st_ino}"}

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in what was written."""
        now = time.monotonic()
        self._heard = [(number, at_s) for number, at_s in self._heard if now - at_s < _LATELY_S]
        if select.select([self._read_end], [], [], timeout_s)[0]:
            for number in os.read(self._read_end, 1 << 16):
                self.listens |= number == _HERE
                if self._echoes[number]:
                    self._echoes[number] -= 1
                else:
                    self._heard.append((number, time.monotonic()))

    def lately(self, number: int, within_s: float) -> bool:
        """Whether somebody in the command has heard this signal, or does within so long."""
        end_s = time.monotonic() + within_s
        while True:
            left_s = end_s - time.monotonic()
            self.listen(max(0.0, left_s))
            if any(heard == number for heard, _ in self._heard):
                self._heard = [(heard, at_s) for heard, at_s in self._heard if heard != number]
                return True
            if left_s <= 0:
                return False

    def passed_on(self, number: int) -> None:
        """It is about to hear this from us."""
        self._echoes[number] += 1


def tell(environ: Mapping[str, str]) -> None:
    """In a Python process of the command: have what it hears written down, and nothing said when nobody reads that any
    more: Python would complain of a broken pipe at each signal, so this process keeps a reading end itself."""
    descriptor, _, inode = environ.get(_VARIABLE, "").partition(" ")
    try:
        status = os.fstat(int(descriptor))
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):  # and not what has its number by now
            ours = _out_of_the_way(int(descriptor))
            before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
                os.close(ours)
            else:
                reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                _out_of_the_way(reading)
                os.close(reading)
                os.write(ours, bytes([_HERE]))
    except (OSError, ValueError):  # not inherited, or not the main thread
        return


def _out_of_the_way(descriptor: int) -> int:
    """The same under a high number: a script that closes what it has inherited gets the low ones for its own files, and
    signals would be written into those."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, min(most, 1024) - 16))
