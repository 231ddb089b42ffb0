"""What a fix kept, as edits of the person's own files: a unified diff, or the files themselves."""

from __future__ import annotations

import difflib
import itertools
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.files import write_whole
from flatout.model.errors import UsageError
from flatout.model.plan import Change

Outcome = Literal["passed", "failed", "undecided", "not tried"]
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")  # as git counts them


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    """Files before and after, and the `command` to train with then.

    The changes `by_plan` are made by lines that apply the plan; those `unwritten` are in no file.
    `tried` says what runs with it have shown, or why there were none.
    """

    file: Path  # where the diff goes
    files: dict[Path, tuple[bytes, bytes]]  # from the current folder on
    command: tuple[str, ...]
    by_plan: tuple[Change, ...] = ()
    unwritten: tuple[Change, ...] = ()
    outcome: Outcome = "not tried"
    tried: str = ""

    def diff(self) -> bytes:
        """For `git apply` in the current folder."""
        return b"".join(_diff(path, *texts) for path, texts in self.files.items())

    def write(self) -> list[Path]:
        """Edit the files, all or none. What they were goes into new files beside them, which are returned."""
        done: list[tuple[Path, bytes, Path]] = []
        try:
            for path, (before, after) in self.files.items():
                if path.read_bytes() != before:
                    raise UsageError(f"nothing was edited: {path} has changed meanwhile")
                backup = _free_name(path)
                done.append((path, before, backup))
                write_whole(backup, before, mode=path.stat().st_mode & 0o777)
                write_whole(path, after)
        except (OSError, UsageError) as problem:
            for path, before, backup in done:
                write_whole(path, before)
                backup.unlink(missing_ok=True)
            if isinstance(problem, UsageError):
                raise
            raise UsageError(f"nothing was edited: cannot write {path}: {problem.strerror}") from None
        return [backup for _, _, backup in done]


def why_not_in_git(files: Iterable[Path] = ()) -> str:
    """Why git could not give these files back as they are; empty where it could."""
    names = list(map(str, files))
    words = ["status", "--porcelain", "--ignored", "--", *names] if names else ["rev-parse"]
    try:
        answer = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except OSError:
        return "there is no git here"
    if answer.returncode:
        return "this folder is in no git repository"
    if answer.stdout:
        return f"git has no copy of {answer.stdout.splitlines()[0][3:]} as it is now: commit it"
    return ""


def _diff(path: Path, before: bytes, after: bytes) -> bytes:
    """With a tab behind names that have a space: git takes that for their end."""
    name = path.as_posix().encode()
    if b" " in name:
        name += b"\t"
    lines = difflib.diff_bytes(
        difflib.unified_diff, _LINES.findall(before), _LINES.findall(after), b"a/" + name, b"b/" + name
    )
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def _free_name(path: Path) -> Path:
    """FILE.orig, or FILE.orig-1 and so on: an earlier one stays."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
    names = (path.with_name(f"{path.name}.orig{number}") for number in numbers)
    return next(name for name in names if not name.exists())
