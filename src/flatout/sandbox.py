"""A trial writes nothing of the user's: what it writes goes to a scratch folder, and it reads back what it wrote.

    overlay       where the system permits: a mount namespace in which the user's folders are overlays
    redirection   elsewhere: Python's ways of writing go to a copy (inject/redirect.py); this says which folders

Run as a program this file makes the namespace and becomes the command: standard library only, nothing of flatout.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REDIRECT = "FLATOUT_REDIRECT"  # to the processes inside: a Sandbox as JSON
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_FILES_LOOKED_AT = 50_000
_TRACKERS_OFF = {
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1",
}  # fmt: skip
_SYSTEM = {
    "proc", "sys", "dev", "run", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "boot", "snap",
    "var", "opt", "lost+found",
}  # fmt: skip
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_PR_SET_PDEATHSIG = 1
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_NOT_DISKS = {"proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """`cover`: folders in which nothing may be written; `keep`: folders in them that may; `scratch` takes the rest."""

    scratch: str
    cover: Sequence[str]
    keep: Sequence[str]

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sandbox:
        """What `to_json` gave."""
        return cls(**json.loads(text))


def sandbox_for(command: Sequence[str], scratch: Path, ours: Sequence[Path]) -> Sandbox:
    """What to keep a command from writing to: all of the user's folders but `ours`. Caches stay: they change no
    result."""
    named = [Path(word.partition("=")[2] or word) for word in command]
    near = [Path.cwd(), *(path if path.is_dir() else path.parent for path in named if path.is_absolute())]
    tops = [
        path for path in Path("/").iterdir() if path.name not in _SYSTEM and path.is_dir() and not path.is_symlink()
    ]
    cover = sorted({path.resolve() for path in (*tops, *near) if path.is_dir()} - {Path("/")})
    home = Path.home()
    caches = [os.environ.get("XDG_CACHE_HOME") or home / ".cache", home / ".triton", home / ".nv"]
    with contextlib.suppress(OSError):  # the first trial that compiles spares the others that time
        _compiled().mkdir(mode=0o700, parents=True, exist_ok=True)
    keep = [*ours, *(Path(path) for path in (*caches, _compiled()) if Path(path).is_dir())]
    return Sandbox(
        scratch=str(scratch.resolve()),
        cover=tuple(str(path) for path in cover if not any(other in path.parents for other in cover)),
        keep=tuple(str(path.resolve()) for path in keep),
    )


def overlaid(command: Sequence[str], sandbox: Sandbox) -> list[str] | None:
    """How to start `command` so that the user's folders are overlays for it; None where the system forbids that."""
    return [*_entrance(sandbox), *command] if overlays_permitted() else None


@functools.cache
def overlays_permitted() -> bool:
    """Whether this system lets us mount overlays: tried out, on a folder of our own."""
    with tempfile.TemporaryDirectory(prefix="flatout-overlay-") as folder:
        below, scratch = Path(folder) / "below", Path(folder) / "scratch"
        below.mkdir()
        scratch.mkdir()
        sandbox = Sandbox(scratch=str(scratch), cover=(str(below),), keep=())
        done = subprocess.run([*_entrance(sandbox), "touch", str(below / "written")], capture_output=True, check=False)
        return done.returncode == 0 and not any(below.iterdir())


def environment(sandbox: Sandbox, *, redirected: bool) -> dict[str, str]:
    """What a trial's environment has beside the user's: trackers off; without an overlay, the word to redirect."""
    scratch = Path(sandbox.scratch)
    set_ = {**_TRACKERS_OFF, "MLFLOW_TRACKING_URI": (scratch / "mlruns").as_uri(), _COMPILED: str(_compiled())}
    if redirected:
        (scratch / "tmp").mkdir(exist_ok=True)
        set_ |= {REDIRECT: sandbox.to_json(), "TMPDIR": str(scratch / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    return set_


def look(command: Sequence[str], keep: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Size and time of the files in the working folder and in folders the command names, up to a good many."""
    folders = {Path.cwd(), *(path for path in map(Path, command) if path.is_absolute() and path.is_dir())}
    seen: dict[str, tuple[int, int]] = {}
    for folder in sorted(folders):
        for place, inside, files in os.walk(folder):
            inside[:] = [name for name in inside if f"{place}/{name}" not in keep]
            for name in files:
                try:
                    found = Path(place, name).lstat()
                except OSError:
                    continue
                seen[f"{place}/{name}"] = (found.st_size, found.st_mtime_ns)
            if len(seen) > _FILES_LOOKED_AT:
                return seen
    return seen


def _compiled() -> Path:
    """Where torch's compiler keeps what it made."""
    user = re.sub(r'[\\/:*?"<>|]', "_", _user())  # as torch names it
    return Path(os.environ.get(_COMPILED) or f"{tempfile.gettempdir()}/torchinductor_{user}")


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def _entrance(sandbox: Sandbox) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, sandbox.to_json()]


# --- inside the program that becomes the command ----------------------------------------------------------------------


def main(sandbox: Sandbox, command: Sequence[str]) -> None:
    """Make the namespace, and become the command."""
    here = Path.cwd()
    _leave_the_users_mounts()
    _cover(sandbox)
    os.chdir(here)  # the same path, seen through the overlay
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGTERM)  # a trial that hangs is not to outlive who would end it
    os.execvp(command[0], list(command))


def _leave_the_users_mounts() -> None:
    """A mount namespace; of a user namespace of our own where we are not root."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _call("unshare", _CLONE_NEWNS)
    else:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)


def _cover(sandbox: Sandbox) -> None:
    """An overlay upon each folder and upon each disk mounted in one; what is to be kept shows through."""
    inside = tuple(top.rstrip("/") + "/" for top in sandbox.cover)
    disks = [path for path in _mounted_disks() if path.startswith(inside)]
    places = sorted({*sandbox.cover, *disks}, key=lambda path: path.count("/"))
    kept = [*sandbox.keep, sandbox.scratch]
    seen = {path: _by_handle(path) for path in (*places, *kept)}
    layers, memory = seen[sandbox.scratch], None
    for number, path in enumerate(places):
        try:
            _overlay(seen[path], f"{layers}/overlay/{number}", path)
            continue
        except OSError:  # the scratch folder lies in what it would cover, or on a disk that cannot: memory then
            memory = memory or _memory_disk(f"{layers}/memory")
        try:
            _overlay(seen[path], f"{memory}/overlay/{number}", path)
        except OSError:
            if os.access(path, os.W_OK):  # to be looked at, then, not to be written to
                _mount(seen[path], path, "", _MS_BIND | _MS_REC)
                _mount("none", path, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    for path in kept:
        _mount(seen[path], path, "", _MS_BIND | _MS_REC)


def _by_handle(path: str) -> str:
    """A folder by a name that holds when something else is mounted upon it."""
    return f"/proc/self/fd/{os.open(path, os.O_PATH | os.O_DIRECTORY)}"


def _overlay(lower: str, layer: str, path: str) -> None:
    upper, work = f"{layer}/upper", f"{layer}/work"
    for folder in (upper, work):
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    there = os.stat(lower)  # noqa: PTH116
    os.chmod(upper, there.st_mode & 0o7777)  # noqa: PTH101 - the top of an overlay looks as its upper folder does,
    if os.getuid() == 0:
        os.chown(upper, there.st_uid, there.st_gid)  # and a /tmp has to stay open to all
    unprivileged = ",userxattr" if os.getuid() else ""
    _mount("overlay", path, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}{unprivileged}")


def _memory_disk(place: str) -> str:
    os.makedirs(place, exist_ok=True)  # noqa: PTH103
    _mount("tmpfs", place, "tmpfs", 0)
    return _by_handle(place)


def _mounted_disks() -> Iterator[str]:
    """Where file systems are mounted that hold files of people."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if rest.split()[0] not in _NOT_DISKS and os.path.isdir(place):  # noqa: PTH112
            yield place


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main(Sandbox.from_json(sys.argv[1]), sys.argv[2:])
