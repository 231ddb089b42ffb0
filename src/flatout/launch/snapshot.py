"""The user's files before and after a trial: which of them were really written, created or removed.

What is near the top of a folder is read first, up to MOST_FILES and two seconds: results and code lie there,
data below. Other programs may write meanwhile. So three kinds of files do not count: what a process older
than the trial has open for writing, what lies beside that in its folder (another training's logs and
checkpoints), and what we could not have written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from flatout.launch import sandbox
from flatout.model.errors import OverlayError, RealWriteError

MOST_FILES = 50_000
MOST_ELSEWHERE = 20_000
_LONGEST_S = 2.0
# What Python compiled, and what another flatout records.
_CACHES = {"__pycache__", "flatout-runs"}
# Names in /dev/shm by which libraries pass data on.
_PASSING = ("torch_", "nccl-", "cuda.shm.", "sem.", "psm_", "pym-", "loky-", "joblib_", "__KMP_")

# For each name the figures that show a change of a file, or None for a folder.
Entries = dict[str, tuple[int, ...] | None]


class UsersFiles:
    """The user's files before a trial, to be compared after it."""

    _reported: ClassVar[set[str]] = set()  # files that changed during a trial: reported once

    def __init__(self, box: sandbox.Sandbox, *, overlay: bool) -> None:
        self._box, self._overlay = box, overlay
        but = [*box.keep, box.scratch, *sandbox.not_compared()]
        self._near = Snapshot(box.near, but=but)
        if overlay:  # which covers all but shared memory
            self._beyond: Snapshot = SharedMemory()
        else:
            self._beyond = Snapshot([str(Path.home().resolve()), *box.cover], but=but, others_work=True)

    def compare(self, say: Callable[[str], None]) -> None:
        """Raise where a trial has really written to them."""
        if self._overlay and (why := sandbox.refusal(self._box)):
            raise OverlayError(why)
        near, beyond = self._near.changed(), self._beyond.changed()
        others = [file for file in beyond if self._is_as_others_do(file)]
        self._note(others, "new or gone during a trial, by it or by another program", say)
        if self._overlay:
            # Not the trial wrote there, but a person, another program, or a service that the script called.
            self._note(near, "changed during a trial, and not by it", say)
            near = []
        if written := {*near, *beyond}.difference(others):
            raise RealWriteError(sorted(written))

    def _is_as_others_do(self, file: str) -> bool:
        """Whether it is what programs do all the time: make files elsewhere, and remove their shared
        memory."""
        own = tuple(f"{folder}/" for folder in (*self._box.near, Path.home().resolve()))
        gone_from_memory = file.startswith("/dev/shm/") and not os.path.lexists(file)
        return not file.startswith(own) and (gone_from_memory or not self._beyond.had(file))

    def _note(self, files: Sequence[str], what: str, say: Callable[[str], None]) -> None:
        new = [file for file in files if file not in self._reported]
        self._reported.update(new)
        if new:
            say(f"Note: {what} ({len(new)}): {', '.join(new[:5])}")


class Snapshot:
    """Files as they are now. `places`: folders to look at, `but` those in them that are left out.

    With `others_work` there is more going on in them than the trial: other repositories are left out, and the
    folders that older processes are in.
    """

    def __init__(self, places: Iterable[str], *, but: Sequence[str] = (), others_work: bool = False) -> None:
        self._places = list(dict.fromkeys(places))
        self._but = {*but}
        self._others_work = others_work
        self._began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._seen = self._read_folders(self._places, MOST_ELSEWHERE if others_work else MOST_FILES)

    def changed(self) -> list[str]:
        """The files that were changed, created or removed since; by their whole paths."""
        found = (path for folder, before in self._seen.items() for path in self._changed_in(folder, before))
        paths = [path for path in found if _is_writable(path)]
        return sorted(self._without_others_work(paths)) if paths else []

    def had(self, path: str) -> bool:
        """Whether this file was there when the snapshot was taken."""
        folder, name = os.path.split(path)
        return name in self._seen.get(folder, {})

    def _changed_in(self, folder: str, before: Entries) -> Iterable[str]:
        after = _entries(folder) or {}
        for name in before.keys() | after.keys():
            path = f"{folder}/{name}"
            if before.get(name, ()) == after.get(name, ()) or self._is_left_out(path):
                continue
            if after.get(name, ()) is not None:
                if name in after or before[name] is not None or not self._seen.get(path):
                    yield path  # of a folder that has gone its files are named
                continue
            inside = self._read_folders([path], MOST_FILES)  # a new one
            files = [f"{place}/{one}" for place, some in inside.items() for one, file in some.items() if file]
            yield from files or [path]

    def _read_folders(self, places: Iterable[str], most: int) -> dict[str, Entries]:
        """What lies in each folder, breadth first."""
        waiting, seen, until_s = deque(places), dict[str, Entries](), time.monotonic() + _LONGEST_S
        while waiting and most > 0 and time.monotonic() < until_s:
            folder = waiting.popleft()
            if folder in seen or self._is_left_out(folder):
                continue
            inside = _entries(folder, most)
            another_project = self._others_work and inside is not None and ".git" in inside
            if inside is not None and not (another_project and folder not in self._places):
                seen[folder] = inside
                most -= len(inside)
                waiting.extend(f"{folder}/{name}" for name, file in inside.items() if file is None)
        return seen

    def _is_left_out(self, path: str) -> bool:
        return path in self._but or os.path.basename(path) in _CACHES

    def _without_others_work(self, paths: Sequence[str]) -> list[str]:
        written, folders = _files_in_use(self._began_s)
        theirs = {os.path.dirname(path) for path in written}
        if self._others_work:
            theirs |= folders
        inside = tuple(f"{place}/" for place in self._places)
        theirs = {folder for folder in theirs - {*self._places} if folder.startswith(inside)}
        return [path for path in paths if path not in written and not theirs.intersection(_folders_of(path))]


class SharedMemory(Snapshot):
    """The files in /dev/shm as they are now: no overlay covers them, and new ones come and go all the
    time."""

    def __init__(self, folder: str = "/dev/shm") -> None:
        super().__init__([folder])

    def _read_folders(self, places: Iterable[str], most: int) -> dict[str, Entries]:
        return {folder: _entries(folder, most) or {} for folder in places}

    def _changed_in(self, folder: str, before: Entries) -> Iterable[str]:
        """Those that were changed or removed; not what libraries pass from process to process."""
        after = _entries(folder) or {}
        files = [name for name, file in before.items() if file is not None and not name.startswith(_PASSING)]
        return [f"{folder}/{name}" for name in files if after.get(name) != before[name]]


def _entries(folder: str, most: int = MOST_FILES) -> Entries | None:
    """What lies in a folder; None where it holds too much, or cannot be read."""
    found: Entries = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if len(found) >= most:
                return None
            if entry.is_dir(follow_symlinks=False):
                found[entry.name] = None
                continue
            with contextlib.suppress(FileNotFoundError):  # gone in between
                seen = entry.stat(follow_symlinks=False)
                found[entry.name] = (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
        return found
    return None


def _is_writable(path: str) -> bool:
    above = next(folder for folder in (*_folders_of(path), "/") if os.path.isdir(folder))
    return os.access(path, os.W_OK) or os.access(above, os.W_OK)


def _folders_of(path: str) -> Iterator[str]:
    while (path := os.path.dirname(path)) != "/":
        yield path


def _files_in_use(before_s: float) -> tuple[set[str], set[str]]:
    """What processes that are older have open for writing or share as memory, and the folders that
    they are in."""
    written, folders = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ticks = int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
            # The kernel gives the start in whole ticks.
            if (ticks + 1) / os.sysconf("SC_CLK_TCK") < before_s:
                folders.add(os.readlink(process / "cwd"))
                written |= {path.removesuffix(" (deleted)") for path in _written_by(process)}
    return written, folders


def _written_by(process: Path) -> Iterator[str]:
    for handle in (process / "fd").iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError):
            path = os.readlink(handle)
            if path.startswith("/") and not path.startswith(("/dev/pts", "/dev/null")):
                flags = (process / "fdinfo" / handle.name).read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    yield path
    for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].endswith("ws"):
            yield fields[5]
