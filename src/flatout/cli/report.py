"""`flatout report`, and the summary that follows `flatout run` and `flatout train`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli.entry import verb
from flatout.cli.options import argument, output_file
from flatout.cli.output import console, damage_in_one_line, write_results
from flatout.model.errors import FlatoutError
from flatout.redact import redact_text

if TYPE_CHECKING:
    from rich.console import Console


@verb()
def report(
    trace: list[Path] = argument("TRACE", "A run's folder; of several machines, all.", default=...),
    json: str | None = output_file("the report as JSON"),
    html: str | None = output_file("the report as one HTML file"),
) -> None:
    """Show a recorded run: the verdict, what to change, and where every second went.

    The HTML file needs no other file and no network. Folders recorded on several machines become one report.
    """
    with damage_in_one_line(*trace):
        _show(trace, None if "-" in (json, html) else console(), json_to=json, html_to=html)


def summarize_run(folder: Path, *, quiet: bool, json_to: str | None = None, html_to: str | None = None) -> None:
    """Print the summary after a run on stderr. A failure in it is one line and never changes the run's exit code."""
    try:
        _show([folder], None if quiet else console(stderr=True), json_to=json_to, html_to=html_to)
    except FlatoutError as problem:
        print(f"flatout: {redact_text(str(problem))}", file=sys.stderr)
    except Exception as problem:  # a mistake of ours, and the training must not suffer from it
        reason = redact_text(f"{type(problem).__name__}: {problem}")
        print(f"flatout: no summary ({reason}); the recording is in {folder}", file=sys.stderr)


def print_applied_changes(folder: Path) -> None:
    """Print on stderr what a plan has changed in a run. Without a readable trace, the summary says why."""
    from flatout import trace
    from flatout.report.applied_changes import paragraph

    with contextlib.suppress(FlatoutError):
        if text := paragraph(trace.read(folder)):
            print(f"flatout: {text}", file=sys.stderr)


def _show(folders: list[Path], terminal_out: Console | None, *, json_to: str | None, html_to: str | None) -> None:
    from flatout.diagnose.rules import diagnose
    from flatout.report import findings, terminal
    from flatout.report.account import account
    from flatout.report.gather import gather
    from flatout.report.html import page

    recorded, by_rank = gather(folders)
    result = account(recorded, ", ".join(str(folder) for folder in folders), by_rank)
    diagnosis = diagnose(recorded)
    write_results(
        json_to, lambda: findings.to_json(result, diagnosis), html_to, lambda: page(recorded, result, diagnosis)
    )
    if terminal_out is not None:
        findings.show(result, diagnosis, terminal_out)
        terminal.show(result, terminal_out)
