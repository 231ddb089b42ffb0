"""Keeps a trial's files apart where no overlay can be mounted: what Python writes goes to a scratch folder.

A path under a covered folder has a shadow there. Writing goes to the shadow (a file that is appended
to is copied first), removing leaves a mark, and reading prefers the shadow. The marks are files: all
processes of the command agree. Not caught are writers in C (but torch.save and safetensors), other
programs, and a Python that was started without our environment: launch compares the folders
afterwards. Standard library only: torch comes later.
"""

from __future__ import annotations

import _io
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

from flatout.launch.sandbox import Sandbox

_open, _stat, _lstat, _scandir, _readlink = io.open, os.stat, os.lstat, os.scandir, os.readlink
_mkdir, _remove, _rmdir, _rmtree, _symlink, _FileIO = (
    os.mkdir, os.remove, os.rmdir, shutil.rmtree, os.symlink, _io.FileIO,
)  # fmt: skip
_MOST_LINKS = 40  # in one path, as the kernel has it
_MOST_KNOWN = 4096
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Shadows:
    """Where a path is found, for reading and for writing, and what calls on covered paths do.

    A `name` is a covered path as `of` gives it: absolute, and without links above its last part.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._cover = tuple(folder.rstrip("/") + "/" for folder in sandbox.cover)
        self._keep = tuple(folder.rstrip("/") + "/" for folder in (*sandbox.keep, sandbox.scratch))
        self._shadows = f"{sandbox.scratch}/shadow"
        self._removed = f"{sandbox.scratch}/removed"
        self._known: dict[str, str] = {}  # folders without links, by the paths that lead to them

    def of(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Where a path leads to, if that is covered; a link that is its last part is not followed."""
        if isinstance(path, int) or path is None:
            return None
        path = _under(os.fsdecode(path), dir_fd)
        if not path.startswith("/"):
            path = f"{os.getcwd()}/{path}"
        above, last = os.path.split(path.rstrip("/"))
        if last in ("", ".", ".."):
            name = self._folder(path)
        else:
            name = f"{self._folder(above).rstrip('/')}/{last}"
        return name if self._covers(name) else None

    def place(self, path: Any, find: Callable[[str], str]) -> Any:
        """The same path, or where `find` says that it is if it is covered."""
        name = self.of(path)
        return path if name is None else find(name)

    def _covers(self, name: str) -> bool:
        inside = (name + "/").startswith
        return any(map(inside, self._cover)) and not any(map(inside, self._keep))

    def read(self, name: str, *, follow: bool = True) -> str:
        """Where to read it from."""
        if follow:
            name = self._followed(name)
        shadow = self._shadows + name
        return shadow if _exists(shadow) or self._is_removed(name) else name

    def write(self, name: str, *, copy: bool = False, new: bool = False, follow: bool = True) -> str:
        """Where to write it to; `copy` brings what is there along, `new` refuses to where something is."""
        if new and self._sees(name, _exists):
            raise _problem(errno.EEXIST, name)
        if follow and not new:
            name = self._followed(name)
        shadow = self._shadows + name
        if not self._covers(name):  # a link to what is not covered
            return name
        if not _exists(shadow):
            if self._sees(os.path.dirname(name), _is_folder):
                _make_folders(os.path.dirname(shadow))
            if copy and not self._is_removed(name):
                if _is_folder(name):
                    _make_folders(shadow)
                elif _exists(name):
                    shutil.copyfile(name, shadow)
        return shadow

    def open(self, mode: str, name: str) -> str:
        """Where to open it in such a mode."""
        if any(letter in mode for letter in "wax+"):
            return self.write(name, copy="w" not in mode, new="x" in mode)
        return self.read(name)

    def open_flags(self, name: str, flags: int) -> str:
        """Where to open it with such flags."""
        follow = not flags & os.O_NOFOLLOW
        if flags & _WRITING:
            return self.write(name, copy=not flags & os.O_TRUNC, new=bool(flags & os.O_EXCL), follow=follow)
        return self.read(name, follow=follow)

    def _folder(self, path: str) -> str:
        """An absolute path to a folder, without its links."""
        if path not in self._known:
            if path.startswith("/proc") or len(self._known) > _MOST_KNOWN:  # /proc changes
                return self._without_links(path)
            self._known[path] = self._without_links(path)
        return self._known[path]

    def _without_links(self, path: str) -> str:
        place, left, links = "/", path.split("/")[::-1], 0
        while left:
            part = left.pop()
            if part == "..":
                place = os.path.dirname(place)
            elif part not in ("", "."):
                above, place = place, f"{place.rstrip('/')}/{part}"
                target = self._link(place) if links < _MOST_LINKS else None
                if target is not None:
                    links += 1
                    place = "/" if target.startswith("/") else above
                    left += target.split("/")[::-1]
        return place

    def _link(self, place: str) -> str | None:
        """What a link leads to, as the script sees it; None for anything else."""
        shadow = self._shadows + place
        if _exists(shadow):
            return _link(shadow)
        target = _link(place)
        return target if target is None or not self._is_removed(place) else None

    def _followed(self, name: str) -> str:
        """A name, or where it leads to if it is a link."""
        for _ in range(_MOST_LINKS):
            target = self._link(name)
            if target is None:
                return name
            name = self._without_links(os.path.join(os.path.dirname(name), target))
        raise _problem(errno.ELOOP, name)

    def remove(self, name: str, how: Callable[[str], None] = _remove) -> None:
        """Remove what the script sees under this name; the user's own is hidden from now on."""
        if not self._sees(name, _exists):
            raise _problem(errno.ENOENT, name)
        if _exists(self._shadows + name):
            how(self._shadows + name)
        self._known.clear()
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

    def move(self, source: str, target: str) -> None:
        """Move what the script sees, of which at least one end is covered."""
        there = self.write(target, follow=False)
        if _link(there) is not None:
            _remove(there)
        if _is_folder(self.read(source, follow=False)):
            # Both are redirected: the user's files are only read.
            shutil.copytree(source, there, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(source)
        else:
            shutil.copyfile(source, there, follow_symlinks=False)
            os.remove(source)
        self._known.clear()

    def link(self, source: str, target: str) -> None:
        """Copy instead: writing to a hard link writes to the file it was made from."""
        shutil.copyfile(source, self.write(target, new=True))

    def symlink(self, source: Any, target: str) -> None:
        """A link that only the script sees."""
        _symlink(source, self.write(target, new=True))
        self._known.clear()

    def scandir(self, name: str) -> Any:
        """What lies in a folder, as the script sees it."""
        name = self._followed(name)
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
        """Whether this, or a folder it lies in, was removed; what came later lies in the shadow."""
        mark = self._removed
        for part in name.split("/")[1:]:
            mark = f"{mark}/{part}"
            if not _exists(mark):
                return False
            if _exists(f"{mark}/.removed"):
                return True
        return False


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
    plain = vars(os).copy()
    read, lread = shadows.read, functools.partial(shadows.read, follow=False)
    copied = functools.partial(shadows.write, copy=True)
    lcopied, new = functools.partial(copied, follow=False), functools.partial(shadows.write, new=True)
    for names, find in (
        (("stat", "access", "listxattr", "getxattr"), read),
        (("lstat", "readlink"), lread),
        (("truncate", "chmod", "chown", "utime", "setxattr", "removexattr", "fchmod", "fchown"), copied),
        (("lchown",), lcopied),
        (("mkdir", "mkfifo", "mknod"), new),
    ):
        for name in names:
            by_path = plain[name.removeprefix("f")]  # fchmod: chmod
            covered = functools.partial(_elsewhere, by_path, find)
            setattr(os, name, _redirected(plain[name], shadows, covered, descriptors=find is copied))
    for name in ("listdir", "scandir", "remove", "rmdir"):
        setattr(os, name, _redirected(plain[name], shadows, getattr(shadows, name)))
    os.unlink = os.remove
    shutil.rmtree = _redirected(_rmtree, shadows, shadows.rmtree)
    os.open = _redirected(
        os.open, shadows, lambda name, flags, mode=0o777: plain["open"](shadows.open_flags(name, flags), flags, mode)
    )
    builtins.open = io.open = _open_redirected(shadows)
    io.FileIO = _io.FileIO = _file_io_redirected(shadows)  # type: ignore[misc]
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
            f = shadows.place(f, shadows.write)
        return save(obj, f, *args, **kwargs)

    torch.save = torch.serialization.save = save_redirected


def redirect_safetensors(module: Any, sandbox: Sandbox) -> None:
    """safetensors reads and writes its files in Rust."""
    shadows = Shadows(sandbox)
    save, load = module.save_file, module.load_file
    module.save_file = lambda tensors, filename, *a, **k: save(tensors, shadows.place(filename, shadows.write), *a, **k)
    module.load_file = lambda filename, *a, **k: load(shadows.place(filename, shadows.read), *a, **k)


def _elsewhere(function: Any, find: Callable[..., str], name: str, *args: Any, **kwargs: Any) -> Any:
    """The same, in another place."""
    if kwargs.get("follow_symlinks") is False:
        find = functools.partial(find, follow=False)
    return function(find(name), *args, **kwargs)


def _redirected(function: Any, shadows: Shadows, covered: Callable[..., Any], *, descriptors: bool = False) -> Any:
    """The same, but something else for a covered path, and with `descriptors` for an open file."""

    @functools.wraps(function)
    def redirected(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        leads_to = "." if path is None else path
        if descriptors and isinstance(path, int):
            leads_to = _link(f"/proc/self/fd/{path}")
        name = shadows.of(leads_to, kwargs.get("dir_fd"))
        if name is None:
            return function(path, *args, **kwargs)
        kwargs.pop("dir_fd", None)
        return covered(name, *args, **kwargs)

    return redirected


def _open_redirected(shadows: Shadows) -> Any:
    @functools.wraps(_open)
    def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return _open(shadows.place(file, functools.partial(shadows.open, mode)), mode, *args, **kwargs)

    return redirected


def _file_io_redirected(shadows: Shadows) -> Any:
    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, _FileIO)  # open() makes those

    class FileIO(_FileIO, metaclass=Kind):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            place = shadows.place(file, functools.partial(shadows.open, mode))
            super().__init__(place, mode, *args, **kwargs)

    return FileIO


def _of_two(function: Any, shadows: Shadows, covered: Callable[[str, str], None]) -> Any:
    """The same, but something else where one of two paths is covered."""

    @functools.wraps(function)
    def redirected(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **how: Any
    ) -> None:
        source, target = shadows.of(src, src_dir_fd), shadows.of(dst, dst_dir_fd)
        if source is None and target is None:
            function(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **how)
        else:
            source = source or _under(os.fsdecode(src), src_dir_fd)
            covered(source, target or _under(os.fsdecode(dst), dst_dir_fd))

    return redirected


def _symlink_redirected(shadows: Shadows) -> Any:
    @functools.wraps(_symlink)
    def redirected(src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        name = shadows.of(dst, dir_fd)
        if name is None:
            _symlink(src, dst, *args, dir_fd=dir_fd, **kwargs)
        else:
            shadows.symlink(src, name)

    return redirected


def _under(path: str, dir_fd: int | None) -> str:
    """A path, relative to an open folder where one is given."""
    if dir_fd is None:
        return path
    return os.path.join(f"/proc/self/fd/{dir_fd}", path)


def _problem(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)


def _exists(name: str) -> bool:
    try:
        _lstat(name)
    except OSError:
        return False
    return True


def _link(name: str) -> str | None:
    """What a link leads to; None for anything else."""
    try:
        return _readlink(name)
    except OSError:
        return None


def _is_folder(name: str) -> bool:
    try:
        return stat.S_ISDIR(_stat(name).st_mode)
    except OSError:
        return False


def _make_folders(name: str) -> None:
    if not _is_folder(name):
        _make_folders(os.path.dirname(name))
        try:
            _mkdir(name)
        except FileExistsError:
            pass  # another process was quicker
