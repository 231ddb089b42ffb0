"""Where no overlay can be mounted: Python's own ways of writing go to a copy in the scratch folder.

A path under a covered folder has a shadow in the scratch folder. What is written goes to the shadow (a file that is
appended to is copied there first), what is removed is marked as removed, and what is read comes from the shadow where
there is one. The marks are files, so that all processes of the command agree. Writers in C that open files by
themselves are not caught, but for torch.save and safetensors; launch compares the folders afterwards and says so.
Standard library only: it is at work before torch is imported.
"""

from __future__ import annotations

import builtins
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

_open, _stat, _lstat, _mkdir, _remove, _scandir = io.open, os.stat, os.lstat, os.mkdir, os.remove, os.scandir
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Shadows:
    """Where a path is to be found, for reading and for writing."""

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

    def shadow(self, name: str) -> str:
        """Where what is written under this name goes."""
        return self._shadows + name

    def is_removed(self, name: str) -> bool:
        """Whether this, or a folder it lies in, has been removed (what came there later lies in the shadow)."""
        mark = self._removed
        for part in name.split("/")[1:]:
            mark = f"{mark}/{part}"
            if not _exists(mark):
                return False
            if _exists(f"{mark}/.removed"):
                return True
        return False

    def mark_removed(self, name: str) -> None:
        """From now on the user's own is not to be seen."""
        if _exists(name):
            _make_folders(f"{self._removed}{name}")
            with _open(f"{self._removed}{name}/.removed", "w"):
                pass

    def read(self, path: Any) -> Any:
        """Where to read it from."""
        name = self.of(path)
        if name is None:
            return path
        shadow = self.shadow(name)
        return shadow if _exists(shadow) or self.is_removed(name) else path

    def write(self, path: Any, *, copy: bool = False) -> Any:
        """Where to write it to; `copy` brings what is there along."""
        name = self.of(path)
        if name is None:
            return path
        shadow = self.shadow(name)
        above = os.path.dirname(name)  # noqa: PTH120
        if not _exists(shadow):
            if self.has_folder(above):
                _make_folders(os.path.dirname(shadow))  # noqa: PTH120
            if copy and os.path.isfile(name) and not self.is_removed(name):  # noqa: PTH113
                shutil.copyfile(name, shadow)
        return shadow

    def has_folder(self, name: str) -> bool:
        """Whether there is such a folder, as the script sees it."""
        return _is_folder(self.shadow(name)) or (_is_folder(name) and not self.is_removed(name))

    def exists(self, name: str) -> bool:
        """Whether there is such a thing, as the script sees it."""
        return _exists(self.shadow(name)) or (_exists(name) and not self.is_removed(name))

    def remove(self, name: str, how: Callable[[str], None]) -> None:
        """Remove what the script sees under this name."""
        if not self.exists(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if _exists(self.shadow(name)):
            how(self.shadow(name))
        self.mark_removed(name)

    def move(self, source: Any, target: Any) -> None:
        """Move what the script sees, of which at least one end is covered."""
        there, name = self.write(target), self.of(source)
        if _is_folder(self.read(source)):
            shutil.copytree(source, there, dirs_exist_ok=True)  # through our own eyes: the user's and the shadow's
            shutil.rmtree(source)
            return
        shutil.copyfile(source, there)
        os.remove(source) if name is None else self.remove(name, _remove)  # noqa: PTH107

    def listing(self, name: str) -> Iterator[Any]:
        """The entries of a folder, as the script sees it."""
        seen = set()
        if _is_folder(self.shadow(name)):
            for entry in _scandir(self.shadow(name)):
                seen.add(entry.name)
                yield entry
        if _is_folder(name) and not self.is_removed(name):
            for entry in _scandir(name):
                if entry.name not in seen and not self.is_removed(f"{name}/{entry.name}"):
                    yield entry


def install(sandbox: Sandbox) -> None:
    """Redirect what this process writes from now on."""
    shadows = Shadows(sandbox)
    _opening(shadows)
    _looking(shadows)
    _changing(shadows)
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


def _opening(shadows: Shadows) -> None:
    os_open = os.open

    @functools.wraps(_open)
    def open_redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if any(letter in mode for letter in "wax+"):
            name = shadows.of(file)
            if "x" in mode and name is not None and shadows.exists(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            return _open(shadows.write(file, copy="w" not in mode), mode, *args, **kwargs)
        return _open(shadows.read(file), mode, *args, **kwargs)

    @functools.wraps(os_open)
    def os_open_redirected(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            return os_open(path, flags, mode, dir_fd=dir_fd)
        name = shadows.of(path)
        if flags & os.O_EXCL and name is not None and shadows.exists(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        where = shadows.write(path, copy=not flags & os.O_TRUNC) if flags & _WRITING else shadows.read(path)
        return os_open(where, flags, mode)

    builtins.open = io.open = open_redirected
    os.open = os_open_redirected


def _looking(shadows: Shadows) -> None:
    listdir = os.listdir
    for name in ("stat", "lstat", "access", "readlink", "listxattr", "getxattr"):
        setattr(os, name, _with_path(getattr(os, name), shadows.read))

    @functools.wraps(listdir)
    def list_folder(path: Any = ".") -> list[Any]:
        name = shadows.of(path)
        return listdir(path) if name is None else [entry.name for entry in scan_folder(path)]

    @functools.wraps(_scandir)
    def scan_folder(path: Any = ".") -> Any:
        name = shadows.of(path)
        if name is None:
            return _scandir(path)
        if not shadows.has_folder(name):
            return _scandir(shadows.read(path))  # raises what it should
        return _Listing(shadows.listing(name))

    os.listdir, os.scandir = list_folder, scan_folder


def _changing(shadows: Shadows) -> None:
    originals = {name: getattr(os, name) for name in ("remove", "rmdir", "rename", "symlink", "link")}
    rmtree = shutil.rmtree

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        name = shadows.of(path) if dir_fd is None else None
        if name is None:
            _mkdir(path, mode, dir_fd=dir_fd)
            return
        if shadows.exists(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        _mkdir(shadows.write(path), mode)

    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        name = shadows.of(path) if dir_fd is None else None
        if name is None:
            originals["remove"](path, dir_fd=dir_fd)
        else:
            shadows.remove(name, originals["remove"])

    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        name = shadows.of(path) if dir_fd is None else None
        if name is None:
            originals["rmdir"](path, dir_fd=dir_fd)
            return
        if shadows.has_folder(name) and any(True for _ in shadows.listing(name)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)
        shadows.remove(name, originals["rmdir"])

    def rename(src: Any, dst: Any, **how: Any) -> None:
        if shadows.of(src) is None and shadows.of(dst) is None:
            originals["rename"](src, dst, **how)
        else:
            shadows.move(src, dst)

    def remove_tree(path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        name = shadows.of(path)
        if name is None:
            rmtree(path, ignore_errors, *args, **kwargs)
        elif shadows.exists(name) or not ignore_errors:
            shadows.remove(name, lambda shadow: rmtree(shadow, ignore_errors))

    remove_tree.avoids_symlink_attacks = False  # type: ignore[attr-defined]
    os.mkdir, os.rmdir, os.rename, os.replace = mkdir, rmdir, rename, rename
    os.remove = os.unlink = remove
    shutil.rmtree = remove_tree  # type: ignore[assignment]
    for name in ("truncate", "chmod", "utime", "setxattr"):
        setattr(os, name, _with_path(getattr(os, name), functools.partial(shadows.write, copy=True)))
    for name in ("symlink", "link"):
        setattr(os, name, _with_second(originals[name], shadows.write))


def _with_path(function: Any, find: Callable[[Any], Any]) -> Any:
    """The same, on another path; one that is relative to an open folder is left alone."""

    @functools.wraps(function)
    def elsewhere(path: Any, *args: Any, **kwargs: Any) -> Any:
        return function(path if kwargs.get("dir_fd") is not None else find(path), *args, **kwargs)

    return elsewhere


def _with_second(function: Any, find: Callable[[Any], Any]) -> Any:
    @functools.wraps(function)
    def elsewhere(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        return function(src, find(dst), *args, **kwargs)

    return elsewhere


class _Listing:
    """What os.scandir gives: to be iterated over, and closed."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held open."""


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
