"""`flatout fix`: a search over real runs of the user's command."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flatout.remedy.candidates import Wishes, not_offered
from flatout.remedy.found import Found, Story
from flatout.remedy.running import Launcher
from flatout.remedy.trial import Search


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
    with tempfile.TemporaryDirectory(prefix="flatout-fix-") as folder:
        found = Search(Launcher(command, Path(folder)), wishes, budget_s=budget_s, steps=steps, story=story).go()
        if found.before is not None and not found.interrupted:
            found.remarks += not_offered(wishes, found.known, on_gpu=found.before.case.on_gpu)
        if keep_in is not None:
            for name, run in (("before", found.before), ("after", found.measured)):
                if run is not None and run.folder is not None and run.folder.is_dir():
                    shutil.copytree(run.folder, keep_in / name)
        return found
