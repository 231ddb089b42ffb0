"""Where no training step comes for a minute: one line that says what the processes of a command are doing.

The launcher leaves a request in the trace folder. A process that may train answers it with the line of the script that
it is at; one that runs no line of the user's, such as torchrun's agent, is silent. None of these files stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flatout.launch.protocol import REQUEST
from flatout.model.formatting import count_of
from flatout.sample import budget
from flatout.trace import ProcessSample

ASK_AFTER_S = 60.0
_ANSWERED_WITHIN_S = 3.0  # processes look once a second whether they are asked
_WAITS_FOR_ANOTHER = ("→ multiprocessing/", "→ torch/multiprocessing/", "→ subprocess.py")


class FirstStep:
    """Asks once, where a command that began at `began_s` has taken no step after so many seconds."""

    def __init__(self, folder: Path, began_s: float, after_s: float = ASK_AFTER_S) -> None:
        self._folder = folder
        self._after_s, self._ask_at_s = after_s, began_s + after_s
        self._asked = self._over = False

    def look(self, now_s: float, processes: Sequence[ProcessSample]) -> str | None:
        """What to tell the person, once; `processes` are those of the command."""
        if self._over or now_s < self._ask_at_s:
            return None
        self._over = any(self._folder.glob("rank-*.jsonl"))
        if not self._over and not self._asked:
            self._asked = True
            with suppress(OSError):
                (self._folder / REQUEST).touch()
        if self._over or now_s < self._ask_at_s + _ANSWERED_WITHIN_S:
            return None
        parts = [f"no training step after {self._after_s:.0f} s", _likeliest(self._answers()), _load(processes)]
        self.close()
        return "; ".join(filter(None, parts))

    def close(self) -> None:
        """Ask no more, and leave no file."""
        self._over = True
        for file in self._folder.glob(f"{REQUEST}*"):
            file.unlink(missing_ok=True)

    def _answers(self) -> list[str]:
        """Those of the processes, the one that started first before the others."""
        files = sorted(self._folder.glob(f"{REQUEST}-*"))
        return [file.read_text(encoding="utf-8") for file in files]


def _likeliest(answers: Sequence[str]) -> str:
    """What training itself is doing: a process that only waits for those it has started is not it."""
    at_work = [one for one in answers if not any(wait in one for wait in _WAITS_FOR_ANOTHER)]
    return next(iter([*at_work, *answers]), "")


def _load(processes: Sequence[ProcessSample]) -> str:
    """Workers and their threads, or else all threads, against the cores that there are."""
    cores = count_of(round(budget.measure().cores_allowed), "core")
    workers = [process for process in processes if process.role == "worker"]
    if workers:
        threads = max(process.threads or 1 for process in workers)
        return f"{count_of(len(workers), 'worker')} × {count_of(threads, 'thread')} on {cores}"
    threads = sum(process.threads or 1 for process in processes)
    return f"{count_of(threads, 'thread')} on {cores}" if threads else ""
