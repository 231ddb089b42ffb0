"""Every file flatout writes in one go is written here: whole, or not at all.

The content goes to a file that has no name yet, is forced to the disk, and takes the target's name in one
step. A full disk leaves what was there before, and so does a `kill -9`, which leaves no temporary file either
(but where the file system has no nameless files). Standard library only: any process may use it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

# For what may hold more than its owner would show: output, configs, plans.
PRIVATE = 0o600
_NEW = 0o666  # less what the umask takes
RUNS = "flatout-runs"  # the folder of all recordings, unless a person names another place
_IGNORE, _ALL = ".gitignore", "*\n"


def write_whole(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Write a file whole or not at all. Raises OSError, and then what was there is still there.

    Without a `mode` the file keeps the permissions it had, or gets those of any new file. What UTF-8 cannot
    hold, such as a file name in another encoding, is written as `?`.
    """
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    write_whole_by(path, lambda file: file.write(data), mode=mode)


def write_whole_by(path: Path, write: Callable[[IO[bytes]], object], *, mode: int | None = None) -> None:
    """As `write_whole`, for what is written piece by piece."""
    target = path.resolve() if path.is_symlink() else path  # a link stays a link
    exists = target.exists()
    if exists and not target.is_file():  # /dev/stdout, a pipe: nothing to replace
        with target.open("wb") as file:
            write(file)
        return
    scratch = target.with_name(f".flatout-{os.urandom(6).hex()}.part")
    handle, nameless = _open(scratch, _NEW if mode is None else mode)
    try:
        with os.fdopen(handle, "wb") as file:
            if exists and mode is None:
                os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
            write(file)
            file.flush()
            os.fsync(file.fileno())
            # The link needs a name of its own first: it cannot replace a file that exists.
            if nameless:
                unnamed = f"/proc/self/fd/{file.fileno()}"
                # Any source folder does; without one the link would not be followed.
                os.link(unnamed, scratch, src_dir_fd=file.fileno())
        scratch.replace(target)
        sync_folder(target.parent)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def make_recording_folder(folder: Path) -> None:
    """Make the folder of a recording. A new `flatout-runs` around it has git look away."""
    runs = folder.parent
    is_new = runs.name == RUNS and not runs.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if is_new:
        with contextlib.suppress(OSError):
            write_whole(runs / _IGNORE, _ALL)


def remove_if_empty(runs: Path) -> None:
    """Remove the folder of all recordings if there is none in it."""
    with contextlib.suppress(OSError):
        if [path.name for path in runs.iterdir()] == [_IGNORE] and (runs / _IGNORE).read_text() == _ALL:
            (runs / _IGNORE).unlink()
        runs.rmdir()


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where its file system knows of that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _open(scratch: Path, mode: int) -> tuple[int, bool]:
    """A new file to write to, and whether it has no name yet."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        Path("/proc/self/fd").stat()  # by which it gets its name
        return clear_of_standard(os.open(scratch.parent, flags | os.O_TMPFILE, mode)), True
    except (OSError, AttributeError):  # not on this file system, or not on this operating system
        return clear_of_standard(os.open(scratch, flags | os.O_CREAT | os.O_EXCL, mode)), False


def clear_of_standard(handle: int) -> int:
    """The same open file under a number that nobody takes for stdin, stdout or stderr.

    Where one of these is closed, the next file opened gets its number, and what is printed lands in it.
    """
    if handle > 2:
        return handle
    import fcntl  # not on every system

    try:
        return fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(handle)


def open_clear(path: str | Path, flags: int) -> int:
    """An `opener` of files that stay open in somebody else's process."""
    return clear_of_standard(os.open(path, flags, _NEW))
