"""One sampler for everything outside the training process: the GPUs, the machine, the training's processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flatout.model.errors import UsageError
from flatout.sample.gpu import Gpus
from flatout.sample.host import host_of
from flatout.sample.process import Proc, Tree, find_trainings
from flatout.trace import Sample

_FIND_TRAININGS_EVERY_S = 10.0
# GPM allows 8 Hz; at 4 a load switched every 2 s is still seen within a few per cent.
PULSE_EVERY_S = 0.25


class Sampler:
    """Call `read` at the pace you want, and `pulse` every PULSE_EVERY_S in between; `close` when done.

    Without `pids` it follows the processes that hold memory on the GPUs, or else those that have loader
    workers. `root` and `nvml` are for tests with recorded data.
    """

    def __init__(
        self,
        *,
        gpus: Sequence[int] | None = None,
        pids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
        nvml: Any = None,
    ) -> None:
        self._proc = Proc(root / "proc")
        for pid in pids:
            if not self._proc.has(pid):
                raise UsageError(f"there is no process {pid}")
        self.notes: list[str] = []
        self._clock = clock
        self._root = root
        self._pids = tuple(pids)
        self._found: tuple[int, ...] = ()
        self._found_s = float("-inf")
        self._read_s: float | None = None
        self._gpus = Gpus(gpus, self._note, nvml)
        self._host = host_of(root)
        self._tree = Tree(root)

    def pulse(self) -> None:
        """Look at the GPUs' activity only; it comes out as `GpuSample.pulses` of the next read."""
        self._gpus.pulse(self._clock())

    def due(self, interval_s: float) -> bool:
        """Whether a read is due, when one wants them `interval_s` apart."""
        return self._read_s is None or self._clock() - self._read_s >= interval_s - 0.01

    def read(self) -> Sample:
        """Everything since the last read. The first one has levels, but no rates yet."""
        now_s = self._clock()
        gpus = self._gpus.read(now_s)
        holders = {process.pid for gpu in gpus for process in gpu.processes or ()}
        before_s = now_s if self._read_s is None else self._read_s
        sample = Sample(
            time_s=now_s,
            interval_s=now_s - before_s,
            host=self._host.read(now_s),
            gpus=gpus,
            processes=self._tree.read(now_s, self._followed(now_s, holders), holders),
        )
        self._read_s = now_s
        return sample

    def close(self) -> None:
        """Let go of the driver."""
        self._gpus.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _followed(self, now_s: float, holders: set[int]) -> tuple[int, ...]:
        if self._pids:
            return self._pids
        seen = sorted(filter(self._proc.has, holders))
        if seen:
            return tuple(seen)
        if holders:
            self._note("the processes that use the GPUs are not to be seen here: looking for loader workers instead")
        if now_s - self._found_s >= _FIND_TRAININGS_EVERY_S:
            self._found_s = now_s
            self._found = find_trainings(self._root)
        return self._found

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
