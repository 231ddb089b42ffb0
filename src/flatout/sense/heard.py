"""Whether the command has heard a signal by itself, so that it is not passed on to it a second time.

Who signals a whole process group cannot be told from who signals us alone. But Python writes the number of each signal
that it has a handler for into a file of one's choice: here into a pipe that the command inherits, unless it chooses
another (asyncio does). Standard library only: it is at work before torch is imported.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from collections.abc import Mapping

_VARIABLE = "FLATOUT_HEARD"
_LATELY_S = 1.0


class Heard:
    """Our end of the pipe; `write_end` is for the command to inherit, with this `environment`."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._when: dict[int, float] = {}  # each number was heard last

    @property
    def environment(self) -> dict[str, str]:
        return {_VARIABLE: f"{self.write_end} {os.fstat(self.write_end).st_ino}"}

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in what was written."""
        if select.select([self._read_end], [], [], timeout_s)[0]:
            now = time.monotonic()
            self._when |= dict.fromkeys(os.read(self._read_end, 1 << 16), now)

    def lately(self, number: int, within_s: float) -> bool:
        """Whether somebody in the command has heard this signal, or does within so long."""
        end_s = time.monotonic() + within_s
        while True:
            left_s = end_s - time.monotonic()
            self.listen(max(0.0, left_s))
            if time.monotonic() - self._when.get(number, -_LATELY_S) < _LATELY_S:
                return True
            if left_s <= 0:
                return False


def tell(environ: Mapping[str, str]) -> None:
    """In a Python process of the command: have what it hears written down."""
    descriptor, _, inode = environ.get(_VARIABLE, "").partition(" ")
    try:
        status = os.fstat(int(descriptor))
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):  # and not what has its number by now
            before = signal.set_wakeup_fd(int(descriptor), warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
    except (OSError, ValueError):  # not inherited, or not the main thread
        return
