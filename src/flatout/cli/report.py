"""Recorded runs: `report`, `compare` and `runs`, and the summary that follows `flatout run` and `train`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.entry import argument, option, output_file, verb
from flatout.cli.output import console, damage_in_one_line, keep_exit_code, say, write_report, write_results
from flatout.files import RUNS, remove_if_empty
from flatout.model.errors import FlatoutError, GateFailed, TraceError, UsageError
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


@verb()
def compare(
    a: Path | None = argument("A", "The run before."),
    b: Path | None = argument("B", "The run after. Without both: the last two in flatout-runs."),
    json: str | None = output_file("the comparison as JSON"),
    html: str | None = output_file("the comparison as one HTML file"),
    fail_if_slower: float | None = option(
        "PCT", "Exit with 1 when B is shown to be slower by more than this.", min=0.0
    ),
) -> None:
    """Compare two recorded runs: is B faster than A, beyond the noise of both?

    "No difference shown" is an answer. Runs that cannot be compared are shown side by side, with the reason.
    """
    from flatout import report
    from flatout.report.history import last

    if a is None:
        a, b = last(2)
    if b is None:
        raise UsageError(f"with which run is {a} to be compared? flatout compare A B, or without both the last two")
    with damage_in_one_line(a, b):
        result = report.compare(report.read_run([a]), report.read_run([b]))
        write_report(result, json, html, console())
    if fail_if_slower is not None:
        if result.typical is None:
            raise UsageError(f"cannot tell whether {b} is slower than {a}: {'; '.join(result.reasons)}")
        if result.slower_than(fail_if_slower):
            raise GateFailed(f"{b} is shown to be more than {fail_if_slower:g}% slower than {a}")


@verb()
def runs(
    folder: Path = argument("DIR", "The folder of the recordings.", default=Path(RUNS)),
    json: str | None = output_file("the list as JSON"),
) -> None:
    """List recorded runs, the newest first: verdict, speed, how busy the GPU was, cost, git commit,
    exit code.

    `flatout report flatout-runs/NAME` shows one of them, `flatout compare` two.
    """
    from flatout.report import history
    from flatout.report.terminal import show_runs

    history.last(1, folder)  # an error where there is none
    listed = []
    for recording in history.recordings_in(folder):
        try:
            with damage_in_one_line(recording):
                listed.append(history.past_run(recording))
        except TraceError as problem:
            say(str(problem))
    if write_results(json, lambda: history.to_json(listed)):
        show_runs([(past.command or (past.name,), past.row(folder)) for past in listed], history.HEADS, console())


def summarize_runs(folder: Path, *, keep: bool, most: int, quiet: bool, why_empty: str = "", **shown: Any) -> None:
    """Print a summary of each training that a command was.

    Unless told to `keep`, remove recordings without a step, and all but the last `most` beside this
    one. `why_empty` is said of a recording without a step, unless it was said already why nothing was
    measured.
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
            from flatout.report.history import remove_older

            gone = remove_older(most, folder.parent)
            if gone and not quiet:
                which = f"{count_of(gone, 'older recording')} removed from {folder.parent}"
                say(f"{which}: it keeps the last {most} (--keep N or FLATOUT_KEEP; 0: all)")


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
