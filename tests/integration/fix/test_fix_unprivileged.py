"""`flatout fix` by a user who is not root: in a user namespace, so that root can test it too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flatout.launch import sandbox

# Becomes user 1000, who is us outside: all files of other users and groups are nobody's.
AS_A_USER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x10000000):
    sys.exit(77)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"1000 {uid} 1")
open("/proc/self/gid_map", "w").write(f"1000 {gid} 1")
os.execvp(sys.argv[1], sys.argv[1:])
"""
LOOK = """
from pathlib import Path
from flatout.launch import sandbox
print(sandbox.why_no_overlay(["python"], Path(".")))
"""
SOMEBODY = 54_321


def as_a_user(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AS_A_USER, sys.executable, *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("this system permits no user namespaces")
    return done


@pytest.fixture
def overlays(tmp_path: Path) -> None:
    if why := as_a_user("-c", LOOK, cwd=tmp_path).stdout.strip():
        pytest.skip(f"this system permits no overlay: {why}")


@pytest.mark.usefixtures("overlays")
def test_root_that_may_not_mount_has_overlays_all_the_same(tmp_path: Path) -> None:
    """GIVEN a container whose root lacks SYS_ADMIN, but that permits user namespaces."""
    drop = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    if os.getuid() or shutil.which(drop[0]) is None:
        pytest.skip("only root can give up a capability")
    done = subprocess.run(
        [*drop, sys.executable, "-c", LOOK], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "\n"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A project in which one file belongs to a group that the user is in."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "log.txt").write_text("as it was")
    try:
        os.chown(folder / "log.txt", -1, SOMEBODY)
    except PermissionError:
        pytest.skip("only root can give a file away")
    (folder / "log.txt").chmod(0o666)
    return folder


FIX = ("-m", "flatout", "fix", "--budget", "15s")


@pytest.mark.usefixtures("overlays")
def test_files_of_another_group_are_the_reason_that_is_given(shared: Path) -> None:
    """GIVEN a file that no overlay of this user's can hold WHEN the script appends to it THEN that is said, and the
    command is not said to fail by itself; with --unprotected it runs."""
    (shared / "train.py").write_text("open('log.txt', 'a').write('more'); print('to the end')")
    refused = as_a_user(*FIX, "--", sys.executable, "train.py", cwd=shared)
    assert refused.returncode == 2
    assert f"{shared}/log.txt belongs to another user or group" in refused.stderr
    assert "--unprotected" in refused.stderr
    assert "by itself" not in refused.stderr
    ran = as_a_user(*FIX, "--unprotected", "--", sys.executable, "train.py", cwd=shared)
    assert "the first real write ends the" in " ".join(ran.stderr.split())  # it went on
    # Other programs may write elsewhere meanwhile, which ends it too.
    assert f"{shared}/" not in ran.stderr.partition("a trial has written to your files")[2]
    assert (shared / "log.txt").read_text() == "as it was"


@pytest.mark.usefixtures("overlays")
def test_files_of_another_group_are_found_where_the_command_does_not_name_them(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (shared / "log.txt").rename(tmp_path / "elsewhere" / "log.txt")
    (shared / "train.py").write_text("open('../elsewhere/log.txt', 'a')")
    refused = as_a_user(*FIX, "--", sys.executable, "train.py", cwd=shared)
    assert refused.returncode == 2
    assert "what it writes to belongs to another user or group" in refused.stderr


@pytest.mark.usefixtures("overlays")
def test_a_failure_that_files_of_others_may_have_caused_says_so(shared: Path) -> None:
    """GIVEN a library that does not say why it could not write."""
    (shared / "train.py").write_text(
        "try: open('log.txt', 'a')\nexcept OSError: raise RuntimeError('cannot be opened') from None"
    )
    refused = as_a_user(*FIX, "--", sys.executable, "train.py", cwd=shared)
    assert refused.returncode == 2
    assert "which may be why the command fails: exit code 1: RuntimeError: cannot be opened" in refused.stderr


@pytest.mark.usefixtures("overlays")
def test_a_folder_of_ones_own_below_one_of_others_can_be_written_to(shared: Path) -> None:
    """GIVEN a project in a folder of another group, as on a shared disk THEN it runs on overlays all the same."""
    mine = shared / "mine" / "project"
    mine.mkdir(parents=True)
    os.chown(shared, -1, SOMEBODY)
    (mine / "train.py").write_text("open('out.txt', 'w').write('x'); print('to the end')")
    ran = as_a_user(*FIX, "--", sys.executable, "train.py", cwd=mine)
    assert "no optimizer step was seen" in ran.stderr, ran.stderr
    assert not (mine / "out.txt").exists()


def test_the_next_fix_removes_the_overlay_of_a_killed_one(tmp_path: Path) -> None:
    """GIVEN a folder that not even its owner may look into, as overlays have them, and a link beside it."""
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o500)
    left = tmp_path / "flatout-fix-1234"
    (left / "overlay" / "work" / "work").mkdir(parents=True)
    (left / "overlay" / "link").symlink_to(mine)
    (left / "in-use").touch()
    (left / "overlay" / "work" / "work").chmod(0)
    clean = "import tempfile; from flatout.fix.fix_command import own_folder\nwith own_folder(): pass"
    done = as_a_user("-c", f"import os; os.environ['TMPDIR'] = {str(tmp_path)!r}\n{clean}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert mine.stat().st_mode & 0o777 == 0o500


def test_single_files_and_sockets_that_are_mounted_or_listen_are_there(tmp_path: Path) -> None:
    """GIVEN a file mounted in a covered folder, as containers do, and a socket THEN both work under the overlay."""
    if why := sandbox.why_no_overlay([sys.executable], tmp_path):
        pytest.skip(f"this system permits no overlay: {why}")
    if os.getuid():
        pytest.skip("only root can mount a file")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "mounted").touch()
        (folder / "source").write_text("of the container")
        done = subprocess.run(
            ["unshare", "-m", "--propagation", "private", sys.executable, "-c", UNDER_AN_OVERLAY, name, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.splitlines() == ["of the container", "[Errno 30]", "answered"], done.stderr


UNDER_AN_OVERLAY = """
import os, socket, subprocess, sys
from pathlib import Path
from flatout.launch import sandbox
folder, scratch = sys.argv[1:]
subprocess.run(["mount", "--bind", f"{folder}/source", f"{folder}/mounted"], check=True)
server = socket.socket(socket.AF_UNIX)
server.bind(f"{folder}/socket")
server.listen(1)
box = sandbox.sandbox_for(["python"], Path(scratch), ())
inside = f'''
import socket
print(open({folder + "/mounted"!r}).read())
try:
    open({folder + "/mounted"!r}, "w")
except OSError as problem:
    print(str(problem).partition(" Read")[0])
client = socket.socket(socket.AF_UNIX)
client.connect({folder + "/socket"!r})
print("answered")
'''
subprocess.run([*sandbox.entrance(box), sys.executable, "-c", inside], check=True)
"""
