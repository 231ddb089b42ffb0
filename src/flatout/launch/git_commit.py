"""Which commit a command ran at, read from `.git` by hand: starting git would take longer, and it may not be there."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def commit_here() -> str | None:
    """The commit that is checked out around the current folder; None where there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        here = Path.cwd()
        for folder in (here, *here.parents):
            if (folder / ".git").exists():
                found = _commit_in(_git_folder(folder / ".git"))
                return found if _COMMIT.fullmatch(found) else None
    return None


def _git_folder(marker: Path) -> Path:
    """Of a worktree and of a submodule, `.git` is a file that names it."""
    if marker.is_dir():
        return marker
    return marker.parent / marker.read_text(encoding="utf-8").removeprefix("gitdir:").strip()


def _commit_in(git: Path) -> str:
    """What HEAD stands for: a commit, or a branch. A worktree shares the branches of its repository."""
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    branch, shared = head.removeprefix("ref: "), git
    if (git / "commondir").exists():
        shared = git / (git / "commondir").read_text(encoding="utf-8").strip()
    if (shared / branch).is_file():
        return (shared / branch).read_text(encoding="utf-8").strip()
    packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.partition(" ")[0] for line in packed if line.endswith(f" {branch}")), "")
