"""`flatout fix`: a search over real runs of the user's command."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flatout.remedy.candidates import Wishes, not_offered
from flatout.remedy.found import Found, Story
from flatout.remedy.running import Launcher
from flatout.remedy.trial import Search

_FOLDER = "flatout-fix-"
_IN_USE = "in-use"  # locked as long as its owner lives, whatever way that ends


def fix(
    command: Sequence[str],
    wishes: Wishes,
    *,
    budget_s: float,
    steps: int | None = None,
    story: Story | None = None,
    keep_in: Path | None = None,
) -> Found:
    """Try, keep, prove. The recordings of before and after go into `keep_in`; those of the trials are thrown away."""
    with own_folder() as folder:
        found = Search(Launcher(command, folder), wishes, budget_s=budget_s, steps=steps, story=story).go()
        if found.before is not None and not found.interrupted:
            found.remarks += not_offered(wishes, found.known, on_gpu=found.before.case.on_gpu)
        if keep_in is not None:
            for name, run in (("before", found.before), ("after", found.measured)):
                if run is not None and run.folder is not None and run.folder.is_dir():
                    shutil.copytree(run.folder, keep_in / name)
        return found


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for all that runs record and write. Those of a fix that was killed go: a trial may have filled them."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        try:
            with (left / _IN_USE).open("r+b") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except OSError:  # in use, or another's
            pass
    with tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "lock").open("wb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            (folder / "lock").rename(folder / _IN_USE)  # nobody sees it before it is locked
            yield folder
