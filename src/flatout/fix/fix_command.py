"""`flatout fix`: a search over real runs of the user's command."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from flatout.fix.journal import Journal, basis_of, can_resume, copy_recording, forget, forget_earlier, held
from flatout.fix.offers import Wishes, not_offered
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import Launcher
from flatout.fix.search import Search
from flatout.launch import launcher, sandbox
from flatout.model.errors import OverlayError, UsageError

_FOLDER = "flatout-fix-"
_IN_USE = "in-use"  # locked as long as its owner lives, whatever way that ends
Result = TypeVar("Result")

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
    options: Mapping[str, Any] | None = None,
    unprotected: bool = False,
) -> FixResult:
    """Try, keep, prove. The recordings of before and after go into `keep_in`; those of the trials are
    thrown away.

    Until then they are kept there too, with the person's `options`: a fix that finds some there goes
    on with them. Where no overlay can be mounted, it is refused, or if `unprotected` done with
    redirection alone.
    """
    progress = progress or ProgressListener()
    with own_folder() as folder, held(keep_in) if keep_in else nullcontext() as place:
        goes_on = keep_in is not None and can_resume(keep_in)

        def search(overlay: bool) -> FixResult:
            way = "overlay" if overlay else "redirection"
            runner = Launcher(command, folder / way, overlay=overlay)
            if place is None:
                return Search(runner, wishes, budget_s=budget_s, steps=steps, progress=progress).run()
            journal = Journal(runner, place, basis_of(command), options or {}, way=way, say=progress.say)
            result = Search(journal, wishes, budget_s=budget_s, steps=steps, progress=progress).run()
            result.seconds += journal.answered_s
            result.remarks += filter(None, [journal.remark])
            return result

        try:
            why_not = sandbox.why_no_overlay(command, folder)
            result = in_a_sandbox(search, why_not, progress, unprotected=unprotected)
        except UsageError:
            if keep_in is not None and not goes_on:  # it would fail in the same way
                forget(keep_in)
            raise
        if result.before is not None and not result.interrupted:
            result.remarks += not_offered(wishes, result.known)
        if keep_in is not None:
            result.remarks += _keep(result, keep_in)
            if not result.unfinished:
                forget(keep_in)
            if not result.interrupted:
                forget_earlier(command, keep_in)
        return result


def _keep(result: FixResult, folder: Path) -> list[str]:
    """Copy the recordings of before and after, in place of those of a fix that was interrupted."""
    remarks = []
    for name, run in (("before", result.before), ("after", result.measured)):
        shutil.rmtree(folder / name, ignore_errors=True)
        if run is not None and run.folder is not None and run.folder.is_dir():
            remarks += copy_recording(run.folder, folder / name)
    return remarks


def in_a_sandbox(
    search: Callable[[bool], Result], why_not: str, progress: ProgressListener, *, unprotected: bool
) -> Result:
    """Search on overlays (`search(True)`). Where that is not possible, say so first, and go on only
    if allowed."""
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


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for all that runs record and write. Those of a killed fix, which may be large, go with
    its runs."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        try:
            with (left / _IN_USE).open("r+b") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for run in left.glob("*/[0-9]*"):
                    launcher.end(run)
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
