"""`flatout report`, and the summary that follows `flatout run` and `flatout train`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.entry import argument, output_file, verb
from flatout.cli.output import console, damage_in_one_line, keep_exit_code, say, write_report
from flatout.files import remove_if_empty
from flatout.model.errors import FlatoutError
from flatout.model.formatting import count_of

if TYPE_CHECKING:
    from flatout.report.account import Price


@verb()
def report(
    trace: list[Path] | None = argument(
        "TRACE", "A run's folder; of several machines, all. Default: the newest in flatout-runs."
    ),
    json: str | None = output_file("the report as JSON"),
    html: str | None = output_file("the report as one HTML file"),
) -> None:
    """Show a recorded run: the verdict, what to change, and where every second went.

    The HTML file needs no other file and no network. Folders recorded on several machines become one report.
    """
    from flatout.report import read_run
    from flatout.report.history import last

    folders = trace or last(1)
    with damage_in_one_line(*folders):
        write_report(read_run(folders), json, html, console())


def summarize_runs(folder: Path, *, keep: bool, most: int, quiet: bool, why_empty: str = "", **shown: Any) -> None:
    """Print a summary of each training that a command was.

    Unless told to `keep`, remove recordings without a step, and all but the last `most` beside this one. `why_empty`
    is said of a recording without a step, unless it was said already why nothing was measured.
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
            remove_if_empty(folder.parent)
        if not keep and folder.is_dir():  # there is one more
            _remove_older(most, folder.parent, quiet=quiet)


def _remove_older(most: int, runs: Path, *, quiet: bool) -> None:
    from flatout.report.history import remove_older

    gone = remove_older(most, runs)
    if gone and not quiet:
        which = count_of(gone, "older recording")
        say(f"{which} removed from {runs}: it keeps the last {most} (--keep N or FLATOUT_KEEP; 0: all)")


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
    from flatout.report import history, read_run

    try:
        result = read_run([folder], price)
        past = history.PastRun.of(result, folder)
        history.note(past)
        if changed and result.changes:
            say(result.changes)
        write_report(result, json_to, html_to, None if quiet else console(stderr=True))
        beside = history.beside_earlier(past)
        if beside and not quiet:
            say(beside)
    except FlatoutError as problem:
        say(str(problem))
    except Exception as problem:  # a mistake of ours, and the training must not suffer from it
        say(f"no summary ({type(problem).__name__}: {problem}); the recording is in {folder}")
