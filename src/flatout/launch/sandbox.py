"""A trial writes nothing of the user's: what it writes goes to a scratch folder, from which it is read back.

    overlay       a mount namespace in which everything that can be written to is an overlay
    redirection   where the system permits none: Python's ways of writing go to a copy (inside/redirect.py)

Run as a program this file makes the namespace and becomes the command: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REDIRECT = "FLATOUT_REDIRECT"  # to the processes inside: a Sandbox as JSON
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_ENTRIES_READ = 20_000
_LINKS_FOLLOWED = 100
_TRACKERS_OFF = {
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled", "DVC_STUDIO_OFFLINE": "true", "DVC_EXP_AUTO_PUSH": "false", "DVC_NO_ANALYTICS": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip
_BUSY = ("/tmp", "/var/tmp", "/var/log", "/var/lib", "/var/cache", "/var/spool")
_SHARED_MEMORY = Path("/dev/shm")
# The running system's: sockets, devices and memory, no files that stay.
_LIVE = {"proc", "sys", "dev", "run"}
_ROOTS_OWN = {"boot", "snap", "lost+found"}
_SYSTEM = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", *_ROOTS_OWN}
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_CAP_SYS_ADMIN = 1 << 21
_PR_SET_PDEATHSIG = 1
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
# Flags of a mount that a remount has to repeat.
_MS_OF_ST = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_NOT_DISKS = {
    "proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "nsfs",
    "autofs",
}  # fmt: skip
# In a layer, a folder of files to lay over those that are there: the files, under their whole paths,
# and the paths of those to remove, with a zero between them.
FILES, REMOVED = "files", "removed"
_REFUSED = "refused"  # a file in the scratch folder: why the command was not started
# Whether the working folder can be written to, seen from inside.
_TOUCH = "import sys; sys.argv[1:] and open(sys.argv[1], 'x').close()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Where a trial may write."""

    scratch: str  # takes what is written elsewhere
    cover: Sequence[str]  # folders in which nothing may be written
    keep: Sequence[str]  # folders in them that may be written to
    near: Sequence[str] = ()  # folders that the command is most likely to write to
    compiled: str = ""  # where torch's compiler keeps what it made
    layer: str = ""  # see FILES

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sandbox:
        """What `to_json` gave."""
        return cls(**json.loads(text))


def sandbox_for(command: Sequence[str], scratch: Path, ours: Sequence[Path]) -> Sandbox:
    """Cover everything that can be written to, but `ours` and compilers' caches.

    What was compiled changes no result, and the first trial that compiles spares the others that time.
    """
    near = _near(command[1:])
    tops = [path for path in Path("/").iterdir() if _can_hold_files(path)]
    memory = [path for path in _SHARED_MEMORY.glob("*") if path.is_dir() and not path.is_symlink()]
    home = Path.home()
    precious = [*near, home.resolve()]
    compiled = _compiled(precious, instead=scratch.absolute().parent / "compiled")
    extensions = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "torch_extensions"
    caches = [path for path in (home / ".triton", home / ".nv", extensions) if _is_private(path, precious)]
    return Sandbox(
        scratch=str(scratch.resolve()),
        cover=tuple(sorted({str(path) for path in (*tops, *memory, *_overlays_beside(near))})),
        keep=tuple(str(path.resolve()) for path in (*ours, compiled, *caches)),
        near=tuple(map(str, near)),
        compiled=str(compiled),
    )


def why_no_overlay(command: Sequence[str], scratch: Path) -> str:
    """Why a command cannot be run on overlays here, tried out on the very folders; empty where it can."""
    here, name = Path.cwd(), f".flatout-{os.urandom(6).hex()}"
    with tempfile.TemporaryDirectory(prefix="probe-", dir=scratch, ignore_cleanup_errors=True) as own:
        box = sandbox_for(command, Path(own), ())
        touch = [sys.executable, "-I", "-S", "-c", _TOUCH]
        if os.access(here, os.W_OK):
            touch.append(name)
        done = subprocess.run([*entrance(box), *touch], capture_output=True, text=True, check=False)
        if why := refusal(box):
            return why
    if (here / name).exists():
        (here / name).unlink()
        return f"what is written over {here} comes through"
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"nothing can be written to {here} in one ({said[0]})"
    return ""


def entrance(sandbox: Sandbox) -> list[str]:
    """What to put before a command to run it on overlays."""
    return [sys.executable, "-I", "-S", __file__, sandbox.to_json()]


def refusal(sandbox: Sandbox) -> str:
    """Why a command was not started in its sandbox; empty where it was."""
    with contextlib.suppress(OSError):
        return Path(sandbox.scratch, _REFUSED).read_text(encoding="utf-8", errors="replace")
    return ""


def file_of_others(command: Sequence[str]) -> str:
    """A file or folder that the command may write to, but not in an overlay; empty where there is none.

    The overlay of a user who may not mount has one owner and one group. What belongs to others, such
    as the files of a shared group, cannot be copied into it (EOVERFLOW).
    """
    for entry in _walk(_near(command[1:])):
        with contextlib.suppress(OSError):
            writable = not entry.is_symlink() and os.access(entry.path, os.W_OK)
            if writable and not _is_ours(entry.stat(follow_symlinks=False)):
                return entry.path
    return ""


def may_mount() -> bool:
    """Whether we are root, and not only by name, as in most containers."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.geteuid() == 0 and bool(capabilities & _CAP_SYS_ADMIN)


def environment(sandbox: Sandbox, *, redirected: bool) -> dict[str, str]:
    """What to add to a trial's environment."""
    scratch = Path(sandbox.scratch)
    variables = {**_TRACKERS_OFF, "MLFLOW_TRACKING_URI": (scratch / "mlruns").as_uri(), _COMPILED: sandbox.compiled}
    if redirected:
        (scratch / "tmp").mkdir(exist_ok=True)
        variables |= {REDIRECT: sandbox.to_json(), "TMPDIR": str(scratch / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    return variables


# --- which folders ------------------------------------------------------------------------------------------


def _can_hold_files(top: Path) -> bool:
    """Whether to cover this top-level folder: the system's too, as a user may own a folder deep in /usr."""
    if top.name in _LIVE or top.is_symlink() or not top.is_dir():
        return False
    return top.name not in _ROOTS_OWN or os.geteuid() == 0


def not_compared() -> list[str]:
    """Folders in which other programs write all the time, or only an administrator does."""
    return [*_BUSY, tempfile.gettempdir(), *(f"/{name}" for name in _SYSTEM)]


def _near(words: Sequence[str]) -> list[Path]:
    """The working folder, the folders that the command names, and those that links in the working
    folder lead to."""
    here = Path.cwd()
    named = [Path(word.partition("=")[2] or word) for word in words]
    found = [here]
    for path in (*named, *_linked_to(here)):
        # The word is too long for a file name, or the links form a loop.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            place = path.resolve()
            if place.exists() or path.is_absolute():
                found.append(place if place.is_dir() else place.parent)
    return sorted({path for path in found if path.is_dir() and not _is_live(path)})


def _is_live(place: Path) -> bool:
    return place.parts[1:2] == () or (place.parts[1] in _LIVE and _SHARED_MEMORY not in place.parents)


def _linked_to(folder: Path) -> list[Path]:
    """Where links in a folder lead to, those that lead out of it; each folder once."""
    found: dict[str, None] = {}
    for entry in _walk([folder]):
        with contextlib.suppress(OSError):
            if entry.is_symlink():
                target = os.path.join(os.path.dirname(entry.path), os.readlink(entry.path))
                found[target if entry.is_dir() else os.path.dirname(target)] = None
        if len(found) >= _LINKS_FOLLOWED:
            break
    return [Path(path) for path in found]


def _walk(folders: Sequence[Path]) -> Iterator[os.DirEntry[str]]:
    """What lies in folders, breadth first, up to _ENTRIES_READ."""
    waiting, seen = deque(map(str, folders)), 0
    while waiting and seen < _ENTRIES_READ:
        with contextlib.suppress(OSError), os.scandir(waiting.popleft()) as entries:
            for entry in entries:
                yield entry
                seen += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _overlays_beside(near: Sequence[Path]) -> Iterator[Path]:
    """Where overlays are needed beside those of the top-level folders.

    What is written in a folder copies all folders above it, up to the overlay's top. Those of others
    cannot be copied (see `file_of_others`): so an overlay begins below the last of them.
    """
    for place in near:
        path = [place, *place.parents][:-2]  # without the top-level folder
        if may_mount() or not os.access(place, os.W_OK):
            continue
        with contextlib.suppress(OSError):
            others = next((depth for depth, folder in enumerate(path) if not _is_ours(folder.stat())), None)
            if others is not None:
                yield path[max(0, others - 1)]


def _is_ours(found: os.stat_result) -> bool:
    return (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid())


# --- caches that show through -------------------------------------------------------------------------------


def _compiled(precious: Collection[Path], *, instead: Path) -> Path:
    """Where torch's compiler keeps what it made; a folder of our own where that is no private one."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)  # as torch names it
    usual = Path(os.environ.get(_COMPILED) or f"{tempfile.gettempdir()}/torchinductor_{user}").absolute()
    with contextlib.suppress(OSError):
        usual.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _is_private(usual, precious):
        return usual
    instead.mkdir(mode=0o700, exist_ok=True)
    return instead


def _is_private(folder: Path, precious: Collection[Path]) -> bool:
    """Whether only this user can write to this folder, which is no link and holds nothing `precious`.

    What shows through is really written: neither a variable nor a link by another user may make that
    the project.
    """
    try:
        found, place = folder.lstat(), folder.resolve()
    except (OSError, RuntimeError):
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return False
    return not any(place == path or place in path.parents for path in precious)


# --- inside the program that becomes the command ------------------------------------------------------------


def main(sandbox: Sandbox, command: Sequence[str]) -> None:
    """Make the namespace and become the command, or write down why not."""
    here = Path.cwd()
    refused = os.open(f"{sandbox.scratch}/{_REFUSED}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        privileged = may_mount()
        _make_namespace(privileged=privileged)
        _cover(sandbox, privileged=privileged)
        os.chdir(here)  # the same path, seen through the overlay
    except OSError as problem:
        os.write(refused, str(problem.strerror or problem).encode())
        sys.exit(1)
    # A trial that hangs must not outlive what would end it.
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execvp(command[0], list(command))


def _make_namespace(*, privileged: bool) -> None:
    """Make a mount namespace, within a user namespace of our own where we may not mount."""
    uid, gid = os.getuid(), os.getgid()
    if privileged:
        _call("unshare", _CLONE_NEWNS)
    else:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)


def _cover(sandbox: Sandbox, *, privileged: bool) -> None:
    """An overlay upon each folder and upon each disk mounted in one; what is to be kept shows through."""
    inside = tuple(top.rstrip("/") + "/" for top in sandbox.cover)
    mounted = [path for path in _mounted() if path.startswith(inside)]
    disks = [path for path in mounted if os.path.isdir(path)]
    places = _handles(sorted({*sandbox.cover, *disks}, key=lambda path: path.count("/")))
    kept = _handles([*sandbox.keep, sandbox.scratch])
    single = _handles([*(path for path in mounted if path not in disks), *_sockets(inside)])
    layers, memory, overlays = kept[sandbox.scratch], None, list[str]()
    for number, (path, seen) in enumerate(places.items()):
        try:
            _overlay(seen, f"{layers}/overlay/{number}", path, privileged=privileged)
            overlays.append(path)
            continue
        except OSError:  # the scratch folder lies in what it would cover, or on a disk that cannot: memory then
            memory = memory or _memory_disk(f"{layers}/memory")
        try:
            _overlay(seen, f"{memory}/overlay/{number}", path, privileged=privileged)
            overlays.append(path)
        except OSError:
            _read_only(seen, path)  # to be looked at, then, not to be written to
    for path, seen in single.items():
        with contextlib.suppress(OSError):  # hidden, then
            _read_only(seen, path)
    if sandbox.layer:  # before anything shows through that is really written
        _lay_over(Path(sandbox.layer), overlays)
    for path, seen in kept.items():
        _mount(seen, path, "", _MS_BIND | _MS_REC)


def _lay_over(layer: Path, overlays: Sequence[str]) -> None:
    """Write a layer's files over those that are there. Raises OSError where no overlay would take that."""
    removed = filter(None, (layer / REMOVED).read_text(encoding="utf-8", errors="surrogateescape").split("\0"))
    for place, _, names in os.walk(layer / FILES):
        for name in names:
            target = _on_overlay(Path("/", os.path.relpath(place, layer / FILES), name), overlays)
            before_s = target.stat().st_mtime if target.exists() else 0.0
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f"{place}/{name}", target)
            shutil.copymode(f"{place}/{name}", target)
            # Python takes what it compiled for that of a file of the same size and second.
            now_s = max(target.stat().st_mtime, before_s + 2)
            os.utime(target, (now_s, now_s))
    for path in removed:
        _on_overlay(Path(path), overlays).unlink(missing_ok=True)


def _on_overlay(target: Path, overlays: Sequence[str]) -> Path:
    """Where a file really lies, if that is on an overlay."""
    place = target.resolve()
    if not any(place.is_relative_to(top) for top in overlays):
        raise OSError(f"no overlay covers {place}")
    return place


def _handles(paths: Sequence[str]) -> dict[str, str]:
    """For files and folders that are there, names that hold when something else is mounted upon them."""
    found = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found[path] = f"/proc/self/fd/{os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)}"
    return found


def _overlay(lower: str, layer: str, path: str, *, privileged: bool) -> None:
    upper, work = f"{layer}/upper", f"{layer}/work"
    for folder in (upper, work):
        os.makedirs(folder, exist_ok=True)
    there = os.stat(lower)
    os.chmod(upper, there.st_mode & 0o7777)  # the top of an overlay looks as its upper folder does,
    if privileged:
        os.chown(upper, there.st_uid, there.st_gid)  # and a /tmp has to stay open to all
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    if not privileged:
        options += ",userxattr"
    _mount("overlay", path, "overlay", 0, options)


def _read_only(source: str, path: str) -> None:
    """Show what is there read-only. Raises OSError, and then there is no trial."""
    there = os.statvfs(source).f_flag
    flags = sum(flag for seen, flag in _MS_OF_ST.items() if there & seen)
    _mount(source, path, "", _MS_BIND | _MS_REC)
    _mount("none", path, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)


def _memory_disk(place: str) -> str:
    os.makedirs(place, exist_ok=True)
    _mount("tmpfs", place, "tmpfs", 0)
    return _handles([place])[place]


def _mounted() -> Iterator[str]:
    """Where disks are mounted; a container mounts single files too."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if rest.split()[0] not in _NOT_DISKS and os.path.exists(place):
            yield place


def _sockets(inside: tuple[str, ...]) -> list[str]:
    """Sockets that programs listen on, as for users' names: through an overlay they cannot be reached."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]
    words = [line.split(maxsplit=7) for line in lines]
    paths = {path for *_, path in words if path.startswith(inside)}  # the last is a number where there is no path
    return sorted(filter(_is_socket, paths))


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main(Sandbox.from_json(sys.argv[1]), sys.argv[2:])
