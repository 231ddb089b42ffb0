"""`flatout fix`: a search over real runs of the user's command."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flatout.files import PRIVATE, write_whole
from flatout.fix.offers import Wishes, not_offered
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import Launcher, end_of
from flatout.fix.search import Search
from flatout.launch import sandbox
from flatout.launch.launcher import OUTPUT
from flatout.model.errors import OverlayError, UsageError

_FOLDER = "flatout-fix-"
_MOST_OUTPUT = 2 << 20  # bytes
_IN_USE = "in-use"  # locked as long as its owner lives, whatever way that ends


_REPEATED = (
    "Each trial runs your command again, and so repeats the requests that the script itself sends (uploads, pushes, "
    "databases). Trackers are off."
)
_ONLY_REDIRECTED = (
    "not covered are other programs and shell commands, libraries that open files in C (sqlite, HDF5, OpenCV, Arrow) "
    "and Pythons started without this environment"
)


def fix(
    command: Sequence[str],
    wishes: Wishes,
    *,
    budget_s: float,
    steps: int | None = None,
    progress: ProgressListener | None = None,
    keep_in: Path | None = None,
    unprotected: bool = False,
) -> FixResult:
    """Try, keep, prove. The recordings of before and after go into `keep_in`; those of the trials are thrown away.

    Where no overlay can be mounted, it is refused, or if `unprotected` done with redirection alone.
    """
    progress = progress or ProgressListener()
    with own_folder() as folder:

        def search(overlay: bool) -> FixResult:
            launcher = Launcher(command, folder / ("overlay" if overlay else "redirection"), overlay=overlay)
            return Search(launcher, wishes, budget_s=budget_s, steps=steps, progress=progress).run()

        result = _in_a_sandbox(search, sandbox.why_no_overlay(command, folder), progress, unprotected=unprotected)
        if result.before is not None and not result.interrupted:
            result.remarks += not_offered(wishes, result.known)
        if keep_in is not None:
            for name, run in (("before", result.before), ("after", result.measured)):
                if run is not None and run.folder is not None and run.folder.is_dir():
                    result.remarks += copy_recording(run.folder, keep_in / name)
        return result


def _in_a_sandbox(
    search: Callable[[bool], FixResult], why_not: str, progress: ProgressListener, *, unprotected: bool
) -> FixResult:
    """Search on overlays (`search(True)`). Where that is not possible, say so first, and go on only if allowed."""
    if why_not and not unprotected:
        raise _refused(f"{why_not}; in a container it takes root and --cap-add SYS_ADMIN, elsewhere user namespaces")
    progress.say(_REPEATED)
    # An overlay can be mounted on some systems and still fail for these files: only the first run shows that.
    if not why_not:
        try:
            return search(True)
        except OverlayError as problem:
            if not unprotected:
                raise _refused(str(problem)) from None
            why_not = str(problem)
    progress.say(
        f"Your files are protected in part only ({why_not}): {_ONLY_REDIRECTED}. Your folders are compared after each "
        "trial, and the first real write ends the fix."
    )
    return search(False)


def _refused(why_not: str) -> UsageError:
    return UsageError(
        f"trials cannot be kept from all your files: no overlay ({why_not}). --unprotected goes on with redirection "
        f"alone, and ends at the first file that a trial really writes: {_ONLY_REDIRECTED}"
    )


def copy_recording(folder: Path, to: Path) -> list[str]:
    """Copy a recording, whole or not at all; returns a remark where that fails."""
    part = to.with_name(f"{to.name}.part")
    try:
        shutil.copytree(folder, part, ignore=shutil.ignore_patterns(OUTPUT))
        if (folder / OUTPUT).is_file():
            write_whole(part / OUTPUT, end_of(folder / OUTPUT, _MOST_OUTPUT), mode=PRIVATE)  # without secrets
        part.rename(to)
    except OSError as problem:  # the plan and the report matter more
        shutil.rmtree(part, ignore_errors=True)
        first = problem.args[0][0][2] if isinstance(problem, shutil.Error) else str(problem)
        why, _, _ = first.partition(": '")  # without the names of the files
        return [f"the recording {to} is not kept: {why}"]
    return []


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for all that runs record and write. Those of a killed fix, which may be large, go."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        try:
            with (left / _IN_USE).open("r+b") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(left)
        except OSError:  # in use, or another's
            pass
    with tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "lock").open("wb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            (folder / "lock").rename(folder / _IN_USE)  # nobody sees it before it is locked
            yield folder


def _remove(folder: Path) -> None:
    """An overlay leaves folders that their owner may not look into."""
    for place, inside, _ in os.walk(folder):
        for path in (Path(place, name) for name in inside):
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
