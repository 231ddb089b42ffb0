"""Where no overlay can be mounted: Python's own ways of writing go to a copy in the scratch folder.

A path under a covered folder has a shadow in the scratch folder. What is written goes to the shadow (a file that is
appended to is copied there first), what is removed is marked as removed, and what is read comes from the shadow where
there is one. The marks are files, so that all processes of the command agree. Writers in C that open files by
themselves are not caught, but for torch.save and safetensors; launch compares the folders afterwards and says so.
Standard library only: it is at work before torch is imported.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import io
import os
import pathlib
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any

from flatout.sandbox import Sandbox

_open, _stat, _lstat, _scandir = io.open, os.stat, os.lstat, os.scandir
_mkdir, _remove, _rmdir, _rmtree = os.mkdir, os.remove, os.rmdir, shutil.rmtree
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Shadows:
    """Where a path is to be found, for reading and for writing; and what becomes of calls on covered paths.

    A `name` is a covered path as `of` gives it: absolute.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._cover = tuple(folder.rstrip("/") + "/" for folder in sandbox.cover)
        self._keep = tuple(folder.rstrip("/") + "/" for folder in (*sandbox.keep, sandbox.scratch))
        self._shadows = f"{sandbox.scratch}/shadow"
        self._removed = f"{sandbox.scratch}/removed"

    def of(self, path: Any) -> str | None:
        """The absolute path, where it is one of those that are covered."""
        if isinstance(path, int) or path is None:
            return None
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        inside = (name + "/").startswith
        return name if any(map(inside, self._cover)) and not any(map(inside, self._keep)) else None

    def read(self, path: Any) -> Any:
        """Where to read it from."""
        name = self.of(path)
        if name is None:
            return path
        shadow = self._shadows + name
        return shadow if _exists(shadow) or self._is_removed(name) else path

    def write(self, path: Any, *, copy: bool = False, new: bool = False) -> Any:
        """Where to write it to; `copy` brings what is there along, `new` refuses to where something is."""
        name = self.of(path)
        if name is None:
            return path
        if new and self._sees(name, _exists):
            raise _problem(errno.EEXIST, name)
        shadow = self._shadows + name
        if not _exists(shadow):
            if self._sees(os.path.dirname(name), _is_folder):  # noqa: PTH120
                _make_folders(os.path.dirname(shadow))  # noqa: PTH120
            if copy and os.path.isfile(name) and not self._is_removed(name):  # noqa: PTH113
                shutil.copyfile(name, shadow)
        return shadow

    def mkdir(self, name: str, mode: int = 0o777) -> None:
        """Make a folder that only the script sees."""
        _mkdir(self.write(name, new=True), mode)

    def remove(self, name: str, how: Callable[[str], None] = _remove) -> None:
        """Remove what the script sees under this name; from now on the user's own is not to be seen."""
        if not self._sees(name, _exists):
            raise _problem(errno.ENOENT, name)
        if _exists(self._shadows + name):
            how(self._shadows + name)
        if _exists(name):
            _make_folders(f"{self._removed}{name}")
            with _open(f"{self._removed}{name}/.removed", "w"):
                pass

    def rmdir(self, name: str) -> None:
        """Remove a folder in which the script sees nothing."""
        if any(True for _ in self._entries(name)):
            raise _problem(errno.ENOTEMPTY, name)
        self.remove(name, _rmdir)

    def rmtree(self, name: str, ignore_errors: bool = False, *_: Any, **__: Any) -> None:
        """Remove a folder with all that the script sees in it."""
        if self._sees(name, _exists) or not ignore_errors:
            self.remove(name, lambda shadow: _rmtree(shadow, ignore_errors))

    def move(self, source: Any, target: Any) -> None:
        """Move what the script sees, of which at least one end is covered."""
        there = self.write(target)
        if _is_folder(self.read(source)):
            shutil.copytree(source, there, dirs_exist_ok=True)  # through our own eyes: the user's and the shadow's
            shutil.rmtree(source)
        else:
            shutil.copyfile(source, there)
            os.remove(source)  # noqa: PTH107

    def scandir(self, name: str) -> Any:
        """What lies in a folder, as the script sees it."""
        if not self._sees(name, _is_folder):
            return _scandir(self.read(name))  # raises what it should
        return _Listing(self._entries(name))

    def listdir(self, name: str) -> list[str]:
        """The names in a folder, as the script sees it."""
        return [entry.name for entry in self.scandir(name)]

    def _entries(self, name: str) -> Iterator[Any]:
        seen = set()
        if _is_folder(self._shadows + name):
            for entry in _scandir(self._shadows + name):
                seen.add(entry.name)
                yield entry
        if _is_folder(name) and not self._is_removed(name):
            for entry in _scandir(name):
                if entry.name not in seen and not self._is_removed(f"{name}/{entry.name}"):
                    yield entry

    def _sees(self, name: str, is_there: Callable[[str], bool]) -> bool:
        """Whether there is such a thing, or such a folder, as the script sees it."""
        return is_there(self._shadows + name) or (is_there(name) and not self._is_removed(name))

    def _is_removed(self, name: str) -> bool:
        """Whether this, or a folder it lies in, has been removed (what came there later lies in the shadow)."""
        mark = self._removed
        for part in name.split("/")[1:]:
            mark = f"{mark}/{part}"
            if not _exists(mark):
                return False
            if _exists(f"{mark}/.removed"):
                return True
        return False


class _Listing(contextlib.nullcontext[Iterator[Any]]):
    """What os.scandir gives: to be iterated over, a context, and closed; nothing is held open."""

    def __iter__(self) -> Iterator[Any]:
        return self.enter_result

    def __next__(self) -> Any:
        return next(self.enter_result)

    def close(self) -> None:
        """Nothing is held open."""


def install(sandbox: Sandbox) -> None:
    """Redirect what this process writes from now on."""
    shadows = Shadows(sandbox)
    builtins.open = io.open = _open_redirected(shadows)
    os.open = _os_open_redirected(shadows)
    for name in ("stat", "lstat", "access", "readlink", "listxattr", "getxattr"):
        setattr(os, name, _elsewhere(getattr(os, name), shadows.read))
    for name in ("truncate", "chmod", "utime", "setxattr"):
        setattr(os, name, _elsewhere(getattr(os, name), functools.partial(shadows.write, copy=True)))
    for name in ("listdir", "scandir", "mkdir", "remove", "rmdir"):
        setattr(os, name, _instead(getattr(os, name), shadows, getattr(shadows, name)))
    os.unlink = os.remove
    shutil.rmtree = _instead(_rmtree, shadows, shadows.rmtree)
    os.rename = os.replace = _moving(os.rename, shadows)
    for name in ("symlink", "link"):
        setattr(os, name, _with_second(getattr(os, name), shadows.write))
    accessor: Any = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 holds on to the functions it found
    for name in ("stat", "open", "listdir", "scandir", "mkdir", "unlink", "rmdir", "rename", "replace", "chmod"):
        if accessor is not None:
            setattr(accessor, name, staticmethod(io.open if name == "open" else getattr(os, name)))


def redirect_torch(torch: Any, sandbox: Sandbox) -> None:
    """torch.save opens its file in C++."""
    shadows = Shadows(sandbox)
    save = torch.save

    @functools.wraps(save)
    def save_redirected(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return save(obj, shadows.write(f) if isinstance(f, str | os.PathLike) else f, *args, **kwargs)

    torch.save = torch.serialization.save = save_redirected


def redirect_safetensors(module: Any, sandbox: Sandbox) -> None:
    """safetensors reads and writes its files in Rust."""
    shadows = Shadows(sandbox)
    save, load = module.save_file, module.load_file
    module.save_file = lambda tensors, filename, *a, **k: save(tensors, shadows.write(filename), *a, **k)
    module.load_file = lambda filename, *a, **k: load(shadows.read(filename), *a, **k)


def _open_redirected(shadows: Shadows) -> Any:
    @functools.wraps(_open)
    def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        where = shadows.write(file, copy="w" not in mode, new="x" in mode) if writes else shadows.read(file)
        return _open(where, mode, *args, **kwargs)

    return redirected


def _os_open_redirected(shadows: Shadows) -> Any:
    os_open = os.open

    @functools.wraps(os_open)
    def redirected(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            return os_open(path, flags, mode, dir_fd=dir_fd)
        if flags & _WRITING:
            path = shadows.write(path, copy=not flags & os.O_TRUNC, new=bool(flags & os.O_EXCL))
        else:
            path = shadows.read(path)
        return os_open(path, flags, mode)

    return redirected


def _elsewhere(function: Any, find: Callable[[Any], Any]) -> Any:
    """The same, on another path; one that is relative to an open folder is left alone."""

    @functools.wraps(function)
    def redirected(path: Any, *args: Any, **kwargs: Any) -> Any:
        return function(path if kwargs.get("dir_fd") is not None else find(path), *args, **kwargs)

    return redirected


def _instead(function: Any, shadows: Shadows, covered: Callable[..., Any]) -> Any:
    """The same, but for a covered path something else; one that is relative to an open folder is left alone."""

    @functools.wraps(function)
    def redirected(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        name = shadows.of(path) if kwargs.get("dir_fd") is None else None
        if name is None:
            return function(path, *args, **kwargs)
        kwargs.pop("dir_fd", None)
        return covered(name, *args, **kwargs)

    return redirected


def _moving(rename: Any, shadows: Shadows) -> Any:
    @functools.wraps(rename)
    def redirected(src: Any, dst: Any, **how: Any) -> None:
        covered = shadows.of(src) or shadows.of(dst)
        shadows.move(src, dst) if covered else rename(src, dst, **how)

    return redirected


def _with_second(function: Any, find: Callable[[Any], Any]) -> Any:
    @functools.wraps(function)
    def redirected(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        return function(src, find(dst), *args, **kwargs)

    return redirected


def _problem(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)


def _exists(name: str) -> bool:
    try:
        _lstat(name)
    except OSError:
        return False
    return True


def _is_folder(name: str) -> bool:
    try:
        return stat.S_ISDIR(_stat(name).st_mode)
    except OSError:
        return False


def _make_folders(name: str) -> None:
    if not _is_folder(name):
        _make_folders(os.path.dirname(name))  # noqa: PTH120
        try:
            _mkdir(name)
        except FileExistsError:
            pass  # another process was quicker
