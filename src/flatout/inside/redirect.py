"""Keeps a trial's files apart where no overlay can be mounted: what Python writes goes to a scratch folder.

A path under a covered folder has a shadow in the scratch folder. Writing goes to the shadow (a file that is
appended to is copied there first), removing leaves a mark, and reading prefers the shadow where there is
one. The marks are files, so all processes of the command agree.

Not caught are writers in C that open files themselves (except torch.save and safetensors), other programs,
and a Python that was started without our environment: launch compares the folders afterwards.

Standard library only: this is at work before torch is imported.
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
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from flatout.launch.sandbox import Sandbox

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ours = threading.local()  # while it has `at_work`, this thread's calls are ours, and not redirected
Method = TypeVar("Method", bound=Callable[..., Any])


def _as_ours(method: Method) -> Method:
    """What the method does with files is not redirected."""

    @functools.wraps(method)
    def unredirected(*args: Any, **kwargs: Any) -> Any:
        if hasattr(_ours, "at_work"):
            return method(*args, **kwargs)
        _ours.at_work = True
        try:
            return method(*args, **kwargs)
        finally:
            del _ours.at_work

    return unredirected  # type: ignore[return-value]


class Shadows:
    """Where a path is found, for reading and for writing, and what calls on covered paths do.

    A `name` is a covered path as `of` gives it: absolute, and without the user's links.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._cover = tuple(folder.rstrip("/") + "/" for folder in sandbox.cover)
        self._keep = tuple(folder.rstrip("/") + "/" for folder in (*sandbox.keep, sandbox.scratch))
        self._shadows = f"{sandbox.scratch}/shadow"
        self._removed = f"{sandbox.scratch}/removed"

    @_as_ours
    def of(self, path: Any, *, follow: bool = True) -> str | None:
        """The covered file or folder that a path leads to; None for any other."""
        if isinstance(path, int) or path is None:
            return None
        above, last = os.path.split(os.fsdecode(path))
        if follow or last in ("", ".", ".."):
            name = os.path.realpath(os.fsdecode(path))
        else:
            name = os.path.join(os.path.realpath(above), last)  # noqa: PTH118
        inside = f"{name}/".startswith
        return name if any(map(inside, self._cover)) and not any(map(inside, self._keep)) else None

    @_as_ours
    def read(self, path: Any, *, follow: bool = True) -> Any:
        """Where to read it from."""
        name = self.of(path, follow=follow)
        if name is None or not (os.path.lexists(self._shadows + name) or self._is_removed(name)):
            return path
        return self._shadows + name

    @_as_ours
    def write(self, path: Any, *, copy: bool = False, new: bool = False, follow: bool = True) -> Any:
        """Where to write it to; `copy` brings what is there along, `new` refuses to where something is."""
        name = self.of(path, follow=follow and not new)
        if name is None:
            return path
        if new and self._sees(name):
            raise _problem(errno.EEXIST, name)
        shadow, above = self._shadows + name, os.path.dirname(name)  # noqa: PTH120
        if not os.path.lexists(shadow):
            if self._sees(above, os.path.isdir):
                os.makedirs(self._shadows + above, exist_ok=True)  # noqa: PTH103
            if copy and self._sees(name, os.path.isdir):
                os.makedirs(shadow, exist_ok=True)  # noqa: PTH103
            elif copy and self._sees(name):
                shutil.copyfile(name, shadow)
        return shadow

    @_as_ours
    def mkdir(self, name: str, mode: int = 0o777) -> None:
        """Make a folder that only the script sees."""
        os.mkdir(self.write(name, new=True), mode)  # noqa: PTH102

    @_as_ours
    def remove(self, name: str) -> None:
        """Remove what the script sees under this name; from now on the user's own is not to be seen."""
        shadow = self._shadows + name
        if not self._sees(name):
            raise _problem(errno.ENOENT, name)
        if os.path.isdir(shadow) and not os.path.islink(shadow):  # noqa: PTH112, PTH114
            shutil.rmtree(shadow)
        elif os.path.lexists(shadow):
            os.remove(shadow)  # noqa: PTH107
        if os.path.lexists(name):
            mark = pathlib.Path(f"{self._removed}{name}/.removed")
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def rmdir(self, name: str) -> None:
        """Remove a folder in which the script sees nothing."""
        if self.listdir(name):
            raise _problem(errno.ENOTEMPTY, name)
        self.remove(name)

    def rmtree(self, name: str, ignore_errors: bool = False, *_: Any, **__: Any) -> None:
        """Remove a folder with all that the script sees in it."""
        if not ignore_errors or self._sees(name):
            self.remove(name)

    def move(self, source: Any, target: Any) -> None:
        """Move what the script sees, of which at least one end is covered."""
        there = self.write(target, follow=False)
        if os.path.islink(there):  # noqa: PTH114
            os.remove(there)  # noqa: PTH107
        # All paths are redirected: the user's own files are read, and the shadow's are written and removed.
        if os.path.isdir(self.read(source, follow=False)):  # noqa: PTH112
            shutil.copytree(source, there, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(source)
        else:
            shutil.copyfile(source, there, follow_symlinks=False)
            os.remove(source)  # noqa: PTH107

    def link(self, source: Any, target: Any) -> None:
        """Copy instead: writing to a hard link writes to the file it was made from."""
        shutil.copyfile(source, self.write(target, new=True))

    @_as_ours
    def symlink(self, source: Any, target: str) -> None:
        """A link that only the script sees. It leads to a shadow: through it, nothing of the user's is written."""
        if os.path.isabs(source) and self.of(source) is not None:  # noqa: PTH117
            source = self.write(source, copy=True)
        os.symlink(source, self.write(target, new=True))  # noqa: PTH211

    @_as_ours
    def scandir(self, name: str) -> Any:
        """What lies in a folder, as the script sees it."""
        shown = self.read(name)
        if not self._sees(name, os.path.isdir):
            return os.scandir(shown)  # raises what it should
        entries = {}
        if shown != name:
            entries = {entry.name: entry for entry in os.scandir(shown)}
        if os.path.isdir(name) and not self._is_removed(name):  # noqa: PTH112
            for entry in os.scandir(name):
                if entry.name not in entries and not self._is_removed(f"{name}/{entry.name}"):
                    entries[entry.name] = entry
        return _Listing(iter(entries.values()))

    def listdir(self, name: str) -> list[str]:
        """The names in a folder, as the script sees it."""
        return [entry.name for entry in self.scandir(name)]

    @_as_ours
    def _sees(self, name: str, is_there: Callable[[str], bool] = os.path.lexists) -> bool:
        """Whether there is such a thing, or such a folder, as the script sees it."""
        return is_there(self._shadows + name) or (is_there(name) and not self._is_removed(name))

    def _is_removed(self, name: str) -> bool:
        """Whether this, or a folder it lies in, has been removed (what came there later lies in the shadow)."""
        if not os.path.exists(self._removed):  # noqa: PTH110
            return False
        places = (name, *map(str, pathlib.PurePath(name).parents))
        return any(os.path.exists(f"{self._removed}{place}/.removed") for place in places)  # noqa: PTH110


class _Listing(contextlib.nullcontext[Iterator[Any]]):
    """What os.scandir returns: an iterator and a context; nothing is held open."""

    def __iter__(self) -> Iterator[Any]:
        return self.enter_result

    def __next__(self) -> Any:
        return next(self.enter_result)

    def close(self) -> None:
        """There is nothing to close."""


def install(sandbox: Sandbox) -> None:
    """Redirect what this process writes from now on."""
    shadows = Shadows(sandbox)
    copied, new = functools.partial(shadows.write, copy=True), functools.partial(shadows.write, new=True)
    builtins.open = io.open = _open_redirected(shadows)
    os.open = _os_open_redirected(shadows)
    for names, find in (
        ("stat lstat readlink access listxattr getxattr", shadows.read),
        ("truncate chmod chown lchown utime setxattr removexattr", copied),
        ("mkfifo mknod", new),
    ):
        for name in names.split():
            setattr(os, name, _elsewhere(getattr(os, name), find))
    for name in ("listdir", "scandir", "mkdir", "remove", "rmdir"):
        setattr(os, name, _instead(getattr(os, name), shadows, getattr(shadows, name)))
    os.unlink = os.remove
    shutil.rmtree = _instead(shutil.rmtree, shadows, shadows.rmtree)
    os.rename = os.replace = _of_two(os.rename, shadows, shadows.move)
    os.link = _of_two(os.link, shadows, shadows.link)
    os.symlink = _symlink_redirected(shadows)
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
        if isinstance(f, str | os.PathLike):
            f = shadows.write(f)
        return save(obj, f, *args, **kwargs)

    torch.save = torch.serialization.save = save_redirected


def redirect_safetensors(module: Any, sandbox: Sandbox) -> None:
    """safetensors reads and writes its files in Rust."""
    shadows = Shadows(sandbox)
    save, load = module.save_file, module.load_file
    module.save_file = lambda tensors, filename, *a, **k: save(tensors, shadows.write(filename), *a, **k)
    module.load_file = lambda filename, *a, **k: load(shadows.read(filename), *a, **k)


def _open_redirected(shadows: Shadows) -> Any:
    plain = io.open

    @functools.wraps(plain)
    def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if hasattr(_ours, "at_work"):
            return plain(file, mode, *args, **kwargs)
        if any(letter in mode for letter in "wax+"):
            file = shadows.write(file, copy="w" not in mode, new="x" in mode)
        else:
            file = shadows.read(file)
        return plain(file, mode, *args, **kwargs)

    return redirected


def _os_open_redirected(shadows: Shadows) -> Any:
    plain = os.open

    @functools.wraps(plain)
    def redirected(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if hasattr(_ours, "at_work"):
            return plain(path, flags, mode, dir_fd=dir_fd)
        path, follow = _under(path, dir_fd), not flags & os.O_NOFOLLOW
        if flags & _WRITING:
            path = shadows.write(path, copy=not flags & os.O_TRUNC, new=bool(flags & os.O_EXCL), follow=follow)
        else:
            path = shadows.read(path, follow=follow)
        return plain(path, flags, mode)

    return redirected


def _elsewhere(function: Any, find: Callable[..., Any]) -> Any:
    """The same, on another path."""
    of_links = function.__name__ in ("lstat", "readlink", "lchown")

    @functools.wraps(function)
    def redirected(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        if hasattr(_ours, "at_work"):
            return function(_under(path, dir_fd), *args, **kwargs)
        follow = not of_links and kwargs.get("follow_symlinks", True)
        return function(find(_under(path, dir_fd), follow=follow), *args, **kwargs)

    return redirected


def _instead(function: Any, shadows: Shadows, covered: Callable[..., Any]) -> Any:
    """The same, but for a covered path something else."""
    reads = function.__name__ in ("listdir", "scandir")

    @functools.wraps(function)
    def redirected(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if hasattr(_ours, "at_work"):
            return function(path, *args, **kwargs)
        at = _under("." if path is None else path, kwargs.get("dir_fd"))
        name = shadows.of(at, follow=reads)
        if name is None:
            return function(path, *args, **kwargs)
        kwargs.pop("dir_fd", None)
        return covered(name, *args, **kwargs)

    return redirected


def _of_two(function: Any, shadows: Shadows, covered: Callable[[Any, Any], None]) -> Any:
    """The same, but something else where one of two paths is covered."""

    @functools.wraps(function)
    def redirected(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **how: Any
    ) -> None:
        source, target = _under(src, src_dir_fd), _under(dst, dst_dir_fd)
        there = [shadows.of(path, follow=False) for path in (source, target)]
        if hasattr(_ours, "at_work") or there == [None, None]:
            function(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **how)
        else:
            covered(there[0] or source, there[1] or target)

    return redirected


def _symlink_redirected(shadows: Shadows) -> Any:
    plain = os.symlink

    @functools.wraps(plain)
    def redirected(src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        dst = _under(dst, dir_fd)
        name = shadows.of(dst, follow=False)
        if hasattr(_ours, "at_work") or name is None:
            return plain(src, dst, *args, **kwargs)
        return shadows.symlink(os.fsdecode(src), name)

    return redirected


def _under(path: Any, dir_fd: int | None) -> Any:
    """A path, relative to an open folder where one is given."""
    if dir_fd is None:
        return path
    return os.path.join(f"/proc/self/fd/{dir_fd}", os.fsdecode(path))  # noqa: PTH118


def _problem(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)
