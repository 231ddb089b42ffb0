"""Training processes that flatout has not got into: they load PyTorch, and nothing there starts flatout.

PYTHONPATH brings flatout in. Python ignores it with -I or -E, and a script may replace it. `flatout hook
install` makes that Python start flatout all the same.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from flatout.launch.protocol import VARIABLE
from flatout.redact import redact_text
from flatout.sample.process import descendants

INJECTED = Path(__file__).parents[1] / "inside" / "path"  # what PYTHONPATH has to name
HOOK = "flatout_hook.pth"
OLDEST_PYTHON = (3, 10)
_TORCH = re.compile(r"\s(/\S*/lib/python(\d+)\.(\d+)/[^\n]*?)/torch/lib/libtorch")
_LOOK_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class LostProcesses:
    """Looks for them below a command, a few times in its first minute."""

    def __init__(self, root: int, started_s: float) -> None:
        self._root = root
        self._due = [started_s + after_s for after_s in _LOOK_AFTER_S]

    def look(self, now_s: float) -> str | None:
        """What to tell the person of the first that is found, with the way to cure it."""
        if not self._due or now_s < self._due[0]:
            return None
        self._due = [at_s for at_s in self._due if at_s > now_s]
        for pid in sorted({self._root, *descendants(self._root)}):
            try:
                text = _why_lost(Path(f"/proc/{pid}"))
            except OSError:  # it has ended, or is not ours
                continue
            if text is not None:
                self._due = []
                return f"process {pid} uses PyTorch and is not measured: {text}"
        return None


def _why_lost(process: Path) -> str | None:
    torch = _TORCH.search((process / "maps").read_text(errors="replace"))
    if torch is None:
        return None
    site, version = Path(torch[1]), (int(torch[2]), int(torch[3]))
    environment = _environment(process)
    if environment.get("FLATOUT") == "off":
        return None
    if version < OLDEST_PYTHON:
        return f"Python {version[0]}.{version[1]} is older than 3.10, the oldest that flatout works in"
    if VARIABLE not in environment:
        return f"it was started without the environment of the command: pass on {VARIABLE} and PYTHONPATH"
    flag = _ignores_pythonpath((process / "cmdline").read_bytes().decode(errors="replace").split("\0"))
    started_it = flag is None and str(INJECTED) in environment.get("PYTHONPATH", "").split(os.pathsep)
    if started_it or (site / HOOK).exists():
        return None
    cause = "PYTHONPATH was replaced for it"
    if flag is not None:
        cause = f"Python was started with {flag} and ignores PYTHONPATH"
    python = shlex.quote(redact_text(str(_python_of(site, process))))
    return f"{cause}. To have it measured: flatout hook install --python {python}"


def _environment(process: Path) -> dict[str, str]:
    """The environment a process was started with."""
    entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def _ignores_pythonpath(command: Sequence[str]) -> str | None:
    """The option by which this Python does without PYTHONPATH, if there is one."""
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            return None
        if word in ("-W", "-X"):  # the next word belongs to it
            next(words, None)
        elif not word.startswith(("-W", "-X", "--")):
            for letter in "IE":
                if letter in word:
                    return f"-{letter}"
    return None


def _python_of(site: Path, process: Path) -> Path:
    """The interpreter of the environment that has this torch."""
    for folder in site.parents:
        if (folder / "bin" / "python").exists():
            return folder / "bin" / "python"
    return (process / "exe").readlink()
