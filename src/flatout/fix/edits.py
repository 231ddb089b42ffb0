"""Edits of the person's own, made ready for a run: a command, and the files that are laid over the
person's there.

    patched   a unified diff, which git applies to copies of the files that it names
    copied    an edited copy of the current folder: its files that are not as they are here

None of the person's files is written: `launch.sandbox` lays the edited ones over them, in the run's own view.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flatout.files import write_whole
from flatout.launch import sandbox
from flatout.model.errors import UsageError
from flatout.model.inputs import is_folder

_NO_GIT = "a patch is applied by git, which is not installed here: install it, or edit a copy and give --with DIR"
_HUNK = re.compile(r"error: patch failed: (.+):(\d+)")
_MISSING = re.compile(r"error: (.+): No such file or directory")
_ERROR = re.compile(r"^error: (.*)", re.M)
# Not taken from a copy: what tools keep, and what flatout records.
_NO_SOURCES = {".git", "__pycache__", ".venv", "flatout-runs", "node_modules", ".mypy_cache", ".pytest_cache"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What a run has that the command as it is has not: another command, or files laid over the person's."""

    name: str
    command: tuple[str, ...]
    layer: Path | None = None  # see sandbox.FILES and sandbox.REMOVED


class _Base(NamedTuple):
    """Where the names in a patch begin, and how many folders to leave out of each."""

    folder: Path
    strip: int


def patched(patches: Sequence[Path], command: Sequence[str], layer: Path) -> Edit:
    """An edit that applies these patches, one after the other. Raises UsageError where one does not apply."""
    if shutil.which("git") is None:
        raise UsageError(_NO_GIT)
    files = layer / sandbox.FILES
    files.mkdir(parents=True)
    removed: dict[str, None] = {}
    for patch in patches:
        for target in _apply(patch, files, removed):
            copy = _in_layer(files, target)
            removed.pop(str(target), None)
            if not copy.exists():
                removed[str(target)] = None
    _write_removed(layer, removed)
    return Edit(name=" + ".join(map(str, patches)), command=tuple(command), layer=layer)


def copied(copy: Path, command: Sequence[str], layer: Path) -> Edit:
    """An edit that has the files of an edited copy of the current folder. What is not in the copy
    stays as it is."""
    here = Path.cwd()
    if not is_folder(copy):
        raise UsageError(f"--with {copy}: there is no such folder")
    if copy.resolve() == here.resolve():
        raise UsageError(f"--with {copy}: this is the current folder; give an edited copy of it")
    changed = [name for name in _files_in(copy) if not _is_equal(copy / name, here / name)]
    if not changed:
        raise UsageError(f"--with {copy}: no file in it differs from the one here")
    for name in changed:
        target = _in_layer(layer / sandbox.FILES, here / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(copy / name, target)
    _write_removed(layer, ())
    return Edit(name=str(copy), command=tuple(command), layer=layer)


# A patch


def _apply(patch: Path, files: Path, removed: dict[str, None]) -> list[Path]:
    """Apply a patch to copies of what it names, which lie in `files`; the files that it is about."""
    base, names = _base_of(patch)
    targets = [base.folder / name for name in names]
    while True:
        for target in targets:
            _take(target, _in_layer(files, target), removed)
        done = _git(patch, base.strip, ("--whitespace=nowarn",), _in_layer(files, base.folder))
        if not done.returncode:
            return targets
        # Of a file that is renamed, git lists the new name alone.
        missing = _MISSING.search(done.stderr)
        if missing is None or base.folder / missing[1] in targets:
            raise UsageError(f"{patch} does not apply: {_why_not(done.stderr)}")
        targets.append(base.folder / missing[1])


def _take(target: Path, copy: Path, removed: dict[str, None]) -> None:
    """Copy a file as it is now, with the patches before."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file() and not copy.exists() and str(target) not in removed:
        shutil.copy(target, copy)


def _base_of(patch: Path) -> tuple[_Base, list[str]]:
    """Where the names in a patch begin, and the names: where most of the files are there, the usual
    place first."""
    here = Path.cwd()
    folders = [here, *(folder for folder in here.parents if (folder / ".git").exists())][:2]
    best: tuple[int, _Base, list[str]] | None = None
    why_not = ""
    for base in (_Base(here, 1), _Base(here, 0), *(_Base(folder, 1) for folder in folders[1:])):
        listed = _git(patch, base.strip, ("--numstat", "-z"), here)
        if listed.returncode:
            why_not = why_not or _why_not(listed.stderr)
            continue
        names = _names_in(listed.stdout)
        if any(".." in Path(name).parts or Path(name).is_absolute() for name in names):
            raise UsageError(f"{patch} names a file outside the current folder: {names[0]}")
        there = sum((base.folder / name).is_file() for name in names)
        if best is None or there > best[0]:
            best = there, base, names
    if best is None:
        raise UsageError(f"{patch} is no patch that git can read: {why_not}")
    return best[1:]


def _names_in(numstat: str) -> list[str]:
    """The files that a patch is about, from `git apply --numstat -z`: lines added and removed, and
    the name."""
    return [entry.split("\t", 2)[2] for entry in filter(None, numstat.split("\0"))]


def _git(patch: Path, strip: int, options: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `git apply` in a folder as if it were in no repository, and without the person's own settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_DIR": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
    words = ["git", "apply", f"-p{strip}", *options, "--", str(patch.absolute())]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, errors="surrogateescape", check=False
    )


def _why_not(said: str) -> str:
    """One line for what git says: the file and the hunk, if it knows them."""
    hunk = _HUNK.search(said)
    if hunk is not None:
        return f"{hunk[1]} is not as the hunk at line {hunk[2]} expects it"
    errors = _ERROR.findall(said)
    return errors[0] if errors else (said.strip() or "git gives no reason")


# Files


def _files_in(folder: Path) -> Iterator[Path]:
    """The sources in a folder, relative to it."""
    for place, inside, names in os.walk(folder):
        inside[:] = [name for name in inside if name not in _NO_SOURCES]
        for name in names:
            path = Path(place, name)
            if path.is_file() and path.suffix != ".pyc":
                yield path.relative_to(folder)


def _is_equal(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other)


def _in_layer(files: Path, target: Path) -> Path:
    return files / target.relative_to("/")


def _write_removed(layer: Path, removed: Iterable[str]) -> None:
    layer.mkdir(parents=True, exist_ok=True)
    write_whole(layer / sandbox.REMOVED, "\0".join(removed).encode(errors="surrogateescape"))
