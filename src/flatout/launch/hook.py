"""`flatout hook`: a file in another Python that starts flatout there under `flatout run`, whatever
PYTHONPATH says.

Python runs the lines of `*.pth` files in site-packages as it starts, and from 3.15 on the functions named in
`*.start` files (PEP 829). Both name a function in `flatout_hook.py`, which does nothing unless `flatout run`
started the command.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flatout.files import write_whole
from flatout.launch.protocol import INJECTED
from flatout.model.errors import UsageError

OLDEST_PYTHON = (3, 10)
_MODULE = "flatout_hook"
HOOK = f"{_MODULE}.pth"
_PTH = f'import os; os.environ.get("FLATOUT_RUN") and __import__("{_MODULE}").start()\n'
_ASK = "import json, sys, sysconfig; print(json.dumps([sysconfig.get_path('purelib'), sys.version_info[:2]]))"
_PACKAGE = re.compile(r"^PACKAGE = (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Hook:
    """The hook's place in one Python, whether it is there or not."""

    site: Path

    @property
    def files(self) -> tuple[Path, Path, Path]:
        return self.site / f"{_MODULE}.py", self.site / HOOK, self.site / f"{_MODULE}.start"

    def install(self) -> None:
        """Write the files. The hook names this flatout: after it has moved, install it again."""
        code = (INJECTED / f"{_MODULE}.py").read_text(encoding="utf-8")
        code, count = _PACKAGE.subn(lambda _: f"PACKAGE = {str(INJECTED.parents[1])!r}", code)
        assert count == 1
        try:
            for path, text in zip(self.files, (code, _PTH, f"{_MODULE}:start\n"), strict=True):
                write_whole(path, text)
        except OSError as problem:
            raise UsageError(f"cannot write to {self.site}: {problem.strerror}") from None

    def remove(self) -> bool:
        """Delete the files; whether there were any."""
        there = [path for path in self.files if path.exists()]
        try:
            for path in there:
                path.unlink()
        except OSError as problem:
            raise UsageError(f"cannot remove {path}: {problem.strerror}") from None
        return bool(there)

    def package(self) -> Path | None:
        """The flatout that the installed hook starts; None where no hook is installed."""
        module, pth, _ = self.files
        if not module.exists() or not pth.exists():
            return None
        found = _PACKAGE.search(module.read_text(encoding="utf-8"))
        return None if found is None else Path(found[1].strip("'\""))


def hook_of(python: str) -> Hook:
    """The hook of a Python interpreter, which is asked where its site-packages are."""
    try:
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=30, check=True)
        site, version = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise UsageError(f"{python} is not a Python that runs") from None
    if tuple(version) < OLDEST_PYTHON:
        raise UsageError(f"{python} is Python {version[0]}.{version[1]}; flatout works in 3.10 and later")
    return Hook(Path(site))
