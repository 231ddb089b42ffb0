"""`flatout report`, and the summary that follows `flatout run` and `flatout train`."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.entry import argument, output_file, verb
from flatout.cli.output import console, damage_in_one_line, keep_exit_code, say, write_report
from flatout.model.errors import FlatoutError

if TYPE_CHECKING:
    from flatout.report.account import Price


@verb()
def report(
    trace: list[Path] = argument("TRACE", "A run's folder; of several machines, all.", default=...),
    json: str | None = output_file("the report as JSON"),
    html: str | None = output_file("the report as one HTML file"),
) -> None:
    """Show a recorded run: the verdict, what to change, and where every second went.

    The HTML file needs no other file and no network. Folders recorded on several machines become one report.
    """
    from flatout.report import read_run

    with damage_in_one_line(*trace):
        write_report(read_run(trace), json, html, console())


def summarize_runs(folder: Path, *, keep: bool, quiet: bool, why_empty: str = "", **shown: Any) -> None:
    """Print a summary of each training that a command was; remove recordings without a step, unless told to `keep`.

    `why_empty` is said of those, unless it was said already why nothing was measured.
    """
    from flatout.launch.launcher import recordings
    from flatout.launch.protocol import reasons_not_measured

    if os.environ.get("FLATOUT") == "off":
        return
    with keep_exit_code():
        for recording in recordings(folder):
            if any(recording.glob("rank-*.jsonl")):
                summarize_run(recording, quiet=quiet, **shown)
                continue
            if why_empty and not reasons_not_measured(recording):
                say(why_empty)
            if not keep:
                shutil.rmtree(recording, ignore_errors=True)
        if not keep:
            with contextlib.suppress(OSError):  # there are others in it
                folder.parent.rmdir()


def summarize_run(
    folder: Path,
    *,
    quiet: bool,
    changed: bool = False,
    price: Price | None = None,
    json_to: str | None = None,
    html_to: str | None = None,
) -> None:
    """Print the summary of a run on stderr, and first what a plan has changed, if one was to change the run.

    A failure in it is one line and never changes the run's exit code.
    """
    from flatout.report import read_run

    try:
        result = read_run([folder], price)
        if changed and result.changes:
            say(result.changes)
        write_report(result, json_to, html_to, None if quiet else console(stderr=True))
    except FlatoutError as problem:
        say(str(problem))
    except Exception as problem:  # a mistake of ours, and the training must not suffer from it
        say(f"no summary ({type(problem).__name__}: {problem}); the recording is in {folder}")
